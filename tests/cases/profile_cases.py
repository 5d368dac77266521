"""Machine profiles with made numbers, and workloads for them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from offload.models.shape import MODEL_SHAPES, ModelShape
from offload.planning.cost_table import CostTable
from offload.planning.profile import DeviceProfile, MachineProfile, shape_key
from offload.planning.workload import Workload
from offload.policies.registry import make_policy

LLAMA = MODEL_SHAPES["llama-3.1-8b"]
SMALL = ModelShape(6, 128, 8, 4, 32, 256, 512, 65536, 10000.0)


def straight(fixed_us: float, us_per_size: float) -> CostTable:
    """fixed_us + us_per_size * size."""
    return CostTable(((0.0, fixed_us), (1e6, fixed_us + 1e6 * us_per_size)))


def device_profile(**changes: Any) -> DeviceProfile:
    """Roughly an H200."""
    return replace(
        DeviceProfile(
            name="made GPU",
            driver="1.0",
            capability=(9, 0),
            num_multiprocessors=132,
            memory_bytes=140 * 2**30,
            read_bandwidth=4e12,
            to_host_bandwidth=55e9,
            from_host_bandwidth=55e9,
            gemv=straight(3.0, 1 / 3.6e6),
            layer_linear_us={shape_key(LLAMA, 2): {1: 129.0}},
            lm_head_us={shape_key(LLAMA, 2): {1: 285.0}},
            attention=straight(6.0, 1 / 4.2e6),
            retrieval=straight(8.0, 1 / 4.0e6),
            top_k=straight(20.0, 1e-5),
            gather=straight(8.0, 1 / 5e4),
            gather_measured=True,
            gather_beside=straight(5.0, 1 / 3e5),
            top_k_beside=straight(5.0, 1e-6),
            window_us=6.6,
            merge_us=4.6,
            sampling_us=15.0,
            round_trip_us=10.0,
            step_us=120.0,
            burst_step_us=20.0,
        ),
        **changes,
    )


def machine_profile(**changes: Any) -> MachineProfile:
    """Roughly 15 threads of a Xeon beside it."""
    return replace(
        MachineProfile(
            cpu="made CPU",
            isa="avx2",
            num_threads=15,
            version="0",
            attention_heads=(32, 8, 128),
            read_bandwidth=190e9,
            attend_cold=CostTable(((131072, 10), (1 << 20, 20), (1 << 22, 50), (1 << 24, 170))),
            attend_warm=CostTable(((131072, 5), (1 << 20, 10), (1 << 22, 25), (1 << 24, 110))),
            scan_dense=straight(10.0, 1 / 1.5e5),
            scan_retrieve=straight(10.0, 1 / 1e5),
            layer_linear_us={},
            lm_head_us={},
            step_us=0.0,
            select_scale={},
            select_hidden={},
            select_ahead={"*": 1.5},
            device=device_profile(),
        ),
        **changes,
    )


def workload(
    policy: str = "lychee_decode",
    kv_len: int = 131072,
    batch_size: int = 1,
    shape: ModelShape = LLAMA,
    **options: Any,
) -> Workload:
    return Workload(shape, make_policy(policy, **options), kv_len, batch_size)
