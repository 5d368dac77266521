"""Decode steps of a stock model on a GPU.

A step is one CUDA graph, as of lean layers: attention where `DeviceDecoder` places its heads, and
the layers in between by our kernels over the states of the `GenericCache` of the pass, where these
lie (`HybridModel`), or by the stock modules (`ModuleSteps`). Prompts are read by the stock modules.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers.modeling_outputs import MoeModelOutputWithPast

from cpu_ops.coprocessor import CoprocessorError
from cpu_ops.worker_pool import WorkerPool
from offload.decode.gpu.buffers import HostLink
from offload.decode.gpu.decoder import DeviceDecoder
from offload.decode.gpu.gpu_sync import GpuSyncError
from offload.decode.gpu.prepared_steps import BoundRows
from offload.kv.store import KVStore
from offload.models.batch import tokens_each
from offload.models.hybrid import TYPES, HybridModel, hybrid_model
from offload.models.stock_view import StockView
from offload.runtime.backends import decode_backend
from offload.runtime.config import RuntimeConfig
from offload.runtime.generic_cache import GenericCache
from offload.runtime.module_steps import ModuleSteps
from offload.runtime.module_watch import ModuleWatch
from offload.runtime.placing import Chooser, placement_for

logger = logging.getLogger(__name__)

# What the stock modules alone give, where a call or else the config asks for it.
_OUTPUTS = ("output_hidden_states", "output_router_logits")
# Weights of which steps have copies, in another form.
_COPIED = re.compile(r"layers\.\d+\..*(layernorm\.weight|_norm\.weight|A_log|dt_bias)")
_SINKS = re.compile(r".*\.sinks")  # of which the CPU has copies where the modules run


def hybrid_view(stock: Any) -> HybridModel | None:
    """The view of a model that has one; None: its layers are others."""
    if stock.config.model_type not in TYPES:
        return None
    with suppress(NotImplementedError, ValueError):
        view = hybrid_model(stock)
        if view.shape.head_dim % 16 == 0:  # else the store pads heads
            return view
    return None


class GenericSteps:
    """In the place of `forward` of the stock model's decoder.

    Args:
        stock: on its device.
        modules: what runs a step of `view`; None: our kernels.
        config: `Auto` is resolved.
        device_kv_bytes: of the device, for keys and values; None: as much as there is.
        decodes: whether the forward pass that runs is a decode step.

    Attributes:
        may_give_up: steps that cannot be captured run module by module; else that is an error.
    """

    def __init__(
        self,
        stock: Any,
        view: HybridModel | StockView,
        modules: ModuleSteps | None,
        store: KVStore,
        config: RuntimeConfig,
        pool: WorkerPool,
        device_kv_bytes: int | None,
        decodes: Callable[[], bool],
    ) -> None:
        self._view, self._modules, self._decodes = view, modules, decodes
        device = torch.device(config.device)
        choose = None
        if device.type == "cuda":
            choose = Chooser.of(config, view.shape, stock.dtype, pool.num_threads)
            choose.predicts = self._modules is None
        place = partial(placement_for, config, view, choose, dtype=stock.dtype)
        self.decoder = DeviceDecoder(
            view,
            store,
            config.policy,
            device=device,
            backend=decode_backend(view, config.backend, device),
            num_threads=pool.num_threads,
            deadline_seconds=config.deadline_seconds,
            device_budget_bytes=device_kv_bytes,
            device_limit_bytes=config.max_memory.get(device.index or 0),
            placement=place(host_kv_bytes=store.host_budget_bytes, device_kv_bytes=device_kv_bytes),
            keeps_placement=False,
            choose=choose,
            most_together=None if choose is None else choose.most_together,
            pool=pool,
        )
        self.decoder.slots.captures_aside = False  # the stock modules run in between
        self.decoder.captured.place_states = self._place_states
        if self._modules is not None:
            self.decoder.captured.num_micro_batches = 1
            self.decoder.captured.place_states = self._modules.place_states
        self.may_give_up = self._gave_up = False
        self._cache: GenericCache | None = None
        self._config = stock.config
        self._model, self._stock = stock.base_model, stock.base_model.forward
        stock.base_model.forward = self
        self._watch = ModuleWatch(stock.base_model)
        copied = _COPIED if modules is None else _SINKS
        parameters = stock.base_model.named_parameters()
        self._copied = {name: x for name, x in parameters if copied.fullmatch(name)}
        self._versions = self._current_versions()

    @property
    def has_modules(self) -> bool:
        """Whether the stock modules run in a step."""
        return self._modules is not None

    def close(self) -> None:
        """The stock modules are as they were."""
        self.decoder.slots.drop()
        vars(self._model).pop("forward", None)

    def check_modules(self) -> None:
        """As `ModuleWatch.check`, and of weights that were written to, where steps have copies."""
        self._watch.check()
        for name, now in self._current_versions().items():
            if now != self._versions[name]:
                raise NotImplementedError(
                    f"{name} was written to after the model was loaded: decode steps on a GPU "
                    "would go on with the old values; change the stock model, save it and load that"
                )

    def _current_versions(self) -> dict[str, int]:
        """How often each was written to; torch does not count it of all."""
        return {name: x._version for name, x in self._copied.items() if not x.is_inference()}

    def __call__(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        cache, positions = past_key_values, position_ids
        if positions is not None and positions.dim() == 3:  # of texts, images have others
            is_text = bool((positions == positions[:1]).all())
            positions = positions[0] if is_text else None
        takes = isinstance(cache, GenericCache) and cache.steps_on_device and self._decodes()
        is_known = positions is not None or position_ids is None
        asked = (kwargs.get(name, getattr(self._config, name, False)) for name in _OUTPUTS)
        is_known = is_known and (self._modules is None or inputs_embeds is None)

        def by_modules() -> Any:
            if takes:
                cache.begin_step()
                for seq in cache.seqs:
                    self.decoder.forget(seq)
            return self._stock(
                input_ids=input_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                past_key_values=cache,
                inputs_embeds=inputs_embeds,
                **kwargs,
            )

        if not takes or not is_known or any(asked) or self._gave_up:
            return by_modules()
        if self._modules is not None:
            assert input_ids is not None
            self._modules.cache, self._modules.ids = cache, input_ids[:, 0]
            size = len(input_ids), 1, self._view.shape.hidden_size
            rows = torch.zeros(size, dtype=cache.store.dtype, device=input_ids.device)
        else:
            rows = self._model.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        batch = tokens_each(len(rows))
        batch.position_ids[:] = cache.num_columns if positions is None else positions[:, 0].cpu()
        self._cache = cache
        try:
            hidden = self.decoder.decode(rows[:, 0], batch, cache.seqs)[:, None]
            if self._modules is not None:
                self._modules.take_states()
        except (MemoryError, CoprocessorError, GpuSyncError):
            raise
        except Exception as error:  # of any kind: what was tried when loading had two rows
            if not self.may_give_up or self._modules is None or self._modules.has_begun:
                raise
            self._gave_up = True
            logger.warning(
                "decode steps run module by module from now on: one of %d sequences cannot be "
                "captured: %s: %s",
                len(cache.seqs),
                type(error).__name__,
                error,
            )
            return by_modules()
        finally:
            self._cache = None
            if self._modules is not None:
                self._modules.end()
        cache.note_step()
        kind: type = MoeModelOutputWithPast
        if self._modules is not None:
            kind = self._modules.output
        else:
            hidden = self._model.norm(hidden)
        return kind(last_hidden_state=hidden, past_key_values=cache)

    def _place_states(self, bound: BoundRows, link: HostLink) -> None:
        bound.steps.step.buffers.write_pointers(bound.slots, self._states_of(bound.seqs))

    def _states_of(self, seqs: Sequence[int]) -> npt.NDArray[np.int64]:
        cache, view = self._cache, self._view
        assert isinstance(view, HybridModel)
        assert cache is not None
        if cache.addresses is not None:
            return cache.addresses
        addresses = np.zeros((len(view.recurrent), 2, len(seqs)), np.int64)
        rows = np.arange(len(seqs))
        for at, layer in zip(addresses, view.recurrent, strict=True):
            states: Any = cache.layers[layer.number]
            both = states.conv_states, states.recurrent_states
            for of_rows, kept in zip(at, both, strict=True):
                if not kept[0].is_contiguous():
                    kept[0] = kept[0].contiguous()
                of_rows[:] = kept[0].data_ptr() + rows * (kept[0].nbytes // len(seqs))
        cache.addresses = addresses
        return addresses
