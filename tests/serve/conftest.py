"""A server of a tiny model on a free port, and clients of it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from cases.tiny_models import byte_tokenizer, make_tiny_model

from offload import AsyncEngine, Engine, OffloadedModel
from offload.serve.app import Served
from offload.serve.grammars import SchemaLimits
from offload.serve.server import Access, Server

TEMPLATE = (
    "{% if tools %}[tools]{{ tools | tojson }}, to be called in <tool_call>{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'developer' %}{{ raise_exception('nobody develops') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls else '' }}"
    "{% if not loop.last or m.role != 'assistant' %}{{ '\\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
Serve = Callable[..., Any]


@pytest.fixture(scope="session")
def serve_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama of 4,096 positions whose tokenizer has a chat template."""
    folder = tmp_path_factory.mktemp("serve") / "tiny"
    make_tiny_model("llama", max_position_embeddings=4096).save_pretrained(folder)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def served_model(serve_folder: Path) -> Any:
    return OffloadedModel.from_pretrained(serve_folder, dtype="float32", num_threads=1)


@contextmanager
def serving(
    model: Any,
    access: Access | None = None,
    *,
    template: str = TEMPLATE,
    limits: SchemaLimits | None = None,
    default_max_tokens: int | None = None,
    sampling_defaults: Mapping[str, float] | None = None,
    **options: Any,
) -> Iterator[Server]:
    """A server of the model in a thread."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    engine = Engine(model, tokenizer, **options)
    served = Served(
        AsyncEngine(engine),
        "tiny",
        schema_limits=limits or SchemaLimits(),
        default_max_tokens=default_max_tokens,
        sampling_defaults=sampling_defaults or {},
    )
    with running(Server(lambda: served, access or Access(port=0))) as server:
        yield server


@contextmanager
def running(server: Server) -> Iterator[Server]:
    """It serves in a thread."""
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        until = time.monotonic() + 20
        while server.served is None and time.monotonic() < until:
            time.sleep(0.01)
        yield server
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


def metric(http: httpx.Client, name: str) -> float:
    """A sample of `/metrics`, by its name and its labels but for the model's name."""
    text = re.sub(r'model_name="[^"]*",|,?model_name="[^"]*"', "", http.get("/metrics").text)
    pattern = rf"^{re.escape(name)} (\S+)$"
    found = re.search(pattern, text.replace("{}", ""), re.MULTILINE)
    assert found is not None, name
    return float(found[1])


@contextmanager
def serving_process(
    folder: Path, *options: object, says: str = "serving at", columns: int = 300
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`offload serve` and its URL, when it says so; killed at the end if it runs."""
    command = ["serve", folder, "--port", 0, "--threads", 1, "--dtype", "float32", *options]
    process = subprocess.Popen(
        [sys.executable, "-m", "offload", *map(str, command)],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"COLUMNS": f"{columns}"},
    )
    assert process.stderr is not None
    with process.stderr:
        try:
            said = list[str]()
            for line in process.stderr:
                said.append(line)
                found = re.search(rf"{says} (http://127\.0\.0\.1:\d+)", line)
                if found:
                    break
            else:
                raise AssertionError("".join(said))
            yield process, found[1]
        finally:
            with suppress(ProcessLookupError):
                process.kill()
            process.wait()


@pytest.fixture(scope="session")
def server(served_model: Any) -> Iterator[Server]:
    with serving(served_model) as running:
        yield running


@pytest.fixture(scope="session")
def http(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=30) as client:
        yield client


@pytest.fixture(scope="session")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture
def serve(served_model: Any) -> Serve:
    """`serving` of another server with the same model."""
    return lambda *access, **options: serving(served_model, *access, **options)
