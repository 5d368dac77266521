"""What layers, heads and rules keep: against sets by hand, and against the policy itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases.attention_cases import Cache, random_queries
from cases.reuse_cases import GROUP_SIZE, importance_of, step_through
from cases.seeded import new_rng
from cases.tiny_models import byte_tokenizer, save_long_model

from cpu_ops.worker_pool import WorkerPool
from offload import load_tokenizer
from offload.bench.eval.perplexity import Window
from offload.bench.eval.prompt import prompt_text, prompt_tokens
from offload.cli import generation
from offload.loading.gguf import EMBEDDED_MODEL
from offload.policies import LycheeDecode
from offload.policies.lychee_decode.roles import HeadRoles
from offload.system.stdlib_text import DEMO_NEEDLE, DEMO_QUESTION
from perf.papers import kinds_of_text, tidal_needle
from perf.papers.kinds_of_text import KINDS, length_of, make_item
from perf.papers.layer_attention import (
    LayerAttention,
    answer_kept,
    compare_layers,
    kept_below,
    selecting_above,
)
from perf.papers.lychee_decode import WINDOWS, Published, Recorded, number_for
from perf.papers.tidal_decode import LayerSweep
from perf.tables import shared_selection_tables as tables

NUM_LAYERS, NUM_HEADS, NUM_QUERIES, KV_LEN = 6, 2, 3, 60
SINKS, RECENT, BUDGET = 2, 5, 15


def made_attention(kv_len: int = KV_LEN, right: float | None = None) -> LayerAttention:
    rng = new_rng()
    scores = torch.from_numpy(
        rng.normal(size=(NUM_LAYERS, NUM_HEADS, NUM_QUERIES, kv_len)).astype(np.float32) * 2
    )
    future = torch.arange(kv_len) > (kv_len - NUM_QUERIES + torch.arange(NUM_QUERIES))[:, None]
    weights = scores.masked_fill(future, -torch.inf).softmax(-1)
    wanted = torch.zeros(kv_len, dtype=torch.bool)
    wanted[20:24] = True
    return LayerAttention(weights, rng.random((NUM_LAYERS - 1, 3, 4)), wanted, right)


@pytest.mark.parametrize("is_shared", [False, True])
def test_pairs_of_layers_are_those_of_sets(is_shared: bool) -> None:
    attention = made_attention()
    found = compare_layers(
        attention,
        budget_tokens=BUDGET,
        sink_tokens=SINKS,
        recent_tokens=RECENT,
        is_shared=is_shared,
    )
    weights = attention.weights.double().numpy()

    def best(importance: Any, kv_len: int) -> set[int]:
        middle = range(SINKS, kv_len - RECENT)
        order = sorted(middle, key=lambda token: -importance[token])
        return set(order[: BUDGET - SINKS - RECENT])

    for i, j in ((0, 0), (0, 2), (1, 3)):
        hits, kept, answer = np.zeros(NUM_HEADS), np.zeros(NUM_HEADS), 0.0
        for head in range(NUM_HEADS):
            for query in range(NUM_QUERIES):
                kv_len = KV_LEN - NUM_QUERIES + 1 + query
                of_layer = weights[i, :, query]
                chosen = best(of_layer.mean(0) if is_shared else of_layer[head], kv_len)
                own = weights[j, head, query]
                hits[head] += len(chosen & best(own, kv_len)) / len(chosen) / NUM_QUERIES
                attended = chosen | {*range(kv_len - RECENT, kv_len)}
                total = own[SINKS:].sum()
                kept[head] += sum(own[token] for token in attended) / total / NUM_QUERIES
                answer += sum(own[token] for token in attended & {20, 21, 22, 23})
        np.testing.assert_allclose(found.recall[:, i, j], hits, rtol=1e-5)
        if i < j:
            np.testing.assert_allclose(found.mass[:, i, j], kept, rtol=1e-5)
            np.testing.assert_allclose(found.answer[i, j], answer, rtol=1e-5)
    assert (np.diagonal(found.mass, axis1=1, axis2=2) == 1).all()
    np.testing.assert_allclose(np.diag(found.answer), weights[..., 20:24].sum((1, 2, 3)), rtol=1e-5)


def test_a_budget_that_chooses_nothing_is_refused() -> None:
    options = {"sink_tokens": SINKS, "recent_tokens": RECENT, "is_shared": False}
    with pytest.raises(ValueError, match="budget_tokens=7 leaves 0 tokens to choose of a prompt"):
        compare_layers(made_attention(), budget_tokens=7, **options)
    with pytest.raises(ValueError, match="budget_tokens=90 leaves 83 tokens"):
        compare_layers(made_attention(), budget_tokens=90, **options)


def test_layers_reuse_the_last_that_selected() -> None:
    assert selecting_above(6, [1, 4]).tolist() == [0, 1, 1, 1, 4, 4]
    pairs = np.arange(36.0).reshape(6, 6)
    assert kept_below(pairs, [1, 4]) == np.mean([pairs[1, 2], pairs[1, 3], pairs[4, 5]])
    answer = np.diag([1.0, 2.0, 4.0]) + np.array([[0, 0.5, 0.25], [0, 0, 3.0], [0, 0, 0]])
    assert answer_kept(answer, [0]) == (1 + 0.5 + 0.25) / 7
    assert answer_kept(answer, [1]) == (1 + 2 + 3) / 7
    assert answer_kept(np.zeros((3, 3)), [0]) is None


@pytest.mark.parametrize(
    ("rule", "number"),
    [("top_p", 0.4), ("top_p", 0.8), ("threshold", 2e-3), ("threshold", 0.01), ("ratio", 0.2)],
)
def test_rules_hand_down_what_the_policy_hands_down(rule: str, number: float) -> None:
    """Layer 0 retrieves alone: what layer 1 attends to is what it handed down."""
    rng, kv_len = new_rng(), 400
    cache = Cache.random(rng, kv_len=kv_len, dtype=torch.float32, page_tokens=16, num_layers=2)
    queries = [random_queries(rng, 1, 2 * GROUP_SIZE, 64, torch.float32) for _ in range(2)]
    roles = np.array([[True, True], [False, False]])
    policy = LycheeDecode(
        budget_tokens=kv_len - 1,
        head_roles=HeadRoles.of(roles, head_dim=64),
        rule=rule,
        **{rule: number},
        **WINDOWS,
    )
    pool = WorkerPool(1)
    try:
        attention = cache.attention(pool, GROUP_SIZE, policy)
        handed_down = step_through(cache, attention, queries, [kv_len])[1][0]
    finally:
        pool.close()
    weights = np.stack(
        [importance_of(cache, queries[i][0], i, kv_len) / GROUP_SIZE for i in range(2)]
    )
    own = LayerAttention(
        torch.from_numpy(weights).float()[:, :, None], np.empty(0), torch.empty(0), None
    )
    published = Published(Recorded("prose", kv_len, own), roles)
    assert published.tokens(rule, number) == np.mean([len(tokens) for tokens in handed_down])
    kept = [
        of_head[[token for token in tokens if token >= WINDOWS["sink_tokens"]]].sum()
        / of_head[WINDOWS["sink_tokens"] :].sum()
        for of_head, tokens in zip(weights[1], handed_down, strict=True)
    ]
    assert published.mass_kept(rule, number) == pytest.approx(np.mean(kept), rel=1e-5)


def test_rules_are_compared_at_the_same_number_of_tokens() -> None:
    roles = np.zeros((NUM_LAYERS, NUM_HEADS), bool)
    roles[0] = True
    prompts = [Recorded("prose", n, made_attention(n)) for n in (300, 900)]
    published = [Published(one, roles) for one in prompts]
    for rule in ("top_k", "top_p", "threshold", "ratio"):
        number = number_for(rule, 100, published)
        tokens = np.mean([one.tokens(rule, number) for one in published])
        assert tokens == pytest.approx(100, abs=1), rule


# The example in a prompt of variable tracking is too long in bytes.
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "tracking"])
def test_prompts_of_every_kind(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    monkeypatch.setattr(kinds_of_text, "load_cached_tokenizer", lambda: tokenizer)
    monkeypatch.setattr(kinds_of_text, "_prose_tokens", lambda: [*range(3000)])
    prose = " ".join(f"This is sentence {i}." for i in range(900)).split()
    monkeypatch.setattr(kinds_of_text, "prose_words", lambda path: prose)
    length = 2000
    item, other = (make_item(kind, length, seed) for seed in (1, 2))
    assert length_of(item) == length
    assert (item.task, item.index) == (kind, 1)
    if isinstance(item, Window):
        assert len(item.tokens) == length
        assert item.tokens != other.tokens
    else:
        assert item.text != other.text
        assert all(output in item.text for output in item.outputs)
        assert len(tokenizer(item.text)["input_ids"]) <= length


def machine() -> dict[str, Any]:
    return {
        "versions": {"python": "3.11.7", "torch": "2.13.0", "transformers": "5.23.0"},
        "cpu": "A CPU",
        "cpus_present": 4,
        "cpus_usable": 2,
        "memory_bytes": 24 * 2**30,
        "isa": "avx2",
        "gpus": [],
        "commit": "0123456789abcdef",
        "uncommitted_changes": False,
        "date": "2026-01-01",
        "load_average": 0.1,
    }


def summary(task: str, policy: str, score: float, interval: list[float] | None) -> dict[str, Any]:
    names = {"part": "answers", "task": task, "policy": policy, "prompts": 8}
    return names | {"score": score, "interval": interval}


def test_tables_of_layers() -> None:
    found = LayerSweep()
    for kind in ("prose", "needle"):
        found.add(kind, 300, made_attention(300, right=1.0))
    sets = {(2,): "no re-selection", (2, 3): "default"}
    rows = [*found.similarity_rows(), *found.sweep_rows(), *found.sets_rows(sets)]
    rows += [summary("all", "full", 1.0, [0, 0]), summary("all", "2,3", 0.75, [-0.5, 0.1])]
    rows += [summary("needle", "2,3", 0.5, None)]
    rows += [
        {"part": "cells", "task": "needle", "length": 300, "samples": 8}
        | {"scores": {"full": 1.0, "exact_topk": 1.0, "quest": 0.5, "2": 0.0, "2,3": 0.75}}
    ]
    settings = {"model": "a model", "budget_tokens": 256, "lengths": [300]}
    kinds = {"prose": "some prose", "needle": "a needle"}
    result = {"machine": machine(), "settings": settings | {"kinds": kinds}, "rows": rows}

    lines = tables.layer_sweep_table(result).splitlines()
    assert lines[0].startswith("a model in bfloat16: 2 prompts of 2 kinds of text at 300 tokens")
    (of_2,) = [line for line in lines if line.startswith("| 2 |")]
    mean = np.mean([row["mass"][0] for row in found.sweep_rows()])
    assert f"| {mean:.1%} |" in of_2
    in_sets = tables.layer_sets_table(result)
    assert "| 2,3 | default |" in in_sets
    assert "| 50.0% | 75.0% (-50% … +10%) |" in in_sets
    by_length = tables.layer_lengths_table(result)
    assert "needle, 300 (8)" in by_length
    assert "| 2,3 | 75% |" in by_length


def test_tables_of_needles() -> None:
    """What full attention does not find, no layers lose."""

    def record(number: str, **said: str) -> dict[str, Any]:
        answers = {k: {"answer": x, "score": float(number in x)} for k, x in said.items()}
        return {"outputs": [number], "answers": answers}

    about: dict[str, Any] = {
        "full": {"layers": [], "budget_tokens": None},
        "swept": {"choice": "swept", "layers": [2, 17], "budget_tokens": 1024},
    }
    answered = [record("12", full="12", swept="12"), record("34", full="34", swept="5\n|3")]
    answered.append(record("56", full="no", swept="65"))
    rows = tidal_needle.rows_of("magic", answered, record("7", full="7", swept="8\n|8"), about)
    assert [(row["right"], row["lost"], row["demo_right"]) for row in rows] == [
        (2, 0, True),
        (1, 1, False),
    ]
    assert rows[1]["wrong"] == [{"wanted": "34", "said": "5\n|3"}, {"wanted": "56", "said": "65"}]
    settings = {"model": "a model", "length": 6400}
    table = tables.needle_table({"machine": machine(), "settings": settings, "rows": rows})
    assert "| magic | full |  |  | 2 of 3 | 0 | right |" in table
    assert (
        "| magic | swept | 2,17 | 1,024 | 1 of 3 | 1 | \N{LEFT DOUBLE QUOTATION MARK}8 \\|8"
        in table
    )


def test_the_needles_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has another text, number and depth; the demo's is what the command asks."""
    tokenizer = load_tokenizer(EMBEDDED_MODEL)
    for kind, make in tidal_needle.KINDS.items():
        samples = make(tokenizer, 700, 3, 1)
        assert len({sample.outputs for sample in samples}) == 3
        if kind == "noise":  # of RULER's own depths and texts
            continue
        assert [sample.task for sample in samples] == ["depth 0 %", "depth 50 %", "depth 100 %"]
        places = [x.text.index(x.outputs[0]) / len(x.text) for x in samples]
        assert places[0] < 0.25 < places[1] < 0.75 < places[2]
        assert (len({sample.text[300:400] for sample in samples}) == 3) == (kind == "magic")
    demo = tidal_needle.demo_sample(tokenizer, 700)
    tokens, count = prompt_tokens(prompt_text(demo, tokenizer, chat=False), tokenizer)
    expected = generation.prompt_tokens(
        tokenizer, DEMO_QUESTION, chat=True, context_tokens=700, needle=DEMO_NEEDLE
    )
    assert count < 700
    assert tokens == expected[0].tolist()

    monkeypatch.setenv("OFFLOAD_CACHE", str(tmp_path))
    assert tidal_needle.layers_named("2,9", "llama-3.1-8b") == (2, 9)
    with pytest.raises(ValueError, match=r"no swept layers of .*: run `offload calibrate"):
        tidal_needle.layers_named("swept", str(save_long_model(tmp_path / "long")))


def test_tables_of_rules_and_roles() -> None:
    named = {"mass": 0.7, "kind": "all", "prompts": 12}
    rule = {"part": "rules", "policy": "ratio 128", "rule": "ratio", "level": 128, "number": 0.0123}
    roles = {"part": "roles", "policy": "calibrated, 16", "retrieving": 19, "heads": 90}
    text = {"part": "text", "length": 0, "windows": 5, "change": 0.021, "interval": [0.01, 0.03]}
    rows = [
        rule | named | {"tokens": {"4096": 50.4, "8192": 100.8}},
        roles | named,
        *(text | {"policy": name} for name in ("ratio 128", "calibrated, 16")),
        summary("all", "full", 1.0, [0, 0]),
        summary("all", "ratio 128", 0.5, [-0.6, -0.4]),
        summary("all", "exact_topk", 0.9, [-0.2, 0.0]),
    ]
    settings = {"model": "a model", "roles_budget": 256, "lengths": [4096, 8192]}
    result = {"machine": machine(), "settings": settings, "rows": rows}
    cells = "| ratio, 128 | 0.0123 | 50 | 101 | 70.0% | 50.0% (-60% … -40%) | +2.1% (+1% … +3%) |"
    assert cells in tables.rules_table(result)
    table = tables.roles_table(result)
    assert "| calibrated, 16 | 19 of 90 | 70.0% |  | +2.1% (+1% … +3%) |" in table
    assert "| exact_topk |  |  | 90.0% (-20% … +0%) | \N{EN DASH} |" in table
    assert "of the heads that reuse, over 12 prompts. Answers: of 8 other prompts" in table
    assert "In brackets the 95 % interval" in table


def test_few_texts_have_no_interval_and_none_no_column() -> None:
    roles = {"part": "roles", "policy": "calibrated, 16", "retrieving": 19, "heads": 90}
    text = {"part": "text", "length": 0, "windows": 2, "change": 0.021, "interval": [0.01, 0.03]}
    answers = [summary("all", name, 1.0, None) for name in ("full", "calibrated, 16")]
    rows = [roles | {"mass": 0.7, "kind": "all", "prompts": 1}, *answers]
    settings = {"model": "a model", "roles_budget": 256, "lengths": [4096]}
    result = {"machine": machine(), "settings": settings, "rows": rows}
    without = tables.roles_table(result)
    assert "| calibrated, 16 | 19 of 90 | 70.0% | 100.0% |\n" in without
    assert "perplexity" not in without.lower()
    assert "over 1 prompt. " in without
    table = tables.roles_table(result | {"rows": [*rows, text | {"policy": "calibrated, 16"}]})
    assert "| calibrated, 16 | 19 of 90 | 70.0% | 100.0% | +2.1% |\n" in table
    assert "In brackets" not in table
