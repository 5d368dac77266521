"""`GenericCache`: the `past_key_values` of a model that runs on its own stock modules.

A `DynamicCache` of transformers whose layers that attend to everything keep keys and values in the
host store, without padding; the others are transformers' own. `update()` of a layer in the store
returns the new keys and values only, and the attention function stores what reaches it: whatever
a module does with them in between (repeating heads) is done once a token. Of latent attention these
are latents (`Latents`): a step absorbs its queries, a prompt expands them.
"""

from __future__ import annotations

import contextlib
import copy
import sys
import weakref
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache

from cpu_ops.decoder_layers import Norm
from cpu_ops.step_rows import DecodeStep
from offload.decode.attention import DecodeAttention
from offload.decode.stock_attention import (
    AttentionCall,
    AttentionSpec,
    taking,
    widened,
)
from offload.kv.store import HostBudgetError, KVStore
from offload.models.batch import pack
from offload.runtime.chosen_rows import ChosenRows
from offload.runtime.modules_device import ModulesDevice
from offload.runtime.runner import Pass
from offload.runtime.saving import file_of, read_sequences
from offload.runtime.sequences import Sequences
from offload.system.errors import SessionMiss
from offload.system.interrupts import shielded
from offload.system.memory import format_bytes

WINDOW = ("keys", "values")  # tensors of a layer that have a column for each token
# Attributes of layers that are of a cache, or of its length.
_OF_CACHE = frozenset(("updated", "number", "spec", "seen", "cumulative_length"))


@dataclass(frozen=True, eq=False)
class RowState:
    """What the layers outside of the store keep of one sequence. Nobody writes to it.

    Attributes:
        tensors: by "LAYER.NAME" or "LAYER.NAME.KEY"; [1, ...], or of a window
            [1, num_kv_heads, columns, head_dim].
    """

    kv_len: int
    tensors: dict[str, Tensor]

    @property
    def num_bytes(self) -> int:
        return sum(x.nbytes for x in self.tensors.values())


@dataclass
class LayerStates:
    """Memory of what caches keep outside of the store: windows, and recurrent states.

    Attributes:
        fixed_bytes: of a sequence of any length.
        windows: columns that a layer keeps at most, and bytes of each of them.
        flags: what else attributes of each layer are that has read something.
        shapes: by the names of `RowState`: dtype and shape [1, ...] of each tensor; columns of a
            window are as many as it keeps at most.
        caches, rows: those that are alive.
        modules: where they are, if not in the host's memory.
    """

    fixed_bytes: int = 0
    windows: list[tuple[int, int]] = field(default_factory=list)
    flags: list[dict[str, Any]] = field(default_factory=list)
    shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = field(default_factory=dict)
    caches: weakref.WeakSet[GenericCache] = field(default_factory=weakref.WeakSet)
    rows: weakref.WeakSet[RowState] = field(default_factory=weakref.WeakSet)
    modules: ModulesDevice | None = None

    def measure(self, cache: GenericCache) -> None:
        """Take the sizes from a cache that has read something."""
        hosted = [i for i, layer in enumerate(cache.layers) if isinstance(layer, _HostedLayer)]
        self.count(cache.layers, len(cache.seqs), hosted)
        self.flags, self.shapes = [_flags(layer) for layer in cache.layers], {}
        for number, layer in enumerate(cache.layers):
            for name, x in row_tensors(layer):
                shape = [1, *x.shape[1:]]
                if name in WINDOW:
                    shape[2] = getattr(layer, "sliding_window", sys.maxsize) - 1
                self.shapes[f"{number}.{name}"] = x.dtype, tuple(shape)

    def take_sizes(self, other: LayerStates) -> None:
        """Those of another one, of the same model."""
        self.fixed_bytes, self.windows = other.fixed_bytes, other.windows
        self.flags, self.shapes = other.flags, other.shapes

    def count(self, layers: Sequence[Any], rows: int, hosted: Container[int]) -> None:
        """Take the bytes from cache layers that have read something.

        Args:
            hosted: numbers of those whose keys and values are in a store.
        """
        self.fixed_bytes, self.windows = 0, []
        for number, layer in enumerate(layers):
            tensors = dict(vars(layer))
            keys, values = tensors.pop("keys", None), tensors.pop("values", None)
            if isinstance(keys, Tensor) and keys.numel() and number not in hosted:
                of_column = (keys.nbytes + values.nbytes) // keys.shape[2] // rows
                self.windows.append((getattr(layer, "sliding_window", sys.maxsize), of_column))
            self.fixed_bytes += sum(x.nbytes for x in tensors_in(tensors)) // rows

    def at(self, columns: int) -> int:
        """Bytes of a sequence that has read so many columns; 0 of an empty one."""
        if columns == 0:
            return 0
        return self.fixed_bytes + sum(min(columns, n) * size for n, size in self.windows)

    def host_bytes_at(self, columns: int) -> int:
        """What `at` takes of the host's memory."""
        return self.at(columns) if self.modules is None else 0

    def left_bytes(self, store: KVStore) -> int:
        """Room for more, beside a store on the host."""
        return store.left_bytes() if self.modules is None else self.modules.left_bytes()

    @property
    def held_bytes(self) -> int:
        of_caches = sum(cache.state_bytes for cache in self.caches)
        return of_caches + sum(row.num_bytes for row in self.rows)


def row_tensors(layer: Any) -> Iterator[tuple[str, Tensor]]:
    """Tensors [batch_size, ...] of a cache layer by their names; a key of a dict comes last."""
    for name, value in vars(layer).items():
        if name not in _OF_CACHE:
            items = value.items() if isinstance(value, dict) else [("", value)]
            for key, x in items:
                if isinstance(x, Tensor) and x.dim() > 1 and x.numel():
                    yield f"{name}.{key}".rstrip("."), x


def _give(layer: Any, name: str, x: Tensor) -> None:
    """Set what `row_tensors` has by this name."""
    name, *keys = name.split(".")
    if keys:
        vars(layer)[name][int(keys[0])] = x
    else:
        setattr(layer, name, x)


def _flags(layer: Any) -> dict[str, Any]:
    """The attributes of a cache layer without any tensor."""
    named = {name: x for name, x in vars(layer).items() if name not in _OF_CACHE}
    return {name: x for name, x in named.items() if not any(True for _ in tensors_in(x))}


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors in containers of containers."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for x in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(x)


@dataclass(frozen=True)
class HostedLayers:
    """The layers of a model whose keys and values are in the host store.

    Attributes:
        config: the model's, of transformers.
        specs: of each by its number in the model; their order is that in the store.
        is_resident: keys and values stay with the modules, and are attended to there; the store
            only counts tokens.
        steps_on_device: `GenericSteps` run decode steps.
        states: `SequenceStates` of the sequences, which save what is not in the store.
    """

    config: Any
    specs: dict[int, AttentionSpec]
    sequences: Sequences
    attention: DecodeAttention
    others: LayerStates = field(default_factory=LayerStates)
    is_resident: bool = False
    steps_on_device: bool = False
    states: Any = None

    @property
    def store(self) -> KVStore:
        return self.sequences.store


class _HostedLayer:
    """In front of the class of a stock cache layer; its states beside keys and values stay."""

    updated: list[_HostedLayer]  # of the cache, which this one does not keep alive
    number: int
    spec: AttentionSpec
    seen: int

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.seen += keys.shape[2]
        self.updated[:] = [self]
        return keys, values

    def get_seq_length(self) -> int:
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def get_max_length(self) -> int:
        return -1


class _ResidentLayer:
    """As `_HostedLayer`, but keys and values stay those of the stock layer."""

    updated: list[Any]

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        rows: tuple[Tensor, Tensor] = super().update(*args, **kwargs)  # type: ignore[misc]
        self.updated[:] = [self]
        return rows


class GenericCache(ChosenRows, DynamicCache):
    """The cached tokens of a batch; a row is a sequence of the store.

    Make it by `model.new_cache()`, and pass it as `past_key_values` to go on from it. The sequences
    go with the object, or at once by `reset()`. After a forward pass that failed it is empty and
    refuses to be continued.

    Args:
        seqs: of somebody else, who frees them; after a pass that failed they have the tokens in the
            store that they had before. None: new ones, of this cache.
    """

    def __init__(self, hosted: HostedLayers, seqs: Sequence[int] | None = None) -> None:
        super().__init__(config=hosted.config)
        self._hosted, self._owns = hosted, seqs is None
        self._seqs: list[int] = [*(seqs or ())]
        # Called between two layers that read a prompt.
        self.between: Callable[[], None] | None = None
        # Of the states that a step writes to, until something else has run.
        self.addresses: npt.NDArray[np.int64] | None = None
        self._num_columns = 0
        self._has_failed = False
        self.takes_back = False  # `crop` may be called
        # Several tokens behind others are a draft; before the last one, and with states:
        self._verifies = False
        self._before: tuple[int, list[dict[str, Any]]] | None = None
        self.num_owed = 0  # columns at the end of the text that are read again with the next
        self._unsure = 0  # columns of the last pass, whose draft nobody has accepted yet
        hosted.others.caches.add(self)
        self._updated: list[_HostedLayer] = []  # the last one, until it attends
        self._host_layers()
        self._forget_pass()
        if self._owns:
            weakref.finalize(self, hosted.sequences.free_later, self._seqs)

    def _host_layers(self) -> None:
        for number, (layer_idx, spec) in enumerate(self._hosted.specs.items()):
            stock: Any = self.layers[layer_idx]
            of_layer: dict[str, Any] = {"updated": self._updated}
            mixin: type = _ResidentLayer
            if not self._hosted.is_resident:
                mixin = _HostedLayer
                of_layer |= {"number": number, "spec": spec, "seen": 0}
            kind = type(f"{mixin.__name__}{type(stock).__name__}", (mixin, type(stock)), {})
            layer: Any = object.__new__(kind)
            layer.__dict__.update(stock.__dict__ | of_layer)
            self.layers[layer_idx] = layer

    def _forget_pass(self) -> None:
        self._updated.clear()
        self._layer_of: dict[int, tuple[Tensor, _HostedLayer]] = {}  # by the id of its keys
        self._step: DecodeStep | None = None
        self._step_lens: list[int] = []  # of a step that may begin
        self._new_columns = 0
        self._new_positions: Tensor | None = None
        self._pads: list[int] = []  # columns of padding before each row's first token
        self._known_mask: Tensor | None = None
        self._known_window: tuple[Tensor | None, int | None] = (None, 0)
        self._no_rotation: tuple[Tensor, Tensor] | None = None  # cos, sin of a step
        self._are_finite: list[tuple[int, Tensor]] = []  # layers, of whose rows all are; or not

    @property
    def store(self) -> KVStore:
        """Where the keys and values are."""
        return self._hosted.store

    @property
    def attention(self) -> DecodeAttention:
        """What decodes from the store."""
        return self._hosted.attention

    @property
    def seqs(self) -> tuple[int, ...]:
        """Store handle of each row; empty before the first forward pass."""
        return tuple(self._seqs)

    @property
    def kv_lens(self) -> list[int]:
        """Tokens in the store of each row, without padding."""
        return [self.store.kv_len(seq) for seq in self._seqs]

    @property
    def state_bytes(self) -> int:
        """Memory of the layers that are not in the store, and of their copies."""
        times = 1 if self._before is None else 2
        return times * len(self._seqs) * self._hosted.others.at(self._num_columns)

    @property
    def others(self) -> LayerStates:
        """Sizes of the layers that are not in the store."""
        return self._hosted.others

    @property
    def has_failed(self) -> bool:
        """Whether a pass ended in its middle: what layers outside of the store keep is lost."""
        return self._has_failed

    def row_state(self, row: int) -> RowState:
        """A copy of what the layers outside of the store keep of a row."""
        kv_len, tensors = self.store.kv_len(self._seqs[row]), dict[str, Tensor]()
        for number, layer in enumerate(self.layers):
            for name, x in row_tensors(layer):
                of_row = x[row : row + 1]
                if name in WINDOW:
                    of_row = of_row[:, :, max(0, x.shape[2] - kv_len) :]
                tensors[f"{number}.{name}"] = of_row.clone()
        state = RowState(kv_len, tensors)
        self._hosted.others.rows.add(state)
        return state

    def take_rows(self, states: Sequence[RowState], columns: int = 0) -> None:
        """Be a batch of sequences with these states, padded on the left to the longest, or to
        `columns`.

        Raises:
            HostBudgetError: there is no room for the copies.
        """
        self.addresses = None
        columns, others = max(columns, *(x.kv_len for x in states)), self._hosted.others
        if columns == 0:
            return
        self._check_states(len(states), 1, columns, len(states) * others.at(columns))
        self._num_columns = columns
        for layer, flags in zip(self.layers, others.flags, strict=True):
            vars(layer).update(copy.deepcopy(flags))
            for name in vars(layer).keys() & {"seen", "cumulative_length"}:
                setattr(layer, name, columns)
        for path in others.shapes:
            number, name, *keys = path.split(".")
            rows = [state.tensors[path] for state in states]
            if name in WINDOW:
                window = getattr(self.layers[int(number)], "sliding_window", sys.maxsize) - 1
                most = min(columns, window)
                rows = [F.pad(x, (0, 0, most - x.shape[2], 0)) for x in rows]
            layer, joined = self.layers[int(number)], torch.cat(rows)
            _give(layer, ".".join([name, *keys]), joined)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs):  # type: ignore[no-untyped-def]
        """As the stock one; what a window keeps of a prompt is not a view of all of it."""
        rows = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        layer: Any = self.layers[layer_idx]
        if getattr(layer, "is_sliding", False) and key_states.shape[2] > 1:
            layer.keys, layer.values = layer.keys.clone(), layer.values.clone()
        return rows

    def check_room(self, need: int, num_pages: int, what: str) -> None:
        """Refuse what does not fit the host budget beside what is there.

        Raises:
            HostBudgetError: `what` needs `need` bytes, pages included.
        """
        store = self.store
        if need > store.left_bytes(num_pages):
            store.trim()
        free = max(0, store.left_bytes(num_pages))
        if need > free:
            raise HostBudgetError(
                f"{what} need {format_bytes(need)} more of host KV cache, but {format_bytes(free)} "
                f"of its budget of {format_bytes(store.host_budget_bytes)} are free; raise "
                "max_memory={'cpu': ...}, or lower the batch size or max_new_tokens"
            )

    def _check_states(self, batch_size: int, n: int, columns: int, more: int) -> None:
        """Refuse a pass over n more columns, up to `columns`, with `more` bytes of states."""
        modules = self._hosted.others.modules
        if modules is not None:
            modules.check(batch_size, n, columns, more)
        elif more > 0:
            what = f"windows and recurrent states of {batch_size} sequences"
            self.check_room(more, 0, what)

    def check_pass(self, shape: tuple[int, int]) -> None:
        """Refuse a pass of (batch_size, seq_len) whose states do not fit.

        Raises:
            HostBudgetError, DeviceMemoryError: name the sizes.
        """
        (batch_size, n), columns = shape, self._num_columns + shape[1]
        more = batch_size * self._hosted.others.at(columns) - self.state_bytes
        if self._copies(n):
            more += self.state_bytes
        self._check_states(batch_size, n, columns, more)

    def reset(self) -> None:
        """Forget all tokens and give their memory back."""
        with self._hosted.sequences.run_lock.lock, shielded():
            self._hosted.sequences.free(self._seqs)
            self._seqs.clear()
            self._has_failed = False
            self._forget_states()

    def _forget_states(self) -> None:
        self.addresses = None
        self._num_columns = 0
        self.layers = DynamicCache(config=self._hosted.config).layers
        self._host_layers()

    is_compileable = False  # or generate() compiles what it runs on a GPU

    def _select(self, rows: Sequence[int]) -> None:
        if [*rows] == [*range(len(self._seqs))]:
            return
        columns, others = self._num_columns, self._hosted.others
        self._check_states(len(rows), 1, columns, len(rows) * others.at(columns))
        chosen = [
            (layer, name, x[list(rows)]) for layer in self.layers for name, x in row_tensors(layer)
        ]
        with self._hosted.sequences.run_lock.lock, shielded():
            self._hosted.sequences.select(self._seqs, rows)
            self.addresses = None
            for of_layer in chosen:
                _give(*of_layer)

    def __deepcopy__(self, memo: dict[int, Any]) -> GenericCache:
        if not self._owns or self._has_failed or self._verifies:
            raise RuntimeError("this cache cannot be copied: it is an engine's, or failed")
        copied = GenericCache(self._hosted)
        self._check_states(len(self._seqs), 1, self._num_columns, self.state_bytes)
        with self._hosted.sequences.run_lock.lock, shielded():
            for seq in self._seqs:  # one by one: what there is goes with the copy if one fails
                copied._seqs.append(self._hosted.sequences.fork(seq))
            for of_copy, layer in zip(copied.layers, self.layers, strict=True):
                vars(of_copy).update(self._copied(layer))
            copied._num_columns = self._num_columns
        return copied

    def __copy__(self) -> GenericCache:
        # A shallow copy would share handles that the first of the two to go frees.
        return self.__deepcopy__({})

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError("a cache cannot be pickled; save(path) writes it to a file")

    @torch.inference_mode(False)
    def save(self, path: str | Path) -> None:
        """Write all rows to a file, as `OffloadedCache.save`, whose `load` takes it.

        Raises:
            ValueError: the cache has no tokens, or a device has its keys and values.
            OSError: it cannot be written.
        """
        if not self._seqs or self._hosted.is_resident:
            raise ValueError("the cache has no tokens to save in host memory")
        sequences, states = self._hosted.sequences, self._hosted.states
        pads = torch.tensor([self._num_columns - n for n in self.kv_lens])
        attended = torch.arange(self._num_columns) >= pads[:, None]
        with sequences.run_lock.lock, states.lent(self):
            for _ in file_of(sequences, self._seqs, attended=attended).write(Path(path)):
                pass

    @classmethod
    def load(cls, hosted: HostedLayers, path: Path, most_tokens: int) -> GenericCache:
        """The cache that `save` has written to a file.

        Raises:
            SessionMiss: as `OffloadedCache.load`.
        """
        sequences, states = hosted.sequences, hosted.states
        cache = cls(hosted)
        with sequences.run_lock.lock:
            sequences.collect()
            rows, attended = read_sequences(sequences, path, most_tokens)
            cache._seqs.extend(row.seq for row in rows)
            columns = 0 if attended is None else attended.shape[1]
            try:
                cache.take_rows([states.taken(row.seq) for row in rows], columns)
            except HostBudgetError as error:
                cache.reset()
                raise SessionMiss(f"no room: {error}") from error
        return cache

    @contextlib.contextmanager
    def verifying(self) -> Iterator[None]:
        """Inside, the passes behind the first `crop` are drafts, whose ends it takes back; an error
        takes back the last."""
        self.takes_back = True
        try:
            yield
        except BaseException:
            if self._unsure:
                self.crop(-self._unsure)
            raise
        finally:
            self.takes_back = self._verifies = False
            self._before, self.num_owed = None, 0

    def activate_past_recording(self) -> None:
        """Nothing: what may be taken back is copied before."""

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last tokens: of a draft, or of any cache without windows and states.

        Recurrent states and windows go back to where they were before all of it: the tokens that
        stay are then `num_owed`, and come again with the next ones.

        Args:
            tokens_to_remove: so many, negative.
        """
        if not self.takes_back:
            if self._hosted.others.at(1) or self._hosted.is_resident:
                raise NotImplementedError(
                    "a cache with windows or recurrent states, or on a device, cannot be cropped: "
                    "they have what was read once; copy.deepcopy it before, or read the text again"
                )
            if tokens_to_remove > 0:
                raise ValueError(
                    "crop takes the number of tokens to remove as 0 or less, got "
                    f"{tokens_to_remove}"
                )
            if not self._seqs:
                return
        with self._hosted.sequences.run_lock.lock, shielded():
            self._crop(tokens_to_remove)

    def _crop(self, tokens_to_remove: int) -> None:
        self._verifies, self._unsure = self.takes_back, 0
        n, (columns, states) = -tokens_to_remove, self._before or (0, [])
        self._before, self.num_owed = None, 0
        if n and states:
            self.num_owed = self._num_columns - n - columns
            n = self._num_columns - columns
        if not n:
            return
        if n >= self._num_columns and not self.takes_back:
            self.reset()  # rows without a column are no rows: the next batch may have others
            return
        for seq in self._seqs:
            self._hosted.sequences.truncate(seq, max(0, self.store.kv_len(seq) - n))
        self._num_columns -= n
        for layer, state in zip(self.layers, states or [{}] * len(self.layers), strict=True):
            vars(layer).update(state)
            if isinstance(layer, _HostedLayer):
                layer.seen = self._num_columns

    def would_decode(self, shape: tuple[int, int]) -> bool:
        """Whether a forward pass of (batch_size, seq_len) is a decode step: a token of each row
        behind others, or a draft."""
        is_step = shape[1] == 1 or self._verifies
        return is_step and bool(self._seqs) and min(self.kv_lens) > 0

    @contextlib.contextmanager
    def forward_pass(
        self,
        shape: tuple[int, int],
        mask: Tensor | None,
        tokens: Tensor | None,
        *,
        is_decode: bool,
    ) -> Iterator[None]:
        """Around a stock forward pass: room before it, and the tokens are cached after it.

        Args:
            shape: (batch_size, seq_len) of what is new.
            mask: [batch_size, cached columns + seq_len], 0 at padding; or None.
            tokens: int64 [batch_size, seq_len], where they are known.
            is_decode: as `would_decode` has it; False: a part of a prompt.

        Raises:
            ValueError: shapes that do not continue the cache, or padding behind a token.
            HostBudgetError: before anything is computed; the cache is as it was.
            RuntimeError: an earlier pass has failed.
        """
        pads = self._checked_pads(shape, None if mask is None else mask.cpu())
        sequences, (batch_size, n), past = self._hosted.sequences, shape, self._num_columns
        sequences.collect()
        others = self._hosted.others
        self.check_pass(shape)
        is_new = not self._seqs
        if is_new:
            self._seqs.extend(sequences.new() for _ in range(batch_size))
        states = self._hosted.attention.states
        attended = torch.arange(past, past + n) >= torch.tensor(pads)[:, None]
        num_new = attended.sum(dim=1).tolist()
        this = Pass(sequences, self._seqs, num_new)
        try:
            self._num_columns += n  # their states count from now on
            this.reserve()
        except BaseException:
            self._num_columns -= n
            if is_new:
                self.reset()
            raise
        began = False
        try:
            if self._copies(n):
                self._before = past, [self._copied(layer) for layer in self.layers]
            states.begin(self._seqs, num_new, prefill=not is_decode, builds=False)
            if attended.any():  # or a slice has only padding
                batch = pack(shape, attended, torch.arange(past, past + n)[None], None)
                text = None if tokens is None else tokens.cpu().flatten()[batch.columns]
                sequences.note_text(batch, self._seqs, text)
            self._forget_pass()
            self._pads, self._new_columns = pads, n
            if not is_decode:
                self.addresses = None
            else:
                self._step_lens = [past + 1 - pad + i for pad in pads for i in range(n)]
                if not self.steps_on_device:
                    self.begin_step()
            began = True
            with taking(self._attend):
                yield
            self._wait_for_rows()
            this.commit()
            this.end()
            states.commit(self._seqs)
            self._unsure = n if self._verifies and n > self.num_owed + 1 else 0
        except BaseException:  # transformers' own layers cannot go back
            if others.modules is not None:
                others.modules.wait()  # what it writes to pages is dropped next
            if self._owns:
                self.reset()
                self._has_failed = True
            else:
                self._has_failed = began
                self._num_columns -= n
                this.roll_back()
                if began:  # the error's traceback may keep this alive
                    self._forget_states()
            raise
        finally:
            self._forget_pass()

    def _copies(self, n: int) -> bool:
        """Whether states are copied before a pass of n columns, which ends in a draft."""
        return self._verifies and n > self.num_owed + 1 and bool(self._hosted.others.shapes)

    @staticmethod
    def _copied(layer: Any) -> dict[str, Any]:
        """What a cache layer keeps, tensors too."""
        kept = ("updated", "number", "spec")
        return copy.deepcopy({name: x for name, x in vars(layer).items() if name not in kept})

    @property
    def steps_on_device(self) -> bool:
        """Whether a step may run on the modules' device as a whole, and `note_step` after it."""
        return self._hosted.steps_on_device

    @property
    def num_columns(self) -> int:
        """Columns before the pass, in it."""
        return self._num_columns - 1

    @property
    def new_positions(self) -> Tensor | None:
        """In a pass, the positions of its columns in their sequences, where the modules are: int64
        [batch_size, n], 0 at padding."""
        if self._new_positions is None and self._new_columns:
            columns = torch.arange(self._num_columns - self._new_columns, self._num_columns)
            positions = (columns - torch.tensor(self._pads)[:, None]).clamp_min(0)
            modules = self._hosted.others.modules
            self._new_positions = positions if modules is None else positions.to(modules.device)
        return self._new_positions

    def begin_step(self) -> None:
        """The stock modules run this step; the CPU attends."""
        self.addresses = None
        seqs = np.repeat(self._seqs, len(self._step_lens) // len(self._seqs)).tolist()
        self._step = self._hosted.attention.begin_step(seqs, self._step_lens)

    def note_step(self) -> None:
        """All layers have the new token of each row."""
        for layer in self.layers:
            if isinstance(layer, _HostedLayer):
                layer.seen += 1

    def _wait_for_rows(self) -> None:
        """Until the device has written all that it was given to pages.

        Raises:
            ValueError: some of it is not finite.
        """
        modules = self._hosted.others.modules
        if modules is None or not self._are_finite:
            return
        modules.wait()
        finite = torch.stack([x for _, x in self._are_finite]).tolist()
        for (layer_idx, _), is_finite in zip(self._are_finite, finite, strict=True):
            if not is_finite:
                raise ValueError(f"non-finite keys or values in layer {layer_idx} of the KV store")

    def _checked_pads(self, shape: tuple[int, int], mask: Tensor | None) -> list[int]:
        (batch_size, n), past = shape, self._num_columns
        if self._has_failed:
            raise RuntimeError(
                "a forward pass with this cache has failed: it is empty; call reset() and read the "
                "whole text again, or make a new one"
            )
        if self._seqs and batch_size != len(self._seqs):
            raise ValueError(f"past_key_values has {len(self._seqs)} rows, got {batch_size}")
        columns = past + n
        pads = [0] * batch_size
        if mask is not None:
            if list(mask.shape) != [batch_size, columns]:
                raise ValueError(
                    f"attention_mask must be {[batch_size, columns]}, padding and cached columns "
                    f"included, got {list(mask.shape)}"
                )
            attended = mask != 0
            pads = (columns - attended.sum(1)).tolist()
            is_behind = torch.arange(columns) >= torch.tensor(pads)[:, None]
            if not torch.equal(attended, is_behind):
                raise ValueError("attention_mask must have padding on the left of each row only")
        for row, (seq, pad) in enumerate(zip(self._seqs, pads, strict=False)):
            if self.store.kv_len(seq) != past - min(pad, past):
                raise ValueError(
                    f"attention_mask hides {pad} columns of row {row}, and the pass before hid "
                    f"{past - self.store.kv_len(seq)}; give the mask of all columns"
                )
        return pads

    def _attend(self, call: AttentionCall) -> Tensor | None:
        """Answer a call whose keys are of a layer in the store."""
        known = self._layer_of.get(id(call.key))
        is_new = known is None
        if known is not None:
            layer = known[1]  # of which another layer shares the keys
        elif self._updated:
            layer = self._updated.pop()
            self._layer_of[id(call.key)] = call.key, layer
        else:
            return self._attend_beside(call)
        modules, seen = self._hosted.others.modules, layer.get_seq_length()
        if self._step is not None or modules is not None:
            self._check_mask(call.mask, call.query.shape[2], seen)
        if self._hosted.is_resident:
            return self._attend_rows(seen, call, None)
        if self._step is not None:
            return self._decode(layer, call, self._step, appends=is_new)
        if is_new:
            self._append(layer, call)
        if modules is not None:
            out = self._attend_rows(seen, call, layer)
        elif self._is_plain(call, seen):
            out = self._attend_prompts(layer, call)
        else:
            if layer.seen > call.query.shape[2] or self.store.format.is_int8:
                keys, values = self._gathered(layer)
                call = replace(call, key=keys, value=values)
            out = call.in_torch()
        if self.between is not None:
            self.between()
        return out

    def _is_plain(self, call: AttentionCall, seen: int) -> bool:
        """Whether a prompt's queries see all that comes before them but padding, and no caps."""
        n = call.query.shape[2]
        if call.softcap or (call.mask is None and call.is_causal is False and n > 1):
            return False
        try:
            self._check_mask(call.mask, n, seen)
        except NotImplementedError:
            return False
        return True

    def _attend_prompts(self, layer: _HostedLayer, call: AttentionCall) -> Tensor:
        """Of a CPU, a row at a time, by the kernel of prompts; zeros at padding."""
        n, pool = call.query.shape[2], self._hosted.attention.pool
        v_dim = call.value.shape[3] if call.latents is None else call.latents.v_dim
        out = call.query.new_zeros(len(self._seqs), n, call.query.shape[1], v_dim)
        for row, (seq, pad) in enumerate(zip(self._seqs, self._pads, strict=True)):
            kv_len = layer.seen - pad
            skip = max(0, n - kv_len)
            if skip == n:
                continue
            rows: tuple[Tensor, ...] = call.key[row, :, skip:], call.value[row, :, skip:]
            if kv_len > n - skip or self.store.format.is_int8:
                whole = self.store.gather(seq, layer.number, 0, kv_len)
                rows = whole[0][..., : layer.spec.k_dim], whole[1][..., : layer.spec.v_dim]
            if call.latents is not None:
                rows = tuple(x[0] for x in call.latents.expand(rows[0][None]))
            out[row, skip:] = call.after(rows, call.query[row, :, skip:], pool)
        return out

    def _attend_beside(self, call: AttentionCall) -> Tensor | None:
        """The same of a layer that is not in the store, such as one with a window; None: the
        module's own attention does it."""
        n, columns = call.query.shape[2], call.key.shape[2]
        if n == 1 or call.softcap or self._hosted.others.modules is not None:
            return None
        window = self._window_of(call.mask, n, columns)
        if window is None or (call.mask is None and (call.is_causal is False or n < columns)):
            return None
        out = call.query.new_zeros(len(self._seqs), n, call.query.shape[1], call.value.shape[3])
        for row, pad in enumerate(self._pads):
            first = max(0, pad - (self._num_columns - columns))
            skip = max(0, first - (columns - n))
            if skip < n:
                rows = call.key[row, :, first:], call.value[row, :, first:]
                query = call.query[row, :, skip:]
                out[row, skip:] = call.after(rows, query, self._hosted.attention.pool, window)
        return out

    def _window_of(self, mask: Tensor | None, n: int, columns: int) -> int | None:
        """How many tokens each query sees, itself the last; 0: all of them but padding. None: some
        of the first, the middle and the last queries see others."""
        if mask is None:
            return 0
        if self._known_window[0] is mask:
            return self._known_window[1]
        some = sorted({0, n // 3, n // 2, max(0, n - 2), n - 1})
        rows = mask[:, 0, some, :columns]
        attended = rows if rows.dtype == torch.bool else rows == 0
        pads = torch.tensor(self._pads)[:, None, None] - (self._num_columns - columns)
        column, queries = torch.arange(columns), torch.arange(columns - n, columns)[some][:, None]
        behind = attended[:, -1].int().argmax(-1) - pads.clamp_min(0)[:, 0, 0]
        first = attended[int(behind.argmax()), -1].int().argmax()
        window = int(columns - first) if int(behind.max()) > 0 else 0
        expected = (column >= pads) & (column <= queries)
        if window:
            expected &= column > queries - window
        fits = mask.shape[1] == 1 and bool(((attended == expected) | (queries < pads)).all())
        self._known_window = mask, window if fits else None
        return self._known_window[1]

    def _check_mask(self, mask: Tensor | None, n: int, seen: int) -> None:
        """Refuse a mask that hides anything but padding, and what comes later, from a decode step,
        or from the first, the middle one and the last of a prompt's columns."""
        if mask is None or mask is self._known_mask:
            return
        device = mask.device
        some = sorted({0, n // 2, n - 1})
        rows = mask[:, 0, some, :seen]  # [batch_size, len(some), columns]
        attended = rows if rows.dtype == torch.bool else rows == 0
        columns = torch.arange(seen, device=device)
        queries = columns[seen - n :][some][:, None]
        pads = torch.tensor(self._pads, device=device)[:, None, None]
        expected = (columns >= pads) & (columns <= queries)
        if mask.shape[1] != 1 or not bool(((attended == expected) | (queries < pads)).all()):
            raise NotImplementedError(
                "its attention mask hides more than padding from a layer that attends to all tokens"
            )
        self._known_mask = mask

    def _append(self, layer: _HostedLayer, call: AttentionCall) -> None:
        """The new keys and values of a prompt, without padding."""
        n, width = call.key.shape[2], layer.spec.head_dim
        past = layer.seen - n
        attention = self._hosted.attention
        on_queries, most = attention.on_prefill_queries, attention.policy.state.observed_queries
        keys = values = widened(call.key, width).transpose(1, 2)
        if not self.store.format.keys_only:
            values = widened(call.value, width).transpose(1, 2)
        on_host = self._hosted.others.modules is None
        append = self.store.append if on_host else self.store.append_async
        for row, (seq, pad) in enumerate(zip(self._seqs, self._pads, strict=True)):
            skip, start = max(0, pad - past), max(past, pad) - pad
            if skip == n:
                continue
            rows = keys[row, skip:], values[row, skip:]
            if not on_host:
                is_finite = rows[0].isfinite().all() & rows[1].isfinite().all()
                self._are_finite.append((layer.number, is_finite))
            append(seq, layer.number, *rows, start=start)
            if on_queries is not None:
                queries = call.query[row : row + 1, :, max(skip, n - most) :]
                if call.latents is not None:
                    queries = call.latents.absorb(queries)
                queries = widened(queries[0], width).cpu()
                on_queries(seq, layer.number, queries, layer.seen - pad)

    def _attend_rows(self, seen: int, call: AttentionCall, hosted: _HostedLayer | None) -> Tensor:
        """Attention on the modules' device; zeros at padding.

        Args:
            seen: columns, the new ones included.
            hosted: keys and values before the new ones are in the store: the device gets those of
                one row and layer at a time. None: the call has them all.

        There may be fewer queries, the last ones, than new keys: layers with the keys of others
        need no output for the rest of a prompt.
        """
        n, first_new = call.query.shape[2], seen - call.key.shape[2]
        num_qo_heads, v_dim = call.query.shape[1], call.value.shape[3]
        if call.latents is not None:
            v_dim = call.latents.v_dim
        out = call.query.new_zeros(len(self._seqs), n, num_qo_heads, v_dim)
        for row, (seq, pad) in enumerate(zip(self._seqs, self._pads, strict=True)):
            before, first = max(0, first_new - pad), max(0, pad - first_new)
            skip, past = max(0, pad - (seen - n)), None
            if skip == n:
                continue
            if before and hosted is not None:
                spec = hosted.spec
                shape = (spec.num_kv_heads, seen - pad, spec.head_dim)
                keys = values = call.query.new_zeros(shape)
                of_store = (keys[:, :before],) * 2
                if not self.store.format.keys_only:
                    values = call.query.new_zeros(shape)
                    of_store = keys[:, :before], values[:, :before]
                self.store.gather(seq, hosted.number, 0, before, out=of_store)
                past = keys, values
            query = call.query[row : row + 1, :, skip:]
            key, value = (x[row : row + 1, :, first:] for x in (call.key, call.value))
            out[row, skip:] = replace(call, query=query, key=key, value=value).behind(past)
        return out

    def _gathered(self, layer: _HostedLayer) -> tuple[Tensor, Tensor]:
        """All keys and values as stock modules have them, zeros at padding."""
        spec, columns = layer.spec, layer.seen
        shape = (len(self._seqs), columns, spec.num_kv_heads)
        keys = torch.zeros(*shape, spec.k_dim, dtype=self.store.dtype)
        values = torch.zeros(*shape, spec.v_dim, dtype=self.store.dtype)
        for row, (seq, pad) in enumerate(zip(self._seqs, self._pads, strict=True)):
            if columns > pad:
                rows = self.store.gather(seq, layer.number, 0, columns - pad)
                for out, found in zip((keys, values), rows, strict=True):
                    out[row, pad:] = found.transpose(0, 1)[..., : out.shape[-1]]
        return keys.transpose(1, 2), values.transpose(1, 2)

    def can_decode(self, layer_idx: int) -> bool:
        """Whether `decode` may take the place of a layer's attention in this pass."""
        layer = self.layers[layer_idx]
        on_host = self._hosted.others.modules is None and isinstance(layer, _HostedLayer)
        return on_host and self._step is not None

    def decode(
        self,
        layer_idx: int,
        qkv: Tensor,
        rope: tuple[Tensor, Tensor],
        norms: tuple[Norm, Norm],
        mask: Tensor | None,
    ) -> Tensor:
        """Attention of a layer's new token: [n, num_qo_heads * head_dim], if it `can_decode`.

        Args:
            qkv: [n, (num_qo_heads + 2 num_kv_heads) * head_dim]; queries are rotated in place.
            rope: cos, sin: [n, rotary_dim].
            norms: of query and key heads, of one eps.
            mask: as of `AttentionCall`, of a padded batch.
        """
        layer: Any = self.layers[layer_idx]
        attention, step = self._hosted.attention, self._step
        assert step is not None
        n = len(qkv) // len(self._seqs)
        layer.seen += n
        self._check_mask(mask, n, layer.seen)
        (q_norm, eps), (k_norm, _) = norms
        attention.rope_append(
            layer.number, step, qkv, rope, q_norm=q_norm, k_norm=k_norm, norm_eps=eps
        )
        out = torch.empty(len(qkv), layer.spec.num_qo_heads * layer.spec.head_dim, dtype=qkv.dtype)
        attention.attend(layer.number, step, qkv, out, None)
        return out

    def _decode(
        self, layer: _HostedLayer, call: AttentionCall, step: DecodeStep, *, appends: bool
    ) -> Tensor:
        attention, spec, width = self._hosted.attention, layer.spec, layer.spec.head_dim
        query, num_rows = call.query, call.query.shape[0] * call.query.shape[2]
        modules = self._hosted.others.modules
        pool = attention.pool if modules is None else None  # which multiplies latents
        if call.latents is not None:
            of_token = query.transpose(1, 2).flatten(0, 1)[:, :, None]
            query = call.latents.absorb(of_token, pool)
        parts = (query, call.key, call.value) if appends else (query,)
        by_token = [widened(x, width).transpose(1, 2).contiguous() for x in parts]
        rows = torch.cat([x.view(num_rows, -1) for x in by_token], dim=1)
        if modules is not None:
            rows = modules.to_host(rows)
        if appends:  # rotated by the module already
            if self._no_rotation is None or self._no_rotation[0].shape[1] != width:
                ones = rows.new_ones(num_rows, width)
                self._no_rotation = ones, torch.zeros_like(ones)
            attention.rope_append(layer.number, step, rows, self._no_rotation)
        if call.sinks is not None and not appends:
            raise NotImplementedError("a layer with sinks attends to keys of another one")
        empty = torch.empty if modules is None else partial(modules.host_rows, "from")
        out = empty((num_rows, spec.num_qo_heads * width), dtype=rows.dtype)
        attention.attend(layer.number, step, rows, out, None)
        if modules is not None:
            out = modules.to_device(out)
        out = out.view(*call.query.shape[:3:2], spec.num_qo_heads, width)[..., : spec.v_dim]
        return out if call.latents is None else call.latents.values_of(out, pool)
