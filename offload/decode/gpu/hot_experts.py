"""Experts on the host in a step, and copies on the GPU of those that are used most.

Of each layer whose experts stay on the host the GPU has `num_slots` copies, and a table of the slot
of each expert. In a step its router chooses; it runs the chosen experts that have a slot, the CPU
the others, and their sums are added. Where each is run is decided on the GPU alone: the CPU gets
what is left to it. Choices are counted in the step. Every so many steps those of a layer's other
experts that are used more take the slots of those that are used less, a bounded number of bytes
at a time and between two steps, in the stream that both wait for: no step sees half an expert.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from gpu_ops.routed_linear import run_experts, split_experts
from offload.models.routed_mlp import RoutedMlp
from offload.system.errors import DeviceMemoryError
from offload.system.interrupts import shielded

_STEPS = 16  # at least, from one look at the use to the next: steps in turn are not interrupted
_KEPT = 0.9  # of the use so far, at each look: half of it counts after about 100 steps
_MOST_BYTES = 128 * 2**20  # copied at one look: some 10 ms over PCIe
_MARGIN = 1.25  # times and one choice by which a newcomer is used more: no swaps to and fro


class HotExperts:
    """Experts on the host, some of them on the GPU as well.

    Args:
        routed: the MLPs of those layers, at least one, by their number in the stock model.
        num_slots: experts of each layer that the GPU has.

    Attributes:
        num_experts: of each layer.
        use: float32 [layers, num_experts] on the GPU: how often each was chosen.
        num_steps: since the last look at the use.

    Raises:
        DeviceMemoryError: the GPU has no memory for them.
    """

    def __init__(self, routed: Mapping[int, RoutedMlp], num_slots: int) -> None:
        self._rows = {number: row for row, number in enumerate(sorted(routed))}
        self._routed = [routed[number] for number in self._rows]
        try:
            self._mlps = [mlp.with_slots(num_slots) for mlp in self._routed]
        except torch.OutOfMemoryError as error:
            raise DeviceMemoryError(
                f"the GPU has no memory left for copies of {num_slots} experts of each of "
                f"{len(routed)} layers; lower hot_experts"
            ) from error
        self.num_slots, self.num_steps = num_slots, 0
        router = self._mlps[0].router
        self.num_experts = router.out_features
        self.use = torch.zeros(len(routed), self.num_experts, device=router.device)
        # The slot of each expert, on this side; -1: it has none.
        self._slots = np.full((len(routed), self.num_experts), -1, np.int32)
        self._slots[:, :num_slots] = range(num_slots)
        self._slot_of = torch.from_numpy(self._slots).to(router.device, copy=True)

    def choose(
        self,
        number: int,
        normed: Tensor,
        positions: Tensor,
        host_experts: Tensor,
        host_weights: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Slots and weights that `run` takes, of rows [n, hidden_size]; other arguments as of
        `split_experts`."""
        row = self._rows[number]
        mlp = self._mlps[row]
        experts, weights = mlp.choose(mlp.router(normed))
        slots = split_experts(
            experts,
            weights,
            self._slot_of[row],
            positions,
            self.use[row],
            host_experts,
            host_weights,
        )
        return slots, weights

    def run(self, number: int, normed: Tensor, slots: Tensor, weights: Tensor) -> Tensor | None:
        """What the GPU has of the sum of experts, the shared one included; None: nothing."""
        mlp = self._mlps[self._rows[number]]
        of_shared = None if mlp.shared is None else mlp.shared(normed, None)
        if not self.num_slots:
            return of_shared
        found = run_experts(mlp.up, mlp.down, normed, slots, weights)
        return found if of_shared is None else found.add_(of_shared)

    def follow_use(self) -> None:
        """Between two steps, in the current stream: at times, let those that are used more take
        slots."""
        if not 0 < self.num_slots < self.num_experts or self.num_steps < _STEPS:
            return
        self.num_steps = 0
        swaps = self._wanted_swaps(self.use.cpu().numpy())
        self.use *= _KEPT
        with shielded():  # or ctrl-C might leave an expert in the slot of another
            left_bytes = _MOST_BYTES
            for row, newcomer, leaver in swaps:
                left_bytes -= self._swap(row, newcomer, leaver)
                if left_bytes <= 0:
                    break
            if swaps:
                self._slot_of.copy_(torch.from_numpy(self._slots))

    def _swap(self, row: int, newcomer: int, leaver: int) -> int:
        """Bytes that were copied."""
        slots, mlp, num_bytes = self._slots[row], self._mlps[row], 0
        slot = slots[newcomer] = slots[leaver]
        slots[leaver] = -1
        for to, source in zip((mlp.up, mlp.down), self._routed[row].matrices(), strict=True):
            to.put(int(slot), source, newcomer)
            num_bytes += to.num_bytes // self.num_slots
        return num_bytes

    @property
    def per_token(self) -> int:
        """Experts that the router chooses."""
        return self._mlps[0].per_token

    def _wanted_swaps(self, use: np.ndarray) -> list[tuple[int, int, int]]:
        """(row, newcomer, leaver) of all swaps that are worth it, the most useful first."""
        has_slot = self._slots >= 0
        most = min(self.num_slots, self.num_experts - self.num_slots)
        newcomers = np.where(has_slot, np.inf, -use).argsort(1, kind="stable")[:, :most]
        leavers = np.where(has_slot, use, np.inf).argsort(1, kind="stable")[:, :most]
        of_newcomers, of_leavers = (np.take_along_axis(use, x, 1) for x in (newcomers, leavers))
        gains = of_newcomers - (_MARGIN * of_leavers + 1.0)
        order = np.argsort(-gains, axis=None, kind="stable")
        rows, places = np.unravel_index(order[: int((gains > 0.0).sum())], gains.shape)
        pairs = zip(rows, newcomers[rows, places], leavers[rows, places], strict=True)
        return [(int(row), int(newcomer), int(leaver)) for row, newcomer, leaver in pairs]
