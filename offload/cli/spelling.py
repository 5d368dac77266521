"""An option has one spelling in all commands; those that it had before are still taken."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

from offload.cli.help import print_help

OLD_SPELLINGS = frozenset(
    {
        *("--contexts", "--kv-len", "--length", "--lengths", "--n-depth", "--tokens", "-d"),
        "--num-threads",
        "--policy-option",
    }
)


class Command(TyperCommand):
    """A command that takes the `OLD_SPELLINGS` of its options, but shows only the others."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._old: list[tuple[Any, list[str]]] = []
        for param in self.params:
            old = [spelling for spelling in param.opts if spelling in OLD_SPELLINGS]
            param.opts = [spelling for spelling in param.opts if spelling not in old]
            if old:
                self._old.append((param, old))

    def make_parser(self, ctx: Any) -> Any:
        """The parser knows the old spellings, too."""
        parser = super().make_parser(ctx)
        for param, old in self._old:
            action = "append" if param.multiple else "store"
            parser.add_option(obj=param, opts=old, dest=param.name, action=action, nargs=1)
        return parser

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Printed at once, as typer does it."""
        print_help(self, ctx)
