"""`offload bench latency`: decode attention of every policy, single core against multi core."""

from __future__ import annotations

import os
from collections import Counter
from typing import Annotated, Any

import typer

from offload.cli.bench.options import (
    DTYPE_NAMES,
    LAYER_SHAPE_NAMES,
    AsJson,
    BatchSize,
    BudgetTokens,
    DType,
    PolicyOptions,
    ThreadCounts,
    option_values,
    policy_grid,
)
from offload.cli.console import (
    make_table,
    print_json,
    print_marked,
    progress_bar,
    running,
    stdout,
)
from offload.cli.options import check_name, comma_separated, counts


def latency(
    shape: Annotated[
        str,
        typer.Option(metavar="NAME", help=f"Of heads and layers: {', '.join(LAYER_SHAPE_NAMES)}."),
    ] = "llama-3.1-8b",
    n_depth: Annotated[
        str,
        typer.Option("--context", metavar="COUNTS", help="Tokens in the context."),
    ] = "4096,16384,65536,131072",
    threads: ThreadCounts = None,
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help=r"Comma-separated. \[default: all that are available]",
        ),
    ] = None,
    budget_tokens: BudgetTokens = 1024,
    option: PolicyOptions = None,
    batch_size: BatchSize = 1,
    repeats: Annotated[
        int, typer.Option("--repeats", "-r", min=1, help="Decode steps that are timed.")
    ] = 11,
    dtype: DType = "bfloat16",
    seed: Annotated[int, typer.Option(min=0, help="Of the made keys and queries.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Time decode attention under every policy, by context length and number of threads.

    Real decode steps: the token's keys and values enter the store, then each layer predicts,
    scores, selects, attends and updates. Keys and queries have the structure of real attention
    (sink, vertical, slash, topics, locality), fitted to a real model's.
    Outputs are compared with an exact reference first; the machine's memory bandwidth is measured
    in the same run, and caches are cleared between steps.

    [bold]Examples[/bold]

        offload bench latency

        offload bench latency --context 8192,131072 --policy full,exact_topk,lfps
        --option lfps.alpha=0.4

        offload bench latency --shape smollm2-135m --context 2048,7168 --threads 1 --json
    """
    check_name(dtype, DTYPE_NAMES, option="--dtype")
    check_name(shape, LAYER_SHAPE_NAMES, option="--shape")
    depths = counts(n_depth, option="--context")
    thread_counts = None if threads is None else counts(threads, option="--threads")
    values = option_values(option or [], option="--option")

    with running():
        from offload.bench.eval.labels import policy_label
        from offload.bench.latency.run import run_latency
        from offload.models.dtypes import DTYPES
        from offload.policies.registry import available_policies
        from offload.system.machine import describe_machine
        from offload.system.memory import available_cpus

        names = available_policies()
        if policy is not None:
            names = comma_separated(policy, option="--policy", available=tuple(names))
        grid = policy_grid(names, [budget_tokens], values, option="--option")
        times = Counter(each.name for each in grid)
        policies = {x.name if times[x.name] == 1 else policy_label(x): x for x in grid}
        cpus = available_cpus()
        if thread_counts is not None and max(thread_counts) > cpus:
            raise ValueError(
                f"--threads {max(thread_counts)}: this process may use {cpus} CPUs only"
            )
        machine = describe_machine() | {"load_average": round(os.getloadavg()[0], 2)}
        with progress_bar() as progress:
            task = progress.add_task("starting", total=None)
            settings, rows = run_latency(
                shape=shape,
                depths=sorted(set(depths)),
                threads=sorted(set(thread_counts or {1, cpus})),
                policies=policies,
                batch_size=batch_size,
                repeats=repeats,
                dtype=DTYPES[dtype],
                seed=seed,
                on_progress=lambda what, done, total: progress.update(
                    task, description=what, completed=done, total=total
                ),
            )
        title = (
            f"{shape}, {settings['dtype']}, batch {batch_size}, "
            f"budget {budget_tokens:,} tokens, {machine['isa']}"
        )
        if as_json:
            print_json({"machine": machine, **settings, "rows": rows})
        else:
            _print_tables(title, rows)
        for line in settings["warnings"]:
            print_marked("warning:", line, "bold yellow")


def _print_tables(title: str, rows: list[dict[str, Any]]) -> None:
    from offload.bench.latency.report import CAPTION, table_cells, threads_title

    console = stdout()
    console.print(f"{title}\n", style="bold")
    for num_threads in sorted({row["num_threads"] for row in rows}):
        header, *lines = table_cells(rows, num_threads)
        of_block = next(row for row in rows if row["num_threads"] == num_threads)
        memory = (
            f"memory {of_block['sequential_bandwidth'] / 1e9:.1f} GB/s in sequence, "
            f"{of_block['gather_bandwidth'] / 1e9:.1f} GB/s by rows"
        )
        table = make_table(
            header,
            title=f"{threads_title(num_threads)}: {memory}",
            no_wrap=True,
            padding=(0, 1, 0, 0),
            box=None,
        )
        before = None
        for line in lines:
            if before not in (None, line[1]):
                table.add_section()
                table.add_row()
            before = line[1]
            table.add_row(*line)
        console.print(table)
        console.print()
    console.print(CAPTION)
