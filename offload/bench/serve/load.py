"""Requests that come at once or one after another, and when each token of their answers came."""

from __future__ import annotations

import heapq
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from offload.bench.serve.server import REFUSALS, Server

Text = tuple[Sequence[int], Sequence[int]]  # what every prompt begins with, and the text's tokens

_LONGEST_WAIT_SECONDS = 0.5  # so that ctrl-C is heard


@dataclass(frozen=True)
class Load:
    """The requests of one measurement. The same client asks the same in every one of them.

    Attributes:
        prompt_tokens: the least and the most, evenly distributed; `shared_tokens` included.
        answer_tokens: of each answer, wherever the model would end it.
        clients: a closed loop: each sends its next request when its last one is answered.
        requests: of each client.
        rate: an open loop instead: requests per second on average, with exponential intervals.
        duration_seconds: in which an open loop sends.
        shared_tokens: with which all prompts begin.
        temperature: of all answers; 0 takes the likeliest tokens.
        good_ttft_ms, good_gap_ms: the most that a good answer takes to its first token, and
            between tokens on average.
    """

    prompt_tokens: tuple[int, int]
    answer_tokens: int
    clients: int = 1
    requests: int = 1
    rate: float | None = None
    duration_seconds: float = 30.0
    shared_tokens: int = 0
    seed: int = 0
    good_ttft_ms: float = math.inf
    good_gap_ms: float = math.inf
    temperature: float = 0.0

    @property
    def most_tokens(self) -> int:
        """Tokens of the longest prompt and its answer."""
        return self.prompt_tokens[1] + self.answer_tokens

    def first_sends(self) -> list[tuple[float, int, int]]:
        """Seconds from the start, client and which request of it: the first of each client.

        In an open loop every request is a client's first and only one.
        """
        if self.rate is None:
            return [(0.0, client, 0) for client in range(self.clients)]
        chance, at, sends = random.Random(self.seed), 0.0, list[tuple[float, int, int]]()
        while (at := at + chance.expovariate(self.rate)) < self.duration_seconds:
            sends.append((at, len(sends), 0))
        return sends

    @property
    def num_requests(self) -> int:
        """In all."""
        return self.clients * self.requests if self.rate is None else len(self.first_sends())

    @property
    def most_at_once(self) -> int:
        """Requests that have no answer yet."""
        return self.clients if self.rate is None else self.num_requests

    def has_next(self, index: int) -> bool:
        """Whether its client sends another request after this one."""
        return self.rate is None and index + 1 < self.requests

    def is_good(self, answer: Answer) -> bool:
        """Whether it is whole, and as fast as a good one."""
        if answer.error is not None or not answer.times:
            return False
        mean_gap = (answer.times[-1] - answer.times[0]) / max(1, len(answer.times) - 1)
        is_soon = 1e3 * (answer.times[0] - answer.sent) <= self.good_ttft_ms
        return is_soon and 1e3 * mean_gap <= self.good_gap_ms


class Prompts:
    """Pieces of a text, another for each request.

    Raises:
        ValueError: a text that is shorter than a prompt, or nothing left of one but what is shared.
    """

    def __init__(self, text: Text, load: Load) -> None:
        beginning, tokens = text
        least, most = load.prompt_tokens
        self._load, self._tokens = load, tokens
        self._shared = [*beginning, *tokens[: max(0, load.shared_tokens - len(beginning))]]
        if len(self._shared) >= least:
            raise ValueError(
                f"{len(self._shared)} shared tokens leave nothing of prompts of {least} tokens; "
                "lower --shared-tokens"
            )
        if most > len(tokens):
            raise ValueError(
                f"prompts of {most} tokens are more than the text has: {len(tokens)}; lower "
                "--prompt-tokens or give a longer --text"
            )

    def of(self, client: int, index: int) -> list[int]:
        """The prompt of a client's request."""
        chance = random.Random(f"{self._load.seed} {client} {index}")
        size = chance.randint(*self._load.prompt_tokens) - len(self._shared)
        first = chance.randrange(len(self._tokens) - size + 1)
        return [*self._shared, *self._tokens[first : first + size]]


@dataclass
class Answer:
    """What came of a request.

    Attributes:
        sent: by time.perf_counter, as `times` of its tokens.
        error: why there is none, or only a part.
        is_refused: it was not even taken.
    """

    prompt_tokens: int
    sent: float
    times: list[float] = field(default_factory=list)
    error: str | None = None
    is_refused: bool = False


def drive(
    server: Server, load: Load, prompts: Prompts, on_answer: Callable[[], None] = lambda: None
) -> list[Answer]:
    """Send all requests of a load, and wait for their answers."""
    due, answers, unanswered = load.first_sends(), list[Answer](), dict[str, tuple[Answer, int]]()
    heapq.heapify(due)
    start = time.perf_counter()

    def end(client: int, index: int) -> None:
        on_answer()
        if load.has_next(index):
            heapq.heappush(due, (0.0, client, index + 1))

    while due or unanswered:
        if due and due[0][0] <= time.perf_counter() - start:
            _, client, index = heapq.heappop(due)
            prompt, request_id = prompts.of(client, index), f"{client} {index}"
            answer = Answer(len(prompt), time.perf_counter())
            answers.append(answer)
            try:
                server.send(request_id, prompt, load.answer_tokens)
            except REFUSALS as error:
                answer.error, answer.is_refused = str(error), True
                end(client, index)
            else:
                unanswered[request_id] = answer, client
            continue
        until_next = due[0][0] - (time.perf_counter() - start) if due else _LONGEST_WAIT_SECONDS
        event = server.receive(min(max(0.0, until_next), _LONGEST_WAIT_SECONDS))
        if event is None or event.request_id not in unanswered:
            continue
        answer, client = unanswered[event.request_id]
        answer.times += [event.time] * event.num_tokens
        if event.is_last:
            answer.error = event.error
            del unanswered[event.request_id]
            end(client, int(event.request_id.split()[1]))
    return answers
