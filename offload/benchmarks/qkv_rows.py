"""Chosen queries, keys and values in the place of those that random weights give.

A model with random weights attends to nothing in particular, and every selection method is
meaningless there. A benchmark so lets the projections run, for their time, and then copies rows of
its own over what they gave: one small kernel per layer, which a CUDA graph captures once and which
reads the number of the step on the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class QKVRows:
    """Rows to copy over a model's projections, and the step that is decoded.

    Attributes:
        rows: [num_steps, num_layers, num_rows, (num_qo_heads + 2 * num_kv_heads) * head_dim], not
            yet rotated: what follows rotates them.
        step: int64 [1], on the same device: which of the rows are copied.
    """

    rows: Tensor
    step: Tensor

    @property
    def num_steps(self) -> int:
        return int(self.rows.shape[0])

    def apply(self, layer_idx: int, qkv: Tensor, first_row: int = 0) -> None:
        """Overwrite `qkv` [n, width] of rows first_row .. first_row + n.

        Neither synchronises nor depends on the step that it is called in: may be captured.
        """
        n = qkv.shape[0]
        of_layer = self.rows[:, layer_idx, first_row : first_row + n]
        if qkv.is_contiguous():
            torch.index_select(of_layer, 0, self.step, out=qkv[None])
        else:  # index_select would have to replace it
            qkv.copy_(of_layer.index_select(0, self.step)[0])

    def end_step(self) -> None:
        """The next step's rows from now on; after the last the first again. May be captured."""
        self.step.add_(1).remainder_(self.num_steps)

    def rewind(self, step: int = 0) -> None:
        """Go on with the rows of `step`."""
        self.step.fill_(step)


def unrotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """What the rotary embedding x * cos + rotate_half(x) * sin turns into `x`, in float32.

    Args:
        x: [..., num_heads, head_dim].
        cos, sin: [..., head_dim], of the positions of x; both halves are equal.
    """
    half = x.shape[-1] // 2
    c, s = (table[..., None, :half].float() for table in (cos, sin))
    x1, x2 = x[..., :half].float(), x[..., half:].float()
    # Some rope types scale cos and sin; a rotation is undone by its transpose over the square.
    square = c * c + s * s
    return torch.cat([(x1 * c + x2 * s) / square, (x2 * c - x1 * s) / square], -1)
