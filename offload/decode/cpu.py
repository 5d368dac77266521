"""Decode: a few new tokens per sequence, on the native kernels.

The hot path is `DecoderLayers::decode_layer` in `cpp/operators/decoder_layers.cpp`; read it first.
A step over more rows than the kernels take at once runs block by block, each through all layers:
rows of one sequence are in order, so a later row finds the K/V of the earlier ones in the store
whichever block they were in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from cpu_ops.decoder_layers import DecoderLayers, LayersStep
from cpu_ops.linear import Linear
from cpu_ops.step_rows import DecodeStep
from cpu_ops.worker_pool import WorkerPool
from offload.decode.attention import DecodeAttention, MakeCompression
from offload.decode.sampling import Draws
from offload.kv.sequence_part import SequencePart
from offload.kv.store import KVStore
from offload.models import LeanModel
from offload.models.base import norm_of
from offload.models.batch import RaggedBatch, tokens_each
from offload.policies import Policy
from offload.system.errors import DeviceMemoryError


class NativeDecoder(SequencePart):
    """The `Decoder` of a model without a GPU: as a part it has no copy that could be out of date.

    It does not sample: the stock loop's tokens are those of transformers with the same seed.

    Attributes:
        after_projection, on_mark: as of `DeviceStep`, for benchmarks; a step goes through Python
            layer by layer then.
    """

    max_rows = Linear.max_rows
    max_step_tokens: int | None = None
    samples = False
    device_bytes = 0
    setup_seconds = 0.0

    def __init__(
        self,
        model: LeanModel,
        store: KVStore,
        policy: Policy,
        num_threads: int,
        make_compression: MakeCompression = lambda attention, pool: None,
    ) -> None:
        self.model = model
        self.store = store
        self.pool = WorkerPool(num_threads)
        self.attention = DecodeAttention(
            policy,
            store,
            num_qo_heads=model.each("num_qo_heads"),
            pool=self.pool,
            sm_scale=model.sm_scales,
            windows=model.each("window"),
            sinks=model.sinks,
            make_compression=make_compression,
        )
        self.stack = DecoderLayers([layer.on_cpu() for layer in model.layers], self.attention)
        self.after_projection: Callable[[int, int, torch.Tensor, torch.Tensor], None] | None = None
        self.on_mark: Callable[[str, int], None] | None = None
        self.final_norm = norm_of(model.final_norm)
        self.lm_head = model.lm_head.on_cpu()

    def decode(self, hidden: torch.Tensor, batch: RaggedBatch, seqs: Sequence[int]) -> torch.Tensor:
        """As `Decoder.decode`; `hidden` is overwritten."""
        tables = [rope(hidden, batch.position_ids[None]) for rope in self.model.ropes]
        scale = self.model.query_scale
        scales = None if scale is None else scale(hidden, batch.position_ids)
        rows = [
            (seq, position)
            for seq, num_new in zip(seqs, batch.num_new_tokens, strict=True)
            for position in range(self.store.kv_len(seq), self.store.kv_len(seq) + num_new)
        ]
        for block in self._blocks(rows):
            step = self.attention.begin_step(
                [seq for seq, _ in rows[block]], [position + 1 for _, position in rows[block]]
            )
            ropes = [(cos[0, block], sin[0, block]) for cos, sin in tables]
            query_scale = None if scales is None else scales[block]
            self._run_layers(hidden[block], ropes, query_scale, step, block.start)
            self.attention.count_rows(step)
        if self.attention.top_p_controller is not None:
            self.attention.top_p_controller.after_step()
        return hidden

    def _blocks(self, rows: Sequence[tuple[int, int]]) -> Iterator[slice]:
        """Rows (seq, position) that go through the layers together.

        Where the policy's state of a sequence has to be built or moved, the rows before it are
        done first: what it is made of must be there.
        """
        start = 0
        for stop in range(1, len(rows) + 1):
            full = stop - start == self.max_rows
            if stop < len(rows) and not full:
                seq, position = rows[stop]
                continues = rows[stop - 1][0] == seq
                stays = self.attention.states.serves(seq, position + 1)
                if not continues or stays or self.attention.attends_to_all(seq, position + 1):
                    continue
            yield slice(start, stop)
            start = stop

    def choose_tokens(
        self,
        seqs: Sequence[int],
        tokens: torch.Tensor,
        position_ids: torch.Tensor,
        draws: Draws | None = None,
        *,
        ahead: bool = False,
        beside: Callable[[], None] | None = None,
    ) -> torch.Tensor:
        """One whole step, to the `likeliest` tokens: see `Decoder.choose_tokens`."""
        assert draws is None
        if beside is not None:
            beside()
        batch = replace(tokens_each(len(seqs)), position_ids=position_ids)
        self._mark("start")
        hidden = self.decode(self.model.embed_tokens(tokens), batch, seqs)
        chosen = likeliest(self.logits(hidden))
        self._mark("linear")
        return chosen

    def tokens_at_once(self, seqs: Sequence[int], most: int) -> int:
        """One: the CPU waits for no GPU."""
        return 1

    def begin_steps(self, seqs: Sequence[int], most: int) -> int:
        """One, likewise."""
        return 1

    def end_steps(self) -> None:
        """Nothing was begun."""

    def choose_several(
        self,
        seqs: Sequence[int],
        tokens: torch.Tensor,
        position_ids: torch.Tensor,
        draws: Draws | None,
        count: int,
    ) -> torch.Tensor:
        """Chooses one token: `count` is 1."""
        assert count == 1
        return self.choose_tokens(seqs, tokens, position_ids, draws)[:, None]

    def first_tokens(self, logits: torch.Tensor, draws: Draws | None = None) -> torch.Tensor:
        """The `likeliest` of logits [n, vocab_size]."""
        assert draws is None
        return likeliest(logits)

    def _run_layers(
        self,
        hidden: torch.Tensor,
        ropes: Sequence[tuple[torch.Tensor, torch.Tensor]],
        query_scale: torch.Tensor | None,
        rows: DecodeStep,
        first_row: int,
    ) -> None:
        """hidden [n, hidden_size] through all layers, in place.

        Args:
            ropes: cos, sin [n, head_dim], of each of the model's.
            query_scale: [n], of `LeanModel.query_scale`.

        Where heads of layers differ and queries are kept, Python goes layer by layer.
        """
        attention, stack = self.attention, self.stack
        is_watched = self.after_projection is not None or self.on_mark is not None
        by_layer = attention.on_attended is not None
        by_layer |= attention.heads_differ and rows.keeps_queries
        if by_layer or rows.in_turns or is_watched:
            step = LayersStep(
                stack, hidden, ropes[0], rows, other_ropes=ropes[1:], query_scale=query_scale
            )
            for layer_idx, layer in enumerate(self.model.layers):
                qkv, attended = step.of_layer(layer_idx)
                stack.project(layer_idx, step)
                if self.after_projection is not None:
                    positions = torch.from_numpy(rows.positions)
                    self.after_projection(layer_idx, first_row, qkv, positions)
                    attention.rope_append(layer_idx, rows, qkv, ropes[layer.spec.rope_idx])
                self._mark("linear", layer_idx)
                attention.attend(layer_idx, rows, qkv, attended)
                self._mark("attend", layer_idx)
                stack.finish(layer_idx, step)
            return
        compression = attention.compression
        if compression is not None and not compression.wants_queries(
            rows.seqs, rows.kv_lens.tolist()
        ):
            compression = None
        keeps_queries = rows.keeps_queries or compression is not None
        step = LayersStep(
            stack,
            hidden,
            ropes[0],
            rows,
            keeps_queries=keeps_queries,
            other_ropes=ropes[1:],
            query_scale=query_scale,
        )
        stack.run(step)
        if compression is not None and step.kept_queries is not None:
            compression.record_step(rows, slice(None), step.kept_queries)
        if rows.keeps_queries and step.kept_queries is not None:
            sparse = attention.sparse_layers.nonzero()[0].tolist()
            attention.record_step_queries(rows, {i: step.kept_queries[i] for i in sparse})

    def _mark(self, kind: str, layer_idx: int = -1) -> None:
        if self.on_mark is not None:
            self.on_mark(kind, layer_idx)

    def trim(self) -> None:
        """Nothing: there is no device."""

    def check_usable(self) -> None:
        """Nothing: an error leaves no step behind."""

    def begin_generation(
        self, num_sequences: int, kv_len: int, read_tokens: int | None = None
    ) -> None:
        """Nothing: all that a step takes is in the store, which checks for itself."""

    def most_together(self, most: int, kv_len: int, read_tokens: int | None = None) -> int:
        return most

    def end_generation(self) -> None:
        """Nothing, either."""

    def finish_captures(self) -> None:
        """Nothing is captured."""

    def give_heads_back(self, why: DeviceMemoryError) -> bool:
        return False

    def close(self) -> None:
        self.pool.close()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = hidden.new_empty(hidden.shape[0], self.lm_head.out_features)
        hidden = hidden.contiguous()
        for start in range(0, hidden.shape[0], self.max_rows):
            rows = slice(start, start + self.max_rows)
            self.lm_head(self.pool, hidden[rows], out=logits[rows], norm=self.final_norm)
        return capped(logits, self.model.logit_cap)


def capped(logits: torch.Tensor, cap: float) -> torch.Tensor:
    """Outputs of the head, overwritten, as logits under `LeanModel.logit_cap`."""
    return logits.div_(cap).tanh_().mul_(cap) if cap else logits


def likeliest(logits: torch.Tensor) -> torch.Tensor:
    """Logits [n, vocab_size] -> int64 [n], of equals the one that the stock loop takes.

    -1 where a logit is NaN, which is what an argmax finds.
    """
    tokens = logits.float().argmax(dim=-1)
    return tokens.masked_fill(logits.gather(1, tokens[:, None])[:, 0].isnan(), -1)
