"""`offload bench decode` at tiny shapes on the CPU, and what it measures with."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases.tiny_shapes import TINY_WINDOWED
from typer.testing import CliRunner

from offload.bench.decode.baselines.transformers_compiled import CannotCompileError
from offload.bench.decode.engines import ENGINES, describe
from offload.bench.decode.models import RandomModel, TextModel
from offload.bench.eval.haystack import prose_text
from offload.cli import app
from offload.cli.bench import decode as bench_decode
from offload.cli.bench.options import DTYPE_NAMES, MODEL_SHAPE_NAMES
from offload.decode.gpu.placement import HeadPlacement, Place
from offload.measuring.steps.measure import WARM_UP_STEPS, measure_steps
from offload.measuring.steps.step_timeline import SHARES
from offload.models.dtypes import DTYPES
from offload.models.shape import MODEL_SHAPES, weight_elements
from offload.policies.registry import make_policy
from offload.runtime.config import BACKENDS, runtime_config

pytestmark = pytest.mark.slow

CONFIG = runtime_config(device="cpu", num_threads=1)
runner = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"})
FAST = ["--steps", "6", "-r", "1", "--baseline-steps", "2", "--threads", "1", "--device", "cpu"]
SMALL = ["bench", "decode", "--shape", "tiny", "--budget-tokens", "256", *FAST]


def run(*arguments: str) -> Any:
    result = runner.invoke(app, [*SMALL, *arguments])
    assert result.exit_code == 0, result.output
    return result


def test_json_of_a_shape() -> None:
    result = run(
        "--context", "700,300", "--policy", "quest,full", "--option", "quest.sink_tokens=8"
    )
    assert "quest sink_tokens=8" in result.stdout
    result = run("--context", "700,300", "--policy", "quest,full", "--json")
    document = json.loads(result.stdout)
    found = [(row["engine"], row["policy"], row["kv_len"]) for row in document["rows"]]
    assert found == [
        (engine, policy, kv_len)
        for kv_len in (300, 700)
        for engine, policy in (("offload", "quest"), ("offload", "full"), ("transformers", None))
    ]
    settings = document["settings"]
    assert (settings["shape"], settings["model"], settings["device"]) == ("tiny", None, "cpu")
    assert (settings["dtype"], settings["backend"]) == ("bfloat16", None)
    assert document["machine"]["isa"]
    for row in document["rows"]:
        assert row["tokens_per_second"] == pytest.approx(1e3 / row["milliseconds"])
        assert row["memory"]["kv_host"] >= row["kv_len"] * MODEL_SHAPES["tiny"].kv_token_bytes
    assert [row["steps"] for row in document["rows"][:3]] == [2, 2, 2]
    assert document["rows"][0]["policy_options"]["budget_tokens"] == 256


def test_a_part_of_the_layers() -> None:
    """A quarter of the layers has a quarter of the keys and values."""
    every = ["--context", "300", "--policy", "full", "--engines", "offload", "--json"]
    few, whole = (json.loads(run(*every, *layers).stdout) for layers in (["--layers", "1"], []))
    assert (few["settings"]["num_layers"], whole["settings"]["num_layers"]) == (1, None)
    hosts = [document["rows"][0]["memory"]["kv_host"] for document in (few, whole)]
    assert 4 * hosts[0] == hosts[1]


def test_int8_rows_of_a_shape() -> None:
    """Ours take 0.56 of the bytes; peers keep the weights' dtype, and say so."""
    every = ["--context", "700", "--policy", "full,lychee_cluster"]
    int8, whole = (
        json.loads(run(*every, "--json", *options).stdout)
        for options in (["--kv-dtype", "int8"], [])
    )
    assert int8["settings"]["kv_dtype"] == "int8"
    assert [row["kv_dtype"] for row in int8["rows"]] == ["int8", "int8", "bfloat16"]
    assert {row["kv_dtype"] for row in whole["rows"]} == {"bfloat16"}
    for ours, theirs in zip(int8["rows"][:2], whole["rows"], strict=False):
        kept = [row["memory"]["kv_host"] for row in (ours, theirs)]
        assert kept[0] / kept[1] == pytest.approx(34 / 64)
    table = run(*every, "--kv-dtype", "int8").stdout
    assert "offload, lychee_cluster, KV int8" in table
    assert "transformers, KV bfloat16" in table


def test_a_placement_is_of_a_gpu(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    HeadPlacement.filled(4, 2, Place.GPU).save(plan)
    result = runner.invoke(app, [*SMALL, "--placement", str(plan)])
    assert result.exit_code == 1
    assert "names no policy" in " ".join(result.stderr.split())
    result = runner.invoke(app, [*SMALL, "--policy", "quest", "--placement", str(plan)])
    assert result.exit_code == 1
    assert "placement is for a GPU that decodes" in " ".join(result.stderr.split())


def test_table_and_log() -> None:
    result = run("--context", "300", "--policy", "streaming_llm", "--dtype", "float32")
    assert "tiny, float32, batch 1, cpu" in result.stdout
    ours, stock = (line for line in result.stdout.splitlines() if "│" in line)
    assert [cell.strip() for cell in ours.split("│")][1:3] == ["300", "offload, streaming_llm"]
    assert f"1.00{bench_decode.TIMES}" in ours
    assert stock.split("│")[2].strip() == "transformers"
    assert "offload streaming_llm" in result.stderr  # each row as soon as it is there


def test_only_peers() -> None:
    rows = json.loads(run("--context", "300", "--engines", "transformers", "--json").stdout)["rows"]
    assert [row["engine"] for row in rows] == ["transformers"]


def test_a_peer_that_does_not_fit_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    target = "offload.bench.decode.engines.host_memory_limit_bytes"
    monkeypatch.setattr(target, lambda: 2**10)
    result = run("--context", "300", "--engines", "transformers")
    assert "needs 300.00 KiB of host memory for KV" in result.stdout
    (row,) = json.loads(run("--context", "300", "--engines", "transformers", "--json").stdout)[
        "rows"
    ]
    assert row["milliseconds"] is None
    assert "needs 300.00 KiB" in describe(row)


def test_a_gpu_that_is_full_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **options: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("offload.bench.decode.engines.filled_cache", full)
    result = run("--context", "300", "--engines", "transformers")
    assert "300.00 KiB of KV do not fit the GPU" in result.stdout


def test_a_step_that_cannot_be_compiled_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **options: Any) -> None:
        raise CannotCompileError("torch.compile needs triton for this GPU")

    monkeypatch.setattr("offload.bench.decode.engines.decode_compiled", fails)
    monkeypatch.setattr(bench_decode, "CPU_ENGINE_NAMES", ("transformers-compiled",))
    result = run("--context", "300", "--engines", "transformers-compiled")
    assert "torch.compile needs triton for this GPU" in result.stdout


def test_a_model_on_real_text(tiny_folders: dict[str, Path], tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("All engines read the same text. " * 40, encoding="utf-8")
    arguments = ["bench", "decode", str(tiny_folders["qwen3"]), *FAST, "--context", "400"]
    arguments += ["--policy", "lychee_cluster,auto,full", "--budget-tokens", "128"]
    result = runner.invoke(app, [*arguments, "--text", str(text), "--json"])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["settings"]["dtype"] == "float32"  # the checkpoint's own
    assert document["settings"]["text"] == str(text)
    assert [row["policy"] for row in document["rows"]] == ["lychee_cluster", "full", None]
    assert document["settings"]["auto"].startswith("exact: contexts up to 8,192 tokens")
    assert document["rows"][0]["memory"]["policy_host"] > 0
    text.write_text("Too short.", encoding="utf-8")
    result = runner.invoke(app, [*arguments, "--text", str(text)])
    assert result.exit_code == 1
    assert "400 tokens and 6 steps are more than the text has: 10" in result.output


def test_every_repeat_continues_the_same_prompt(tiny_folders: dict[str, Path]) -> None:
    policy = make_policy("lfps", budget_tokens=128)
    model = TextModel(tiny_folders["llama"], [policy], CONFIG, text=prose_text(None))
    with model.sessions(300, [policy], num_steps=6) as opened:
        session: Any = opened(policy)
        selections = []
        for _ in range(2):
            session.rewind()
            session.decode(6)
            assert session._cache.kv_lens == [306]
            assert session._prompt.kv_lens == [300]
            selections.append(session.runtime.attention.last_selection())
        assert selections[0] == selections[1]
        measured, _ = measure_steps(session, repeats=1, traced_steps=0)
        assert measured.steps == 6 - WARM_UP_STEPS
        session.close()


def test_positions_of_the_model_bound_the_context(tiny_folders: dict[str, Path]) -> None:
    policy = make_policy("full")
    model = TextModel(tiny_folders["llama"], [policy], CONFIG, text=prose_text(None))
    positions = model.stock.config.max_position_embeddings
    with (
        pytest.raises(ValueError, match=f"more than the model has positions: {positions}; lower"),
        model.sessions(positions, [policy], num_steps=6),
    ):
        pass


TRACED = ["--steps", "8", "--traced-steps", "2", "--engines", "offload"]


def test_trace(tmp_path: Path) -> None:
    path = tmp_path / "steps.json"
    arguments = ["--context", "600", "--policy", "quest", "--batch-size", "2", "--json"]
    result = run(*arguments, *TRACED, "--trace", str(path))
    (row,) = json.loads(result.stdout)["rows"]
    assert (row["batch_size"], row["steps"]) == (2, 4)
    assert sum(row["shares"].values()) == pytest.approx(1)
    assert row["shares"]["overlapped"] == 0  # on a CPU they take turns
    assert row["microseconds"]["cpu"]["attend"] > 0
    assert row["memory"]["kv_host"] >= 2 * 4 * 3 * 2 * 2 * 256 * 32 * 2
    events = json.loads(path.read_text())["traceEvents"]
    rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    attend = [(rows[e["pid"], e["tid"]], e["args"]) for e in events if e["name"] == "attend"]
    led = [args["layer"] for name, args in attend if name == "requests"]
    assert led == [0, 1, 2, 3] * 2
    places = {tuple(args.values()) for name, args in attend if name == "worker 0"}
    assert {(2, row, unit) for row in (0, 1) for unit in (0, 1)} <= places
    workers = row["workers"]
    assert (workers["num_workers"], workers["num_lost_events"]) == (1, 0)
    assert min(workers["task_microseconds"].values()) > 0
    assert [reply["layer"] for reply in workers["replies"]] == [0, 1, 2, 3]
    for reply in workers["replies"]:
        assert reply["microseconds"] > reply["before_tasks_microseconds"] > 0
        assert 0 < reply["busy_workers"] <= 1
        assert 0 <= reply["idle_share"] < 1
    assert f"wrote {path}" in result.stderr.replace("\n", "")


def test_tables_of_a_trace_on_real_text(tiny_folders: dict[str, Path], tmp_path: Path) -> None:
    arguments = ["bench", "decode", str(tiny_folders["llama"]), *FAST, *TRACED, "--context", "300"]
    arguments += ["--policy", "full", "--trace", str(tmp_path / "steps.json")]
    result = runner.invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "4 steps; " in result.stdout
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines if "%" in line][:4] == [*SHARES]
    assert {"attend", "median", "slowest:"} <= {line.split()[0] for line in lines if line}
    assert "KV on the host" in result.stdout


def random_model(**options: Any) -> RandomModel:
    config = runtime_config(num_threads=1, dtype="float32")
    return RandomModel("tiny", config, **({"longest": 600} | options))


def test_several_sessions_over_one_cache() -> None:
    policies = [make_policy("lfps", budget_tokens=256), make_policy("full")]
    tokens: list[list[list[int]]] = []
    with random_model().sessions(600, policies, num_steps=10) as opened:
        for policy in [*policies, policies[0]]:
            with closing(opened(policy)) as session:
                choose = session.runtime.choose_tokens
                for _ in range(2):
                    session.rewind()
                    tokens.append([])
                    session.runtime.choose_tokens = lambda *args, choose=choose: (
                        tokens[-1].append((x := choose(*args)).tolist()) or x
                    )
                    session.decode(10)
    assert tokens[0] == tokens[1] == tokens[4]
    assert tokens[2] == tokens[3] != tokens[0]
    assert len({str(token) for token in tokens[0]}) > 1


@pytest.mark.parametrize("weights", ["auto", "q8"])
@pytest.mark.parametrize("name", [*TINY_WINDOWED])
def test_sessions_of_layers_with_windows(
    name: str, weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store drops what is before windows, and a GPU's step, here inline, chooses as the native
    layers do."""
    monkeypatch.setitem(MODEL_SHAPES, name, TINY_WINDOWED[name])
    policies = [make_policy("full"), make_policy("sketch", budget_tokens=256, dense_layers=0)]
    tokens: dict[str, list[list[int]]] = {"full": [], "sketch": []}
    for backend in (None, "inline"):
        options: dict[str, Any] = {"dtype": "float32", "weights": weights, "backend": backend}
        model = RandomModel(name, runtime_config(num_threads=1, **options), longest=3000)
        with model.sessions(3000, policies, num_steps=8) as opened:
            for policy in policies:
                with closing(opened(policy)) as session:
                    session.rewind()
                    choose, chosen = session.runtime.choose_tokens, list[int]()

                    def one(*args: Any, choose: Any = choose, chosen: Any = chosen) -> Any:
                        chosen.append(int((found := choose(*args[:3], 1))[0, 0]))
                        return found

                    monkeypatch.setattr(session.runtime, "choose_tokens", one)
                    session.decode(8)
                    tokens[policy.name].append(chosen)
                    store = session.runtime.store
                    full = store.num_full_rows * 3008 * 2 * 2 * 32 * 4
                    assert full < store.host_bytes_used < 2 * full
    # Those of q8 round what they multiply with on a CPU. Norms of heads, gemma's, are of a GPU's
    # synthetic queries alone.
    same = [] if weights == "q8" else ["full"] if name == "gemma-3-12b" else ["full", "sketch"]
    for policy_name in same:
        assert tokens[policy_name][0] == tokens[policy_name][1]
    assert all(len({*chosen}) > 1 for of_policy in tokens.values() for chosen in of_policy)


def test_shapes_are_those_of_the_models() -> None:
    gemma, gpt_oss = MODEL_SHAPES["gemma-3-12b"], MODEL_SHAPES["gpt-oss-20b"]
    assert round(weight_elements(gemma) / 1e9, 1) == 11.8
    assert round(weight_elements(gpt_oss) / 1e9, 1) == 20.9
    assert [len(x.windows) - np.count_nonzero(x.windows) for x in (gemma, gpt_oss)] == [8, 12]
    assert [len(x.with_layers(7).windows) for x in (gemma, gpt_oss)] == [7, 7]


def test_made_keys_reach_beyond_the_shape() -> None:
    """A GPU's tables have room for as many tokens as the model has positions."""
    model = random_model(longest=13_000)
    assert model.stock.config.max_position_embeddings >= 13_000 + 64


def test_measurement() -> None:
    done: list[tuple[int, int]] = []
    policy = make_policy("full")
    with (
        random_model().sessions(600, [policy], num_steps=10) as opened,
        closing(opened(policy)) as session,
    ):
        measurement, steps = measure_steps(
            session, repeats=2, traced_steps=3, on_progress=lambda *at: done.append(at)
        )
        for options, message in (({"repeats": 0}, "repeats"), ({"traced_steps": 6}, "traced")):
            with pytest.raises(ValueError, match=f"{message}.* must be"):
                measure_steps(session, **options)
        row = asdict(measure_steps(session, repeats=1, traced_steps=0)[0])
    assert done == [(1, 3), (2, 3), (3, 3)]
    assert (len(steps), measurement.steps) == (3, 2 * 6)
    assert row["tokens_per_second"] == pytest.approx(1e3 / row["milliseconds"])
    assert row["shares"] is row["traced_milliseconds"] is row["workers"] is None
    assert row["microseconds"] == {"gpu": {}, "cpu": {}}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--trace", "x", "--traced-steps", "1"],
            "--trace is of one policy at one context of ours, got",
        ),
        (["--trace", "x", "--traced-steps", "2"], "2 of 6 steps cannot be traced"),
        (
            ["--distinct-layers", "9", "--context", "300"],
            "distinct_layers must be in [1, 4], got 9",
        ),
        (["--layers", "5"], "num_layers must be in [1, 4], got 5"),
        (
            ["--shape", "gpt-oss-20b", "--weights", "q4", "--engines", "offload"],
            "give weights='q8'",
        ),
        (["--shape", "llama"], "unknown 'llama'; available: llama-3.1-8b"),
        (["--dtype", "int8"], "unknown 'int8'; available: bfloat16"),
        (["--engines", "vllm"], "unknown 'vllm'; available: offload, graph"),
        (["--engines", "graph"], "--engines graph needs a GPU"),
        (["--backend", "inline"], "unknown 'inline'; available: graph, stream"),
        (["--backend", "graph"], "--backend graph needs a GPU"),
        (["--policy", "qest"], "unknown 'qest'; available: "),
        (["--option", "quest.alpha=1"], "'quest' is not among the policies"),
        (["x"], "give one of --shape and a model"),
        (["--text", "x"], "give a model"),
        (["--context", "4K"], "expected integers of at least 1"),
        (["--device", "tpu"], "unknown device 'tpu'; available: cpu, cuda"),
    ],
)
def test_refusals(arguments: list[str], message: str) -> None:
    result = runner.invoke(app, [*SMALL, *arguments])
    assert result.exit_code != 0
    assert message in " ".join(result.output.replace("│", " ").split())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA GPU")
def test_a_gpu_that_is_not_there() -> None:
    result = runner.invoke(app, [*SMALL, "--device", "cuda"])
    assert result.exit_code == 1
    assert "error: device='cuda': " in result.output
    assert "use device='cpu'" in " ".join(result.output.split())


def test_names_that_the_command_offers() -> None:
    assert tuple(MODEL_SHAPES) == MODEL_SHAPE_NAMES
    assert tuple(ENGINES) == bench_decode.ENGINE_NAMES
    assert {*bench_decode.CPU_ENGINE_NAMES} < {*ENGINES}
    assert {*ENGINES} - {*bench_decode.DEFAULT_ENGINE_NAMES} == {"transformers-compiled"}
    assert tuple(DTYPES) == DTYPE_NAMES
    assert {*BACKENDS} - {"inline"} == {*bench_decode.BACKEND_NAMES}
    assert bench_decode.WARM_UP_STEPS == WARM_UP_STEPS


@pytest.mark.cuda
@pytest.mark.parametrize("source", ["shape", "model"])
def test_on_a_gpu(source: str, tiny_folders: dict[str, Path]) -> None:
    of_source = ["--shape", "tiny"] if source == "shape" else [str(tiny_folders["llama"])]
    arguments = ["bench", "decode", *of_source, "--context", "400", "--budget-tokens", "128"]
    # One that learns from the model before it decodes.
    arguments += ["--policy", "lfps,lychee_decode" if source == "model" else "lfps,quest"]
    arguments += ["--steps", "6", "-r", "1", "--device", "cuda", "--json"]
    result = runner.invoke(app, arguments)
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["rows"]
    baselines = [ENGINES[name] for name in bench_decode.DEFAULT_ENGINE_NAMES if name != "offload"]
    assert [row["engine"] for row in rows] == ["offload", "offload", *baselines]
    assert all(row["milliseconds"] > 0 for row in rows)
