"""`offload bench selection`: how good the selections of the policies are."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from offload.cli.bench.options import (
    Threads,
    check_name,
    make_table,
    option_values,
    policy_grid,
)
from offload.cli.console import (
    no_loading_bars,
    print_json,
    quiet_transformers,
    running,
    stderr,
    stdout,
)
from offload.cli.options import comma_separated, counts
from offload.policies.registry import available_policies
from offload.system.text_file import read_text_file

if TYPE_CHECKING:
    from offload.policies import Policy

DEFAULT_MODEL = "smollm2-135m-instruct"
OUTPUTS = ("table", "json", "csv", "md")
_read = functools.partial(typer.Option, rich_help_panel="What is read")
_compared = functools.partial(typer.Option, rich_help_panel="What is compared")
_output = functools.partial(typer.Option, rich_help_panel="Output")


def selection(
    model: Annotated[
        str, typer.Argument(help="Folder, .gguf file, hub id, or an embedded model's name.")
    ] = DEFAULT_MODEL,
    text: Annotated[
        str | None,
        _read(
            metavar="PATH",
            help=r"Read this file. \[default: docstrings of Python's library]",
            show_default=False,
        ),
    ] = None,
    context: Annotated[
        int,
        _read(min=1, help="Tokens read before decoding."),
    ] = 6144,
    steps: Annotated[
        int,
        _read(min=1, help="Next tokens of the text to decode."),
    ] = 1000,
    sample_every: Annotated[
        int,
        _read(min=1, metavar="N", help="Compare every n-th step with exact attention."),
    ] = 20,
    policy: Annotated[
        str | None,
        _compared(
            metavar="NAMES",
            help=f"Comma-separated: {', '.join(available_policies())}. "
            r"Full attention is always measured: it is the reference. \[default: all]",
            show_default=False,
        ),
    ] = None,
    budget_tokens: Annotated[
        str | None,
        _compared(
            metavar="COUNTS",
            help=r"Tokens attended per KV head, such as 256,1024. \[default: 1024]",
            show_default=False,
        ),
    ] = None,
    budget_share: Annotated[
        float | None,
        _compared(min=0.0, max=1.0, help="A budget as a share of --context."),
    ] = None,
    option: Annotated[
        list[str] | None,
        _compared(
            metavar="[POLICY.]KEY=VALUES",
            help="An option of one or of all policies; each of several values is measured, such as "
            "lfps.alpha=0.1,0.2. Repeatable.",
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16, float32 or auto.")] = "bfloat16",
    threads: Threads = None,
    output: Annotated[
        str,
        _output("--output", "-o", help=", ".join(OUTPUTS)),
    ] = "table",
    as_json: Annotated[bool, _output("--json", help="The same as -o json.")] = False,
    plot: Annotated[
        Path | None,
        _output(
            metavar="PATH",
            help="Draw quality against budget, as .png, .svg or .pdf (needs matplotlib).",
        ),
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="More on stderr.")] = False,
) -> None:
    """Compare what policies select with what exact attention would have wanted.

    The model reads [bold]--context[/bold] tokens of real text with exact attention and is then fed
    the next tokens of the same text, whatever it would have said itself. Every policy so sees
    the same tokens, and its next-token distributions can be set against full attention's.

    Columns: [bold]attended[/bold] tokens per KV head, [bold]candidates[/bold] (keys scored
    exactly), [bold]overlap[/bold] with the true top-k of the same size, attention [bold]mass[/bold]
    kept without the sinks, also relative to exact top-k, L2 [bold]error[/bold] of the attention
    output, [bold]KL[/bold] divergence, [bold]perplexity[/bold] and its change; then how stable the
    selection is from step to step ([bold]Jaccard[/bold], and the share chosen in the last 32 steps)
    and decoded tokens/s.

    [bold]Examples[/bold]

        offload bench selection

        offload bench selection --steps 100 --policy quest,lfps --budget-tokens 256,1024

        offload bench selection --budget-share 0.02 --option lfps.alpha=0.1,0.2,0.4

        offload bench selection --text book.txt --json --plot quality.png > quality.json
    """
    names = list(available_policies())
    if policy is not None:
        names = comma_separated(policy, option="--policy", available=tuple(names))
    check_name("--output", output, OUTPUTS)
    budgets = _budgets(budget_tokens, budget_share, context)
    options = option_values(option or [], option="--option")

    with running(verbose=verbose):
        from offload.bench.selection.output import check_plot, plot_selection

        policies = policy_grid(names, budgets, options, option="--option")
        if plot is not None:
            check_plot(plot)
        settings = {
            "model": model,
            "text": text or "docstrings of the standard library",
            "dtype": dtype,
            "context": context,
            "steps": steps,
            "sample_every": sample_every,
        }
        with quiet_transformers(verbose=verbose):
            document = _measure(settings, text, policies, options, threads)
        _print(document, "json" if as_json else output)
        if plot is not None:
            plot_selection(document["rows"], plot, _title(document))
            stderr().print(f"wrote {plot}")


def _budgets(tokens: str | None, share: float | None, context: int) -> list[int]:
    budgets = [] if tokens is None else counts(tokens, option="--budget-tokens")
    if share is not None:
        budgets.append(round(share * context))
    return list(dict.fromkeys(budgets)) or [1024]


def _measure(
    described: dict[str, Any],
    text: str | None,
    policies: Sequence[Policy],
    options: dict[str, list[Any]],
    threads: int | None,
) -> dict[str, Any]:
    from offload.bench.selection.measure import (
        SelectionSettings,
        measure_selection,
        reference_options,
    )
    from offload.cli.eval.scored import progress_bar
    from offload.loading.names import load_tokenizer
    from offload.runtime.model import OffloadedModel
    from offload.system.machine import describe_machine
    from offload.system.stdlib_text import stdlib_paragraphs

    model = described["model"]
    settings = SelectionSettings(
        **{name: described[name] for name in ("context", "steps", "sample_every")},
        reference_options=reference_options(
            {key: values[0] for key, values in options.items() if len(values) == 1}
        ),
    )
    words = "\n\n".join(stdlib_paragraphs()) if text is None else read_text_file(text)
    tokens = load_tokenizer(model)(words, verbose=False)["input_ids"]
    runs = 1 + sum(policy.name != "full" for policy in policies)
    with no_loading_bars(), progress_bar() as progress:
        task = progress.add_task("", total=runs * settings.decode_steps)
        measurements = measure_selection(
            lambda made: OffloadedModel.from_pretrained(
                model, policy=made, dtype=described["dtype"], num_threads=threads
            ),
            policies,
            tokens,
            settings,
            on_policy=lambda label: progress.update(task, description=label),
            on_progress=lambda done: progress.advance(task, done),
        )
    rows = [asdict(measurement) for measurement in measurements]
    return {"machine": describe_machine(), "settings": described, "rows": rows}


def _title(document: dict[str, Any]) -> str:
    settings = document["settings"]
    return (
        f"{settings['model']}, {settings['context']:,} tokens of {settings['text']}, "
        f"{settings['steps']:,} decode steps"
    )


def _print(document: dict[str, Any], output: str) -> None:
    from offload.bench.selection.output import COLUMNS, LEGEND, cells, csv_table, markdown_table

    rows = document["rows"]
    if output == "json":
        print_json(document)
    elif output == "csv":
        print(csv_table(rows), end="")
    elif output == "md":
        print(markdown_table(rows))
    else:
        header = ("policy", *(name for name, _, _ in COLUMNS))
        lines = ([row["label"], *cells(row)] for row in rows)
        stdout().print(make_table(header, lines, title=_title(document), caption=LEGEND))
