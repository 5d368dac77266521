"""What a server holds of memory stays within what it was told, whatever is asked."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from cases.every_type import tiny_model_of
from cases.inside import allow_host_bytes
from cases.tiny_models import VOCAB_SIZE
from serve.conftest import serving_process

from offload import Engine, OffloadedModel
from offload.loading.embedded_package import embedded_gguf
from offload.runtime.config import runtime_config
from offload.runtime.generic_loading import generic_runtime
from offload.runtime.generic_model import generic_model

TOLD_MIB, PROMPT_TOKENS = 130, 500
NOISE_MIB = 8  # the first requests' modules, and threads of the server


def anonymous_mib(pid: int) -> float:
    """Memory of a process that no file backs."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return sum(int(x.split()[1]) for x in lines if x.startswith(("RssAnon", "RssShmem"))) / 1024


@pytest.mark.slow
def test_a_server_stays_within_max_memory() -> None:
    told = ("--max-memory", f"cpu={TOLD_MIB}MiB", "--kv-dtype", "int8", "--dtype", "bfloat16")
    with serving_process(embedded_gguf(), *told, "--policy", "full") as (process, url):
        weights = embedded_gguf().stat().st_size / 2**20
        program = anonymous_mib(process.pid) - weights
        samples, is_over = [0.0], threading.Event()

        def watch() -> None:
            while not is_over.wait(0.005):
                samples.append(anonymous_mib(process.pid))

        def ask(client: int) -> int:
            body = {"prompt": f"{client} " * PROMPT_TOKENS, "max_tokens": 4, "ignore_eos": True}
            return httpx.post(f"{url}/v1/completions", json=body, timeout=300).status_code

        watching = threading.Thread(target=watch)
        watching.start()
        try:
            with ThreadPoolExecutor(4) as clients:
                assert [*clients.map(ask, range(4))] == [200] * 4
        finally:
            is_over.set()
            watching.join()
        assert max(samples) <= program + TOLD_MIB + NOISE_MIB


@pytest.mark.parametrize("budget", [1 << 20, 1 << 24])
def test_slices_are_as_large_as_the_budget_allows(
    tiny_folders: dict[str, Path], budget: int
) -> None:
    model = OffloadedModel.from_pretrained(tiny_folders["llama"], policy="full", num_threads=1)
    allow_host_bytes(model, budget)
    engine, ledger = Engine(model), model.kv_store.ledger
    counted = ledger.by_tenant()["what reading a prompt takes"]
    scheduler = engine._steps.scheduler
    assert 32 <= scheduler.most_slice_tokens <= model._offload.config.prefill_slice_tokens
    assert 0 < counted == budget - engine._steps.admission.budget_bytes
    assert counted <= budget / 4 or scheduler.most_slice_tokens == 32
    assert scheduler.most_slice_tokens > 32 or budget == 1 << 20
    other = Engine(model)
    engine.stop()
    assert ledger.by_tenant()["what reading a prompt takes"] == counted  # one at a time reads
    del other, engine
    gc.collect()
    assert ledger.by_tenant()["what reading a prompt takes"] == 0


def test_few_layers_in_the_store_leave_room_for_pages_and_slices() -> None:
    """Where a token's keys of one layer are half of what a page has of it, and no context ends."""
    options = runtime_config(policy="full", num_threads=1, page_tokens=16)
    stock = tiny_model_of("granitemoe_swa", vocab_size=VOCAB_SIZE)
    model = generic_model(generic_runtime(stock, options, None))
    allow_host_bytes(model, 1 << 24)
    engine = Engine(model)
    assert engine._steps.scheduler.most_slice_tokens > 64
    assert engine._steps.admission.budget_bytes > 1 << 23
    engine.stop()
