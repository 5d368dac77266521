"""`offload generate`: answer a prompt, and say what it cost."""

from __future__ import annotations

import gc
import sys
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from offload.cli.console import print_json, print_marked, quiet_transformers, running, stderr
from offload.cli.generation import (
    Screen,
    answer,
    check_context,
    condensed_line,
    policy_label,
    prompt_tokens,
    quality_line,
)
from offload.cli.options import (
    DEFAULT_MODEL,
    Device,
    DType,
    HostExperts,
    HotExperts,
    KVDtype,
    MaxMemory,
    ModelName,
    Placement,
    PolicyChoice,
    Threads,
    Verbose,
    Weights,
    memory_budgets,
    torch_seed,
)
from offload.policies.registry import make_policy
from offload.ranks.launch import is_rank, is_silent_rank, run_ranks
from offload.system.errors import HostBudgetError
from offload.system.garbage import importing_torch
from offload.system.stdlib_text import DEMO_ANSWER, DEMO_CONTEXT_TOKENS, DEMO_NEEDLE, DEMO_QUESTION
from offload.system.text_file import argument_text, decoded, read_text_file

if TYPE_CHECKING:
    from offload.policies import Policy
    from offload.policies.auto import Auto


@dataclass(frozen=True)
class Prompt:
    """The prompt, and what the answer should have."""

    panel: ClassVar[str] = "What the model reads"
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="The prompt.")] = None
    prompt_file: Annotated[
        str | None,
        typer.Option(
            "--prompt-file",
            "-f",
            metavar="PATH",
            help='Read the prompt from a file, or from stdin with "-".',
        ),
    ] = None
    demo: Annotated[
        bool,
        typer.Option(
            "--demo",
            help="Find one sentence in 6,000 tokens, as auto does it and with what it did not "
            "take; fails if an answer is wrong.",
        ),
    ] = False
    context: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="TOKENS",
            help="Put the prompt behind so many tokens of text: docstrings of Python's library.",
        ),
    ] = None
    needle: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="Hide this sentence in the middle of that text."),
    ] = None
    expect: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="Exit with code 3 unless the answer contains this."),
    ] = None
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--no-chat", help=r"Use the model's chat template. \[default: if it has one]"
        ),
    ] = None

    def checked(self) -> Prompt:
        """With --demo's own prompt; a usage error where there is no prompt or more than one."""
        asked = self
        if self.demo:
            if any(
                x is not None for x in (self.prompt, self.prompt_file, self.needle, self.expect)
            ):
                raise typer.BadParameter(
                    "--demo brings its own prompt, needle and expected answer", param_hint="--demo"
                )
            asked = replace(
                self,
                prompt=DEMO_QUESTION,
                needle=DEMO_NEEDLE,
                expect=DEMO_ANSWER,
                context=self.context or DEMO_CONTEXT_TOKENS,
            )
        if (asked.prompt is None) == (asked.prompt_file is None):
            raise typer.BadParameter("give one of --prompt, --prompt-file and --demo")
        if asked.needle is not None and asked.context is None:
            raise typer.BadParameter("--needle needs --context", param_hint="--needle")
        return asked


@dataclass(frozen=True)
class Chosen(PolicyChoice):
    """The policy, and whether full attention answers, too."""

    panel: ClassVar[str] = "How it runs"
    compare: Annotated[
        bool | None,
        typer.Option(
            "--compare/--no-compare",
            help="Run full attention on the same prompt, too; where auto came to exact attention, "
            r"what it comes to in longer ones instead. \[default: no; yes with --demo]",
        ),
    ] = None


@dataclass(frozen=True)
class Loading:
    """Arguments of `OffloadedModel.from_pretrained`."""

    panel: ClassVar[str] = "How it runs"
    dtype: DType = "auto"
    weights: Weights = "auto"
    kv_dtype: KVDtype = "auto"
    device: Device = "cpu"
    backend: Annotated[
        str | None,
        typer.Option(
            help=r"How GPU and CPU wait for each other: graph or stream. \[default: the fastest]"
        ),
    ] = None
    num_threads: Threads = None
    tensor_parallel_size: Annotated[
        int,
        typer.Option(
            min=1,
            metavar="N",
            help="GPUs that run the model together, each with a part of its heads and its own "
            "process. --max-memory cpu= is for all of them, --threads for each.",
        ),
    ] = 1
    max_memory: MaxMemory = None
    host_experts: HostExperts = "0"
    hot_experts: HotExperts = None
    host_bytes_per_sequence: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Hard limit for what is kept of one sequence, however long it gets, such as "
            "64MiB; what does not fit is condensed or dropped (--condense-by). Not with ranks.",
        ),
    ] = None
    condense_by: Annotated[
        str,
        typer.Option(
            metavar="HOW",
            help="Which tokens stay within --host-bytes-per-sequence. reconstruction: those that "
            "are looked up when the text is read a second time, shared out among all heads; keeps "
            "what nobody has asked for yet; a long prompt takes four times as long. attention: in "
            "each head those that were asked for last. auto: reconstruction on a CPU if the policy "
            "keeps nothing but the cache (full, exact_topk …), else attention.",
        ),
    ] = "auto"
    cache_correction_every: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="T",
            help="After so many tokens that were decoded sparsely, read them again with exact "
            "attention and replace their keys and values. Not with --policy full, "
            r"--host-bytes-per-sequence or ranks. \[default: never]",
        ),
    ] = None
    placement: Placement = None
    quality_probe: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=1.0,
            metavar="SHARE",
            help="Compare this share of what the policy selects with exact attention, such as "
            "0.001, and tell how much of the attention mass was kept.",
        ),
    ] = 0.0
    quality_floor: Annotated[
        float | None,
        typer.Option(
            min=0.0, max=1.0, metavar="SHARE", help="Warn once if surely less of it is kept."
        ),
    ] = None


@dataclass(frozen=True)
class Sampling:
    """How many tokens, and how each is chosen."""

    panel: ClassVar[str] = "How tokens are chosen"
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", min=1)] = 128
    temperature: Annotated[float, typer.Option(min=0.0, max=100.0, help="0 is greedy.")] = 0.0
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0)] = 1.0
    top_k: Annotated[int, typer.Option(min=0, help="0 is all.")] = 0
    seed: Annotated[
        int | None, typer.Option(callback=torch_seed, help="Makes sampling repeatable.")
    ] = None
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on to --max-new-tokens, to measure.")
    ] = False
    mtp: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=8,
            metavar="N",
            help="Have the checkpoint's own head for multi-token prediction (Qwen3.5, Qwen3-Next, "
            "DeepSeek-V3, GLM-4.x) draft so many tokens at a time, on a CPU.",
            show_default="no drafts",
        ),
    ] = None

    def settings(self) -> dict[str, Any]:
        """Arguments of `generate`."""
        samples = self.temperature >= 1e-5  # as SamplingParams, which takes long to import
        settings: dict[str, Any] = {"do_sample": samples}
        if samples:
            settings |= {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        if self.ignore_eos:
            settings["eos_token_id"] = None
        if self.mtp is not None:
            settings |= {"use_mtp": True, "num_assistant_tokens": self.mtp}
        return settings | {"max_new_tokens": self.max_new_tokens}


def generate(
    model: ModelName = DEFAULT_MODEL,
    *,
    asked: Prompt,
    chosen: Chosen,
    loading: Loading,
    sampling: Sampling,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document instead of text.")
    ] = False,
    verbose: Verbose = False,
) -> None:
    """Answer a prompt and print what it cost: KV bytes, prefill and decode speed.

    The answer streams to stdout; progress, logs and what it cost go to stderr.

    [bold]Examples[/bold]

    A fact hidden in 6,000 tokens, found by the default and by what it did not take:

        offload generate --demo

    A question about a file, attending to 512 tokens per KV head:

        cat notes.txt question.txt | offload generate -f -
        --policy exact_topk --budget-tokens 512

    Your own model, sampled, in at most 8 GiB of host memory:

        offload generate ./Llama-3.2-1B-Instruct -p "Why is the sky blue?"
        --temperature 0.7 --max-memory cpu=8GiB

    On two GPUs:

        offload generate ./Llama-3.1-8B-Instruct -f book.txt --device cuda
        --tensor-parallel-size 2

    Figures for a script:

        offload generate --context 4000 -p "Summarise the text." --json | jq .runs
    """
    asked = asked.checked()
    options = chosen.options()
    budgets = memory_budgets(loading.max_memory or [])
    has_ranks = loading.tensor_parallel_size > 1
    if has_ranks and not is_rank():
        with running(verbose=verbose):
            stdin = _read_prompt("-") if asked.prompt_file == "-" else None
        raise typer.Exit(run_ranks(loading.tensor_parallel_size, sys.argv[1:], stdin=stdin))
    is_silent = has_ranks and is_silent_rank()

    with running(verbose=verbose):
        with importing_torch():
            policies = [make_policy(chosen.policy, **options)]
            compare = asked.demo if chosen.compare is None else chosen.compare
            if compare and chosen.policy != "full":
                policies.append(make_policy("full"))
            prompt = _read_prompt(asked.prompt_file) if asked.prompt is None else asked.prompt
            prompt = argument_text(prompt, "--prompt")
            needle = asked.needle
            if needle is not None:
                needle = argument_text(needle, "--needle")

            from offload.loading.names import load_tokenizer
            from offload.policies.auto import Auto
            from offload.runtime.model import OffloadedModel
            from offload.runtime.row_dtype import takes_int8

            with quiet_transformers(verbose=verbose):
                tokenizer = load_tokenizer(model)
        with quiet_transformers(verbose=verbose):
            if asked.context is not None:
                check_context(model, asked.context)
            input_ids = prompt_tokens(
                tokenizer, prompt, chat=asked.chat, context_tokens=asked.context, needle=needle
            )
            settings = sampling.settings()
            arguments = asdict(loading) | {"max_memory": budgets}
            most = input_ids.shape[1] + sampling.max_new_tokens
            runs: list[dict[str, Any]] = []
            while policies:
                made = policies.pop(0)
                loaded = OffloadedModel.from_pretrained(model, policy=made, **arguments)
                arguments["cache_correction_every"] = None  # of the first
                resolved = loaded.policy
                is_exact = not resolved.selects or most <= resolved.dense_tokens
                came_to = "exact" if is_exact and resolved.selects else resolved.name
                label = made.name if made.name != "auto" else policy_label(made.name, came_to)
                shown = not as_json and not is_silent
                with Screen(label, input_ids.shape[1], shown=shown) as screen:
                    try:
                        run = answer(
                            loaded, made, tokenizer, input_ids, screen, sampling.seed, settings
                        )
                    except HostBudgetError as error:
                        if not (screen.is_untouched and takes_int8(loaded, loading.kv_dtype)):
                            raise
                        in_int8 = f"--kv-dtype auto: int8, as otherwise {error}"
                        stderr().print(in_int8, style="dim", soft_wrap=True)
                        arguments["kv_dtype"], policies = "int8", [made, *policies]
                        del loaded, error
                        gc.collect()
                        continue
                runs.append(run | {"label": label})
                if policies and isinstance(made, Auto) and is_exact:
                    sparse = _beyond_crossover(made, loaded, most)
                    policies = [sparse] if sparse.selects and most > sparse.dense_tokens else []
                    beside = _beside(sparse, resolved, loaded.policy_reason, most)
                    stderr().print(beside, style="dim", soft_wrap=True)
                del loaded  # before the next is loaded: its weights and cache leave the memory
    if is_silent:
        raise typer.Exit
    expect = asked.expect
    _print_result(model, prompt, expect, runs, as_json=as_json)
    missed = [run["label"] for run in runs if expect is not None and expect not in run["answer"]]
    if missed:
        names = " and ".join(missed)
        print_marked("wrong:", f"no {expect!r} in the answer with {names}", "bold red")
        raise typer.Exit(3)


def _beyond_crossover(auto: Auto, loaded: Any, most: int) -> Policy:
    """What `auto` takes in longer contexts than `most`; Full where nothing selects."""
    from offload.models.shape import ModelShape
    from offload.runtime.auto_policy import beyond_crossover
    from offload.runtime.generic_loading import GenericRuntime

    runtime = loaded._offload
    if not isinstance(runtime, GenericRuntime):
        shape = ModelShape.of_config(loaded.config.to_dict(), most)
    elif runtime.hosted.specs:  # configs of these types name sizes as they like
        shape = replace(runtime.shape, max_context=most)
    else:
        return make_policy("full")
    return beyond_crossover(auto, shape, most)


def _beside(sparse: Policy, resolved: Policy, reason: str, most: int) -> str:
    """What is compared with `auto`, which has attended to all of at most `most` tokens, and why."""
    if not sparse.selects:
        return "nothing beside it: no other policy takes this model"
    if most <= sparse.dense_tokens:
        return (
            f"nothing beside it: {sparse.name} attends to all of {most:,} tokens, too, with "
            f"budget_tokens={sparse.dense_tokens}"
        )
    if resolved.selects:
        return (
            f"beside it {sparse.name}, which selects from {sparse.dense_tokens:,} tokens on; auto "
            f"attends to everything up to {resolved.dense_tokens:,} tokens"
        )
    return f"beside it {sparse.name}; auto did not take it here: {reason}"


def _read_prompt(prompt_file: str | None) -> str:
    if prompt_file is None or prompt_file == "-":
        if sys.stdin is None:
            raise ValueError("stdin is closed, but --prompt-file - reads the prompt there")
        return decoded(sys.stdin.buffer.read(), "stdin")
    return read_text_file(prompt_file)


def _print_result(
    model: str, prompt: str, expect: str | None, runs: list[dict[str, Any]], *, as_json: bool
) -> None:
    if as_json:
        correct = None if expect is None else all(expect in run["answer"] for run in runs)
        print_json(
            {"model": model, "prompt": prompt, "expected": expect, "correct": correct, "runs": runs}
        )
        return
    from rich.table import Table

    from offload.system.memory import format_bytes

    table = Table(title=model, title_justify="left")
    table.add_column("policy", min_width=max(len(run["label"]) for run in runs))
    sets_up = any(run["setup_seconds"] for run in runs)
    on_device = any(run["kv_device_bytes"] for run in runs)
    of_device = ["KV on device"] if on_device else []
    costs = ["context", "KV on host", *of_device, "index", "prefill", "decode"]
    for column in [*costs, "set-up"] if sets_up else costs:
        table.add_column(column, justify="right")
    for run in runs:
        index = f"{format_bytes(run['policy_host_bytes'])}\n{run['index_seconds']:.2f} s"
        table.add_row(
            run["label"],
            f"{run['context_tokens']:,}",
            format_bytes(run["kv_host_bytes"]),
            *([format_bytes(run["kv_device_bytes"])] if on_device else []),
            index if run["policy_host_bytes"] else "-",
            f"{run['prefill_tokens_per_second']:,.0f} tok/s",
            f"{run['decode_tokens_per_second']:,.1f} tok/s",
            *([f"{run['setup_seconds']:.2f} s"] if sets_up else []),
        )
    console = stderr()  # stdout has the answer alone
    console.print(table)
    first, last = runs[0], runs[-1]
    speeds = [run["decode_tokens_per_second"] for run in (first, last)]
    compares = first["policy"] == "auto" and last["policy"] != "full"
    if compares and speeds[1] > speeds[0]:
        told = f"{last['policy']} was faster this time, though auto did not expect it"
        console.print(
            f"{told}; `offload plan {model} --remeasure` measures this machine", soft_wrap=True
        )
    for run in runs:
        if run["condensed"] is not None:
            line = condensed_line(run["condensed"], run["condense_by"])
            console.print(f"{run['label']}: {line}", soft_wrap=True)
        if run["quality"] is not None:
            line = quality_line(run["quality"])
            console.print(f"{run['label']}: {line}", soft_wrap=True)
