"""Part `heads` of `perf.bench_gpu`: retrieval heads on the GPU, and who attends to the other heads.

LycheeDecode with layer 0 and an eighth of the KV heads retrieving, TidalDecode, and what `auto` is,
`per_head`: each with its retrieving heads on the CPU, on the GPU, with the rows of more and more of
the other heads fetched by the GPU, and placed as `offload plan` does; beside the graph with all KV
on the GPU, and transformers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from offload.bench.decode.engines import graph_row, stock_row
from offload.bench.pipeline.settings import PipelineSettings
from offload.decode.gpu.placement import HeadPlacement, Place, whole_on_device
from offload.models.shape import MODEL_SHAPES
from offload.planning.plan import make_plan
from offload.policies import Policy
from offload.policies.base import DENSE, RETRIEVE, REUSE
from offload.policies.registry import make_policy
from perf.gpu_steps import STOCK_STEPS, GPUBench, Row, measure_ours, plan_request

RETRIEVAL_SHARE = 8  # one KV head in so many retrieves, beside those of layer 0
BUDGETS = {"lychee_decode": 2048, "tidal_decode": 1024, "per_head": 1024}


def head_policies(settings: PipelineSettings, names: list[str]) -> list[Policy]:
    """The policies of this part."""
    shape = MODEL_SHAPES[settings.shape]
    retrieving = max(1, shape.num_layers * shape.num_kv_heads // RETRIEVAL_SHARE)
    options = {"lychee_decode": {"retrieval_heads": retrieving}}
    return [
        make_policy(name, budget_tokens=BUDGETS[name], **options.get(name, {})) for name in names
    ]


def placement(settings: PipelineSettings, policy: Policy, num_gathered: int) -> HeadPlacement:
    """Retrieving heads on the GPU, and of each layer's others `num_gathered`; -1: all on the CPU
    that a policy does not leave dense."""
    shape = MODEL_SHAPES[settings.shape]
    roles = policy.roles(shape.num_layers, shape.num_kv_heads)
    assert roles is not None
    places = np.full(roles.shape, Place.CPU, np.uint8)
    places[roles == DENSE] = Place.GPU
    if num_gathered >= 0:
        places[(roles == RETRIEVE) | whole_on_device(policy, roles)] = Place.GPU
        for of_layer, of_roles in zip(places, roles, strict=True):
            of_layer[np.flatnonzero(of_roles == REUSE)[:num_gathered]] = Place.GATHER
    return HeadPlacement(places)


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
                for count in gathered:
                    placed = replace(
                        settings, policy=policy, placement=placement(settings, policy, count)
                    )
                    yield measure_ours(bench, placed, cache) | {"gathered_heads": count}
                if bench.is_cuda:
                    request = plan_request(settings, policy, kv_len)
                    chosen = make_plan(request, bench.profile).placement
                    counted = {place.name: sum(chosen.counts(place)) for place in Place}
                    placed = replace(settings, policy=policy, placement=chosen)
                    row = measure_ours(bench, placed, cache)
                    yield row | {"gathered_heads": None, "heads": counted}
        yield graph_row(bench.model, kv_len, num_steps=bench.num_steps)
        yield stock_row(bench.model, kv_len, offloaded=False, num_steps=STOCK_STEPS)
