"""A picture of a training: its loss, how many heads are open, and which retrieve."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from offload.training.train import Trainer


def plot_training(trainer: Trainer, path: Path, title: str) -> None:
    """Loss and open heads by step, and a map of E[z]; circles are heads that retrieve."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    log = trainer.log
    left.semilogy([step.step for step in log], [step.loss for step in log], linewidth=0.7)
    left.set(xlabel="step", ylabel="mean squared distance from full attention")
    middle.plot([step.open_heads for step in log], label="E‖z‖₀")
    middle.plot([step.retrieval_heads for step in log], label="E[z] > 0.5")
    middle.axhline(trainer.settings.target_heads, color="black", linewidth=0.7, label="target")
    middle.set(xlabel="step", ylabel="heads after layer 0")
    middle.legend()
    mean = trainer.mean_gates().numpy()
    image = right.imshow(mean, vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    layers, heads = np.nonzero(trainer.retrieval)
    right.scatter(heads, layers, facecolors="none", edgecolors="red")
    right.set(xlabel="KV head", ylabel="layer", xticks=range(mean.shape[1]))
    figure.colorbar(image, label="E[z]; circles retrieve")
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
