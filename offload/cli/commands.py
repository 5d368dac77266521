"""Commands whose options are dataclasses, and groups that say what they do not have."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from copy import copy
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from typing import Annotated, Any, get_args, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from offload.cli.help import print_help


class Command(TyperCommand):
    """A command whose help is `print_help`'s."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Printed at once, as typer does it."""
        print_help(self, ctx)


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

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Printed at once, as typer does it."""
        print_help(self, ctx)


def _group() -> None:
    """Makes a group of what has one command, too."""


def command_group(**options: Any) -> typer.Typer:
    """A group whose commands are added by `add_command`."""
    return typer.Typer(
        cls=CommandGroup,
        callback=_group,
        no_args_is_help=True,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
        **options,
    )


def add_command(app: typer.Typer, command: Callable[..., Any], **settings: Any) -> None:
    """Add a command, some of whose parameters may be dataclasses: it has their fields as options.

    Defaults are the class's, or those of an instance that is the parameter's default. The help
    shows the options of a class in its `panel`, a class variable, if it has one.
    """
    parameters: list[inspect.Parameter] = []
    classes: dict[str, Any] = {}
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        cls = parameter.annotation
        if not is_dataclass(cls):
            parameters.append(parameter.replace(kind=parameter.KEYWORD_ONLY))
            continue
        classes[parameter.name] = cls
        defaults = cls if parameter.default is parameter.empty else parameter.default
        hints = get_type_hints(cls, include_extras=True)
        for field in fields(cls):
            kind, option = get_args(hints[field.name])
            option = copy(option)
            option.rich_help_panel = getattr(cls, "panel", None)
            parameters.append(
                inspect.Parameter(
                    field.name,
                    parameter.KEYWORD_ONLY,
                    default=getattr(defaults, field.name),
                    annotation=Annotated[kind, option],
                )
            )

    @functools.wraps(command)
    def expanded(**given: Any) -> Any:
        for name, cls in classes.items():
            given[name] = cls(**{field.name: given.pop(field.name) for field in fields(cls)})
        return command(**given)

    expanded.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    expanded.__annotations__ = {each.name: each.annotation for each in parameters}
    app.command(cls=Command, **settings)(expanded)
