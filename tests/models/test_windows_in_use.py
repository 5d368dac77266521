"""Layers with windows keep little more than their windows, and nothing that is read changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases.inside import allow_host_bytes, passes_take_nothing
from cases.tiny_models import make_tiny_model, random_tokens
from engine.test_sessions import ask as ask_engine

from offload import Engine, OffloadedCache, OffloadedModel, SamplingParams
from offload.engine.sessions import Sessions
from offload.kv import page_pool, sequence_pages
from offload.planning.placement_bytes import store_bytes
from offload.planning.workload import Workload
from offload.policies.exact_topk import ExactTopK
from offload.policies.full import Full
from offload.policies.per_head.policy import PerHead
from offload.runtime.config import runtime_config
from offload.runtime.model_loading import check_heads
from offload.selection.head_roles import HeadRoles

WINDOW, NUM_NEW = 32, 100
PROMPT = random_tokens(1, 320, seed=3).clamp(min=1)  # 0 is padding
OPTIONS: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
ROLES = HeadRoles.of(
    np.eye(3, 2) * [[0], [1], [0]] > 0, head_dim=32, model_type="gemma3_text", made_by="a test"
)
APART = PerHead(retrieval=Full(), rest=ExactTopK(budget_tokens=128), head_roles=ROLES)


@pytest.fixture(scope="module", params=["gemma3_text", "gemma4_text", "gpt_oss"])
def stock(request: pytest.FixtureRequest) -> Any:
    """Layers of the second differ in their heads, too, and those of the last have sinks."""
    return make_tiny_model(request.param, sliding_window=WINDOW).float().eval()


@pytest.fixture(scope="module")
def folder(stock: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("windows")
    stock.save_pretrained(path)
    return path


def load(folder: Path, **options: Any) -> Any:
    sizes = {"num_threads": 2, "page_tokens": 16, "prefill_slice_tokens": 48}
    return OffloadedModel.from_pretrained(folder, policy="full", **sizes, **options)


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return load(folder)


@pytest.fixture(scope="module")
def expected(stock: Any) -> torch.Tensor:
    with torch.inference_mode():
        return stock.generate(PROMPT, max_new_tokens=NUM_NEW, **OPTIONS)


def test_tokens_and_host_bytes(model: Any, expected: torch.Tensor) -> None:
    cache, store = model.new_cache(), model.kv_store
    found = model.generate(PROMPT, max_new_tokens=NUM_NEW, past_key_values=cache, **OPTIONS)
    assert torch.equal(found, expected)
    (seq,), kv_len = cache.seqs, cache.kv_lens[0]
    is_full = [kind == "full_attention" for kind in model.config.layer_types]
    first = (kv_len - WINDOW - 64) // 16 * 16
    assert store.starts(seq)[:, 0].tolist() == [0 if full else first for full in is_full]
    of_full, of_window = -(-kv_len // 16), -(-(WINDOW + 64) // 16) + 2
    most = of_full + 2 * of_window
    assert store.host_bytes_used <= model.offload_stats().kv_host_bytes <= most * store.page_bytes
    assert most == store.pages_at(kv_len) < 0.6 * 3 * of_full
    planned = Workload(
        model._offload.lean.shape, Full(), kv_len, dtype=torch.float32, page_tokens=16
    )
    more = store_bytes(planned, 1) - most * store.page_bytes
    heads_differ = len({*map(store.heads_of, range(3))}) > 1  # then for the most of each number
    assert 0 <= more < 4096 + most * store.page_bytes * heads_differ

    model_keys = cache.layers[is_full.index(True)].keys
    assert model_keys is not None
    assert model_keys.shape[2] == kv_len
    with pytest.raises(ValueError, match="layer 0 sees a window"):
        _ = cache.layers[0].keys
    with pytest.raises(
        ValueError, match=r"window of 32 tokens .*; read the first 319 tokens again"
    ):
        cache.crop(319 - kv_len)
    assert cache.get_seq_length() == kv_len
    cache.crop(-60)  # as few can be taken back
    again = model.generate(
        expected[:, : kv_len - 59], max_new_tokens=60, past_key_values=cache, **OPTIONS
    )
    assert torch.equal(again, expected)
    cache.reset()
    assert store.host_bytes_used == 0


@pytest.mark.parametrize(
    "more", [{"num_beams": 3}, {"num_return_sequences": 2, "num_beams": 2}, {"padded": True}]
)
@torch.inference_mode()
def test_several_rows(more: dict[str, Any], model: Any, stock: Any) -> None:
    ids, options = PROMPT, OPTIONS | more | {"max_new_tokens": 40}
    if options.pop("padded", False):
        short = torch.cat([torch.zeros(1, 90, dtype=torch.int64), PROMPT[:, 90:]], 1)
        ids = torch.cat([PROMPT, short])
        options["attention_mask"] = torch.ones_like(ids)
        options["attention_mask"][1, :90] = 0
    assert torch.equal(model.generate(ids, **options), stock.generate(ids, **options))


def test_drafts(model: Any, expected: torch.Tensor) -> None:
    options = OPTIONS | {"max_new_tokens": NUM_NEW}
    found = model.generate(PROMPT, prompt_lookup_num_tokens=5, **options)
    assert torch.equal(found, expected)
    with pytest.raises(ValueError, match=r"prompt_lookup_num_tokens=65 .* up to 64 tokens"):
        model.generate(PROMPT, prompt_lookup_num_tokens=65, **options)


def test_int8_rows(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tokens as if nothing were freed."""
    model, options = load(folder, kv_dtype="int8"), OPTIONS | {"max_new_tokens": NUM_NEW}
    found, freed = model.generate(PROMPT, **options), model.offload_stats().kv_host_bytes
    for module in (page_pool, sequence_pages):
        monkeypatch.setattr(module, "WINDOW_SLACK", 10**6)
    assert torch.equal(found, model.generate(PROMPT, **options))
    assert freed < 0.6 * model.offload_stats().kv_host_bytes


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_saved_caches(kv_dtype: str, folder: Path, tmp_path: Path) -> None:
    model, options = load(folder, kv_dtype=kv_dtype), OPTIONS | {"max_new_tokens": 30}
    cache = model.new_cache()
    first = model.generate(PROMPT, past_key_values=cache, **options)
    cache.save(tmp_path / "cache")
    of_rows = model.kv_store.format
    of_token = sum(n * of_rows.row_items(d) for n, d in map(model.kv_store.heads_of, range(3)))
    whole = 2 * cache.kv_lens[0] * of_token * of_rows.page_dtype.itemsize
    assert (tmp_path / "cache").stat().st_size < 0.7 * whole
    expected = model.generate(first, past_key_values=cache, **options)
    starts, store = model.kv_store.starts(cache.seqs[0]).tolist(), model.kv_store
    loaded = OffloadedCache.load(model, tmp_path / "cache")
    assert store.starts(loaded.seqs[0])[:, 0].tolist() <= [of_layer[0] for of_layer in starts]
    assert torch.equal(model.generate(first, past_key_values=loaded, **options), expected)


def test_engine_and_its_sessions(model: Any, stock: Any, tmp_path: Path) -> None:
    """A text that goes on is not read again, from memory or a file; what branches off early is."""
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)

    def expected(prompt: list[int]) -> list[int]:
        ids = torch.tensor([prompt])
        found = stock.generate(ids, max_new_tokens=20, **OPTIONS)
        return found[0, len(prompt) :].tolist()

    def ask(engine: Engine, prompt: list[int], session_id: str | None) -> tuple[list[int], int]:
        answer, output = ask_engine(engine, prompt, session_id, params)
        return answer, output.num_cached

    prompt, more = PROMPT[0].tolist(), random_tokens(1, 12, seed=5).clamp(min=1)[0].tolist()
    for session_id in (None, "s"):
        sessions = None if session_id is None else Sessions(tmp_path)
        for _ in range(2):
            engine = Engine(model, sessions=sessions)
            answer, _ = ask(engine, prompt, session_id)
            assert answer == expected(prompt)
            if sessions is not None:  # from the file
                engine.stop()
                engine = Engine(model, sessions=sessions)
            longer = [*prompt, *answer, *more]
            answer, cached = ask(engine, longer, session_id)
            assert (answer, cached) == (expected(longer), len(prompt) + 19)
            early = [*prompt[:100], *more]
            answer, cached = ask(engine, early, session_id)
            assert (answer, cached) == (expected(early), 0)
            engine.stop()
    assert model.kv_store.host_bytes_used == 0


def test_requests_that_fit_together(
    folder: Path, stock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two that would be too many with the pages of all tokens."""
    passes_take_nothing(monkeypatch)
    model, prompts = load(folder), [PROMPT[0].tolist(), PROMPT[0, 20:].tolist()]
    store, params = model.kv_store, SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    of_windows = store.pages_at(360) - -(-360 // 16)  # a prompt that is kept has its own, too
    room = 2 * store.pages_at(360) + of_windows
    assert room < 0.7 * 2 * 3 * -(-360 // 16)
    allow_host_bytes(model, room * store.page_bytes)
    engine, answers = Engine(model), dict[str, list[int]]()
    for prompt in prompts:
        answers[engine.add_request(prompt, params)] = []
    most = 0
    while engine.has_work:
        outputs = engine.step()
        most = max(most, len({output.request_id for output in outputs}))
        for output in outputs:
            assert output.error is None, output
            answers[output.request_id] += [chosen.token for chosen in output.tokens]
    engine.stop()
    for prompt, answer in zip(prompts, answers.values(), strict=True):
        found = stock.generate(torch.tensor([prompt]), max_new_tokens=40, **OPTIONS)
        assert answer == found[0, len(prompt) :].tolist()
    assert most == 2  # of one step
    assert store.host_bytes_used == 0


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"host_bytes_per_sequence": 10**6}, "host_bytes_per_sequence"),
        ({"quality_probe": 0.5, "policy": "exact_topk"}, "quality_probe"),
        ({"cache_correction_every": 8, "policy": "exact_topk"}, "cache_correction_every"),
        ({"policy": APART}, "policy='per_head', which tells layers or heads apart,"),
    ],
)
def test_what_windows_are_not_for(options: dict[str, Any], what: str, model: Any) -> None:
    config = runtime_config(**options)
    if len({*map(model.kv_store.heads_of, range(3))}) > 1:
        what, why = what.partition(",")[0], "needs layers whose heads are alike"
    else:
        why = "a window of 32 tokens"
    with pytest.raises(NotImplementedError, match=f"{what}.* {why}"):
        check_heads(model._offload.lean, config, None)
