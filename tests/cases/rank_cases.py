"""What ranks run in tests: each function is called on all ranks of `rank_processes.Ranks`."""

from __future__ import annotations

import functools
import logging
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from cases.device_cases import greedy, keep_least_on_gpu, small
from cases.inside import allow_device_bytes, decoder_of, runtime_of

from offload import OffloadedModel
from offload.decode.gpu.placement import HeadPlacement, Place
from offload.policies import Policy
from offload.ranks.group import TensorParallel
from offload.ranks.watch import POLL_SECONDS
from offload.runtime import runner as runner_module
from offload.selection.policy import DENSE, RETRIEVE
from offload.system.errors import DeviceMemoryError


@functools.cache
def _load(folder: Path, policy: str, options: tuple[tuple[str, Any], ...] = ()) -> Any:
    if policy == "full":
        return load(folder, policy, **dict(options))
    model = load(folder, small(policy), **dict(options))
    keep_least_on_gpu(model)  # all of it would be there, and exact
    return model


def load(folder: Path, policy: Policy | str, device: str = "cpu", **options: Any) -> Any:
    return OffloadedModel.from_pretrained(
        folder,
        policy=policy,
        dtype=options.pop("dtype", "float32"),
        device=device,
        tensor_parallel_size=int(os.environ.get("WORLD_SIZE", "1")),
        **{"page_tokens": 16, "prefill_slice_tokens": 64, "num_threads": 1, **options},
    )


def tokens_of(
    folder: Path,
    policy: str,
    input_ids: torch.Tensor,
    max_new_tokens: int,
    load_options: dict[str, Any] | None = None,
    **options: Any,
) -> torch.Tensor:
    """Greedy tokens of the model under a policy."""
    model = _load(folder, policy, tuple((load_options or {}).items()))
    return greedy(model, input_ids, max_new_tokens, **options)


def sampled(folder: Path, input_ids: torch.Tensor, seed: int | None, **options: Any) -> Any:
    """Sampled tokens; each rank has a random state of its own before, unless there is a seed."""
    torch.manual_seed(seed if seed is not None else 1000 + int(os.environ["RANK"]))
    return greedy(_load(folder, "full"), input_ids, 30, do_sample=True, **options)


def bitwise(
    folder: Path, input_ids: torch.Tensor, dtype: str, load_options: dict[str, Any] | None = None
) -> list[torch.Tensor]:
    """Logits of a prompt and of some decode steps."""
    model = load(folder, "full", dtype=dtype, **(load_options or {}))
    out = model(input_ids[:, :-3])
    logits = [out.logits]
    for column in range(input_ids.shape[1] - 3, input_ids.shape[1]):
        out = model(input_ids[:, column : column + 1], past_key_values=out.past_key_values)
        logits.append(out.logits)
    return [x.cpu() for x in logits]


def facts(folder: Path, policy: str = "full", **options: Any) -> dict[str, Any]:
    """What a rank has of a model."""
    model = load(folder, policy, **options)
    ranks: TensorParallel = runtime_of(model).ranks
    layer = model.model.layers[0]
    return {
        "kv_heads": model.kv_store.num_kv_heads,
        "token_bytes": model.kv_store.token_bytes,
        "q_rows": layer.self_attn.q_proj.weight.shape[0],
        "gate_rows": layer.mlp.gate_proj.weight.shape[0],
        "o_bias": layer.self_attn.o_proj.bias is not None,
        "weight_bytes": sum(weight.nbytes for weight in model.parameters()),
        "budget": model.kv_store.host_budget_bytes,
        "num_cpus": ranks.num_cpus,
        "policy": (model.policy.name, model.policy_reason),
    }


def raises(folder: Path, what: str, policy: str = "full", **options: Any) -> tuple[str, str]:
    """Name and message of what loading, or using, a model raises on this rank."""
    try:
        if what == "load":
            load(folder, policy, **options)
        else:
            model = _load(folder, policy)
            if what == "save":
                model.save_pretrained(folder / "never")
            else:
                greedy(model, torch.ones(1, 5, dtype=torch.int64), 4, **options)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def other_inputs(folder: Path) -> tuple[str, str]:
    """Each rank has a prompt of its own."""
    try:
        greedy(_load(folder, "full"), torch.full((1, 7), int(os.environ["RANK"])), 3)
    except ValueError as error:
        return type(error).__name__, str(error)
    return "", ""


class _Trouble:
    """A streamer that lets one rank fail after some tokens."""

    def __init__(self, kind: str, rank: int, after: int = 5) -> None:
        self._left = after if int(os.environ["RANK"]) == rank else -1
        self._kind = kind

    def put(self, value: torch.Tensor) -> None:
        self._left -= 1
        if self._left == 0:
            if self._kind == "kill":
                time.sleep(2 * POLL_SECONDS)  # the other rank has seen this process by then
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("boom in the middle")

    def end(self) -> None:
        pass


def fails(folder: Path, kind: str, rank: int, catches: bool = False) -> str:
    """Rank `rank` dies, or raises, in the middle of a generation."""
    model = _load(folder, "full")
    try:
        greedy(model, torch.ones(1, 5, dtype=torch.int64), 400, streamer=_Trouble(kind, rank))
    except RuntimeError as error:
        if not catches:
            raise
        return f"{type(error).__name__}: {error}"
    return ""


def leaves(folder: Path, fails: bool = False) -> tuple[bool, bool]:
    """As at the process's end: whether the model's decoder was closed, and the group is there."""
    model = load(folder, "full")
    greedy(model, torch.ones(1, 5, dtype=torch.int64), 3)
    ranks: TensorParallel = runtime_of(model).ranks
    if fails:
        with suppress(ValueError), ranks.together():
            raise ValueError("the last thing it did")
    ranks.leave()
    return not decoder_of(model).coprocessors, dist.is_initialized()


def no_room(
    folder: Path, policy: str, input_ids: torch.Tensor, max_new_tokens: int, rank: int
) -> tuple[torch.Tensor, list[str], list[str]]:
    """Retrieving heads on the GPU, or codes of keys, of which `rank` has room for a few pages.

    Returns:
        the tokens; the placement afterwards, and after a short prompt; warnings.
    """
    model = load(folder, small(policy), backend="inline")
    decoder = decoder_of(model)
    places, roles = np.array(decoder.placement.places), decoder.attention.roles
    if roles is None:  # sketch
        places[places == Place.CPU] = Place.CODES
    else:
        places[(roles == RETRIEVE) | (roles == DENSE)] = Place.GPU
    decoder.place(HeadPlacement(places))
    assert not decoder.placed.keeps
    if int(os.environ["RANK"]) == rank:
        page_bytes = decoder.store.page_bytes // places.shape[1] * int((places == Place.GPU).sum())
        num_pages = input_ids.shape[1] // 16 + 1
        if roles is None:  # all of the dense layer fits
            num_pages = -(-(input_ids.shape[1] + max_new_tokens) // 16)
        allow_device_bytes(model, page_bytes * num_pages)
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())
    logging.getLogger("offload.decode.gpu.placed_heads").addHandler(handler)
    tokens, after = greedy(model, input_ids, max_new_tokens), [decoder.placement.text()]
    greedy(model, input_ids[:, :20], 4)
    return tokens, [*after, decoder.placement.text()], warnings


def makes_room_alone(
    folder: Path, input_ids: torch.Tensor, rank: int
) -> tuple[torch.Tensor, list[bool]]:
    """A step behind a second prompt, for which `rank` alone gives device memory back; sequences
    before and behind it have slots, of which the first is free by then.

    Returns:
        the step's logits; which slots are taken.
    """
    model = load(folder, small("exact_topk"), backend="inline")
    runtime = runtime_of(model)
    runtime.decoder.begin_generation(3, 300)
    caches = [model.new_cache() for _ in range(3)]
    prefill_for = runner_module.prefill_for

    def prefill(*args: Any, give_back: Any, **options: Any) -> Any:
        if int(os.environ["RANK"]) == rank:
            give_back(DeviceMemoryError("no room"))
        return prefill_for(*args, give_back=give_back, **options)

    with torch.no_grad():
        for tokens in (input_ids[:, :-1], input_ids[:, -1:]):
            for cache in caches:
                model(tokens, past_key_values=cache)
        caches[0].reset()
        with mock.patch.object(runner_module, "prefill_for", prefill):
            model(input_ids[:, :9], past_key_values=caches[1])
        logits = model(input_ids[:, 9:10], past_key_values=caches[1]).logits
    slots = runtime.decoder.slots.steps.step.resident.slots
    return logits, [slot.seq is not None for slot in slots]


def room_for_scores(folder: Path) -> int:
    """Tokens that a step for 300 is made for; rank 0 has heads that publish, others have none."""
    model = load(folder, small("lychee_decode"), backend="inline")
    decoder = decoder_of(model)
    if int(os.environ["RANK"]) == 0:
        places = np.array(decoder.placement.places)
        places[decoder.attention.roles == RETRIEVE] = Place.GPU
        decoder.place(HeadPlacement(places))
    with mock.patch("offload.decode.gpu.buffers._MIN_SCORE_TOKENS", 16):
        room: int = decoder.slots._room_for(300, decoder.placed.layers)
    return room
