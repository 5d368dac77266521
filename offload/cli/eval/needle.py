"""`offload eval needle`: one needle at each depth and length."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import typer

from offload.bench.eval.haystack import described, prose_words
from offload.bench.eval.needle import depth_samples
from offload.bench.eval.output import check_plot, plot_cells
from offload.bench.eval.prompt import prompt_counter
from offload.bench.eval.sample import Sample
from offload.cli.console import running, stderr
from offload.cli.eval import options as opt
from offload.cli.eval.scored import Setup, answer_all
from offload.cli.options import DEFAULT_MODEL, ModelName, Plot, Verbose, counts

_QUESTIONS = opt.ProseQuestions(lengths="2048,4096,8192", samples=5)


def needle(
    model: ModelName = DEFAULT_MODEL,
    *,
    compared: opt.Compared,
    bounds: opt.Bounds,
    questions: opt.ProseQuestions = _QUESTIONS,
    depths: Annotated[
        str,
        typer.Option(
            metavar="PER CENT",
            help="Where the needle stands: 0 is the text's beginning, 100 its end.",
            rich_help_panel=opt.TASK_PANEL,
        ),
    ] = "0,25,50,75,100",
    runs: opt.Runs,
    output: opt.Output,
    plot: Plot = None,
    verbose: Verbose = False,
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
    setup = Setup(model, compared.policies(), bounds.on(runs.device), runs, verbose)

    def sampler(tokenizer: Any, chat: bool) -> Callable[..., list[Sample]]:
        prose, count_prompt = prose_words(questions.haystack), prompt_counter(tokenizer, chat=chat)
        return partial(depth_samples, count_prompt=count_prompt, prose=prose)

    with running(verbose=verbose):
        if plot is not None:
            check_plot(plot)
        document = answer_all(
            "needle",
            setup,
            questions,
            places,
            sampler,
            output,
            settings={"depths": places, "haystack": described(questions.haystack)},
            shared_texts=True,
            decode_last=questions.decode_last,
        )
        if plot is not None:
            plot_cells(document["cells"], plot, f"One needle in prose, {model}")
            stderr().print(f"wrote {plot}")
