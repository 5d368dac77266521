"""SmolLM2-135M decoding, ours against transformers and llama.cpp: `python -m perf.bench_decode`.

All engines read the same real text and then take turns, a few tokens each, so that a slow minute of
a shared machine slows all of them. Figures are medians over all steps. With --isa all of them run
as on an older CPU, and llama.cpp is the one of `make peers PEERS_ISA=ISA`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from offload.loading.embedded_package import EMBEDDED_MODEL, embedded_gguf
from offload.loading.gguf import converted_folder
from offload.loading.names import load_tokenizer, resolve_folder
from offload.policies.registry import available_policies
from offload.system.memory import available_cpus
from offload.system.stdlib_text import stdlib_paragraphs
from perf.engines.engine_protocol import EngineProcess, peers_python
from perf.engines.forced_isa import VARIABLES, force_isa
from perf.results_file import Run, script_options

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
    model: str
    settings: dict[str, Any]
    python: Path | None = None


@dataclass
class Times:
    """What one contestant needed at one context length."""

    prefill_seconds: list[float]
    step_seconds: list[float] = field(default_factory=list)
    argmax: list[int] = field(default_factory=list)


def contestants(threads: int, isa: str | None = None) -> list[Contestant]:
    """All engines; `REFERENCE` is transformers with its defaults.

    Args:
        threads: of each.
        isa: what the peers were compiled for; by default, this CPU.
    """
    gguf = embedded_gguf()
    folder = str(converted_folder(gguf, EMBEDDED_MODEL))  # in bfloat16

    def ours(policy: str, dtype: str = "bfloat16") -> Contestant:
        settings = {"threads": threads, "policy": policy, "dtype": dtype}
        name = f"offload {policy}" + (f", {dtype}" if dtype != "bfloat16" else "")
        return Contestant(name, "perf.engines.offload_engine", folder, settings)

    def as_in_file(policy: str) -> Contestant:
        settings = {"threads": threads, "policy": policy, "dtype": "bfloat16"}
        kept = str(resolve_folder(EMBEDDED_MODEL))
        return Contestant(f"offload {policy}, Q4_1", "perf.engines.offload_engine", kept, settings)

    def stock(name: str, attention: str, cache: str) -> Contestant:
        settings = {"threads": threads, "attention": attention, "cache": cache}
        return Contestant(name, "perf.baselines.stock_transformers", folder, settings)

    def llama(name: str, flash_attention: bool) -> Contestant:
        settings = {"threads": threads, "flash_attention": flash_attention}
        return Contestant(name, "perf.baselines.llama_cpp", str(gguf), settings, peers_python(isa))

    return [
        *(ours(policy) for policy in available_policies()),
        ours("full", "float32"),
        as_in_file("full"),
        stock(REFERENCE, "sdpa", "dynamic"),
        stock("transformers, static cache", "sdpa", "static"),
        stock("transformers, static cache, eager", "eager", "static"),
        llama("llama.cpp", False),
        llama("llama.cpp, flash attention", True),
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
    parser = script_options(__doc__, "decode")
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--tokens-per-round", type=int, default=8)
    parser.add_argument("--engines", nargs="+", help="names; default: all")
    parser.add_argument(
        "--isa",
        choices=VARIABLES,
        help="force it on every engine; the results file is NAME-ISA. Default: the best there is",
    )
    options = parser.parse_args()
    if options.isa:
        options.name += f"-{options.isa}"
        try:
            force_isa(options.isa)
        except ValueError as error:
            parser.error(f"--isa: {error}")
    threads = available_cpus()
    chosen = [
        contestant
        for contestant in contestants(threads, options.isa)
        if options.engines is None or contestant.name in (*options.engines, REFERENCE)
    ]
    if any(contestant.python and not contestant.python.exists() for contestant in chosen):
        for_isa = f" PEERS_ISA={options.isa}" if options.isa else ""
        parser.error(f"the peers are not installed; run: make peers{for_isa}")
    run = Run(options)
    tokenizer = load_tokenizer(EMBEDDED_MODEL)
    text = tokenizer("\n\n".join(stdlib_paragraphs())[: MAX_CONTEXT * 8])["input_ids"]
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        engines = {
            c.name: stack.enter_context(EngineProcess(c.module, c.model, c.settings, c.python))
            for c in tqdm(chosen, desc="start", unit="engine")
        }
        for context in options.contexts:
            rounds = run.named("rounds", "tokens_per_round")
            times = measure(engines, text, context=context, **rounds)
            rows += [row(name, context, times[name], times[REFERENCE]) for name in engines]
        descriptions = {name: engine.description for name, engine in engines.items()}
    settings = {"model": EMBEDDED_MODEL, "threads": threads}
    settings |= run.named("isa", "rounds", "tokens_per_round") | {"engines": descriptions}
    run.write(settings, rows)


if __name__ == "__main__":
    main()
