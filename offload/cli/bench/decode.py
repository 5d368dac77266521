"""`offload bench decode`: tokens per second by context and policy, compared with other engines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from offload.cli.bench.options import (
    DTYPE_NAMES,
    MODEL_SHAPE_NAMES,
    AsJson,
    BudgetTokens,
    PolicyOptions,
    option_values,
    policy_grid,
    resolved_policies,
)
from offload.cli.bench.traced import print_traced
from offload.cli.console import (
    make_table,
    no_loading_bars,
    print_json,
    progress_bar,
    quiet_transformers,
    running,
    stderr,
    stdout,
)
from offload.cli.options import (
    KV_DTYPE_NAMES,
    WEIGHT_NAMES,
    AnyDevice,
    KVDtype,
    MaxMemory,
    Placement,
    Text,
    Threads,
    Weights,
    check_name,
    comma_separated,
    counts,
    memory_budgets,
    torch_seed,
)

if TYPE_CHECKING:
    from offload.bench.decode.engines import DecodePlan
    from offload.bench.decode.models import DecodeModel
    from offload.measuring.steps.step_timeline import StepTimeline
    from offload.runtime.config import RuntimeConfig

# offload.bench has these, but imports torch; tests compare the two.
ENGINE_NAMES = (
    "offload",
    "graph",
    "transformers",
    "transformers-compiled",
    "transformers-offloaded",
)
DEFAULT_ENGINE_NAMES = tuple(name for name in ENGINE_NAMES if name != "transformers-compiled")
CPU_ENGINE_NAMES = ("offload", "transformers")
BACKEND_NAMES = ("graph", "stream")
DEFAULT_POLICIES = "auto,lychee_cluster,lfps"
# What a machine can do in a few minutes.
GPU_DEFAULTS = ("llama-3.1-8b", "4096,32768,131072")
CPU_DEFAULTS = ("smollm2-135m", "512,2048,7168")
WARM_UP_STEPS = 4
TIMES = "\N{MULTIPLICATION SIGN}"


def decode(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Instead of --shape: a model (folder, .gguf file, hub id, or "
            "smollm2-135m-instruct) that reads real text, within its positions."
        ),
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help=f"Model of random weights, over made keys: {', '.join(MODEL_SHAPE_NAMES)}. "
            rf"\[default: {GPU_DEFAULTS[0]}; on a CPU {CPU_DEFAULTS[0]}]",
        ),
    ] = None,
    text: Text = None,
    contexts: Annotated[
        str | None,
        typer.Option(
            "--context",
            metavar="COUNTS",
            help=f"Tokens of the prompts. \\[default: {GPU_DEFAULTS[1]}; on a CPU "
            f"{CPU_DEFAULTS[1]}]",
        ),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Of host attention, comma-separated. "
            rf"\[default: {DEFAULT_POLICIES}; with --placement, its own]",
        ),
    ] = None,
    budget_tokens: BudgetTokens = 1024,
    option: PolicyOptions = None,
    engines: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help=f"Any of {', '.join(ENGINE_NAMES)}; on a CPU of {', '.join(CPU_ENGINE_NAMES)}. "
            r"\[default: all but transformers-compiled, which compiles for each context]",
        ),
    ] = None,
    device: AnyDevice = None,
    backend: Annotated[
        str | None,
        typer.Option(
            help=f"How GPU and CPU wait for each other: {', '.join(BACKEND_NAMES)}. "
            r"\[default: the fastest that the GPU can do]",
        ),
    ] = None,
    steps: Annotated[
        int, typer.Option(min=WARM_UP_STEPS + 1, help="Tokens decoded after each prompt.")
    ] = 64,
    repeats: Annotated[
        int, typer.Option("--repeats", "-r", min=1, help="Times that we decode these.")
    ] = 2,
    baseline_steps: Annotated[
        int,
        typer.Option(min=1, help="Tokens that transformers decodes: it is slow."),
    ] = 8,
    threads: Threads = None,
    max_memory: MaxMemory = None,
    placement: Placement = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help=rf"{', '.join(DTYPE_NAMES)}. \[default: bfloat16; of a model, its own]",
        ),
    ] = None,
    weights: Weights = "auto",
    kv_dtype: KVDtype = "auto",
    seed: Annotated[
        int,
        typer.Option(min=0, callback=torch_seed, help="Of --shape's weights, keys and queries."),
    ] = 0,
    batch_size: Annotated[
        int, typer.Option(min=1, help="Sequences of --shape that decode together.")
    ] = 1,
    distinct_layers: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help=r"Make N layers of --shape's keys and repeat them; quicker. \[default: all]",
        ),
    ] = None,
    layers: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help=r"Of --shape. \[default: all that it has]"),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Tell what of our step overlaps, and write steps for ui.perfetto.dev. Takes one "
            "policy and one context.",
        ),
    ] = None,
    traced_steps: Annotated[int, typer.Option(min=1, help="Steps that --trace is of.")] = 8,
    as_json: AsJson = False,
) -> None:
    """Time decode steps of a whole model by context, ours under each policy and other engines'.

    [bold]offload[/bold] keeps the KV cache in host memory. [bold]graph[/bold] runs the same layers
    with all of it on the GPU, as one CUDA graph: what the best engine could do with a GPU that
    large. [bold]transformers[/bold] is the stock model as it comes,
    [bold]transformers-compiled[/bold] with a static cache and torch.compile, whose time to compile
    is told as well, [bold]transformers-offloaded[/bold] with the cache it can offload from a GPU.
    All share one process and one set of weights; an engine whose cache does not fit is listed as
    that.

    A step is timed from one token on the host to the next. [bold]--shape[/bold] needs no
    checkpoint: keys and queries have the structure of real attention. With [bold]--layers[/bold] it
    has fewer layers than its name says, where all of them need more memory than there is; give
    --max-memory as much less. Peers attend to everything, which takes as long for random keys, so
    theirs are random; they have the weights' dtype also with [bold]--kv-dtype int8[/bold].

    With [bold]--trace[/bold] some more steps have marks, and their time is shared out:
    [bold]overlapped[/bold] (GPU and CPU work), [bold]waiting[/bold] (the CPU waits for the GPU),
    [bold]exposed[/bold] (the GPU waits for the CPU) and [bold]handshake[/bold] (neither works).
    Then comes what the CPU's workers did in a layer, and how many of them were busy from its
    request to the reply.

    [bold]Examples[/bold]

        offload bench decode

        offload bench decode --context 131072 --engines offload,graph --max-memory 0=24GiB

        offload bench decode smollm2-135m-instruct --device cpu --context 2048,7168 --json

        offload bench decode --policy lfps --context 131072 --engines offload --trace steps.json

        offload plan llama-3.1-8b --policy lychee_cluster --json > plan.json

        offload bench decode --context 131072 --engines offload,graph --placement plan.json
    """
    if shape is not None and model is not None:
        raise typer.BadParameter("give one of --shape and a model", param_hint="--shape")
    if text is not None and model is None:
        raise typer.BadParameter("made keys read no text; give a model", param_hint="--text")
    check_name(shape, MODEL_SHAPE_NAMES, option="--shape")
    check_name(dtype, DTYPE_NAMES, option="--dtype")
    check_name(weights, WEIGHT_NAMES, option="--weights")
    check_name(kv_dtype, KV_DTYPE_NAMES, option="--kv-dtype")
    check_name(backend, BACKEND_NAMES, option="--backend")
    if model is not None and (batch_size > 1 or distinct_layers is not None or layers is not None):
        raise typer.BadParameter(
            "a model reads one text; give --shape",
            param_hint="--batch-size, --distinct-layers or --layers",
        )
    kv_lens = None if contexts is None else sorted(set(counts(contexts, option="--context")))
    chosen = None
    if engines is not None:
        chosen = comma_separated(engines, option="--engines", available=ENGINE_NAMES)
    options = option_values(option or [], option="--option")
    budgets = memory_budgets(max_memory or [])
    if trace is None:
        traced_steps = 0
    elif traced_steps > steps - WARM_UP_STEPS - 1:
        raise typer.BadParameter(
            f"{traced_steps} of {steps} steps cannot be traced: {WARM_UP_STEPS + 1} warm up; raise "
            "--steps",
            param_hint="--traced-steps",
        )

    with running():
        import torch

        from offload.bench.decode.engines import DecodePlan
        from offload.bench.decode.models import check_weights
        from offload.policies.registry import policy_names
        from offload.runtime.config import checked_device, planned_policy, runtime_config

        if policy is None and placement is not None:
            planned = planned_policy(placement)
            names = [planned.name]
            budget_tokens = planned.budget_tokens if planned.selects else budget_tokens
        else:
            names = comma_separated(
                policy or DEFAULT_POLICIES, option="--policy", available=tuple(policy_names())
            )
        policies = policy_grid(names, [budget_tokens], options, option="--option")
        where = checked_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        on_cpu = where.type == "cpu"
        defaults = CPU_DEFAULTS if on_cpu else GPU_DEFAULTS
        engine_names = chosen or list(CPU_ENGINE_NAMES if on_cpu else DEFAULT_ENGINE_NAMES)
        for engine in engine_names:
            if on_cpu and engine not in CPU_ENGINE_NAMES:
                raise ValueError(
                    f"--engines {engine} needs a GPU, but the device is the CPU; there are "
                    f"{', '.join(CPU_ENGINE_NAMES)}"
                )
        if on_cpu and backend is not None:
            raise ValueError(f"--backend {backend} needs a GPU, but the device is the CPU")
        if weights in ("q8", "q4") and not {"offload", "graph"}.issuperset(engine_names):
            raise ValueError(
                f"--weights {weights} is ours alone, and all engines share one set of weights; "
                "give --engines offload" + ("" if on_cpu else ",graph")
            )
        if model is None:
            check_weights(shape or defaults[0], weights)
        with quiet_transformers(verbose=False), no_loading_bars():
            config = runtime_config(
                device=where,
                backend=backend,
                num_threads=threads,
                dtype=dtype or ("bfloat16" if model is None else "auto"),
                weights=weights,
                kv_dtype=kv_dtype,
                max_memory=budgets,
                policy=policies[0],  # each has its turn
                placement=placement,
            )
            policies, why = resolved_policies(policies, config, model, shape or defaults[0])
        plan = DecodePlan(
            policies=policies,
            kv_lens=kv_lens or counts(defaults[1], option="--context"),
            engines=engine_names,
            num_steps=steps,
            repeats=repeats,
            stock_steps=baseline_steps,
            num_threads=threads,
            traced_steps=traced_steps,
        )
        is_one = len(plan.policies) == len(plan.kv_lens) == 1 and "offload" in engine_names
        if trace is not None and not is_one:
            raise ValueError(
                f"--trace is of one policy at one context of ours, got {len(plan.policies)} and "
                f"{len(plan.kv_lens)} for {', '.join(engine_names)}; give --policy and --context"
            )
        of_keys = {"seed": seed, "batch_size": batch_size, "distinct_layers": distinct_layers}
        of_keys |= {"num_layers": layers}
        with quiet_transformers(verbose=False), no_loading_bars():
            document = _measure(
                plan,
                {"weights": weights, "kv_dtype": kv_dtype},
                lambda: _model(model, shape or defaults[0], text, config, plan, of_keys),
                trace,
            )
    document["settings"] |= {"auto": why or None, "max_memory": budgets}
    if as_json:
        print_json(document)
    else:
        _print_table(document)
        if trace is not None:
            print_traced(document["rows"][0])
    if trace is not None:
        stderr().print(f"wrote {trace}")


def _measure(
    plan: DecodePlan,
    kept_as: dict[str, str],
    load: Callable[[], tuple[DecodeModel, dict[str, Any]]],
    trace: Path | None,
) -> dict[str, Any]:
    """Rows of all engines; `load` gives the model and the settings that say which."""
    from offload.bench.decode.engines import describe, measure_engines
    from offload.measuring.steps.chrome_trace import write_chrome_trace
    from offload.system.machine import describe_machine

    machine = describe_machine()
    per_context = len(plan.engines)
    if "offload" in plan.engines:
        per_context += len(plan.policies) - 1
    with progress_bar() as progress:
        whole = progress.add_task("weights", total=len(plan.kv_lens) * per_context)
        part = progress.add_task("", total=None)

        def on_done(what: str, done: int, total: int) -> None:
            progress.update(part, description=what, completed=done, total=total)

        subject, settings = load()
        rows = []

        def on_traced(row: dict[str, Any], timelines: Sequence[StepTimeline]) -> None:
            if trace is not None:
                about = {name: row[name] for name in ("policy", "policy_options", "kv_len")}
                about |= settings | {"gpus": machine["gpus"]}
                write_chrome_trace(trace, timelines, metadata=about)

        for row in measure_engines(subject, plan, on_done, on_traced):
            rows.append(row)
            # As soon as it is there: a large context takes minutes.
            progress.console.print(describe(row), style="dim", soft_wrap=True)
            progress.update(whole, advance=1, description="engines")
        settings["dtype"] = str(subject.stock.dtype).removeprefix("torch.")
    settings |= {
        **kept_as,
        "contexts": list(plan.kv_lens),
        "steps": plan.num_steps,
        "repeats": plan.repeats,
        "peer_steps": plan.stock_steps,
    }
    return {"machine": machine, "settings": settings, "rows": rows}


def _model(
    model: str | None,
    shape: str,
    text: Path | None,
    config: RuntimeConfig,
    plan: DecodePlan,
    of_keys: dict[str, Any],
) -> tuple[DecodeModel, dict[str, Any]]:
    """The model, and the settings that say which."""
    import torch

    from offload.bench.decode.models import RandomModel, TextModel
    from offload.bench.eval.haystack import prose_text
    from offload.runtime.backends import choose_backend

    device = torch.device(config.device)
    described = {
        "model": model,
        "shape": None if model else shape,
        "device": config.device,
        "backend": None if device.type == "cpu" else choose_backend(config.backend, device),
        "threads": config.num_threads,
    }
    if model is not None:
        policies = plan.policies if "offload" in plan.engines else ()
        found = TextModel(model, policies, config, text=prose_text(text, "--text"))
        return found, described | {"text": str(text or "docstrings of the standard library")}
    if device.index:
        raise ValueError(f"--device {device}: made keys are for the first GPU; use --device cuda")
    if "cpu" in config.max_memory:
        raise ValueError("--max-memory cpu: made caches take what they take; name a model instead")
    return RandomModel(shape, config, longest=max(plan.kv_lens), **of_keys), described | of_keys


def _weights_of(settings: dict[str, Any]) -> str:
    """The dtype, and what weights are kept as instead."""
    packed = settings.get("weights", "auto")
    return str(settings["dtype"]) + (f" with weights {packed}" if packed in ("q8", "q4") else "")


def _print_table(document: dict[str, Any]) -> None:
    settings, rows = document["settings"], document["rows"]
    where = settings["device"]
    if settings["backend"]:
        where += f", backend {settings['backend']}"
    first = rows[0]
    of_first = first.get("label", first["engine"])
    table = make_table(
        ("context", "engine", "tokens/s", "ms per token", "time", "KV on host", "KV on GPU"),
        words=(1,),
        title=f"{settings['model'] or settings['shape']}, {_weights_of(settings)}, "
        f"batch {first['batch_size']}, {where}",
        caption=f"±: half of p10 to p90. time: of {of_first}'s at that context.",
    )
    for kv_len, of_context in groupby(rows, key=lambda row: row["kv_len"]):
        together = list(of_context)
        base = together[0]["milliseconds"]
        for index, row in enumerate(together):
            cells = _cells(row, base, names_kv=settings["kv_dtype"] == "int8")
            table.add_row("" if index else f"{kv_len:,}", *cells)
        table.add_section()
    stdout().print(table)


def _cells(row: dict[str, Any], base: float | None, *, names_kv: bool) -> list[str]:
    from offload.system.memory import format_bytes

    name = row["engine"] + (f", {row['label']}" if row["policy"] else "")
    name += f", KV {row['kv_dtype']}" * names_kv
    if row.get("compile_seconds") is not None:
        name += f" in {row['compile_seconds']:.0f} s"
    if row["milliseconds"] is None:
        return [name, "", str(row["missing"]), "", "", ""]
    spread = (row["milliseconds_p90"] - row["milliseconds_p10"]) / 2
    sizes = [row["memory"].get(place) for place in ("kv_host", "kv_device")]
    return [
        name,
        f"{row['tokens_per_second']:,.1f}",
        f"{row['milliseconds']:.2f} ± {spread:.2f}",
        "" if base is None else f"{row['milliseconds'] / base:.2f}{TIMES}",
        *("" if size is None else format_bytes(size) for size in sizes),
    ]
