"""Measures what a policy's own selection costs on this machine's worker pool.

`StepModel` says how many bytes a policy looks at and attends to; how fast it does, its kernels
decide: rows that lie together are read faster than single ones, and some policies compute more than
they read. So one short made context is attended to under the policy, and what it takes is kept in
the profile as a multiple of what the model says of that context.
"""

from __future__ import annotations

import itertools
import time
from contextlib import closing
from dataclasses import replace

import numpy as np
import torch

from cpu_ops.bandwidth import measure_read_bandwidth
from cpu_ops.worker_pool import WorkerPool
from offload.decode.attention import DecodeAttention
from offload.measuring.synthetic.one_slab import num_pages, one_slab_store
from offload.measuring.synthetic.structured_cache import structured_layer
from offload.models.shape import ModelShape, layer_elements
from offload.planning.placement_bytes import head_state_bytes
from offload.planning.profile import MachineProfile
from offload.planning.step_time import StepModel
from offload.planning.workload import Workload, policy_key, timed_tokens
from offload.policies import Policy
from offload.policies.base import in_every_layer
from offload.selection.policy import SELECT
from offload.system.memory import host_memory_limit_bytes

_LAYERS = 2
_REPEATS = 7
_WARM_UP_SECONDS = 0.2
_QUERIES = range(1, 17)  # of the last tokens
_MAX_BYTES_BETWEEN = 2**30


def selects_on_host(policy: Policy, shape: ModelShape, kv_len: int) -> bool:
    """Whether a policy's own kernels select in some layer, so that it has to be measured."""
    work = Workload(shape, policy, max(1, kv_len))
    return work.is_sparse and bool((work.roles() == SELECT).any())


def with_policy(
    profile: MachineProfile, policy: Policy, shape: ModelShape, dtype: torch.dtype, kv_len: int
) -> MachineProfile:
    """`profile` with the policy's `select_scale`, and that of each of its members: measured now, 1
    to 3 s, if it is not there; with a GPU `select_ahead`, too.

    Args:
        kv_len: of the context that is planned; at most so many tokens are attended to.

    Returns:
        `profile` itself where there is nothing to measure, or no memory for it.
    """
    if selects_on_host(policy, shape, kv_len):
        for member in policy.members:
            profile = _with_member(profile, member, shape, dtype, kv_len)
    return profile


def _with_member(
    profile: MachineProfile, policy: Policy, shape: ModelShape, dtype: torch.dtype, kv_len: int
) -> MachineProfile:
    """The profile with the time of a policy that has no others as members."""
    key = policy_key(policy, shape, kv_len)
    if key in profile.select_scale:
        return profile
    tokens = timed_tokens(policy, kv_len)
    layer_bytes = 2 * shape.num_kv_heads * shape.head_dim * dtype.itemsize * tokens
    if 4 * _LAYERS * layer_bytes > host_memory_limit_bytes():
        return profile
    timed = in_every_layer(policy.members[0])

    def model_of(num_layers: int) -> StepModel:
        state_bytes = head_state_bytes(timed, shape, dtype, tokens)
        layers = replace(shape, num_layers=num_layers, windows=())
        work = Workload(layers, timed, tokens, dtype=dtype, head_state_bytes=state_bytes)
        return StepModel(profile, work, on_gpu=False)

    whole = model_of(shape.num_layers)
    between = whole.touched_bytes(whole.roles[-1], whole.work.unit_members[-1])
    if profile.device is None:
        between += layer_elements(shape) * dtype.itemsize
    measured, hidden, ahead = measure_policy_us(
        policy, shape, dtype, tokens, profile.num_threads, int((shape.num_layers - 1) * between)
    )
    model = model_of(_LAYERS)
    heads = model.roles[-1], model.work.unit_members[-1]
    profile = replace(
        profile,
        select_scale={**profile.select_scale, key: measured / model.attend_us(*heads)},
        select_hidden={**profile.select_hidden, key: hidden},
    )
    cold = model.choose_cold_us(*heads)
    if profile.device is None or not cold:  # streaming_llm chooses nothing
        return profile
    return replace(profile, select_ahead={**profile.select_ahead, key: ahead / cold})


def measure_policy_us(
    policy: Policy,
    shape: ModelShape,
    dtype: torch.dtype,
    kv_len: int,
    num_threads: int,
    bytes_between: int,
) -> tuple[float, float, float]:
    """Time of one layer's attention to `kv_len` tokens, after so many other bytes were read.

    Returns:
        Median microseconds; which share of the time is before the query and after the answer; and
        median microseconds where the layer is asked ahead, and nothing is attended.
    """
    kv_len += -kv_len % policy.members[0].observes_every  # a turn, and no less than selects
    pages = _LAYERS * num_pages(kv_len)
    store = one_slab_store(shape, dtype, num_layers=_LAYERS, pages=pages)
    with closing(store), closing(WorkerPool(num_threads)) as pool:
        attention = DecodeAttention(
            in_every_layer(policy.members[0]), store, num_qo_heads=shape.num_qo_heads, pool=pool
        )
        seq = store.new_sequence()
        store.reserve([seq], [kv_len])
        layer = structured_layer(
            shape,
            kv_len=kv_len - 1,
            num_steps=1,
            dtype=dtype,
            seed=0,
            prompt_queries=max(len(_QUERIES), attention.policy.state.observed_queries),
        )
        keys, values = layer.keys.transpose(0, 1), layer.values.transpose(0, 1)
        for layer_idx in range(_LAYERS):  # one and the same, each in memory of its own
            store.append(seq, layer_idx, keys, values, start=0)
            attention.record_queries(seq, layer_idx, layer.queries, kv_len)
        store.commit([seq], [kv_len])
        # Others each time: the rows that a query chooses would be in a cache the second time.
        queries = itertools.cycle(layer.queries[:, -i].reshape(1, -1).clone() for i in _QUERIES)
        step = attention.begin_step([seq], [kv_len])
        out = torch.empty(1, shape.num_qo_heads * shape.head_dim, dtype=dtype)
        most = min(_MAX_BYTES_BETWEEN, host_memory_limit_bytes() // 8)
        between = torch.ones(max(2**20, min(bytes_between, most)), dtype=torch.uint8)
        everything: list[float] = []
        answers: list[float] = []  # what a GPU waits for
        ahead: list[float] = []
        begin, is_first = time.perf_counter(), True
        while len(ahead) < _LAYERS * _REPEATS:
            for times in (everything, answers, ahead):
                measure_read_bandwidth(pool, between, repeats=1)
                of_layers = [next(queries)] * _LAYERS
                layers = attention.time_layers(
                    step,
                    of_layers,
                    out,
                    prepares=times is not answers,
                    chooses_only=times is ahead,
                )
                if is_first or time.perf_counter() - begin < _WARM_UP_SECONDS:
                    continue  # code is loaded, and threads come back to their CPUs
                for seconds, profile in layers:
                    phases = profile["seconds"]
                    updates = phases["update"] / max(sum(phases.values()), 1e-9)
                    share = 1.0 - updates if times is answers else 1.0
                    times.append(1e6 * seconds * share)
            is_first = False
    chooser = policy.members[0]
    # The first layer scores for `observe`, in its turn.
    share = 1.0 / max(_LAYERS, chooser.observes_every)
    of_step = np.reshape(ahead, (-1, _LAYERS)) @ [share, 1.0 - share]
    whole, answer, asked = (float(np.median(times)) for times in (everything, answers, of_step))
    is_done = chooser.prepare is chooser.observe is chooser.append is None
    return whole, 0.0 if is_done else max(0.0, 1.0 - answer / whole), asked
