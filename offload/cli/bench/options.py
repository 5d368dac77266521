"""Options, names and tables that the commands of `offload bench` share."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.table import Table

# offload.bench and offload.models have these, but import torch; tests compare the two.
MODEL_SHAPE_NAMES = ("llama-3.1-8b", "llama-3.2-1b", "smollm2-135m", "tiny")
LAYER_SHAPE_NAMES = ("llama-3.1-8b", "llama-3.2-1b", "qwen2.5-7b", "qwen3-8b", "smollm2-135m")
DTYPE_NAMES = ("bfloat16", "float16", "float32")

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON with the machine.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Sequences that decode together.")]
BudgetTokens = Annotated[int, typer.Option(min=1, help="Tokens that each KV head attends to.")]
DType = Annotated[str, typer.Option(help=f"{', '.join(DTYPE_NAMES)}.")]
PolicyOptions = Annotated[
    list[str] | None,
    typer.Option(metavar="POLICY.NAME=VALUE", help="Such as lfps.alpha=0.4. Repeatable."),
]
TextModelName = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Instead of --shape: a model (folder, .gguf file, hub id, or "
        "smollm2-135m-instruct) that reads real text, within its positions.",
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(min=1, help=r"CPU threads. \[default: all it may use]", show_default=False),
]
ThreadCounts = Annotated[
    str | None,
    typer.Option(
        metavar="COUNTS",
        help=r"Such as 1,2. \[default: 1 and all this process may use]",
        show_default=False,
    ),
]


def check_name(option: str, name: str | None, available: Collection[str]) -> None:
    """A usage error for a name that is given and not `available`."""
    if name is not None and name not in available:
        raise typer.BadParameter(
            f"unknown {name!r}; available: {', '.join(available)}", param_hint=option
        )


def check_one_source(shape: str | None, model: str | None) -> None:
    """A usage error if both are given."""
    if shape is not None and model is not None:
        raise typer.BadParameter("give one of --shape and --model", param_hint="--model")


def make_table(
    header: Sequence[str],
    rows: Iterable[Sequence[str]] = (),
    *,
    words: Collection[int] = (0,),
    no_wrap: bool = False,
    **options: Any,
) -> Table:
    """A table whose columns `words` stand to the left, the others to the right."""
    from rich.table import Table

    table = Table(title_justify="left", caption_justify="left", **options)
    for i, name in enumerate(header):
        table.add_column(name, justify="left" if i in words else "right", no_wrap=no_wrap)
    for row in rows:
        table.add_row(*row)
    return table
