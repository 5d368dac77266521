"""Sees what was changed in a stock model after its lean layers were made.

Decoding calls no module of a layer: native kernels and CUDA graphs hold the addresses of the
weights and the numbers beside them. What is written into a weight is seen by all of them, at once.
Any other change would be seen in prefill, or in a part of it, and not in decoding: it is refused.

The check runs before every generation and every forward pass outside of one. It compares flat
lists, most of that in C (0.1 ms for 32 layers), and looks for names only where they differ.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterator
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as nn_module

from offload.models.rope import follows_length

# What stock layers compute with beside their weights, and what a stock model reads of its config
# in every forward pass, or we when we load it.
_VALUES = (
    *("variance_epsilon", "scaling", "attention_scaling", "top_k", "norm_topk_prob"),
    *("embedding_multiplier", "residual_multiplier", "alpha", "limit"),
)
_CONFIG = (
    "num_hidden_layers",
    "layer_types",
    "sliding_window",
    "max_position_embeddings",
    "rope_parameters",
    "logits_scaling",
)
_SAVE_AND_LOAD = "change the stock model, save it and load that"
_Places = tuple[list[int], list[tuple[int, ...]], list[int]]


class ModuleWatch:
    """A stock model as it is now, to be compared with what it is later.

    Hooks on the model itself, and its own `forward`, are not watched: whoever calls it sees them.
    """

    def __init__(self, stock: Any) -> None:
        modules = dict(stock.named_modules())
        self._names: list[str] = []  # of the module of each table
        self._tables: list[dict[str, Any]] = []  # what it holds by name
        self._values: list[tuple[str, dict[str, Any], str]] = []
        for name, module in modules.items():
            fields = module.__dict__
            tables = [module._modules, module._parameters]
            if not follows_length(vars(module).get("rope_type", "default")):
                tables.append(module._buffers)
                self._values += [(name, fields, value) for value in _VALUES if value in fields]
            for table in filter(None, tables):
                self._names.append(name)
                self._tables.append(table)
        # Without the model itself, which has this watch: only the garbage collector would free it.
        del modules[""]
        self._modules: dict[str, nn.Module] = modules
        self._fields = [module.__dict__ for module in modules.values()]
        self._classes = [type(module) for module in modules.values()]
        self._forwards = {kind: kind.forward for kind in self._classes}
        self._tables_before = [dict(table) for table in self._tables]
        self._held = [held for table in self._tables for held in table.values()]
        self._tensors = {
            f"{name}.{key}": held
            for name, table in zip(self._names, self._tables, strict=True)
            for key, held in table.items()
            if isinstance(held, Tensor)
        }
        self._places = self._tensor_places()
        self._numbers = self._current_numbers()
        self._config = vars(stock.config)
        self._config_values = copy.deepcopy(self._current_config())

    def check(self) -> None:
        """
        Raises:
            NotImplementedError: something was changed that decoding would not see; names it.
        """
        if self._is_as_before():
            return
        # There is none where all that differs are hooks that transformers has put there.
        for change in self._changes():
            raise NotImplementedError(change)

    def _is_as_before(self) -> bool:
        # On the way to every token of a loop over forward passes.
        held = chain.from_iterable(map(dict.values, self._tables))
        return (
            list(map(len, self._tables)) == list(map(len, self._tables_before))
            and all(map(operator.is_, held, self._held))
            and self._tensor_places() == self._places
            and not self._has_hooks()
            and list(map(type, self._modules.values())) == self._classes
            and all(kind.forward is forward for kind, forward in self._forwards.items())
            and self._current_numbers() == self._numbers
            and self._current_config() == self._config_values
        )

    def _tensor_places(self) -> _Places:
        """What `.data = ...` changes of a parameter, and what moving it to shared memory does."""
        tensors = self._tensors.values()
        return (
            list(map(Tensor.data_ptr, tensors)),
            list(map(Tensor.stride, tensors)),
            list(map(Tensor.numel, tensors)),
        )

    def _has_hooks(self) -> bool:
        for fields in self._fields:
            if fields["_forward_hooks"] or fields["_forward_pre_hooks"] or "forward" in fields:
                return True
        return bool(nn_module._global_forward_hooks or nn_module._global_forward_pre_hooks)

    def _current_numbers(self) -> list[Any]:
        return [fields.get(value) for _, fields, value in self._values]

    def _current_config(self) -> list[Any]:
        return [self._config.get(name) for name in _CONFIG]

    def _changes(self) -> Iterator[str]:
        """What is not as before, and what to do about it."""
        for name, table, before in zip(self._names, self._tables, self._tables_before, strict=True):
            for key in {**before, **table}:
                if table.get(key) is not before.get(key):
                    is_module = isinstance(before.get(key), nn.Module)
                    yield _replaced(f"{name}.{key}".lstrip("."), is_module=is_module)
        for name, *places in zip(self._tensors, *self._places, *self._tensor_places(), strict=True):
            if places[:3] != places[3:]:
                yield _replaced(name, is_module=False)
        for (name, module), kind in zip(self._modules.items(), self._classes, strict=True):
            if any(map(_is_foreign, _forward_hooks(module))):
                yield _hooked(name)
            if "forward" in vars(module):
                yield _other(name, "forward")
            if type(module) is not kind:
                yield _other(name, "class")
        if nn_module._global_forward_hooks or nn_module._global_forward_pre_hooks:
            yield _hooked("all modules")
        for kind, forward in self._forwards.items():
            if kind.forward is not forward:
                yield _other(kind.__name__, "forward")
        names = [f"{name}.{value}" for name, _, value in self._values]
        names += [f"config.{name}" for name in _CONFIG]
        olds = self._numbers + self._config_values
        news = self._current_numbers() + self._current_config()
        for name, old, new in zip(names, olds, news, strict=True):
            if old != new:
                yield (
                    f"{name} was changed from {old} to {new} after the model was loaded: decoding "
                    f"would go on with the old value; {_SAVE_AND_LOAD}"
                )


def _forward_hooks(module: nn.Module) -> list[Any]:
    return [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]


def _is_foreign(hook: Any) -> bool:
    """Not one that transformers leaves behind in modules whose outputs a stock forward pass was
    asked for: it does nothing in other passes."""
    return getattr(hook, "__module__", None) != "transformers.utils.output_capturing"


def _replaced(name: str, *, is_module: bool) -> str:
    write = "" if is_module else "write into it (copy_, load_state_dict without assign=True), or "
    return (
        f"{name} was replaced after the model was loaded: decoding would go on with the old one; "
        f"{write}{_SAVE_AND_LOAD}"
    )


def _other(name: str, what: str) -> str:
    return (
        f"{name} has another {what} than when the model was loaded: decoding does not go through "
        "it; use the stock model"
    )


def _hooked(name: str) -> str:
    return (
        f"a forward hook on {name} would not be called: decoding does not go through the modules "
        "inside the model; hook the model itself, or use the stock model"
    )
