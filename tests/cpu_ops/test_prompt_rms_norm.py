"""RMSNorm of many rows against that of transformers."""

from __future__ import annotations

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from cpu_ops import native
from cpu_ops.rms_norm import rms_norm
from cpu_ops.worker_pool import WorkerPool

# Relative L2. Values are rounded where transformers rounds: only those near a tie may differ.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-4, torch.bfloat16: 1e-3}


@pytest.mark.parametrize("isa", native.available_isas())
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_matches_transformers(isa: str, dtype: torch.dtype) -> None:
    pool = WorkerPool(2)
    for shape in [(1, 16), (63, 577), (130, 576), (33, 3, 64)]:
        generator = torch.Generator().manual_seed(shape[0])
        norm = LlamaRMSNorm(shape[-1], eps=1e-2)
        norm.weight.data.normal_(generator=generator)
        norm = norm.to(dtype)
        x = (0.3 * torch.randn(shape, generator=generator)).to(dtype)
        expected = norm(x).detach().float()
        normed = rms_norm(pool, x, norm.weight.detach(), 1e-2, isa=isa)
        assert normed.shape == x.shape
        assert (normed.float() - expected).norm() / expected.norm() < TOLERANCE[dtype]
    pool.close()


def test_refuses_other_weights() -> None:
    pool, x = WorkerPool(1), torch.ones(2, 16)
    with pytest.raises(ValueError, match="weight must be"):
        rms_norm(pool, x, torch.ones(15), 1e-5)
    with pytest.raises(ValueError, match="x must be"):
        rms_norm(pool, x.T, torch.ones(2), 1e-5)
    pool.close()
