"""Loads on one model under several engines, as rows of plain values."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from offload.bench.serve.load import Answer, Load, Prompts, Text, drive
from offload.bench.serve.pace import NUM_DECODING, SHORT_TOKENS, measure_pace, most_needed
from offload.bench.serve.server import OffloadServer, Server, TransformersServer
from offload.loading.checkpoint import Checkpoint, check_checkpoint
from offload.loading.names import resolve_folder
from offload.loading.stock_model import load_stock_model
from offload.runtime.config import runtime_config
from offload.runtime.model import OffloadedModel

Row = dict[str, Any]
# Of how many requests there are at a time, and the tokens of a prompt and its answer, at most.
Opener = Callable[[int, int], Server]
OnRequest = Callable[[str], None]  # hears an engine's name whenever an answer ended


def ignore(engine: str) -> None:
    """An `OnRequest` that does nothing."""


@dataclass(frozen=True)
class Served:
    """A model, and how engines run it.

    Attributes:
        options: of `OffloadedModel.from_pretrained`: transformers heeds `dtype`, `device` and
            `num_threads`.
        max_num_seqs, max_queued, prefix_caching: of `Engine`; transformers has no `max_queued`.
        temperature: of all answers.
    """

    model: str
    options: Mapping[str, Any]
    max_num_seqs: int = 32
    max_queued: int = 256
    prefix_caching: bool = True
    temperature: float = 0.0

    @property
    def checkpoint(self) -> Checkpoint:
        """The model's checkpoint."""
        return check_checkpoint(resolve_folder(self.model))

    @contextmanager
    def opened(self, engine: str) -> Iterator[tuple[Opener, Row]]:
        """What opens a server of a loaded model, and what rows say about the engine."""
        if engine == "offload":
            model = OffloadedModel.from_pretrained(self.model, **self.options)
            of_engine: dict[str, Any] = {
                "max_num_seqs": self.max_num_seqs,
                "max_queued": self.max_queued,
                "prefix_caching": self.prefix_caching,
                "temperature": self.temperature,
            }
            row = {"engine": engine, "policy": model.policy.name}

            def ours(num_requests: int, most_tokens: int) -> Server:
                return OffloadServer(model, **of_engine)

            yield ours, row | {"dtype": str(model.dtype).removeprefix("torch.")}
            return
        asked = {name: self.options[name] for name in ("dtype", "device", "num_threads")}
        config, before = runtime_config(**asked), torch.get_num_threads()
        stock = load_stock_model(self.checkpoint, config.dtype).eval().to(config.device)

        def theirs(num_requests: int, most_tokens: int) -> Server:
            return TransformersServer(
                stock,
                max_num_seqs=min(self.max_num_seqs, num_requests),
                most_tokens=most_tokens,
                prefix_caching=self.prefix_caching,
                temperature=self.temperature,
            )

        dtype = str(stock.dtype).removeprefix("torch.")
        # Of the process: it computes in a thread of its own.
        torch.set_num_threads(config.num_threads or before)
        try:
            yield theirs, {"engine": engine, "policy": None, "dtype": dtype}
        finally:
            torch.set_num_threads(before)


def measure_loads(
    served: Served,
    engines: Sequence[str],
    loads: Sequence[Load],
    text: Text,
    on_request: OnRequest = ignore,
) -> Iterator[Row]:
    """A row for each load under each engine.

    Raises:
        ValueError: prompts and answers longer than the model has positions or the text has tokens.
    """
    check_length(served, max(load.most_tokens for load in loads))
    prompts = [Prompts(text, load) for load in loads]
    for engine in engines:
        on_answer = partial(on_request, engine)
        with served.opened(engine) as (opener, about):
            _warm_up(opener, loads[0], text)
            for load, of_load in zip(loads, prompts, strict=True):
                with closing(opener(load.most_at_once, load.most_tokens)) as server:
                    answers = drive(server, load, of_load, on_answer)
                    yield about | described(load) | summary(answers, load) | server.costs()
            del opener
        gc.collect()  # the next engine may need all of the memory


def measure_paces(
    served: Served,
    engines: Sequence[str],
    load: Load,
    text: Text,
    on_request: OnRequest = ignore,
) -> Iterator[Row]:
    """A row for each engine: what requests keep of their pace while another's prompt is read.

    Args:
        load: its prompts are read, and so many tokens of an answer are decoded alone first.

    Raises:
        ValueError: as `measure_loads`.
    """
    longest = most_needed(load, check_length(served, load.most_tokens))
    served = replace(served, max_num_seqs=max(served.max_num_seqs, NUM_DECODING + 1))
    prompts = Prompts(text, load)
    for engine in engines:
        with served.opened(engine) as (opener, about):
            _warm_up(opener, load, text)
            with closing(opener(NUM_DECODING + 1, longest)) as server:
                found = measure_pace(server, load, prompts, longest)
                on_request(engine)
                yield about | {"prompt_tokens": load.prompt_tokens[1]} | found | server.costs()
            del opener
        gc.collect()


def check_length(served: Served, most_tokens: int) -> int:
    """Positions of the model, if prompts and answers fit in them."""
    positions = served.checkpoint.shape.max_context
    if most_tokens > positions:
        raise ValueError(
            f"prompts and answers of {most_tokens} tokens are more than the model has positions: "
            f"{positions}; lower --prompt-tokens or --answer-tokens"
        )
    return positions


def _warm_up(opener: Opener, load: Load, text: Text) -> None:
    """One short request, which is not counted."""
    tokens = min(SHORT_TOKENS, load.prompt_tokens[1])
    short = Load((tokens, tokens), min(4, load.answer_tokens), seed=load.seed)
    with closing(opener(1, short.most_tokens)) as server:
        drive(server, short, Prompts(text, short))


def described(load: Load) -> Row:
    """What a row says about its load."""
    is_closed = load.rate is None
    return {
        "clients": load.clients if is_closed else None,
        "rate": load.rate,
        "prompt_tokens": list(load.prompt_tokens),
        "answer_tokens": load.answer_tokens,
        "shared_tokens": load.shared_tokens,
        "temperature": load.temperature,
    }


def summary(answers: Sequence[Answer], load: Load) -> Row:
    """Latencies and throughput; None where nothing was measured.

    Rates are of the time from the first request to the last token.
    """
    began = [answer for answer in answers if answer.times]
    firsts = [answer.times[0] - answer.sent for answer in began]
    gaps = [after - before for answer in began for before, after in pairwise(answer.times)]
    start = min((answer.sent for answer in answers), default=0.0)
    seconds = max((answer.times[-1] for answer in began), default=start) - start
    whole = [answer for answer in began if answer.error is None]
    amounts = {
        "answer_tokens_per_second": sum(len(answer.times) for answer in began),
        "prompt_tokens_per_second": sum(answer.prompt_tokens for answer in began),
        "requests_per_second": len(whole),
        "good_requests_per_second": sum(map(load.is_good, answers)),
    }
    return {
        "requests": len(answers),
        "refused": sum(answer.is_refused for answer in answers),
        "errors": sum(answer.error is not None and not answer.is_refused for answer in answers),
        "first_error": next((answer.error for answer in answers if answer.error), None),
        "seconds": seconds,
        "answer_tokens_mean": float(np.mean([len(x.times) for x in whole])) if whole else None,
        "ttft_ms_median": _milliseconds(firsts, 50),
        "ttft_ms_p99": _milliseconds(firsts, 99),
        "gap_ms_median": _milliseconds(gaps, 50),
        "gap_ms_p99": _milliseconds(gaps, 99),
        "gap_ms_longest": _milliseconds(gaps, 100),
        **{name: amount / seconds if seconds else None for name, amount in amounts.items()},
    }


def _milliseconds(seconds: Sequence[float], percent: float) -> float | None:
    return 1e3 * float(np.percentile(seconds, percent)) if seconds else None
