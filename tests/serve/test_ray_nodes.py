"""Two nodes of Ray, each with a replica: a rolling update, and a head that is restarted."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from offload.ranks.launch import free_port

pytest.importorskip("ray.serve", reason="Ray Serve is not installed: pip install '.[ray]'")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # in this process runs Ray's


def until(check: Callable[[], object], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.3)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A head and another node of one CPU each; what the head knows is in a RocksDB."""
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster

    before = {**os.environ}
    os.environ |= {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_gcs_storage": "rocksdb",
        "RAY_gcs_storage_path": str(tmp_path_factory.mktemp("gcs")),
        "OFFLOAD_TEST_PORT": str(free_port()),
        "RAY_gcs_rpc_server_reconnect_timeout_s": "60",
    }
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        cluster.add_node(num_cpus=1)
        ray.init(address=cluster.address)
        port = int(os.environ["OFFLOAD_TEST_PORT"])
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        yield cluster
    finally:
        with suppress(Exception):
            serve.shutdown()
        ray.shutdown()
        cluster.shutdown()
        os.environ.clear()
        os.environ |= before


@dataclass
class Talk:
    """A session, whose turns each tell all before.

    Attributes:
        num_tokens: of the prompts of the last turns.
        lost: turns that went on from less than the turn before the last had read.
        stale: turns that went on from the turn before the last: the last was not written yet.
    """

    name: str
    url: str
    prompt: str = ""
    num_tokens: tuple[int, int] = (0, 0)
    failures: list[str] = field(default_factory=list)
    turns: int = 0
    lost: int = 0
    stale: int = 0

    def turn(self, http: httpx.Client) -> None:
        """Ask, without a second try."""
        asked = f"{self.prompt} I am {self.name}, turn {self.turns}."
        body = {"model": "tiny", "prompt": asked, "max_tokens": 8, "temperature": 0}
        headers = {"X-Session-ID": self.name}
        try:
            answer = http.post(f"{self.url}/v1/completions", json=body, headers=headers)
        except httpx.HTTPError as error:
            self.failures.append(repr(error))
            return
        if answer.status_code != 200:
            self.failures.append(f"{answer.status_code}: {answer.text[:300]}")
            return
        usage = answer.json()["usage"]
        cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0)
        older, last = self.num_tokens
        self.lost += cached < older
        self.stale += older <= cached < last
        self.num_tokens = last, usage["prompt_tokens"]
        self.turns, self.prompt = self.turns + 1, asked


def deploy(folder: Path, sessions: Path, extra: str = "", **options: Any) -> str:
    """The URL of the application, or of its next version."""
    from ray import serve

    from offload.cli.ray_app import Options, app

    command = f"{folder} --dtype float32 --served-model-name tiny --session-dir {sessions} {extra}"
    serve.run(app(Options(command=command, num_cpus=1, **options)), name="offload")
    return f"http://127.0.0.1:{os.environ['OFFLOAD_TEST_PORT']}"


def running() -> dict[str, str]:
    """Nodes of the replicas that run, by the replicas' names."""
    from ray.util.state import list_actors

    return {
        each.name: each.node_id
        for each in list_actors(filters=[("state", "=", "ALIVE")])
        if each.name and "#offload#" in each.name
    }


def talk_on(talks: list[Talk], stop: threading.Event) -> None:
    with httpx.Client(timeout=60) as http:
        while not stop.is_set():
            for talk in talks:
                talk.turn(http)
                time.sleep(0.1)


@pytest.mark.parametrize("router", ["session", "prefix"])
def test_rolling_update_loses_no_session(
    nodes: Any, serve_folder: Path, tmp_path: Path, router: str
) -> None:
    url = deploy(serve_folder, tmp_path, num_replicas=2, router=router)
    first = running()
    assert len({*first.values()}) == 2, "a replica on each node"
    talks = [Talk(f"session-{i}", url) for i in range(12)]
    stop = threading.Event()
    with ThreadPoolExecutor(4) as threads:
        loads = [threads.submit(talk_on, talks[i::4], stop) for i in range(4)]
        try:
            until(lambda: all(talk.turns > 2 for talk in talks), 60)
            deploy(serve_folder, tmp_path, "--max-queued 100", num_replicas=2, router=router)
            assert not {*first} & {*running()}
            seen = [talk.turns for talk in talks]
            until(lambda: all(t.turns > n + 2 for t, n in zip(talks, seen, strict=True)), 60)
        finally:
            stop.set()
        for each in loads:
            each.result()
    assert [failure for talk in talks for failure in talk.failures] == []
    assert sum(talk.lost for talk in talks) == 0
    # Turns come 0.1 s after the answer. Where that is too soon, a move costs one turn's reading.
    assert max(talk.stale for talk in talks) <= 2


def test_head_restarts(nodes: Any, serve_folder: Path, tmp_path: Path) -> None:
    """Its GCS: requests are answered meanwhile, and it knows its replicas when it is back."""
    url = deploy(serve_folder, tmp_path, num_replicas=2)
    talks, before = [Talk(f"session-{i}", url) for i in range(6)], running()
    with httpx.Client(timeout=60) as http:
        for talk in talks * 2:
            talk.turn(http)
        nodes.head_node.kill_gcs_server()
        for talk in talks:
            talk.turn(http)
        nodes.head_node.start_gcs_server()
        until(lambda: running() == before, 60)
        for talk in talks:
            talk.turn(http)
    assert [failure for talk in talks for failure in talk.failures] == []
    assert [(talk.turns, talk.lost, talk.stale) for talk in talks] == [(4, 0, 0)] * 6


def test_queue_adds_a_replica(nodes: Any, serve_folder: Path, tmp_path: Path) -> None:
    scaling = {"min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 1}
    scaling |= {"upscale_delay_s": 1, "downscale_delay_s": 1, "look_back_period_s": 2}
    url = deploy(serve_folder, tmp_path, autoscaling_config=scaling)
    until(lambda: len(running()) == 1, 120)
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 2000, "ignore_eos": True}
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
            assert answer.status_code == 200, answer.text

    with ThreadPoolExecutor(6) as threads:
        loads = [threads.submit(ask) for _ in range(6)]
        try:
            until(lambda: len(running()) == 2, 120)
        finally:
            stop.set()
        for load in loads:
            load.result()


def test_prompts_go_where_they_were_read(nodes: Any, serve_folder: Path, tmp_path: Path) -> None:
    import ray

    url = deploy(serve_folder, tmp_path, num_replicas=2, router="prefix")
    texts = [f"{letter}{i}: " + letter * 400 for i, letter in enumerate("abcdefgh")]
    cached = list[int]()
    with httpx.Client(base_url=url, timeout=60) as http:
        for turn in range(3):
            for text in texts:
                body = {"model": "tiny", "prompt": text + "and so on. " * turn, "max_tokens": 4}
                usage = http.post("/v1/completions", json=body).raise_for_status().json()["usage"]
                details = usage["prompt_tokens_details"] or {}
                cached += [details.get("cached_tokens", 0)] if turn else []
        with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as stream:
            lines = [line for line in stream.iter_lines() if line]
        refused = http.post("/v1/completions", content=b"{" * 9 * 2**20)
    tree = ray.get_actor("LlmPrefixTreeActor", namespace="serve::offload::offload")
    read = ray.get(tree.getattr.remote("tenant_to_char_count"))
    assert sum(count > 400 for count in read.values()) == 2, read  # both replicas have prompts
    assert min(cached) > 300
    assert len(lines) >= 3
    assert lines[-1] == "data: [DONE]"
    assert refused.status_code == 413


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"[" * 100_000, b'{"prompt": ""}'])
def test_a_body_without_a_prompt_is_known_by_its_path(body: bytes) -> None:
    from offload.cli.ray_prefix import Asked

    asked = Asked.of({"path": "/v1/completions", "type": "http"}, body)
    assert (asked.body, asked.prompt) == (body, "/v1/completions")


def test_who_reads_no_more_ends_the_answer() -> None:
    from offload.cli.ray_prefix import Asked, answered

    ended = list[str]()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert (await receive())["body"] == b"[]"
        try:
            while True:
                await send({"type": "http.response.body", "more_body": True})
        finally:
            ended.append("cancelled")

    async def read_one() -> None:
        messages = answered(app, Asked.of({"path": "/v1/completions", "type": "http"}, b"[]"))
        assert (await anext(messages))["more_body"]
        await messages.aclose()
        await asyncio.sleep(0)

    asyncio.run(read_one())
    assert ended == ["cancelled"]
