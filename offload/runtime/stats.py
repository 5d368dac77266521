"""What a generation did: tokens, seconds and bytes."""

from __future__ import annotations

from dataclasses import dataclass


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
    with a prompt's. With `use_mtp`, drafted_tokens were proposed, of which accepted_tokens stayed.
    With threads: what the last one did, or does.
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
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    @property
    def prefill_tokens_per_second(self) -> float:
        return self.prefill_tokens / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def decode_tokens_per_second(self) -> float:
        return self.decode_tokens / self.decode_seconds if self.decode_seconds else 0.0
