"""The head of a checkpoint that predicts the token after the next one, and its drafts.

A decoder layer of the model's own kind reads, for each position, the hidden state behind the final
norm and the embedding of the next token (DeepSeek-V3, arXiv:2412.19437, section 2.2). transformers
leaves its weights out. Here they become a stock model of one layer, its matrices as the files have
them (dense beside a packed model, too), and `generate(use_mtp=True)` has its drafts verified
several tokens at a time. Of more tokens than one, each reads the hidden state that the head has
made of the one before.
"""

from __future__ import annotations

import copy
import math
import re
import weakref
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.generation.candidate_generator import CandidateGenerator

from cpu_ops.worker_pool import WorkerPool
from offload.loading.checkpoint import GGUF_FILE, Checkpoint, check_loaded
from offload.loading.generic_packing import (
    generic_from_parts,
    kept_in_safetensors,
    parameter_bytes,
    safetensors_parts,
    skeleton,
)
from offload.loading.stock_model import text_part
from offload.runtime.generation import Generation
from offload.runtime.generic_cache import tensors_in
from offload.runtime.pooled_modules import use_pool

_QWEN = {  # names in files, and in the stock model of one layer
    "mtp.fc.": "eh_proj.",
    "mtp.pre_fc_norm_embedding.": "enorm.",
    "mtp.pre_fc_norm_hidden.": "hnorm.",
    "mtp.norm.": "model.norm.",
    "mtp.layers.0.": "model.layers.0.",
}
_OWN = ("enorm.weight", "hnorm.weight", "eh_proj.weight")
_OF_MODEL = ("model.embed_tokens.weight", "lm_head.weight")
MOST_DRAFTS = 8  # at a time
_MOST_OWED = 4  # tokens that are read again beside a draft; then a pass goes without one


class HeadFiles:
    """The weights of a head in the files of a checkpoint.

    Attributes:
        empty: the stock model of one layer, without memory.
        num_bytes: of memory that they will take.

    Args:
        config: the model's, of transformers, without its head.
        packing: see `packed_bytes.kept_as`.

    Raises:
        ValueError: there is no head.
        NotImplementedError: a GGUF file.
    """

    def __init__(
        self, checkpoint: Checkpoint, config: Any, dtype: torch.dtype, packing: str
    ) -> None:
        if (checkpoint.folder / GGUF_FILE).is_file():
            raise NotImplementedError(
                f"use_mtp=True: {checkpoint.folder} holds a GGUF file, of whose tensors no head is "
                "made in this version; take safetensors, or leave use_mtp out"
            )
        layer = f"model.layers.{config.num_hidden_layers}."
        # Embeddings and the matrix for logits are copies of the model's.
        renamed = {f"{layer}{x}.": "" for x in ("embed_tokens", "shared_head.head")} | {
            **{f"{layer}{x}.": f"{x}." for x in ("enorm", "hnorm", "eh_proj")},
            f"{layer}shared_head.norm.": "model.norm.",
            layer: "model.layers.0.",
            **_QWEN,
        }
        self._names: dict[str, str] = {}  # in the stock model of one layer, by those in the files
        for name in checkpoint.stored_shapes:
            prefix = next(filter(name.startswith, renamed), None)
            if prefix is not None and renamed[prefix]:
                self._names[name] = renamed[prefix] + name.removeprefix(prefix)
        if not {*_OWN, "model.norm.weight"} <= {*self._names.values()}:
            raise ValueError(
                f"use_mtp=True: {checkpoint.folder} has no head for multi-token prediction, of "
                f"weights mtp.* or {layer}*; leave use_mtp out"
            )
        shapes, types = checkpoint.stored_shapes, checkpoint.stored_types
        self._checkpoint = replace(
            checkpoint,
            stored_shapes={name: shapes[name] for name in self._names},
            stored_types={name: types[name] for name in self._names if name in types},
        )
        self._dtype, self._packing = dtype, packing
        # What transformers' renaming takes, of its layer alone.
        self._of_layer = {rf"^{re.escape(x)}": "model.layers.0." for x in (layer, "mtp.layers.0.")}
        of_layer = _one_layer(config)
        self.empty = skeleton(text_part(of_layer)[1], of_layer, dtype)
        kept = kept_in_safetensors(self._checkpoint, self.empty, self._of_layer, packing)
        sizes = parameter_bytes(self.empty, kept)
        own = (math.prod(shapes[name]) for name, x in self._names.items() if x in _OWN)
        self.num_bytes = dtype.itemsize * sum(own) + sum(
            size for name, size in sizes.items() if name not in _OF_MODEL
        )

    def load(self) -> tuple[Any, dict[str, Tensor]]:
        """The stock model of one layer, in whose embeddings and matrix for logits nothing is, and
        `_OWN`."""
        dtype, empty = self._dtype, self.empty
        parts = safetensors_parts(self._checkpoint, empty, dtype, self._of_layer, self._packing)
        plain = {self._names[name]: x for name, x in parts.plain.items()}
        own = {name: plain.pop(name) for name in _OWN}
        nothing, stubs = torch.zeros(1, dtype=dtype), dict(empty.named_parameters())
        plain |= {x: nothing.expand(stubs[x].shape) for x in _OF_MODEL if x in stubs}
        model, info = generic_from_parts(dtype, empty, replace(parts, plain=plain), None)
        check_loaded(info, self._checkpoint.folder, "its head for multi-token prediction")
        return model, own


class MtpHead:
    """The head of a stock model, with embeddings and the matrix for logits of that one.

    Args:
        pool: multiplies rows of drafts.
    """

    def __init__(self, stock: Any, files: HeadFiles, pool: WorkerPool) -> None:
        self._stock = stock
        model, weights = files.load()
        own = {name: nn.Parameter(x, requires_grad=False) for name, x in weights.items()}
        self._model: Any = model.model.eval()
        self._model.embed_tokens = nn.Identity()
        self._enorm, self._hnorm = (copy.deepcopy(self._model.norm) for _ in range(2))
        self._enorm.weight, self._hnorm.weight = own["enorm.weight"], own["hnorm.weight"]
        shape = own["eh_proj.weight"].shape
        self._eh_proj = nn.Linear(shape[1], shape[0], bias=False, device="meta")
        self._eh_proj.weight = own["eh_proj.weight"]
        # The model's own multiplies on the pool in decode steps alone: this one does so always.
        self._lm_head = copy.copy(stock.lm_head)
        for module in (self._model, self._eh_proj, self._lm_head):
            use_pool(module, pool, None)
            use_pool(module, pool, lambda: True)
        self._num_bytes: int = sum(x.nbytes for x in (*self._model.parameters(), *own.values()))
        self._caches = weakref.WeakSet[DynamicCache]()
        probe, size = self.new_cache(1), int(shape[0])
        with torch.no_grad():
            nothing = torch.zeros(1, 1, size, dtype=stock.dtype)
            self.hidden(nothing, torch.zeros(1, 1, dtype=torch.long), probe, 0)
        self.row_bytes = self.held_bytes - self._num_bytes

    @property
    def held_bytes(self) -> int:
        """Memory of weights, keys and values."""
        held: list[int] = [
            x.nbytes for cache in self._caches for x in tensors_in(vars(cache.layers[0]))
        ]
        return self._num_bytes + sum(held)

    def hidden(self, hidden: Tensor, tokens: Tensor, cache: Any, first: int) -> Tensor:
        """What the matrix for logits reads behind each position [1, n, hidden_size].

        Args:
            hidden: [1, n, hidden_size], of positions from `first` on.
            tokens: int64 [1, n], that come next.
            cache: of the head, with rows of the positions before.
        """
        embedded = self._stock.get_input_embeddings()(tokens)
        parts = self._enorm(embedded), self._hnorm(hidden)
        out = self._model(
            inputs_embeds=self._eh_proj(torch.cat(parts, dim=-1)),
            position_ids=torch.arange(first, first + tokens.shape[1])[None],
            past_key_values=cache,
            use_cache=True,
        )
        found: Tensor = out.last_hidden_state
        return found

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [1, vocab_size] behind the last of `hidden`."""
        found: Tensor = self._lm_head(hidden[:, -1:])[:, -1].float()
        return found

    def new_cache(self, most: int) -> DynamicCache:
        """An empty one, of up to `most` tokens."""
        cache = DynamicCache(config=self._model.config)
        cache.layers[0] = _Rows(most)
        self._caches.add(cache)
        return cache


class _Rows(DynamicLayer):  # type: ignore[no-untyped-call]
    """Keys and values of one sequence, of whom nothing is copied when more come."""

    def __init__(self, most: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._most, self._len = most, 0
        self._all: list[Tensor] = []

    def update(self, key_states, value_states, *_, **__):  # type: ignore[no-untyped-def]
        if not self._all:
            self._all = [
                x.new_empty(*x.shape[:2], self._most, x.shape[3])
                for x in (key_states, value_states)
            ]
        first, self._len = self._len, self._len + key_states.shape[2]
        for rows, new in zip(self._all, (key_states, value_states), strict=True):
            rows[:, :, first : self._len] = new
        of_keys, of_values = (rows[:, :, : self._len] for rows in self._all)
        return of_keys, of_values

    def get_seq_length(self) -> int:
        return self._len

    def crop(self, tokens_to_remove: int) -> None:
        self._len += tokens_to_remove


def _one_layer(config: Any) -> Any:
    """A model of the head's layer alone: it attends to everything, and has experts if any has."""
    changed = copy.deepcopy(config)
    changed.num_hidden_layers = 1
    changed._attn_implementation = "sdpa"
    kinds: dict[str, Any] = {"layer_types": ["full_attention"], "mlp_layer_types": ["sparse"]}
    kinds |= {"first_k_dense_replace": 0, "mlp_only_layers": []}
    for name, value in kinds.items():
        if getattr(changed, name, None) is not None:
            setattr(changed, name, value)
    return changed


class MtpDrafts(CandidateGenerator):
    """Proposes tokens to `generate()`, as transformers asks for them.

    Args:
        generation: that runs, with its cache.
        most: tokens of the prompt and the answer together.
        processors: of logits, the model's and the head's.
    """

    requires_model_outputs = True
    model_kwargs_overrides: ClassVar[dict[str, Any]] = {}

    def __init__(
        self,
        head: MtpHead,
        generation: Generation,
        most: int,
        processors: Any,
        *,
        samples: bool,
    ) -> None:
        self._head, self._most, self._processors, self._samples = head, most, processors, samples
        self._cache, self._num_drafts = generation.cache, generation.draft_tokens
        self._stats = generation.stats
        self._first = self._cache.get_seq_length()
        self._offset = 0 if generation.gives_all else self._first  # column of the first id
        self._rows = head.new_cache(most + self._offset - self._first)
        self._hidden, self._start = torch.empty(0), 0

    def note(self, module: Any, inputs: Any, output: Any) -> None:
        """Hook of the model's decoder: what it gives for the new tokens of a pass."""
        self._hidden = output.last_hidden_state
        self._start = self._cache.get_seq_length() - self._hidden.shape[1]

    def get_candidates(  # type: ignore[override]
        self, input_ids: Tensor, *, is_first_iteration: bool, **_: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Ids [1, n], all so far and the drafts, and logits float32 [1, num_drafts, vocab_size]."""
        if is_first_iteration:
            return input_ids, None
        known = self._first + self._rows.get_seq_length()  # positions that the head has read
        tokens = input_ids[:, known + 1 - self._offset :]
        read = self._hidden[:, known - self._start :][:, : tokens.shape[1]]
        hidden = self._head.hidden(read, tokens, self._rows, known)
        num_drafts = min(self._num_drafts, self._most - input_ids.shape[1] - 1)
        if num_drafts < 1 or self._cache.num_owed >= _MOST_OWED:
            return input_ids, None
        found, ids = list[Tensor](), input_ids
        for number in range(num_drafts):
            if number:
                position = self._first + self._rows.get_seq_length()
                hidden = self._head.hidden(hidden[:, -1:], ids[:, -1:], self._rows, position)
            logits = self._processors(ids, self._head.logits(hidden))
            token = logits.argmax(-1, keepdim=True)
            if self._samples:
                token = logits.softmax(-1).multinomial(1)
            ids = torch.cat((ids, token), dim=1)
            found.append(logits)
        self._rows.crop(1 - num_drafts)  # of tokens that may not stay
        self._stats.drafted_tokens += num_drafts
        return ids, torch.stack(found, dim=1)

    def update_candidate_strategy(
        self, input_ids: Tensor, scores: Tensor, num_matches: Any
    ) -> None:
        """Of the last drafts so many have stayed."""
        self._stats.accepted_tokens += int(num_matches)
