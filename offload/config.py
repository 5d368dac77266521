"""Options of a run, as one frozen dataclass that refuses what it does not know."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from offload.memory import check_max_memory
from offload.policies import Policy, make_policy
from offload.policies.full import Full

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class RuntimeConfig:
    """How a model runs. Make one with `runtime_config`, which also takes names and size strings.

    Attributes:
        policy: which cached tokens a decode step attends to.
        dtype: of weights, activations and KV cache; None is the checkpoint's own.
        device: where the linear layers run.
        max_memory: bytes by device index or "cpu"; what is not named is bounded by what is free.
            With device="cpu", "cpu" covers the weights and the KV cache.
        num_threads: CPU threads of prefill and decoding; None is all CPUs this process may use.
        prefill_slice_tokens: tokens whose activations exist at one time during prefill.
        page_tokens: tokens in a page of the KV store.
    """

    policy: Policy = field(default_factory=Full)
    dtype: torch.dtype | None = None
    device: str = "cpu"
    max_memory: Mapping[int | str, int] = field(default_factory=dict)
    num_threads: int | None = None
    prefill_slice_tokens: int = 8192
    page_tokens: int = 256

    def __post_init__(self) -> None:
        if self.dtype is not None and self.dtype not in DTYPES.values():
            raise _unknown("dtype", self.dtype, ["auto", *DTYPES])
        if self.device.partition(":")[0] == "cuda":
            raise NotImplementedError(
                f"device={self.device!r}: the GPU pipeline has not landed yet; available: cpu"
            )
        if self.device != "cpu":
            raise _unknown("device", self.device, ["cpu"])
        devices = [key for key in self.max_memory if key != "cpu"]
        if devices:
            raise ValueError(
                f"max_memory names device {devices[0]}, but device is 'cpu'; "
                "give max_memory={'cpu': ...} only"
            )
        for name in ("num_threads", "prefill_slice_tokens", "page_tokens"):
            number = getattr(self, name)
            if number is None and name == "num_threads":
                continue
            if not isinstance(number, int) or isinstance(number, bool) or number < 1:
                raise ValueError(f"{name} must be an integer of at least 1, got {number!r}")


def runtime_config(**options: Any) -> RuntimeConfig:
    """`RuntimeConfig` from what a user writes.

    `policy` may be a name ("full", "exact_topk", …) or a policy object, `dtype` a name, "auto" or
    a torch.dtype, `device` a string or a torch.device, `max_memory` a dict with size strings.

    Raises:
        ValueError: an unknown policy, dtype or device, or a value out of range.
        TypeError: an unknown option.
        NotImplementedError: device="cuda".
    """
    known = [option.name for option in dataclasses.fields(RuntimeConfig)]
    for name in options:
        if name not in known:
            raise TypeError(f"unknown option {name!r}; available: {', '.join(known)}")
    if "policy" in options:
        options["policy"] = make_policy(options["policy"])
    if "dtype" in options:
        options["dtype"] = _dtype(options["dtype"])
    if "device" in options:
        options["device"] = str(options["device"])
    if "max_memory" in options:
        options["max_memory"] = check_max_memory(options["max_memory"])
    return RuntimeConfig(**options)


def _dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    if dtype is None or dtype == "auto":
        return None
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in DTYPES:
        raise _unknown("dtype", dtype, ["auto", *DTYPES])
    return DTYPES[dtype]


def _unknown(option: str, value: object, available: list[str]) -> ValueError:
    return ValueError(f"unknown {option} {str(value)!r}; available: {', '.join(available)}")
