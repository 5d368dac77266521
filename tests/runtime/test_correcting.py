"""Tokens that were decoded sparsely are read again with exact attention."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.correcting import check_exact, largest_difference, read, rows_of
from cases.device_cases import small, steps
from cases.inside import runtime_of, states_of
from cases.slowly import combinations
from cases.tiny_models import random_tokens

from offload import OffloadedCache, OffloadedModel
from offload.kv.store import HostBudgetError
from offload.policies.registry import available_policies, make_policy
from offload.prefill import forward as prefill_forward

EVERY, PROMPT = 20, 130
SELECTING = [name for name in available_policies() if make_policy(name).selects]
DENSE = small("exact_topk").dense_tokens


def load(folder: Path, policy: Any, every: int | None = EVERY, **options: Any) -> Any:
    options = {"dtype": "float32", "num_threads": 1, "page_tokens": 16} | options
    return OffloadedModel.from_pretrained(
        folder, policy=policy, cache_correction_every=every, **options
    )


@pytest.fixture(scope="module")
def exact(folder: Path) -> Any:
    return load(folder, "full", None)


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return load(folder, small("lychee_cluster"))


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.mark.parametrize(("backend", "name"), combinations([None, "inline"], SELECTING))
def test_as_one_prefill(
    folder: Path, exact: Any, name: str, backend: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys and values of all layers; nothing that a policy keeps is built again for it."""
    if backend == "inline" and name not in ("lychee_decode", "lychee_cluster", "sketch"):
        pytest.skip("three policies stand for the others in the GPU's code")
    model = load(folder, small(name), backend=backend)
    state = runtime_of(model).attention.policy.state
    build, built = type(state).build, []
    monkeypatch.setattr(type(state), "build", lambda *given: built.append(1) or build(*given))
    tokens = random_tokens(1, PROMPT + 3 * EVERY)
    cache, _ = read(model, tokens[:, :PROMPT])
    steps(model, cache, tokens[:, PROMPT : PROMPT + EVERY])
    drifted, _ = read(exact, tokens[:, : PROMPT + EVERY])
    # Of these only the last layer is sparse, which no keys and values come after.
    is_exact = name in ("streaming_llm", "tidal_decode")
    assert (largest_difference(cache, drifted) < 1e-2) == is_exact
    num_built = len(built)
    assert bool(num_built) == state.has_arrays
    stop = PROMPT + EVERY + 1
    steps(model, cache, tokens[:, stop - 1 : stop])
    check_exact(cache, exact, tokens[:, : stop - 1])
    assert torch.isfinite(steps(model, cache, tokens[:, stop:])).all()
    stats = model.offload_stats()
    assert stats.corrected_tokens == 2 * EVERY
    assert 0 < stats.correction_seconds < stats.decode_seconds
    assert stats.decode_tokens == 3 * EVERY
    assert len(built) == num_built
    assert model.kv_store.num_sequences == 1


@pytest.mark.parametrize("name", ["quest", "sketch"])
def test_what_is_kept_of_new_keys(folder: Path, name: str) -> None:
    """A policy selects as one that built its arrays from the corrected keys does."""
    model = load(folder, small(name, budget_tokens=64), EVERY)
    tokens, stop = random_tokens(1, 240), PROMPT + EVERY + 1
    cache, _ = read(model, tokens[:, :PROMPT])
    steps(model, cache, tokens[:, PROMPT:stop])
    (seq,) = cache.seqs
    states = states_of(model)
    arrays = states.arrays_of(seq)
    revised = [{k: x.copy() for k, x in of_layer.items()} for of_layer in arrays.layers]
    states.rebuild(seq)
    built = states.ensure(seq, stop + 1).layers
    compared = {"quest": ["bounds"], "sketch": ["scales"]}[name]
    for ours, of_layer in zip(revised, built, strict=True):
        for key in compared if ours else ():
            if name == "quest":
                pages = int(ours["runs"][0])
                assert pages == int(of_layer["runs"][0]) > PROMPT // 16
                assert (ours[key][:, :, :pages] == of_layer[key][:, :, :pages]).all()
            else:
                assert (ours["encoded"] == stop).all()
                # Their means differ: the same prompt, and what was decoded.
                torch.testing.assert_close(
                    torch.from_numpy(ours[key][:, :stop]),
                    torch.from_numpy(of_layer[key][:, :stop]),
                    rtol=0.2,
                    atol=0.2,
                )


def test_chunks_of_new_keys(folder: Path) -> None:
    """Those that were grafted are ranked by the keys that they have now."""
    policy = make_policy(
        "lychee_cluster",
        budget_tokens=64,
        recent_tokens=8,
        buffer_tokens=12,
        min_chunk_tokens=3,
        max_chunk_tokens=5,
    )
    from offload.policies.lychee_cluster.index import starts_of

    model = load(folder, policy, 40)
    tokens, stop = random_tokens(1, 240), PROMPT + 40
    cache, _ = read(model, tokens[:, :PROMPT])
    steps(model, cache, tokens[:, PROMPT:stop])
    (seq,) = cache.seqs
    before = copy.deepcopy(states_of(model).arrays_of(seq).layers)
    steps(model, cache, tokens[:, stop : stop + 1])
    (seq,) = cache.seqs
    layers = states_of(model).arrays_of(seq).layers
    for layer_idx, (ours, then) in enumerate(zip(layers, before, strict=True)):
        if not ours:
            continue
        header, starts = ours["header"][0], starts_of(ours)
        assert int(then["header"][0]["num_chunks"]) == int(header["num_chunks"])
        is_new = starts[:-1] >= PROMPT
        assert is_new.sum() >= 5
        keys = cache.store.gather(seq, layer_idx)[0].float()
        for chunk in is_new.nonzero()[0].tolist():
            row = int(header["num_units"]) + chunk
            of_chunk = keys[:, starts[chunk] : starts[chunk + 1]]
            low, high = of_chunk.amin(1), of_chunk.amax(1)
            centre = 0.5 * of_chunk.mean(1) + 0.25 * (low + high)
            bits = ours["scales"][:, 0, row].astype("int32") << 16
            step = torch.from_numpy(bits.view("float32"))[:, None]
            nibbles = torch.from_numpy(ours["rows"][:, row].astype("int32")) & 15
            nibbles = nibbles - 16 * (nibbles > 7)
            assert float((nibbles * step - centre).abs().max()) <= float(step.max()) * 0.51


def test_no_step_waits_for_a_compiler(folder: Path) -> None:
    """What revises is compiled when the model is loaded, for arrays as they are."""
    from offload.policies.lychee_cluster.revise import _rank
    from offload.policies.sketch.codes import encode_rows

    for name, compiled in (("lychee_cluster", _rank), ("sketch", encode_rows)):
        model, tokens = load(folder, small(name)), random_tokens(1, PROMPT + EVERY + 1)
        known = list(compiled.signatures)
        assert known
        cache, _ = read(model, tokens[:, :PROMPT])
        steps(model, cache, tokens[:, PROMPT:])
        assert model.offload_stats().corrected_tokens == EVERY
        assert list(compiled.signatures) == known


def test_a_prompt_corrects_what_waits(model: Any, exact: Any) -> None:
    """Though less than so many tokens do; and so does one of embeddings."""
    tokens = random_tokens(1, 200)
    for by_embeddings in (False, True):
        cache, _ = read(model, tokens[:, :PROMPT])
        steps(model, cache, tokens[:, PROMPT : PROMPT + 7])
        prompt = tokens[:, PROMPT + 7 :]
        given = {"input_ids": prompt}
        if by_embeddings:
            given = {"inputs_embeds": model.get_input_embeddings()(prompt)}
        logits = model(**given, past_key_values=cache).logits[:, -1]
        torch.testing.assert_close(logits, read(exact, tokens)[1], rtol=1e-4, atol=1e-4)
        check_exact(cache, exact, tokens)


def test_dense_tokens_are_not_read_again(model: Any) -> None:
    tokens, before = random_tokens(1, DENSE + EVERY + 1), model.offload_stats().corrected_tokens
    cache, _ = read(model, tokens[:, : DENSE - 5])
    steps(model, cache, tokens[:, DENSE - 5 : DENSE + EVERY])
    assert model.offload_stats().corrected_tokens == before
    steps(model, cache, tokens[:, -1:])
    assert model.offload_stats().corrected_tokens == before + EVERY


def test_forks_and_crops_count_on(model: Any, exact: Any) -> None:
    """Each is corrected when its own tokens are due, and a fork's pages stay as they are."""
    tokens, stop = random_tokens(1, 200), PROMPT + 12
    cache, _ = read(model, tokens[:, :PROMPT])
    steps(model, cache, tokens[:, PROMPT:stop])
    fork = copy.deepcopy(cache)
    steps(model, cache, tokens[:, stop : PROMPT + EVERY])
    kept = copy.deepcopy(cache)
    before = rows_of(kept)
    steps(model, cache, tokens[:, PROMPT + EVERY : PROMPT + EVERY + 1])
    check_exact(cache, exact, tokens[:, : PROMPT + EVERY])
    for now, then in zip(rows_of(kept), before, strict=True):
        assert torch.equal(now, then)
    others = random_tokens(1, 40, seed=5)
    own = torch.cat([tokens[:, : stop - 4], others], dim=1)
    fork.crop(-4)
    steps(model, fork, own[:, stop - 4 : PROMPT + EVERY])
    drifted, _ = read(exact, own[:, : PROMPT + EVERY])
    assert largest_difference(fork, drifted) > 1e-2
    steps(model, fork, own[:, PROMPT + EVERY : PROMPT + EVERY + 1])
    check_exact(fork, exact, own[:, : PROMPT + EVERY])
    cache.crop(-EVERY // 2)  # into what was corrected: that is exact
    check_same = torch.cat([tokens[:, : cache.get_seq_length()], others[:, :9]], dim=1)
    model(others[:, :9], past_key_values=cache)
    check_exact(cache, exact, check_same)


def test_a_file_keeps_what_waits(folder: Path, model: Any, tmp_path: Path) -> None:
    """A cache that was saved is corrected when it would have been, and with the same tokens."""
    tokens, path = random_tokens(1, PROMPT + 2 * EVERY), tmp_path / "cache.safetensors"
    cache, _ = read(model, tokens[:, :PROMPT])
    steps(model, cache, tokens[:, PROMPT : PROMPT + EVERY - 3])
    cache.save(path)
    other = load(folder, small("lychee_cluster"))
    loaded = OffloadedCache.load(other, path)
    rest = tokens[:, PROMPT + EVERY - 3 :]
    wanted = steps(model, cache, rest)
    assert torch.equal(steps(other, loaded, rest), wanted)
    assert other.offload_stats().corrected_tokens == EVERY


def test_int8_rows_are_read_again(folder: Path) -> None:
    """As a prompt of a model that attends to all has them, but for a code's rounding."""
    tokens, num_read = random_tokens(1, PROMPT + EVERY + 1), PROMPT + EVERY
    model = load(folder, small("lychee_cluster"), kv_dtype="int8")
    cache, _ = read(model, tokens[:, :PROMPT])
    steps(model, cache, tokens[:, PROMPT:num_read])
    found = [[x[:, :, :num_read] for x in rows_of(cache)]]
    steps(model, cache, tokens[:, num_read:])
    assert model.offload_stats().corrected_tokens == EVERY
    found += [[x[:, :, :num_read] for x in rows_of(cache)]]
    exact = rows_of(read(load(folder, "full", None, kv_dtype="int8"), tokens[:, :num_read])[0])
    drifted, corrected = (
        max(float((x - y).abs().max() / y.abs().max()) for x, y in zip(rows, exact, strict=True))
        for rows in found
    )
    assert corrected < 0.03
    assert drifted > 3 * corrected, drifted


def test_rows_of_a_batch_are_corrected_apart(model: Any) -> None:
    """Two that are padded otherwise become sparse at other steps, and are as they are alone."""
    tokens = random_tokens(2, DENSE + 60)
    prompt = DENSE - 10
    mask = torch.ones(2, prompt, dtype=torch.long)
    mask[0, :15] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache = model.new_cache()
    together = [
        model(
            tokens[:, :prompt], attention_mask=mask, position_ids=positions, past_key_values=cache
        ).logits[:, -1]
    ]
    for i in range(prompt, tokens.shape[1]):
        mask = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], dim=1)
        positions = mask.sum(1, keepdim=True) - 1
        given = {"attention_mask": mask, "position_ids": positions, "past_key_values": cache}
        together.append(model(tokens[:, i : i + 1], **given).logits[:, -1])
    for row, first in enumerate((15, 0)):
        own = tokens[row : row + 1, first:]
        alone, logits = read(model, own[:, : prompt - first])
        logits = torch.cat([logits, steps(model, alone, own[:, prompt - first :])[0]])
        of_row = torch.stack([x[row] for x in together])
        torch.testing.assert_close(of_row, logits, rtol=1e-3, atol=1e-3)


def test_greedy_generation_is_that_of_the_steps(model: Any) -> None:
    """Tokens that are chosen inside the step, and what the stock loop chooses by logits."""
    tokens, length = random_tokens(2, PROMPT), 3 * EVERY
    options = {"max_new_tokens": length, "min_new_tokens": length, "do_sample": False}
    by_logits = model.generate(tokens, return_dict_in_generate=True, **options).sequences
    model.generation_config.eos_token_id, eos = None, model.generation_config.eos_token_id
    try:
        chosen = model.generate(tokens, max_new_tokens=length, do_sample=False)
    finally:
        model.generation_config.eos_token_id = eos
    assert model.offload_stats().corrected_tokens == 2 * 2 * EVERY
    cache, logits = read(model, tokens)
    for i in range(PROMPT, chosen.shape[1]):
        assert torch.equal(logits.argmax(-1), chosen[:, i])
        logits = steps(model, cache, chosen[:, i : i + 1])[:, -1]
    assert torch.equal(by_logits[:, : PROMPT + 1], chosen[:, : PROMPT + 1])
    beams = model.generate(tokens[:1], num_beams=3, **options)
    assert beams.shape == (1, PROMPT + length)


@pytest.mark.parametrize("name", ["lychee_cluster", "lfps", "exact_topk"])
@pytest.mark.parametrize("error", [ValueError("a fault"), KeyboardInterrupt()])
def test_a_correction_that_fails(
    folder: Path, name: str, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of it: keys, values and counts are as before, and what follows is, too."""
    model = load(folder, small(name))
    tokens = random_tokens(1, 220)
    cache, _ = read(model, tokens[:, :PROMPT])
    steps(model, cache, tokens[:, PROMPT : PROMPT + EVERY])
    unharmed, before = copy.deepcopy(cache), rows_of(cache)
    attend, calls = prefill_forward.attend, []

    def failing(*given: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:  # the first layer is in the store
            raise error
        return attend(*given)

    with monkeypatch.context() as patched:
        patched.setattr(prefill_forward, "attend", failing)
        with pytest.raises(type(error)):
            model(tokens[:, PROMPT + EVERY :][:, :1], past_key_values=cache)
    assert len(calls) == 2
    assert model.kv_store.num_sequences == 2
    assert model.offload_stats().corrected_tokens == 0
    for now, then in zip(rows_of(cache), before, strict=True):
        assert torch.equal(now, then)
    rest = tokens[:, PROMPT + EVERY :]
    assert torch.equal(steps(model, cache, rest), steps(model, unharmed, rest))


def test_a_correction_without_room(folder: Path) -> None:
    """Refused before anything changes, and a generation before it begins."""
    model = load(folder, small("exact_topk"), 64)
    model.kv_store.fit_slabs(16)
    tokens = random_tokens(1, PROMPT + 65)
    cache, _ = read(model, tokens[:, :PROMPT])
    steps(model, cache, tokens[:, PROMPT:-1])
    before, pool = rows_of(cache), model.kv_store._pool
    pool.ledger.limit_bytes = pool.reserved_bytes
    with pytest.raises(HostBudgetError, match="budget"):
        model(tokens[:, -1:], past_key_values=cache)
    assert model.kv_store.num_sequences == 1
    for now, then in zip(rows_of(cache), before, strict=True):
        assert torch.equal(now, then)
    # The next token of this generation fits, but not 64 that are read again.
    room = model.kv_store.num_page_rows * model.kv_store.page_bytes
    pool.ledger.limit_bytes += room
    with pytest.raises(HostBudgetError, match="max_memory"):
        model.generate(tokens, max_new_tokens=2, past_key_values=cache)
    pool.ledger.limit_bytes += 6 * room
    assert model.generate(tokens, max_new_tokens=2, past_key_values=cache).shape[1] > PROMPT + 65


@pytest.mark.parametrize("every", [0, -1, 2.5, True, "8"])
def test_no_such_number(folder: Path, every: Any) -> None:
    with pytest.raises(ValueError, match="cache_correction_every must be an integer"):
        load(folder, "exact_topk", every)


@pytest.mark.parametrize(
    ("policy", "options", "words"),
    [
        ("full", {}, "policy='full' attends to everything"),
        ("exact_topk", {"host_bytes_per_sequence": "64MiB"}, "host_bytes_per_sequence"),
        ("exact_topk", {"tensor_parallel_size": 2}, "tensor_parallel_size=2"),
    ],
)
def test_refused_with(folder: Path, policy: str, options: Any, words: str) -> None:
    with pytest.raises(ValueError, match=f"cache_correction_every=20: .*{words}"):
        load(folder, policy, **options)


def test_refused_inputs(model: Any, exact: Any) -> None:
    tokens = random_tokens(1, PROMPT)
    embeddings = model.get_input_embeddings()(tokens)
    cache, _ = read(model, tokens)
    with pytest.raises(ValueError, match="inputs_embeds in a decode step with cache_correction"):
        model(inputs_embeds=embeddings[:, :1], past_key_values=cache)
    assert cache.kv_lens == [PROMPT]
    with pytest.raises(ValueError, match="prompt_lookup_num_tokens with cache_correction_every"):
        model.generate(tokens, prompt_lookup_num_tokens=3, max_new_tokens=5)
    with pytest.raises(ValueError, match="assistant_model cannot have cache_correction_every"):
        exact.generate(tokens, assistant_model=model, max_new_tokens=5)
