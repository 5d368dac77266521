"""What a caller hands to `forward` and `generate`: checked, and packed without padding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from offload.kv.store import KVStore
from offload.models.batch import RaggedBatch, pack
from offload.runtime.cache import OffloadedCache


def rows_shape(
    input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None, hidden_size: int
) -> tuple[int, int]:
    """(batch_size, seq_len) of the one of the two that is given.

    Raises:
        ValueError: both or none, or another shape than [batch_size, seq_len (, hidden_size)].
    """
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError("give exactly one of input_ids and inputs_embeds")
    if input_ids is not None:
        name, given, expected = "input_ids", input_ids, "[batch_size, seq_len]"
        fits = given.ndim == 2 and not given.is_floating_point()
    else:
        assert inputs_embeds is not None
        name, given = "inputs_embeds", inputs_embeds
        expected = f"[batch_size, seq_len, {hidden_size}]"
        fits = given.ndim == 3 and given.shape[2] == hidden_size
    if not fits or not given.numel():
        raise ValueError(
            f"{name} must be {expected} and not empty, got {given.dtype} {list(given.shape)}"
        )
    return int(given.shape[0]), int(given.shape[1])


def check_cache(cache: Any, store: KVStore) -> None:
    """Refuse a cache of another kind, or of another model than that of `store`."""
    if not isinstance(cache, OffloadedCache):
        raise ValueError(
            f"past_key_values must be an OffloadedCache, got {type(cache).__name__}, which "
            "would stay empty; pass past_key_values=model.new_cache()"
        )
    if cache.store is not store:
        raise ValueError("past_key_values belongs to another model")


def pack_rows(
    shape: tuple[int, int],
    shared_rows: torch.Tensor | None,
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    cache: OffloadedCache | None,
    check_context: Callable[[int], None],
) -> RaggedBatch:
    """The tokens of a call without padding, checked against the mask and the cache.

    Args:
        shape: (batch_size, seq_len).
        shared_rows: their ids; rows that start as equal ones, such as beams and samples of one
            prompt, are then computed and stored once. None: each row is.
        check_context: of the model, gets the length of each sequence.
    """
    batch_size, seq_len = shape
    past_columns = cache.get_seq_length() if cache is not None else 0
    past_mask = attended = None
    if attention_mask is not None:
        check_mask(attention_mask, batch_size, past_columns, seq_len)
        past_mask = attention_mask[:, :past_columns] != 0
        attended = attention_mask[:, past_columns:] != 0
        if bool(attended.all()):
            attended = None
    if cache is not None:
        cache.check_continues(batch_size, past_mask)
    if position_ids is None:
        position_ids = torch.arange(past_columns, past_columns + seq_len)[None]
    else:
        check_positions(position_ids, shape, past_columns, attended)
    batch = pack(shape, attended, position_ids, None if past_columns else shared_rows)
    seen = cache.seen_lens if cache is not None and past_columns else [0] * batch.num_sequences
    for num_seen, num_new in zip(seen, batch.num_new_tokens, strict=True):
        check_context(num_seen + num_new)
    return batch


def check_mask(mask: torch.Tensor, batch_size: int, past_columns: int, seq_len: int) -> None:
    """Refuse an attention mask that is not [batch_size, past_columns + seq_len]."""
    if mask.ndim == 4:
        raise NotImplementedError("4D attention masks are not supported; give one per token, 2D")
    expected = [batch_size, past_columns + seq_len]
    if list(mask.shape) != expected:
        raise ValueError(
            f"attention_mask is {list(mask.shape)}, but input_ids [{batch_size}, {seq_len}] after "
            f"{past_columns} cached columns need {expected}"
        )


def check_positions(
    position_ids: torch.Tensor,
    shape: tuple[int, int],
    past_columns: int,
    attended: torch.Tensor | None,
) -> None:
    """Refuse positions that are not [batch_size or 1, seq_len], or that start over in a row.

    `attended` is a bool [batch_size, seq_len], False at padding, or None without padding.
    """
    batch_size, seq_len = shape
    if position_ids.ndim != 2 or tuple(position_ids.shape) not in {shape, (1, seq_len)}:
        raise ValueError(
            f"position_ids are {list(position_ids.shape)}, but input_ids are "
            f"{[batch_size, seq_len]}"
        )
    # transformers reads positions that start over as several sequences packed into one row.
    if attended is None and past_columns == 0 and bool((position_ids.diff(dim=1) < 1).any()):
        raise NotImplementedError(
            "position_ids must ascend: packed sequences in one row are not supported; "
            "give one row per sequence"
        )


def check_tokens(tokens: torch.Tensor, vocab_size: int) -> None:
    """Refuse tokens that are not in the vocabulary."""
    if int(tokens.min()) < 0 or int(tokens.max()) >= vocab_size:
        raise ValueError(
            f"input_ids must be in 0..{vocab_size - 1}, "
            f"got {int(tokens.min())}..{int(tokens.max())}"
        )


def empty_rows(mask: torch.Tensor | None) -> torch.Tensor:
    """int64 [num_rows]: rows of mask [batch_size, columns] that are nothing but padding."""
    if mask is None:
        return torch.empty(0, dtype=torch.int64)
    return (~mask.any(dim=1)).nonzero().squeeze(1)


def check_labels(labels: torch.Tensor, logits: torch.Tensor) -> None:
    """Refuse labels that are not [batch_size, seq_len] of `logits` [batch_size, seq_len, …]."""
    if labels.shape != logits.shape[:-1]:
        raise ValueError(
            f"labels are {list(labels.shape)}, but the logits {list(logits.shape)}; "
            "they need the same rows and positions"
        )


def keep_positions(hidden: torch.Tensor, logits_to_keep: int | torch.Tensor) -> torch.Tensor:
    """The positions of hidden [batch_size, seq_len, hidden_size] whose logits are wanted.

    `logits_to_keep` is the number of last positions (0: all), a tensor of positions [n] or
    [batch_size, n], or a bool mask [batch_size, seq_len] that flattens the first two dimensions.
    """
    if isinstance(logits_to_keep, int):
        return hidden[:, -logits_to_keep:] if logits_to_keep else hidden
    if logits_to_keep.dtype == torch.bool:
        return hidden[logits_to_keep]
    if logits_to_keep.ndim == 2:
        return torch.take_along_dim(hidden, logits_to_keep[..., None], dim=1)
    return hidden[:, logits_to_keep]


def refuse_unsupported(
    generation_config: Any,
    mask: torch.Tensor | None,
    *,
    has_ranks: bool = False,
    has_head: bool = False,
) -> None:
    """Raise for generation options that would need another cache, or parts of the stock layers, or
    with ranks would let each stop when its own clock says so; and for padding on the right."""
    if mask is not None and mask.shape[1] and bool((mask[:, -1] == 0)[mask.any(dim=1)].any()):
        raise ValueError(
            "attention_mask ends in padding; generation needs padding on the left "
            "(tokenizer.padding_side = 'left')"
        )
    if has_ranks and generation_config.max_time is not None:
        raise NotImplementedError(
            f"max_time={generation_config.max_time} with tensor_parallel_size: the ranks' clocks "
            "would stop them at different tokens; use max_new_tokens"
        )
    if generation_config.cache_implementation not in (None, "dynamic"):
        raise ValueError(
            f"cache_implementation={generation_config.cache_implementation!r}: the KV cache of an "
            "offloaded model is its host store; leave cache_implementation out"
        )
    for name in ("assistant_early_exit", "use_mtp")[: 1 if has_head else 2]:
        if getattr(generation_config, name, None):
            raise NotImplementedError(
                f"{name}={getattr(generation_config, name)} is not supported; "
                "assistant_model and prompt_lookup_num_tokens are"
            )
