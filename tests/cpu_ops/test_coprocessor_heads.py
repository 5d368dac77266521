"""The coprocessor beside a GPU that attends to some heads itself, and publishes what they chose."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from cases.attention_cases import relative_error
from cases.coprocessor_cases import (
    FLOAT32,
    FlagGpu,
    Shape,
    Step,
    World,
    decode_synchronously,
    full_world,
)
from cases.pools import pools
from cases.seeded import new_rng
from cases.slowly import combinations

from cpu_ops import _native
from cpu_ops.coprocessor import Coprocessor, CoprocessorError
from cpu_ops.mailbox import Mailbox
from cpu_ops.worker_pool import WorkerPool
from offload.policies import Policy
from offload.policies.registry import make_policy
from offload.selection.head_roles import HeadRoles
from offload.selection.policy import RETRIEVE

SHAPE = Shape(num_layers=4, num_kv_heads=3, group_size=2)
WINDOW: dict[str, Any] = {"budget_tokens": 48, "sink_tokens": 4, "recent_tokens": 8}
# All heads of layer 0 retrieve. Head 0 does again in layer 2 and head 1 in layer 3, the last.
RETRIEVAL = np.array([[1, 1, 1], [0, 0, 0], [1, 0, 0], [0, 1, 0]], bool)
KV_LENS = [200, 20, 47, 100]  # the second stays within the budget, the third comes to leave it


pool = pools(1, 3, scope="function")


def of_heads() -> Policy:
    roles = HeadRoles.of(RETRIEVAL, head_dim=SHAPE.head_dim)
    return make_policy("lychee_decode", head_roles=roles, dense_layers=1, **WINDOW)


def of_layers() -> Policy:
    """One selection of all heads, of layers 1 and 3."""
    return make_policy("tidal_decode", dense_layers=1, select_layers=(1, 3), **WINDOW)


POLICIES = {"of_heads": of_heads, "of_layers": of_layers}


@dataclasses.dataclass
class Twins:
    """A world that a GPU shares with the coprocessor, and one of the CPU alone, with the same
    numbers: of the latter are the selections that the GPU publishes in the former."""

    world: World
    alone: World
    on_gpu: np.ndarray  # bool [layers, KV heads]: those that retrieve, or are dense
    publishing: np.ndarray
    selections: list[list[list[int]]] = dataclasses.field(default_factory=list)

    @classmethod
    def of(cls, policy: Policy, pool: WorkerPool, kv_lens: Sequence[int] = KV_LENS) -> Twins:
        seed = int(new_rng().integers(1 << 30))
        world, alone = (
            World.random(np.random.default_rng(seed), SHAPE, policy, pool, kv_lens) for _ in "ab"
        )
        roles = world.attention.roles
        twins = cls(world, alone, (roles == RETRIEVE) | (roles == 0), roles == RETRIEVE)
        world.heads_publish = twins.publish
        return twins

    def coprocessor(self, **options: Any) -> Coprocessor:
        policy = self.world.attention.policy
        num_rows = options.get("max_rows", len(self.world.seqs))
        layers = np.flatnonzero(~self.on_gpu.all(1)).tolist()
        return self.world.coprocessor(
            **{
                "requests": [(layer, 0, num_rows) for layer in layers],
                "selection": (1 if policy.shares_selection else SHAPE.num_kv_heads, 48),
                "device_heads": self.on_gpu,
                "publishing_heads": self.publishing,
                **options,
            }
        )

    def publish(self, mailbox: Mailbox, layer_idx: int, row: int, slot: int) -> None:
        """What a head publishes is what it reuses in the next layer; -9 is nobody's token."""
        for head in np.flatnonzero(self.publishing[layer_idx]):
            unit = min(int(head), mailbox.selection.shape[1] - 1)
            tokens: list[int] = []
            if layer_idx + 1 < SHAPE.num_layers:
                tokens = self.selections[layer_idx + 1][row * SHAPE.num_kv_heads + int(head)]
            mailbox.selection[slot, unit] = -9
            mailbox.selection[slot, unit, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
            mailbox.counts[slot, unit] = len(tokens)

    def expect(self, given: Step) -> np.ndarray:
        """The CPU's own step; from now on its selections are those that the GPU publishes."""
        out, self.selections = self.alone.decode(given)
        return out.double().numpy()

    def check(self, out: np.ndarray, expected: np.ndarray) -> None:
        """Check the heads that the CPU attends to."""
        shape = (SHAPE.num_layers, -1, SHAPE.num_kv_heads, SHAPE.group_size * SHAPE.head_dim)
        for layer_idx, (ours, theirs) in enumerate(
            zip(out.reshape(shape), expected.reshape(shape), strict=True)
        ):
            heads = ~self.on_gpu[layer_idx]
            if heads.any():
                assert relative_error(ours[:, heads], theirs[:, heads]) < 2 * FLOAT32

    def check_stored(self) -> None:
        """K and V of all heads of all layers are on the host."""
        for row, seq in enumerate(self.world.seqs):
            for layer_idx in range(SHAPE.num_layers):
                keys, _ = self.world.store.gather(seq, layer_idx)
                assert torch.equal(keys, self.world.keys[row][layer_idx].transpose(0, 1))


@pytest.mark.parametrize("name", list(POLICIES))
def test_what_the_gpu_publishes_is_attended_to(name, pool):
    """Rows beyond the budget and within it, in one batch; layer by layer on one thread."""
    rng = new_rng()
    twins = Twins.of(POLICIES[name](), pool)
    coprocessor = twins.coprocessor(max_rows=6)
    for _ in range(3):
        given = twins.world.random_step(rng)
        expected = twins.expect(given)
        out = decode_synchronously(twins.world, coprocessor, given, slots=[4, 0, 5, 2])
        twins.check(out, expected)
    twins.check_stored()


@pytest.mark.parametrize("name", list(POLICIES))
def test_a_thread_attends_to_what_the_gpu_publishes(name, pool):
    """By flags, with reading ahead; in two parts that take turns."""
    rng = new_rng()
    twins = Twins.of(POLICIES[name](), pool)
    layers = np.flatnonzero(~twins.on_gpu.all(1)).tolist()
    requests = [(layer, first, 2) for layer in layers for first in (0, 2)]
    coprocessor = twins.coprocessor(requests=requests)
    coprocessor.start()
    gpu = FlagGpu(twins.world, coprocessor)
    for _ in range(4):
        given = twins.world.random_step(rng)
        expected = twins.expect(given)
        step = twins.world.open(given)
        coprocessor.begin_step(step, range(4))
        gpu.launch(given, step, range(4))
        coprocessor.wait()
        gpu.synchronize()
        twins.world.commit(step)
        twins.check(gpu.outputs[-1], expected)
    gpu.stop()
    coprocessor.close()
    twins.check_stored()


@pytest.mark.parametrize(("bad_layer", "by_flags"), combinations([0, 2, 3], [False, True]))
def test_numbers_of_the_gpu_that_are_not_finite(by_flags, bad_layer, pool):
    """A count of -1, seen in the next request, or at the step's end; then all goes on."""
    rng = new_rng()
    twins = Twins.of(of_heads(), pool)
    kv_lens = [twins.world.store.kv_len(seq) for seq in twins.world.seqs]
    coprocessor = twins.coprocessor()
    gpu = None
    if by_flags:
        coprocessor.start()
        gpu = FlagGpu(twins.world, coprocessor)
    head = int(np.flatnonzero(RETRIEVAL[bad_layer])[-1])

    def publish(mailbox: Mailbox, layer_idx: int, row: int, slot: int) -> None:
        twins.publish(mailbox, layer_idx, row, slot)
        if layer_idx == bad_layer and row == 1:
            mailbox.counts[slot, head] = -1

    given = twins.world.random_step(rng)
    expected = twins.expect(given)
    twins.world.heads_publish = publish
    message = f"non-finite attention in layer {bad_layer}, query row 1, KV head {head}"
    if gpu is None:
        with pytest.raises(RuntimeError, match=message):
            decode_synchronously(twins.world, coprocessor, given)
    else:
        step = twins.world.open(given)
        coprocessor.begin_step(step, range(4))
        gpu.launch(given, step, range(4))
        with pytest.raises(CoprocessorError, match=message):
            coprocessor.wait()
    coprocessor.abort()
    if gpu is not None:
        gpu.synchronize()
    coprocessor.reset()
    twins.world.truncate(kv_lens)
    twins.world.heads_publish = twins.publish
    if gpu is None:
        twins.check(decode_synchronously(twins.world, coprocessor, given), expected)
        return
    coprocessor.start()
    step = twins.world.open(given)
    coprocessor.begin_step(step, range(4))
    gpu.launch(given, step, range(4))
    coprocessor.wait()
    gpu.synchronize()
    twins.check(gpu.outputs[-1], expected)
    gpu.stop()
    coprocessor.close()


def test_a_mailbox_that_goes_away_takes_its_lists_along(pool):
    """The attention outlives coprocessors and their mailboxes: it keeps no address of theirs."""
    rng = new_rng()
    twins = Twins.of(of_heads(), pool, kv_lens=[200])
    given = twins.world.random_step(rng)
    expected = twins.expect(given)
    first = twins.coprocessor()
    twins.check(decode_synchronously(twins.world, first, given), expected)
    last = twins.world.attention.last_selection()
    assert last[0] == twins.selections[3][0]  # head 0 reuses, in layer 3, what the GPU published
    first.close()
    assert twins.world.attention.last_selection()[0] == []
    del first
    given = twins.world.random_step(rng)
    expected = twins.expect(given)
    twins.check(decode_synchronously(twins.world, twins.coprocessor(), given), expected)


@pytest.mark.parametrize("heads", [[0], [1], [2], [0, 2], [0, 1, 2]])
def test_full_attention_with_heads_on_the_gpu(heads, pool):
    """Any of them: those in between are attended to in several runs."""
    world = full_world(pool, kv_lens=(300, 5, 70), num_kv_heads=3, num_layers=2)
    on_gpu = np.zeros((2, 3), bool)
    on_gpu[1, heads] = True  # and layer 0 as it was
    coprocessor = world.coprocessor(sink_tokens=4, recent_tokens=8, device_heads=on_gpu)
    given = world.random_step(new_rng())
    out = decode_synchronously(world, coprocessor, given)
    shape = (2, 3, 3, world.shape.group_size * world.shape.head_dim)
    for row, kv_len in enumerate((301, 6, 71)):
        for layer_idx in range(2):
            q = given[0][layer_idx, row]
            expected, _ = world.window_part(q, layer_idx, row, kv_len, kv_len, 0)
            ours = out.reshape(shape)[layer_idx, row, ~on_gpu[layer_idx]]
            theirs = expected.reshape(shape[2:])[~on_gpu[layer_idx]]
            assert not theirs.size or relative_error(ours, theirs) < FLOAT32
    # The GPU's own have nothing of the CPU: no sums, and no output, which is what `play` left.
    lse = coprocessor.mailbox.lse.view(3, 3, -1)
    assert torch.isneginf(lse[:, heads]).all()
    assert torch.isfinite(lse[0, [head for head in range(3) if head not in heads]]).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_gpu_that_attends_to_everything(dtype, pool):
    """No requests: keys and values are stored, and tell where numbers are not finite."""
    world = full_world(pool, num_layers=3, dtype=dtype)
    options = {"sink_tokens": 4, "recent_tokens": 8, "device_heads": np.ones((3, 2), bool)}
    coprocessor = world.coprocessor(requests=[], **options)
    given = world.random_step(new_rng())
    assert np.isnan(decode_synchronously(world, coprocessor, given)).all()
    keys, values = world.store.gather(world.seqs[1], 2)
    assert torch.equal(keys, world.keys[1][2].transpose(0, 1))
    assert torch.equal(values, world.values[1][2].transpose(0, 1))
    for bad, side in ((float("nan"), 1), (float("inf"), 2)):
        given = world.random_step(new_rng())
        given[side][1, 1, 0, 3] = bad
        step = world.open(given)
        coprocessor.begin_step(step, [0, 1])
        coprocessor.mailbox.kv[:, :2, 0], coprocessor.mailbox.kv[:, :2, 1] = given[1], given[2]
        with pytest.raises(RuntimeError, match="non-finite keys or values in layer 1, row 1"):
            coprocessor.end_step()
        coprocessor.abort()
        coprocessor.reset()
        world.truncate([61, 31])
    # Where the CPU attends to a layer below, that is what notices it.
    below = world.coprocessor(requests=[(2, 0, 2)], sink_tokens=4, recent_tokens=8)
    check = decode_synchronously(world, below, world.random_step(new_rng()))
    assert np.isfinite(check[2]).all()


def test_hot_heads_that_do_not_fit(pool):
    twins = Twins.of(of_heads(), pool)
    hot, none = np.zeros((4, 3), bool), np.zeros((4, 3), bool)
    hot[2, :2] = True
    options = {"publishing_heads": None, "selection": (0, 0), "hot_heads": hot}
    with pytest.raises(ValueError, match="hot_heads need hot_rows, and a mailbox with"):
        twins.coprocessor(**options)
    options |= {"hot_rows": _native.HotRows(4, 4, 3, 96), "fetch_tokens": 48}
    for on_gpu in (none, None):
        with pytest.raises(ValueError, match="all heads of layer 2 must be of hot_heads or of"):
            twins.coprocessor(**options, device_heads=on_gpu)
    others = ~hot & (np.arange(4) == 2)[:, None]
    twins.coprocessor(**options, device_heads=others)
    hot[0] = True
    with pytest.raises(ValueError, match="layer 0 has no layer above"):
        twins.coprocessor(**options, device_heads=others)


def test_heads_that_do_not_fit(pool):
    twins = Twins.of(of_heads(), pool)
    for name in ("device_heads", "publishing_heads", "listed_heads"):
        with pytest.raises(
            ValueError,
            match=rf"{name} must be \[num_layers, num_kv_heads\] = \(4, 3\), got \(3, 4\)",
        ):
            twins.coprocessor(**{name: np.zeros((3, 4), bool)})
    for selection in ((2, 48), (0, 48), (3, 47), (0, 0)):
        with pytest.raises(
            ValueError,
            match=r"mailbox.selection must have 1 or 3 lists of at least budget_tokens=48",
        ):
            twins.coprocessor(selection=selection)
    # Nobody publishes: no room is needed for it.
    twins.coprocessor(selection=(0, 0), publishing_heads=np.zeros((4, 3), bool))
    with pytest.raises(ValueError, match="listed_heads or publishing_heads: the mailbox has one"):
        twins.coprocessor(listed_heads=~twins.on_gpu)
    with pytest.raises(ValueError, match=r"mailbox.selection must have 3 lists for listed_heads"):
        twins.coprocessor(listed_heads=~twins.on_gpu, publishing_heads=None, selection=(1, 48))
    mailbox = twins.coprocessor().mailbox
    for name, x in (
        ("selection", torch.zeros(4, 3, 48, dtype=torch.int64)),
        ("selection", torch.zeros(3, 3, 48, dtype=torch.int32)),
        ("counts", torch.zeros(4, 2, dtype=torch.int32)),
    ):
        wrong = dataclasses.replace(mailbox, **{name: x})
        with pytest.raises(ValueError, match=rf"mailbox\.{name} must be"):
            Coprocessor(
                twins.world.attention,
                wrong,
                twins.coprocessor().requests,
                sink_tokens=4,
                recent_tokens=8,
            )


def test_dense_rows_of_a_batch(pool):
    """All rows are within the budget: the CPU attends to all tokens of its heads."""
    twins = Twins.of(of_heads(), pool, kv_lens=(10, 30))
    given = twins.world.random_step(new_rng())
    twins.expect(given)
    out = decode_synchronously(twins.world, twins.coprocessor(), given)
    for layer_idx in (1, 2, 3):
        heads = np.repeat(~twins.on_gpu[layer_idx], SHAPE.group_size * SHAPE.head_dim)
        for row, kv_len in enumerate((11, 31)):
            expected, _ = twins.world.window_part(
                given[0][layer_idx, row], layer_idx, row, kv_len, kv_len, 0
            )
            error = relative_error(out[layer_idx, row][heads], expected.reshape(-1)[heads])
            assert error < FLOAT32
