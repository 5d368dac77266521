"""`offload calibrate --policy tidal_decode`: select layers, by a sweep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from offload.cli.console import make_table, progress_bar, quiet_transformers, stdout
from offload.cli.options import counts

if TYPE_CHECKING:
    from offload.models import LeanModel
    from offload.training.layer_sweep import Sweep, SweepSettings

_TOKENS = 4096


@dataclass(frozen=True)
class SweepOptions:
    """What is compared for select layers, and on what."""

    panel: ClassVar[str] = "For --policy tidal_decode"
    select_layers: Annotated[
        int | None,
        typer.Option(min=1, help=r"How many layers select. \[default: as many as without a sweep]"),
    ] = None
    budget_tokens: Annotated[
        str | None,
        typer.Option(
            metavar="COUNT,…",
            help=r"What layers that reuse attend to; all count alike. \[default: 1024,320]",
        ),
    ] = None
    batches: Annotated[int | None, typer.Option(min=1, help=r"Of texts. \[default: 8]")] = None
    batch_size: Annotated[
        int | None, typer.Option(min=1, help=r"Seven texts are of as many kinds. \[default: 7]")
    ] = None
    seed: Annotated[int | None, typer.Option(help=r"Of the texts. \[default: 0]")] = None
    device: Annotated[str | None, typer.Option(help=r"cpu or cuda. \[default: cpu]")] = None

    def sizes(self) -> dict[str, Any]:
        """Arguments of `SweepSettings` that are given, or a usage error."""
        sizes: dict[str, Any] = {
            "num_batches": self.batches,
            "batch_size": self.batch_size,
            "seed": self.seed,
        }
        if self.budget_tokens is not None:
            sizes["budgets"] = tuple(counts(self.budget_tokens, option="--budget-tokens"))
        return {name: value for name, value in sizes.items() if value is not None}


def calibrate_layers(
    model: str,
    output: Path | None,
    options: SweepOptions,
    *,
    dense_layers: int,
    tokens: int | None,
    dtype: str,
    num_threads: int | None,
    verbose: bool,
) -> dict[str, Any]:
    """Sweep, write the layers file, and return what was found, for JSON.

    Args:
        output: None: where the policy looks for it.

    Raises:
        ValueError: numbers that the model does not have; before any weight is read.
    """
    from offload.loading.names import checkpoint_name, load_tokenizer, resolve_folder
    from offload.loading.planned_model import planned_model
    from offload.policies.tidal_decode import SelectLayers, default_select_layers
    from offload.policies.tidal_decode.select_layers import kept_path
    from offload.runtime.config import runtime_config
    from offload.training.answers import MIN_PROMPT_TOKENS
    from offload.training.layer_sweep import ANSWER_TOKENS, SweepSettings, check_num_select_layers

    config = runtime_config(dtype=dtype, device=options.device or "cpu", num_threads=num_threads)
    shape = planned_model(model, dtype).shape
    if shape.max_context < MIN_PROMPT_TOKENS + ANSWER_TOKENS:
        raise ValueError(
            f"{model} reads at most {shape.max_context} tokens, but a sweep reads texts of at "
            f"least {MIN_PROMPT_TOKENS} and answers of up to {ANSWER_TOKENS}; give "
            "tidal_decode layers by --option select_layers"
        )
    usual = default_select_layers(shape.num_layers, shape.num_kv_heads, dense_layers)
    count = len(usual) if options.select_layers is None else options.select_layers
    check_num_select_layers(count, shape.num_layers, dense_layers)
    settings = SweepSettings(
        count,
        dense_layers,
        min(_TOKENS, shape.max_context - ANSWER_TOKENS) if tokens is None else tokens,
        **options.sizes(),
    )
    folder = resolve_folder(model)
    checkpoint = checkpoint_name(folder)
    path = output or kept_path(checkpoint, dense_layers)
    if path is None:
        raise ValueError(f"the files of {model} cannot be read to name it: give --output")
    with quiet_transformers(verbose=verbose):
        tokenizer = load_tokenizer(model)
        lean, model_type = _loaded(folder, config)
    sweep = _swept(lean, tokenizer, settings, [usual], config.num_threads)
    SelectLayers(
        model_type,
        **shape.kv_heads,
        select_layers=sweep.select_layers,
        dense_layers=dense_layers,
        made_by=_made_by(settings),
        checkpoint=checkpoint,
    ).keep(path)
    return {
        "model": model,
        "output": str(path),
        "policy": "tidal_decode",
        "model_type": model_type,
        "checkpoint": checkpoint,
        "num_layers": shape.num_layers,
        "num_kv_heads": shape.num_kv_heads,
        "settings": asdict(settings),
        "found_by_policy": output is None,
        "default_select_layers": usual,
        **asdict(sweep),
    }


def print_layers(summary: dict[str, Any]) -> None:
    """What a single layer in addition to the fixed one is worth, and the sets of layers."""
    budgets = summary["settings"]["budgets"]

    def show(title: str, first: str, names: Sequence[str], rows: Any, **more: Any) -> None:
        header = [first, *(f"{name}, {budget:,}" for budget in budgets for name in names)]
        stdout().print(make_table(header, rows, words=(), title=title, **more))

    fixed = summary["path"][0]
    show(
        f"{summary['model']}: layer {fixed[0]} selects, and this one again",
        "layer",
        ("KL", "right"),
        [
            [str(layers[1]) if layers[1:] else "none", *_cells(scores, "kl", "right")]
            for layers, scores in sorted(_by_layers(summary["scores"]).items())
            if layers == fixed or (len(layers) == 2 and layers[0] == fixed[0])
        ],
        caption="KL of the answers' tokens from full attention; answers right as with it",
    )
    why = {
        summary["select_layers"]: " (chosen)",
        summary["default_select_layers"]: " (default)",
    }
    show(
        f"On other texts; full attention gives {summary['num_right']} answers right",
        "select layers",
        ("KL", "agrees", "right"),
        [
            [
                ",".join(map(str, layers)) + why.get(layers, ""),
                *_cells(scores, "kl", "agrees", "right"),
            ]
            for layers, scores in _by_layers(summary["held_out"]).items()
        ],
    )
    written = ",".join(map(str, summary["select_layers"]))
    stdout().print(f"select_layers={written}\nWritten to {summary['output']}")
    if summary["found_by_policy"]:
        stdout().print("tidal_decode takes them whenever this model is loaded.")


def _loaded(folder: Path, config: Any) -> tuple[LeanModel, str]:
    """The model on its device, and its type."""
    from offload.loading.checkpoint import check_checkpoint
    from offload.loading.stock_model import load_stock_model
    from offload.models import FAMILIES, lean_model_maker

    checkpoint = check_checkpoint(folder)
    FAMILIES[checkpoint.config["model_type"]].check_plain()  # before weights are read
    stock = load_stock_model(checkpoint, config.dtype).eval().to(config.device)
    model_type: str = stock.config.model_type
    return lean_model_maker(model_type)(stock), model_type


def _swept(
    lean: LeanModel,
    tokenizer: Any,
    settings: SweepSettings,
    compared: Sequence[tuple[int, ...]],
    num_threads: int | None,
) -> Sweep:
    from offload.system.torch_threads import torch_threads
    from offload.training.layer_sweep import LayerSweep

    with torch_threads(num_threads), progress_bar() as progress:
        reading = progress.add_task("reading texts", total=settings.num_batches)
        sweep = LayerSweep(lean, tokenizer, settings, on_batch=lambda: progress.advance(reading))
        task, total = progress.add_task("sets of layers", total=0), 0

        def on_round(more: int) -> None:
            nonlocal total
            total += more
            progress.update(task, total=total)

        return sweep.run(compared, on_round=on_round, on_scored=lambda: progress.advance(task))


def _made_by(settings: SweepSettings) -> str:
    budgets = " and ".join(map(str, settings.budgets))
    return (
        f"a sweep over answers to {settings.num_batches * settings.batch_size} texts of "
        f"{settings.tokens} tokens, with budgets of {budgets}"
    )


def _by_layers(scores: Sequence[dict[str, Any]]) -> dict[tuple[int, ...], list[dict[str, Any]]]:
    """The scores of each set of layers, one for each budget."""
    found: dict[tuple[int, ...], list[dict[str, Any]]] = {}
    for score in scores:
        found.setdefault(tuple(score["select_layers"]), []).append(score)
    return found


def _cells(scores: Sequence[dict[str, Any]], *names: str) -> list[str]:
    forms = {"kl": ".3f", "agrees": ".1%", "right": ".0%"}
    values = ((name, score[name]) for score in scores for name in names)
    return ["" if value is None else format(value, forms[name]) for name, value in values]
