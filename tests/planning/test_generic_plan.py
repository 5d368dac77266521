"""`offload plan` of models without lean layers, against the same models when they are loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from cases.every_type import tiny_model_of
from cases.profile_cases import machine_profile
from typer.testing import CliRunner

from offload import OffloadedModel
from offload.cli import app
from offload.policies.registry import make_policy
from offload.runtime import generic_plan
from offload.runtime.budgets import weight_bytes_of
from offload.system.errors import HostBudgetError
from offload.system.memory import format_bytes

runner = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"})
TYPES = ["qwen3_5_text", "gemma2", "granitemoe_swa"]
_CONTEXT = 512  # whole pages


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    made = {}
    for model_type in TYPES:
        made[model_type] = str(tmp_path_factory.mktemp(model_type))
        tiny_model_of(model_type).save_pretrained(made[model_type])
    machine_profile().save(Path(made["granitemoe_swa"]) / "h200.json")
    return made | {"h200": str(Path(made["granitemoe_swa"]) / "h200.json")}


@pytest.fixture
def by_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of no type are one graph of its modules."""
    fails = Mock(side_effect=NotImplementedError)
    monkeypatch.setattr(generic_plan, "check_one_step", fails)


def planned(*arguments: str) -> Any:
    result = runner.invoke(app, ["plan", *arguments, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def refusal(*arguments: str) -> str:
    result = runner.invoke(app, ["plan", *arguments])
    assert result.exit_code == 1, result.output
    return " ".join(result.stderr.split())


@pytest.mark.parametrize("policy", ["auto", "quest"])
@pytest.mark.parametrize("model_type", TYPES)
def test_a_generation_needs_what_the_plan_says(
    folders: dict[str, str], model_type: str, policy: str
) -> None:
    """With so many bytes it runs to its end, with one less it is refused, by both."""
    folder, options = folders[model_type], ["--batch", "2", "--device", "cpu", "--policy", policy]
    arguments = [folder, "--context", str(_CONTEXT), *options]
    arguments += [] if policy == "auto" else ["--budget-tokens", "128"]
    plan = planned(*arguments)
    need, max_new = plan["host_total_bytes"], 4
    made = make_policy(policy, **({} if policy == "auto" else {"budget_tokens": 128}))
    ids = torch.randint(3, 250, (2, _CONTEXT - max_new))

    def generate(limit: int) -> Any:
        loading = {"policy": made, "num_threads": 1, "max_memory": {"cpu": limit}}
        model: Any = OffloadedModel.from_pretrained(folder, **loading)
        model.generate(input_ids=ids, max_new_tokens=max_new, do_sample=False, eos_token_id=None)
        return model

    model = generate(need)
    assert plan["host_bytes"]["weights"] == weight_bytes_of(model)
    assert plan["kv_bytes_per_token"] == model.kv_store.token_bytes
    assert plan["policy"] == ("full" if policy == "auto" else policy)
    with pytest.raises(HostBudgetError):
        generate(need - 1)
    at_limit = planned(*arguments, "--max-memory", f"cpu={need}")
    assert at_limit["largest_context"] == _CONTEXT
    said = refusal(*arguments, "--max-memory", f"cpu={need - 1}")
    assert f"2 x 512 tokens needs {format_bytes(need)} of host memory, but max_memory" in said
    assert "at most 256 tokens fit" in said


@pytest.mark.usefixtures("by_modules")
def test_a_gpu_has_weights_and_states_and_what_fits_beside_them(folders: dict[str, str]) -> None:
    arguments = [folders["gemma2"], "--profile", folders["h200"], "--context", "1024"]
    whole = planned(*arguments)
    kinds = ["weights", "windows and recurrent states", "KV cache"]
    assert [*whole["device_bytes"]][:3] == kinds
    assert sum(whole["host_bytes"].values()) == 0
    assert "the engine and `offload serve` keep them on the host" in whole["notes"][0]
    limit = whole["device_total_bytes"] - whole["device_bytes"]["KV cache"]
    less = planned(*arguments, "--max-memory", f"0={limit}")
    assert "KV cache" not in less["device_bytes"]
    assert less["device_total_bytes"] <= limit
    assert less["host_bytes"]["KV cache"] == 1024 * less["kv_bytes_per_token"]
    assert "KV cache" in planned(*arguments, "--policy", "quest")["host_bytes"]
    assert "no context fits" in refusal(*arguments, "--max-memory", "0=1MiB")


def test_a_gpu_that_steps_has_keys_and_values_beside_the_host(folders: dict[str, str]) -> None:
    arguments = [folders["qwen3_5_text"], "--profile", folders["h200"], "--context", "1024"]
    plan = planned(*arguments)
    assert [*plan["device_bytes"]][:2] == ["weights", "windows and recurrent states"]
    assert "KV cache" not in plan["device_bytes"]
    assert plan["host_bytes"]["KV cache"] == 1024 * plan["kv_bytes_per_token"]
    assert plan["policy"] == "full"
    assert "takes keys and values, all or what is chosen" in plan["notes"][0]
    assert "no context fits" in refusal(*arguments, "--max-memory", "0=1MiB")


def test_a_step_takes_no_less_than_reading_what_is_active(folders: dict[str, str]) -> None:
    """Of its four experts a token meets two; of its embedding it reads a row."""
    profile = machine_profile()
    plan = planned(folders["granitemoe_swa"], "--profile", folders["h200"], "--device", "cpu",
                   "--context", "1024")  # fmt: skip
    named = dict(tiny_model_of("granitemoe_swa").named_parameters())
    experts = sum(x.nbytes for name, x in named.items() if ".experts." in name)
    active = sum(x.nbytes for name, x in named.items() if "embed_tokens" not in name)
    assert plan["active_weight_bytes"] == active - experts // 2
    states = plan["host_bytes"]["windows and recurrent states"]
    read = plan["active_weight_bytes"] + states + 1024 * plan["kv_bytes_per_token"]
    assert plan["least_milliseconds_per_step"] == pytest.approx(1e3 * read / profile.read_bandwidth)
    assert plan["milliseconds_per_step"] is None
    shown = runner.invoke(app, ["plan", folders["granitemoe_swa"], "--profile", folders["h200"]])
    assert "ms per step, at most" in shown.stdout
    assert "largest context that fits: 131,072 tokens" in shown.stdout


@pytest.mark.usefixtures("by_modules")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--remeasure"], "--remeasure with a model of type"),
        (["--prompt-tokens", "5"], "--prompt-tokens with a model of type"),
        (["--policy", "lychee_decode"], "policy 'lychee_decode' with type 'gemma2'"),
        (["--context", "2000000"], "a context of 2000000 tokens exceeds the 1024 tokens"),
        (["--device", "cuda:0", "--kv-dtype", "int8"], "kv_dtype='int8' is for a CPU"),
        (["--max-memory", "1=1GiB"], "max_memory names 1, but device is 'cpu'"),
    ],
)
def test_what_does_not_apply_is_refused_by_name(
    folders: dict[str, str], arguments: list[str], said: str
) -> None:
    arguments = [*arguments, "--profile", folders["h200"]] if "cuda:0" in arguments else arguments
    assert said in refusal(folders["gemma2"], "--device", "cpu", *arguments)


def test_a_config_alone_will_do(folders: dict[str, str], tmp_path: Path) -> None:
    """Its experts are four bits in MXFP4, of which no file is there to tell."""
    config = json.loads((Path(folders["granitemoe_swa"]) / "config.json").read_text())
    sizes = []
    for settings in ({}, {"quantization_config": {"quant_method": "mxfp4"}}):
        (tmp_path / "config.json").write_text(json.dumps(config | settings))
        sizes.append(planned(str(tmp_path), "--device", "cpu")["host_bytes"]["weights"])
    named = tiny_model_of("granitemoe_swa").named_parameters()
    experts = sum(x.nbytes for name, x in named if ".experts." in name and x.dim() == 3)
    assert sizes[0] - experts < sizes[1] < sizes[0] - 0.8 * experts


def test_memory_alone_bounds_a_context_with_alibi(tmp_path: Path) -> None:
    """Whose positions are counted, but to a number that nobody wants to plan for."""
    tiny_model_of("bloom").config.save_pretrained(tmp_path)
    assert "has no number of positions; give --context" in refusal(str(tmp_path))
    assert planned(str(tmp_path), "--context", "4000")["context"] == 4000
