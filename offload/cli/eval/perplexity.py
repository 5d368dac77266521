"""`offload eval perplexity`: of text that is decoded token by token."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from offload.cli.console import print_json, running
from offload.cli.eval import options as opt
from offload.cli.eval.scored import Setup, check_lengths, measure_all, print_tables
from offload.cli.options import counts
from offload.cli.spelling import Command

if TYPE_CHECKING:
    from offload.bench.eval.perplexity import Window
    from offload.runtime.shared_model import SharedModel


def register(app: typer.Typer) -> None:
    """Add the command to `offload eval`."""
    app.command(cls=Command)(perplexity)


def perplexity(
    model: opt.Model = opt.DEFAULT_MODEL,
    policy: opt.Policies = "auto",
    budget_tokens: opt.BudgetTokens = "1024",
    option: opt.PolicyOptions = None,
    host_share: opt.HostShares = "",
    evictions: opt.Evictions = opt.DEFAULT_EVICTIONS,
    text: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help=r"A file, or a folder of .txt and .md files. \[default: docstrings of Python's "
            r"library]",
            show_default=False,
            rich_help_panel=opt.TASK_PANEL,
        ),
    ] = None,
    lengths: Annotated[
        str,
        typer.Option(
            "--context",
            "--lengths",
            metavar="COUNTS",
            help="Tokens that are read before those that count.",
            rich_help_panel=opt.TASK_PANEL,
        ),
    ] = "4096",
    steps: Annotated[
        int,
        typer.Option(min=2, help="Decode steps of each window.", rich_help_panel=opt.TASK_PANEL),
    ] = 256,
    windows: Annotated[
        int, typer.Option(min=1, help="Windows of each length.", rich_help_panel=opt.TASK_PANEL)
    ] = 8,
    stride: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=r"Tokens from window to window. \[default: --steps]",
            show_default=False,
            rich_help_panel=opt.TASK_PANEL,
        ),
    ] = None,
    dtype: opt.Dtype = "bfloat16",
    device: opt.Device = "cpu",
    threads: opt.Threads = None,
    page_tokens: opt.PageTokens = 256,
    resume: opt.Resume = None,
    output: opt.Output = "table",
    as_json: opt.AsJson = False,
    verbose: opt.Verbose = False,
) -> None:
    """Measure the perplexity of text behind a long context, step by step.

    Prefill is exact under every policy, so that the perplexity of a prompt would judge nothing: a
    window of the text is read, and the tokens that follow are decoded one by one, whatever the
    model would have said. The windows slide over the text.

    [bold]Examples[/bold]

        offload eval perplexity --policy exact_topk,quest --budget-tokens 256

        offload eval perplexity --text book.txt --context 2048,4096,7168 --windows 16

        offload eval perplexity --policy full --host-share 0.5,0.25 --evictions reread,fitted

        offload eval perplexity --steps 512 --stride 2048 --resume perplexity.jsonl --json
    """
    all_lengths = counts(lengths, option="--context")
    shown, distance = opt.output_format(output, as_json), stride or steps
    setup = Setup(
        model,
        opt.policies_of(policy, budget_tokens, option),
        opt.bounds_of(host_share, evictions, device),
        dtype,
        device,
        threads,
        page_tokens,
        verbose,
    )

    def make_windows(tokenizer: Any) -> list[Window]:
        from offload.bench.eval.haystack import prose_text
        from offload.bench.eval.perplexity import text_tokens, windows_of

        beginning, tokens = text_tokens(prose_text(text, "--text"), tokenizer)
        return [
            window
            for length in all_lengths
            for window in windows_of(tokens, length, steps + 1, distance, windows, beginning)
        ]

    def measure(model: SharedModel, tokenizer: Any, window: Window) -> dict[str, Any]:
        from offload.bench.eval.perplexity import measure_window

        return measure_window(model, setup.labels, window, setup.bounds)

    with running(verbose=verbose):
        from offload.bench.eval.haystack import described

        check_lengths(model, [length + steps for length in all_lengths], "--context or --steps")
        options, records = measure_all(
            "perplexity",
            setup,
            make_windows,
            measure,
            lambda tokenizer, window: len(window.tokens) - 1,
            resume=resume,
            settings={
                "text": described(text, "--text"),
                "lengths": all_lengths,
                "steps": steps,
                "windows": windows,
                "stride": distance,
            },
        )
        from offload.bench.eval.output import BOUND_LEGEND, PERPLEXITY_LEGEND, perplexity_table
        from offload.bench.eval.perplexity import perplexity_rows
        from offload.system.machine import describe_machine

        rows = perplexity_rows(records, setup.all_labels)
        if shown == "json":
            print_json({"machine": describe_machine(), "settings": options, "rows": rows})
        else:
            title = f"perplexity: {model}, {steps} decode steps of {windows} windows"
            legend = PERPLEXITY_LEGEND + BOUND_LEGEND * bool(setup.bounds)
            print_tables({title: perplexity_table(rows)}, legend, shown)
