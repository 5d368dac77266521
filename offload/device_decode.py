"""Decode on the GPU with the KV cache on the host; the CPU attends as its coprocessor.

`decode_layer` is the hot path; read it first, then `handshake.py` (who waits for whom) and
`resident.py` (what stays on the GPU). A step works on static buffers, one row per slot, and reads
everything that changes from step to step (positions, page tables, flags) from memory, so that it
can be captured once and replayed for any lengths. Rows whose position is -1 are not in use.

With device "cpu" and backend "inline" the same step runs on CPU tensors, kernel by kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from cpu_ops.coprocessor import Coprocessor
from cpu_ops.native import WorkerPool
from gpu_ops.merge_state import merge_state
from gpu_ops.paged_attention import num_kv_splits, paged_decode_attention
from gpu_ops.rms_norm import add_rms_norm
from gpu_ops.rope_publish import rope_publish
from gpu_ops.silu_mul import silu_mul
from gpu_ops.window_attention import window_attention
from offload.attention import DecodeAttention
from offload.batch import RaggedBatch
from offload.handshake import Handshake, make_handshake
from offload.kv_store import KVStore
from offload.mailbox import Mailbox
from offload.memory import DeviceMemoryError
from offload.models import DecoderLayer, LeanModel
from offload.policies import Policy
from offload.resident import ResidentKV
from offload.sampling import SamplingOptions, choose
from offload.weights import fuse_rows

# Of policies that name none (full attention): enough for the GPU to have something to do.
_SINK_TOKENS, _RECENT_TOKENS = 4, 64


@dataclass(frozen=True)
class DeviceLayer:
    """A decoder layer's weights as the step takes them: q, k, v and gate, up in one matrix each."""

    input_norm: Tensor
    norm_eps: float
    qkv: tuple[Tensor, Tensor | None]
    q_norm: Tensor | None
    k_norm: Tensor | None
    qk_norm_eps: float
    o_proj: tuple[Tensor, Tensor | None]
    mlp_norm: Tensor
    mlp_norm_eps: float
    gate_up: tuple[Tensor, Tensor | None]
    down: tuple[Tensor, Tensor | None]


class StepBuffers:
    """The static tensors of a step with up to `num_rows` rows."""

    def __init__(self, model: LeanModel, num_rows: int, dtype: torch.dtype, device: torch.device):
        shape = model.attention
        layer = model.layers[0]
        heads = shape.num_qo_heads * shape.head_dim

        def rows(width: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.zeros(num_rows, width, dtype=dtype, device=device)

        # What changes from step to step: the host writes it, the step's first operation copies it.
        host_state = torch.full((3, num_rows), -1, dtype=torch.int64)
        self.host_state = host_state.pin_memory() if device.type == "cuda" else host_state
        self.state = self.host_state.to(device)
        self.positions, self.rope_positions, self.tokens = self.state
        self.host_tokens = torch.empty_like(self.host_state[2], pin_memory=device.type == "cuda")
        self.hidden = rows(model.hidden_size)
        self.normed = rows(model.hidden_size)
        self.query = rows(heads)
        self.window_out = rows(heads, torch.float32)
        self.window_lse = rows(shape.num_qo_heads, torch.float32)
        self.attended = rows(heads)
        self.gated = rows(layer.down_proj.in_features)
        num_splits = num_kv_splits(shape.num_kv_heads, _num_multiprocessors(device))
        self.partial_lse = torch.zeros(num_rows, shape.num_qo_heads, num_splits, device=device)
        self.partial_out = torch.zeros(*self.partial_lse.shape, shape.head_dim, device=device)


class DeviceDecoder:
    """Decode steps of one model over one store.

    Args:
        backend: as `handshake.choose_backend` returns it.
        deadline_seconds: after which a step that one side does not finish is an error.
        device_budget_bytes: of what stays on the GPU beside weights and buffers.
        make_handshake: another one than `handshake.make_handshake`'s, for benches.

    Attributes:
        after_projection: called after the q, k, v projection of each layer with (layer_idx, qkv
            [n, (num_qo_heads + 2 num_kv_heads) * head_dim], positions [n]) and may overwrite qkv;
            for benches.
        on_mark: called in the step with (kind, layer_idx) of what was launched since the call
            before; for traces. Steps with and without it are captured apart.
    """

    max_rows = 1  # new tokens per sequence; more are a prefill
    after_projection: Callable[[int, Tensor, Tensor], None] | None = None
    on_mark: Callable[[str, int], None] | None = None

    def __init__(
        self,
        model: LeanModel,
        store: KVStore,
        policy: Policy,
        *,
        device: torch.device,
        backend: str,
        num_threads: int | None,
        deadline_seconds: float = 5.0,
        device_budget_bytes: int | None = None,
        make_handshake: Callable[..., Handshake] = make_handshake,
    ) -> None:
        self.model, self.store, self.device = model, store, device
        self.pool = WorkerPool(num_threads)
        self.attention = DecodeAttention(
            policy,
            store,
            num_qo_heads=model.attention.num_qo_heads,
            pool=self.pool,
            sm_scale=model.attention.sm_scale,
        )
        self.sink_tokens = policy.sink_tokens if policy.selects else _SINK_TOKENS
        self.recent_tokens = policy.recent_tokens if policy.selects else _RECENT_TOKENS
        self.layers = [_device_layer(layer) for layer in model.layers]
        self._backend = backend
        self._make_handshake = make_handshake
        self._deadline_seconds = deadline_seconds
        self._device_budget_bytes = device_budget_bytes
        is_resident = self.attention.is_dense if policy.selects else [False] * len(self.layers)
        self._host_layers = [i for i, resident in enumerate(is_resident) if not resident]
        self._resident_layers = [i for i, resident in enumerate(is_resident) if resident]
        self._num_slots = 0  # nothing below exists before the first step
        self._handshake: Handshake

    @property
    def device_bytes(self) -> int:
        """Of the KV cache that is on the device."""
        return self.resident.num_bytes if self._num_slots else 0

    def decode(self, hidden: Tensor, batch: RaggedBatch, seqs: Sequence[int]) -> Tensor:
        """Run all layers over one new token per sequence, for which room is reserved.

        Args:
            hidden: [num_sequences, hidden_size], the embeddings.
            seqs: the store's sequence of each.

        Returns:
            [num_sequences, hidden_size], before the final norm.

        Raises:
            CoprocessorError: a side missed its deadline, or NaN or inf in the query or the cache;
                names the layer.
            DeviceMemoryError: the resident layers do not fit.
        """
        slots, kv_lens = self._bind(seqs)
        rows = _bucket(max(slots) + 1)
        key, step = ("layers", rows, self.on_mark), functools.partial(self._run_layers, rows)
        self._prepare(key, step)
        self._write_state(slots, kv_lens, batch.position_ids)
        at = torch.tensor(slots, device=self.device)
        self.buffers.hidden[at] = hidden
        self._run(key, step, seqs, slots, kv_lens)
        return self.buffers.hidden[at]

    def choose_tokens(
        self,
        seqs: Sequence[int],
        tokens: Tensor,
        position_ids: Tensor,
        options: SamplingOptions,
    ) -> Tensor:
        """One whole step, from the last tokens to the next.

        Args:
            tokens, position_ids: int64 [num_sequences], of the last token of each.

        Returns:
            int64 [num_sequences], on the host.

        Raises:
            As `decode`.
        """
        slots, kv_lens = self._bind(seqs)
        rows = _bucket(max(slots) + 1)
        key, step = (
            ("tokens", rows, options, self.on_mark),
            functools.partial(self._run_tokens, rows, options),
        )
        self._prepare(key, step)
        self._write_state(slots, kv_lens, position_ids, tokens)
        self._run(key, step, seqs, slots, kv_lens)
        return self.buffers.host_tokens[slots]

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden_size] before the final norm -> [n, vocab_size]."""
        logits: Tensor = self.model.lm_head(self.model.final_norm(hidden))
        return logits

    def forget(self, seq: int) -> None:
        """`seq` was changed or freed outside of a decode step."""
        if self._num_slots:
            self.resident.forget(seq)

    def check_usable(self) -> None:
        """Raise CoprocessorError where an earlier fault was for good, or after a fork."""
        if self._num_slots:
            self.coprocessor.check_usable()

    def close(self) -> None:
        """End the threads."""
        if self._num_slots:
            self._handshake.close()
        self.pool.close()

    def _bind(self, seqs: Sequence[int]) -> tuple[list[int], list[int]]:
        """Slots for `seqs`, and their kv_lens after the step, for which there is room."""
        self._make_slots(len(seqs))
        kv_lens = [self.store.kv_len(seq) + 1 for seq in seqs]
        slots = self.resident.bind(seqs)
        self.resident.reserve(slots, kv_lens)
        return slots, kv_lens

    def _prepare(self, key: Hashable, step: Callable[[], None]) -> None:
        """Do what the first run of `step` needs; it may run the step, with no row in use."""
        self.buffers.host_state.fill_(-1)
        self._handshake.prepare(key, step)

    def _write_state(
        self,
        slots: Sequence[int],
        kv_lens: Sequence[int],
        position_ids: Tensor,
        tokens: Tensor | None = None,
    ) -> None:
        state = self.buffers.host_state
        state.fill_(-1)
        state[0, slots] = torch.tensor(kv_lens) - 1
        state[1, slots] = position_ids
        state[2, slots] = 0 if tokens is None else tokens

    def _run(
        self,
        key: Hashable,
        step: Callable[[], None],
        seqs: Sequence[int],
        slots: Sequence[int],
        kv_lens: Sequence[int],
    ) -> None:
        """One step of bound sequences that end with `kv_lens` tokens."""
        rows = self.attention.begin_step(seqs, kv_lens)
        try:
            self._handshake.run(key, step, rows, slots)
        except BaseException:
            for seq in seqs:  # who knows what was written
                self.resident.forget(seq)
                if self.coprocessor.is_stuck:
                    self.store.renew_page_table(seq)
            raise
        self.resident.advance(slots, kv_lens)

    def _run_layers(self, num_rows: int) -> None:
        self.buffers.state.copy_(self.buffers.host_state, non_blocking=True)
        self.all_layers(num_rows)

    def _run_tokens(self, num_rows: int, options: SamplingOptions) -> None:
        b = self.buffers
        self._mark("start")
        b.state.copy_(b.host_state, non_blocking=True)
        b.hidden[:num_rows] = self.model.embed_tokens(b.tokens[:num_rows].clamp(min=0))
        self.all_layers(num_rows)
        logits = self.logits(b.hidden[:num_rows])
        self._mark("linear")
        b.host_tokens[:num_rows].copy_(choose(logits, options), non_blocking=True)
        self._mark("sample")

    def all_layers(self, num_rows: int) -> None:
        """Rows [0, num_rows) of `buffers.hidden` through all layers, in place."""
        b = self.buffers
        x = b.hidden[:num_rows]
        positions = b.positions[:num_rows]
        rope_positions = b.rope_positions[None, :num_rows].clamp(min=0)
        cos, sin = (table[0] for table in self.model.rotary_emb(x, rope_positions))
        rope = (cos.contiguous(), sin.contiguous())
        mlp_out = None
        for layer_idx, layer in enumerate(self.layers):
            mlp_out = self.decode_layer(layer_idx, layer, x, mlp_out, positions, rope)
        if mlp_out is not None:
            x += mlp_out

    def decode_layer(
        self,
        layer_idx: int,
        layer: DeviceLayer,
        x: Tensor,
        mlp_out: Tensor | None,
        positions: Tensor,
        rope: tuple[Tensor, Tensor],
    ) -> Tensor:
        """x [n, hidden_size] += mlp_out, += attention; returns what the MLP adds."""
        b, n = self.buffers, x.shape[0]
        shape, store = self.model.attention, self.store
        normed, query, attended = b.normed[:n], b.query[:n], b.attended[:n]
        window = self.resident.windows.get(layer_idx)
        page_table = self.resident.page_tables.get(layer_idx)

        add_rms_norm(x, mlp_out, layer.input_norm, layer.norm_eps, normed)
        qkv = functional.linear(normed, *layer.qkv)
        if self.after_projection is not None:
            self.after_projection(layer_idx, qkv, positions)
        rope_publish(
            qkv,
            *rope,
            positions,
            num_kv_heads=shape.num_kv_heads,
            q_norm=layer.q_norm,
            k_norm=layer.k_norm,
            norm_eps=layer.qk_norm_eps,
            query=query,
            host_query=self.mailbox.query[:n],
            host_kv=self.mailbox.kv[layer_idx, :n],
            window=None if window is None else window[:n],
            sink_tokens=self.sink_tokens,
            page_table=None if page_table is None else page_table[:n],
            page_tokens=store.page_tokens,
        )
        self._mark("linear", layer_idx)
        if page_table is not None:
            paged_decode_attention(
                query,
                page_table[:n],
                positions,
                num_kv_heads=shape.num_kv_heads,
                page_tokens=store.page_tokens,
                sm_scale=shape.sm_scale,
                partial_out=b.partial_out[:n],
                partial_lse=b.partial_lse[:n],
                out=attended,
            )
            self._mark("attention", layer_idx)
        else:
            assert window is not None
            request = self._request_of_layer[layer_idx]
            self._handshake.publish(request)
            window_out, window_lse = b.window_out[:n], b.window_lse[:n]
            window_attention(
                query,
                window[:n],
                positions,
                sm_scale=shape.sm_scale,
                out=window_out,
                lse=window_lse,
            )
            self._mark("window", layer_idx)
            self._handshake.await_reply(request)
            self._mark("wait", layer_idx)
            host_out, host_lse = self.mailbox.output[:n], self.mailbox.lse[:n]
            merge_state(window_out, window_lse, host_out, host_lse, attended)
            self._mark("merge", layer_idx)
        attention_out = functional.linear(attended, *layer.o_proj)
        add_rms_norm(x, attention_out, layer.mlp_norm, layer.mlp_norm_eps, normed)
        gated = b.gated[:n]
        silu_mul(functional.linear(normed, *layer.gate_up), gated)
        return functional.linear(gated, *layer.down)

    def _mark(self, kind: str, layer_idx: int = -1) -> None:
        if self.on_mark is not None:
            self.on_mark(kind, layer_idx)

    def _make_slots(self, num_sequences: int) -> None:
        """Static buffers for at least `num_sequences` rows; larger ones mean new captures."""
        if num_sequences <= self._num_slots:
            return
        if self._num_slots:
            self._num_slots = 0  # whatever happens below
            self._handshake.close()
        num_slots = _bucket(num_sequences)
        try:
            self._allocate_slots(num_slots)
        except torch.OutOfMemoryError as error:
            raise DeviceMemoryError(
                f"the GPU has no memory left for decode steps of {num_slots} sequences ("
                f"{str(error).partition(chr(10))[0]}); lower the batch size or raise max_memory of "
                "the device"
            ) from error
        self._num_slots = num_slots

    def _allocate_slots(self, num_slots: int) -> None:
        self.buffers = StepBuffers(self.model, num_slots, self.store.dtype, self.device)
        self.resident = ResidentKV(
            self.store,
            host_layers=self._host_layers,
            resident_layers=self._resident_layers,
            sink_tokens=self.sink_tokens,
            recent_tokens=self.recent_tokens,
            num_slots=num_slots,
            max_context=self.model.max_context,
            device=self.device,
            budget_bytes=self._device_budget_bytes,
        )
        shape = self.model.attention
        requests = [(layer_idx, 0, num_slots) for layer_idx in self._host_layers]
        self._request_of_layer = {layer: i for i, layer in enumerate(self._host_layers)}
        self.mailbox = Mailbox.allocate(
            num_layers=len(self.layers),
            max_rows=num_slots,
            num_qo_heads=shape.num_qo_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            dtype=self.store.dtype,
            num_requests=len(requests),
            pinned=self.device.type == "cuda",
        )
        self.coprocessor = Coprocessor(
            self.attention,
            self.mailbox,
            requests,
            sink_tokens=self.sink_tokens,
            recent_tokens=self.recent_tokens,
            deadline_seconds=self._deadline_seconds,
        )
        self._handshake = self._make_handshake(
            self._backend,
            self.coprocessor,
            self.mailbox,
            deadline_seconds=self._deadline_seconds,
        )


def _num_multiprocessors(device: torch.device) -> int:
    if device.type == "cpu":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _bucket(num_rows: int) -> int:
    """The number of rows that a step for `num_rows` sequences is made for: a power of two."""
    return 1 << (num_rows - 1).bit_length()


def _device_layer(layer: DecoderLayer) -> DeviceLayer:
    has_qk_norm = layer.q_norm is not None and layer.k_norm is not None
    return DeviceLayer(
        input_norm=_norm_weight(layer.input_norm),
        norm_eps=_norm_eps(layer.input_norm),
        qkv=fuse_rows([layer.q_proj, layer.k_proj, layer.v_proj]),
        q_norm=_norm_weight(layer.q_norm) if has_qk_norm else None,
        k_norm=_norm_weight(layer.k_norm) if has_qk_norm else None,
        qk_norm_eps=_norm_eps(layer.q_norm) if has_qk_norm else 0.0,
        o_proj=fuse_rows([layer.o_proj]),
        mlp_norm=_norm_weight(layer.mlp_norm),
        mlp_norm_eps=_norm_eps(layer.mlp_norm),
        gate_up=fuse_rows([layer.gate_proj, layer.up_proj]),
        down=fuse_rows([layer.down_proj]),
    )


def _norm_weight(module: Any) -> Tensor:
    weight: Tensor = module.weight.detach()
    return weight


def _norm_eps(module: Any) -> float:
    return float(module.variance_epsilon)
