"""Whether generated tokens drift: the error of attention, by quarter of a generation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cpu_ops.step_rows import DecodeStep
from offload.bench.eval.answers import attended_tokens
from offload.bench.eval.perplexity import teacher_forced
from offload.bench.selection.metrics import exact_attention, mean, relative_error
from offload.bench.selection.observer import looked_at
from offload.kv.store import KVStore
from offload.runtime.runtime import Runtime
from offload.runtime.shared_model import ReadPrompt, SharedModel

QUARTERS = 4


@dataclass(frozen=True)
class Drift:
    """Of a generation under a policy, means of each quarter of its tokens.

    Attributes:
        output_error: relative L2 error of a layer's attention output, over sampled steps and
            layers; None where nothing was sampled.
        attended_tokens: mean per step, layer and unit, dense layers included.
    """

    output_error: list[float | None] = field(default_factory=list)
    attended_tokens: list[float | None] = field(default_factory=list)


class _WrittenRows:
    """Every key and value that a sequence ever had, whatever its cache keeps of them.

    Copied as they are written: [num_kv_heads, capacity_tokens, head_dim] of each layer.
    """

    def __init__(self, store: KVStore, prompt_seq: int, capacity_tokens: int) -> None:
        self._store, num_tokens = store, store.kv_len(prompt_seq)
        shape = (store.num_kv_heads, capacity_tokens, store.head_dim)
        self._rows = [
            tuple(torch.empty(shape, dtype=store.dtype) for _ in range(2))
            for _ in range(store.num_layers)
        ]
        self._lens = [num_tokens] * store.num_layers
        for layer_idx, kept in enumerate(self._rows):
            for rows, held in zip(kept, store.gather(prompt_seq, layer_idx), strict=True):
                rows[:, :num_tokens] = held

    def add_newest(self, seq: int, layer_idx: int, kv_len: int) -> None:
        """The last of the `kv_len` rows that the cache has of the sequence."""
        newest = self._store.gather(seq, layer_idx, kv_len - 1, kv_len)
        for rows, of_token in zip(self._rows[layer_idx], newest, strict=True):
            rows[:, self._lens[layer_idx]] = of_token[:, 0]
        self._lens[layer_idx] += 1

    def of(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """float32 (keys, values), [num_kv_heads, num_tokens, head_dim]."""
        keys, values = (rows[:, : self._lens[layer_idx]] for rows in self._rows[layer_idx])
        return keys.float(), values.float()


class _ErrorObserver:
    """Give `attended` to `DecodeAttention.on_attended`; set `sampling` before each step."""

    def __init__(self, runtime: Runtime, rows: _WrittenRows, dense_layers: int) -> None:
        self._runtime, self._rows, self._dense_layers = runtime, rows, dense_layers
        self.sampling = False
        self.errors: list[float] = []

    def attended(self, layer_idx: int, step: DecodeStep, query: Tensor, out: Tensor) -> None:
        """See one layer of a step of one sequence with one new token."""
        self._rows.add_newest(step.seqs[0], layer_idx, int(step.kv_lens[0]))
        if not self.sampling or layer_idx < self._dense_layers:
            return
        attention = self._runtime.attention
        row = slice(0, attention.num_qo_heads * attention.store.head_dim)
        heads = query[0, row].float().view(attention.num_qo_heads, -1)
        keys, values = self._rows.of(layer_idx)
        _, exact = exact_attention(heads, keys, values, self._runtime.lean.sm_scale)
        self.errors.append(relative_error(out[0, row], exact))


def measure_drift(
    model: SharedModel,
    index: int,
    prompt: ReadPrompt,
    num_tokens: int,
    *,
    sample_every: int,
    dense_layers: int,
    on_progress: Callable[[int], None] = lambda steps: None,
) -> Drift:
    """Generate greedily under a policy, and compare with exact attention to all that was written.

    The keys and values are those of the policy's own run: the error is of attention, not of what
    differs because another text was generated. An end-of-text token does not end it.

    Args:
        index: of the policy's runtime.
        num_tokens: to generate, at least one for each quarter.
        sample_every: n-th step is compared; at least one of each quarter.
        dense_layers: first layers that are left out.
    """
    runtime = model.runtimes[index]
    rows = _WrittenRows(runtime.store, prompt.cache.seqs[0], len(prompt.tokens) + num_tokens)
    observer = _ErrorObserver(runtime, rows, dense_layers)
    drift, token = Drift(), int(prompt.logits[0].argmax())
    ends = [num_tokens * (quarter + 1) // QUARTERS for quarter in range(QUARTERS)]
    with (
        teacher_forced(model, index, prompt) as decode,
        looked_at(runtime.attention, observer.attended),
    ):
        for start, end in zip([0, *ends], ends, strict=False):
            observer.errors.clear()
            runtime.attention.start_profile()
            for step in range(start, end):
                observer.sampling = (step - start) % sample_every == 0
                token = int(decode(token).argmax())
                on_progress(1)
            drift.output_error.append(mean(observer.errors))
            drift.attended_tokens.append(attended_tokens(runtime, end - start))
    return drift
