"""`offload bench pipeline` on a tiny model, and what it measures with."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from offload.bench.pipeline.session import (
    BACKENDS,
    make_cache,
    make_model,
    open_session,
    opened_session,
)
from offload.bench.pipeline.settings import PipelineSettings
from offload.cli import app
from offload.cli.bench.options import DTYPE_NAMES, MODEL_SHAPE_NAMES
from offload.cli.bench.pipeline import BACKEND_NAMES
from offload.measuring.steps.measure import measure_pipeline, share_lines, step_line
from offload.measuring.steps.step_timeline import SHARES
from offload.models.dtypes import DTYPES
from offload.models.shape import MODEL_SHAPES
from offload.policies.registry import make_policy

runner = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"})
SMALL = ["bench", "pipeline", "--shape", "tiny", "--context", "600", "--budget-tokens", "256"]
SMALL += ["--steps", "8", "--traced-steps", "2", "-r", "1", "--threads", "1"]
SMALL += ["--backend", "inline"]


def test_json_and_trace(tmp_path: Path) -> None:
    path = tmp_path / "steps.json"
    arguments = [*SMALL, "--policy", "quest", "--batch-size", "2", "--json", "--trace", str(path)]
    result = runner.invoke(app, arguments)
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["settings"]["policy"] == "quest"
    assert document["settings"]["policy_options"]["budget_tokens"] == 256
    assert document["settings"]["dtype"] == "bfloat16"
    assert (document["batch_size"], document["steps"]) == (2, 4)
    assert sum(document["shares"].values()) == pytest.approx(1)
    assert document["shares"]["overlapped"] == 0  # on a CPU they take turns
    assert document["microseconds"]["cpu"]["attend"] > 0
    assert document["memory"]["kv_host"] >= 2 * 4 * 3 * 2 * 2 * 256 * 32 * 2
    events = json.loads(path.read_text())["traceEvents"]
    rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    attend = [(rows[e["pid"], e["tid"]], e["args"]) for e in events if e["name"] == "attend"]
    led = [args["layer"] for row, args in attend if row == "requests"]
    assert led == [0, 1, 2, 3] * 2
    places = {tuple(args.values()) for row, args in attend if row == "worker 0"}
    assert {(2, row, unit) for row in (0, 1) for unit in (0, 1)} <= places
    workers = document["workers"]
    assert (workers["num_workers"], workers["num_lost_events"]) == (1, 0)
    assert min(workers["task_microseconds"].values()) > 0
    assert [reply["layer"] for reply in workers["replies"]] == [0, 1, 2, 3]
    for reply in workers["replies"]:
        assert reply["microseconds"] > reply["before_tasks_microseconds"] > 0
        assert 0 < reply["busy_workers"] <= 1
        assert 0 <= reply["idle_share"] < 1
    assert f"wrote {path}" in result.stderr.replace("\n", "")


def test_tables() -> None:
    result = runner.invoke(app, [*SMALL, "--policy", "full", "--dtype", "float32"])
    assert result.exit_code == 0, result.output
    assert "tiny, 600 tokens, batch 1, float32, full, backend inline" in result.stdout
    assert "4 steps; " in result.stdout
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines if "%" in line][:4] == [*SHARES]
    assert {"attend", "median", "slowest:"} <= {line.split()[0] for line in lines if line}
    assert "KV on the host" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "llama"], "unknown 'llama'; available: llama-3.1-8b"),
        (["--backend", "grahp"], "unknown 'grahp'; available: "),
        (["--dtype", "int8"], "unknown 'int8'; available: bfloat16"),
        (["--traced-steps", "4"], "4 of 8 steps cannot be traced"),
        (["--policy", "qest"], "unknown policy 'qest'"),
        (["--distinct-layers", "9"], "distinct_layers must be in [1, 4], got 9"),
    ],
)
def test_refusals(arguments: list[str], message: str) -> None:
    result = runner.invoke(app, [*SMALL, *arguments])
    assert result.exit_code != 0
    assert message in result.output


def test_names_that_the_command_offers() -> None:
    assert tuple(MODEL_SHAPES) == MODEL_SHAPE_NAMES
    assert tuple(BACKENDS) == BACKEND_NAMES
    assert tuple(DTYPES) == DTYPE_NAMES


def settings(**changes: object) -> PipelineSettings:
    options: dict[str, object] = {
        "shape": "tiny",
        "kv_len": 600,
        "policy": make_policy("lfps", budget_tokens=256),
        "backend": "inline",
        "num_steps": 10,
        "num_threads": 1,
        "dtype": torch.float32,
    }
    return PipelineSettings(**(options | changes))  # type: ignore[arg-type]


def test_every_repeat_decodes_the_same() -> None:
    with opened_session(settings()) as session:
        decoded = []
        for _ in range(2):
            session.rewind()
            tokens = []
            for _ in range(session.num_steps):
                session.decode(1)
                tokens.append(session._tokens.tolist())  # type: ignore[attr-defined]
            decoded.append(tokens)
    assert decoded[0] == decoded[1]
    assert len({token for (token,) in decoded[0]}) > 1


def test_measurement_without_traces() -> None:
    with opened_session(settings(host_work="none")) as session:
        measurement, steps = measure_pipeline(session, repeats=1, traced_steps=0)
    assert steps == []
    row = asdict(measurement)
    assert row["shares"] is None
    assert row["traced_milliseconds"] is None
    assert row["microseconds"] == {"gpu": {}, "cpu": {}}
    assert row["workers"] is None


def test_several_sessions_over_one_cache() -> None:
    of_lfps = settings()
    stock = make_model(of_lfps)
    policies = [of_lfps.policy, make_policy("full")]
    cache = make_cache(of_lfps, stock, policies)
    decoded = []
    for policy in [*policies, of_lfps.policy]:
        session = open_session(replace(of_lfps, policy=policy), stock, cache)
        session.decode(session.num_steps)
        decoded.append(session._tokens.tolist())  # type: ignore[attr-defined]
        session.close()
    assert decoded[0] == decoded[2]
    cache.close()


def test_made_keys_reach_beyond_the_shape() -> None:
    """A GPU's tables have room for as many tokens as the model has positions."""
    beyond = settings(kv_len=13_000)
    positions = make_model(beyond).config.max_position_embeddings
    assert positions >= beyond.kv_len + beyond.num_steps


def test_measurement() -> None:
    done: list[tuple[int, int]] = []
    with opened_session(settings(policy=make_policy("full"))) as session:
        measurement, steps = measure_pipeline(
            session, repeats=2, traced_steps=3, on_progress=lambda *at: done.append(at)
        )
        for options, message in (({"repeats": 0}, "repeats"), ({"traced_steps": 6}, "traced")):
            with pytest.raises(ValueError, match=f"{message}.* must be"):
                measure_pipeline(session, **options)
    assert done == [(1, 3), (2, 3), (3, 3)]
    assert len(steps) == 3
    assert measurement.steps == 2 * 6
    row = asdict(measurement)
    assert row["tokens_per_second"] == pytest.approx(1e3 / row["milliseconds"])
    assert "12 steps" in step_line(row)
    assert [line[0] for line in share_lines(row)] == [*SHARES]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shape": "big"}, "unknown shape 'big'; available: llama"),
        ({"backend": "fast"}, "unknown backend 'fast'; available: graph, stream, inline"),
        ({"host_work": "some"}, "unknown host_work 'some'; available: attend, none"),
    ],
)
def test_sessions_that_cannot_be_opened(changes: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message), opened_session(settings(**changes)):
        pass
