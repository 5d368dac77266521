"""What cache correction costs: `python -m perf.papers.correction_time --device cuda`.

Tokens behind a prompt are decoded in turns with corrections and without, from the same pages, by
the same runtime. A pass has whole periods of T sparse tokens and the one that corrects them, so
that its share is that of a long answer. A GPU reads its part of a corrected sequence anew in the
next step, which is behind `correction_seconds` and within the share.
"""

from __future__ import annotations

import tempfile
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from offload.bench.decode.models import TextModel
from offload.measuring.steps.text_session import TextSession
from offload.measuring.synthetic.random_model import random_model
from offload.models.shape import MODEL_SHAPES
from offload.policies import Policy
from offload.policies.registry import make_policy
from offload.runtime.config import runtime_config
from offload.runtime.correcting import Corrections
from offload.runtime.opening import open_loaded
from offload.runtime.runtime import Runtime
from offload.system.memory import available_cpus
from perf.papers.observed import MODEL
from perf.results_file import Run, hide_loading_bars, script_options

POLICIES = ("exact_topk", "lychee_cluster", "lychee_decode", "quest")
Row = dict[str, Any]


def main() -> None:
    parser = script_options(__doc__, "paper-correction-time")
    parser.add_argument("--model", default=MODEL, help="that reads text")
    parser.add_argument("--shape", choices=tuple(MODEL_SHAPES), help="random weights, no --model")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--backend", help="with a GPU; default: the best there is")
    parser.add_argument("--policies", nargs="+", default=POLICIES)
    parser.add_argument("--length", type=int, default=8192, help="of the prompt")
    parser.add_argument("--every", type=int, default=1024)
    parser.add_argument("--corrections", type=int, default=2, help="of a pass")
    parser.add_argument("--budget", type=float, default=0.1, help="share of all tokens")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, help="default: as many as decode best")
    options = parser.parse_args()
    if options.threads is None and options.device == "cpu":
        options.threads = available_cpus()
    hide_loading_bars()
    run, rows = Run(options), []
    # One more has what the last correction leaves to the next step.
    num_steps = options.corrections * (options.every + 1) + 1
    budget_tokens = int(options.budget * (options.length + num_steps))
    named = run.named("shape", "device", "backend", "length", "every", "corrections", "repeats")
    named |= {"model": None if options.shape else options.model, "threads": options.threads}
    for name in options.policies:
        policy = make_policy(name, budget_tokens=budget_tokens)
        with opened(options, policy, num_steps) as session:
            row = measure(session, options.every, num_steps, options.repeats)
        rows.append({"policy": name} | row)
        run.say(str(rows[-1]))
        run.write(named | {"budget_tokens": budget_tokens, "steps": num_steps}, rows)


@contextmanager
def opened(options: Namespace, policy: Policy, num_steps: int) -> Iterator[TextSession]:
    """A session behind a text, or behind any tokens with random weights."""
    named: Row = {"device": options.device, "backend": options.backend}
    named |= {"num_threads": options.threads}
    if options.shape is None:
        model = TextModel(options.model, [policy], dtype="bfloat16", **named)
        with model.sessions(options.length, [policy], num_steps=num_steps) as make:
            session: Any = make(policy)
            try:
                yield session
            finally:
                session.close()
        return
    config = runtime_config(policy=policy, **named)
    shape, device = MODEL_SHAPES[options.shape], torch.device(config.device)
    stock = random_model(shape, device=device, dtype=torch.bfloat16)
    weight_bytes = sum(weight.nbytes for weight in stock.parameters())
    drawn = torch.Generator().manual_seed(0)
    tokens = torch.randint(shape.vocab_size, (options.length + num_steps,), generator=drawn)
    with tempfile.TemporaryDirectory() as no_tokenizer:
        runtime = Runtime(open_loaded(stock, config, Path(no_tokenizer)))
    session = TextSession(runtime, weight_bytes, tokens, options.length, num_steps)
    try:
        yield session
    finally:
        session.close()


def measure(session: TextSession, every: int, num_steps: int, repeats: int) -> Row:
    """Both ways, each `repeats` times, in turns.

    Raises:
        ValueError: not all of them were corrected, as where sequences attend to everything.
    """
    timed(session, every, every + 2)  # what is compiled and captured once
    seconds: dict[int | None, list[list[float]]] = {None: [], every: []}
    correcting = []
    for repeat in range(repeats):
        for way in (None, every) if repeat % 2 == 0 else (every, None):
            times, of_corrections, corrected = timed(session, way, num_steps)
            seconds[way].append(times)
            if way is None:
                continue
            correcting.append(of_corrections)
            expected = num_steps // (every + 1) * every
            if corrected != expected:
                raise ValueError(
                    f"{corrected} of {expected} tokens were corrected: the others attended to "
                    "everything; lower --budget or raise --length"
                )
    without, corrected_steps = np.array(seconds[None]), np.array(seconds[every])
    is_correction = np.arange(num_steps) % (every + 1) == every
    is_next = np.roll(is_correction, 1)
    means = [1e3 * x.mean(axis=1) for x in (without, corrected_steps)]
    medians = [float(np.median(x)) for x in means]
    of_corrections = float(np.median(correcting))
    return {
        "ms_per_token": medians[0],
        "ms_per_token_corrected": medians[1],
        "added_share": medians[1] / medians[0] - 1.0,
        "correction_seconds": of_corrections,
        "seconds_per_correction": of_corrections / int(is_correction.sum()),
        "step_ms": 1e3 * float(np.median(without)),
        "correcting_step_ms": 1e3 * float(np.median(corrected_steps[:, is_correction])),
        "next_step_ms": 1e3 * float(np.median(corrected_steps[:, is_next])),
        "ms_of_repeats": [x.tolist() for x in means],
    }


def timed(
    session: TextSession, every: int | None, num_steps: int
) -> tuple[list[float], float, int]:
    """Seconds of each step behind the prompt, and in corrections; tokens that were corrected."""
    runtime = session._runtime
    session.rewind()
    corrections = None
    if every is not None:
        corrections = Corrections(every, runtime.store, runtime.config.policy.dense_tokens)
    runtime.sequences.corrections = corrections
    before, tokens = runtime.stats.correction_seconds, runtime.stats.corrected_tokens
    times = session.decode(num_steps)
    stats = runtime.stats
    return times, stats.correction_seconds - before, stats.corrected_tokens - tokens


if __name__ == "__main__":
    main()
