"""Predicted against measured decode steps, and planned against taken bytes.

`python -m perf.bench_plan` on a machine with a GPU: measures the machine's profile for each number
of threads, then decodes with the placement that a plan would choose and with the one that decoding
has by itself, over made keys. With `--backend inline --shape tiny` it runs on a CPU, for tests;
predictions are then those of a machine without a GPU, and mean little.

The profile is measured before anything else in the same process; no coefficient comes from the
steps that are predicted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace

from offload.bench.decode.engines import describe as describe_peer
from offload.bench.decode.engines import our_row, peer_row
from offload.decode.gpu.placement import Place
from offload.loading.planned_model import planned_model
from offload.measuring.machine.measure import measure_profile
from offload.measuring.machine.policy import with_policy
from offload.models.shape import MODEL_SHAPES
from offload.planning.choose import least_placement
from offload.planning.plan import Plan, PlanRequest, make_plan
from offload.planning.profile import MachineProfile
from offload.planning.workload import Workload
from offload.policies import Policy
from offload.policies.registry import make_policy
from offload.system.memory import available_cpus
from perf.gpu_steps import GPUBench, Row, model_options, random_model
from perf.results_file import Run, script_options

CHOSEN, LEAST = "chosen", "dense layers only"
PLACEMENTS = (CHOSEN, LEAST)
COUNTED = ("kv_device", "device", "host")  # bytes of a plan that were counted, too


@dataclass(frozen=True)
class Setting:
    """One of the twelve, or of a sweep over `room_gib`, max_memory of the GPU; None: all of it."""

    policy: str
    kv_len: int
    budget_tokens: int
    threads: int
    room_gib: float | None = None

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
    parser = script_options(__doc__, "gpu-plan")
    model_options(parser)
    parser.add_argument(
        "--rooms", type=float, nargs="+", metavar="GIB", help="a sweep instead: the GPU's memory"
    )
    parser.add_argument("--policies", nargs="+", default=["tidal_decode", "lychee_cluster"],
                        help="of the sweep")  # fmt: skip
    parser.add_argument("--longest", type=int, default=131072, help="contexts beyond are cut to it")
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--tolerance", type=float, default=0.15, help="of predicted milliseconds")
    parser.add_argument("--bytes-tolerance", type=float, default=0.02)
    options = parser.parse_args(arguments)
    run = Run(options)
    every: Sequence[Setting] = SETTINGS
    if options.rooms:
        every = [
            Setting(policy, options.longest, 1024, 15, room)
            for policy in options.policies
            for room in options.rooms
        ]
    cut = (
        replace(
            setting,
            kv_len=min(setting.kv_len, options.longest),
            threads=min(setting.threads, available_cpus()),
        )
        for setting in every
    )
    settings = list(dict.fromkeys(cut))
    model = random_model(parser, options, longest=options.longest)
    bench = GPUBench(model, (), options.steps, options.repeats)
    profiles = {}
    for threads in sorted({setting.threads for setting in settings}):
        profiles[threads] = measured_profile(bench, threads, settings)
        run.say(f"measured the profile of {threads} threads")
        for key, scale in profiles[threads].select_scale.items():
            run.say(f"selecting by {key}: {scale:.2f} of what its bytes take")
    rows = []
    for row in measure(bench, settings, profiles):
        rows.append(row)
        run.say(describe(row))
    if options.rooms and bench.is_cuda:
        graph = peer_row(bench.model, bench.plan([], "graph"), "graph", options.longest)
        run.say(describe_peer(graph))
        rows.append(graph)
    document = run.named("shape", "dtype", "backend", "steps", "repeats")
    document["profiles"] = {str(n): profile.as_json() for n, profile in profiles.items()}
    run.write(document, rows)
    if options.rooms:
        return 0
    return judge(rows, options.tolerance, options.bytes_tolerance, run.say)


def measured_profile(bench: GPUBench, threads: int, settings: Sequence[Setting]) -> MachineProfile:
    """Profile of the machine with so many threads, which includes how long the policies of
    `settings` select."""
    shape, dtype = MODEL_SHAPES[bench.model.shape], bench.model.dtype
    profile = measure_profile(bench.model.device, threads, shape=shape, dtype=dtype)
    for setting in settings:
        if setting.threads == threads:
            profile = with_policy(profile, setting.made(), shape, dtype, setting.kv_len)
    bench.release()
    return profile


def measure(
    bench: GPUBench, settings: Sequence[Setting], profiles: dict[int, MachineProfile]
) -> Iterator[Row]:
    """A row for each setting and placement. Settings of one context share its caches."""
    for kv_len in sorted({setting.kv_len for setting in settings}):
        of_context = [setting for setting in settings if setting.kv_len == kv_len]
        policies = list(dict.fromkeys(setting.made() for setting in of_context))
        with bench.model.sessions(kv_len, policies, num_steps=bench.num_steps) as opened:
            for setting in of_context:
                for plan, which in _plans(bench, setting, profiles[setting.threads]):
                    placement = plan.placement if bench.is_cuda else None
                    session = opened(
                        setting.made(), num_threads=setting.threads, placement=placement
                    )
                    store = session.runtime.store
                    measured, _ = our_row(session, kv_len, bench.plan([kv_len], "offload"))
                    bench.release()
                    reserved = {"host_bytes": store.host_bytes_reserved}
                    row = {**asdict(setting), "placement": which, **reserved}
                    yield row | _compared(plan, measured, bench.is_cuda)


def _plans(
    bench: GPUBench, setting: Setting, profile: MachineProfile
) -> Iterator[tuple[Plan, str]]:
    """With the best placement, and with the one that decoding has by itself; once if they agree."""
    # At the end of the steps: their tokens take memory, too.
    request = _plan_request(bench, setting.made(), setting.kv_len + bench.num_steps)
    if setting.room_gib is not None:
        request = replace(request, max_memory={0: int(setting.room_gib * 2**30)})
    chosen = make_plan(request, profile)
    yield chosen, CHOSEN
    if bench.is_cuda and setting.room_gib is None:
        shape = request.model.shape
        least = least_placement(Workload(shape, setting.made(), setting.kv_len))
        if least != chosen.placement:
            yield make_plan(replace(request, placement=least), profile), LEAST


def _plan_request(bench: GPUBench, policy: Policy, context: int) -> PlanRequest:
    """A plan for so many tokens of synthetic keys, whose context no rotation limits."""
    model = replace(planned_model(bench.model.shape), dtype=bench.model.dtype)
    longest = max(model.shape.max_context, context)
    return PlanRequest(
        model=replace(model, shape=replace(model.shape, max_context=longest)),
        policy=policy,
        context=context,
        batch_size=1,
        device=str(bench.model.device),
        max_memory={},
        on_this_machine=False,
    )


def _compared(plan: Plan, measured: Row, on_gpu: bool) -> Row:
    """What was planned, and what was measured."""
    memory, counted = measured["memory"], plan.device_bytes
    of_kv = ("KV of resident heads", "windows", "page tables")
    of_step = [name for name in counted if name not in ("weights", "prefill, at its peak")]
    predicted = plan.step.milliseconds
    times = ("milliseconds", "milliseconds_p10", "milliseconds_p90")
    return {
        "heads": {place.name: sum(plan.placement.counts(place)) for place in Place},
        "map": plan.placement.as_json(),
        "predicted_milliseconds": predicted,
        **{name: measured[name] for name in times},
        "error": predicted / measured["milliseconds"] - 1.0,
        "predicted_microseconds": plan.as_json()["microseconds"],
        "planned_kv_device_bytes": sum(counted[name] for name in of_kv) if on_gpu else None,
        "kv_device_bytes": memory.get("kv_device"),
        "planned_device_bytes": sum(counted[name] for name in of_step) if on_gpu else None,
        "device_bytes": memory.get("device"),
        "planned_host_bytes": plan.host_bytes["KV cache"],
        "planned_policy_bytes": plan.host_bytes["kept by the policy"],
        "policy_bytes": memory.get("policy_host"),
        "assumed": list(plan.step.assumed),
    }


def describe(row: Row) -> str:
    """A line about a row."""
    return (
        f"{row['policy']}, {row['kv_len']:,} tokens, budget {row['budget_tokens']:,}, "
        f"{row['threads']} threads, {row['placement']}"
        + ("" if row.get("room_gib") is None else f" for {row['room_gib']:g} GiB")
        + f", {row.get('heads', {}).get('GPU', 0)} heads on the GPU: predicted "
        f"{row['predicted_milliseconds']:.2f} ms, measured {row['milliseconds']:.2f} "
        f"({row['error']:+.1%})"
    )


def bytes_errors(row: Row) -> dict[str, float]:
    """Errors of planned bytes against taken ones, where both were counted."""
    found = {}
    for name in COUNTED:
        planned, taken = row[f"planned_{name}_bytes"], row[f"{name}_bytes"]
        if planned and taken:
            found[name] = planned / taken - 1
    return found


def judge(
    rows: Sequence[Row],
    tolerance: float,
    bytes_tolerance: float,
    say: Callable[[str], None],
) -> int:
    """Say how much is off by more than it may be; 1 if bytes are, or a chosen placement's time.

    The other placements are reported, too: a plan never uses them.
    """
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
    miscounted = 0
    for row in rows:
        for name, error in bytes_errors(row).items():
            if abs(error) > bytes_tolerance:
                miscounted += 1
                say(f"{name} bytes off by {error:+.1%}: {describe(row)}")
    say(f"{miscounted} counts of bytes are off")
    return int(bool(wrong[CHOSEN] or miscounted))


if __name__ == "__main__":
    sys.exit(main())
