"""Options that several commands have, and command-line strings that become Python values."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from offload.policies.registry import policy_names

Scalar = int | float | bool | str

DEFAULT_MODEL = "smollm2-135m-instruct"
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Device = Annotated[
    str,
    typer.Option(
        help="Where the linear layers run: cpu, cuda or cuda:1. The KV cache is on the host."
    ),
]
AnyDevice = Annotated[
    str | None,
    typer.Option(help=r"cpu, cuda or cuda:1. \[default: cuda if there is one, else cpu]"),
]
DType = Annotated[str, typer.Option(help="auto (the checkpoint's), bfloat16, float16 or float32.")]
MaxMemory = Annotated[
    list[str] | None,
    typer.Option(
        metavar="DEVICE=SIZE",
        help="Hard limit for weights and KV cache, such as cpu=8GiB or 0=20GiB. Repeatable.",
    ),
]
ModelName = Annotated[
    str, typer.Argument(help="Folder, .gguf file, hub id, or an embedded model's name.")
]
PageTokens = Annotated[int, typer.Option(min=1, help="In a page of the KV cache.")]
Placement = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Where KV heads are attended: the output of offload plan --json. "
        r"\[default: chosen for this machine]",
    ),
]
Text = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH",
        help="What is read: a file, or a folder of .txt and .md files. "
        r"\[default: docstrings of Python's library]",
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        "--threads",
        min=1,
        help=r"CPU threads. \[default: all this process may use; with a GPU, but one]",
    ),
]
# As RuntimeConfig has them, which takes long to import.
WEIGHT_NAMES = ("auto", "q8", "q4", "bfloat16", "float16", "float32")
Weights = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="What the layers' matrices are kept as: auto (on a CPU as a GGUF has them, else in "
        "--dtype), q8, q4, bfloat16, float16 or float32. q8 and q4 are smaller; q8 is nearly as "
        "exact, q4 less, of small models much less; the head is q8 with both.",
    ),
]
KV_DTYPE_NAMES = ("auto", "bfloat16", "float16", "float32", "int8")
KVDtype = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="What keys and values are kept as: auto (the model's dtype, or int8 where generate "
        "has no room for that, and serve none for a whole context), bfloat16, float16 or float32 "
        "(of a model in it), or int8, which takes 0.52 of the bytes of bfloat16 and is a little "
        "less exact.",
    ),
]
HostExperts = Annotated[
    str,
    typer.Option(
        metavar="N|auto",
        help="Of a MoE model with --device cuda, layers whose experts stay in host memory and "
        "run on the CPU. auto: as many as the GPU has too little memory for.",
    ),
]
HotExperts = Annotated[
    int | None,
    typer.Option(
        min=0,
        metavar="N",
        help="Of each of these layers, experts of which the GPU has copies: those used most. "
        "Default: with auto half of them, or as many as there is room for; else none.",
    ),
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="More logs on stderr.")]


@dataclass(frozen=True)
class PolicyChoice:
    """A policy by its name, and its options."""

    policy: Annotated[
        str,
        typer.Option(
            help=f"Which cached tokens a decode step attends to: {', '.join(policy_names())}."
        ),
    ] = "auto"
    policy_option: Annotated[
        list[str] | None,
        typer.Option(
            "--option",
            metavar="KEY=VALUE",
            help="An option of the policy, such as dense_layers=1. Repeatable.",
        ),
    ] = None
    budget_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, help="Tokens that each KV head attends to; short for --option budget_tokens=N."
        ),
    ] = None

    def options(self) -> dict[str, Scalar]:
        """The policy's options; a policy that does not exist is a usage error."""
        check_name(self.policy, policy_names(), kind="policy ", option="--policy")
        return policy_options(self.policy_option or [], self.budget_tokens)


def key_values(pairs: list[str], *, option: str, form: str = "key=value") -> dict[str, str]:
    """`["cpu=8GiB"]` -> `{"cpu": "8GiB"}`; a usage error if a pair has no "=" or a key repeats."""
    parsed: dict[str, str] = {}
    for pair in pairs:
        key, separator, value = pair.partition("=")
        if not separator or not key or not value:
            raise typer.BadParameter(f"expected {form}, got {pair!r}", param_hint=option)
        if key in parsed:
            raise typer.BadParameter(f"{key!r} is given twice", param_hint=option)
        parsed[key] = value
    return parsed


def policy_options(pairs: list[str], budget_tokens: int | None = None) -> dict[str, Scalar]:
    """`["alpha=0.4"]` -> `{"alpha": 0.4}`: numbers and booleans, else text.

    `budget_tokens` is one of them if it is given, and a usage error if `pairs` have it, too.
    """
    if budget_tokens is not None:
        pairs = [*pairs, f"budget_tokens={budget_tokens}"]
    values = key_values(pairs, option="--option")
    return {key: scalar(value) for key, value in values.items()}


def memory_budgets(pairs: list[str]) -> dict[int | str, int | str] | None:
    """`["0=20GiB", "cpu=96GiB"]` -> `{0: "20GiB", "cpu": "96GiB"}`; None if there are none."""
    values = key_values(pairs, option="--max-memory", form="DEVICE=SIZE, such as cpu=8GiB")
    budgets: dict[int | str, int | str] = {}
    for key, value in values.items():
        budgets[int(key) if key.isdigit() else key] = int(value) if value.isdigit() else value
    return budgets or None


def check_name(name: str | None, available: Sequence[str], *, option: str, kind: str = "") -> None:
    """A usage error for a name that is given and not `available`."""
    if name is not None and name not in available:
        raise typer.BadParameter(
            f"unknown {kind}{name!r}; available: {', '.join(available)}", param_hint=option
        )


def comma_separated(text: str, *, option: str, available: tuple[str, ...]) -> list[str]:
    """`"dense,topk"` -> `["dense", "topk"]`; a usage error for a name that is not `available`."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        check_name(name, available, option=option)
    if not names:
        raise typer.BadParameter(f"give one of: {', '.join(available)}", param_hint=option)
    return names


def counts(text: str, *, option: str, least: int = 1) -> list[int]:
    """`"1,2"` -> `[1, 2]`; a usage error unless all are integers of at least `least`."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < least:
        raise typer.BadParameter(
            f"expected integers of at least {least}, separated by commas, got {text!r}",
            param_hint=option,
        )
    return numbers


def shares(text: str, *, option: str) -> list[float]:
    """`"0.9,0.95"` -> `[0.9, 0.95]`, each once; a usage error unless all are in (0, 1]."""
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or not all(0 < share <= 1 for share in numbers):
        raise typer.BadParameter(
            f"expected shares above 0 and at most 1, separated by commas, got {text!r}",
            param_hint=option,
        )
    return list(dict.fromkeys(numbers))


def torch_seed(seed: int | None) -> int | None:
    """The seed; a usage error unless it is one that torch takes."""
    if seed is not None and not -(2**63) <= seed < 2**64:
        raise typer.BadParameter(f"expected -2**63 to 2**64 - 1, got {seed}")
    return seed


def scalar(text: str) -> Scalar:
    """A number or a boolean if it looks like one, else the text."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    return value if isinstance(value, (int, float)) else text
