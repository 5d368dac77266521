"""`offload eval ruler`: RULER's tasks under full attention and under policies."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

from offload.bench.eval.haystack import described, prose_words
from offload.bench.eval.prompt import text_counter
from offload.bench.eval.ruler import PROSE_TASKS, RULER_TASKS, ruler_samples
from offload.bench.eval.sample import Sample
from offload.cli.console import running
from offload.cli.eval import options as opt
from offload.cli.eval.scored import Setup, answer_all
from offload.cli.options import DEFAULT_MODEL, ModelName, Verbose


def ruler(
    model: ModelName = DEFAULT_MODEL,
    *,
    compared: opt.Compared,
    bounds: opt.Bounds,
    questions: opt.ProseQuestions,
    tasks: Annotated[str, opt.tasks_option(RULER_TASKS)] = "all",
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

    The mean is over tasks and lengths in which full attention scores at all; the interval is 95 %
    of the difference to full attention on the same prompts.

    [bold]Examples[/bold]

        offload eval ruler --tasks niah_single_1,niah_multikey_1 --context 2048 --samples 5

        offload eval ruler --policy lfps,quest --budget-tokens 256,1024 --resume ruler.jsonl

        offload eval ruler --policy lychee_cluster --host-share 0.5,0.25 --page-tokens 64

        offload eval ruler ./Qwen3-0.6B --context 4096,16384 --haystack books/ --json > ruler.json
    """
    names = opt.task_names(tasks, RULER_TASKS)
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
                "haystack": described(questions.haystack) if has_prose else None,
            },
            decode_last=questions.decode_last,
        )
