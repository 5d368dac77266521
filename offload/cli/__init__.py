"""The `offload` command.

Results go to stdout, logs and progress to stderr. Each command imports what it needs when it runs,
so that `--help` answers at once.
"""

from __future__ import annotations

from typing import Annotated

import typer

from offload.cli import bench, sessions
from offload.cli import eval as eval_commands
from offload.cli.calibrate import calibrate
from offload.cli.commands import add_command, command_group
from offload.cli.download import download
from offload.cli.env import env
from offload.cli.generate import generate
from offload.cli.plan import plan
from offload.cli.serve import serve
from offload.cli.train_heads import train_heads
from offload.system.version import __version__

app = command_group(name="offload", pretty_exceptions_show_locals=False)
for command in (generate, serve, plan, env, download, calibrate, train_heads):
    add_command(app, command)
app.add_typer(bench.app, name="bench")
app.add_typer(eval_commands.app, name="eval")
app.add_typer(sessions.app, name="sessions")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"offload {__version__}")
        raise typer.Exit


@app.callback()
def offload(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print and exit."),
    ] = False,
) -> None:
    """LLM decoding with the KV cache in host memory.

    Start with [bold]offload generate --demo[/bold]: a small model that is embedded in a package
    reads 6,000 tokens and answers a question about one sentence of them.
    """
