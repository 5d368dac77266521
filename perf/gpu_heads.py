"""Part `heads` of `perf.bench_gpu`: retrieval heads on the GPU, and who attends to the other heads.

LycheeDecode with layer 0 and an eighth of the KV heads retrieving, TidalDecode, what `auto` is,
`per_head`, and `sketch`: each with its retrieving heads on the CPU, on the GPU, with the rows of
more and more of the other heads fetched by the GPU, with codes of keys on the GPU, and placed as
`offload plan` does; beside the graph with all KV on the GPU, and transformers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from offload.bench.decode.engines import graph_row, stock_row
from offload.bench.pipeline.settings import PipelineSettings
from offload.decode.gpu.placement import (
    HeadPlacement,
    Place,
    UInt8Array,
    has_codes,
    kv_head_roles,
    whole_on_device,
)
from offload.models.shape import MODEL_SHAPES
from offload.planning.plan import make_plan
from offload.policies import Policy
from offload.policies.base import DENSE, RETRIEVE, REUSE
from offload.policies.registry import make_policy
from perf.gpu_steps import STOCK_STEPS, GPUBench, Row, measure_ours, plan_request

RETRIEVAL_SHARE = 8  # one KV head in so many retrieves, beside those of layer 0
BUDGETS = {"lychee_decode": 2048, "tidal_decode": 1024, "per_head": 1024, "sketch": 1024}


def head_policies(settings: PipelineSettings, names: list[str]) -> list[Policy]:
    """The policies of this part."""
    shape = MODEL_SHAPES[settings.shape]
    retrieving = max(1, shape.num_layers * shape.num_kv_heads // RETRIEVAL_SHARE)
    options = {"lychee_decode": {"retrieval_heads": retrieving}}
    return [
        make_policy(name, budget_tokens=BUDGETS[name], **options.get(name, {})) for name in names
    ]


def _roles(settings: PipelineSettings, policy: Policy) -> UInt8Array:
    shape = MODEL_SHAPES[settings.shape]
    roles = kv_head_roles(policy, shape.num_layers, shape.num_qo_heads, shape.num_kv_heads)
    assert roles is not None  # they select
    return roles


def placement(settings: PipelineSettings, policy: Policy, num_gathered: int) -> HeadPlacement:
    """Retrieving heads on the GPU, and of each layer's others `num_gathered`; -1: all on the CPU
    that a policy does not leave dense."""
    roles = _roles(settings, policy)
    places = np.full(roles.shape, Place.CPU, np.uint8)
    places[roles == DENSE] = Place.GPU
    if num_gathered >= 0:
        places[(roles == RETRIEVE) | whole_on_device(policy, roles)] = Place.GPU
        for of_layer, of_roles in zip(places, roles, strict=True):
            of_layer[np.flatnonzero(of_roles == REUSE)[:num_gathered]] = Place.GATHER
    return HeadPlacement(places)


def coded_placement(settings: PipelineSettings, policy: Policy) -> HeadPlacement | None:
    """Nothing on the GPU but dense layers and codes of keys; None: the policy has none."""
    places = placement(settings, policy, -1).places.copy()
    coded = has_codes(policy, _roles(settings, policy))
    places[coded] = Place.CODES
    return HeadPlacement(places) if coded.any() else None


def heads(
    bench: GPUBench, *, kv_lens: list[int], names: list[str], gathered: list[int]
) -> Iterator[Row]:
    """Time per token at each context.

    Args:
        names: of BUDGETS.
        gathered: heads of a layer whose rows the GPU fetches; -1: retrieving heads on the CPU too.
    """
    policies = head_policies(bench.settings, names)
    for kv_len in kv_lens:
        with bench.caches(kv_len, policies) as (settings, cache):
            for policy in policies:
                seen = set()
                for count in gathered:
                    made = placement(settings, policy, count)
                    if made not in seen:  # nothing of this policy is fetched
                        placed = replace(settings, policy=policy, placement=made)
                        yield measure_ours(bench, placed, cache) | {"gathered_heads": count}
                    seen.add(made)
                coded = coded_placement(settings, policy)
                if coded is not None:
                    placed = replace(settings, policy=policy, placement=coded)
                    yield measure_ours(bench, placed, cache) | {"gathered_heads": 0, "coded": True}
                if bench.is_cuda:
                    request = plan_request(settings, policy, kv_len)
                    chosen = make_plan(request, bench.profile).placement
                    counted = {place.name: sum(chosen.counts(place)) for place in Place}
                    placed = replace(settings, policy=policy, placement=chosen)
                    row = measure_ours(bench, placed, cache)
                    yield row | {"gathered_heads": None, "heads": counted}
        yield graph_row(bench.model, kv_len, num_steps=bench.num_steps)
        yield stock_row(bench.model, kv_len, offloaded=False, num_steps=STOCK_STEPS)
