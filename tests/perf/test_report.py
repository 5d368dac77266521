"""The tables of README and docs come from perf/results."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
from cases.machine import MACHINE

from perf import plots, report, results_file
from perf.results_file import read_results, write_results
from perf.tables.tables import (
    decode_table,
    policy_speed_table,
    prefill_table,
    startup_table,
)


def decode_row(engine: str, context: int, speed: float) -> dict[str, Any]:
    return {
        "engine": engine,
        "context": context,
        "steps": 64,
        "decode_tokens_per_second": speed,
        "prefill_tokens_per_second": speed * 10,
        "same_next_token_as_transformers": 0.99,
    }


DECODE = {
    "machine": MACHINE,
    "settings": {"model": "smollm2-135m-instruct", "threads": 2},
    "rows": [
        decode_row(engine, context, speed)
        for context in (512, 7168)
        for engine, speed in [
            ("offload exact_topk", 40.0),
            ("offload full", 39.0),
            ("transformers", 10.0),
            ("transformers, static cache", 16.0),
            ("llama.cpp", 50.0),
        ]
    ],
}
FORCED = {
    "machine": MACHINE | {"isa_forced": "avx2"},
    "settings": {
        "model": "smollm2-135m-instruct",
        "threads": 2,
        "isa": "avx2",
        "engines": {
            "offload full": {"version": "offload 0.1.0"},
            "llama.cpp": {"version": "0.3.36", "build": "CPU : AVX2 = 1 | FMA = 1 | AMX = 0 | "},
        },
    },
    "rows": [
        *DECODE["rows"],
        *(decode_row("offload full, float32", context, 52.0) for context in (512, 7168)),
    ],
}
STARTUP = {
    "machine": MACHINE,
    "settings": {"model": "smollm2-135m-instruct", "dtype": "bfloat16", "repeats": 5},
    "rows": [
        {
            "engine": "offload",
            "phase": "from pretrained",
            "seconds": 3.5,
            "seconds_p10": 3.4,
            "seconds_p90": 3.6,
        }
    ],
}


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(results_file, "RESULTS", tmp_path)
    return tmp_path


def test_decode_table_has_ratios_of_one_run() -> None:
    table = decode_table(DECODE)
    assert "| offload exact_topk | 40.0 | 40.0 |" in table
    assert "| 7,168 | 4.0\N{MULTIPLICATION SIGN} | 2.50\N{MULTIPLICATION SIGN} | 0.80" in table
    assert "| transformers | 100 | 100 | 99% |" in prefill_table(DECODE)


def test_a_forced_isa_is_told_with_the_build_of_llama_cpp() -> None:
    table = decode_table(FORCED)
    assert "Every engine is held to avx2; llama.cpp is compiled with AVX2, FMA." in table
    assert "ISA avx2 (forced), no GPU" in table
    assert "held to" not in decode_table(DECODE)
    assert "forced" not in decode_table(DECODE)


def test_prefill_is_compared_with_each_kind_of_engine_in_the_run() -> None:
    times = "\N{MULTIPLICATION SIGN}"
    table = prefill_table(FORCED)
    assert "vs transformers' fastest | vs llama.cpp's fastest, Q4_1 | vs itself in float32" in table
    assert f"| 7,168 | 2.44{times} | 0.78{times} | 0.75{times} |" in table
    assert "With float32 in its name, an engine has its weights" in table
    assert "float32" not in prefill_table(DECODE)
    assert f"| 7,168 | 2.44{times} | 0.78{times} |" in prefill_table(DECODE)


def test_llama_cpp_never_stands_beside_us_without_its_weights() -> None:
    gpu = {part: read_results(f"gpu-{part}") for part in ("decode", "peers")}
    captions = [table(DECODE) for table in (decode_table, prefill_table)]
    captions.append(plots.time_per_token_caption(gpu, read_results("decode")))
    for caption in captions:
        assert "llama.cpp runs the GGUF's Q4_1 weights, the others bfloat16." in caption


def test_policy_speed_is_held_against_exact_topk() -> None:
    def line(engine: str, speed: float) -> dict[str, object]:
        return {"engine": engine, "context": 7168, "decode_tokens_per_second": speed}

    engines = {"offload exact_topk": 40.0, "offload lfps": 50.0, "offload quest": 30.0}
    rows = [line(name, speed) for name, speed in {**engines, "transformers": 5.0}.items()]
    result = {"machine": MACHINE, "settings": {"model": "m"}, "rows": rows}
    text = policy_speed_table(result)
    assert "| `lfps` | 50.0 | 125% |" in text
    assert "| `exact_topk` | 40.0 | 100% |" in text
    assert "| `quest` | 30.0 | 75% |" in text
    assert "transformers" not in text.splitlines()[4]


def test_startup_table() -> None:
    table = startup_table(STARTUP)
    assert "| offload | from pretrained | 3.50 ± 0.10 |" in table


def test_tables_name_machine_and_commit() -> None:
    for table in (decode_table(DECODE), startup_table(STARTUP)):
        assert "A CPU, 2 of 4 CPUs, 24 GiB, ISA avx2, no GPU" in table
        assert "commit 0123456789ab, 2026-01-01" in table


def test_results_survive_a_round_trip(results: Path) -> None:
    assert read_results("decode") is None
    write_results("decode", machine=MACHINE, settings={"threads": 2}, rows=[{"context": 1}])
    result = read_results("decode")
    assert result is not None
    assert result["machine"] == MACHINE
    assert result["rows"] == [{"context": 1}]


def test_sections_are_replaced_and_the_rest_is_kept(results: Path) -> None:
    text = "before\n<!-- perf:startup -->\nold\n<!-- /perf:startup -->\nafter\n"
    assert report.NOT_MEASURED in report.render(text)
    write_results("startup", machine=MACHINE, settings=STARTUP["settings"], rows=STARTUP["rows"])
    rendered = report.render(text)
    assert rendered.startswith("before\n<!-- perf:startup -->\n")
    assert rendered.endswith("<!-- /perf:startup -->\nafter\n")
    assert "from pretrained" in rendered
    assert "old" not in rendered
    assert report.render(rendered) == rendered


def test_gpu_tables_say_nothing_until_one_was_measured(results: Path) -> None:
    empty = "<!-- perf:gpu-decode -->\n\n<!-- /perf:gpu-decode -->"
    assert report.render("<!-- perf:gpu-decode -->\nold\n<!-- /perf:gpu-decode -->") == empty
    assert report.render(empty) == empty


def test_unknown_sections_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown section 'decoding'; available: decode"):
        report.render("<!-- perf:decoding -->\n<!-- /perf:decoding -->")


def test_documents_match_the_results() -> None:
    assert report.outdated() == [], "run: make report"


def test_plots_match_the_results() -> None:
    assert report.plots(outdated_only=True) == {}, "run: make report"


def test_the_time_plot_belongs_to_its_results(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra perf is not installed")
    gpu = {part: read_results(f"gpu-{part}") for part in ("decode", "peers")}
    cpu = read_results("decode")
    path = tmp_path / "time.svg"
    assert cpu is not None
    assert not plots.is_current(path, plots.time_results(gpu, cpu))
    plots.plot_time_per_token(gpu, cpu, path)
    assert plots.is_current(path, plots.time_results(gpu, cpu))
    faster = copy.deepcopy(gpu)
    faster["decode"]["rows"][0]["milliseconds"] /= 2
    assert not plots.is_current(path, plots.time_results(faster, cpu))


def test_the_time_plot_is_told_in_words() -> None:
    gpu = {part: read_results(f"gpu-{part}") for part in ("decode", "peers")}
    with_a_gpu = plots.time_per_token_caption(gpu, None)
    assert re.search(r"at 131,072 tokens: transformers, KV offloaded [\d.,]+ ms", with_a_gpu)
    assert re.search(r"Of [\d.]+ GiB of keys and values, offload", with_a_gpu)
    assert gpu["decode"]["machine"]["commit"][:12] in with_a_gpu


def test_the_plot_is_the_same_for_the_same_results(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra perf is not installed")
    rooms = read_results("gpu-rooms")
    assert rooms is not None
    for name in ("one.svg", "two.svg"):
        plots.plot_rooms(rooms, tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
