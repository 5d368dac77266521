"""`offload bench latency`: decode attention of every policy, single core against multi core."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from offload.cli.console import print_json, quiet_transformers, running, stderr, stdout
from offload.cli.options import comma_separated, counts, key_values, policy_options

if TYPE_CHECKING:
    from offload.policies import Policy

SHAPE_NAMES = ("llama-3.1-8b", "llama-3.2-1b", "qwen2.5-7b", "qwen3-8b", "smollm2-135m")
DTYPE_NAMES = ("bfloat16", "float16", "float32")
OUTPUTS = ("table", "json", "csv", "md")


def register(app: typer.Typer) -> None:
    """Add the command to `offload bench`."""
    app.command()(latency)


def latency(
    shape: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help=f"Heads of this model, on made keys: {', '.join(SHAPE_NAMES)}. "
            r"\[default: llama-3.1-8b]",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Instead of --shape: a model (folder, .gguf file, hub id, or "
            "smollm2-135m-instruct) that reads real text, within its positions.",
        ),
    ] = None,
    n_depth: Annotated[
        str, typer.Option("--n-depth", "-d", metavar="COUNTS", help="Tokens in the context.")
    ] = "4096,16384,65536,131072",
    threads: Annotated[
        str | None,
        typer.Option(
            metavar="COUNTS",
            help=r"Such as 1,2. \[default: 1 and all this process may use]",
            show_default=False,
        ),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help=r"Comma-separated. \[default: all that are available]",
            show_default=False,
        ),
    ] = None,
    budget_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens that each KV head attends to.")
    ] = 1024,
    option: Annotated[
        list[str] | None,
        typer.Option(metavar="POLICY.NAME=VALUE", help="Such as lfps.alpha=0.4. Repeatable."),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences that decode together.")] = 1,
    repeats: Annotated[
        int, typer.Option("--repeats", "-r", min=1, help="Decode steps that are timed.")
    ] = 11,
    dtype: Annotated[str, typer.Option(help=f"{', '.join(DTYPE_NAMES)}.")] = "bfloat16",
    seed: Annotated[int, typer.Option(min=0, help="Of the made keys and queries.")] = 0,
    output: Annotated[str, typer.Option("--output", "-o", help=f"{', '.join(OUTPUTS)}.")] = "table",
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw time against context, a panel per thread count."),
    ] = None,
) -> None:
    """Time decode attention under every policy, by context length and number of threads.

    Real decode steps: the token's keys and values enter the store, then each layer predicts,
    scores, selects, attends and updates. Keys and queries have the structure of real attention
    (sink, vertical, slash, topics, locality), fitted to a real model's, or are a real model's own.
    Outputs are compared with an exact reference first; the machine's memory bandwidth is measured
    in the same run, and caches are cleared between steps.

    [bold]Examples[/bold]

        offload bench latency

        offload bench latency -d 8192,131072 --policy full,exact_topk,lfps --option lfps.alpha=0.4

        offload bench latency --model smollm2-135m-instruct -d 2048,7168 --threads 1 -o json
    """
    _check_name("--output", output, OUTPUTS)
    _check_name("--dtype", dtype, DTYPE_NAMES)
    if shape is not None and model is not None:
        raise typer.BadParameter("give one of --shape and --model", param_hint="--model")
    if model is None:
        shape = shape or "llama-3.1-8b"
        _check_name("--shape", shape, SHAPE_NAMES)
    depths = counts(n_depth, option="--n-depth")
    thread_counts = None if threads is None else counts(threads, option="--threads")

    with running():
        from offload.bench.latency.run import LatencyRun, run_latency
        from offload.models.dtypes import DTYPES
        from offload.policies.registry import available_policies
        from offload.system.machine import describe_machine
        from offload.system.memory import available_cpus

        names = available_policies()
        if policy is not None:
            names = comma_separated(policy, option="--policy", available=tuple(names))
        options = _options(option or [], names)
        policies = _policies(names, options, budget_tokens)
        cpus = available_cpus()
        if thread_counts is not None and max(thread_counts) > cpus:
            raise ValueError(
                f"--threads {max(thread_counts)}: this process may use {cpus} CPUs only"
            )
        if plot is not None:
            from offload.bench.latency.report import check_plot

            check_plot(plot)
        machine = describe_machine() | {"load_average": round(os.getloadavg()[0], 2)}
        run = LatencyRun(
            shape=shape,
            model=model,
            depths=tuple(sorted(set(depths))),
            threads=tuple(sorted(set(thread_counts or {1, cpus}))),
            policies=policies,
            options=options,
            batch_size=batch_size,
            repeats=repeats,
            dtype=DTYPES[dtype],
            seed=seed,
        )
        with quiet_transformers(verbose=False) if model else contextlib.nullcontext():
            result = _with_progress(run_latency, run)
    title = (
        f"{model or shape}, {result.dtype}, batch {batch_size}, budget {budget_tokens:,} tokens, "
        f"{machine['isa']}"
    )
    _print(output, title, result, machine)
    if plot is not None:
        with running():
            from offload.bench.latency.report import plot_latency

            plot_latency(result.rows(), plot, title=title)


def _with_progress(function: Any, run: Any) -> Any:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=stderr(), transient=True) as progress:
        task = progress.add_task("starting", total=None)

        def on_progress(what: str, done: int, total: int) -> None:
            progress.update(task, description=what, completed=done, total=total)

        return function(run, on_progress=on_progress)


def _options(pairs: list[str], names: list[str]) -> dict[str, dict[str, Any]]:
    """`["lfps.alpha=0.4"]` -> `{"lfps": {"alpha": 0.4}}`."""
    found: dict[str, dict[str, Any]] = {}
    for key, value in key_values(pairs, option="--option").items():
        policy, separator, name = key.partition(".")
        if not separator or not name:
            raise typer.BadParameter(
                f"expected POLICY.NAME=VALUE, got {key}={value}", param_hint="--option"
            )
        if policy not in names:
            raise typer.BadParameter(
                f"{policy!r} is not measured; policies: {', '.join(names)}", param_hint="--option"
            )
        found.setdefault(policy, {}).update(policy_options([f"{name}={value}"]))
    return found


def _policies(
    names: list[str], options: dict[str, dict[str, Any]], budget_tokens: int
) -> dict[str, Policy]:
    from offload.policies.registry import make_policy

    policies = {}
    for name in names:
        given: dict[str, Any] = {}
        if "budget_tokens" in type(make_policy(name)).option_names():
            given["budget_tokens"] = budget_tokens
        policies[name] = make_policy(name, **(given | options.get(name, {})))
    return policies


def _print(output: str, title: str, result: Any, machine: dict[str, Any]) -> None:
    from offload.bench.latency.report import latency_csv, latency_markdown

    rows = result.rows()
    if output == "json":
        print_json({"machine": machine, **result.settings(), "rows": rows})
    elif output == "csv":
        print(latency_csv(rows), end="")
    elif output == "md":
        print(f"{title}\n\n{latency_markdown(rows)}", end="")
    else:
        _print_tables(title, result, rows)
    for line in result.warnings:
        stderr().print(f"[bold yellow]warning:[/bold yellow] {line}", soft_wrap=True)


def _print_tables(title: str, result: Any, rows: list[dict[str, Any]]) -> None:
    from rich.table import Table

    from offload.bench.latency.report import TABLE_CAPTION, table_cells, threads_title

    console = stdout()
    console.print(f"[bold]{title}[/bold]\n")
    for num_threads in sorted({row["num_threads"] for row in rows}):
        header, *lines = table_cells(rows, num_threads)
        of_block = next(row for row in rows if row["num_threads"] == num_threads)
        memory = (
            f"memory {of_block['sequential_bandwidth'] / 1e9:.1f} GB/s in sequence, "
            f"{of_block['gather_bandwidth'] / 1e9:.1f} GB/s by rows"
        )
        table = Table(
            title=f"{threads_title(num_threads)}: {memory}",
            title_justify="left",
            padding=(0, 1, 0, 0),
            box=None,
        )
        for i, name in enumerate(header):
            table.add_column(name, justify="left" if i == 0 else "right", no_wrap=True)
        before = None
        for line in lines:
            if before not in (None, line[1]):
                table.add_section()
                table.add_row()
            before = line[1]
            table.add_row(*line)
        console.print(table)
        console.print()
    console.print(result.describe_statistics())
    console.print(TABLE_CAPTION)


def _check_name(option: str, name: str, available: tuple[str, ...]) -> None:
    if name not in available:
        raise typer.BadParameter(
            f"unknown {name!r}; available: {', '.join(available)}", param_hint=option
        )
