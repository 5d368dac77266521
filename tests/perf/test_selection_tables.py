"""Tables of the selection and needle benchmarks."""

from __future__ import annotations

from typing import Any

import pytest

from offload.policies.registry import available_policies
from perf.bench_selection import BUDGETS, policies_of_quality
from perf.tables.selection_tables import (
    lfps_ablation_table,
    lfps_candidates_table,
    policy_speed_table,
    selection_table,
)

MACHINE: dict[str, Any] = {
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


def row(policy: str, budget: int | None, **measured: Any) -> dict[str, Any]:
    unknown = dict.fromkeys(
        ("attended_tokens", "candidate_share", "overlap", "mass_kept", "mass_of_topk")
    )
    unknown |= dict.fromkeys(("output_error", "jaccard", "window_hit"))
    known = {"kl": 0.01, "perplexity": 17.0, "perplexity_change": 0.0, "tokens_per_second": 50.0}
    names = {"part": "quality", "policy": policy, "label": policy, "budget_tokens": budget}
    return unknown | known | names | measured


def lfps_row(alpha: float, length: int, share: float) -> dict[str, Any]:
    return {"alpha": alpha, "length": length, "candidate_share": share, "sink_tokens": 4}


CANDIDATES = {
    "machine": MACHINE,
    "settings": {"model": "m", "text": "docstrings", "steps": 64},
    "rows": [lfps_row(0.1, 4096, 0.080), lfps_row(0.4, 8192, 0.060), lfps_row(0.2, 32640, 0.03)],
}


SELECTION = {
    "machine": MACHINE,
    "settings": {
        "model": "smollm2-135m-instruct",
        "text": "docstrings",
        "context": 6144,
        "steps": 1000,
        "sample_every": 20,
    },
    "rows": [
        row("full", None, mass_kept=1.0),
        row("quest", 1024, mass_kept=0.93),
        row("tidal_decode", 1024, mass_kept=0.94),
        row("lychee_cluster", 1024, mass_kept=0.92, perplexity_change=0.011),
        row("lfps", 1024, mass_kept=0.96, perplexity_change=0.009),
        row("lfps", 123, mass_kept=0.8, mass_of_topk=0.985, perplexity_change=0.05),
        row("quest", 123, mass_kept=0.6),
    ],
}


def test_selection_targets() -> None:
    lines = selection_table(SELECTION).splitlines()
    table = {tuple(line.split(" | ")[:2]): line for line in lines if line.startswith("| ")}
    assert table["| tidal_decode", "1,024"].endswith("| mass above Quest's met |")
    assert table["| lychee_cluster", "1,024"].endswith(
        "| mass above Quest's **missed**, perplexity ≤ +1% **missed** |"
    )
    assert table["| lfps", "1,024"].endswith("| perplexity ≤ +1% met |")
    assert table["| lfps", "123"].endswith("| ≥ 0.98 of top-k met |")
    assert table["| quest", "123"].endswith("|  |")
    assert len({line.count("|") for line in table.values()}) == 1


def test_candidates_beside_the_paper() -> None:
    table = lfps_candidates_table(CANDIDATES)
    assert "| 0.1 | 4,096 | 7.9% | 8.0% | 0.99 of the paper's" in table
    assert "| 0.4 | 8,192 | 6.0% | 3.6% | 1.65 of the paper's" in table
    assert "| 0.2 | 32,640 | 3.0% | 3.4% | 0.88 of the paper's" in table
    assert table.count("**missed**") == 1


def test_the_ablation_weighs_lengths_by_their_prompts() -> None:
    options = {"budget_tokens": 320, "alpha": 0.8, "spread": 8, "bypass_threshold": 1.0}
    shared = {"part": "cells", "task": "vt"}
    rows = [
        {"part": "quality", "label": "lfps 320", "length": n, "seed": 3, "scored_tokens": n / 8}
        for n in (4096, 8192)
    ]
    rows += [
        shared | {"length": 4096, "samples": 3, "scores": {"lfps 320": 1.0}},
        shared | {"length": 8192, "samples": 1, "scores": {"lfps 320": 0.0}},
        shared | {"length": 8192, "samples": 4, "scores": {"lfps 320": 0.0}, "task": "cwe"},
    ]
    settings = {"model": "m", "policies": {"lfps 320": options}}
    table = lfps_ablation_table({"machine": MACHINE, "settings": settings, "rows": rows})
    assert "| lfps | 8 | 0.8 | 1.0 | 38 | 75 | 0 | 512 | 1,024 |" in table
    assert "4 prompts of vt, 4 prompts of cwe, at 4,096 and 8,192 tokens, seed 3" in table


@pytest.mark.parametrize(
    ("table", "result"), [(selection_table, SELECTION), (lfps_candidates_table, CANDIDATES)]
)
def test_the_machine_is_named(table: Any, result: dict[str, Any]) -> None:
    assert "A CPU, 2 of 4 CPUs, 24 GiB, ISA avx2" in table(result)


def test_every_policy_has_both_budgets() -> None:
    policies = policies_of_quality(available_policies())
    for name in available_policies():
        budgets = [policy.budget_tokens for policy in policies if policy.name == name]
        assert budgets == ([] if name == "full" else list(BUDGETS))


def test_policy_speed_is_held_against_exact_topk() -> None:
    def line(engine: str, speed: float) -> dict[str, object]:
        return {"engine": engine, "context": 7168, "decode_tokens_per_second": speed}

    engines = {"offload exact_topk": 40.0, "offload lfps": 50.0, "offload quest": 30.0}
    rows = [line(name, speed) for name, speed in {**engines, "transformers": 5.0}.items()]
    result = {"machine": SELECTION["machine"], "settings": {"model": "m"}, "rows": rows}
    text = policy_speed_table(result)
    assert "| `lfps` | 50.0 | 125% met |" in text
    assert "| `exact_topk` | 40.0 | 100% |" in text
    assert "| `quest` | 30.0 | 75% **missed** |" in text
    assert "transformers" not in text.splitlines()[4]
