"""`offload bench`: how fast this machine runs the kernels, and models with them."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from offload.cli.bench import decode, latency, pipeline, quality
from offload.cli.bench.options import (
    DTYPE_NAMES,
    LAYER_SHAPE_NAMES,
    AsJson,
    DType,
    ThreadCounts,
    check_name,
    make_table,
)
from offload.cli.commands import add_command, command_group
from offload.cli.console import print_json, running, stderr, stdout
from offload.cli.options import comma_separated, counts
from offload.cli.spelling import Command

if TYPE_CHECKING:
    from offload.bench.attention.measure import AttentionMeasurement

app = command_group(help="Measure kernels, policies and whole decode steps on this machine.")

# offload.bench.attention.measure has these, but imports torch; tests compare the two.
KERNEL_NAMES = ("dense", "sparse", "topk")

add_command(app, quality.quality)
for old in ("budget", "selection"):
    add_command(app, quality.quality, name=old, hidden=True)


@app.command(cls=Command)
def attention(
    shape: Annotated[
        str, typer.Option(help=f"Heads of this model's layer: {', '.join(LAYER_SHAPE_NAMES)}.")
    ] = "llama-3.1-8b",
    kv_len: Annotated[
        int, typer.Option("--context", "--kv-len", min=1, help="Tokens in the cache.")
    ] = 131072,
    dtype: DType = "bfloat16",
    kernel: Annotated[
        str, typer.Option(metavar="NAMES", help="Any of dense, sparse, topk, comma-separated.")
    ] = ",".join(KERNEL_NAMES),
    threads: ThreadCounts = None,
    sparse_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens per KV head that the sparse kernel attends to.")
    ] = 2048,
    topk_share: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share of the cache that topk selects.")
    ] = 0.02,
    repeats: Annotated[int, typer.Option("--repeats", "-r", min=1)] = 20,
    as_json: AsJson = False,
) -> None:
    """Time one layer's decode attention over a cache in host memory.

    [bold]dense[/bold] reads the whole cache, [bold]sparse[/bold] sorted random tokens of it,
    [bold]topk[/bold] scores every key, selects, and attends to the selection. The machine's
    own bandwidth (sequential read, row gather) is measured in the same run, on the same memory, and
    every kernel's output is compared with a float64 reference first.

    [bold]Examples[/bold]

        offload bench attention

        offload bench attention --shape smollm2-135m --context 7168 --threads 1 --kernel dense

        OFFLOAD_ISA=avx2 offload bench attention --json
    """
    check_name("--shape", shape, LAYER_SHAPE_NAMES)
    check_name("--dtype", dtype, DTYPE_NAMES)
    kernels = comma_separated(kernel, option="--kernel", available=KERNEL_NAMES)
    thread_counts = None if threads is None else counts(threads, option="--threads")

    with running():
        from rich.progress import Progress

        from offload.bench.attention.measure import SHAPES, measure_attention
        from offload.models.dtypes import DTYPES
        from offload.system.machine import describe_machine
        from offload.system.memory import available_cpus

        machine = describe_machine()
        with Progress(console=stderr(), transient=True) as progress:
            task = progress.add_task(f"{shape}, {kv_len:,} tokens", total=None)
            measurements = measure_attention(
                SHAPES[shape],
                kv_len=kv_len,
                dtype=DTYPES[dtype],
                threads=thread_counts or sorted({1, available_cpus()}),
                kernels=kernels,
                sparse_tokens=sparse_tokens,
                topk_share=topk_share,
                repeats=repeats,
                on_progress=lambda done, total: progress.update(task, completed=done, total=total),
            )
    if as_json:
        print_json(
            {
                "machine": machine,
                "load_average": os.getloadavg()[0],
                "shape": shape,
                "dtype": dtype,
                "repeats": repeats,
                "measurements": [
                    asdict(measurement) | {"yardstick_share": measurement.yardstick_share}
                    for measurement in measurements
                ],
            }
        )
    else:
        _print_table(f"{shape}, {kv_len:,} tokens, {dtype}, {machine['isa']}", measurements)


def _print_table(title: str, measurements: list[AttentionMeasurement]) -> None:
    dense = {m.num_threads: m.microseconds for m in measurements if m.kernel == "dense"}

    def cells(m: AttentionMeasurement) -> list[str]:
        of_dense = f"{m.microseconds / dense[m.num_threads]:.2f}" if m.num_threads in dense else ""
        spread = (m.microseconds_p90 - m.microseconds_p10) / 2 / m.microseconds
        return [
            m.kernel,
            str(m.num_threads),
            f"{m.tokens:,}",
            f"{m.microseconds:,.0f} ±{spread:.0%}",
            f"{m.bandwidth / 1e9:.1f}",
            f"{m.yardstick_bandwidth / 1e9:.1f}",
            f"{m.yardstick_share:.0%}",
            of_dense,
        ]

    caption = (
        "tokens: attended per KV head. memory: GB/s of a sequential read of the same cache, for "
        "sparse of the same rows. ±: half of p10 to p90."
    )
    header = ("kernel", "threads", "tokens", "µs", "GB/s", "memory", "share", "of dense")
    stdout().print(make_table(header, map(cells, measurements), title=title, caption=caption))


for command in (decode.decode, latency.latency, pipeline.pipeline):
    app.command(cls=Command)(command)
