"""`offload eval structured`: questions whose answers stand in JSON, code and tables."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import typer

from offload.bench.eval.prompt import prompt_counter
from offload.bench.eval.sample import Sample
from offload.bench.eval.structured import FIELDS, STRUCTURED_TASKS, structured_samples
from offload.cli.console import running
from offload.cli.eval import options as opt
from offload.cli.eval.scored import Setup, answer_all
from offload.cli.options import DEFAULT_MODEL, ModelName, Verbose

_COMPARED = opt.Compared(policy="quest,lychee_cluster")


def structured(
    model: ModelName = DEFAULT_MODEL,
    *,
    compared: opt.Compared = _COMPARED,
    bounds: opt.Bounds,
    questions: opt.Questions,
    tasks: Annotated[str, opt.tasks_option(STRUCTURED_TASKS)] = "all",
    fields: Annotated[
        int,
        typer.Option(
            min=1,
            max=len(FIELDS),
            help="Values of each object, function or row, all asked for: more are harder.",
            rich_help_panel=opt.TASK_PANEL,
        ),
    ] = 1,
    runs: opt.Runs,
    output: opt.Output,
    verbose: Verbose = False,
) -> None:
    """Ask for the values of one object, function or row, among many alike.

    The text is JSON, Python code or a Markdown table, all generated, and the answer begins with
    what stands before the first value. This is the question of LycheeCluster's pilot study (its
    Figure 2): does it help to select along the text's structure?

    [bold]Examples[/bold]

        offload eval structured --context 2048 --samples 5

        offload eval structured --tasks json --policy quest,lychee_cluster

        offload eval structured --budget-tokens 256,512 --resume structured.jsonl -o md
    """
    names = opt.task_names(tasks, STRUCTURED_TASKS)
    setup = Setup(model, compared.policies(), bounds.on(runs.device), runs, verbose)

    def sampler(tokenizer: Any, chat: bool) -> Callable[..., list[Sample]]:
        count_prompt = prompt_counter(tokenizer, chat=chat)
        return partial(structured_samples, num_fields=fields, count_prompt=count_prompt)

    with running(verbose=verbose):
        answer_all(
            "structured",
            setup,
            questions,
            names,
            sampler,
            output,
            settings={"tasks": names, "fields": fields},
        )
