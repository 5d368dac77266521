"""Options that the commands of `offload eval` share, and the policies that they ask for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from offload.cli.bench.options import PolicyOptions, option_values, policy_grid
from offload.cli.options import (
    Device,
    KVDtype,
    PageTokens,
    Scalar,
    Threads,
    Weights,
    check_name,
    comma_separated,
    counts,
    shares,
)
from offload.policies.registry import policy_names

if TYPE_CHECKING:
    from offload.bench.eval.bounds import Bound
    from offload.policies import Policy

OUTPUTS = ("table", "json", "md")
TASK_PANEL = "What is asked"
_ANY_EVICTION = "auto"


def tasks_option(available: Sequence[str], sets: Sequence[str] = ("all",)) -> Any:
    """--tasks of a command that has so many, and sets of them by name."""
    names = f"Comma-separated: {', '.join(available)}; or {', or '.join(sets)}."
    return typer.Option(metavar="NAMES", help=names, rich_help_panel=TASK_PANEL)


def task_names(tasks: str, available: tuple[str, ...]) -> list[str]:
    """What --tasks says, or a usage error."""
    if tasks == "all":
        return [*available]
    return comma_separated(tasks, option="--tasks", available=available)


@dataclass(frozen=True)
class Compared:
    """The policies, and their budgets and options."""

    panel: ClassVar[str] = "What is compared"
    policy: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help=f"Comma-separated: {', '.join(policy_names())}. "
            "Full attention always runs as well: it is the reference.",
        ),
    ] = "auto"
    budget_tokens: Annotated[
        str,
        typer.Option(
            metavar="COUNTS",
            help="Tokens attended per KV head, such as 256,1024. Sinks and recent window are the "
            "policy's defaults, but at most a sixteenth and a quarter of them, unless --option "
            "says otherwise.",
        ),
    ] = "1024"
    option: PolicyOptions = None

    def policies(self) -> list[Policy]:
        """Full attention, then each policy with each budget and combination of its options.

        Where the options do not give them, sink_tokens and recent_tokens are as `windows_of` the
        budget: of a small one most is left to choose.
        """
        wanted = comma_separated(self.policy, option="--policy", available=tuple(policy_names()))
        given = option_values([*(self.option or [])], option="--option")
        policies: list[Policy] = policy_grid(["full"], [], {}, option="--option")
        selecting = [name for name in wanted if name != "full"]
        if given and not selecting:
            raise typer.BadParameter("full attention takes no options", param_hint="--option")
        if any(name.rpartition(".")[2] == "budget_tokens" for name in given):
            raise typer.BadParameter("use --budget-tokens for it", param_hint="--option")
        for budget in counts(self.budget_tokens, option="--budget-tokens") if selecting else []:
            options = _windows(selecting, budget, given) | given
            try:
                policies += policy_grid(selecting, [budget], options, option="--option")
            except ValueError as error:
                raise typer.BadParameter(str(error), param_hint="--option") from error
        return list(dict.fromkeys(policies))


@dataclass(frozen=True)
class Bounds:
    """Within which the policies are asked again."""

    panel: ClassVar[str] = Compared.panel
    host_share: Annotated[
        str,
        typer.Option(
            metavar="SHARES",
            help="Ask every policy, and full attention, again within these shares of the bytes of "
            "prompt and answer (host_bytes_per_sequence), such as 0.5,0.25, on the CPU. Each reads "
            "each prompt by itself then; with small --page-tokens less is lost to whole pages.",
        ),
    ] = ""
    evictions: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help="What stays within --host-share, comma-separated. auto: as "
            "host_bytes_per_sequence has it, reread where the policy allows it, else fitted. "
            "reread: tokens that are looked up when the text is read again, of all heads together "
            "(condense_by=reconstruction; full, exact_topk and others that keep nothing but the "
            "cache). By attention, as many in each head: fitted (condense_by=attention: others are "
            "merged), dropped (nothing is merged).",
        ),
    ] = _ANY_EVICTION

    def on(self, device: str) -> list[Bound]:
        """Each share with each eviction, or a usage error; none where no share is given."""
        if not self.host_share:
            if self.evictions != _ANY_EVICTION:
                raise typer.BadParameter("needs --host-share", param_hint="--evictions")
            return []
        if device != "cpu":
            raise typer.BadParameter(
                f"bounds are scored on the CPU, but --device is {device}; leave one of them out",
                param_hint="--host-share",
            )
        from offload.bench.eval.bounds import EVICTIONS, Bound, check_share

        found = shares(self.host_share, option="--host-share")
        names = comma_separated(self.evictions, option="--evictions", available=tuple(EVICTIONS))
        try:
            for share in found:
                check_share(share)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--host-share") from error
        return [Bound(share, name) for share in found for name in dict.fromkeys(names)]


@dataclass(frozen=True)
class Questions:
    """How many prompts, how long, and as what."""

    panel: ClassVar[str] = TASK_PANEL
    lengths: Annotated[
        str,
        typer.Option(
            "--context",
            metavar="COUNTS",
            help="Tokens of prompt and answer, such as 4096,8192.",
        ),
    ] = "4096"
    samples: Annotated[int, typer.Option(min=1, help="Prompts of each kind.")] = 20
    seed: Annotated[int, typer.Option(min=0, help="Of the prompts.")] = 0
    chat_template: Annotated[
        bool | None, typer.Option(help=r"Use the model's chat template. \[default: if it has one]")
    ] = None

    def all_lengths(self) -> list[int]:
        """As numbers, or a usage error."""
        return counts(self.lengths, option="--context")


@dataclass(frozen=True)
class ProseQuestions(Questions):
    """Questions in prose, whose end may be decoded."""

    haystack: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help=r"Prose to hide needles in: a file, or a folder of .txt and .md files. "
            r"\[default: docstrings of Python's library]",
        ),
    ] = None
    decode_last: Annotated[
        int,
        typer.Option(
            metavar="COUNT",
            min=0,
            help="Decode so many tokens at the end of each prompt one by one, instead of reading "
            "them with the rest: what they ask for, nothing has looked at before. 64 has the "
            "question.",
        ),
    ] = 0


@dataclass(frozen=True)
class Runs:
    """What the model runs on, and as what."""

    panel: ClassVar[str] = "What runs"
    dtype: Annotated[str, typer.Option(help="auto, bfloat16, float16 or float32.")] = "bfloat16"
    device: Device = "cpu"
    reads_on: Annotated[
        str | None,
        typer.Option(
            metavar="DEVICE",
            help="A GPU that reads the prompts, such as cuda, where --device cpu decodes. "
            r"\[default: --device]",
        ),
    ] = None
    hot_rows: Annotated[
        bool,
        typer.Option(
            "--hot-rows",
            help="Heads that select attend to rows that a GPU keeps, chosen a layer ahead, where "
            "they may (docs/placement.md). On a CPU the GPU's part is computed slowly.",
        ),
    ] = False
    cache_correction_every: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="TOKENS",
            help="Read so many decoded tokens again with exact attention, each time that they are "
            "there (docs/notes/cache-correction.md).",
        ),
    ] = None
    batch_size: Annotated[
        int,
        typer.Option(
            min=1,
            help="Prompts of one kind that are decoded in the same steps: a GPU has time for many.",
        ),
    ] = 1
    threads: Threads = None
    page_tokens: PageTokens = 256
    weights: Weights = "auto"
    kv_dtype: KVDtype = "auto"

    def check_batch(self, bounds: Sequence[Bound]) -> None:
        """Refuse what is for one prompt at a time, with a usage error."""
        others = {
            "--host-share": bool(bounds),
            "--cache-correction-every": self.cache_correction_every is not None,
        }
        for option, is_given in others.items():
            if self.batch_size > 1 and is_given:
                raise typer.BadParameter(
                    f"{self.batch_size} prompts at a time are not for {option}, which takes one; "
                    "leave one of them out",
                    param_hint="--batch-size",
                )


@dataclass(frozen=True)
class Output:
    """Where answers and results go."""

    panel: ClassVar[str] = "Output"
    resume: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.jsonl",
            help="Keep every answer in this file, and go on from what it has. A file of a run with "
            "other options is refused.",
        ),
    ] = None
    output: Annotated[str, typer.Option("--output", "-o", help=", ".join(OUTPUTS))] = "table"
    as_json: Annotated[bool, typer.Option("--json", help="The same as -o json.")] = False

    def __post_init__(self) -> None:
        check_name(self.output, OUTPUTS, option="--output")

    @property
    def shown(self) -> str:
        """One of OUTPUTS."""
        return "json" if self.as_json else self.output


def _windows(
    names: Sequence[str], budget: int, given: dict[str, list[Scalar]]
) -> dict[str, list[Scalar]]:
    from offload.bench.eval.labels import windows_of

    return {
        f"{name}.{option}": [tokens]
        for name in names
        for option, tokens in windows_of(name, budget).items()
        if not {option, f"{name}.{option}"} & {*given}
    }
