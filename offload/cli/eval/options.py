"""Options that the commands of `offload eval` share, and the policies that they ask for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from offload.cli.bench.options import option_values, policy_grid
from offload.cli.options import Scalar, comma_separated, counts, shares
from offload.policies.registry import policy_names

if TYPE_CHECKING:
    from offload.bench.eval.bounds import Bound
    from offload.policies import Policy

DEFAULT_MODEL = "smollm2-135m-instruct"
DEFAULT_EVICTIONS = "auto"
OUTPUTS = ("table", "json", "md")
MODEL_PANEL = "What runs"
POLICY_PANEL = "What is compared"
TASK_PANEL = "What is asked"
OUTPUT_PANEL = "Output"

Model = Annotated[
    str, typer.Argument(help="Folder, .gguf file, hub id, or the embedded model's name.")
]
Policies = Annotated[
    str,
    typer.Option(
        "--policy",
        metavar="NAMES",
        help=f"Comma-separated: {', '.join(policy_names())}. "
        "Full attention always runs beside: it is the reference.",
        rich_help_panel=POLICY_PANEL,
    ),
]
BudgetTokens = Annotated[
    str,
    typer.Option(
        metavar="COUNTS",
        help="Tokens attended per KV head, such as 256,1024. The recent window is a quarter of "
        "them, at most 64, and the sinks a sixteenth, at most 4, unless --option says otherwise.",
        rich_help_panel=POLICY_PANEL,
    ),
]
PolicyOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        metavar="[POLICY.]KEY=VALUES",
        help="An option of one or of all policies; each of several values is measured, such as "
        "lfps.alpha=0.1,0.2. Repeatable.",
        rich_help_panel=POLICY_PANEL,
    ),
]
HostShares = Annotated[
    str,
    typer.Option(
        "--host-share",
        metavar="SHARES",
        help="Ask every policy, and full attention, again within these shares of the bytes of "
        "prompt and answer (host_bytes_per_sequence), such as 0.5,0.25, on the CPU. Each reads "
        "each prompt by itself then; with small --page-tokens less is lost to whole pages.",
        rich_help_panel=POLICY_PANEL,
    ),
]
Evictions = Annotated[
    str,
    typer.Option(
        metavar="NAMES",
        help="What stays within --host-share, comma-separated. auto: as host_bytes_per_sequence "
        "has it, reread where the policy allows it, else fitted. reread: tokens that are looked up "
        "when the text is read again, of all heads together (condense_by=rereading; full, "
        "exact_topk and others that keep nothing beside the cache). By attention, as many in each "
        "head: fitted (condense_by=attention: others are merged), means (merged without "
        "fitting), dropped (nothing is merged). By other scores: snapkv, rkv, snapkv-fitted, "
        "rkv-fitted.",
        rich_help_panel=POLICY_PANEL,
    ),
]
PageTokens = Annotated[
    int, typer.Option(min=1, help="In a page of the KV cache.", rich_help_panel=MODEL_PANEL)
]
Lengths = Annotated[
    str,
    typer.Option(
        "--context",
        "--lengths",
        metavar="COUNTS",
        help="Tokens of prompt and answer, such as 4096,8192.",
        rich_help_panel=TASK_PANEL,
    ),
]
Samples = Annotated[
    int,
    typer.Option("--samples", min=1, help="Prompts of each kind.", rich_help_panel=TASK_PANEL),
]
Seed = Annotated[int, typer.Option(min=0, help="Of the prompts.", rich_help_panel=TASK_PANEL)]
ChatTemplate = Annotated[
    bool | None,
    typer.Option(
        "--chat-template/--no-chat-template",
        help=r"Use the model's chat template. \[default: if it has one]",
        show_default=False,
        rich_help_panel=TASK_PANEL,
    ),
]
DecodeLast = Annotated[
    int,
    typer.Option(
        metavar="COUNT",
        min=0,
        help="Decode so many tokens at the end of each prompt one by one, instead of reading them "
        "with the rest: what they ask for, nothing has looked at before. 64 has the question.",
        rich_help_panel=TASK_PANEL,
    ),
]
Haystack = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH",
        help=r"Prose to hide needles in: a file, or a folder of .txt and .md files. "
        r"\[default: docstrings of Python's library]",
        show_default=False,
        rich_help_panel=TASK_PANEL,
    ),
]
Dtype = Annotated[
    str, typer.Option(help="auto, bfloat16, float16 or float32.", rich_help_panel=MODEL_PANEL)
]
Device = Annotated[
    str,
    typer.Option(
        help="Where the linear layers run: cpu, cuda or cuda:1.", rich_help_panel=MODEL_PANEL
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        min=1,
        help=r"CPU threads. \[default: all it may use]",
        show_default=False,
        rich_help_panel=MODEL_PANEL,
    ),
]
Resume = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.jsonl",
        help="Keep every answer in this file, and go on from what it has. A file of a run with "
        "other options is refused.",
        rich_help_panel=OUTPUT_PANEL,
    ),
]
Output = Annotated[
    str, typer.Option("--output", "-o", help=", ".join(OUTPUTS), rich_help_panel=OUTPUT_PANEL)
]
AsJson = Annotated[
    bool, typer.Option("--json", help="The same as -o json.", rich_help_panel=OUTPUT_PANEL)
]
Plot = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH",
        help="Draw a picture: .png, .svg or .pdf (needs matplotlib).",
        rich_help_panel=OUTPUT_PANEL,
    ),
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="More on stderr.")]


def output_format(output: str, as_json: bool) -> str:
    """One of OUTPUTS, or a usage error."""
    if output not in OUTPUTS:
        raise typer.BadParameter(
            f"unknown {output!r}; available: {', '.join(OUTPUTS)}", param_hint="--output"
        )
    return "json" if as_json else output


def policies_of(names: str, budgets: str, option: Sequence[str] | None) -> list[Policy]:
    """Full attention, then each policy with each budget and combination of its options.

    Where the options do not give them, recent_tokens is min(64, budget // 4) and sink_tokens
    min(4, budget // 16): of a small budget most is left to choose.
    """
    wanted = comma_separated(names, option="--policy", available=tuple(policy_names()))
    given = option_values([*(option or [])], option="--option")
    policies: list[Policy] = policy_grid(["full"], [], {}, option="--option")
    selecting = [name for name in wanted if name != "full"]
    if given and not selecting:
        raise typer.BadParameter("full attention takes no options", param_hint="--option")
    if any(name.rpartition(".")[2] == "budget_tokens" for name in given):
        raise typer.BadParameter("use --budget-tokens for it", param_hint="--option")
    for budget in counts(budgets, option="--budget-tokens") if selecting else []:
        options = _windows(selecting, budget, given) | given
        try:
            policies += policy_grid(selecting, [budget], options, option="--option")
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--option") from error
    return list(dict.fromkeys(policies))


def bounds_of(host_shares: str, evictions: str, device: str) -> list[Bound]:
    """Each share with each eviction; none of "", or a usage error."""
    if not host_shares:
        if evictions != DEFAULT_EVICTIONS:
            raise typer.BadParameter("needs --host-share", param_hint="--evictions")
        return []
    if device != "cpu":
        raise typer.BadParameter(
            f"bounds are scored on the CPU, but --device is {device}; leave one of them out",
            param_hint="--host-share",
        )
    from offload.bench.eval.bounds import Bound, check_share
    from offload.bench.eval.evictions import AUTO, EVICTIONS

    found = shares(host_shares, option="--host-share")
    names = comma_separated(evictions, option="--evictions", available=(AUTO, *EVICTIONS))
    try:
        for share in found:
            check_share(share)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--host-share") from error
    return [Bound(share, name) for share in found for name in dict.fromkeys(names)]


def _windows(
    names: Sequence[str], budget: int, given: dict[str, list[Scalar]]
) -> dict[str, list[Scalar]]:
    from offload.bench.eval.labels import windows_of
    from offload.policies.registry import make_policy

    windows: dict[str, list[Scalar]] = {}
    for name in names:
        known = type(make_policy(name)).option_names()
        for option, tokens in windows_of(budget).items():
            # streaming_llm's recent window is what the sinks leave of the budget.
            derived = (name, option) == ("streaming_llm", "recent_tokens")
            if option in known and not derived and not {option, f"{name}.{option}"} & {*given}:
                windows[f"{name}.{option}"] = [tokens]
    return windows
