"""`offload bench quality`: how good the selections of the policies are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from offload.cli.bench.options import AsJson, PolicyOptions, option_values, policy_grid
from offload.cli.console import (
    make_table,
    no_loading_bars,
    print_json,
    progress_bar,
    quiet_transformers,
    running,
    stdout,
)
from offload.cli.eval import options as opt
from offload.cli.eval.scored import Setup
from offload.cli.options import (
    DEFAULT_MODEL,
    ModelName,
    PageTokens,
    Text,
    Threads,
    Verbose,
    comma_separated,
    counts,
)
from offload.policies.registry import available_policies

if TYPE_CHECKING:
    from offload.bench.quality.measure import QualityMeasurement, QualitySettings


@dataclass(frozen=True)
class Read:
    """The text, and how much of it."""

    panel: ClassVar[str] = "What is read"
    text: Text = None
    context: Annotated[int, typer.Option(min=1, help="Tokens read before decoding.")] = 6144
    steps: Annotated[int, typer.Option(min=1, help="Next tokens of the text to decode.")] = 1000
    sample_every: Annotated[
        int, typer.Option(min=1, metavar="N", help="Compare every n-th step with exact attention.")
    ] = 20


@dataclass(frozen=True)
class Compared:
    """The policies, and their budgets and options."""

    panel: ClassVar[str] = opt.Compared.panel
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help=f"Comma-separated: {', '.join(available_policies())}. "
            r"Full attention is always measured: it is the reference. \[default: all]",
        ),
    ] = None
    budget_tokens: Annotated[
        str, typer.Option(metavar="COUNTS", help="Tokens attended per KV head, such as 256,1024.")
    ] = "1024"
    option: PolicyOptions = None


@dataclass(frozen=True)
class Bounds(opt.Bounds):
    """Within which full attention decodes the same text."""

    host_share: Annotated[
        str,
        typer.Option(
            metavar="SHARES",
            help="Then decode the same text under full attention within these shares of the bytes "
            "of its keys and values (host_bytes_per_sequence), such as 0.5,0.25.",
        ),
    ] = ""


def quality(
    model: ModelName = DEFAULT_MODEL,
    *,
    read: Read,
    compared: Compared,
    bounds: Bounds,
    page_tokens: PageTokens = 256,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16, float32 or auto.")] = "bfloat16",
    threads: Threads = None,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Compare what policies select with what exact attention would have wanted.

    The model reads [bold]--context[/bold] tokens of real text with exact attention and is then fed
    the next tokens of the same text, whatever it would have said itself. Every policy so sees
    the same tokens, and its next-token distributions can be set against full attention's.

    Columns: [bold]attended[/bold] tokens per KV head, [bold]candidates[/bold] (keys scored
    exactly), [bold]overlap[/bold] with the true top-k of the same size, attention [bold]mass[/bold]
    covered without the sinks, also relative to exact top-k, L2 [bold]error[/bold] of the attention
    output, [bold]KL[/bold] divergence, [bold]perplexity[/bold] and its change; then how stable the
    selection is from step to step ([bold]Jaccard[/bold], and the share chosen in the last 32 steps)
    and decoded tokens/s.

    [bold]Examples[/bold]

        offload bench quality

        offload bench quality --steps 100 --policy quest,lfps --budget-tokens 256,1024

        offload bench quality --policy hard_kv,exact_topk --option hard_kv.top_p=0.85,0.9,0.95

        offload bench quality --policy full --host-share 0.25 --evictions reread,fitted,snapkv

        offload bench quality --text book.txt --json > quality.json
    """
    names = list(available_policies())
    if compared.policy is not None:
        names = comma_separated(compared.policy, option="--policy", available=tuple(names))
    budgets = counts(compared.budget_tokens, option="--budget-tokens")
    options = option_values(compared.option or [], option="--option")
    within, text = bounds.on("cpu"), read.text

    with running(verbose=verbose):
        from offload.bench.eval.haystack import described
        from offload.bench.quality.measure import QualitySettings, exact_topk_of
        from offload.policies.registry import make_policy
        from offload.system.machine import describe_machine

        grid = policy_grid(names, budgets, options, option="--option")
        policies = list(dict.fromkeys([make_policy("full"), *grid]))
        runs = opt.Runs(dtype, threads=threads, page_tokens=page_tokens)
        setup = Setup(model, policies, within, runs, verbose)
        settings = QualitySettings(
            context=read.context,
            steps=read.steps,
            sample_every=read.sample_every,
            exact_topk=exact_topk_of(options),
        )
        source = described(text, "--text")
        with quiet_transformers(verbose=verbose):
            rows = _measure(setup, settings, text)
        if as_json:
            run = {**setup.described(), "text": source}
            run |= {name: getattr(settings, name) for name in ("context", "steps", "sample_every")}
            found = [asdict(row) for row in rows]
            print_json({"machine": describe_machine(), "settings": run, "rows": found})
        else:
            of_text = "docstrings of the standard library" if text is None else text
            title = f"{model}, {read.context:,} tokens of {of_text}, {read.steps:,} decode steps"
            _print(rows, title, has_bounds=bool(within))


def _measure(setup: Setup, settings: QualitySettings, text: Path | None) -> list[Any]:
    from offload.bench.eval.haystack import prose_text
    from offload.bench.eval.perplexity import text_tokens
    from offload.bench.quality.measure import check_quality, measure_quality
    from offload.loading.names import load_tokenizer
    from offload.runtime.shared_model import SharedModel

    beginning, tokens = text_tokens(prose_text(text, "--text"), load_tokenizer(setup.model))
    tokens = [*beginning, *tokens]
    max_context = setup.checkpoint.shape.max_context
    check_quality(setup.policies, len(tokens), settings, max_context)
    full = replace(setup, policies=setup.policies[:1])
    full.check_bounds(settings.text_tokens - 1)
    runs = len(setup.policies) + len(setup.bounds)
    with no_loading_bars(), progress_bar() as progress:
        task = progress.add_task("loading", total=runs * settings.decode_steps)
        return measure_quality(
            SharedModel(setup.model, setup.policies, setup.config()),
            setup.policies,
            tokens,
            settings,
            setup.bounds,
            on_policy=lambda label: progress.update(task, description=label),
            on_progress=lambda done: progress.advance(task, done),
        )


def _print(rows: Sequence[QualityMeasurement], title: str, *, has_bounds: bool) -> None:
    from offload.bench.quality.output import BOUND_LEGEND, COLUMNS, LEGEND, cells

    header = ["policy", *(name for name, _, _ in COLUMNS)]
    lines = [[row.label, *cells(asdict(row))] for row in rows]
    legend = LEGEND + BOUND_LEGEND * has_bounds
    console = stdout()
    table = make_table(header, lines, title=title, caption=legend)
    unbounded = console.options.update(max_width=10_000)
    if console.measure(table, options=unbounded).minimum <= console.width:
        console.print(table)
        return
    half = header.index("KL")
    parts: tuple[tuple[range, dict[str, Any]], ...] = (
        (range(1, half), {"title": title}),
        (range(half, len(header)), {"caption": legend}),
    )
    plain: dict[str, Any] = {"overflow": "fold", "box": None, "padding": (0, 1, 0, 0)}
    for columns, more in parts:
        shown = [[line[0], *(line[i] for i in columns)] for line in (header, *lines)]
        console.print(make_table(shown[0], shown[1:], **plain, **more))
        console.print()
