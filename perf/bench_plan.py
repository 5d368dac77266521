"""Predicted against measured decode steps, and planned against taken bytes.

`python -m perf.bench_plan` on a machine with a GPU: measures the machine's profile for each number
of threads, then decodes with the placement that a plan would choose and with the one that decoding
has by itself, over made keys. With `--backend inline --shape tiny` it runs on a CPU, for tests;
predictions are then those of a machine without a GPU, and mean little.

The profile is measured before anything else in the same process; no coefficient comes from the
steps that are predicted.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from offload.bench.decode.models import RandomModel, release
from offload.bench.machine.measure import measure_profile
from offload.bench.machine.policy import with_policy
from offload.bench.made.model_cache import ModelCache
from offload.bench.pipeline.measure import measure_pipeline
from offload.bench.pipeline.session import BACKENDS, check_settings, open_session
from offload.bench.pipeline.settings import PipelineSettings
from offload.decode.gpu.placement import HeadPlacement, Place
from offload.loading.planned_model import planned_model
from offload.models.dtypes import DTYPES
from offload.models.shape import MODEL_SHAPES
from offload.planning.choose import least_placement
from offload.planning.plan import Plan, PlanRequest, make_plan
from offload.planning.profile import MachineProfile
from offload.planning.workload import Workload
from offload.policies import Policy
from offload.policies.registry import make_policy
from offload.system.memory import available_cpus
from perf.results_file import start_machine, write_results

CHOSEN, LEAST = "chosen", "dense layers only"
PLACEMENTS = (CHOSEN, LEAST)


@dataclass(frozen=True)
class Setting:
    """One of the twelve."""

    policy: str
    kv_len: int
    budget_tokens: int
    num_threads: int

    def made(self) -> Policy:
        return make_policy(self.policy, budget_tokens=self.budget_tokens)


# Every policy at both contexts; budgets and threads where they matter most, at the longer one.
SETTINGS = (
    Setting("lychee_decode", 32768, 1024, 15),
    Setting("lychee_decode", 131072, 1024, 15),
    Setting("lychee_decode", 131072, 2048, 15),
    Setting("lychee_decode", 131072, 4096, 15),
    Setting("lychee_decode", 131072, 4096, 8),
    Setting("tidal_decode", 32768, 1024, 15),
    Setting("tidal_decode", 131072, 1024, 15),
    Setting("tidal_decode", 131072, 4096, 15),
    Setting("tidal_decode", 131072, 2048, 8),
    Setting("lychee_cluster", 32768, 1024, 15),
    Setting("lychee_cluster", 131072, 1024, 15),
    Setting("lychee_cluster", 131072, 2048, 8),
)


def main(arguments: list[str] | None = None) -> int:
    """Measure and write; 1 if a prediction or a count of bytes is off by more than it may be."""
    parser = _parser()
    options = parser.parse_args(arguments)
    started = time.monotonic()

    def say(line: str) -> None:
        print(f"[{time.monotonic() - started:6.1f} s] {line}", flush=True)

    machine = start_machine(options.commit)
    settings = [
        replace(
            setting,
            kv_len=min(setting.kv_len, options.longest),
            num_threads=min(setting.num_threads, available_cpus()),
        )
        for setting in SETTINGS
    ]
    settings = list(dict.fromkeys(settings))
    base = PipelineSettings(
        shape=options.shape,
        kv_len=settings[0].kv_len,
        policy=settings[0].made(),
        backend=options.backend,
        num_steps=options.steps,
        dtype=DTYPES[options.dtype],
    )
    try:
        check_settings(base)
    except NotImplementedError as error:
        parser.error(str(error))
    device = torch.device("cpu" if options.backend == "inline" else "cuda")
    profiles = {}
    for threads in sorted({setting.num_threads for setting in settings}):
        start = time.monotonic()
        profiles[threads] = measure_profile(
            device, threads, shape=MODEL_SHAPES[options.shape], dtype=base.dtype
        )
        say(f"profile of {threads} threads: {time.monotonic() - start:.1f} s")
        for setting in settings:
            if setting.num_threads == threads:
                profiles[threads] = with_policy(
                    profiles[threads],
                    setting.made(),
                    MODEL_SHAPES[options.shape],
                    base.dtype,
                    setting.kv_len,
                )
        for key, scale in profiles[threads].select_scale.items():
            say(f"selecting by {key}: {scale:.2f} of what its bytes take")
        release(device)
    rows = []
    for row in measure(base, settings, profiles, options.repeats):
        rows.append(row)
        say(describe(row))
    path = write_results(
        options.name,
        machine=machine,
        settings={
            "shape": options.shape,
            "dtype": options.dtype,
            "backend": options.backend,
            "steps": options.steps,
            "repeats": options.repeats,
            "profiles": {str(n): profile.as_json() for n, profile in profiles.items()},
        },
        rows=rows,
        folder=options.output,
    )
    say(f"wrote {path}")
    return judge(rows, options.tolerance, options.bytes_tolerance, say)


def measure(
    base: PipelineSettings,
    settings: Sequence[Setting],
    profiles: dict[int, MachineProfile],
    repeats: int,
) -> Iterator[dict[str, Any]]:
    """A row for each setting and placement. Settings of one context share its caches."""
    model = RandomModel(base)
    _ = model.stock
    for kv_len in sorted({setting.kv_len for setting in settings}):
        of_context = [setting for setting in settings if setting.kv_len == kv_len]
        policies = list(dict.fromkeys(setting.made() for setting in of_context))
        with model.caches(kv_len, policies, num_steps=base.num_steps) as (made, cache):
            for setting in of_context:
                profile = profiles[setting.num_threads]
                for plan, which in _plans(base, setting, profile):
                    yield _row(made, model.stock, cache, setting, plan, which, repeats)
                    release(base.device)


def _plans(
    base: PipelineSettings, setting: Setting, profile: MachineProfile
) -> Iterator[tuple[Plan, str]]:
    """With the best placement, and with the one that decoding has by itself; once if they agree."""
    model = replace(planned_model(base.shape), dtype=base.dtype)
    on_gpu = base.device.type == "cuda"
    # At the end of the steps: their tokens take memory, too. Rows are given, no rotation limits
    # the context.
    context = setting.kv_len + base.num_steps
    longest = max(model.shape.max_context, context)
    model = replace(model, shape=replace(model.shape, max_context=longest))
    request = PlanRequest(
        model=model,
        policy=setting.made(),
        context=context,
        batch_size=1,
        device=str(base.device),
        max_memory={},
        on_this_machine=False,
    )
    chosen = make_plan(request, profile)
    yield chosen, CHOSEN
    if on_gpu:
        least = least_placement(Workload(model.shape, setting.made(), setting.kv_len))
        if least != chosen.placement:
            yield make_plan(replace(request, placement=least), profile), LEAST


def _row(
    made: PipelineSettings,
    stock: Any,
    cache: ModelCache,
    setting: Setting,
    plan: Plan,
    which: str,
    repeats: int,
) -> dict[str, Any]:
    on_gpu = made.device.type == "cuda"
    session = open_session(
        replace(
            made,
            policy=setting.made(),
            num_threads=setting.num_threads,
            placement=plan.placement if on_gpu else None,
        ),
        stock,
        cache,
    )
    try:
        measured, _ = measure_pipeline(session, repeats=repeats, traced_steps=0)
    finally:
        session.close()
    memory, counted = measured.memory, plan.device_bytes
    of_kv = ("KV of resident heads", "windows", "page tables")
    of_step = [name for name in counted if name not in ("weights", "prefill, at its peak")]
    predicted = plan.step.milliseconds
    return {
        "policy": setting.policy,
        "kv_len": setting.kv_len,
        "budget_tokens": setting.budget_tokens,
        "threads": setting.num_threads,
        "placement": which,
        "heads": {place.name: sum(plan.placement.counts(place)) for place in Place},
        "map": plan.placement.as_json(),
        "predicted_milliseconds": predicted,
        "milliseconds": measured.milliseconds,
        "milliseconds_p10": measured.milliseconds_p10,
        "milliseconds_p90": measured.milliseconds_p90,
        "error": predicted / measured.milliseconds - 1.0,
        "predicted_microseconds": plan.as_json()["microseconds"],
        "planned_kv_device_bytes": sum(counted[name] for name in of_kv) if on_gpu else None,
        "kv_device_bytes": memory.get("kv_device"),
        "planned_device_bytes": sum(counted[name] for name in of_step) if on_gpu else None,
        "device_bytes": memory.get("device"),
        "planned_host_bytes": plan.host_bytes["KV cache"],
        "host_bytes": cache.store.host_bytes_reserved,
        "planned_policy_bytes": plan.host_bytes["kept by the policy"],
        "policy_bytes": memory.get("policy_host"),
        "assumed": list(plan.step.assumed),
    }


def describe(row: dict[str, Any]) -> str:
    """A line about a row."""
    heads = ", ".join(f"{name} {count}" for name, count in row["heads"].items())
    line = (
        f"{row['policy']:15} {row['kv_len']:7,} tokens, budget {row['budget_tokens']:5,}, "
        f"{row['threads']:2} threads, {row['placement']} ({heads}): predicted "
        f"{row['predicted_milliseconds']:.2f} ms, measured {row['milliseconds']:.2f} "
        f"({row['error']:+.1%})"
    )
    for name in ("kv_device", "device", "host", "policy"):
        planned, actual = row[f"planned_{name}_bytes"], row[f"{name}_bytes"]
        if planned and actual:
            line += f"; {name} {planned / 2**20:,.1f} of {actual / 2**20:,.1f} MiB"
    return line


def judge(
    rows: Sequence[dict[str, Any]],
    tolerance: float,
    bytes_tolerance: float,
    say: Callable[[str], None],
) -> int:
    """Say what is off by more than it may be; 1 if bytes are, or the time of a chosen placement.

    The other placements are reported beside them: nobody who plans gets one.
    """
    miscounted = 0
    for row in rows:
        if abs(row["error"]) > tolerance:
            say(f"off by more than {tolerance:.0%}: {describe(row)}")
        for name in ("kv_device", "device", "host"):
            planned, actual = row[f"planned_{name}_bytes"], row[f"{name}_bytes"]
            if planned and actual and abs(planned / actual - 1.0) > bytes_tolerance:
                miscounted += 1
                say(f"{name} bytes off by {planned / actual - 1.0:+.1%}: {describe(row)}")
    wrong = {}
    for which in PLACEMENTS:
        errors = sorted(abs(row["error"]) for row in rows if row["placement"] == which)
        wrong[which] = sum(error > tolerance for error in errors)
        if errors:
            say(
                f"{which}: {len(errors) - wrong[which]} of {len(errors)} predictions within "
                f"{tolerance:.0%}, median error {errors[len(errors) // 2]:.1%}, "
                f"largest {errors[-1]:.1%}"
            )
    say(f"{miscounted} counts of bytes are off")
    return int(bool(wrong[CHOSEN] or miscounted))


def placement_of(row: dict[str, Any]) -> HeadPlacement:
    """Of a row of the results file."""
    return HeadPlacement.from_json(row["map"])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=list(MODEL_SHAPES), default="llama-3.1-8b")
    parser.add_argument("--backend", choices=list(BACKENDS), default=next(iter(BACKENDS)))
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16")
    parser.add_argument("--longest", type=int, default=131072, help="contexts beyond are cut to it")
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--tolerance", type=float, default=0.15, help="of predicted milliseconds")
    parser.add_argument("--bytes-tolerance", type=float, default=0.02)
    parser.add_argument("--name", default="gpu-plan", help="of the results file")
    parser.add_argument("--output", type=Path, help="its folder; default: perf/results")
    parser.add_argument("--commit", help="of this tree, where there is no repository")
    return parser


if __name__ == "__main__":
    sys.exit(main())
