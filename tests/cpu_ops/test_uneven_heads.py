"""KV heads with pages of their own and different numbers of tokens, each against float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from cases import kernel_references as reference
from cases.attention_cases import TOLERANCE, attend, random_queries, relative_error
from cases.pools import pools
from cases.seeded import new_rng
from cases.slowly import combinations

from cpu_ops import native
from cpu_ops.attention import attend_csr_rows
from cpu_ops.worker_pool import WorkerPool
from offload.decode.attention import DecodeAttention, DecodedUnits
from offload.kv.format import KVFormat
from offload.policies import Policy
from offload.policies.base import SparsePolicy
from offload.policies.exact_topk import ExactTopK
from offload.policies.registry import make_policy
from offload.selection.callback import Callback, callback

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ISAS = sorted({"scalar", native.isa_name()})
NUM_LAYERS, NUM_KV_HEADS, GROUP_SIZE, HEAD_DIM, PAGE_TOKENS = 2, 3, 2, 32, 16
NUM_QO_HEADS = NUM_KV_HEADS * GROUP_SIZE
KV_LEN = 645
# All tokens, 53 of them, 5 of them; another order and another length in each layer and sequence.
STARTS = np.array([[0, 592, 640], [320, 640, 0]])
OTHER_STARTS = np.array([[16, 48, 0], [0, 64, 16]])
OTHER_LEN = 70
OPTIONS = {"budget_tokens": 64, "sink_tokens": 4, "recent_tokens": 8, "dense_layers": 0}


class ApartPages:
    """Sequences of random keys and values; pages of one KV head, NaN where no token is.

    Attributes:
        keys, values: of each sequence [layer][head] a tensor [tokens of the head, HEAD_DIM].
    """

    num_layers, num_kv_heads, head_dim = NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM
    page_tokens, per_head_pages = PAGE_TOKENS, True

    def heads_of(self, layer_idx: int) -> tuple[int, int]:
        return NUM_KV_HEADS, HEAD_DIM

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.format = KVFormat.of("auto", dtype, [HEAD_DIM])
        self.keys: list[list[list[torch.Tensor]]] = []
        self.values: list[list[list[torch.Tensor]]] = []
        self._tables: list[np.ndarray] = []
        self._starts: list[np.ndarray] = []
        self._pages: list[dict[tuple[int, int, int], torch.Tensor]] = []

    def add(self, rng: np.random.Generator, kv_len: int, starts: np.ndarray, room: int = 0) -> int:
        """A sequence of `kv_len` tokens with pages for `room` more, and its handle."""
        seq, capacity = len(self.keys), -(-(kv_len + room) // PAGE_TOKENS)
        table = np.zeros((NUM_LAYERS * NUM_KV_HEADS, capacity), np.int64)
        pages: dict[tuple[int, int, int], torch.Tensor] = {}
        for layer, head, page in np.ndindex(NUM_LAYERS, NUM_KV_HEADS, capacity):
            if (page + 1) * PAGE_TOKENS > starts[layer, head]:
                pages[layer, head, page] = torch.full(
                    (2, 1, PAGE_TOKENS, HEAD_DIM), float("nan"), dtype=self.dtype
                )
                table[layer * NUM_KV_HEADS + head, page] = pages[layer, head, page].data_ptr()
        self._tables.append(table)
        self._starts.append(np.ascontiguousarray(starts, np.int64))
        self._pages.append(pages)
        for tensors, part in ((self.keys, 0), (self.values, 1)):
            tensors.append([])
            for layer in range(NUM_LAYERS):
                counts = [kv_len - int(start) for start in starts[layer]]
                tensors[seq].append([self._random(rng, n) for n in counts])
                for head, rows in enumerate(tensors[seq][layer]):
                    for slot, row in enumerate(rows, int(starts[layer, head])):
                        self.row(seq, layer, head, slot)[part] = row
        return seq

    def _random(self, rng: np.random.Generator, n: int) -> torch.Tensor:
        x = rng.standard_normal((n, HEAD_DIM), dtype=np.float32)
        return torch.from_numpy(x).to(self.dtype)

    def row(self, seq: int, layer: int, head: int, slot: int) -> torch.Tensor:
        """Key and value [2, HEAD_DIM] of a slot, in its page."""
        page = self._pages[seq][layer, head, slot // PAGE_TOKENS]
        return page[:, 0, slot % PAGE_TOKENS]

    def page_table(self, seq: int) -> np.ndarray:
        return self._tables[seq]

    def starts(self, seq: int) -> np.ndarray:
        return self._starts[seq]

    def all_rows(self, seq: int) -> torch.Tensor:
        return torch.stack(list(self._pages[seq].values()))

    def attention(
        self, pool: WorkerPool, policy: Policy, isa: str | None = None
    ) -> DecodeAttention:
        store: Any = self
        return DecodeAttention(policy, store, num_qo_heads=NUM_QO_HEADS, pool=pool, isa=isa)

    def expected(
        self,
        seq: int,
        layer: int,
        query: torch.Tensor,
        kv_len: int,
        selection: Sequence[Sequence[int]] = ((),) * NUM_KV_HEADS,
    ) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
        """float64 o, lse and weights of one row; a unit whose selection is empty attends to all."""
        heads = query.double().numpy().reshape(NUM_KV_HEADS, GROUP_SIZE, HEAD_DIM)
        per_head = len(selection) // NUM_KV_HEADS
        outs, lses, weights = [], [], []
        for head in range(NUM_KV_HEADS):
            n = kv_len - int(self._starts[seq][layer, head])
            units = selection[head * per_head : (head + 1) * per_head]
            o, lse, of_heads = reference.attention(
                heads[head],
                self.keys[seq][layer][head][None, :n].double().numpy(),
                self.values[seq][layer][head][None, :n].double().numpy(),
                sm_scale=HEAD_DIM**-0.5,
                selection=[tokens or range(n) for tokens in units],
            )
            outs.append(o)
            lses.append(lse)
            weights += of_heads
        return np.concatenate(outs), np.concatenate(lses), weights


pool = pools(1, 2)


def queries_of(rng: np.random.Generator, n: int, dtype: torch.dtype) -> torch.Tensor:
    return random_queries(rng, n, NUM_QO_HEADS, HEAD_DIM, dtype)


def make_step(
    rng: np.random.Generator, dtype: torch.dtype
) -> tuple[ApartPages, list[int], list[int], torch.Tensor]:
    """A draft of one sequence, and a row of another."""
    pages = ApartPages(dtype)
    first = pages.add(rng, KV_LEN, STARTS)
    second = pages.add(rng, OTHER_LEN, OTHER_STARTS)
    seqs, kv_lens = [first, first, second], [KV_LEN - 1, KV_LEN, OTHER_LEN]
    return pages, seqs, kv_lens, queries_of(rng, len(seqs), dtype)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dense_matches_reference(isa, dtype, pool):
    rng = new_rng()
    pages, seqs, kv_lens, queries = make_step(rng, dtype)
    attention = pages.attention(pool, make_policy("full"), isa)
    for layer in range(NUM_LAYERS):
        out, lse = attend(attention, seqs, kv_lens, queries, layer)
        for row, (seq, kv_len) in enumerate(zip(seqs, kv_lens, strict=True)):
            o, expected_lse, _ = pages.expected(seq, layer, queries[row], kv_len)
            assert relative_error(out[row], o) < TOLERANCE[dtype], (layer, row)
            np.testing.assert_allclose(lse[row], expected_lse, atol=2e-4)


@dataclass(frozen=True)
class TopKPerQueryHead(ExactTopK):
    per_query_head: ClassVar[bool] = True


@callback
def propose(pointer: Any) -> int:
    return 0


@dataclass(frozen=True)
class Proposes(SparsePolicy):
    """No candidates: what is considered is the runtime's sinks and recent tokens."""

    name: ClassVar[str] = "proposes"
    propose: ClassVar[Callback | None] = propose


SELECTING = {
    "exact_topk": make_policy("exact_topk", **OPTIONS),
    "per_query_head": TopKPerQueryHead(**OPTIONS),
    "streaming_llm": make_policy("streaming_llm", budget_tokens=64, dense_layers=0),
    "hard_kv": make_policy("hard_kv", inner="exact_topk", top_p=0.8, **OPTIONS),
    "proposes": Proposes(**OPTIONS),
}


@pytest.mark.parametrize(("isa", "dtype", "name"), combinations(ISAS, DTYPES, SELECTING))
def test_heads_select_among_their_own_tokens(isa, dtype, name, pool):
    """Those that have at most dense_tokens attend to all of them, beside others that select."""
    policy = SELECTING[name]
    rng = new_rng()
    pages, seqs, kv_lens, queries = make_step(rng, dtype)
    attention = pages.attention(pool, policy, isa)
    attention.start_probe(1.0, seed=1)
    per_unit = 1 if policy.per_query_head else GROUP_SIZE
    num_units = NUM_QO_HEADS // per_unit
    kept, compared = np.zeros((2, NUM_LAYERS, NUM_QO_HEADS))
    for layer in range(NUM_LAYERS):
        out, lse = attend(attention, seqs, kv_lens, queries, layer)
        selections = attention.last_selection()
        for row, (seq, kv_len) in enumerate(zip(seqs, kv_lens, strict=True)):
            selection = selections[row * num_units : (row + 1) * num_units]
            _, _, weights = pages.expected(seq, layer, queries[row], kv_len)
            for unit, tokens in enumerate(selection):
                heads = slice(unit * per_unit, (unit + 1) * per_unit)
                check_selection(policy, tokens, np.sum(weights[heads], 0), dtype)
                if tokens:
                    kept[layer, heads] += [of_head[tokens].sum() for of_head in weights[heads]]
                    compared[layer, heads] += 1
            o, expected_lse, _ = pages.expected(seq, layer, queries[row], kv_len, selection)
            assert relative_error(out[row], o) < TOLERANCE[dtype], (layer, row)
            np.testing.assert_allclose(lse[row], expected_lse, atol=2e-4)
    counts, sums = attention.probed()
    assert counts.repeat(GROUP_SIZE, axis=1).tolist() == compared.tolist()
    expected_sums = kept.reshape(NUM_LAYERS, NUM_KV_HEADS, GROUP_SIZE).mean(2)
    np.testing.assert_allclose(sums, expected_sums, atol=5e-3)


def check_selection(
    policy: Policy, tokens: list[int], importance: np.ndarray, dtype: torch.dtype
) -> None:
    """`importance`: of all the unit's tokens, by float64; ties may fall to another token."""
    n, sinks, recent = len(importance), policy.sink_tokens, policy.recent_tokens
    if n <= policy.dense_tokens:
        assert tokens == []
        return
    assert tokens[:sinks] == list(range(sinks))
    assert tokens[-recent:] == list(range(n - recent, n))
    assert sorted(set(tokens)) == tokens
    if policy.propose is not None:
        assert len(tokens) == sinks + recent
        return
    between = np.sort(importance[sinks : n - recent])[::-1]
    chosen = len(tokens) - sinks - recent
    if policy.selection_top_p == 1:
        assert len(tokens) == policy.budget_tokens
    else:
        window = importance.sum() - between.sum()
        wanted = policy.selection_top_p * GROUP_SIZE - window
        fewest = int(np.searchsorted(between.cumsum(), wanted) + 1) if wanted > 0 else 0
        assert abs(chosen - min(fewest, policy.budget_tokens - sinks - recent)) <= 1
    best = between[:chosen].sum()
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    assert importance[tokens[sinks : len(tokens) - recent]].sum() >= best - tolerance


def test_counts_are_of_what_heads_have(pool):
    pages, seqs, kv_lens, queries = make_step(new_rng(), torch.float32)
    attention = pages.attention(pool, SELECTING["exact_topk"])
    attention.start_profile()
    attend(attention, seqs, kv_lens, queries, 0)
    counted = attention.profile()
    tokens = np.array(kv_lens)[:, None, None] - [STARTS, STARTS, OTHER_STARTS]
    is_longer = tokens > 64
    assert counted["scored_tokens"] == tokens[:, 0][is_longer[:, 0]].sum()
    assert counted["attended_tokens"] == np.minimum(tokens[:, 0], 64).sum()
    attention.start_probe(1.0, seed=1)
    attention.count_rows(attention.begin_step(seqs, kv_lens))
    assert attention.decoded == DecodedUnits(
        exact=int((~is_longer).sum()), selecting=int(is_longer.sum())
    )


def test_layers_are_timed_on_their_own_tokens(pool):
    pages, seqs, kv_lens, queries = make_step(new_rng(), torch.float32)
    attention = pages.attention(pool, SELECTING["exact_topk"])
    out = torch.empty_like(queries)
    measured = attention.time_layers(attention.begin_step(seqs, kv_lens), [queries] * 2, out)
    expected, _ = attend(attention, seqs, kv_lens, queries, NUM_LAYERS - 1)
    assert relative_error(out.double().numpy(), expected.reshape(out.shape)) < 1e-6
    tokens = np.array(kv_lens)[:, None, None] - [STARTS, STARTS, OTHER_STARTS]
    scored = np.where(tokens > 64, tokens, 0).sum(axis=(0, 2))
    assert [profile["scored_tokens"] for _, profile in measured] == scored.tolist()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rope_append_writes_the_newest_slot_of_each_head(isa, dtype, pool):
    """Across a page's end, in a head that has nothing but the new tokens, too."""
    rng = new_rng()
    pages = ApartPages(dtype)
    starts = np.array([[0, 0, 0], [0, 32, 16]])
    first = pages.add(rng, 32, starts, room=2)
    second = pages.add(rng, 31, np.zeros((2, 3), int), room=1)
    seqs, kv_lens = [first, second, first], [33, 32, 34]
    attention = pages.attention(pool, make_policy("full"), isa)
    qkv = random_queries(rng, 3, NUM_QO_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM, dtype)
    angles = rng.uniform(0, 2 * np.pi, (3, HEAD_DIM))
    cos, sin = (torch.from_numpy(f(angles)).to(dtype) for f in (np.cos, np.sin))
    given = qkv.double().numpy().reshape(3, -1, HEAD_DIM)
    before = [pages.all_rows(seq) for seq in (first, second)]
    attention.rope_append(1, attention.begin_step(seqs, kv_lens), qkv, (cos, sin))
    for row, (seq, kv_len) in enumerate(zip(seqs, kv_lens, strict=True)):
        for head in range(NUM_KV_HEADS):
            key, value = pages.row(seq, 1, head, kv_len - 1).double().numpy()
            of_row = [x[row].double().numpy() for x in (cos, sin)]
            rotated = reference.rope(given[row, NUM_QO_HEADS + head], *of_row)
            assert relative_error(key, rotated) < TOLERANCE[dtype]
            assert (value == given[row, NUM_QO_HEADS + NUM_KV_HEADS + head]).all()
            pages.row(seq, 1, head, kv_len - 1)[:] = float("nan")
    for seq, rows in zip((first, second), before, strict=True):
        assert torch.equal(rows.isnan(), pages.all_rows(seq).isnan()), "nothing else is written"


@pytest.mark.parametrize("name", ["full", "exact_topk", "streaming_llm"])
def test_nan_names_its_head(name, pool):
    policy = make_policy("full") if name == "full" else SELECTING[name]
    pages, seqs, kv_lens, queries = make_step(new_rng(), torch.float32)
    attention = pages.attention(pool, policy)
    row = pages.row(seqs[0], 1, 1, KV_LEN - 1)
    kept = row.clone()
    row[1, 3] = float("inf")  # the newest value
    with pytest.raises(RuntimeError, match="layer 1, query row 1, KV head 1"):
        attend(attention, seqs, kv_lens, queries)
    row[:] = kept
    attend(attention, seqs, kv_lens, queries)
    if name == "streaming_llm":  # which does not look at it
        pages.row(seqs[0], 1, 0, 320 + 100)[0] = float("nan")
        attend(attention, seqs, kv_lens, queries)
        return
    pages.row(seqs[0], 1, 0, 320 + 7)[0, 0] = float("nan")
    with pytest.raises(RuntimeError, match=r"layer 1, query row [01], KV head 0"):
        attend(attention, seqs, kv_lens, queries)


def test_rows_before_a_head_begins_are_refused(pool):
    pages = ApartPages(torch.float32)
    seq = pages.add(new_rng(), KV_LEN, STARTS)
    attention = pages.attention(pool, make_policy("full"))
    for kv_len in (640, 657):
        with pytest.raises(ValueError, match=rf"sequence 0 must be in \[641, 656\].*got {kv_len}"):
            attention.begin_step([seq], [kv_len])


def test_selections_of_the_caller_are_refused(pool):
    pages = ApartPages(torch.float32)
    seq = pages.add(new_rng(), KV_LEN, STARTS)
    attention = pages.attention(pool, make_policy("full"))
    step, x = attention.begin_step([seq], [KV_LEN]), torch.zeros(1, 1)
    with pytest.raises(ValueError, match="pages of their own"):
        attend_csr_rows(attention, 0, step, x, x, np.zeros((2, 1), np.int32))


@pytest.mark.parametrize("name", ["quest", "lfps", "sketch", "lychee_cluster", "tidal_decode"])
def test_policies_that_number_tokens_across_heads_are_refused(name, pool):
    pages = ApartPages(torch.float32)
    with pytest.raises(ValueError, match=rf"policy {name} .*exact_topk"):
        pages.attention(pool, make_policy(name))
