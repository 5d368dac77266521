"""Tiny random checkpoints of every supported model type, and the embedded model."""

from __future__ import annotations

import gc
import os
import signal
import zlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Imports and collection make a million objects that stay: see pytest_collection_finish().
gc.disable()

# Tests must not reach the network, and must not fork tokenizer threads into subprocesses.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# More threads than CPUs, of all test processes together: who waits for another must not spin.
# OpenMP reads this when torch is imported first.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest  # noqa: E402
import torch  # noqa: E402

# Where there is no GPU, tests run Triton's kernels by its interpreter, if they ask for it
# (gpu_ops/launch.py). Triton reads this when it is imported first.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Models of a few kilobytes: most of their time went into the pages of slabs for large ones. Others
# take this number when they are imported first.
from offload.kv import page_pool  # noqa: E402

page_pool.DEFAULT_SLAB_BYTES = 2 * 2**20

from cases.tiny_models import LEAN_MODELS, byte_tokenizer, make_tiny_model, save_long_model  # noqa: E402

from cpu_ops.worker_pool import WorkerPool  # noqa: E402
from offload import OffloadedModel  # noqa: E402
from offload.system.memory import available_cpus  # noqa: E402

# A shell starts background jobs with SIGINT ignored; tests of ctrl-C want Python's handler.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Threads only slow tiny tensors down, above all on a busy machine.
torch.set_num_threads(1)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Workers of `-n auto`: as many as this process may keep busy, not as the machine has."""
    return available_cpus()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Most cases of a test are slow, but with a GPU or a chosen ISA: as many stay as show each
    value of its parameters."""
    if torch.cuda.is_available() or "OFFLOAD_ISA" in os.environ:
        return
    tests = defaultdict[str, list[pytest.Item]](list)
    for x in items:
        if x.get_closest_marker("cuda"):  # would be skipped one by one
            x.add_marker("slow")
        elif not any(map(x.get_closest_marker, ("slow", "docs"))):
            tests[x.nodeid.partition("[")[0]].append(x)
    for cases in tests.values():
        cases.sort(key=lambda x: zlib.crc32(x.nodeid.encode()))  # in no order
        for x in {*cases} - {*_all_values(cases)}:
            x.add_marker("slow")


def _all_values(cases: list[pytest.Item]) -> Iterator[pytest.Item]:
    """Few of a test's cases whose names have each word of the others in its place."""
    words = {x: {*enumerate(x.nodeid.partition("[")[2].rstrip("]").split("-"))} for x in cases}
    while words:
        most = max(words, key=lambda x: len(words[x]))
        yield most
        shown = words[most]
        words = {x: left for x, of in words.items() if (left := of - shown)}


def pytest_collection_finish() -> None:
    """What is there by now stays: the many collections that tests ask for need not walk it."""
    gc.enable()
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("cuda") and not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")


@pytest.fixture(autouse=True)
def ctrl_c_as_before() -> Iterator[None]:
    """No test leaves another handler of ctrl-C to those after it."""
    before = signal.getsignal(signal.SIGINT)
    yield
    assert signal.getsignal(signal.SIGINT) == before


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    """Two threads."""
    workers = WorkerPool(2)
    yield workers
    workers.close()


@pytest.fixture(scope="session")
def tiny_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folder of the float32 checkpoint of each of LEAN_MODELS, with its tokenizer."""
    folders = {}
    for name in LEAN_MODELS:
        folders[name] = tmp_path_factory.mktemp("tiny") / name
        make_tiny_model(name).save_pretrained(folders[name])
        byte_tokenizer().save_pretrained(folders[name])
    return folders


@pytest.fixture(scope="session")
def long_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_long_model(tmp_path_factory.mktemp("long"))


@pytest.fixture(scope="session")
def folder(tiny_folders: dict[str, Path]) -> Path:
    """Of the llama; files that need another model have a fixture of this name."""
    return tiny_folders["llama"]


@pytest.fixture(scope="session")
def stock_models(tiny_folders: dict[str, Path]) -> dict[str, Any]:
    """The stock transformers model of each of LEAN_MODELS."""
    from transformers import AutoModelForCausalLM

    return {
        name: AutoModelForCausalLM.from_pretrained(folder).eval()
        for name, folder in tiny_folders.items()
    }


@pytest.fixture(scope="session")
def stock(stock_models: dict[str, Any]) -> Any:
    return stock_models["llama"]


@pytest.fixture(scope="session")
def offloaded_models(tiny_folders: dict[str, Path]) -> dict[str, Any]:
    """The offloaded model of each of LEAN_MODELS; pages and slices are small, to be crossed."""
    return {
        name: OffloadedModel.from_pretrained(
            folder, num_threads=2 if name == "qwen3" else 1, page_tokens=16, prefill_slice_tokens=24
        )
        for name, folder in tiny_folders.items()
    }


@pytest.fixture(params=list(LEAN_MODELS))
def model_pair(
    request: pytest.FixtureRequest, stock_models: dict[str, Any], offloaded_models: dict[str, Any]
) -> tuple[Any, Any]:
    """(stock, offloaded) of every tiny model."""
    return stock_models[request.param], offloaded_models[request.param]


@pytest.fixture
def llama_pair(
    stock_models: dict[str, Any], offloaded_models: dict[str, Any]
) -> Iterator[tuple[Any, Any]]:
    """(stock, offloaded) of one tiny model; afterwards nothing may be left in its KV store."""
    model = offloaded_models["llama"]
    yield stock_models["llama"], model
    import gc

    gc.collect()
    assert model.kv_store.num_sequences == 0
    assert model.kv_store.host_bytes_used == 0


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return byte_tokenizer()
