"""What a saved sequence depends on: it is taken up where all of this is the same."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import numpy as np
import torch

from offload.kv.store import KVStore
from offload.policies import Policy
from offload.system.checked_file import bytes_of
from offload.system.version import __version__

_BLOCK, _NUM_BLOCKS = 2048, 8  # elements; and blocks of a parameter
_NO_MATTER = ("transformers_version", "dtype", "torch_dtype", "use_cache")


def fingerprint(
    parameters: Mapping[str, torch.Tensor], config: Any, policy: Policy, store: KVStore
) -> dict[str, str]:
    """By name, of one model as it is loaded.

    Weights are told apart by some blocks of each parameter at equal distances.
    """
    weights = blake2b(digest_size=16)
    for name, parameter in parameters.items():
        weights.update(f"{name} {list(parameter.shape)}\n".encode())
        flat = parameter.detach().flatten()
        size = flat.numel()
        places = [place * max(0, size - _BLOCK) // _NUM_BLOCKS for place in range(_NUM_BLOCKS + 1)]
        blocks = [flat[place : place + _BLOCK] for place in dict.fromkeys(places)]
        weights.update(bytes_of(torch.cat(blocks).cpu()).data)
    facts = {
        key: value
        for key, value in config.to_dict().items()
        if key not in _NO_MATTER and not key.startswith("_")
    }
    with np.printoptions(threshold=sys.maxsize, floatmode="unique"):
        options = repr(policy)
    return {
        "version of offload": __version__,
        "weights": weights.hexdigest(),
        "config": _digest(json.dumps(facts, sort_keys=True, default=str)),
        "dtype": str(store.dtype).removeprefix("torch."),
        "kv_dtype": str(store.format.page_dtype).removeprefix("torch."),
        "policy": policy.name,
        "options of the policy": _digest(options),
        "layout": _layout(store),
    }


def _layout(store: KVStore) -> str:
    heads = [*map(store.heads_of, range(store.num_layers))]
    parts = "K" if store.format.keys_only else "K|V"
    if len(set(heads)) > 1:
        return f"layers of [{parts}, h, n, d], (h, d) = {heads}"
    (num_kv_heads, head_dim), *_ = heads
    return f"{store.num_layers} layers of [{parts}, {num_kv_heads}, n, {head_dim}]"


def _digest(text: str) -> str:
    return blake2b(text.encode(), digest_size=16).hexdigest()
