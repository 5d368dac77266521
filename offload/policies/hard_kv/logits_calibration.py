"""Temperatures at which scores of blocks count as attention: HARD-KV's logits calibration.

Source: Zeng et al., HARD-KV (arXiv 2606.28831), Problem 1 and Constraint 1: of each head a
temperature at which the metric's own top-N holds a given probability, N being what true attention
needs for p; dividing by a temperature keeps the order. N is rounded up to blocks, which share a
score.

One number per KV head of a layer is solved for, by bisection, for all queries of a window together:
the blocks that it selects for them have as many tokens as they need in all. What they need is a
choice (`Calibrate`). In the paper it is what exact attention takes for p, "tokens". Where a metric
finds less than that, as bounds do, fewer weights are kept where more tokens were needed; "mass" is
what its own order takes until p of true attention is held. docs/notes/hard-kv.md compares them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import torch
from torch import Tensor

# Tokens that a head's temperature is solved for: as many as its blocks need, in their order, or as
# many as exact top-p takes.
Calibrate = Literal["mass", "tokens"]
CALIBRATE: tuple[Calibrate, ...] = get_args(Calibrate)
WINDOW_QUERIES = 64
LEAST_BLOCKS = 32  # to choose from: of fewer a temperature says little of later steps
# The probability that the metric's top-N shall hold under "tokens". Any selects as many tokens in
# the window; after it a small one does better: the tail of bounds is long and says little.
SHARE_OF_TOKENS = 0.35
LEAST_OF_HEAD = 0.5  # of its attention, a query head keeps: as cpp/attention cuts by weights
_COLDEST, _HOTTEST = 4.0, -8.0  # log(1 / temperature)
_ROUNDS = 24  # of bisection: to 1e-6 of that


def share_of(calibrate: Calibrate, top_p: float, group_size: int) -> float:
    """The share of the calibrated softmax that is selected.

    Under "mass" it is p, as in the paper: many heads need most of the tokens in the order of their
    bounds, which a smaller share would not reach. And so is what `needed_tokens` asks at least.
    """
    return _least_share(top_p, group_size) if calibrate == "mass" else SHARE_OF_TOKENS


def _least_share(top_p: float, group_size: int) -> float:
    """The share of a group's attention that leaves each query head LEAST_OF_HEAD or more."""
    return max(top_p, (group_size - LEAST_OF_HEAD) / group_size)


@dataclass(frozen=True, eq=False)
class Blocks:
    """How a policy ranks blocks of tokens for past queries.

    Attributes:
        scores: [num_kv_heads, n, num_blocks].
        tokens: [n, num_blocks], of a block that a query may select.
        starts: [num_blocks + 1], where blocks begin and the last one ends.
    """

    scores: Tensor
    tokens: Tensor
    starts: Tensor

    @cached_property
    def ranked(self) -> tuple[Tensor, Tensor]:
        """Scores in descending order, blocks without tokens last, and which blocks those are."""
        return self.scores.masked_fill(self.tokens == 0, -torch.inf).sort(-1, descending=True)

    def ends(self) -> Tensor:
        """[n, 1], behind which no token can be chosen: all there are attended."""
        ends = (self.starts[:-1] + self.tokens) * (self.tokens > 0)
        first = self.starts[:1].expand(len(ends), 1)
        return torch.cat([first, ends], dim=1).amax(1, keepdim=True)


def needed_tokens(
    keys: Tensor,
    queries: Tensor,
    blocks: Blocks,
    *,
    in_order: bool,
    sm_scale: float,
    sink_tokens: int,
    recent_tokens: int,
    top_p: float,
) -> Tensor:
    """How many tokens in addition to those always attended have top_p of past queries' attention.

    Always attended are sinks, recent window, and tokens between the last block and that.

    Args:
        keys: [num_kv_heads, kv_len, head_dim].
        queries: [num_qo_heads, n, head_dim] of the last n tokens, oldest first.
        blocks: of tokens that can be chosen.
        in_order: blocks are taken in their order, each as a whole; else the heaviest tokens are.

    Returns:
        float32 [num_kv_heads, n].
    """
    num_kv_heads, kv_len, _ = keys.shape
    group_size, n = len(queries) // num_kv_heads, queries.shape[1]
    positions, newest = torch.arange(kv_len), torch.arange(kv_len - n, kv_len)[:, None]
    is_always = (positions < sink_tokens) | (positions > newest - recent_tokens)  # [n, kv_len]
    is_always |= positions >= blocks.ends()
    mass = group_size * _least_share(top_p, group_size)
    needed = torch.empty(num_kv_heads, n)
    order, num_blocks = blocks.ranked[1], blocks.scores.shape[2]
    block = torch.bucketize(positions, blocks.starts[1:], right=True)
    # Of one head each, used again by the next: fresh memory takes longer than what is done in it.
    logits = torch.empty(group_size * n, kv_len)
    weights, held, total = torch.empty_like(logits), torch.empty(n, kv_len), torch.empty(n, kv_len)
    for head, of_head in enumerate(queries.reshape(num_kv_heads, group_size * n, queries.shape[2])):
        torch.mm(sm_scale * of_head.float(), keys[head].float().T, out=logits)
        newer = positions[kv_len - n :] > newest
        logits.view(group_size, n, kv_len)[..., kv_len - n :].masked_fill_(newer, -torch.inf)
        torch.softmax(logits, -1, out=weights)
        torch.sum(weights.view(group_size, n, kv_len), 0, out=total)
        held.copy_(total).masked_fill_(is_always, 0.0)
        always = total.sum(-1, keepdim=True) - held.sum(-1, keepdim=True)
        if not in_order:
            # In place, and NumPy's: torch's sort takes several times as long.
            held.neg_().numpy().sort(axis=-1)
            of_blocks, sizes = held.neg_(), (held > 0.0).long()
        else:
            of_blocks = torch.zeros(n, num_blocks + 1).index_add_(1, block, held)[:, :num_blocks]
            of_blocks, sizes = (x.gather(-1, order[head]) for x in (of_blocks, blocks.tokens))
        before = of_blocks.double().cumsum(-1).add_(always).sub_(of_blocks)
        needed[head] = (sizes * (before < mass)).sum(-1)
    return needed


def selected_tokens(below: Tensor, tokens: Tensor, beta: Tensor, share: float) -> Tensor:
    """How many tokens the first blocks have that hold a share of the calibrated softmax.

    Args:
        below: [heads, n, num_blocks] scores, descending, less the highest one.
        tokens: of these blocks.
        beta: [heads], 1 / temperature.

    Returns:
        [heads, n].
    """
    masses = torch.mul(below, beta[:, None, None]).exp_().mul_(tokens)
    before = masses.cumsum(-1).sub_(masses)
    is_in = before < share * masses.sum(-1, keepdim=True)
    return torch.mul(tokens, is_in, out=masses).sum(-1)


def inverse_temperatures(blocks: Blocks, needed: Tensor, room: int, share: float) -> Tensor:
    """Each head's largest 1 / temperature that selects what is needed in all.

    Args:
        needed: tokens [num_kv_heads, n].
        room: a selection has no more tokens.

    Returns:
        float64 [heads]; 0 where the flattest softmax selects too few, where scores are not finite,
        without queries, or where the newest has fewer than LEAST_BLOCKS to choose from: nothing
        says how much to leave out there.
    """
    scores = blocks.scores
    num_heads = len(scores)
    found = torch.zeros(num_heads, dtype=torch.float64)
    if not scores.numel() or (blocks.tokens[-1] > 0).sum() < LEAST_BLOCKS:
        return found
    ranked, order = blocks.ranked
    ordered = blocks.tokens.float().expand_as(scores).gather(-1, order)
    wanted = needed.clamp(max=room).sum(-1)
    below = (ranked - ranked[..., :1]).clamp_(min=-1e30)

    def enough(logs: Tensor) -> Tensor:
        counts = selected_tokens(below, ordered, logs.exp(), share)
        return counts.clamp(max=room).sum(-1) >= wanted

    low, high = (torch.full((num_heads,), x) for x in (_HOTTEST, _COLDEST))
    solved = enough(low) & scores.isfinite().all(-1).all(-1)
    for _ in range(_ROUNDS):
        middle = (low + high) / 2
        is_enough = enough(middle)
        low, high = torch.where(is_enough, middle, low), torch.where(is_enough, high, middle)
    return torch.where(solved, low.double().exp(), found)
