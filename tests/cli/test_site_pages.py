"""The pages of the documentation that are made when it is built."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def site_pages(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    spec = importlib.util.spec_from_file_location("site_pages", ROOT / "docs" / "site_pages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_links_of_the_repository_become_links_of_the_site(site_pages: ModuleType) -> None:
    text = "[a](docs/gpu.md#speed) [b](CONTRIBUTING.md) [c](#here) [d](https://x.org/docs/a.md)"
    wanted = "[a](gpu.md#speed) [b](contributing.md) [c](#here) [d](https://x.org/docs/a.md)"
    assert site_pages.links_of_site(text, "", "index.md") == wanted
    text, wanted = (
        "[a](../../README.md#status) [b](../gpu.md)",
        "[a](../index.md#status) [b](../gpu.md)",
    )
    assert site_pages.links_of_site(text, "docs/how-to", "how-to/x.md") == wanted


def test_a_section_that_is_gone_is_an_error(site_pages: ModuleType) -> None:
    assert "class Strided" in site_pages.section("CONTRIBUTING.md", "Add a policy", "x.md")
    with pytest.raises(ValueError, match="has no section 'Add a room'"):
        site_pages.section("CONTRIBUTING.md", "Add a room", "x.md")


def test_the_reference_has_every_command(site_pages: ModuleType) -> None:
    text = site_pages.commands()
    alone = ("generate", "serve", "plan", "env", "calibrate")
    for command in (*alone, "bench decode", "eval perplexity", "inspect heads"):
        assert f"# `offload {command}`\n" in text
    assert "--tensor-parallel-size N`" in text
    assert "<span" not in text
    assert "&quot;" not in text
