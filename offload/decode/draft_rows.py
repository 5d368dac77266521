"""Attending again to the rows that stay of a draft, for what a policy learns from them.

A draft's rows run one after the other in every layer, and what a policy learns in one layer depends
on that layer's queries, keys and values only. So a policy's state before a draft and the queries of
the rows that were accepted are all it takes to have the state that decoding them one by one leaves.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import numpy as np

from offload.selection.policy import DENSE, REUSE

if TYPE_CHECKING:
    from torch import Tensor

    from cpu_ops.step_rows import DecodeStep
    from offload.decode.attention import DecodeAttention
    from offload.selection.state import DraftRows


def attend_again(attention: DecodeAttention, seq: int, rows: DraftRows) -> None:
    """Take the policy's state of `seq` from before `rows` to after them.

    Where there is no memory for it the state is dropped: it is built again from the keys.
    """
    states, top_p_controller = attention.states, attention.top_p_controller
    try:
        with (
            contextlib.nullcontext()
            if top_p_controller is None
            else top_p_controller.as_last_step()
        ):
            for row in range(len(next(iter(rows.queries.values()), ()))):
                _attend_row(attention, seq, rows, row)
    except MemoryError:
        states.rebuild(seq)
    except BaseException:
        states.rebuild(seq)
        raise


def _attend_row(attention: DecodeAttention, seq: int, rows: DraftRows, row: int) -> None:
    states, kv_len = attention.states, rows.first_kv_len + row
    if kv_len > attention.policy.dense_tokens:
        states.ensure(seq, kv_len, kv_len - 1)
    step = attention.begin_step([seq], [kv_len])
    before = step  # where a layer is asked ahead: without the row's own token
    if attention.ahead_layers:
        before = attention.begin_step([seq], [max(1, kv_len - 1)])
    for layer_idx, queries in rows.queries.items():
        query, ahead = queries[row : row + 1], layer_idx in attention.ahead_layers
        if kv_len <= attention.policy.dense_tokens:
            attention.record_step_queries(step, {layer_idx: query})
        elif not ahead:
            _learn(attention, layer_idx, step, query)
        elif kv_len - 1 > attention.policy.dense_tokens:
            _learn(attention, layer_idx, before, query)


def _learn(attention: DecodeAttention, layer_idx: int, step: DecodeStep, query: Tensor) -> None:
    """Attend one row [1, num_qo_heads * head_dim] of one layer as its step has done it."""
    sinks, recent, device_heads = attention.left_to_device or (0, 0, None)
    elsewhere = np.zeros(attention.layer_heads[layer_idx][1], bool)
    if device_heads is not None:
        elsewhere |= device_heads[layer_idx]
    if attention.roles is not None:  # what heads above published in that step is gone
        # Nor do heads learn that attend to everything.
        roles = attention.roles[layer_idx].reshape(len(elsewhere), -1)
        elsewhere |= (roles == REUSE).any(axis=1) | (roles == DENSE).all(axis=1)
    attention.native.learn(
        layer_idx,
        query.data_ptr(),
        step.native,
        attention.left_to_device is not None,
        sinks,
        recent,
        layer_idx in attention.ahead_layers,
        elsewhere.tolist(),
    )
