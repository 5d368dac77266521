"""per_head's calibrated heads: found once, and what lies in the cache instead is not believed."""

from __future__ import annotations

import json
import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases.inside import runtime_of

from offload.loading.embedded_package import EMBEDDED_MODEL, LONG_CONTEXT_MODEL
from offload.loading.names import checkpoint_name, load_tokenizer, resolve_folder
from offload.policies import LycheeDecode, PerHead, Policy
from offload.policies.lychee_decode.calibration import calibration_tokens, observe_heads, roles_from
from offload.policies.per_head.calibration import mean_lookup_mass
from offload.policies.registry import make_policy
from offload.selection import kept_roles as kept
from offload.selection.head_roles import HeadRoles
from offload.selection.kept_roles import keep_roles, kept_roles

SHAPE: dict[str, Any] = {"num_layers": 3, "num_kv_heads": 2, "head_dim": 32}
ROLES = HeadRoles.of(
    np.array([[0, 0], [0, 1], [0, 0]], bool),
    head_dim=32,
    model_type="llama",
    made_by="a test",
    checkpoint="0123",
)
# Of default options: retrieval heads, the layers before them, and whether these retrieve.
OF_EMBEDDED = [("per_head", (11, 2), False), ("lychee_decode", (15, 1), True)]


def found(checkpoint: str = "0123", count: int = 1, dense_layers: int = 1) -> HeadRoles | None:
    return kept_roles("per_head", checkpoint, count, dense_layers, **SHAPE, model_type="llama")


def keep(roles: HeadRoles = ROLES) -> None:
    keep_roles("per_head", roles, 1, 1)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OFFLOAD_CACHE", str(tmp_path))
    return tmp_path


def only_file(cache: Path) -> Path:
    (path,) = (path for path in cache.rglob("*") if path.is_file())
    return path


def test_what_is_kept_is_found(cache: Path) -> None:
    assert found() is None
    keep()
    assert found() == ROLES
    for other in ({"checkpoint": "0124"}, {"count": 2}, {"dense_layers": 0}):
        assert found(**other) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text[: len(text) // 2], "is not JSON"),
        (lambda text: text.replace("llama", "qwen2"), "was made for another model"),
        (lambda text: text.replace('"head_dim": 32', '"head_dim": 64'), "made for another model"),
        (lambda text: text.replace("true", "false"), "was changed"),
        (lambda text: text.replace("[false, false]", "[true, true]", 1), "was changed"),
        (lambda text: "\0", "is not JSON"),
    ],
)
def test_what_is_damaged_is_made_again(cache: Path, caplog: Any, damage: Any, message: str) -> None:
    keep()
    path = only_file(cache)
    path.write_text(damage(path.read_text()))
    with caplog.at_level(logging.WARNING, logger="offload"):
        assert found() is None
    assert message in caplog.text
    assert path.name in caplog.text
    keep()
    assert found() == ROLES


def test_many_keep_at_once(cache: Path) -> None:
    """A reader sees nothing or all of it, and nothing else stays behind."""

    def keep_and_find(i: int) -> HeadRoles | None:
        keep(replace(ROLES, made_by=str(i) * 1000))
        return found()

    with ThreadPoolExecutor(8) as threads:
        results = list(threads.map(keep_and_find, range(64)))
    assert all(roles == replace(ROLES, made_by=roles.made_by) for roles in results if roles)
    assert None not in results
    assert only_file(cache).suffix == ".json"
    assert [path.name for path in only_file(cache).parent.iterdir()] == [only_file(cache).name]


def test_a_write_that_fails_leaves_nothing(cache: Path, monkeypatch: Any, caplog: Any) -> None:
    def fill_disk(self: HeadRoles, path: Path) -> None:
        Path(path).write_text("{")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(HeadRoles, "save", fill_disk)
        with caplog.at_level(logging.INFO, logger="offload"):
            keep()
    assert "No space left on device); set OFFLOAD_CACHE to a folder" in caplog.text
    assert not [path for path in cache.rglob("*") if path.is_file()]
    (cache / "file").write_text("")
    monkeypatch.setenv("OFFLOAD_CACHE", str(cache / "file"))
    keep()  # no reason not to load the model
    assert found() is None


@pytest.mark.usefixtures("cache")
def test_a_policy_calibrates_once(offloaded_models: Any, tokenizer: Any, monkeypatch: Any) -> None:
    """The next one of the same checkpoint and options takes what it found."""
    lean = runtime_of(offloaded_models["llama"]).lean
    lean = replace(lean, shape=replace(lean.shape, max_context=4096))
    runs = []

    def mass(*_: Any) -> np.ndarray:
        runs.append(1)
        return np.array([[0.9, 0.8], [0.1, 0.3], [0.4, 0.0]])

    monkeypatch.setattr("offload.policies.per_head.calibration.mean_lookup_mass", mass)

    def heads(checkpoint: str, **options: Any) -> list[list[bool]]:
        policy = make_policy("per_head", dense_layers=1, **options)
        of_model = (lambda: lean, "llama", lambda: tokenizer, lambda: checkpoint)
        made = policy.calibration.learn(*of_model)
        assert isinstance(made, PerHead)
        return made.head_roles.array.tolist()  # type: ignore[union-attr]

    assert heads("0123", retrieval_heads=1) == [[False, False], [False, False], [True, False]]
    assert heads("0123", retrieval_heads=1, rest="lfps") == heads("0123", retrieval_heads=1)
    assert len(runs) == 1
    assert not any(map(any, heads("0123", retrieval_heads=0)))
    assert len(runs) == 1  # for no heads nothing is read
    heads("4567", retrieval_heads=1)
    assert len(runs) == 2


@pytest.mark.usefixtures("cache")
def test_lychee_decode_calibrates_once(
    offloaded_models: Any, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """And says so; a plan, and a policy with lychee_decode inside, take what it found."""
    lean = runtime_of(offloaded_models["llama"]).lean

    def lines(policy: Policy, checkpoint: str = "0123") -> tuple[Policy, int]:
        caplog.clear()
        of_model = (lambda: lean, "llama", lambda: tokenizer, lambda: checkpoint)
        made = policy.calibration.learn(*of_model)
        return made, len(caplog.messages)

    policy = LycheeDecode(retrieval_heads=2)
    with caplog.at_level(logging.INFO, logger="offload"):
        made, _ = lines(policy)
        assert caplog.messages[0] == (
            "lychee_decode: finding the heads of this model that retrieve, on cpu, once (6 layers "
            "to read)"
        )
        assert caplog.messages[1].startswith("found them in ")
        assert made.head_roles.num_retrieval_heads == 2  # type: ignore[attr-defined]
        assert lines(replace(policy, budget_tokens=99, rule="ratio", ratio=0.5))[0] == replace(
            made, budget_tokens=99, rule="ratio", ratio=0.5
        )
        assert lines(policy) == (made, 0)
        assert policy.calibration.with_kept(lambda: "0123", "llama", **lean.shape.kv_heads) == made
        assert lines(LycheeDecode(retrieval_heads=3))[1] > 0
        assert lines(policy, "4567")[1] > 0


@pytest.mark.parametrize(("policy", "wanted", "first_retrieve"), OF_EMBEDDED)
@pytest.mark.parametrize("name", [EMBEDDED_MODEL, LONG_CONTEXT_MODEL])
def test_the_embedded_models_have_theirs(
    name: str, policy: str, wanted: tuple[int, int], first_retrieve: bool, tmp_path: Path
) -> None:
    """They come with the package: no calibration, whatever the cache has."""
    folder = resolve_folder(name)
    assert checkpoint_name(folder).startswith(f"{name}@")
    copied = tmp_path / folder.name
    copied.symlink_to(folder)
    assert "@" not in checkpoint_name(copied)  # whose weights could be others
    config = json.loads((folder / "config.json").read_text())
    num_layers, num_kv_heads = config["num_hidden_layers"], config["num_key_value_heads"]
    shape = {"num_layers": num_layers, "num_kv_heads": num_kv_heads, "head_dim": 64}
    of_model = {**shape, "model_type": "llama", "first_retrieve": first_retrieve}
    roles = kept_roles(policy, f"{name}@", *wanted, **of_model)
    assert roles is not None
    assert Path(roles.source).parent == kept._of_package(policy)
    asked = make_policy(policy)
    made: Any = asked.calibration.with_kept(lambda: f"{name}@", "llama", **shape)
    assert made.head_roles == roles


@pytest.mark.slow
@pytest.mark.parametrize("name", [EMBEDDED_MODEL, LONG_CONTEXT_MODEL])
def test_a_calibration_finds_what_is_shipped(name: str) -> None:
    """But for heads whose mass is about that of the next one: rounding differs between machines."""
    from offload import OffloadedModel

    lean = runtime_of(OffloadedModel.from_pretrained(name, policy="full")).lean
    mass = mean_lookup_mass(lean, load_tokenizer(name), 2048)
    roles = HeadRoles.load(kept._of_package("per_head") / f"{name}-11-after-2.json").array
    least = np.sort(mass[2:], axis=None)[-11]
    assert (roles[mass > least + 0.02]).all()
    assert not roles[mass < least - 0.02].any()
    shipped = HeadRoles.load(kept._of_package("lychee_decode") / f"{name}-15-after-1.json")
    made = roles_from(
        observe_heads(lean, calibration_tokens(load_tokenizer(name), 2048)),
        model_type="llama",
        head_dim=64,
    )
    assert (made.array == shipped.array).sum() >= made.array.size - 2  # one moved


def test_other_weights_have_another_name(tmp_path: Path) -> None:
    """Also where the digest, which reads a part of them, does not notice."""
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(8 << 20))
    (tmp_path / "old.txt").mkdir()
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    before = checkpoint_name(tmp_path)
    assert before == checkpoint_name(tmp_path) != ""
    with weights.open("r+b") as file:
        file.seek(5000)
        file.write(b"1")
    assert checkpoint_name(tmp_path) != before
    assert checkpoint_name(tmp_path / "nowhere") == ""


def test_weights_that_nobody_can_name(cache: Path) -> None:
    keep(replace(ROLES, checkpoint=""))
    assert found("") is None
    assert not list(cache.iterdir())
