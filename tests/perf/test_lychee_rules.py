"""LycheeDecode's rules at equal tokens: what is counted and judged, against the policy itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases.attention_cases import Cache, random_queries
from cases.reuse_cases import GROUP_SIZE, importance_of, step_through
from cases.seeded import new_rng
from cases.tiny_models import byte_tokenizer, random_tokens

from cpu_ops.worker_pool import WorkerPool
from offload import OffloadedModel
from offload.bench.eval.perplexity import Window
from offload.bench.eval.sample import Sample
from offload.policies import LycheeDecode
from offload.policies.lychee_decode.roles import HeadRoles
from offload.policies.registry import make_policy
from offload.runtime.config import runtime_config
from offload.runtime.shared_model import SharedModel
from perf.papers.layer_attention import LayerAttention
from perf.papers.lychee_decode import WINDOWS, Published, Recorded, number_for
from perf.papers.lychee_rules import Rule, judge_item, rows_of, rules_of
from perf.tables.shared_selection_tables import equal_rules_table

ROLES = np.array([[1, 1], [0, 1], [0, 0]], bool)
LENGTH, STEPS = 260, 12
RULES = (
    Rule("top_k", 64, None, 64.0),
    Rule("top_p", 64, 0.4, 64.0),
    Rule("ratio", 64, 0.3, 64.0),
)


@pytest.mark.parametrize(("rule", "number"), [("top_p", 0.4), ("threshold", 4e-3), ("ratio", 0.2)])
def test_tokens_count_as_often_as_heads_reuse_them(rule: str, number: float) -> None:
    """Head 0 of layer 0 hands down to two heads, head 1 of layer 1 to one, of layer 0 to none."""
    rng, kv_len = new_rng(), 400
    cache = Cache.random(rng, kv_len=kv_len, dtype=torch.float32, page_tokens=16, num_layers=3)
    queries = [random_queries(rng, 1, 2 * GROUP_SIZE, 64, torch.float32) for _ in range(3)]
    policy = LycheeDecode(
        budget_tokens=150,
        head_roles=HeadRoles.of(ROLES, head_dim=64),
        rule=rule,
        **{rule: number},
        **WINDOWS,
    )
    pool = WorkerPool(1)
    try:
        attended = step_through(cache, cache.attention(pool, GROUP_SIZE, policy), queries, [kv_len])
    finally:
        pool.close()
    weights = np.stack(
        [importance_of(cache, queries[i][0], i, kv_len) / GROUP_SIZE for i in range(3)]
    )
    own = LayerAttention(
        torch.from_numpy(weights).float()[:, :, None], np.empty(0), torch.empty(0), None
    )
    published = Published(Recorded("prose", kv_len, own), ROLES, 150)
    of_heads = [len(attended[i][0][head]) for i, head in np.argwhere(~ROLES)]
    assert published.attended(rule, number) == pytest.approx(np.mean(of_heads))
    assert 20 < np.mean(of_heads) < 150


def test_numbers_make_tokens_equal_that_heads_attend_to() -> None:
    rng, published = new_rng(), []
    for kv_len in (300, 600):
        scores = torch.from_numpy(rng.normal(size=(3, 2, 4, kv_len)).astype(np.float32))
        scores *= torch.tensor([1.0, 4.0])[:, None, None]  # lists of very different lengths
        future = torch.arange(kv_len) > (kv_len - 4 + torch.arange(4))[:, None]
        weights = scores.masked_fill(future, -torch.inf).softmax(-1)
        own = LayerAttention(weights, np.empty(0), torch.empty(0), None)
        published.append(Published(Recorded("prose", kv_len, own), ROLES, 250))
    for rule in rules_of([60, 90], published):
        assert rule.found_tokens == pytest.approx(rule.budget, abs=1.0), rule
    by_heads = number_for("top_p", 90, published)
    (top_p,) = [x for x in rules_of([90], published) if x.name == "top_p"]
    assert top_p.number != pytest.approx(by_heads, rel=0.01)


@pytest.fixture(scope="module")
def roles() -> HeadRoles:
    return HeadRoles.of(ROLES, head_dim=32)


@pytest.fixture(scope="module")
def model(tiny_folders: dict[str, Path], roles: HeadRoles) -> SharedModel:
    policies = [rule.policy(roles, 128) for rule in RULES]
    full = make_policy("full")
    return SharedModel(tiny_folders["llama"], [full, *policies], runtime_config(num_threads=1))


LABELS = ("full", *(rule.label for rule in RULES))


def test_windows_are_judged_by_the_logits_of_their_last_tokens(
    model: SharedModel, roles: HeadRoles, tiny_folders: dict[str, Path]
) -> None:
    tokens = random_tokens(1, LENGTH + STEPS)[0].tolist()
    row = judge_item(
        model, LABELS, None, Window(LENGTH, 0, tokens, "prose"), float(1 - ROLES.mean())
    )

    def logits_of(policy: Any) -> torch.Tensor:
        alone = OffloadedModel.from_pretrained(tiny_folders["llama"], policy=policy, num_threads=1)
        out = alone(torch.tensor([tokens[:LENGTH]]), use_cache=True)
        found = []
        for token in tokens[LENGTH:]:
            out = alone(
                torch.tensor([[token]]), past_key_values=out.past_key_values, use_cache=True
            )
            found.append(out.logits[0, -1].double().log_softmax(-1))
        return torch.stack(found)

    exact = logits_of("full")
    assert row["steps"] == STEPS
    assert row["kl"]["full"] == 0
    for rule in RULES:
        other = logits_of(rule.policy(roles, 128))
        expected = (exact.exp() * (exact - other)).sum(-1).mean()
        assert row["kl"][rule.label] == pytest.approx(float(expected), rel=1e-3)
    assert row["tokens"]["full"] is None
    assert row["tokens"]["top_k 64"] == pytest.approx(64)
    assert 20 <= row["tokens"]["top_p 64"] <= 128
    of_steps = [np.ceil(0.3 * (LENGTH + 1 + i)) for i in range(STEPS)]
    assert row["tokens"]["ratio 64"] == pytest.approx(np.mean(of_steps))


def test_questions_are_judged_by_what_full_attention_answers(model: SharedModel) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    text = "Some words that mean nothing, again. " * 6
    sample = Sample("needle", 256, 3, text, "It is", ("x",), 6)
    row = judge_item(model, LABELS, tokenizer, sample, float(1 - ROLES.mean()))
    assert (row["task"], row["length"], row["index"]) == ("needle", 256, 3)
    assert set(row["answers"]) == set(LABELS)
    assert 0 < row["steps"] <= 32
    assert row["kl"]["top_k 64"] > 0 == row["kl"]["full"]


def judged(task: str, length: int, index: int, kl: float, extra: float, **more: Any) -> Any:
    names = {"task": task, "length": length, "index": index, "steps": 31}
    tokens: dict[str, Any] = {"full": None, "top_k 64": 64.0, "top_p 64": 60.0 + index}
    kl_of = {"full": 0.0, "top_k 64": kl, "top_p 64": kl + extra}
    return names | {"kl": kl_of, "tokens": tokens} | more


def answers(*scores: float) -> Any:
    names = ("full", "top_k 64", "top_p 64")
    common = {"attended_tokens": None, "scored_tokens": None, "new_tokens": 5}
    common |= {"decode_seconds": 0.1, "build_seconds": 0.0}
    return {name: {"score": score} | common for name, score in zip(names, scores, strict=True)}


def test_rows_and_the_table_say_the_difference_to_top_k() -> None:
    found = [
        judged("needle", 400, 0, 0.1, 0.02, answers=answers(1, 1, 0)),
        judged("needle", 400, 2, 0.3, 0.04, answers=answers(1, 1, 1)),
        judged("prose", 800, 4, 0.2, 0.03),
    ]
    rows = rows_of(found, RULES[:2])
    top_k, top_p = (row for row in rows if row["kind"] == "all")
    assert top_k["kl"] == pytest.approx(0.2)
    assert top_k["kl_interval"] is None
    assert top_p["kl_change"] == pytest.approx(0.03)
    assert top_p["kl_interval"][0] < 0.03 < top_p["kl_interval"][1]
    assert (top_p["asked"], top_p["score"], top_p["full_score"]) == (2, 0.5, 1.0)
    assert top_p["tokens"] == 62
    assert top_p["tokens_by_length"] == {"400": 61.0, "800": 64.0}
    (of_prose,) = [x for x in rows if x["kind"] == "prose" and x["rule"] == "top_p"]
    assert of_prose["kl"] == pytest.approx(0.23)
    machine = {
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
    settings = {"model": "a model", "lengths": [400, 800], "searched_on": 7, "most_tokens": 128}
    table = equal_rules_table({"machine": machine, "settings": settings, "rows": rows})
    assert "searched on 7 prompts" in table
    assert "| top_k, 64 |  | 64 | 64 | 64 | 0.2000 |  | 0.2000 | 0.2000 | 100.0%" in table
    assert "| top_p, 64 | 0.4 | 62 | 61 | 64 | 0.2300 | +0.0300 (+0.0" in table
