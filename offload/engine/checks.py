"""What an engine cannot be made of."""

from __future__ import annotations

from typing import Any


def check_options(
    max_num_seqs: int, max_queued: int, slice_seconds: float, read_share: float, overcommit: float
) -> None:
    """Refuse arguments out of range."""
    if max_num_seqs < 1:
        raise ValueError(f"max_num_seqs must be at least 1, got {max_num_seqs}")
    if max_queued < 0:
        raise ValueError(f"max_queued must not be negative, got {max_queued}")
    if not slice_seconds > 0.0:
        raise ValueError(f"slice_seconds must be positive, got {slice_seconds}")
    if not 0.0 < read_share < 1.0:
        raise ValueError(f"read_share must be between 0 and 1, got {read_share}")
    if not overcommit >= 1.0:
        raise ValueError(f"overcommit must be at least 1, got {overcommit}")


def check_model(runtime: Any) -> None:
    """Refuse options whose state is of one generation."""
    options = {
        "tensor_parallel_size": runtime.ranks,
        "host_bytes_per_sequence": runtime.sequences.compression,
        "mean_tokens of hard_kv": runtime.attention.top_p_controller,
    }
    for name, value in options.items():
        if value is not None:
            raise NotImplementedError(f"an engine cannot run a model with {name}; leave it out")
    if runtime.reads_at_once:
        raise NotImplementedError(
            f"an engine cannot run a model of type {runtime.stock.config.model_type!r}: it reads "
            "prompts in parts, at which transformers' modules of this type forget their states; "
            "use generate()"
        )
