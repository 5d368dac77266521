"""TidalDecode: which layers do what, what is refused, and that reuse is what it says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from cases.reuse_cases import GROUP_SIZE, check_top_k, importance_of, make_case, step_through

from offload.policies import ExactTopK, Full, LycheeDecode, Quest, TidalDecode
from offload.policies.base import SparsePolicy
from offload.policies.registry import make_policy
from offload.policies.tidal_decode import default_select_layers
from offload.selection.callback import Callback, callback, read_context, view_float32
from offload.selection.policy import DENSE, RETRIEVE, REUSE, SELECT

SMALL = {"budget_tokens": 48, "sink_tokens": 4, "recent_tokens": 8, "dense_layers": 1}


def roles_by_layer(policy: TidalDecode, num_layers: int, num_units: int = 2) -> list[int]:
    roles = policy.roles(num_layers, num_units)
    assert roles.shape == (num_layers, num_units)
    assert (roles == roles[:, :1]).all()
    return roles[:, 0].tolist()


def test_roles():
    policy = TidalDecode(ExactTopK(dense_layers=2), select_layers=(5, 2))
    assert policy.select_layers == (2, 5)
    expected = [DENSE, DENSE, RETRIEVE, REUSE, REUSE, RETRIEVE, REUSE, REUSE]
    assert roles_by_layer(policy, 8) == expected
    policy = TidalDecode(Quest(dense_layers=2), select_layers=(2, 5))
    expected = [DENSE, DENSE, SELECT, REUSE, REUSE, SELECT, REUSE, REUSE]
    assert roles_by_layer(policy, 8) == expected
    # Layers above the first selection have nothing to reuse.
    policy = TidalDecode(ExactTopK(dense_layers=1), select_layers=(3,))
    assert roles_by_layer(policy, 5) == [DENSE, DENSE, DENSE, RETRIEVE, REUSE]


@pytest.mark.parametrize(
    ("shape", "dense_layers", "expected"),
    [
        ((32, 8), 2, (2, 13)),  # Llama-3-8B, the paper
        ((32, 32), 2, (2, 7)),  # Llama-2-7B, the paper
        ((30, 3), 2, (2, 6, 17, 21)),  # SmolLM2-135M, measured
        ((30, 3), 5, (5, 6, 17, 21)),
        ((36, 8), 2, (2, 15)),
        ((80, 8), 2, (2, 32)),
        ((2, 2), 0, (0, 1)),
        ((4, 2), 2, (2,)),
        ((2, 2), 2, ()),
    ],
)
def test_default_select_layers(shape, dense_layers, expected):
    assert default_select_layers(*shape, dense_layers) == expected
    roles = TidalDecode(ExactTopK(dense_layers=dense_layers)).roles(*shape)
    assert tuple(np.flatnonzero(roles[:, 0] == RETRIEVE)) == expected


def test_options_of_the_inner_policy_are_its_own():
    policy = make_policy("tidal_decode", budget_tokens=256, select_layers=(2, 13))
    assert policy == TidalDecode(ExactTopK(budget_tokens=256), select_layers=(2, 13))
    assert (policy.budget_tokens, policy.sink_tokens, policy.recent_tokens) == (256, 4, 64)
    assert make_policy("tidal_decode", select_layers="2, 13").select_layers == (2, 13)
    assert make_policy("tidal_decode", select_layers=7).select_layers == (7,)
    assert make_policy("tidal_decode").select_layers is None
    policy = make_policy("tidal_decode", inner="quest", budget_tokens=512)
    assert policy.inner == Quest(budget_tokens=512)
    assert not policy.scans_keys
    assert policy.state.has_arrays
    assert policy.members == (policy.inner,)
    policy = make_policy("tidal_decode", inner=Quest(page_tokens=32))
    assert policy.inner.page_tokens == 32
    assert not TidalDecode().state.has_arrays
    assert TidalDecode().scans_keys


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"select_layers": ()}, "select_layers is empty: without a token-selection layer"),
        ({"select_layers": ""}, "select_layers is empty"),
        ({"select_layers": (2, 5, 2)}, r"select_layers=\(2, 5, 2\) names layer 2 twice"),
        ({"select_layers": (1, 5)}, "layer 1 is not after the first dense_layers=2 layers"),
        ({"select_layers": (-1,)}, "layer -1 is not after the first dense_layers=2 layers"),
        ({"select_layers": (2.0,)}, r"select_layers must be layer numbers, got \(2\.0,\)"),
        ({"select_layers": "2;5"}, "layer numbers, separated by commas, got '2;5'"),
        ({"budget": 3}, "policy 'tidal_decode' has no option 'budget'"),
        ({"budget_tokens": 60}, "budget_tokens=60 cannot hold"),
        ({"inner": "ful"}, "unknown policy 'ful'"),
        ({"inner": "full"}, "needs an inner policy that selects in every layer, .*, got full"),
        ({"inner": LycheeDecode()}, "selects in every layer, .*, got lychee_decode"),
        ({"inner": TidalDecode()}, "selects in every layer, .*, got tidal_decode"),
        ({"inner": ExactTopK(), "budget_tokens": 128}, "given beside a policy object"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        make_policy("tidal_decode", **options)


def test_bad_inner_objects():
    for inner in (Full(), "exact_topk"):
        with pytest.raises(ValueError, match="needs an inner policy that selects"):
            TidalDecode(inner)


def test_layers_the_model_does_not_have(pool):
    cache, _ = make_case()
    message = r"select_layers=\(2, 6\) names layer 6, but this model has layers 0 to 5"
    with pytest.raises(ValueError, match=message):
        cache.attention(pool, GROUP_SIZE, TidalDecode(ExactTopK(), select_layers=(2, 6)))
    cache.attention(pool, GROUP_SIZE, TidalDecode(ExactTopK(), select_layers=(2, 5)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_reusing_layers_attend_to_the_top_tokens_of_the_select_layer(dtype, pool):
    policy = TidalDecode(ExactTopK(**SMALL), select_layers=(1, 4))
    cache, queries = make_case(dtype, rows=3)
    attention = cache.attention(pool, GROUP_SIZE, policy)
    kv_lens = [300, 400, 355]
    selections = step_through(cache, attention, queries, kv_lens)
    for layer_idx in (0, 1, 4):  # dense and retrieving layers attend to everything
        assert selections[layer_idx] == [[[], []]] * 3
    for layer_idx, source in ((2, 1), (3, 1), (5, 4)):
        for row, kv_len in enumerate(kv_lens):
            importance = importance_of(cache, queries[source][row], source, kv_len).sum(0)
            for tokens in selections[layer_idx][row]:
                check_top_k(tokens, importance, policy, 48 - 12)
            assert selections[layer_idx][row][0] == selections[layer_idx][row][1]
    assert selections[2] == selections[3]
    assert selections[2] != selections[5]


def test_steps_do_not_reuse_what_an_earlier_step_published(pool):
    policy = TidalDecode(ExactTopK(**SMALL), select_layers=(1,))
    cache, queries = make_case()
    _, other = make_case()
    attention = cache.attention(pool, GROUP_SIZE, policy)
    first = step_through(cache, attention, queries, [399])
    second = step_through(cache, attention, other, [400])
    again = step_through(cache, attention, queries, [399])
    assert first == again
    importance = importance_of(cache, other[1][0], 1, 400).sum(0)
    for tokens in second[5][0]:
        check_top_k(tokens, importance, policy, 48 - 12)


def test_an_inner_policy_that_does_not_scan_selects_for_itself(pool):
    """Quest in layers 1 and 4: they attend to its selection, and so do the layers below them."""
    quest = Quest(**SMALL)
    cache, queries = make_case()
    attention = cache.attention(pool, GROUP_SIZE, TidalDecode(quest, select_layers=(1, 4)))
    selections = step_through(cache, attention, queries, [400])
    alone = step_through(cache, cache.attention(pool, GROUP_SIZE, quest), queries, [400])
    assert selections[0] == [[[], []]]
    for layer_idx, source in ((1, 1), (2, 1), (3, 1), (4, 4), (5, 4)):
        assert selections[layer_idx] == alone[source]
    arrays = attention.states.arrays_of(cache.seq).layers
    assert [bool(of_layer) for of_layer in arrays] == [False, True, False, False, True, False]


@callback
def propose(pointer: Any) -> int:
    """Answers with zeros instead of attending."""
    ctx = read_context(pointer)
    view_float32(ctx.output, ctx.group_size * ctx.head_dim)[:] = 0.0
    view_float32(ctx.lse, ctx.group_size)[:] = 0.0
    return -2


@dataclass(frozen=True)
class Answering(SparsePolicy):
    name: ClassVar[str] = "answering"
    propose: ClassVar[Callback | None] = propose


def test_heads_below_one_that_answered_keep_sinks_and_window(pool):
    """Not what was published before: here, nothing or the last step's selection."""
    policy = TidalDecode(Answering(**SMALL), select_layers=(1,))
    cache, queries = make_case()
    attention = cache.attention(pool, GROUP_SIZE, policy)
    for kv_len in (399, 400):
        step = attention.begin_step([cache.seq], [kv_len])
        for layer_idx, query in enumerate(queries[:3]):
            attention.attend(layer_idx, step, query, torch.empty_like(query))
        assert attention.last_selection() == [[*range(4), *range(kv_len - 8, kv_len)]] * 2
