"""What 2, 100 and 10,000 replicas need: a simulation over measured times of one replica.

    python -m perf.replicas [--measure]    # or with the times of perf/results/replicas.json

Sessions come back after a pause of random length, each to the replica that a consistent-hash ring
of 100 points a replica names, as Ray Serve's router does. In the middle a rolling update takes a
fifth of the replicas at a time, as Ray does; their sessions are restored from the shared folder. A
turn writes what no part of its session's file has yet.
"""

from __future__ import annotations

import heapq
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from timeit import repeat
from typing import Any

import numpy as np
import torch

from offload import OffloadedCache, OffloadedModel
from perf.results_file import Run, read_results, script_options

_MODEL = "smollm2-135m-instruct"
_POINTS, _WAVES, _SLOTS = 100, 5, 8  # of Ray: points on the ring, parts of an update; requests
_NEW, _ANSWER, _MOST = 128, 64, 4096  # tokens a turn brings, and answers; then a session ends
_PART_BYTES = 16 * 2**20  # as of `offload/runtime/saving.py`
_SESSIONS, _PAUSE_S = 16, 60.0  # a replica's, and between an answer and the next turn


def measure() -> dict[str, float]:
    """Of one replica: starting, saving and restoring on this machine, the quickest of three."""

    def quickest(work: Callable[[], object]) -> float:
        return min(repeat(work, number=1, repeat=3))

    loaded = OffloadedModel.from_pretrained(_MODEL, num_threads=2)
    cache, ids = loaded.new_cache(), torch.arange(300, 300 + 1024)[None]
    loaded.generate(ids, past_key_values=cache, max_new_tokens=1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "session.safetensors"
        save = quickest(lambda: cache.save(path))
        restore = quickest(lambda: OffloadedCache.load(loaded, path))
        size = path.stat().st_size
    # Of `make bench` are the prompt's speed and the step's, which is the same for eight requests.
    known = (read_results("decode") or {"rows": []})["rows"]
    row = next(r for r in known if (r["engine"], r["context"]) == ("offload full", 2048))
    return {
        "prefill_tokens_per_s": row["prefill_tokens_per_second"],
        "decode_step_s": row["step_ms"] / 1e3,
        "startup_s": quickest(_start),
        "bytes_per_token": size / ids.shape[1],
        "save_bytes_per_s": size / save,
        "restore_bytes_per_s": size / restore,
    }


def _start() -> None:
    """Start a server, and wait until it serves."""
    command = [sys.executable, "-m", "offload", "serve", _MODEL, "--threads", "2", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        is_up = any("serving at" in line for line in process.stderr or ())
        process.kill()
    if not is_up:
        raise RuntimeError(f"{' '.join(command)} did not start")


def _places(points: np.ndarray, owners: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """The owner of the first point after each key."""
    order = np.argsort(points)
    return owners[order][np.searchsorted(points[order], keys) % len(points)]


def simulate(times: dict[str, float], replicas: int, seconds: float) -> dict[str, str]:
    """One fleet under a steady load, with an update from a third of the time on."""
    rng, number = np.random.default_rng(0), replicas * _SESSIONS
    points, owners = rng.random(replicas * _POINTS), np.arange(replicas * _POINTS) % replicas
    keys, waves = rng.random(number), min(_WAVES, replicas)
    wave = rng.permutation(replicas) % waves  # in which a replica is replaced by one with an id,
    begins, places = [0.0], [_places(points, owners, keys)]  # and so with points, of its own
    for part in range(waves):
        there = wave[owners] != part
        begins.append(seconds / 3 + part * times["startup_s"])
        places.append(_places(points[there], owners[there], keys))
        points[~there] = rng.random(np.count_nonzero(~there))
    begins.append(begins[-1] + times["startup_s"])
    places.append(_places(points, owners, keys))
    slots = [[0.0] * _SLOTS for _ in range(replicas)]
    last, tokens, saved = places[0].copy(), rng.integers(0, _MOST, number), np.zeros(number)
    in_parts = tokens - tokens % math.ceil(_PART_BYTES / times["bytes_per_token"])
    written, read = np.zeros(int(seconds) + 600), np.zeros(int(seconds) + 600)
    waits: tuple[list[float], list[float]] = ([], [])
    moved = stale = 0
    coming = list(zip(rng.exponential(_PAUSE_S, number).tolist(), range(number), strict=True))
    heapq.heapify(coming)
    while coming and coming[0][0] < seconds:
        now, session = heapq.heappop(coming)
        phase = int(np.searchsorted(begins, now, "right")) - 1
        replica = int(places[phase][session])
        started = max(now, heapq.heappop(slots[replica]))
        size = float(tokens[session]) * times["bytes_per_token"]
        first = started + _NEW / times["prefill_tokens_per_s"]
        made = replica + replicas * (phase > wave[replica] + 1)
        if made != last[session]:
            moved, last[session] = moved + 1, made
            stale += saved[session] > now
            first += size / times["restore_bytes_per_s"]
            read[int(started)] += size
        ended = first + _ANSWER * times["decode_step_s"]
        heapq.heappush(slots[replica], ended)
        tokens[session] = (tokens[session] + _NEW + _ANSWER) % _MOST
        if tokens[session] < in_parts[session]:  # it has begun anew
            in_parts[session] = 0
        size = float(tokens[session] - in_parts[session]) * times["bytes_per_token"]
        if size >= _PART_BYTES:
            in_parts[session] = tokens[session]
        saved[session] = ended + size / times["save_bytes_per_s"]
        written[int(ended)] += size
        waits[begins[1] <= now].append(first - now)
        heapq.heappush(coming, (ended + rng.exponential(_PAUSE_S), session))
    steady, files = written[5 : int(seconds)], number * _MOST / 2
    before, later = (np.percentile(each or [0.0], [50, 99]) for each in waits)
    return {
        "replicas": f"{replicas:,}",
        "sessions": f"{number:,}",
        "turns a second": f"{sum(map(len, waits)) / seconds:,.1f}",
        "points on the ring": f"{len(points):,}",
        "sessions of the busiest, of the mean": f"{np.bincount(places[0]).max() / _SESSIONS:.2f}",
        "files of sessions, GB": f"{files * times['bytes_per_token'] / 1e9:,.1f}",
        "written, mean, GB/s": f"{steady.mean() / 1e9:,.3f}",
        "written, most in a second, GB/s": f"{steady.max() / 1e9:,.3f}",
        "read, most in a second of the update, GB/s": f"{read.max() / 1e9:,.3f}",
        "rolling update, s": f"{begins[-1] - begins[1]:.0f}",
        "turns on another replica than the last": f"{moved:,}",
        "of these, before the state was written": f"{stale:,}",
        "first token, median and p99, ms": "{:,.0f}, {:,.0f}".format(*before * 1e3),
        "the same from the update on, ms": "{:,.0f}, {:,.0f}".format(*later * 1e3),
    }


def main(argv: list[str] | None = None) -> int:
    """Measure if asked to, simulate, and write both."""
    parser = script_options(__doc__, "replicas")
    parser.add_argument("--measure", action="store_true", help="one replica on this machine")
    options = parser.parse_args(argv)
    run, known = Run(options), read_results("replicas")
    if options.measure:
        settings: dict[str, Any] = {"model": _MODEL, "threads": 2, "times": measure()}
    else:
        assert known is not None, "no times of a replica are known: add --measure"
        run.machine, settings = known["machine"], known["settings"]
    rows = [simulate(settings["times"], replicas, 600.0) for replicas in (2, 100, 10_000)]
    run.write(settings, rows)
    print(table(rows))
    return 0


def table(rows: list[dict[str, Any]]) -> str:
    """In Markdown, a column for each fleet."""
    lines = [f"| {' | '.join([name, *(row[name] for row in rows)])} |" for name in rows[0]]
    return "\n".join([lines[0], "| --- |" + " ---: |" * len(rows), *lines[1:]])


if __name__ == "__main__":
    raise SystemExit(main())
