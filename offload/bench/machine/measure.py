"""Measuring the profile of this machine that plans are made from."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from offload.models.shape import ModelShape
from offload.planning.profile import MachineProfile, OnProgress, machine_key


def measure_profile(
    device: torch.device,
    num_threads: int,
    *,
    shape: ModelShape | None = None,
    dtype: torch.dtype | None = None,
    rows: int = 1,
    on_progress: OnProgress = lambda what, done, total: None,
) -> MachineProfile:
    """Measure this machine; some seconds.

    Args:
        num_threads: of the worker pool.
        shape: whose linear layers and heads are measured; default Llama-3.1-8B's.
        dtype: of weights and KV cache; default bfloat16.
        rows: sequences of a step, whose linear layers are measured beside those of one.
        on_progress: gets what was measured, how many things were, and of how many.
    """
    from offload.bench.machine.host import measure_host

    if shape is None:
        from offload.models.shape import MODEL_SHAPES

        shape = MODEL_SHAPES["llama-3.1-8b"]
    if dtype is None:
        import torch

        dtype = torch.bfloat16
    key = machine_key(device, num_threads)
    host = measure_host(num_threads, shape, dtype, on_progress)
    measured = None
    if device.type == "cuda":
        from offload.bench.machine.device import measure_device

        measured = measure_device(
            device,
            shape,
            dtype,
            rows=sorted({1, rows}),
            driver=key["driver"],
            num_threads=num_threads,
            on_progress=on_progress,
        )
    return MachineProfile(
        cpu=key["cpu"],
        isa=key["isa"],
        num_threads=num_threads,
        version=key["version"],
        device=measured,
        **host,
    )
