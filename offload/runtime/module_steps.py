"""A decode step of a stock model's own modules, as a CUDA graph replays it: over states that stay
where they are, and with the attention of a `DeviceStep` in the place of the attention function.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.modeling_outputs import MoeModelOutputWithPast

from offload.decode.gpu.buffers import HostLink
from offload.decode.gpu.prepared_steps import BoundRows
from offload.decode.stock_attention import AttentionCall, AttentionSpec, taking, widened
from offload.models.base import LayerSpec, stock_context_limit
from offload.models.missing_features import OWN_ATTENTION
from offload.models.shape import ModelShape
from offload.models.stock_view import Attend, StockView, stock_view
from offload.runtime.generic_cache import WINDOW, GenericCache, row_tensors
from offload.runtime.stand_ins import StandIns
from offload.system.errors import DeviceMemoryError


class _StepWindow:
    """In front of the class of a stock layer with a window, whose last tokens stay where they are:
    `keys` and `values` are [n, num_kv_heads, sliding_window - 1, head_dim], the newest last.
    """

    keys: Tensor
    values: Tensor
    updated: list[Any]

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        whole = torch.cat([self.keys, keys], dim=2), torch.cat([self.values, values], dim=2)
        self.keys.copy_(whole[0][:, :, 1:])
        self.values.copy_(whole[1][:, :, 1:])
        self.updated[:] = [self]
        return whole


@dataclass
class _Static:
    """What a step of so many rows reads and writes, at the same addresses each time.

    Attributes:
        ids: int64 [n].
        cache: as the modules take it.
        states: tensors of its layers, [n, ...], by layer and name.
        updated: the layer whose keys and values were given last.
        attended: keys that attention was asked for in a step, and their layer, by the id of these.
        owner: whose tensors are parts of `states`, so that nothing is copied between its steps.
        parts: these, by layer and name.
    """

    ids: Tensor
    cache: DynamicCache
    states: dict[tuple[int, str], Tensor]
    updated: list[Any] = field(default_factory=list)
    attended: dict[int, tuple[Tensor, Any]] = field(default_factory=dict)
    owner: Callable[[], GenericCache | None] = lambda: None
    parts: dict[tuple[int, str], Tensor] = field(default_factory=dict)

    def part(self, number: int, name: str, rows: Any, columns: int) -> Tensor:
        """Rows of a state; of a window that many columns, the newest."""
        whole = self.states[number, name][rows]
        return whole[:, :, max(0, whole.shape[2] - columns) :] if name in WINDOW else whole

    def release(self) -> None:
        """Its owner has copies of its own."""
        own, cache = {x.untyped_storage().data_ptr() for x in self.states.values()}, self.owner()
        for layer in () if cache is None else cache.layers:
            for name, x in [*row_tensors(layer)]:
                if x.untyped_storage().data_ptr() in own:
                    _set(layer, name, x.clone())
        self.owner = lambda: None
        self.parts.clear()


def check_one_step(stock: Any, specs: Mapping[int, AttentionSpec]) -> None:
    """Refuse a model whose modules are certainly no part of a `DeviceStep`; also of one without
    weights.

    Raises:
        NotImplementedError: attention that it does not compute, or modules that are not told a
            token's position.
    """
    kinds = getattr(stock.config.get_text_config(), "layer_types", None) or ()
    heads = {(x.num_qo_heads, x.num_kv_heads, x.head_dim) for x in specs.values()}
    told = "position_ids" in signature(stock.base_model.forward).parameters
    if not told and stock.config.model_type not in OWN_ATTENTION:  # these ask the cache
        raise NotImplementedError("its modules take no position_ids")
    if len(heads) != 1 or "chunked_attention" in kinds:
        raise NotImplementedError(
            "no layer is in the store, their heads differ or windows are chunks"
        )


class ModuleSteps:
    """Args:
        stock: on its device.
        specs: of its layers in the store, by their number in the model.
        shape: of these.
        state_bytes: what other layers keep of a sequence.

    Attributes:
        view: with which a `DeviceStep` runs them.
        cache, ids: of the pass that runs: its sequences, and a token of each.
        output: what the modules return.

    Raises:
        NotImplementedError: as `check_one_step`.
    """

    def __init__(
        self, stock: Any, specs: Mapping[int, AttentionSpec], shape: ModelShape, state_bytes: int
    ) -> None:
        check_one_step(stock, specs)
        self._model, self._forward = stock.base_model, stock.base_model.forward
        self._specs = [*specs.values()]
        config, (most, reason) = stock.config.get_text_config(), stock_context_limit(stock.config)
        self.view: StockView = stock_view(
            stock,
            [
                LayerSpec(x.num_qo_heads, x.num_kv_heads, x.head_dim, x.sm_scale, softcap=x.softcap)
                for x in self._specs
            ],
            [x.sinks for x in self._specs],
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
        self._stand_ins: StandIns | None = None
        self._stock = stock
        self.output: type = MoeModelOutputWithPast
        self.cache: GenericCache | None = None
        self.ids: Tensor | None = None
        self._by_rows: dict[int, _Static] = {}
        # Of the step that runs, and its rows; None: what runs is captured.
        self._placed: tuple[_Static, Any] | None = None

    def place_states(self, bound: BoundRows, link: HostLink) -> None:
        """Before a step: tokens and states are where the modules read them."""
        static, cache, slots = self._static(link.num_rows), self.cache, bound.slots
        assert cache is not None
        assert self.ids is not None
        static.ids[torch.tensor(slots, device=static.ids.device)] = self.ids
        rows = slice(len(slots)) if slots == [*range(len(slots))] else slots
        self._placed = static, rows
        if static.owner() is cache and isinstance(rows, slice):
            kept = static.parts.items()
            if all(_get(cache.layers[number], name) is x for (number, name), x in kept):
                return
        static.release()
        own, others = list[Tensor](), list[Tensor]()
        for number, layer in enumerate(cache.layers):
            for name, x in [*row_tensors(layer)]:
                columns = x.shape[2] if name in WINDOW else 0
                whole = static.states[number, name]
                if name in WINDOW and columns < whole.shape[2]:  # a mask does not hide NaN
                    whole[rows, :, : whole.shape[2] - columns] = 0.0
                if isinstance(rows, slice):
                    own.append(static.part(number, name, rows, columns))
                    others.append(x)
                    static.parts[number, name] = own[-1]
                else:
                    of_slots = static.part(number, name, slice(None), columns)
                    own += [of_slots[slot] for slot in slots]
                    others += x
        if own:
            torch._foreach_copy_(own, others)
        if isinstance(rows, slice):
            static.owner = weakref.ref(cache)
            for (number, name), x in static.parts.items():
                _set(cache.layers[number], name, x)

    def take_states(self) -> None:
        """Behind a step: the pass has what the modules left."""
        assert self._placed is not None
        (static, rows), cache, self._placed = self._placed, self.cache, None
        assert cache is not None
        of_pass = [*static.parts] if isinstance(rows, slice) else [*static.states]
        for number, name in of_pass:
            layer: Any = cache.layers[number]
            if name in WINDOW:
                columns = _get(layer, name).shape[2]
                layer.cumulative_length += name == WINDOW[0]
                if isinstance(rows, slice) and columns == static.states[number, name].shape[2]:
                    continue
                part = static.part(number, name, rows, columns + 1)
            elif isinstance(rows, slice):
                continue
            else:
                part = static.part(number, name, rows, 0)
            _set(layer, name, part)
            if isinstance(rows, slice):
                static.parts[number, name] = part

    def end(self) -> None:
        """Of a pass, also of one that failed."""
        self.cache = self.ids = self._placed = None

    @property
    def has_begun(self) -> bool:
        """Whether the states of the pass are where a step changes them."""
        return self._placed is not None

    @torch.inference_mode(False)
    def _static(self, n: int) -> _Static:
        """For n rows, of sequences like those of the pass."""
        if n in self._by_rows:
            return self._by_rows[n]
        assert self.cache is not None
        assert self.ids is not None
        made = _Static(self.ids.new_zeros(n), DynamicCache(config=self._model.config), {})
        made.cache.layers = []
        stock: Any
        for number, stock in enumerate(self.cache.layers):
            layer, kind = copy.copy(stock), type(stock)
            if getattr(stock, "is_sliding", False):
                layer = object.__new__(type(f"_Step{kind.__name__}", (_StepWindow, kind), {}))
                layer.__dict__.update(stock.__dict__)
            for name, value in [*vars(layer).items()]:
                if isinstance(value, dict):
                    setattr(layer, name, dict(value))
            for name, x in [*row_tensors(layer)]:
                shape = [n, *x.shape[1:]]
                if name in WINDOW:
                    shape[2] = stock.sliding_window - 1
                try:
                    kept = torch.zeros(shape, dtype=x.dtype, device=x.device)
                except torch.OutOfMemoryError as error:
                    raise DeviceMemoryError(
                        "no device memory is left for windows and recurrent states of steps of "
                        f"{n} sequences; raise max_memory of the device or lower the batch size"
                    ) from error
                made.states[number, name] = kept
                _set(layer, name, kept)
            layer.updated = made.updated
            vars(layer).update({x: 1 for x in ("seen", "cumulative_length") if hasattr(layer, x)})
            made.cache.layers.append(layer)
        self._by_rows[n] = made
        return made

    def _run(self, positions: Tensor, earlier: Tensor, attend: Attend) -> Tensor:
        n = len(positions)
        static = self._static(n)
        if self._stand_ins is None:
            self._stand_ins = StandIns(self._stock)
        if self._placed is None:  # its owner's states would change
            static.release()
        static.updated.clear()
        static.attended.clear()
        static.cache.new_positions = earlier[:, None]  # type: ignore[attr-defined]
        with taking(partial(self._attend, static, earlier, attend)), self._stand_ins.of_rows(n):
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
        self.output = type(out)
        last: Tensor = out.last_hidden_state[:, 0]
        return last

    def _attend(
        self, static: _Static, earlier: Tensor, attend: Attend, call: AttentionCall
    ) -> Tensor:
        n, is_new = len(call.query), bool(static.updated)
        if is_new:
            static.attended[id(call.key)] = call.key, static.updated.pop()
        elif id(call.key) not in static.attended:
            raise NotImplementedError("a layer attends to keys of no layer before it")
        layer = static.attended[id(call.key)][1]
        if isinstance(layer, _StepWindow):
            columns = torch.arange(call.key.shape[2] - 1, -1, -1, device=earlier.device)
            seen = columns <= earlier[:, None]  # of the newest, and those before it
            return replace(call, mask=seen[:, None, None], is_causal=False).in_torch()
        spec, latents = self._specs[layer.number], call.latents
        query = call.query if latents is None else latents.absorb(call.query)
        asked = query.shape[1], call.sm_scale, call.softcap, call.sinks is None
        if not is_new and asked != (spec.num_qo_heads, spec.sm_scale, spec.softcap, True):
            raise NotImplementedError("a layer attends otherwise than the one whose keys it shares")
        rows = (query, call.key, call.value) if is_new else (query,)
        qkv = torch.cat([widened(x, spec.head_dim).reshape(n, -1) for x in rows], dim=1)
        out = attend(layer.number, qkv).view(n, 1, spec.num_qo_heads, spec.head_dim)
        out = out[..., : spec.v_dim]
        return out if latents is None else latents.values_of(out)


def _get(layer: Any, name: str) -> Tensor:
    name, *keys = name.split(".")
    value: Any = vars(layer)[name]
    found: Tensor = value[int(keys[0])] if keys else value
    return found


def _set(layer: Any, name: str, value: Tensor) -> None:
    """A tensor of a cache layer by its name in `row_tensors`."""
    name, *keys = name.split(".")
    if keys:
        vars(layer)[name][int(keys[0])] = value
    else:
        setattr(layer, name, value)
