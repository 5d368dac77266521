"""`offload bench serve`: latencies and throughput of many requests at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from offload.cli.bench.options import AsJson
from offload.cli.console import (
    make_table,
    no_loading_bars,
    print_json,
    progress_bar,
    quiet_transformers,
    running,
    stderr,
    stdout,
)
from offload.cli.options import (
    DEFAULT_MODEL,
    Device,
    DType,
    MaxMemory,
    PageTokens,
    Plot,
    PolicyChoice,
    Text,
    Threads,
    Verbose,
    Weights,
    comma_separated,
    counts,
    memory_budgets,
)

if TYPE_CHECKING:
    from offload.bench.serve.load import Load
    from offload.bench.serve.measure import OnRequest, Row, Served

# offload.bench has these, but imports torch; a test compares the two.
ENGINE_NAMES = ("offload", "transformers")
CLIENTS = "1,2,4,8"
PACE_PROMPT_TOKENS = "7000"


@dataclass(frozen=True)
class Requests:
    """How many come, when, and how long they are."""

    panel: ClassVar[str] = "What is asked"
    clients: Annotated[
        str | None,
        typer.Option(
            metavar="COUNTS",
            help="Each sends its next request when its last one is answered. "
            rf"\[default: {CLIENTS}]",
        ),
    ] = None
    requests: Annotated[int, typer.Option(min=1, help="Of each client.")] = 4
    rate: Annotated[
        float | None,
        typer.Option(
            min=1e-3,
            metavar="R",
            help="Instead of --clients: R requests per second on average, at random, whether "
            "earlier ones are answered or not.",
        ),
    ] = None
    duration: Annotated[
        float, typer.Option(min=0.0, metavar="SECONDS", help="In which --rate sends requests.")
    ] = 30.0
    prompt_tokens: Annotated[
        str | None,
        typer.Option(
            metavar="COUNTS",
            help="Such as 512,2048; or a range, such as 128-2048, of evenly distributed lengths. "
            rf"\[default: 2048; {PACE_PROMPT_TOKENS} with --pace]",
        ),
    ] = None
    answer_tokens: Annotated[
        str, typer.Option(metavar="COUNTS", help="All are decoded, wherever the model would end.")
    ] = "128"
    shared_tokens: Annotated[
        int, typer.Option(min=0, metavar="N", help="With which all prompts begin.")
    ] = 0
    temperature: Annotated[
        float, typer.Option(min=0.0, max=100.0, metavar="T", help="0 takes the likeliest tokens.")
    ] = 0.0
    pace: Annotated[
        bool,
        typer.Option(
            "--pace",
            help="Instead of clients: four requests decode alone, and then while a prompt of "
            "--prompt-tokens is read.",
        ),
    ] = False
    text: Text = None
    seed: Annotated[int, typer.Option(min=0, help="Of lengths, pieces and times.")] = 0
    good_ttft_ms: Annotated[
        float | None,
        typer.Option(min=0.0, metavar="MS", help="To the first token of a good answer, at most."),
    ] = None
    good_gap_ms: Annotated[
        float | None,
        typer.Option(min=0.0, metavar="MS", help="Between its tokens, at most, on average."),
    ] = None

    def loads(self) -> list[Load]:
        """Each, or a usage error."""
        given = {"--clients": self.clients is not None, "--rate": self.rate is not None}
        given["--pace"] = self.pace
        both = [name for name, is_given in given.items() if is_given]
        if len(both) > 1:
            raise typer.BadParameter(f"give one of {' and '.join(both)}", param_hint=both[0])
        default = PACE_PROMPT_TOKENS if self.pace else "2048"
        ranges = token_ranges(self.prompt_tokens or default, option="--prompt-tokens")
        answers = counts(self.answer_tokens, option="--answer-tokens")
        several = "1" if self.pace or self.rate is not None else self.clients or CLIENTS
        clients = counts(several, option="--clients")
        from offload.bench.serve.load import Load

        return [
            Load(
                prompt_tokens,
                answer_tokens,
                clients=num_clients,
                requests=self.requests,
                rate=self.rate,
                duration_seconds=self.duration,
                shared_tokens=self.shared_tokens,
                seed=self.seed,
                temperature=self.temperature,
                good_ttft_ms=math.inf if self.good_ttft_ms is None else self.good_ttft_ms,
                good_gap_ms=math.inf if self.good_gap_ms is None else self.good_gap_ms,
            )
            for prompt_tokens, answer_tokens, num_clients in product(ranges, answers, clients)
        ]


@dataclass(frozen=True)
class Answering(PolicyChoice):
    """Which engines answer, and how."""

    panel: ClassVar[str] = "What answers with --in-process"
    engines: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help="Comma-separated: offload; transformers, the continuous batching of the stock "
            "model.",
        ),
    ] = "offload"
    max_num_seqs: Annotated[
        int, typer.Option(min=1, metavar="N", help="Requests that run at a time.")
    ] = 32
    max_queued: Annotated[
        int,
        typer.Option(min=0, metavar="N", help="That wait for these; offload refuses more."),
    ] = 256
    prefix_caching: Annotated[
        bool, typer.Option(help="Prompts that begin alike share what was read.")
    ] = True
    dtype: DType = "auto"
    device: Device = "cpu"
    threads: Threads = None
    page_tokens: PageTokens = 256
    max_memory: MaxMemory = None
    weights: Weights = "auto"


@dataclass(frozen=True)
class OverHTTP:
    """How servers are asked."""

    panel: ClassVar[str] = "Servers"
    served_model_name: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Its tokenizer counts tokens, and a server that lists none or several models is "
            r"asked for it. \[default: what the first server lists]",
        ),
    ] = None
    generator: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help=r"The program aiperf, which sends the requests. \[default: of .venv-load (make "
            "load-generator), or on the PATH]",
        ),
    ] = None


def serve(
    model: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="URL|MODEL",
            help="Servers, such as http://127.0.0.1:8000; with --in-process a folder, .gguf file, "
            rf"hub id, or an embedded model's name. \[default: {DEFAULT_MODEL}]",
        ),
    ] = None,
    *,
    in_process: Annotated[
        bool, typer.Option("--in-process", help="Load the model here, and ask it without HTTP.")
    ] = False,
    asked: Requests,
    over_http: OverHTTP,
    answering: Answering,
    plot: Plot = None,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Send many requests at once: time to first token, time between tokens, throughput.

    Columns: [bold]first token[/bold], milliseconds from a request to the first token of its answer
    (median, 99th percentile); [bold]between[/bold] tokens (median, 99th percentile, the longest);
    [bold]answers[/bold] and [bold]prompts[/bold] in tokens per second, and [bold]requests[/bold]
    per second, from the first request to the last token; [bold]cached[/bold], prompt tokens that
    others had read; [bold]own[/bold], the share of the engine's time outside of the model's passes;
    [bold]KV[/bold], the most bytes of keys and values on the host at a time. transformers does not
    say what was cached, and its KV cache has a fixed size. [bold]good[/bold], requests per second
    within --good-ttft-ms and --good-gap-ms; [bold]tokens[/bold] of an answer, if some ended early.

    Servers answer /v1/completions as OpenAI's does. aiperf asks them, a program of its own; all get
    the same texts in the same order. A server may know them from an earlier run: start it again, or
    give another --seed.

    [bold]Examples[/bold]

        offload bench serve http://127.0.0.1:8000 http://127.0.0.1:8001 --clients 8

        offload bench serve --in-process

        offload bench serve --in-process --clients 8 --engines offload,transformers

        offload bench serve --in-process --clients 16 --prompt-tokens 6200 --shared-tokens 6000

        offload bench serve --in-process --rate 0.5 --duration 60 --prompt-tokens 128-2048

        offload bench serve --in-process --pace
    """
    names = _targets(model or [], in_process=in_process, asked=asked, answering=answering)
    if in_process and over_http != OverHTTP():
        raise typer.BadParameter("--served-model-name and --generator are for servers")
    answering.options()  # usage errors
    engines = comma_separated(answering.engines, option="--engines", available=ENGINE_NAMES)
    if asked.pace and plot is not None:
        raise typer.BadParameter("--pace has no picture", param_hint="--plot")
    budgets = memory_budgets(answering.max_memory or [])

    with running(verbose=verbose):
        from offload.bench.eval.haystack import described, prose_text
        from offload.bench.eval.output import check_plot
        from offload.bench.serve.over_http import find_generator, measure_urls
        from offload.bench.serve.picture import plot_loads
        from offload.system.machine import describe_machine

        loads = asked.loads()
        if plot is not None:
            check_plot(plot)
        text = prose_text(asked.text, "--text")
        with quiet_transformers(verbose=verbose), no_loading_bars(), progress_bar() as progress:
            num_requests = len(loads) if asked.pace else sum(load.num_requests for load in loads)
            total = len(engines if in_process else names) * num_requests
            task = progress.add_task("requests", total=total)

            def on_request(engine: str) -> None:
                progress.update(task, advance=1, description=f"requests to {engine}")

            if in_process:
                served = _served(names[0], answering, budgets, loads[0].temperature)
                rows = _measure(served, engines, loads, text, on_request, pace=asked.pace)
            else:
                found = find_generator(over_http.generator)
                asked_for = over_http.served_model_name
                rows = list(measure_urls(found, names, loads, text, asked_for, on_request))
        title = names[0] if in_process else rows[0]["model"]
        how = {"model": title, **asdict(answering)} if in_process else {"urls": names}
        settings = {**how, **asdict(asked), "text": described(asked.text, "--text")}
        if as_json:
            print_json({"machine": describe_machine(), "settings": settings, "rows": rows})
        elif asked.pace:
            _print_paces(title, rows)
        else:
            is_judged = asked.good_ttft_ms is not None or asked.good_gap_ms is not None
            _print_loads(title, rows, is_judged=is_judged)
        for error in dict.fromkeys(row.get("first_error") for row in rows):
            if error is not None:
                stderr().print(f"failed: {error}", soft_wrap=True)
        if plot is not None:
            plot_loads(rows, plot, title)
            stderr().print(f"wrote {plot}")


def _targets(
    names: list[str], *, in_process: bool, asked: Requests, answering: Answering
) -> list[str]:
    """The one model, or URLs without /v1; or a usage error."""
    if in_process:
        if len(names) > 1:
            raise typer.BadParameter(f"--in-process takes one model, got {', '.join(names)}")
        return names or [DEFAULT_MODEL]
    others = [name for name in names if not name.startswith(("http://", "https://"))]
    if others or not names:
        got = f", got {', '.join(others)}" if others else ""
        raise typer.BadParameter(
            f"expected URLs such as http://127.0.0.1:8000, or a model and --in-process{got}",
            param_hint="URL",
        )
    if asked.pace:
        raise typer.BadParameter("needs --in-process", param_hint="--pace")
    if answering != Answering():
        raise typer.BadParameter(f"the options of {answering.panel!r} need it")
    return list(dict.fromkeys(name.rstrip("/").removesuffix("/v1") for name in names))


def _served(model: str, answering: Answering, budgets: Any, temperature: float) -> Served:
    from offload.bench.serve.measure import Served
    from offload.policies.registry import make_policy

    return Served(
        model,
        {
            "policy": make_policy(answering.policy, **answering.options()),
            "dtype": answering.dtype,
            "weights": answering.weights,
            "device": answering.device,
            "num_threads": answering.threads,
            "page_tokens": answering.page_tokens,
            "max_memory": budgets,
        },
        max_num_seqs=answering.max_num_seqs,
        max_queued=answering.max_queued,
        prefix_caching=answering.prefix_caching,
        temperature=temperature,
    )


def token_ranges(text: str, *, option: str) -> list[tuple[int, int]]:
    """`"512,128-2048"` -> `[(512, 512), (128, 2048)]`, or a usage error."""
    ranges = []
    for part in text.split(","):
        ends = counts(part.replace("-", ",", 1), option=option)
        if ends[0] > ends[-1]:
            raise typer.BadParameter(
                f"{part}: {ends[0]} is more than {ends[-1]}", param_hint=option
            )
        ranges.append((ends[0], ends[-1]))
    return ranges


def _measure(
    served: Served,
    engines: list[str],
    loads: list[Load],
    text: str,
    on_request: OnRequest,
    *,
    pace: bool,
) -> list[Row]:
    from offload.bench.eval.perplexity import text_tokens
    from offload.bench.serve.measure import measure_loads, measure_paces
    from offload.loading.names import load_tokenizer

    tokens = text_tokens(text, load_tokenizer(served.model))
    if not pace:
        return list(measure_loads(served, engines, loads, tokens, on_request))
    rows: list[Row] = []
    for load in loads:
        rows += measure_paces(served, engines, load, tokens, on_request)
    return rows


def _print_loads(model: str, rows: list[Row], *, is_judged: bool) -> None:
    asked = {
        "engine": [row["engine"] for row in rows],
        "clients": [f"{row['clients'] or row['rate']:,}" for row in rows],
        "prompt": [_range(row["prompt_tokens"]) for row in rows],
        "answer": [f"{row['answer_tokens']:,}" for row in rows],
    }
    if rows[0]["rate"] is not None:
        asked = {"requests/s" if name == "clients" else name: asked[name] for name in asked}
    times = {
        "first token": [_numbers(row, "ttft_ms_median", "ttft_ms_p99") for row in rows],
        "between": [_numbers(row, "gap_ms_median", "gap_ms_p99", "gap_ms_longest") for row in rows],
        "answers": [_number(row["answer_tokens_per_second"], ",.1f") for row in rows],
        "prompts": [_number(row["prompt_tokens_per_second"], ",.0f") for row in rows],
        "requests": [_number(row["requests_per_second"], ",.2f") for row in rows],
    }
    legend = "ms: median / p99 / longest; answers and prompts: tokens per second"
    _print_columns(_title(model, rows), asked, times, legend)
    costs = {
        "cached": [_number(row["cached_tokens"], ",d") for row in rows],
        "refused": [f"{row['refused']:,}" for row in rows],
        "errors": [f"{row['errors']:,}" for row in rows],
        "good": [_number(row["good_requests_per_second"], ",.2f") for row in rows],
        "tokens": [_number(row["answer_tokens_mean"], ",.1f") for row in rows],
        **_costs(rows),
    }
    if not is_judged:
        del costs["good"]
    if all(row["answer_tokens_mean"] in (None, row["answer_tokens"]) for row in rows):
        del costs["tokens"]
    stdout().print()
    legend = "cached: tokens of prompts"
    if any(costs["own"]):
        legend += "; own: not in passes of the model"
    _print_columns("", asked, costs, legend)


def _print_paces(model: str, rows: list[Row]) -> None:
    asked = {
        "engine": [row["engine"] for row in rows],
        "prompt": [f"{row['prompt_tokens']:,}" for row in rows],
    }
    found = {
        "alone": [f"{row['alone_tokens_per_second']:,.1f}" for row in rows],
        "beside": [f"{row['beside_tokens_per_second']:,.1f}" for row in rows],
        "kept": [f"{row['kept_share']:.0%}" for row in rows],
        "gap alone": [f"{row['alone_gap_ms_longest']:,.0f}" for row in rows],
        "beside it": [f"{row['beside_gap_ms_longest']:,.0f}" for row in rows],
        "read": [f"{row['ttft_ms'] / 1e3:,.2f}" for row in rows],
        **_costs(rows),
    }
    title = f"{_title(model, rows)}, four requests decode while a prompt is read"
    legend = "alone, beside: tokens per second; gap: the longest, in ms; read: seconds"
    _print_columns(title, asked, found, legend)


def _print_columns(
    title: str, asked: dict[str, list[str]], found: dict[str, list[str]], legend: str
) -> None:
    """What all rows have in common stands in the title."""
    from rich.box import SIMPLE_HEAD

    varies = {name: cells for name, cells in asked.items() if len(set(cells)) > 1}
    if title:
        title = ", ".join(
            [title, *(f"{name} {asked[name][0]}" for name in asked if name not in varies)]
        )
    columns = varies | {name: cells for name, cells in found.items() if any(cells)}
    words = [i for i, name in enumerate(columns) if name == "engine"]
    lines = zip(*columns.values(), strict=True)
    table = make_table(list(columns), lines, words=words, title=title, caption=legend)
    table.box, table.padding = SIMPLE_HEAD, (0, 1, 0, 0)
    stdout().print(table)


def _title(model: str, rows: Sequence[Row]) -> str:
    policies = [f"policy {row['policy']}" for row in rows if row["policy"]]
    drawn = [f"temperature {row['temperature']:g}" for row in rows if row.get("temperature")]
    return ", ".join([model, *filter(None, [rows[0]["dtype"]]), *policies[:1], *drawn[:1]])


def _range(tokens: Sequence[int]) -> str:
    return "-".join(f"{count:,}" for count in sorted(set(tokens)))


def _costs(rows: Sequence[Row]) -> dict[str, list[str]]:
    from offload.system.memory import format_bytes

    return {
        "own": [_number(row["own_share"], ".1%") for row in rows],
        "KV": [
            "" if row["kv_host_bytes"] is None else format_bytes(row["kv_host_bytes"])
            for row in rows
        ],
    }


def _numbers(row: Row, *names: str) -> str:
    return " / ".join(_number(row[name], ",.0f") for name in names)


def _number(value: Any, form: str) -> str:
    return "" if value is None else format(value, form)
