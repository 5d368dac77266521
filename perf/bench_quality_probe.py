"""What `quality_probe` costs: `python -m perf.bench_quality_probe --model smollm2-135m-instruct`.

One session decodes in blocks of steps, with another share in each, in turns. A block's mean counts,
not its median: few steps have a probe. Each turn's means are relative to its share of 0, and the
second block without a probe says how much of a difference is noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from offload.bench.decode.models import RandomModel, TextModel
from offload.bench.pipeline.measure import WARM_UP_STEPS, DecodeSession
from offload.bench.pipeline.settings import PipelineSettings
from offload.policies.registry import make_policy
from perf.results_file import Run, script_options

Row = dict[str, Any]
CONTROL = "0 again"


def main() -> None:
    parser = script_options(__doc__, "quality-probe")
    parser.add_argument("--model", help="that reads real text; default: random weights of --shape")
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--distinct-layers", type=int, default=2, help="of the made keys")
    parser.add_argument("--backend", default="graph", help="of --shape: graph, stream or inline")
    parser.add_argument("--device", default="cpu", help="of --model")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--policies", nargs="+", default=["lychee_cluster"])
    parser.add_argument("--kv-len", type=int, default=32768)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.001, 0.01])
    parser.add_argument("--steps", type=int, default=64, help="of a block")
    parser.add_argument("--turns", type=int, default=10)
    options = parser.parse_args()
    run = Run(options)
    policies = [make_policy(name) for name in options.policies]
    model: RandomModel | TextModel
    if options.model is None:
        model = RandomModel(
            PipelineSettings(
                shape=options.shape,
                kv_len=options.kv_len,
                policy=policies[0],
                backend=options.backend,
                num_threads=options.threads,
                distinct_layers=options.distinct_layers,
            )
        )
    else:
        model = TextModel(
            options.model, policies, device=options.device, num_threads=options.threads
        )
    blocks: dict[str, float] = {"0": 0.0, CONTROL: 0.0}
    blocks |= {f"{share:g}": share for share in options.shares}
    num_steps = WARM_UP_STEPS + len(blocks) * options.steps
    rows: list[Row] = []
    with model.sessions(options.kv_len, policies, num_steps=num_steps) as opened:
        for policy in policies:
            session = opened(policy)
            run.say(f"{policy.name} behind {options.kv_len:,} tokens")
            try:
                rows += measure(session, blocks, options.steps, options.turns)
            finally:
                session.close()
            for row in rows[-len(blocks) :]:
                row["policy"] = policy.name
                run.say(describe(row))
            run.write(
                run.named(
                    "model", "shape", "backend", "device", "threads", "kv_len", "steps", "turns"
                ),
                rows,
            )


def measure(
    session: DecodeSession, blocks: dict[str, float], num_steps: int, num_turns: int
) -> list[Row]:
    """A row for each of `blocks`, shares by their names."""
    attention = attention_of(session)
    means: dict[str, list[float]] = {name: [] for name in blocks}
    probes = dict.fromkeys(blocks, 0)
    names = list(blocks)
    for turn in range(num_turns):
        session.rewind()
        session.decode(WARM_UP_STEPS)
        for i in range(len(names)):
            name = names[(i + turn) % len(names)]
            attention.start_probe(blocks[name], seed=turn)
            before = attention.num_probed()
            means[name].append(float(np.mean(session.decode(num_steps))))
            probes[name] += attention.num_probed() - before
        attention.start_probe(0.0, seed=0)
    base = np.array(means["0"])
    return [
        {
            "share": name,
            "milliseconds": 1e3 * float(np.median(means[name])),
            "probes_per_step": probes[name] / (num_turns * num_steps),
            **quartiles(np.array(means[name]) / base - 1.0),
        }
        for name in names
    ]


def attention_of(session: Any) -> Any:
    """What a session attends with."""
    runtime = getattr(session, "_runtime", None)
    return session._decoder.attention if runtime is None else runtime.attention


def quartiles(extra: Sequence[float] | Any) -> Row:
    low, median, high = np.quantile(extra, (0.25, 0.5, 0.75))
    return {"extra": float(median), "extra_p25": float(low), "extra_p75": float(high)}


def describe(row: Row) -> str:
    return (
        f"{row['policy']}, share {row['share']}: {row['milliseconds']:.3f} ms a step, "
        f"{row['probes_per_step']:.2f} probes; {row['extra']:+.2%} "
        f"({row['extra_p25']:+.2%} … {row['extra_p75']:+.2%})"
    )


if __name__ == "__main__":
    with torch.no_grad():
        main()
