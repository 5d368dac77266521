"""What `host_bytes_per_sequence` comes to in slots of the KV cache."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

from offload.kv_compression.window import SPACING
from offload.selection.policy import Policy
from offload.system.memory import format_bytes

SINK_TOKENS, RECENT_TOKENS = 4, 64  # kept as they are, where the policy does not ask for more
CONDENSED_SHARE = 0.03125
_SHARE_FREED = 4  # of the slots, by condensing: that costs a token about the same at any bound
_NEW_SHARE = 4  # of the condensed ones, that each time makes anew


@dataclass(frozen=True)
class SequenceBound:
    """Slots of one sequence: positions of the KV store, whole pages of them.

    Attributes:
        slots: at most so many.
        low: so many are left when they were condensed.
        sinks, recent: first and last tokens, which are never condensed.
        condensed: slots at most that stand for several tokens each.
    """

    slots: int
    low: int
    sinks: int
    recent: int
    condensed: int

    @classmethod
    def of(
        cls,
        num_bytes: int,
        *,
        token_bytes: int,
        page_tokens: int,
        policy: Policy,
        condensed_share: float = CONDENSED_SHARE,
        by_page: bool = False,
        other_bytes: Callable[[int], int] = lambda slots: 0,
    ) -> SequenceBound:
        """The largest that `num_bytes` allow.

        Args:
            token_bytes: of a token's keys and values in all layers.
            condensed_share: of the slots.
            by_page: heads have whole pages of their own when they were condensed: `low` are these.
            other_bytes: bytes that are kept of a sequence of so many slots without its pages.

        Raises:
            ValueError: there is no room for sinks, recent tokens and a page.
        """
        sinks, recent = SINK_TOKENS, RECENT_TOKENS
        if policy.selects:
            sinks, recent = max(sinks, policy.sink_tokens), max(recent, policy.recent_tokens)
        if by_page:  # a policy attends to the last that a head has, whichever these are
            recent = max(1, recent - sinks)
        fewest = -(-(sinks + recent + max(page_tokens, 16)) // page_tokens)

        def need(pages: int) -> int:
            return pages * page_tokens * token_bytes + other_bytes(pages * page_tokens)

        pages = num_bytes // (page_tokens * token_bytes)
        if pages >= fewest:  # the most that fit
            pages = bisect_right(range(pages + 1), num_bytes, lo=fewest, key=need) - 1
        if pages < fewest:
            raise ValueError(
                f"host_bytes_per_sequence={num_bytes} ({format_bytes(num_bytes)}) is too little: "
                f"{sinks} sink tokens, {recent} recent ones and a page of {page_tokens} tokens "
                f"need {need(fewest)} bytes; raise host_bytes_per_sequence or lower page_tokens"
            )
        slots = pages * page_tokens
        if by_page:
            always = -(-(sinks + recent) // page_tokens)
            freed = max(1, min(pages // _SHARE_FREED, pages - always)) * page_tokens
            return cls(slots, slots - freed, sinks, recent, 0)
        freed = min(slots // _SHARE_FREED, slots - sinks - recent - 1)
        # The newest query of a window is then the last token's, where tokens came one by one.
        low = slots - max(1, freed // SPACING * SPACING)
        condensed = min(int(condensed_share * slots), low - sinks - recent)
        return cls(slots, low, sinks, recent, condensed)

    @property
    def freed(self) -> int:
        """Slots that are free when a full sequence was condensed."""
        return self.slots - self.low

    @property
    def most_cropped(self) -> int:
        """Tokens of one pass, at most, all of which may be taken back, however full it was."""
        return max(self.freed, self.recent)

    @property
    def new_condensed(self) -> int:
        """Slots that condensing makes anew, of tokens and of condensed ones before."""
        return -(-self.condensed // _NEW_SHARE)
