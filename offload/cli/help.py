"""What `--help` prints: names of options are whole, and examples can be copied, at any width.

typer's own tables have a column for each part of an option and cut what does not fit. Here an
option that is too long for the left column has a line of its own, and an example that is too long
for the terminal goes on behind a backslash.
"""

from __future__ import annotations

import inspect
import re
import shlex
from typing import TYPE_CHECKING, Any

from offload.cli.console import stdout

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

_INDENT = "  "
_EXAMPLE = " " * 4
_VALUES = {"int": "N", "float": "X", "path": "PATH", "file": "PATH", "dir": "PATH", "str": "TEXT"}
_OPTION = r"(?<![\w-])--?[a-zA-Z][\w-]*"


def print_help(command: Any, ctx: Any) -> None:
    """Print the help of a command or a group to stdout."""
    console = stdout()
    for line in _wrapped(" ".join(command.get_usage(ctx).split()), console, console.width):
        console.print(line, style="bold", soft_wrap=True)
    _print_description(console, command.help or "")
    panels: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
    for param in command.get_params(ctx):
        record = param.get_help_record(ctx)
        if record is None:  # hidden
            continue
        is_argument = param.param_type_name == "argument"
        default = "Arguments" if is_argument else "Options"
        panel = getattr(param, "rich_help_panel", None) or default
        term = re.sub(" <.*>", "", record[0]) if is_argument else _term(record[0])
        panels.setdefault(panel, []).append((term, _plain(record[1])))
    commands = getattr(command, "commands", {})
    panels["Commands"] = [(x, _first(of.help)) for x, of in commands.items() if not of.hidden]
    for panel, rows in panels.items():
        if rows:
            _print_rows(console, panel, rows)


def example_lines(example: str, width: int) -> list[str]:
    """A command as a shell takes it, in lines of at most `width` characters, behind a backslash.

    They break before an option if that is possible, else before any word, and words stay whole.
    """
    words, indent, lines = _words(example), "", []
    while len(indent + " ".join(words)) > width:
        fitting = [
            i for i in range(1, len(words)) if len(f"{indent}{' '.join(words[:i])} \\") <= width
        ]
        if not fitting:
            break
        before_option = [i for i in fitting if words[i].startswith(("-", "|", ">"))]
        cut = max(before_option or fitting)
        lines.append(f"{indent}{' '.join(words[:cut])} \\")
        words, indent = words[cut:], _INDENT
    return [*lines, indent + " ".join(words)]


def _words(command: str) -> list[str]:
    lexer = shlex.shlex(command, posix=False)
    lexer.whitespace_split, lexer.commenters = True, ""
    return list(lexer)


def _term(term: str) -> str:
    """`-n, --steps <int range>` -> `-n, --steps N`: what typer and click call types is theirs."""
    for kind, value in _VALUES.items():
        term = re.sub(f" <{kind}[^>]*>", f" {value}", term)
    return term


def _plain(text: str) -> str:
    """Help of an option without markup; what stands in brackets at its end is in one pair."""
    text = " ".join(re.sub(r"\[/?bold\]", "", text.replace("\\[", "[")).split())
    return re.sub(r"\[(default: [^\]]*)\] \[", r"[\1; ", text)


def _first(text: str | None) -> str:
    """The first paragraph."""
    return _plain(inspect.cleandoc(text or "").split("\n\n")[0])


def _wrapped(text: str | Text, console: Console, width: int) -> list[Text]:
    from rich.text import Text

    lines = list((Text(text) if isinstance(text, str) else text).wrap(console, width))
    for line in lines:
        line.rstrip()
    return lines


def _print_description(console: Console, text: str) -> None:
    from rich.text import Text

    for paragraph in inspect.cleandoc(text).split("\n\n"):
        console.print()
        if paragraph.startswith(_EXAMPLE):
            for line in example_lines(paragraph, console.width - len(_EXAMPLE)):
                console.print(_EXAMPLE + line, style="cyan", soft_wrap=True)
            continue
        shown = Text.from_markup(" ".join(paragraph.split()))
        for wrapped in _wrapped(shown, console, console.width):
            console.print(wrapped, soft_wrap=True)


def _print_rows(console: Console, panel: str, rows: list[tuple[str, str]]) -> None:
    """Terms to the left, and what they mean to the right, or below a term that is too long."""
    from rich.text import Text

    most = 3 * console.width // 10
    left = max((len(term) for term, _ in rows if len(term) <= most), default=most)
    indent = len(_INDENT) + left + 2
    console.print()
    console.print(f"{panel}:", style="bold")
    for term, meaning in rows:
        shown = Text(_INDENT + term)
        shown.highlight_regex(_OPTION, "cyan")
        lines = _wrapped(meaning, console, max(console.width - indent, 20))
        if len(term) <= left and lines:
            shown.append(" " * (indent - len(shown)))
            shown.append_text(lines.pop(0))
        console.print(shown, soft_wrap=True)
        for line in lines:
            console.print(Text(" " * indent).append_text(line), soft_wrap=True)
