"""The dtypes a model may have here, and what its weights may be kept as."""

from __future__ import annotations

import torch

from cpu_ops.packed import FORMATS

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
WEIGHTS = ("auto", *FORMATS, *DTYPES)
AUTO_ON_GPU = "auto on a GPU"  # of formats that its kernels multiply
