"""One answer while it grows: what the model is fed next, and what it has said so far."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

PART_TOKENS = 24  # of an answer to one of several questions


class Reply:
    """The answer to a prompt, token by token, with the questions that stand in the answer itself.

    Args:
        unread: tokens of the prompt after those that were read; they are fed one by one.
        is_done: gets the answer's tokens so far; no question comes any more.
        max_new_tokens: that the answer may have, questions included.
        questions: each gets the tokens that were said since the last one, without the token that
            ended them, and returns the tokens that are fed before the model goes on.
        ends_part: whether a token ends what is said between two questions.

    Attributes:
        tokens: of the answer, questions included, but for tokens that were left out before one.
        num_steps: decode steps so far.
        is_done: nothing follows.
    """

    def __init__(
        self,
        unread: Iterable[int],
        is_done: Callable[[list[int]], bool],
        max_new_tokens: int,
        *,
        questions: Iterable[Callable[[Sequence[int]], list[int]]] = (),
        ends_part: Callable[[int], bool] = lambda token: False,
    ) -> None:
        self.tokens: list[int] = []
        self.num_steps = -1  # what was read has the first choice
        self._is_done, self._max_new_tokens = is_done, max_new_tokens
        self._ends_part = ends_part
        self._feed, self._questions = deque(unread), deque(questions)
        self._part_start = 0
        self.is_done = False

    @property
    def num_given(self) -> int:
        """Tokens to be fed whatever the model chooses."""
        return len(self._feed)

    @property
    def num_left(self) -> int:
        """Tokens that may follow."""
        return self._max_new_tokens - len(self.tokens)

    def next_token(self) -> int:
        """What the model is fed now."""
        return self._feed.popleft() if self._feed else self.tokens[-1]

    def hear(self, token: int) -> None:
        """The model's choice behind what it was fed, or behind what it has read."""
        self.num_steps += 1
        if self._feed:
            return
        said = self.tokens[self._part_start :]
        if self._questions and (self._ends_part(token) or len(said) == PART_TOKENS):
            question = self._questions.popleft()(said)
            self._feed.extend(question)
            self.tokens += question
            self._part_start = len(self.tokens)
            return
        self.tokens.append(token)
        answered = not self._questions and self._is_done(self.tokens)
        self.is_done = answered or self.num_left <= 0
