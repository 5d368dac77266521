"""A decode step of a stock model's own modules, as a CUDA graph replays it: over states that stay
where they are, and with the attention of a `DeviceStep` in the place of the attention function.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from offload.decode.gpu.buffers import HostLink
from offload.decode.gpu.prepared_steps import BoundRows
from offload.decode.stock_attention import AttentionCall, AttentionSpec, taking, widened
from offload.models.base import LayerSpec, stock_context_limit
from offload.models.shape import ModelShape
from offload.models.stock_view import Attend, StockView, stock_view
from offload.runtime.generic_cache import GenericCache, row_tensors

# Rows whose experts' weights are copied one by one; of more they are sorted by experts.
_FEW_ROWS = 2


@dataclass
class _Static:
    """What a step of so many rows reads and writes, at the same addresses each time.

    Attributes:
        ids: int64 [n].
        cache: as the modules take it.
        states: tensors of its layers, [n, ...], by layer and name.
        updated: the layer in the store whose keys and values were given last.
    """

    ids: Tensor
    cache: DynamicCache
    states: dict[tuple[int, str], Tensor]
    updated: list[Any]


class ModuleSteps:
    """Args:
        stock: on its device.
        specs: of its layers in the store, by their number in the model.
        shape: of these.
        state_bytes: what other layers keep of a sequence.

    Attributes:
        view: with which a `DeviceStep` runs them.
        cache, ids: of the pass that runs: its sequences, and a token of each.

    Raises:
        NotImplementedError: attention that a `DeviceStep` does not compute, or modules that are not
            told a token's position.
    """

    def __init__(
        self, stock: Any, specs: Mapping[int, AttentionSpec], shape: ModelShape, state_bytes: int
    ) -> None:
        self._model, self._forward = stock.base_model, stock.base_model.forward
        if "position_ids" not in signature(self._forward).parameters:
            raise NotImplementedError("its modules take no position_ids")
        self._specs = [*specs.values()]
        heads = {(x.num_qo_heads, x.num_kv_heads, x.head_dim) for x in self._specs}
        if len(heads) != 1 or any(spec.softcap for spec in self._specs):
            raise NotImplementedError("its layers' heads differ, or scores are capped")
        config, (most, reason) = stock.config.get_text_config(), stock_context_limit(stock.config)
        self.view: StockView = stock_view(
            stock,
            [LayerSpec(*of_heads, x.sm_scale) for x in self._specs for of_heads in heads],
            replace(
                shape,
                hidden_size=int(config.hidden_size),
                vocab_size=int(config.vocab_size),
                max_context=most,
            ),
            reason,
            self._run,
            state_bytes,
        )
        configs = {id(x.config): x.config for x in stock.modules() if hasattr(x, "config")}
        self._configs = [x for x in configs.values() if hasattr(x, "_experts_implementation")]
        self.cache: GenericCache | None = None
        self.ids: Tensor | None = None
        self._by_rows: dict[int, _Static] = {}

    def place_states(self, bound: BoundRows, link: HostLink) -> None:
        """Before a step: tokens and states are where the modules read them."""
        static = self._static(link.num_rows)
        assert self.ids is not None
        static.ids[torch.tensor(bound.slots, device=static.ids.device)] = self.ids
        self._placed = static, bound.slots
        self._copy(to_pass=False)

    def take_states(self) -> None:
        """Behind a step: the pass has what the modules left."""
        self._copy(to_pass=True)

    def _copy(self, *, to_pass: bool) -> None:
        static, slots = self._placed
        assert self.cache is not None
        own, others = list[Tensor](), list[Tensor]()
        for number, layer in enumerate(self.cache.layers):
            for name, of_rows in row_tensors(layer):
                kept = static.states[number, name]
                if slots == [*range(len(of_rows))]:
                    own.append(kept[: len(of_rows)])
                    others.append(of_rows)
                else:
                    own += [kept[slot] for slot in slots]
                    others += of_rows
        if own:
            torch._foreach_copy_(*((others, own) if to_pass else (own, others)))

    def _static(self, n: int) -> _Static:
        """For n rows, of sequences like those of the pass."""
        if n in self._by_rows:
            return self._by_rows[n]
        assert self.cache is not None
        assert self.ids is not None
        made = _Static(self.ids.new_zeros(n), DynamicCache(config=self._model.config), {}, [])
        made.cache.layers = [copy.copy(layer) for layer in self.cache.layers]
        for number, layer in enumerate(made.cache.layers):
            tensors = [*row_tensors(layer)]
            for name, value in vars(layer).items():
                if isinstance(value, dict):
                    setattr(layer, name, dict(value))
            for name, x in tensors:
                made.states[number, name] = kept = x.new_zeros(n, *x.shape[1:])
                _set(layer, name, kept)
            if hasattr(layer, "updated"):
                layer.updated, layer.seen = made.updated, 1
        self._by_rows[n] = made
        return made

    def _run(self, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        n = len(hidden)
        static = self._static(n)
        static.updated.clear()
        with taking(partial(self._attend, static, attend)), self._experts_of_few(n):
            out = self._forward(
                input_ids=static.ids[:, None],
                position_ids=positions[:, None],
                past_key_values=static.cache,
                use_cache=True,
            )
        for number, layer in enumerate(static.cache.layers):
            for name, x in row_tensors(layer):
                kept = static.states[number, name]
                if x is not kept:
                    kept.copy_(x)
                    _set(layer, name, kept)
        last: Tensor = out.last_hidden_state[:, 0]
        return last

    def _attend(self, static: _Static, attend: Attend, call: AttentionCall) -> Tensor:
        if not static.updated or call.sinks is not None:
            raise NotImplementedError("a layer attends to keys of another one, or has sinks")
        number, n = static.updated.pop().number, len(call.query)
        spec = self._specs[number]
        rows = (call.query, call.key, call.value)
        qkv = torch.cat([widened(x, spec.head_dim).reshape(n, -1) for x in rows], dim=1)
        out = attend(number, qkv).view(n, 1, spec.num_qo_heads, spec.head_dim)
        return out[..., : spec.v_dim]

    @contextmanager
    def _experts_of_few(self, n: int) -> Iterator[None]:
        """What sorts tokens by experts waits for the GPU, but for some dtypes."""
        before = [config._experts_implementation for config in self._configs]
        try:
            for config in self._configs if n <= _FEW_ROWS else ():
                config._experts_implementation = "batched_mm"
            yield
        finally:
            for config, kept in zip(self._configs, before, strict=True):
                config._experts_implementation = kept


def _set(layer: Any, name: str, value: Tensor) -> None:
    """A tensor of a cache layer by its name in `row_tensors`."""
    name, *keys = name.split(".")
    if keys:
        vars(layer)[name][int(keys[0])] = value
    else:
        setattr(layer, name, value)
