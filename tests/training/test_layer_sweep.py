"""The sweep over select layers: what it computes is what the runtime does, and what it chooses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from cases.answers import decoded_logits
from cases.tiny_models import byte_tokenizer, make_tiny_model, random_tokens

from offload import OffloadedModel
from offload.models import lean_model_maker
from offload.policies import ExactTopK, TidalDecode
from offload.system.stdlib_text import stdlib_docstrings, stdlib_sources
from offload.training import answers
from offload.training.layer_sweep import (
    LayerSweep,
    Score,
    SweepSettings,
    attending_layers,
    check_num_select_layers,
    compared,
)
from offload.training.mixed_attention import ReadText, SparseRule, mixed_logits, read_text

NUM_LAYERS, PROMPT, ANSWER, BUDGET = 6, 400, 12, 100
TEXTS: dict[str, Any] = {"tokens": 2048, "num_batches": 1, "batch_size": 2, "budgets": (128, 90)}


@pytest.fixture(scope="module")
def stock() -> Any:
    return make_tiny_model("qwen3", num_hidden_layers=NUM_LAYERS, max_position_embeddings=2304)


@pytest.fixture(scope="module")
def lean(stock: Any) -> Any:
    return lean_model_maker("qwen3")(stock)


@pytest.fixture(scope="module")
def folder(stock: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("sweep")
    stock.save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def few_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """To cut into bytes, which takes seconds of all of them."""
    docstrings, sources = [*stdlib_docstrings()][:60], stdlib_sources()[:1]
    monkeypatch.setattr(answers, "stdlib_docstrings", lambda: docstrings)
    monkeypatch.setattr(answers, "stdlib_sources", lambda: sources)


@torch.no_grad()
@pytest.mark.parametrize(("dense_layers", "layers"), [(1, (1, 3)), (0, (0, 4, 5)), (1, (2,))])
def test_layers_do_what_the_runtime_does(
    folder: Any, lean: Any, dense_layers: int, layers: tuple[int, ...]
) -> None:
    """Logits of each token of an answer, decoded one by one under the policy."""
    policy = TidalDecode(ExactTopK(budget_tokens=BUDGET, dense_layers=dense_layers), layers)
    model = OffloadedModel.from_pretrained(folder, policy=policy, dtype="float32", num_threads=1)
    tokens = random_tokens(1, PROMPT + ANSWER, seed=1)
    expected = decoded_logits(model, tokens, PROMPT)
    text = read_text(lean, tokens, PROMPT, torch.ones(1, ANSWER, dtype=torch.bool))
    rule = SparseRule(BUDGET)
    actual = mixed_logits(lean, text, attending_layers(layers, NUM_LAYERS), rule)
    largest = expected.abs().max()
    assert (actual - expected).abs().max() < 1e-4 * largest
    assert (text.logits - expected).abs().max() > 1e-2 * largest


def test_what_is_compared_of_answers() -> None:
    """The second one is one token long; what pads it says nothing."""
    rng = np.random.default_rng(0)
    full, ours = rng.normal(size=(2, 2, 3, 5)).astype(np.float32)
    full[1, 1:], ours[1, 1:] = 9.0, -9.0
    full[0, 0] = ours[0, 0]  # the same tokens are most probable, by other logits
    full[0, 1] = 2 * ours[0, 1]
    answered = torch.tensor([[True, True, True], [True, False, False]])
    best = ours.argmax(-1)
    tokens = torch.tensor([[0, 0, best[0, 0], best[0, 1]], [0, 4, 0, 0]])
    text = ReadText(tokens, 1, answered, [], [], torch.from_numpy(full), torch.empty(0))

    def log_p(logits: np.ndarray) -> np.ndarray:
        x = logits.astype(np.float64)
        return x - np.log(np.exp(x).sum(-1, keepdims=True))

    kl = (np.exp(log_p(full)) * (log_p(full) - log_p(ours))).sum(-1)
    same = full.argmax(-1) == best
    expected = [[kl[0].mean(), kl[1, 0]], [same[0].mean(), same[1, 0]], [1, 1], [1, 1]]
    found = compared(torch.from_numpy(ours), text).numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    lost = ours.copy()
    lost[0, 1, (best[0, 1] + 1) % 5] = 99.0
    np.testing.assert_array_equal(
        compared(torch.from_numpy(lost), text)[2:].numpy(), [[0, 1], [1, 1]]
    )
    text.logits[0, 0] = -text.logits[0, 0]  # full attention does not know it, either
    np.testing.assert_array_equal(
        compared(torch.from_numpy(ours), text)[2:].numpy(), [[0, 1], [0, 1]]
    )


class _Told(LayerSweep):
    """Knows what sets of layers are worth."""

    def _score(self, layers: Any, read: Any) -> list[Score]:
        worth = {(1,): 9.0, (1, 3): 3.0, (1, 2, 3): 2.5, (1, 3, 4): 2.0, (1, 4, 5): 1.0}
        kl = worth.get(layers, 4.0)
        # Of two budgets: neither alone says so.
        return [Score(layers, 128, kl - 10, 0, 0), Score(layers, 90, kl + 10, 0, 0)]


def test_layers_are_added_and_then_exchanged(lean: Any) -> None:
    settings = SweepSettings(3, dense_layers=1, **TEXTS)
    rounds: list[int] = []
    scored: list[int] = []
    sweep = _Told(lean, byte_tokenizer(), settings).run(
        [(1, 2, 5)], on_round=rounds.append, on_scored=lambda: scored.append(1)
    )
    assert sweep.path == [(1,), (1, 3), (1, 3, 4), (1, 4, 5)]
    assert sweep.select_layers == (1, 4, 5)
    # One alone, four beside it, three more; then what one exchange reaches and was not known.
    assert rounds[:3] == [1, 4, 3]
    assert sum(rounds) == len(scored) == len(sweep.scores) // 2
    assert len({score.select_layers for score in sweep.scores}) == len(scored)
    assert [score.select_layers for score in sweep.held_out[::2]] == [(1, 4, 5), (1, 2, 5), (1,)]


def test_of_a_model(lean: Any) -> None:
    """All that select are as full attention, the chosen ones better than what they started from."""
    read: list[int] = []
    sweep = LayerSweep(
        lean,
        byte_tokenizer(),
        SweepSettings(2, dense_layers=1, **TEXTS),
        on_batch=lambda: read.append(1),
    )
    assert len(read) == 1
    (exact, _) = sweep._score(tuple(range(NUM_LAYERS)), sweep._read)
    assert exact.kl == pytest.approx(0, abs=1e-5)
    assert exact.agrees == 1
    found = sweep.run()
    by_layers = {score.select_layers: score.kl for score in found.scores}
    assert set(by_layers) == {(1,), (1, 2), (1, 3), (1, 4), (1, 5)}
    of_both = {
        layers: sum(score.kl for score in found.scores if score.select_layers == layers)
        for layers in by_layers
    }
    assert found.select_layers == min(of_both, key=lambda layers: of_both[layers])
    assert of_both[found.select_layers] < of_both[1,]
    assert all(np.isfinite(score.kl) and score.kl > 0 for score in found.held_out)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_select_layers": 0}, "num_select_layers must be at least 1, got 0"),
        ({"tokens": 1000}, "--context 1000 must be at least 1024"),
        ({"budgets": (2048,)}, r"--budget-tokens 2048 must be in \(68, 2048\)"),
        ({"budgets": (68,)}, r"--budget-tokens 68 must be in \(68, 2048\)"),
        ({"budgets": ()}, "budgets is empty"),
        ({"dense_layers": -1}, "--dense-layers -1 must be at least 0"),
        ({"num_batches": 0}, "num_batches must be at least 1, got 0"),
    ],
)
def test_settings_that_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SweepSettings(**{"num_select_layers": 2, **TEXTS, **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_select_layers": 4}, r"--select-layers 4 must be in \[1, 3\]: .* has 6 layers"),
        ({"tokens": 2300}, "their answers take 2340 tokens, more than the 2304 of this model"),
        ({"num_batches": 10**6}, "1000000 batches of 2 texts of 2048 tokens take .* but cpu has"),
    ],
)
def test_models_that_do_not_fit(lean: Any, options: dict[str, Any], message: str) -> None:
    settings = SweepSettings(**{"num_select_layers": 2, **TEXTS, **options})
    with pytest.raises(ValueError, match=message):
        LayerSweep(lean, byte_tokenizer(), settings)


def test_weights_that_are_no_numbers() -> None:
    """No layer is chosen by distances that are none."""
    broken = make_tiny_model("llama", num_hidden_layers=4, max_position_embeddings=1280)
    broken.model.layers[2].self_attn.q_proj.weight.data[3, 5] = torch.nan
    settings = SweepSettings(1, dense_layers=1, **(TEXTS | {"tokens": 1024}))
    sweep = LayerSweep(lean_model_maker("llama")(broken), byte_tokenizer(), settings)
    with pytest.raises(ValueError, match=r"select layers \(1,\) is nan: .* check its weights"):
        sweep.run()


def test_one_layer_has_to_reuse() -> None:
    check_num_select_layers(3, 6, 2)
    with pytest.raises(ValueError, match="must be in \\[1, 3\\]"):
        check_num_select_layers(4, 6, 2)
