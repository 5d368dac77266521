"""A text within a bound on a sequence's host memory, against all of its keys and values.

The next tokens are the text's own whatever a method would say, so that methods, and the quarters of
one, are compared on the same tokens. A layer's attention output is compared with what it is in a
run without a bound: what the layers below it have lost is in the error, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cpu_ops.step_rows import DecodeStep
from offload.bench.budget.drift import QUARTERS
from offload.bench.budget.evictions import EVICTIONS, eviction_options, use_eviction
from offload.bench.selection.metrics import by_rows, kl_divergence, negative_log_likelihood
from offload.bench.selection.observer import looked_at
from offload.loading.checkpoint import Checkpoint
from offload.runtime.cascading import check_bound
from offload.runtime.config import RuntimeConfig
from offload.runtime.model import OffloadedModel

Row = dict[str, Any]
Progress = Callable[[int], None]


@dataclass(frozen=True)
class DecodedText:
    """What follows `length` tokens of a text.

    Attributes:
        logits: [steps, vocab_size]; the first are the prompt's.
        outputs: float32 [samples, num_layers, num_qo_heads * head_dim], of attention at every
            `sample_every`-th of the other steps.
        row: sizes and times.
    """

    logits: Tensor
    outputs: Tensor
    sample_every: int
    row: Row


def decode_text(
    name: str,
    tokens: Sequence[int],
    length: int,
    *,
    sample_every: int,
    eviction: str = "fitted",
    on_progress: Progress = lambda steps: None,
    **options: Any,
) -> DecodedText:
    """Read `length` tokens, and decode those that follow; what does not merge drops.

    Args:
        name: of the model.
        tokens: the last one is only predicted.
        eviction: one of `EVICTIONS`, where there is a bound.
        options: of `OffloadedModel.from_pretrained`.

    Raises:
        ValueError: no `EVICTIONS` of this name; fewer than two tokens after the first `length`.
    """
    check_eviction(eviction)
    steps = len(tokens) - 1 - length
    if length < 1 or steps < 1:
        raise ValueError(f"{len(tokens)} tokens are too few to read {length} and decode one")
    if options.get("host_bytes_per_sequence") is not None:
        options = {**options, **eviction_options(eviction)}
    model = OffloadedModel.from_pretrained(name, **options)
    attention, cascade = model._offload.attention, model._offload.sequences.cascade
    num_qo_heads = attention.num_qo_heads
    if cascade is not None:
        use_eviction(model._offload, eviction)
    outputs: list[Tensor] = []

    def attended(layer_idx: int, step: DecodeStep, query: Tensor, out: Tensor) -> None:
        outputs.append(out[0, : num_qo_heads * attention.store.head_dim].float().clone())

    ids, cache = torch.tensor([tokens]), model.new_cache()
    with torch.no_grad():
        start = time.perf_counter()
        prompt = model(ids[:, :length], past_key_values=cache, logits_to_keep=1).logits[0]
        prompt_seconds = time.perf_counter() - start
        logits = prompt.new_empty(steps, prompt.shape[1])
        logits[0] = prompt
        before, start = replace(model.offload_stats()), time.perf_counter()
        for step in range(1, steps):
            is_sampled = step % sample_every == 0
            with looked_at(attention, attended) if is_sampled else nullcontext():
                position = length + step - 1
                found = model(ids[:, position : position + 1], past_key_values=cache)
            logits[step] = found.logits[0, -1]
            on_progress(1)
        seconds = time.perf_counter() - start
    (row,), store = cache.tokens, cache.store
    measured: Row = {
        "prompt_seconds": prompt_seconds,
        "decode_seconds": seconds,
        "seen": row.seen,
        "kept": row.kept,
        "condensed": row.condensed,
        "bytes_per_token": store.token_bytes,
    }
    if cascade is not None:
        stats = model.offload_stats()
        measured["slots"] = cascade.bound.slots
        measured["prompt_condense_seconds"] = before.condense_seconds
        measured["condense_seconds"] = stats.condense_seconds - before.condense_seconds
        measured["condensed_tokens"] = stats.condensed_tokens - before.condensed_tokens
    shape = (len(outputs) // store.num_layers, store.num_layers, num_qo_heads * store.head_dim)
    sampled = torch.stack(outputs) if outputs else torch.empty(0)
    return DecodedText(logits, sampled.view(shape), sample_every, measured)


def measure_evictions(
    name: str,
    tokens: Sequence[int],
    length: int,
    evictions: Sequence[str],
    *,
    share: float,
    on_eviction: Callable[[str], None] = lambda name: None,
    **options: Any,
) -> list[Row]:
    """`compare_eviction` of several, each with its name; the model is loaded for each anew."""
    on_eviction("all keys and values")
    full = decode_text(name, tokens, length, **options)
    rows = []
    for eviction in evictions:
        on_eviction(eviction)
        found = compare_eviction(
            full, name, tokens, length, eviction=eviction, share=share, **options
        )
        rows.append({"eviction": eviction, "share": share, **found})
    return rows


def compare_eviction(
    full: DecodedText,
    name: str,
    tokens: Sequence[int],
    length: int,
    *,
    eviction: str,
    share: float,
    sample_every: int,
    **options: Any,
) -> Row:
    """Against `full`, the same without a bound: means of all steps, and of each quarter of them,
    and the largest KL of a step.

    Args:
        share: of the bytes that all tokens take.
        sample_every: that of `full`.
        options: as of `decode_text`.

    Raises:
        ValueError: as `decode_text`, for a share outside of (0, 1), for another `sample_every`, and
            where fewer outputs were sampled than there are quarters.
    """
    check_share(share)
    check_eviction(eviction)
    if sample_every != full.sample_every:
        raise ValueError(
            f"sample_every={sample_every}, but attention's output without a bound was looked at "
            f"with sample_every={full.sample_every}; give the same"
        )
    steps = len(full.logits)
    if len(full.outputs) < QUARTERS:
        raise ValueError(
            f"attention's output was looked at {len(full.outputs)} times in {steps} steps, less "
            "than once a quarter; lower sample_every, or decode more"
        )
    bounded = decode_text(
        name,
        tokens,
        length,
        eviction=eviction,
        sample_every=sample_every,
        host_bytes_per_sequence=int(share * full.row["bytes_per_token"] * (length + steps)),
        **options,
    )
    targets = torch.tensor(tokens[length : length + steps])
    loss, of_full = (by_rows(negative_log_likelihood, x.logits, targets) for x in (bounded, full))
    kl = by_rows(kl_divergence, bounded.logits, full.logits)
    errors = (bounded.outputs - full.outputs).norm(dim=-1) / full.outputs.norm(dim=-1)
    quarters = [part.mean(0).tolist() for part in errors.tensor_split(QUARTERS)]
    return {
        "kl": float(kl.mean()),
        "kl_max": float(kl.max()),
        "kl_of_quarters": [float(part.mean()) for part in kl.tensor_split(QUARTERS)],
        "loss": float(of_full.mean()),
        "loss_change": float((loss - of_full).mean()),
        "error_of_quarters": [sum(of_layers) / len(of_layers) for of_layers in quarters],
        "error_of_layers": [list(of_layer) for of_layer in zip(*quarters, strict=True)],
        "full_prompt_seconds": full.row["prompt_seconds"],
        "full_decode_seconds": full.row["decode_seconds"],
        **bounded.row,
    }


def check_share(share: float) -> None:
    """Refuse what is no share of the bytes.

    Raises:
        ValueError: it is not above 0 and below 1.
    """
    if not 0 < share < 1:
        raise ValueError(f"the share of the bytes must be above 0 and below 1, got {share}")


def check_text_bound(
    checkpoint: Checkpoint, config: RuntimeConfig, num_tokens: int, share: float, eviction: str
) -> None:
    """Refuse a share of the bytes of `num_tokens` that is too little, before weights are read.

    Args:
        eviction: one of `EVICTIONS`, or AUTO; some are not for every policy.

    Raises:
        ValueError: as `check_bound`, with the share.
    """
    shape = checkpoint.shape
    item_bytes = checkpoint.loaded_dtype(config.dtype).itemsize
    of_token = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * item_bytes
    bound = int(share * of_token * num_tokens)
    try:
        options = eviction_options(eviction)
        bounded = replace(config, host_bytes_per_sequence=bound, **options)
        check_bound(bounded, shape, checkpoint.config, item_bytes)
    except ValueError as error:
        raise ValueError(
            f"{share:g} of the {of_token * num_tokens} bytes of {num_tokens:,} tokens, "
            f"{eviction}: {error}"
        ) from error


def check_eviction(name: str) -> None:
    """Refuse what is not one.

    Raises:
        ValueError: it says which there are.
    """
    if name not in EVICTIONS:
        raise ValueError(f"unknown eviction {name!r}; available: {', '.join(EVICTIONS)}")
