"""What requests leave out is as the model's generation config has it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer
from serve.conftest import Serve, running
from transformers import GenerationConfig
from typer.testing import CliRunner

from offload.cli import app
from offload.cli.commands import add_command
from offload.cli.serve import prepare
from offload.serve.sampling_defaults import sampling_defaults
from offload.serve.server import Server

OURS = {"do_sample": True, "temperature": 0.7, "top_k": 1, "top_p": 0.9, "repetition_penalty": 1.5}
HELLO: list[Any] = [{"role": "user", "content": "hello"}]
GIVEN = {name: value for name, value in OURS.items() if name != "do_sample"}
PLAIN: dict[str, Any] = {"temperature": 1, "top_p": 1, "top_k": 0, "repetition_penalty": 1}


def said(http: httpx.Client, path: str, **fields: Any) -> str:
    """The text of an answer; the seed is the same for all."""
    given: dict[str, Any] = {"messages": HELLO, "max_tokens": 16}
    if path == "responses":
        given = {"input": "hello", "max_output_tokens": 16}
    if path == "completions":
        given = {"prompt": "hello", "max_tokens": 16}
    answer = http.post(f"/v1/{path}", json=given | {"seed": 5} | fields)
    assert answer.status_code == 200, answer.text
    made = answer.json()
    if path == "responses":
        return str(made["output"][0]["content"][0]["text"])
    (choice,) = made["choices"]
    return str(choice["text"] if path == "completions" else choice["message"]["content"])


@contextmanager
def command(*arguments: object) -> Iterator[httpx.Client]:
    """A client of what `offload serve` serves, in this process."""
    cli = typer.Typer(pretty_exceptions_enable=False)
    add_command(cli, prepare)
    given = ["--port", 0, "--threads", 1, "--dtype", "float32", *arguments]
    load, access = typer.main.get_command(cli).main([*map(str, given)], standalone_mode=False)
    with (
        running(Server(load, access)) as server,
        httpx.Client(base_url=server.url, timeout=30) as http,
    ):
        yield http


@pytest.fixture
def folder(serve_folder: Path, tmp_path: Path) -> Path:
    """The tiny model with a generation config of its own."""
    copied = Path(shutil.copytree(serve_folder, tmp_path / "tiny"))
    (copied / "generation_config.json").write_text(json.dumps(OURS))
    return copied


def test_the_command(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One line names the values. With none they are OpenAI's."""
    paths = ("completions", "chat/completions", "responses")
    caplog.set_level("INFO", "offload.serve.sampling_defaults")
    with command(folder) as http:
        ours = {path: said(http, path) for path in paths}
        assert ours == {path: said(http, path, **GIVEN) for path in paths}
        plain = {path: said(http, path, **PLAIN) for path in paths}
        assert ours != plain
        drawn = said(http, "completions", top_k=0, temperature=None)
        assert drawn == said(http, "completions", **GIVEN | {"top_k": 0})
        assert drawn not in (ours["completions"], plain["completions"])
    (line,) = [record.getMessage() for record in caplog.records]
    assert all(f"{name}={value:g}" in line for name, value in GIVEN.items())
    caplog.clear()
    with command(folder, "--generation-config", "none") as http:
        assert {path: said(http, path) for path in paths} == plain
    assert not caplog.records


def test_responses_say_what_they_had(serve: Serve) -> None:
    defaults = {"temperature": 0.7, "top_p": 0.9}
    with serve(sampling_defaults=defaults) as server:
        for fields in ({}, {"top_p": 0.8}, {"temperature": 0, "top_p": None}):
            body = {"input": "hello", "max_output_tokens": 1, **fields}
            made = httpx.post(f"{server.url}/v1/responses", json=body, timeout=30).json()
            wanted = defaults | {name: value for name, value in fields.items() if value is not None}
            assert {name: made[name] for name in defaults} == wanted


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", -1), ("temperature", 101), ("temperature", "hot"), ("top_p", 0)),
        *(("top_p", 1.5), ("top_p", float("nan")), ("top_k", 1.5), ("top_k", -2), ("top_k", True)),
        *(("min_p", 2), ("min_p", [1]), ("repetition_penalty", 0)),
    ],
)
def test_what_is_out_of_range_is_left_out(
    name: str, value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    other = "min_p" if name != "min_p" else "top_p"
    config = GenerationConfig(**{name: value, other: 0.5})
    assert sampling_defaults(config) == {other: 0.5}
    assert f"{name}={value!r}" in caplog.text


def test_a_config_that_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "offload.serve.sampling_defaults")
    assert sampling_defaults(GenerationConfig(eos_token_id=3, max_new_tokens=5)) == {}
    assert not caplog.records


def test_the_option_has_two_values() -> None:
    result = CliRunner().invoke(app, ["serve", "tiny", "--generation-config", "vllm"])
    assert result.exit_code == 2
    assert "unknown 'vllm'; available: auto, none" in " ".join(result.stderr.split())
