"""`offload bench`: how fast this machine runs the kernels, and models with them."""

from __future__ import annotations

from offload.cli.bench import decode, latency
from offload.cli.commands import add_command, command_group

app = command_group(help="Measure kernels, policies and whole decode steps on this machine.")

for command in (decode.decode, latency.latency):
    add_command(app, command)
