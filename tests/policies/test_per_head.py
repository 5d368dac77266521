"""PerHead: its members do what they would alone, and what does not go together is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from cases.attention_cases import assert_same_arrays, build_context
from cases.coprocessor_cases import SMALL, Shape, World, worlds_alike
from cases.profile_cases import machine_profile, workload
from cases.seeded import new_rng
from cases.slowly import combinations
from torch.utils._python_dispatch import TorchDispatchMode

from cpu_ops.worker_pool import WorkerPool
from offload.decode.gpu.layer_heads import layer_heads
from offload.decode.gpu.placement import HeadPlacement, Place, least_places
from offload.models.shape import MODEL_SHAPES
from offload.planning.choose import DeviceRoom, choose_placement, least_placement
from offload.planning.step_time import StepModel
from offload.policies import LFPS, ExactTopK, Full, LycheeDecode, PerHead, Policy
from offload.policies.registry import make_policy
from offload.prefill.memory import PrefillMemory
from offload.selection.head_roles import HeadRoles
from offload.selection.layer_state import BuildContext
from offload.selection.policy import SELECT

HEADS = Shape(num_kv_heads=4)
# [layers, KV heads] of HEADS; layer 0 retrieves anyway, as the only one of dense_layers
MIXED = np.array([[1, 1, 1, 1], [0, 1, 0, 1], [0, 0, 1, 0]], bool)
KV_LENS = [300, 40, 130]


def per_head(retrieves: np.ndarray, head_dim: int = 32, **options: Any) -> PerHead:
    """With these retrieval heads, however many."""
    policy = make_policy("per_head", **{**SMALL, **options})
    return replace(policy, head_roles=HeadRoles.of(retrieves, head_dim=head_dim), is_part=True)


def worlds(policies: list[Policy], pool: WorkerPool) -> list[World]:
    return worlds_alike(policies, HEADS, pool, KV_LENS)


def decode(worlds: list[World], num_steps: int) -> list[list[tuple[Any, Any]]]:
    """(o, selections) of each step, of each world."""
    rng, results = new_rng(), []
    for _ in range(num_steps):
        given = worlds[0].random_step(rng)
        results.append([world.decode(given) for world in worlds])
    return results


@pytest.mark.parametrize(
    ("rest", "retrieval"),
    combinations(
        ["lfps", "lychee_cluster", "quest", "exact_topk", "union", None], ["full", "exact_topk"]
    ),
)
def test_heads_of_one_kind(rest, retrieval, pool):
    """Without retrieval heads it is the rest, and without others (None) the retrieval."""
    name = rest or retrieval
    alone = Full() if name == "full" else make_policy(name, **SMALL | {"dense_layers": 0})
    options: dict[str, Any] = {} if rest is None else {"rest": name}
    retrieves = np.full((3, 4), rest is None)
    ours = per_head(retrieves, retrieval=retrieval, dense_layers=0, **options)
    for (out, chosen), (expected, selections) in decode(worlds([ours, alone], pool), 5):
        assert torch.equal(out, expected)
        assert chosen == selections


def test_a_rest_per_query_head_needs_roles():
    policy = make_policy("per_head", rest="lfps", granularity="query_head")
    with pytest.raises(ValueError, match="selects per query head, so that head_roles must say"):
        policy.roles(30, 9)


@pytest.mark.parametrize("rest", ["lfps", "lychee_cluster"])
@pytest.mark.parametrize("retrieval", ["full", "exact_topk"])
def test_each_head_does_as_it_would_alone(rest, retrieval, pool):
    """Every head's answer is that of its own member deciding for all heads; learning included."""
    ours = per_head(MIXED, rest=rest, retrieval=retrieval)
    alone = Full() if retrieval == "full" else ExactTopK(**SMALL | {"dense_layers": 0})
    all_worlds = worlds([ours, make_policy(rest, **SMALL), alone], pool)
    of_head = 3 * 32
    for (out, _), (of_rest, _), (of_retrieval, _) in decode(all_worlds, 6):
        heads = [x.view(3, len(KV_LENS), 4, of_head) for x in (out, of_rest, of_retrieval)]
        retrieves = torch.from_numpy(MIXED)[:, None, :, None]
        expected = torch.where(retrieves, heads[2], heads[1])
        # Pieces of a layer are cut, and merge, otherwise.
        torch.testing.assert_close(heads[0], expected, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("rest", ["lfps", "lychee_cluster", "union"])
def test_forks_and_shorter_sequences(rest, pool):
    """A fork goes on as its parent would; a step that is taken back leaves nothing."""
    ours, other = worlds([per_head(MIXED, rest=rest, retrieval="exact_topk")] * 2, pool)
    decode([ours, other], 3)
    states = ours.attention.states
    rng = new_rng()
    fork = ours.store.fork(ours.seqs[0])
    states.fork(ours.seqs[0], fork)
    ours.seqs[0] = fork
    # A pass that fails after its step: the policy takes it back.
    lens = [ours.store.kv_len(seq) for seq in ours.seqs]
    states.begin(ours.seqs, [1] * len(lens), prefill=False)
    given = ours.random_step(rng)
    step = ours.open(given)
    out = torch.empty_like(given[0])
    for layer_idx in range(HEADS.num_layers):
        for i, seq in enumerate(step.seqs):
            k, v = (x[layer_idx, i][None] for x in given[1:])
            ours.store.append(seq, layer_idx, k, v, start=lens[i])
        ours.attention.attend(layer_idx, step, given[0][layer_idx], out[layer_idx])
    for row, (seq, kv_len) in enumerate(zip(ours.seqs, lens, strict=True)):
        states.roll_back(seq)
        ours.store.truncate(seq, kv_len)
        ours.keys[row], ours.values[row] = (x[row][:, :kv_len] for x in (ours.keys, ours.values))
    assert states.arrays_of(fork) is not None
    for (out, chosen), (expected, selections) in decode([ours, other], 3):
        assert torch.equal(out, expected)
        assert chosen == selections
    lens = [ours.store.kv_len(seq) - 2 for seq in ours.seqs]
    for world in (ours, other):
        world.truncate(lens)
    for (out, chosen), (expected, selections) in decode([ours, other], 2):
        assert torch.equal(out, expected)
        assert chosen == selections


def apart(policy: PerHead, context: BuildContext, build: Callable[[Policy, Any], Any]) -> Any:
    """What each member builds of its own heads in layer 1 of MIXED."""
    arrays = {}
    group = context.queries.view(4, 3, *context.queries.shape[1:])
    for name, heads in (("rest", [0, 2]), ("retrieval", [1, 3])):
        keys, queries = context.keys[heads], group[heads].flatten(0, 1)
        own = replace(context, keys=keys, values=keys, queries=queries)
        built = build(getattr(policy, name), own)
        arrays |= {f"{name}.{array}": x for array, x in built.items()}
    return arrays


def context_of_heads(pool: WorkerPool) -> BuildContext:
    queries, keys = torch.randn(12, 32, 32), torch.randn(4, 500, 32)
    return build_context(keys, queries=queries, capacity_tokens=600, pool=pool, num_layers=3)


def test_arrays_are_of_a_members_own_heads_only(pool):
    policy, context = per_head(MIXED, rest="lfps", retrieval="quest"), context_of_heads(pool)
    expected = apart(policy, context, lambda member, own: member.state.build(own))
    assert_same_arrays(policy.state.build(context), expected)
    policy = per_head(np.ones((3, 4), bool), rest="lfps", retrieval="quest")
    assert {name.split(".")[0] for name in policy.state.build(context)} == {"retrieval"}


class Indexed(TorchDispatchMode):
    """Shapes of what is indexed by tensors or lists."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[torch.Size] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if str(function) == "aten.index.Tensor":
            self.shapes.append(args[0].shape)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("rest", ["lfps", "lychee_cluster"])
def test_a_device_builds_of_each_member_its_own_heads(rest, pool):
    policy, context = per_head(MIXED, rest=rest), context_of_heads(pool)
    assert policy.device.builds
    expected = apart(policy, context, lambda member, own: member.device.build(own)())
    with Indexed() as indexed:
        finish = policy.device.build(context)
    # The host would wait for a list of heads to get to the device.
    assert not [shape for shape in indexed.shapes if len(shape) > 2 and shape[0] == 4]
    assert_same_arrays(finish(), expected)


def test_copies_of_heads_are_counted():
    """Those of a member's heads that do not lie together, in the layer with most of them."""
    assert per_head(MIXED, rest="lfps").device.copied_heads(3, 4) == 3
    together = np.zeros((3, 4), bool)
    together[:, :2] = True
    assert per_head(together, rest="lfps").device.copied_heads(3, 4) == 0
    together[1, 2:] = [False, True]
    together[1, :2] = [False, True]
    assert per_head(together, rest="lfps").device.copied_heads(3, 4) == 2
    shape, sizes = MODEL_SHAPES["llama-3.1-8b"], {"item_bytes": 2, "slice_tokens": 8192}
    without, copied = (
        PrefillMemory.of(shape, num_tokens=1000, copied_heads=n, **sizes).total_bytes
        for n in (0, 7)
    )
    assert copied - without == 2 * 7 * 1000 * 128 * 2


def test_default_heads():
    """An eighth, spread over the layers after the dense ones, of which all, and over KV heads."""
    policy = make_policy("per_head", rest="lfps")
    assert (policy.unit_members(32, 8)[:2] == 1).all()
    assert (policy.roles(32, 8) == SELECT).all()
    retrieves = policy.unit_members(32, 8)[2:] == 1
    assert retrieves.sum() == 32
    assert retrieves.sum(0).tolist() == [4] * 8
    assert retrieves.sum(1).max() <= 2
    assert (make_policy("per_head", retrieval_heads=0).unit_members(32, 8)[2:] == 0).all()


def test_default_retrieval():
    """A sketch with rest's budget; it selects per KV head."""
    policy = make_policy("per_head", rest="lfps", budget_tokens=320, recent_tokens=32)
    assert policy.retrieval == make_policy("sketch", budget_tokens=320, recent_tokens=32)
    assert policy == PerHead(rest=policy.rest)
    assert make_policy("per_head", rest="lfps", granularity="query_head").retrieval.name == "full"


def test_a_gpu_takes_no_length_but_the_budget_for_dense():
    places = HeadPlacement(np.full((3, 4), Place.CPU))
    places.check_policy(per_head(MIXED, retrieval="exact_topk", dense_until=48), 12)
    with pytest.raises(ValueError, match="dense_until=49 must be its budget_tokens=48 where a GPU"):
        places.check_policy(per_head(MIXED, retrieval="exact_topk", dense_until=49), 12)


def test_heads_on_a_gpu_are_those_that_retrieve():
    for retrieval in ("full", "exact_topk"):
        policy = per_head(MIXED, retrieval=retrieval)
        places = np.full((3, 4), Place.CPU)
        if retrieval == "full":  # dense layers must be there
            with pytest.raises(ValueError, match=r"KV head 0 of layer 0 .* leaves this layer dens"):
                HeadPlacement(places).check_policy(policy, 12)
        else:
            HeadPlacement(places).check_policy(policy, 12)
        places[0] = Place.GPU
        assert (least_places(policy, 3, 12, 4) == places).all()
        HeadPlacement(places).check_policy(policy, 12)
        places[MIXED] = Place.GPU
        HeadPlacement(places).check_policy(policy, 12)
        places[2, 0] = Place.GPU
        with pytest.raises(ValueError, match=r"KV head 0 of layer 2 .* 'per_head' has it select"):
            HeadPlacement(places).check_policy(policy, 12)
    by_query_head = per_head(MIXED, rest="lfps", granularity="query_head")
    HeadPlacement(np.where(MIXED, Place.GPU, Place.CPU)).check_policy(by_query_head, 12)


@pytest.mark.parametrize("dense_layers", [0, 2])
def test_a_rank_has_its_heads_part(dense_layers):
    policy = make_policy("per_head", rest="lfps", retrieval="exact_topk", dense_layers=dense_layers)
    whole = policy.unit_members(32, 8)
    shape = {"num_layers": 32, "num_kv_heads": 8, "head_dim": 64}
    for heads in (range(3), range(3, 8)):
        part = policy.of_heads(heads, **shape)
        own = {**shape, "num_kv_heads": len(heads)}
        part.check_model(**own, num_qo_heads=4 * len(heads))
        np.testing.assert_array_equal(
            part.unit_members(32, len(heads)), whole[:, heads.start : heads.stop]
        )


def roles_with(count: int) -> HeadRoles:
    retrieves = np.zeros((6, 4), bool)
    retrieves[0] = True
    retrieves.flat[[8 + 3 * i for i in range(count)]] = True
    return HeadRoles.of(retrieves, head_dim=64)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rest": "quset"}, "unknown policy 'quset'; available: "),
        ({"rest": "full"}, "rest must be a policy that selects in every layer, .*, got full"),
        ({"rest": "tidal_decode"}, "rest must be .*, got tidal_decode"),
        ({"rest": LycheeDecode()}, "rest must be .*, got lychee_decode"),
        ({"retrieval": "lychee_decode"}, "retrieval must be full or .*, got lychee_decode"),
        ({"retrieval": "per_head"}, "retrieval must be full or .*, got per_head"),
        ({"retrieval": "lychee_cluster"}, "retrieval must not be lychee_cluster: heads of"),
        ({"retrieval": "union"}, "retrieval must not be union: heads of lychee_cluster share"),
        ({"rest": "lfps", "candidate_ratio": 2.0}, "'lfps' has no option 'candidate_ratio'"),
        ({"alpa": 0.2}, "'per_head' has no option 'alpa'; its options: rest, retrieval, head_rol"),
        (
            {"rest": LFPS(budget_tokens=512), "retrieval": ExactTopK(budget_tokens=256)},
            r"budget_tokens must be the same .*\(lfps\) has 512 and retrieval \(exact_topk\) 256",
        ),
        (
            {"rest": "lfps", "retrieval": "exact_topk", "granularity": "query_head"},
            r"per_query_head must be the same for all heads, .* True and .* False",
        ),
        ({"head_roles": 3}, "head_roles must be a roles file or HeadRoles, got 3"),
        ({"head_roles": roles_with(1), "retrieval_heads": 2}, "retrieval_heads=2 is for a calib"),
    ],
)
def test_what_does_not_go_together(options, message):
    with pytest.raises(ValueError, match=message):
        make_policy("per_head", **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head_roles": roles_with(4)}, None),
        (
            {"head_roles": roles_with(5)},
            "5 retrieval heads .* at most 4 may retrieve, a sixth .*24",
        ),
        ({"retrieval_heads": 5}, "5 retrieval heads after the first 2 layers, but at most 4 may"),
        ({"retrieval_heads": -1}, "-1 retrieval heads"),
        ({"retrieval_heads": 1.5}, r"retrieval_heads must be an int, got 1\.5"),
        ({"head_roles": HeadRoles.of(MIXED, head_dim=64)}, "made for another model: it says num_l"),
    ],
)
def test_models_that_do_not_fit(options, message):
    shape = {"num_layers": 6, "num_qo_heads": 12, "num_kv_heads": 4, "head_dim": 64}
    policy = make_policy("per_head", **options)
    if message is None:
        policy.check_model(**shape)
        return
    with pytest.raises(ValueError, match=message):
        policy.check_model(**shape)


@pytest.mark.parametrize("retrieval", ["full", "exact_topk"])
@pytest.mark.parametrize("measured", [True, False], ids=["by a profile", "by what fits"])
def test_retrieval_heads_go_to_a_gpu_that_has_room(retrieval, measured):
    work = workload("per_head", rest="lfps", retrieval=retrieval)
    retrieves = work.policy.unit_members(32, 8) != 0
    model = StepModel(machine_profile(), work, on_gpu=True) if measured else None
    enough = DeviceRoom(work, None).num_bytes(
        HeadPlacement(np.where(retrieves, Place.GPU, Place.CPU).astype(np.uint8))
    )
    chosen = choose_placement(model, DeviceRoom(work, enough))
    assert ((chosen.places == Place.GPU) == retrieves).all()
    chosen.check_policy(work.policy, 32)
    layers = layer_heads(chosen.places, work.selected_roles)
    assert not any(layer.publishing for layer in layers)
    # Little room: those that fit; the dense layers do in any case, and need no more.
    least = least_placement(work)
    assert ((least.places == Place.GPU).sum(1) == [8, 8] + [0] * 30).all()
    of_head = 131072 * 2 * 128 * 2
    room = DeviceRoom(work, DeviceRoom(work, None).num_bytes(least) + 6 * of_head)
    some = choose_placement(model, room)
    assert 0 < (some.places[2:] == Place.GPU).sum() < 6
    assert retrieves[some.places == Place.GPU].all()
    if model is not None:
        assert model.step(chosen).milliseconds < model.step(some).milliseconds
