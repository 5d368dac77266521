"""How well the policies select on SmolLM2 and real text: `python -m perf.bench_quality`.

Every policy at 6,144 tokens with budgets of 1,024 tokens and of 2 % of the context, over 1,000
decode steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from tqdm import tqdm

from offload import load_tokenizer
from offload.bench.quality.measure import QualitySettings, measure_quality
from offload.loading.gguf import EMBEDDED_MODEL
from offload.policies import Policy
from offload.policies.registry import available_policies, make_policy
from offload.runtime.config import runtime_config
from offload.runtime.shared_model import SharedModel
from offload.system.memory import available_cpus
from offload.system.stdlib_text import stdlib_paragraphs
from perf.results_file import Run, hide_loading_bars, script_options

CONTEXT = 6144
BUDGETS = (1024, round(0.02 * CONTEXT))


def policies_of_quality(names: Sequence[str]) -> list[Policy]:
    """Each policy with each budget."""
    return [
        make_policy(name, budget_tokens=budget)
        for name in names
        for budget in BUDGETS
        if name != "full"
    ]


def measure(
    policies: Sequence[Policy],
    tokens: Sequence[int],
    settings: QualitySettings,
    threads: int,
) -> list[dict[str, Any]]:
    """Rows of the results, full attention first."""
    policies = [make_policy("full"), *policies]
    config = runtime_config(dtype="bfloat16", device="cpu", num_threads=threads)
    bar = tqdm(total=len(policies) * settings.decode_steps, desc="quality", unit="step")

    def on_progress(steps: int) -> None:
        bar.update(steps)

    with bar:
        measurements = measure_quality(
            SharedModel(EMBEDDED_MODEL, policies, config),
            policies,
            tokens,
            settings,
            on_policy=bar.set_postfix_str,
            on_progress=on_progress,
        )
    return [{"part": "quality"} | asdict(measurement) for measurement in measurements]


def main() -> None:
    parser = script_options(__doc__, "selection")
    parser.add_argument("--policies", nargs="+", default=available_policies())
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--sample-every", type=int, default=20)
    options = parser.parse_args()

    hide_loading_bars()
    run = Run(options)
    threads = available_cpus()
    text = "\n\n".join(stdlib_paragraphs())
    tokens = load_tokenizer(EMBEDDED_MODEL)(text, verbose=False)["input_ids"]
    settings = QualitySettings(
        context=CONTEXT, steps=options.steps, sample_every=options.sample_every
    )
    policies = policies_of_quality(options.policies)
    rows = measure(policies, tokens, settings, threads)
    settings_of_all = {
        "model": EMBEDDED_MODEL,
        "text": "docstrings of the standard library",
        "threads": threads,
        "context": CONTEXT,
    }
    run.write(settings_of_all | run.named("steps", "sample_every"), rows)


if __name__ == "__main__":
    main()
