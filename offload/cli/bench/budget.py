"""`offload bench budget`: how many tokens each head gets and needs, and what that costs."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from offload.cli.bench.options import (
    OldModelOption,
    Threads,
    check_name,
    given_model,
    option_values,
    policy_grid,
)
from offload.cli.console import no_loading_bars, print_json, quiet_transformers, running, stderr
from offload.cli.options import Scalar, comma_separated, counts, key_values, scalar, shares
from offload.policies.registry import available_policies

if TYPE_CHECKING:
    from offload.bench.budget.measure import BudgetMeasurement, BudgetSettings
    from offload.loading.checkpoint import Checkpoint
    from offload.policies import Policy
    from offload.runtime.config import RuntimeConfig

DEFAULT_MODEL = "smollm2-135m-instruct"
OUTPUTS = ("table", "json", "md")
_OWN = {
    "policy": "use --policy",
    "dtype": "use --dtype",
    "num_threads": "use --threads",
    "device": "always cpu, as a GPU does not tell what it selects",
}
ADAPTIVE = "hard_kv"  # the policy whose budget is a share of the attention
_read = functools.partial(typer.Option, rich_help_panel="What is read")
_compared = functools.partial(typer.Option, rich_help_panel="What is compared")
_output = functools.partial(typer.Option, rich_help_panel="Output")


def budget(
    model: Annotated[
        str, typer.Argument(help="Folder, .gguf file, hub id, or an embedded model's name.")
    ] = DEFAULT_MODEL,
    old_model: OldModelOption = None,
    text: Annotated[
        Path | None,
        _read(
            metavar="PATH",
            help=r"A file, or a folder of .txt and .md files. \[default: docstrings of Python's "
            r"library]",
            show_default=False,
        ),
    ] = None,
    length: Annotated[
        int, _read("--context", "--length", min=1, help="Tokens read before decoding.")
    ] = 4096,
    steps: Annotated[int, _read(min=1, help="Next tokens of the text to decode.")] = 64,
    sample_every: Annotated[
        int, _read(min=1, metavar="N", help="Compare every n-th step with exact attention.")
    ] = 4,
    generate: Annotated[
        int,
        _read(
            min=0,
            metavar="N",
            help="Then let every policy generate so many tokens, and tell the error by quarter; "
            "0 for none. Keeps a second copy of the KV cache meanwhile.",
        ),
    ] = 64,
    temperature_every: Annotated[
        int,
        _read(
            metavar="N",
            help="After every N of these, at least 64, solve again for the temperatures of a "
            "policy that has any, and compare them with the prompt's.",
        ),
    ] = 64,
    policy: Annotated[
        str,
        _compared(
            metavar="NAMES",
            help=f"Comma-separated: {', '.join(available_policies())}. "
            "Full attention is always measured: it is the reference. While they are timed, what "
            "all of them keep of the text is in memory at once.",
        ),
    ] = f"{ADAPTIVE},exact_topk",
    top_p: Annotated[
        str,
        _compared(
            metavar="SHARES",
            help=f"Shares of the attention at which {ADAPTIVE} cuts, such as 0.9,0.95. Heads of "
            "fixed budgets are asked how much of what they attend to the first of them needs.",
        ),
    ] = "0.95",
    max_tokens: Annotated[
        int | None,
        _compared(
            min=1,
            help=f"The most tokens that a head of {ADAPTIVE} may take: the budget_tokens of its "
            "inner policy, which so has more candidates. "
            r"\[default: half of --context]",
            show_default=False,
        ),
    ] = None,
    budget_tokens: Annotated[
        str,
        _compared(metavar="COUNTS", help="Tokens per KV head of the policies with a fixed budget."),
    ] = "128,256,512,1024",
    option: Annotated[
        list[str] | None,
        _compared(
            metavar="[POLICY.]KEY=VALUES",
            help="An option of one or of all policies; each of several values is measured, such as "
            f"{ADAPTIVE}.inner=exact_topk,sketch. Repeatable.",
        ),
    ] = None,
    evictions: Annotated[
        str,
        _compared(
            metavar="NAMES",
            help="Then decode the next --generate tokens of the text within --host-share of the "
            "bytes, with these evictions, comma-separated: reread (condense_by=rereading), fitted, "
            "means, dropped (condense_by=attention, without fitting, without merging), snapkv, "
            "rkv, snapkv-fitted, rkv-fitted.",
        ),
    ] = "",
    host_share: Annotated[
        float, _compared(metavar="SHARE", help="Of the bytes of all keys and values.")
    ] = 0.25,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16, float32 or auto.")] = "bfloat16",
    threads: Threads = None,
    runtime_option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="Of OffloadedModel.from_pretrained, such as page_tokens=64. Repeatable.",
        ),
    ] = None,
    output: Annotated[str, _output("--output", "-o", help=", ".join(OUTPUTS))] = "table",
    as_json: Annotated[bool, _output("--json", help="The same as -o json.")] = False,
    plot: Annotated[
        Path | None,
        _output(
            metavar="PATH",
            help="Draw maps of heads, utilisation and errors, as .png, .svg or .pdf (needs "
            "matplotlib).",
        ),
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="More on stderr.")] = False,
) -> None:
    """Show how many tokens each head attends to, how many it needed, and what that costs.

    A fixed budget gives every head the same number of tokens; [bold]hard_kv[/bold] gives each the
    fewest that hold a share of its attention ([bold]--top-p[/bold]), up to a cap
    ([bold]--max-tokens[/bold]). The model reads [bold]--context[/bold] tokens of real text, is fed
    the next [bold]--steps[/bold] of the same text under every policy, and its heads are compared
    with exact attention.

    The first table sets tokens against output error, and says how much of the budget is used
    (utilisation) and how many tokens a fixed budget takes for the same error; with time per token,
    memory, and both multiplied. The second says how often what heads attend to reaches top-p, how
    much of it is then [bold]needed[/bold], and how far they are from the true count. Then budgets
    by layer and head, and the error by quarter of [bold]--generate[/bold] tokens: what grows there,
    drifts; and over page bounds ([bold]--option hard_kv.inner=quest[/bold]) how temperatures do.

    [bold]Examples[/bold]

        offload bench budget

        offload bench budget --top-p 0.85,0.9,0.95,0.98 --option hard_kv.inner=exact_topk

        offload bench budget --policy hard_kv,lychee_cluster,exact_topk --max-tokens 1024

        offload bench budget --text book.txt --context 7168 --generate 512 --plot budget.png --json

        offload bench budget --text book.txt --generate 4096 --evictions reread,fitted,snapkv,rkv
    """
    model = given_model(model, old_model, DEFAULT_MODEL) or DEFAULT_MODEL
    names = comma_separated(policy, option="--policy", available=tuple(available_policies()))
    check_name("--output", output, OUTPUTS)
    top_shares = shares(top_p, option="--top-p")
    budgets = counts(budget_tokens, option="--budget-tokens")
    options = option_values(option or [], option="--option")
    _check_options(names, options, top_shares, max_tokens)
    runtime: dict[str, Any] = {"dtype": dtype, "device": "cpu", "num_threads": threads}
    runtime |= _runtime_options(runtime_option or [])

    with running(verbose=verbose):
        from offload.bench.budget.measure import BudgetSettings, check_budgets
        from offload.bench.budget.picture import plot_budgets
        from offload.bench.selection.output import check_plot
        from offload.loading.checkpoint import check_checkpoint
        from offload.loading.names import resolve_folder

        if ADAPTIVE in names:
            cap = max_tokens or length // 2
            options |= {f"{ADAPTIVE}.top_p": [*top_shares], f"{ADAPTIVE}.budget_tokens": [cap]}
        policies = _policies(names, budgets, options)
        settings = BudgetSettings(
            length=length,
            steps=steps,
            sample_every=sample_every,
            generate=generate,
            temperature_every=temperature_every,
            top_p=top_shares[0],
        )
        checkpoint = check_checkpoint(resolve_folder(model))
        bounded = _evictions(evictions, host_share, runtime, settings)
        check_budgets(policies, settings, checkpoint.shape)
        if bounded:
            _check_bounds(host_share, bounded, runtime, settings, checkpoint)
        if plot is not None:
            check_plot(plot)
        with quiet_transformers(verbose=verbose):
            tokens = _tokens(model, text, settings, settings.generate + 1 if bounded else 0)
            rows = _measure(model, tokens, runtime, policies, settings)
            within = _measure_evictions(model, tokens, runtime, bounded, host_share, settings)
        output = "json" if as_json else output
        _print(rows, within, settings, {"model": model, "text": text, **runtime}, output)
        if plot is not None:
            plot_budgets(rows, plot, f"{model}, {length:,} tokens, {steps} steps")
            stderr().print(f"wrote {plot}")


def _check_options(
    names: Sequence[str],
    options: Mapping[str, Any],
    top_shares: Sequence[float],
    max_tokens: int | None,
) -> None:
    """A usage error for what has an option of its own, or none of the policies would take."""
    for key in options:
        owner, _, name = key.rpartition(".")
        if name in ("budget_tokens", "max_tokens"):
            raise typer.BadParameter("use --budget-tokens or --max-tokens", param_hint="--option")
        if name == "top_p" and owner in ("", ADAPTIVE):
            raise typer.BadParameter("use --top-p for it", param_hint="--option")
    if ADAPTIVE not in names:
        further = ",".join(map(str, top_shares[1:]))
        for option, given in (("--max-tokens", max_tokens), ("--top-p", further)):
            if given:
                raise typer.BadParameter(
                    f"{given} is for {ADAPTIVE}, which is not among --policy {','.join(names)}",
                    param_hint=option,
                )


def _runtime_options(pairs: list[str]) -> dict[str, Scalar]:
    """A usage error for one that has an option of its own."""
    options = {
        key: scalar(value) for key, value in key_values(pairs, option="--runtime-option").items()
    }
    for key, instead in _OWN.items():
        if key in options:
            raise typer.BadParameter(f"{key}: {instead}", param_hint="--runtime-option")
    return options


def _evictions(
    names: str, share: float, runtime: Mapping[str, Any], settings: BudgetSettings
) -> list[str]:
    """A usage error for what is none, or cannot be compared; none of "", but for a bad share."""
    from offload.bench.budget.bounded_text import check_share
    from offload.bench.budget.drift import QUARTERS
    from offload.bench.budget.evictions import EVICTIONS

    try:
        check_share(share)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--host-share") from error
    if not names:
        return []
    found = comma_separated(names, option="--evictions", available=tuple(EVICTIONS))
    for key in ("host_bytes_per_sequence", "condense_by", "condensed_share"):
        if key in runtime:
            raise typer.BadParameter(
                f"{key} is not for --evictions, which have --host-share",
                param_hint="--runtime-option",
            )
    fewest = QUARTERS * settings.sample_every + 1
    if settings.generate < fewest:
        raise typer.BadParameter(
            f"--evictions with --sample-every {settings.sample_every} need at least {fewest} "
            f"tokens, one step to compare in each quarter, got {settings.generate}",
            param_hint="--generate",
        )
    return list(dict.fromkeys(found))


def _check_bounds(
    share: float,
    evictions: Sequence[str],
    runtime: Mapping[str, Any],
    settings: BudgetSettings,
    checkpoint: Checkpoint,
) -> None:
    """A usage error for a share of the text's bytes that is too little for a sequence."""
    from offload.bench.budget.bounded_text import check_text_bound

    try:
        num_tokens = settings.length + settings.generate
        for eviction in evictions:
            check_text_bound(checkpoint, _config(runtime), num_tokens, share, eviction)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--host-share") from error


def _config(runtime: Mapping[str, Any]) -> RuntimeConfig:
    from offload.runtime.config import runtime_config

    try:
        return runtime_config(**runtime)
    except TypeError as error:  # one that it does not know
        raise typer.BadParameter(str(error), param_hint="--runtime-option") from error


def _policies(
    names: Sequence[str], budgets: Sequence[int], options: dict[str, list[Any]]
) -> list[Policy]:
    """Full attention first; a usage error for numbers that a policy refuses."""
    others = [name for name in names if name != "full"]
    try:
        policies = policy_grid(["full", *others], budgets, options, option="--option")
    except ValueError as error:
        hint = "--budget-tokens, --max-tokens or --option"
        raise typer.BadParameter(str(error), param_hint=hint) from error
    return list(dict.fromkeys(policies))


def _tokens(model: str, text: Path | None, settings: BudgetSettings, further: int) -> list[int]:
    """Of the text: with so many after `length` as are needed, or as `further` says."""
    from offload.bench.budget.measure import check_text
    from offload.bench.eval.haystack import prose_text
    from offload.bench.eval.perplexity import text_tokens
    from offload.loading.names import load_tokenizer

    beginning, tokens = text_tokens(prose_text(text, "--text"), load_tokenizer(model))
    tokens = [*beginning, *tokens]
    check_text(len(tokens), settings)
    if len(tokens) < settings.length + further:
        raise ValueError(
            f"the text has {len(tokens):,} tokens, but --context {settings.length:,} and "
            f"--generate {settings.generate:,} with --evictions need "
            f"{settings.length + further:,}; give a longer --text, or lower --context or --generate"
        )
    return tokens


def _measure(
    model: str,
    tokens: Sequence[int],
    runtime: Mapping[str, Any],
    policies: Sequence[Policy],
    settings: BudgetSettings,
) -> list[BudgetMeasurement]:
    from offload.bench.budget.measure import measure_budgets
    from offload.cli.eval.scored import progress_bar
    from offload.runtime.shared_model import SharedModel

    config = _config(runtime)
    # No thread of its own, which would draw during steps that are timed.
    with no_loading_bars(), progress_bar(auto_refresh=False) as progress:
        task = progress.add_task("loading", total=len(policies) * settings.decode_steps)
        shared = SharedModel(model, policies, config)
        show = functools.partial(progress.update, task, refresh=True)
        show(description=f"reading {settings.length:,} tokens")
        return measure_budgets(
            shared,
            policies,
            tokens,
            settings,
            on_policy=lambda label: show(description=label),
            on_progress=lambda done: show(advance=done),
        )


def _measure_evictions(
    model: str,
    tokens: Sequence[int],
    runtime: Mapping[str, Any],
    evictions: Sequence[str],
    share: float,
    settings: BudgetSettings,
) -> list[dict[str, Any]]:
    from offload.bench.budget.bounded_text import measure_evictions
    from offload.cli.eval.scored import progress_bar

    if not evictions:
        return []
    with no_loading_bars(), progress_bar() as progress:
        total = (1 + len(evictions)) * (settings.generate - 1)
        task = progress.add_task("loading", total=total)
        return measure_evictions(
            model,
            tokens[: settings.length + settings.generate + 1],
            settings.length,
            evictions,
            share=share,
            sample_every=settings.sample_every,
            on_eviction=lambda name: progress.update(task, description=name),
            on_progress=lambda done: progress.update(task, advance=done),
            **runtime,
        )


def _print(
    rows: Sequence[BudgetMeasurement],
    within: Sequence[dict[str, Any]],
    settings: BudgetSettings,
    run: dict[str, Any],
    output: str,
) -> None:
    from dataclasses import asdict

    from offload.bench.budget import output as tables
    from offload.bench.eval.haystack import described
    from offload.cli.eval.scored import print_tables
    from offload.system.machine import describe_machine

    if output == "json":
        run |= {"text": described(run["text"], "--text"), **asdict(settings)}
        found = [row.as_json() for row in rows]
        document = {"machine": describe_machine(), "settings": run, "rows": found}
        print_json(document | ({"evictions": within} if within else {}))
        return
    legend = tables.LEGEND
    title = f"{run['model']}, {settings.length:,} tokens, {settings.steps:,} decode steps"
    shown = {title: tables.main_table(rows), "What heads needed": tables.needed_table(rows)}
    for row in tables.adaptive_of(rows):
        name = f"{row.label}, {tables.budget_of(row)}: tokens of the heads of each layer"
        shown[name] = tables.layer_table(row)
    if settings.generate:
        name = f"Output error of {settings.generate:,} generated tokens, by quarter"
        shown[name] = tables.drift_table(rows)
        if any(row.drift.temperatures for row in rows):
            name = "Temperatures solved for again, of those of the prompt"
            shown[name] = tables.temperature_table(rows)
            legend += tables.TEMPERATURE_LEGEND
    if within:
        share = within[0]["share"]
        name = f"The text's next {settings.generate:,} tokens within {share:.0%} of the bytes"
        shown[name] = tables.eviction_table(within)
        legend += tables.EVICTION_LEGEND
    print_tables(shown, legend, output)
