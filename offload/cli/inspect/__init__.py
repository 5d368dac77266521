"""`offload inspect`: what a model's attention is like, whatever the policy."""

from __future__ import annotations

import typer

from offload.cli.commands import CommandGroup
from offload.cli.inspect.heads import heads
from offload.cli.spelling import Command

app = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Look at a model's attention.",
)


@app.callback()
def inspect() -> None:
    """Look at a model's attention."""


app.command(cls=Command)(heads)
