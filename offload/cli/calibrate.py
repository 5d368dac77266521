"""`offload calibrate`: choose a model's retrieval heads, and write them to a roles file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from offload.cli.console import print_json, quiet_transformers, running, stderr, stdout

if TYPE_CHECKING:
    from offload.policies.lychee_decode.calibration import Calibration
    from offload.policies.lychee_decode.roles import HeadRoles

_SELECT_LAYERS = 4  # suggested for tidal_decode
_DENSE_LAYERS = 2


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(calibrate)


def calibrate(
    model: Annotated[
        str, typer.Argument(help="Folder, .gguf file, hub id, or an embedded model's name.")
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="PATH", help="The roles file to write.")
    ],
    retrieval_heads: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="How many KV heads after layer 0 retrieve; in layer 0 all do. "
            r"\[default: a sixth of all KV heads]",
            show_default=False,
        ),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="Text like what the model will read. "
            r"\[default: docstrings of Python's library]",
            show_default=False,
        ),
    ] = None,
    tokens: Annotated[
        int, typer.Option(min=1, help="How many of the text's first tokens to read, at most.")
    ] = 2048,
    dtype: Annotated[
        str, typer.Option(help="auto (the checkpoint's), bfloat16, float16 or float32.")
    ] = "auto",
    num_threads: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=r"CPU threads. \[default: all this process may use]",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="More logs on stderr.")] = False,
) -> None:
    """Choose the retrieval heads of a model for the policy lychee_decode.

    A retrieval head attends to the whole cache and hands the tokens it finds to the same head of
    the layers below. The model reads a text once; for 32 of its queries the attention of every
    head is compared with the tokens that it would inherit, and the retrieval heads are chosen so
    that as much attention as possible is kept. The same measurement suggests select layers for
    the policy tidal_decode.

    [bold]Examples[/bold]

        offload calibrate smollm2-135m-instruct -o roles.json

        offload generate --policy lychee_decode --policy-option head_roles=roles.json --demo

    Another share of retrieval heads, calibrated on code:

        offload calibrate ./Llama-3.2-1B -o code.json --retrieval-heads 24 --text src/main.c
    """
    with running(verbose=verbose):
        folder = output.expanduser().absolute().parent
        if output.is_dir() or not folder.is_dir():
            problem = "is a folder" if output.is_dir() else f"cannot be written: no folder {folder}"
            raise ValueError(f"--output {output} {problem}")
        content = None if text is None else text.read_text(encoding="utf-8")

        from rich.progress import Progress

        from offload.loading.names import load_tokenizer
        from offload.policies.lychee_decode.calibration import (
            calibration_tokens,
            observe_heads,
            roles_from,
        )
        from offload.runtime.model import OffloadedModel

        with quiet_transformers(verbose=verbose):
            input_ids = calibration_tokens(load_tokenizer(model), tokens, content)
            loaded = OffloadedModel.from_pretrained(
                model, policy="full", dtype=dtype, num_threads=num_threads
            )
        lean = loaded._offload.lean
        with Progress(console=stderr(), transient=True) as progress:
            task = progress.add_task(f"reading {len(input_ids):,} tokens", total=len(lean.layers))
            calibration = observe_heads(lean, input_ids, on_layer=lambda: progress.advance(task))
        roles = roles_from(
            calibration,
            model_type=loaded.config.model_type,
            head_dim=lean.shape.head_dim,
            retrieval_heads=retrieval_heads,
            text="the standard library's docstrings" if text is None else text.name,
        )
        roles.save(output.expanduser())
        summary = _summary(model, output, roles, calibration)
    if as_json:
        print_json(summary)
    else:
        _print_table(summary, roles)


def _summary(
    model: str, output: Path, roles: HeadRoles, calibration: Calibration
) -> dict[str, Any]:
    from offload.policies.lychee_decode.choice import choose_select_layers
    from offload.policies.lychee_decode.roles import evenly_spaced_heads

    spaced = evenly_spaced_heads(roles.num_layers, roles.num_kv_heads, roles.num_retrieval_heads)
    count = min(_SELECT_LAYERS, roles.num_layers - _DENSE_LAYERS)
    return {
        "model": model,
        "output": str(output),
        "model_type": roles.model_type,
        "num_layers": roles.num_layers,
        "num_kv_heads": roles.num_kv_heads,
        "num_tokens": calibration.num_tokens,
        "tokens_per_head": calibration.tokens_per_head,
        "retrieval_heads": roles.num_retrieval_heads,
        "mass_kept": calibration.kept_by(roles.array),
        "mass_kept_evenly_spaced": calibration.kept_by(spaced),
        "select_layers": choose_select_layers(
            calibration.mass_kept, count, _DENSE_LAYERS, calibration.copying_layers
        )
        if count > 0
        else [],
    }


def _print_table(summary: dict[str, Any], roles: HeadRoles) -> None:
    from rich.table import Table

    table = Table(title=f"Retrieval heads of {summary['model']}", title_justify="left")
    table.add_column("layer", justify="right")
    table.add_column("KV heads")
    for layer_idx, row in enumerate(roles.retrieval):
        if any(row):
            heads = " ".join(str(head) for head, retrieves in enumerate(row) if retrieves)
            table.add_row(str(layer_idx), heads)
    stdout().print(table)
    stdout().print(
        f"{summary['retrieval_heads']} retrieval heads after layer 0 keep "
        f"{summary['mass_kept']:.3f} of the attention with {summary['tokens_per_head']} tokens per "
        f"head (evenly spaced: {summary['mass_kept_evenly_spaced']:.3f}).\n"
        f"For tidal_decode: select_layers={','.join(map(str, summary['select_layers']))}\n"
        f"Written to {summary['output']}"
    )
