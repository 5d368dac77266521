"""What a model without lean layers will take, before anything is loaded: `offload plan` of it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from cpu_ops.worker_pool import WorkerPool
from offload.decode.latents import expanded_bytes
from offload.models.hybrid import TYPES
from offload.models.missing_features import has_alibi
from offload.planning.profile import MachineProfile
from offload.planning.workload import Workload
from offload.policies import Policy
from offload.policies.auto import Auto
from offload.policies.full import Full
from offload.runtime.auto_policy import Room, resolve_auto
from offload.runtime.config import RuntimeConfig
from offload.runtime.generic_sizes import (
    EXACT_ALIBI,
    GenericSizes,
    check_policy,
    num_pages,
    policy_bytes,
    resolve_generic,
    row_bytes,
    shape_of,
    store_and_attention,
)
from offload.runtime.module_steps import check_one_step
from offload.runtime.modules_device import PassBytes, token_bytes
from offload.system.errors import DeviceMemoryError, HostBudgetError
from offload.system.memory import HostMemory, format_bytes, host_memory

_LONGEST = 2**40  # of models without a number of positions


@dataclass(frozen=True)
class GenericPlan:
    """What a model of transformers' own modules takes, and the longest context that fits.

    Args:
        name: as the user wrote it.
        empty, kept: as `parameter_bytes` has them.
        max_context: tokens that the model has positions for; None: it has no number of them.
        config: policy, kv_dtype and page_tokens; where it runs `device` says.
        context: tokens of each sequence at its end.
        max_memory: bytes by device index or "cpu", as in `RuntimeConfig`.
        device_limit_bytes: of the GPU; None without one.
        on_this_machine: the host's memory that is not named is what this machine has left.
        profile: of the machine, for the time of a step; None: it was not measured.

    Attributes:
        policy_reason: why `auto` came to `config.policy`; "" if that was asked for.

    Raises:
        DeviceMemoryError, HostBudgetError: it does not fit the limits; names both numbers.
        NotImplementedError: the policy needs lean layers, or has nothing to select.
    """

    name: str
    empty: Any
    kept: Mapping[str, str]
    config: RuntimeConfig
    context: int
    batch_size: int
    device: str
    max_memory: Mapping[int | str, int]
    max_context: int | None
    device_limit_bytes: int | None = None
    on_this_machine: bool = True
    profile: MachineProfile | None = None
    policy_reason: str = field(default="", init=False)

    def __post_init__(self) -> None:
        check_policy(self.config, self.empty.config.to_dict())
        if self.config.kv_dtype == "int8" and self.on_gpu and not self.steps_on_gpu:
            raise NotImplementedError(
                f"kv_dtype='int8' is for a CPU where decode steps are not one graph, not with "
                f"device={self.device!r}; give --device cpu or --kv-dtype auto"
            )
        if self.max_context is not None and self.context > self.max_context:
            raise ValueError(
                f"a context of {self.context} tokens exceeds the {self.max_context} tokens of "
                f"{self.name}"
            )
        auto = self.config.policy
        if isinstance(auto, Auto):
            policy, reason = self._resolved(auto)
            object.__setattr__(self, "config", self.config.under(policy))
            object.__setattr__(self, "policy_reason", reason)
        self._check_fits()

    def _resolved(self, auto: Auto) -> tuple[Policy, str]:
        specs, work = self.sizes.specs, None
        if has_alibi(self.empty.config.to_dict()):
            return EXACT_ALIBI
        if specs:
            work = Workload(
                shape_of(specs.values()),
                auto,
                self.context,
                self.batch_size,
                self.empty.dtype,
                kv_dtype=self.config.kv_dtype,
            )
        if work is not None and self.steps_on_gpu and self.device_limit_bytes is not None:
            left = self.device_limit_bytes - self.sizes.weight_bytes - self._states_at(self.context)
            return resolve_auto(auto, work, Room(True, max(0, left), profile=self.profile))
        return resolve_generic(auto, specs, work, self.profile, on_gpu=self.on_gpu)

    @property
    def policy(self) -> Policy:
        """What decodes at the context: exact attention where `auto` has all on the GPU."""
        return Full() if self.is_resident_at(self.context) else self.config.policy

    @property
    def model_type(self) -> str:
        return str(self.empty.config.model_type)

    @cached_property
    def sizes(self) -> GenericSizes:
        return GenericSizes.of(self.empty, self.kept, on_gpu=self.on_gpu)

    @cached_property
    def _parts(self) -> tuple[Any, Any]:
        with closing(WorkerPool(1)) as pool:  # counts only
            store, attention = store_and_attention(
                self.sizes.specs,
                self.config,
                pool,
                dtype=self.empty.dtype,
                host_budget_bytes=0,
            )
            return store, attention.states.bytes

    @property
    def kv_token_bytes(self) -> int:
        """Of a token, in the store, of the layers that attend to everything; without any the store
        still counts tokens."""
        return int(self._parts[0].token_bytes)

    @cached_property
    def _pass(self) -> PassBytes:
        row = row_bytes(self._parts[0]) + expanded_bytes(self.empty)
        return PassBytes(token_bytes(self.empty), row, self.config.prefill_slice_tokens)

    def host_bytes_at(self, context: int) -> dict[str, int]:
        """By what they are for, as a generation is checked before it begins."""
        store, states = self._parts
        ends = [context] * self.batch_size
        counted = {} if self.on_gpu else {"weights": self.sizes.weight_bytes}
        if not self.is_resident_at(context):
            counted["KV cache"] = num_pages(store, ends) * store.page_bytes
        if not self.on_gpu:
            counted["windows and recurrent states"] = self._states_at(context)
        kept = 0 if self.is_resident_at(context) else policy_bytes(states, ends)
        return counted | {"kept by the policy, at its peak": kept}

    def device_bytes_at(self, context: int) -> dict[str, int]:
        """By what they are for."""
        if self.device_limit_bytes is None:
            return {}
        counted = {"weights": self.sizes.weight_bytes}
        states, is_resident = self._states_at(context), self.is_resident_at(context)
        counted["windows and recurrent states"] = states
        left = self.device_limit_bytes - self.sizes.weight_bytes
        n = self._pass.slice_tokens(self.batch_size, context, states, left)
        if is_resident:
            counted["KV cache"] = self._resident_at(context) - states
            n = self.config.prefill_slice_tokens
        of_pass = self._pass.need(self.batch_size, min(n, context), context, 0)
        return counted | {f"reading {min(n, context):,} tokens at a time": of_pass}

    def is_resident_at(self, context: int) -> bool:
        """Whether `generate()` keeps keys and values on the GPU."""
        attends_to_all = bool(self.policy_reason) or not self.config.policy.selects
        attends_to_all &= not self.steps_on_gpu
        if self.device_limit_bytes is None or not attends_to_all or not self.sizes.specs:
            return False
        resident = self._resident_at(context)
        need = self._pass.resident_need(self.batch_size, context, resident)
        return need + self.sizes.weight_bytes <= self.device_limit_bytes

    def _states_at(self, context: int) -> int:
        return self.batch_size * self.sizes.states.at(context)

    def _resident_at(self, context: int) -> int:
        return self.batch_size * self.sizes.all_states.at(context)

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"

    @property
    def steps_on_gpu(self) -> bool:
        """Whether steps are a GPU's as of lean layers: keys and values are on the host, and as many
        as there is room for on the GPU, too."""
        return self.on_gpu and (self.model_type in TYPES or self._may_be_one_step)

    @cached_property
    def _may_be_one_step(self) -> bool:
        """Whether the modules may be captured; loading tries it."""
        try:
            check_one_step(self.empty, self.sizes.specs)
        except NotImplementedError:
            return False
        return True

    @cached_property
    def host_memory(self) -> HostMemory | None:
        """Where the host's limit comes from it."""
        is_named = "cpu" in self.max_memory or not self.on_this_machine
        return None if is_named else host_memory()

    @property
    def host_limit_bytes(self) -> int | None:
        """For what `host_bytes_at` counts; None: it is not known."""
        if self.host_memory is not None:
            return self.host_memory.model_bytes()
        return self.max_memory.get("cpu")

    @cached_property
    def largest_context(self) -> int | None:
        """Tokens of each sequence that fit all limits; 0: none do. None: nothing limits them."""
        if self.host_limit_bytes is None and self.max_context is None:
            return None
        lengths = range(1, (self.max_context or _LONGEST) + 1)
        return bisect_left(lengths, True, key=lambda context: bool(self._refusal(context)))

    def _refusal(self, context: int) -> tuple[type[Exception], str] | None:
        """Why a context does not fit."""
        of_host = sum(self.host_bytes_at(context).values())
        of_device = sum(self.device_bytes_at(context).values())
        what = f"{self.name} with {self.batch_size} x {context:,} tokens needs"
        limit = self.device_limit_bytes
        if limit is not None and of_device > limit:
            where = f"max_memory[{torch.device(self.device).index or 0}]"
            return DeviceMemoryError, (
                f"{what} {format_bytes(of_device)} on {self.device} "
                f"({format_bytes(self.sizes.weight_bytes)} of it for weights), but {where} is "
                f"{format_bytes(limit)}"
            )
        limit = self.host_limit_bytes
        if limit is not None and of_host > limit:
            named = "max_memory['cpu'] is" if "cpu" in self.max_memory else "this process may use"
            return HostBudgetError, (
                f"{what} {format_bytes(of_host)} of host memory, but {named} {format_bytes(limit)}"
            )
        return None

    def _check_fits(self) -> None:
        found = self._refusal(self.context)
        if found is not None and (found[0] is DeviceMemoryError or "cpu" in self.max_memory):
            options = "raise max_memory, or lower the batch size or the context"
            raise found[0](f"{found[1]}: {self._fitting()}; {options}")

    def _fitting(self) -> str:
        longest = self.largest_context
        return f"at most {longest:,} tokens fit" if longest else "no context fits"

    @property
    def notes(self) -> list[str]:
        """What a user should know in addition to the numbers."""
        found, notes = self._refusal(self.context), list[str]()
        if found is not None:
            notes.append(f"{found[1]}: {self._fitting()}")
        if self.is_resident_at(self.context):
            in_store = num_pages(self._parts[0], [self.context] * self.batch_size)
            notes.append(
                "generate() keeps keys and values on the GPU, where they fit; the engine and "
                f"`offload serve` keep them on the host: "
                f"{format_bytes(in_store * self._parts[0].page_bytes)}"
            )
        if self.steps_on_gpu:
            once = "" if self.model_type in TYPES else ", if its modules can be one CUDA graph"
            notes.append(
                f"what the GPU has left takes keys and values, all or what is chosen{once}"
            )
        if self.least_milliseconds is None:
            notes.append(
                "no time of a step: this machine was not measured; `offload plan llama-3.1-8b` "
                "measures it, or give --profile"
            )
        return notes

    @cached_property
    def least_milliseconds(self) -> float | None:
        """A decode step takes at least so long: what it reads, over the bandwidth of the memory
        where that is; of experts as many as one token meets. None: it is not known."""
        profile = self.profile
        if profile is None or (self.on_gpu and profile.device is None):
            return None
        policy, most = self.policy, self.context
        if policy.selects and most > policy.dense_tokens:
            most = min(most, policy.budget_tokens)
        modules = self.sizes.active_bytes + self._states_at(self.context)
        keys = self.batch_size * most * self.kv_token_bytes * bool(self.sizes.specs)
        seconds = keys / profile.read_bandwidth
        if profile.device is None or not self.on_gpu:
            return 1e3 * (seconds + modules / profile.read_bandwidth)
        if self.is_resident_at(self.context) or self.steps_on_gpu:
            seconds = keys / profile.device.read_bandwidth
        return 1e3 * (seconds + modules / profile.device.read_bandwidth)

    def as_json(self) -> dict[str, Any]:
        """Plain values, by the names that the plan of a model with lean layers has, and more."""
        policy, profile = self.policy, self.profile
        host, on_device = self.host_bytes_at(self.context), self.device_bytes_at(self.context)
        least = self.least_milliseconds
        return {
            "model": self.name,
            "model_type": self.model_type,
            "dtype": str(self.empty.dtype).removeprefix("torch."),
            "weights": "auto",
            "kv_dtype": self.config.kv_dtype,
            "policy": policy.name,
            "max_tokens": policy.budget_tokens if policy.selects else None,
            "context": self.context,
            "largest_context": self.largest_context,
            "batch_size": self.batch_size,
            "device": self.device,
            "machine": None if profile is None else profile.key,
            "kv_bytes_per_token": self.kv_token_bytes,
            "active_weight_bytes": self.sizes.active_bytes,
            "device_bytes": on_device,
            "device_total_bytes": sum(on_device.values()),
            "device_limit_bytes": self.device_limit_bytes,
            "host_bytes": host,
            "host_total_bytes": sum(host.values()),
            "host_limit_bytes": self.host_limit_bytes,
            "host_memory": None if self.host_memory is None else self.host_memory.explained(),
            "milliseconds_per_step": None,
            "least_milliseconds_per_step": least,
            "most_tokens_per_second": None if not least else 1e3 * self.batch_size / least,
            "notes": self.notes,
        }
