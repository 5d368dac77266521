"""What policies make of prompts: right answers, and the likelihood of text that goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from offload.bench.eval.answers import answer_sample
from offload.bench.eval.perplexity import Window, measure_window, perplexity_rows
from offload.bench.eval.summary import cell_rows, summaries
from offload.policies import Policy
from offload.policies.registry import make_policy
from offload.runtime.config import RuntimeConfig
from offload.runtime.shared_model import SharedModel
from perf.papers.kinds_of_text import (
    MODEL,
    QUESTIONS,
    items_until,
    length_of,
    load_cached_tokenizer,
)
from perf.results_file import Run

JUDGED_SEED = 1000  # other prompts than those that something was chosen on
ALL_LENGTHS = 0


def judge(
    policies: Mapping[str, Policy],
    kinds: Sequence[str],
    lengths: Sequence[int],
    config: RuntimeConfig,
    deadline: float,
    run: Run,
) -> list[dict[str, Any]]:
    """Ask policies by their labels, and full attention beside them, until `deadline`.

    Returns:
        rows of "answers" (all questions together; one of each kind of question too) and "cells",
        as `offload eval` has them, and of "text", by length and for `ALL_LENGTHS`.
    """
    model = SharedModel(MODEL, [make_policy("full"), *policies.values()], config)
    labels, tokenizer = ["full", *policies], load_cached_tokenizer()
    run.say(f"{len(labels)} policies are loaded")
    asked, texts = [], []
    for item in items_until(deadline, kinds, lengths, first_seed=JUDGED_SEED):
        key = {"task": item.task, "length": length_of(item), "index": item.index}
        if isinstance(item, Window):
            texts.append(key | measure_window(model, labels, item))
        else:
            asked.append(key | answer_sample(model, labels, tokenizer, item, chat=True))
        run.say(f"judged by {item.task}, {key['length']} tokens, seed {item.index}")
    rows = [{"part": "cells"} | row for row in cell_rows(asked, labels)]
    for task in ("all", *(kind for kind in QUESTIONS if kind in kinds)):
        of_task = [record for record in asked if task in ("all", record["task"])]
        rows += [  # a kind that the time was too short for has no prompts
            {"part": "answers", "task": task, "prompts": len(of_task)} | row
            for row in (summaries(of_task, labels) if of_task else [])
        ]
    together = [record | {"length": ALL_LENGTHS} for record in texts]
    rows += [{"part": "text"} | row for row in perplexity_rows(together + texts, labels)]
    return rows
