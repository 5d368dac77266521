"""The real model under many policies, which `offload.bench.selection` looks at."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from offload.policies import Policy
from offload.runtime.config import runtime_config
from offload.runtime.shared_model import SharedModel

MODEL = "smollm2-135m-instruct-32k"


def open_model(policies: Sequence[Policy], threads: int) -> SharedModel:
    """The 32K model: prompts are read on a GPU if there is one, all else is the CPU's."""
    config = runtime_config(dtype="bfloat16", device="cpu", num_threads=threads)
    reads_on = "cuda" if torch.cuda.is_available() else None
    return SharedModel(MODEL, policies, config, reads_on=reads_on)
