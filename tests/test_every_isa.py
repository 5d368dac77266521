"""What `make test-isas` runs, and says in the end."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import every_isa
import pytest

from cpu_ops import native

AVX2_ONLY = """
import json, numpy, torch
from numba.core.registry import cpu_target
from cpu_ops import native
core = numpy._core if hasattr(numpy, "_core") else numpy.core
features = core._multiarray_umath.__cpu_features__
_, cpu, enabled = cpu_target.target_context.codegen().magic_tuple()
dispatch = core._multiarray_umath.__cpu_dispatch__
print(json.dumps({
    "ours": native.isa_name(),
    "torch": torch.backends.cpu.get_cpu_capability(),
    "numba": [cpu, "+avx512" in enabled],
    "numpy": [name for name in dispatch if features[name] and ("512" in name or name == "X86_V4")],
}))
"""


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[str]]]:
    """A CPU with AVX2, whose tests fail in scalar code: what was run."""
    seen: list[tuple[str, list[str]]] = []

    def run(isa: str, arguments: list[str]) -> tuple[int, str]:
        seen.append((isa, arguments))
        return (1, "1 failed, 2 passed in 1s") if isa == "scalar" else (0, "3 passed in 1s")

    monkeypatch.setattr(every_isa, "run", run)
    monkeypatch.setattr(native, "available_isas", lambda: ["scalar", "avx2"])
    monkeypatch.delenv("ISAS", raising=False)
    return seen


def test_each_isa_has_a_line(
    runs: list[tuple[str, list[str]]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert every_isa.main(["-x"]) == 1
    assert runs == [("scalar", ["-x"]), ("avx2", ["-x"])]
    lines = capsys.readouterr().out.splitlines()[-len(native.known_isas()) :]
    assert [line.split()[0] for line in lines] == native.known_isas()
    assert lines[0] == "scalar       failed: 1 failed, 2 passed in 1s"
    assert lines[-1] == "amx          left out: this CPU or build lacks it"


def test_isas_are_chosen(
    runs: list[tuple[str, list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ISAS", "avx2 amx")
    assert every_isa.main([]) == 0
    assert runs == [("avx2", [])]
    monkeypatch.setenv("ISAS", "avx2 sse9")
    with pytest.raises(SystemExit, match="unknown ISA 'sse9' in ISAS; known: scalar, neon, avx2"):
        every_isa.main([])


@pytest.mark.slow
def test_libraries_have_no_more_either() -> None:
    if "avx2" not in native.available_isas():
        pytest.skip("AVX2 is not on this CPU")
    environment = {**os.environ, **every_isa.LIBRARIES["avx2"], "OFFLOAD_ISA": "avx2"}
    result = subprocess.run(
        [sys.executable, "-c", AVX2_ONLY],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    expected = {"ours": "avx2", "torch": "AVX2", "numba": ["haswell", False], "numpy": []}
    assert json.loads(result.stdout) == expected
