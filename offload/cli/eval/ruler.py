"""`offload eval ruler`: RULER's tasks under full attention and under policies."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import typer

from offload.bench.eval.haystack import described, prose_words
from offload.bench.eval.prompt import text_counter
from offload.bench.eval.ruler import (
    ALL_TASKS,
    HARD_TASKS,
    PROSE_TASKS,
    RULER_TASKS,
    ruler_samples,
)
from offload.bench.eval.sample import Sample
from offload.cli.console import running
from offload.cli.eval import options as opt
from offload.cli.eval.scored import Setup, answer_all
from offload.cli.options import DEFAULT_MODEL, ModelName, Verbose

HARD_RANGE = (0.3, 0.97)  # what full attention has of a task that tells policies apart


def ruler(
    model: ModelName = DEFAULT_MODEL,
    *,
    compared: opt.Compared,
    bounds: opt.Bounds,
    questions: opt.ProseQuestions,
    tasks: Annotated[str, opt.tasks_option(ALL_TASKS, ("all (of RULER)", "hard"))] = "all",
    kl: Annotated[
        bool,
        typer.Option(
            "--kl",
            help="Also give each policy full attention's answer, and tell what its logits diverge "
            "by: the mean over all tasks, in nats a token.",
            rich_help_panel=opt.Questions.panel,
        ),
    ] = False,
    runs: opt.Runs,
    output: opt.Output,
    verbose: Verbose = False,
) -> None:
    """Score policies on RULER, the tasks that need no download.

    Needles in a haystack ([bold]niah[/bold]: one, among others, with several values or questions),
    variable tracking ([bold]vt[/bold]), common and frequent words ([bold]cwe, fwe[/bold]), with the
    published templates and scores: the share of the right answers that the model's answer has.
    Prompts and scores are those of lm-eval for one length and the same seed, but for the prose,
    which is text of yours or of Python's library instead of a download.

    [bold]--tasks hard[/bold] is for telling policies apart: those of them that are not saturated,
    shorter chains and fewer words (vt_2, cwe_3), needles that a question in the answer asks for, so
    that it is decoded (asked, asked_lines), and look-ups of two steps, of which the model asks
    itself the second (two_steps). A task counts where full attention has 30 to 97 points.
    asked_long goes on asking for 2,000 tokens and more, and judges the last questions.

    The mean is over tasks and lengths in which full attention scores at all; the interval is 95 %
    of the difference to full attention on the same prompts.

    [bold]Examples[/bold]

        offload eval ruler --tasks niah_single_1,niah_multikey_1 --context 2048 --samples 5

        offload eval ruler --policy lfps,quest --budget-tokens 256,1024 --resume ruler.jsonl

        offload eval ruler --tasks hard --context 24576 --samples 45 --device cuda --batch-size 16

        offload eval ruler --policy lychee_cluster --host-share 0.5,0.25 --page-tokens 64

        offload eval ruler ./Qwen3-0.6B --context 4096,16384 --haystack books/ --json > ruler.json
    """
    sets = {"all": RULER_TASKS, "hard": HARD_TASKS}
    names = [*sets[tasks]] if tasks in sets else opt.task_names(tasks, ALL_TASKS)
    of_full = HARD_RANGE if tasks == "hard" else None
    has_prose = any(name in PROSE_TASKS for name in names)
    setup = Setup(model, compared.policies(), bounds.on(runs.device), runs, verbose)

    def sampler(tokenizer: Any, chat: bool) -> Callable[..., list[Sample]]:
        prose = prose_words(questions.haystack) if has_prose else []
        return partial(ruler_samples, count_tokens=text_counter(tokenizer), prose=prose)

    with running(verbose=verbose):
        answer_all(
            "ruler",
            setup,
            questions,
            names,
            sampler,
            output,
            settings={
                "tasks": names,
                "of_full": of_full,
                "haystack": described(questions.haystack) if has_prose else None,
            },
            decode_last=questions.decode_last,
            of_full=of_full,
            with_kl=kl,
        )
