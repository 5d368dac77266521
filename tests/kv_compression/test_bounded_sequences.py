"""Sequences of a model with `host_bytes_per_sequence`: never more, and right where they can be."""

from __future__ import annotations

import copy
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.bounded_cases import generate, rows_of, step
from cases.drafts import verifying
from cases.inside import compression_of, runtime_of, states_of
from cases.slowly import slow_but
from cases.tiny_models import make_tiny_model, random_tokens
from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb

import offload.kv_compression.by_attention as by_attention
from offload import OffloadedModel
from offload.kv.store import HostBudgetError
from offload.kv_compression.bound import SequenceBound
from offload.kv_compression.by_reconstruction import CompressionByReconstruction
from offload.kv_compression.condense import condense
from offload.policies.registry import make_policy

Load = Callable[..., Any]
SLOTS = 192
WINDOW_BYTES = 3 * 16 * 6 * 32 * 4  # as in conftest


@pytest.mark.parametrize(
    ("policy", "by"),
    [("full", "attention"), ("exact_topk", "attention"), ("full", "reconstruction")],
)
def test_a_bound_that_is_not_reached_changes_nothing(bounded: Load, policy: str, by: str) -> None:
    chosen = policy if policy == "full" else make_policy(policy, budget_tokens=80)
    tokens = random_tokens(2, 100)
    expected = generate(bounded(None, chosen), tokens, 80)
    model = bounded(SLOTS, chosen, condense_by=by)
    cache = model.new_cache()
    assert torch.equal(generate(model, tokens, 80, past_key_values=cache), expected)
    assert [(row.seen, row.kept, row.condensed) for row in cache.tokens] == [(179, 179, 0)] * 2
    assert model.offload_stats().condensed_tokens == 0


def bytes_after_each_pass(model: Any, cache: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of pages, of what chooses between tokens, and of all that a policy keeps."""
    compression, states, used = compression_of(model), states_of(model), []
    commit = type(states).commit

    def watched(self: Any, seqs: Any) -> None:
        commit(self, seqs)
        used.append(cache.store.host_bytes_used + self.held_bytes + compression.held_bytes)

    monkeypatch.setattr(type(states), "commit", watched)
    return used


@pytest.mark.parametrize(
    "policy",
    slow_but(["full", "exact_topk", "lychee_cluster", "lfps", "sketch"], "full", "lychee_cluster"),
)
@pytest.mark.parametrize("draft", slow_but([0, 6], 6))
def test_never_more_than_the_bound(
    bounded: Load, policy: str, draft: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = policy if policy == "full" else make_policy(policy, budget_tokens=96)
    per_sequence = 2**20 if policy == "full" else 9 * 2**19
    model = bounded(None, chosen, host_bytes_per_sequence=per_sequence)
    bound, cache = compression_of(model).bound, model.new_cache()
    used = bytes_after_each_pass(model, cache, monkeypatch)
    text = random_tokens(1, 60).repeat(1, bound.slots // 60)  # it repeats: drafts are accepted
    num_new = bound.freed + bound.slots - text.shape[1] + 20
    drafts = {"prompt_lookup_num_tokens": draft} if draft else {}
    generate(model, text, num_new, past_key_values=cache, **drafts)
    assert max(used) <= per_sequence
    (row,) = cache.tokens
    assert row.seen == text.shape[1] + num_new - 1 == cache.get_seq_length()
    assert row.kept + row.condensed == cache.kv_lens[0] <= bound.slots
    assert row.condensed >= 2 * bound.new_condensed
    assert model.offload_stats().condensed_tokens == row.seen - cache.kv_lens[0]
    assert draft or cache.store.page_bytes * 3 * bound.slots // 16 <= max(used)


@pytest.mark.parametrize("policy", slow_but(["full", "exact_topk", "hard_kv"], "full", "hard_kv"))
@pytest.mark.parametrize("draft", slow_but([0, 6], 6))
def test_never_more_than_the_bound_by_rereading(
    bounded: Load, policy: str, draft: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: Any = policy if policy == "full" else make_policy("exact_topk", budget_tokens=96)
    chosen = make_policy(policy, inner=chosen) if policy == "hard_kv" else chosen
    model = bounded(SLOTS, chosen, condense_by="reconstruction")
    bound, cache = compression_of(model).bound, model.new_cache()
    used = bytes_after_each_pass(model, cache, monkeypatch)
    drafts = {"prompt_lookup_num_tokens": draft} if draft else {}
    generate(model, random_tokens(1, 50).repeat(1, 8), 150, past_key_values=cache, **drafts)
    assert max(used) <= runtime_of(model).config.host_bytes_per_sequence
    (row,), seq = cache.tokens, cache.seqs[0]
    assert (row.seen, row.condensed) == (549, 0)
    lens = cache.kv_lens[0] - cache.store.starts(seq)
    assert lens.sum() == row.kept * lens.size
    assert row.kept <= bound.slots
    assert lens.min() >= bound.sinks + bound.recent


def test_a_prompt_longer_than_the_bound(bounded: Load) -> None:
    """All of its logits are there, and its beginning is as without a bound."""
    tokens, model = random_tokens(1, 700), bounded(SLOTS)
    cache = model.new_cache()
    with torch.no_grad():
        expected = bounded(None)(tokens[:, :SLOTS]).logits
        logits = model(tokens, past_key_values=cache).logits
    assert logits.shape[1] == 700
    torch.testing.assert_close(logits[:, :SLOTS], expected, rtol=1e-4, atol=1e-4)
    assert torch.isfinite(logits).all()
    assert cache.get_seq_length() == 700 > SLOTS >= cache.kv_lens[0]
    assert cache.store.host_bytes_used <= SLOTS * cache.store.page_bytes * 3 // 16


@pytest.mark.parametrize("slots", slow_but([SLOTS, 272], SLOTS))
def test_padded_rows_are_as_alone(bounded: Load, slots: int) -> None:
    """Each is condensed when it is full itself, whatever stands beside it."""
    model, tokens = bounded(slots), random_tokens(2, 500)
    mask = torch.ones(2, 500, dtype=torch.long)
    mask[0, :350] = 0
    together = generate(model, tokens, 60, attention_mask=mask)
    positions = {"attention_mask": mask[:1, 350:]}
    alone = generate(model, tokens[:1, 350:], 60, **positions)
    assert torch.equal(together[0, 500:], alone[0, 150:])


def test_rows_of_one_prompt(bounded: Load) -> None:
    """It is read once, in slices; its copies part afterwards."""
    model, tokens = bounded(SLOTS), random_tokens(1, 400)
    alone = generate(model, tokens, 30)
    beams = generate(model, tokens, 90, num_beams=3, num_return_sequences=2)
    assert beams.shape == (2, 490)
    both = generate(model, tokens.repeat(2, 1), 30)
    assert torch.equal(both, alone.repeat(2, 1))


def test_heads_of_a_layer_one_by_one(bounded: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where there are so many logits that there is room for one head's: bit for bit."""
    tokens, found, num_heads = random_tokens(1, 500), [], set()
    for many_logits in (by_attention._MANY_LOGITS, 1):
        monkeypatch.setattr(by_attention, "_MANY_LOGITS", many_logits)
        model = bounded(SLOTS)
        compression, cache, at_once = compression_of(model), model.new_cache(), set()
        monkeypatch.setattr(
            compression,
            "condense_heads",
            lambda keys, *others, sizes=at_once: sizes.add(len(keys)) or condense(keys, *others),
        )
        with torch.no_grad():
            logits = model(tokens, past_key_values=cache).logits
        found.append([logits, *rows_of(cache)])
        num_heads |= at_once
        assert len(at_once) == 1
    assert num_heads == {1, 2}
    for at_once, alone in zip(*found, strict=True):
        assert torch.equal(at_once, alone)


@pytest.mark.parametrize("by", ["attention", "reconstruction"])
def test_a_fork_goes_its_own_way(bounded: Load, by: str) -> None:
    """Pages that both have are left alone by the one that is condensed."""
    model = bounded(SLOTS, condense_by=by)
    cache = model.new_cache()
    tokens = random_tokens(1, cache.bound.slots)
    with torch.no_grad():
        model(tokens, past_key_values=cache)
    before = rows_of(cache)
    fork = copy.deepcopy(cache)
    logits = step(model, fork)
    assert model.offload_stats().condensed_tokens > 0
    assert cache.kv_lens[0] == tokens.shape[1]
    for now, then in zip(rows_of(cache), before, strict=True):
        assert torch.equal(now, then)
    assert torch.equal(step(model, cache), logits)
    for ours, of_fork in zip(rows_of(cache), rows_of(fork), strict=True):
        assert torch.equal(ours, of_fork)
    again = copy.deepcopy(fork)  # of a condensed one
    assert again.tokens == fork.tokens
    assert torch.equal(step(model, again), step(model, fork))


def test_crop(bounded: Load) -> None:
    """Within the recent tokens it is as if they had not come; further back it is refused."""
    model, tokens = bounded(SLOTS), random_tokens(1, 230)
    caches = [model.new_cache() for _ in range(2)]
    with torch.no_grad():
        for cache, length in zip(caches, (210, 230), strict=True):
            model(tokens[:, :200], past_key_values=cache)
            for i in range(200, length):
                model(tokens[:, i : i + 1], past_key_values=cache)
    cache = caches[1]
    cache.crop(-20)
    assert cache.get_seq_length() == 210
    assert cache.tokens == caches[0].tokens
    torch.testing.assert_close(step(model, cache), step(model, caches[0]), rtol=0, atol=0)
    with pytest.raises(ValueError, match="cannot crop a sequence of 211 tokens to 61: the first"):
        cache.crop(-150)
    assert cache.get_seq_length() == 211
    step(model, cache)
    cache.crop(-1000)
    assert cache.seqs == ()


def test_drafts(bounded: Load) -> None:
    """What is refused of a draft is forgotten, though it was condensed for it."""
    model, tokens = bounded(SLOTS), random_tokens(1, 300)
    expected = generate(model, tokens[:, :150], 100)
    drafted = generate(model, tokens[:, :150], 100, prompt_lookup_num_tokens=6)
    assert drafted.shape == expected.shape
    assert torch.equal(drafted[:, : SLOTS - 7], expected[:, : SLOTS - 7])  # condensed later
    cache, one_by_one = model.new_cache(), model.new_cache()
    with torch.no_grad():
        for of_cache in (cache, one_by_one):
            model(tokens[:, : SLOTS - 2], past_key_values=of_cache)
        with verifying(model, cache):
            model(tokens[:, SLOTS - 2 : SLOTS + 6], past_key_values=cache)
        runtime_of(model).sequences.make_room(one_by_one.seqs, [8])
        for i in range(SLOTS - 2, SLOTS):
            model(tokens[:, i : i + 1], past_key_values=one_by_one)
    cache.crop(-6)
    assert cache.tokens == one_by_one.tokens
    assert cache.tokens[0].seen == SLOTS
    assert cache.tokens[0].condensed > 0
    for token in range(5):
        ours, theirs = step(model, cache, token), step(model, one_by_one, token)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_cached_prefix_is_continued(bounded: Load) -> None:
    model, tokens = bounded(SLOTS), random_tokens(1, 420)
    cache = model.new_cache()
    with torch.no_grad():
        model(tokens[:, :300], past_key_values=cache)
        by_hand = copy.deepcopy(cache)
        logits, expected = model(tokens[:, 300:], past_key_values=by_hand).logits[:, -1], []
        for _ in range(40):
            expected.append(int(logits.argmax()))
            logits = step(model, by_hand, expected[-1])
    output = generate(model, tokens, 40, past_key_values=cache)
    assert output[0, 420:].tolist() == expected
    assert cache.tokens[0].seen == 459
    assert cache.kv_lens[0] <= SLOTS


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_a_failure_changes_nothing(
    bounded: Load, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither one while it is condensed, ctrl-C included, nor for want of room beside a fork's
    pages."""
    model, tokens = bounded(SLOTS), random_tokens(1, SLOTS)
    compression, cache = compression_of(model), model.new_cache()
    with torch.no_grad():
        model(tokens, past_key_values=cache)
    before, calls = rows_of(cache), []

    def fails(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 2 and error is KeyboardInterrupt:
            signal.raise_signal(signal.SIGINT)
        elif len(calls) == 2:
            raise MemoryError("no more")
        return condense(*arguments)

    condense = compression.condense_heads
    monkeypatch.setattr(compression, "condense_heads", fails)
    with pytest.raises(error):
        step(model, cache)
    assert len(calls) == 2
    monkeypatch.undo()
    fork = copy.deepcopy(cache)
    pool = cache.store._pool
    monkeypatch.setattr(type(pool), "allocate", lambda self, n: out_of_budget())
    with pytest.raises(HostBudgetError, match="full"):
        step(model, fork)
    monkeypatch.undo()
    for now, then in zip(rows_of(cache) + rows_of(fork), before * 2, strict=True):
        assert torch.equal(now, then)
    assert cache.tokens == fork.tokens
    assert torch.equal(step(model, cache), step(model, fork))


def out_of_budget() -> Any:
    raise HostBudgetError("full")


def test_a_failed_slice_leaves_a_new_cache_new(
    bounded: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that had tokens has those of the slices that were done, and says so."""
    model, tokens = bounded(SLOTS), random_tokens(1, 500)
    compression, cache, filled = compression_of(model), model.new_cache(), model.new_cache()
    with torch.no_grad():
        model(tokens[:, :100], past_key_values=filled)
        monkeypatch.setattr(compression, "condense_heads", lambda *arguments: out_of_budget())
        for of_cache in (cache, filled):
            with pytest.raises(HostBudgetError, match="full"):
                model(tokens, past_key_values=of_cache)
    assert cache.seqs == ()
    assert cache.get_seq_length() == 0
    assert filled.get_seq_length() == SLOTS == filled.kv_lens[0]


def test_keys_of_columns_are_refused(bounded: Load) -> None:
    model = bounded(SLOTS)
    cache = model.new_cache()
    with torch.no_grad():
        model(random_tokens(1, 300), past_key_values=cache)
    with pytest.raises(ValueError, match="were condensed to stay within host_bytes_per_sequence"):
        _ = cache.layers[0].keys


FULL = make_policy("full")


def bound(num_bytes: int, **changes: object) -> SequenceBound:
    options = {"token_bytes": 100, "page_tokens": 16, "policy": FULL} | changes
    return SequenceBound.of(num_bytes, **options)  # type: ignore[arg-type]


def test_whole_pages_within_the_bytes() -> None:
    assert bound(100 * 1000).slots == 992
    assert bound(100 * 1008).slots == 1008
    assert bound(100 * 1008 - 1).slots == 992


@pytest.mark.parametrize("num_bytes", [9600, 20_000, 1_234_567])
@pytest.mark.parametrize("share", [0.0, 0.0625, 1.0])
def test_tiers_fit(num_bytes: int, share: float) -> None:
    found = bound(num_bytes, condensed_share=share)
    assert found.slots * 100 <= num_bytes < (found.slots + 16) * 100
    assert found.sinks + found.recent + found.condensed <= found.low < found.slots
    assert found.new_condensed <= found.condensed
    assert found.freed <= found.slots // 4


def test_what_is_kept_beside_the_pages_counts() -> None:
    found = bound(100_000, other_bytes=lambda slots: 5000 + 20 * slots)
    assert found.slots * 120 + 5000 <= 100_000 < (found.slots + 16) * 120 + 5000


def test_too_few_bytes() -> None:
    message = r"9599 \(9.37 KiB\) is too little: 4 sink tokens, 64 recent ones and a page of 16 "
    with pytest.raises(ValueError, match=message + "tokens need 9600 bytes"):
        bound(9599)
    assert bound(9600).slots == 96
    policy = make_policy("exact_topk", sink_tokens=8, recent_tokens=100)
    with pytest.raises(ValueError, match="8 sink tokens, 100 recent ones"):
        bound(9600, policy=policy)
    with pytest.raises(ValueError, match="need 14600 bytes"):
        bound(9600, other_bytes=lambda slots: 5000)


def test_heads_that_are_rotated_in_part(tmp_path: Path) -> None:
    """A query of later is turned as stock layers turn it, and the rest of the head stays."""
    make_tiny_model("phi3", max_position_embeddings=4096).save_pretrained(tmp_path)
    per_sequence = SLOTS * 3 * 2 * 2 * 32 * 4 + WINDOW_BYTES
    options = {"page_tokens": 16, "num_threads": 1, "condense_by": "attention"}
    model = OffloadedModel.from_pretrained(
        tmp_path, policy="full", host_bytes_per_sequence=per_sequence, **options
    )
    compression = compression_of(model)
    width = compression._turns[0].shape[-1]
    query = torch.randn(1, 1, 4, 32)
    later = compression._now_or_later(query)
    assert 0 < width < 32
    assert torch.equal(later[..., width:], query[..., width:])
    for row, share in zip((3, 2, 1, 0), (*by_attention.AHEAD, 0.0), strict=True):
        distance = torch.tensor([[round(share * compression.bound.slots)]])
        turn = model.model.rotary_emb(query, distance)
        of_row = query[:, :, row : row + 1]
        wanted, _ = apply_rotary_pos_emb(of_row, of_row, *turn)
        torch.testing.assert_close(later[:, :, row : row + 1], wanted, rtol=1e-4, atol=1e-4)
    new = model.generate(random_tokens(1, 3 * SLOTS), max_new_tokens=4, eos_token_id=None)
    assert new.shape[1] == 3 * SLOTS + 4


@pytest.mark.parametrize("by", ["attention", "reconstruction"])
def test_int8_rows(bounded: Load, by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the same bytes more than three times as many slots as float32; as many are within theirs,
    and answer nearly as those. What stays keeps its rows."""
    plain = bounded(SLOTS, condense_by=by)
    slots = compression_of(plain).bound.slots
    wide = bounded(SLOTS, condense_by=by, kv_dtype="int8")
    assert compression_of(wide).bound.slots > 3 * SLOTS
    beside = WINDOW_BYTES
    if by == "reconstruction":
        beside = CompressionByReconstruction.other_bytes(3 * 2, slots, 16)
    per_sequence = slots * wide.kv_store.token_bytes + beside
    model = bounded(None, condense_by=by, kv_dtype="int8", host_bytes_per_sequence=per_sequence)
    assert compression_of(model).bound == compression_of(plain).bound
    tokens, logits, sinks = random_tokens(1, 360), list[Any](), list[Any]()
    used = None
    with torch.no_grad():
        for each in (plain, model):
            cache = each.new_cache()
            if each is model:
                used = bytes_after_each_pass(model, cache, monkeypatch)
            for first, last in ((0, 150), (150, 270), (270, 360)):
                logits.append(each(tokens[:, first:last], past_key_values=cache).logits[0])
                if each is model and by == "attention":
                    sinks.append(cache.store.gather(cache.seqs[0], 1, 0, 4, kept=True))
            assert cache.seen_lens == [360]
            assert cache.kv_lens[0] < 300
            cache.reset()
    assert used is not None
    assert max(used) <= per_sequence
    assert all(torch.equal(x, y) for rows in sinks for x, y in zip(rows, sinks[0], strict=True))
    near = torch.cosine_similarity(torch.cat(logits[:3]), torch.cat(logits[3:]), dim=-1)
    assert near[:150].min() > 0.999
    assert near.mean() > 0.97
