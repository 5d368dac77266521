"""LycheeDecode's four rules at equal tokens: `python -m perf.papers.lychee_rules --reads-on cuda`.

Each rule's number is searched on other texts than those that it is judged by, so that the heads
that reuse attend there to as many tokens, on the mean, as under top-k with a budget. Judged are the
next tokens' logits against full attention, and answers; beside them stands what these heads
attended to meanwhile.

At one length ratio is top-k; over several it hands down more where there is more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offload import OffloadedModel
from offload.bench.eval.answers import answer_sample, attended_tokens, greedy_answer
from offload.bench.eval.intervals import student_interval
from offload.bench.eval.perplexity import Window, teacher_forced
from offload.bench.eval.prompt import prompt_text, prompt_tokens
from offload.bench.eval.summary import FULL, mean, summaries
from offload.bench.selection.metrics import kl_divergence, mean_by_rows
from offload.policies import Policy
from offload.policies.lychee_decode.calibration import (
    CALIBRATION_TOKENS,
    calibration_tokens,
    observe_heads,
    roles_from,
)
from offload.policies.lychee_decode.policy import RULES
from offload.policies.lychee_decode.roles import HeadRoles
from offload.policies.registry import make_policy
from offload.runtime.config import RuntimeConfig, runtime_config
from offload.runtime.shared_model import SharedModel
from perf.papers.judge import JUDGED_SEED
from perf.papers.kinds_of_text import (
    DECODED_TOKENS,
    DESCRIPTIONS,
    MODEL,
    Item,
    items_until,
    length_of,
    load_cached_tokenizer,
)
from perf.papers.lychee_decode import WINDOWS, Published, number_for, record
from perf.results_file import Run, hide_loading_bars, script_options

TOP_K = "top_k"
JUDGED = ("needle", "prose", "keys", "source", "json")
ALL = "all"
TINY = {"lengths": [700], "budgets": [64], "most_tokens": 256, "rounds": 1}
Row = dict[str, Any]


@dataclass(frozen=True)
class Rule:
    """A rule with a number, judged as a policy.

    Attributes:
        budget: of top-k, whose tokens it has.
        number: None for top-k.
        found_tokens: attended to where the number was searched, mean of the heads that reuse.
    """

    name: str
    budget: int
    number: float | None
    found_tokens: float

    @property
    def label(self) -> str:
        return f"{self.name} {self.budget}"

    def policy(self, roles: HeadRoles, most_tokens: int) -> Policy:
        """Top-k with the budget; the others with at most `most_tokens`."""
        is_top_k = self.name == TOP_K
        return make_policy(
            "lychee_decode",
            rule=self.name,
            head_roles=roles,
            budget_tokens=self.budget if is_top_k else most_tokens,
            **({} if is_top_k else {self.name: self.number}),
            **WINDOWS,
        )


def rules_of(budgets: Sequence[int], published: Sequence[Published]) -> list[Rule]:
    """All rules with the numbers that make their tokens equal, by budget."""
    rules = []
    for budget in budgets:
        for name in RULES:
            number = number_for(name, budget, published, Published.attended)
            tokens = float(np.mean([one.attended(name, number) for one in published]))
            rules.append(Rule(name, budget, None if name == TOP_K else number, tokens))
    return rules


def judge_item(
    model: SharedModel, labels: Sequence[str], tokenizer: Any, item: Item, reusing: float
) -> Row:
    """What policies make of the tokens that follow a prompt, and what they answer.

    Args:
        labels: of the runtimes of `model`; the first has full attention.
        reusing: share of the heads that attend to what was handed down.

    Returns:
        kl: by policy, in nats, of each next token's logits against the first policy's; those that
            follow a question are what full attention answers.
        tokens: by policy, that heads attended to which reuse; None on a GPU, which does not count.
        answers: of a question, as `answer_sample` has them.
    """
    row: Row = {"task": item.task, "length": length_of(item), "index": item.index}
    if isinstance(item, Window):
        context, following = list(item.tokens[: item.length]), list(item.tokens[item.length :])
    else:
        room = model.max_context - item.max_new_tokens
        context, _ = prompt_tokens(prompt_text(item, tokenizer, chat=True), tokenizer, room)
        following = []
        row |= answer_sample(model, labels, tokenizer, item, chat=True)
    with model.read(context) as prompt:
        if not following:
            stop = model.eos_tokens
            following = greedy_answer(
                model, 0, prompt, lambda said: said[-1] in stop, DECODED_TOKENS
            ).tokens
        logits: dict[str, Tensor] = {}
        tokens: dict[str, float | None] = {}
        steps = len(following)
        kv_len = len(context) + (steps + 1) / 2  # mean of the steps
        for index, label in enumerate(labels):
            runtime = model.runtimes[index]
            with teacher_forced(model, index, prompt) as decode:
                runtime.attention.start_profile()
                logits[label] = torch.stack([decode(token).float().cpu() for token in following])
                attended = attended_tokens(runtime, steps)
            tokens[label] = None
            if attended is not None and label != labels[0]:
                tokens[label] = (attended - (1 - reusing) * kv_len) / reusing
    exact = logits[labels[0]]
    kl = {label: mean_by_rows(kl_divergence, of, exact) for label, of in logits.items()}
    return row | {"steps": steps, "kl": kl, "tokens": tokens}


def rows_of(judged: Sequence[Row], rules: Sequence[Rule]) -> list[Row]:
    """A row for each rule, budget and kind of text, and all of them.

    kl_change is the difference to top-k's at the same budget, with the 95 % interval of it over
    prompts; score that of the answers, score_interval of its difference to full attention.
    """
    rows = []
    asked = [one for one in judged if "answers" in one]
    scored = {x["policy"]: x for x in summaries(asked, [FULL, *(x.label for x in rules)])}
    for kind in (ALL, *dict.fromkeys(one["task"] for one in judged)):
        of_kind = [one for one in judged if kind in (ALL, one["task"])]
        for rule in rules:
            label, of_top_k = rule.label, f"{TOP_K} {rule.budget}"
            kl = np.array([one["kl"][label] for one in of_kind])
            change = kl - [one["kl"][of_top_k] for one in of_kind]
            row = {
                "rule": rule.name,
                "budget": rule.budget,
                "number": rule.number,
                "found_tokens": rule.found_tokens,
                "kind": kind,
                "prompts": len(of_kind),
                "kl": float(kl.mean()),
                "kl_change": float(change.mean()),
                "kl_interval": None if rule.name == TOP_K else student_interval(change),
                "tokens": mean([one["tokens"][label] for one in of_kind]),
                "tokens_by_length": _tokens_by_length(of_kind, label),
            }
            if kind == ALL:
                row |= {"asked": len(asked), "score": scored[label]["score"]}
                row |= {"full_score": scored[FULL]["score"]}
                row |= {"score_interval": scored[label]["interval"]}
            rows.append(row)
    return rows


def _tokens_by_length(judged: Sequence[Row], label: str) -> Mapping[str, float | None]:
    lengths = sorted({one["length"] for one in judged})
    return {
        str(length): mean([one["tokens"][label] for one in judged if one["length"] == length])
        for length in lengths
    }


def main() -> None:
    parser = script_options(__doc__, "paper-lychee-rules")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192])
    parser.add_argument("--budgets", type=int, nargs="+", default=[256, 512])
    parser.add_argument("--most-tokens", type=int, default=2048, help="of the rules but top-k")
    parser.add_argument("--rounds", type=int, default=4, help="prompts of each kind and length")
    parser.add_argument("--device", default="cpu", help="that decodes; a GPU counts no tokens")
    parser.add_argument("--reads-on", help="a GPU that reads prompts where the CPU decodes")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--record-until", type=float, default=60, help="seconds after the start")
    parser.add_argument("--judge-until", type=float, default=165, help="seconds after the start")
    parser.add_argument("--tiny", action="store_true", help=f"to try the script: {TINY}")
    options = parser.parse_args()
    if options.tiny:
        parser.set_defaults(**TINY)
        options = parser.parse_args()
    least = options.most_tokens + DECODED_TOKENS
    if min(options.lengths) <= least or max(options.budgets) > options.most_tokens:
        parser.error(
            f"--lengths {options.lengths} must exceed {least}: a context that fits into "
            f"--most-tokens {options.most_tokens} is attended whole; and no budget may, of "
            f"--budgets {options.budgets}"
        )

    hide_loading_bars()
    run = Run(options)
    config = runtime_config(device=options.device, dtype="bfloat16", num_threads=options.threads)
    model = OffloadedModel.from_pretrained(MODEL, policy="full", num_threads=options.threads)
    tokens = calibration_tokens(load_cached_tokenizer(), CALIBRATION_TOKENS)
    calibration = observe_heads(model._offload.lean, tokens)
    del model
    roles = roles_from(calibration, model_type="", head_dim=64, retrieval_heads=None)
    weighing = runtime_config(
        device=options.reads_on or options.device, dtype="bfloat16", num_threads=options.threads
    )
    deadline = run.started + options.record_until
    recorded = record(weighing, options.lengths, deadline, run, JUDGED, options.rounds)
    if not recorded:
        parser.error(f"nothing was recorded: raise --record-until {options.record_until:g}")
    published = [Published(one, roles.array, options.most_tokens) for one in recorded]
    rules = rules_of(options.budgets, published)
    searched_on = len(recorded)
    del recorded, published
    for rule in rules:
        run.say(f"{rule.label}: {rule.number}, {rule.found_tokens:.1f} tokens")
    judged = _judge(config, rules, roles, options, run)
    if not judged:
        parser.error(f"nothing was judged: raise --judge-until {options.judge_until:g}")
    settings: Row = {"model": MODEL, "kinds": DESCRIPTIONS, "searched_on": searched_on}
    names = ("lengths", "budgets", "most_tokens", "device", "reads_on", "threads")
    run.write(settings | run.named(*names), rows_of(judged, rules))


def _judge(
    config: RuntimeConfig, rules: Sequence[Rule], roles: HeadRoles, options: Any, run: Run
) -> list[Row]:
    policies = [rule.policy(roles, options.most_tokens) for rule in rules]
    model = SharedModel(MODEL, [make_policy("full"), *policies], config, reads_on=options.reads_on)
    labels, judged = [FULL, *(rule.label for rule in rules)], []
    reusing = 1 - roles.array.sum() / roles.array.size
    run.say(f"{len(labels)} policies are loaded")
    for item in items_until(
        run.started + options.judge_until,
        JUDGED,
        options.lengths,
        first_seed=JUDGED_SEED,
        most_rounds=options.rounds,
    ):
        judged.append(judge_item(model, labels, load_cached_tokenizer(), item, reusing))
        run.say(f"judged by {item.task}, {length_of(item)} tokens, seed {item.index}")
    return judged


if __name__ == "__main__":
    main()
