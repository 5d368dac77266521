"""What a request leaves out is as the model's authors say."""

from __future__ import annotations

import logging
from typing import Any

from pydantic import ValidationError

from offload.engine.sampling_params import SamplingParams
from offload.serve.protocol import Sampling

logger = logging.getLogger(__name__)

_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def sampling_defaults(generation_config: Any) -> dict[str, float]:
    """The values of a model's generation config, logged; those out of range are left out.

    As vLLM's `--generation-config auto`: what the config does not set keeps OpenAI's default, and
    `do_sample` says nothing.
    """
    given, taken = generation_config.to_diff_dict(), dict[str, float]()
    for name in _FIELDS:
        if given.get(name) is None:
            continue
        try:
            value = getattr(Sampling.model_validate({name: given[name]}), name)
            SamplingParams(**{name: value})
        except ValueError as error:
            reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
            logger.warning(
                "the model's generation config has %s=%r, which is not taken: %s",
                name,
                given[name],
                reason,
            )
        else:
            taken[name] = value
    if taken:
        logger.info(
            "sampling defaults of the model's generation config: %s; --generation-config none "
            "takes OpenAI's",
            ", ".join(f"{name}={value:g}" for name, value in taken.items()),
        )
    return taken
