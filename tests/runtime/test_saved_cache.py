"""`OffloadedCache.save` and `load`: the same tokens after, and any damage is a miss."""

from __future__ import annotations

import os
import random
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.inside import allow_host_bytes
from cases.slowly import slow_but
from cases.tiny_models import make_tiny_model, random_tokens
from safetensors import safe_open

from offload import Engine, OffloadedCache, OffloadedModel, SessionMiss
from offload.policies.registry import make_policy
from offload.runtime.saving import read_in_parts
from offload.system.checked_file import finish

FEW = {"budget_tokens": 32, "sink_tokens": 4, "recent_tokens": 8}
POLICIES = ("full", "lychee_cluster", "lfps", "quest", "tidal_decode", "hard_kv", "sketch")


def load(folder: Path, name: str = "full", **options: Any) -> Any:
    policy = make_policy(name)
    few = {key: few for key, few in FEW.items() if key in policy.option_names()}
    options = {"dtype": "float32"} | options
    return OffloadedModel.from_pretrained(folder, policy=make_policy(name, **few), **options)


def go_on(model: Any, text: torch.Tensor, cache: OffloadedCache, num_new: int) -> torch.Tensor:
    return model.generate(
        text,
        attention_mask=torch.ones_like(text),
        past_key_values=cache,
        max_new_tokens=num_new,
        do_sample=False,
        eos_token_id=None,
    )


@pytest.mark.parametrize("num_decoded", slow_but([0, 9], 9))
@pytest.mark.parametrize("name", POLICIES)
def test_the_tokens_after_are_the_same(
    tiny_folders: dict[str, Path], tmp_path: Path, name: str, num_decoded: int
) -> None:
    model, path = load(tiny_folders["llama"], name), tmp_path / "cache"
    cache, text = model.new_cache(), random_tokens(1, 150)
    if num_decoded:
        text = go_on(model, text, cache, num_decoded)
    else:
        model(text[:, :-1], past_key_values=cache)
    cache.save(path)
    other = load(tiny_folders["llama"], name)
    loaded = OffloadedCache.load(other, path)
    loaded.save(tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == path.read_bytes()
    wanted = go_on(model, text, cache, 20)
    assert go_on(other, text, loaded, 20).tolist() == wanted.tolist()
    more = torch.cat([wanted, random_tokens(1, 12, seed=1)], dim=1)
    wanted = go_on(model, more, cache, 12)
    assert go_on(other, more, loaded, 12).tolist() == wanted.tolist()


def test_rows_with_padding(tiny_folders: dict[str, Path], tmp_path: Path) -> None:
    model, text = load(tiny_folders["llama"]), random_tokens(2, 40)
    mask, cache = torch.ones_like(text), model.new_cache()
    mask[0, :7] = 0
    model(text, attention_mask=mask, past_key_values=cache)
    cache.save(tmp_path / "cache")
    loaded = OffloadedCache.load(model, tmp_path / "cache")
    assert loaded.kv_lens == [33, 40]
    assert loaded.attended.tolist() == cache.attended.tolist()
    mask = torch.cat([mask, torch.ones(2, 1, dtype=mask.dtype)], dim=1)
    logits = [
        model(text[:, :1], attention_mask=mask, past_key_values=x).logits for x in (cache, loaded)
    ]
    assert torch.equal(*logits)


@pytest.fixture(scope="module")
def saved(
    tiny_folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, Path]:
    model, path = load(tiny_folders["llama"], "quest"), tmp_path_factory.mktemp("saved") / "cache"
    cache = model.new_cache()
    go_on(model, random_tokens(1, 40), cache, 2)
    cache.save(path)
    return model, path


def test_safetensors_reads_it(saved: tuple[Any, Path]) -> None:
    with safe_open(saved[1], "pt") as file:
        assert file.metadata()["format"] == "offload-session-2"
        assert file.get_tensor("0.kv.0").shape == (2, 2, 41, 32)


def assert_miss(model: Any, path: Path, reason: str | None = None) -> None:
    used, held = model.kv_store.host_bytes_used, model._offload.attention.states.held_bytes
    with pytest.raises(SessionMiss, match=reason):
        OffloadedCache.load(model, path)
    assert model.kv_store.num_sequences == 0
    assert model.kv_store.host_bytes_used == used
    assert model._offload.attention.states.held_bytes == held


@pytest.mark.parametrize("share", [10, pytest.param(1, marks=pytest.mark.slow)])
def test_every_flipped_bit_and_truncation_is_a_miss(
    saved: tuple[Any, Path], tmp_path: Path, share: int
) -> None:
    model, path = saved
    good, chance, damaged = path.read_bytes(), random.Random(0), tmp_path / "damaged"
    size, head = len(good), 8 + int.from_bytes(good[:8], "little")
    damaged.write_bytes(good)
    places = [chance.randrange(8 * size) for _ in range(1200 // share)]
    places += [chance.randrange(8 * head) for _ in range(500 // share)] + list(range(64))
    places += [8 * size - 1 - chance.randrange(8 * 600) for _ in range(300 // share)]
    with damaged.open("r+b", buffering=0) as file:
        for place in places:
            at, bit = divmod(place, 8)
            os.pwrite(file.fileno(), bytes([good[at] ^ (1 << bit)]), at)
            assert_miss(model, damaged)
            os.pwrite(file.fileno(), good[at : at + 1], at)
    for end in [*range(20), *(chance.randrange(size) for _ in range(200 // share)), size - 1]:
        damaged.write_bytes(good[:end])
        assert_miss(model, damaged)
    for more in (b"\0", good):
        damaged.write_bytes(good + more)
        assert_miss(model, damaged)
    damaged.write_bytes(good)
    assert OffloadedCache.load(model, damaged).kv_lens == [41]


def test_what_does_not_fit_is_a_miss_with_a_reason(
    saved: tuple[Any, Path], tiny_folders: dict[str, Path], tmp_path: Path
) -> None:
    model, path = saved
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "absurd").write_bytes((2**62).to_bytes(8, "little") + b"{}" * 100)
    assert_miss(model, tmp_path / "absurd", "truncated, or not a session")
    assert_miss(model, tmp_path / "pipe", "not a file")
    assert_miss(model, tmp_path, "not a file")
    assert_miss(model, tmp_path / "nothing", "there is no .*nothing")
    assert_miss(load(tiny_folders["llama"], "full"), path, "another policy: quest, not full")
    assert_miss(load(tiny_folders["llama"], "quest", dtype="bfloat16"), path, "other weights")
    assert_miss(load(tiny_folders["qwen3"], "quest"), path, "saved with other weights")
    other = OffloadedModel.from_pretrained(
        tiny_folders["llama"], policy=make_policy("quest", **FEW | {"budget_tokens": 31}),
        dtype="float32",
    )  # fmt: skip
    assert_miss(other, path, "saved with other options of the policy")
    budget = model.kv_store.host_budget_bytes
    allow_host_bytes(model, 1000)
    try:
        assert_miss(model, path, "no room")
    finally:
        allow_host_bytes(model, budget)
    with pytest.raises(ValueError, match="no tokens to save"):
        model.new_cache().save(tmp_path / "empty")


def test_a_stock_model_is_refused(saved: tuple[Any, Path]) -> None:
    for model, name in ((make_tiny_model("llama"), "LlamaForCausalLM"), (None, "None")):
        message = f"must come from OffloadedModel.from_pretrained, got {name}$"
        with pytest.raises(TypeError, match=message):
            OffloadedCache.load(model, saved[1])
        with pytest.raises(TypeError, match=message):
            Engine(model)


def test_room_that_others_take_meanwhile_is_a_miss(saved: tuple[Any, Path]) -> None:
    model, path = saved
    store, budget = model.kv_store, model.kv_store.host_budget_bytes
    parts = read_in_parts(model._offload.sequences, path, 2048)
    next(parts)
    store.trim()
    allow_host_bytes(model, store.host_bytes_reserved)
    try:
        with pytest.raises(SessionMiss, match="no room"):
            finish(parts)
    finally:
        allow_host_bytes(model, budget)
    assert store.num_sequences == 0


def test_writing_that_fails_leaves_the_file_before(saved: tuple[Any, Path], tmp_path: Path) -> None:
    model, path = saved
    cache = OffloadedCache.load(model, path)
    good = path.read_bytes()
    with pytest.raises(OSError, match=f"No such file or directory: '{tmp_path}/nowhere/cache'$"):
        cache.save(tmp_path / "nowhere" / "cache")
    for taken in ("folder", "pipe"):  # as root it could take the place of /dev/null
        (Path.mkdir if taken == "folder" else os.mkfifo)(tmp_path / taken)
        with pytest.raises(OSError, match=f"Not a regular file: '{tmp_path}/{taken}'$"):
            cache.save(tmp_path / taken)
        assert not (tmp_path / taken).is_file()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match=f"File too large: '{path}'$"):
            cache.save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    cache.crop(-1)
    os.chmod(path.parent, 0o500)
    try:
        if os.geteuid():
            with pytest.raises(PermissionError):
                cache.save(path)
    finally:
        os.chmod(path.parent, 0o700)
    assert path.read_bytes() == good
    assert os.listdir(path.parent) == [path.name]
