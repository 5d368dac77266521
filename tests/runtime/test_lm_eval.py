"""lm-eval's HFLM takes an offloaded model as it is. The requests are made here: no downloads."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
from cases.tiny_models import random_tokens

from offload import DeviceMemoryError, HostBudgetError, OffloadedModel

Pair = tuple[Any, Any]


@pytest.fixture(scope="module")
def lm_eval() -> Any:
    pytest.importorskip("lm_eval", reason="lm-eval is not installed (pip install lm-eval)")
    import lm_eval.api.instance
    import lm_eval.models.huggingface

    return lm_eval


@pytest.mark.parametrize("kind", [HostBudgetError, DeviceMemoryError])
def test_what_is_out_of_memory_is_known_to_accelerate(kind: type[MemoryError]) -> None:
    """By its own function; people see the message alone."""
    memory = pytest.importorskip("accelerate.utils.memory")
    error = kind("it needs 3 MiB; lower the batch size")
    for made in (error, copy.copy(error), pickle.loads(pickle.dumps(error)), kind(*error.args)):
        assert memory.should_reduce_batch_size(made)
        assert isinstance(made, MemoryError)
        assert str(made) == "it needs 3 MiB; lower the batch size"
        assert made.args == error.args


def test_the_batch_size_that_is_found_fits_any_rows(
    tiny_folders: dict[str, Path], tokenizer: Any, lm_eval: Any
) -> None:
    """`batch_size=auto` goes down from 16 until 64 tokens of each row fit a budget for 5 rows."""
    folder, options = tiny_folders["llama"], {"num_threads": 1, "page_tokens": 16}
    probe = OffloadedModel.from_pretrained(folder, **options)
    weights = sum(weight.nbytes for weight in probe.parameters())
    budget = weights + 5 * 4 * 3 * probe.kv_store.page_bytes
    model = OffloadedModel.from_pretrained(folder, **options, max_memory={"cpu": budget})
    harness = lm_eval.models.huggingface.HFLM(
        pretrained=model, tokenizer=tokenizer, batch_size="auto", max_batch_size=16, max_length=64
    )
    found = harness._detect_batch_size()
    assert found == 5
    assert harness._model_call(random_tokens(found, 64)).shape[:2] == (found, 64)
    with pytest.raises(HostBudgetError):
        harness._model_call(random_tokens(6, 64))
