"""Which layer selects what the layers below look up, found while a model is loaded.

The model reads texts in which facts stand far from their questions, answers included. While it
reads an answer, some tokens are chosen by each layer, and what counts is the attention to the fact
that falls on them in the layers that would reuse the choice: the answer is lost with it. Neither
all attention mass nor recall of the heaviest tokens, the paper's measure, tells so: nearly all of
both is elsewhere. SmolLM2-135M (32K positions), layer 2 and one more select 320 tokens, answers
over 4K tokens:

    layer                                   12     14     17     18
    attention to facts kept, 8K          0.124  0.805  0.867  0.619
    attention mass kept, 8K              0.712  0.783  0.784  0.760
    recall, 8K                           0.268  0.295  0.276  0.261
    KL of the answers from full          2.444  0.407  0.033  0.077

One layer is chosen beside the first, as in the paper. For more of them this measure is too coarse:
of three more, layers 7, 14 and 21 keep most, and lose one of many keys. A sweep over answers
(`training.layer_sweep`) tells, and takes minutes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offload.models import LeanModel
from offload.policies.lychee_decode.calibration import reading_progress
from offload.policies.lychee_decode.choice import FloatArray
from offload.policies.per_head.calibration import lookup_attention
from offload.policies.per_head.lookups import (
    LOOKUP_TOKENS,
    MIN_LOOKUP_TOKENS,
    NUM_LOOKUP_TEXTS,
    LookUp,
    lookup_texts,
)
from offload.policies.tidal_decode.select_layers import SelectLayers, default_select_layers

logger = logging.getLogger(__name__)

_SINK_TOKENS = 4
_RECENT_TOKENS = 64


def calibrated_layers(
    lean: LeanModel, model_type: str, load_tokenizer: Callable[[], Any], dense_layers: int
) -> SelectLayers | None:
    """The first layer after the dense ones, and the one that keeps most attention to facts beside
    it.

    None where there is nothing to choose, and for a model that cannot read the texts: its context
    is shorter than MIN_LOOKUP_TOKENS, or it has no tokenizer.

    Args:
        lean: the model that will run.
        load_tokenizer: called only if it is needed.
    """
    shape = lean.shape
    if shape.num_layers - dense_layers < 3:  # one that selects, another, and one to reuse it
        return None
    if shape.max_context < MIN_LOOKUP_TOKENS:
        logger.info(
            "tidal_decode: a context of %d tokens is too short for a calibration", shape.max_context
        )
        return None
    try:
        tokenizer = load_tokenizer()
    except OSError as error:
        logger.warning("tidal_decode: no calibration without a tokenizer: %s", error)
        return None
    num_tokens = min(LOOKUP_TOKENS, shape.max_context)
    with reading_progress("tidal_decode", lean, NUM_LOOKUP_TEXTS, "layers") as on_layer:
        kept = mean_lookups_kept(lean, tokenizer, num_tokens, dense_layers, on_layer)
    layers = choose_layers(kept, dense_layers)
    usual = default_select_layers(shape.num_layers, shape.num_kv_heads, dense_layers)
    made_by = (
        f"calibration on look-ups in texts of {num_tokens} tokens: with layers "
        f"{_listed(layers)} the layers after the first {dense_layers} keep "
        f"{kept_by(kept, layers):.2f} of their attention to a fact that the model repeats (with "
        f"{_listed(usual)}, by shape: {kept_by(kept, usual):.2f})"
    )
    logger.info("tidal_decode has no select_layers: %s", made_by)
    return SelectLayers(
        model_type,
        **shape.kv_heads,
        select_layers=layers,
        dense_layers=dense_layers,
        made_by=made_by,
    )


def mean_lookups_kept(
    lean: LeanModel,
    tokenizer: Any,
    num_tokens: int,
    dense_layers: int,
    on_layer: Callable[[], None] = lambda: None,
) -> FloatArray:
    """[num_layers, num_layers]: `lookups_kept`, mean over texts of each kind; the attention of all
    layers after the dense ones is 1.

    Args:
        num_tokens: of a text.
        on_layer: called when a layer has read one of the NUM_LOOKUP_TEXTS.
    """
    of_texts = []
    for text in lookup_texts(tokenizer, num_tokens):
        kept = lookups_kept(lean, *text, on_layer)
        of_texts.append(kept / max(kept.diagonal()[dense_layers:].sum(), np.finfo(float).tiny))
    return np.asarray(np.mean(of_texts, axis=0))


def lookups_kept(
    lean: LeanModel,
    tokens: Tensor,
    lookups: Sequence[LookUp],
    on_layer: Callable[[], None] = lambda: None,
) -> FloatArray:
    """[num_layers, num_layers]: [i, j] is the attention of layer j to the facts, summed over heads
    and the answers' queries, that falls on the tokens which layer i < j selects: those of the
    largest weight, summed over its heads, a 32nd of the text, with sinks and recent ones beside
    them. [j, j] is all of it: a layer that selects attends to everything. 0 below the diagonal.
    """
    num_layers = lean.shape.num_layers
    kept = np.zeros((num_layers, num_layers))
    chosen: dict[range, list[Tensor]] = {lookup.fact: [] for lookup in lookups}
    token = torch.arange(len(tokens))
    for layer_idx, lookup, weights in lookup_attention(lean, tokens, lookups, on_layer):
        importance = weights.sum((0, 1)).cpu()  # [queries, num_tokens]
        fact = slice(lookup.fact.start, lookup.fact.stop)
        on_fact = importance[:, fact].double()
        above = chosen[lookup.fact]
        for i, held in enumerate(above):
            kept[i, layer_idx] += float((on_fact * held).sum())
        kept[layer_idx, layer_idx] += float(on_fact.sum())
        last = torch.tensor(lookup.queries)[:, None]
        always = (token < _SINK_TOKENS) | (token > last - _RECENT_TOKENS)
        heaviest = importance.masked_fill(always, -1.0).topk(len(tokens) // 32).indices
        above.append(always.scatter(-1, heaviest, True)[:, fact])
    return kept


def choose_layers(kept: FloatArray, dense_layers: int) -> tuple[int, int]:
    """The first layer after the dense ones, and the one beside which it keeps most.

    Args:
        kept: of `mean_lookups_kept`.
    """
    later = range(dense_layers + 1, len(kept))
    return dense_layers, max(later, key=lambda layer: kept_by(kept, (dense_layers, layer)))


def kept_by(kept: FloatArray, layers: Sequence[int]) -> float:
    """What the layers from the first of `layers` on keep, if those select."""
    return float(sum(kept[i, i:end].sum() for i, end in pairwise([*layers, len(kept)])))


def _listed(layers: Sequence[int]) -> str:
    return ",".join(map(str, layers))
