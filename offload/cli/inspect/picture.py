"""A map of heads: what each shares with the layer above it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from offload.policies.lychee_decode.overlap import HeadOverlap
    from offload.selection.head_roles import HeadRoles


def plot_overlap(found: HeadOverlap, roles: HeadRoles | None, path: Path, title: str) -> None:
    """Layers from top to bottom, KV heads from left to right; circles are heads that retrieve."""
    from matplotlib.figure import Figure

    num_rows, num_heads = found.shares.shape
    size = (max(5.0, 2.0 + 0.35 * num_heads), max(3.0, 1.5 + 0.22 * num_rows))
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    extent = (-0.5, num_heads - 0.5, num_rows + 0.5, 0.5)
    image = axes.imshow(
        100 * found.shares, vmin=0, vmax=100, aspect="auto", interpolation="nearest", extent=extent
    )
    if roles is not None:
        layers, heads = np.nonzero(roles.array[1:])
        axes.scatter(heads, layers + 1, facecolors="none", edgecolors="red", label="retrieves")
        figure.legend(loc="outside lower center")
    axes.set_xticks(range(num_heads))
    axes.set_xlabel("KV head")
    axes.set_ylabel("layer")
    axes.set_title(title.replace(": ", ":\n"), fontsize="medium")
    figure.colorbar(image, label=f"per cent; by chance {100 * found.by_chance:.0f}")
    figure.savefig(path, dpi=120)
