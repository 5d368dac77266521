"""Training the gates: distillation under a constraint on how many heads retrieve.

min over gates, max over lambda >= 0 of  L2(logits, logits of full attention) + lambda * (E|z|_0 -
target), as in LycheeDecode (arXiv 2602.04541). Only gates learn; the weights stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from offload.models import LeanModel
from offload.models.checkpoint_names import same_checkpoint
from offload.models.shape import ModelShape
from offload.prefill.memory import available_bytes
from offload.system.interrupts import shielded
from offload.system.memory import host_memory_limit_bytes
from offload.training.answers import MIN_PROMPT_TOKENS, AnswerTexts, padded
from offload.training.gates import HardKuma
from offload.training.layer_sweep import compared, means_of
from offload.training.mixed_attention import ReadText, SparseRule, read_text
from offload.training.mixed_heads import activation_bytes, mixed_hidden, prepare_stock

_ANSWER_TOKENS, _QUESTION_TOKENS = 40, 64  # that are decoded, at most
_HELD_OUT_SEED = 1_000_003  # of no step
HELD_OUT_BATCHES = 16
_DAMPING = 2.0  # of the square of what is open beyond the target; without it lambda overshoots
_SAVE_EVERY = 100  # steps
_SAVED = {"settings": dict, "gates": dict, "optimizer": dict, "multiplier": float, "log": list}


@dataclass(frozen=True)
class Settings:
    """What a training depends on; it is resumed with the same ones only, but for `steps`.

    Errors name the options of `offload train-heads`.

    Attributes:
        checkpoint, dtype: of the model.
        target_heads: retrieval heads beyond layer 0.
        steps: after which it ends; no step depends on how many are to come.
        context: tokens of a prompt; budget_tokens: that a sparse head attends to.
        learning_rate: of the gates (Adam); lambda_rate: lambda grows by it in a step, times what is
            open beyond the target, as a share of the target.
    """

    checkpoint: str
    dtype: str
    target_heads: int
    steps: int = 3000
    context: int = 4096
    batch_size: int = 2
    budget_tokens: int = 409
    learning_rate: float = 0.02
    lambda_rate: float = 0.2
    seed: int = 0

    def __post_init__(self) -> None:
        if self.context < MIN_PROMPT_TOKENS:
            raise ValueError(f"--context {self.context} must be at least {MIN_PROMPT_TOKENS}")
        for name in ("steps", "batch_size", "budget_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{_option(name)} {getattr(self, name)} must be at least 1")
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"--learning-rate {self.learning_rate} must be finite and above 0")
        least = self.rule.sink_tokens + self.rule.recent_tokens
        if not least < self.budget_tokens < self.context:
            raise ValueError(
                f"--budget-tokens {self.budget_tokens} must be in ({least}, {self.context}): more "
                f"than the {self.rule.sink_tokens} sinks and {self.rule.recent_tokens} recent "
                "tokens, and less than --context, or no head is sparse"
            )

    @property
    def rule(self) -> SparseRule:
        return SparseRule(self.budget_tokens)

    def check_model(self, shape: ModelShape, max_context_reason: str) -> None:
        """Refuse a model with fewer heads, or with a shorter context.

        Raises:
            ValueError: names the numbers.
        """
        most = (shape.num_layers - 1) * shape.num_kv_heads
        if not 1 <= self.target_heads <= most:
            raise ValueError(
                f"--target-heads {self.target_heads} must be in [1, {most}]: so many KV heads does "
                f"this model have after layer 0, whose {shape.num_kv_heads} retrieve anyway"
            )
        decoded = _QUESTION_TOKENS + _ANSWER_TOKENS
        if self.context + decoded > shape.max_context:
            least = MIN_PROMPT_TOKENS + decoded
            remedy = "lower --context"
            if least > shape.max_context:
                remedy = f"no training fits, which takes at least {least}: use `offload calibrate`"
            raise ValueError(
                f"prompts of --context {self.context} and what is decoded take "
                f"{self.context + decoded} tokens, more than the {shape.max_context} of this "
                f"model ({max_context_reason}); {remedy}"
            )


@dataclass(frozen=True)
class Step:
    """One step of the log.

    Attributes:
        loss: distance from full attention; open_heads: E|z|_0, and retrieval_heads those with E[z]
            above 0.5, both beyond layer 0.
        multiplier: lambda.
    """

    step: int
    loss: float
    open_heads: float
    retrieval_heads: int
    multiplier: float


@dataclass(frozen=True)
class HeldOut:
    """Answers over text that no step has read, teacher-forced.

    Attributes:
        loss: mean squared difference of logits with roles as they are decided; gated_loss: with
            gates as training has them.
        right: share of the `num_right` answers that full attention gives right which these roles
            give right, too; None if there are none.
        kl: of the logits from those of full attention, per token.
        agrees: share of tokens that full attention thinks most probable, too.
    """

    loss: float
    gated_loss: float
    right: float | None
    num_right: int
    kl: float
    agrees: float


@dataclass
class Trainer:
    """Gates of one model, step by step.

    Args:
        stock: of transformers, on the device that trains; its attention is replaced.
        lean: the same model.
        tokenizer: of transformers.

    Raises:
        ValueError: see `Settings.check_model`.
    """

    stock: Any
    lean: LeanModel
    tokenizer: Any
    settings: Settings
    log: list[Step] = field(default_factory=list)

    def __post_init__(self) -> None:
        shape, settings = self.lean.shape, self.settings
        settings.check_model(shape, self.lean.max_context_reason)
        self._texts = AnswerTexts(
            self.tokenizer, settings.context, _ANSWER_TOKENS, _QUESTION_TOKENS
        )
        lm_head = self.lean.lm_head
        self.device = lm_head.device
        answer = _QUESTION_TOKENS + _ANSWER_TOKENS  # at most
        needed = activation_bytes(
            shape, lm_head.dtype.itemsize, settings.batch_size * answer, settings.context + answer
        )
        on_gpu = self.device.type == "cuda"
        free = available_bytes(self.device) if on_gpu else host_memory_limit_bytes()
        prepare_stock(self.stock, recompute=needed > free // 2)
        self.gates = HardKuma((shape.num_layers - 1, shape.num_kv_heads)).to(self.device)
        self.multiplier = 0.0
        self._optimizer = torch.optim.Adam(
            self.gates.parameters(), settings.learning_rate, betas=(0.9, 0.99)
        )

    def step(self) -> Step:
        """One step of gradient descent for the gates, and of ascent for lambda.

        Raises:
            ValueError: the loss is no number.
        """
        settings, number = self.settings, len(self.log)
        text = self._read(settings.seed + number)
        hidden = self._mixed(text, self._sample(settings.seed * 1_000_003 + number))
        open_heads = self.gates.open_probability().sum()
        excess = (open_heads - settings.target_heads) / settings.target_heads
        loss = _distance(self.stock.lm_head(hidden), text.logits, text)
        objective = loss + self.multiplier * excess + _DAMPING / 2 * excess.square()
        taken = Step(
            number,
            float(loss.detach()),
            float(open_heads.detach()),
            int((self.gates.mean() > 0.5).sum()),
            self.multiplier,
        )
        if not np.isfinite(taken.loss):
            cause = "try --dtype float32"
            if settings.dtype == "float32":
                cause = "the model computes no finite numbers; check its weights"
            raise ValueError(f"the loss of step {number} is {taken.loss}; {cause}")
        self._optimizer.zero_grad()
        torch.autograd.backward(objective)
        self._optimizer.step()
        self.gates.limit()
        ascent = settings.lambda_rate * float(excess.detach())
        self.multiplier = max(0.0, self.multiplier + ascent)
        self.log.append(taken)
        return taken

    @torch.no_grad()
    def mean_gates(self) -> Tensor:
        """E[z] [num_layers, num_kv_heads] on the CPU; 1 in layer 0."""
        return _with_layer_0(self.gates.mean()).cpu()

    @property
    def retrieval(self) -> npt.NDArray[np.bool_]:
        """bool [num_layers, num_kv_heads]: layer 0, and where E[z] > 0.5."""
        roles: npt.NDArray[np.bool_] = (self.mean_gates() > 0.5).numpy()
        return roles

    @torch.no_grad()
    def held_out(self, on_batch: Callable[[], None] = lambda: None) -> HeldOut:
        """How the roles that were learnt do over text that no step has read."""
        roles = torch.from_numpy(self.retrieval).float().to(self.device)
        rows, answers = [], []
        for number in range(HELD_OUT_BATCHES):
            text = self._read(_HELD_OUT_SEED + number, held_out=True)
            logits, gated = (
                self.stock.lm_head(self._mixed(text, gates)).float()
                for gates in (roles, self._sample(number))
            )
            rows.append([float(_distance(x, text.logits, text)) for x in (logits, gated)])
            answers.append(compared(logits, text))
            on_batch()
        loss, gated_loss = np.mean(rows, axis=0).tolist()
        kl, agrees, right, num_right = means_of(answers)
        return HeldOut(loss, gated_loss, right, num_right, kl, agrees)

    def save(self, path: Path) -> None:
        """All that `resume` needs."""
        temporary = path.with_name(path.name + ".part")
        state = {
            "settings": asdict(self.settings),
            "gates": self.gates.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "multiplier": self.multiplier,
            "log": [asdict(step) for step in self.log],
        }
        torch.save(state, temporary)
        temporary.replace(path)

    def resume(self, path: Path) -> None:
        """Go on where `save` was called.

        Raises:
            ValueError: see `read_saved`.
        """
        state = read_saved(path, self.settings)
        self.gates.load_state_dict(state["gates"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.multiplier = state["multiplier"]
        self.log = [Step(**step) for step in state["log"]]

    def _mixed(self, text: ReadText, gates: Tensor) -> Tensor:
        return mixed_hidden(self.stock, text, gates, self.settings.rule)

    def _sample(self, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed % 2**64)  # of which it takes no more bits
        return _with_layer_0(self.gates.sample(generator))

    def _read(self, seed: int, *, held_out: bool = False) -> ReadText:
        size, num_prompt = self.settings.batch_size, self.settings.context
        tokens, answered = padded(self._texts.batch(size, seed, held_out=held_out))
        return read_text(self.lean, tokens.to(self.device), num_prompt, answered.to(self.device))


def read_saved(path: Path, settings: Settings) -> dict[str, Any]:
    """What `Trainer.save` has written.

    Raises:
        ValueError: with other settings than these and `steps`, or the file is damaged.
    """
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        if any(not isinstance(state[name], kind) for name, kind in _SAVED.items()):
            raise TypeError(f"{path} has other types")
        state["settings"] = asdict(Settings(**state["settings"]))
    except FileNotFoundError:
        raise
    except Exception as error:  # pickle, zip and torch have their own
        raise ValueError(
            f"{path} is no unfinished training, or damaged; delete it to begin again"
        ) from error
    theirs, ours = state["settings"], asdict(settings)
    other = [name for name in ours if name != "steps" and ours[name] != theirs[name]]
    if "checkpoint" in other and same_checkpoint(settings.checkpoint, theirs["checkpoint"]):
        other.remove("checkpoint")  # converted elsewhere or again, or a copy
    if other:
        was, now = (", ".join(f"{_option(x)} {of[x]}" for x in other) for of in (theirs, ours))
        raise ValueError(
            f"{path} was trained with {was}, not {now}; give the same options, or another --out"
        )
    return state


def train(trainer: Trainer, saved: Path, on_step: Callable[[Step], None]) -> None:
    """The steps that are left; `saved` is written now and then, and whenever it ends, also by
    ctrl-C, which waits for the end of a step. Before the first step there is nothing to write."""
    try:
        while len(trainer.log) < trainer.settings.steps:
            with shielded():
                taken = trainer.step()
            on_step(taken)
            if len(trainer.log) % _SAVE_EVERY == 0:
                trainer.save(saved)
    finally:
        if trainer.log:
            trainer.save(saved)


def _option(name: str) -> str:
    """The option of `offload train-heads` that sets `name`."""
    return name if name in ("checkpoint", "lambda_rate") else f"--{name.replace('_', '-')}"


def _with_layer_0(gates: Tensor) -> Tensor:
    return torch.cat([torch.ones_like(gates[:1]), gates])


def _distance(ours: Tensor, full: Tensor, text: ReadText) -> Tensor:
    """Mean squared difference [batch, num_answer, size], over the answers' tokens."""
    return (ours.float() - full.float()).square().mean(-1)[text.answered].mean()
