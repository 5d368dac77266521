"""SmolLM2-135M decoding, ours against transformers and llama.cpp: `python -m perf.bench_decode`.

All engines read the same real text and then take turns, a few tokens each, so that a slow minute of
a shared machine slows all of them. Figures are medians over all steps.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from offload.loading.gguf import EMBEDDED_MODEL, embedded_gguf
from offload.loading.names import load_tokenizer, resolve_folder
from offload.policies.registry import available_policies
from offload.system.memory import available_cpus
from offload.system.stdlib_text import stdlib_paragraphs
from perf.engines.engines import PEERS_PYTHON, EngineProcess
from perf.results_file import start_machine, write_results

CONTEXTS = (512, 2048, 7168)
MAX_CONTEXT = 8192
WARM_UP_CONTEXT = 512
WARM_UP_TOKENS = 2
# A long prefill takes a minute on two cores, and is steadier.
PREFILL_REPEATS, SHORT_CONTEXT = 3, 2048
REFERENCE = "transformers"


@dataclass(frozen=True)
class Contestant:
    """An engine with its settings."""

    name: str
    module: str
    arguments: tuple[str, ...]
    python: Path | None = None


@dataclass
class Times:
    """What one contestant needed at one context length."""

    prefill_seconds: list[float]
    step_seconds: list[float] = field(default_factory=list)
    argmax: list[int] = field(default_factory=list)


def contestants(threads: int) -> list[Contestant]:
    """All engines; `REFERENCE` is transformers with its defaults."""
    folder = str(resolve_folder(EMBEDDED_MODEL))
    ours = ("--threads", str(threads))
    stock = "perf.peers.stock_transformers"
    static = (folder, *ours, "--cache", "static")
    llama = (str(embedded_gguf()), *ours, "--context", str(MAX_CONTEXT))
    return [
        *(
            Contestant(
                f"offload {name}", "perf.engines.offload_engine", (folder, *ours, "--policy", name)
            )
            for name in available_policies()
        ),
        Contestant(REFERENCE, stock, (folder, *ours)),
        Contestant("transformers, static cache", stock, static),
        Contestant("transformers, static cache, eager", stock, (*static, "--attention", "eager")),
        Contestant("llama.cpp", "perf.peers.llama_cpp", llama, PEERS_PYTHON),
        Contestant(
            "llama.cpp, flash attention",
            "perf.peers.llama_cpp",
            (*llama, "--flash-attention"),
            PEERS_PYTHON,
        ),
    ]


def measure(
    engines: dict[str, EngineProcess],
    text: Sequence[int],
    *,
    context: int,
    rounds: int,
    tokens_per_round: int,
) -> dict[str, Times]:
    """Prefill `context` tokens with every engine, then let them take turns decoding."""
    times = {}
    for name, engine in tqdm(engines.items(), desc=f"{context}: prefill", unit="engine"):
        engine.prefill(text[:WARM_UP_CONTEXT])
        repeats = PREFILL_REPEATS if context <= SHORT_CONTEXT else 1
        times[name] = Times([engine.prefill(text[:context]) for _ in range(repeats)])
        engine.decode(text[context : context + WARM_UP_TOKENS])
    start = context + WARM_UP_TOKENS
    for round_index in tqdm(range(rounds), desc=f"{context}: decode", unit="round"):
        first = start + round_index * tokens_per_round
        for name, engine in engines.items():
            seconds, argmax = engine.decode(text[first : first + tokens_per_round])
            times[name].step_seconds += seconds
            times[name].argmax += argmax
    return times


def row(name: str, context: int, times: Times, reference: Times) -> dict[str, Any]:
    """One line of the results."""
    p10, median, p90 = (float(t) for t in np.percentile(times.step_seconds, [10, 50, 90]))
    agreement = np.mean(np.array(times.argmax) == np.array(reference.argmax))
    return {
        "engine": name,
        "context": context,
        "steps": len(times.step_seconds),
        "prefill_tokens_per_second": context / float(np.median(times.prefill_seconds)),
        "decode_tokens_per_second": 1 / median,
        "step_ms": median * 1e3,
        "step_ms_p10": p10 * 1e3,
        "step_ms_p90": p90 * 1e3,
        "same_next_token_as_transformers": float(agreement),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--tokens-per-round", type=int, default=8)
    parser.add_argument("--engines", nargs="+", help="names; default: all")
    parser.add_argument("--name", default="decode", help="of the results file, without .json")
    parser.add_argument("--dry-run", action="store_true", help="print, do not write the results")
    arguments = parser.parse_args()
    threads = available_cpus()
    chosen = [
        contestant
        for contestant in contestants(threads)
        if arguments.engines is None or contestant.name in (*arguments.engines, REFERENCE)
    ]
    if any(contestant.python and not contestant.python.exists() for contestant in chosen):
        parser.error("the peers are not installed; run: make peers")
    machine = start_machine()
    tokenizer = load_tokenizer(EMBEDDED_MODEL)
    text = tokenizer("\n\n".join(stdlib_paragraphs())[: MAX_CONTEXT * 8])["input_ids"]
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        engines = {
            contestant.name: stack.enter_context(
                EngineProcess(contestant.module, contestant.arguments, python=contestant.python)
            )
            for contestant in tqdm(chosen, desc="start", unit="engine")
        }
        for context in arguments.contexts:
            times = measure(
                engines,
                text,
                context=context,
                rounds=arguments.rounds,
                tokens_per_round=arguments.tokens_per_round,
            )
            rows += [row(name, context, times[name], times[REFERENCE]) for name in engines]
        descriptions = {name: engine.description for name, engine in engines.items()}
    if arguments.dry_run:
        for line in rows:
            print(
                f"{line['context']:6} {line['engine']:36}"
                f"{line['prefill_tokens_per_second']:8.0f} {line['decode_tokens_per_second']:7.1f}"
                f"  ±{(line['step_ms_p90'] - line['step_ms_p10']) / 2:.1f} ms"
                f"  {line['same_next_token_as_transformers']:.0%}"
            )
        return
    settings = {
        "model": EMBEDDED_MODEL,
        "threads": threads,
        "rounds": arguments.rounds,
        "tokens_per_round": arguments.tokens_per_round,
        "engines": descriptions,
    }
    print(write_results(arguments.name, machine=machine, settings=settings, rows=rows))


if __name__ == "__main__":
    main()
