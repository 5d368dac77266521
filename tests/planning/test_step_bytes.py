"""What a step is planned to take, against every tensor that it has: to the byte."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases.slowly import combinations

from gpu_ops.layout import layout_bytes
from offload.decode.gpu.decoder import DeviceDecoder
from offload.decode.gpu.layer_heads import LayerHeads
from offload.decode.gpu.pages import whole_slabs
from offload.decode.gpu.placement import HeadPlacement
from offload.decode.gpu.resident_kv import resident_pages
from offload.kv.store import KVStore
from offload.measuring.synthetic.random_model import random_model
from offload.models import LeanModel, ModelShape, lean_model_maker
from offload.planning.placement_bytes import step_device_bytes, step_layouts
from offload.planning.workload import Workload
from offload.policies import Policy
from offload.policies.registry import make_policy

CPU = torch.device("cpu")
PAGE_TOKENS = 16
SHAPE = ModelShape(4, 64, 8, 4, 32, 96, 300, 8192)
WINDOW = {"budget_tokens": 48, "sink_tokens": 4, "recent_tokens": 16}
LYCHEE = make_policy("lychee_decode", retrieval_heads=2, **WINDOW)
TIDAL = make_policy("tidal_decode", select_layers=(1,), dense_layers=1, **WINDOW)
CASES: dict[str, tuple[Policy, ModelShape, tuple[str, ...]]] = {
    "nothing on the gpu": (make_policy("full"), SHAPE, ("....",) * 4),
    "full": (make_policy("full"), SHAPE, ("GGGG", "G...", "GG..", "....")),
    "dense layers": (make_policy("exact_topk", dense_layers=2, **WINDOW), SHAPE, ("GGGG",) * 2),
    "lychee_decode": (LYCHEE, SHAPE, ("GGGG", "....", "GG..", "....")),
    "lychee_decode, gathered": (LYCHEE, SHAPE, ("GGGG", "g.g.", "GGg.", "gggg")),
    "tidal_decode": (TIDAL, SHAPE, ("GGGG", "GGGG", "g..g", "....")),
    "codes": (make_policy("sketch", dense_layers=1, **WINDOW), SHAPE, ("GGGG", "cccc", "c..c")),
    "codes of one bit": (
        make_policy("sketch", bits=1, dense_layers=0, candidate_ratio=1.5, **WINDOW),
        replace(SHAPE, num_layers=2),
        ("cccc", "cccc"),
    ),
    "hot rows": (
        make_policy("exact_topk", dense_layers=1, **WINDOW),
        SHAPE,
        ("GGGG", "hhhh", "....", "hhhh"),
    ),
    "hot rows of some heads": (
        make_policy(
            "per_head", rest="quest", retrieval="full", retrieval_heads=2, dense_layers=0, **WINDOW
        ),
        SHAPE,
        ("....", "Ghhh", "hhhh", "...."),
    ),
    "one KV head": (
        make_policy("full"),
        replace(SHAPE, num_layers=3, num_kv_heads=1, intermediate_size=50, vocab_size=5000),
        ("G", ".", "G"),
    ),
    "a context of odd length": (LYCHEE, replace(SHAPE, max_context=1001), ("GGGG", "gggg")),
}


def decoder_of(
    policy: Policy,
    lean: LeanModel,
    placement: HeadPlacement,
    dtype: torch.dtype,
    kv_dtype: str = "auto",
) -> DeviceDecoder:
    shape = lean.shape
    store = KVStore(
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        dtype=dtype,
        kv_dtype=kv_dtype,
        page_tokens=PAGE_TOKENS,
    )
    return DeviceDecoder(
        lean, store, policy, device=CPU, backend="inline", num_threads=1, placement=placement
    )


def step(decoder: DeviceDecoder, batch_size: int, kv_len: int) -> None:
    """The step after which `batch_size` new sequences have `kv_len` tokens."""
    store = decoder.store
    seqs = [store.new_sequence() for _ in range(batch_size)]
    store.reserve(seqs, [kv_len] * batch_size)
    generator = torch.Generator().manual_seed(0)
    for seq in seqs:
        for layer_idx in range(store.num_layers):
            rows = torch.randn(
                2, kv_len - 1, store.num_kv_heads, store.head_dim, generator=generator
            )
            store.append(seq, layer_idx, *rows.to(store.dtype))
    store.commit(seqs, [kv_len - 1] * batch_size)
    tokens = torch.zeros(batch_size, dtype=torch.int64)
    decoder.choose_tokens(seqs, tokens, tokens + kv_len - 1)


def tensors_in(owner: Any, seen: dict[int, Any]) -> Iterator[torch.Tensor]:
    """Tensors of an object, of what it holds, and so on; not of the model, nor of the host's own
    state."""
    if id(owner) in seen or isinstance(owner, (torch.nn.Module, LeanModel, KVStore, str)):
        return
    seen[id(owner)] = owner  # kept, so that its id stays its own
    if isinstance(owner, torch.Tensor):
        yield owner
    elif isinstance(owner, dict):
        for value in owner.values():
            yield from tensors_in(value, seen)
    elif isinstance(owner, (list, tuple)):
        for value in owner:
            yield from tensors_in(value, seen)
    elif type(owner).__module__.startswith(("offload.decode", "gpu_ops", "cpu_ops")):
        held = {**getattr(owner, "__dict__", {})}
        for name in ("host_state", "host_tokens", "_host_draws"):
            held.pop(name, None)
        yield from tensors_in(held, seen)


def bytes_of(*owners: Any) -> int:
    """Bytes of the memory behind all tensors of `owners`."""
    seen: dict[int, Any] = {}
    storages = {
        storage.data_ptr(): storage.nbytes()
        for owner in owners
        for storage in (tensor.untyped_storage() for tensor in tensors_in(owner, seen))
    }
    return sum(storages.values())


@pytest.mark.parametrize(
    ("batch_size", "kv_len", "dtype", "kv_dtype", "case"),
    combinations(
        [(1, 40), (1, 100), (2, 65), (3, 50)],
        [(torch.float32, "auto"), (torch.bfloat16, "auto"), (torch.bfloat16, "int8")],
        list(CASES),
    ),
)
def test_a_step_takes_what_was_planned(
    case: str, dtype: torch.dtype, kv_dtype: str, batch_size: int, kv_len: int
) -> None:
    policy, shape, rows = CASES[case]
    rows = (*rows, *("." * shape.num_kv_heads,) * (shape.num_layers - len(rows)))
    placement = HeadPlacement.from_text("\n".join(rows))
    stock = random_model(replace(shape, rope_theta=10000.0), device=CPU, dtype=dtype)
    lean = replace(lean_model_maker("llama")(stock), shape=shape)
    decoder = decoder_of(policy, lean, placement, dtype, kv_dtype)
    try:
        step(decoder, batch_size, kv_len)
        work = Workload(shape, policy, kv_len, batch_size, dtype, PAGE_TOKENS, kv_dtype=kv_dtype)
        planned = step_device_bytes(placement, work, device=None)
        running, (link,) = decoder.slots.steps.step, decoder.slots.steps.links.values()
        codes = running.resident.codes
        parts = {
            "windows": running.resident.windows,
            "page tables": (
                running.resident.page_tables,
                running.resident.host_pages,
                [] if codes is None else codes.page_tables,
            ),
            "codes of keys": [] if codes is None else [codes._pages, codes.means],
            "fetched rows": running.heads._rows,
            "hot rows": vars(running.resident.hot) if running.resident.hot else [],
            "KV of resident heads": running.resident._pages,
        }
        assert {name: planned[name] for name in parts} == {
            name: bytes_of(owner) for name, owner in parts.items()
        }
        weights = bytes_of(running.weights)
        assert sum(planned.values()) == bytes_of(running) - weights
        mailbox = step_layouts(placement, work)["mailbox"]
        assert layout_bytes(mailbox) == bytes_of(link.mailbox)
    finally:
        decoder.close()
        decoder.store.close()


def test_layers_of_equally_many_heads_share_slabs() -> None:
    def pages(*heads: int) -> int:
        layers = [LayerHeads(tuple(range(n)), (), ()) for n in heads]
        sizes = {"num_sequences": 7, "kv_len": 20, "page_tokens": 16, "row_items": 8}
        return layout_bytes(resident_pages(layers, dtype=torch.bfloat16, **sizes))

    page = 2 * 16 * 8 * 2
    assert pages(0, 0) == 0
    assert pages(4, 0, 4) == whole_slabs(2 * 14) * 4 * page
    assert pages(4, 2, 4) == (32 * 4 + 32 * 2) * page
