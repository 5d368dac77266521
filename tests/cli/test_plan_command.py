"""`offload plan`."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from cases.processes import run_program
from cases.profile_cases import machine_profile
from cases.tiny_models import byte_tokenizer, make_tiny_model, write_gguf
from typer.testing import CliRunner

from offload.cli import app
from offload.decode.gpu.placement import HeadPlacement, Place
from offload.loading.embedded_package import LONG_CONTEXT_MODEL
from offload.loading.names import checkpoint_name
from offload.models.shape import MODEL_SHAPES
from offload.planning.choose import _with_layers
from offload.selection.head_roles import HeadRoles
from offload.selection.kept_roles import keep_roles, kept_roles

runner = CliRunner(env={"COLUMNS": "120", "TERM": "dumb"})


@pytest.fixture
def h200(tmp_path: Path) -> str:
    path = tmp_path / "h200.json"
    machine_profile().save(path)
    return str(path)


def test_it_shows_heads_bytes_and_speed(h200: str) -> None:
    arguments = ["plan", "llama-3.1-8b", "--profile", h200, "--max-memory", "0=24GiB"]
    arguments += ["--policy", "lychee_decode"]
    result = runner.invoke(app, arguments)
    assert result.exit_code == 0, result.output
    shown = " ".join(result.stdout.split())
    assert "llama-3.1-8b, 1 x 131,072 tokens, bfloat16, lychee_decode" in shown
    assert "made GPU, made CPU, 15 threads" in shown
    assert re.search(r"KV heads by layer \(\. \d+, G 51, g \d+, h \d+\)", shown)
    assert "weights 14.96 GiB" in shown
    assert "of 24.00 GiB" in shown
    assert "KV cache 16.00 GiB" in shown
    assert re.search(r"heads on gather \d+", shown)
    assert "tokens/s" in shown
    heads = [line for line in result.stdout.splitlines() if line.startswith("  head ")]
    assert len(heads) == 8
    assert {len("".join(line.split()[2:])) for line in heads} == {32}


def test_json_is_a_placement(h200: str, tmp_path: Path) -> None:
    arguments = ["plan", "llama-3.1-8b", "--profile", h200, "--budget-tokens", "2048", "--json"]
    arguments += ["--policy", "lychee_decode"]
    result = runner.invoke(app, arguments)
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["policy"] == "lychee_decode"
    assert document["machine"]["gpu"] == "made GPU"
    path = tmp_path / "plan.json"
    path.write_text(result.stdout)
    placement = HeadPlacement.load(path)
    again = runner.invoke(app, [*arguments, "--placement", str(path)])
    assert json.loads(again.stdout)["milliseconds_per_step"] == document["milliseconds_per_step"]
    assert (placement.num_layers, placement.num_kv_heads) == (32, 8)


@pytest.mark.parametrize(
    ("arguments", "policy", "said"),
    [
        ([], "full", "auto: all of 16.00 GiB of KV on the GPU, exact"),
        (
            ["--max-memory", "0=22GiB"],
            "sketch",
            "hard look-ups at 24K: -0.7 ± 1.5 points of full attention (measured on SmolLM2-135M)",
        ),
        (["--device", "cpu"], "sketch", "auto: exact up to 8,192 tokens, then sketch"),
        (["--device", "cpu", "--context", "8192"], "full", "auto: exact: contexts up to 8,192"),
    ],
)
def test_what_auto_comes_to(
    h200: str, tmp_path: Path, arguments: list[str], policy: str, said: str
) -> None:
    """The plan names it, so that its placement is not counted for another one."""
    command = ["plan", "llama-3.1-8b", "--profile", h200, *arguments, "--json"]
    result = runner.invoke(app, command)
    assert result.exit_code == 0, result.output
    assert said in " ".join(result.stderr.split())
    document = json.loads(result.stdout)
    assert document["policy"] == policy
    path = tmp_path / "plan.json"
    path.write_text(result.stdout)
    again = runner.invoke(app, [*command, "--placement", str(path)])
    assert "auto:" not in again.stderr
    assert json.loads(again.stdout)["policy"] == policy
    del document["policy"]
    path.write_text(json.dumps(document))
    unnamed = runner.invoke(app, [*command, "--placement", str(path)])
    assert unnamed.exit_code == 1
    assert "names no policy, and policy is 'auto'" in " ".join(unnamed.stderr.split())


@pytest.fixture
def heads_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU gets retrieving heads, and no whole layers beside them."""
    monkeypatch.setattr(
        "offload.planning.choose._with_layers", lambda *args: _with_layers(*args)[-1:]
    )


@pytest.mark.usefixtures("heads_only")
def test_it_plans_for_the_heads_that_will_retrieve(
    h200: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that a calibration has kept, or else evenly spaced ones."""
    monkeypatch.setenv("OFFLOAD_CACHE", str(tmp_path))

    def on_gpu(model: str) -> list[list[int]]:
        arguments = ["--policy", "per_head", "--option", "dense_layers=1", "--json"]
        result = runner.invoke(app, ["plan", model, "--profile", h200, *arguments])
        assert result.exit_code == 0, result.output
        places = HeadPlacement.from_json(json.loads(result.stdout)).places
        return np.argwhere(places[1:] == Place.GPU).tolist()

    folder = tmp_path / "model"
    make_tiny_model("llama", num_hidden_layers=9).save_pretrained(folder)
    spaced = on_gpu(str(folder))
    retrieves = np.zeros((9, 2), bool)
    retrieves[[2, 3], [0, 0]] = True
    kept = np.argwhere(retrieves[1:]).tolist()
    assert len(spaced) == 2
    assert spaced != kept
    name = checkpoint_name(folder)
    roles = HeadRoles.of(retrieves, head_dim=32, model_type="llama", checkpoint=name)
    keep_roles("per_head", roles, 2, 1)
    assert on_gpu(str(folder)) == kept


@pytest.mark.usefixtures("heads_only")
def test_it_plans_for_the_heads_of_an_embedded_model(h200: str, tmp_path: Path) -> None:
    """Whose weights need not be converted for it."""
    cache = {"OFFLOAD_CACHE": str(tmp_path / "none")}
    arguments = ["plan", LONG_CONTEXT_MODEL, "--policy", "per_head", "--profile", h200, "--json"]
    result = runner.invoke(app, arguments, env=cache)
    assert result.exit_code == 0, result.output
    places = HeadPlacement.from_json(json.loads(result.stdout)).places
    shape = MODEL_SHAPES["smollm2-135m"].kv_heads
    roles = kept_roles("per_head", f"{LONG_CONTEXT_MODEL}@", 11, 2, **shape)
    assert roles is not None
    assert np.array_equal(places[2:] == Place.GPU, roles.array[2:])
    assert not (tmp_path / "none").exists()


def test_a_machine_that_is_not_there_yet(
    tiny_folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        sys.modules["offload.cli.plan"], "_measured", lambda *_, **__: (machine_profile(), 15)
    )
    arguments = [
        "plan",
        str(tiny_folders["llama"]),
        "--device",
        "cpu",
        "--max-memory",
        "cpu=900TiB",
    ]
    result = runner.invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "of 900.00 TiB" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--max-memory", "0=14GiB"], 1, "the weights need 14.96 GiB, but max_memory[0] is 14.00"),
        (["--max-memory", "cpu=4GiB"], 1, "of host memory, but max_memory['cpu'] is 4.00 GiB"),
        (["--max-memory", "0=lots"], 1, "cannot read 'lots' as a size"),
        (["--context", "200000"], 1, "exceeds the 131072 tokens"),
        (["--policy", "qest"], 2, "unknown policy 'qest'"),
        (["--option", "budget=3"], 1, "has no option 'budget'"),
        (["--remeasure"], 2, "a given profile is not measured"),
        (["--hot-experts", "4"], 2, "there are none: give --host-experts"),
        (["--placement", "nowhere.json"], 1, "no placement file nowhere.json"),
        (["--placement", "/"], 1, "placement file / is a folder; give a file"),
    ],
)
def test_refusals(h200: str, arguments: list[str], code: int, message: str) -> None:
    result = runner.invoke(app, ["plan", "llama-3.1-8b", "--profile", h200, *arguments])
    assert result.exit_code == code
    assert message in " ".join(result.stderr.replace("│", " ").split())
    assert result.stdout == ""


def test_packed_weights_are_counted(h200: str) -> None:
    arguments = ["plan", "llama-3.1-8b", "--profile", h200, "--device", "cpu", "--policy", "full"]
    found = {}
    for weights in ("auto", "q8", "q4"):
        result = runner.invoke(app, [*arguments, "--weights", weights, "--json"])
        assert result.exit_code == 0, result.output
        found[weights] = json.loads(result.stdout)
        assert found[weights]["weights"] == weights
    times = {name: plan["milliseconds_per_step"] for name, plan in found.items()}
    assert times["q4"] < times["q8"] < times["auto"]
    said = [" ".join(plan["assumed"]).count("packed weights: ") for plan in found.values()]
    assert said == [0, 1, 1]
    sizes = {name: plan["host_bytes"]["weights"] for name, plan in found.items()}
    assert sizes["q4"] < 0.4 * sizes["auto"] < sizes["q8"] < 0.6 * sizes["auto"]
    shown = runner.invoke(app, [*arguments, "--weights", "q4"])
    assert "bfloat16 with weights q4, full" in shown.stdout
    limit = f"cpu={(sizes['q4'] + sizes['auto']) // 2}"
    few = ["--context", "4096", "--max-memory", limit]
    assert runner.invoke(app, [*arguments, *few]).exit_code == 1
    assert runner.invoke(app, [*arguments, *few, "--weights", "q4"]).exit_code == 0


def test_a_profile_tells_what_a_file_is_kept_as(
    h200: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table of 4 bits is one of 8 on a GPU, also one that only the profile names."""
    monkeypatch.setenv("OFFLOAD_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "tiny.gguf"
    types = {"ffn_down.weight": "MXFP4", "token_embd.weight": "Q8_0"}
    write_gguf(path, make_tiny_model("llama"), byte_tokenizer(), types=types)
    arguments = ["plan", str(path), "--profile", h200, "--policy", "full", "--json"]
    found = {}
    for device in ("cpu", "cuda", None):
        more = [] if device is None else ["--device", device]
        result = runner.invoke(app, [*arguments, *more])
        assert result.exit_code == 0, result.output
        plan = json.loads(result.stdout)
        found[device] = plan["host_bytes" if device == "cpu" else "device_bytes"]["weights"]
    assert found[None] == found["cuda"] > found["cpu"]


def test_a_damaged_profile(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text("{")
    result = runner.invoke(app, ["plan", "llama-3.1-8b", "--profile", str(path)])
    assert result.exit_code == 1
    assert "profile.json is damaged" in result.stderr.replace("\n", "")


def test_this_machine_is_measured_once(
    tiny_folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OFFLOAD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("offload.measuring.machine.host._KV_LEN", 4096)
    monkeypatch.setattr("offload.measuring.machine.host._MAX_CACHE_BYTES", 16 * 2**20)
    monkeypatch.setattr("offload.planning.profile.MAX_SPREAD", float("inf"))
    saved = tmp_path / "here.json"
    arguments = ["plan", str(tiny_folders["llama"]), "--device", "cpu", "--threads", "1"]
    arguments += ["--max-memory", "cpu=1GiB"]  # what is left changes
    first = runner.invoke(app, [*arguments, "--save-profile", str(saved)])
    assert first.exit_code == 0, first.output
    assert "measured this machine" in first.stderr.replace("\n", "")
    (kept,) = (tmp_path / "cache" / "profiles").iterdir()
    assert json.loads(kept.read_text())["profiles"] == [json.loads(saved.read_text())]
    second = runner.invoke(app, arguments)
    assert second.exit_code == 0
    assert "measured this machine" not in second.stderr
    assert second.stdout == first.stdout
    three = runner.invoke(app, [*arguments, "--threads", "3", "--json"])
    assert three.exit_code == 0
    assert "measured this machine" not in three.stderr
    assert "CPU: measured with num_threads=1, not 3; " in three.stdout
    before = kept.stat().st_mtime_ns
    assert runner.invoke(app, [*arguments, "--remeasure"]).exit_code == 0
    assert kept.stat().st_mtime_ns > before
    assert runner.invoke(app, [*arguments, "--threads", "3", "--remeasure"]).exit_code == 0
    measured = json.loads(kept.read_text())["profiles"]
    assert [profile["num_threads"] for profile in measured] == [1, 3]


def test_a_busy_machine_is_measured_again_and_not_kept(
    tiny_folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OFFLOAD_CACHE", str(tmp_path / "cache"))
    spreads = iter([0.5, 0.3, 0.4])
    monkeypatch.setattr(
        "offload.measuring.machine.measure.measure_profile",
        lambda *_, **__: machine_profile(device=None, num_threads=1, spread=next(spreads)),
    )
    arguments = ["plan", str(tiny_folders["llama"]), "--device", "cpu", "--threads", "1"]
    result = runner.invoke(app, [*arguments, "--policy", "full", "--prompt-tokens", "100"])
    assert result.exit_code == 0, result.output
    said = " ".join(result.stderr.split())
    assert "3 times; timings spread by 30 %, more than 10: something else keeps it busy" in said
    assert not (tmp_path / "cache" / "profiles").exists()
    assert "s to the first token after 1 x 100 tokens" in result.stdout
    refused = runner.invoke(app, [*arguments, "--context", "64", "--prompt-tokens", "65"])
    assert refused.exit_code == 1
    assert "--prompt-tokens 65 are more than the context's 64" in refused.stderr


def test_help_teaches() -> None:
    result = runner.invoke(app, ["plan", "--help"])
    assert result.exit_code == 0
    for text in ("--profile", "--placement", "--max-memory", "offload generate", "attended by"):
        assert text in result.stdout


def test_help_is_fast() -> None:
    check = (
        "import sys\nfrom typer.testing import CliRunner\nfrom offload.cli import app\n"
        "assert CliRunner().invoke(app, ['plan', '--help']).exit_code == 0\n"
        "sys.exit(','.join({'torch', 'transformers', 'numba'} & {*sys.modules}))"
    )
    start = time.monotonic()
    done = run_program(check)
    assert done.stderr.strip() == ""
    assert time.monotonic() - start < 20.0
