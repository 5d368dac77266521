"""Exact attention of one query, to check outputs and to judge selections by."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from offload.kv.store import KVStore

# The output is rounded to the cache's dtype, and so are the softmax weights inside some kernels.
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}


class ExactAttention:
    """One layer of one sequence, with sums in float64.

    Args:
        query: [num_qo_heads * head_dim].
        kv_len: tokens that it sees; they need not be committed.

    Attributes:
        weights: float32 [num_kv_heads, group_size, kv_len].
    """

    def __init__(
        self,
        store: KVStore,
        seq: int,
        layer_idx: int,
        query: Tensor,
        *,
        kv_len: int,
        sm_scale: float,
    ) -> None:
        self._tolerance = _TOLERANCE[store.dtype]
        self._kv_len = kv_len
        keys, self._values = store.gather(seq, layer_idx, 0, kv_len)
        queries = query.float().view(store.num_kv_heads, -1, store.head_dim)
        self.weights = torch.stack(
            [((q @ k.float().T) * sm_scale).softmax(-1) for q, k in zip(queries, keys, strict=True)]
        )

    def check_output(self, out: Tensor, selection: Sequence[Sequence[int] | None]) -> float:
        """As `relative_error`.

        Raises:
            ArithmeticError: more than rounding explains.
        """
        error = self.relative_error(out, selection)
        if not error <= self._tolerance:
            raise ArithmeticError(
                f"the output differs from the reference by {error:.2g} (relative L2), more than "
                f"{self._tolerance:.2g}"
            )
        return error

    def relative_error(self, out: Tensor, selection: Sequence[Sequence[int] | None]) -> float:
        """Relative L2 error of `out` [num_qo_heads * head_dim] over the units that were attended.

        Args:
            selection: tokens of each unit (KV head or query head); [] means all of them, None
                that the unit is left out.
        """
        weights = self._of_units(len(selection))
        got = out.double().view(*weights.shape[:2], -1)
        difference = norm = 0.0
        for unit, tokens in enumerate(selection):
            if tokens is None:
                continue
            values = self._values[unit * len(self._values) // len(selection)]
            expected = self._attend(weights[unit], values, tokens)
            difference += float((got[unit] - expected).square().sum())
            norm += float(expected.square().sum())
        return float(np.sqrt(difference / max(norm, 1e-30)))

    def importances(self, num_units: int) -> npt.NDArray[np.float32]:
        """[num_units, kv_len]: the weights of each unit's query heads together."""
        found: npt.NDArray[np.float32] = self._of_units(num_units).sum(1).numpy()
        return found

    def _of_units(self, num_units: int) -> Tensor:
        """The weights, [num_units, members, kv_len]: a unit is a KV head or a query head."""
        return self.weights.view(num_units, -1, self._kv_len)

    def _attend(self, weights: Tensor, values: Tensor, tokens: Sequence[int]) -> Tensor:
        """float64 [members, head_dim] of one unit."""
        if not len(tokens):
            # In pieces: a float64 copy of all values of a head at 128K is 134 MB.
            pieces = zip(torch.split(weights, 16384, 1), torch.split(values, 16384), strict=True)
            return torch.stack([w.double() @ v.double() for w, v in pieces]).sum(0)
        chosen = torch.as_tensor(tokens, dtype=torch.int64)
        part = weights[:, chosen].double()
        return part @ values[chosen].double() / part.sum(1, keepdim=True)
