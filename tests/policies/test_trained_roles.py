"""lychee_decode's trained heads: those of the package are taken before any are calibrated."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offload.policies import LycheeDecode
from offload.policies.lychee_decode import calibration, trained_roles
from offload.policies.lychee_decode.roles import HeadRoles

SHAPE: dict[str, Any] = {"num_layers": 3, "num_kv_heads": 2, "head_dim": 32}
CHECKPOINT = "tiny@0123-5"
RETRIEVAL = np.array([[1, 1], [0, 0], [0, 1]], bool)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(trained_roles, "trained_folder", lambda: tmp_path)
    return tmp_path


def train(folder: Path, retrieval: np.ndarray = RETRIEVAL, count: int = 1, **others: Any) -> Path:
    path = folder / trained_roles.trained_file_name("tiny", count)
    made: dict[str, Any] = {"model_type": "llama", "head_dim": 32, "checkpoint": CHECKPOINT}
    HeadRoles.of(retrieval, **made | others).save(path)
    return path


def with_kept(policy: LycheeDecode, checkpoint: str = CHECKPOINT) -> Any:
    return policy.with_kept(lambda: checkpoint, "llama", **SHAPE)


def test_they_are_found_by_name_and_number(folder: Path) -> None:
    assert train(folder).name == "tiny-1.json"
    default, one = LycheeDecode(budget_tokens=99), LycheeDecode(retrieval_heads=1)
    for policy in (default, one):  # of 6 heads one at least
        made = with_kept(policy)
        np.testing.assert_array_equal(made.head_roles.array, RETRIEVAL)
        assert made.head_roles.source == str(folder / "tiny-1.json")
        assert (made.budget_tokens, made.retrieval_heads) == (policy.budget_tokens, None)
    for other in ("0123-5", "tiny-32k@0123-5", ""):
        assert with_kept(default, other) is default
    two = LycheeDecode(retrieval_heads=2)
    assert with_kept(two) is two
    given = LycheeDecode(head_roles=HeadRoles.of(~RETRIEVAL | [[1], [0], [0]], head_dim=32))
    assert with_kept(given) is given


def test_a_policy_takes_them_before_it_calibrates(
    folder: Path, offloaded_models: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lean = offloaded_models["llama"]._offload.lean
    runs = []
    observe = calibration.observe_heads
    monkeypatch.setattr(
        calibration, "observe_heads", lambda *args: runs.append(1) or observe(*args)
    )

    def calibrated(policy: Any) -> Any:
        return policy.calibrated(lambda: lean, "llama", lambda: tokenizer, lambda: CHECKPOINT)

    without = calibrated(LycheeDecode())
    assert len(runs) == 1
    assert without.head_roles.checkpoint == CHECKPOINT
    train(folder, retrieval=~without.head_roles.array | [[True], [False], [False]], count=3)
    train(folder)
    assert calibrated(LycheeDecode()).head_roles.source == str(folder / "tiny-1.json")
    assert calibrated(LycheeDecode(retrieval_heads=3)).head_roles.source.endswith("tiny-3.json")
    assert len(runs) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"retrieval": ~RETRIEVAL | [[True], [False], [False]]}, "tiny-1.json was changed"),
        ({"retrieval": RETRIEVAL & [[False], [True], [True]]}, "tiny-1.json was changed"),
        ({"checkpoint": "tiny-32k@0123-5"}, "was made for other weights of this shape"),
        ({"model_type": "qwen2"}, "was made for another model"),
        ({"head_dim": 64}, "was made for another model"),
    ],
)
def test_what_does_not_fit_is_left(
    folder: Path, caplog: Any, change: dict[str, Any], message: str
) -> None:
    train(folder, **change)
    policy = LycheeDecode()
    with caplog.at_level(logging.WARNING, logger="offload"):
        assert with_kept(policy) is policy
    assert message in caplog.text
