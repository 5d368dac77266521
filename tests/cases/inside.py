"""Where tests look into a loaded model: no other file of them names these members."""

from __future__ import annotations

import sys
from typing import Any

from offload.engine.working_memory import WorkingMemory


def runtime_of(model: Any) -> Any:
    return model._offload


def decoder_of(model: Any) -> Any:
    return model._offload.decoder


def states_of(model: Any) -> Any:
    """What its policy keeps of each sequence."""
    return model._offload.attention.states


def compression_of(model: Any) -> Any:
    return model._offload.sequences.compression


def least_placement_of(model: Any) -> Any:
    """The placement of only the heads that the policy needs on the GPU."""
    return decoder_of(model).placed.least


def keep_placement(model: Any, *, keeps: bool) -> None:
    """Whether heads for which the GPU has no room are an error, as where somebody placed them."""
    decoder_of(model).placed.keeps = keeps


def allow_device_bytes(model: Any, num_bytes: int) -> None:
    decoder_of(model).placed.budget_bytes = num_bytes


def split_steps(model: Any, num_micro_batches: int) -> None:
    """Rows of a step take turns, in so many parts."""
    decoder_of(model).captured.num_micro_batches = num_micro_batches


def steps_of(model: Any) -> Any:
    """Those that were made last, as the GPU runs them."""
    return decoder_of(model).slots.steps


def resident_of(model: Any) -> Any:
    """What the step that was made last holds on the GPU."""
    return steps_of(model).step.resident


def allow_host_bytes(model: Any, num_bytes: int) -> None:
    """Set the limit of the KV store's budget."""
    model.kv_store._pool.ledger.limit_bytes = num_bytes


def corrections_of(model: Any) -> Any:
    return model._offload.sequences.corrections


def correct_in_background(model: Any, in_background: bool = True) -> Any:
    """As with a GPU, or as without one. The model."""
    corrections_of(model).in_background = in_background
    return model


def background_of(model: Any) -> Any:
    """What is corrected beside the steps."""
    return model._offload.sequences.background.running


def passes_take_nothing(monkeypatch: Any) -> None:
    """Budgets are of pages and states alone: what passes of an engine take is counted in
    tests/serve/test_served_memory.py."""

    def of(model: Any, runtime: Any) -> WorkingMemory:
        return WorkingMemory(0, 0, 0, runtime.config.prefill_slice_tokens, sys.maxsize)

    monkeypatch.setattr(WorkingMemory, "of", of)
