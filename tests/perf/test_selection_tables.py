"""Tables of the selection and needle benchmarks."""

from __future__ import annotations

from typing import Any

from cases.machine import MACHINE

from perf.tables.selection_tables import policy_speed_table, selection_table


def row(policy: str, budget: int | None, **measured: Any) -> dict[str, Any]:
    unknown = dict.fromkeys(
        ("attended_tokens", "candidate_share", "overlap", "mass_kept", "mass_of_topk")
    )
    unknown |= dict.fromkeys(("output_error", "jaccard", "window_hit"))
    known = {"kl": 0.01, "perplexity": 17.0, "perplexity_change": 0.0, "tokens_per_second": 50.0}
    names = {"part": "quality", "policy": policy, "label": policy, "budget_tokens": budget}
    return unknown | known | names | measured


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


def test_selection_table() -> None:
    lines = selection_table(SELECTION).splitlines()
    table = {tuple(line.split(" | ")[:2]): line for line in lines if line.startswith("| ")}
    assert table["| lfps", "123"].endswith(" | 50.0 |")
    assert len({line.count("|") for line in table.values()}) == 1


def test_the_machine_is_named() -> None:
    assert "A CPU, 2 of 4 CPUs, 24 GiB, ISA avx2" in selection_table(SELECTION)


def test_policy_speed_is_held_against_exact_topk() -> None:
    def line(engine: str, speed: float) -> dict[str, object]:
        return {"engine": engine, "context": 7168, "decode_tokens_per_second": speed}

    engines = {"offload exact_topk": 40.0, "offload lfps": 50.0, "offload quest": 30.0}
    rows = [line(name, speed) for name, speed in {**engines, "transformers": 5.0}.items()]
    result = {"machine": SELECTION["machine"], "settings": {"model": "m"}, "rows": rows}
    text = policy_speed_table(result)
    assert "| `lfps` | 50.0 | 125% |" in text
    assert "| `exact_topk` | 40.0 | 100% |" in text
    assert "| `quest` | 30.0 | 75% |" in text
    assert "transformers" not in text.splitlines()[4]
