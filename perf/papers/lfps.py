"""LFPS's claims (Learn from the Past, Figures 2a and 5b, Table 3): `python -m perf.papers.lfps`.

Its parts, which `--parts` chooses from:

    overlap   Figure 2: what the rule finds of exact top-k, and without parts of it, by replay
    bypass    Table 3: the policy on text, by the threshold of the bypass
    ruler     the same settings: scores of RULER's tasks
    speed     the same settings: decode attention on one thread
    batch     Figure 5b: decode attention by batch size

Results are written as they come. Parts of several runs become one file by `--add`.
"""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from offload import OffloadedModel, load_tokenizer
from offload.bench.decode.models import lean_model
from offload.bench.eval.answers import answer_sample
from offload.bench.eval.haystack import prose_words
from offload.bench.eval.labels import windows_of
from offload.bench.eval.prompt import prompt_text
from offload.bench.eval.ruler import ruler_samples
from offload.bench.eval.sample import Sample
from offload.bench.latency.run import LatencyRun, run_latency
from offload.bench.selection.measure import SelectionSettings, measure_selection
from offload.loading.checkpoint import check_checkpoint
from offload.loading.gguf import LONG_CONTEXT_MODEL
from offload.loading.names import resolve_folder
from offload.loading.stock_model import load_stock_model
from offload.policies import Policy
from offload.policies.registry import make_policy
from offload.runtime.config import runtime_config
from offload.runtime.shared_model import SharedModel
from offload.system.memory import available_cpus
from offload.system.stdlib_text import stdlib_paragraphs
from perf.papers.lfps_replay import THRESHOLDS, AsInThePaper, Rule, read_text, replay
from perf.results_file import Run, hide_loading_bars, script_options

Row = dict[str, Any]
LENGTHS = (4096, 8192, 16384, 32768)
TEXTS = ("docstrings", "source code", "RULER prompts")
RULER_OF_SEED = ("niah_multiquery", "vt", "cwe", "fwe")  # of the prompts that are replayed
RULER_TASKS = ("niah_multikey_1", "niah_multiquery", "vt", "cwe")  # of those that are answered
PAPER = Rule("LFPS")
RULES = (
    PAPER,
    replace(PAPER, name="no expansion", offsets=()),
    replace(PAPER, name="no expansion, alpha 0.1", offsets=(), alpha=0.1),
    replace(PAPER, name="all neighbours, not only above the mean", above_mean=False),
    replace(PAPER, name="neighbours -4 to 4", offsets=(-4, -3, -2, -1, 1, 2, 3, 4)),
    replace(PAPER, name="vertical table only", slash=False),
    replace(PAPER, name="slash table only", vertical=False),
    replace(PAPER, name="alpha 0.3", alpha=0.3),
    replace(PAPER, name="no bypass", bypass_threshold=1.0),
    replace(PAPER, name="KV heads instead of query heads", per_query_head=False),
    replace(PAPER, name="the best 1 %", budget_share=0.01),
    replace(PAPER, name="the best 4 %", budget_share=0.04),
)
BYPASS_BUDGET = 320
BATCH_SHAPE, BATCH_BUDGET = "llama-3.1-8b", 1024
BATCH_POLICIES = ("full", "exact_topk", "quest", "lfps")
_FIXED = {
    "model": LONG_CONTEXT_MODEL,
    "bypass_budget": BYPASS_BUDGET,
    "batch_shape": BATCH_SHAPE,
    "batch_budget": BATCH_BUDGET,
}


def prompts_of(task: str, length: int, count: int, seed: int, tokenizer: Any) -> list[Sample]:
    """RULER's first prompts of a task."""
    return ruler_samples(
        task,
        length,
        count,
        seed=seed,
        count_tokens=lambda text: len(tokenizer(text, verbose=False)["input_ids"]),
        prose=prose_words(None),
    )


def text_tokens(kind: str, seed: int, num_tokens: int, tokenizer: Any) -> list[int]:
    """At most `num_tokens` of a kind of text; each seed another part of it, or another task."""
    if kind == "RULER prompts":
        task = RULER_OF_SEED[seed % len(RULER_OF_SEED)]
        (sample,) = prompts_of(task, num_tokens, 1, seed, tokenizer)
        text = prompt_text(sample, tokenizer, chat=False) + " " + ", ".join(sample.outputs)
        tokens: list[int] = tokenizer(text, verbose=False)["input_ids"]
        return tokens[-num_tokens:]
    parts = stdlib_paragraphs()
    if kind == "source code":
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        parts = [file.read_text("utf-8", errors="replace") for file in files]
    # Seeds begin at different parts, and go on at the beginning where the text ends.
    first = len(parts) * (seed % 4) // 4
    text, most = "", 12 * num_tokens  # characters: more than tokens have
    for part in parts[first:] + parts[:first]:
        text += part + "\n\n"
        if len(text) > most:
            break
    tokens = tokenizer(text[:most], verbose=False)["input_ids"]
    return tokens[:num_tokens]


def texts_of(
    length: int, seeds: int, tokenizer: Any, kinds: tuple[str, ...] = TEXTS
) -> Iterator[tuple[str, int, list[int]]]:
    """Kind, seed and tokens; the kinds take turns."""
    for seed in range(seeds):
        for kind in kinds:
            yield kind, seed, text_tokens(kind, seed, length, tokenizer)


def overlap_rows(options: Any) -> Iterator[list[Row]]:
    """Figure 2: a row of each rule and text at each length; the text's own rule is None."""
    tokenizer = load_tokenizer(LONG_CONTEXT_MODEL)
    checkpoint = check_checkpoint(resolve_folder(LONG_CONTEXT_MODEL))
    lean = lean_model(load_stock_model(checkpoint, torch.bfloat16).eval().to(options.device))
    for length in options.lengths:
        rows: list[Row] = []
        for kind, seed, tokens in texts_of(length, options.seeds, tokenizer):
            text = read_text(lean, tokens, options.steps, options.device)
            of_rules, of_text = replay(text, RULES)
            where = {"part": "overlap", "length": length, "text": kind, "seed": seed}
            rows.append(where | {"tokens": len(tokens), "rule": None} | of_text)
            rows += [
                where | {"rule": rule.name, "options": asdict(rule)} | means
                for rule, means in zip(RULES, of_rules, strict=True)
            ]
        yield rows


def bypass_policies() -> dict[str, Policy]:
    """LFPS by threshold, and what it is compared with."""
    options: dict[str, Any] = {"budget_tokens": BYPASS_BUDGET, **windows_of(BYPASS_BUDGET)}
    return {"full": make_policy("full"), "exact_topk": make_policy("exact_topk", **options)} | {
        f"lfps {limit}": AsInThePaper(bypass_threshold=limit, **options)
        for limit in (1.0, *THRESHOLDS)
    }


def speed_rows(options: Any) -> Iterator[list[Row]]:
    """Table 3: a row of each threshold, real text on one thread."""
    policies = bypass_policies()
    result = run_latency(
        LatencyRun(
            shape=None,
            model=LONG_CONTEXT_MODEL,
            depths=(options.bypass_length,),
            threads=(1,),
            policies=policies,
            options={name: {} for name in policies},
            batch_size=1,
            repeats=options.repeats,
            dtype=torch.bfloat16,
            seed=0,
        )
    )
    yield [{"part": "speed"} | row for row in result.rows()]


def bypass_rows(options: Any) -> Iterator[list[Row]]:
    """Table 3: a row of each threshold and text."""
    tokenizer, length = load_tokenizer(LONG_CONTEXT_MODEL), options.bypass_length
    settings = SelectionSettings(
        context=length - options.steps - 1, steps=options.steps, sample_every=8, timed_steps=1
    )
    # A prompt of RULER may have fewer tokens than are asked for.
    for kind, seed, tokens in texts_of(settings.text_tokens, options.seeds, tokenizer, TEXTS[:2]):
        measured = measure_selection(
            lambda policy: OffloadedModel.from_pretrained(
                LONG_CONTEXT_MODEL,
                policy=policy,
                dtype="bfloat16",
                num_threads=options.threads,
            ),
            list(bypass_policies().values()),
            tokens,
            settings,
        )
        where = {"part": "bypass", "text": kind, "seed": seed, "length": length}
        yield [where | asdict(row) for row in measured]


def ruler_rows(options: Any) -> Iterator[list[Row]]:
    """Table 3: a row of each prompt, with everybody's answers; the tasks take turns."""
    tokenizer, length = load_tokenizer(LONG_CONTEXT_MODEL), options.bypass_length
    policies = bypass_policies()
    config = runtime_config(dtype="bfloat16", device=options.device, num_threads=options.threads)
    model = SharedModel(LONG_CONTEXT_MODEL, list(policies.values()), config)
    samples = [prompts_of(task, length, options.samples, 0, tokenizer) for task in RULER_TASKS]
    for sample in chain.from_iterable(zip(*samples, strict=True)):
        answered = answer_sample(model, list(policies), tokenizer, sample, chat=True)
        where = {"part": "ruler", "task": sample.task, "length": length, "index": sample.index}
        yield [where | answered]


def batch_rows(options: Any) -> Iterator[list[Row]]:
    """Figure 5b: policies by batch size, on `--threads`."""
    given = {"budget_tokens": BATCH_BUDGET}
    of_policy = {name: {} if name == "full" else given for name in BATCH_POLICIES}
    for batch_size in options.batches:
        result = run_latency(
            LatencyRun(
                shape=BATCH_SHAPE,
                model=None,
                depths=(options.batch_depth,),
                threads=(options.threads,),
                policies={name: make_policy(name, **of_policy[name]) for name in of_policy},
                options=of_policy,
                batch_size=batch_size,
                repeats=options.repeats,
                dtype=torch.bfloat16,
                seed=0,
                max_layers=1,
            )
        )
        yield [{"part": "batch"} | row for row in result.rows()]


PARTS: dict[str, Callable[[Any], Iterator[list[Row]]]] = {
    "overlap": overlap_rows,
    "bypass": bypass_rows,
    "ruler": ruler_rows,
    "speed": speed_rows,
    "batch": batch_rows,
}


# Settings that rows of a part depend on, beside those that are the same in every run.
_OPTIONS = {
    "overlap": ("steps", "seeds"),
    "bypass": ("steps", "seeds", "bypass_length"),
    "ruler": ("bypass_length",),
    "speed": ("bypass_length", "repeats"),
    "batch": ("batch_depth", "repeats"),
}


def added_rows(
    paths: Sequence[Path], machine: dict[str, Any], settings: dict[str, Any]
) -> list[Row]:
    """Rows of other runs: the file that they go to names one machine and one set of options.

    Raises:
        ValueError: a run of another machine, or parts of it that were made with other options.
    """
    rows: list[Row] = []
    for path in paths:
        found = json.loads(path.read_text("utf-8"))
        for name in ("cpu", "gpus"):
            if found["machine"][name] != machine[name]:
                raise ValueError(
                    f"--add {path}: it is of {name} {found['machine'][name]!r}, this machine has "
                    f"{machine[name]!r}; run there, or write to another file without --add"
                )
        for part in {row["part"]: None for row in found["rows"]}:
            for name in (*_FIXED, *_OPTIONS[part]):
                then, now = found["settings"].get(name), settings[name]
                if then != now:
                    raise ValueError(
                        f"--add {path}: its part {part!r} was made with {_option(name)} {then}, "
                        f"but this run has {now}; give the same, or leave --add out"
                    )
        rows += found["rows"]
    return rows


def _option(name: str) -> str:
    return name if name in _FIXED else f"--{name.replace('_', '-')}"


def main() -> None:
    parser = script_options(__doc__, "paper-lfps")
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=[*PARTS])
    parser.add_argument("--add", type=Path, nargs="+", default=(), help="results of other parts")
    parser.add_argument("--device", default="cpu", help="of replays and RULER: cpu or cuda")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--seeds", type=int, default=2, help="of each kind of text")
    parser.add_argument("--bypass-length", type=int, default=8192)
    parser.add_argument("--samples", type=int, default=8, help="of each of RULER's tasks")
    parser.add_argument("--batches", type=int, nargs="+", default=(1, 2, 4, 8))
    parser.add_argument("--batch-depth", type=int, default=16384)
    parser.add_argument("--threads", type=int, default=available_cpus(), help="but for speed: 1")
    parser.add_argument("--repeats", type=int, default=11, help="of timed steps")
    options = parser.parse_args()
    hide_loading_bars()
    run = Run(options)
    names = ("lengths", "steps", "seeds", "bypass_length", "batch_depth", "repeats")
    settings = _FIXED | run.named(*names)
    try:
        rows = added_rows(options.add, run.machine, settings)
    except ValueError as error:
        parser.error(str(error))
    run.write(settings, rows)
    for part in options.parts:
        for found in PARTS[part](options):
            rows += found
            run.write(settings, rows)


if __name__ == "__main__":
    main()
