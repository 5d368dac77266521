"""`offload plan`: where heads go, what that takes, how fast it is; before anything is loaded."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from offload.cli.bench.options import MODEL_SHAPE_NAMES
from offload.cli.console import (
    make_table,
    print_json,
    print_marked,
    progress_bar,
    quiet_transformers,
    running,
    stderr,
    stdout,
)
from offload.cli.options import (
    AnyDevice,
    DType,
    HostExperts,
    HotExperts,
    KVDtype,
    MaxMemory,
    PolicyChoice,
    Threads,
    Verbose,
    Weights,
    memory_budgets,
)
from offload.policies.registry import make_policy

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from offload.loading.planned_model import PlannedModel
    from offload.planning.plan import Plan
    from offload.planning.profile import MachineProfile
    from offload.policies import Policy
    from offload.runtime.generic_plan import GenericPlan

# Of measuring a machine that is busy; none begins after so many seconds.
_TRIES, _TRY_SECONDS = 3, 40.0


@dataclass(frozen=True)
class Machine:
    """The machine that is planned for."""

    panel: ClassVar[str] = "On which machine"
    device: AnyDevice = None
    threads: Threads = None
    profile: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Plan for the machine that this was measured on."),
    ] = None
    save_profile: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write the machine's profile here, for --profile elsewhere."
        ),
    ] = None
    remeasure: Annotated[
        bool,
        typer.Option(
            "--remeasure", help="Measure this machine again, though its profile is in the cache."
        ),
    ] = False


def plan(
    model: Annotated[
        str,
        typer.Argument(
            help="Folder, .gguf file, hub id, an embedded model's name, or a shape: "
            f"{', '.join(MODEL_SHAPE_NAMES)}. Only its config is read."
        ),
    ],
    *,
    chosen: PolicyChoice,
    context: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="TOKENS",
            help=r"Tokens of each sequence at its end. \[default: the model's longest]",
        ),
    ] = None,
    batch: Annotated[
        int,
        typer.Option(
            min=1,
            help="Sequences that decode together; a cap of a step (max_step_bytes, max_step_us) is "
            "of all of them.",
        ),
    ] = 1,
    prompt_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="TOKENS",
            help=r"Of each prompt, for the time to the first token. \[default: the context]",
        ),
    ] = None,
    max_memory: MaxMemory = None,
    dtype: DType = "auto",
    weights: Weights = "auto",
    kv_dtype: KVDtype = "auto",
    host_experts: HostExperts = "0",
    hot_experts: HotExperts = None,
    placement: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Count and predict for these places of heads, instead of choosing the best.",
        ),
    ] = None,
    machine: Machine,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON; generate takes it as --placement.")
    ] = False,
    verbose: Verbose = False,
) -> None:
    """Show which KV heads belong on the GPU, every byte on both sides, and the predicted speed.

    The machine is measured the first time (some seconds) and its profile is kept in the cache
    folder. No weights are read and nothing is allocated for the model: what does not fit
    --max-memory or the GPU is refused here, with both numbers and the option to change (exit code
    1). Without a limit for the host, a plan beyond this machine's memory is shown, with the longest
    context that fits.

    In the map of heads, one column per layer: [bold]G[/bold] keeps all of its KV on the GPU,
    [bold]g[/bold] has its selected rows fetched over PCIe, [bold]h[/bold] keeps hot rows there,
    [bold]f[/bold] keeps those that the GPU finds by codes, [bold]c[/bold] is attended by the CPU
    with codes on the GPU, [bold].[/bold] by the CPU alone.

    [bold]Examples[/bold]

        offload plan llama-3.1-8b --context 131072 --max-memory 0=24GiB

        offload plan ./Llama-3.1-8B-Instruct --batch 4 --context 32768 --json > plan.json

        offload generate ./Llama-3.1-8B-Instruct --device cuda --placement plan.json

    For another machine: --save-profile there, then

        offload plan llama-3.1-8b --profile h200.json
    """
    options = chosen.options()
    device, threads, profile = machine.device, machine.threads, machine.profile
    if machine.remeasure and profile is not None:
        raise typer.BadParameter("a given profile is not measured", param_hint="--remeasure")
    if hot_experts and host_experts == "0":
        raise typer.BadParameter(
            f"{hot_experts} of layers on the host, but there are none: give --host-experts",
            param_hint="--hot-experts",
        )
    budgets = memory_budgets(max_memory or []) or {}
    with running(verbose=verbose), quiet_transformers(verbose=verbose):
        needs_lean = {
            "--host-experts": host_experts != "0",
            "--hot-experts": hot_experts is not None,
            "--placement": placement is not None,
            "--prompt-tokens": prompt_tokens is not None,
            "--remeasure": machine.remeasure,
            "--save-profile": machine.save_profile is not None,
        }
        generic = _generic_plan(
            model,
            make_policy(chosen.policy, **options),
            machine,
            budgets,
            [option for option, is_given in needs_lean.items() if is_given],
            context=context,
            batch_size=batch,
            dtype=dtype,
            weights=weights,
            kv_dtype=kv_dtype,
        )
        if generic is not None:
            print_json(generic.as_json()) if as_json else _print_generic(generic)
            return
        from offload.decode.gpu.placement import HeadPlacement
        from offload.kv.format import KVFormat
        from offload.loading.planned_model import planned_model
        from offload.planning.plan import PlanRequest, make_plan
        from offload.planning.profile import MachineProfile
        from offload.planning.step_cap import in_tokens, step_predictor
        from offload.policies.auto import Auto
        from offload.runtime.auto_policy import beyond_crossover, resolve_planned
        from offload.runtime.config import planned_policy
        from offload.system.memory import parse_size

        planned = planned_model(model, dtype, weights, device or "cpu")
        made_policy = make_policy(chosen.policy, **options)
        tokens = context or planned.shape.max_context
        planned.check_context(tokens)  # before anything is measured
        if prompt_tokens is not None and prompt_tokens > tokens:
            raise ValueError(
                f"--prompt-tokens {prompt_tokens:,} are more than the context's {tokens:,}; raise "
                "--context"
            )
        # What this machine has left does not bound one that is not there yet.
        limits = {k: parse_size(size, name=f"max_memory[{k!r}]") for k, size in budgets.items()}
        if profile is None:
            measured, threads = _measured(machine, planned, batch)
        else:
            measured = MachineProfile.load(profile)
            threads = measured.num_threads
        places = None if placement is None else HeadPlacement.load(placement)
        where = device or ("cuda" if measured.device is not None else "cpu")
        if device is None and where != "cpu":
            planned = planned_model(model, dtype, weights, where)  # packs less there
        if host_experts != "0":
            asked = host_experts, hot_experts
            planned = _with_host_experts(planned, *asked, where, limits, measured)
        if isinstance(made_policy, Auto) and placement is not None:
            made_policy = planned_policy(placement)
        if isinstance(made_policy, Auto):
            if profile is None and where == "cpu":  # what it may come to
                candidate = beyond_crossover(made_policy, planned.shape, tokens)
                measured = _with_policy(measured, threads, planned, candidate, tokens)
            made_policy, reason = resolve_planned(
                made_policy,
                planned,
                tokens,
                batch,
                where,
                limits,
                measured.for_threads(threads),
                kv_dtype,
            )
            stderr().print(f"auto: {reason}", style="dim", soft_wrap=True)
        made_policy = made_policy.calibration.with_kept(
            lambda: planned.checkpoint, planned.model_type, **planned.shape.kv_heads
        )
        if profile is None:
            measured = _with_policy(measured, threads, planned, made_policy, tokens)
            measured = _with_prefill(measured, threads, planned, where)
        measured = measured.for_threads(threads)
        capped = in_tokens(
            made_policy,
            planned.shape,
            KVFormat.of(kv_dtype, planned.dtype).row_bytes(planned.shape.head_dim),
            lambda: step_predictor(
                made_policy,
                planned.shape,
                planned.dtype,
                kv_len=tokens,
                profile=measured,
                placement=places,
                on_gpu=where != "cpu",
                batch_size=batch,
                kv_dtype=kv_dtype,
            ),
            batch_size=batch,
        )
        if capped is not made_policy:
            stderr().print(
                f"the cap of a step of {batch} x {tokens:,} tokens allows {capped.name} "
                f"max_tokens={capped.budget_tokens}",
                style="dim",
            )
        if machine.save_profile is not None:
            measured.save(machine.save_profile)
        request = PlanRequest(
            model=planned,
            policy=capped,
            context=tokens,
            batch_size=batch,
            device=where,
            max_memory=limits,
            on_this_machine=profile is None,
            placement=places,
            prompt_tokens=prompt_tokens,
            kv_dtype=kv_dtype,
        )
        found = make_plan(request, measured)
        if as_json:
            print_json(found.as_json())
        else:
            _print(found)


def _with_host_experts(
    planned: PlannedModel,
    asked: str,
    hot: int | None,
    where: str,
    limits: Mapping[int | str, int],
    measured: MachineProfile,
) -> PlannedModel:
    import torch

    from offload.runtime.host_experts import room_beside

    if where == "cpu" or not (asked == "auto" or asked.isdecimal()):
        raise typer.BadParameter(
            f"{asked!r} with device {where!r}: give auto or a number of layers, and --device cuda",
            param_hint="--host-experts",
        )
    device = measured.device
    limit = None if device is None else device.memory_bytes or None
    limit = limits.get(torch.device(where).index or 0, limit)
    return planned.with_host_experts(
        "auto" if asked == "auto" else int(asked),
        hot,
        limit,
        lambda: room_beside(planned.shape, planned.dtype, 8192),
    )


def _generic_plan(
    model: str,
    policy: Policy,
    machine: Machine,
    max_memory: dict[int | str, int | str],
    needs_lean: list[str],
    *,
    dtype: str,
    weights: str,
    kv_dtype: str,
    context: int | None,
    batch_size: int,
) -> GenericPlan | None:
    """The plan of a model without lean layers; None: it has some.

    Args:
        needs_lean: options that were given and are for models with lean layers.
    """
    import sys

    import torch

    from offload.loading.planned_model import planned_skeleton
    from offload.models.base import ALIBI_POSITIONS, stock_context_limit
    from offload.planning.profile import MachineProfile, cached_profile
    from offload.runtime.config import RuntimeConfig, checked_device
    from offload.runtime.generic_plan import GenericPlan
    from offload.system.memory import parse_size, worker_threads

    profile = None if machine.profile is None else MachineProfile.load(machine.profile)
    has_gpu = torch.cuda.is_available() if profile is None else profile.device is not None
    device = machine.device or ("cuda" if has_gpu else "cpu")
    skeleton = planned_skeleton(model, dtype, device, weights)
    if skeleton is None:
        return None
    empty, kept = skeleton
    if needs_lean:
        raise NotImplementedError(
            f"{needs_lean[0]} with a model of type {empty.config.model_type!r}, which has no lean "
            "layers; leave it out"
        )
    limits = {k: parse_size(size, name=f"max_memory[{k!r}]") for k, size in max_memory.items()}
    index = torch.device(device).index or 0
    limit = None
    if device != "cpu":
        if profile is None:
            limit = torch.cuda.get_device_properties(checked_device(device)).total_memory
        elif profile.device is not None:
            limit = profile.device.memory_bytes
        else:
            raise ValueError(f"device is {device!r}, but the profile has no GPU; give another one")
        limit = limits.get(index, limit)
    known = {"cpu"} if device == "cpu" else {"cpu", index}
    for key in limits.keys() - known:
        raise ValueError(
            f"max_memory names {key!r}, but device is {device!r}; it may name "
            f"{', '.join(sorted(map(repr, known)))}"
        )
    most, _ = stock_context_limit(empty.config)
    if context is None and most in (ALIBI_POSITIONS, sys.maxsize):
        raise ValueError(f"{model} has no number of positions; give --context")
    if profile is None:
        threads = worker_threads(machine.threads, with_gpu=device != "cpu")
        profile = cached_profile(torch.device(device), threads)
    elif machine.threads is not None:
        profile = profile.for_threads(machine.threads)
    plan = GenericPlan(
        name=model,
        empty=empty,
        kept=kept,
        config=RuntimeConfig(policy=policy, kv_dtype=kv_dtype),
        context=context or most,
        batch_size=batch_size,
        device=device,
        max_memory=limits,
        max_context=None if most == sys.maxsize else most,
        device_limit_bytes=limit,
        on_this_machine=machine.profile is None,
        profile=profile,
    )
    if plan.policy_reason:
        stderr().print(f"auto: {plan.policy_reason}", style="dim", soft_wrap=True)
    return plan


def _print_generic(found: GenericPlan) -> None:
    from offload.system.memory import format_bytes

    console, document, sizes = stdout(), found.as_json(), found.sizes
    console.print(
        f"{found.name}, {found.batch_size} x {found.context:,} tokens, {document['dtype']}, "
        f"{document['policy']}, transformers' own modules on {found.device}",
        style="bold",
    )
    cached = f"{format_bytes(found.kv_token_bytes)} a token in {len(sizes.specs)} layers"
    others = format_bytes(sizes.states.at(found.context))
    console.print(
        f"KV: {cached} that attend to everything; windows and recurrent states: {others} a "
        "sequence\n"
    )
    _print_bytes(f"on {found.device}", document["device_bytes"], found.device_limit_bytes)
    _print_bytes("on the host", document["host_bytes"], found.host_limit_bytes)
    if found.host_memory is not None:
        console.print(f"{found.host_memory.explained()}\n", style="dim")
    if found.largest_context is not None:
        console.print(f"largest context that fits: {found.largest_context:,} tokens", style="bold")
    if (least := found.least_milliseconds) is not None:
        console.print(
            f"at least {least:.2f} ms per step, at most {1e3 * found.batch_size / least:,.1f} "
            f"tokens/s: reading {format_bytes(sizes.active_bytes)} of weights, and the cache, "
            "takes that long",
            style="bold",
        )
    for note in document["notes"]:
        print_marked("note:", note, "yellow")


def _measured(machine: Machine, model: PlannedModel, batch: int) -> tuple[MachineProfile, int]:
    """This machine's profile, from the cache, or measured now and kept, and the number of threads
    that it shall be for. Where the machine was measured with other numbers, the nearest is it."""
    import torch

    from offload.measuring.machine.measure import measure_profile
    from offload.planning.profile import measured_profile
    from offload.runtime.config import checked_device
    from offload.system.memory import worker_threads

    console = stderr()
    where = checked_device(machine.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    threads = worker_threads(machine.threads, with_gpu=where.type == "cuda")
    found = None if machine.remeasure else measured_profile(where, threads)
    if found is not None:
        return found, threads
    parts = "memory and CPU" if where.type == "cpu" else "memory, CPU, PCIe and GPU"
    console.print(f"measuring this machine, once: {parts}", style="dim")
    start = time.perf_counter()
    tries: list[MachineProfile] = []
    while not tries or (not tries[-1].is_steady and _may_try(len(tries), start)):
        with progress_bar() as progress:
            task = progress.add_task("measuring this machine", total=None)
            show = partial(_show, progress, task)
            found = measure_profile(
                where,
                threads,
                shape=model.shape,
                dtype=model.dtype,
                rows=batch,
                on_progress=show,
            )
        tries.append(found)
    found = min(tries, key=lambda measured: measured.spread)
    seconds = time.perf_counter() - start
    console.print(
        f"measured this machine in {seconds:.0f} s{_kept(found, found.spread, len(tries))}",
        style="dim",
        soft_wrap=True,
    )
    return found, threads


def _show(progress: Progress, task: TaskID, what: str, done: int, total: int) -> None:
    progress.update(task, description=what, completed=done, total=total)


def _may_try(done: int, start: float) -> bool:
    return done < _TRIES and time.perf_counter() - start < _TRY_SECONDS


def _kept(profile: MachineProfile, spread: float, tries: int = 1) -> str:
    """Keeps a profile for the next time if the machine was not busy; what to say about it."""
    from offload.planning.profile import MAX_SPREAD, store_profile

    if profile.is_steady and spread <= MAX_SPREAD:
        return f": {store_profile(profile)}"
    return (
        f", {tries} {'times' if tries > 1 else 'time'}; timings spread by "
        f"{100 * max(spread, profile.spread):.0f} %, more than "
        f"{100 * MAX_SPREAD:.0f}: something else keeps it busy. This plan uses them, and they are "
        "not kept; plan again when it is quiet"
    )


def _with_prefill(
    found: MachineProfile, threads: int, model: PlannedModel, where: str
) -> MachineProfile:
    """This machine's profile with what prompts of the model take here: measured now, and kept, if
    it has not that yet, as the profiles from before that was measured."""
    import torch

    from offload.measuring.machine.prefill import with_prefill
    from offload.planning.profile import MAX_SPREAD
    from offload.system.memory import available_cpus

    if found.num_threads > max(threads, available_cpus()):
        return found
    console, start = stderr(), time.perf_counter()
    tries: list[tuple[MachineProfile, float]] = []
    with console.status(f"measuring how fast {model.name} reads prompts here, once"):
        while not tries or (tries[-1][1] > MAX_SPREAD and _may_try(len(tries), start)):
            tries.append(with_prefill(found, torch.device(where), model.shape, model.dtype))
    whole, spread = min(tries, key=lambda measured: measured[1])
    if whole is not found:
        seconds = time.perf_counter() - start
        console.print(
            f"measured how fast it reads prompts in {seconds:.0f} s"
            f"{_kept(whole, spread, len(tries))}",
            style="dim",
            soft_wrap=True,
        )
    return whole


def _with_policy(
    found: MachineProfile, threads: int, model: PlannedModel, policy: Policy, context: int
) -> MachineProfile:
    """This machine's profile with what the policy costs here: measured now and kept if it has not
    that yet."""
    from offload.measuring.machine.policy import with_policy
    from offload.planning.profile import store_profile
    from offload.system.memory import available_cpus

    if found.num_threads > max(threads, available_cpus()):  # more than could run here at once
        return found
    console, start = stderr(), time.perf_counter()
    with console.status(f"measuring what {policy.name} costs here, once"):
        whole = with_policy(found, policy, model.shape, model.dtype, context)
    if whole is not found:
        if whole.is_steady:
            store_profile(whole)
        seconds = time.perf_counter() - start
        console.print(f"measured what {policy.name} costs here in {seconds:.0f} s", style="dim")
    return whole


def _print(found: Plan) -> None:
    request, console = found.request, stdout()
    where, weights = found.profile.cpu, request.model.weights
    packed = f" with weights {weights}" if request.model.weight_share < 1.0 else ""
    if found.profile.device is not None and request.on_gpu:
        where = f"{found.profile.device.name}, {where}"
    console.print(
        f"{request.model.name}, {request.batch_size} x {request.context:,} tokens, "
        f"{request.model.dtype_name}{packed}, {request.policy.name}",
        style="bold",
    )
    console.print(f"{where}, {found.profile.num_threads} threads\n")
    if request.on_gpu:
        _print_heads(found)
    _print_bytes("on the GPU", found.device_bytes, found.device_limit_bytes)
    _print_bytes("on the host", found.host_bytes, found.host_limit_bytes)
    if found.host_memory is not None:
        stdout().print(f"{found.host_memory.explained()}\n", style="dim")
    _print_step(found)
    for note in (*found.notes, *found.step.assumed):
        print_marked("note:", note, "yellow")


def _print_heads(found: Plan) -> None:
    """A line per KV head, a column per layer, in groups of eight."""
    from offload.decode.gpu.placement import LETTERS, Place

    places = found.placement.places
    counts = ", ".join(
        f"{letter} {int((places == place).sum())}"
        for place, letter in sorted(LETTERS.items())
        if place in places
    )
    console = stdout()
    console.print(f"KV heads by layer ({counts})")
    for head in range(places.shape[1]):
        letters = "".join(LETTERS[Place(int(p))] for p in places[:, head])
        groups = " ".join(letters[i : i + 8] for i in range(0, len(letters), 8))
        console.print(f"  head {head:<3} {groups}")
    console.print()


def _print_bytes(title: str, counted: dict[str, int], limit: int | None) -> None:
    from rich.text import Text

    from offload.system.memory import format_bytes

    if not counted:
        return
    table = make_table([title, ""], box=None, padding=(0, 2, 0, 0))
    for name, num_bytes in counted.items():
        if num_bytes:
            table.add_row(name, format_bytes(num_bytes))
    of_limit = "" if limit is None else f" of {format_bytes(limit)}"
    table.add_row(Text("in all", "bold"), f"{format_bytes(sum(counted.values()))}{of_limit}")
    stdout().print(table)
    stdout().print()


def _print_step(found: Plan) -> None:
    step = found.step
    columns = ("layers", "linear", "GPU attends", "waits", "merge", "in all")
    header = ["predicted, ms per step", *columns]
    table = make_table(header, box=None, padding=(0, 2, 0, 0))
    for row in step.breakdown():
        parts = [row[name] for name in ("linear", "gpu", "exposed", "merge", "total")]
        cells = [f"{us / 1e3:.2f}" for us in parts]
        table.add_row(f"heads on {row['kind']}", str(row["layers"]), *cells)
    for name, us in (("last projection, token", step.last), ("launch and end", step.fixed)):
        table.add_row(name, "", "", "", "", "", f"{us / 1e3:.2f}")
    stdout().print(table)
    stdout().print(
        f"\n{step.milliseconds:.2f} ms per step, {step.tokens_per_second:,.1f} tokens/s",
        style="bold",
    )
    prompt = found.request.prompt_tokens or found.request.context
    of_prompts = f"first token after {found.request.batch_size} x {prompt:,} tokens"
    if (prefill := found.prefill) is None:
        stdout().print(f"{of_prompts}: not in this profile; `offload plan` there measures it")
        return
    waits = f", KV to the host {prefill.leaving:.2f}" if prefill.leaving else ""
    stdout().print(
        f"{prefill.total:.2f} s to the {of_prompts}, {prefill.tokens_per_second:,.0f} tokens/s "
        f"(products {prefill.products:.2f}, attention {prefill.attention:.2f}{waits})",
        style="bold",
    )
