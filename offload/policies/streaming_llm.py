"""StreamingLLM: sink tokens and a recent window, nothing else.

Source: Xiao et al., Efficient Streaming Language Models with Attention Sinks (ICLR 2024). Positions
stay those of the full sequence; the original re-numbers them inside the window.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from offload.policies.base import SparsePolicy


@dataclass(frozen=True)
class StreamingLLM(SparsePolicy):
    """Attend to `sink_tokens` and the last `budget_tokens - sink_tokens` tokens.

    `recent_tokens` is derived: the runtime's recent window is the whole rest of the budget, so the
    policy itself has nothing to choose.
    """

    name: ClassVar[str] = "streaming_llm"

    recent_tokens: int = 0  # 0: budget_tokens - sink_tokens

    def __post_init__(self) -> None:
        given = (self.budget_tokens, self.sink_tokens)
        if self.recent_tokens == 0 and all(isinstance(value, int) for value in given):
            object.__setattr__(self, "recent_tokens", self.budget_tokens - self.sink_tokens)
        super().__post_init__()
        if self.recent_tokens != self.budget_tokens - self.sink_tokens:
            raise ValueError(
                f"streaming_llm attends to sinks and recent tokens only: recent_tokens must be"
                f" budget_tokens - sink_tokens = {self.budget_tokens - self.sink_tokens},"
                f" got {self.recent_tokens}"
            )
