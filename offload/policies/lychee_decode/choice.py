"""Which heads or layers should look at everything, given what the others keep by reusing them.

Exact optima by dynamic programming: what a head keeps depends only on the retrieval head above it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from offload.selection.head_roles import BoolArray, check_retrieval_heads

FloatArray = npt.NDArray[np.float64]


def choose_retrieval_heads(
    mass_kept: FloatArray, retrieval_heads: int, wanted: BoolArray | None = None
) -> BoolArray:
    """The roles that keep most attention mass in total; a retrieval head keeps all of its own.

    Args:
        mass_kept: [num_kv_heads, num_layers, num_layers], see `Calibration`.
        retrieval_heads: how many to choose after layer 0.
        wanted: bool [num_layers, num_kv_heads], heads that must be among them, so many or fewer.

    Returns:
        bool [num_layers, num_kv_heads] with layer 0 all True.
    """
    num_kv_heads, num_layers, _ = mass_kept.shape
    check_retrieval_heads(retrieval_heads, num_layers, num_kv_heads)
    # A bonus that no mass outweighs: the layers of a head keep 1 each at most.
    bonus = np.zeros((num_kv_heads, num_layers))
    if wanted is not None:
        bonus[wanted.T] = 2 * num_layers
    most = min(retrieval_heads, num_layers - 1)
    chains = [_best_chains(kept, most, b) for kept, b in zip(mass_kept, bonus, strict=True)]
    # Share the retrieval heads out among the KV heads: best[n] is the mass with n of them.
    best, shares = np.zeros(1), []
    for chain in chains:
        gains = np.array([mass for mass, _ in chain])
        totals = np.full(retrieval_heads + 1, -np.inf)
        share = np.zeros(retrieval_heads + 1, int)
        for count, gain in enumerate(gains):
            for n, mass in enumerate(best[: retrieval_heads + 1 - count]):
                if mass + gain > totals[n + count]:
                    totals[n + count], share[n + count] = mass + gain, count
        best = totals
        shares.append(share)
    retrieval = np.zeros((num_layers, num_kv_heads), np.bool_)
    left = retrieval_heads
    for head in reversed(range(num_kv_heads)):
        count = shares[head][left]
        retrieval[chains[head][count][1], head] = True
        left -= count
    return retrieval


def choose_select_layers(
    mass_kept: FloatArray,
    num_select_layers: int,
    dense_layers: int,
    wanted: BoolArray | None = None,
) -> list[int]:
    """Token-selection layers for TidalDecode, the first of them right after the dense layers.

    Args:
        mass_kept: [num_kv_heads, num_layers, num_layers], see `Calibration`.
        wanted: bool [num_layers], layers that come before others, as far as there is room.
    """
    kept = mass_kept.mean(0)[dense_layers:, dense_layers:]
    bonus = np.zeros(len(kept))
    if wanted is not None:
        bonus[wanted[dense_layers:]] = 2 * len(kept)
    if not 1 <= num_select_layers <= len(kept):
        raise ValueError(
            f"num_select_layers must be in [1, {len(kept)}], the layers after "
            f"dense_layers={dense_layers}, got {num_select_layers}"
        )
    chosen = _best_chains(kept, num_select_layers - 1, bonus)[-1][1]
    return [dense_layers + layer_idx for layer_idx in chosen]


def _best_chains(kept: FloatArray, most: int, bonus: FloatArray) -> list[tuple[float, list[int]]]:
    """For each count up to `most`: (mass kept, layers) of the best retrieval layers, 0 and `count`
    more. kept [i, j]: what layer j keeps with the tokens of layer i; bonus [j]: extra mass for
    choosing j.

    Dynamic programming over the lowest retrieval layer so far, exact: O(most * num_layers ** 2).
    """
    num_layers = len(kept)
    # sums[i, j]: what layers i + 1 .. j - 1 keep with the tokens of layer i.
    sums = np.zeros((num_layers, num_layers + 1))
    sums[:, 1:] = np.cumsum(np.triu(kept, 1), axis=1)
    best = np.full((most + 1, num_layers), -np.inf)
    before = np.zeros((most + 1, num_layers), int)
    best[0, 0] = 1.0
    for count in range(1, most + 1):
        for layer_idx in range(1, num_layers):
            masses = best[count - 1, :layer_idx] + sums[:layer_idx, layer_idx]
            before[count, layer_idx] = masses.argmax()
            best[count, layer_idx] = masses.max() + 1.0 + bonus[layer_idx]
    chains = []
    for count in range(most + 1):
        masses = best[count] + sums[:, num_layers]
        layer_idx = int(masses.argmax())
        mass, layers = float(masses[layer_idx]), [layer_idx]
        for step in range(count, 0, -1):
            layer_idx = int(before[step, layer_idx])
            layers.append(layer_idx)
        chains.append((mass, layers[::-1]))
    return chains
