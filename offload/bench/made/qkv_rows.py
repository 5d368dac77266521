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
    """Rows to copy over a model's projections.

    Attributes:
        rows: [num_steps, num_layers, num_rows, (num_qo_heads + 2 * num_kv_heads) * head_dim], not
            yet rotated: what follows rotates them.
        first_position: of the tokens of the first step, in every sequence.
        step: int64 [1], on the same device: which of the rows are copied.
    """

    rows: Tensor
    first_position: int
    step: Tensor

    @property
    def num_steps(self) -> int:
        return int(self.rows.shape[0])

    def after_projection(
        self, layer_idx: int, first_row: int, qkv: Tensor, positions: Tensor
    ) -> None:
        """Overwrite `qkv` [n, width], row by row; rows beyond those there are stay as they are.

        Layers come in order, and layer 0 looks up the step. Neither synchronises nor depends on
        the step that it is called in: it may be captured.

        Args:
            first_row: of the batch, in `qkv`.
            positions: int64 [n] on the device, the same in all rows; other rows than the first may
                be inactive.
        """
        if layer_idx == 0:
            torch.sub(positions[:1], self.first_position, out=self.step)
            self.step.clamp_(0, self.num_steps - 1)
        of_layer = self.rows[:, layer_idx, first_row : first_row + qkv.shape[0]]
        n = of_layer.shape[1]
        if n == 0:
            return
        if qkv.is_contiguous():
            torch.index_select(of_layer, 0, self.step, out=qkv[None, :n])
        else:  # index_select would have to replace it
            qkv[:n] = of_layer.index_select(0, self.step)[0]


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
