"""A fresh process that loads the embedded model and times it; `perf.bench_startup` runs it.

Arguments: `offload` or `transformers`, and the folder of the model, which must have been converted
before. Prints one JSON object: seconds of each phase.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from typing import Any


def main(engine: str, folder: str) -> None:
    times = [time.perf_counter()]
    import torch

    model_class: Any
    if engine == "offload":
        from offload import OffloadedModel

        model_class = OffloadedModel
    else:
        from transformers import AutoModelForCausalLM

        model_class = AutoModelForCausalLM
    times.append(time.perf_counter())
    model = model_class.from_pretrained(folder, dtype="bfloat16")
    times.append(time.perf_counter())
    model.generate(
        torch.tensor([[1, 2, 3, 4]]),
        attention_mask=torch.ones(1, 4, dtype=torch.long),
        max_new_tokens=2,
        do_sample=False,
        pad_token_id=0,
    )
    times.append(time.perf_counter())
    phases = ("import", "from pretrained", "first tokens")
    spent = (end - start for start, end in itertools.pairwise(times))
    print(json.dumps(dict(zip(phases, spent, strict=True))))


if __name__ == "__main__":
    main(*sys.argv[1:])
