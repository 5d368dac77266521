"""Sampling inside the captured step: temperature, top-k and top-p, without a sort.

Sorting 128K logits takes longer than reading them ten times. So the smallest logit to keep is found
digit by digit, the most significant first: each pass adds up how many logits (top-k) or how much
probability (top-p) every value of one digit has, in chunks all over the GPU, and the programs of
the next pass decide the digit from these sums. Without atomics, so that the same input gives the
same token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_ops.checks import check_tensor
from gpu_ops.greedy import (
    DIGIT_BITS,
    DIGITS,
    NUM_WARPS,
    SamplingBuffers,
    check_logits,
    chunk_max_kernel,
    chunk_shape,
    greedy_reference,
    load_logits,
    row_max,
)
from gpu_ops.launch import jit, runs_kernel, tl

_TILE = 128  # logits of a program that are compared with all values of a digit at once


@jit
def sort_key(x: tl.tensor) -> tl.tensor:
    """int64 in [0, 2**32), in the order of the float32 x."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True).to(tl.int64)


@jit
def decide_digit(
    PASS: tl.constexpr,
    IS_SHARE: tl.constexpr,  # the target is `share` of the sum; otherwise it is known
    sums: tl.tensor,
    prefix: tl.tensor,
    above: tl.tensor,
    target: tl.tensor,
    share: tl.tensor,
    row: tl.tensor,
    PASSES: tl.constexpr,
    BITS: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK_C: tl.constexpr,
) -> tl.tensor:
    """(prefix, above, target) after the digit of pass PASS: the largest that keeps the target."""
    c, value = tl.arange(0, BLOCK_C), tl.arange(0, 1 << BITS)
    rows = ((row * PASSES + PASS) * CHUNKS + c)[:, None] * (1 << BITS) + value[None, :]
    amounts = tl.sum(tl.load(sums + rows, mask=(c < CHUNKS)[:, None], other=0.0), 0)
    state = row * PASSES + PASS
    higher = tl.load(above + state)
    wanted = tl.load(target + state)
    if IS_SHARE:  # never 0, or a top_p of 0 would keep nothing
        wanted = tl.maximum(share * tl.sum(amounts, 0), 1e-30)
    is_at_least = value[None, :] >= value[:, None]
    at_least = higher + tl.sum(tl.where(is_at_least, amounts[None, :], 0.0), 1)
    digit = tl.max(tl.where(at_least >= wanted, value, 0), 0)
    higher += tl.sum(tl.where(value > digit, amounts, 0.0), 0)
    return (tl.load(prefix + state) << BITS) | digit.to(tl.int64), higher, wanted


@jit
def digit_kernel(
    logits: tl.tensor,
    temperatures: tl.tensor,
    top_ks: tl.tensor,
    top_ps: tl.tensor,
    chunk_max: tl.tensor,
    sums: tl.tensor,
    prefix: tl.tensor,
    above: tl.tensor,
    target: tl.tensor,
    floor: tl.tensor,
    PASS: tl.constexpr,  # the digits of top-k's floor, then those of top-p's
    DIGITS: tl.constexpr,
    PASSES: tl.constexpr,
    BITS: tl.constexpr,
    VOCAB_SIZE: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_C: tl.constexpr,
) -> None:
    """One program per row and chunk: decides the digit before, and adds up the values of this."""
    BY_MASS: tl.constexpr = PASS >= DIGITS
    DIGIT: tl.constexpr = PASS % DIGITS
    SHIFT: tl.constexpr = 32 - BITS * (DIGIT + 1)
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature, top_p = tl.load(temperatures + row), tl.load(top_ps + row)
    top_k = tl.load(top_ks + row)
    has_top_k = (top_k > 0) & (top_k < VOCAB_SIZE)
    if temperature <= 0:
        return

    sources = (sums, prefix, above, target, top_p, row)
    smallest = tl.zeros([], tl.int64)
    if BY_MASS:
        if DIGIT == 0:
            if has_top_k:
                found, _, _ = decide_digit(PASS - 1, False, *sources, PASSES, BITS, CHUNKS, BLOCK_C)
                smallest = found << (32 - BITS * DIGITS)
            if chunk == 0:
                tl.store(floor + row * 2, smallest)
        else:
            smallest = tl.load(floor + row * 2)
        if top_p >= 1:
            return
    elif not has_top_k:
        return

    known = tl.zeros([], tl.int64)
    higher = tl.zeros([], tl.float32)
    wanted = top_k.to(tl.float32)
    if DIGIT > 0:
        known, higher, wanted = decide_digit(
            PASS - 1, BY_MASS and DIGIT == 1, *sources, PASSES, BITS, CHUNKS, BLOCK_C
        )
    state = row * PASSES + PASS
    if chunk == 0:
        tl.store(prefix + state, known)
        tl.store(above + state, higher)
        tl.store(target + state, wanted)

    largest, _ = row_max(chunk_max, row, CHUNKS, BLOCK_C)
    value = tl.arange(0, 1 << BITS)
    amounts = tl.zeros([TILE, 1 << BITS], tl.float32)
    for start in range(0, CHUNK, TILE):
        token = chunk * CHUNK + start + tl.arange(0, TILE)
        inside = token < VOCAB_SIZE
        x = tl.load(logits + row * VOCAB_SIZE + token, mask=inside, other=float("-inf"))
        x = x.to(tl.float32)
        key = sort_key(x)
        counts = inside & (key >= smallest) & ((key >> (SHIFT + BITS)) == known)
        amount = tl.where(counts, 1.0, 0.0)
        if BY_MASS:
            amount *= tl.exp((x - largest) / temperature)
        digit = ((key >> SHIFT) & ((1 << BITS) - 1)).to(tl.int32)
        amounts += tl.where(digit[:, None] == value[None, :], amount[:, None], 0.0)
    target_row = ((row * PASSES + PASS) * CHUNKS + chunk) * (1 << BITS)
    tl.store(sums + target_row + value, tl.sum(amounts, 0))


@jit
def kept_mass_kernel(
    logits: tl.tensor,
    temperatures: tl.tensor,
    top_ps: tl.tensor,
    chunk_max: tl.tensor,
    chunk_mass: tl.tensor,
    sums: tl.tensor,
    prefix: tl.tensor,
    above: tl.tensor,
    target: tl.tensor,
    floor: tl.tensor,
    DIGITS: tl.constexpr,
    PASSES: tl.constexpr,
    BITS: tl.constexpr,
    VOCAB_SIZE: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_C: tl.constexpr,
) -> None:
    """One program per row and chunk: the probability in it that is kept."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature, top_p = tl.load(temperatures + row), tl.load(top_ps + row)
    if temperature <= 0:
        return
    sources = (sums, prefix, above, target, top_p, row)
    smallest = tl.load(floor + row * 2)
    if top_p < 1:
        found, _, _ = decide_digit(2 * DIGITS - 1, False, *sources, PASSES, BITS, CHUNKS, BLOCK_C)
        smallest = tl.maximum(smallest, found << (32 - BITS * DIGITS))
    if chunk == 0:
        tl.store(floor + row * 2 + 1, smallest)
    largest, _ = row_max(chunk_max, row, CHUNKS, BLOCK_C)
    x = load_logits(logits, row, chunk * CHUNK, VOCAB_SIZE, CHUNK)
    mass = tl.where(sort_key(x) >= smallest, tl.exp((x - largest) / temperature), 0.0)
    tl.store(chunk_mass + row * CHUNKS + chunk, tl.sum(mass, 0))


@jit
def first_beyond(mass: tl.tensor, amount: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """The first index up to which more than `amount` adds up; the last with mass if none does."""
    index = tl.arange(0, BLOCK)
    has_mass = mass > 0
    last = tl.max(tl.where(has_mass, index, 0), 0)
    beyond = has_mass & (tl.cumsum(mass, 0) > amount)
    return tl.minimum(tl.min(tl.where(beyond, index, BLOCK), 0), last)


@jit
def pick_kernel(
    logits: tl.tensor,
    temperatures: tl.tensor,
    uniform: tl.tensor,
    chunk_max: tl.tensor,
    chunk_argmax: tl.tensor,
    chunk_mass: tl.tensor,
    floor: tl.tensor,
    out: tl.tensor,
    VOCAB_SIZE: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_C: tl.constexpr,
) -> None:
    """One program per row: the token where the kept probabilities add up to `uniform` of all."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    largest, chunk = row_max(chunk_max, row, CHUNKS, BLOCK_C)
    if temperature <= 0:
        token = tl.load(chunk_argmax + row * CHUNKS + chunk)
        tl.store(out + row, tl.where(largest == largest, token, -1))
        return
    if (tl.abs(largest) < float("inf")) == 0:  # NaN, too
        tl.store(out + row, -1)
        return
    c = tl.arange(0, BLOCK_C)
    masses = tl.load(chunk_mass + row * CHUNKS + c, mask=c < CHUNKS, other=0.0)
    amount = tl.load(uniform + row) * tl.sum(masses, 0)
    chunk = first_beyond(masses, amount, BLOCK_C)
    amount -= tl.sum(tl.where(c < chunk, masses, 0.0), 0)
    x = load_logits(logits, row, chunk * CHUNK, VOCAB_SIZE, CHUNK)
    smallest = tl.load(floor + row * 2 + 1)
    mass = tl.where(sort_key(x) >= smallest, tl.exp((x - largest) / temperature), 0.0)
    tl.store(out + row, (chunk * CHUNK + first_beyond(mass, amount, CHUNK)).to(tl.int64))


def sample_tokens(
    logits: Tensor,
    *,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    uniform: Tensor,
    out: Tensor,
    buffers: SamplingBuffers,
) -> None:
    """Draw a token per row: temperature, top-k, top-p of what is left, the order of transformers.

    What is kept is what is not smaller than some logit: of tokens that tie for the last place all
    are kept (transformers does so in top-k, and in top-p keeps some of them).

    Args:
        logits: [n, vocab_size].
        temperature: float32 [n]; 0 takes the largest logit, the lowest token of equals.
        top_k: int64 [n]; the k largest are kept; 0 keeps all.
        top_p: float32 [n]; the smallest set of at least this probability is kept; 1 keeps all.
        uniform: float32 [n] in [0, 1): draws the token where the kept probabilities, added up in
            the order of tokens, exceed this share of their sum.
        out: int64 [n]; -1 where no token can be drawn: a logit is NaN or inf, or all are -inf. With
            temperature 0 only NaN is so.
    """
    n = check_logits(logits, out, buffers)
    device = logits.device
    check_tensor("temperature", temperature, (n,), torch.float32, device)
    check_tensor("top_k", top_k, (n,), torch.int64, device)
    check_tensor("top_p", top_p, (n,), torch.float32, device)
    check_tensor("uniform", uniform, (n,), torch.float32, device)
    if not runs_kernel(logits):
        return sample_tokens_reference(
            logits, temperature=temperature, top_k=top_k, top_p=top_p, uniform=uniform, out=out
        )
    shape, block_c = chunk_shape(buffers)
    grid = (n, buffers.num_chunks)
    maxima = (buffers.chunk_max, buffers.chunk_argmax)
    state = (buffers.sums, buffers.prefix, buffers.above, buffers.target, buffers.floor)
    digits = DIGITS[logits.dtype]
    passes = (digits, buffers.sums.shape[1], DIGIT_BITS)
    drawn, warps = (logits, temperature), {"num_warps": NUM_WARPS}
    chunk_max_kernel[grid](logits, *maxima, *shape, **warps)
    for i in range(2 * digits):
        digit_kernel[grid](
            *drawn, top_k, top_p, maxima[0], *state, i, *passes, *shape, _TILE, block_c, **warps
        )
    masses = (buffers.chunk_max, buffers.chunk_mass)
    kept_mass_kernel[grid](*drawn, top_p, *masses, *state, *passes, *shape, block_c, **warps)
    pick_kernel[(n,)](
        *drawn, uniform, *maxima, buffers.chunk_mass, buffers.floor, out, *shape, block_c, **warps
    )


def sample_tokens_reference(
    logits: Tensor,
    *,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    uniform: Tensor,
    out: Tensor,
) -> None:
    """`sample_tokens` by torch, in float64."""
    out.copy_(greedy_reference(logits))
    for row in temperature.gt(0).nonzero()[:, 0].tolist():
        if not bool(logits[row].amax().isfinite()):
            out[row] = -1
            continue
        probabilities = (logits[row].double() / float(temperature[row])).softmax(0)
        k = int(top_k[row])
        if 0 < k < logits.shape[1]:
            probabilities[logits[row] < logits[row].topk(k).values[-1]] = 0.0
        if float(top_p[row]) < 1.0:
            ordered = probabilities.sort(descending=True).values
            sums = ordered.cumsum(0)
            enough = int((sums < max(float(top_p[row]), 1e-30) * sums[-1]).sum())
            probabilities[probabilities < ordered[enough]] = 0.0
        sums = probabilities.cumsum(0)
        out[row] = (sums > float(uniform[row]) * sums[-1]).byte().argmax()
