"""What attention looks like: the numbers that tell real keys and queries from noise.

`MEASURED` holds those of SmolLM2-135M-Instruct on prose, layers 2 to 29;
`statistics_outside_range` compares generated ones with them. Everything is a mean over heads; "top"
tokens are the 2 % of largest weight, sinks left out; a KV head's weights are summed over its group
of query heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields

import torch
from torch import Tensor

SINK_TOKENS = 4
TOP_SHARE = 0.02
NEAR_TOKENS = 64
LFPS_ALPHA = 0.2
LFPS_STEPS = 32


@dataclass(frozen=True)
class AttentionStatistics:
    """Statistics of the last queries of one layer.

    Attributes:
        sink_share: attention on the sinks.
        top_mass: of a query head's other attention, what its top tokens hold.
        group_top_mass: the same for a KV head's summed weights.
        near_share: of a query head's other attention, what the last 64 tokens hold.
        overlap_1, overlap_8, overlap_32: share of a KV head's top tokens that are top tokens that
            many steps later too.
        clustering: share of top tokens whose next top token is at most 2 further on.
        lfps_candidates: share of the context that LFPS's thresholds (alpha 0.2, vertical and slash,
            tables of the last 32 steps, no expansion) make candidates.
    """

    sink_share: float
    top_mass: float
    group_top_mass: float
    near_share: float
    overlap_1: float
    overlap_8: float
    overlap_32: float
    clustering: float
    lfps_candidates: float


# Context -> what the real model gave there, at lengths 2,048, 4,096 to 4,700 and 7,000 to 8,150.
MEASURED = {
    2048: AttentionStatistics(0.298, 0.849, 0.835, 0.620, 0.717, 0.523, 0.389, 0.563, 0.0813),
    4096: AttentionStatistics(0.260, 0.871, 0.851, 0.570, 0.656, 0.497, 0.358, 0.511, 0.0625),
    8192: AttentionStatistics(0.262, 0.908, 0.893, 0.563, 0.668, 0.540, 0.430, 0.538, 0.0473),
}


def attention_statistics(queries: Tensor, keys: Tensor) -> AttentionStatistics:
    """Statistics of consecutive decode steps, the last of them that of the last key.

    Args:
        queries: [num_qo_heads, n, head_dim], n > 32; rotated.
        keys: [num_kv_heads, kv_len, head_dim].

    Raises:
        ValueError: too few queries or keys.
    """
    num_kv_heads, kv_len, head_dim = keys.shape
    n = queries.shape[1]
    if n <= LFPS_STEPS or kv_len < 8 * n:
        raise ValueError(
            f"needs more than {LFPS_STEPS} queries and 8 keys for each, got {n} and {kv_len}"
        )
    groups = queries.reshape(num_kv_heads, -1, n, head_dim)
    heads = [_of_kv_head(q.float(), k.float()) for q, k in zip(groups, keys, strict=True)]
    return mean_statistics(heads)


def mean_statistics(parts: Sequence[AttentionStatistics]) -> AttentionStatistics:
    """The mean of several layers' or heads' statistics."""
    rows = [asdict(part) for part in parts]
    return AttentionStatistics(
        **{f.name: sum(row[f.name] for row in rows) / len(rows) for f in fields(parts[0])}
    )


def _of_kv_head(queries: Tensor, keys: Tensor) -> AttentionStatistics:
    """queries [group_size, n, head_dim], keys [kv_len, head_dim]."""
    n, kv_len = queries.shape[1], keys.shape[0]
    k = round(TOP_SHARE * kv_len)
    weights = queries @ keys.T
    weights *= queries.shape[2] ** -0.5
    first = kv_len - n  # what a query may not see yet lies in the last n columns
    future = torch.ones(n, n, dtype=torch.bool).triu(1)
    weights[:, :, first:].masked_fill_(future, -torch.inf)
    weights = weights.softmax(-1)

    sink = weights[:, :, :SINK_TOKENS].sum(-1)
    near_columns = weights[:, :, first - NEAR_TOKENS :]
    too_far = torch.ones(n, n + NEAR_TOKENS, dtype=torch.bool).tril(0)
    near = near_columns.masked_fill(too_far, 0).sum(-1)
    weights[:, :, :SINK_TOKENS] = 0
    # Not 1 - sink, which rounds to 0 where the sinks have next to everything.
    rest = weights.sum(-1).clamp_min(torch.finfo(weights.dtype).tiny)
    top = weights.topk(k, -1).values.sum(-1)

    group = weights.sum(0)  # [n, kv_len]
    values, tokens = group.topk(k, -1)
    chosen = torch.zeros_like(group, dtype=torch.bool).scatter_(-1, tokens, True)
    overlap = {
        lag: float((chosen[lag:] & chosen[:-lag]).sum() / (k * (n - lag))) for lag in (1, 8, 32)
    }
    gaps = tokens.sort(-1).values.diff(dim=-1)
    return AttentionStatistics(
        sink_share=float(sink.mean()),
        top_mass=float((top / rest).mean()),
        group_top_mass=float((values.sum(-1) / group.sum(-1)).mean()),
        near_share=float((near / rest).mean()),
        overlap_1=overlap[1],
        overlap_8=overlap[8],
        overlap_32=overlap[32],
        clustering=float((gaps <= 2).float().mean()),
        lfps_candidates=_lfps_candidates(group[-LFPS_STEPS:]),
    )


def _lfps_candidates(weights: Tensor) -> float:
    """Share of tokens over either threshold; weights [steps, kv_len], the sinks' are zero."""
    steps, kv_len = weights.shape
    vertical = weights.sum(0)[SINK_TOKENS:]
    slash = torch.zeros(kv_len)  # by distance
    for i, row in enumerate(weights):
        seen = kv_len - steps + i + 1
        slash[:seen] += row[:seen].flip(0)
    slash = slash[: kv_len - SINK_TOKENS]
    candidates = vertical > _threshold(vertical)
    # The next query is that of token kv_len: distance 1 is the last token.
    distances = (slash > _threshold(slash)).nonzero().flatten()
    distances = distances[distances >= 1]
    candidates[kv_len - SINK_TOKENS - distances] = True
    return float(candidates.sum() / kv_len)


def _threshold(table: Tensor) -> float:
    centred = table - table.mean()
    variance = float(centred.square().mean())
    kurtosis = float(centred.pow(4).mean()) / max(variance**2, 1e-30)
    return float(table.mean() + LFPS_ALPHA * table.max() / max(kurtosis, 1.0) ** 0.5)


# How far made layers may be from the real model's mean. The share of candidates is relative to what
# is expected: it falls with the context.
TOLERANCES = AttentionStatistics(
    sink_share=0.10,
    top_mass=0.05,
    group_top_mass=0.06,
    near_share=0.16,
    overlap_1=0.10,
    overlap_8=0.10,
    overlap_32=0.12,
    clustering=0.12,
    lfps_candidates=0.5,
)


def statistics_outside_range(statistics: AttentionStatistics, kv_len: int) -> list[str]:
    """Names of numbers that differ from `MEASURED` at a context by more than TOLERANCES."""
    expected, tolerances = asdict(MEASURED[kv_len]), asdict(TOLERANCES)
    tolerances["lfps_candidates"] *= expected["lfps_candidates"]
    values = asdict(statistics)
    return [x for x in values if not abs(values[x] - expected[x]) <= tolerances[x]]
