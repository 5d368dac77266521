"""Types whose modules compute attention themselves, and ALiBi as dimensions of keys and queries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cases.every_type import tiny_model_of
from cases.slowly import combinations
from cases.tiny_models import VOCAB_SIZE
from torch.nn.functional import pad
from transformers import AutoModelForCausalLM
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from cpu_ops.worker_pool import WorkerPool
from offload import OffloadedModel
from offload.decode.alibi import bloom_slopes, mpt_slopes, of_positions, of_slopes
from offload.policies.registry import make_policy
from offload.prefill.attention import attend
from offload.runtime.row_dtype import takes_int8

IDS = torch.randint(3, 250, (2, 40), generator=torch.Generator().manual_seed(1))
MASK = torch.ones_like(IDS)
MASK[0, :11] = 0
# 12 heads: no power of two.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "bloom": ("bloom", {"n_head": 12, "hidden_size": 96}),
    "mpt": ("mpt", {"n_heads": 12, "d_model": 96}),
    "falcon-alibi": ("falcon", {"alibi": True, "multi_query": False, "num_kv_heads": 4}),
    "falcon-rotary": ("falcon", {}),
    "falcon-new": ("falcon", {"new_decoder_architecture": True}),
}
WITH_ALIBI = ["bloom", "mpt", "falcon-alibi"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for name, (model_type, changes) in MODELS.items():
        made[name] = tmp_path_factory.mktemp(name)
        model = tiny_model_of(model_type, vocab_size=VOCAB_SIZE, **changes)
        model.save_pretrained(made[name])
    return made


def load(folder: Path, **options: Any) -> Any:
    return OffloadedModel.from_pretrained(folder, **{"num_threads": 1, "page_tokens": 16} | options)


def tokens(model: Any, rows: slice, **options: Any) -> list[list[int]]:
    settings = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    out = model.generate(input_ids=IDS[rows], attention_mask=MASK[rows], **settings | options)
    return out.tolist()


@pytest.mark.parametrize(
    ("name", "backend", "policy"), combinations(MODELS, [None, "inline"], ["full", "exact_topk"])
)
def test_tokens_are_those_of_the_stock_model(
    folders: dict[str, Path], name: str, backend: str | None, policy: str
) -> None:
    """Alone, and in a padded batch whose prompts are read in parts, also without a cache; the steps
    of a GPU are whole, without a fall back to single modules."""
    stock = AutoModelForCausalLM.from_pretrained(folders[name]).eval()
    options = {} if policy == "full" else {"budget_tokens": 4096, "dense_layers": 0}
    model = load(folders[name], backend=backend, policy=make_policy(policy, **options))
    assert (model._offload.steps is not None) == (backend == "inline")
    for rows in (slice(1, 2), slice(0, 2)):
        expected = tokens(stock, rows, use_cache=True)
        for more in ({}, {"prefill_chunk_size": 8}, {"use_cache": False, "max_new_tokens": 3}):
            found = tokens(model, rows, **more)
            assert found == [row[: len(found[0])] for row in expected], more
    assert model.kv_store.num_sequences == 0


@pytest.mark.parametrize("name", MODELS)
def test_logits_in_bfloat16_are_near(folders: dict[str, Path], name: str) -> None:
    """As near to float32's as those of the stock model, whose biases are rounded, too."""
    ids = torch.randint(3, 250, (1, 300), generator=torch.Generator().manual_seed(2))
    found = []
    with torch.no_grad():
        for dtype in (torch.float32, torch.bfloat16):
            stock = AutoModelForCausalLM.from_pretrained(folders[name], dtype=dtype).eval()
            found.append(stock(input_ids=ids).logits.float())
        model = load(folders[name], dtype=torch.bfloat16)
        cache = model.new_cache()
        logits = [model(input_ids=ids[:, :290], past_key_values=cache).logits]
        for n in range(290, 300):
            logits.append(model(input_ids=ids[:, n : n + 1], past_key_values=cache).logits)
    exact, rounded = found
    ours = torch.cat(logits, dim=1).float()
    assert (ours - exact).norm() < 1.2 * (rounded - exact).norm()


def test_slopes_are_those_of_transformers() -> None:
    for num_heads in (4, 8, 12, 32, 71, 112):
        stock = build_alibi_tensor(torch.ones(1, 2, dtype=torch.int64), num_heads, torch.float32)
        torch.testing.assert_close(bloom_slopes(num_heads).float(), stock[:, 0, 1])
        stock = -build_mpt_alibi_tensor(num_heads, 2)[:, 0, 0]
        torch.testing.assert_close(mpt_slopes(num_heads, 8).float(), stock)


@pytest.mark.parametrize(
    ("dtype", "most"), [(torch.float32, 5e-4), (torch.bfloat16, 4e-3), (torch.float16, 1e-3)]
)
def test_biases_are_exact_at_long_distances(dtype: torch.dtype, most: float) -> None:
    """Against float64: the summand of each score, and attention to 30,000 keys."""
    slopes, head_dim, kv_len = bloom_slopes(12), 64, 30_000
    scale, generator = head_dim**-0.5, torch.Generator().manual_seed(0)
    sizes = [(12, 1), (12, kv_len), (12, kv_len)]
    q, k, v = (torch.randn(*x, head_dim, generator=generator).to(dtype) for x in sizes)
    positions = torch.arange(kv_len) + 2**21 - kv_len
    of_keys = of_positions(positions[None], dtype)[0]
    of_queries = of_slopes(slopes, scale, dtype, "cpu")[0]
    summands = (of_queries.double() @ of_keys.double().transpose(1, 2))[:, 0] * scale
    bias = slopes[:, None] * positions
    errors = (summands - bias) - (summands - bias)[:, -1:]  # of what a softmax sees
    assert (errors.abs() <= 1e-6 * (bias[:, -1:] - bias) + 1e-9).all()

    of_keys = of_positions(torch.arange(kv_len)[None], dtype)[0].expand(12, -1, -1)
    wide = [torch.cat([q, of_queries], -1), torch.cat([k, of_keys], -1), v]
    q_wide, k_wide, v_wide = (pad(x, (0, 80 - x.shape[-1])).contiguous() for x in wide)
    pool = WorkerPool(1)
    found = attend(q_wide, None, (k_wide, v_wide), scale, pool, None)[0, :, :head_dim]
    pool.close()
    scores = q.double() @ k.double().transpose(1, 2) * scale
    weights = (scores + (slopes[:, None] * torch.arange(kv_len))[:, None]).softmax(-1)
    expected = (weights @ v.double())[:, 0]
    assert ((found - expected).norm(dim=-1) < most * expected.norm(dim=-1)).all()


@pytest.mark.parametrize("name", WITH_ALIBI)
def test_what_would_round_positions_is_refused(
    folders: dict[str, Path], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before weights are read; `auto` comes to neither."""
    with monkeypatch.context() as patch:
        patch.setattr("offload.runtime.generic_loading.load_generic_model", None)
        for options in ({"kv_dtype": "int8"}, {"policy": make_policy("sketch")}):
            with pytest.raises(NotImplementedError, match="have their positions for ALiBi"):
                load(folders[name], **options)
    model = load(folders[name])
    assert (model.policy.name, model.policy_reason[:7]) == ("full", "exact: ")
    assert not takes_int8(model, "auto")
    assert not model.kv_store.format.is_int8


def test_int8_rows_without_alibi(folders: dict[str, Path]) -> None:
    model = load(folders["falcon-rotary"], kv_dtype="int8")
    assert takes_int8(load(folders["falcon-new"]), "auto")
    assert model.kv_store.format.is_int8
    assert len(tokens(model, slice(0, 2))[0]) == 50
