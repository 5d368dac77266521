"""`offload inspect`: what a model's attention is like, whatever the policy."""

from __future__ import annotations

from offload.cli.commands import add_command, command_group
from offload.cli.inspect.heads import heads

app = command_group(help="Look at a model's attention.")
add_command(app, heads)
