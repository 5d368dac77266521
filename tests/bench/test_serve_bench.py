"""`offload bench serve`: loads on the tiny model, and what is made of their times."""

from __future__ import annotations

import json
import queue
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from offload import OffloadedModel
from offload.bench.serve.load import Answer, Load, Prompts, drive
from offload.bench.serve.measure import summary
from offload.bench.serve.pace import measure_pace
from offload.bench.serve.server import ENGINES, Event, OffloadServer
from offload.cli.bench.serve import ENGINE_NAMES, serve, token_ranges
from offload.cli.commands import add_command

TEXT = [1], list(range(3, 100)) * 8
app = typer.Typer()
add_command(app, serve)


@app.callback()
def bench() -> None:
    """A group, as `offload bench` is."""


runner = CliRunner(env={"COLUMNS": "80", "TERM": "dumb"})


class Echo:
    """Answers at once; of prompts of more than 40 tokens it takes none."""

    def __init__(self) -> None:
        self.prompts: dict[str, list[int]] = {}
        self.most_at_once, self._events = 0, queue.Queue[Event]()

    def send(self, request_id: str, prompt: Sequence[int], num_tokens: int) -> None:
        if len(prompt) > 40:
            raise ValueError("too long")
        self.prompts[request_id] = list(prompt)
        for i in range(num_tokens):
            is_last = i == num_tokens - 1
            self._events.put(Event(request_id, 1, time.perf_counter(), is_last))
        self.most_at_once = max(self.most_at_once, self._events.qsize())

    def receive(self, timeout: float) -> Event | None:
        try:
            return self._events.get(timeout=timeout)
        except queue.Empty:
            return None


def test_clients_ask_one_by_one_and_the_same_in_every_load() -> None:
    server, done = Echo(), []
    load = Load((10, 20), 3, clients=2, requests=3, shared_tokens=5)
    answers = drive(server, load, Prompts(TEXT, load), lambda: done.append(1))
    assert len(answers) == len(done) == load.num_requests == 6
    assert server.most_at_once == 2 * 3
    assert all(len(answer.times) == 3 and answer.error is None for answer in answers)
    prompts = list(server.prompts.values())
    assert {tuple(prompt[:5]) for prompt in prompts} == {(1, 3, 4, 5, 6)}
    assert len({tuple(prompt) for prompt in prompts}) == 6
    assert {10 <= len(prompt) <= 20 for prompt in prompts} == {True}
    assert len({len(prompt) for prompt in prompts}) > 1
    one = Prompts(TEXT, Load((10, 20), 3, clients=8, shared_tokens=5))
    assert one.of(1, 2) == server.prompts["1 2"]


def test_requests_at_random_times() -> None:
    load = Load((10, 10), 2, rate=200.0, duration_seconds=0.2)
    sends = load.first_sends()
    assert 20 < len(sends) == load.num_requests < 80
    start = time.perf_counter()
    answers = drive(Echo(), load, Prompts(TEXT, load))
    assert [answer.sent - start >= at for answer, (at, _, _) in zip(answers, sends, strict=True)]
    assert answers[-1].sent - start >= sends[-1][0]


def test_refused_requests_are_counted() -> None:
    load = Load((41, 41), 2, clients=2, requests=2)
    row = summary(drive(Echo(), load, Prompts(TEXT, load)), load)
    assert (row["requests"], row["refused"], row["errors"]) == (4, 4, 0)
    assert row["first_error"] == "too long"
    assert row["ttft_ms_median"] is None
    assert row["answer_tokens_per_second"] is None


def test_prompts_need_text() -> None:
    with pytest.raises(ValueError, match="lower --shared-tokens"):
        Prompts(TEXT, Load((10, 20), 1, shared_tokens=10))
    with pytest.raises(ValueError, match="longer --text"):
        Prompts(TEXT, Load((1000, 1000), 1))


def test_the_summary() -> None:
    answers = [Answer(100, 1.0, [1.5, 1.6, 1.8]), Answer(50, 2.0, [3.0], error="broken")]
    row = summary([*answers, Answer(9, 2.0, error="full", is_refused=True)], Load((9, 9), 3))
    assert row["seconds"] == 2.0
    assert row["ttft_ms_median"] == pytest.approx(750)
    assert row["gap_ms_median"] == pytest.approx(150)
    assert row["gap_ms_longest"] == pytest.approx(200)
    assert row["answer_tokens_per_second"] == 2.0
    assert row["prompt_tokens_per_second"] == 75.0
    assert row["requests_per_second"] == 0.5
    assert (row["refused"], row["errors"]) == (1, 1)


@pytest.fixture(scope="module")
def model(tiny_folders: dict[str, Path]) -> Any:
    return OffloadedModel.from_pretrained(tiny_folders["llama"], policy="full", page_tokens=16)


def test_our_engine_shares_a_beginning_and_tells_its_costs(model: Any) -> None:
    server = OffloadServer(model, max_num_seqs=2)
    load = Load((60, 60), 4, clients=3, requests=2, shared_tokens=48)
    answers = drive(server, load, Prompts(TEXT, load))
    assert [len(answer.times) for answer in answers] == [4] * 6
    costs = server.costs()
    server.close()
    assert costs["cached_tokens"] >= 4 * 48
    assert 0 < costs["own_share"] < 1
    assert costs["kv_host_bytes"] > 64 * model.kv_store.token_bytes
    assert model.kv_store.host_bytes_used == 0


def test_pace(model: Any) -> None:
    server = OffloadServer(model, max_num_seqs=5, slice_seconds=1e-4)
    load = Load((150, 150), 4)
    row = measure_pace(server, load, Prompts(TEXT, load), 500)
    server.close()
    assert row["kept_share"] > 0
    assert row["kept_share"] == row["beside_tokens_per_second"] / row["alone_tokens_per_second"]
    assert min(row[name] for name in ("alone_gap_ms_longest", "beside_gap_ms_longest")) > 0
    assert model.kv_store.num_sequences == 0


def test_an_answer_that_ends_before_the_prompt_is_read(model: Any) -> None:
    load = Load((150, 150), 4)
    server = OffloadServer(model, max_num_seqs=5, slice_seconds=1e-4, read_share=0.01)
    with pytest.raises(ValueError, match="ended before all was measured"):
        measure_pace(server, load, Prompts(TEXT, load), 140)
    server.close()


@pytest.fixture
def arguments(tiny_folders: dict[str, Path], tmp_path: Path) -> list[str]:
    text = tmp_path / "text.txt"
    text.write_text("A text of a few hundred bytes, each of which is a token. " * 12)
    given = ["serve", str(tiny_folders["llama"]), "--in-process", "--text", str(text)]
    return [*given, "--policy", "full", "--dtype", "float32", "--threads", "1"]


def test_both_engines_as_json(arguments: list[str]) -> None:
    asked = ["--engines", "offload,transformers", "--clients", "1,3", "--requests", "1"]
    asked += ["--prompt-tokens", "30-40", "--answer-tokens", "5", "--json"]
    result = runner.invoke(app, [*arguments, *asked])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["machine"]["isa"]
    assert document["settings"]["engines"] == "offload,transformers"
    rows = document["rows"]
    of = [(row["engine"], row["clients"], row["prompt_tokens"]) for row in rows]
    assert of == [(name, clients, [30, 40]) for name in ENGINES for clients in (1, 3)]
    for row in rows:
        assert (row["refused"], row["errors"], row["dtype"]) == (0, 0, "float32"), row
        assert row["requests"] == row["clients"]
        assert 0 < row["gap_ms_median"] <= row["gap_ms_p99"] <= row["gap_ms_longest"]
        assert row["ttft_ms_p99"] > 0
        assert row["kv_host_bytes"] > 0
        assert (row["own_share"] is None) == (row["engine"] == "transformers")


def test_tables_fit_80_columns(arguments: list[str]) -> None:
    asked = ["--clients", "1,2", "--requests", "1", "--answer-tokens", "3", "--temperature", "1"]
    result = runner.invoke(app, [*arguments, *asked, "--prompt-tokens", "30,40"])
    assert result.exit_code == 0, result.output
    said = "float32, policy full, temperature 1, engine offload, answer 3"
    assert said in " ".join(result.stdout.split())
    _, *lines = result.stdout.splitlines()  # the title has the path
    assert max(map(len, lines)) <= 80
    headers = [line.split() for line in lines if "clients" in line]
    assert headers[1] == ["clients", "prompt", "cached", "refused", "errors", "own", "KV"]


def test_a_picture(arguments: list[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra perf is not installed")
    path = tmp_path / "load.png"
    asked = ["--clients", "1,2", "--requests", "1", "--answer-tokens", "3", "--plot", str(path)]
    result = runner.invoke(app, [*arguments, *asked, "--prompt-tokens", "30"])
    assert result.exit_code == 0, result.output
    assert path.stat().st_size > 1000


def test_pace_as_a_table(arguments: list[str]) -> None:
    asked = ["--pace", "--prompt-tokens", "100", "--answer-tokens", "5"]
    result = runner.invoke(app, [*arguments, *asked])
    assert result.exit_code == 0, result.output
    assert "kept" in result.stdout
    assert "%" in result.stdout


def test_what_is_refused(arguments: list[str]) -> None:
    assert ENGINE_NAMES == ENGINES
    assert token_ranges("512,128-2048", option="") == [(512, 512), (128, 2048)]
    for added, words in {
        "--clients 1 --rate 2": "give one of --clients and --rate",
        "--prompt-tokens 20-10": "20 is more than 10",
        "--prompt-tokens x": "expected integers",
        "--engines vllm": "available: offload, transformers",
        "--pace --plot x.png": "no picture",
        "--prompt-tokens 500": "than the model has positions",
        "--prompt-tokens 30 --plot x.gif": "must end in one of",
    }.items():
        result = runner.invoke(app, [*arguments, *added.split()])
        assert result.exit_code != 0
        assert words in " ".join(result.output.replace("│", "").split()), result.output
