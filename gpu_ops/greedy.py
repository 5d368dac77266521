"""Greedy decoding inside the captured step, and the scratch that it shares with sampling."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_ops.checks import check_dtype, check_tensor
from gpu_ops.launch import jit, next_power_of_2, runs_kernel, tl
from gpu_ops.layout import Layout

CHUNK = 2048  # logits of a program
DIGIT_BITS = 4  # of the search of sampling.py
# Of the float32 a logit is read as, the first so many digits tell any two of them apart.
DIGITS = {torch.bfloat16: 4, torch.float16: 5, torch.float32: 8}
NUM_WARPS = 4


@dataclass(frozen=True)
class SamplingBuffers:
    """Scratch for at most `max_rows` rows of `vocab_size` logits; nothing stays in it.

    Attributes:
        chunk_max, chunk_argmax, chunk_mass: [max_rows, num_chunks].
        sums: float32 [max_rows, passes, num_chunks, values of a digit].
        prefix, above, target: [max_rows, passes], what was known before each pass: the digits so
            far, as a number; how much lies above all keys that begin so; how much is to be kept.
        floor: int64 [max_rows, 2], the smallest key that top-k keeps, and top-p of those.
    """

    vocab_size: int
    chunk_max: Tensor
    chunk_argmax: Tensor
    chunk_mass: Tensor
    sums: Tensor
    prefix: Tensor
    above: Tensor
    target: Tensor
    floor: Tensor

    @staticmethod
    def layout(max_rows: int, vocab_size: int) -> Layout:
        """For logits of any dtype: 64 KB a row for 128K logits."""
        chunks = (max_rows, -(-vocab_size // CHUNK))
        passes = (max_rows, 2 * max(DIGITS.values()))
        return {
            "chunk_max": (chunks, torch.float32),
            "chunk_argmax": (chunks, torch.int64),
            "chunk_mass": (chunks, torch.float32),
            "sums": ((*passes, chunks[1], 1 << DIGIT_BITS), torch.float32),
            "prefix": (passes, torch.int64),
            "above": (passes, torch.float32),
            "target": (passes, torch.float32),
            "floor": ((max_rows, 2), torch.int64),
        }

    @property
    def num_chunks(self) -> int:
        return self.chunk_max.shape[1]


@jit
def first_largest(x: tl.tensor) -> tl.tensor:
    """(largest, its index) of a block of float32: the first of equals; NaN if there is one."""
    is_nan = x != x
    largest, index = tl.max(tl.where(is_nan, float("inf"), x), 0, return_indices=True)
    if largest == float("inf"):  # hardly ever: one more reduction
        has_nan = tl.max(is_nan.to(tl.int32), 0) > 0
        largest = tl.where(has_nan, float("nan"), largest)
    return largest, index


@jit
def load_logits(
    logits: tl.tensor,
    row: tl.tensor,
    first: tl.tensor,
    VOCAB_SIZE: tl.constexpr,
    SIZE: tl.constexpr,
) -> tl.tensor:
    """float32 [SIZE] of a row, from `first` on; -inf beyond its end."""
    token = first + tl.arange(0, SIZE)
    x = tl.load(logits + row * VOCAB_SIZE + token, mask=token < VOCAB_SIZE, other=float("-inf"))
    return x.to(tl.float32)


@jit
def chunk_max_kernel(
    logits: tl.tensor,
    chunk_max: tl.tensor,
    chunk_argmax: tl.tensor,
    VOCAB_SIZE: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """One program per row and chunk."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    largest, index = first_largest(load_logits(logits, row, chunk * CHUNK, VOCAB_SIZE, CHUNK))
    tl.store(chunk_max + row * CHUNKS + chunk, largest)
    tl.store(chunk_argmax + row * CHUNKS + chunk, (chunk * CHUNK + index).to(tl.int64))


@jit
def row_max(
    chunk_max: tl.tensor, row: tl.tensor, CHUNKS: tl.constexpr, BLOCK_C: tl.constexpr
) -> tl.tensor:
    """(largest logit, its chunk): the first of equals; NaN if there is one."""
    c = tl.arange(0, BLOCK_C)
    of_chunks = tl.load(chunk_max + row * CHUNKS + c, mask=c < CHUNKS, other=float("-inf"))
    return first_largest(of_chunks)


@jit
def pick_greedy_kernel(
    chunk_max: tl.tensor,
    chunk_argmax: tl.tensor,
    out: tl.tensor,
    CHUNKS: tl.constexpr,
    BLOCK_C: tl.constexpr,
) -> None:
    """One program per row."""
    row = tl.program_id(0).to(tl.int64)
    largest, chunk = row_max(chunk_max, row, CHUNKS, BLOCK_C)
    token = tl.load(chunk_argmax + row * CHUNKS + chunk)
    tl.store(out + row, tl.where(largest == largest, token, -1))


def greedy_tokens(logits: Tensor, out: Tensor, buffers: SamplingBuffers) -> None:
    """out = the token of the largest logit of each row, the lowest of equals; -1 where one is NaN.

    Args:
        logits: [n, vocab_size].
        out: int64 [n].
    """
    n = check_logits(logits, out, buffers)
    if not runs_kernel(logits):
        out.copy_(greedy_reference(logits))
        return
    shape, block_c = chunk_shape(buffers)
    chunk_max_kernel[(n, buffers.num_chunks)](
        logits, buffers.chunk_max, buffers.chunk_argmax, *shape, num_warps=NUM_WARPS
    )
    pick_greedy_kernel[(n,)](
        buffers.chunk_max, buffers.chunk_argmax, out, buffers.num_chunks, block_c, num_warps=1
    )


def greedy_reference(logits: Tensor) -> Tensor:
    """`greedy_tokens` by torch: int64 [n]; torch.argmax does not say which of equals it returns."""
    tokens = torch.arange(logits.shape[1], device=logits.device)
    largest = logits.amax(1, keepdim=True)
    first = torch.where(logits == largest, tokens, logits.shape[1]).amin(1)
    return first.masked_fill(largest[:, 0].isnan(), -1)


def check_logits(logits: Tensor, out: Tensor, buffers: SamplingBuffers) -> int:
    """The number of rows; ValueError if the operands do not fit each other."""
    check_dtype("logits", logits)
    n = out.shape[0]
    check_tensor("logits", logits, (n, buffers.vocab_size), logits.dtype, logits.device)
    check_tensor("out", out, (n,), torch.int64, logits.device)
    max_rows = buffers.chunk_max.shape[0]
    if n > max_rows:
        raise ValueError(f"the sampling buffers are for {max_rows} rows, got {n}")
    return n


def chunk_shape(buffers: SamplingBuffers) -> tuple[tuple[int, int, int], int]:
    """What kernels over chunks take: (VOCAB_SIZE, CHUNKS, CHUNK) and BLOCK_C."""
    return (buffers.vocab_size, buffers.num_chunks, CHUNK), next_power_of_2(buffers.num_chunks)
