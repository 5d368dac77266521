"""`offload train-heads`: learn a model's retrieval heads, into a file."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from offload.cli.console import (
    make_table,
    print_json,
    print_marked,
    progress_bar,
    quiet_transformers,
    running,
    stderr,
    stdout,
    writable,
)
from offload.cli.options import AsJson, DType, ModelName, Threads, Verbose, torch_seed

if TYPE_CHECKING:
    from offload.training.train import HeldOut, Settings, Step, Trainer

_STEPS = 3000


def train_heads(
    model: ModelName,
    *,
    target_heads: Annotated[
        int,
        typer.Option(
            min=1, help="How many KV heads are to retrieve, in addition to those of layer 0."
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            "-o",
            metavar="PATH",
            help="The roles file to write. PATH.log.jsonl is the log; until the last step is done "
            "there are PATH.unfinished and PATH.unfinished.log.jsonl instead.",
        ),
    ],
    steps: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="In all, those before --resume among them. "
            rf"\[default: {_STEPS}, or what was asked for before --resume]",
        ),
    ] = None,
    context: Annotated[int, typer.Option("--context", min=1, help="Tokens of each prompt.")] = 4096,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts of a step.")] = 2,
    budget_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, help=r"That sparse heads attend to. \[default: a tenth of the context]"
        ),
    ] = None,
    learning_rate: Annotated[float, typer.Option(min=1e-6, help="Of the gates.")] = 0.02,
    seed: Annotated[
        int, typer.Option(min=0, callback=torch_seed, help="Of texts and samples.")
    ] = 0,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with PATH.unfinished of --out.")
    ] = False,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    dtype: DType = "auto",
    num_threads: Threads = None,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Learn which KV heads retrieve, for lychee_decode, as its paper does.

    Every KV head after layer 0 gets a gate between full attention and that to the tokens which the
    same head of the layer above hands down. The model reads made questions over Python's docstrings
    and sources exactly; then its logits while it says the answers are compared with those of full
    attention, and the gates learn. A multiplier grows until as many are open as --target-heads
    says. Weights stay as they are.

    While --resume goes on, --steps may be another number than before; all other options are the
    same.

    At the end the roles are compared with full attention on other texts: the loss with these roles,
    and with gates as they were trained, whose distance is what rounding costs.

    [bold]Examples[/bold]

        offload train-heads smollm2-135m-instruct --target-heads 11 -o roles.json --device cuda

        offload generate --policy lychee_decode --option head_roles=roles.json --demo
    """
    with running(verbose=verbose), quiet_transformers(verbose=verbose):
        from transformers import AutoConfig

        from offload.loading.names import checkpoint_name, load_tokenizer, resolve_folder
        from offload.loading.planned_model import planned_model
        from offload.models.base import context_limit
        from offload.runtime.config import runtime_config
        from offload.selection.head_roles import HeadRoles, check_more_layers
        from offload.system.torch_threads import torch_threads
        from offload.training.train import Settings, read_saved

        config = runtime_config(dtype=dtype, device=device, num_threads=num_threads)
        out = writable(out, "--out")
        planned = planned_model(model, dtype)
        check_more_layers(planned.shape.num_layers)
        folder = resolve_folder(model)
        settings = Settings(
            checkpoint_name(folder),
            planned.dtype_name,
            target_heads,
            _STEPS if steps is None else steps,
            context,
            batch_size,
            context // 10 if budget_tokens is None else budget_tokens,
            learning_rate,
            seed=seed,
        )
        _, reason = context_limit(AutoConfig.from_pretrained(folder, trust_remote_code=False))
        settings.check_model(planned.shape, reason)
        saved = out.with_name(f"{out.name}.unfinished")
        if resume:
            if not saved.exists():
                raise ValueError(
                    f"there is no {saved} to go on with, as a training that has ended leaves none; "
                    "leave out --resume"
                )
            before = read_saved(saved, settings)  # refused before any weight is read
            if steps is None:
                settings = replace(settings, steps=before["settings"]["steps"])
            elif steps < len(before["log"]):
                raise ValueError(
                    f"--steps {steps} is less than the {len(before['log'])} steps of {saved}"
                )
        elif saved.exists():
            raise ValueError(
                f"{saved} is of a training that has not ended; go on with --resume, delete it, or "
                "give another --out"
            )
        trainer, model_type = _trainer(folder, load_tokenizer(model), settings, config)
        if resume:
            trainer.resume(saved)
        log = out.with_name(f"{out.name}.log.jsonl")
        saved_log = saved.with_name(f"{saved.name}.log.jsonl")  # not over that of other roles
        try:
            with torch_threads(config.num_threads):
                seconds, held_out = _trained(trainer, saved, saved_log)
        finally:
            if not trainer.log:  # nothing to go on with
                saved_log.unlink(missing_ok=True)
        roles = HeadRoles.of(
            trainer.retrieval,
            head_dim=planned.shape.head_dim,
            model_type=model_type,
            made_by=_made_by(trainer),
            checkpoint=settings.checkpoint,
        )
        roles.keep(out)
        saved_log.replace(log)
        saved.unlink()
        summary = {
            "model": model,
            "output": str(out),
            "log": str(log),
            "settings": asdict(settings),
            "retrieval_heads": roles.num_retrieval_heads,
            "open_heads": round(trainer.log[-1].open_heads, 3),
            "seconds_per_step": seconds,
            "held_out": asdict(held_out),
            "mean_gates": [[round(z, 4) for z in row] for row in trainer.mean_gates().tolist()],
        }
        print_json(summary) if as_json else _print(summary, roles.retrieval)
        _warn(trainer)


def _trainer(folder: Path, tokenizer: Any, settings: Settings, config: Any) -> tuple[Trainer, str]:
    """With the model on its device; and the model's type."""
    from offload.loading.checkpoint import check_checkpoint
    from offload.loading.stock_model import load_stock_model
    from offload.models import FAMILIES, lean_model_maker
    from offload.training.train import Trainer

    checkpoint = check_checkpoint(folder)
    FAMILIES[checkpoint.config["model_type"]].check_plain()  # before weights are read
    stock = load_stock_model(checkpoint, config.dtype).to(config.device)
    model_type: str = stock.config.model_type
    return Trainer(stock, lean_model_maker(model_type)(stock), tokenizer, settings), model_type


def _trained(trainer: Trainer, saved: Path, log: Path) -> tuple[float | None, HeldOut]:
    """Seconds per step of those that were left, None if there were none, and what was learnt."""
    import torch

    from offload.training.train import HELD_OUT_BATCHES, train

    begin, done = time.perf_counter(), len(trainer.log)
    left = trainer.settings.steps - done
    with log.open("w", encoding="utf-8") as lines, progress_bar() as progress:

        def write(row: dict[str, Any]) -> None:
            lines.write(json.dumps(row) + "\n")
            lines.flush()

        def on_step(step: Step) -> None:
            write(asdict(step))
            said = (
                f"loss {step.loss:.3f}, E‖z‖₀ {step.open_heads:.1f}, "
                f"{step.retrieval_heads} heads retrieve"
            )
            progress.update(steps, advance=1, description=said)

        write({"settings": asdict(trainer.settings)})
        for step in trainer.log:
            write(asdict(step))
        steps = progress.add_task("training", total=trainer.settings.steps, completed=done)
        try:
            train(trainer, saved, on_step)
            seconds = (time.perf_counter() - begin) / left if left else None
            task = progress.add_task("other texts", total=HELD_OUT_BATCHES)
            held_out = trainer.held_out(lambda: progress.advance(task))
        except torch.OutOfMemoryError as error:
            raise ValueError(
                f"the GPU's memory is too small ({error}); lower --context or --batch-size, or "
                "take --dtype bfloat16"
            ) from error
        except KeyboardInterrupt:
            if trainer.log:
                stderr().print(f"{saved} has {len(trainer.log)} steps; go on with --resume")
            raise
        write({"held_out": asdict(held_out), "mean_gates": trainer.mean_gates().tolist()})
    return seconds, held_out


def _made_by(trainer: Trainer) -> str:
    settings = trainer.settings
    return (
        f"{settings.steps} steps on {settings.batch_size} prompts of "
        f"{settings.context} tokens, budget {settings.budget_tokens}, seed {settings.seed}: "
        f"{int(trainer.retrieval[1:].sum())} retrieval heads after layer 0, target "
        f"{settings.target_heads}, open gates {trainer.log[-1].open_heads:.1f}"
    )


def _warn(trainer: Trainer) -> None:
    """Warn if the gates have not come near the target: there were too few steps."""
    settings, last = trainer.settings, trainer.log[-1]
    found = int(trainer.retrieval[1:].sum())
    if not settings.target_heads / 2 <= found <= 2 * settings.target_heads:
        print_marked(
            "warning:",
            f"{found} heads retrieve after layer 0, but --target-heads is {settings.target_heads}: "
            f"the gates have not settled in {settings.steps} steps (E‖z‖₀ is "
            f"{last.open_heads:.1f}); train again with more --steps",
            "bold yellow",
        )


def _print(summary: dict[str, Any], retrieval: tuple[tuple[bool, ...], ...]) -> None:
    gates, held_out = summary["mean_gates"], summary["held_out"]
    rows = []
    for layer_idx, row in enumerate(retrieval):
        heads = [f"{i} ({gates[layer_idx][i]:.2f})" for i, retrieves in enumerate(row) if retrieves]
        if heads:
            rows.append([str(layer_idx), " ".join(heads)])
    title = f"Retrieval heads of {summary['model']}"
    stdout().print(make_table(["layer", "KV heads (E[z])"], rows, words=(1,), title=title))
    right = "" if held_out["right"] is None else f", {held_out['right']:.0%} of them with these"
    stdout().print(
        f"{summary['retrieval_heads']} retrieval heads after layer 0 (E‖z‖₀ "
        f"{summary['open_heads']:.1f}, target {summary['settings']['target_heads']}).\n"
        f"On other texts: full attention gives {held_out['num_right']} answers right{right}; "
        f"KL {held_out['kl']:.3f}, loss {held_out['loss']:.3f}, with gates as in training "
        f"{held_out['gated_loss']:.3f}.\nWritten to {summary['output']}"
    )
