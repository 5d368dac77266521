"""The tables of perf/results/train-heads.json."""

from __future__ import annotations

from typing import Any

from cases import machine

from perf.tables.training_tables import compared_roles_table, trained_heads_table

MACHINE = machine.MACHINE | {"gpus": ["A GPU"]}


def training(method: str, right: float | None) -> dict[str, Any]:
    held_out = {"kl": 0.04, "agrees": 0.93, "right": right, "num_right": 5 if right else 0}
    held_out |= {"loss": 0.75, "gated_loss": 0.74}
    return {
        "part": "training",
        "model": "smollm2-135m-instruct",
        "method": method,
        "context": 4096,
        "target_heads": 11,
        "open_heads": 11.04,
        "retrieval_heads": 10,
        "held_out": held_out,
        "alone_seconds_per_step": 0.15,
    } | ({} if right is None else {"seconds_per_step": 0.25})


def roles(name: str, **compared: Any) -> dict[str, Any]:
    measured = {"retrieval_heads": 11, "prompts": 20, "kl": 0.04, "agrees": 0.93}
    return {"part": "roles", "model": "m", "roles": name, **measured, **compared}


RESULT = {
    "machine": MACHINE,
    "settings": {
        "steps": 3000,
        "batch_size": 2,
        "held_out_prompts": 32,
        "roles_context": 4096,
        "concurrent": "four",
        "roles_machine": MACHINE | {"cpu": "Another CPU", "gpus": []},
    },
    "rows": [
        training("hardkuma", 0.8),
        training("direct", None),
        roles("learnt", less_kl={"mean": 0.005, "interval": [-0.001, 0.011]}),
        roles("calibrated"),
    ],
}


def test_a_line_of_each_training() -> None:
    table = trained_heads_table(RESULT)
    wanted = "| 11 | 11.0 | 10 | 0.040 | 93.0% | 4 of 5 | 0.75 | 0.74 | 0.25 (0.15) |"
    assert f"| `smollm2-135m-instruct` | `hardkuma` | 4,096 {wanted}" in table
    assert "| 93.0% |  | 0.75 | 0.74 | (0.15) |" in table
    assert "A GPU" in table
    assert "learnt" not in table


def test_learnt_roles_beside_calibrated_ones() -> None:
    table = compared_roles_table(RESULT)
    assert "| learnt | 11 | 20 | 0.040 | +0.005 [-0.001, +0.011] | 93.0% |" in table
    assert "| calibrated | 11 | 20 | 0.040 |  | 93.0% |" in table
    assert "Another CPU" in table
    assert "hardkuma" not in table
