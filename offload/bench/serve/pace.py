"""What requests that decode keep of their pace while somebody's long prompt is read."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from statistics import harmonic_mean
from typing import Any

from offload.bench.serve.load import Load, Prompts
from offload.bench.serve.server import Server

NUM_DECODING = 4
SHORT_TOKENS = 128  # of their prompts
_READ = "read"


def most_needed(load: Load, most_tokens: int) -> int:
    """Tokens of the longest of the requests, where a prompt and its answer may have `most_tokens`.

    Answers go on until after the prompt is read, whose slices may be small.
    """
    return min(most_tokens, SHORT_TOKENS + 2 * load.answer_tokens + 4 * load.prompt_tokens[1])


def measure_pace(server: Server, load: Load, prompts: Prompts, most_tokens: int) -> dict[str, Any]:
    """Four requests decode alone, then while a prompt is read until its first token is there, and
    alone again: their contexts grow meanwhile, so that a token alone takes the mean of both times.

    Args:
        load: `prompts` are of it; each decodes `answer_tokens` alone, twice.
        most_tokens: `most_needed`.

    Raises:
        ValueError: an answer came to its end before all was measured.
        RuntimeError: a request failed.
    """
    size = min(SHORT_TOKENS, load.prompt_tokens[1])
    answer_tokens = most_tokens - size
    names = [f"decodes {i}" for i in range(NUM_DECODING)]
    times: dict[str, list[float]] = {name: [] for name in (*names, _READ)}

    def collect(until: Callable[[], bool]) -> None:
        while not until():
            event = server.receive(0.5)
            if event is None:
                continue
            times[event.request_id] += [event.time] * event.num_tokens
            if event.error is not None:
                raise RuntimeError(f"a request failed: {event.error}")
            if event.is_last and event.request_id != _READ:
                raise ValueError(
                    f"an answer of {answer_tokens} tokens ended before all was measured; lower "
                    "--prompt-tokens or --answer-tokens"
                )

    def have(num_tokens: int) -> Callable[[], bool]:
        """Each of the four has so many tokens."""
        return lambda: min(len(times[name]) for name in names) >= num_tokens

    for i, name in enumerate(names):
        server.send(name, prompts.of(i + 1, 0)[-size:], answer_tokens)
    collect(have(1))
    begun = max(times[name][0] for name in names)  # this thread may hear of it late
    collect(have(1 + load.answer_tokens))
    sent = time.perf_counter()
    server.send(_READ, prompts.of(0, 0), 1)
    collect(lambda: bool(times[_READ]))
    (read,) = times[_READ][:1]
    collect(have(1 + max(len(times[name]) for name in names) + load.answer_tokens))
    # Before their first tokens behind it they waited for it.
    again = max(min(at for at in times[name] if at > read) for name in names)
    ended = min(times[name][-1] for name in names)
    for name in names:
        server.cancel(name)
    of_all = [times[name] for name in names]
    alone = harmonic_mean([_pace(of_all, begun, sent), _pace(of_all, again, ended)])
    beside = _pace(of_all, sent, read)
    return {
        "alone_tokens_per_second": alone,
        "beside_tokens_per_second": beside,
        "kept_share": beside / alone,
        "alone_gap_ms_longest": max(_longest(of_all, begun, sent), _longest(of_all, again, ended)),
        "beside_gap_ms_longest": _longest(of_all, sent, read),
        "ttft_ms": 1e3 * (read - sent),
    }


def _pace(of_all: list[list[float]], start: float, end: float) -> float:
    """Tokens per second of all together."""
    return sum(start < at <= end for times in of_all for at in times) / (end - start)


def _longest(of_all: list[list[float]], start: float, end: float) -> float:
    """Milliseconds between two tokens of one request that lie in this time, in part or whole."""
    return 1e3 * max(
        after - before
        for times in of_all
        for before, after in pairwise(times)
        if after > start and before < end
    )
