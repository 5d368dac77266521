"""Seconds of decode steps under many policies, in turns: what else the machine does hits all."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import numpy as np

from offload.bench.eval.perplexity import teacher_forced
from offload.runtime.shared_model import ReadPrompt, SharedModel

STEPS_IN_TURN = 4  # of one policy after the other: at each change caches are cold


def step_seconds(
    model: SharedModel,
    prompt: ReadPrompt,
    following: Sequence[int],
    on_progress: Callable[[int], None] = lambda steps: None,
) -> list[tuple[float, float, float]]:
    """10th percentile, median and 90th of each policy's steps, with nobody looking on.

    What a policy builds at its first step is not in them. Until the end all policies keep what
    they have of the prompt.
    """
    policies = range(len(model.runtimes))
    seconds: list[list[float]] = [[] for _ in policies]
    with ExitStack() as forks:
        decodes = [forks.enter_context(teacher_forced(model, i, prompt)) for i in policies]
        for first in range(0, len(following), STEPS_IN_TURN):
            for index, decode in enumerate(decodes):
                stats = model.runtimes[index].stats
                for token in following[first : first + STEPS_IN_TURN]:
                    start, built = time.perf_counter(), stats.index_seconds
                    decode(token)
                    end = time.perf_counter()
                    seconds[index].append(end - start - (stats.index_seconds - built))
                    on_progress(1)
    spreads = [np.percentile(of_policy, (10, 50, 90)).tolist() for of_policy in seconds]
    return [(low, median, high) for low, median, high in spreads]
