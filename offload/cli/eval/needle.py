"""`offload eval needle`: one needle at each depth and length."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from offload.cli.console import running, stderr
from offload.cli.eval import options as opt
from offload.cli.eval.scored import Setup, answer_all, print_document
from offload.cli.options import counts
from offload.cli.spelling import Command

if TYPE_CHECKING:
    from offload.bench.eval.sample import Sample


def register(app: typer.Typer) -> None:
    """Add the command to `offload eval`."""
    app.command(cls=Command)(needle)


def needle(
    model: opt.Model = opt.DEFAULT_MODEL,
    policy: opt.Policies = "auto",
    budget_tokens: opt.BudgetTokens = "1024",
    option: opt.PolicyOptions = None,
    host_share: opt.HostShares = "",
    evictions: opt.Evictions = opt.DEFAULT_EVICTIONS,
    lengths: opt.Lengths = "2048,4096,8192",
    depths: Annotated[
        str,
        typer.Option(
            metavar="PER CENT",
            help="Where the needle stands: 0 is the text's beginning, 100 its end.",
            rich_help_panel=opt.TASK_PANEL,
        ),
    ] = "0,25,50,75,100",
    samples: opt.Samples = 5,
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
    plot: opt.Plot = None,
    verbose: opt.Verbose = False,
) -> None:
    """Find a number in prose, at every depth and length.

    One sentence with a seven-digit number is hidden in text, and asked for. Samples differ in the
    text and the number; those of one length are the same at every depth.

    [bold]Examples[/bold]

        offload eval needle --context 2048,4096 --depths 10,50,90 --samples 3

        offload eval needle --policy quest,lfps --budget-tokens 256 --plot needle.png

        offload eval needle ./Qwen3-0.6B --context 16384,32768 --haystack book.txt --json
    """
    places = counts(depths, option="--depths", least=0)
    if max(places) > 100:
        raise typer.BadParameter(f"at most 100, got {max(places)}", param_hint="--depths")
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
        from offload.bench.eval.haystack import prose_words
        from offload.bench.eval.needle import depth_samples
        from offload.bench.eval.prompt import prompt_counter

        prose, count_prompt = prose_words(haystack), prompt_counter(tokenizer, chat=chat)
        return [
            sample
            for length in all_lengths
            for depth in places
            for sample in depth_samples(
                depth, length, samples, seed=seed, count_prompt=count_prompt, prose=prose
            )
        ]

    with running(verbose=verbose):
        from offload.bench.eval.haystack import described

        if plot is not None:
            from offload.bench.eval.output import check_plot

            check_plot(plot)
        document = answer_all(
            "needle",
            setup,
            make_samples,
            lengths=all_lengths,
            chat_template=chat_template,
            decode_last=decode_last,
            resume=resume,
            shared_texts=True,
            settings={
                "depths": places,
                "lengths": all_lengths,
                "samples": samples,
                "seed": seed,
                "haystack": described(haystack),
            },
        )
        print_document(document, shown)
        if plot is not None:
            from offload.bench.eval.output import plot_cells

            plot_cells(document["cells"], plot, f"One needle in prose, {model}")
            stderr().print(f"wrote {plot}")
