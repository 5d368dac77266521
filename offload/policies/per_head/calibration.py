"""Which heads fetch facts from afar: those that look at a fact while the model repeats it.

SmolLM2-135M: three kinds of look-up agree on the same ten heads out of 90, which give 0.1 to 0.9 of
their attention to the fact. Heads that copy a passage (`lychee_decode.calibration`) are much the
same ones, but for one that only copies and one that only looks up.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offload.models import LeanModel
from offload.policies.lychee_decode.calibration import keys_of_text, reading_progress
from offload.policies.lychee_decode.choice import FloatArray
from offload.policies.per_head.lookups import (
    LOOKUP_TOKENS,
    MIN_LOOKUP_TOKENS,
    NUM_LOOKUP_TEXTS,
    LookUp,
    lookup_texts,
)
from offload.selection.head_roles import HeadRoles

logger = logging.getLogger(__name__)


def calibrated_roles(
    lean: LeanModel,
    model_type: str,
    load_tokenizer: Callable[[], Any],
    retrieval_heads: int,
    dense_layers: int,
) -> HeadRoles | None:
    """The heads after the dense layers that look at facts most.

    None for a model whose context is shorter than MIN_LOOKUP_TOKENS: it keeps evenly spaced
    retrieval heads.

    Args:
        lean: the model that will run.
        load_tokenizer: called only if it is needed.
    """
    shape = lean.shape
    if shape.max_context < MIN_LOOKUP_TOKENS:
        logger.warning(
            "per_head: a context of %d tokens is too short for a calibration; its retrieval heads "
            "are evenly spaced",
            shape.max_context,
        )
        return None
    if retrieval_heads == 0:
        none = np.zeros((shape.num_layers, shape.num_kv_heads), np.bool_)
        return HeadRoles.of(none, head_dim=shape.head_dim, model_type=model_type)
    num_tokens = min(LOOKUP_TOKENS, shape.max_context)
    tokenizer = load_tokenizer()
    with reading_progress("per_head", lean, NUM_LOOKUP_TEXTS) as on_layer:
        mass = mean_lookup_mass(lean, tokenizer, num_tokens, on_layer)
    roles = roles_by_mass(
        mass,
        retrieval_heads,
        dense_layers,
        num_tokens=num_tokens,
        head_dim=shape.head_dim,
        model_type=model_type,
    )
    logger.info("per_head has no head_roles: %s", roles.made_by)
    return roles


def roles_by_mass(
    mass: FloatArray,
    retrieval_heads: int,
    dense_layers: int,
    *,
    num_tokens: int,
    head_dim: int,
    model_type: str,
) -> HeadRoles:
    """So many heads after the dense layers, those of the largest mass.

    Args:
        mass: of `mean_lookup_mass` for texts of `num_tokens` tokens.
    """
    mass = mass.copy()
    mass[:dense_layers] = -1.0
    retrieves = np.zeros(mass.shape, np.bool_)
    retrieves.flat[np.argsort(-mass, axis=None, kind="stable")[:retrieval_heads]] = True
    least = float(mass[retrieves].min()) if retrieval_heads else 0.0
    made_by = (
        f"calibration on look-ups in texts of {num_tokens} tokens: {retrieval_heads} heads after "
        f"the first {dense_layers} layers, which give {least:.2f} to {mass.max():.2f} of their "
        "attention to a fact that the model repeats"
    )
    return HeadRoles.of(retrieves, head_dim=head_dim, model_type=model_type, made_by=made_by)


def mean_lookup_mass(
    lean: LeanModel,
    tokenizer: Any,
    num_tokens: int,
    on_layer: Callable[[], None] = lambda: None,
) -> FloatArray:
    """[num_layers, num_kv_heads]: `lookup_mass`, mean over texts of each kind.

    Args:
        num_tokens: of a text.
        on_layer: called when a layer has read one of the NUM_LOOKUP_TEXTS.
    """
    texts = lookup_texts(tokenizer, num_tokens)
    masses = [lookup_mass(lean, *text, on_layer) for text in texts]
    return np.asarray(np.mean(masses, axis=0))


def lookup_mass(
    lean: LeanModel,
    tokens: Tensor,
    lookups: Sequence[LookUp],
    on_layer: Callable[[], None] = lambda: None,
) -> FloatArray:
    """[num_layers, num_kv_heads]: the share of attention that falls on the facts while the answers
    are read, of the query head that gives most.
    """
    mass = np.zeros((lean.shape.num_layers, lean.shape.num_kv_heads))
    for layer_idx, lookup, weights in lookup_attention(lean, tokens, lookups, on_layer):
        on_fact = weights[..., lookup.fact.start : lookup.fact.stop].sum(-1).mean(-1)
        mass[layer_idx] += on_fact.amax(1).cpu().numpy() / len(lookups)
    return mass


def lookup_attention(
    lean: LeanModel,
    tokens: Tensor,
    lookups: Sequence[LookUp],
    on_layer: Callable[[], None] = lambda: None,
) -> Iterator[tuple[int, LookUp, Tensor]]:
    """(layer, look-up, attention weights [num_kv_heads, group_size, queries, num_tokens] of its
    answer), layer by layer; one prefill of `tokens`, in a store of its own.

    It runs where the model's weights are.
    """
    shape = lean.shape
    first = min(lookup.queries.start for lookup in lookups)
    kept: list[list[Tensor]] = [[] for _ in range(shape.num_layers)]

    def keep_queries(seq: int, layer_idx: int, queries: Tensor, kv_len: int) -> None:
        begin = max(0, first - (kv_len - queries.shape[1]))
        kept[layer_idx].append(queries[:, begin:].float().clone())

    with keys_of_text(lean, tokens, keep_queries, on_layer) as keys_of:
        for layer_idx, queries in enumerate(kept):
            of_layer = torch.cat(queries, dim=1)
            groups = of_layer.view(shape.num_kv_heads, -1, *of_layer.shape[1:])
            keys = keys_of(layer_idx).float().transpose(1, 2)[:, None]
            for lookup in lookups:
                asked = lookup.queries
                scores = groups[:, :, asked.start - first : asked.stop - first] @ keys
                later = torch.arange(len(tokens)) > torch.tensor(asked)[:, None]
                later = later.to(scores.device)
                weights = (lean.sm_scale * scores).masked_fill(later, -torch.inf).softmax(-1)
                yield layer_idx, lookup, weights
