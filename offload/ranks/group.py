"""Several GPUs of one host: the heads of one model split over processes, one GPU each.

Every rank runs the same program on the same inputs. A rank has some of the KV heads with their
query heads, and an equal part of the MLP; the partial results of the two projections that end in
the residual stream are summed over the ranks, by NCCL between GPUs and by gloo between CPUs.
Embeddings, norms and lm_head are on every rank, so that each has the whole residual stream.

`connect` makes the one `TensorParallel` of a process, from the environment that torchrun sets up.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import logging
import os
import threading
import weakref
import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from offload.ranks.watch import LostConnectionError, RankWatch
from offload.system.memory import available_cpus

logger = logging.getLogger(__name__)

_c10d: Any = dist  # not all that it documents has types
_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
# Our messages are some KiB. NVLink multicast and registered buffers are for large ones, and both
# take resources of the whole host.
_NCCL_DEFAULTS = {"NCCL_NVLS_ENABLE": "0", "NCCL_GRAPH_REGISTER": "0"}
_LEAVE_SECONDS = 10.0  # for NCCL to end at exit; without it the process ends, too


@dataclass(frozen=True, eq=False)
class TensorParallel:
    """This process as one of `world_size` that run a model together.

    Attributes:
        rank: of this process, 0 .. world_size - 1; its GPU is cuda:rank.
        group: of all ranks; NCCL for CUDA tensors, gloo for CPU tensors.
        watch: see `RankWatch`.
        num_cpus: CPUs that this rank may keep busy: its own, or its part of those that it shares.
    """

    rank: int
    world_size: int
    group: Any
    watch: RankWatch
    num_cpus: int
    _users: list[weakref.WeakMethod[Callable[[], None]]] = field(default_factory=list)

    def close_before_leaving(self, close: Callable[[], None]) -> None:
        """Call the bound method at the process's end, if its object is still there: NCCL waits for
        all CUDA graphs that captured its operations to be gone.
        """
        self._users[:] = [method for method in self._users if method() is not None]
        self._users.append(weakref.WeakMethod(close))

    def leave(self) -> None:
        """End the connection, unless this rank or another failed: that would wait for them."""
        for method in self._users:
            close = method()
            if close is not None:
                close()
        self._users.clear()
        self.watch.close()
        if dist.is_initialized() and self.group is dist.group.WORLD and not self.watch.has_failed:
            ends = threading.Thread(target=dist.destroy_process_group, daemon=True)
            ends.start()
            ends.join(_LEAVE_SECONDS)

    def together(self) -> AbstractContextManager[None]:
        """Around work in which ranks wait for each other (see `RankWatch.section`)."""
        return self.watch.section()

    def all_reduce(self, x: Tensor) -> Tensor:
        """x = the sum of all ranks' x, in place; bitwise the same on all ranks.

        On a GPU in the order of the current stream; a CUDA graph may capture it.
        """
        self._call(dist.all_reduce, x)
        return x

    def broadcast(self, x: Tensor) -> Tensor:
        """x = rank 0's x, in place; as `all_reduce`."""
        self._call(dist.broadcast, x, group_src=0)
        return x

    def agree(self, value: int) -> int:
        """Rank 0's value, on the host."""
        return int(self.broadcast(torch.tensor([value]))[0])

    def total(self, *values: int) -> list[int]:
        """Each value summed over the ranks, on the host."""
        return [int(x) for x in self.all_reduce(torch.tensor(values))]

    def least(self, value: int) -> int:
        """The smallest of the ranks' values, on the host."""
        x = torch.tensor([value])
        self._call(dist.all_reduce, x, op=dist.ReduceOp.MIN)
        return int(x[0])

    def once(self, make: Callable[[], Any]) -> Any:
        """What `make` returns, or raises, on rank 0: on all ranks; the others wait for it."""
        made: list[Any] = [None, None]
        if self.rank == 0:
            try:
                made[0] = make()
            except Exception as error:
                made[1] = error
        self._call(dist.broadcast_object_list, made, group_src=0, device=torch.device("cpu"))
        if made[1] is not None:
            raise made[1]
        return made[0]

    def share_random_state(self, device: torch.device) -> None:
        """Rank 0's random state of torch, on all ranks: they draw the same from now on."""
        torch.set_rng_state(self.broadcast(torch.get_rng_state()))
        if device.type == "cuda":
            state = self.broadcast(torch.cuda.get_rng_state(device))
            torch.cuda.set_rng_state(state, device)

    def check_same(self, what: str, x: Tensor) -> None:
        """Refuse an int64 tensor that is not the same on all ranks.

        Raises:
            ValueError: on all ranks.
        """
        mine = torch.tensor([x.numel(), zlib.crc32(x.contiguous().cpu().numpy().tobytes())])
        all_of_them = [torch.empty_like(mine) for _ in range(self.world_size)]
        self._call(dist.all_gather, all_of_them, mine)
        for rank, theirs in enumerate(all_of_them):
            if not torch.equal(theirs, all_of_them[0]):
                raise ValueError(
                    f"{what} of rank {rank} ({int(theirs[0])} tokens) is not that of rank 0 "
                    f"({int(all_of_them[0][0])} tokens); all ranks must get the same inputs"
                )

    def _call(self, collective: Callable[..., Any], *args: Any, **options: Any) -> None:
        try:
            collective(*args, group=self.group, **options)
        except RuntimeError as error:
            raise LostConnectionError(str(error)) from error


def check_environment(tensor_parallel_size: int, device: str) -> None:
    """Refuse to be a rank where there is no place for one, before anything is started.

    Raises:
        ValueError: not under torchrun, another number of processes, too few GPUs, a device with
            an index; says what to do.
    """
    size = tensor_parallel_size
    command = f"torchrun --nproc-per-node {size} PROGRAM"
    missing = [name for name in _VARIABLES if name not in os.environ]
    if missing:
        raise ValueError(
            f"tensor_parallel_size={size} needs {size} processes that know of each other, but "
            f"{', '.join(missing)} is not set; start the program with `{command}`, or use "
            f"`offload generate --tensor-parallel-size {size}`"
        )
    world_size = int(os.environ["WORLD_SIZE"])
    if world_size != size:
        raise ValueError(
            f"tensor_parallel_size={size}, but WORLD_SIZE={world_size} processes were started; "
            f"start the program with `{command}`"
        )
    if int(os.environ.get("LOCAL_WORLD_SIZE", world_size)) != world_size:
        raise ValueError(
            "tensor_parallel_size is for the GPUs of one host, but torchrun started processes on "
            "several; use --nnodes 1"
        )
    if ":" in device:
        raise ValueError(
            f"device={device!r} with tensor_parallel_size={size}: rank i takes cuda:i; "
            f"use device={device.partition(':')[0]!r}"
        )
    if device == "cuda" and torch.cuda.device_count() < size:
        raise ValueError(
            f"tensor_parallel_size={size} needs {size} GPUs, but torch finds "
            f"{torch.cuda.device_count()} on this machine"
        )


def check_peer_access(world_size: int, rank: int) -> None:
    """Refuse GPUs that cannot reach each other's memory, unless NCCL is told not to try.

    Raises:
        ValueError: names two such GPUs; says what to do.
    """
    for a, b in itertools.permutations(range(world_size), 2):
        if torch.cuda.can_device_access_peer(a, b):
            continue
        gpus = (
            f"cuda:{a} ({torch.cuda.get_device_name(a)}) cannot access the memory of cuda:{b} "
            f"({torch.cuda.get_device_name(b)})"
        )
        if os.environ.get("NCCL_P2P_DISABLE") != "1":
            raise ValueError(
                f"tensor_parallel_size={world_size}: {gpus}; set NCCL_P2P_DISABLE=1 to sum through "
                "host memory, which is slower, or choose other GPUs by CUDA_VISIBLE_DEVICES"
            )
        if rank == 0:
            logger.warning("%s: ranks sum through host memory, which is slower", gpus)
        return


def connect(size: int, device: str) -> TensorParallel | None:
    """The `size` processes that run a model on `device`; None where there is one only.

    Waits for the other processes. A process connects once and keeps the connection.

    Raises:
        ValueError: see `check_environment`, `check_peer_access`.
    """
    if size == 1:
        return None
    check_environment(size, device)
    device_type = torch.device(device).type
    if device_type == "cuda":
        check_peer_access(size, int(os.environ["RANK"]))
    return _connect(device_type)


@functools.cache
def _connect(device_type: str) -> TensorParallel:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    backend = "cpu:gloo"
    if device_type == "cuda":
        backend += ",cuda:nccl"
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        for name, value in _NCCL_DEFAULTS.items():
            os.environ.setdefault(name, value)
    if dist.is_initialized():  # by the program, or by us with another device
        group: Any = dist.new_group(backend=backend)
    else:
        dist.init_process_group(backend)
        group = dist.group.WORLD
    server = _c10d.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        timeout=timedelta(seconds=30),
        wait_for_workers=False,
    )
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = _c10d.PrefixStore(f"offload/{device_type}/{attempt}", server)
    watch = RankWatch(store, rank, world_size)
    with watch.section():
        cpus: list[Any] = [None] * world_size
        dist.all_gather_object(cpus, _cpus(), group=group)
        ranks = TensorParallel(rank, world_size, group, watch, _share_of_cpus(cpus, rank))
        if device_type == "cuda":
            # NCCL connects at the first operation of its kind, and a CUDA graph cannot capture it.
            ranks.all_reduce(torch.zeros(1, device="cuda"))
            ranks.broadcast(torch.zeros(1, device="cuda"))
            torch.cuda.synchronize()
    atexit.register(ranks.leave)
    return ranks


def _cpus() -> tuple[frozenset[int], int]:
    """The CPUs this process may run on, and how many it may keep busy."""
    return frozenset(os.sched_getaffinity(0)), available_cpus()


def _share_of_cpus(cpus: Sequence[tuple[frozenset[int], int]], rank: int) -> int:
    """CPUs of a rank, of those that it shares with others."""
    own, num_cpus = cpus[rank]
    sharers = sum(1 for others, _ in cpus if own & others)
    return max(1, num_cpus // sharers)
