"""No rank waits for one that died, failed or left, and ranks that are through leave in order."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.rank_processes import Ranks

from offload.ranks.group import check_peer_access, connect
from offload.ranks.launch import run_ranks
from offload.ranks.watch import PeerError, RankWatch
from offload.runtime.config import runtime_config


@pytest.mark.slow
@pytest.mark.parametrize("failing", [0, 1])
def test_a_killed_rank_ends_the_other(failing, tiny_folders):
    """Rank 0 also holds the store through which ranks know of each other."""
    ranks = Ranks(2)
    try:
        ranks.call("facts", folder=tiny_folders["llama"])
        ranks.start("fails", folder=tiny_folders["llama"], kind="kill", rank=failing)
        assert ranks.wait(failing, 20) == -9
        start = time.monotonic()
        ok, message = ranks.receive(1 - failing)
        assert time.monotonic() - start < 10
        assert not ok
        assert "PeerError" in message
        assert f"the process of rank {failing} (pid {ranks.processes[failing].pid}) is gone" in (
            message
        )
    finally:
        ranks.close()


@pytest.mark.slow
def test_a_rank_that_raises_ends_the_other(tiny_folders):
    """Rank 1 raises and goes on; rank 0 waits for it in a collective operation."""
    ranks = Ranks(2)
    try:
        ranks.call("facts", folder=tiny_folders["llama"])
        ranks.start("fails", folder=tiny_folders["llama"], kind="raise", rank=1, catches=True)
        ok, message = ranks.receive(1)
        assert (ok, message) == (True, "RuntimeError: boom in the middle")
        assert ranks.wait(0, 10) == 1
        assert "error: rank 1 failed: RuntimeError: boom in the middle" in ranks.stderr(0)
    finally:
        ranks.close()


class _Store(dict):
    """What `RankWatch` needs of a torch store."""

    def set(self, key: str, value: str) -> None:
        self[key] = value.encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)


@pytest.fixture
def reasons(monkeypatch):
    """Why ranks end, which look often, wait a fifth of a second for others and end no process."""
    found = []
    monkeypatch.setattr("offload.ranks.watch._end_process", found.append)
    monkeypatch.setattr("offload.ranks.watch.POLL_SECONDS", 0.05)
    monkeypatch.setattr("offload.ranks.watch.GRACE_SECONDS", 0.2)
    return found


def test_a_rank_that_ends_early_is_not_waited_for(reasons):
    store = _Store()
    watch = RankWatch(store, 0, 2)
    other = RankWatch(store, 1, 2)
    with watch.section():
        time.sleep(0.1)
    with other.section():
        pass
    other.close()
    with watch.section():
        deadline = time.monotonic() + 10
        while not reasons and time.monotonic() < deadline:
            time.sleep(0.05)
    assert reasons[0] == "rank 1 has ended; every rank must make the same calls"
    watch.close()


def test_errors_of_both_ranks_end_nobody(reasons):
    store = _Store()
    watches = [RankWatch(store, rank, 2) for rank in range(2)]
    for watch in watches:
        with pytest.raises(ValueError, match="the same"), watch.section():
            raise ValueError("the same")
    time.sleep(0.6)
    assert reasons == []
    for watch in watches:
        watch.close()
    assert issubclass(PeerError, RuntimeError)


@pytest.fixture
def gpus(monkeypatch):
    """Three GPUs, of which the last two do not reach each other."""
    asked: list[tuple[int, int]] = []

    def can_access(device: int, peer: int) -> bool:
        asked.append((device, peer))
        return 0 in (device, peer)

    monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", can_access)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {'ABC'[device]}")
    return asked


def test_gpus_that_do_not_reach_each_other(gpus, monkeypatch, caplog):
    with pytest.raises(
        ValueError,
        match=r"cuda:1 \(GPU B\) cannot access the memory of cuda:2 \(GPU "
        r"C\); set NCCL_P2P_DISABLE=1 to sum through host memory, which is slower",
    ):
        check_peer_access(3, 0)
    check_peer_access(2, 0)  # those two do
    assert gpus[-2:] == [(0, 1), (1, 0)]
    # Told not to try, NCCL goes through the host: rank 0 says so, once.
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    with caplog.at_level(logging.WARNING, logger="offload.ranks.group"):
        for rank in range(3):
            check_peer_access(3, rank)
    assert len(caplog.messages) == 1
    assert "cuda:1 (GPU B) cannot access" in caplog.messages[0]
    assert "slower" in caplog.messages[0]


def test_peers_are_looked_at_before_ranks_connect(gpus, monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setattr("offload.ranks.group._connect", lambda _: pytest.fail("connects"))
    # Without a GPU a config for one cannot be made.
    config: Any = type("Config", (), {"tensor_parallel_size": 3, "device": "cuda"})
    with pytest.raises(ValueError, match="NCCL_P2P_DISABLE=1"):
        connect(config.tensor_parallel_size, config.device)
    assert runtime_config().tensor_parallel_size == 1


@pytest.mark.slow
def test_ranks_that_are_through_leave_in_order(tiny_folders):
    """What captured their operations is closed, and then the process group ended; not where the
    last thing that a rank did has failed: others may not come to its end."""
    ranks = Ranks(2)
    try:
        assert ranks.call("leaves", folder=tiny_folders["llama"], fails=True) == [(True, True)] * 2
        assert ranks.call("leaves", folder=tiny_folders["llama"]) == [(True, False)] * 2
    finally:
        ranks.close()


@pytest.mark.slow
def test_ranks_do_not_import_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text("open('was_run', 'w').close()\n")
    monkeypatch.chdir(tmp_path)
    assert run_ranks(1, ["env"]) == 0
    assert not (tmp_path / "was_run").exists()
