"""Sequences, and somebody who plays the GPU's part of their decode steps, in float64."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from cases import kernel_references as reference
from cases.attention_cases import TOLERANCE, relative_error
from cases.seeded import new_rng
from torch import Tensor

from cpu_ops.coprocessor import Coprocessor, Request
from cpu_ops.mailbox import Mailbox
from cpu_ops.step_rows import DecodeStep
from cpu_ops.worker_pool import WorkerPool
from offload.decode.attention import DecodeAttention
from offload.kv.store import KVStore
from offload.policies import Full, Policy

SMALL = {"budget_tokens": 48, "sink_tokens": 4, "recent_tokens": 8, "dense_layers": 1}
FLOAT32 = TOLERANCE[torch.float32]

Step = tuple[Tensor, Tensor, Tensor]  # q [layers, n, Hq * D]; k, v [layers, n, Hkv, D]


@dataclass(frozen=True)
class Shape:
    num_layers: int = 3
    num_kv_heads: int = 2
    group_size: int = 3
    head_dim: int = 32
    dtype: torch.dtype = torch.float32
    page_tokens: int = 16

    @property
    def num_qo_heads(self) -> int:
        return self.num_kv_heads * self.group_size


@dataclass
class World:
    """Sequences in a store of their own, under a policy."""

    shape: Shape
    store: KVStore
    seqs: list[int]
    attention: DecodeAttention
    keys: list[Tensor] = field(default_factory=list)  # of each sequence [layers, kv_len, Hkv, D]
    values: list[Tensor] = field(default_factory=list)
    # What the GPU does with (mailbox, layer_idx, row of the step, slot) when K and V are there.
    heads_publish: Callable[[Mailbox, int, int, int], None] | None = None

    @classmethod
    def random(
        cls,
        rng: np.random.Generator,
        shape: Shape,
        policy: Policy,
        pool: WorkerPool,
        kv_lens: Sequence[int],
        **options: Any,
    ) -> World:
        store = KVStore(
            num_layers=shape.num_layers,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            dtype=shape.dtype,
            page_tokens=shape.page_tokens,
            slab_bytes=1 << 20,
        )
        options |= {"num_qo_heads": shape.num_qo_heads, "pool": pool}
        attention = DecodeAttention(policy, store, **options)
        world = cls(shape, store, [], attention)
        for kv_len in kv_lens:
            seq = store.new_sequence()
            world.seqs.append(seq)
            size = (shape.num_layers, kv_len, shape.num_kv_heads, shape.head_dim)
            world.keys.append(normal(rng, *size).to(shape.dtype))
            world.values.append(normal(rng, *size).to(shape.dtype))
            store.reserve([seq], [kv_len])
            for layer_idx in range(shape.num_layers):
                store.append(seq, layer_idx, world.keys[-1][layer_idx], world.values[-1][layer_idx])
            store.commit([seq], [kv_len])
            if count := policy.state.observed_queries:
                queries = normal(rng, shape.num_qo_heads, count, shape.head_dim)
                for layer_idx in range(shape.num_layers):
                    attention.record_queries(seq, layer_idx, queries.to(shape.dtype), kv_len)
        return world

    def record_random_queries(self, rng: np.random.Generator, kv_lens: Sequence[int]) -> None:
        """The same queries of the prompts, whichever policy observes how many of them."""
        shape = self.shape
        for seq, kv_len in zip(self.seqs, kv_lens, strict=True):
            queries = normal(rng, shape.num_qo_heads, 32, shape.head_dim)
            for layer_idx in range(shape.num_layers):
                self.attention.record_queries(seq, layer_idx, queries, kv_len)

    def random_step(self, rng: np.random.Generator, n: int | None = None) -> Step:
        shape = self.shape
        n = len(self.seqs) if n is None else n
        q = 2.0 * normal(rng, shape.num_layers, n, shape.num_qo_heads * shape.head_dim)
        k, v = (normal(rng, shape.num_layers, n, shape.num_kv_heads, shape.head_dim) for _ in "kv")
        return q.to(shape.dtype), k.to(shape.dtype), v.to(shape.dtype)

    def open(self, given: Step, rows: Sequence[int] | None = None) -> DecodeStep:
        """Reserve, and remember, the step's tokens of sequences `rows`."""
        rows = range(len(self.seqs)) if rows is None else rows
        seqs = [self.seqs[row] for row in rows]
        self.store.reserve(seqs, [1] * len(seqs))
        for i, row in enumerate(rows):
            self.keys[row] = torch.cat([self.keys[row], given[1][:, i : i + 1]], 1)
            self.values[row] = torch.cat([self.values[row], given[2][:, i : i + 1]], 1)
        return self.attention.begin_step(seqs, [self.store.kv_len(seq) + 1 for seq in seqs])

    def commit(self, step: DecodeStep) -> None:
        self.store.commit(list(step.seqs), [1] * len(step.seqs))

    def truncate(self, kv_lens: Sequence[int]) -> None:
        """Forget what an aborted step may have left half-written."""
        for row, kv_len in enumerate(kv_lens):
            self.store.truncate(self.seqs[row], kv_len)
            self.attention.states.truncate(self.seqs[row], kv_len)
            self.keys[row] = self.keys[row][:, :kv_len]
            self.values[row] = self.values[row][:, :kv_len]

    def decode(self, given: Step) -> tuple[Tensor, list[list[list[int]]]]:
        """The step on the CPU alone: o [layers, n, Hq * D] and the selection of each layer."""
        step = self.open(given)
        out = torch.full_like(given[0], float("nan"))
        selections = []
        for layer_idx in range(self.shape.num_layers):
            for i, seq in enumerate(step.seqs):
                at = int(step.positions[i])
                k, v = (x[layer_idx, i][None] for x in given[1:])
                self.store.append(seq, layer_idx, k, v, start=at)
            self.attention.attend(layer_idx, step, given[0][layer_idx], out[layer_idx])
            selections.append(self.attention.last_selection())
        self.commit(step)
        return out, selections

    def coprocessor(
        self,
        requests: Sequence[Request] | None = None,
        max_rows: int | None = None,
        selection: tuple[int, int] = (0, 0),
        fetch_tokens: int = 0,
        **options: Any,
    ) -> Coprocessor:
        """`selection`: lists of a row, and tokens of a list, that the GPU publishes."""
        shape = self.shape
        max_rows = len(self.seqs) if max_rows is None else max_rows
        if requests is None:
            requests = [(layer_idx, 0, max_rows) for layer_idx in range(shape.num_layers)]
        mailbox = Mailbox.allocate(
            num_requests=len(requests),
            max_rows=max_rows,
            num_layers=shape.num_layers,
            num_qo_heads=shape.num_qo_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            dtype=shape.dtype,
            pinned=False,
            selection_units=selection[0],
            selection_tokens=selection[1],
            fetch_tokens=fetch_tokens,
        )
        mailbox.query.fill_(float("nan"))
        mailbox.kv.fill_(float("nan"))
        mailbox.output.fill_(float("nan"))
        mailbox.lse.fill_(float("nan"))
        if self.attention.window is not None:
            own = zip(("sink_tokens", "recent_tokens"), self.attention.window, strict=True)
            options = {**dict(own), **options}
        options.setdefault("on_done", self.attention.record_step_queries)
        return Coprocessor(self.attention, mailbox, requests, **options)

    def window_part(
        self, query: Tensor, layer_idx: int, row: int, kv_len: int, sinks: int, recent: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """o [Hq, D] and lse of what the GPU holds, in float64."""
        shape = self.shape
        tokens = np.r_[0 : min(sinks, kv_len), max(sinks, kv_len - recent) : kv_len]
        out, lse, _ = reference.attention(
            query.double().numpy().reshape(-1, shape.head_dim),
            self.keys[row][layer_idx, :kv_len].double().numpy().transpose(1, 0, 2),
            self.values[row][layer_idx, :kv_len].double().numpy().transpose(1, 0, 2),
            sm_scale=shape.head_dim**-0.5,
            selection=[tokens] * shape.num_kv_heads,
        )
        return out, lse


def worlds_alike(
    policies: Sequence[Policy], shape: Shape, pool: WorkerPool, kv_lens: Sequence[int]
) -> list[World]:
    """The same sequences and queries under each policy."""
    made = [World.random(new_rng(), shape, policy, pool, kv_lens) for policy in policies]
    for world in made:
        world.record_random_queries(new_rng(), kv_lens)
        world.keys, world.values = list(made[0].keys), list(made[0].values)
        for seq, keys, values in zip(world.seqs, world.keys, world.values, strict=True):
            for layer_idx in range(shape.num_layers):
                world.store.append(seq, layer_idx, keys[layer_idx], values[layer_idx], start=0)
    return made


def normal(rng: np.random.Generator, *shape: int) -> Tensor:
    return torch.from_numpy(rng.standard_normal(shape, dtype=np.float32))


def merge(window: tuple[np.ndarray, np.ndarray], out: Tensor, lse: Tensor) -> np.ndarray:
    """The GPU's part and the CPU's [Hq, D], as mailbox.py says."""
    o = out.double().numpy().reshape(len(lse), -1)
    whole = torch.isposinf(lse).numpy()
    merged, _ = reference.merge_softmax(*window, o, np.where(whole, 0.0, lse.double().numpy()))
    merged[whole] = o[whole]
    return merged


def play(
    world: World,
    coprocessor: Coprocessor,
    given: Step,
    step: DecodeStep,
    slots: Sequence[int],
    raise_request: Callable[[int], None],
    end: Callable[[], None],
) -> np.ndarray:
    """The GPU's part of a step; `raise_request(i)` returns when the answer is there.

    Returns o float64 [layers, n, Hq * D]; NaN where no request asked for it.
    """
    mailbox, shape = coprocessor.mailbox, world.shape
    out = np.full((shape.num_layers, *given[0].shape[1:]), np.nan)
    row_of = {seq: row for row, seq in enumerate(world.seqs)}
    published = dict.fromkeys(slots, 0)

    def publish(i: int, end_layer: int) -> None:
        for layer_idx in range(published[slots[i]], end_layer):
            mailbox.kv[layer_idx, slots[i], 0] = given[1][layer_idx, i]
            mailbox.kv[layer_idx, slots[i], 1] = given[2][layer_idx, i]
            if world.heads_publish is not None:
                world.heads_publish(mailbox, layer_idx, i, slots[i])
        published[slots[i]] = max(published[slots[i]], end_layer)

    for request, (layer_idx, first_row, num_rows, _) in enumerate(coprocessor.requests):
        rows = [i for i, s in enumerate(slots) if first_row <= s < first_row + num_rows]
        for i in rows:
            mailbox.query[slots[i]] = given[0][layer_idx, i]
            publish(i, layer_idx + 1)
        raise_request(request)
        for i in rows:
            window = world.window_part(
                given[0][layer_idx, i],
                layer_idx,
                row_of[step.seqs[i]],
                int(step.kv_lens[i]),
                coprocessor.sink_tokens,
                coprocessor.recent_tokens,
            )
            merged = merge(window, mailbox.output[slots[i]], mailbox.lse[slots[i]])
            out[layer_idx, i] = merged.reshape(-1)
            mailbox.query[slots[i]] = float("nan")  # nobody may read it any more
            mailbox.output[slots[i]] = float("nan")
    for i in range(len(slots)):
        publish(i, shape.num_layers)
    end()
    return out


def decode_synchronously(
    world: World, coprocessor: Coprocessor, given: Step, slots: Sequence[int] | None = None
) -> np.ndarray:
    """One step of all sequences through serve()."""
    slots = range(len(world.seqs)) if slots is None else slots
    step = world.open(given)
    coprocessor.begin_step(step, slots)
    out = play(world, coprocessor, given, step, slots, coprocessor.serve, coprocessor.end_step)
    world.commit(step)
    return out


class FlagGpu:
    """Plays the GPU on a thread of its own, by flags alone: steps in the order of `launch`.

    Like a GPU it waits for a reply for ever; `stop` ends the wait, for tests that fail.
    """

    def __init__(self, world: World, coprocessor: Coprocessor) -> None:
        self.world, self.coprocessor = world, coprocessor
        self.outputs: list[np.ndarray] = []
        self._requests = coprocessor.mailbox.requests.numpy()
        self._replies = coprocessor.mailbox.replies.numpy()
        self._steps: queue.SimpleQueue[tuple[Step, DecodeStep, Sequence[int]] | None]
        self._steps = queue.SimpleQueue()
        self._launched = 0
        self._stopped = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def launch(self, given: Step, step: DecodeStep, slots: Sequence[int]) -> None:
        self._launched += 1
        self._steps.put((given, step, slots))

    def synchronize(self, timeout_s: float = 20.0) -> None:
        """Until all that was launched has run."""
        end = time.monotonic() + timeout_s
        while len(self.outputs) < self._launched:
            assert time.monotonic() < end, "the GPU hangs"
            time.sleep(0.001)

    def stop(self) -> None:
        self._stopped = True
        self._steps.put(None)
        self._thread.join()

    def _run(self) -> None:
        while self._run_next():
            pass

    def _run_next(self) -> bool:
        given = self._steps.get()
        if given is not None:
            with np.errstate(all="ignore"):  # after a failure the CPU's part is anything
                out = play(self.world, self.coprocessor, *given, self._ask, self._end)
            self.outputs.append(out)
        return given is not None

    def _ask(self, request: int) -> None:
        self._requests[request, 0] = 1
        while not self._replies[request, 0] and not self._stopped:
            time.sleep(0)
        self._replies[request, 0] = 0

    def _end(self) -> None:
        self._requests[len(self.coprocessor.requests), 0] = 1


def full_world(pool: WorkerPool, kv_lens: Sequence[int] = (60, 30), **shape: Any) -> World:
    return World.random(new_rng(), Shape(**shape), Full(), pool, kv_lens)


@contextmanager
def started(world: World, **options: Any) -> Iterator[tuple[Coprocessor, FlagGpu]]:
    if not world.attention.policy.selects:
        options = {"sink_tokens": 4, "recent_tokens": 8, **options}
    coprocessor = world.coprocessor(**options)
    coprocessor.start()
    gpu = FlagGpu(world, coprocessor)
    yield coprocessor, gpu
    gpu.stop()
    coprocessor.close()


def launch(world: World, coprocessor: Coprocessor, gpu: FlagGpu, rng: np.random.Generator) -> None:
    """Begin a step of all sequences and hand it to the GPU."""
    given = world.random_step(rng)
    kv_lens = [world.store.kv_len(seq) + 1 for seq in world.seqs]
    if not all(map(world.attention.states.serves, world.seqs, kv_lens)):
        coprocessor.wait()
    step = world.open(given)
    slots = range(len(world.seqs))
    coprocessor.begin_step(step, slots)
    gpu.launch(given, step, slots)
    world.commit(step)


def check_last(world: World, gpu: FlagGpu, coprocessor: Coprocessor) -> None:
    """One more step, beside full attention."""
    given = world.random_step(new_rng())
    step = world.open(given)
    coprocessor.begin_step(step, range(len(world.seqs)))
    gpu.launch(given, step, range(len(world.seqs)))
    coprocessor.wait()
    gpu.synchronize()
    check_dense(world, gpu.outputs[-1], given[0], step.kv_lens)


def check_dense(world: World, out: np.ndarray, q: torch.Tensor, kv_lens: np.ndarray) -> None:
    for layer_idx in range(world.shape.num_layers):
        for row, kv_len in enumerate(kv_lens.tolist()):
            expected, _ = world.window_part(q[layer_idx, row], layer_idx, row, kv_len, kv_len, 0)
            assert relative_error(out[layer_idx, row], expected.reshape(-1)) < FLOAT32
