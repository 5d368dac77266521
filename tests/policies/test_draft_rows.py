"""Rejected rows of a draft leave no trace in a policy's state, bit for bit."""

from __future__ import annotations

import pytest
import torch
from cases.device_cases import small
from cases.slowly import combinations

from cpu_ops.worker_pool import WorkerPool
from offload.decode.attention import DecodeAttention
from offload.kv.sequence_part import SequencePart
from offload.kv.store import KVStore
from offload.policies.tidal_decode import TidalDecode
from offload.runtime.sequences import Sequences

LAYERS, KV_HEADS, HEADS, HEAD_DIM = 2, 2, 6, 32
TOKENS = 400


class Nowhere(SequencePart):
    """A device that has nothing."""


class World:
    """One sequence of given keys, values and queries."""

    def __init__(self, name: str, pool: WorkerPool, prompt: int) -> None:
        generator = torch.Generator().manual_seed(1)
        shape = (LAYERS, TOKENS, HEADS + 2 * KV_HEADS, HEAD_DIM)
        self.rows = torch.randn(shape, generator=generator)
        store = KVStore(
            num_layers=LAYERS,
            num_kv_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            dtype=torch.float32,
            page_tokens=16,
        )
        policy = small(name.removeprefix("tidal "))
        if name.startswith("tidal "):
            policy = TidalDecode(policy, (1,))
        self.store = store
        self.attention = DecodeAttention(policy, store, num_qo_heads=HEADS, pool=pool)
        self.states = self.attention.states
        self.sequences = Sequences(store, self.attention, Nowhere())
        self.seq = self.sequences.new()
        self.write(0, prompt)
        store.commit([self.seq], [prompt])
        for layer_idx in range(LAYERS):
            queries = self.rows[layer_idx, :prompt, :HEADS].transpose(0, 1)
            self.attention.record_queries(self.seq, layer_idx, queries, prompt)

    def write(self, first: int, n: int, seed: int | None = None) -> torch.Tensor:
        """Reserve and write n tokens from `first` on, others than the text's with a seed."""
        rows = self.rows[:, first : first + n]
        if seed is not None:
            rows = torch.randn(rows.shape, generator=torch.Generator().manual_seed(seed))
        self.store.reserve([self.seq], [n])
        for layer_idx in range(LAYERS):
            keys, values = rows[layer_idx, :, HEADS:].split(KV_HEADS, dim=1)
            self.store.append(self.seq, layer_idx, keys, values, first)
        return rows

    def decode(self, rejected: int, n: int) -> torch.Tensor:
        """n rows of the text and `rejected` others in one pass, which are then cropped."""
        kv_len = self.store.kv_len(self.seq)
        self.states.begin([self.seq], [n + rejected], prefill=False)
        rows = self.write(kv_len, n)
        if rejected:
            self.store.reserve([self.seq], [n + rejected])
            wrong = torch.randn(
                LAYERS, rejected, *self.rows.shape[2:], generator=torch.Generator().manual_seed(n)
            )
            for layer_idx in range(LAYERS):
                keys, values = wrong[layer_idx, :, HEADS:].split(KV_HEADS, dim=1)
                self.store.append(self.seq, layer_idx, keys, values, kv_len + n)
            rows = torch.cat([rows, wrong], dim=1)
        outs = []
        for row in range(n + rejected):  # one by one: each may need what the last has built
            step = self.attention.begin_step([self.seq], [kv_len + row + 1])
            out = torch.empty(LAYERS, 1, HEADS * HEAD_DIM)
            for layer_idx in range(LAYERS):
                query = rows[layer_idx, row : row + 1, :HEADS].flatten(1).contiguous()
                self.attention.attend(layer_idx, step, query, out[layer_idx])
            outs.append(out)
        self.store.commit([self.seq], [n + rejected])
        self.states.commit([self.seq])
        if rejected:
            self.sequences.truncate(self.seq, kv_len + n)
        return torch.stack(outs[:n])


@pytest.mark.parametrize(
    ("prompt", "name"),
    combinations([300, 55], ["lfps", "lychee_cluster", "quest", "sketch", "union", "tidal lfps"]),
)
def test_as_if_the_accepted_rows_had_been_decoded_one_by_one(name, prompt, pool):
    drafting, plain = (World(name, pool, prompt) for _ in range(2))
    for accepted, rejected in [(1, 7), (4, 2), (5, 5), (9, 1), (3, 0), (1, 3), (2, 4), (6, 40)]:
        ours = drafting.decode(rejected, accepted)
        theirs = torch.cat([plain.decode(0, 1) for _ in range(accepted)])
        assert torch.equal(ours, theirs)
    for _ in range(20):
        assert torch.equal(drafting.decode(0, 1), plain.decode(0, 1))


@pytest.mark.parametrize("name", ["lfps", "lychee_cluster"])
def test_a_draft_that_is_cropped_as_a_whole_and_more(name, pool):
    """Beyond the draft, it is what a crop of the tokens before it leaves."""
    drafting, plain = (World(name, pool, 300) for _ in range(2))
    for world in (drafting, plain):
        world.decode(0, 5)
        for _ in range(3):
            world.decode(0, 1)
    drafting.decode(0, 7)
    for world in (drafting, plain):
        world.sequences.truncate(world.seq, 306)
    for _ in range(20):
        assert torch.equal(drafting.decode(0, 1), plain.decode(0, 1))


def test_a_fork_may_crop_the_draft_too(pool):
    ours, theirs = (World("lfps", pool, 300) for _ in range(2))
    kv_len = 300
    ours.states.begin([ours.seq], [6], prefill=False)
    rows = ours.write(kv_len, 6)
    step = ours.attention.begin_step([ours.seq] * 6, list(range(kv_len + 1, kv_len + 7)))
    out = torch.empty(6, HEADS * HEAD_DIM)
    for layer_idx in range(LAYERS):
        ours.attention.attend(layer_idx, step, rows[layer_idx, :, :HEADS].flatten(1), out)
    ours.store.commit([ours.seq], [6])
    ours.states.commit([ours.seq])
    parent = ours.seq
    child = ours.sequences.fork(parent)
    for _ in range(2):
        theirs.decode(0, 1)
    for seq in (child, parent):
        ours.sequences.truncate(seq, kv_len + 2)
    state = {seq: ours.states.arrays_of(seq).copy() for seq in (parent, child)}
    for name, array in state[parent].layers[1].items():
        assert (array == state[child].layers[1][name]).all()
    ours.seq = child
    for _ in range(10):
        assert torch.equal(ours.decode(0, 1), theirs.decode(0, 1))
