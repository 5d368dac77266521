"""Two ranks as processes of their own, which run functions of `rank_cases` by name."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import traceback
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

import torch
from cases import rank_cases

from offload.ranks.launch import free_port, rank_environment

TIMEOUT_SECONDS = 120
# Names, of which the fork server skips those that are not there.
PRELOADED = [rank_cases.__name__, "transformers.models.llama.modeling_llama"]


def _context() -> Any:
    """How ranks begin: as forks of a process that has imported what they need, which takes seconds
    each time. Not beside a GPU, which no fork may use once somebody has looked for it.
    """
    if torch.cuda.is_available():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):
        forkserver.ensure_running()
    return context


class Ranks:
    """`world_size` ranks that wait for calls. All get the same call."""

    def __init__(self, world_size: int = 2) -> None:
        context = _context()
        port = free_port()
        self._pipes: list[Any] = []
        self.processes: list[Any] = []
        self._errors: list[Any] = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            self._errors.append(tempfile.NamedTemporaryFile())  # noqa: SIM115 (until close)
            environment = rank_environment(rank, world_size, port)
            process = context.Process(
                target=_serve, args=(environment, theirs, self._errors[-1].name), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)

    def call(self, name: str, **options: Any) -> list[Any]:
        """What `rank_cases.<name>` returns on each rank.

        Raises:
            RuntimeError: it raised on some rank; with its traceback.
        """
        self.start(name, **options)
        results = [self._receive(pipe) for pipe in self._pipes]
        for rank, (ok, result) in enumerate(results):
            if not ok:
                raise RuntimeError(f"rank {rank}: {result}")
        return [result for _, result in results]

    def start(self, name: str, **options: Any) -> None:
        """`call` without waiting."""
        for pipe in self._pipes:
            pipe.send((name, options))

    def wait(self, rank: int, seconds: float) -> int | None:
        """The exit code of a rank that ends within `seconds`, or None."""
        self.processes[rank].join(seconds)
        return self.processes[rank].exitcode

    def receive(self, rank: int) -> tuple[bool, Any]:
        """What a rank answers to `start`: whether it returned, and what; or a traceback."""
        ok, result = self._receive(self._pipes[rank])
        return ok, result

    def stderr(self, rank: int) -> str:
        """What a rank has written there."""
        text: bytes = self._errors[rank].read()
        return text.decode()

    def close(self) -> None:
        for file in self._errors:
            file.close()
        for pipe in self._pipes:
            pipe.close()
        for process in self.processes:
            process.kill()
            process.join()

    @staticmethod
    def _receive(pipe: Connection) -> Any:
        if not pipe.poll(TIMEOUT_SECONDS):
            raise TimeoutError(f"a rank did not answer within {TIMEOUT_SECONDS} s")
        return pipe.recv()


def _serve(environment: dict[str, str], pipe: Connection, errors: str) -> None:
    os.environ.update(environment)
    with open(errors, "ab") as file:
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    while True:
        try:
            name, options = pipe.recv()
        except EOFError:
            return
        try:
            answer = (True, getattr(rank_cases, name)(**options))
        except BaseException:
            answer = (False, traceback.format_exc())
        pipe.send(answer)
