"""Training heads: what gates of 0 and 1 compute, the constraint, going on, and the command."""

from __future__ import annotations

import json
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases.answers import decoded_logits
from cases.tiny_models import byte_tokenizer, make_tiny_model, random_tokens
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from offload import OffloadedModel
from offload.cli import app
from offload.loading.names import checkpoint_name
from offload.models import lean_model_maker
from offload.policies import LycheeDecode
from offload.selection.head_roles import HeadRoles
from offload.system.stdlib_text import stdlib_docstrings, stdlib_sources
from offload.training import answers, mixed_heads
from offload.training import train as training
from offload.training.gates import HardKuma
from offload.training.mixed_attention import SparseRule, read_text
from offload.training.mixed_heads import activation_bytes, mixed_hidden, prepare_stock
from offload.training.train import Settings, Step, Trainer, read_saved, train

runner = CliRunner(env={"COLUMNS": "120", "TERM": "dumb"})
NUM_LAYERS, PROMPT, ANSWER, BUDGET = 4, 400, 12, 100
SHAPE = {"num_layers": NUM_LAYERS, "num_kv_heads": 2, "head_dim": 32}
SIZES: dict[str, Any] = {"steps": 6, "context": 1024, "batch_size": 1, "budget_tokens": 90}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    tiny = make_tiny_model("llama", num_hidden_layers=NUM_LAYERS, max_position_embeddings=1280)
    tiny.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def few_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """To cut into bytes, which takes seconds of all of them."""
    docstrings, sources = [*stdlib_docstrings()][:60], stdlib_sources()[:1]
    monkeypatch.setattr(answers, "stdlib_docstrings", lambda: docstrings)
    monkeypatch.setattr(answers, "stdlib_sources", lambda: sources)
    monkeypatch.setattr(training, "HELD_OUT_BATCHES", 2)


def trainer(**changes: Any) -> Trainer:
    stock = make_tiny_model("llama", num_hidden_layers=NUM_LAYERS, max_position_embeddings=1280)
    settings = Settings("tiny", "float32", **{"target_heads": 2, **SIZES, **changes})
    return Trainer(stock, lean_model_maker("llama")(stock), byte_tokenizer(), settings)


@torch.no_grad()
def test_gates_of_0_and_1_are_lychee_decode(folder: Path) -> None:
    """Logits of each token of an answer, decoded one by one with these roles."""
    retrieval = np.array([[1, 1], [0, 1], [1, 0], [0, 0]], bool)
    roles = HeadRoles.of(retrieval, head_dim=32)
    policy = LycheeDecode(budget_tokens=BUDGET, head_roles=roles)
    model = OffloadedModel.from_pretrained(folder, policy=policy, dtype="float32", num_threads=1)
    tokens = random_tokens(1, PROMPT + ANSWER, seed=1)
    expected = decoded_logits(model, tokens, PROMPT)
    made = trainer()
    text = read_text(made.lean, tokens, PROMPT, torch.ones(1, ANSWER, dtype=torch.bool))
    gates = torch.from_numpy(retrieval).float()
    actual = made.stock.lm_head(mixed_hidden(made.stock, text, gates, SparseRule(BUDGET)))
    largest = expected.abs().max()
    assert (actual - expected).abs().max() < 1e-4 * largest
    assert (text.logits - expected).abs().max() > 1e-2 * largest
    full = mixed_hidden(made.stock, text, torch.ones_like(gates), SparseRule(BUDGET))
    torch.testing.assert_close(full, text.hidden, rtol=1e-4, atol=1e-4)


def test_gradients_through_layers_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are those of differences, and those without gradient checkpointing."""
    calls: list[int] = []
    attend = mixed_heads.MixedHeads.attend
    monkeypatch.setattr(
        mixed_heads.MixedHeads,
        "attend",
        lambda self, layer, *args: calls.append(layer) or attend(self, layer, *args),
    )
    stock = make_tiny_model("qwen3", num_hidden_layers=NUM_LAYERS).double()
    lean = lean_model_maker("qwen3")(stock)
    prepare_stock(stock)
    text = read_text(lean, random_tokens(2, 212), 200, torch.ones(2, 12, dtype=torch.bool))
    gates = torch.rand((NUM_LAYERS, 2), generator=torch.Generator().manual_seed(1))
    gates[0] = 1

    def loss(gates: torch.Tensor) -> torch.Tensor:
        return mixed_hidden(stock, text, gates, SparseRule(BUDGET)).square().mean()

    learnt = gates.clone().requires_grad_()
    loss(learnt).backward()
    assert sorted(calls) == sorted([*range(NUM_LAYERS), *range(1, NUM_LAYERS)])
    assert learnt.grad is not None
    stock.eval()  # nothing is computed again
    plain = gates.clone().requires_grad_()
    loss(plain).backward()
    torch.testing.assert_close(learnt.grad, plain.grad)
    with torch.no_grad():
        for layer, head in ((1, 0), (2, 1), (3, 0)):
            step = torch.zeros_like(gates)
            step[layer, head] = 1e-2
            difference = (loss(gates + step) - loss(gates - step)) / 2e-2
            assert float(difference) == pytest.approx(float(learnt.grad[layer, head]), rel=0.05)
    assert all(parameter.grad is None for parameter in stock.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_the_gradient_keeps_is_what_is_estimated(dtype: torch.dtype) -> None:
    stock = make_tiny_model("llama", num_hidden_layers=NUM_LAYERS).to(dtype)
    lean = lean_model_maker("llama")(stock)
    prepare_stock(stock, recompute=False)
    text = read_text(lean, random_tokens(2, 600), 540, torch.ones(2, 60, dtype=torch.bool))
    gates = torch.rand((NUM_LAYERS, 2)).requires_grad_()
    kept: dict[int, int] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        mixed_hidden(stock, text, gates, SparseRule(BUDGET))
    for parameter in stock.parameters():
        kept.pop(parameter.untyped_storage().data_ptr(), None)
    expected = activation_bytes(lean.shape, dtype.itemsize, 2 * 60, 600)
    assert sum(kept.values()) == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize(("free", "calls"), [(1 << 40, 4), (1 << 20, 7)])
def test_layers_are_computed_again_where_memory_is_short(
    free: int, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "host_memory_limit_bytes", lambda: free)
    attend, called = mixed_heads.MixedHeads.attend, []
    monkeypatch.setattr(
        mixed_heads.MixedHeads,
        "attend",
        lambda self, layer, *args: called.append(layer) or attend(self, layer, *args),
    )
    trainer().step()
    assert len(called) == calls


@pytest.mark.slow
def test_the_constraint_is_reached() -> None:
    made = trainer(steps=50, target_heads=2, learning_rate=0.3)
    before = {name: x.clone() for name, x in made.stock.named_parameters()}
    for _ in range(made.settings.steps):
        made.step()
    first, last = made.log[0], made.log[-1]
    assert first.open_heads > 3
    assert last.open_heads == pytest.approx(2, abs=0.4)
    assert last.retrieval_heads == 2 == made.retrieval[1:].sum()
    assert made.retrieval[0].all()
    assert all(torch.equal(x, before[name]) for name, x in made.stock.named_parameters())


def test_the_largest_seed() -> None:
    """What gates are drawn by is larger than the seed."""
    assert trainer(seed=2**64 - 1).step().loss >= 0


def test_it_goes_on_as_without_a_break(tmp_path: Path) -> None:
    whole, saved = trainer(), tmp_path / "saved"
    train(whole, tmp_path / "whole", lambda step: None)

    def interrupt(step: Any) -> None:
        if step.step == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(trainer(), saved, interrupt)
    again = trainer()
    again.resume(saved)
    assert [step.step for step in again.log] == [0, 1, 2]
    train(again, saved, lambda step: None)
    assert again.log == whole.log
    assert len(again.log) == 6
    assert torch.equal(again.mean_gates(), whole.mean_gates())
    with pytest.raises(ValueError, match=r"was trained with --seed 0, not --seed 1; give the same"):
        trainer(seed=1).resume(saved)
    saved.write_bytes(b"PK?")
    with pytest.raises(ValueError, match="is no unfinished training, or damaged"):
        trainer().resume(saved)


def test_it_goes_on_with_the_same_weights_elsewhere(tmp_path: Path) -> None:
    """An embedded model that was converted again has another time, on another machine another
    digest, too."""
    saved, made = tmp_path / "saved", trainer()
    made.settings = replace(made.settings, checkpoint="embedded@1-2")
    made.save(saved)
    assert read_saved(saved, replace(made.settings, checkpoint="embedded@3-4"))["log"] == []
    with pytest.raises(ValueError, match="was trained with checkpoint embedded@1-2, not checkp"):
        read_saved(saved, replace(made.settings, checkpoint="another@1-2"))


def test_some_questions_are_decoded() -> None:
    def lengths(texts: answers.AnswerTexts, **options: Any) -> list[int]:
        batches = [texts.batch(4, seed, **options) for seed in range(20)]
        assert {len(x.prompt) for batch in batches for x in batch} == {1024}
        return [len(x.answer) for batch in batches for x in batch]

    decoded = answers.AnswerTexts(byte_tokenizer(), 1024, 40, max_question_tokens=400)
    longer = sum(length > 40 for length in lengths(decoded))
    assert 0.08 < longer / 80 < 0.4
    assert max(lengths(decoded)) <= 440
    assert max(lengths(decoded, held_out=True)) <= 40
    assert max(lengths(answers.AnswerTexts(byte_tokenizer(), 1024))) <= 40


def command(folder: Path, out: Path, *more: str) -> list[str]:
    sizes = ["--steps", "4", "--context", "1024", "--batch-size", "1", "--threads", "1"]
    return ["train-heads", str(folder), "--out", str(out), "--target-heads", "2", *sizes, *more]


def test_the_command(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "roles.json"
    result = runner.invoke(app, command(folder, out, "--json"))
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    roles = HeadRoles.load(out)
    roles.check(**SHAPE, model_type="llama", checkpoint=checkpoint_name(folder))
    assert roles.checkpoint == checkpoint_name(folder)
    assert document["retrieval_heads"] == roles.num_retrieval_heads
    assert "4 steps on 1 prompts of 1024 tokens, budget 102, seed 0" in roles.made_by
    assert document["seconds_per_step"] > 0
    assert document["held_out"]["loss"] > 0
    lines = [json.loads(line) for line in Path(document["log"]).read_text().splitlines()]
    assert lines[0]["settings"] == document["settings"]
    assert [line["step"] for line in lines[1:-1]] == list(range(4))
    assert lines[-1]["held_out"] == document["held_out"]
    assert not (tmp_path / "roles.json.unfinished").exists()
    policy = LycheeDecode(budget_tokens=90, head_roles=out)
    model = OffloadedModel.from_pretrained(folder, policy=policy, num_threads=1)
    assert model.generate(random_tokens(1, 200), max_new_tokens=2).shape[1] <= 202


def test_the_command_goes_on(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, out = tmp_path / "whole.json", tmp_path / "roles.json"
    assert runner.invoke(app, command(folder, whole)).exit_code == 0
    step = Trainer.step

    def interrupted(made: Trainer) -> Step:
        if len(made.log) == 2:
            raise KeyboardInterrupt
        return step(made)

    with monkeypatch.context() as broken:
        broken.setattr(Trainer, "step", interrupted)
        ended = runner.invoke(app, command(folder, out))
    assert ended.exit_code == 130
    said = " ".join(ended.output.split())
    assert "roles.json.unfinished has 2 steps; go on with --resume" in said
    unfinished = tmp_path / "roles.json.unfinished"
    before = unfinished.read_bytes()
    log = tmp_path / "roles.json.log.jsonl"
    log.write_text("of other roles")
    for more, said in (
        ([], "is of a training that has not ended; go on with --resume"),
        (
            ["--resume", "--seed", "3"],
            "was trained with --seed 0, not --seed 3; give the same options",
        ),
    ):
        refused = runner.invoke(app, command(folder, out, *more))
        assert refused.exit_code == 1
        assert said in " ".join(refused.output.split())
        assert unfinished.read_bytes() == before
        assert not out.exists()
        assert log.read_text() == "of other roles"
    result = runner.invoke(app, command(folder, out, "--resume"))
    assert result.exit_code == 0, result.output
    assert out.read_text() == whole.read_text()
    logs = [path.with_name(f"{path.name}.log.jsonl").read_text() for path in (out, whole)]
    assert logs[0] == logs[1]
    assert not list(tmp_path.glob("*.unfinished*"))


@pytest.mark.slow
def test_resuming_with_other_steps(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends as a training that had as many from the beginning; without --steps there are as many
    as were asked for first."""
    step = Trainer.step
    outs = [tmp_path / f"{name}.json" for name in ("whole", "longer", "shorter", "as_before")]
    whole, longer, shorter, as_before = outs
    assert runner.invoke(app, command(folder, whole)).exit_code == 0
    with monkeypatch.context() as broken:
        broken.setattr(Trainer, "step", lambda self: step(self) if len(self.log) < 2 else 1 / 0)
        for out, steps in ((longer, "3"), (shorter, "100"), (as_before, "4")):
            runner.invoke(app, command(folder, out, "--steps", steps))
    refused = runner.invoke(app, command(folder, shorter, "--resume", "--steps", "1"))
    assert refused.exit_code == 1
    said = "".join(refused.output.split())
    assert f"--steps1islessthanthe2stepsof{shorter}.unfinished" in said
    for out in (longer, shorter):
        result = runner.invoke(app, command(folder, out, "--resume"))  # with four
        assert result.exit_code == 0, result.output
        assert out.read_text() == whole.read_text()
    without_steps = [x for x in command(folder, as_before, "--resume") if x not in ("--steps", "4")]
    assert runner.invoke(app, without_steps).exit_code == 0
    logs = {out.with_name(f"{out.name}.log.jsonl").read_text() for out in outs}
    assert len(logs) == 1
    assert as_before.read_text() == whole.read_text()


@pytest.mark.parametrize(("mean", "found"), [(0.2, 0), (0.9, 6), (None, 2)])
def test_gates_that_have_not_settled(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mean: float | None, found: int
) -> None:
    """None, or far more heads than were asked for, are said; what is near the target is not."""
    means = torch.full((NUM_LAYERS, 2), 0.2 if mean is None else mean)
    means[0] = 1
    means[1] = 0.9 if mean is None else mean
    monkeypatch.setattr(Trainer, "mean_gates", lambda self: means)
    result = runner.invoke(app, command(folder, tmp_path / "roles.json", "--json"))
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["retrieval_heads"] == found
    said = " ".join(result.stderr.split())
    assert ("warning:" in said) == (mean is not None)
    if mean is not None:
        assert f"{found} heads retrieve after layer 0, but --target-heads is 2" in said
        assert "have not settled in 4 steps" in said
        assert "train again with more --steps" in said


def test_damaged_unfinished_trainings(folder: Path, tmp_path: Path) -> None:
    made, saved = trainer(), tmp_path / "roles.json.unfinished"
    made.step()
    made.save(saved)
    whole = torch.load(saved, weights_only=True)
    without_gates = {name: value for name, value in whole.items() if name != "gates"}
    newer = whole | {"settings": whole["settings"] | {"temperature": 1.0}}
    for damaged in (
        without_gates,
        newer,
        whole | {"settings": None},
        whole | {"log": None},
        [1, 2],
    ):
        torch.save(damaged, saved)
        with pytest.raises(ValueError, match="is no unfinished training, or damaged; delete it"):
            made.resume(saved)
    saved.write_bytes(saved.read_bytes()[:300])
    result = runner.invoke(app, command(folder, tmp_path / "roles.json", "--resume"))
    assert result.exit_code == 1
    assert "is no unfinished training, or damaged" in " ".join(result.output.split())


def test_weights_that_are_no_numbers(folder: Path, tmp_path: Path) -> None:
    """Nothing is learnt: other roles and their log stay, and nothing waits for --resume."""
    broken = Path(shutil.copytree(folder, tmp_path / "broken"))
    stock = AutoModelForCausalLM.from_pretrained(broken, dtype=torch.float32)
    stock.model.layers[1].self_attn.q_proj.weight.data[3, 5] = torch.nan
    stock.save_pretrained(broken)
    out, log = tmp_path / "roles.json", tmp_path / "roles.json.log.jsonl"
    out.write_text("mine")
    log.write_text("of mine")
    result = runner.invoke(app, command(broken, out, "--dtype", "float32"))
    assert result.exit_code == 1
    said = "the loss of step 0 is nan; the model computes no finite numbers; check its weights"
    assert said in " ".join(result.output.split())
    assert (out.read_text(), log.read_text()) == ("mine", "of mine")
    assert not list(tmp_path.glob("*.unfinished*"))


def test_refusals(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "roles.json"
    out.write_text("mine")
    one_layer = tmp_path / "one_layer"
    make_tiny_model("llama", num_hidden_layers=1).save_pretrained(one_layer)
    byte_tokenizer().save_pretrained(one_layer)
    sliding = Path(shutil.copytree(folder, tmp_path / "sliding"))
    config = json.loads((sliding / "config.json").read_text())
    config |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    (sliding / "config.json").write_text(json.dumps(config | {"sliding_window": 256}))
    for model, more, said in (
        (folder, ["--target-heads", "7"], "--target-heads 7 must be in [1, 6]"),
        (
            folder,
            ["--context", "4096"],
            "the 1280 of this model (max_position_embeddings=1280); lower --context",
        ),
        (folder, ["--budget-tokens", "68"], "--budget-tokens 68 must be in (68, 1024)"),
        (folder, ["--learning-rate", "inf"], "--learning-rate inf must be finite and above 0"),
        (folder, ["--context", "5"], "--context 5 must be at least 1024"),
        (folder, ["--resume"], "to go on with, as a training that has ended leaves none; leave"),
        (one_layer, [], "this model has one layer, whose KV heads all retrieve: there are none"),
        (
            sliding,
            [],
            "(sliding_window=256; sliding-window layers are not supported yet); no training fits, "
            "which takes at least 1128",
        ),
    ):
        result = runner.invoke(app, command(model, out, *more))
        assert result.exit_code == 1, result.output
        assert said in " ".join(result.output.split()), result.output
        assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["roles.json"]
        assert out.read_text() == "mine"


def test_ctrl_c_waits_for_the_end_of_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, limit = trainer(), HardKuma.limit

    def interrupted(gates: HardKuma) -> None:
        if len(made.log) == 2:
            signal.raise_signal(signal.SIGINT)
        limit(gates)

    monkeypatch.setattr(HardKuma, "limit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(made, tmp_path / "saved", lambda step: None)
    again = trainer()
    again.resume(tmp_path / "saved")
    assert len(again.log) == 3
    assert torch.equal(again.mean_gates(), made.mean_gates())
