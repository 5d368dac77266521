"""What the measured kernels should have computed for layer 0, in float64."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from offload.bench.made.attention_cache import AttentionCache

Selection = Sequence[Sequence[int]] | npt.NDArray[np.int32]

# The output is rounded to the cache's dtype, and so are the softmax weights inside some kernels.
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}
_TOPK_MASS_TOLERANCE = 1e-3


class AttentionReference:
    """Attention of one query over layer 0 of a cache, computed once and then compared with.

    Args:
        query: [num_qo_heads * head_dim], in the cache's dtype.
    """

    def __init__(self, cache: AttentionCache, query: torch.Tensor) -> None:
        num_kv_heads, head_dim = cache.store.num_kv_heads, cache.store.head_dim
        self._dtype = cache.store.dtype
        self._kv_len = cache.kv_len
        self._keys, self._values = cache.store.gather(cache.seq, 0)
        # [num_kv_heads, group_size, head_dim]
        queries = query.double().numpy().reshape(num_kv_heads, -1, head_dim)
        weights, outputs = [], []
        for kv_head in range(num_kv_heads):
            scores = queries[kv_head] @ self._keys[kv_head].double().numpy().T / np.sqrt(head_dim)
            exponentials = np.exp(scores - scores.max(axis=1, keepdims=True))
            weights.append(exponentials / exponentials.sum(axis=1, keepdims=True))
            outputs.append(weights[-1] @ self._values[kv_head].double().numpy())
        self._weights = np.stack(weights)  # [num_kv_heads, group_size, kv_len]
        self._dense = np.stack(outputs)

    def check_output(self, out: torch.Tensor, selection: Selection | None) -> float:
        """Relative L2 error of `out` [num_qo_heads * head_dim].

        Args:
            selection: tokens of each KV head; None is all of them.

        Raises:
            ArithmeticError: more than rounding explains.
        """
        expected = self._dense if selection is None else self._attend(selection)
        difference = out.double().numpy() - expected.reshape(-1)
        error = float(np.linalg.norm(difference) / np.linalg.norm(expected))
        tolerance = _TOLERANCE[self._dtype]
        if not error <= tolerance:
            raise ArithmeticError(
                f"the output differs from the float64 reference by {error:.2g} (relative L2), "
                f"more than {tolerance:.2g}"
            )
        return error

    def check_topk(
        self, selection: Selection, *, budget_tokens: int, sink_tokens: int, recent_tokens: int
    ) -> None:
        """Compare the attention mass of a selection with the most that its budget can hold.

        Raises:
            ArithmeticError: a selection of another size, or with less mass.
        """
        fixed = np.r_[0:sink_tokens, self._kv_len - recent_tokens : self._kv_len]
        for kv_head, tokens in enumerate(selection):
            num_tokens = len(set(tokens))
            if num_tokens != budget_tokens:
                raise ArithmeticError(
                    f"KV head {kv_head}: {num_tokens} tokens selected, not {budget_tokens}"
                )
            importance = self._weights[kv_head].sum(axis=0)
            rest = np.sort(np.delete(importance, fixed))
            best = importance[fixed].sum() + rest[len(fixed) - budget_tokens :].sum()
            mass = importance[np.asarray(tokens)].sum()
            if mass < best * (1 - _TOPK_MASS_TOLERANCE):
                raise ArithmeticError(
                    f"KV head {kv_head}: the selection holds {mass:.5f} of the attention, "
                    f"the best one {best:.5f}"
                )

    def _attend(self, selection: Selection) -> npt.NDArray[np.float64]:
        outputs = []
        for kv_head, tokens in enumerate(selection):
            chosen = np.asarray(tokens, dtype=np.int64)
            weights = self._weights[kv_head][:, chosen]
            values = self._values[kv_head, torch.from_numpy(chosen)].double().numpy()
            outputs.append(weights @ values / weights.sum(axis=1, keepdims=True))
        return np.stack(outputs)
