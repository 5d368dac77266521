"""`offload eval structured`: questions whose answers stand in JSON, code and tables."""

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

# offload.bench.eval.structured has these, but is imported when it is needed; tests compare the two.
TASK_NAMES = ("json", "code", "table")


def register(app: typer.Typer) -> None:
    """Add the command to `offload eval`."""
    app.command(cls=Command)(structured)


def structured(
    model: opt.Model = opt.DEFAULT_MODEL,
    policy: opt.Policies = "quest,lychee_cluster",
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
    fields: Annotated[
        int,
        typer.Option(
            min=1,
            max=8,
            help="Values of each object, function or row, all asked for: more are harder.",
            rich_help_panel=opt.TASK_PANEL,
        ),
    ] = 1,
    samples: opt.Samples = 20,
    seed: opt.Seed = 0,
    chat_template: opt.ChatTemplate = None,
    dtype: opt.Dtype = "bfloat16",
    device: opt.Device = "cpu",
    threads: opt.Threads = None,
    page_tokens: opt.PageTokens = 256,
    resume: opt.Resume = None,
    output: opt.Output = "table",
    as_json: opt.AsJson = False,
    verbose: opt.Verbose = False,
) -> None:
    """Ask for the values of one object, function or row, among many alike.

    The text is JSON, Python code or a Markdown table, all generated, and the answer begins with
    what stands before the first value. This is the question of LycheeCluster's pilot study (its
    Figure 2): does it help to select along the text's structure?

    [bold]Examples[/bold]

        offload eval structured --context 2048 --samples 5

        offload eval structured --tasks json --policy quest --option quest.chunks=false,true

        offload eval structured --budget-tokens 256,512 --resume structured.jsonl -o md
    """
    names = [*TASK_NAMES]
    if tasks != "all":
        names = comma_separated(tasks, option="--tasks", available=TASK_NAMES)
    all_lengths = counts(lengths, option="--context")
    shown = opt.output_format(output, as_json)
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
        from offload.bench.eval.prompt import prompt_counter
        from offload.bench.eval.structured import structured_samples

        count_prompt = prompt_counter(tokenizer, chat=chat)
        return [
            sample
            for length in all_lengths
            for task in names
            for sample in structured_samples(
                task,
                length,
                samples,
                num_fields=fields,
                seed=seed,
                count_prompt=count_prompt,
            )
        ]

    with running(verbose=verbose):
        document = answer_all(
            "structured",
            setup,
            make_samples,
            lengths=all_lengths,
            chat_template=chat_template,
            resume=resume,
            settings={
                "tasks": names,
                "lengths": all_lengths,
                "fields": fields,
                "samples": samples,
                "seed": seed,
            },
        )
        print_document(document, shown)
