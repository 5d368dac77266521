"""Policies built from device tensors: the same arrays as on the CPU, within rounding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from cases.attention_cases import relative_error
from cases.lychee_cases import LycheeIndex
from cases.pairwise import pairwise
from cases.prefill_cases import run_prefill, store_for, tiny_lean_model
from cases.seeded import new_rng
from cases.slowly import combinations

from cpu_ops import clustering
from gpu_ops.chunk_clusters import chunk_boxes
from offload.decode.attention import DecodeAttention
from offload.policies.lfps.layout import unlist_all
from offload.policies.lychee_cluster.index_on_device import spherical_kmeans
from offload.policies.registry import make_policy
from offload.policies.sketch.codes import rotation
from offload.selection.layer_state import BuildContext, State
from offload.selection.prefill_build import PrefillBuild

KV_HEADS, GROUP = 2, 3
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.cuda,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
        ],
    ),
]


def topical(rng: np.random.Generator, kv_len: int, head_dim: int, num_topics: int = 20) -> Any:
    """Keys in runs about one of some topics: clusters that rounding does not move."""
    topics = rng.standard_normal((num_topics, KV_HEADS, head_dim), dtype=np.float32)
    runs = np.repeat(rng.integers(0, num_topics, kv_len // 11 + 1), 11)[:kv_len]
    noise = rng.standard_normal((kv_len, KV_HEADS, head_dim), dtype=np.float32)
    return torch.from_numpy((2 * topics[runs] + 0.5 * noise).swapaxes(0, 1).copy())


def context_of(rng, pool, kv_len=700, head_dim=32, dtype=torch.float32, marks=True):
    keys = topical(rng, kv_len, head_dim).to(dtype)
    values = torch.from_numpy(rng.standard_normal(keys.shape, dtype=np.float32)).to(dtype)
    queries = rng.standard_normal((KV_HEADS * GROUP, 32, head_dim), dtype=np.float32)
    return BuildContext(
        layer_idx=1,
        keys=keys,
        values=values,
        queries=torch.from_numpy(queries).to(dtype),
        sm_scale=head_dim**-0.5,
        capacity_tokens=kv_len + 300,
        text_marks=rng.choice(np.array([0, 2, 0x40, 0x41], np.uint8), kv_len) if marks else None,
        pool=pool,
    )


def on(device: str, context: BuildContext) -> BuildContext:
    """Strided, as the rows of a prefill's buffer are."""
    moved = {
        name: torch.cat([x, x], dim=1).to(device)[:, : x.shape[1]]
        for name in ("keys", "values", "queries")
        for x in [getattr(context, name)]
    }
    return BuildContext(**{**vars(context), **moved})


def both_builds(policy: Any, context: BuildContext, device: str) -> tuple[State, State]:
    finish = policy.device.build(on(device, context))
    if device == "cuda":
        torch.cuda.synchronize()
    built, on_device = policy.state.build(context), finish()
    assert built.keys() == on_device.keys()
    return built, on_device


def pairs_of(arrays: State, others: State) -> list[tuple[Any, Any]]:
    return [(arrays[name], others[name]) for name in others]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("dtype", "head_dim", "kv_len"),
    pairwise([torch.float32, torch.float16, torch.bfloat16], [32, 128, 256], [15, 100, 700]),
)
def test_quest(device, dtype, head_dim, kv_len, pool):
    policy = make_policy("quest", budget_tokens=80)
    context = context_of(new_rng(), pool, kv_len, head_dim, dtype)
    for expected, array in pairs_of(*both_builds(policy, context, device)):
        assert expected.dtype == array.dtype
        np.testing.assert_array_equal(array, expected)


@pytest.mark.parametrize(
    ("device", "dtype", "granularity", "kv_len"),
    combinations(DEVICES, [torch.float32, torch.bfloat16], ["kv_head", "query_head"], [90, 700]),
)
def test_lfps(device, dtype, granularity, kv_len, pool):
    policy = make_policy("lfps", budget_tokens=80, granularity=granularity)
    context = context_of(new_rng(), pool, kv_len, dtype=dtype)
    expected, arrays = both_builds(policy, context, device)
    for built in (expected, arrays):
        unlist_all(built)  # what is listed depends on the last bit of a mean
    for name in ("tables", "answers", "variance_ratios"):
        assert relative_error(arrays[name], expected[name]) < 1e-5
    for a, b in pairs_of(arrays, expected):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)


@pytest.mark.parametrize(
    ("device", "dtype", "kv_len", "options"),
    combinations(
        DEVICES, [torch.float32, torch.bfloat16], [100, 700, 3000], [{}, {"ranked_chunks": 40}]
    ),
)
def test_lychee_cluster(options, device, dtype, kv_len, pool):
    """The same units of the same chunks, and what belongs to them."""
    policy = make_policy("lychee_cluster", budget_tokens=81, **options)
    context = context_of(new_rng(), pool, kv_len, 64, dtype)
    expected, arrays = both_builds(policy, context, device)
    for a, b in pairs_of(arrays, expected):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
    before, index = LycheeIndex(expected), LycheeIndex(arrays)
    np.testing.assert_array_equal(index.starts(), before.starts())
    # A chunk between two clusters may go to the other one: fewer than one in a hundred.
    differing = (index.order() != before.order()).mean()
    assert differing < 0.01
    if differing == 0:
        # A number at a boundary may be rounded to either side: a scale by the last of its bits,
        # and few of the others by one step.
        for found, known, steps in zip(index.boxes(), before.boxes(), (7, 15), strict=True):
            away = np.abs(found - known) / np.abs(known).max(axis=-1, keepdims=True)
            assert away.max() < 1.01 / steps
            assert (away > 0.01).mean() < 0.01


@pytest.mark.cuda
def test_lychee_cluster_of_a_long_prompt(pool):
    """More chunks than one program looks at together: every chunk still has its box."""
    policy = make_policy("lychee_cluster", budget_tokens=1024)
    context = context_of(new_rng(), pool, 33_000, 64, torch.bfloat16)
    _, arrays = both_builds(policy, context, "cuda")
    index, keys = LycheeIndex(arrays), context.keys.double().numpy()
    assert index.num_units > 1
    starts = index.starts()
    for head in range(len(keys)):
        centres, widths = (x[head, index.num_units :] for x in index.boxes())
        for place, chunk in enumerate(index.order()[head]):
            tokens = keys[head, starts[chunk] : starts[chunk + 1]]
            low, high = tokens.min(axis=0), tokens.max(axis=0)
            centre, width = (tokens.mean(axis=0) + (low + high) / 2) / 2, (high - low) / 2
            assert np.abs(centres[place] - centre).max() < 0.51 * 1.01 / 7 * np.abs(centre).max()
            assert np.abs(widths[place] - width).max() < 0.51 * 1.01 / 15 * width.max()


@pytest.mark.parametrize(
    ("device", "dtype", "bits", "head_dim", "kv_len"),
    combinations(
        DEVICES, [torch.float32, torch.bfloat16], [(1, 48), (1, 128), (2, 64), (2, 80)], [64, 700]
    ),
)
def test_sketch(device, dtype, bits, head_dim, kv_len, pool, monkeypatch):
    monkeypatch.setattr("offload.policies.sketch.codes_on_device.WORKSPACE_BYTES", 1 << 18)
    policy = make_policy("sketch", budget_tokens=80, bits=bits)
    context = context_of(new_rng(), pool, kv_len, head_dim, dtype)
    expected, arrays = both_builds(policy, context, device)
    for name, array in arrays.items():
        assert (array.shape, array.dtype) == (expected[name].shape, expected[name].dtype)
        if name not in ("codes", "scales", "mean"):
            np.testing.assert_array_equal(array, expected[name])
    np.testing.assert_allclose(arrays["mean"], expected["mean"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(arrays["scales"], expected["scales"], rtol=1e-3)
    # A mean whose last bit differs moves what is at a bound.
    assert (arrays["codes"] != expected["codes"]).mean() < 1e-3


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bits", [1, 2])
def test_a_sketch_of_small_integers_is_the_same_bit_for_bit(bits, device, pool):
    """Nothing is rounded before the scales: elements of 0 have the same code, too."""
    half = torch.from_numpy(new_rng().integers(-3, 4, (KV_HEADS, 150, 64))).float()
    keys = torch.cat([half, -half, torch.zeros(KV_HEADS, 7, 64)], dim=1)
    context = replace(context_of(new_rng(), pool, 307, 64), keys=keys)
    policy = make_policy("sketch", budget_tokens=80, bits=bits)
    expected, arrays = both_builds(policy, context, device)
    assert not arrays["mean"].any()
    np.testing.assert_array_equal(arrays["codes"], expected["codes"])
    np.testing.assert_allclose(arrays["scales"], expected["scales"], rtol=1e-6)
    rotated = keys @ torch.from_numpy(rotation(64))
    assert (rotated[:, :300] == 0).float().mean() > 0.02


def test_a_key_that_is_not_finite_has_no_scale(pool):
    context = context_of(new_rng(), pool, 300, 64)
    context.keys[1, 70, 5] = float("nan")
    expected, arrays = both_builds(make_policy("sketch", budget_tokens=80), context, "cpu")
    for built in (expected, arrays):
        assert np.argwhere(np.isnan(built["scales"])).tolist() == [[1, 70]]
        assert not built["mean"][1, 5].any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_chunk_boxes(device, dtype, pool):
    rng = new_rng()
    keys = torch.from_numpy(rng.standard_normal((3, 200, 48), dtype=np.float32)).to(dtype)
    keys[1, 20:30] = 0
    starts = np.array([4, 20, 30, 31, 47, 199])
    expected = clustering.chunk_boxes(pool, keys, starts)
    results = chunk_boxes(keys.to(device), torch.from_numpy(starts).to(device))
    for x, y in zip(results, expected, strict=True):
        assert relative_error(x.cpu().numpy(), y) < 1e-6


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("n", "k"), [(1, 1), (40, 40), (40, 39), (300, 64), (1000, 500)])
def test_spherical_kmeans(device, n, k, pool, monkeypatch):
    """As good a clustering as the native one, the same where nothing is at a boundary."""
    monkeypatch.setattr(
        "offload.policies.lychee_cluster.index_on_device.WORKSPACE_BYTES", 4 * 3 * k * 7
    )
    rng = new_rng()
    points = rng.standard_normal((3, n, 32), dtype=np.float32)
    points /= np.linalg.norm(points, axis=-1, keepdims=True)
    expected_labels, expected = clustering.spherical_kmeans(pool, points, k, 10)
    labels, centroids = (
        x.cpu().numpy() for x in spherical_kmeans(torch.from_numpy(points).to(device), k, 10)
    )
    for head in range(3):
        assert set(labels[head]) == set(range(k))
        fit = (points[head] * centroids[head, labels[head]]).sum()
        expected_fit = (points[head] * expected[head, expected_labels[head]]).sum()
        assert fit == pytest.approx(expected_fit, rel=2e-3)
        sums = np.zeros((k, 32))
        np.add.at(sums, labels[head], points[head].astype(np.float64))
        sums /= np.linalg.norm(sums, axis=-1, keepdims=True)
        assert relative_error(centroids[head], sums) < 1e-5
    if k in (1, 39, 40):
        np.testing.assert_array_equal(labels, expected_labels)


def test_a_chunk_less_context(pool):
    policy = make_policy("lychee_cluster", budget_tokens=81)
    context = context_of(new_rng(), pool, 70)
    for a, b in pairs_of(*both_builds(policy, context, "cpu")):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("quest", {}),
        ("lfps", {}),
        ("lychee_cluster", {}),
        ("sketch", {}),
        ("per_head", {}),
        ("tidal_decode", {"inner": "lfps"}),
    ],
)
def test_alongside_a_prefill(name, options, pool):
    """What `prefill` and `PrefillBuild` leave is what decoding would have built from the host."""
    _, lean = tiny_lean_model()
    options = dict(options)
    if "inner" in options:
        inner = make_policy(options.pop("inner"), budget_tokens=90, dense_layers=1)
        policy = make_policy(name, inner=inner, select_layers=(1,))
    else:
        policy = make_policy(name, budget_tokens=90, dense_layers=1, **options)
    store = store_for(lean)
    attention = DecodeAttention(
        policy, store, num_qo_heads=lean.shape.num_qo_heads, pool=pool, sm_scale=0.2
    )
    lengths = [150, 89, 90, 30]
    seqs = [store.new_sequence() for _ in lengths]
    build = attention.prefill_build(seqs, lengths)
    assert isinstance(build, PrefillBuild)
    run_prefill(
        lean, store, seqs, lengths, on_queries=attention.on_prefill_queries, on_layer=build.on_layer
    )
    known = attention.states._known
    queries = {seq: dict(known[seq].queries or {}) for seq in seqs}
    build.finish()
    assert build.host_seconds > 0
    has_arrays = [attention.states.arrays_of(seq) is not None for seq in seqs]
    assert has_arrays == [True, False, True, False]
    for seq, kv_len in ((seqs[0], 150), (seqs[2], 90)):
        built = attention.states.arrays_of(seq)
        attention.states.rebuild(seq)
        known[seq].queries = queries[seq]
        expected = attention.states.ensure(seq, kv_len + 1)
        assert built.capacity_tokens == expected.capacity_tokens
        for arrays, others in zip(built.layers, expected.layers, strict=True):
            for a, b in pairs_of(arrays, others):
                assert a.shape == b.shape
                if name == "quest":
                    np.testing.assert_array_equal(a, b)
    assert bool(known[seqs[1]].queries) == (policy.state.observed_queries > 0)


def test_a_policy_without_it_is_built_later(pool):
    from cases.heavy_hitter import HeavyHitter

    _, lean = tiny_lean_model()
    store = store_for(lean)

    policy = HeavyHitter(budget_tokens=90, dense_layers=1)
    attention = DecodeAttention(
        policy, store, num_qo_heads=lean.shape.num_qo_heads, pool=pool, sm_scale=0.2
    )
    seq = store.new_sequence()
    assert attention.prefill_build([seq], [120]) is None
    run_prefill(lean, store, [seq], [120])
    assert attention.states.arrays_of(seq) is None
    assert attention.states.ensure(seq, 121).layers[1]


@pytest.mark.parametrize(("name", "options"), [("quest", {"budget_tokens": 90}), ("full", {})])
def test_nothing_to_build_of_short_or_dense_sequences(name, options, pool):
    _, lean = tiny_lean_model()
    store, num_qo_heads = store_for(lean), lean.shape.num_qo_heads
    policy = make_policy(name, **options)
    attention = DecodeAttention(policy, store, num_qo_heads=num_qo_heads, pool=pool)
    assert attention.prefill_build([store.new_sequence()], [50]) is None
