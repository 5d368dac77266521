"""A fresh process that loads the embedded model and times it; `perf.bench_startup` runs it.

The model must have been converted before. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=["offload", "transformers"])
    parser.add_argument("folder")
    engine, folder = parser.parse_args().engine, parser.parse_args().folder

    started = time.perf_counter()
    import torch

    if engine == "offload":
        from offload import OffloadedModel as Model
    else:
        from transformers import AutoModelForCausalLM as Model
    imported = time.perf_counter()
    model = Model.from_pretrained(folder, dtype="bfloat16")
    loaded = time.perf_counter()
    model.generate(
        torch.tensor([[1, 2, 3, 4]]),
        attention_mask=torch.ones(1, 4, dtype=torch.long),
        max_new_tokens=2,
        do_sample=False,
        pad_token_id=0,
    )
    generated = time.perf_counter()
    print(
        json.dumps(
            {
                "import_seconds": imported - started,
                "from_pretrained_seconds": loaded - imported,
                "first_tokens_seconds": generated - loaded,
            }
        )
    )


if __name__ == "__main__":
    main()
