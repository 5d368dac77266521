"""What a server holds of memory stays within what it was told, whatever is asked."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
from serve.conftest import serving_process

from offload.loading.embedded_package import embedded_gguf

TOLD_MIB, PROMPT_TOKENS = 160, 600
NOISE_MIB = 8  # the first requests' modules, and threads of the server


def anonymous_mib(pid: int) -> float:
    """Memory of a process that no file backs."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return sum(int(x.split()[1]) for x in lines if x.startswith(("RssAnon", "RssShmem"))) / 1024


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
            with ThreadPoolExecutor(8) as clients:
                assert [*clients.map(ask, range(8))] == [200] * 8
        finally:
            is_over.set()
            watching.join()
        assert max(samples) <= program + TOLD_MIB + NOISE_MIB
