"""`offload roles`: files of head roles that others have found."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from offload.cli.calibrate import check_text, checked_tokens, observed
from offload.cli.commands import add_command, command_group
from offload.cli.console import (
    make_table,
    print_json,
    print_marked,
    quiet_transformers,
    running,
    stdout,
    writable,
)
from offload.cli.options import AsJson, DType, ModelName, Threads, Verbose

if TYPE_CHECKING:
    from offload.selection.head_roles import BoolArray

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
    verify: Annotated[
        bool,
        typer.Option(
            help="Load the model and compare the imported heads with as many calibrated ones. "
            "With --no-verify no weights are needed."
        ),
    ] = True,
    tokens: Annotated[
        int | None,
        typer.Option(
            "--context",
            min=1,
            help="Of each of the two texts that the model reads. "
            r"\[default: as of calibrate: 2048, or what the model can read]",
        ),
    ] = None,
    dtype: DType = "auto",
    num_threads: Threads = None,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Turn the gates that DuoAttention publishes for a model into a roles file of lychee_decode.

    All heads of layer 0 retrieve, whatever their gates. DuoAttention trained against attention to
    sinks and recent tokens only, so that these are heads to begin with. The model therefore reads
    a text as `offload calibrate` has it, which chooses as many heads, and then another one, on
    which both are compared by what a calibration goes by: how many of the heads that copy are
    among them, then how much of the attention they keep. The file is written in any case, and says
    both.

    [bold]Examples[/bold]

        offload roles import full_attention_heads.tsv ./Llama-3-8B-Instruct --out roles.json

        offload generate ./Llama-3-8B-Instruct --policy lychee_decode --option head_roles=roles.json
    """
    if share is not None and threshold is not None:
        raise typer.BadParameter("cannot be combined with --share", param_hint="--threshold")
    if threshold is not None and not math.isfinite(threshold):
        raise typer.BadParameter(f"must be a number, got {threshold}", param_hint="--threshold")
    if tokens is not None and not verify:
        raise typer.BadParameter("cannot be combined with --no-verify", param_hint="--context")
    if share is None and threshold is None:
        share = _SHARE
    with running(verbose=verbose), quiet_transformers(verbose=verbose):
        from offload.loading.planned_model import planned_model
        from offload.selection.head_roles import HeadRoles, check_more_layers
        from offload.selection.imported_roles import read_gates, roles_of_gates

        planned = planned_model(model, dtype)
        shape, path = planned.shape, writable(out, "--out")
        tsv = tsv.expanduser()
        if path.exists() and tsv.exists() and path.samefile(tsv):
            raise ValueError(f"--out {path} is the file to read; give another name")
        check_more_layers(shape.num_layers)
        gates = read_gates(tsv, shape.num_layers, shape.num_kv_heads)
        retrieval = roles_of_gates(gates, share=share, threshold=threshold)
        if verify and planned.folder is None:
            raise ValueError(
                f"{model} is a shape, which has no weights to verify with: --no-verify imports the "
                "heads as they are"
            )
        verified = _verified(model, retrieval, tokens, dtype, num_threads) if verify else None
        chosen = f"threshold {threshold}"
        if threshold is None:
            chosen = f"share {share} of the KV heads after layer 0"
        made_by = f"imported from {tsv.name}, {chosen}"
        found = HeadRoles.of(
            retrieval,
            head_dim=shape.head_dim,
            model_type=planned.model_type,
            made_by=made_by if verified is None else f"{made_by}: {verified}",
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
            "verified": None if verified is None else asdict(verified) | {"worse": verified.worse},
        }
    if as_json:
        print_json(summary)
    else:
        if verified is not None:
            _print_table(verified)
        stdout().print(
            f"{found.num_retrieval_heads} retrieval heads after layer 0, whose "
            f"{found.num_kv_heads} retrieve anyway.\nWritten to {path}"
        )
    if verified is not None and verified.worse:
        print_marked(
            "warning:",
            "the imported heads are worse than as many calibrated ones, which `offload calibrate "
            f"{model} --retrieval-heads {found.num_retrieval_heads} -o PATH` writes",
            "bold yellow",
        )


@dataclass(frozen=True)
class _Worth:
    """What roles keep on a text.

    Attributes:
        copying_heads: so many of the heads that copy retrieve.
        mass_kept: mean share of the attention, as `Calibration.kept_by`, to three decimals.
    """

    copying_heads: int
    mass_kept: float

    def __str__(self) -> str:
        return f"{self.copying_heads} copying, {self.mass_kept:.3f}"


@dataclass(frozen=True)
class _Verified:
    """Imported roles compared with as many calibrated ones, on a text that neither was chosen by.

    Attributes:
        num_tokens: of the text.
        tokens_per_head: that each head finds.
        copying_heads: that there are among all after layer 0, at most as many as retrieve.
    """

    num_tokens: int
    tokens_per_head: int
    copying_heads: int
    imported: _Worth
    calibrated: _Worth
    evenly_spaced: _Worth

    @property
    def worse(self) -> bool:
        """By what a calibration goes by: heads that copy first, then attention."""
        ours, theirs = self.imported, self.calibrated
        return (ours.copying_heads, ours.mass_kept) < (theirs.copying_heads, theirs.mass_kept)

    def __str__(self) -> str:
        return (
            f"{self.imported} of the attention mass kept on {self.num_tokens} tokens of the "
            f"standard library's docstrings with {self.tokens_per_head} tokens per head (as many "
            f"calibrated: {self.calibrated}; evenly spaced: {self.evenly_spaced})"
        )


def _verified(
    model: str, retrieval: BoolArray, tokens: int | None, dtype: str, num_threads: int | None
) -> _Verified:
    """Reads a text as `offload calibrate` does, and the docstrings behind it."""
    from offload.loading.names import load_tokenizer
    from offload.policies.lychee_decode.calibration import calibration_tokens, roles_from
    from offload.runtime.model import OffloadedModel
    from offload.selection.head_roles import evenly_spaced_heads
    from offload.system.stdlib_text import stdlib_prose

    num_tokens = checked_tokens(model, tokens, short="--no-verify imports them as they are")
    other = stdlib_prose(2 * num_tokens).removeprefix(stdlib_prose(num_tokens))
    tokenizer = load_tokenizer(model, takes_generic=False)
    texts = [calibration_tokens(tokenizer, num_tokens, text) for text in (None, other)]
    for text in texts:
        name = f"--context {num_tokens}: one of two texts from the standard library"
        check_text(text, name, "lower --context")
    loaded = OffloadedModel.from_pretrained(
        model, policy="full", dtype=dtype, num_threads=num_threads
    )
    lean = loaded._offload.lean
    calibration, measured = observed(lean, texts)
    count = int(retrieval[1:].sum())
    calibrated = roles_from(
        calibration, model_type="", head_dim=lean.shape.head_dim, retrieval_heads=count
    )
    copying = measured.copying_heads(count)
    spaced = evenly_spaced_heads(len(retrieval), retrieval.shape[1], count)
    imported, chosen, even = (
        _Worth(int((copying & x).sum()), round(measured.kept_by(x), 3))
        for x in (retrieval, calibrated.array, spaced)
    )
    sizes = measured.num_tokens, measured.tokens_per_head
    return _Verified(*sizes, int(copying.sum()), imported, chosen, even)


def _print_table(verified: _Verified) -> None:
    rows = [
        [name, f"{worth.copying_heads} of {verified.copying_heads}", f"{worth.mass_kept:.3f}"]
        for name, worth in (
            ("imported", verified.imported),
            ("calibrated", verified.calibrated),
            ("evenly spaced", verified.evenly_spaced),
        )
    ]
    title = f"As many heads, on {verified.num_tokens:,} tokens that they were not chosen by"
    stdout().print(make_table(["heads", "that copy", "attention kept"], rows, title=title))


add_command(app, import_roles, name="import")
