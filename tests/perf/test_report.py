"""The tables of README and docs come from perf/results."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
from cases.machine import MACHINE

from offload.planning.measured_loss import HOT_ROWS, PACKAGED, TRUE_QUERY
from perf import plots, report, results_file
from perf.results_file import read_results, write_results
from perf.tables.latency_tables import latency_phases_table, latency_table
from perf.tables.loss_tables import loss_rows, loss_table, packaged_losses
from perf.tables.markdown import LLAMA_CPP_NOTE
from perf.tables.tables import (
    decode_table,
    policy_speed_table,
    prefill_table,
    startup_table,
)

pytestmark = pytest.mark.docs
TIMES = "\N{MULTIPLICATION SIGN}"


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
    table = prefill_table(FORCED)
    assert "vs transformers' fastest | vs llama.cpp's fastest, Q4_1 | vs itself in float32" in table
    assert f"| 7,168 | 2.44{TIMES} | 0.78{TIMES} | 0.75{TIMES} |" in table
    assert "With float32 in its name, an engine has its weights" in table
    assert "float32" not in prefill_table(DECODE)
    assert f"| 7,168 | 2.44{TIMES} | 0.78{TIMES} |" in prefill_table(DECODE)


def test_llama_cpp_never_stands_beside_us_without_its_weights() -> None:
    gpu = {part: read_results(f"gpu-{part}") for part in ("decode", "peers")}
    captions = [table(DECODE) for table in (decode_table, prefill_table)]
    captions.append(plots.time_per_token_caption(gpu, read_results("decode")))
    for caption in captions:
        assert LLAMA_CPP_NOTE in caption


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


def latency_row(
    policy: str, kv_len: int, threads: int, time: float, **changes: Any
) -> dict[str, Any]:
    full = kv_len / 10 / threads
    phases = dict.fromkeys(("predict", "score", "select", "attend", "update", "other"), time / 10)
    return {
        "policy": policy,
        "kv_len": kv_len,
        "num_threads": threads,
        "microseconds": time,
        "microseconds_p10": 0.9 * time,
        "microseconds_p90": 1.1 * time,
        "phases": phases,
        "bytes_touched": 4e6,
        "bandwidth": 9e9,
        "sequential_bandwidth": 12e9 * threads,
        "gather_bandwidth": 10e9 * threads,
        "yardstick_share": 0.9,
        "candidate_share": 1.0 if policy == "full" else 0.02,
        "top_overlap": None,
        "attended_tokens": 1000.0,
        "mass_kept": 0.97,
        "build_seconds": 0.4,
        "state_share": 0.012,
        "all_layers_microseconds": 0.1 * full + 0.9 * time,
        "speedup_over_full": full / time,
        "speedup_over_exact_topk": full / time / 2,
        "thread_speedup": 1.7,
        "thread_efficiency": 0.85 if policy == "full" else 0.7,
    } | changes


LATENCY: dict[str, Any] = {
    "machine": MACHINE,
    "settings": {
        "shape": "llama-3.1-8b",
        "dtype": "bfloat16",
        "batch_size": 1,
        "budget_tokens": 1024,
        "repeats": 12,
    },
    "rows": [
        latency_row(policy, kv_len, threads, kv_len / scale / threads)
        for kv_len in (8192, 131072)
        for threads in (1, 2)
        for policy, scale in (
            *(("full", 10), ("exact_topk", 20)),
            *(("lfps", 300), ("lychee_cluster", 350)),
        )
    ],
}


def test_latency_table() -> None:
    table = latency_table(LATENCY)
    assert "| policy | 8K | 128K | all layers over full at 128K | those that select |" in table
    assert f"| `full` | 819 | 13,107 | 1.0{TIMES} | 1.0{TIMES} |" in table
    assert "**one thread** (memory 12.0 GB/s in sequence, 10.0 by rows)" in table
    # A tenth of the layers takes as long as under `full`: 1 / (0.1 + 0.9 / 30) of its time.
    of_lfps = f"7.7{TIMES} | 30.0{TIMES} | 15.0{TIMES} | 2.00% | 1,000 | 97.0% | 90%"
    assert f"| `lfps` | 14 | 218 | {of_lfps} |" in table
    assert "commit 0123456789ab, 2026-01-01" in table


def test_phases_table() -> None:
    table = latency_phases_table(LATENCY)
    assert "at 131,072 tokens on one thread" in table
    assert "| `full` | 13,107 ± 1,311 | 1,311 |" in table


def losses(*, hot_rows: bool = False, difference: float = -0.02, prompts: int = 160) -> Any:
    summary = {"part": "summary", "length": 24576, "prompts": prompts, "interval": [-0.05, 0.011]}
    policies = {
        "full": {},
        "lychee_cluster 1024": {"budget_tokens": 1024, "estimate_clusters": 0},
        "lychee_cluster 1024 estimate_clusters=64": {
            "budget_tokens": 1024,
            "estimate_clusters": 64,
        },
    }
    return {
        "machine": {"gpus": ["A GPU"], "cpus_usable": 4, "commit": "0" * 40, "date": "2026-01-01"},
        "settings": {
            "options": {
                "model": "m",
                "hot_rows": hot_rows,
                "policies": policies,
                "tasks": ["vt", "fwe"],
            }
        },
        "rows": [
            *({**summary, "policy": name, "difference": difference} for name in policies),
            {"part": "cells", "task": "vt"},
        ],
    }


def test_the_packaged_table_is_what_the_results_give() -> None:
    results = report._hard_results()
    assert {"hard-ruler-ahead", "hard-ruler-cpu", "hard-ruler-found"} <= set(results)
    assert PACKAGED.read_text("utf-8") == packaged_losses(results), "run: make report"


def test_rows_of_losses() -> None:
    rows = loss_rows({"hard-ruler": losses()})
    assert rows[1] == {
        "policy": "lychee_cluster",
        "options": {"budget_tokens": 1024, "estimate_clusters": 64},
        "where": TRUE_QUERY,
        "context": 24576,
        "points": -2.0,
        "interval": [-5.0, 1.1],
        "prompts": 160,
    }
    assert [row["options"] for row in rows[:1]] == [{"budget_tokens": 1024}]
    assert len(rows) == 2
    assert loss_rows({"hard-ruler": losses(hot_rows=True)})[0]["where"] == HOT_ROWS


@pytest.mark.parametrize("more", [160, 320])
def test_more_prompts_stand(more: int) -> None:
    results = {"a": losses(prompts=more), "b": losses(difference=0.01, prompts=200)}
    assert loss_rows(results)[0]["points"] == (1.0 if more < 200 else -2.0)


def test_one_table_is_of_one_model() -> None:
    other = copy.deepcopy(losses())
    other["settings"]["options"]["model"] = "n"
    with pytest.raises(ValueError, match=r"are of 2 models"):
        packaged_losses({"hard-ruler": losses(), "hard-ruler-n": other})
    assert json.loads(packaged_losses({"hard-ruler": losses()}))["model"] == "m"


def test_the_table_for_readers() -> None:
    shown = loss_table({"hard-ruler": losses()})
    assert (
        "| `lychee_cluster` estimate_clusters=64 | 1,024 | true query | 24,576 | -2.0 | "
        "-5.0 … +1.1 | 160 |"
    ) in shown
    assert "*true query: 1 of 2 tasks, A GPU, 4 CPU cores, commit 000000000000" in shown
