"""Sketch: a code of 1 or 2 bits a dimension for every key, all of them scored in each step.

History is not asked and nothing is grouped, so nothing is missed for being new or for standing
beside others. The error of one key's score is that of many small ones of either sign; what ranks
by it are candidates, some more than fit the budget, among which exact weights choose.

Codes are of keys less their mean over the prompt, which adds the same to all scores of a query: of
what exact top-k keeps of the attention, 1 bit then keeps 0.89 instead of 0.79
(docs/notes/sketch.md). Scores of the group's heads are compared as they are; to subtract each
head's sum of exponentials first kept little more. How codes are made is in `codes`, how they are
scored in cpp/kernels/codes-inl.h.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from cpu_ops.codes import CODE_BLOCK
from cpu_ops.worker_pool import WorkerPool
from offload.policies.base import SparsePolicy
from offload.policies.sketch.codes import LEVELS, OUTER, encode_rows, rotate, rotation
from offload.policies.sketch.codes_on_device import encode_keys, mean_keys
from offload.selection.callback import (
    Callback,
    callback,
    load_keys,
    offset_floats,
    read_context,
    top_codes,
    view_float32,
    view_int32,
    view_uint8,
)
from offload.selection.compiled import cached_njit
from offload.selection.device_build import to_host
from offload.selection.device_support import DeviceBuild, DeviceCodes, DeviceSupport
from offload.selection.layer_state import BuildContext, LayerState, State, StateShape
from offload.selection.layouts import NumberLayout, StateLayout, reader
from offload.selection.revised import Revised
from offload.system.map_in_threads import map_in_threads

STATE = StateLayout(
    codes=np.uint8,  # [num_kv_heads, blocks, head_dim * bits / 8, CODE_BLOCK]
    scales=np.float32,  # [num_kv_heads, blocks * CODE_BLOCK]
    mean=np.float32,  # [num_kv_heads, head_dim] of the prompt's keys
    levels=np.float32,  # [1 << bits]
    encoded=np.int32,  # [num_kv_heads] tokens that have codes
    sizes=np.int32,  # SIZES
    # Scratch of each KV head: a key, the group's rotated queries and what their scores start from.
    floats=np.float32,  # [.., head_dim + group_size * (head_dim + 1)]
    candidates=np.int32,  # [.., candidates]
)
SIZES = ("max_tokens", "floats", "candidates")
NUMBERS = NumberLayout("bits", "candidate_ratio")
read_state, read_sizes, read_numbers = STATE.read, reader(SIZES, np.int32), NUMBERS.read
_BUILD_TOKENS = 4096  # of one piece of a build


@cached_njit()
def encode_new(pointer: Any, ctx: Any, state: Any, sizes: Any, bits: Any, end: Any) -> None:
    """Codes of the tokens before `end` that have none yet."""
    head_dim = ctx.head_dim
    encoded = view_int32(state.encoded, ctx.kv_head + 1)
    first = encoded[ctx.kv_head]
    end = min(end, sizes.max_tokens)
    if first >= end:
        return
    code_bytes = head_dim * bits // 8
    key_at = offset_floats(state.floats, ctx.kv_head * sizes.floats)
    key = view_float32(key_at, head_dim)
    mean = view_float32(state.mean, head_dim, ctx.kv_head)
    levels = view_float32(state.levels, 1 << bits)
    codes = view_uint8(state.codes, sizes.max_tokens * code_bytes, ctx.kv_head)
    scales = view_float32(state.scales, sizes.max_tokens, ctx.kv_head)
    for token in range(first, end):
        load_keys(pointer, ctx.load_keys, token, 1, key_at)
        encode_rows(key.reshape(1, head_dim), mean, bits, levels, codes, scales, token)
    encoded[ctx.kv_head] = end
    ctx.bytes_touched += (end - first) * (code_bytes + 4)


@callback
def propose(pointer: Any) -> int:
    ctx = read_context(pointer)
    state = read_state(ctx.arrays)
    sizes, numbers = read_sizes(state.sizes), read_numbers(ctx.parameters)
    bits, head_dim, group_size = int(numbers.bits), ctx.head_dim, ctx.group_size
    encode_new(pointer, ctx, state, sizes, bits, ctx.last)
    floats_at = offset_floats(state.floats, ctx.kv_head * sizes.floats)
    query_at = offset_floats(floats_at, head_dim)
    offsets_at = offset_floats(query_at, group_size * head_dim)
    tokens_at = offset_floats(state.candidates, ctx.kv_head * sizes.candidates)
    offsets = view_float32(offsets_at, group_size)
    mean = view_float32(state.mean, head_dim, ctx.kv_head)
    scale = np.float32(ctx.sm_scale)
    for g in range(group_size):
        query, rotated = view_float32(ctx.query, head_dim, g), view_float32(query_at, head_dim, g)
        offset = np.float32(0.0)
        for d in range(head_dim):
            rotated[d] = scale * query[d]
            offset += rotated[d] * mean[d]
        offsets[g] = offset
        rotate(rotated)
    ratio = 1.0 if ctx.ahead else numbers.candidate_ratio  # ahead, nothing is scored
    wanted = min(int(ratio * ctx.budget_tokens), ctx.last - ctx.first)
    code_bytes = sizes.max_tokens * (head_dim * bits // 8)
    ctx.candidates = tokens_at
    count: int = top_codes(
        pointer,
        ctx.top_codes,
        (
            query_at,
            offsets_at,
            state.codes + ctx.kv_head * code_bytes,
            offset_floats(state.scales, ctx.kv_head * sizes.max_tokens),
            state.levels,
            bits,
            wanted,
            tokens_at,
        ),
    )
    return count


@callback
def append(pointer: Any) -> None:
    ctx = read_context(pointer)
    state = read_state(ctx.arrays)
    bits = int(read_numbers(ctx.parameters).bits)
    encode_new(pointer, ctx, state, read_sizes(state.sizes), bits, ctx.kv_len)


class SketchState(LayerState):
    """Codes of all keys."""

    layout, catches_up = STATE, True
    policy: Sketch

    def build(self, context: BuildContext) -> State:
        """Codes of all keys."""
        kv_len = context.keys.shape[1]
        arrays = self.arrays_of(context)()

        def build_head(head: int) -> None:
            keys = context.keys[head]
            arrays["mean"][head] = mean_keys(keys).numpy()
            for first in range(0, kv_len, _BUILD_TOKENS):
                self.encode(arrays, head, keys[first : first + _BUILD_TOKENS], first)

        num_threads = context.pool.num_threads if context.pool is not None else 1
        map_in_threads(build_head, range(len(context.keys)), num_threads)
        return arrays

    def encode(self, arrays: State, head: int, keys: Tensor, first: int) -> None:
        """Codes of a head's keys [n, head_dim] of the tokens from `first` on."""
        rows = keys.to(torch.float32, copy=True).numpy()
        codes, scales = arrays["codes"][head].reshape(-1), arrays["scales"][head]
        encode_rows(
            rows, arrays["mean"][head], self.policy.bits, arrays["levels"], codes, scales, first
        )

    def arrays_of(self, context: BuildContext) -> Callable[[], State]:
        """What makes the arrays without codes, and does not hold on to the keys."""
        policy = self.policy
        num_kv_heads, kv_len, head_dim = context.keys.shape
        max_tokens = _whole_blocks(max(kv_len, context.capacity_tokens))
        floats = _scratch_floats(len(context.queries) // num_kv_heads, head_dim)
        blocks, code_bytes = max_tokens // CODE_BLOCK, head_dim * policy.bits // 8
        return lambda: {
            "codes": np.zeros((num_kv_heads, blocks, code_bytes, CODE_BLOCK), np.uint8),
            "scales": np.zeros((num_kv_heads, max_tokens), np.float32),
            "mean": np.zeros((num_kv_heads, head_dim), np.float32),
            "levels": LEVELS[policy.bits].copy(),
            "encoded": np.full(num_kv_heads, kv_len, np.int32),
            "sizes": np.array([max_tokens, floats, policy.max_candidates], np.int32),
            "floats": np.zeros((num_kv_heads, floats), np.float32),
            "candidates": np.zeros((num_kv_heads, policy.max_candidates), np.int32),
        }

    def num_bytes(self, shape: StateShape) -> int:
        policy = self.policy
        of_token = shape.head_dim * policy.bits // 8 + 4
        floats = _scratch_floats(shape.num_qo_heads // shape.num_kv_heads, shape.head_dim)
        of_head = _whole_blocks(shape.capacity_tokens) * of_token + 4 * shape.head_dim + 4
        of_head += 4 * (floats + policy.max_candidates)
        return shape.num_kv_heads * of_head + LEVELS[policy.bits].nbytes + 4 * len(SIZES)

    def grow(self, layer_idx: int, arrays: State, capacity_tokens: int, pool: WorkerPool) -> State:
        """The same codes with room for `capacity_tokens` tokens."""
        codes, scales = arrays["codes"], arrays["scales"]
        more = max(0, _whole_blocks(capacity_tokens) - scales.shape[1])
        sizes = arrays["sizes"].copy()
        sizes[0] += more
        return {name: array.copy() for name, array in arrays.items()} | {
            "codes": np.pad(codes, [(0, 0), (0, more // CODE_BLOCK), (0, 0), (0, 0)]),
            "scales": np.pad(scales, [(0, 0), (0, more)]),
            "sizes": sizes,
        }

    def truncate(self, layer_idx: int, arrays: State, kv_len: int) -> bool:
        """Tokens that come instead of others get codes of their own."""
        encoded = arrays["encoded"]
        np.minimum(encoded, kv_len, out=encoded)
        return True

    rewind = truncate  # codes say nothing of steps

    def revise(self, layer_idx: int, arrays: State, revised: Revised) -> bool:
        """Codes of their own for such tokens."""
        self.truncate(layer_idx, arrays, revised.first)
        self.policy.device.code_state(arrays, revised.kv_len, revised.load_keys)
        return True

    def compile_revise(self) -> None:
        rows, levels = np.zeros((0, 8), np.float32), LEVELS[self.policy.bits].copy()
        codes, scales, mean = np.zeros(0, np.uint8), rows[:, 0].copy(), np.zeros(8, np.float32)
        encode_rows(rows, mean, self.policy.bits, levels, codes, scales, 0)

    def read_bytes(
        self, *, kv_len: int, chosen_tokens: int, row_bytes: int, state_bytes: float
    ) -> tuple[float, bool]:
        """All codes, and candidates' keys."""
        return state_bytes + self.policy.candidate_ratio * chosen_tokens * row_bytes, False


class SketchDevice(DeviceSupport):
    """Codes are made and scored there, too."""

    builds = True
    policy: Sketch

    def codes(self, num_layers: int, num_units: int) -> DeviceCodes | None:
        """Codes of all units of sparse layers."""
        policy = self.policy
        if not policy.max_candidates:
            return None
        sparse = np.arange(num_layers) >= policy.dense_layers
        levels = tuple(LEVELS[policy.bits].tolist())
        heads = np.repeat(sparse[:, None], num_units, axis=1)
        return DeviceCodes(heads, policy.max_candidates, levels, float(OUTER), rotation)

    def code_state(self, arrays: State, kv_len: int, load_keys: Callable[[int], Tensor]) -> State:
        """With codes of the tokens that have none yet."""
        first = int(arrays["encoded"].min())
        if first < kv_len:
            for head, keys in enumerate(load_keys(first)):
                self.policy.state.encode(arrays, head, keys, first)
            arrays["encoded"][:] = kv_len
        return {name: arrays[name] for name in ("codes", "scales", "mean")}

    def build(self, context: BuildContext) -> DeviceBuild:
        """The same, encoded on the device; what is at the bound of two levels may differ."""
        mean = mean_keys(context.keys)
        codes, scales = encode_keys(context.keys, mean, self.policy.bits)
        found = {"codes": to_host(codes), "scales": to_host(scales), "mean": to_host(mean)}
        make = self.policy.state.arrays_of(context)

        def finish() -> State:
            arrays = make()
            for name, x in found.items():
                torch.from_numpy(arrays[name])[:, : x.shape[1]].copy_(x)
            return arrays

        return finish

    def warm_up_kernels(self, keys: Tensor) -> None:
        encode_keys(keys, mean_keys(keys), self.policy.bits)


@dataclass(frozen=True)
class Sketch(SparsePolicy):
    """The tokens whose keys' codes score most, chosen among by their exact weights.

    Args:
        bits: of a dimension's code, 1 or 2. 1 takes about half of the memory and two thirds of the
            time, and does where the budget is 5 % of the context or more.
        candidate_ratio: tokens whose keys are scored exactly, for each one attended.
    """

    name: ClassVar[str] = "sketch"
    propose: ClassVar[Callback | None] = propose
    append: ClassVar[Callback | None] = append
    number_layout: ClassVar[NumberLayout | None] = NUMBERS
    state = cached_property(SketchState)
    device = cached_property(SketchDevice)

    bits: int = 2
    candidate_ratio: float = 3.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bits not in LEVELS or not isinstance(self.bits, int) or isinstance(self.bits, bool):
            raise ValueError(f"bits must be 1 or 2, got {self.bits!r}")
        if not 1 <= self.candidate_ratio <= 64:
            raise ValueError(f"candidate_ratio must be in [1, 64], got {self.candidate_ratio}")

    @property
    def max_candidates(self) -> int:
        chosen = self.budget_tokens - self.sink_tokens - self.recent_tokens
        return int(self.candidate_ratio * chosen)


def _whole_blocks(num_tokens: int) -> int:
    return -(-max(1, num_tokens) // CODE_BLOCK) * CODE_BLOCK


def _scratch_floats(group_size: int, head_dim: int) -> int:
    """A key, queries, and what their scores start from."""
    return head_dim + group_size * (head_dim + 1)
