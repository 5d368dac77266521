"""Files of TidalDecode's select layers: what they hold, which models take them, where they lie."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from offload.loading.planned_model import planned_model
from offload.policies import ExactTopK, TidalDecode
from offload.policies.registry import make_policy
from offload.policies.tidal_decode import SelectLayers
from offload.policies.tidal_decode.select_layers import kept_path

SHAPE: dict[str, Any] = {"num_layers": 6, "num_kv_heads": 2, "head_dim": 32}
CHECKPOINT = "tiny@0123-5"
LAYERS = SelectLayers(
    "llama", **SHAPE, select_layers=(4, 1), dense_layers=1, made_by="a test", checkpoint=CHECKPOINT
)


@pytest.fixture(autouse=True)
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the user's own are."""
    monkeypatch.setenv("OFFLOAD_CACHE", str(tmp_path / "cache"))
    kept = kept_path(CHECKPOINT, 1)
    assert kept is not None
    return kept


def with_kept(policy: TidalDecode, checkpoint: str = CHECKPOINT) -> Any:
    return policy.calibration.with_kept(lambda: checkpoint, "llama", **SHAPE)


def sparse(layers: Any = None, dense_layers: int = 1) -> TidalDecode:
    return TidalDecode(ExactTopK(dense_layers=dense_layers), layers)


def test_a_file_holds_them(tmp_path: Path) -> None:
    path = tmp_path / "layers.json"
    LAYERS.save(path)
    read = SelectLayers.load(path)
    assert read == LAYERS
    assert read.select_layers == (1, 4)
    assert (read.source, str(read)) == (str(path), "1,4")
    for given in (str(path), path, read):
        policy = make_policy("tidal_decode", select_layers=given, dense_layers=1)
        assert policy.select_layers == LAYERS
        assert policy.roles(6, 2).tolist() == sparse((1, 4)).roles(6, 2).tolist()
        policy.check_model(num_qo_heads=6, **SHAPE)
    assert with_kept(policy) is policy


def test_they_are_of_one_model() -> None:
    policy = sparse(LAYERS)
    with pytest.raises(
        ValueError, match=r"made for another model: it says num_layers=6, .*=2, .* "
    ):
        policy.check_model(num_qo_heads=6, **SHAPE | {"num_kv_heads": 3})
    lean: Any = type("Lean", (), {"shape": planned_model("tiny").shape})

    def calibrated(policy: TidalDecode, checkpoint: str, **shape: Any) -> Any:
        lean.shape = replace(lean.shape, **SHAPE | shape)
        return policy.calibration.learn(lambda: lean, "llama", lambda: None, lambda: checkpoint)

    assert calibrated(policy, "tiny@4567-8") is policy
    with pytest.raises(
        ValueError, match=r"made for other weights of this shape: those of .*tiny@0"
    ):
        calibrated(policy, "other@0123-5")
    with pytest.raises(ValueError, match=r"num_layers=6, .* this model has .*num_layers=8"):
        calibrated(policy, CHECKPOINT, num_layers=8)
    LAYERS.keep(kept_path(CHECKPOINT, 1) or Path())
    assert calibrated(sparse(), CHECKPOINT).select_layers == LAYERS


def test_a_rank_has_the_whole_models() -> None:
    policy = make_policy("tidal_decode", inner="quest", select_layers=LAYERS, dense_layers=1)
    part = policy.of_heads(range(1), **SHAPE)
    assert part.select_layers == (1, 4)
    part.check_model(num_qo_heads=3, **SHAPE | {"num_kv_heads": 1})


def test_a_policy_finds_its_models_own(path: Path) -> None:
    policy = sparse()
    assert with_kept(policy) is policy
    LAYERS.keep(path)
    assert with_kept(policy).select_layers == LAYERS
    assert with_kept(policy).inner == policy.inner
    for other in (sparse((1, 3)), sparse(dense_layers=2)):
        assert with_kept(other) is other
    for checkpoint in ("", "0124-5", "tiny@4567-8"):
        assert with_kept(policy, checkpoint) is policy
    assert [file.name for file in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"checkpoint": "tiny-32k@0123-5"}, "was made for other weights of this shape"),
        ({"model_type": "qwen2"}, "was made for another model"),
        ({"head_dim": 64}, "was made for another model"),
        ({"dense_layers": 0}, "was changed"),
        ({"select_layers": [1, 9]}, "names layer 9, but this model has layers 0 to 5"),
        ({"select_layers": []}, "select_layers is empty"),
        ({"select_layers": [0, 3]}, "layer 0 is not after the first dense_layers=1"),
        ({"select_layers": "1,4"}, "must be layer numbers, got '1,4'"),
        ({"num_layers": "6"}, "num_layers must be an integer of at least 1, got '6'"),
        ({"dense_layers": True}, "dense_layers must be an integer of at least 0, got True"),
        ({"made_by": 3}, "made_by must be strings"),
        ({"heads": 3}, r"has unknown keys \['heads'\]; its keys: format, model_type, num_layers"),
        ({"format": "offload-head-roles-2"}, "another format than 'offload-select-layers-1'"),
    ],
)
def test_what_does_not_fit_is_left(
    path: Path, caplog: Any, change: dict[str, Any], message: str
) -> None:
    LAYERS.keep(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    policy = sparse()
    with caplog.at_level(logging.WARNING, logger="offload"):
        assert with_kept(policy) is policy
    (record,) = caplog.records
    assert str(path) in record.message
    assert re.search(message, record.message)


def test_layers_inside_the_policys_dense_ones_are_refused() -> None:
    with pytest.raises(ValueError, match="layer 1 is not after the first dense_layers=2"):
        sparse(LAYERS, dense_layers=2)
    with pytest.raises(
        FileNotFoundError, match=r"no layers file none\.json; write one with `offload"
    ):
        make_policy("tidal_decode", select_layers="none.json")
