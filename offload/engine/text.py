"""The text of an answer as it comes: whole characters, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers.decoders import DecodeStream

_PROMPT_TOKENS = 8  # that decide how the first of an answer is spelt


class TextStream:
    """Text of tokens that come one by one.

    Half of a character is held back, as is what a stop string may begin with.

    Args:
        tokenizer: a fast one of transformers.
        stop: strings before which the text ends.
        prompt: token ids before the answer.

    Attributes:
        text: so far.
        is_stopped: a stop string was found: `text` is all.
    """

    def __init__(
        self, tokenizer: Any, stop: Sequence[str] = (), prompt: Sequence[int] = ()
    ) -> None:
        self.text, self.is_stopped = "", False
        self._backend, self._stop = tokenizer.backend_tokenizer, stop
        self._longest = max(map(len, stop), default=0)
        self._stream = DecodeStream(ids=list(prompt[-_PROMPT_TOKENS:]), skip_special_tokens=True)
        self._held = ""

    def add(self, token: int, *, may_stop: bool = True) -> str:
        """What the next token adds to `text`; not looked for stop strings unless it `may_stop`."""
        try:
            new = self._stream.step(self._backend, token)
        except Exception:  # bytes that are no character, and then others: go on behind them
            self._stream = DecodeStream(skip_special_tokens=True)
            new = self._stream.step(self._backend, token)
        if self.is_stopped or not new:
            return ""
        new, self._held = self._held + new, ""
        if not may_stop:
            return self._append(new)
        ends = [at for at in (new.find(stop) for stop in self._stop) if at >= 0]
        if ends:
            self.is_stopped = True
            return self._append(new[: min(ends)])
        for size in range(min(len(new), self._longest - 1), 0, -1):
            if any(stop.startswith(new[-size:]) for stop in self._stop):
                new, self._held = new[:-size], new[-size:]
                break
        return self._append(new)

    def end(self) -> str:
        """What was held back, where no token comes any more."""
        held, self._held = self._held, ""
        return self._append(held)

    def _append(self, new: str) -> str:
        self.text += new
        return new
