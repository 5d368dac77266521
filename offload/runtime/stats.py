"""What a generation did: tokens, seconds and bytes."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass
class OffloadStats:
    """What the last `generate()` did, and the forward passes since.

    In a generation, seconds of decoding count from the end of one forward pass to the end of the
    next, so they include choosing and streaming tokens. index_seconds went into building what the
    policy keeps of a context, and setup_seconds into what a GPU needs before the first step of its
    kind or size, such as its graph; both are in neither. kv_host_bytes is the most that was in use,
    policy_host_bytes what the policy keeps beside it. Of a model with `host_bytes_per_sequence`,
    condensed_tokens have lost their places, which took condense_seconds of prefill and decode
    seconds. With `cache_correction_every`, corrected_tokens were read again, which took
    correction_seconds of decode seconds (what goes on beside steps is not counted apart), or came
    with a prompt's. With threads: what the last one did, or does.
    """

    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0
    kv_host_bytes: int = 0
    kv_device_bytes: int = 0
    index_seconds: float = 0.0
    policy_host_bytes: int = 0
    setup_seconds: float = 0.0
    condensed_tokens: int = 0
    condense_seconds: float = 0.0
    corrected_tokens: int = 0
    correction_seconds: float = 0.0

    @property
    def prefill_tokens_per_second(self) -> float:
        return self.prefill_tokens / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def decode_tokens_per_second(self) -> float:
        return self.decode_tokens / self.decode_seconds if self.decode_seconds else 0.0


@dataclass
class PassCounter:
    """Counts forward passes, those of a `generate()` or others.

    Attributes:
        prefill_threads: of torch while a prompt is prefilled; None: as torch has it.
        is_running: they are those of a `generate()`.
        stats: what is counted; outside of a `generate()` also what the last one has counted.
    """

    prefill_threads: int | None
    is_running: bool = False
    stats: OffloadStats = field(default_factory=OffloadStats)
    _start: float = 0.0
    _last_end: float | None = None

    def restart_watch(self) -> None:
        """The next decode step counts from its own start: something else ran in between."""
        self._last_end = None

    def begin_pass(self, seconds: float = 0.0) -> None:
        """A pass begins, or something that counts as one has, so many seconds ago."""
        self._start = time.perf_counter() - seconds

    def count_index(self, seconds: float) -> None:
        """`seconds` of building what the policy keeps, which do not count as decoding."""
        self.stats.index_seconds += seconds
        self._leave_out(seconds)

    def count_setup(self, seconds: float) -> None:
        """`seconds` of the decoder's set-up, which do not count as decoding."""
        self.stats.setup_seconds += seconds
        self._leave_out(seconds)

    def _leave_out(self, seconds: float) -> None:
        self._start += seconds
        if self._last_end is not None:
            self._last_end += seconds

    def count_correction(self, num_tokens: int) -> None:
        """So many were read again, which the thread that decodes had to do with from `begin_pass`
        to now."""
        self.stats.corrected_tokens += num_tokens
        self.stats.correction_seconds += time.perf_counter() - self._start
        self.count_pass("decode", 0)

    def count_pass(self, phase: str, num_tokens: int) -> None:
        """A forward pass of `num_tokens` tokens from `begin_pass` to now."""
        stats, end = self.stats, time.perf_counter()
        if phase != "prefill":
            stats.decode_tokens += num_tokens
            stats.decode_seconds += end - (self._last_end or self._start)
        else:
            stats.prefill_tokens += num_tokens
            stats.prefill_seconds += end - self._start
        # Between the passes of a generation tokens are chosen; between others, anything may happen.
        self._last_end = end if self.is_running else None
