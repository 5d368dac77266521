"""How long a decode step will take, by a placement of heads and what was measured of a machine.

A layer on a GPU, with what goes on beside each other in one column:

    linear layers, norms, rotation      │ fetching of rows that are known before the query
    ────────────────────────────────────┼──────────────────────────────────────────────────
    attention over GPU pages, windows   │ the rest of the fetching │ request, CPU attention,
    attention over fetched rows         │                          │ reply
    ────────────────────────────────────┴──────────────────────────────────────────────────
    merge

so a layer takes linear + max(GPU's side, reply) + merge; a layer without heads on the CPU has no
reply. A layer with hot rows also makes the next layer's query, by which the CPU is asked a whole
layer before the GPU needs the answer: the layer takes the longer of what the GPU does in it and of
what the CPU does for one such request. Work that runs at the same time slows each other down: how
much longer a layer takes with rows on their way, or during a top-k, was measured as a whole
(`measuring.machine.layers`). A step is its layers, the last projection, choosing the token, and
what a step costs without its kernels. Without a GPU it is the same, and nothing overlaps.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from offload.decode.gpu.placement import (
    HOT_BUDGETS,
    BoolArray,
    HeadPlacement,
    Place,
    UInt8Array,
    awaited_heads,
)
from offload.models.shape import layer_elements
from offload.planning.profile import DeviceProfile, MachineProfile, shape_key
from offload.planning.workload import Workload, policy_key
from offload.selection.policy import DENSE, RETRIEVE, REUSE, SELECT

# Of a worker's second-level cache that reading ahead fills (cache_warmer.cpp).
_AHEAD_BYTES_PER_WORKER = 2**20

# Linear layers of several rows, which are cuBLAS's, than of one: an 8B layer of eight takes 190 us
# instead of 160 on an H100.
_ROWS_SLOWER = 1.19
# Of a choice, what was not hot before. SmolLM2's 32K version, lychee_cluster, budget 1,024, 14th to
# 37th step: 0.05 behind 6,400 tokens of docstrings, 0.10 behind 20,000.
_MISSING_SHARE = 1 / 8
# What finding rows takes beside reading codes, top-k and attention, of a layer: 112 us in all of an
# 8B shape at 128K on an H200, where these are 65.
_FIND_US = 26.0


@dataclass(frozen=True)
class LayerTime:
    """Microseconds of one layer.

    Attributes:
        kind: what is attended where, such as "GPU + gather + CPU".
        linear: linear layers, norms and rotation; with hot rows a predicted query, too.
        gpu: attention on the GPU over pages, fetched rows and windows.
        gather: what fetching beside a layer adds to it, attention to the rows not counted.
        reply: from the request to the CPU's answer; 0 where the GPU does not ask. With hot rows all
            that the CPU does for a request; the GPU does not wait if a layer takes longer.
        exposed: what the GPU waits for the slower of gather and reply beyond its own attention.
        merge: of the parts.
    """

    kind: str
    linear: float
    gpu: float
    gather: float
    reply: float
    exposed: float
    merge: float

    @property
    def total(self) -> float:
        return self.linear + self.gpu + self.exposed + self.merge


@dataclass(frozen=True)
class StepTime:
    """A predicted step, in microseconds.

    Attributes:
        layers: in order.
        last: the last projection and choosing the token.
        fixed: what a step costs without its kernels.
        batch_size: tokens of a step.
        assumed: what was not measured, and what stands for it.
    """

    layers: tuple[LayerTime, ...]
    last: float
    fixed: float
    batch_size: int
    assumed: tuple[str, ...] = ()

    @property
    def milliseconds(self) -> float:
        return (sum(layer.total for layer in self.layers) + self.last + self.fixed) / 1e3

    @property
    def tokens_per_second(self) -> float:
        return 1e3 * self.batch_size / self.milliseconds

    def breakdown(self) -> list[dict[str, Any]]:
        """A row per kind of layer, in the order of first appearance: sums over its layers, us."""
        rows: dict[str, dict[str, Any]] = {}
        for layer in self.layers:
            row = rows.setdefault(layer.kind, {"kind": layer.kind, "layers": 0, "total": 0.0})
            row["layers"] += 1
            for name in ("linear", "gpu", "gather", "reply", "exposed", "merge", "total"):
                row[name] = row.get(name, 0.0) + getattr(layer, name)
        return list(rows.values())


@dataclass
class _ReadBytes:
    """Bytes of host memory that one sequence's heads read of a layer, by how; `selected` by the
    policy's members."""

    dense: float = 0.0
    retrieved: float = 0.0
    certain: float = 0.0
    selected: dict[int, float] = field(default_factory=dict)


class StepModel:
    """Predicts steps of one workload on one machine.

    Args:
        on_gpu: the linear layers are there; else all is on the CPU.

    Attributes:
        linear_us: of a layer's linear layers.

    Raises:
        ValueError: a GPU is asked for, and the profile has none.
    """

    def __init__(self, profile: MachineProfile, work: Workload, *, on_gpu: bool) -> None:
        if on_gpu and profile.device is None:
            raise ValueError(
                "the machine profile has no GPU; measure it where there is one, or plan for "
                "--device cpu"
            )
        self.profile, self.work = profile, work
        self.roles = work.roles()
        self._device = profile.device if on_gpu else None
        self._assumed: list[str] = []
        # Most layers are alike, and so are most placements that are compared.
        self._top_k_times: dict[tuple[bytes, bytes], float] = {}
        self._layer_times: dict[tuple[bytes, bytes, bytes, float, bool, int], LayerTime] = {}
        if work.weight_share < 1.0:
            self._assume(
                f"packed weights: {work.weight_share:.0%} of the time of those in "
                f"{str(work.dtype).removeprefix('torch.')}, as of their bytes"
            )
        if self._device is not None:
            self.linear_us = self._layer_linear_us(self._device)
            if not self._device.gather_measured:
                self._assume("fetching rows: a PCIe copy of as many bytes stands for it")
        else:
            self.linear_us = self._host_us(
                profile.layer_linear_us, layer_elements(work.shape), "linear layers"
            )
        if profile.measured_threads is not None:
            self._assume(
                f"CPU: measured with num_threads={profile.measured_threads}, not "
                f"{profile.num_threads}; fewer take longer in proportion, more as long, and "
                "--remeasure measures them"
            )
        heads = (work.shape.num_qo_heads, work.shape.num_kv_heads, work.shape.head_dim)
        if heads != profile.attention_heads:
            self._assume(
                "CPU attention: measured with (query heads, KV heads, head_dim) = "
                f"{profile.attention_heads}, this model has {heads}"
            )

    def step(self, placement: HeadPlacement) -> StepTime:
        """Time of a step with this placement; all on the CPU means wholly, if there is no GPU."""
        waiting, layers = 0.0, []
        shares = self.work.policy.shares_selection
        awaited = awaited_heads(self.roles, placement.places, shares_selection=shares)
        publishing = (awaited & (placement.places == Place.GPU)).any(axis=1)
        for layer_idx, places in enumerate(placement.places):
            publishes = bool(publishing[layer_idx])
            layers.append(self.layer(layer_idx, places, top_k_us=waiting, publishes=publishes))
            waiting = self.top_k_us(layer_idx, places) if publishes else 0.0
        if self._device is None:
            vocabulary = self.work.shape.vocab_size * self.work.shape.hidden_size
            last = self._host_us(self.profile.lm_head_us, vocabulary, "the last projection")
            fixed = self.profile.step_us
        else:
            last = self._lm_head_us(self._device) + self._device.sampling_us
            is_burst = bool((placement.places == Place.GPU).all())
            fixed = self._device.burst_step_us if is_burst else self._device.step_us
        return StepTime(tuple(layers), last, fixed, self.work.batch_size, tuple(self._assumed))

    def layer(
        self, layer_idx: int, places: UInt8Array, *, top_k_us: float = 0.0, publishes: bool = True
    ) -> LayerTime:
        """Time of one layer with its heads at `places` [num_kv_heads].

        Args:
            top_k_us: what the layer before publishes takes, beside the linear layers in between.
            publishes: whether somebody waits for what heads on the GPU retrieve.
        """
        roles, members = self.roles[layer_idx], self.work.unit_members[layer_idx]
        window = (self.work.shape.windows or (0,) * (layer_idx + 1))[layer_idx]
        key = (roles.tobytes(), members.tobytes(), places.tobytes(), top_k_us, publishes, window)
        if key not in self._layer_times:
            layer = (roles, members, places, top_k_us, publishes, window)
            self._layer_times[key] = self._layer(*layer)
        return self._layer_times[key]

    def _layer(
        self,
        roles: UInt8Array,
        members: UInt8Array,
        places: UInt8Array,
        top_k_us: float,
        publishes: bool,
        window_tokens: int,
    ) -> LayerTime:
        work = self.work
        # With codes on the GPU as without: what these save was not measured.
        on_cpu = (places == Place.CPU) | (places == Place.CODES)
        if self._device is None:
            attend = self.attend_us(roles, members)
            return LayerTime("CPU", self.linear_us, 0.0, 0.0, attend, attend, 0.0)
        device = self._device
        resident = roles[places == Place.GPU]
        publishes = publishes and self._publishes(resident)
        num_gathered = int((places == Place.GATHER).sum())
        num_on_cpu = int(on_cpu.sum())
        if (places == Place.FOUND).any():
            return self._found_layer(device, roles, places == Place.FOUND, publishes=publishes)
        hot = places == Place.HOT
        if hot.any():
            return self._hot_layer(device, roles, members, hot, publishes=publishes)
        window = device.window_us if num_on_cpu else 0.0
        gpu = (
            self._resident_us(device, resident, publishes=publishes, window=window_tokens) + window
        )
        gather = slowed = merge = reply = 0.0
        if num_on_cpu:
            merge = device.merge_us
        fetched = work.batch_size * num_gathered * work.chosen_tokens * work.pair_bytes
        attend_fetched = device.attention.us(fetched)
        if num_gathered:
            gather, attend_fetched, slowed = self._gather_us(device, fetched)
            if top_k_us:  # rows that the layer before chose are on their way only since then
                late = top_k_us + device.gather.us(fetched) - self.linear_us
                gather = max(gather, late)
        if num_on_cpu:
            # The request waits for what the CPU's heads reuse.
            reply = max(0.0, top_k_us - self.linear_us) + device.round_trip_us
            reply += self._reply_us(roles[on_cpu], members[on_cpu])
        # The link is done when all rows are there, whatever else the GPU did meanwhile.
        gpu += attend_fetched
        side = max(gpu + slowed, window + attend_fetched + gather, reply + slowed)
        # A layer takes longer with the top-k of its heads beside it.
        exposed = (
            side - gpu + device.top_k_beside.us(self._num_scores(resident) if publishes else 0)
        )
        counts = {"GPU": len(resident), "gather": num_gathered, "CPU": num_on_cpu}
        kind = " + ".join(name for name, count in counts.items() if count)
        return LayerTime(kind, self.linear_us, gpu, gather, reply, exposed, merge)

    def _hot_layer(
        self,
        device: DeviceProfile,
        roles: UInt8Array,
        members: UInt8Array,
        hot: BoolArray,
        *,
        publishes: bool,
    ) -> LayerTime:
        """Time of a layer with hot heads, whose others are on the GPU."""
        work, num_hot = self.work, int(hot.sum())
        resident = roles[~hot]
        linear = self.linear_us
        if (roles[hot] != REUSE).any():
            linear += self._matrices_us(device, work.shape.query_width)
        rows = min(work.kv_len, HOT_BUDGETS * work.policy.budget_tokens)
        gpu = self._resident_us(device, resident, publishes=publishes)
        gpu += device.attention.us(work.batch_size * num_hot * rows * work.pair_bytes)
        chosen = work.batch_size * num_hot * work.chosen_tokens * work.pair_bytes
        gather = sum(self._gather_us(device, _MISSING_SHARE * chosen)[:2])
        reply = device.round_trip_us + self._choose_us(roles[hot], members[hot])
        scores = self._num_scores(resident) if publishes else 0
        exposed = gather + device.top_k_beside.us(scores)
        exposed = max(exposed, reply - linear - gpu)
        kind = "GPU + hot rows" if len(resident) else "hot rows"
        return LayerTime(kind, linear, gpu, gather, reply, exposed, 0.0)

    def _found_layer(
        self, device: DeviceProfile, roles: UInt8Array, found: BoolArray, *, publishes: bool
    ) -> LayerTime:
        """Time of a layer whose hot rows are found by codes: nothing runs beside anything."""
        work, num_found = self.work, int(found.sum())
        codes = work.policy.device.codes(work.shape.num_layers, work.shape.num_kv_heads)
        bits = 2 if codes is None else codes.bits
        num_scores = work.batch_size * num_found * work.kv_len
        find = device.attention.us(num_scores * (work.shape.head_dim * bits // 8 + 4))
        find += device.top_k.us(num_scores) + _FIND_US
        rows = min(work.kv_len, HOT_BUDGETS * work.policy.budget_tokens)
        gpu = find + self._resident_us(device, roles[~found], publishes=publishes)
        gpu += device.attention.us(work.batch_size * num_found * rows * work.pair_bytes)
        chosen = work.batch_size * num_found * work.chosen_tokens * work.pair_bytes
        gather = device.gather.us(_MISSING_SHARE * chosen)
        kind = "hot rows found" if num_found == len(roles) else "GPU + hot rows found"
        return LayerTime(kind, self.linear_us, gpu, gather, 0.0, gather, 0.0)

    def _gather_us(self, device: DeviceProfile, num_bytes: float) -> tuple[float, float, float]:
        """Time of a layer's fetched rows: what fetching adds to a layer that has nothing else to
        do, attention to them, and what fetching adds to any layer, however little it fetches."""
        if not device.gather_measured:
            hidden = max(0.0, device.gather.us(num_bytes) - self.linear_us)
            return hidden, device.attention.us(num_bytes), 0.0
        table = device.gather_beside
        attend = min(device.attention.us(num_bytes), table.us(num_bytes))
        gather = table.us(num_bytes) - attend
        least = min(num_bytes, table.points[0][0])
        slowed = min(gather, max(0.0, table.us(least) - device.attention.us(least)))
        return gather, attend, slowed

    def _num_scores(self, resident: UInt8Array) -> int:
        """Scores of heads on the GPU that leave a selection: one per query head and token."""
        if not self._publishes(resident):
            return 0
        work = self.work
        return work.batch_size * len(resident) * work.shape.group_size * work.kv_len

    def _publishes(self, roles: UInt8Array) -> bool:
        """Whether heads in GPU pages leave a selection."""
        return self.work.is_sparse and bool((roles == RETRIEVE).any())

    def top_k_us(self, layer_idx: int, places: UInt8Array) -> float:
        """Time of the top-k of what a layer's heads publish on the GPU."""
        if self._device is None:
            return 0.0
        roles = self.roles[layer_idx]
        key = (roles.tobytes(), places.tobytes())
        if key not in self._top_k_times:
            num_scores = self._num_scores(roles[places == Place.GPU])
            self._top_k_times[key] = self._device.top_k.us(num_scores)
        return self._top_k_times[key]

    def _resident_us(
        self, device: DeviceProfile, roles: UInt8Array, *, publishes: bool, window: int = 0
    ) -> float:
        """Attention to all tokens of heads in GPU pages, or to those in a layer's window."""
        work = self.work
        kv_len = min(work.kv_len, window or work.kv_len)
        of_head = work.batch_size * kv_len * work.pair_bytes
        table = device.retrieval if publishes else device.attention
        return table.us(len(roles) * of_head)

    def attend_us(self, roles: UInt8Array, members: UInt8Array) -> float:
        """The worker pool's part of a layer, its heads with these roles and selected for by these
        members of the policy."""
        return self._pool_us(self._read_bytes(roles, members, self.work.window_tokens))[0]

    def touched_bytes(self, roles: UInt8Array, members: UInt8Array) -> float:
        """Host memory that the worker pool reads in such a layer."""
        read = self._read_bytes(roles, members, self.work.window_tokens)
        return read.dense + read.retrieved + read.certain + sum(read.selected.values())

    def _reply_us(self, roles: UInt8Array, members: UInt8Array) -> float:
        """The same where a GPU attends to the window: what a policy does before the query and after
        its answer costs what it takes longer than the GPU's linear layers."""
        whole, hidden = self._pool_us(self._read_bytes(roles, members, 0))
        return whole - min(hidden, self.linear_us)

    def choose_cold_us(self, roles: UInt8Array, members: UInt8Array) -> float:
        """Reading what such heads look at to select, when no cache holds it."""
        selected = self._read_bytes(roles, members, 0).selected
        return self.profile.attend_cold.us(self.work.batch_size * sum(selected.values()))

    def _choose_us(self, roles: UInt8Array, members: UInt8Array) -> float:
        """What the worker pool does to choose a layer ahead for such heads; what they reuse was
        chosen before."""
        selected = self._read_bytes(roles, members, 0).selected
        if not selected:
            return self.profile.attend_cold.fixed_us
        work, factors = self.work, self.profile.select_ahead
        policy = work.policy
        if policy.selection_top_p < 1.0:  # cut by weights: it scores what its members would take
            factors = {"*": factors.get("*", 1.0)}
        factor = sum(
            num_bytes * self._factor(factors, index) for index, num_bytes in selected.items()
        )
        return self.choose_cold_us(roles, members) * factor / sum(selected.values())

    def _read_bytes(self, roles: UInt8Array, members: UInt8Array, window: int) -> _ReadBytes:
        """What a layer reads, with `window` tokens of the window."""
        work, read = self.work, _ReadBytes()
        of_members = work.policy.members
        is_sparse = work.is_sparse
        scanned = (work.kv_len - work.window_tokens + window) * work.pair_bytes
        chosen_tokens, row_bytes = work.chosen_tokens, work.row_bytes
        attended = (chosen_tokens + window) * work.pair_bytes
        for role, index in zip(roles.tolist(), members.tolist(), strict=True):
            if role == RETRIEVE and is_sparse:
                read.retrieved += scanned
            elif role in (DENSE, RETRIEVE) or not is_sparse:
                read.dense += scanned
            elif role == REUSE:
                read.certain += attended
            elif role == SELECT:
                num_bytes, rereads_keys = of_members[index].state.read_bytes(
                    kv_len=work.kv_len,
                    chosen_tokens=chosen_tokens,
                    row_bytes=row_bytes,
                    state_bytes=work.head_state_bytes[index] if work.head_state_bytes else 0.0,
                )
                num_bytes += attended if rereads_keys else attended / 2
                read.selected[index] = read.selected.get(index, 0.0) + num_bytes
        return read

    def _pool_us(self, read: _ReadBytes) -> tuple[float, float]:
        """What the worker pool takes in all, and of that before a query and after its answer."""
        work, profile = self.work, self.profile
        cost = profile.scan_dense.us(work.batch_size * read.dense)
        cost += profile.scan_retrieve.us(work.batch_size * read.retrieved)
        selected, hidden = sum(read.selected.values()), 0.0
        if read.certain or selected:
            rows = self._rows_us(work.batch_size * (read.certain + selected))
            scales = {index: self._select_scale(index) for index in read.selected}
            scale = 1.0
            if selected:
                scale = (
                    sum(read.selected[i] * of_all for i, (of_all, _) in scales.items()) / selected
                )
                late = sum(
                    read.selected[i] * of_all * share for i, (of_all, share) in scales.items()
                )
                hidden = rows * late / selected
            cost += rows * scale
        return (cost, hidden) if cost else (profile.attend_cold.fixed_us, 0.0)

    @cached_property
    def _member_keys(self) -> tuple[str, ...]:
        work = self.work
        return tuple(policy_key(of, work.shape, work.kv_len) for of in work.policy.members)

    def _select_scale(self, index: int) -> tuple[float, float]:
        """Factor of a member's own kernels, and the share of them beside query and answer."""
        scale = self._factor(self.profile.select_scale, index)
        return scale, self.profile.select_hidden.get(self._member_keys[index], 0.0)

    def _factor(self, factors: dict[str, float], index: int) -> float:
        """What was measured of a member of the policy, or else what stands for it."""
        work, key = self.work, self._member_keys[index]
        policy = work.policy
        if key in factors:
            return factors[key]
        self._assume("selecting on the CPU: the bytes that the policy looks at stand for it")
        names = (policy.name, policy.members[index].name, "*")
        return next((factors[name] for name in names if name in factors), 1.0)

    def _rows_us(self, num_bytes: float) -> float:
        """Attending to selected rows, as many of which were read ahead as there is time for."""
        profile = self.profile
        cold = profile.attend_cold.us(num_bytes)
        if self._device is None:
            return cold
        ahead = min(
            num_bytes,
            self.linear_us * 1e-6 * profile.read_bandwidth,
            profile.num_threads * _AHEAD_BYTES_PER_WORKER,
        )
        warm = profile.attend_warm.us(num_bytes)
        return cold + (warm - cold) * ahead / num_bytes

    def _host_us(
        self, measured_us: dict[str, dict[int, float]], num_weights: int, what: str
    ) -> float:
        """Time of products with so many weights on the host: measured, or else of reading them."""
        measured = self._of_this_batch(measured_us)
        if measured is None:
            self._assume(f"{what} on the CPU: reading the weights from memory stands for it")
            measured = 1e6 * num_weights * self.work.item_bytes / self.profile.read_bandwidth
        return measured * self.work.weight_share

    def _layer_linear_us(self, device: DeviceProfile) -> float:
        """Time of one layer for this batch: measured, or else by the bytes of its matrices."""
        shape = self.work.shape
        measured = self._of_this_batch(device.layer_linear_us)
        if measured is not None:
            return measured * self.work.weight_share
        self._assume("linear layers: the bytes of their weights at the speed of other shapes stand")
        width, up_width = shape.num_qo_heads * shape.head_dim, shape.intermediate_size
        of_one = self._matrices_us(device, shape.qkv_width, width, 2 * up_width, up_width)
        return of_one * (_ROWS_SLOWER if self.work.batch_size > 1 else 1.0)

    def _lm_head_us(self, device: DeviceProfile) -> float:
        measured = self._of_this_batch(device.lm_head_us)
        if measured is not None:
            return measured * self.work.weight_share
        return self._matrices_us(device, self.work.shape.vocab_size)

    def _of_this_batch(self, measured_us: dict[str, dict[int, float]]) -> float | None:
        """What was measured with this shape and batch, or with smaller and larger ones."""
        key = shape_key(self.work.shape, self.work.item_bytes)
        of_rows, batch_size = sorted(measured_us.get(key, {}).items()), self.work.batch_size
        if not of_rows or not of_rows[0][0] <= batch_size <= of_rows[-1][0]:
            return None
        rows, times = zip(*of_rows, strict=True)
        return float(np.interp(batch_size, rows, times))

    def _matrices_us(self, device: DeviceProfile, *widths: int) -> float:
        """Time of products with matrices [width, hidden_size]."""
        row_bytes = self.work.shape.hidden_size * self.work.item_bytes * self.work.weight_share
        return sum(device.gemv.us(width * row_bytes) for width in widths)

    def _assume(self, what: str) -> None:
        if what not in self._assumed:
            self._assumed.append(what)
