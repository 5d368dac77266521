"""What LycheeCluster's paper claims, on a real model: `python -m perf.papers.lychee_cluster`.

Three parts, all of `lychee_variants` on the same prompts, for Figures 6, 7, 9, 10 and Table 3 of
arXiv 2603.08453:

    recall     a window of text is read and its next tokens decoded: what each variant selects
               against exact attention, and how far its next-token distributions are from it
    answers    right answers to questions about text of each kind
    stability  thousands of tokens of a text decoded after a short prompt: selections from step to
               step, and what they keep, as the index grows

Prompts are read on a GPU if there is one, everything else is measured on CPUs. Several processes
share the jobs, the most wanted first; those that --seconds cut off are left out.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from offload.bench.eval.answers import answer_sample
from offload.bench.eval.perplexity import teacher_forced
from offload.bench.eval.prompt import prompt_counter
from offload.bench.eval.ruler import RULER_TASKS, ruler_samples
from offload.bench.eval.sample import Sample
from offload.bench.eval.structured import STRUCTURED_TASKS, structured_samples
from offload.bench.selection.metrics import kl_divergence, mean, negative_log_likelihood
from offload.bench.selection.observed_text import observe_text, observer_of
from offload.bench.selection.observer import SelectionObserver
from offload.loading.names import load_tokenizer
from offload.system.stdlib_text import stdlib_paragraphs, stdlib_sources
from perf.papers.lychee_variants import answering, variants
from perf.papers.observed import MODEL, open_model
from perf.results_file import Run, hide_loading_bars, script_options

TEXTS = ("prose", "code", "json")
WINDOWS = 3  # of prose and code
TASKS = (
    "niah_multikey_1",
    "niah_multikey_2",
    "niah_multivalue",
    "niah_multiquery",
    *STRUCTURED_TASKS,
)
STEPS, SAMPLE_EVERY = 32, 8
STABILITY_PROMPT, SEGMENT, STABILITY_SAMPLE_EVERY = 2048, 1024, 128
STABILITY_LAYERS = 4  # every fourth is looked at: all of them would take longer than the decoding
STABILITY_VARIANTS = ("ours 1024", "published 1024")

PARTS = ("recall", "answers", "stability")
Row = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """One prompt of a part.

    Attributes:
        kind: of the text, the task, or the variant whose stability is measured.
        length: tokens that are read; index: which window or sample.
    """

    part: str
    kind: str
    length: int
    index: int
    steps: int = STEPS


@cache
def _tokenizer() -> Any:
    return load_tokenizer(MODEL)


def _count(text: str) -> int:
    return len(_tokenizer()(text, verbose=False)["input_ids"])


@cache
def _tokens_of(kind: str) -> list[int]:
    pieces = stdlib_paragraphs() if kind == "prose" else stdlib_sources()
    tokens: list[int] = _tokenizer()("\n\n".join(pieces), verbose=False)["input_ids"]
    return tokens


def text_window(kind: str, length: int, index: int) -> list[int]:
    """`length` tokens of a text: the windows of prose and code are evenly spread over it."""
    if kind not in STRUCTURED_TASKS:
        tokens = _tokens_of(kind)
        first = (len(tokens) - length) // (WINDOWS - 1) * index
        return tokens[first : first + length]
    # Longer by more than the question behind the text, which so is left out.
    count_prompt = prompt_counter(_tokenizer(), chat=True)
    samples = structured_samples(kind, length + 512, 1, seed=index, count_prompt=count_prompt)
    tokens = _tokenizer()(samples[0].text, verbose=False)["input_ids"][:length]
    return list(tokens)


def sample_of(job: Job) -> Sample:
    """The question of a job of the part "answers"."""
    if job.kind in RULER_TASKS:
        prose = "\n\n".join(stdlib_paragraphs()).split()
        (sample,) = ruler_samples(
            job.kind, job.length, 1, seed=job.index, count_tokens=_count, prose=prose
        )
    else:
        count_prompt = prompt_counter(_tokenizer(), chat=True)
        (sample,) = structured_samples(
            job.kind, job.length, 1, seed=job.index, count_prompt=count_prompt
        )
    return sample


class Bench:
    """The model under all variants, in one process.

    Args:
        deadline: in `time.time()`; of a long job, what was measured until then is kept.
    """

    def __init__(self, threads: int, deadline: float) -> None:
        hide_loading_bars()
        self._deadline = deadline
        policies = variants()
        self.labels = list(policies)
        self.model = open_model(list(policies.values()), threads)

    def measure(self, job: Job) -> list[Row]:
        """The rows of a job."""
        start = time.perf_counter()
        parts: dict[str, Callable[[Job], Iterator[Row]]] = {
            "recall": self._recall,
            "answers": self._answers,
            "stability": self._stability,
        }
        rows = [asdict(job) | row for row in parts[job.part](job)]
        return [row | {"job_seconds": round(time.perf_counter() - start, 1)} for row in rows]

    def _recall(self, job: Job) -> Iterator[Row]:
        tokens = text_window(job.kind, job.length + job.steps + 1, job.index)
        context, following = tokens[: job.length], tokens[job.length :]
        exact: torch.Tensor | None = None
        with self.model.read(context) as prompt:
            for index, label in enumerate(self.labels):
                row, logits = observe_text(
                    self.model, index, prompt, following[:-1], sample_every=SAMPLE_EVERY
                )
                exact = logits if exact is None else exact  # full attention comes first
                nll = negative_log_likelihood(logits, torch.tensor(following[1:]))
                kl = float(kl_divergence(logits, exact).mean())
                yield {"variant": label, **row, "kl": kl, "nll": float(nll.mean())}

    def _answers(self, job: Job) -> Iterator[Row]:
        record = answer_sample(self.model, answering(), _tokenizer(), sample_of(job), chat=True)
        yield {"task": job.kind, **record}

    def _stability(self, job: Job) -> Iterator[Row]:
        index = self.labels.index(job.kind)
        tokens = text_window("prose", job.length + job.steps, job.index)
        attention = self.model.runtimes[index].attention
        with (
            self.model.read(tokens[: job.length]) as prompt,
            teacher_forced(self.model, index, prompt) as decode,
        ):
            for first in range(0, job.steps, SEGMENT):
                if first and time.time() > self._deadline:
                    break
                observer = observer_of(self.model, index, len(tokens))

                def look(
                    layer_idx: int, *rest: Any, observer: SelectionObserver = observer
                ) -> None:
                    if layer_idx % STABILITY_LAYERS == STABILITY_LAYERS - 1:
                        observer.attended(layer_idx, *rest)

                attention.on_attended = look
                start, losses = time.perf_counter(), []
                for step in range(first, min(first + SEGMENT, job.steps - 1)):
                    observer.sampling = step % STABILITY_SAMPLE_EVERY == 0
                    logits = decode(tokens[job.length + step]).double()
                    target = tokens[job.length + step + 1]
                    losses.append(float(logits.logsumexp(-1) - logits[target]))
                seconds = time.perf_counter() - start
                row = {"first_step": first, "nll": mean(losses), "seconds": seconds}
                yield row | observer.measured()
            attention.on_attended = None


def jobs_of(lengths: Sequence[int], *, samples: int, stability_steps: int) -> list[Job]:
    """The most wanted first: the longest, a window of each text, questions, then further windows.

    Args:
        lengths: ascending; at the last one only prose is read, for the time that it takes, and
            questions are asked at the second.
    """
    *shorter, longest = lengths
    jobs = [
        Job("stability", variant, STABILITY_PROMPT, 0, stability_steps)
        for variant in STABILITY_VARIANTS
    ]
    jobs.append(Job("recall", TEXTS[0], longest, 0))
    windows = [
        Job("recall", kind, length, index)
        for index in range(WINDOWS)
        for length in reversed(shorter)
        for kind in TEXTS
    ]
    asked = lengths[min(1, len(shorter))]
    questions = [Job("answers", task, asked, i) for i in range(samples) for task in TASKS]
    first = len(windows) // WINDOWS
    return [*jobs, *windows[:first], *questions, *windows[first:]]


_bench: list[Bench] = []  # of a process that measures


def _begin(threads: int, deadline: float) -> None:
    _bench.append(Bench(threads, deadline))


def _measure(job: Job) -> list[Row]:
    return _bench[0].measure(job)


def measure_all(jobs: Sequence[Job], run: Run, options: argparse.Namespace) -> Iterator[list[Row]]:
    """The rows of each job that is done in time."""
    processes = multiprocessing.get_context("spawn")
    # A segment may still be decoded behind the deadline.
    deadline = time.time() + 0.85 * (options.seconds - run.seconds)
    with processes.Pool(options.workers, _begin, (options.threads, deadline)) as pool:
        results = pool.imap_unordered(_measure, jobs)
        for done in range(1, len(jobs) + 1):
            try:
                rows = results.next(timeout=max(1.0, options.seconds - run.seconds))
            except multiprocessing.TimeoutError:
                run.say(f"time is over: {done - 1} of {len(jobs)} jobs are done")
                return
            except Exception as error:  # of one job: the others go on
                run.say(f"{done}/{len(jobs)} failed: {error!r}")
                continue
            row = rows[0]
            name = f"{row['part']} {row['kind']} {row['length']:,} #{row['index']}"
            run.say(f"{done}/{len(jobs)} {name}: {row['job_seconds']} s")
            yield rows


def main() -> None:
    parser = script_options(__doc__, "paper-lychee-cluster")
    parser.add_argument("--out", type=Path, help="write this file instead")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192, 16384, 32000])
    parser.add_argument("--samples", type=int, default=8, help="questions of a task and length")
    parser.add_argument("--stability-steps", type=int, default=10 * SEGMENT)
    parser.add_argument("--workers", type=int, default=1, help="processes that measure")
    parser.add_argument("--threads", type=int, default=1, help="of each")
    parser.add_argument("--seconds", type=float, default=3600.0, help="no longer than this")
    options = parser.parse_args()
    if options.out is not None:
        options.output, options.name = options.out.parent, options.out.stem
    run = Run(options)
    jobs = jobs_of(
        sorted(options.lengths), samples=options.samples, stability_steps=options.stability_steps
    )
    jobs = [job for job in jobs if job.part in options.parts]
    settings = {
        "model": MODEL,
        "steps": STEPS,
        "sample_every": SAMPLE_EVERY,
        "prompts_read_on": "cuda" if torch.cuda.is_available() else "cpu",
    } | run.named("lengths", "samples", "stability_steps", "workers", "threads", "seconds")
    rows: list[Row] = []
    for of_job in measure_all(jobs, run, options):
        rows += of_job
    run.write(settings, rows)


if __name__ == "__main__":
    main()
