"""`offload bench`: how fast this machine runs the kernels, and models with them."""

from __future__ import annotations

import typer

from offload.cli.bench import decode, latency, quality
from offload.cli.commands import CommandGroup
from offload.cli.spelling import Command

app = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Measure kernels, policies and whole decode steps on this machine.",
)

for command in (decode.decode, latency.latency, quality.quality):
    app.command(cls=Command)(command)
for old, new in (
    ("budget", quality.quality),
    ("pipeline", decode.decode),
    ("selection", quality.quality),
):
    app.command(old, cls=Command, hidden=True)(new)
