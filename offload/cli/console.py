"""Where the commands write: results to stdout, everything else to stderr."""

from __future__ import annotations

import codecs
import contextlib
import io
import json
import logging
import sys
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.logging import RichHandler
from rich.text import Text

if TYPE_CHECKING:
    from rich.console import OverflowMethod
    from rich.progress import Progress
    from rich.table import Table

logger = logging.getLogger(__name__)

_REFUSALS = (ValueError, OSError, RuntimeError, MemoryError)
_OF_TYPER = (typer.Exit, typer.Abort, typer.BadParameter)


def stdout() -> Console:
    """For results. Made when needed, because tests and callers replace sys.stdout.

    Brackets are no markup: names of models and files come from outside. Styles are arguments.
    """
    return Console(highlight=False, markup=False, soft_wrap=not sys.stdout.isatty())


def stderr() -> Console:
    """For logs, progress and errors; without markup, as `stdout`."""
    return Console(stderr=True, highlight=False, markup=False, soft_wrap=not sys.stderr.isatty())


def print_marked(mark: str, text: str, style: str) -> None:
    """A line on stderr that begins with a styled word, such as "error:"."""
    stderr().print(Text.assemble((mark, style), " ", text), soft_wrap=True)


def make_table(
    header: Sequence[str],
    rows: Iterable[Sequence[str | Text]] = (),
    *,
    words: Collection[int] = (0,),
    no_wrap: bool = False,
    overflow: OverflowMethod = "ellipsis",
    **options: Any,
) -> Table:
    """A table whose columns `words` stand to the left, the others to the right."""
    from rich.table import Table

    table = Table(title_justify="left", caption_justify="left", **options)
    for i, name in enumerate(header):
        table.add_column(
            name, justify="left" if i in words else "right", no_wrap=no_wrap, overflow=overflow
        )
    for row in rows:
        table.add_row(*row)
    return table


def progress_bar() -> Progress:
    """On stderr, gone when done."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    return Progress(*columns, TimeRemainingColumn(), console=stderr(), transient=True)


def print_json(result: Mapping[str, Any]) -> None:
    """The result of a command for another program: one JSON document on stdout."""
    print(json.dumps(result, indent=2))


def writable(path: Path, option: str) -> Path:
    """The file that an option names, where one can be written.

    Raises:
        ValueError: a folder, or in none that there is.
    """
    path = path.expanduser()
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir():
        bad = "is a folder" if path.is_dir() else f"cannot be written: no folder {folder}"
        raise ValueError(f"{option} {path} {bad}")
    return path


@contextlib.contextmanager
def running(*, verbose: bool = False, log_format: str | None = None) -> Iterator[None]:
    """What every command runs in: logs go to stderr, and refusals become one line there.

    A refusal is an error that tells the user what to change; the exit code is 1. Everything else
    is a defect of this program and keeps its traceback.

    Args:
        log_format: of a server, which writes what other packages log in it, too: "text" or "json",
            as which refusals and defects are records as well.
    """
    if sys.stdout is None:  # closed, as by >&-
        print_marked("error:", "stdout is closed, where the result would go", "bold red")
        raise typer.Exit(1)
    _escape_what_stdout_lacks()
    with _logs(log_format, verbose=verbose), warnings.catch_warnings():
        if not verbose:
            warnings.simplefilter("ignore")
        try:
            yield
        except BrokenPipeError:  # whoever read has what it wanted; typer ends without a word
            raise
        except Exception as error:
            is_refusal = isinstance(error, _REFUSALS) and _is_refusal(error)
            if log_format == "json" and not isinstance(error, _OF_TYPER):
                logger.error("%s", error, exc_info=not is_refusal)
            elif is_refusal:
                print_marked("error:", str(error), "bold red")
            else:
                raise
            raise typer.Exit(1) from error


def _escape_what_stdout_lacks() -> None:
    """An answer may have characters that a terminal's encoding has not, such as Latin-1: they show
    as \\u2603, as on stderr. UTF-8 stays as it is: it has them all."""
    out = sys.stdout
    if isinstance(out, io.TextIOWrapper) and codecs.lookup(out.encoding).name != "utf-8":
        out.reconfigure(errors="backslashreplace")


def _is_refusal(error: Exception) -> bool:
    if "DefaultCPUAllocator: can't allocate memory" in str(error):  # torch's MemoryError
        return True
    if not isinstance(error, RuntimeError) or isinstance(error, NotImplementedError | MemoryError):
        return True
    # These import torch, which whoever raised them has done.
    from offload.ranks.watch import PeerError
    from offload.system.errors import NoGPUError

    return isinstance(error, NoGPUError | PeerError)


@contextlib.contextmanager
def _logs(log_format: str | None, *, verbose: bool) -> Iterator[None]:
    ours = logging.getLogger("offload")
    whose = ours if log_format is None else logging.getLogger()
    handler: logging.Handler
    if log_format is None and sys.stderr.isatty():
        handler = RichHandler(console=stderr(), show_path=False, show_time=False)
    else:  # rich would wrap it
        lines = logging.Formatter("%(levelname)-8s %(message)s")
        if log_format is not None:
            from offload.serve.log_lines import FORMS

            lines = FORMS[log_format]
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(lines)
    before = ours.level
    whose.addHandler(handler)
    ours.setLevel(logging.DEBUG if verbose else logging.INFO)
    logging.captureWarnings(log_format is not None)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        ours.setLevel(before)
        whose.removeHandler(handler)


@contextlib.contextmanager
def no_loading_bars() -> Iterator[None]:
    """Not a bar of transformers for each model that is loaded, across ours."""
    from transformers.utils import logging as transformers_logging

    logging: Any = transformers_logging  # parts of it are untyped
    had_bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if had_bars:
            logging.enable_progress_bar()


@contextlib.contextmanager
def quiet_transformers(*, verbose: bool) -> Iterator[None]:
    """Hide what transformers logs below the level of errors, unless `verbose`."""
    from transformers.utils import logging as transformers_logging

    before: int = transformers_logging.get_verbosity()
    if not verbose:
        transformers_logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)
