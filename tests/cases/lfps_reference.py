"""LFPS in float64 NumPy: eager decay, every formula over whole tables."""

from __future__ import annotations

import numpy as np

from offload.policies.lfps.policy import LFPS

OFFSETS = (-1, 0, 1, 2)
HEIGHTS, LOWER = 12, 0.7  # of thresholds, before all above the mean


def threshold(table: np.ndarray, alpha: float) -> float:
    centred = table - table.mean()
    variance = (centred**2).mean()
    if variance == 0.0:
        return np.inf
    kurtosis = (centred**4).mean() / variance**2
    return table.mean() + alpha * table.max() / np.sqrt(kurtosis)


def above(table: np.ndarray, theta: float, share: float) -> np.ndarray:
    """Indices above the threshold, lowered to a share of its height above the mean."""
    mean = table.mean()
    return np.flatnonzero(table > (mean + share * (theta - mean) if share > 0 else mean))


def softmax(x: np.ndarray) -> np.ndarray:
    exp = np.exp(x - x.max(-1, keepdims=True))
    return exp / exp.sum(-1, keepdims=True)


class Unit:
    """Tables of one unit: its query heads share one KV head.

    Args:
        queries: [group, n, head_dim] of the last n tokens; keys, values: [kv_len, head_dim].
    """

    def __init__(self, policy: LFPS, queries, keys, values) -> None:
        self.policy, self.scale = policy, keys.shape[1] ** -0.5
        self.attempt = 0  # that sufficed in the step before
        self.budget = policy.budget_tokens - policy.sink_tokens - policy.recent_tokens
        self.vertical = np.zeros(len(keys))
        self.slash = np.zeros(len(keys))
        sinks, n = policy.sink_tokens, queries.shape[1]
        for row in range(n):
            t = len(keys) - n + row
            if t < sinks:
                continue
            weights = softmax(self.scale * queries[:, row] @ keys[sinks : t + 1].T).mean(0)
            self._add(np.arange(sinks, t + 1), weights * 0.5 / ((1 - policy.gamma) * n), t)
        self.mean_key, self.mean_value = keys[sinks:].mean(0), values[sinks:].mean(0)
        last = self.scale * queries[:, -1] @ keys[sinks:].T
        self.ratios = last.var(-1) / (queries[:, -1] ** 2).sum(-1)

    def _grow(self, length: int) -> None:
        grown = max(len(self.vertical), length)
        self.vertical = np.pad(self.vertical, (0, grown - len(self.vertical)))
        self.slash = np.pad(self.slash, (0, grown - len(self.slash)))

    def _add(self, tokens, weights, t: int) -> None:
        self._grow(t + 1)
        self.vertical[tokens] += weights
        self.slash[t - tokens] += weights

    def candidates(self, kv_len: int) -> np.ndarray:
        """Before the query of token kv_len - 1."""
        policy, t = self.policy, kv_len - 1
        self._grow(kv_len)
        sinks, last = policy.sink_tokens, kv_len - policy.recent_tokens
        vertical, slash = self.vertical[sinks:t], self.slash[: t - sinks]
        theta_v, theta_s = threshold(vertical, policy.alpha), threshold(slash, policy.alpha)
        mean_v, mean_s = vertical.mean(), slash.mean()
        wanted = min(int(policy.candidates_per_budget * self.budget), last - sinks)
        chosen: set[int] = set()
        for attempt in range(max(self.attempt - 1, 0), HEIGHTS + 2):
            share = LOWER**attempt if attempt < HEIGHTS else 0.0
            initial = {
                sinks + i + d
                for i in above(vertical, theta_v, share)
                for d in range(policy.spread + 1)
                if sinks + i <= last
            }
            initial |= {t - j for j in above(slash, theta_s, share)}
            if attempt == HEIGHTS + 1:
                initial |= set(range(max(sinks, last - (wanted - len(chosen))), last))
            chosen = set()
            for i in initial:
                for p in (i + d for d in OFFSETS):
                    if sinks <= p < last and (
                        p == i or self.vertical[p] > mean_v or self.slash[t - p] > mean_s
                    ):
                        chosen.add(p)
            self.attempt = attempt
            if len(chosen) >= wanted:
                break
        return np.array(sorted(chosen), np.int64)

    def bypassed(self, queries, keys, values) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Which heads are highly sparse, and what they answer: o [group, head_dim] and lse."""
        sinks = self.policy.sink_tokens
        scores = self.scale * queries @ keys.T
        top = scores.max()
        of_sinks = np.exp(scores[:, :sinks] - top)
        local = np.exp(scores[:, -5:] - top).sum(-1)
        spread = 0.5 * self.ratios * (queries**2).sum(-1)
        mean = self.scale * queries @ self.mean_key
        everything = (len(keys) - sinks) * np.exp(mean + spread - top)
        rest = np.maximum(everything, local)
        share = of_sinks.sum(-1) / (of_sinks.sum(-1) + rest)
        value = of_sinks / of_sinks.sum(-1, keepdims=True) @ values[:sinks]
        output = share[:, None] * value + (1 - share[:, None]) * self.mean_value
        lse = top + np.log(of_sinks.sum(-1) + rest)
        return share > self.policy.bypass_threshold, output, lse

    def observe(self, queries, keys, attended: np.ndarray, votes: np.ndarray) -> None:
        """`attended`: sorted tokens, of which keys are [kv_len, head_dim]."""
        if not votes.any():
            return
        self.vertical *= self.policy.gamma
        self.slash *= self.policy.gamma
        tokens = attended[attended >= self.policy.sink_tokens]
        weights = softmax(self.scale * queries[votes] @ keys[tokens].T).mean(0)
        self._add(tokens, 0.5 * weights, len(keys) - 1)

    def truncate(self, kv_len: int) -> None:
        self.vertical = self.vertical[:kv_len]
        self.slash = self.slash[: max(kv_len - self.policy.sink_tokens, 0)]
        self.slash = np.pad(self.slash, (0, len(self.vertical) - len(self.slash)))
