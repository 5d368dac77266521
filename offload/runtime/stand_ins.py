"""Kernels in the place of stock modules while a decode step is captured: RMSNorms, of which torch
launches seven kernels each, and experts, whose chosen weights it copies before it multiplies.

A norm is known by its numbers: what it gives for random rows says which of the rules that the
kernel has it follows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.integrations import moe

from gpu_ops.rms_norm import rms_norm, rms_norm_by_torch
from gpu_ops.routed_linear import GpuExperts, run_experts
from offload.models.packed_experts import native_gate

EXPERTS = "offload_step"  # the name of `_run_experts` in transformers
_MOST_ROWS = 16  # of `run_experts` at a time
_RULES: list[dict[str, Any]] = [
    {"offset": offset, "rounds": rounds} for offset in (0, 1) for rounds in (True, False)
]
_GATES = {"gelu_pytorch_tanh": "gelu_tanh", "relu2": "relu2"}


class StandIns:
    """Those of a stock model's modules, on its device."""

    def __init__(self, stock: nn.Module) -> None:
        moe.ALL_EXPERTS_FUNCTIONS.register(EXPERTS, _run_experts)
        self._norms: list[tuple[nn.Module, Callable[[Tensor], Tensor]]] = []
        rules: dict[Any, dict[str, Any] | None] = {}
        dtype = next((x.dtype for x in stock.parameters()), torch.float32)
        dtype = getattr(stock, "dtype", dtype)  # of what they get, whatever their weights have
        # Elsewhere torch sorts tokens by experts on the host, for which no graph waits.
        x = next(stock.parameters(), torch.empty(0))
        has_cores = x.is_cuda and torch.cuda.get_device_capability(x.device)[0] == 9
        self._sorts_by_experts = has_cores and x.dtype == torch.bfloat16
        for module in stock.modules():
            name, weight = type(module).__name__, getattr(module, "weight", None)
            eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
            if "RMSNorm" not in name or eps is None or "forward" in vars(module):
                continue
            key = type(module), eps, None if weight is None else (weight.dtype, weight.shape)
            if key not in rules:
                rules[key] = None
                with suppress(RuntimeError):  # it takes other rows
                    rules[key] = _rule_of(module, float(eps), dtype)
            rule = rules[key]
            if rule is not None:
                self._norms.append((module, partial(_normed, weight, float(eps), rule)))
        configs = {id(x.config): x.config for x in stock.modules() if hasattr(x, "config")}
        self._configs = [x for x in configs.values() if hasattr(x, "_experts_implementation")]

    @contextmanager
    def of_rows(self, n: int) -> Iterator[None]:
        """Inside, a pass of n tokens launches them."""
        before = [config._experts_implementation for config in self._configs]
        is_few = n <= _MOST_ROWS or not self._sorts_by_experts
        try:
            for config in self._configs if is_few else ():
                config._experts_implementation = EXPERTS
            for module, forward in self._norms:
                vars(module)["forward"] = forward
            yield
        finally:
            for config, kept in zip(self._configs, before, strict=True):
                config._experts_implementation = kept
            for module, _ in self._norms:
                vars(module).pop("forward", None)


def _normed(weight: Tensor | None, eps: float, rule: dict[str, Any], x: Tensor) -> Tensor:
    return rms_norm(x, weight, eps, **rule)


def _rule_of(module: Any, eps: float, dtype: torch.dtype) -> dict[str, Any] | None:
    """Options of `rms_norm` with which it gives what the module does; None: there are none."""
    weight = getattr(module, "weight", None)
    names = [name for name, _ in module.named_parameters()]
    if names not in ([], ["weight"]) or len(signature(module.forward).parameters) != 1:
        return None
    width = getattr(module, "normalized_shape", [64])[-1]
    like = next(module.parameters(), torch.empty(width))
    rows = torch.randn(4, like.shape[-1], generator=torch.Generator().manual_seed(0))
    rows[1] *= eps**0.5  # which says where eps comes in
    x = rows.to(like.device, dtype)
    with torch.no_grad():
        expected = module(x)
        if expected.dtype != x.dtype or expected.shape != x.shape:
            return None
        found = [
            (rms_norm_by_torch(x, weight, eps, **rule) - expected).abs().max() for rule in _RULES
        ]
    best = min(range(len(_RULES)), key=lambda i: float(found[i]))
    limit = 2 * torch.finfo(x.dtype).eps * float(expected.abs().max())
    return _RULES[best] if float(found[best]) <= limit else None


def _run_experts(module: Any, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    """As transformers calls it: x [n, hidden_size], experts and weights [n, k]."""
    gate = _gate_of(module)
    if gate is None:
        found: Tensor = moe.batched_mm_experts_forward(module, x, experts, weights)
        return found
    weight = (module.gate_up_proj if module.has_gate else module.up_proj).detach()
    up, down = GpuExperts(weight, len(weight), gate=gate), module.down_proj.detach()
    chosen = x.contiguous(), experts.contiguous(), weights.float().contiguous()
    parts = zip(*(torch.split(rows, _MOST_ROWS) for rows in chosen), strict=True)
    return torch.cat([run_experts(up, GpuExperts(down, len(down)), *part) for part in parts])


def _gate_of(module: Any) -> str | None:
    """A kind of `GpuExperts`; None: transformers computes the module."""
    others = module.has_bias, module.is_transposed, getattr(module, "has_post_expert_norm", False)
    if any(others) or not module.is_concatenated or not module.down_proj.is_contiguous():
        return None
    if module.has_gate and type(module)._apply_gate is not moe._default_apply_gate:
        return None
    if module.has_gate and (known := native_gate(module)) is not None:
        return known.kind
    kinds = [kind for name, kind in _GATES.items() if type(module.act_fn) is type(ACT2FN[name])]
    return next((kind for kind in kinds if (kind == "relu2") != module.has_gate), None)
