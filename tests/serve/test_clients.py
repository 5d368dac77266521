"""Clients that people use, against `offload serve` with the embedded model."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from serve.conftest import serving_process

from offload.loading.embedded_package import embedded_gguf
from offload.loading.gguf import converted_folder

CLIENTS = Path(__file__).with_name("clients")
ROOT = Path(__file__).parents[2]
MODULES = {
    "openai": "openai",
    "agents": "agents",
    "langchain_openai": "langchain_openai",
    "instructor": "instructor",
    "litellm": "litellm",
    "llama_index": "llama_index.llms.openai_like",
    "pydantic_ai": "pydantic_ai",
}
# As Hermes and Qwen tell of tools, and with roles by their names.
TEMPLATE = """\
{%- if tools %}<|im_start|>system
Call functions in <tool_call></tool_call>:
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}<|im_end|>
{% endif %}
{%- for m in messages %}
{%- if m.role in ["system", "user"] %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% elif m.role == "assistant" %}<|im_start|>assistant
{{ m.content }}
{%- for call in m.tool_calls or [] %}
<tool_call>
{{ call.function | tojson }}
</tool_call>
{%- endfor %}<|im_end|>
{% elif m.role == "tool" %}<|im_start|>user
<tool_response>{{ m.content }}</tool_response><|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def model_with_tools(folder: Path) -> Path:
    """The embedded model, with a template with tools."""
    folder.mkdir()
    for path in converted_folder(embedded_gguf(), "smollm2-135m-instruct").iterdir():
        if path.name != "chat_template.jinja":
            (folder / path.name).symlink_to(path)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = model_with_tools(tmp_path_factory.mktemp("clients") / "model")
    options = ("--served-model-name", "small", "--max-memory", "cpu=2GiB")
    with serving_process(folder, *options) as (_, found):
        yield f"{found}/v1"


@cache
def python_of(module: str) -> str | None:
    """Python of the environment that has the module: see `make clients`."""
    given = os.environ.get("OFFLOAD_CLIENTS_PYTHON")
    made = map(str, sorted(ROOT.glob(".venv-clients*/bin/python")))
    for python in given.split(os.pathsep) if given else made:
        code = f"import importlib.util as u, sys; sys.exit(u.find_spec({module!r}) is None)"
        if subprocess.run([python, "-c", code], capture_output=True, timeout=60).returncode == 0:
            return python
    return None


@pytest.mark.slow
@pytest.mark.parametrize("client", MODULES)
def test_a_client(client: str, url: str) -> None:
    python = python_of(MODULES[client])
    if python is None:
        pytest.skip(f"{client} is not installed; `make clients`, or set OFFLOAD_CLIENTS_PYTHON")
    done = subprocess.run(
        [python, CLIENTS / f"of_{client}.py", url, "small"],
        capture_output=True,
        text=True,
        timeout=600,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"task"')]
    assert {each["task"] for each in told} >= {"chat", "stream", "tools", "structured", "history"}
    failed = "\n".join(f"{each['task']}: {each['error']}" for each in told if each["error"])
    assert not failed
