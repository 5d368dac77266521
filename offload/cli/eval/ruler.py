"""`offload eval ruler`: RULER's tasks under full attention and under policies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from offload.cli.console import running
from offload.cli.eval import options as opt
from offload.cli.eval.scored import Setup, answer_all, print_document
from offload.cli.options import comma_separated, counts
from offload.cli.spelling import Command

if TYPE_CHECKING:
    from offload.bench.eval.sample import Sample

# offload.bench.eval.ruler has these, but imports torch; tests compare the two.
TASK_NAMES = (
    "niah_single_1",
    "niah_single_2",
    "niah_single_3",
    "niah_multikey_1",
    "niah_multikey_2",
    "niah_multikey_3",
    "niah_multivalue",
    "niah_multiquery",
    "vt",
    "cwe",
    "fwe",
)
PROSE_NAMES = TASK_NAMES[1:4] + TASK_NAMES[6:8]  # whose needles are in prose


def register(app: typer.Typer) -> None:
    """Add the command to `offload eval`."""
    app.command(cls=Command)(ruler)


def ruler(
    model: opt.Model = opt.DEFAULT_MODEL,
    policy: opt.Policies = "auto",
    budget_tokens: opt.BudgetTokens = "1024",
    option: opt.PolicyOptions = None,
    host_share: opt.HostShares = "",
    evictions: opt.Evictions = opt.DEFAULT_EVICTIONS,
    lengths: opt.Lengths = "4096",
    tasks: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help=f"Comma-separated: {', '.join(TASK_NAMES)}; or all.",
            rich_help_panel=opt.TASK_PANEL,
        ),
    ] = "all",
    samples: opt.Samples = 20,
    haystack: opt.Haystack = None,
    seed: opt.Seed = 0,
    chat_template: opt.ChatTemplate = None,
    decode_last: opt.DecodeLast = 0,
    dtype: opt.Dtype = "bfloat16",
    device: opt.Device = "cpu",
    threads: opt.Threads = None,
    page_tokens: opt.PageTokens = 256,
    resume: opt.Resume = None,
    output: opt.Output = "table",
    as_json: opt.AsJson = False,
    verbose: opt.Verbose = False,
) -> None:
    """Score policies on RULER, the tasks that need no download.

    Needles in a haystack ([bold]niah[/bold]: one, among others, with several values or questions),
    variable tracking ([bold]vt[/bold]), common and frequent words ([bold]cwe, fwe[/bold]), with the
    published templates and scores: the share of the right answers that the model's answer has.
    Prompts and scores are those of lm-eval for one length and the same seed, but for the prose,
    which is text of yours or of Python's library instead of a download.

    The mean is over tasks and lengths in which full attention scores at all; the interval is 95 %
    of the difference to full attention on the same prompts.

    [bold]Examples[/bold]

        offload eval ruler --tasks niah_single_1,niah_multikey_1 --context 2048 --samples 5

        offload eval ruler --policy lfps,quest --budget-tokens 256,1024 --resume ruler.jsonl

        offload eval ruler --policy lychee_cluster --host-share 0.5,0.25 --page-tokens 64

        offload eval ruler ./Qwen3-0.6B --context 4096,16384 --haystack books/ --json > ruler.json
    """
    names = [*TASK_NAMES]
    if tasks != "all":
        names = comma_separated(tasks, option="--tasks", available=TASK_NAMES)
    all_lengths = counts(lengths, option="--context")
    shown = opt.output_format(output, as_json)
    has_prose = any(name in PROSE_NAMES for name in names)
    setup = Setup(
        model,
        opt.policies_of(policy, budget_tokens, option),
        opt.bounds_of(host_share, evictions, device),
        dtype,
        device,
        threads,
        page_tokens,
        verbose,
    )

    def make_samples(tokenizer: Any, chat: bool) -> list[Sample]:
        from offload.bench.eval.haystack import prose_words
        from offload.bench.eval.prompt import text_counter
        from offload.bench.eval.ruler import ruler_samples

        prose = prose_words(haystack) if has_prose else []
        count_tokens = text_counter(tokenizer)
        return [
            sample
            for length in all_lengths
            for task in names
            for sample in ruler_samples(
                task, length, samples, seed=seed, count_tokens=count_tokens, prose=prose
            )
        ]

    with running(verbose=verbose):
        from offload.bench.eval.haystack import described

        document = answer_all(
            "ruler",
            setup,
            make_samples,
            lengths=all_lengths,
            chat_template=chat_template,
            decode_last=decode_last,
            resume=resume,
            settings={
                "tasks": names,
                "lengths": all_lengths,
                "samples": samples,
                "seed": seed,
                "haystack": described(haystack) if has_prose else None,
            },
        )
        print_document(document, shown)
