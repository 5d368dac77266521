"""`offload inspect heads`: which heads find the tokens that the layer above found."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from offload.cli.console import (
    print_json,
    print_marked,
    progress_bar,
    quiet_transformers,
    running,
    stderr,
    stdout,
)
from offload.cli.options import AsJson, DType, ModelName, Plot, Text, Threads, Verbose

if TYPE_CHECKING:
    from offload.loading.planned_model import PlannedModel
    from offload.policies.lychee_decode.overlap import HeadOverlap
    from offload.selection.head_roles import HeadRoles

_POLICY = "lychee_decode"
_WITH_ROLES = "per_head"  # whose retrieval heads are marked
_BUDGETS = 4  # in the text, by default


def heads(
    model: ModelName,
    text: Text = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            "--context",
            min=1,
            help="Of the text, at most. "
            rf"\[default: {_BUDGETS} times --budget-tokens, or what the model can read]",
        ),
    ] = None,
    budget_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=rf"Heaviest tokens of a head that are compared. \[default: {_POLICY}'s budget]",
        ),
    ] = None,
    dtype: DType = "auto",
    num_threads: Threads = None,
    picture: Plot = None,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Show which KV heads find the tokens that the same head of the layer above found.

    The model reads a text. For its last 32 queries, the tokens of the largest exact attention
    weight are compared between neighbouring layers, KV head by KV head: 100 % are the same tokens,
    and "by chance" is what heads share that choose at random.

    That this differs from head to head is why [bold]lychee_decode[/bold] hands tokens down by head,
    not by layer: one that shares many can reuse the other's, one that shares few should retrieve.
    The heads that [bold]per_head[/bold] lets look at everything are marked with *, where it has
    roles of the model in the package or the cache.

    [bold]Examples[/bold]

        offload inspect heads smollm2-135m-instruct

        offload inspect heads ./Llama-3.2-1B --text book.txt --context 8192 --budget-tokens 512

        offload inspect heads ./Llama-3.2-1B --picture heads.png --json > heads.json
    """
    with running(verbose=verbose), quiet_transformers(verbose=verbose):
        from offload.bench.eval.haystack import prose_text
        from offload.bench.eval.output import check_plot
        from offload.cli.inspect.picture import plot_overlap
        from offload.loading.names import load_tokenizer
        from offload.loading.planned_model import planned_model
        from offload.policies.lychee_decode.calibration import calibration_tokens
        from offload.policies.lychee_decode.overlap import check_overlap
        from offload.policies.registry import make_policy

        if picture is not None:
            check_plot(picture, "--picture")
        planned = planned_model(model, dtype)
        if budget_tokens is None:
            budget_tokens = make_policy(_POLICY).budget_tokens
        if tokens is None:
            tokens = min(_BUDGETS * budget_tokens, planned.shape.max_context)
        check_overlap(planned.shape, tokens, budget_tokens)
        content = None if text is None else prose_text(text, "--text")
        input_ids = calibration_tokens(load_tokenizer(model), tokens, content)
        check_overlap(planned.shape, len(input_ids), budget_tokens)
        found = _measured(model, dtype, num_threads, input_ids, budget_tokens)
        roles = _roles(planned)
        if as_json:
            source = "the standard library's docstrings" if text is None else text.name
            print_json(_document(planned, source, found, roles))
        else:
            _print(model, found, roles)
        if picture is not None:
            plot_overlap(found, roles, picture, _title(model, found))
            stderr().print(f"wrote {picture}")


def _measured(
    model: str, dtype: str, num_threads: int | None, input_ids: Any, budget_tokens: int
) -> HeadOverlap:
    from offload.policies.lychee_decode.overlap import head_overlap
    from offload.runtime.model import OffloadedModel

    loaded = OffloadedModel.from_pretrained(
        model, policy="full", dtype=dtype, num_threads=num_threads
    )
    lean = loaded._offload.lean
    with progress_bar() as progress:
        task = progress.add_task(f"reading {len(input_ids):,} tokens", total=2 * len(lean.layers))
        return head_overlap(
            lean, input_ids, budget_tokens, on_progress=lambda: progress.advance(task)
        )


def _roles(planned: PlannedModel) -> HeadRoles | None:
    """Those of `per_head`, where they are known without a calibration."""
    from offload.policies.registry import make_policy
    from offload.selection.head_roles import HeadRoles

    policy = make_policy(_WITH_ROLES).calibration.with_kept(
        lambda: planned.checkpoint, planned.model_type, **planned.shape.kv_heads
    )
    roles = getattr(policy, "head_roles", None)
    return roles if isinstance(roles, HeadRoles) else None


def _document(
    planned: PlannedModel, text: str, found: HeadOverlap, roles: HeadRoles | None
) -> dict[str, Any]:
    from offload.policies.lychee_decode.overlap import NUM_QUERIES

    return {
        "model": planned.name,
        "model_type": planned.model_type,
        "checkpoint": planned.checkpoint,
        "num_layers": planned.shape.num_layers,
        "num_kv_heads": planned.shape.num_kv_heads,
        "text": text,
        "num_tokens": found.num_tokens,
        "num_queries": NUM_QUERIES,
        "budget_tokens": found.budget_tokens,
        "by_chance": round(found.by_chance, 4),
        "can_differ": found.can_differ,
        "mean": round(float(found.shares.mean()), 4),
        "layers": [
            {"layer": i, "mean": round(float(row.mean()), 4), "heads": row.round(4).tolist()}
            for i, row in enumerate(found.shares, start=1)
        ],
        "roles": None
        if roles is None
        else {"policy": _WITH_ROLES, "made_by": roles.made_by, "retrieval": roles.retrieval},
    }


def _print(model: str, found: HeadOverlap, roles: HeadRoles | None) -> None:
    """Lines, as a table of rich would break where a model has many heads."""
    import numpy as np

    shares, console = found.shares, stdout()
    retrieves = np.zeros(shares.shape, np.bool_) if roles is None else roles.array[1:]

    def line(name: str, cells: list[str], mean: str) -> None:
        text = f"{name:>5} {''.join(f'{cell:<5}' for cell in cells)} {mean:>4}"
        console.print(text, soft_wrap=True, markup=False)

    def percent(share: float, mark: str = "") -> str:
        return f"{100 * share:4.0f}{mark}"

    console.print(_title(model, found), soft_wrap=True, markup=False)
    console.print(f"Per cent, by KV head; by chance {found.by_chance:.0%}\n")
    line("layer", [f"{head:4}" for head in range(shares.shape[1])], "mean")
    for i, (row, marked) in enumerate(zip(shares, retrieves, strict=True), start=1):
        cells = [percent(x, "*" if mark else "") for x, mark in zip(row, marked, strict=True)]
        line(str(i), cells, percent(row.mean()))
    line("mean", [percent(x) for x in shares.mean(0)], percent(shares.mean()))
    if roles is not None:
        said = f"\n* retrieves under {_WITH_ROLES}: {roles.made_by}"
        if 0 < retrieves.sum() < retrieves.size:
            said += (
                f"\nThese share {shares[retrieves].mean():.0%} on average, the others "
                f"{shares[~retrieves].mean():.0%}."
            )
        console.print(said, soft_wrap=True, markup=False)
    if not found.can_differ:
        said = (
            f"the heads can hardly differ here: by chance alone they share {found.by_chance:.0%}, "
            f"as {found.budget_tokens:,} tokens are most of {found.num_tokens:,}; give a longer "
            f"text (--context {_BUDGETS * found.budget_tokens} or more), or lower --budget-tokens"
        )
        print_marked("warning:", said, "bold yellow")


def _title(model: str, found: HeadOverlap) -> str:
    return (
        f"{model}, {found.num_tokens:,} tokens: heaviest {found.budget_tokens:,} shared with the "
        "layer above"
    )
