"""Which backend decode steps get, by model and device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from offload.runtime.backends import decode_backend

CUDA = torch.device("cuda")


class Rotary:
    def __init__(self, rope_type: str) -> None:
        self.rope_type = rope_type


class Lean:
    def __init__(self, rope_type: str) -> None:
        self.ropes = (Rotary(rope_type),)


@pytest.fixture
def _graphs_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "offload.runtime.backends.choose_backend", lambda name, device: name or "graph"
    )


@pytest.mark.usefixtures("_graphs_work")
@pytest.mark.parametrize(
    ("rope_type", "backend", "expected"),
    [
        ("default", None, "graph"),
        ("llama3", "graph", "graph"),
        ("dynamic", "stream", "stream"),
        ("dynamic", None, "stream"),
        ("longrope", None, "stream"),
    ],
)
def test_backend(rope_type: str, backend: str | None, expected: str) -> None:
    lean: Any = Lean(rope_type)
    assert decode_backend(lean, backend, CUDA) == expected


@pytest.mark.usefixtures("_graphs_work")
def test_a_dynamic_rope_is_said_and_refused(caplog: pytest.LogCaptureFixture) -> None:
    lean: Any = Lean("dynamic")
    decode_backend(lean, None, CUDA)
    assert "rope_type='dynamic' cannot be captured in a CUDA graph: using backend='stream'" in (
        caplog.text
    )
    with pytest.raises(NotImplementedError, match="use backend='stream'"):
        decode_backend(lean, "graph", CUDA)


def test_without_a_gpu() -> None:
    lean: Any = Lean("dynamic")
    assert decode_backend(lean, "inline", torch.device("cpu")) == "inline"
