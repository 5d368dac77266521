"""Whether generated tokens drift: the error of attention and temperatures over a generation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from cpu_ops.step_rows import DecodeStep
from offload.bench.budget.temperature import (
    LaterTemperatures,
    TemperatureObserver,
    has_temperatures,
)
from offload.bench.budget.written_rows import WrittenRows
from offload.bench.eval.answers import attended_tokens
from offload.bench.eval.perplexity import teacher_forced
from offload.bench.selection.metrics import exact_attention, mean, relative_error
from offload.bench.selection.observer import looked_at
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
        temperatures: solved for again every so many tokens, where the policy has any.
    """

    output_error: list[float | None] = field(default_factory=list)
    attended_tokens: list[float | None] = field(default_factory=list)
    temperatures: list[LaterTemperatures] = field(default_factory=list)


class _ErrorObserver:
    """Give `attended` to `DecodeAttention.on_attended`; set `sampling` before each step."""

    def __init__(self, runtime: Runtime, rows: WrittenRows, dense_layers: int) -> None:
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
        keys, values = (rows.float() for rows in self._rows.held(layer_idx))
        _, exact = exact_attention(heads, keys, values, self._runtime.lean.sm_scale)
        self.errors.append(relative_error(out[0, row], exact))


def last_to_second(of_quarters: Sequence[float | None]) -> float | None:
    """The last quarter over the second; None where nothing was sampled, or the second has none."""
    _, second, _, last = of_quarters
    return last / second if last is not None and second else None


def measure_drift(
    model: SharedModel,
    index: int,
    prompt: ReadPrompt,
    num_tokens: int,
    *,
    sample_every: int,
    dense_layers: int,
    temperature_every: int = 0,
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
        temperature_every: tokens, after which temperatures are solved for again, at least a window
            of queries; 0: never.
    """
    runtime = model.runtimes[index]
    rows = WrittenRows(runtime.store, prompt.cache.seqs[0], len(prompt.tokens) + num_tokens)
    observer = _ErrorObserver(runtime, rows, dense_layers)
    solves = temperature_every > 0 and has_temperatures(runtime)
    temperatures = TemperatureObserver(runtime, rows) if solves else None

    def attended(layer_idx: int, step: DecodeStep, query: Tensor, out: Tensor) -> None:
        observer.attended(layer_idx, step, query, out)
        if temperatures is not None:
            temperatures.attended(layer_idx, step, query, out)

    drift, token = Drift(), int(prompt.logits[0].argmax())
    ends = [num_tokens * (quarter + 1) // QUARTERS for quarter in range(QUARTERS)]
    with (
        teacher_forced(model, index, prompt) as decode,
        looked_at(runtime.attention, attended),
    ):
        for start, end in zip([0, *ends], ends, strict=False):
            observer.errors.clear()
            runtime.attention.start_profile()
            for step in range(start, end):
                observer.sampling = (step - start) % sample_every == 0
                token = int(decode(token).argmax())
                if temperatures is not None and (step + 1) % temperature_every == 0:
                    drift.temperatures.append(temperatures.solved(step + 1))
                on_progress(1)
            drift.output_error.append(mean(observer.errors))
            drift.attended_tokens.append(attended_tokens(runtime, end - start))
    return drift
