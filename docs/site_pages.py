"""Hooks of mkdocs: pages that are made when the site is built, so that they cannot drift.

README.md, CONTRIBUTING.md and CHANGELOG.md become pages, a section of one of them may stand in
another page, and the reference of commands comes from the commands. Links are written as GitHub
wants them, relative to the file in the repository, and changed here to those of the site.
"""

from __future__ import annotations

import html
import posixpath
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.structure.files import Files

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
COMMANDS = "<!-- commands -->"
_SECTION = re.compile(r"<!-- section of (?P<file>[\w.]+): (?P<title>.+) -->")
_LINK = re.compile(r"(?P<before>\]\()(?P<target>[^)#:\s]+)(?P<after>(?:#[^)\s]*)?\))")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are files outside of docs/."""
    from mkdocs.structure.files import File  # here: tests of this file need no mkdocs

    for source, page in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=links_of_site(text, "", page)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Fill in sections and commands."""
    uri = page.file.src_uri
    if uri in PAGES.values():
        return markdown
    markdown = links_of_site(markdown, posixpath.join("docs", posixpath.dirname(uri)), uri)
    markdown = _SECTION.sub(lambda found: section(found["file"], found["title"], uri), markdown)
    return markdown.replace(COMMANDS, commands()) if COMMANDS in markdown else markdown


def section(file: str, title: str, page: str) -> str:
    """What stands under `## title` in a file of the root, without the heading."""
    text = (ROOT / file).read_text(encoding="utf-8")
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    if found is None:
        raise ValueError(f"{page}: {file} has no section {title!r}")
    return links_of_site(found[1], "", page)


def links_of_site(text: str, folder: str, page: str) -> str:
    """Links relative to `folder` of the repository become relative to a page of the site."""

    def of_site(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, link["target"]))
        inside = PAGES.get(target, target.removeprefix("docs/"))
        return link["before"] + posixpath.relpath(inside, posixpath.dirname(page)) + link["after"]

    return _LINK.sub(of_site, text)


def commands() -> str:
    """The help of all commands, as typer writes it, without the heading of the page."""
    command = [sys.executable, "-m", "typer", "offload.cli", "utils", "docs", "--name", "offload"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[1:])} failed:\n{done.stderr}")
    text = re.sub(r'<span style="font-weight: bold">(.*?)</span>', r"**\1**", done.stdout)
    text = re.sub(r"\n    (?=--)", " ", text)  # an example's second line
    return html.unescape(text).removeprefix("# `offload`\n")
