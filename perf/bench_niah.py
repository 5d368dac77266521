"""RULER's `niah_single_1` through lm-eval, each policy on the same prompts:
`python -m perf.bench_niah`.

A number is hidden in thousands of tokens of repeated noise, which lm-eval makes with the model's
own tokenizer: nothing is downloaded.
"""

from __future__ import annotations

import os
import random
import time
from importlib.util import find_spec
from typing import Any

from tqdm import tqdm

from offload import OffloadedModel, load_tokenizer
from offload.bench.selection.measure import policy_label
from offload.bench.selection.shared_prefill import SharedPrefill
from offload.loading.gguf import EMBEDDED_MODEL
from offload.loading.names import resolve_folder
from offload.policies import Policy
from offload.policies.registry import available_policies, make_policy
from offload.system.memory import available_cpus
from perf.results_file import Run, hide_loading_bars, script_options

TASK = "niah_single_1"
LENGTH_TOKENS = 7168
MAX_CONTEXT = 8192
SEED = 0


def load_task(length_tokens: int) -> dict[str, Any]:
    """The task with its prompts, as `lm_eval.evaluator.evaluate` takes it."""
    from lm_eval.tasks import TaskManager

    folder = str(resolve_folder(EMBEDDED_MODEL))
    random.seed(SEED)  # RULER draws from the global generator
    metadata = {"max_seq_lengths": [length_tokens], "tokenizer": folder}
    tasks: dict[str, Any] = TaskManager(metadata=metadata).load([TASK])
    return tasks


def measure(
    policy: Policy, tasks: dict[str, Any], shared: SharedPrefill, samples: int, threads: int
) -> dict[str, Any]:
    """One line of the results."""
    from lm_eval.evaluator import evaluate
    from lm_eval.models.huggingface import HFLM

    model = OffloadedModel.from_pretrained(
        EMBEDDED_MODEL, policy=policy, dtype="bfloat16", num_threads=threads
    )
    harness = HFLM(
        pretrained=shared.attach(model),
        tokenizer=load_tokenizer(EMBEDDED_MODEL),
        batch_size=1,
        max_length=MAX_CONTEXT,
    )
    start = time.perf_counter()
    result = evaluate(harness, tasks, limit=samples, bootstrap_iters=0, log_samples=True)
    seconds = time.perf_counter() - start
    assert result is not None
    scored = result["samples"][TASK]
    answers = [sample["filtered_resps"][0].strip() for sample in scored]
    scores = [float(sample[str(sample["doc"]["max_length"])]) for sample in scored]
    return {
        "policy": policy.name,
        "label": policy_label(policy),
        "budget_tokens": policy.budget_tokens if policy.selects else None,
        "samples": len(scores),
        "score": sum(scores) / len(scores),
        "longest_tokens": max(sample["doc"]["length"] for sample in scored),
        "seconds": seconds,
        "decode_tokens_per_second": model.offload_stats().decode_tokens_per_second,
        "wanted": [sample["doc"]["outputs"][0] for sample in scored],
        "answers": [answer[:40] for answer in answers],
    }


def main() -> None:
    parser = script_options(__doc__, "niah")
    parser.add_argument("--policies", nargs="+", default=available_policies())
    parser.add_argument("--budget-tokens", type=int, default=1024)
    parser.add_argument("--length", type=int, default=LENGTH_TOKENS)
    parser.add_argument("--samples", type=int, default=4)
    options = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    for module in ("lm_eval", "wonderwords"):
        if find_spec(module) is None:
            parser.error(f"{module} is not installed; install the extras test and perf")

    hide_loading_bars()
    run = Run(options)
    threads = available_cpus()
    tasks = load_task(options.length)
    shared = SharedPrefill()
    rows = []
    for name in tqdm(options.policies, desc=TASK, unit="policy"):
        budget = {} if name == "full" else {"budget_tokens": options.budget_tokens}
        row = measure(make_policy(name, **budget), tasks, shared, options.samples, threads)
        rows.append(row)
        tqdm.write(
            f"{row['label']:28}{row['score']:6.2f} of {row['samples']} samples, "
            f"{row['seconds']:5.0f} s, {row['decode_tokens_per_second']:.1f} tok/s"
        )
        for wanted, answer in zip(row["wanted"], row["answers"], strict=True):
            if wanted not in answer:
                tqdm.write(f"    wanted {wanted}, got {answer!r}")
    settings = {"model": EMBEDDED_MODEL, "task": TASK, "threads": threads}
    run.write(settings | run.named("length", "samples"), rows)


if __name__ == "__main__":
    main()
