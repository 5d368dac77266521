"""What `offload bench latency` runs on: sequences in a host KV store, and steps after them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cpu_ops.worker_pool import WorkerPool
from offload.bench.eval.labels import policy_options
from offload.bench.latency.plan import LayerPlan, plan_layers
from offload.measuring.synthetic.model_cache import ModelCache, structured_model_cache
from offload.models import ModelShape
from offload.policies import Policy
from offload.system.memory import available_cpus


@dataclass
class LatencyWorkload:
    """Sequences of some layers, which stand for all of a model's, and what steps add and ask.

    A step is: `advance`, whatever reads it, `commit`.

    Attributes:
        cache: whose rows no rotation follows.
        shape: of those layers.
        plans: of each policy, by the name to show.
        options: of the policies, as they were given.
    """

    cache: ModelCache
    shape: ModelShape
    plans: dict[str, LayerPlan]
    options: dict[str, dict[str, Any]]

    def __post_init__(self) -> None:
        self.store, self.seqs = self.cache.store, self.cache.seqs
        self.num_layers, self.batch_size = self.shape.num_layers, len(self.seqs)
        self.sm_scale = self.shape.head_dim**-0.5

    def queries(self, layer_idx: int, step: int) -> Tensor:
        """[batch_size, num_qo_heads * head_dim] of a step, contiguous."""
        width = self.shape.num_qo_heads * self.shape.head_dim
        return self.cache.rows.rows[step, layer_idx, :, :width].contiguous()

    def advance(self, step: int) -> list[int]:
        """Write the step's keys and values; returns each sequence's length with them."""
        self.store.reserve(self.seqs, [1] * self.batch_size)
        heads = self.shape.num_kv_heads
        for layer_idx, rows in enumerate(self.cache.rows.rows[step]):
            new = rows.view(self.batch_size, 1, -1, self.shape.head_dim)[:, :, -2 * heads :]
            for seq, row in zip(self.seqs, new, strict=True):
                self.store.append(seq, layer_idx, *row.split(heads, 1))
        return [self.store.kv_len(seq) + 1 for seq in self.seqs]

    def commit(self) -> None:
        """The step's tokens belong to the sequences from now on."""
        self.store.commit(self.seqs, [1] * self.batch_size)

    def rewind(self) -> None:
        """Back to the prompts."""
        for seq in self.seqs:
            self.store.truncate(seq, self.cache.kv_len)

    def close(self) -> None:
        """Give the memory back."""
        self.cache.close()


def structured_workload(
    shape: ModelShape,
    policies: Mapping[str, Policy],
    *,
    kv_len: int,
    num_steps: int,
    num_layers: int,
    batch_size: int,
    dtype: torch.dtype,
    seed: int,
    on_layer: Callable[[], None] = lambda: None,
) -> LatencyWorkload:
    """Sequences of structured keys in `num_layers` of the shape's layers.

    Args:
        policies: by the name to show.

    Raises:
        ValueError: a policy that does not fit the shape or so few layers.
        HostBudgetError: before anything is made, if it does not fit.
    """
    plans = {}
    for name, policy in policies.items():
        policy.check_model(**shape.heads)
        per_query_head = policy.selects and policy.per_query_head
        plans[name] = plan_layers(
            policy,
            num_model_layers=shape.num_layers,
            num_layers=num_layers,
            num_units=shape.num_qo_heads if per_query_head else shape.num_kv_heads,
        )
    of_layers = replace(shape, num_layers=num_layers)
    with closing(WorkerPool(available_cpus())) as pool:
        cache = structured_model_cache(
            of_layers,
            kv_len=kv_len,
            num_steps=num_steps,
            ropes=[_no_rotation] * num_layers,
            device=torch.device("cpu"),
            dtype=dtype,
            pool=pool,
            policies=list(dict.fromkeys(plan.policy for plan in plans.values())),
            batch_size=batch_size,
            seed=seed,
            on_layer=lambda done, total: on_layer(),
        )
    options = {name: policy_options(policy) for name, policy in policies.items()}
    return LatencyWorkload(cache, of_layers, plans, options)


def _no_rotation(rows: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines, [1, num_steps, 1] each, that leave rows as they are."""
    cos = torch.ones(1, positions.shape[1], 1)
    return cos, torch.zeros_like(cos)
