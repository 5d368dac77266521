"""A bound on the host memory of each prompt and its answer: scored against the whole KV.

A bounded prompt is read by itself: what is condensed of it while it is read depends on the bound.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from offload.kv.format import KVFormat
from offload.kv_compression.bound import CONDENSED_SHARE
from offload.loading.checkpoint import Checkpoint
from offload.runtime.compressing import check_bound
from offload.runtime.config import RuntimeConfig
from offload.runtime.shared_model import BoundedModel, ReadPrompt, SharedModel

AUTO = "auto"
# What becomes of the tokens of a full sequence, as options of `RuntimeConfig`.
EVICTIONS: dict[str, dict[str, Any]] = {
    AUTO: {},
    "reread": {"condense_by": "reconstruction", "condensed_share": CONDENSED_SHARE},
    "fitted": {"condense_by": "attention"},
    "dropped": {"condense_by": "attention", "condensed_share": 0.0},
}


@dataclass(frozen=True)
class Bound:
    """What one sequence may have.

    Attributes:
        share: of the bytes that the keys and values of prompt and answer take, in (0, 1).
        eviction: one of `EVICTIONS`: what becomes of the tokens beyond.
    """

    share: float
    eviction: str = AUTO

    def label(self, policy: str) -> str:
        """The name that records use for a policy within this bound."""
        words = [policy, f"host={self.share:g}"]
        return " ".join(words if self.eviction == AUTO else [*words, self.eviction])


def all_labels(policies: Sequence[str], bounds: Sequence[Bound]) -> list[str]:
    """Each policy's, then those of it within each bound."""
    return [label for policy in policies for label in (policy, *(b.label(policy) for b in bounds))]


@dataclass(frozen=True)
class BoundedPrompt:
    """A prompt that was read within a bound.

    Attributes:
        model: continues it, once, as its runtime 0.
    """

    model: BoundedModel
    prompt: ReadPrompt
    host_bytes: int

    def measured(self) -> dict[str, Any]:
        """For the record: the bound, and what has become of the tokens by now.

        condensed_tokens are no longer in the cache as they were; condensed_slots stand for them.
        """
        (row,), bound = self.prompt.cache.tokens, self.prompt.cache.bound
        assert bound is not None
        return {
            "host_bytes": self.host_bytes,
            "slots": bound.slots,
            "seen_tokens": row.seen,
            "condensed_tokens": row.seen - row.kept,
            "condensed_slots": row.condensed,
            "prefill_seconds": round(self.prompt.seconds, 4),
        }


@contextlib.contextmanager
def read_within(
    bound: Bound, model: SharedModel, index: int, tokens: Sequence[int], num_further: int
) -> Iterator[BoundedPrompt]:
    """A prompt that `runtimes[index]` of `model` reads within a bound; its memory is free after.

    Args:
        num_further: tokens that the sequence may get after the prompt; the share is of all.

    Raises:
        ValueError: as `OffloadedModel.from_pretrained` with host_bytes_per_sequence.
    """
    store = model.runtimes[index].store
    store.trim()  # its slabs are of no use to the other store, and both have the host's budget
    host_bytes = int(bound.share * store.token_bytes * (len(tokens) + num_further))
    bounded = model.bounded(index, host_bytes, **EVICTIONS[bound.eviction])
    with contextlib.closing(bounded), bounded.read(tokens) as prompt:
        yield BoundedPrompt(bounded, prompt, host_bytes)


def check_share(share: float) -> None:
    """Refuse what is no share of the bytes.

    Raises:
        ValueError: it is not above 0 and below 1.
    """
    if not 0 < share < 1:
        raise ValueError(f"the share of the bytes must be above 0 and below 1, got {share}")


def check_text_bound(
    checkpoint: Checkpoint, config: RuntimeConfig, num_tokens: int, share: float, eviction: str
) -> None:
    """Refuse a share of the bytes of `num_tokens` that is too little, before weights are read.

    Args:
        eviction: one of `EVICTIONS`; some are not for every policy.

    Raises:
        ValueError: as `check_bound`, with the share.
    """
    shape = checkpoint.shape
    item_bytes = checkpoint.loaded_dtype(config.dtype).itemsize
    of_rows = KVFormat.of(config.kv_dtype, checkpoint.loaded_dtype(config.dtype))
    of_token = of_rows.token_bytes(shape.num_layers, shape.num_kv_heads, shape.head_dim)
    bound = int(share * of_token * num_tokens)
    try:
        bounded = replace(config, host_bytes_per_sequence=bound, **EVICTIONS[eviction])
        check_bound(bounded, shape, checkpoint.config, item_bytes)
    except ValueError as error:
        raise ValueError(
            f"{share:g} of the {of_token * num_tokens} bytes of {num_tokens:,} tokens, "
            f"{eviction}: {error}"
        ) from error
