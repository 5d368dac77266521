"""Caps of a step in bytes and predicted microseconds, against counted bytes and against plans."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.inside import runtime_of
from cases.profile_cases import SMALL, machine_profile, straight
from cases.tiny_models import random_tokens
from typer.testing import CliRunner

from offload import OffloadedModel
from offload.bench.eval.forced import attended_tokens
from offload.cli import app
from offload.cli.eval.options import Runs
from offload.cli.eval.scored import Setup
from offload.decode.gpu.placement import HeadPlacement, Place
from offload.loading.planned_model import planned_model
from offload.planning.plan import PlanRequest, make_plan
from offload.planning.profile import MachineProfile, machine_key, store_profile
from offload.planning.step_cap import attended_token_bytes, in_tokens, step_predictor
from offload.policies import ExactTopK, HardKV, PerHead, Quest
from offload.policies.full import Full
from offload.policies.registry import make_policy

BFLOAT16, FLOAT32, INT8 = 2 * 32, 4 * 32, 34  # bytes of a row of head_dim 32

OPTIONS: dict[str, Any] = {
    "budget_tokens": 64,
    "sink_tokens": 4,
    "recent_tokens": 16,
    "dense_layers": 1,
}
ALMOST_ALL = 0.9999999  # below 1 selections are counted; the cap decides
runner = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"})


def hard_kv(inner: str = "exact_topk", **options: Any) -> HardKV:
    made = make_policy("hard_kv", inner=inner, **{"top_p": ALMOST_ALL, **OPTIONS, **options})
    assert isinstance(made, HardKV)
    return made


def never() -> Any:
    raise AssertionError("bytes need no prediction")


def loaded(folder: Path, policy: HardKV, **options: Any) -> Any:
    options = {"dtype": "float32", "num_threads": 1, "page_tokens": 16} | options
    return OffloadedModel.from_pretrained(folder, policy=policy, **options)


@pytest.fixture
def profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MachineProfile:
    """A profile of this machine with one thread and synthetic costs: every byte counts."""
    monkeypatch.setenv("OFFLOAD_CACHE", str(tmp_path))
    key = machine_key(torch.device("cpu"))
    made = machine_profile(
        attend_cold=straight(10.0, 1e-3),
        scan_dense=straight(10.0, 1e-3),
        device=None,
        num_threads=1,
        **{name: key[name] for name in ("cpu", "isa", "version")},
    )
    store_profile(made)
    return made


def planned_us(folder: Path, policy: HardKV, tokens: int, profile: MachineProfile) -> float:
    """What a plan of the same model says at a cap."""
    model = planned_model(str(folder), "float32")
    request = PlanRequest(
        model=model,
        policy=policy.with_max_tokens(tokens),
        context=model.shape.max_context,
        batch_size=1,
        device="cpu",
        max_memory={},
        page_tokens=16,
    )
    return 1e3 * make_plan(request, profile).step.milliseconds


def predictor(policy: HardKV, profile: MachineProfile, **changes: Any) -> Any:
    options = {"kv_len": 8192, "placement": None, "on_gpu": False} | changes
    return step_predictor(policy, SMALL, torch.bfloat16, profile=profile, **options)


@pytest.mark.parametrize("inner", ["exact_topk", "lfps", "lychee_cluster", "sketch", "quest"])
def test_no_step_attends_to_more_bytes(tiny_folders: dict[str, Path], inner: str) -> None:
    limit, steps = 45 * 1024 - 1, 6  # a token is 1,024 bytes in the four heads that select
    model = loaded(tiny_folders["llama"], hard_kv(inner, max_step_bytes=limit))
    runtime = runtime_of(model)
    shape = runtime.lean.shape
    assert (shape.num_layers, shape.num_kv_heads, shape.head_dim) == (3, 2, 32)
    assert runtime.config.policy.budget_tokens == 44
    tokens = random_tokens(1, 150, seed=3)
    cache = model(tokens, use_cache=True).past_key_values
    for step in range(steps):
        runtime.attention.start_profile()
        model(tokens[:, :1], past_key_values=cache, use_cache=True)
        attended = 6 * (attended_tokens(runtime, 1) or 0.0) - 2 * (151 + step)  # less a dense layer
        read_bytes = attended * 2 * shape.head_dim * runtime.store.dtype.itemsize
        assert 0.9 * limit < read_bytes <= limit


@pytest.mark.parametrize("spare", [0, 1, 1023])
def test_as_many_tokens_as_fit(spare: int) -> None:
    shape = replace(SMALL, num_layers=3, num_kv_heads=2, num_qo_heads=4, head_dim=32)
    for tokens in (21, 40, 64, 900):
        policy = hard_kv(max_step_bytes=1024 * tokens + spare)
        capped = in_tokens(policy, shape, FLOAT32, never)
        assert capped == hard_kv(max_tokens=min(tokens, 64))
    assert in_tokens(hard_kv(max_step_bytes="32KiB"), shape, BFLOAT16, never).budget_tokens == 64
    assert in_tokens(hard_kv(max_step_bytes="32KiB"), shape, FLOAT32, never).budget_tokens == 32
    assert in_tokens(hard_kv(max_step_bytes=272 * 40), shape, INT8, never).budget_tokens == 40
    # Heads that attend to everything are not in it: one of the six.
    inner = PerHead(Full(), ExactTopK(**OPTIONS), retrieval_heads=1)
    whole = HardKV(inner, max_step_bytes=40 * 1280)
    assert in_tokens(whole, replace(shape, num_layers=4), FLOAT32, never).budget_tokens == 40
    assert in_tokens(Quest(), shape, FLOAT32, never) == Quest()
    four = in_tokens(hard_kv(max_step_bytes=4 * 1024 * 40), shape, FLOAT32, never, batch_size=4)
    assert four.budget_tokens == 40
    with pytest.raises(
        ValueError, match=r"less than 86016 .* select read of 4 sequences for 4 sin"
    ):
        in_tokens(hard_kv(max_step_bytes=80 * 1024), shape, FLOAT32, never, batch_size=4)
    # Where all layers are dense nothing reads them.
    assert in_tokens(hard_kv(dense_layers=3, max_step_bytes=10), shape, FLOAT32, never) == hard_kv(
        dense_layers=3, max_tokens=64
    )


def test_microseconds_hold_by_what_a_plan_says(
    tiny_folders: dict[str, Path], profile: MachineProfile
) -> None:
    folder, policy = tiny_folders["llama"], hard_kv("lychee_cluster", max_step_us=1.0)
    least, most = (planned_us(folder, policy, n, profile) for n in (21, 64))
    assert least < most
    for limit in (least, least + 0.3 * (most - least), most - 1e-6, most):
        model = loaded(folder, replace(policy, max_step_us=limit))
        tokens = runtime_of(model).config.policy.max_tokens
        assert planned_us(folder, policy, tokens, profile) <= limit
        assert tokens == 64 or planned_us(folder, policy, tokens + 1, profile) > limit
    few = r"max_step_us=.* is less than the .* us that a step of one sequence of 512 tokens is pred"
    with pytest.raises(ValueError, match=few):
        loaded(folder, replace(policy, max_step_us=0.99 * least))


def test_candidates_are_named_for_the_cap(tiny_folders: dict[str, Path]) -> None:
    """A lower cap has fewer keys scored, in a step as in what is predicted of it."""
    policy = hard_kv("sketch")
    predict = predictor(policy, machine_profile(device=None, attend_cold=straight(0.0, 1.0)))
    few, many = (predict(policy.with_max_tokens(n)).layers[1].reply for n in (24, 60))
    assert many - few == pytest.approx(4 * (3 + 1) * 36 * 32 * 2)  # keys scored, values attended
    tokens, scored = random_tokens(1, 200, seed=3), []
    for cap in (24, 60):
        model = loaded(tiny_folders["llama"], policy.with_max_tokens(cap))
        cache = model(tokens, use_cache=True).past_key_values
        runtime_of(model).attention.start_profile()
        model(tokens[:, :1], past_key_values=cache, use_cache=True)
        count = attended_tokens(runtime_of(model), 1, "scored_tokens") or 0.0
        scored.append(6 / 4 * count)  # of the four heads that select
    assert scored == pytest.approx([20 + 3 * 4, 20 + 3 * 40])  # sinks and recent window, too


@pytest.mark.parametrize("limit", [0.001, 1e9])
def test_a_budget_of_sinks_and_recent_window_is_checked(limit: float) -> None:
    inner = ExactTopK(budget_tokens=20, sink_tokens=4, recent_tokens=16, dense_layers=1)
    policy = HardKV(inner, max_step_us=limit)
    predict = predictor(policy, machine_profile(device=None), batch_size=3)
    if limit > 1:
        assert in_tokens(policy, SMALL, BFLOAT16, lambda: predict).budget_tokens == 20
        return
    of_what = "a step of 3 sequences of 8,192 tokens .* with 4 sinks, 16 recent tokens; raise it, "
    with pytest.raises(ValueError, match=rf"max_step_us=0.001 .* {of_what}let `offload plan`"):
        in_tokens(policy, SMALL, BFLOAT16, lambda: predict)
    bytes_of_20 = attended_token_bytes(policy, SMALL, BFLOAT16) * 20
    exact = HardKV(inner, max_step_bytes=bytes_of_20)
    assert in_tokens(exact, SMALL, BFLOAT16, never).budget_tokens == 20
    with pytest.raises(ValueError, match=rf"is less than {bytes_of_20} .* 16 recent tokens; raise"):
        in_tokens(HardKV(inner, max_step_bytes=bytes_of_20 - 1), SMALL, BFLOAT16, never)


def test_bad_caps() -> None:
    for given in ({"max_tokens": 40}, {"max_step_us": 9.0}):
        with pytest.raises(ValueError, match=r"one cap, got .*max_step_bytes=9000.*leave all"):
            hard_kv(max_step_bytes=9000, **given)
    for wrong in ("many", "5 apples", 1.5, True, -1):
        with pytest.raises(ValueError, match="max_step_bytes"):
            hard_kv(max_step_bytes=wrong)
    for us in (0, -3.0, float("nan"), float("inf"), True, "9"):
        with pytest.raises(ValueError, match="max_step_us must be a positive number of microsec"):
            hard_kv(max_step_us=us)
    with pytest.raises(ValueError, match="max_step_us=9 needs a policy that weighs tokens: what"):
        hard_kv("quest", max_step_us=9)
    shape = replace(SMALL, num_layers=3, num_kv_heads=2, num_qo_heads=4, head_dim=32)
    few = r"max_step_bytes=20480 is less than 21504 \(21.00 KiB\), .* for 4 sinks, 16 recent tokens"
    with pytest.raises(ValueError, match=few + " and one token; raise it, or lower sink_tokens or"):
        in_tokens(hard_kv(max_step_bytes=20 * 1024), shape, FLOAT32, never)
    with pytest.raises(ValueError, match="and a page of 16; raise it"):
        in_tokens(hard_kv("quest", max_step_bytes=35 * 1024), shape, FLOAT32, never)
    for option in ("mean_tokens", "dense_until"):
        asks = hard_kv(max_step_bytes=40 * 1024, **{option: 50})
        with pytest.raises(
            ValueError, match=rf"allows 40 tokens of a head, but {option}=50; raise"
        ):
            in_tokens(asks, shape, FLOAT32, never)
    capped = hard_kv(max_step_bytes="40KiB")
    assert pickle.loads(pickle.dumps(capped)) == capped
    with pytest.raises(ValueError, match="max_step_bytes=40960 of hard_kv is turned into max_tok"):
        capped.check_model(**shape.heads)


def test_what_nothing_predicts(
    tiny_folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OFFLOAD_CACHE", str(tmp_path))
    folder, policy = tiny_folders["llama"], hard_kv(max_step_us=100)
    how = r"`offload plan --context 512 --dtype float32 --threads 1 --device cpu` with this model"
    with pytest.raises(ValueError, match=f"machine was not measured; run {how}"):
        loaded(folder, policy)
    with pytest.raises(NotImplementedError, match="nothing predicts steps of several ranks, or wi"):
        loaded(folder, policy, backend="inline")
    other = HeadPlacement.filled(SMALL.num_layers + 1, SMALL.num_kv_heads, Place.CPU)
    for placement, message in (
        (None, "for a GPU before its heads have their places; give plac"),
        (other, f"made for another model: .*={SMALL.num_layers + 1}"),
    ):
        with pytest.raises(ValueError, match=message):
            predictor(policy, machine_profile(), placement=placement, on_gpu=True)


def test_a_plan_for_a_gpu_with_places(tmp_path: Path) -> None:
    machine, places = tmp_path / "machine.json", tmp_path / "places.json"
    machine_profile().save(machine)
    shape = planned_model("llama-3.1-8b").shape
    kinds = HeadPlacement.filled(shape.num_layers, shape.num_kv_heads, Place.CPU).places.copy()
    kinds[:2] = Place.GPU  # dense layers
    places.write_text(json.dumps({"placement": HeadPlacement(kinds).as_json()}))
    arguments = ["plan", "llama-3.1-8b", "--context", "32768", "--profile", str(machine), "--json"]
    arguments += ["--policy", "hard_kv", "--placement", str(places)]

    def planned(*options: str, batch: int = 1) -> dict[str, Any]:
        given = [x for option in ("inner=exact_topk", *options) for x in ("--option", option)]
        result = runner.invoke(app, [*arguments, *given, "--batch", str(batch)])
        assert result.exit_code == 0, result.output
        document: dict[str, Any] = json.loads(result.stdout)
        return document

    whole = planned()
    assert whole["max_tokens"] == 1024
    limit = 1e3 * planned("max_tokens=500")["milliseconds_per_step"]
    found = planned(f"max_step_us={limit}")
    assert found["max_tokens"] == 500
    assert found["milliseconds_per_step"] < whole["milliseconds_per_step"]
    by_bytes = planned("max_step_bytes=100MiB")
    assert by_bytes["max_tokens"] == 100 * 2**20 // (30 * 8 * 2 * 128 * 2)
    assert planned("max_step_bytes=400MiB", batch=4)["max_tokens"] == by_bytes["max_tokens"]
    wrong = ["--option", "inner=exact_topk", "--option", "max_step_us=10"]
    result = runner.invoke(app, [*arguments, *wrong])
    assert result.exit_code == 1
    assert "max_step_us=10 is less than the" in " ".join(result.output.split())
    places.write_text(json.dumps({"placement": HeadPlacement(kinds[:4]).as_json()}))
    result = runner.invoke(app, [*arguments, *wrong])
    assert result.exit_code == 1
    assert "made for another model: it has num_layers=4" in " ".join(result.output.split())


def test_generate_takes_it(tiny_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    load, caps = OffloadedModel.from_pretrained, []

    def keeping(*arguments: Any, **options: Any) -> Any:
        model = load(*arguments, **options)
        caps.append(runtime_of(model).attention.policy.budget_tokens)
        return model

    monkeypatch.setattr(OffloadedModel, "from_pretrained", keeping)
    arguments = ["generate", str(tiny_folders["llama"]), "--threads", "1", "-n", "4", "--json"]
    arguments += ["-p", "the quick brown fox " * 9, "--policy", "hard_kv"]
    for name, value in {**OPTIONS, "inner": "exact_topk"}.items():
        arguments += ["--option", f"{name}={value}"]
    result = runner.invoke(app, [*arguments, "--option", "max_step_bytes=40KiB"])
    assert result.exit_code == 0, result.output
    (run,) = json.loads(result.stdout)["runs"]
    assert (run["policy"], caps) == ("hard_kv", [40])
    result = runner.invoke(app, [*arguments, "--option", "max_step_bytes=9KiB"])
    assert result.exit_code == 1
    assert "max_step_bytes=9216 is less than 21504" in " ".join(result.output.split())


def test_evaluations_name_the_tokens(tiny_folders: dict[str, Path]) -> None:
    policies = [Full(), hard_kv(max_step_bytes="40KiB")]
    runs = Runs("float32", "cpu", threads=1, page_tokens=64)
    setup = Setup(str(tiny_folders["llama"]), policies, [], runs, verbose=False)
    options = setup.described()["policies"][setup.labels[1]]
    assert (options["max_tokens"], options["max_step_bytes"]) == (40, None)
