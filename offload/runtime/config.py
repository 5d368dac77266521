"""Options of a run, as one frozen dataclass that refuses what it does not know."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from cpu_ops.worker_pool import MAX_THREADS
from offload.decode.gpu.placement import HeadPlacement, check_dense_until
from offload.kv.format import KV_DTYPES
from offload.kv_compression.bound import CONDENSED_SHARE
from offload.models import Where
from offload.models.dtypes import AUTO_ON_GPU, DTYPES, WEIGHTS
from offload.policies import Policy
from offload.policies.auto import Auto
from offload.policies.registry import make_policy
from offload.system.errors import NoGPUError
from offload.system.json_file import read_json
from offload.system.memory import check_max_memory, parse_size

BACKENDS = ("graph", "stream", "inline")
_COUNTS = ("prefill_slice_tokens", "page_tokens", "tensor_parallel_size")
_COUNTS_OR_NONE = ("num_threads", "cache_correction_every")
CONDENSE_BY = ["auto", "reconstruction", "attention"]


@dataclass(frozen=True)
class RuntimeConfig:
    """How a model runs. Make one with `runtime_config`, which also takes names and size strings.

    Attributes:
        policy: which cached tokens a decode step attends to. `Auto` is another one once a model is
            opened (`offload.runtime.auto_policy`).
        dtype: of weights, activations and KV cache; None is the checkpoint's own.
        weights: what the layers' matrices are kept as. "q8": int8 in groups of 32 with a float16
            scale; "q4": four bits with a scale and a minimum. A GGUF file's own blocks
            where they are such, else rounded to nearest; a decode step then rounds what it
            multiplies them with to int8. The head is kept as with "q8" under both,
            and so is an embedding that is tied to it; another one stays in `dtype`.
            "bfloat16", "float16" or "float32": not packed, and `dtype` is that. "auto": on a
            GPU, and in one process on a CPU with its own backend, what a file has quantised is kept
            in the one of those two that has its numbers, else as "q8" (`gguf_blocks.format_of`);
            all else is in `dtype`.
        device: where the linear layers run: "cpu", "cuda" or "cuda:1".
        max_memory: bytes by device index or "cpu"; what is not named is bounded by what is free.
            With device="cpu", "cpu" covers the weights and the KV cache; with a GPU, "cpu" covers
            the KV cache, and the GPU's index its weights and the part of the KV cache there.
        num_threads: CPU threads of prefill and decoding; None is all CPUs this process may use,
            with a GPU all but one: the driver and Python need it. With ranks, of each rank; None
            is its part of the CPUs.
        prefill_slice_tokens: tokens whose activations exist at one time during prefill.
        page_tokens: tokens in a page of the KV store; of one KV head at most 64, where sequences
            are condensed by reconstruction.
        backend: how GPU and CPU wait for each other in a decode step, "graph" or "stream" (see
            `gpu_sync`); None is the fastest the GPU can do. "inline" runs the GPU's code path on
            the CPU, for tests and debugging.
        deadline_seconds: after which a decode step that one side does not finish is an error.
        tensor_parallel_size: processes that run the model together, each with a part of the heads
            (see `TensorParallel`). max_memory["cpu"] is for all of them, and rank i's GPU is i.
        placement: which KV heads are attended where, of a GPU that decodes; None: chosen when the
            model is loaded (`placement_for`). `offload plan` makes one.
        quality_probe: share of the selections of decode steps that are compared with exact
            attention, for `OffloadedModel.quality`; 0.001 costs next to nothing.
        quality_floor: warn once if the attention mass kept is surely below this; needs a probe.
        host_bytes_per_sequence: of host memory, whatever its length, that one sequence's KV cache
            and what the policy keeps of it take at most; tokens that attention has left behind are
            condensed (see `offload.kv_compression`). None: no such bound. Not with ranks.
        condense_by: which tokens stay then. "reconstruction": those that are looked up when the
            text is read a second time, of all heads of all layers together. "attention": in each
            head those that the last tokens have asked for; costs no second reading, and loses what
            nobody has asked for yet. "auto": the first, on a CPU under a policy that keeps
            nothing beside the cache, such as `full` or `exact_topk`; else, or with a
            condensed_share, the second.
        condensed_share: by attention, of the slots that these bytes hold, for condensed tokens at
            most; with 0 tokens are dropped instead, as they are by reconstruction.
        cache_correction_every: tokens that were decoded sparsely until they are read again by
            exact attention, and their keys and values replaced: before the next one, or with a
            GPU beside the next ones (see `offload.runtime.corrector`); None: never. Not with ranks,
            host_bytes_per_sequence, drafts, or a policy that attends to everything; `Auto` that
            comes to one does without.
        host_experts: layers, the first that have some, whose experts a GPU leaves in the host's
            memory, where the CPU runs them in decode steps; prompts copy them to the GPU, one at a
            time. "auto": as many as the GPU has too little memory for, often none. Of lean layers,
            and of hybrids (`offload.models.hybrid`), in one process; max_memory["cpu"] covers them,
            too.
        hot_experts: experts of each of these layers, those that steps choose most, of which the GPU
            has copies that it runs itself. None: with "auto" half of each layer's, for which more
            layers go to the host, or fewer where all layers do; else none.
        kv_dtype: what keys and values are kept as. "int8": with a float16 scale per token, head
            and 64 dims, in 0.52 of the bytes of bfloat16, and a little less exact. "bfloat16",
            "float16", "float32": only of a model in it. "auto": the model's dtype.
    """

    policy: Policy = field(default_factory=Auto)
    dtype: torch.dtype | None = None
    device: str = "cpu"
    max_memory: Mapping[int | str, int] = field(default_factory=dict)
    num_threads: int | None = None
    prefill_slice_tokens: int = 8192
    page_tokens: int = 256
    backend: str | None = None
    deadline_seconds: float = 5.0
    tensor_parallel_size: int = 1
    placement: HeadPlacement | None = None
    quality_probe: float = 0.0
    quality_floor: float | None = None
    host_bytes_per_sequence: int | None = None
    condense_by: str = "auto"
    condensed_share: float = CONDENSED_SHARE
    cache_correction_every: int | None = None
    weights: str = "auto"
    kv_dtype: str = "auto"
    host_experts: int | str = 0
    hot_experts: int | None = None

    def __post_init__(self) -> None:
        if self.dtype is not None and self.dtype not in DTYPES.values():
            raise _unknown("dtype", self.dtype, ["auto", *DTYPES])
        device = checked_device(self.device)
        check_backend(self.backend, device)
        if device.type == "cuda":
            check_dense_until(self.policy)
        for name in (*_COUNTS, *_COUNTS_OR_NONE):
            number = getattr(self, name)
            if number is None and name in _COUNTS_OR_NONE:
                continue
            if not isinstance(number, int) or isinstance(number, bool) or number < 1:
                raise ValueError(f"{name} must be an integer of at least 1, got {number!r}")
            if name == "num_threads" and number > MAX_THREADS:
                raise ValueError(f"num_threads must be at most {MAX_THREADS}, got {number}")
        for key in self.max_memory:
            if key != "cpu" and (device.type == "cpu" or key not in self._gpus(device)):
                raise ValueError(
                    f"max_memory names device {key}, but device is {self.device!r}; "
                    f"give {_budget_example(device)}"
                )
        if self.placement is not None and device.type == "cpu" and self.backend != "inline":
            raise ValueError(
                "placement is for a GPU that decodes, but device is 'cpu'; leave placement out"
            )
        if self.placement is not None and isinstance(self.policy, Auto):
            raise ValueError(
                "placement is of the heads of one policy, but policy is 'auto'; give the policy "
                "that it was made for"
            )
        seconds = self.deadline_seconds
        if not isinstance(seconds, (int, float)) or not seconds > 0:
            raise ValueError(f"deadline_seconds must be a positive number, got {seconds!r}")
        _check_share("quality_probe", self.quality_probe)
        if self.quality_probe and self.tensor_parallel_size > 1:
            raise ValueError(
                f"quality_probe={self.quality_probe} with tensor_parallel_size="
                f"{self.tensor_parallel_size}: a rank sees only its own heads; leave one out"
            )
        if self.quality_floor is not None:
            _check_share("quality_floor", self.quality_floor)
            if not self.quality_probe:
                raise ValueError(
                    f"quality_floor={self.quality_floor} needs quality_probe, such as 0.001"
                )

        _check_share("condensed_share", self.condensed_share)
        if self.condense_by not in CONDENSE_BY:
            raise _unknown("condense_by", self.condense_by, CONDENSE_BY)
        if self.host_bytes_per_sequence is None:
            for name, default in (("condensed_share", CONDENSED_SHARE), ("condense_by", "auto")):
                if getattr(self, name) != default:
                    raise ValueError(f"{name}={getattr(self, name)} needs host_bytes_per_sequence")
        elif self.tensor_parallel_size > 1:
            raise ValueError(
                f"host_bytes_per_sequence={self.host_bytes_per_sequence} is for one process, but "
                f"tensor_parallel_size is {self.tensor_parallel_size}; leave one of the two out"
            )

        self._check_correction()
        self._check_weights()
        self._check_host_experts()
        if self.kv_dtype not in KV_DTYPES:
            raise _unknown("kv_dtype", self.kv_dtype, list(KV_DTYPES))

    @property
    def runs_on(self) -> Where:
        """What computes the layers."""
        if self.tensor_parallel_size > 1:
            return "ranks"
        return "cpu" if self.device == "cpu" and self.backend is None else "gpu"

    @property
    def packing(self) -> str:
        """`weights` if they may be packed here, else ""; "auto" and AUTO_ON_GPU pack what a file
        has so."""
        if self.weights in DTYPES:
            return ""
        if self.weights != "auto":
            return self.weights
        if self.device == "cpu":
            return "auto" if self.runs_on == "cpu" else ""
        return AUTO_ON_GPU

    def under(self, policy: Policy) -> RuntimeConfig:
        """The same with another policy; without corrections where it attends to everything."""
        selects = policy.selects or isinstance(policy, Auto)
        every = self.cache_correction_every if selects else None
        return replace(self, policy=policy, cache_correction_every=every)

    def _check_weights(self) -> None:
        if self.weights not in WEIGHTS:
            raise _unknown("weights", self.weights, [*WEIGHTS])
        if self.weights in DTYPES and self.dtype not in (None, DTYPES[self.weights]):
            dtype = str(self.dtype).removeprefix("torch.")
            raise ValueError(
                f"weights={self.weights!r} contradicts dtype={dtype!r}; leave one of the two out"
            )

    def _check_host_experts(self) -> None:
        asked, hot = self.host_experts, self.hot_experts
        if hot is not None and (not isinstance(hot, int) or isinstance(hot, bool) or hot < 0):
            raise ValueError(f"hot_experts must be an integer of at least 0, got {hot!r}")
        if hot and not asked:
            raise ValueError(f"hot_experts={hot} needs host_experts, layers that they are of")
        if asked == "auto":
            return
        if not isinstance(asked, int) or isinstance(asked, bool) or asked < 0:
            raise ValueError(f"host_experts must be 'auto' or a number of layers, got {asked!r}")
        if asked and self.runs_on != "gpu":
            where = "several ranks" if self.runs_on == "ranks" else "device='cpu'"
            raise ValueError(
                f"host_experts={asked} is for one GPU beside this CPU, but the model runs on "
                f"{where}; leave it out"
            )

    def _check_correction(self) -> None:
        every = self.cache_correction_every
        if every is None:
            return
        reason = ""
        if not self.policy.selects and not isinstance(self.policy, Auto):
            reason = f"policy={self.policy.name!r} attends to everything: what it keeps is exact"
        elif self.host_bytes_per_sequence is not None:
            reason = "host_bytes_per_sequence moves tokens, which are read again where they were"
        elif self.tensor_parallel_size > 1:
            reason = f"it is for one process, but tensor_parallel_size={self.tensor_parallel_size}"
        if reason:
            raise ValueError(f"cache_correction_every={every}: {reason}; leave one of the two out")

    def _gpus(self, device: torch.device) -> range:
        """Indices of the GPUs that may have a limit."""
        if device.index is None and self.tensor_parallel_size > 1:
            return range(self.tensor_parallel_size)
        return range(device.index or 0, (device.index or 0) + 1)


def runtime_config(**options: Any) -> RuntimeConfig:
    """`RuntimeConfig` from what a user writes.

    `policy` may be a name ("auto", "full", "exact_topk", …) or a policy object, `dtype` a name,
    "auto" or a torch.dtype, `device` a string or a torch.device, `max_memory` a dict with size
    strings, `host_bytes_per_sequence` a size string, `placement` the path of a file, whose policy
    stands for "auto".

    Raises:
        ValueError: an unknown policy, dtype or device, or a value out of range.
        TypeError: an unknown option.
        NoGPUError: device="cuda" without a usable GPU.
        FileNotFoundError: no such placement file.
    """
    known = [option.name for option in dataclasses.fields(RuntimeConfig)]
    for name in options:
        if name not in known:
            raise TypeError(f"unknown option {name!r}; available: {', '.join(known)}")
    if "policy" in options:
        options["policy"] = make_policy(options["policy"])
    if "dtype" in options:
        options["dtype"] = _dtype(options["dtype"])
    if options.get("weights") in DTYPES and options.get("dtype") is None:
        options["dtype"] = DTYPES[options["weights"]]
    if "device" in options:
        options["device"] = str(options["device"])
    if str(options.get("host_experts")).isdecimal():
        options["host_experts"] = int(options["host_experts"])
    if "max_memory" in options:
        options["max_memory"] = check_max_memory(options["max_memory"])
    per_sequence = options.get("host_bytes_per_sequence")
    if per_sequence is not None:
        size = parse_size(per_sequence, name="host_bytes_per_sequence")
        options["host_bytes_per_sequence"] = size
    if isinstance(options.get("placement"), (str, Path)):
        path = options["placement"]
        options["placement"] = HeadPlacement.load(path)
        if isinstance(options.get("policy", Auto()), Auto):
            options["policy"] = planned_policy(path)
    if not isinstance(options.get("placement"), (HeadPlacement, type(None))):
        raise ValueError(
            "placement must be a HeadPlacement or the path of a plan's JSON, "
            f"got {options['placement']!r}"
        )
    return RuntimeConfig(**options)


def planned_policy(path: str | Path) -> Policy:
    """The policy that a plan's JSON names, with its budget.

    Raises:
        ValueError: it names none. FileNotFoundError: there is no such file.
    """
    document = read_json(path, "placement file")
    name = document.get("policy") if isinstance(document, dict) else None
    if not isinstance(name, str):
        raise ValueError(
            f"placement file {path} names no policy, and policy is 'auto'; give the policy that it "
            "was made for"
        )
    made, budget = make_policy(name), document.get("max_tokens")
    given = {"budget_tokens": budget} if made.selects and budget is not None else {}
    return make_policy(name, **given)


def check_backend(backend: str | None, device: torch.device) -> None:
    """Refuse a backend of decode steps that does not fit the device."""
    if backend is None:
        return
    if backend not in BACKENDS:
        raise _unknown("backend", backend, list(BACKENDS))
    if (backend == "inline") != (device.type == "cpu"):
        needed = "device='cpu'" if backend == "inline" else "device='cuda'"
        raise ValueError(f"backend={backend!r} needs {needed}, but device is {str(device)!r}")


def checked_device(name: str) -> torch.device:
    """The device of that name, if this machine has it.

    Raises:
        ValueError, NoGPUError: there is no such device.
    """
    if not re.fullmatch(r"cpu|cuda(:[0-9]{1,2})?", name):
        raise _unknown("device", name, ["cpu", "cuda", "cuda:0", "cuda:1 …"])
    device = torch.device(name)
    if device.type == "cpu":
        return device
    if not torch.cuda.is_available():
        reason = "this build of torch has no CUDA"
        if torch.version.cuda is not None:
            reason = f"torch, built for CUDA {torch.version.cuda}, finds no GPU or no driver for it"
        raise NoGPUError(f"device={name!r}: {reason}; use device='cpu'")
    if (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"device={name!r}: this machine has {torch.cuda.device_count()} GPUs, numbered from 0"
        )
    return device


def _budget_example(device: torch.device) -> str:
    if device.type == "cpu":
        return "max_memory={'cpu': ...} only"
    return f"max_memory={{{device.index or 0}: ..., 'cpu': ...}}"


def _check_share(name: str, value: object) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0.0 <= value <= 1.0:  # type: ignore[operator]
        raise ValueError(f"{name} must be a number from 0 to 1, got {value!r}")


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
