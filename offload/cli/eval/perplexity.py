"""`offload eval perplexity`: of text that is decoded token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from offload.bench.eval.haystack import described, prose_text
from offload.bench.eval.output import (
    BOUND_LEGEND,
    INT8_LEGEND,
    PERPLEXITY_LEGEND,
    SELECTIONS_LEGEND,
    perplexity_table,
)
from offload.cli.console import print_json, print_marked, running
from offload.cli.eval import options as opt
from offload.cli.eval.scored import Setup, measure_all, print_tables
from offload.cli.options import DEFAULT_MODEL, ModelName, Text, Verbose, counts
from offload.system.machine import describe_machine

if TYPE_CHECKING:
    from offload.bench.eval.perplexity import Window
    from offload.runtime.shared_model import SharedModel


@dataclass(frozen=True)
class Read:
    """The windows of a text."""

    panel: ClassVar[str] = opt.TASK_PANEL
    text: Text = None
    lengths: Annotated[
        str,
        typer.Option(
            "--context",
            metavar="COUNTS",
            help="Tokens that are read before those that count.",
        ),
    ] = "4096"
    steps: Annotated[int, typer.Option(min=2, help="Decode steps of each window.")] = 256
    windows: Annotated[int, typer.Option(min=1, help="Windows of each length.")] = 8
    stride: Annotated[
        int | None, typer.Option(min=1, help=r"Tokens from window to window. \[default: --steps]")
    ] = None
    selections_every: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="STEPS",
            help="Judge what is attended to at every n-th decode step by exact attention, on the "
            "CPU: error of the output, overlap with the true top-k, attention mass kept.",
        ),
    ] = None


def perplexity(
    model: ModelName = DEFAULT_MODEL,
    *,
    compared: opt.Compared,
    bounds: opt.Bounds,
    read: Read,
    runs: opt.Runs,
    output: opt.Output,
    verbose: Verbose = False,
) -> None:
    """Measure the perplexity of text behind a long context, step by step.

    Prefill is exact under every policy, so that the perplexity of a prompt would judge nothing: a
    window of the text is read, and the tokens that follow are decoded one by one, whatever the
    model would have said. The windows slide over the text.

    [bold]Examples[/bold]

        offload eval perplexity --policy exact_topk,quest --budget-tokens 256

        offload eval perplexity --text book.txt --context 2048,4096,7168 --windows 16

        offload eval perplexity --policy full --host-share 0.5,0.25 --evictions reread,fitted

        offload eval perplexity --policy lfps,quest --selections-every 16

        offload eval perplexity --policy full --context 1024 --kv-dtype int8

        offload eval perplexity --steps 512 --stride 2048 --resume perplexity.jsonl --json
    """
    all_lengths, steps = counts(read.lengths, option="--context"), read.steps
    distance = read.stride or steps
    if runs.batch_size > 1:
        raise typer.BadParameter(
            f"{runs.batch_size} windows at a time are not decoded; leave it out",
            param_hint="--batch-size",
        )
    judged_every = read.selections_every
    if judged_every is not None and (runs.device != "cpu" or runs.hot_rows):
        raise typer.BadParameter(
            "selections are judged where the CPU attends to all tokens; leave out --device and "
            "--hot-rows",
            param_hint="--selections-every",
        )
    setup = Setup(model, compared.policies(), bounds.on(runs.device), runs, verbose)

    def make_windows(tokenizer: Any) -> list[Window]:
        from offload.bench.eval.perplexity import text_tokens, windows_of

        beginning, tokens = text_tokens(prose_text(read.text, "--text"), tokenizer)
        return [
            window
            for length in all_lengths
            for window in windows_of(tokens, length, steps + 1, distance, read.windows, beginning)
        ]

    def measure(
        model: SharedModel, tokenizer: Any, windows: Sequence[Window]
    ) -> list[dict[str, Any]]:
        from offload.bench.eval.perplexity import measure_window

        return [
            measure_window(model, setup.labels, window, setup.bounds, judged_every)
            for window in windows
        ]

    with running(verbose=verbose):
        setup.check_lengths([length + steps for length in all_lengths], "--context or --steps")
        if judged_every is not None and setup.is_generic:
            raise NotImplementedError(
                f"--selections-every {judged_every} needs lean layers, which {model} does not "
                "have; leave it out"
            )
        options, records = measure_all(
            "perplexity",
            setup,
            make_windows,
            measure,
            lambda tokenizer, window: len(window.tokens) - 1,
            resume=output.resume,
            settings={
                "text": described(read.text, "--text"),
                "lengths": all_lengths,
                "steps": steps,
                "windows": read.windows,
                "stride": distance,
                "selections_every": judged_every,
            },
        )
        from offload.bench.eval.perplexity import int8_warnings, perplexity_rows

        rows, is_int8 = perplexity_rows(records, setup.all_labels), runs.kv_dtype == "int8"
        if output.shown == "json":
            print_json({"machine": describe_machine(), "settings": options, "rows": rows})
        else:
            title = f"perplexity: {model}, {steps} decode steps of {read.windows} windows"
            legend = PERPLEXITY_LEGEND + SELECTIONS_LEGEND * (judged_every is not None)
            legend += BOUND_LEGEND * bool(setup.bounds) + INT8_LEGEND * is_int8
            print_tables({title: perplexity_table(rows)}, legend, output.shown)
        for warning in int8_warnings(rows) if is_int8 else ():
            print_marked("warning:", warning, "yellow")
