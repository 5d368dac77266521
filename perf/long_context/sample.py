"""What training reads: a document and how much each of its tokens counts."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Sample:
    """tokens and weights have the same length; weights[i] is that of predicting tokens[i]."""

    kind: str
    tokens: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)

    def add(self, tokens: list[int], weight: float = 0.0) -> None:
        self.tokens += tokens
        self.weights += [weight] * len(tokens)

    def cut(self, length: int) -> Sample:
        """Never longer than `length`: the document loses its beginning, not the answers."""
        excess = len(self.tokens) - length
        if excess > 0:
            del self.tokens[1 : 1 + excess], self.weights[1 : 1 + excess]
        return self
