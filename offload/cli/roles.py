"""`offload roles`: files of head roles that others have found."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from offload.cli.commands import add_command, command_group
from offload.cli.console import print_json, running, stdout, writable
from offload.cli.options import AsJson, ModelName

app = command_group(help="Files of head roles.")

_SHARE = 0.125  # LycheeDecode's


def import_roles(
    tsv: Annotated[
        Path, typer.Argument(help="full_attention_heads.tsv: rows are layers, columns KV heads.")
    ],
    model: ModelName,
    *,
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="PATH", help="The roles file to write.")
    ],
    share: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            help="Of the KV heads after layer 0, those with the largest gates. "
            rf"\[default: {_SHARE}]",
        ),
    ] = None,
    threshold: Annotated[
        float | None, typer.Option(help="Gates of at least this much retrieve, instead.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Turn the gates that DuoAttention publishes for a model into a roles file of lychee_decode.

    All heads of layer 0 retrieve, whatever their gates. DuoAttention trained against attention to
    sinks and recent tokens only, so that these are heads to begin with: compare them with
    `offload eval` before you rely on them.

    [bold]Examples[/bold]

        offload roles import full_attention_heads.tsv ./Llama-3-8B-Instruct --out roles.json

        offload generate ./Llama-3-8B-Instruct --policy lychee_decode --option head_roles=roles.json
    """
    if share is not None and threshold is not None:
        raise typer.BadParameter("is given beside --share", param_hint="--threshold")
    if threshold is not None and not math.isfinite(threshold):
        raise typer.BadParameter(f"must be a number, got {threshold}", param_hint="--threshold")
    if share is None and threshold is None:
        share = _SHARE
    with running():
        from offload.loading.planned_model import planned_model
        from offload.policies.head_roles import HeadRoles
        from offload.policies.imported_roles import read_gates, roles_of_gates

        planned = planned_model(model)
        shape, path = planned.shape, writable(out, "--out")
        tsv = tsv.expanduser()
        if path.exists() and tsv.exists() and path.samefile(tsv):
            raise ValueError(f"--out {path} is the file to read; give another name")
        gates = read_gates(tsv, shape.num_layers, shape.num_kv_heads)
        retrieval = roles_of_gates(gates, share=share, threshold=threshold)
        chosen = f"share {share}" if threshold is None else f"threshold {threshold}"
        found = HeadRoles.of(
            retrieval,
            head_dim=shape.head_dim,
            model_type=planned.model_type,
            made_by=f"imported from {tsv.name}, {chosen} of the KV heads after layer 0",
            checkpoint=planned.checkpoint,
        )
        found.keep(path)
        summary = {
            "model": model,
            "output": str(path),
            "checkpoint": found.checkpoint,
            "num_layers": found.num_layers,
            "num_kv_heads": found.num_kv_heads,
            "retrieval_heads": found.num_retrieval_heads,
        }
    if as_json:
        print_json(summary)
    else:
        stdout().print(
            f"{found.num_retrieval_heads} retrieval heads after layer 0, whose "
            f"{found.num_kv_heads} retrieve anyway.\nWritten to {path}"
        )


add_command(app, import_roles, name="import")
