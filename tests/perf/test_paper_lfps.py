"""The replay of LFPS's rule against its simulation, the texts it reads, and its tables."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from cases.lfps_reference import Unit

from perf.papers.lfps import _FIXED, TEXTS, added_rows, text_tokens
from perf.papers.lfps_replay import (
    PROMPT_QUERIES,
    SINKS,
    AsInThePaper,
    ReadText,
    Rule,
    Sparsity,
    Tables,
    first_scores,
    replay,
    without_sinks,
)
from perf.tables.markdown import TIMES
from perf.tables.paper_lfps_tables import (
    paper_lfps_ablation_table,
    paper_lfps_batch_table,
    paper_lfps_bypass_table,
    paper_lfps_overlap_table,
)

LAYERS, KV_HEADS, GROUP, HEAD_DIM, CONTEXT, STEPS = 1, 2, 2, 16, 200, 12
MACHINE = {
    "versions": {"python": "3.11.7", "torch": "2.13.0+cpu", "transformers": "5.23.0"},
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


def make_text(sink_strength: float = 2.0) -> ReadText:
    """Queries drift around a topic that some keys have, and look for keys of their own phase."""
    random = torch.Generator().manual_seed(0)
    tokens = CONTEXT + STEPS

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random)

    keys = normal(LAYERS, KV_HEADS, tokens, HEAD_DIM)
    queries = 0.5 * normal(LAYERS, KV_HEADS, GROUP, tokens, HEAD_DIM)
    topic = normal(LAYERS, KV_HEADS, 1, HEAD_DIM)
    keys += topic * (torch.rand(tokens, 1, generator=random) < 0.1)
    queries += topic[:, :, None] * normal(LAYERS, KV_HEADS, GROUP, 1, 1).abs()
    phase = 2 * np.pi * torch.arange(tokens) / 29
    wave = 2 * torch.stack([phase.cos(), phase.sin()], -1)
    keys[..., :2] += wave
    queries[..., :2] += wave
    keys[:, :, :SINKS] += sink_strength * topic
    last = queries[:, :, :, -(PROMPT_QUERIES + STEPS) :]
    return ReadText(keys, last, STEPS, HEAD_DIM**-0.5)


@pytest.mark.parametrize("per_query_head", [True, False])
def test_candidates_and_sparsity_are_the_simulation_s(per_query_head: bool) -> None:
    text, rule = make_text(), Rule("LFPS", per_query_head=per_query_head)
    policy = AsInThePaper(budget_tokens=40, sink_tokens=SINKS, recent_tokens=1, dense_layers=0)
    queries, keys = text.queries.double().numpy()[0], text.keys.double().numpy()[0]
    units = [
        Unit(policy, of_unit[:, :PROMPT_QUERIES], keys[head, :CONTEXT], keys[head, :CONTEXT])
        for head in range(KV_HEADS)
        for of_unit in (queries[head][:, None] if per_query_head else queries[head][None])
    ]
    tables, sparsity = Tables(rule, first_scores(text)), Sparsity(text)
    differing = proposed = 0
    for kv_len in range(CONTEXT + 1, CONTEXT + STEPS + 1):
        found = tables.candidates(kv_len)
        weights = without_sinks(text.weights(kv_len)).flatten(0, 1)  # [KV heads, group, n]
        of_units = weights.flatten(0, 1)[:, None] if per_query_head else weights
        importance = of_units.mean(1).masked_fill(~found, -1.0)
        chosen, tokens = importance.topk(8, 1)
        votes = torch.ones(len(units), dtype=torch.bool)
        of_chosen = of_units.gather(2, tokens[:, None].expand(-1, of_units.shape[1], -1))
        of_chosen = of_chosen * (chosen >= 0)[:, None]
        of_chosen = (of_chosen / of_chosen.sum(-1, keepdim=True)).mean(1)
        tables.observe(tokens, of_chosen, votes, kv_len)
        shares = sparsity.shares(kv_len).flatten()
        for i, unit in enumerate(units):
            expected = unit.candidates(kv_len)
            # The simulation leaves the newest token to the recent window.
            own = SINKS + torch.nonzero(found[i, :-1])[:, 0].numpy()
            differing += len(np.setxor1d(own, expected))
            proposed += len(expected)
            head, group = (i // GROUP, [i % GROUP]) if per_query_head else (i, [0, 1])
            query = queries[head, group, PROMPT_QUERIES + kv_len - 1 - CONTEXT]
            seen = keys[head, :kv_len]
            unit.policy = AsInThePaper(bypass_threshold=0.5)
            bypassed, _, _ = unit.bypassed(query, seen, seen)
            first = i if per_query_head else i * GROUP
            of_heads = shares[first : first + len(group)].numpy()
            np.testing.assert_array_equal(bypassed, of_heads > 0.5)
            unit.policy = policy
            attended = SINKS + tokens[i][chosen[i] >= 0].numpy()
            unit.observe(query, seen, np.sort(attended), np.ones(len(group), bool))
    assert proposed > 20 * len(units)
    assert differing <= 2  # a score may round to the other side of a threshold


def test_parts_of_the_rule_are_left_out() -> None:
    rules = [
        Rule("LFPS"),
        Rule("none", offsets=()),
        Rule("vertical", slash=False),
        Rule("slash", vertical=False),
        Rule("all", alpha=1e-9, offsets=tuple(range(-40, 41))[:40], above_mean=False),
    ]
    rows, of_text = replay(make_text(), rules)
    found = {rule.name: row for rule, row in zip(rules, rows, strict=True)}
    for name in ("none", "vertical", "slash"):
        assert 0 < found[name]["candidates"] < found["LFPS"]["candidates"]
        assert found[name]["overlap"] < found["LFPS"]["overlap"]
    assert found["all"]["overlap"] > 0.99
    assert found["all"]["mass"] > 0.99
    parts = [found["LFPS"][f"overlap_{i}"] for i in range(1, 5)]
    assert found["LFPS"]["overlap"] == pytest.approx(np.mean(parts), abs=0.02)
    assert 0 < of_text["bypassed_0.95"] <= of_text["bypassed_0.7"] < 1
    assert 0 < of_text["quest"] < 1


class Words:
    """A tokenizer: a token of each word."""

    def __call__(self, text: str, verbose: bool = True) -> dict[str, list[str]]:
        return {"input_ids": text.split()}


@pytest.mark.parametrize("kind", TEXTS)
def test_texts_have_the_length_and_differ_by_seed(kind: str) -> None:
    texts = [text_tokens(kind, seed, 3000, Words()) for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]
    for text in texts:
        assert 2000 < len(text) <= 3000
    if kind != "RULER prompts":
        assert len(texts[0]) == 3000


def overlap_row(rule: str | None, text: str, **means: float) -> dict:
    names = ("overlap", "candidates", "mass", "overlap_far", "quest", "quest_mass", "clustered")
    limits = (0.95, 0.9, 0.85, 0.8, 0.75, 0.7)
    known = dict.fromkeys([*names, *(f"bypassed_{limit}" for limit in limits)], 0.5)
    where = {"part": "overlap", "rule": rule, "text": text, "seed": 0, "length": 8192}
    return known | where | means


def bypass_row(policy: str, limit: float | None, kl: float) -> dict:
    options = {} if limit is None else {"bypass_threshold": limit}
    means = {"mass_of_topk": None, "output_error": 0.1, "kl": kl, "perplexity_change": 0.01}
    return {"part": "bypass", "policy": policy, "options": options} | means


def ruler_row(index: int, full: float, lfps: float) -> dict:
    seconds = {"decode_seconds": 1.0, "build_seconds": 0.0, "new_tokens": 2}
    answers = {
        name: {"score": score, "attended_tokens": None} | seconds
        for name, score in (("full", full), ("lfps 0.85", lfps))
    }
    return {"part": "ruler", "task": "vt", "length": 8192, "index": index, "answers": answers}


def batch_row(policy: str, size: int, microseconds: float) -> dict:
    times = {"microseconds": microseconds, "all_layers_microseconds": microseconds}
    return {"part": "batch", "policy": policy, "batch_size": size, "num_threads": 8} | times


RESULT = {
    "machine": MACHINE,
    "settings": {
        "model": "a model",
        "steps": 8,
        "bypass_length": 8192,
        "bypass_budget": 320,
        "batch_shape": "llama-3.1-8b",
        "batch_depth": 16384,
        "batch_budget": 1024,
    },
    "rows": [
        overlap_row("LFPS", "prose", overlap=0.8, candidates=0.046),
        overlap_row("LFPS", "code", overlap=0.6, candidates=0.056),
        overlap_row("no expansion", "prose", overlap=0.7),
        overlap_row("no expansion", "code", overlap=0.6),
        overlap_row(None, "prose", **{"bypassed_0.85": 0.1}),
        overlap_row(None, "code", **{"bypassed_0.85": 0.2}),
        bypass_row("full", None, 0.0),
        bypass_row("lfps", 0.85, 0.02),
        bypass_row("lfps", 0.85, 0.04),
        bypass_row("lfps", 1.0, 0.01),
        ruler_row(0, 1.0, 0.5),
        ruler_row(1, 1.0, 1.0),
        {"part": "speed", "policy": "lfps 0.85", "microseconds": 30.0},
        batch_row("lfps", 1, 1000.0),
        batch_row("lfps", 8, 500.0),
        batch_row("quest", 1, 1000.0),
        batch_row("quest", 8, 1000.0),
    ],
}


def lines_of(text: str) -> dict[str, list[str]]:
    cells = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    return {line[0]: line[1:] for line in cells}


def test_claims_beside_ours() -> None:
    lines = lines_of(paper_lfps_overlap_table(RESULT))
    assert lines["overlap, no expansion"] == ["85%", "65%"]
    assert lines["what expansion adds, points"] == ["+3", "+5.0"]
    assert lines["keys scored (Table 4)"] == ["4.6%", "5.1%"]
    assert lines["heads bypassed (Table 3)"] == ["12%", "15%"]


def test_ablation() -> None:
    lines = lines_of(paper_lfps_ablation_table(RESULT))
    assert lines["LFPS"] == ["70 (60 to 80)", "5.1%", "50%", "50.0%"]
    assert lines["Quest's pages of 16"][0] == "50 (50 to 50)"


def test_bypass() -> None:
    lines = [
        line.strip("|").split("|")
        for line in paper_lfps_bypass_table(RESULT).splitlines()
        if line.startswith("| lfps 0.85")
    ]
    ((_, paper, ours, qasper, ruler, interval, kl, *_, microseconds),) = lines
    assert [x.strip() for x in (paper, ours, qasper, ruler)] == ["12.0%", "15.0%", "38.95", "75.0"]
    assert [x.strip() for x in (kl, microseconds)] == ["0.0300", "30.0"]
    low, high = (float(x) for x in interval.split("…"))
    assert low < -25 < high


def test_batches() -> None:
    lines = lines_of(paper_lfps_batch_table(RESULT))
    assert lines["`lfps`"] == ["31", "62", f"1.0{TIMES}", f"1.0{TIMES}", "45"]
    assert lines["`quest`"] == ["31", "31", f"1.0{TIMES}", f"2.0{TIMES}", "30"]


def test_a_part_that_is_missing() -> None:
    rows = [row for row in RESULT["rows"] if row["part"] not in ("batch", "speed")]
    of_others = RESULT | {"rows": rows}
    command = "python -m perf.papers.lfps --name paper-lfps-speed --parts {}`, with"
    assert command.format("batch") in paper_lfps_batch_table(of_others)
    assert command.format("speed") in paper_lfps_bypass_table(of_others)
    assert paper_lfps_overlap_table(of_others) == paper_lfps_overlap_table(RESULT)
    answers = RESULT | {"rows": [row for row in rows if row["part"] != "bypass"]}
    assert command.format("bypass speed") in paper_lfps_bypass_table(answers)
    assert lines_of(paper_lfps_bypass_table(answers))["lfps 0.85"][:4] == [
        "12.0%",
        "15.0%",
        "38.95",
        "75.0",
    ]


def test_rows_of_another_machine_or_with_other_options_are_not_added(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    settings = _FIXED | {"bypass_length": 8192, "batch_depth": 16384, "repeats": 11}
    settings |= {"steps": 128, "seeds": 2}
    file.write_text(json.dumps(RESULT | {"settings": settings}))
    assert added_rows([file, file], MACHINE, settings) == RESULT["rows"] * 2
    with pytest.raises(ValueError, match=r"a\.json: it is of gpus \[\], this machine has \['H100'"):
        added_rows([file], MACHINE | {"gpus": ["H100"]}, settings)
    for name, part in {"steps": "overlap", "seeds": "overlap", "batch_depth": "batch"}.items():
        message = (
            rf"a\.json: its part '{part}' was made with --{name.replace('_', '-')} "
            f"{settings[name]}, but this run has 1; give the same"
        )
        with pytest.raises(ValueError, match=message):
            added_rows([file], MACHINE, settings | {name: 1})
    of_batch = [row for row in RESULT["rows"] if row["part"] == "batch"]
    file.write_text(json.dumps(RESULT | {"settings": settings, "rows": of_batch}))
    assert added_rows([file], MACHINE, settings | {"steps": 1}) == of_batch
