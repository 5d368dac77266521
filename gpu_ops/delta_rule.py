"""A decode step of the gated delta rule (Gated DeltaNet, arXiv 2412.06464) on the GPU, from the
projections of a token to what the output projection reads.

The states of a sequence lie anywhere in the GPU's memory; the kernels get their addresses. A kernel
computes the convolution, a second one the rest: each of its programs holds the state of a value
head, so that it is read once and written once, and can normalise the head's output.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from gpu_ops.checks import check_dtype, check_tensor
from gpu_ops.cpu_pages import page_at
from gpu_ops.early_launch import await_inputs, can_launch_early, early_option
from gpu_ops.launch import jit, next_power_of_2, runs_kernel, tl
from gpu_ops.rms_norm import rms_norm_reference
from gpu_ops.silu_mul import activated

_CHANNELS = 128  # of a program of the convolution
_ELEMENTS_PER_THREAD = 64  # of a state
_MAX_REGISTERS = 128  # of a thread: a multiprocessor has two programs of 8 warps
_UNIT_EPS = 1e-6  # of the squared length of queries and keys

Place = tuple[int, int]  # in a row of projections: first element, and from key head to next


class Heads(Protocol):
    """What `cpu_ops.delta_rule.DeltaHeads` says."""

    @property
    def num_k_heads(self) -> int: ...
    @property
    def num_v_heads(self) -> int: ...
    @property
    def k_dim(self) -> int: ...
    @property
    def v_dim(self) -> int: ...
    @property
    def channels(self) -> int: ...
    @property
    def row_size(self) -> int: ...
    def places(self, *, by_key_head: bool) -> tuple[Place, ...]: ...


@jit
def delta_conv_kernel(
    projected: tl.tensor,
    addresses: tl.tensor,  # of each row's conv_state, or 0
    conv: tl.tensor,
    mixed: tl.tensor,
    row_stride: tl.tensor,
    NUM_K_HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    QUERY_FIRST: tl.constexpr,
    QUERY_STRIDE: tl.constexpr,
    KEY_FIRST: tl.constexpr,
    KEY_STRIDE: tl.constexpr,
    VALUE_FIRST: tl.constexpr,
    VALUE_STRIDE: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_T: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """mixed <- silu(convolution); one program per block of channels and row."""
    await_inputs(EARLY)
    KEYS: tl.constexpr = NUM_K_HEADS * K_DIM
    VALUES: tl.constexpr = (CHANNELS - 2 * KEYS) // NUM_K_HEADS  # of a key head
    dtype = mixed.dtype.element_ty
    row = tl.program_id(1).to(tl.int64)
    address = tl.load(addresses + row)
    if address != 0:
        c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
        t = tl.arange(0, BLOCK_T)
        query_at = QUERY_FIRST + c // K_DIM * QUERY_STRIDE + c % K_DIM
        of_key, of_value = c - KEYS, c - 2 * KEYS
        key_at = KEY_FIRST + of_key // K_DIM * KEY_STRIDE + of_key % K_DIM
        value_at = VALUE_FIRST + of_value // VALUES * VALUE_STRIDE + of_value % VALUES
        at = tl.where(of_value >= 0, value_at, tl.where(of_key >= 0, key_at, query_at))
        exists = c < CHANNELS
        newest = tl.load(projected + row * row_stride + at, mask=exists, other=0.0)
        inside = exists[:, None] & (t < WIDTH)[None, :]
        elements = c[:, None] * WIDTH + t[None, :]
        kept = address.to(tl.pointer_type(dtype)) + elements
        past = tl.load(kept + 1, mask=inside & (t + 1 < WIDTH)[None, :], other=0.0)
        weight = tl.load(conv + elements, mask=inside, other=0.0).to(tl.float32)
        seen = tl.where((t + 1 == WIDTH)[None, :], newest[:, None], past)
        tl.debug_barrier()  # a thread may write what another reads
        tl.store(kept, seen, mask=inside)
        total = tl.sum(seen.to(tl.float32) * weight, 1).to(dtype).to(tl.float32)
        tl.store(mixed + row * CHANNELS + c, activated(total, False).to(dtype), mask=exists)


@jit
def delta_step_kernel(
    projected: tl.tensor,
    mixed: tl.tensor,
    addresses: tl.tensor,  # of each row's state, or 0
    norm: tl.tensor,
    rate: tl.tensor,
    dt_bias: tl.tensor,
    out: tl.tensor,
    row_stride: tl.tensor,
    eps: tl.tensor,
    UNIT_EPS: tl.constexpr,
    NUM_K_HEADS: tl.constexpr,
    NUM_V_HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    GATE_STRIDE: tl.constexpr,
    BETA_FIRST: tl.constexpr,
    BETA_STRIDE: tl.constexpr,
    ALPHA_FIRST: tl.constexpr,
    ALPHA_STRIDE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """One program per value head and row, which holds the head's state in registers.

    It is launched early, but the convolution before it is not: all but `mixed` is there already.
    """
    EACH: tl.constexpr = NUM_V_HEADS // NUM_K_HEADS
    KEYS: tl.constexpr = NUM_K_HEADS * K_DIM
    dtype = out.dtype.element_ty
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    k, v = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    of_key, of_value = k < K_DIM, v < V_DIM
    target = out + (row * NUM_V_HEADS + head) * V_DIM + v
    address = tl.load(addresses + row)
    if address == 0:
        await_inputs(EARLY)
        tl.store(target, tl.zeros([BLOCK_V], dtype), mask=of_value)
    else:
        inside = of_key[:, None] & of_value[None, :]
        first = head * (K_DIM * V_DIM)
        state = tl.load(elements_at(address, first, k, v, V_DIM), mask=inside, other=0.0)

        key_head, i = head // EACH, head % EACH
        of_row = projected + row * row_stride
        beta = tl.load(of_row + BETA_FIRST + key_head * BETA_STRIDE + i).to(tl.float32)
        alpha = tl.load(of_row + ALPHA_FIRST + key_head * ALPHA_STRIDE + i).to(tl.float32)
        gate_at = of_row + GATE_FIRST + key_head * GATE_STRIDE + i * V_DIM + v
        gate = tl.load(gate_at, mask=of_value, other=0.0).to(tl.float32)
        weight = tl.load(norm + v, mask=of_value, other=0.0).to(tl.float32)

        await_inputs(EARLY)
        mixed_row = mixed + row * (2 * KEYS + NUM_V_HEADS * V_DIM)
        query_at = mixed_row + key_head * K_DIM + k
        query = tl.load(query_at, mask=of_key, other=0.0).to(tl.float32)
        key = tl.load(query_at + KEYS, mask=of_key, other=0.0).to(tl.float32)
        value_at = mixed_row + 2 * KEYS + head * V_DIM + v
        value = tl.load(value_at, mask=of_value, other=0.0).to(tl.float32)

        query *= tl.rsqrt(tl.sum(query * query, 0) + UNIT_EPS) / tl.sqrt(K_DIM + 0.0)
        key *= tl.rsqrt(tl.sum(key * key, 0) + UNIT_EPS)
        beta = (1.0 / (1.0 + tl.exp(-beta))).to(dtype).to(tl.float32)
        alpha += tl.load(dt_bias + head)
        decay = tl.exp(-tl.load(rate + head) * softplus(alpha))

        # Read again, or the compiler would keep 32 registers of pointers until the state is stored.
        address = tl.load(addresses + row, volatile=True)
        state *= decay
        delta = (value - tl.sum(state * key[:, None], 0)) * beta
        state += key[:, None] * delta[None, :]
        tl.store(elements_at(address, first, k, v, V_DIM), state, mask=inside)
        attended = tl.sum(state * query[:, None], 0).to(dtype).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(attended * attended, 0) / V_DIM + eps)
        normed = (attended * inverse).to(dtype).to(tl.float32)
        normed = (weight * normed).to(dtype).to(tl.float32)
        tl.store(target, (normed * activated(gate, False)).to(dtype), mask=of_value)


@jit
def elements_at(
    address: tl.tensor, first: tl.tensor, k: tl.tensor, v: tl.tensor, V_DIM: tl.constexpr
) -> tl.tensor:
    """Pointers to the rows k and columns v of a state of float32 from its element `first` on."""
    pointers = address.to(tl.pointer_type(tl.float32)) + first
    pointers = pointers + (k[:, None] * V_DIM + v[None, :])
    if V_DIM % 4 == 0:  # what the compiler does not know of an address
        return tl.multiple_of(pointers, (1, 16))
    else:
        return pointers


@jit
def softplus(x: tl.tensor) -> tl.tensor:
    """log(1 + exp(x)), and x where torch has that; exact to rounding for small results, too."""
    e = tl.exp(tl.minimum(x, 20.0, propagate_nan=tl.PropagateNan.ALL))
    # What rounding took from 1 + e the quotient gives back.
    added = (1.0 + e) - 1.0
    log1p = tl.log(1.0 + e) * (e / tl.where(added == 0.0, 1.0, added))
    return tl.where(x > 20.0, x, tl.where(added == 0.0, e, log1p))


class GpuDeltaRule:
    """`cpu_ops.delta_rule.DeltaRule` on tensors of a GPU.

    Args:
        heads, conv, norm, a_log, dt_bias, by_key_head: as there, the tensors on one device.

    Raises:
        ValueError: for shapes, dtypes or devices that do not fit each other.
    """

    def __init__(
        self,
        heads: Heads,
        conv: Tensor,
        norm: tuple[Tensor, float],
        a_log: Tensor,
        dt_bias: Tensor,
        *,
        by_key_head: bool = False,
    ) -> None:
        weight, eps = norm
        check_dtype("conv", conv)
        check_tensor("conv", conv, (heads.channels, conv.shape[-1]), conv.dtype, conv.device)
        check_tensor("norm", weight, (heads.v_dim,), conv.dtype, conv.device)
        for name, x in (("a_log", a_log), ("dt_bias", dt_bias)):
            check_tensor(name, x, (heads.num_v_heads,), x.dtype, conv.device)
        self.heads, self.conv, self.norm, self.eps = heads, conv, weight, eps
        self.rate, self.dt_bias = a_log.float().exp(), dt_bias.float()
        self.places = heads.places(by_key_head=by_key_head)

    def __call__(self, projected: Tensor, pointers: Tensor, out: Tensor | None = None) -> Tensor:
        """A token of each row: [n, num_v_heads * v_dim].

        Args:
            projected: [n, row_size], what `places` says; rows may be apart.
            pointers: int64 [2, n], its two rows may be apart: addresses of each row's conv_state
                [channels, conv_width], the inputs of the tokens before, and of its state, float32
                [num_v_heads, k_dim, v_dim], S, on a multiple of 16 bytes if a row of S is one;
                both are overwritten. A row whose addresses are 0 is not in use: nothing of it is
                read, and it becomes zeros.
            out: what is returned, if given.
        """
        heads, conv, n = self.heads, self.conv, len(projected)
        if projected.dim() != 2 or projected.stride(1) != 1:
            raise ValueError(f"rows of projected must be contiguous, got {projected.stride()}")
        check_tensor("a row of projected", projected[0], (heads.row_size,), conv.dtype, conv.device)
        if pointers.shape != (2, n):
            raise ValueError(f"pointers must be [2, {n}], got {list(pointers.shape)}")
        for addresses in pointers:
            check_tensor("pointers", addresses, (n,), torch.int64, conv.device)
        size = heads.num_v_heads * heads.v_dim
        if out is None:
            out = torch.empty(n, size, dtype=conv.dtype, device=conv.device)
        check_tensor("out", out, (n, size), conv.dtype, conv.device)
        if not runs_kernel(projected):
            for row, addresses, to in zip(projected, pointers.T.tolist(), out, strict=True):
                self._step_reference(row, addresses, to)
            return out
        width, early = conv.shape[-1], can_launch_early(projected)
        query, key, value, gate, beta, alpha = self.places
        mixed = torch.empty(n, heads.channels, dtype=conv.dtype, device=conv.device)
        delta_conv_kernel[(-(-heads.channels // _CHANNELS), n)](
            projected,
            pointers[0],
            conv,
            mixed,
            projected.stride(0),
            heads.num_k_heads,
            heads.k_dim,
            heads.channels,
            width,
            *(*query, *key, *value),
            _CHANNELS,
            next_power_of_2(width),
            early,
            num_warps=4,
        )
        blocks = next_power_of_2(heads.k_dim), next_power_of_2(heads.v_dim)
        num_warps = blocks[0] * blocks[1] // (32 * _ELEMENTS_PER_THREAD)
        delta_step_kernel[(heads.num_v_heads, n)](
            projected,
            mixed,
            pointers[1],
            self.norm,
            self.rate,
            self.dt_bias,
            out,
            projected.stride(0),
            self.eps,
            _UNIT_EPS,
            heads.num_k_heads,
            heads.num_v_heads,
            heads.k_dim,
            heads.v_dim,
            *(*gate, *beta, *alpha),
            *blocks,
            early,
            num_warps=min(16, max(1, num_warps)),
            maxnreg=_MAX_REGISTERS,
            **early_option(early),
        )
        return out

    def _step_reference(self, row: Tensor, addresses: list[int], out: Tensor) -> None:
        """A row by torch."""
        if not addresses[0]:
            out.zero_()
            return
        heads, conv, each = self.heads, self.conv, self.heads.num_v_heads // self.heads.num_k_heads
        widths = [heads.k_dim, heads.k_dim, each * heads.v_dim, each * heads.v_dim, each, each]
        parts = [
            torch.cat([row[first + i * stride :][:width] for i in range(heads.num_k_heads)])
            for (first, stride), width in zip(self.places, widths, strict=True)
        ]
        *newest, gate, beta, alpha = parts
        kept = page_at(addresses[0], tuple(conv.shape), conv.dtype)
        kept.copy_(torch.cat([kept[:, 1:], torch.cat(newest)[:, None]], 1))
        mixed = functional.silu((kept.float() * conv.float()).sum(1).to(conv.dtype)).float()
        query, key, value = torch.split(mixed, [len(x) for x in newest])
        query, key = (
            (x * (x.square().sum(1, keepdim=True) + _UNIT_EPS).rsqrt()).repeat_interleave(each, 0)
            for x in (y.view(-1, heads.k_dim) for y in (query, key))
        )
        decay = (-self.rate * functional.softplus(alpha.float() + self.dt_bias)).exp()
        shape = heads.num_v_heads, heads.k_dim, heads.v_dim
        state = page_at(addresses[1], shape, torch.float32)
        state *= decay[:, None, None]
        delta = value.view(-1, heads.v_dim) - torch.einsum("hkv,hk->hv", state, key)
        delta *= beta.sigmoid().float()[:, None]
        state += key[:, :, None] * delta[:, None, :]
        attended = torch.einsum("hkv,hk->hv", state, query * heads.k_dim**-0.5).to(conv.dtype)
        normed = rms_norm_reference(attended, self.norm, self.eps).float()
        out.copy_((normed * functional.silu(gate.float()).view(shape[0], -1)).flatten())
