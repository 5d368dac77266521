"""English text that every machine already has: the docstrings of the Python standard library.

The demo, the benchmarks and several tests need thousands of tokens of real prose without a
download. The text is read from the source files with `ast`, so nothing is imported and the same
Python version always yields the same text.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path

# Modules of Python 3.10-3.13 whose docstrings are mostly prose, in reading order.
PROSE_MODULES = """
collections textwrap heapq difflib argparse calendar configparser statistics random fractions
shutil pathlib tempfile logging threading queue sched selectors subprocess socketserver
http.client http.cookiejar urllib.request urllib.parse email.message email.header mailbox smtplib
ftplib json pickle pprint inspect ast tokenize unittest.case unittest.mock doctest pdb cmd
optparse gettext locale codecs zipfile tarfile csv datetime decimal _pydecimal _pydatetime _pyio
typing dataclasses enum functools contextlib asyncio.events asyncio.streams asyncio.base_events
asyncio.tasks asyncio.locks concurrent.futures._base multiprocessing.pool multiprocessing.managers
"""
MIN_DOCSTRING_CHARS = 200

DEMO_CONTEXT_TOKENS = 6000
DEMO_NEEDLE = "The telephone number of the Fairhaven lighthouse is 555-0142."
DEMO_QUESTION = (
    "What is the telephone number of the Fairhaven lighthouse? Answer with one short sentence."
)
DEMO_ANSWER = "555-0142"

_SEPARATOR = "\n\n"


def _docstrings(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            docstring = ast.get_docstring(node, clean=False)
            if docstring:
                yield inspect.cleandoc(docstring)


def _source_path(module: str) -> Path | None:
    """Path of the module's source file without importing it; None if this Python lacks it."""
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        return None
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin)
    return path if path.suffix == ".py" and path.is_file() else None


@functools.cache
def _module_docstrings(module: str) -> tuple[str, ...]:
    """All of a module's docstrings; none if its source is not there."""
    path = _source_path(module)
    if path is None:
        return ()
    return tuple(_docstrings(ast.parse(path.read_text(encoding="utf-8"))))


def stdlib_prose(num_tokens: int) -> str:
    """The first of `stdlib_docstrings()`: so many tokens of any tokenizer, if there are as many."""
    text = ""
    for docstring in stdlib_docstrings():
        text += docstring + _SEPARATOR
        if len(text) > 12 * num_tokens:  # more than any tokenizer needs for prose
            break
    return text


def stdlib_docstrings() -> Iterator[str]:
    """Yield the standard library's long docstrings, deterministic for one Python version.

    Docstrings shorter than `MIN_DOCSTRING_CHARS` and those with doctest prompts are left out;
    what remains reads like a manual.

    Raises:
        RuntimeError: this Python carries no standard-library sources.
    """
    seen: set[str] = set()
    for module in PROSE_MODULES.split():
        for docstring in _module_docstrings(module):
            if len(docstring) < MIN_DOCSTRING_CHARS or ">>>" in docstring or docstring in seen:
                continue
            seen.add(docstring)
            yield docstring
    if not seen:
        raise RuntimeError(
            "found no standard-library source files to take text from; "
            "pass your own text with --prompt-file"
        )


def stdlib_paragraphs() -> list[str]:
    """The paragraphs of `stdlib_docstrings()`, in order: about 100,000 tokens."""
    return list(_paragraphs())


def _paragraphs() -> Iterator[str]:
    for docstring in stdlib_docstrings():
        for paragraph in docstring.split("\n\n"):
            if paragraph.strip():
                yield paragraph.strip()


def stdlib_sources() -> list[str]:
    """The source files of `PROSE_MODULES`, in order: more than half a million tokens of Python."""
    paths = (_source_path(module) for module in PROSE_MODULES.split())
    return [path.read_text(encoding="utf-8") for path in paths if path is not None]


def filler_prompt(
    count_tokens: Callable[[str], int],
    *,
    num_tokens: int,
    question: str,
    needle: str | None = None,
) -> str:
    """A user message of about `num_tokens` tokens: an instruction, real text, and the question.

    Args:
        count_tokens: tokens of a string, without special tokens.
        num_tokens: upper bound of the message's tokens; the last paragraph that fits decides how
            close it gets.
        question: asked after the text.
        needle: a sentence hidden in the middle of the text as a paragraph of its own.

    Raises:
        ValueError: the text of this Python is too short, or `num_tokens` leaves no room for it.
    """
    opening = "Read the text and answer the question after it."
    ending = f"Question: {question}"
    frame = [opening, ending] if needle is None else [opening, needle, ending]
    room_tokens = num_tokens - count_tokens(_SEPARATOR.join(frame)) - len(frame)
    if room_tokens <= 0:
        raise ValueError(f"a context of {num_tokens} tokens leaves no room for any text")
    chosen = _paragraphs_of(count_tokens, room_tokens)
    if needle is not None:
        chosen.insert(round(len(chosen) / 2), needle)
    return _SEPARATOR.join([opening, *chosen, ending])


def _paragraphs_of(count_tokens: Callable[[str], int], room_tokens: int) -> list[str]:
    chosen: list[str] = []
    for paragraph in _paragraphs():
        room_tokens -= count_tokens(_SEPARATOR + paragraph)
        if room_tokens < 0:
            return chosen
        chosen.append(paragraph)
    raise ValueError(
        f"the standard library's docstrings are {room_tokens} tokens short of this context; "
        "pass your own text with --prompt-file"
    )
