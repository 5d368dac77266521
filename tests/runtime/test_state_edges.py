"""Crops, rows and failures at the edges of what a policy keeps, and who waits for whom."""

from __future__ import annotations

import copy
import gc
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.device_cases import load_in_room, small, steps
from cases.drafts import verifying
from cases.inside import states_of
from cases.slowly import combinations
from cases.tiny_models import make_tiny_model, random_tokens

from offload import HostBudgetError


def load(folder: Path, policy: str, room_bytes: int | None = None, budget: int = 64) -> Any:
    model = load_in_room(folder, small(policy, budget) if policy != "full" else "full", room_bytes)
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture(scope="module")
def lfps(tiny_folders: dict[str, Path]) -> Any:
    return load(tiny_folders["llama"], "lfps")


@pytest.mark.parametrize(("num_steps", "cropped"), combinations([0, 1, 2], [1, 40, 70, 100]))
def test_lfps_goes_on_after_any_crop(lfps: Any, num_steps: int, cropped: int) -> None:
    """Also where the tokens whose queries it has seen are gone."""
    cache = lfps.new_cache()
    lfps(random_tokens(1, 200), past_key_values=cache)
    if num_steps:
        steps(lfps, cache, random_tokens(1, num_steps, seed=1))
    cache.crop(-cropped)
    assert bool(steps(lfps, cache, random_tokens(1, 3, seed=2)).isfinite().all())
    assert cache.kv_lens == [200 + num_steps - cropped + 3]


def test_a_row_without_a_token_keeps_its_state(lfps: Any) -> None:
    """… in a turn of another row."""
    waits = lfps.new_cache()
    mask = torch.ones(2, 150, dtype=torch.int64)
    lfps(random_tokens(2, 150), past_key_values=waits)

    def step(cache: Any, mask: torch.Tensor, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        mask = torch.cat([mask, torch.ones(2, 1, dtype=torch.int64)], dim=1)
        positions = (mask.cumsum(1) - 1)[:, -1:]
        token = random_tokens(2, 1, seed=seed)
        out = lfps(token, attention_mask=mask, past_key_values=cache, position_ids=positions)
        return out.logits, mask

    for seed in range(5):
        _, mask = step(waits, mask, seed)
    alone = copy.deepcopy(waits)
    turn = torch.cat([mask, torch.tensor([[1] * 10, [0] * 10])], dim=1)
    positions = (turn.cumsum(1) - 1)[:, -10:]
    tokens = random_tokens(2, 10, seed=9)
    lfps(tokens, attention_mask=turn, past_key_values=waits, position_ids=positions)
    assert torch.equal(step(waits, turn, 8)[0][1], step(alone, mask, 8)[0][1])


@pytest.mark.parametrize("num_failing", [1, 40])
def test_a_failed_pass_leaves_what_a_crop_needs(lfps: Any, num_failing: int) -> None:
    cache = lfps.new_cache()
    lfps(random_tokens(1, 150), past_key_values=cache)
    steps(lfps, cache, random_tokens(1, 9, seed=3))
    unharmed = copy.deepcopy(cache)
    for each in (cache, unharmed):
        with verifying(lfps, each):
            lfps(random_tokens(1, 6, seed=6), past_key_values=each)
    norm = lfps.model.layers[1].input_layernorm.weight.data
    kept = norm.clone()
    norm.fill_(float("nan"))
    with pytest.raises((RuntimeError, ValueError), match="finite"):
        lfps(random_tokens(1, num_failing), past_key_values=cache)
    norm.copy_(kept)
    tokens = random_tokens(1, 20, seed=9)
    for each in (cache, unharmed):
        each.crop(-3)
    assert torch.equal(steps(lfps, cache, tokens), steps(lfps, unharmed, tokens))


def test_queries_that_are_kept_are_asked_for_first(tiny_folders: dict[str, Path]) -> None:
    """Not after half of the tokens."""
    page_bytes = 3 * load(tiny_folders["llama"], "lfps").kv_store.page_bytes
    model = load(tiny_folders["llama"], "lfps", room_bytes=(16 * 9 + 4) * page_bytes, budget=256)
    with pytest.raises(HostBudgetError, match="of it for what the policy keeps"):
        model.generate(random_tokens(16, 40), max_new_tokens=100, do_sample=False)
    assert model.offload_stats().prefill_tokens == 0
    assert states_of(model).held_bytes == 0


def test_pages_that_are_free_make_room_for_what_a_policy_keeps(
    tiny_folders: dict[str, Path],
) -> None:
    first = load(tiny_folders["llama"], "quest")
    room_bytes = 2 * states_of(first).bytes.at(201) + 180 * first.kv_store.page_bytes
    model = load(tiny_folders["llama"], "quest", room_bytes=room_bytes)
    caches: list[Any] = []

    def fill() -> None:
        for seed in range(1000):
            caches.append(model.new_cache())
            model(random_tokens(1, 40, seed=seed), past_key_values=caches[-1])

    with pytest.raises(HostBudgetError):
        fill()
    caches.clear()
    gc.collect()
    assert model.kv_store.host_bytes_used == 0
    prompt = random_tokens(1, 180)
    out = model.generate(prompt, max_new_tokens=10, do_sample=False)
    assert torch.equal(out, first.generate(prompt, max_new_tokens=10, do_sample=False))


def test_two_models_that_assist_each_other(tiny_folders: dict[str, Path], tmp_path: Path) -> None:
    """In two threads: whose turn it is, is asked of both in one order."""
    make_tiny_model("llama", num_hidden_layers=2).save_pretrained(tmp_path)
    models = load(tiny_folders["llama"], "full"), load(tmp_path, "full")
    prompt = random_tokens(1, 30)
    plain = [model.generate(prompt, max_new_tokens=6, do_sample=False) for model in models]
    found: list[list[torch.Tensor]] = [[], []]

    def generate(number: int) -> None:
        for _ in range(8):
            out = models[number].generate(
                prompt, assistant_model=models[1 - number], max_new_tokens=6, do_sample=False
            )
            found[number].append(out)

    threads = [threading.Thread(target=generate, args=(i,), daemon=True) for i in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "they wait for each other"
    for outs, expected in zip(found, plain, strict=True):
        assert len(outs) == 8
        assert all(torch.equal(out, expected) for out in outs)
