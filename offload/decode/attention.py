"""Decode attention over the host KV store under a policy, on the worker pool.

One `DecodeAttention` serves one model. A decode step is begun once (`begin_step`: which sequences,
how long), then each layer attends with its queries.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cpu_ops._native import StepRows
from cpu_ops.attention import NativeAttention
from cpu_ops.native import NO_ARRAYS
from cpu_ops.step_rows import ATTENDS_TO_ALL, DecodeStep
from cpu_ops.worker_pool import WorkerPool
from offload.decode.top_p_controller import TopPController
from offload.kv.store import KVStore
from offload.kv_compression.base import KVCompression
from offload.prefill.forward import OnQueries
from offload.selection.policy import DENSE, NO_MEMBER, RETRIEVE, REUSE, SELECT, Policy
from offload.selection.prefill_build import PrefillBuild
from offload.selection.state import PolicyStates
from offload.selection.unit_roles import check_roles


@dataclass
class DecodedUnits:
    """How many units, each a KV head of a layer for a token of a sequence, attended how.

    Attributes:
        exact: to all tokens.
        selecting: to a selection, on the CPU, which can look at all keys.
        gathered: to a selection whose rows a device fetched.
    """

    exact: int = 0
    selecting: int = 0
    gathered: int = 0


MakeCompression = Callable[["DecodeAttention", WorkerPool], KVCompression[Any] | None]


class DecodeAttention(NativeAttention):
    """Attention of decode steps: dense, or sparse under `policy`.

    Args:
        policy: what to attend to.
        store: the host KV store; its layout, dtype and head_dim are used.
        num_qo_heads, sm_scale, softcap, windows, sinks, isa: as `NativeAttention` takes them.

    Attributes:
        on_attended: called after each `attend` with (layer_idx, step, query, out); for benches.
        left_to_device: what steps leave to a device: sink tokens, recent tokens, and heads
            [num_layers, num_kv_heads]; None: nothing.
        ahead_layers: in which the policy chooses before the step's own token is there, by a query
            that was predicted.
        roles: the policy's, of each [layer, unit]; see `Policy.roles`.
        estimate_clusters: the policy's; 0 where KV heads have pages of their own.
        has_state: whether the policy remembers anything of a sequence.
        top_p_controller: of the mean of tokens that are attended to; None: the policy names none.
        compression: of `make_compression`, wants queries to condense sequences by; None: none of
            them has a bound.
        decoded: units of decode steps so far, as `count_rows` is told of them.

    Raises:
        ValueError: shapes the kernels do not take, a policy that does not fit the model, or one
            that numbers tokens across KV heads over a store with `per_head_pages`.
    """

    on_attended: Callable[[int, DecodeStep, Tensor, Tensor], None] | None = None
    left_to_device: tuple[int, int, npt.NDArray[np.bool_]] | None = None
    ahead_layers: frozenset[int] = frozenset()
    roles: npt.NDArray[np.uint8] | None = None

    def __init__(
        self,
        policy: Policy,
        store: KVStore,
        *,
        num_qo_heads: int | Sequence[int],
        pool: WorkerPool,
        sm_scale: float | Sequence[float] | None = None,
        softcap: float | Sequence[float] = 0.0,
        windows: int | Sequence[int] = 0,
        sinks: Sequence[Tensor | None] | None = None,
        isa: str | None = None,
        make_compression: MakeCompression = lambda attention, pool: None,
    ) -> None:
        heads = [*map(store.heads_of, range(store.num_layers))]
        super().__init__(
            pool,
            num_layers=store.num_layers,
            num_qo_heads=num_qo_heads,
            num_kv_heads=[num_kv_heads for num_kv_heads, _ in heads],
            head_dim=[head_dim for _, head_dim in heads],
            page_tokens=store.page_tokens,
            dtype=store.dtype,
            int8_rows=store.format.is_int8,
            keys_only=store.format.keys_only,
            sm_scale=sm_scale,
            softcap=softcap,
            windows=windows,
            sinks=sinks,
            isa=isa,
        )
        for qo_heads, kv_heads, head_dim in set(self.layer_heads):
            policy.check_model(
                num_layers=store.num_layers,
                num_qo_heads=qo_heads,
                num_kv_heads=kv_heads,
                head_dim=head_dim,
            )
        num_qo_heads, num_kv_heads = self.num_qo_heads, self.num_kv_heads
        num_units = num_qo_heads if policy.selects and policy.per_query_head else num_kv_heads
        if store.per_head_pages and (what := shares_positions(policy, store.num_layers, num_units)):
            raise ValueError(
                f"policy {policy.name} {what}, and KV heads of this store have different tokens;"
                " give one that selects by the keys alone, as exact_topk does"
            )
        self.policy = policy
        self.store = store
        if policy.selects:
            if not store.per_head_pages:
                self.estimate_clusters = policy.estimate_clusters
            self.roles = roles = check_roles(policy, policy.roles(store.num_layers, num_units))
            if roles is None:
                sparse = np.arange(store.num_layers) >= policy.dense_layers
            else:
                sparse = (roles != DENSE).any(axis=1)
            if any(self.windows):
                sparse &= np.equal(self.windows, 0)
            self._prepares = any(member.prepare is not None for member in policy.members)
            self.sparse_layers = sparse
            self.budget_tokens = policy.budget_tokens
            self.dense_tokens = policy.dense_tokens
            self.window = (policy.sink_tokens, policy.recent_tokens)
            members = policy.unit_members(store.num_layers, num_units)
            self.native.set_policy(
                policy.budget_tokens,
                policy.dense_tokens,
                *self.window,
                policy.selection_top_p,
                policy.per_query_head,
                [native_member(member) for member in policy.members],
                [] if roles is None else roles.reshape(-1).tolist(),
                policy.shares_selection,
                *([], []) if members is None else native_units(members),
                self.estimate_clusters,
            )
        self.states = PolicyStates(
            policy,
            store,
            layer_heads=self.layer_heads,
            sm_scales=self.sm_scales,
            pool=pool,
            layers=self._selecting_layers(),
            estimate_clusters=self.estimate_clusters,
            estimating=self._estimating_layers(),
        )
        self.has_state = self.states.has_arrays
        self.top_p_controller = None
        if policy.selection_mean_tokens is not None:
            group_size = 1 if policy.per_query_head else num_qo_heads // num_kv_heads
            self.top_p_controller = TopPController(
                self.native, policy.selection_top_p, policy.selection_mean_tokens, group_size
            )
        self._budgets: Mapping[int, int] = {}
        self.decoded = DecodedUnits()
        self._selecting_heads = self._gathered_heads = 0
        self._count_heads(None, None)
        self._observes_queries = policy.selects and policy.state.observed_queries > 0
        self.compression = make_compression(self, pool)

    def leave_to_device(
        self,
        window: tuple[int, int],
        heads: npt.NDArray[np.bool_],
        gathered: npt.NDArray[np.bool_],
        hot: npt.NDArray[np.bool_],
    ) -> None:
        """A device attends to a window of sink and recent tokens, and to all of some heads.

        In layers in which it selects for no other heads the policy keeps nothing of sequences.

        Args:
            heads, gathered: [num_layers, num_kv_heads]; those of which a device fetches a selection
                are in both.
            hot: likewise, those for which the policy chooses a layer ahead.
        """
        self.left_to_device = (*window, heads)
        self.ahead_layers = frozenset(np.flatnonzero(hot.any(axis=1)).tolist())
        self.states.serve(self._selecting_layers(heads), self._estimating_layers(heads))
        self._count_heads(heads, gathered)

    def expect_on_device(self, heads: npt.NDArray[np.bool_]) -> None:
        """Steps to come leave `heads` [num_layers, num_kv_heads] to a device."""
        self.states.expect(self._selecting_layers(heads), self._estimating_layers(heads))

    def _selecting_layers(self, elsewhere: npt.NDArray[np.bool_] | None = None) -> frozenset[int]:
        """Layers with heads, but those of `elsewhere` [num_layers, num_kv_heads], in which
        the policy selects."""
        if not self.policy.selects:
            return frozenset()
        selects = self.sparse_layers[:, None]
        if self.roles is not None:
            selects = (self.roles == RETRIEVE) | (self.roles == SELECT)
        if elsewhere is not None:
            units = selects.shape[1] // self.num_kv_heads or 1
            selects = selects & ~np.repeat(elsewhere, units, axis=1)
        return frozenset(np.flatnonzero(selects.any(axis=1)).tolist())

    def _estimating_layers(self, elsewhere: npt.NDArray[np.bool_] | None = None) -> frozenset[int]:
        """Layers with heads, but those of `elsewhere`, that attend to a selection and whose rest is
        estimated: by the CPU, or of hot rows by the GPU."""
        if not self.estimate_clusters:
            return frozenset()
        selecting = self.selecting_heads
        if elsewhere is not None:
            selecting = selecting & ~elsewhere
        return frozenset(np.flatnonzero(selecting.any(axis=1)).tolist())

    def count_rows(self, step: DecodeStep) -> None:
        """A step was decoded; counts its units while `is_probed`."""
        if not self.is_probed:
            return
        num_units = len(step.seqs) * self.num_layers * self.num_kv_heads
        if self.store.per_head_pages:
            starts = np.stack([self.store.starts(seq) for seq in step.seqs])
            is_longer = step.kv_lens[:, None, None] - starts > self.dense_tokens
            selecting, gathered = int((is_longer & self.selecting_heads).sum()), 0
        else:
            pairs = zip(step.seqs, step.kv_lens.tolist(), strict=True)
            rows = sum(not self.attends_to_all(seq, kv_len) for seq, kv_len in pairs)
            selecting, gathered = rows * self._selecting_heads, rows * self._gathered_heads
        self.decoded.selecting += selecting
        self.decoded.gathered += gathered
        self.decoded.exact += num_units - selecting - gathered

    def _count_heads(
        self, elsewhere: npt.NDArray[np.bool_] | None, gathered: npt.NDArray[np.bool_] | None
    ) -> None:
        selecting = self.selecting_heads
        if elsewhere is not None:
            selecting = selecting & ~elsewhere
        self._selecting_heads = int(selecting.sum())
        self._gathered_heads = 0 if gathered is None else int(gathered.sum())

    @property
    def selecting_heads(self) -> npt.NDArray[np.bool_]:
        """[num_layers, num_kv_heads], where rows longer than `dense_tokens` attend to a selection,
        if the CPU attends."""
        if self.roles is None:
            return np.repeat(self.sparse_layers[:, None], self.num_kv_heads, axis=1)
        selecting = (self.roles == SELECT) | (self.roles == REUSE)
        heads: npt.NDArray[np.bool_]
        heads = selecting.reshape(len(selecting), self.num_kv_heads, -1).any(axis=2)
        return heads

    @property
    def budgets(self) -> Mapping[int, int]:
        """Sequences whose KV heads attend to fewer tokens than the policy's budget, or to all
        (ATTENDS_TO_ALL), as `check_budget` allows it. The policy keeps nothing of those that attend
        to all."""
        return self._budgets

    @budgets.setter
    def budgets(self, budgets: Mapping[int, int]) -> None:
        self._budgets = budgets
        self.states.unasked = {seq for seq, n in budgets.items() if n == ATTENDS_TO_ALL}

    def attends_to_all(self, seq: int, kv_len: int) -> bool:
        """Whether a step attends to all of the `kv_len` tokens that `seq` has then."""
        return kv_len <= self.dense_tokens or self.budgets.get(seq) == ATTENDS_TO_ALL

    def check_budget(self, exact: bool, budget_tokens: int | None) -> None:
        """Refuse what steps of a sequence cannot attend to: all tokens, or so many.

        Raises:
            ValueError: steps where a device attends, too, a budget above the policy's or below its
                window, or one where nothing is selected.
        """
        policy, is_asked = self.policy, exact or budget_tokens is not None
        if is_asked and policy.selects and self.left_to_device is not None:
            name = "exact" if exact else "budget_tokens"
            raise ValueError(
                f"{name} of a request needs a model whose attention is all on the CPU: a GPU "
                "attends alike for all; give policy or budget_tokens when the model is loaded"
            )
        if budget_tokens is None:
            return
        if not policy.selects:
            raise ValueError(f"budget_tokens of a request: policy {policy.name!r} attends to all")
        least, most = policy.sink_tokens + policy.recent_tokens, policy.budget_tokens
        if not least <= budget_tokens <= most:
            raise ValueError(
                f"budget_tokens of a request must be in [{least}, {most}] (sinks and recent window,"
                f" and the model's budget), got {budget_tokens}; exact=True attends to all"
            )

    def build_states(self, seqs: Sequence[int], kv_lens: Sequence[int]) -> float:
        """Build what the policy keeps of sequences that will have `kv_lens` tokens.

        `begin_step` does it too, where it was not done before. Returns the seconds it took.
        """
        start = time.perf_counter()
        for seq, kv_len in zip(seqs, kv_lens, strict=True):
            if self.has_state and not self.attends_to_all(seq, kv_len):
                self.states.ensure(seq, kv_len)
        return time.perf_counter() - start

    def builds_in_prefill(self, device: torch.device) -> bool:
        """Whether a prefill on `device` builds the policy's state."""
        return self.states.builds_on_device and device.type == "cuda"

    def prefill_build(self, seqs: Sequence[int], kv_lens: Sequence[int]) -> PrefillBuild | None:
        """What builds the policy's state during a prefill on a device; None if there is none.

        Args:
            kv_lens: tokens that each of `seqs` will have after it. Those that will still
                attend to everything with one more are not built for, nor those that keep arrays.
        """
        if not self.states.builds_on_device:
            return None
        lens = zip(seqs, kv_lens, strict=True)
        built = {
            seq: n
            for seq, n in lens
            if n >= self.dense_tokens and self.states.arrays_of(seq) is None
        }
        return PrefillBuild(self.states, built) if built else None

    def begin_step(self, seqs: Sequence[int], kv_lens: Sequence[int]) -> DecodeStep:
        """Fix the rows of a step, after `store.reserve` and before the first layer writes.

        Args:
            seqs: store handle of each row.
            kv_lens: tokens each row attends to, the row's own token included.
        """
        if len(seqs) != len(kv_lens) or not seqs:
            raise ValueError(f"expected one kv_len per row, got {len(seqs)} and {len(kv_lens)}")
        tables = [self.store.page_table(seq) for seq in seqs]
        starts = [self.store.starts(seq) for seq in seqs] if self.store.per_head_pages else []
        least = [1] * len(seqs)
        if starts:
            least = [1 + int(of_seq.max()) for of_seq in starts]
        lens = np.asarray(kv_lens, np.int64)
        for seq, table, shortest, kv_len in zip(seqs, tables, least, kv_lens, strict=True):
            capacity = table.shape[1] * self.store.page_tokens
            if not shortest <= kv_len <= capacity:
                raise ValueError(
                    f"kv_len of sequence {seq} must be in [{shortest}, {capacity}] (its pages,"
                    f" and a token of each head), got {kv_len}"
                )
        arrays = text_marks = NO_ARRAYS
        kept: list[Any] = [*tables, *starts]
        pairs = [*zip(seqs, kv_lens, strict=True)]
        asking = [pair for pair in pairs if not self.attends_to_all(*pair)]
        if self.has_state:
            for seq, kv_len in pairs:
                if kv_len > self.dense_tokens and self.attends_to_all(seq, kv_len):
                    self.states.rebuild(seq)  # it is not told of the tokens that come now
        if self.has_state and asking:
            longest = dict(sorted(pairs))
            for seq, kv_len in sorted(asking):  # build and grow before any address is taken
                self.states.ensure(seq, kv_len)
            states = {seq: self.states.ensure(seq, longest[seq]) for seq, _ in asking}
            kept += states.values()
            tables_of = {seq: state.pointers.ctypes.data for seq, state in states.items()}
            arrays = np.array([tables_of.get(seq, 0) for seq in seqs], np.int64)
            if self.policy.state.reads_text:
                kept += [self.states.marks_of(seq) for seq in longest]
                text_marks = np.array(
                    [self.states.marks_address(seq, longest[seq]) for seq in seqs], np.int64
                )
        page_tables = np.array([table.ctypes.data for table in tables], np.int64)
        strides = np.array([table.size // self.num_layers for table in tables], np.int64)
        first_slots = np.array([of_seq.ctypes.data for of_seq in starts], np.int64)
        budgets = self._budgets_of(seqs)
        of_rows = page_tables, strides, lens, arrays, text_marks, first_slots, budgets
        return DecodeStep(
            seqs=tuple(seqs),
            kv_lens=lens,
            positions=lens - 1,
            page_tables=page_tables,
            table_strides=strides,
            starts=first_slots,
            native=StepRows(*of_rows),
            kept=tuple(kept),
            in_turns=self.has_state and len(set(seqs)) < len(seqs),
            keeps_queries=self.states.records_rows
            or (self._observes_queries and len(asking) < len(pairs)),
            prepared=set(),
        )

    def _budgets_of(self, seqs: Sequence[int]) -> npt.NDArray[np.int64]:
        if not any(seq in self.budgets for seq in seqs):
            return NO_ARRAYS
        return np.array([self.budgets.get(seq, self.budget_tokens) for seq in seqs], np.int64)

    def attend(
        self,
        layer_idx: int,
        step: DecodeStep,
        query: Tensor,
        out: Tensor,
        lse: Tensor | None = None,
    ) -> None:
        """As `NativeAttention.attend`; the policy gets the queries it wants to see."""
        super().attend(layer_idx, step, query, out, lse)
        if step.keeps_queries and self.sparse_layers[layer_idx]:
            self.record_step_queries(step, {layer_idx: query})
        if self.compression is not None:
            self.compression.record_step(
                step, layer_idx, query[:, : self.query_features(layer_idx)]
            )
        if self.on_attended is not None:
            self.on_attended(layer_idx, step, query, out)

    @property
    def on_prefill_queries(self) -> OnQueries | None:
        """What `prefill` shows its queries to: None unless somebody observes queries."""
        condenses = self.compression is not None and self.compression.observes_queries
        wanted = self._observes_queries or condenses
        return self.record_queries if wanted else None

    def record_queries(self, seq: int, layer_idx: int, queries: Tensor, kv_len: int) -> None:
        """Keep the last queries of a layer for the policy's `build`, and to condense by.

        Args:
            queries: [num_qo_heads, n, head_dim], rotated, of the last n of `kv_len` tokens.
        """
        if self._observes_queries:
            self.states.record_queries(seq, layer_idx, queries, kv_len)
        if self.compression is not None:
            self.compression.record_queries(seq, layer_idx, queries, kv_len)

    def record_step_queries(self, step: DecodeStep, queries: Mapping[int, Tensor]) -> None:
        """Keep the queries of rows that attended densely, for the policy's `build`, and of drafts.

        Args:
            queries: of each sparse layer [n, >= num_qo_heads * head_dim], rotated.
        """
        kv_lens = step.kv_lens.tolist()
        for layer_idx, query in queries.items():
            query = query[:, : self.query_features(layer_idx)]
            heads = query.view(len(query), self.layer_heads[layer_idx][0], -1)
            for row, (seq, kv_len) in enumerate(zip(step.seqs, kv_lens, strict=True)):
                if self._observes_queries and self.attends_to_all(seq, kv_len):
                    self.states.record_queries(seq, layer_idx, heads[row][:, None], kv_len)
                if self.states.records_rows:
                    self.states.record_row(seq, layer_idx, query[row])


def shares_positions(policy: Policy, num_layers: int, num_units: int) -> str:
    """What a policy does that heads with different tokens cannot have, or "": arrays and text marks
    are by positions in the sequence, and what a unit hands to another is by the first one's tokens.
    """
    if not policy.selects:
        return ""
    if policy.state.has_arrays:
        return "keeps arrays of a sequence's tokens"
    if policy.state.reads_text:
        return "reads the text of tokens"
    roles = policy.roles(num_layers, num_units)
    hands_down = roles is not None and bool(np.isin(roles, (RETRIEVE, REUSE)).any())
    return "hands selections from unit to unit" if hands_down or policy.shares_selection else ""


def needs_alike_layers(policy: Policy, num_layers: int, num_units: int) -> str:
    """What a policy does that layers whose heads differ cannot have yet, or "": what is
    counted by units is [layer, unit]."""
    if not policy.selects:
        return ""
    if policy.estimate_clusters:
        return "estimates the rest of a selection"
    if policy.selection_mean_tokens is not None:
        return "adapts to a mean of tokens"
    of_units = policy.roles, policy.unit_members
    by_unit = any(of(num_layers, num_units) is not None for of in of_units)
    return "tells the heads of a layer apart" if by_unit else ""


def native_member(policy: Policy) -> tuple[bool, list[int], list[float], int, int]:
    """As `set_policy` takes it: scans keys, addresses of callbacks, numbers, how many arrays, and
    `observes_every`."""
    callbacks = (policy.prepare, policy.propose, policy.select, policy.observe, policy.append)
    numbers, state = policy.number_layout, policy.state.layout
    return (
        policy.scans_keys,
        [0 if c is None else c.address for c in callbacks],
        [] if numbers is None else numbers.values(policy),
        0 if state is None else len(state),
        policy.observes_every,
    )


def native_units(members: npt.NDArray[np.uint8]) -> tuple[list[int], list[int]]:
    """Member of each [layer, unit], and the unit's number among the member's units of the layer."""
    numbers = np.zeros(members.shape, np.int32)
    for member in np.unique(members):
        is_its = members == member
        numbers[is_its] = (is_its.cumsum(axis=1) - 1)[is_its]
    asked = np.where(members == NO_MEMBER, 0, members)  # never read
    return asked.reshape(-1).tolist(), numbers.reshape(-1).tolist()
