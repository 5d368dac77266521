"""Caches of every layer of a model, with the structure of real attention, and steps after them.

A prefill of 128K tokens with random weights would give keys that attention treats as noise, so the
keys and values are made (see `structured_cache`): on a GPU all 32 layers of an 8B model at 128K
tokens in seconds, each written to host pages before the next is made. What policies keep of a
context is built from the same tensors while they are on the device.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cpu_ops.worker_pool import WorkerPool
from offload.decode.attention import DecodeAttention
from offload.kv.format import KVFormat
from offload.kv.page_pool import pages_at
from offload.kv.store import HostBudgetError, KVStore
from offload.measuring.synthetic.one_slab import PAGE_TOKENS, num_pages, one_slab_store, page_bytes
from offload.measuring.synthetic.structured_cache import (
    PROMPT_QUERIES,
    StructuredLayer,
    structured_layer,
)
from offload.models.rope import Rotary
from offload.models.shape import ModelShape
from offload.policies import Policy
from offload.selection.estimate import EstimateState
from offload.selection.layer_state import BuildContext, State
from offload.selection.state import capacity_for
from offload.system.memory import format_bytes, host_memory_limit_bytes

PolicyArrays = dict[int, State]  # of each layer that asks the policy


@dataclass(frozen=True)
class QKVRows:
    """Chosen queries, keys and values in the place of those that random weights give.

    A model with random weights attends to nothing in particular, and every selection method is
    meaningless there. A benchmark so lets the projections run, for their time, and then copies rows
    of its own over what they gave: one small kernel per layer, which a CUDA graph captures once and
    which reads the number of the step on the device.

    Attributes:
        rows: [num_steps, num_layers, num_rows, (num_qo_heads + 2 * num_kv_heads) * head_dim], not
            yet rotated: what follows rotates them.
        first_position: of the tokens of the first step, in every sequence.
        step: int64 [1], on the same device: which of the rows are copied.
    """

    rows: Tensor
    first_position: int
    step: Tensor

    @property
    def num_steps(self) -> int:
        return int(self.rows.shape[0])

    def after_projection(
        self, layer_idx: int, first_row: int, qkv: Tensor, positions: Tensor
    ) -> None:
        """Overwrite `qkv` [n, width], or queries alone, row by row; rows beyond those there are
        stay as they are.

        Layers come in order, and layer 0 looks up the step. Neither synchronises nor depends on
        the step that it is called in: it may be captured.

        Args:
            first_row: of the batch, in `qkv`.
            positions: int64 [n] on the device, the same in all rows; other rows than the first may
                be inactive.
        """
        if layer_idx == 0:
            torch.sub(positions[:1], self.first_position, out=self.step)
            self.step.clamp_(0, self.num_steps - 1)
        n, width = qkv.shape
        of_layer = self.rows[:, layer_idx, first_row : first_row + n, :width]
        n = of_layer.shape[1]
        if n == 0:
            return
        if qkv.is_contiguous():
            torch.index_select(of_layer, 0, self.step, out=qkv[None, :n])
        else:  # index_select would have to replace it
            qkv[:n] = of_layer.index_select(0, self.step)[0]


@dataclass
class ModelCache:
    """Sequences of `kv_len` tokens in a host store, and what `num_steps` steps add and ask.

    Attributes:
        store, seqs: the sequences' keys and values.
        rows: queries, keys and values of the steps, on the model's device.
        arrays: of each policy and sequence.
    """

    store: KVStore
    seqs: list[int]
    kv_len: int
    rows: QKVRows
    arrays: dict[Policy, list[PolicyArrays]]

    @property
    def num_steps(self) -> int:
        return self.rows.num_steps

    def install(self, attention: DecodeAttention, seqs: Sequence[int]) -> None:
        """Give `attention` fresh copies of what its policy built, for `seqs` or forks of them."""
        for seq, layers in zip(seqs, self.arrays[attention.policy], strict=True):
            if layers:
                copied = copy.deepcopy(layers)
                attention.states.install(seq, copied, self.kv_len + self.num_steps)

    def close(self) -> None:
        self.store.close()


def structured_model_cache(
    shape: ModelShape,
    *,
    kv_len: int,
    num_steps: int,
    ropes: Sequence[Rotary],
    device: torch.device,
    dtype: torch.dtype,
    pool: WorkerPool,
    kv_dtype: str = "auto",
    policies: Sequence[Policy] = (),
    batch_size: int = 1,
    distinct_layers: int | None = None,
    seed: int = 0,
    on_layer: Callable[[int, int], None] = lambda done, total: None,
) -> ModelCache:
    """Make `batch_size` sequences in all layers of a model of `shape`.

    Args:
        ropes: of each layer of the model that decodes: its decode steps rotate the rows.
        device: where keys are made; the store is in host memory, pinned for a GPU.
        kv_dtype: of the store. Policies build on what it keeps: with "int8" on rounded keys.
        distinct_layers: make only so many, and let the others repeat them, each in memory of its
            own, so that no cache flatters them; default all.

    Raises:
        HostBudgetError: before anything is made, if it does not fit.
        ValueError: numbers out of range.
        NotImplementedError: a kv_dtype that does not fit the dtype or the shape.
    """
    distinct = shape.num_layers if distinct_layers is None else distinct_layers
    if not 1 <= distinct <= shape.num_layers:
        raise ValueError(f"distinct_layers must be in [1, {shape.num_layers}], got {distinct}")
    store = _store(shape, kv_len, num_steps, batch_size, device, dtype, kv_dtype)
    attentions = {
        policy: DecodeAttention(
            policy, store, num_qo_heads=shape.num_qo_heads, pool=pool, windows=shape.windows or 0
        )
        for policy in policies
        if policy.selects and policy.state.has_arrays
    }
    in_pages = batch_size * _pages_of_sequence(shape, kv_len, num_steps)
    in_arrays = sum(x.states.bytes.at(kv_len + num_steps) for x in attentions.values())
    need = in_pages * store.page_bytes + batch_size * in_arrays
    if need > store.host_budget_bytes:
        store.close()
        raise HostBudgetError(
            f"{batch_size} x {kv_len + num_steps} tokens in {shape.num_layers} layers, with what "
            f"policies keep of them, need {format_bytes(need)} of host memory, but "
            f"{format_bytes(store.host_budget_bytes)} are left for them; lower --context or the "
            "batch size, or measure fewer policies at once"
        )
    arrays: dict[Policy, list[PolicyArrays]] = {policy: [] for policy in policies}
    width = shape.qkv_width
    rows = torch.empty(num_steps, shape.num_layers, batch_size, width, dtype=dtype, device=device)
    positions = torch.arange(kv_len, kv_len + num_steps, device=device)
    tables = {rope: [x[0] for x in rope(rows, positions[None])] for rope in set(ropes)}
    seqs = [store.new_sequence() for _ in range(batch_size)]
    at_first = kv_len  # of windows no more than stays
    if not shape.windows:
        # At once: what is missing later is taken as another slab of this size, as far as it fits.
        at_first = PAGE_TOKENS * _pages_of_sequence(shape, kv_len, num_steps) // shape.num_layers
    store.reserve(seqs, [at_first] * batch_size, at_once=bool(shape.windows))
    for row, seq in enumerate(seqs):
        layers_of: dict[Policy, PolicyArrays] = {policy: {} for policy in policies}
        for source in range(distinct):
            layer = structured_layer(
                shape,
                kv_len=kv_len,
                num_steps=num_steps,
                dtype=dtype,
                seed=seed + row,
                layer_idx=source,
                device=device,
            )
            alike = range(source, shape.num_layers, distinct)
            steps = {
                rope: _steps_of(layer, kv_len, *tables[rope]).to(dtype)
                for rope in {ropes[layer_idx] for layer_idx in alike}
            }
            keys, values = (x[:, :kv_len] for x in (layer.keys, layer.values))
            for layer_idx in reversed(alike):
                rows[:, layer_idx, row] = steps[ropes[layer_idx]]
                k, v = keys, values
                if store.format.is_int8 and layer_idx != source:  # `append_async` rounds them
                    k, v = keys.clone(), values.clone()
                store.append_async(seq, layer_idx, k.transpose(0, 1), v.transpose(0, 1), start=0)
            for policy, attention in attentions.items():
                asks = [layer_idx for layer_idx in alike if layer_idx in attention.states.layers]
                if not asks or kv_len <= policy.dense_tokens:
                    continue
                members = policy.unit_members(shape.num_layers, shape.num_kv_heads)
                built: dict[int, State] = {}
                for layer_idx in asks:
                    # Where a policy has members, layers differ in whose heads they have.
                    like = source if members is None else layer_idx
                    if like not in built:
                        built[like] = _build(policy, layer, like, shape, kv_len, num_steps, pool)
                    layers_of[policy][layer_idx] = {n: x.copy() for n, x in built[like].items()}
            if device.type == "cuda":  # before the layer's memory goes to the next one
                torch.cuda.synchronize(device)
            on_layer(row * distinct + source + 1, batch_size * distinct)
        for policy in policies:
            arrays[policy].append(layers_of[policy])
        store.commit([seq], [kv_len])
        store.free_behind([seq])
        store.truncate(seq, kv_len)  # the pages that steps take go to forks
    step = torch.zeros(1, dtype=torch.int64, device=device)
    return ModelCache(store, seqs, kv_len, QKVRows(rows, kv_len, step), arrays)


def _store(
    shape: ModelShape,
    kv_len: int,
    num_steps: int,
    batch_size: int,
    device: torch.device,
    dtype: torch.dtype,
    kv_dtype: str,
) -> KVStore:
    pages = batch_size * _pages_of_sequence(shape, kv_len, num_steps)
    KVFormat.of(kv_dtype, dtype, [shape.head_dim])
    need = pages * page_bytes(shape, dtype, kv_dtype)
    if need > host_memory_limit_bytes():
        raise HostBudgetError(
            f"{batch_size} x {kv_len + num_steps} tokens in {shape.num_layers} layers need "
            f"{format_bytes(need)} of host memory, but this process may use only "
            f"{format_bytes(host_memory_limit_bytes())}; lower --context or the batch size"
        )
    pinned = device.type == "cuda"
    return one_slab_store(
        shape,
        dtype,
        num_layers=shape.num_layers,
        pages=pages,
        kv_dtype=kv_dtype,
        pinned=pinned,
        windows=shape.windows or 0,
    )


def _pages_of_sequence(shape: ModelShape, kv_len: int, num_steps: int) -> int:
    """Pages of a sequence and its fork. The fork takes the steps, and has its own last page if that
    is not full."""
    of_fork = num_pages(kv_len + num_steps) - kv_len // PAGE_TOKENS
    windows = shape.windows or [0] * shape.num_layers
    return pages_at(kv_len, PAGE_TOKENS, windows) + of_fork * shape.num_layers


def _steps_of(layer: StructuredLayer, kv_len: int, cos: Tensor, sin: Tensor) -> Tensor:
    """Queries, keys and values of the steps, not rotated: float32 [num_steps, width]."""
    parts = (
        unrotated(layer.queries[:, PROMPT_QUERIES:].transpose(0, 1), cos, sin),
        unrotated(layer.keys[:, kv_len:].transpose(0, 1), cos, sin),
        layer.values[:, kv_len:].transpose(0, 1),
    )
    return torch.cat([part.float().flatten(1) for part in parts], 1)


def unrotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """What the rotary embedding x * cos + rotate_half(x) * sin turns into `x`, in float32.

    Args:
        x: [..., num_heads, head_dim].
        cos, sin: [..., head_dim], of the positions of x; both halves are equal.
    """
    half = x.shape[-1] // 2
    c, s = (table[..., None, :half].float() for table in (cos, sin))
    x1, x2 = x[..., :half].float(), x[..., half:].float()
    # Some rope types scale cos and sin; a rotation is undone by its transpose over the square.
    square = c * c + s * s
    return torch.cat([(x1 * c + x2 * s) / square, (x2 * c - x1 * s) / square], -1)


def _build(
    policy: Policy,
    layer: StructuredLayer,
    layer_idx: int,
    shape: ModelShape,
    kv_len: int,
    num_steps: int,
    pool: WorkerPool,
) -> State:
    """The policy's arrays, built on the layer's device if the policy can."""
    tensors = (layer.keys[:, :kv_len], layer.values[:, :kv_len], layer.queries[:, :PROMPT_QUERIES])
    keys, values, queries = (x.contiguous() for x in tensors)
    context = BuildContext(
        layer_idx=layer_idx,
        keys=keys,
        values=values,
        queries=queries,
        sm_scale=keys.shape[-1] ** -0.5,
        capacity_tokens=capacity_for(kv_len + num_steps),
        text_marks=None,
        pool=pool,
        num_layers=shape.num_layers,
    )
    estimate = EstimateState(policy, policy.estimate_clusters)
    estimate.asking = frozenset({layer_idx})
    estimate.estimating = estimate.asking if policy.estimate_clusters else frozenset()
    if keys.is_cuda and (policy.device.builds or not policy.state.has_arrays):
        finish = estimate.build_on_device(context)
        torch.cuda.synchronize(keys.device)
        return finish()
    context = replace(context, keys=keys.cpu(), values=values.cpu(), queries=queries.cpu())
    return estimate.build(context)
