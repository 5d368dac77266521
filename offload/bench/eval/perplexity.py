"""Perplexity under policies: text is read, and its next tokens are given one decode step each.

Prefill is exact whatever the policy, so that the perplexity of a prompt would judge nothing.
Windows slide over the text: each is read, and then some more tokens are decoded, teacher-forced.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from offload.bench.eval.bounds import Bound, read_within
from offload.bench.eval.forced import measure_forced
from offload.bench.eval.intervals import student_interval
from offload.bench.eval.record_file import Record
from offload.bench.eval.selections import METRICS, SelectionJudge, most_dense_layers
from offload.bench.eval.summary import FULL, bound_means, mean
from offload.runtime.shared_model import SharedModel

MOST_INT8_KL = 0.01  # nats a token


@dataclass(frozen=True)
class Window:
    """`length` tokens to read, and those that follow them."""

    length: int
    index: int
    tokens: Sequence[int]
    task: str = "text"


def text_tokens(text: str, tokenizer: Any) -> tuple[list[int], list[int]]:
    """What the tokenizer puts before a text (a BOS, or nothing), and the text's tokens."""
    tokens: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    begun: list[int] = tokenizer("")["input_ids"][:1]
    return [token for token in begun if token == tokenizer.bos_token_id], tokens


def windows_of(
    tokens: Sequence[int],
    length: int,
    steps: int,
    stride: int,
    count: int,
    beginning: Sequence[int] = (),
) -> list[Window]:
    """`count` windows, each `stride` tokens after the one before.

    Args:
        beginning: of every window, and counted in `length`. Models that were trained with a BOS
            need it as the sink of their attention: without it policies differ for its absence.

    Raises:
        ValueError: a text that is too short.
    """
    beginning, span = list(beginning), length - len(beginning) + steps
    needed = span + (count - 1) * stride
    if len(tokens) < needed:
        raise ValueError(
            f"the text has {len(tokens):,} tokens, but {count} windows of {length:,} + {steps} "
            f"tokens, one every {stride}, need {needed:,}; give a longer --text, or lower "
            "--context, --steps, --windows or --stride"
        )
    starts = [i * stride for i in range(count)]
    return [
        Window(length, i, [*beginning, *tokens[start : start + span]])
        for i, start in enumerate(starts)
    ]


def measure_window(
    model: SharedModel,
    labels: Sequence[str],
    window: Window,
    bounds: Sequence[Bound] = (),
    judged_every: int | None = None,
) -> dict[str, Any]:
    """The negative log-likelihood of a window's last tokens under each policy, and its divergence
    from the first one, full attention, both in nats; then under each within each bound. Where keys
    and values are int8, what diverges is measured from full attention over those of the model's
    dtype: full attention itself then has a divergence, too, that of int8 alone.

    Args:
        judged_every: what is attended to is judged at every n-th step, but not within bounds; None:
            at none.
    """
    context, following = window.tokens[: window.length], window.tokens[window.length :]
    full: list[torch.Tensor] = []
    judges: list[SelectionJudge | None] = [None] * len(labels)
    if judged_every is not None:
        dense = most_dense_layers([runtime.attention.policy for runtime in model.runtimes])
        judges = [SelectionJudge(runtime, judged_every, dense) for runtime in model.runtimes]
    if model.runtimes[0].store.format.is_int8:
        with model.unrounded() as unrounded, unrounded.read(context) as prompt:
            measure_forced(unrounded, 0, prompt, following, full)
    with model.read(context) as prompt:
        answers = {
            label: measure_forced(model, index, prompt, following, full, judges[index])
            for index, label in enumerate(labels)
        }
        seconds = round(prompt.seconds, 4)
    for index, label in enumerate(labels):
        for bound in bounds:
            with read_within(bound, model, index, context, len(following) - 1) as read:
                measured = measure_forced(read.model, 0, read.prompt, following, full)
                answers[bound.label(label)] = measured | read.measured()
    return {"prefill_seconds": seconds, "answers": answers}


def int8_warnings(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What to tell of int8 keys and values: lengths where they alone change answers by more than
    `MOST_INT8_KL`."""
    return [
        f"keys and values in int8 change this model's next tokens by a KL of {row['kl']:.3g} nats "
        f"a token behind {row['length']:,} tokens, above {MOST_INT8_KL}; keep them with "
        "--kv-dtype auto"
        for row in rows
        if row["policy"] == FULL and row["kl"] > MOST_INT8_KL
    ]


def perplexity_rows(records: Sequence[Record], labels: Sequence[str]) -> list[dict[str, Any]]:
    """One row per length and policy.

    change is the perplexity's, relative to full attention's; interval 95 % of it, by Student's t
    of the windows' differences. kl is the mean divergence of `measure_window`, in nats a token.
    Where steps were judged, METRICS are means over windows.
    """
    rows = []
    for length in dict.fromkeys(record["length"] for record in records):
        of_length = [record for record in records if record["length"] == length]

        def nll(label: str, of_length: list[Record] = of_length) -> Any:
            answers = [record["answers"][label] for record in of_length]
            return np.array([answer["nll"] / answer["tokens"] for answer in answers])

        for label in labels:
            difference = nll(label) - nll(FULL)
            interval = student_interval(difference)
            answers = [record["answers"][label] for record in of_length]
            rows.append(
                {
                    "policy": label,
                    "length": length,
                    "windows": len(of_length),
                    "tokens": sum(answer["tokens"] for answer in answers),
                    "nll": float(nll(label).mean()),
                    "perplexity": math.exp(nll(label).mean()),
                    "change": math.expm1(difference.mean()),
                    "interval": None if interval is None else [math.expm1(x) for x in interval],
                    "kl": sum(a["kl"] for a in answers) / sum(a["tokens"] for a in answers),
                    "attended_tokens": mean([answer["attended_tokens"] for answer in answers]),
                    "scored_tokens": mean([answer["scored_tokens"] for answer in answers]),
                    "decode_seconds": sum(answer["decode_seconds"] for answer in answers),
                    "decoded_tokens": sum(answer["decoded_tokens"] for answer in answers),
                    **{x: mean([a[x] for a in answers]) for x in METRICS if x in answers[0]},
                    **bound_means(answers),
                }
            )
    return rows
