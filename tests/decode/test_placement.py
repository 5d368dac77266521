"""Places of KV heads: what is refused, what is written, and what is chosen."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np
import pytest
from cases.profile_cases import SMALL, device_profile, machine_profile, straight, workload
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.decode.gpu.layer_heads import layer_heads
from offload.decode.gpu.placement import HeadPlacement, Place, kv_head_roles, may_be_gathered
from offload.planning.choose import DeviceRoom, choose_placement, least_placement
from offload.planning.cost_table import CostTable
from offload.planning.step_time import StepModel
from offload.policies import LycheeDecode
from offload.policies.registry import make_policy
from offload.policies.tidal_decode import TidalDecode
from offload.selection.device_support import DeviceSupport
from offload.selection.head_roles import HeadRoles
from offload.selection.policy import DENSE, RETRIEVE, REUSE
from offload.system.errors import DeviceMemoryError

G, C, F = Place.GPU, Place.CPU, Place.GATHER


def placement_of(*rows: str) -> HeadPlacement:
    return HeadPlacement.from_text("\n".join(rows))


def test_text_and_json_come_back(tmp_path: Path) -> None:
    placement = placement_of("GGGG", "g.gG", "....")
    assert placement.places.tolist() == [[1, 1, 1, 1], [2, 0, 2, 1], [0, 0, 0, 0]]
    assert placement.counts(G) == [4, 1, 0]
    path = tmp_path / "places.json"
    placement.save(path)
    assert HeadPlacement.load(path) == placement
    path.write_text(json.dumps({"placement": placement.as_json(), "context": 3}))
    assert HeadPlacement.load(path) == placement
    assert hash(HeadPlacement.load(path)) == hash(placement)
    assert placement != placement_of("GGGG", "g.gG", "...g")


def test_places_cannot_be_written_to() -> None:
    with pytest.raises(ValueError, match="read-only"):
        placement_of("GG").places[0, 0] = 0


@pytest.mark.parametrize(
    ("places", "message"),
    [
        (np.zeros(3, np.uint8), r"must be \[num_layers, num_kv_heads\], got shape \[3\]"),
        (np.zeros((0, 3), np.uint8), r"got shape \[0, 3\]"),
        (np.full((2, 2), 6), r"3 = CODES, 4 = HOT, 5 = FOUND, got 6 to 6"),
        (np.full((2, 2), -1), "got -1 to -1"),
        (np.zeros((2, 2)), "must be integers, got float64"),
    ],
)
def test_wrong_arrays(places: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HeadPlacement(places)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("not json", "is not JSON"),
        ("[1]", "holds no placement"),
        ('{"format": "offload-placement-2"}', "holds no placement"),
        ('{"placement": {"format": "offload-placement-1"}}', "heads must be a list of strings"),
        ('{"format": "offload-placement-1", "heads": ["GG", "G"]}', "equally many letters"),
        ('{"format": "offload-placement-1", "heads": ["GX"]}', "'g' = GATHER"),
        (
            '{"format": "offload-placement-1", "heads": ["GG"], "num_layers": 2, '
            '"num_kv_heads": 2}',
            "says num_layers=2, but its heads have 1",
        ),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "places.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        HeadPlacement.load(path)
    assert "places.json" in str(error.value)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="write one with `offload plan MODEL --json"):
        HeadPlacement.load(tmp_path / "none.json")


def test_another_model_is_refused() -> None:
    with pytest.raises(ValueError, match="num_layers=2, num_kv_heads=3, this model has num_la"):
        placement_of("GGG", "...").check_model(num_layers=2, num_kv_heads=4)


LYCHEE = make_policy("lychee_decode", retrieval_heads=2, budget_tokens=128)  # on 4 layers x 4 heads
SKETCH = make_policy("sketch", dense_layers=1)
TIDAL_QUEST = TidalDecode(make_policy("quest", dense_layers=1), select_layers=(1, 3))
TIDAL = make_policy("tidal_decode", select_layers=(1,), dense_layers=1, budget_tokens=128)


def test_roles_of_these_policies() -> None:
    assert LYCHEE.roles(4, 4).tolist() == [[1] * 4, [3] * 4, [1, 1, 3, 3], [3] * 4]
    assert TIDAL.roles(3, 2).tolist() == [[DENSE] * 2, [RETRIEVE] * 2, [REUSE] * 2]


@pytest.mark.parametrize(
    ("policy", "rows", "message"),
    [
        (LYCHEE, ("GGGG", "gGgg", "....", "...."), "head 1 of layer 1 .* has it reuse"),
        (LYCHEE, ("GG.G", "g.gg", "....", "...."), "head 2 of layer 1 .* not on the GPU"),
        (LYCHEE, ("GGGG", "gggg", "g...", "...."), "head 0 of layer 2 .* has it retrieve, and"),
        (LYCHEE, ("GGGG", "gggg", "....", "g..."), "head 0 of layer 3 .* not on the GPU"),
        (TIDAL, ("G.", "..", ".."), "head 1 of layer 0 cannot be placed CPU: .* dense"),
        (TIDAL, ("GG", "G.", ".."), "head 1 of layer 1 .* publish one selection together"),
        (TIDAL, ("GG", "..", "g."), "head 0 of layer 2 .* not on the GPU"),
        (make_policy("full"), ("GG", "Gg"), "head 1 of layer 1 .* selects no tokens"),
        (make_policy("full"), ("GG", "Gc"), "head 1 of layer 1 .* CODES: .* keeps no codes"),
        (make_policy("lfps", dense_layers=1), ("GG", ".c"), "head 1 of layer 1 .* 'sketch' does"),
        (SKETCH, ("GG", "cG"), "head 1 of layer 1 .* has it select"),
        (SKETCH, ("cG", "cc"), "head 0 of layer 0 cannot be placed CODES: .* dense layers stay"),
        (make_policy("quest", dense_layers=1), ("GG", "G."), "head 0 of layer 1 .* has it select"),
        (
            make_policy("quest", dense_layers=1),
            ("GG", "h."),
            "head 0 .* HOT: .* other heads are on the",
        ),
        (make_policy("quest", dense_layers=0), ("hh", ".."), "head 0 of layer 0 .* HOT: .* below"),
        (TIDAL_QUEST, ("GG", "hh", "..", "GG"), "head 0 of layer 1 .* HOT: .* nor if others reuse"),
        (LYCHEE, ("GGGG", "hhhh", "GGgg", "gggg"), "head 0 of layer 1 .* HOT: .* that select"),
        (make_policy("full"), ("GG", "hh"), "head 0 of layer 1 .* HOT: .* selects no tokens"),
    ],
)
def test_places_that_the_policy_cannot_have(policy, rows: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        placement_of(*rows).check_policy(policy, 2 * len(rows[0]))


@pytest.mark.parametrize(
    ("policy", "rows"),
    [
        (LYCHEE, ("GGGG", "gggg", "GGgg", "gggg")),
        (LYCHEE, ("G...", "g...", "G...", "g...")),
        (LYCHEE, ("....", "....", "G...", "g...")),
        (TIDAL, ("GG", "GG", "g.")),
        (make_policy("full"), ("G.", "..")),
        (make_policy("quest", dense_layers=1), ("GG", "..")),
        (SKETCH, ("GG", "c.", "cc")),
        (SKETCH, ("GG", "hh", "cc", "hh")),
        (TIDAL_QUEST, ("GG", "hh", "GG", "GG")),
        (TIDAL_QUEST, ("GG", "..", "..", "hh")),
    ],
)
def test_places_that_the_policy_can_have(policy, rows: tuple[str, ...]) -> None:
    placement_of(*rows).check_policy(policy, 2 * len(rows[0]))


def test_a_rule_that_a_gpu_cannot_follow_keeps_its_heads_on_the_cpu() -> None:
    class Other(LycheeDecode):
        device = cached_property(DeviceSupport)

    policy = Other(retrieval_heads=2)
    with pytest.raises(ValueError, match=r"head 0 of layer 0 .* has it retrieve"):
        placement_of("GGGG", "....", "....", "....").check_policy(policy, 8)


def test_nothing_to_gather_beside_the_window() -> None:
    policy = make_policy("lychee_decode", budget_tokens=68)
    roles = policy.roles(4, 4)
    assert not may_be_gathered(policy, roles, np.full((4, 4), G, np.uint8)).any()


# What is chosen


costs = st.builds(straight, st.floats(0.0, 50.0), st.floats(1e-7, 1e-3))


@st.composite
def profiles(draw):
    device = device_profile(
        attention=draw(costs),
        retrieval=draw(costs),
        top_k=draw(costs),
        gather=draw(costs),
        round_trip_us=draw(st.floats(0, 50)),
        window_us=draw(st.floats(0, 20)),
        gemv=draw(costs),
    )
    cold, warm = draw(costs), draw(costs)
    points = [(size, max(cold.us(size), warm.us(size))) for size in (1e4, 1e6, 1e8)]
    return machine_profile(
        device=device,
        attend_cold=CostTable(tuple(points)),
        attend_warm=CostTable.measured([(s, min(cold.us(s), warm.us(s))) for s, _ in points]),
        read_bandwidth=draw(st.floats(1e9, 1e12)),
    )


policies = st.sampled_from(
    [
        ("lychee_decode", {"budget_tokens": 256}),
        ("lychee_decode", {"budget_tokens": 2048, "dense_layers": 2}),
        ("tidal_decode", {"budget_tokens": 512}),
        ("quest", {"budget_tokens": 512}),
        ("sketch", {"budget_tokens": 512, "bits": 1}),
        ("full", {}),
    ]
)


@settings(max_examples=30, deadline=None)
@given(profiles(), policies, st.integers(0, 64 * 2**20), st.sampled_from([1, 3]))
def test_a_choice_keeps_to_budget_and_rules(profile, policy, budget, batch_size) -> None:
    name, options = policy
    work = workload(name, kv_len=16384, batch_size=batch_size, shape=SMALL, **options)
    room = DeviceRoom(work, budget)
    model = StepModel(profile, work, on_gpu=True)
    try:
        chosen = choose_placement(model, room)
    except DeviceMemoryError:
        assert room.num_bytes(least_placement(work)) > budget
        return
    assert room.num_bytes(chosen) <= budget
    chosen.check_policy(work.policy, SMALL.num_qo_heads)
    assert chosen == choose_placement(model, room)
    assert model.step(chosen).milliseconds <= model.step(least_placement(work)).milliseconds + 1e-9


@settings(max_examples=30, deadline=None)
@given(profiles(), st.floats(1.0, 20.0), st.integers(256, 4096), st.integers(2**22, 2**27))
def test_a_faster_link_never_means_fewer_gathered_heads(profile, factor, tokens, budget) -> None:
    work = workload("lychee_decode", kv_len=16384, shape=SMALL, budget_tokens=tokens)
    slow = profile.device.gather
    fast = CostTable(tuple((size, us / factor) for size, us in slow.points))
    chosen = []
    for gather in (slow, fast):
        device = replace(profile.device, gather=gather)
        model = StepModel(replace(profile, device=device), work, on_gpu=True)
        chosen.append(choose_placement(model, DeviceRoom(work, budget)))
    before, after = chosen
    assert all(a <= b for a, b in zip(before.counts(F), after.counts(F), strict=True))


@pytest.mark.parametrize("model", [None, "profile"])
def test_codes_are_there_as_far_as_they_fit(model: str | None) -> None:
    """The first layers' first; in contexts within the budget nobody needs them."""
    work = workload("sketch", kv_len=16384, shape=SMALL)
    step_model = None if model is None else StepModel(machine_profile(), work, on_gpu=True)
    wanted = placement_of("GGGG", "GGGG", "cccc", "cccc", "cccc", "....")
    budget = DeviceRoom(work, None).num_bytes(wanted)
    assert choose_placement(step_model, DeviceRoom(work, budget)) == wanted
    of_layer = DeviceRoom(work, None).num_bytes(placement_of(*["GGGG"] * 3, *["...."] * 3))
    of_layer -= DeviceRoom(work, None).num_bytes(least_placement(work))
    if model is None:  # layers as a whole before that, the last ones first
        more = choose_placement(None, DeviceRoom(work, budget + of_layer))
        assert more == placement_of("GGGG", "GGGG", "cccc", "cccc", "cccc", "GGGG")
    short = workload("sketch", kv_len=1024, shape=SMALL)
    some = choose_placement(None, DeviceRoom(short, DeviceRoom(short, None).num_bytes(wanted)))
    assert not (some.places == Place.CODES).any()


def test_all_that_fits_is_on_the_gpu() -> None:
    """Whatever the policy: whole layers, the last ones first, as far as there is room."""
    for name in ("full", "lychee_cluster", "tidal_decode", "lychee_decode", "per_head", "lfps"):
        work = workload(name, kv_len=16384, shape=SMALL)
        everything = HeadPlacement.filled(6, 4, G)
        everything.check_policy(work.policy, SMALL.num_qo_heads)
        room = DeviceRoom(work, DeviceRoom(work, None).num_bytes(everything))
        assert choose_placement(None, room) == everything
        layers = layer_heads(
            everything.places, work.selected_roles, shares_selection=work.policy.shares_selection
        )
        assert all(layer.is_resident for layer in layers)
        before = 0
        for share in (0.5, 0.7, 0.9):
            part = replace(room, budget_bytes=int(share * (room.budget_bytes or 0)))
            chosen = choose_placement(None, part)
            chosen.check_policy(work.policy, SMALL.num_qo_heads)
            assert part.holds(chosen)
            on_gpu = int((chosen.places == G).sum())
            assert before <= on_gpu < 24
            before = on_gpu
        assert before >= 16


def test_a_layer_that_others_wait_for() -> None:
    """Its heads retrieve, or reuse: as a whole it is on the GPU once nobody else needs it."""
    policy = make_policy("lychee_decode", dense_layers=0)
    roles = np.array([[1, 1], [0, 1], [0, 0], [0, 0]], bool)
    policy = replace(policy, head_roles=HeadRoles.of(roles, head_dim=16), retrieval_heads=None)
    waits = placement_of("GG", "GG", "..", "..")
    with pytest.raises(ValueError, match=r"head 0 of layer 1 cannot be placed GPU.* reuse"):
        waits.check_policy(policy, 4)
    placement_of("..", "..", "..", "GG").check_policy(policy, 4)
    nobody = placement_of("GG", "GG", "GG", "GG")
    nobody.check_policy(policy, 4)
    of_roles = kv_head_roles(policy, 4, 4, 2)
    assert not any(layer.publishing for layer in layer_heads(nobody.places, of_roles))
    one = placement_of("GG", ".G", "G.", "GG")
    with pytest.raises(ValueError, match="head 0 of layer 2 cannot be placed GPU"):
        one.check_policy(policy, 4)
    below = placement_of("GG", ".G", "..", "GG")
    below.check_policy(policy, 4)
    assert [layer.publishing for layer in layer_heads(below.places, of_roles)] == [
        (0, 1), (1,), (), ()
    ]  # fmt: skip


def test_a_calibration_moves_as_many_codes_as_there_were() -> None:
    """They fitted; more of them may not."""
    before, after = (
        replace(
            make_policy("per_head", dense_layers=0),
            head_roles=HeadRoles.of(np.array(retrieves, bool), head_dim=16),
            is_part=True,
        )
        for retrieves in ([[1, 1], [1, 0], [0, 0]], [[1, 1], [1, 1], [1, 0]])
    )
    places = np.array([[Place.CODES, Place.CODES], [Place.CPU, Place.CPU], [Place.CPU] * 2])
    moved = HeadPlacement(places.astype(np.uint8)).after_calibration(before, after, 4)
    assert (moved.places == Place.CODES).sum() == 2


def test_a_calibration_leaves_no_hot_rows_beside_heads_of_the_cpu() -> None:
    """One of two heads with hot rows retrieves now, and the GPU has no more room than before."""
    before, after = (
        replace(
            make_policy("per_head", rest="quest", retrieval="full", dense_layers=0),
            head_roles=HeadRoles.of(np.array(retrieves, bool), head_dim=16),
            is_part=True,
        )
        for retrieves in ([[1, 0], [0, 0], [0, 0]], [[1, 0], [1, 0], [0, 0]])
    )
    places = np.array([[Place.GPU, Place.CPU], [Place.HOT] * 2, [Place.HOT] * 2])
    moved = HeadPlacement(places.astype(np.uint8)).after_calibration(before, after, 4)
    moved.check_policy(after, 4)
    assert moved.text() == "G.\n..\nhh"


def test_what_an_h200_would_have() -> None:
    work = workload("lychee_decode", budget_tokens=1024)
    model = StepModel(machine_profile(), work, on_gpu=True)
    chosen = choose_placement(model, DeviceRoom(work, None))
    roles = work.roles()
    assert ((chosen.places == G) == (roles == RETRIEVE)).all()
    assert (chosen.places == F).sum() > 100
    without = HeadPlacement(np.where(chosen.places == F, C, chosen.places))
    assert model.step(chosen).milliseconds < model.step(without).milliseconds


def test_a_slow_link_and_a_fast_cpu_gather_nothing() -> None:
    work = workload("lychee_decode", budget_tokens=4096)
    slow = straight(5000.0, 1.0)
    device = device_profile(gather=slow, gather_beside=slow)
    model = StepModel(machine_profile(device=device), work, on_gpu=True)
    assert not (choose_placement(model, DeviceRoom(work, None)).places == F).any()


def test_without_a_profile_retrieving_heads_go_up_in_order() -> None:
    work = workload("lychee_decode", kv_len=16384, shape=SMALL, retrieval_heads=4)
    head_bytes = 16384 * 2 * SMALL.head_dim * 2
    least = DeviceRoom(work, None).num_bytes(least_placement(work))
    chosen = choose_placement(None, DeviceRoom(work, least + 5 * head_bytes))
    assert chosen.counts(G)[0] == 4  # layer 0 retrieves as a whole
    assert sum(chosen.counts(G)) in (4, 5)
    assert not (chosen.places == F).any()


def test_dense_layers_that_do_not_fit_are_refused_with_both_numbers() -> None:
    work = workload("quest", kv_len=16384, shape=SMALL, dense_layers=2)
    with pytest.raises(
        DeviceMemoryError, match=r"needs 16\.\d+ MiB .* but 1\.00 MiB are left"
    ) as e:
        choose_placement(None, DeviceRoom(work, 2**20))
    assert "lower the policy's dense_layers" in str(e.value)
    assert "one page" not in str(e.value)


def test_a_budget_below_one_page_of_each_head_is_named() -> None:
    work = workload("quest", kv_len=16384, shape=SMALL, dense_layers=2)
    one_page = 8 * 2 * 256 * SMALL.head_dim * 2
    with pytest.raises(
        DeviceMemoryError,
        match="one page of 256 tokens of each of the 8 KV heads that must stay there takes 256",
    ):
        choose_placement(None, DeviceRoom(work, one_page - 1))
