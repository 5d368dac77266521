"""A process that generates with a bound and says what memory it has: `python -m
cases.bounded_process FOLDER CONDENSE_BY HOST_BYTES_PER_SEQUENCE NUM_NEW_TOKENS`.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

import psutil
import torch
from cases.inside import compression_of

from offload import OffloadedModel
from offload.system.memory import give_back_free_memory

SPACING = 50  # steps from one measurement to the next
OPTIONS: dict[str, Any] = {"page_tokens": 64, "num_threads": 1}


def main() -> None:
    folder, condense_by, per_sequence, num_new = *sys.argv[1:3], *map(int, sys.argv[3:])
    bound = {"host_bytes_per_sequence": per_sequence, "condense_by": condense_by}
    # What is loaded, compiled or kept when a sequence is condensed for the first time, by MKL say.
    model = OffloadedModel.from_pretrained(folder, **bound, **OPTIONS)
    with torch.no_grad():
        model(torch.full((1, per_sequence // 1024), 65), logits_to_keep=1)
    generate(model, SPACING)
    assert model.offload_stats().condensed_tokens > 0
    model = OffloadedModel.from_pretrained(folder, **bound, **OPTIONS)
    gc.collect()
    give_back_free_memory()
    before = psutil.Process().memory_info().rss
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    samples, kept = generate(model, num_new)
    found = {
        "before": before,
        "samples": samples,
        "kept": kept,
        "slots": compression_of(model).bound.slots,
        "peak": peak_bytes(),
        "page_bytes": model.kv_store.host_bytes_reserved,
        "condensed_tokens": model.offload_stats().condensed_tokens,
    }
    print(json.dumps(found))


def generate(model: Any, num_new: int) -> tuple[list[tuple[int, int]], int]:
    """Greedy: (tokens seen, resident bytes) every `SPACING` of them, and those in the cache."""
    cache, process, samples = model.new_cache(), psutil.Process(), []
    token = torch.tensor([[65]])
    with torch.no_grad():
        for seen in range(1, num_new + 1):
            token = model(token, past_key_values=cache).logits[:, -1:].argmax(-1)
            if seen % SPACING == 0:
                samples.append((seen, process.memory_info().rss))
    (row,) = cache.tokens
    return samples, row.kept + row.condensed


def peak_bytes() -> int:
    """The most that was resident since it was asked to start anew."""
    status = Path("/proc/self/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main()
