"""What passes of an engine take of the host's memory beside weights and KV cache, and give back.

It comes out of the same budget as the KV cache, so that a process that was told a limit stays
within it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from offload.runtime.modules_device import token_bytes
from offload.runtime.runtime import Runtime

# Of the budget, that a slice of a prompt takes at most; half of it is for its own tokens, whatever
# those before take, which are much where few layers are in the store.
_PART = 8
_LEAST_TOKENS = 32  # of a slice, whatever they take
_FLOAT32 = 4


@dataclass(frozen=True)
class WorkingMemory:
    """Bytes of the host that passes take; of a model on a device all are 0.

    Attributes:
        token_bytes: activations of a token of a slice, all at one time.
        past_bytes: keys and values of a token in one layer, of what a slice attends to.
        row_bytes: logits of a request, as they are and in float32.
        slice_tokens: of a slice at most.
        past_tokens: that its sequences have together, unless one alone has more.
    """

    token_bytes: int
    past_bytes: int
    row_bytes: int
    slice_tokens: int
    past_tokens: int

    @classmethod
    def of(cls, model: Any, runtime: Any) -> WorkingMemory:
        """Of an engine; its slices are as large as that part of the budget has room for."""
        most, store = runtime.config.prefill_slice_tokens, runtime.store
        if runtime.device.type != "cpu":
            return cls(0, 0, 0, most, runtime.max_context)
        item, layers = model.dtype.itemsize, max(1, store.num_layers)
        of_token, of_past = token_bytes(model), -(-store.token_bytes // layers)
        if isinstance(runtime, Runtime):
            shape = runtime.lean.shape.of_a_token
            hidden, inner, heads = shape.hidden_size, shape.intermediate_size, shape.qkv_width
            # Of an MLP gate and up: in parts, in one piece, and each by itself.
            of_layer = max(3 * hidden + 6 * inner, 2 * hidden + 3 * heads + shape.query_width)
            of_token = item * (hidden + of_layer) + 4 * _FLOAT32 * shape.head_dim
            of_past = 2 * shape.num_kv_heads * shape.head_dim * item
        budget = store.host_budget_bytes
        # Pages have room for no more, beside these.
        past = min(runtime.max_context * 5 // 4, budget // max(1, store.token_bytes + of_past))
        of_row = model.config.get_text_config().vocab_size * (item + _FLOAT32)
        of_tokens = max(budget // _PART - past * of_past, budget // (2 * _PART)) * 4 // 5
        fitting = max(_LEAST_TOKENS, of_tokens // of_token)
        return cls(of_token, of_past, of_row, min(most, fitting), past)

    @property
    def of_slice(self) -> int:
        """Bytes of the largest slice, and of what is read between two layers of it."""
        return self.slice_tokens * 5 // 4 * self.token_bytes + self.past_tokens * self.past_bytes
