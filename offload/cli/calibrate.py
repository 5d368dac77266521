"""`offload calibrate`: choose a model's retrieval heads or select layers, into a file."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from offload.cli.calibrate_layers import SweepOptions, calibrate_layers, print_layers
from offload.cli.console import (
    make_table,
    print_json,
    progress_bar,
    quiet_transformers,
    running,
    stdout,
    writable,
)
from offload.cli.options import AsJson, DType, ModelName, Threads, Verbose, check_name
from offload.system.text_file import read_text_file

if TYPE_CHECKING:
    import torch

    from offload.models import LeanModel
    from offload.models.shape import ModelShape
    from offload.policies.lychee_decode.calibration import Calibration
    from offload.runtime.model import OffloadedModel
    from offload.selection.head_roles import HeadRoles

_SELECT_LAYERS = 4  # suggested for tidal_decode
_DENSE_LAYERS = 2
_TOKENS = 2048
_POLICIES = ("lychee_decode", "per_head", "tidal_decode")
_SPACED = "its retrieval heads are evenly spaced"  # of a model that is too small


def calibrate(
    model: ModelName,
    *,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="PATH",
            help="The roles file, or layers file, to write. Without it tidal_decode's is written "
            "where that policy looks for it.",
        ),
    ] = None,
    policy: Annotated[
        str,
        typer.Option(
            help="Whose heads: lychee_decode, or per_head; or the layers of tidal_decode."
        ),
    ] = "lychee_decode",
    retrieval_heads: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="How many KV heads retrieve, in addition to those of layer 0, or of per_head's "
            r"dense layers, where all do. \[default: a sixth of all KV heads; an eighth for "
            "per_head]",
        ),
    ] = None,
    dense_layers: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="For per_head and tidal_decode: so many first layers have no heads to choose, or "
            r"select nothing. \[default: 2]",
        ),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="For lychee_decode: text like what the model will read. "
            r"\[default: docstrings of Python's library]",
        ),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            "--context",
            min=1,
            help="Of the text, at most; of each of per_head's or tidal_decode's texts. "
            r"\[default: 2048, or what the model can read; for tidal_decode 4096]",
        ),
    ] = None,
    sweep: SweepOptions,
    dtype: DType = "auto",
    num_threads: Threads = None,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Choose a model's retrieval heads for lychee_decode or per_head, or tidal_decode's layers.

    lychee_decode: a retrieval head attends to the whole cache and hands the tokens it finds to the
    same head of the layers below. The model reads a text once; for 32 of its queries the attention
    of every head is compared with the tokens that it would inherit, and the retrieval heads are
    chosen so that as much attention as possible is kept. The same measurement suggests select
    layers for the policy tidal_decode.

    per_head: a retrieval head looks at everything, the others at what another policy selects. The
    model reads texts in which facts are told, and asked for at the end; the heads that look at the
    fact while the answer is read are chosen. Loading a model does the same, and keeps the result.

    tidal_decode: a select layer attends to everything, the layers below reuse what it selects. The
    model reads texts with questions once, then says the answers with one set of select layers after
    another; those whose answers are nearest to full attention's are chosen: layer after layer, then
    exchanged one by one. Minutes on a GPU; on a CPU lower --context and --batches.

    [bold]Examples[/bold]

        offload calibrate smollm2-135m-instruct -o roles.json

        offload generate --policy lychee_decode --option head_roles=roles.json --demo

    Another share of retrieval heads, calibrated on code:

        offload calibrate ./Llama-3.2-1B -o code.json --retrieval-heads 24 --text src/main.c

    The heads that fetch facts from afar:

        offload calibrate ./Llama-3.2-1B --policy per_head -o facts.json

    Select layers, where tidal_decode finds them:

        offload calibrate ./Llama-3.2-1B --policy tidal_decode --device cuda
    """
    check_name(policy, _POLICIES, option="--policy", kind="policy ")
    of_layers, of_per_head = policy == "tidal_decode", policy == "per_head"
    if policy != "lychee_decode" and text is not None:
        raise typer.BadParameter(f"the texts of {policy} are made", param_hint="--text")
    if policy == "lychee_decode" and dense_layers is not None:
        hint = "is for --policy per_head or tidal_decode"
        raise typer.BadParameter(hint, param_hint="--dense-layers")
    if of_layers and retrieval_heads is not None:
        raise typer.BadParameter("tidal_decode has none", param_hint="--retrieval-heads")
    if not of_layers:
        for name in [name for name, value in asdict(sweep).items() if value is not None]:
            option = f"--{name.replace('_', '-')}"
            raise typer.BadParameter("is for --policy tidal_decode", param_hint=option)
        if output is None:
            raise typer.BadParameter(f"is needed for --policy {policy}", param_hint="--output")
    if dense_layers is None:
        dense_layers = _DENSE_LAYERS
    with running(verbose=verbose):
        if output is not None:
            output = writable(output, "--output")
        if of_layers or output is None:  # which others have
            summary = calibrate_layers(
                model,
                output,
                sweep,
                dense_layers=dense_layers,
                tokens=tokens,
                dtype=dtype,
                num_threads=num_threads,
                verbose=verbose,
            )
            print_json(summary) if as_json else print_layers(summary)
            return
        content = None if text is None else read_text_file(text)

        from offload.loading.names import checkpoint_name, load_tokenizer, resolve_folder
        from offload.policies.lychee_decode.calibration import calibration_tokens
        from offload.runtime.model import OffloadedModel

        if of_per_head:
            count, num_tokens = _checked_counts(model, retrieval_heads, dense_layers, tokens)
        else:
            num_tokens = _checked_tokens(model, tokens, retrieval_heads)
        with quiet_transformers(verbose=verbose):
            tokenizer = load_tokenizer(model, takes_generic=False)
            if not of_per_head:
                input_ids = calibration_tokens(tokenizer, num_tokens, content)
                _check_text(input_ids, f"--text {text}")
            loaded = OffloadedModel.from_pretrained(
                model, policy="full", dtype=dtype, num_threads=num_threads
            )
        if of_per_head:
            roles, summary = _of_per_head(loaded, tokenizer, num_tokens, count, dense_layers)
        else:
            source = "the standard library's docstrings" if text is None else text.name
            roles, summary = _of_lychee_decode(loaded, input_ids, retrieval_heads, source)
        roles = replace(roles, checkpoint=checkpoint_name(resolve_folder(model)))
        roles.keep(output)
        summary = {
            "model": model,
            "output": str(output),
            "policy": policy,
            "model_type": roles.model_type,
            "checkpoint": roles.checkpoint,
            "num_layers": roles.num_layers,
            "num_kv_heads": roles.num_kv_heads,
        } | summary
    if as_json:
        print_json(summary)
    else:
        _print_table(summary, roles)


def _checked_counts(
    model: str, retrieval_heads: int | None, dense_layers: int, tokens: int | None
) -> tuple[int, int]:
    """per_head's heads, and tokens to read for them; refused before any weight is read."""
    from offload.loading.planned_model import planned_model
    from offload.policies.per_head.heads import check_retrieval_heads, default_retrieval_heads
    from offload.policies.per_head.lookups import MIN_LOOKUP_TOKENS

    shape = planned_model(model).shape
    tokens = _within_context(model, shape, tokens, MIN_LOOKUP_TOKENS, "per_head", _SPACED)
    if dense_layers >= shape.num_layers:
        raise ValueError(
            f"--dense-layers {dense_layers} leave no heads to choose: this model has "
            f"{shape.num_layers} layers; lower --dense-layers"
        )
    of_model = shape.num_layers, shape.num_kv_heads, dense_layers
    count = default_retrieval_heads(*of_model) if retrieval_heads is None else retrieval_heads
    check_retrieval_heads(count, *of_model, remedy="lower --retrieval-heads")
    return count, tokens


def _checked_tokens(model: str, tokens: int | None, retrieval_heads: int | None) -> int:
    """Tokens to read for lychee_decode; refused before any weight is read."""
    from offload.loading.planned_model import planned_model
    from offload.policies.lychee_decode.calibration import MIN_CALIBRATION_TOKENS
    from offload.selection.head_roles import check_more_layers, check_retrieval_heads

    shape = planned_model(model).shape
    check_more_layers(shape.num_layers)
    if retrieval_heads is not None:
        of_model = shape.num_layers, shape.num_kv_heads
        check_retrieval_heads(retrieval_heads, *of_model, name="--retrieval-heads ")
    return _within_context(model, shape, tokens, MIN_CALIBRATION_TOKENS, "lychee_decode", _SPACED)


def _within_context(
    model: str, shape: ModelShape, tokens: int | None, least: int, policy: str, short: str
) -> int:
    """How many tokens a policy's calibration reads, by default as `calibrate` says."""
    if shape.max_context < least:
        raise ValueError(
            f"{model} reads at most {shape.max_context} tokens, but {policy} is calibrated on at "
            f"least {least}: {short}"
        )
    if tokens is None:
        tokens = min(_TOKENS, shape.max_context)
    if not least <= tokens <= shape.max_context:
        raise ValueError(
            f"--context {tokens} must be in [{least}, {shape.max_context}] for {policy}: from "
            "what its texts need to what this model can read"
        )
    return tokens


def _check_text(input_ids: torch.Tensor, name: str) -> None:
    """Refuse int64 [num_tokens] that are too few for lychee_decode's calibration."""
    from offload.policies.lychee_decode.calibration import MIN_CALIBRATION_TOKENS

    if len(input_ids) < MIN_CALIBRATION_TOKENS:
        raise ValueError(
            f"{name} has {len(input_ids)} tokens, but a calibration needs at least "
            f"{MIN_CALIBRATION_TOKENS}; give a longer one"
        )


def _of_per_head(
    loaded: OffloadedModel, tokenizer: Any, tokens: int, count: int, dense_layers: int
) -> tuple[HeadRoles, dict[str, Any]]:
    from offload.policies.per_head.calibration import mean_lookup_mass, roles_by_mass
    from offload.policies.per_head.lookups import NUM_LOOKUP_TEXTS

    lean = loaded._offload.lean
    with progress_bar() as progress:
        total = NUM_LOOKUP_TEXTS * len(lean.layers)
        task = progress.add_task(f"reading {tokens:,} tokens each time", total=total)
        mass = mean_lookup_mass(lean, tokenizer, tokens, lambda: progress.advance(task))
    roles = roles_by_mass(
        mass,
        count,
        dense_layers,
        num_tokens=tokens,
        head_dim=lean.shape.head_dim,
        model_type=loaded.config.model_type,
    )
    return roles, {
        "num_tokens": tokens,
        "retrieval_heads": count,
        "dense_layers": dense_layers,
        "lookup_mass": mass.round(4).tolist(),
    }


def _observed(lean: LeanModel, text: torch.Tensor) -> Calibration:
    """What lychee_decode's calibration measures, behind a progress bar."""
    from offload.policies.lychee_decode.calibration import observe_heads

    with progress_bar() as progress:
        task = progress.add_task(f"reading {len(text):,} tokens", total=2 * len(lean.layers))
        return observe_heads(lean, text, on_layer=lambda: progress.advance(task))


def _of_lychee_decode(
    loaded: OffloadedModel, input_ids: torch.Tensor, retrieval_heads: int | None, source: str
) -> tuple[HeadRoles, dict[str, Any]]:
    from offload.policies.lychee_decode.calibration import roles_from
    from offload.policies.lychee_decode.choice import choose_select_layers
    from offload.selection.head_roles import evenly_spaced_heads

    lean = loaded._offload.lean
    calibration = _observed(lean, input_ids)
    roles = roles_from(
        calibration,
        model_type=loaded.config.model_type,
        head_dim=lean.shape.head_dim,
        retrieval_heads=retrieval_heads,
        text=source,
    )
    spaced = evenly_spaced_heads(roles.num_layers, roles.num_kv_heads, roles.num_retrieval_heads)
    count = min(_SELECT_LAYERS, roles.num_layers - _DENSE_LAYERS)
    layers = []
    if count > 0:
        kept, copying = calibration.mass_kept, calibration.copying_layers
        layers = choose_select_layers(kept, count, _DENSE_LAYERS, copying)
    return roles, {
        "num_tokens": calibration.num_tokens,
        "tokens_per_head": calibration.tokens_per_head,
        "retrieval_heads": roles.num_retrieval_heads,
        "mass_kept": calibration.kept_by(roles.array),
        "mass_kept_evenly_spaced": calibration.kept_by(spaced),
        "select_layers": layers,
    }


def _print_table(summary: dict[str, Any], roles: HeadRoles) -> None:
    mass = summary.get("lookup_mass")
    found = "KV heads" if mass is None else "KV heads (attention to the facts)"
    title = f"Retrieval heads of {summary['model']}"
    table = make_table(["layer", found], words=(1,), title=title)
    for layer_idx, row in enumerate(roles.retrieval):
        heads = [head for head, retrieves in enumerate(row) if retrieves]
        if heads:
            shown = [
                str(head) if mass is None else f"{head} ({mass[layer_idx][head]:.2f})"
                for head in heads
            ]
            table.add_row(str(layer_idx), " ".join(shown))
    stdout().print(table)
    if mass is None:
        said = (
            f"{summary['retrieval_heads']} retrieval heads after layer 0 keep "
            f"{summary['mass_kept']:.3f} of the attention with {summary['tokens_per_head']} tokens "
            f"per head (evenly spaced: {summary['mass_kept_evenly_spaced']:.3f})."
        )
        if summary["select_layers"]:
            layers = ",".join(map(str, summary["select_layers"]))
            said += f"\nFor tidal_decode: select_layers={layers}"
    else:
        said = (
            f"{summary['retrieval_heads']} retrieval heads after the first "
            f"{summary['dense_layers']} layers, whose heads all retrieve."
        )
    stdout().print(f"{said}\nWritten to {summary['output']}")
