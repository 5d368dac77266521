"""Measuring the profile of this machine that plans are made from."""

from __future__ import annotations

import torch

from offload.measuring.machine.host import measure_host
from offload.measuring.machine.spread import Spread
from offload.measuring.machine.steps import host_step_us
from offload.models.shape import ModelShape
from offload.planning.profile import MachineProfile, OnProgress, machine_key

_BATCH_ROWS = (2, 8)


def measure_profile(
    device: torch.device,
    num_threads: int,
    *,
    shape: ModelShape,
    dtype: torch.dtype = torch.bfloat16,
    rows: int = 1,
    on_progress: OnProgress = lambda what, done, total: None,
) -> MachineProfile:
    """Measure this machine, for models of layers as in `shape`; some seconds.

    Args:
        rows: sequences of a step, whose linear layers are measured beside those of one and of
            some, on a GPU.
    """
    key = machine_key(device)
    spread = Spread()
    shape = shape.of_a_token
    host = measure_host(num_threads, shape, dtype, on_progress, spread)
    measured = None
    linear: dict[str, dict[int, float]] = {}
    lm_head: dict[str, dict[int, float]] = {}
    step_us = 0.0
    if device.type == "cpu":
        on_progress("linear layers", 0, 1)
        linear, lm_head, step_us = host_step_us(shape, dtype, num_threads)
        on_progress("linear layers", 1, 1)
    else:
        from offload.measuring.machine.device import measure_device

        measured = measure_device(
            device,
            shape,
            dtype,
            rows=sorted({1, *_BATCH_ROWS, rows}),
            driver=key["driver"],
            num_threads=num_threads,
            on_progress=on_progress,
        )
    return MachineProfile(
        cpu=key["cpu"],
        isa=key["isa"],
        num_threads=num_threads,
        version=key["version"],
        layer_linear_us=linear,
        lm_head_us=lm_head,
        step_us=step_us,
        spread=spread.most,
        device=measured,
        **host,
    )
