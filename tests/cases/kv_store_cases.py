"""Small stores and random contents for the tests of the KV store."""

import torch

from offload.kv.store import KVStore

LAYERS, HEADS, HEAD_DIM, PAGE_TOKENS = 3, 2, 8, 4
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def make_store(**options) -> KVStore:
    defaults = {
        "num_layers": LAYERS,
        "num_kv_heads": HEADS,
        "head_dim": HEAD_DIM,
        "dtype": torch.float32,
        "page_tokens": PAGE_TOKENS,
        "host_budget_bytes": 1 << 20,
        "slab_bytes": 1 << 16,
    }
    return KVStore(**{**defaults, **options})


def random_rows(num_tokens: int, store: KVStore) -> torch.Tensor:
    return torch.randn(num_tokens, store.num_kv_heads, store.head_dim).to(store.dtype)


def write_tokens(store: KVStore, seq: int, num_tokens: int) -> list[torch.Tensor]:
    """Reserve, append random rows to every layer, commit; rows [2, num_tokens, heads, dim]."""
    store.reserve([seq], [num_tokens])
    written = []
    for layer_idx in range(store.num_layers):
        keys, values = random_rows(num_tokens, store), random_rows(num_tokens, store)
        store.append(seq, layer_idx, keys, values)
        written.append(torch.stack([keys, values]))
    store.commit([seq], [num_tokens])
    return written


def read_tokens(store: KVStore, seq: int, stop: int | None = None) -> list[torch.Tensor]:
    """What gather returns for every layer, in the shape of `write_tokens`."""
    gathered = [store.gather(seq, layer_idx, stop=stop) for layer_idx in range(store.num_layers)]
    return [torch.stack([keys, values]).transpose(1, 2) for keys, values in gathered]


def joined(head: list[torch.Tensor], tail: list[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.cat(rows, dim=1) for rows in zip(head, tail, strict=True)]


def assert_same(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for actual_rows, expected_rows in zip(actual, expected, strict=True):
        torch.testing.assert_close(actual_rows, expected_rows, rtol=0, atol=0)


def bytes_per_column(store: KVStore) -> int:
    """Bytes of one page in every layer."""
    return store.num_layers * store.page_bytes
