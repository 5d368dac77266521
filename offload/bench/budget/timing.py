"""Seconds of decode steps under many policies, in turns: what else the machine does hits all."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch

from offload.bench.eval.perplexity import teacher_forced
from offload.runtime.shared_model import ReadPrompt, SharedModel
from offload.system.torch_threads import torch_threads

STEPS_IN_TURN = 4


def step_seconds(
    model: SharedModel,
    prompt: ReadPrompt,
    following: Sequence[int],
    on_progress: Callable[[int], None] = lambda steps: None,
) -> list[list[float]]:
    """Of each policy's timed steps, with nobody looking on.

    A turn has `STEPS_IN_TURN` of them, and one before them that is not timed: caches are another
    policy's then, and its workers may still spin. Each round begins with the next policy. What a
    policy builds at its first step is not in them. Until the end all policies keep what they have
    of the prompt.
    """
    num_policies, threads = len(model.runtimes), torch.get_num_threads()
    seconds: list[list[float]] = [[] for _ in range(num_policies)]
    with ExitStack() as forks:
        decodes = []
        for index in range(num_policies):
            # A generation leaves one thread to what is inside, which is the next policy's.
            forks.enter_context(torch_threads(threads))
            decodes.append(forks.enter_context(teacher_forced(model, index, prompt)))
        for turn, first in enumerate(range(0, len(following), STEPS_IN_TURN + 1)):
            untimed, *timed = following[first : first + STEPS_IN_TURN + 1]
            for place in range(num_policies):
                index = (turn + place) % num_policies
                decode, stats = decodes[index], model.runtimes[index].stats
                decode(untimed)
                for token in timed:
                    start, built = time.perf_counter(), stats.index_seconds
                    decode(token)
                    end = time.perf_counter()
                    seconds[index].append(end - start - (stats.index_seconds - built))
                on_progress(1 + len(timed))
    return seconds
