"""`offload bench pipeline`: time per token with the KV in host memory, and what overlaps."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from offload.cli.bench.options import (
    DTYPE_NAMES,
    MODEL_SHAPE_NAMES,
    AsJson,
    BatchSize,
    BudgetTokens,
    DType,
    Threads,
    check_name,
    make_table,
    policy_with_budget,
    resolved_policies,
)
from offload.cli.console import print_json, running, stderr, stdout
from offload.cli.options import policy_options

if TYPE_CHECKING:
    from offload.bench.pipeline.settings import PipelineSettings

# offload.bench has these, but imports torch; tests compare the two.
BACKEND_NAMES = ("graph", "stream", "inline")


def pipeline(
    shape: Annotated[
        str, typer.Option(help=f"Model of random weights: {', '.join(MODEL_SHAPE_NAMES)}.")
    ] = "llama-3.1-8b",
    kv_len: Annotated[
        int, typer.Option("--context", "--kv-len", min=256, help="Tokens of each prompt.")
    ] = 131072,
    policy: Annotated[str, typer.Option(metavar="NAME", help="Of host attention.")] = (
        "lychee_cluster"
    ),
    budget_tokens: BudgetTokens = 1024,
    policy_option: Annotated[
        list[str] | None,
        typer.Option(
            "--option",
            "--policy-option",
            metavar="NAME=VALUE",
            help="Such as alpha=0.4. Repeatable.",
        ),
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(
            help=f"{', '.join(BACKEND_NAMES)}. " + r"\[default: the fastest that runs here]",
            show_default=False,
        ),
    ] = None,
    batch_size: BatchSize = 1,
    steps: Annotated[int, typer.Option(min=6, help="Tokens decoded after the prompts.")] = 64,
    repeats: Annotated[
        int, typer.Option("--repeats", "-r", min=1, help="Times that these are decoded.")
    ] = 2,
    traced_steps: Annotated[int, typer.Option(min=1, help="Steps that shares are of.")] = 8,
    threads: Threads = None,
    dtype: DType = "bfloat16",
    distinct_layers: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help=r"Make N layers of keys and repeat them; quicker. \[default: all]",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of weights, keys and queries.")] = 0,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the traced steps for ui.perfetto.dev."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Time decode steps of a whole model, and show what of a step overlaps.

    The model has random weights of a known shape; keys, values and queries have the structure of
    real attention, and selections differ from step to step. Shares of a traced step:
    [bold]overlapped[/bold] (GPU and CPU work), [bold]waiting[/bold] (the CPU waits for the GPU),
    [bold]exposed[/bold] (the GPU waits for the CPU) and [bold]handshake[/bold] (neither works).
    Then what the CPU's workers did in a layer, and how many of them were busy from its request to
    the reply.

    [bold]Examples[/bold]

        offload bench pipeline

        offload bench pipeline --policy lfps --option alpha=0.2 --trace steps.json

        offload bench pipeline --shape smollm2-135m --context 4096 --backend inline
    """
    check_name("--shape", shape, MODEL_SHAPE_NAMES)
    check_name("--backend", backend, BACKEND_NAMES)
    check_name("--dtype", dtype, DTYPE_NAMES)
    if traced_steps > steps - 5:
        raise typer.BadParameter(
            f"{traced_steps} of {steps} steps cannot be traced: 5 warm up; raise --steps",
            param_hint="--traced-steps",
        )
    with running():
        import torch

        from offload.bench.pipeline.settings import PipelineSettings
        from offload.models.dtypes import DTYPES

        if backend is None:
            backend = "graph" if torch.cuda.is_available() else "inline"
        (made,), _ = resolved_policies(
            [policy_with_budget(policy, budget_tokens, policy_options(policy_option or []))],
            None,
            shape,
            dtype=dtype,
            device="cpu" if backend == "inline" else "cuda",
            backend=backend,
            threads=threads,
        )
        settings = PipelineSettings(
            shape=shape,
            kv_len=kv_len,
            policy=made,
            backend=backend,
            batch_size=batch_size,
            num_steps=steps,
            num_threads=threads,
            dtype=DTYPES[dtype],
            distinct_layers=distinct_layers,
            seed=seed,
        )
        document = _measure(settings, repeats, traced_steps, trace)
    if as_json:
        print_json(document)
    else:
        _print_tables(document)
    if trace is not None:
        stderr().print(f"wrote {trace}")


def _measure(
    settings: PipelineSettings, repeats: int, traced_steps: int, trace: Path | None
) -> dict[str, Any]:
    from rich.progress import Progress

    from offload.bench.pipeline.chrome_trace import write_chrome_trace
    from offload.bench.pipeline.session import opened_session
    from offload.measuring.steps.measure import measure_pipeline
    from offload.system.machine import describe_machine

    machine = describe_machine()
    with Progress(console=stderr(), transient=True) as progress:
        making = progress.add_task("layers of keys", total=None)
        with opened_session(
            settings,
            on_layer=lambda done, total: progress.update(making, completed=done, total=total),
        ) as session:
            decoding = progress.add_task("repeats", total=repeats + 1)
            measurement, steps = measure_pipeline(
                session,
                repeats=repeats,
                traced_steps=traced_steps,
                on_progress=lambda done, total: progress.update(
                    decoding, completed=done, total=total
                ),
            )
    described = asdict(settings) | {
        "policy": settings.policy.name,
        "policy_options": asdict(settings.policy),
        "dtype": str(settings.dtype).removeprefix("torch."),
    }
    if trace is not None:
        write_chrome_trace(trace, steps, metadata=described | {"gpus": machine["gpus"]})
    return {"machine": machine, "settings": described, **asdict(measurement)}


def _print_tables(document: dict[str, Any]) -> None:
    from offload.measuring.steps.measure import memory_line, share_lines, step_line, work_lines
    from offload.measuring.steps.worker_tasks import reply_lines, task_lines

    settings, console = document["settings"], stdout()
    console.print(
        f"{settings['shape']}, {settings['kv_len']:,} tokens, batch "
        f"{settings['batch_size']}, {settings['dtype']}, {settings['policy']}, backend "
        f"{settings['backend']}",
        style="bold",
    )
    console.print(step_line(document))
    console.print(memory_line(document) + "\n")
    _print_table(["share", "of a step", "ms", "what it is"], share_lines(document))
    _print_table(["side", "work", "µs per step", "of a step"], work_lines(document))
    if workers := document["workers"]:
        columns = ["worker task", "µs per layer, all workers", "what it is"]
        _print_table(columns, task_lines(workers))
        columns = ["layer", "µs to the reply", "before tasks", "after tasks"]
        _print_table([*columns, "busy workers", "idle"], reply_lines(workers))
        if num_lost := workers["num_lost_events"]:
            stderr().print(f"{num_lost:,} events of the workers are missing: too many in a step")


def _print_table(columns: list[str], lines: list[list[str]]) -> None:
    """Numbers stand to the right, words to the left."""
    cells = lines[0] if lines else columns
    words = [i for i, cell in enumerate(cells) if not cell[0].isdigit()]
    table = make_table(columns, lines, words=words, box=None, padding=(0, 2, 0, 0))
    stdout().print(table)
    stdout().print()
