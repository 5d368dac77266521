"""Groups of commands, and what they say about one that they do not have."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

from typer.core import TyperGroup


class CommandGroup(TyperGroup):
    """Names the commands that begin like an unknown one, or else are spelled like it."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """As typer does it."""
        name = args[0]
        if name not in self.commands and not name.startswith("-"):
            begin = [command for command in self.commands if command.startswith(name)]
            near = begin or get_close_matches(name, self.commands)
            guess = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
            ctx.fail(f"No such command {name!r}.{guess} Available: {', '.join(self.commands)}")
        return super().resolve_command(ctx, args)
