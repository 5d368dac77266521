"""An MLP of experts for the few rows of a decode step: each row meets those that it is routed to.

Three kernels behind the router's product: the choice; gate and up of each pair of a row and an
expert; and down, in which a program goes through the experts of its row, so that their weighted sum
and the residual stay in registers. Only chosen experts are read, and the host needs not know which.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gpu_ops.checks import check_dtype, check_reachable, check_tensor
from gpu_ops.gemv import glu, row_products
from gpu_ops.gemv import launch_shape as dense_shape
from gpu_ops.launch import interprets, jit, next_power_of_2, runs_kernel, tl
from gpu_ops.linear import GpuLinear
from gpu_ops.packed_linear import (
    PackedRows,
    launch_shape,
    packed_products,
    quantise_rows,
    unpack,
)
from gpu_ops.rms_norm import rms_norm_reference
from gpu_ops.silu_mul import gate_reference

Norm = tuple[Tensor, float]

# Measured with 8 of 128 experts of 768 on an H200: 25.7 us dense (4 outputs: 29.7), 16.4 in q4 by
# one warp (21.0 by four).
_OUTPUTS = 2  # of a program, dense
_FEW_GROUPS = 128


@jit
def choose_experts_kernel(
    logits: tl.tensor,
    experts: tl.tensor,
    weights: tl.tensor,
    NUM_EXPERTS: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    NORMALISES: tl.constexpr,
    ROUNDS: tl.constexpr,
    BLOCK: tl.constexpr,
    PLACES: tl.constexpr,
) -> None:
    """One program per row."""
    row = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK)
    x = tl.load(logits + row * NUM_EXPERTS + e, mask=e < NUM_EXPERTS, other=-float("inf"))
    dtype = x.dtype
    x = x.to(tl.float32)
    left = tl.exp(x - tl.max(x, 0))
    total = tl.sum(left, 0)
    left /= total
    place = tl.arange(0, PLACES)
    chosen = tl.zeros((PLACES,), tl.int32)
    weight = tl.zeros((PLACES,), tl.float32)
    for i in tl.static_range(PER_TOKEN):
        best = tl.max(left, 0)
        first = tl.min(tl.where(left == best, e, NUM_EXPERTS - 1), 0)  # any, where it is NaN
        chosen = tl.where(place == i, first, chosen)
        weight = tl.where(place == i, best, weight)
        left = tl.where(e == first, -1.0, left)
    if NORMALISES:
        weight /= tl.sum(weight, 0)
    if ROUNDS:
        weight = weight.to(dtype).to(tl.float32)
    at = row * PER_TOKEN + place
    tl.store(experts + at, chosen, mask=place < PER_TOKEN)
    tl.store(weights + at, weight + total * 0.0, mask=place < PER_TOKEN)  # NaN, where it is that


@jit
def _clamped_glu(
    gate: tl.tensor, up: tl.tensor, alpha: tl.tensor, limit: tl.tensor, dtype: tl.constexpr
) -> tl.tensor:
    """(up + 1) * gate * sigmoid(alpha * gate) of clamped float32; NaN stays NaN."""
    gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    return ((up + 1.0) * (gate / (1.0 + tl.exp(-alpha * gate)))).to(dtype)


@jit
def _relu2(x: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """relu(x)**2 of float32, rounded before and after; NaN stays NaN."""
    x = x.to(dtype).to(tl.float32)
    x = tl.where(x < 0.0, 0.0, x)
    return (x * x).to(dtype)


@jit
def _expert_products(
    x: tl.tensor,
    x_scales: tl.tensor,
    x_sums: tl.tensor,
    norm_weight: tl.tensor,
    eps: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    row: tl.tensor,
    n: tl.tensor,
    inside_n: tl.tensor,
    up_rows: tl.tensor,
    dtype: tl.constexpr,
    K: tl.constexpr,
    FORMAT: tl.constexpr,
    GLU: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_X: tl.constexpr,
    DP4A: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Products of a row of x and rows n of the weight, and with GLU of rows n + up_rows: float32
    [BLOCK_N] each. Of packed weights K and BLOCK_K count groups, and x is on a grid."""
    if FORMAT == "dense":
        y, up = row_products(
            x + row * K, codes, norm_weight, eps, n, inside_n, up_rows, dtype,
            K, GLU, BLOCK_N, BLOCK_K, BLOCK_X,
        )  # fmt: skip
    else:
        x += row * K * 8
        x_scales += row * K
        x_sums += row * K
        y = packed_products(
            codes, scales, x, x_scales, x_sums, n, inside_n, K, FORMAT, BLOCK_N, BLOCK_K, DP4A
        )
        up = y
        if GLU:
            up = packed_products(
                codes, scales, x, x_scales, x_sums, n + up_rows, inside_n,
                K, FORMAT, BLOCK_N, BLOCK_K, DP4A,
            )  # fmt: skip
    return y, up


@jit
def routed_up_kernel(
    x: tl.tensor,
    x_scales: tl.tensor,  # None: weights are not packed; so with the next, and with `scales`
    x_sums: tl.tensor,
    norm_weight: tl.tensor,  # None: no norm
    eps: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    bias: tl.tensor,  # None: there is none
    experts: tl.tensor,
    out: tl.tensor,
    alpha: tl.tensor,
    limit: tl.tensor,
    num_out: tl.tensor,
    num_pairs: tl.tensor,
    NUM_EXPERTS: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    K: tl.constexpr,
    FORMAT: tl.constexpr,
    GATE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_X: tl.constexpr,
    DP4A: tl.constexpr,
) -> None:
    """One program per pair of a row and an expert, and BLOCK_N outputs of the gate; gate and up of
    one are neighbours where GATE is "clamped", else in halves; of "relu2" there is no up."""
    CLAMPED: tl.constexpr = GATE == "clamped"
    HALVES: tl.constexpr = 1 if GATE == "relu2" else 2
    dtype = out.dtype.element_ty
    pair = (tl.program_id(0) % num_pairs).to(tl.int64)
    n = (tl.program_id(0) // num_pairs).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside_n = n < num_out
    expert = tl.minimum(tl.load(experts + pair).to(tl.int64), NUM_EXPERTS - 1)
    of_expert = expert * num_out * HALVES + (n * 2 if CLAMPED else n)
    up_rows = num_out * 0 + 1 if CLAMPED else num_out
    y, up = _expert_products(
        x, x_scales, x_sums, norm_weight, eps, codes, scales, pair // PER_TOKEN, of_expert,
        inside_n, up_rows, dtype, K, FORMAT, HALVES == 2, BLOCK_N, BLOCK_K, BLOCK_X, DP4A,
    )  # fmt: skip
    if bias is not None:
        y += tl.load(bias + of_expert, mask=inside_n, other=0.0).to(tl.float32)
        if HALVES == 2:
            up += tl.load(bias + of_expert + up_rows, mask=inside_n, other=0.0).to(tl.float32)
    if CLAMPED:
        y = _clamped_glu(y, up, alpha, limit, dtype)
    elif HALVES == 2:
        y = glu(y, up, GATE == "gelu_tanh", dtype)
    else:
        y = _relu2(y, dtype)
    tl.store(out + pair * num_out + n, y, mask=inside_n)


@jit
def routed_down_kernel(
    x: tl.tensor,
    x_scales: tl.tensor,  # None: weights are not packed; so with the next, and with `scales`
    x_sums: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    bias: tl.tensor,  # None: there is none; so with `residual`
    experts: tl.tensor,
    weights: tl.tensor,
    residual: tl.tensor,
    out: tl.tensor,
    num_out: tl.tensor,
    num_rows: tl.tensor,
    NUM_EXPERTS: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    K: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DP4A: tl.constexpr,
) -> None:
    """One program per row and BLOCK_N outputs, the weighted sum over the row's experts."""
    dtype = out.dtype.element_ty
    row = (tl.program_id(0) % num_rows).to(tl.int64)
    n = (tl.program_id(0) // num_rows).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside_n = n < num_out
    total = tl.zeros((BLOCK_N,), tl.float32)
    for i in range(PER_TOKEN):
        pair = row * PER_TOKEN + i
        expert = tl.load(experts + pair).to(tl.int64)
        of_expert = n + tl.minimum(expert, NUM_EXPERTS - 1) * num_out
        y, _ = _expert_products(
            x, x_scales, x_sums, None, 0.0, codes, scales, pair, of_expert,
            inside_n, num_out, dtype, K, FORMAT, False, BLOCK_N, BLOCK_K, BLOCK_K, DP4A,
        )  # fmt: skip
        if bias is not None:
            at = expert * num_out + n
            y += tl.load(bias + at, mask=inside_n & (expert < NUM_EXPERTS), other=0.0).to(
                tl.float32
            )
        of_pair = y.to(dtype).to(tl.float32) * tl.load(weights + pair)
        total += tl.where(expert < NUM_EXPERTS, of_pair, 0.0)
    y = total.to(dtype)
    at = row * num_out + n
    if residual is not None:
        added = tl.load(residual + at, mask=inside_n, other=0.0).to(tl.float32)
        y = (y.to(tl.float32) + added).to(dtype)
    tl.store(out + at, y, mask=inside_n)


@jit
def split_experts_kernel(
    experts: tl.tensor,
    weights: tl.tensor,
    slot_of: tl.tensor,
    positions: tl.tensor,
    use: tl.tensor,
    slots: tl.tensor,
    host_experts: tl.tensor,
    host_weights: tl.tensor,
    NUM_EXPERTS: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    PLACES: tl.constexpr,
) -> None:
    """One program per row."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, PLACES)
    inside = place < PER_TOKEN
    at = row * PER_TOKEN + place
    expert = tl.load(experts + at, mask=inside, other=0)
    slot = tl.load(slot_of + expert, mask=inside, other=0)
    tl.store(slots + at, tl.where(slot < 0, NUM_EXPERTS, slot), mask=inside)
    tl.store(host_experts + at, tl.where(slot < 0, expert, NUM_EXPERTS).to(tl.int64), mask=inside)
    tl.store(host_weights + at, tl.load(weights + at, mask=inside, other=0.0), mask=inside)
    counts = inside & (tl.load(positions + row) >= 0)
    tl.atomic_add(use + expert, tl.where(counts, 1.0, 0.0), mask=counts)


class GpuExperts:
    """The matrices of one projection of all experts, one expert after the other.

    Args:
        weight: [num_experts, out_features, in_features], or packed [num_experts * out_features,
            in_features]; kept by reference.
        bias: [num_experts, out_features] or None.
        clamp: (alpha, limit) of a gate (up + 1) * gate * sigmoid(alpha * gate) of gates in the even
            outputs, at most `limit`, and up in the odd ones, between -limit and limit; None: there
            is none. Of gate and up alone.
        gate: what else becomes of their outputs: silu or gelu_tanh(first half) * second half, or of
            all relu(x)**2 ("relu2").
    """

    def __init__(
        self,
        weight: Tensor | PackedRows,
        num_experts: int,
        bias: Tensor | None = None,
        clamp: tuple[float, float] | None = None,
        gate: str = "silu",
    ) -> None:
        if gate not in ("silu", "gelu_tanh", "relu2"):
            raise ValueError(f"gate must be silu, gelu_tanh or relu2, got {gate!r}")
        self.num_experts, self._packed = num_experts, None
        self.bias, self.clamp, self.kind = bias, clamp, gate
        if isinstance(weight, PackedRows):
            self._packed, self.in_features = weight, weight.in_features
            self.out_features = weight.num_out // num_experts
            self.device, self.num_bytes = weight.codes.device, weight.num_bytes
        else:
            self._dense = weight
            self.out_features, self.in_features = weight.shape[1:]
            self.device, self.num_bytes = weight.device, weight.nbytes

    def reads(self, codes: Tensor) -> bool:
        """Whether these are its packed ones."""
        return self._packed is not None and self._packed.codes.data_ptr() == codes.data_ptr()

    def first(self, num_experts: int, device: torch.device) -> GpuExperts:
        """A copy of the first ones, on a device."""
        matrices, bias = self._by_expert(num_experts)
        copies = [x.to(device, copy=True) for x in matrices]
        weight: Tensor | PackedRows
        if self._packed is None:
            (weight,) = copies
        else:
            codes, numbers = (x.flatten(0, 1) for x in copies)
            weight = replace(self._packed, codes=codes, numbers=numbers)
        bias = None if bias is None else bias.to(device, copy=True)
        return GpuExperts(weight, num_experts, bias, self.clamp, self.kind)

    def put(self, expert: int, source: GpuExperts, number: int) -> None:
        """One of these becomes another's `number`, in the current stream: one of the same
        matrices, on any device."""
        (own, bias), (others, other_bias) = self._by_expert(), source._by_expert()
        for to, x in zip(own, others, strict=True):
            to[expert].copy_(x[number], non_blocking=True)
        if bias is not None and other_bias is not None:
            bias[expert].copy_(other_bias[number], non_blocking=True)

    def _by_expert(self, count: int | None = None) -> tuple[list[Tensor], Tensor | None]:
        """The weight, or its codes and numbers, [num_experts, out_features, ...] of the first
        ones, and their bias."""
        bias = None if self.bias is None else self.bias[:count]
        if self._packed is None:
            return [self._dense[:count]], bias
        both = self._packed.codes, self._packed.numbers
        return [x.view(self.num_experts, -1, *x.shape[1:])[:count] for x in both], bias

    @property
    def format(self) -> str:
        return "dense" if self._packed is None else self._packed.format

    def read(self, x: Tensor, norm: Norm | None) -> tuple[list[Tensor | None], Norm]:
        """Rows as the kernels read them: x, or its codes, scales and sums; and the norm that is
        left to do."""
        nothing: Any = (None, 0.0)
        if self._packed is None:
            return [x, None, None], nothing if norm is None else norm
        codes, scales, sums = quantise_rows(x, norm)
        return [codes.view(torch.int32), scales, sums], nothing

    @property
    def operands(self) -> tuple[Tensor, Tensor | None]:
        """The weight, and the scales of its groups."""
        if self._packed is None:
            return self._dense, None
        return self._packed.words, self._packed.scales

    def shape(self, *, glu: bool) -> tuple[int, int, int, int]:
        """K, BLOCK_N, BLOCK_K and warps of a program."""
        if self._packed is None:
            _, block_k, warps = dense_shape(self.in_features, self._dense.element_size(), glu=glu)
            return self.in_features, _OUTPUTS, block_k, warps
        groups = self._packed.num_groups
        if groups <= _FEW_GROUPS:
            return groups, 1, min(32, next_power_of_2(groups)), 1
        return groups, *launch_shape(groups, self.format)

    def multiply(self, x: Tensor, expert: int) -> Tensor:
        """x [n, in_features] through one expert's matrix, unpacked, on x's device."""
        bias = None if self.bias is None else self.bias[expert].to(x.device)
        if self._packed is None:
            weight = self._dense[expert].to(x.device, non_blocking=True)
            return functional.linear(x, weight, bias)
        first = expert * self.out_features
        part = self._packed.part(first, first + self.out_features).to(x.device)
        weight = unpack(part, x.dtype)
        return functional.linear(x, weight, bias)

    @property
    def inner_features(self) -> int:
        """What is left of `out_features` behind the gate."""
        return self.out_features // (1 if self.kind == "relu2" else 2)

    def gate(self, y: Tensor) -> Tensor:
        """What becomes of outputs of gate and up."""
        if self.clamp is not None:
            alpha, limit = self.clamp
            gate, up = y[..., ::2].clamp(max=limit), y[..., 1::2].clamp(-limit, limit)
            return (up + 1) * (gate * torch.sigmoid(alpha * gate))
        if self.kind == "relu2":
            return functional.relu(y).square()
        gate, up = y.chunk(2, -1)
        return gate_reference(gate, self.kind) * up


def run_experts(
    up: GpuExperts,
    down: GpuExperts,
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    out: Tensor | None = None,
    *,
    norm: Norm | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """The sum of weights[:, j] * down(gate(up)) of experts[:, j] and f(x), + residual.

    Args:
        up: hidden_size -> gate above up, or one of them. down: back to hidden_size.
        x: [n, hidden_size], a few rows.
        experts: int32 or int64 [n, k]; num_experts or more stands for none.
        weights: float32 [n, k].
        out: [n, hidden_size], made if None; may be `residual` itself.
        norm: (weight, eps) of an RMSNorm f of x.
        residual: added last.
    """
    check_dtype("x", x)
    n, k = experts.shape
    hidden, device, dtype = up.in_features, up.device, x.dtype
    out = torch.empty_like(x) if out is None else out
    for name, rows in (("x", x), ("out", out), ("residual", residual)):
        if rows is not None:
            check_tensor(name, rows, (n, hidden), dtype, device)
    check_tensor("experts", experts, (n, k), experts.dtype, device)
    check_tensor("weights", weights, (n, k), torch.float32, device)
    if not runs_kernel(x):
        x = x if norm is None else rms_norm_reference(x, *norm)
        summed = run_experts_reference(up, down, x, experts, weights)
        return out.copy_(summed if residual is None else summed + residual)
    pairs, dp4a = n * k, not interprets()
    read, (norm_weight, eps) = up.read(x, norm)
    inner = x.new_empty(pairs, up.inner_features)
    kind = up.kind if up.clamp is None else "clamped"
    size, block_n, block_k, warps = up.shape(glu=kind != "relu2")
    routed_up_kernel[(pairs * -(-inner.shape[1] // block_n),)](
        *read, norm_weight, eps, *up.operands, up.bias, experts, inner, *(up.clamp or (0.0, 0.0)),
        inner.shape[1], pairs, up.num_experts, k, size, up.format, kind, block_n, block_k,
        next_power_of_2(hidden), dp4a, num_warps=warps,
    )  # fmt: skip
    read, _ = down.read(inner, None)
    size, block_n, block_k, warps = down.shape(glu=False)
    routed_down_kernel[(n * -(-hidden // block_n),)](
        *read, *down.operands, down.bias, experts, weights, residual, out, hidden, n,
        up.num_experts, k, size, down.format, block_n, block_k, dp4a, num_warps=warps,
    )  # fmt: skip
    return out


def run_experts_reference(
    up: GpuExperts, down: GpuExperts, x: Tensor, experts: Tensor, weights: Tensor
) -> Tensor:
    """The sum by torch, one expert after the other."""
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in sorted({*experts.flatten().tolist()}):
        if expert >= up.num_experts:
            continue
        rows, places = torch.where(experts == expert)
        found = down.multiply(up.gate(up.multiply(x[rows], expert)), expert)
        total.index_add_(0, rows, found.float() * weights[rows, places, None])
    return total.to(x.dtype)


def split_experts(
    experts: Tensor,
    weights: Tensor,
    slot_of: Tensor,
    positions: Tensor,
    use: Tensor,
    host_experts: Tensor,
    host_weights: Tensor,
) -> Tensor:
    """The slots of chosen experts that have one, and what is left to the host.

    Args:
        experts, weights: of `GpuRoutedMlp.choose`, [n, k].
        slot_of: int32 [num_experts]; -1: the host alone has it.
        positions: int64 [n]; below 0: the row is not in use.
        use: float32 [num_experts], to which the choices of rows in use are added.
        host_experts, host_weights: out, int64 and float32 [n, k], also in pinned host memory; an
            expert that has a slot becomes num_experts.

    Returns:
        int32 [n, k], num_experts for one that has none.
    """
    (n, k), (num_experts,), device = experts.shape, slot_of.shape, experts.device
    check_tensor("experts", experts, (n, k), torch.int32, device)
    check_tensor("weights", weights, (n, k), torch.float32, device)
    check_tensor("slot_of", slot_of, (num_experts,), torch.int32, device)
    check_tensor("positions", positions, (n,), torch.int64, device)
    check_tensor("use", use, (num_experts,), torch.float32, device)
    check_reachable("host_experts", host_experts, (n, k), torch.int64, device)
    check_reachable("host_weights", host_weights, (n, k), torch.float32, device)
    if not runs_kernel(experts):
        slots = slot_of[experts.long()]
        has_slot = slots >= 0
        host_experts.copy_(torch.where(has_slot, num_experts, experts))
        host_weights.copy_(weights)
        in_use = (positions >= 0).float()[:, None].expand(n, k)
        use.index_add_(0, experts.flatten().long(), in_use.flatten())
        return torch.where(has_slot, slots, num_experts)
    slots = torch.empty_like(experts)
    split_experts_kernel[(n,)](
        experts, weights, slot_of, positions, use, slots, host_experts, host_weights,
        num_experts, k, next_power_of_2(k), num_warps=1,
    )  # fmt: skip
    return slots


@dataclass(frozen=True, eq=False)
class SharedExpert:
    """An MLP that all rows meet, times the sigmoid of a gate: hidden_size -> 1."""

    gate: GpuLinear
    gate_up: GpuLinear
    down: GpuLinear

    def __call__(self, x: Tensor, norm: Norm | None) -> Tensor:
        share = self.gate(x, norm=norm).sigmoid_()
        return self.down(self.gate_up(x, norm=norm, glu=True)).mul_(share)


@dataclass(frozen=True, eq=False)
class GpuRoutedMlp:
    """Experts, and the router that chooses them.

    Attributes:
        router: hidden_size -> num_experts.
        up, down: as `run_experts` takes them.
        per_token, normalises, rounds: as `cpu_ops.routed_linear.ExpertChoice`.
        shared: what is added; None: nothing.
    """

    router: GpuLinear
    up: GpuExperts
    down: GpuExperts
    per_token: int
    normalises: bool
    rounds: bool
    shared: SharedExpert | None = None

    @property
    def num_bytes(self) -> int:
        """Of the weights that one row reads."""
        of_experts = self.up.num_bytes + self.down.num_bytes
        return self.router.num_bytes + of_experts * self.per_token // self.up.num_experts

    def __call__(
        self,
        x: Tensor,
        out: Tensor | None = None,
        *,
        norm: Norm | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """`run_experts` of the chosen ones."""
        shared = None if self.shared is None else self.shared(x, norm)  # `out` may be x
        choice = self.choose(self.router(x, norm=norm))
        found = run_experts(self.up, self.down, x, *choice, out, norm=norm, residual=residual)
        return found if shared is None else found.add_(shared)

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """logits [n, num_experts] -> experts, int32 [n, per_token], and weights, float32 likewise.

        Those of the highest probabilities, of equals the first.
        """
        num_rows, num_experts = logits.shape
        if not runs_kernel(logits):
            found = logits.softmax(-1, dtype=torch.float32).sort(
                dim=-1, descending=True, stable=True
            )
            weights, experts = (y[:, : self.per_token].contiguous() for y in found)
            if self.normalises:
                weights /= weights.sum(-1, keepdim=True)
            if self.rounds:
                weights = weights.to(logits.dtype).float()
            return experts.int(), weights
        experts = logits.new_empty(num_rows, self.per_token, dtype=torch.int32)
        weights = logits.new_empty(num_rows, self.per_token, dtype=torch.float32)
        choose_experts_kernel[(num_rows,)](
            logits, experts, weights, num_experts, self.per_token, self.normalises, self.rounds,
            next_power_of_2(num_experts), next_power_of_2(self.per_token), num_warps=1,
        )  # fmt: skip
        return experts, weights
