"""A decode step of the gated delta rule (Gated DeltaNet, arXiv 2412.06464), from the projections of
a token to what the output projection reads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cpu_ops import _native
from cpu_ops.native import check_tensor, dtype_code, isa_name
from cpu_ops.worker_pool import WorkerPool

Place = tuple[int, int]  # in a row of projections: first element, and from key head to next


@dataclass(frozen=True)
class DeltaHeads:
    """How many heads there are, of which width; each key head has as many value heads.

    Raises:
        ValueError: num_v_heads is no multiple of num_k_heads.
    """

    num_k_heads: int
    num_v_heads: int
    k_dim: int
    v_dim: int

    def __post_init__(self) -> None:
        if self.num_k_heads < 1 or self.num_v_heads % self.num_k_heads:
            raise ValueError(
                f"num_v_heads must be a multiple of num_k_heads={self.num_k_heads}, got "
                f"{self.num_v_heads}"
            )

    @property
    def channels(self) -> int:
        """What the convolution is over: queries ++ keys ++ values."""
        return 2 * self.num_k_heads * self.k_dim + self.num_v_heads * self.v_dim

    def places(self, *, by_key_head: bool) -> tuple[Place, ...]:
        """Where queries, keys, values, gates, betas and alphas are in a row of projections.

        Args:
            by_key_head: all but betas and alphas of a key head, then those of the next; and betas
                and alphas in the same way. Else one after the other, each of all heads.
        """
        each = self.num_v_heads // self.num_k_heads
        widths = [self.k_dim, self.k_dim, each * self.v_dim, each * self.v_dim, each, each]
        places, first = list[Place](), 0
        for group in (widths[:4], widths[4:]):
            for i, width in enumerate(group):
                before = sum(group[:i])
                if by_key_head:
                    places.append((first + before, sum(group)))
                else:
                    places.append((first + before * self.num_k_heads, width))
            first += sum(group) * self.num_k_heads
        return tuple(places)

    @property
    def row_size(self) -> int:
        """Elements of a row of projections."""
        return self.channels + self.num_v_heads * (self.v_dim + 2)


class DeltaRule:
    """out = RMSNorm(S q) * silu(gate), with S <- decay * S + k (x) beta * (v - decay * S k).

    q, k and v are silu of a causal convolution of each channel, q and k of unit length, and q over
    sqrt(k_dim); beta is a sigmoid, and decay exp(-rate * softplus(alpha + dt_bias)). Values are
    rounded to the dtype where transformers rounds; S is float32.

    Args:
        by_key_head: as `DeltaHeads.places`.
        conv: [channels, conv_width] of the convolution, the newest token last; kept.
        norm: (weight [v_dim], eps) of the RMSNorm; kept.
        a_log: [num_v_heads], the logarithm of the rate.
        dt_bias: [num_v_heads].
        isa: an ISA other than the process's (tests).

    Raises:
        ValueError: for shapes or dtypes that do not fit each other.
    """

    def __init__(
        self,
        heads: DeltaHeads,
        conv: Tensor,
        norm: tuple[Tensor, float],
        a_log: Tensor,
        dt_bias: Tensor,
        *,
        by_key_head: bool = False,
        isa: str | None = None,
    ) -> None:
        weight, eps = norm
        check_tensor("conv", conv, (heads.channels, conv.shape[-1]), conv.dtype)
        check_tensor("norm", weight, (heads.v_dim,), conv.dtype)
        for name, x in (("a_log", a_log), ("dt_bias", dt_bias)):
            check_tensor(name, x, (heads.num_v_heads,), x.dtype)
        self.heads, self.dtype, self.isa = heads, conv.dtype, isa or isa_name()
        self.conv_width = int(conv.shape[-1])
        rate, bias = a_log.float().exp(), dt_bias.float().contiguous()
        self._kept = conv, weight, rate, bias
        self._native = _native.DeltaRule(
            dtype_code(conv.dtype),
            [heads.num_k_heads, heads.num_v_heads, heads.k_dim, heads.v_dim, self.conv_width],
            [x for place in heads.places(by_key_head=by_key_head) for x in place],
            conv.data_ptr(),
            weight.data_ptr(),
            rate.data_ptr(),
            bias.data_ptr(),
            eps,
        )

    def __call__(
        self, pool: WorkerPool, projected: Tensor, conv_state: Tensor, state: Tensor
    ) -> Tensor:
        """A token of each row: [n, num_v_heads * v_dim].

        Args:
            projected: [n, `DeltaHeads.row_size`], what `DeltaHeads.places` says.
            conv_state: [n, channels, conv_width], the inputs of the tokens before; overwritten by
                those up to this one.
            state: float32 [n, num_v_heads, k_dim, v_dim], S; overwritten likewise.
        """
        n, heads = len(projected), self.heads
        check_tensor("projected", projected, (n, heads.row_size), self.dtype)
        check_tensor("conv_state", conv_state, (n, heads.channels, self.conv_width), self.dtype)
        shape = (n, heads.num_v_heads, heads.k_dim, heads.v_dim)
        check_tensor("state", state, shape, torch.float32)
        out = torch.empty(n, heads.num_v_heads * heads.v_dim, dtype=self.dtype)
        self._native.run(
            pool.native,
            self.isa,
            projected.data_ptr(),
            n,
            heads.row_size,
            conv_state.data_ptr(),
            state.data_ptr(),
            out.data_ptr(),
        )
        return out
