"""`offload eval`: what a policy loses, on tasks with right answers and on text."""

from __future__ import annotations

from offload.cli.commands import add_command, command_group
from offload.cli.eval.perplexity import perplexity
from offload.cli.eval.ruler import ruler

app = command_group(
    help="Score policies against full attention: what do I lose?\n\n"
    "Each prompt is read once, with exact attention, and then continued under full attention and "
    "under every policy. Nothing is downloaded."
)
for command in (ruler, perplexity):
    add_command(app, command)
