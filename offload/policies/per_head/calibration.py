"""Which heads fetch facts from afar: those that copy."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np

from offload.models import LeanModel
from offload.policies.lychee_decode.calibration import (
    CALIBRATION_TOKENS,
    MIN_CALIBRATION_TOKENS,
    calibration_tokens,
    observe_heads,
)
from offload.policies.lychee_decode.roles import HeadRoles

logger = logging.getLogger(__name__)


def calibrated_roles(
    lean: LeanModel,
    model_type: str,
    load_tokenizer: Callable[[], Any],
    retrieval_heads: int,
    dense_layers: int,
) -> HeadRoles | None:
    """The heads after the dense layers that copy most, on the standard library's docstrings.

    None for a model whose context is shorter than MIN_CALIBRATION_TOKENS: it keeps evenly spaced
    retrieval heads.

    Args:
        lean: the model that will run.
        load_tokenizer: called only if it is needed.
    """
    shape = lean.shape
    if shape.max_context < MIN_CALIBRATION_TOKENS:
        logger.warning(
            "per_head: a context of %d tokens is too short for a calibration; its retrieval heads "
            "are evenly spaced",
            shape.max_context,
        )
        return None
    tokens = calibration_tokens(load_tokenizer(), min(CALIBRATION_TOKENS, shape.max_context))
    copy_mass = observe_heads(lean, tokens).copy_mass.copy()
    copy_mass[:dense_layers] = -1.0
    retrieves = np.zeros(copy_mass.shape, np.bool_)
    retrieves.flat[np.argsort(-copy_mass, axis=None, kind="stable")[:retrieval_heads]] = True
    retrieves[0] = True  # as roles have it
    made_by = (
        f"calibration on {len(tokens)} tokens of the standard library's docstrings: "
        f"{retrieval_heads} heads after the first {dense_layers} layers that copy most"
    )
    logger.info("per_head has no head_roles: %s", made_by)
    return HeadRoles.of(retrieves, head_dim=shape.head_dim, model_type=model_type, made_by=made_by)
