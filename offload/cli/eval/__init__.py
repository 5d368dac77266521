"""`offload eval`: what a policy loses, on tasks with right answers and on text."""

from __future__ import annotations

import typer

from offload.cli.commands import CommandGroup
from offload.cli.eval import needle, perplexity, ruler, structured

app = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Score policies against full attention: what do I lose?",
)


@app.callback()
def evaluate() -> None:
    """Score policies against full attention: what do I lose?

    Each prompt is read once, with exact attention, and then continued under full attention and
    under every policy. Nothing is downloaded.
    """


for command in (ruler, needle, structured, perplexity):
    command.register(app)
