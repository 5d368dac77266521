"""Choosing retrieval heads without training: what heads lose when they reuse another's tokens.

LycheeDecode trains gates for it. Here one prefill of a text is enough: for some of its queries the
exact attention weights of every layer are computed, and for every pair of layers and each KV head
the attention mass that the lower one keeps on the tokens which the upper one finds. The retrieval
heads are then those that keep most of it in total: an exact optimum, not a greedy one, because what
a head keeps depends only on the retrieval head above it.

Mass over prose is not all: the few heads that fetch a fact from far away have nothing to do there.
So a passage of the text is repeated at its end, and the heads that look back at its first
appearance while the model reads it again are retrieval heads first. On SmolLM2-135M these are the
very heads that attend to a needle in a haystack; chosen by mass alone, needles got lost.

SmolLM2-135M, calibrated on 2,048 tokens of prose, queries at 6-7K tokens of it, 1,024 tokens
attended, mean mass without sinks (and in the heads that reuse): 0.943 (0.934) with 12 retrieval
heads after layer 0, 0.960 (0.951) with 16; evenly spaced 0.910 (0.895) and 0.946 (0.933); 12 chosen
by mass alone 0.955 (0.948); exact top-k everywhere 0.987, Quest 0.937.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offload.kv.store import KVStore
from offload.models import LeanModel
from offload.models.batch import pack
from offload.policies.lychee_decode.choice import FloatArray, choose_retrieval_heads
from offload.prefill.forward import OnQueries, prefill
from offload.selection.head_roles import (
    BoolArray,
    HeadRoles,
    check_retrieval_heads,
    default_retrieval_heads,
    evenly_spaced_heads,
)
from offload.system.autocast import without_autocast
from offload.system.progress import Progress
from offload.system.stdlib_text import stdlib_prose

logger = logging.getLogger(__name__)

CALIBRATION_TOKENS = 2048
MIN_CALIBRATION_TOKENS = 256
_NUM_QUERIES = 32
_REPEATED_TOKENS = 128
_MIN_COPY_MASS = (
    0.15  # of a copying head: SmolLM2-135M's have 0.19 to 0.61, the others at most 0.18
)
_SINK_TOKENS = 4
_RECENT_TOKENS = 64


@dataclass(frozen=True)
class Calibration:
    """What was measured on a text, and what follows from it.

    Attributes:
        mass_kept: [num_kv_heads, num_layers, num_layers]; [h, i, j] is the share of the attention
            of KV head h in layer j (sinks not counted, the recent window counted) that falls on the
            tokens which the same head of layer i <= j finds. Below the diagonal it is zero.
        copy_mass: [num_layers, num_kv_heads], share of its attention that a head gives to the first
            appearance of a passage when it is repeated; of the query head that gives most.
        num_tokens: of the text.
        tokens_per_head: tokens each head found, besides sinks and recent window.
    """

    mass_kept: FloatArray
    copy_mass: FloatArray
    num_tokens: int
    tokens_per_head: int

    def copying_heads(self, most: int) -> BoolArray:
        """bool [num_layers, num_kv_heads]: at most so many heads after layer 0 that copy."""
        copy_mass = self.copy_mass.copy()
        copy_mass[0] = 0.0  # retrieves anyway
        copying = np.zeros(copy_mass.shape, np.bool_)
        copying.flat[np.argsort(-copy_mass, axis=None)[:most]] = True
        copying &= copy_mass >= _MIN_COPY_MASS
        return copying

    @property
    def copying_layers(self) -> BoolArray:
        """bool [num_layers]: layers with a copying head."""
        return np.asarray((self.copy_mass >= _MIN_COPY_MASS).any(axis=1))

    def kept_by(self, retrieval: BoolArray) -> float:
        """Mean mass kept over all heads after layer 0 under bool [num_layers, num_kv_heads]."""
        kept = []
        for head, roles in enumerate(retrieval.T):
            above = 0
            for layer_idx in range(1, len(roles)):
                if roles[layer_idx]:
                    above = layer_idx
                kept.append(1.0 if roles[layer_idx] else self.mass_kept[head, above, layer_idx])
        return float(np.mean(kept)) if kept else 1.0


class HeadObserver:
    """Queries of a prefill, and what `Calibration.mass_kept` follows from them and the keys.

    Pass `keep_queries` to `prefill` as `on_queries`; afterwards give the layers' keys to
    `compare`, in order. It holds queries x layers x KV heads x tokens_per_head int64, and one
    query's attention weights at a time.

    Args:
        num_tokens: `text_tokens` of a text, and after them its passage `repeated` once more. 32
            queries, spread over the second half of the text, and those of the repetition are
            looked at.
    """

    def __init__(
        self, num_layers: int, num_kv_heads: int, sm_scale: float, num_tokens: int
    ) -> None:
        repeated_tokens = min(_REPEATED_TOKENS, num_tokens // 16)
        self.text_tokens = num_tokens - repeated_tokens
        first = self.text_tokens // 4
        self.repeated = slice(first, first + repeated_tokens)
        self.positions: list[int] = (
            np.linspace(self.text_tokens // 2, self.text_tokens - 1, _NUM_QUERIES)
            .astype(int)
            .tolist()
        )
        self._copies: list[list[Tensor]] = [[] for _ in range(num_layers)]
        self._copy_mass = np.zeros((num_layers, num_kv_heads))
        self.tokens_per_head = num_tokens // 16
        self._num_tokens = num_tokens
        self._num_kv_heads = num_kv_heads
        self._sm_scale = sm_scale
        self._queries: list[dict[int, Tensor]] = [{} for _ in range(num_layers)]
        shape = (_NUM_QUERIES, num_layers, num_kv_heads, self.tokens_per_head)
        self._found = np.zeros(shape, np.int64)
        self._mass_kept = np.zeros((num_kv_heads, num_layers, num_layers))

    def keep_queries(self, seq: int, layer_idx: int, queries: Tensor, kv_len: int) -> None:
        """Keep those of `queries` [num_qo_heads, n, head_dim], up to token kv_len - 1, it needs."""
        first = kv_len - queries.shape[1]
        for position in self.positions:
            if first <= position < kv_len:
                query = queries[:, position - first].float().clone()
                group = query.view(self._num_kv_heads, -1, query.shape[-1])
                self._queries[layer_idx][position] = group
        if kv_len > self.text_tokens:
            copies = queries[:, max(0, self.text_tokens - first) :].float()
            self._copies[layer_idx].append(
                copies.reshape(self._num_kv_heads, -1, *copies.shape[1:])
            )

    def compare(self, layer_idx: int, keys: Tensor) -> None:
        """Attention of a layer's queries over keys [num_kv_heads, kv_len, head_dim].

        kv_len counts the text and its repeated passage.
        """
        keys = keys.float().transpose(1, 2)
        for i, position in enumerate(self.positions):
            scores = self._queries[layer_idx][position] @ keys[:, :, : position + 1]
            self._add(layer_idx, i, (self._sm_scale * scores).softmax(-1).sum(1))
        # [num_kv_heads, group_size, repeated, kv_len]; over the text only: the copy itself is near
        copies = torch.cat(self._copies[layer_idx], dim=2)
        scores = self._sm_scale * copies @ keys[:, None, :, : self.text_tokens]
        of_passage = scores.softmax(-1)[..., self.repeated].sum(-1)
        self._copy_mass[layer_idx] = of_passage.mean(-1).amax(1).cpu().numpy()

    def _add(self, layer_idx: int, i: int, weights: Tensor) -> None:
        """weights [num_kv_heads, kv_len]: attention of query i, summed over query heads."""
        weights = weights.cpu()
        last = weights.shape[1] - _RECENT_TOKENS
        found = weights[:, _SINK_TOKENS:last].topk(self.tokens_per_head).indices + _SINK_TOKENS
        self._found[i, layer_idx] = found.numpy()
        importance = weights.double().numpy()
        recent = importance[:, last:].sum(1)
        total = importance[:, _SINK_TOKENS:].sum(1)
        above = self._found[i, : layer_idx + 1]  # [layers so far, num_kv_heads, tokens_per_head]
        chosen = importance[np.arange(self._num_kv_heads)[:, None], above].sum(-1)
        # All attention may be on the sinks: nothing is lost then.
        kept = np.divide(chosen + recent, total, out=np.ones_like(chosen), where=total > 0)
        self._mass_kept[:, : layer_idx + 1, layer_idx] += kept.T

    def result(self) -> Calibration:
        """After the last layer."""
        return Calibration(
            self._mass_kept / len(self.positions),
            self._copy_mass,
            self._num_tokens,
            self.tokens_per_head,
        )


def observe_heads(
    lean: LeanModel,
    input_ids: Tensor,
    *,
    on_layer: Callable[[], None] = lambda: None,
) -> Calibration:
    """One prefill of a text, in a KV store of its own, and the attention of some of its queries.

    It runs where the model's weights are.

    Args:
        input_ids: int64 [num_tokens] or [1, num_tokens]. The last tokens, 128 or a sixteenth,
            give way to the repeated passage.
        on_layer: called twice for each layer: when it has been read, and when it is compared.

    Raises:
        ValueError: fewer than MIN_CALIBRATION_TOKENS tokens, or more than the model can have.
    """
    tokens = input_ids.flatten()
    num_tokens = len(tokens)
    if num_tokens < MIN_CALIBRATION_TOKENS:
        raise ValueError(
            f"calibration needs a text of at least {MIN_CALIBRATION_TOKENS} tokens, "
            f"got {num_tokens}"
        )
    if num_tokens > lean.shape.max_context:
        raise ValueError(
            f"a calibration text of {num_tokens} tokens exceeds the {lean.shape.max_context} "
            f"tokens of this model ({lean.max_context_reason}); shorten it or lower its number of "
            "tokens"
        )
    shape, num_layers = lean.shape, len(lean.layers)
    observer = HeadObserver(num_layers, shape.num_kv_heads, lean.sm_scale, num_tokens)
    tokens = torch.cat([tokens[: observer.text_tokens], tokens[observer.repeated]])
    with keys_of_text(lean, tokens, observer.keep_queries, on_layer) as keys_of:
        for layer_idx in range(num_layers):
            observer.compare(layer_idx, keys_of(layer_idx))
            on_layer()
    return observer.result()


@contextmanager
def keys_of_text(
    lean: LeanModel,
    tokens: Tensor,
    on_queries: OnQueries,
    on_layer: Callable[[], None] = lambda: None,
) -> Iterator[Callable[[int], Tensor]]:
    """Read a text of int64 [num_tokens] in one slice, in a store of its own, on the device of the
    weights: it is the current one inside.

    Args:
        on_queries: as `prefill` takes it.
        on_layer: called when a layer has been read; a GPU may still be at work on it.

    Yields:
        what gives a layer's keys [num_kv_heads, num_tokens, head_dim] on that device.
    """
    num_tokens, device = len(tokens), lean.lm_head.device
    with (
        closing(KVStore(**lean.shape.kv_heads, dtype=lean.lm_head.dtype)) as store,
        torch.cuda.device(device) if device.type == "cuda" else nullcontext(),
        without_autocast(device),
    ):
        seq = store.new_sequence()
        store.reserve([seq], [num_tokens])
        with torch.no_grad():
            prefill(
                lean,
                lean.embed_tokens(tokens.to(device)).clone(),
                pack((1, num_tokens), None, torch.arange(num_tokens)[None]),
                store=store,
                seqs=[seq],
                slice_tokens=num_tokens,
                on_queries=on_queries,
                on_tokens=lambda num_tokens: on_layer(),
            )
        store.commit([seq], [num_tokens])
        yield lambda layer_idx: store.gather(seq, layer_idx)[0].to(device)


def calibration_tokens(tokenizer: Any, num_tokens: int, text: str | None = None) -> Tensor:
    """int64 [<= num_tokens]: the first tokens of `text`, or of the standard docstrings."""
    text = stdlib_prose(num_tokens) if text is None else text
    encoded = tokenizer(text, truncation=True, max_length=num_tokens, return_tensors="pt")
    tokens: Tensor = encoded["input_ids"][0]
    return tokens


def calibrated_roles(
    lean: LeanModel,
    model_type: str,
    load_tokenizer: Callable[[], Any],
    retrieval_heads: int | None,
) -> HeadRoles | None:
    """Roles from up to CALIBRATION_TOKENS tokens of the standard library's docstrings.

    None for a model whose context is shorter than MIN_CALIBRATION_TOKENS: it keeps evenly spaced
    retrieval heads.

    Args:
        lean: the model that will run.
        load_tokenizer: called only if it is needed.
        retrieval_heads: beyond layer 0; None takes a sixth of the model's KV heads.
    """
    shape = lean.shape
    if shape.max_context < MIN_CALIBRATION_TOKENS:
        logger.warning(
            "lychee_decode: a context of %d tokens is too short for a calibration; its retrieval "
            "heads are evenly spaced",
            shape.max_context,
        )
        return None
    tokens = calibration_tokens(load_tokenizer(), min(CALIBRATION_TOKENS, shape.max_context))
    with reading_progress("lychee_decode", lean, 2) as on_layer:
        calibration = observe_heads(lean, tokens, on_layer=on_layer)
    roles = roles_from(
        calibration,
        model_type=model_type,
        head_dim=lean.shape.head_dim,
        retrieval_heads=retrieval_heads,
        text="the standard library's docstrings",
    )
    logger.info(
        "lychee_decode has no head_roles: %s. `offload calibrate` makes a file of them",
        roles.made_by,
    )
    return roles


@contextmanager
def reading_progress(
    policy: str, lean: LeanModel, times: int, found: str = "heads"
) -> Iterator[Callable[[], None]]:
    """Shows how far a calibration is that a model's loading waits for.

    Yields:
        what is to be called for each layer, so many times.
    """
    device = lean.lm_head.device
    progress = Progress(
        logger,
        title=f"finding {policy}'s {found}",
        begins=f"{policy}: finding the {found} of this model that retrieve, on {device}, once "
        "(%d layers to read)",
        ended="found them in %.1f s",
    )
    done, total = itertools.count(1), times * len(lean.layers)
    with progress.shown():
        progress(0, total)
        yield lambda: progress(next(done), total)


def roles_from(
    calibration: Calibration,
    *,
    model_type: str,
    head_dim: int,
    retrieval_heads: int | None = None,
    text: str = "a text",
) -> HeadRoles:
    """The best `retrieval_heads` (default: a sixth of the KV heads) for what was measured."""
    num_kv_heads, num_layers, _ = calibration.mass_kept.shape
    if retrieval_heads is None:
        retrieval_heads = default_retrieval_heads(num_layers, num_kv_heads)
    check_retrieval_heads(retrieval_heads, num_layers, num_kv_heads)
    copying = calibration.copying_heads(retrieval_heads)
    retrieval = choose_retrieval_heads(calibration.mass_kept, retrieval_heads, copying)
    kept = calibration.kept_by(retrieval)
    spaced = calibration.kept_by(evenly_spaced_heads(num_layers, num_kv_heads, retrieval_heads))
    made_by = (
        f"calibration on {calibration.num_tokens} tokens of {text}: {retrieval_heads} retrieval "
        f"heads after layer 0, {int(copying.sum())} of them copying, keep {kept:.3f} of the "
        f"attention mass with "
        f"{calibration.tokens_per_head} tokens per head (evenly spaced: {spaced:.3f})"
    )
    return HeadRoles.of(retrieval, head_dim=head_dim, model_type=model_type, made_by=made_by)
