"""Building what a policy keeps of sequences while they are prefilled on a device.

As soon as the keys and values of a layer are complete, before they leave the device: to build from
the host's copy afterwards would bring all of them back.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from offload.selection.device_support import DeviceBuild
from offload.selection.layer_state import State
from offload.selection.state import PolicyStates

_LAYERS_PENDING = 3


@dataclass(frozen=True)
class _Pending:
    seq: int
    layer_idx: int
    build: DeviceBuild
    done: torch.cuda.Event | None  # by the device; None where there was nothing to wait for

    def is_done(self) -> bool:
        return self.done is None or bool(self.done.query())  # type: ignore[no-untyped-call]


class PrefillBuild:
    """One prefill's builds. `on_layer` goes to `prefill`; afterwards `finish`.

    A layer is finished on the host once the device is found to have done its part (LycheeCluster:
    about 1 ms of a layer of 128K tokens, beside hundreds of the device). The host waits only where
    it is some layers ahead: what is pending holds pinned memory. Sequences are built again later,
    on the host, if `finish` is not reached.

    Args:
        kv_lens: of the sequences to build for, the tokens that they will have.

    Attributes:
        host_seconds: spent here by the host, waiting included.
        copied_heads: KV heads of a layer at most of which `on_layer` makes copies.
    """

    def __init__(self, states: PolicyStates, kv_lens: Mapping[int, int]) -> None:
        self._states = states
        self._kv_lens = dict(kv_lens)
        self._pending: deque[_Pending] = deque()
        self._layers: dict[int, dict[int, State]] = {seq: {} for seq in kv_lens}
        self.host_seconds = 0.0
        self.copied_heads = states.copied_heads

    def on_layer(self, layer_idx: int, seq: int, keys: Tensor, values: Tensor) -> None:
        """Queue the build of one layer from its keys and values [num_kv_heads, kv_len, head_dim].

        Its queries have been recorded by now.
        """
        if seq not in self._layers or layer_idx not in self._states.built_layers:
            return
        start = time.perf_counter()
        kv_len = self._kv_lens[seq]
        if keys.shape[1] != kv_len:
            raise ValueError(
                f"layer {layer_idx} of sequence {seq} has {keys.shape[1]} keys, expected {kv_len}"
            )
        context = self._states.build_context(seq, layer_idx, keys, values, kv_len + 1)
        build = self._states.build_on_device(context)
        done = None
        if keys.is_cuda:
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(torch.cuda.current_stream(keys.device))
        self._pending.append(_Pending(seq, layer_idx, build, done))
        most = _LAYERS_PENDING * len(self._kv_lens)
        while self._pending and (self._pending[0].is_done() or len(self._pending) > most):
            self._make_arrays(self._pending.popleft())
        self.host_seconds += time.perf_counter() - start

    def finish(self) -> None:
        """Wait for the last builds, and hand everything to the policy states."""
        start = time.perf_counter()
        while self._pending:
            self._make_arrays(self._pending.popleft())
        for seq, kv_len in self._kv_lens.items():
            self._states.install(seq, self._layers[seq], kv_len + 1)
        self._layers.clear()
        self.host_seconds += time.perf_counter() - start

    def _make_arrays(self, pending: _Pending) -> None:
        if pending.done is not None:
            pending.done.synchronize()
        self._layers[pending.seq][pending.layer_idx] = pending.build()
