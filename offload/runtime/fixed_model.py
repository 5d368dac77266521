"""What can be done to a stock model, and not to one whose weights kernels hold.

Each of these is refused before it changes anything; what is done to the model's parts behind its
back is seen by `module_watch`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from offload.models.packed_embedding import dequantised_state
from offload.runtime.config import RuntimeConfig

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    _StockModel = Any  # transformers' PreTrainedModel, in the subclasses
else:
    _StockModel = object


def _refused(name: str, reason: str) -> Callable[..., NoReturn]:
    def refuse(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"{name}: {reason}")

    refuse.__name__, refuse.__doc__ = name, f"Not supported: {reason}."
    return refuse


_CHANGE = "the weights of an offloaded model stay; change the stock model, save it and load that"
_TRAINING = "an offloaded model cannot be trained; train the stock model"
_ADAPTERS = "adapters are not supported; merge them into the weights first"
_ATTENTION = "an offloaded model has its own attention; from_pretrained(policy=...) chooses it"
_COPY = (
    "an offloaded model cannot be copied or pickled; use save_pretrained and "
    "OffloadedModel.from_pretrained, or copy its state_dict()"
)
_OPTIONS = {option.name for option in fields(RuntimeConfig)}


class FixedModel(_StockModel):  # type: ignore[misc]
    """In front of a stock class: dtype, device and modules stay as they were loaded."""

    resize_token_embeddings = _refused("resize_token_embeddings", _CHANGE)
    set_input_embeddings = _refused("set_input_embeddings", _CHANGE)
    set_output_embeddings = _refused("set_output_embeddings", _CHANGE)
    set_decoder = _refused("set_decoder", _CHANGE)
    share_memory = _refused("share_memory", _CHANGE)
    gradient_checkpointing_enable = _refused("gradient_checkpointing_enable", _TRAINING)
    activation_checkpointing_enable = _refused("activation_checkpointing_enable", _TRAINING)
    enable_input_require_grads = _refused("enable_input_require_grads", _TRAINING)
    add_adapter = _refused("add_adapter", _ADAPTERS)
    load_adapter = _refused("load_adapter", _ADAPTERS)
    set_attn_implementation = _refused("set_attn_implementation", _ATTENTION)
    __reduce_ex__ = _refused("copy and pickle", _COPY)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OPTIONS:
            raise NotImplementedError(
                f"{name} of a loaded model stays as it is; load another one with "
                f"OffloadedModel.from_pretrained(..., {name}={value!r})"
            )
        # The first thing that cpu_offload, dispatch_model and others do to a model.
        if name in ("_hf_hook", "_old_forward"):
            raise NotImplementedError(
                "accelerate's hooks would move weights that kernels hold; give device and "
                "max_memory to OffloadedModel.from_pretrained"
            )
        super().__setattr__(name, value)

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        """As the stock one; packed weights are saved as they are dequantised."""
        if kwargs.get("state_dict") is None and (state := dequantised_state(self)) is not None:
            logger.info("packed weights are saved as they are dequantised, in %s", self.dtype)
            kwargs["state_dict"] = state
        return super().save_pretrained(save_directory, *args, **kwargs)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Behind `to()`, `half()`, `cuda()` …: the KV store and the kernels are made for one dtype
        and device, so a change is refused; nothing else needs applying."""
        give = "give dtype and device to OffloadedModel.from_pretrained"
        try:
            probe = fn(torch.empty(0, dtype=self.dtype, device=self.device))
        except (AssertionError, RuntimeError) as error:  # torch's, of a device that is not there
            reason = str(error).partition("\n")[0]
            raise ValueError(
                f"cannot turn a model of {self.dtype} on {self.device} into another: {reason}; "
                f"{give}"
            ) from error
        if probe.dtype != self.dtype or probe.device != self.device:
            raise ValueError(
                f"cannot turn a model of {self.dtype} on {self.device} into {probe.dtype} on "
                f"{probe.device}; {give}"
            )
        return self

    def train(self, mode: bool = True) -> Any:
        """`train(False)` and `eval()` are fine; training is not."""
        if mode:
            raise NotImplementedError(_TRAINING)
        return super().train(False)
