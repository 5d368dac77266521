"""Training the gates: distillation under a constraint on how many heads retrieve.

min over gates, max over lambda >= 0 of  L2(logits, logits of full attention) + lambda * (E|z|_0 -
target), as in LycheeDecode (arXiv 2602.04541). Only gates learn; the weights stay as they are.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offload.models import LeanModel
from offload.policies.lychee_decode.roles import BoolArray, check_retrieval_heads
from offload.training.answers import AnswerTexts, padded
from offload.training.gates import METHODS, Gates
from offload.training.mixed_attention import ReadText, SparseRule, mixed_logits, read_text

_HELD_OUT_SEED = 1_000_003  # of no step


@dataclass(frozen=True)
class Settings:
    """What a training depends on, besides the model; it is resumed with the same ones only.

    Attributes:
        target_heads: retrieval heads beyond layer 0.
        tokens: of a prompt; budget_tokens: that a sparse head attends to.
        method: of METHODS.
        learning_rate: of the gates (Adam); lambda_rate: lambda grows by it in a step, times the
            share of heads that are open beyond the target.
    """

    target_heads: int
    steps: int = 3000
    tokens: int = 4096
    batch_size: int = 2
    budget_tokens: int = 410
    method: str = "hardkuma"
    learning_rate: float = 0.02
    lambda_rate: float = 0.2
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("target_heads", "steps", "tokens", "batch_size", "budget_tokens"):
            value, least = getattr(self, name), 0 if name == "target_heads" else 1
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
        for name in ("learning_rate", "lambda_rate"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)!r}")
        if self.method not in METHODS:
            raise ValueError(f"unknown method {self.method!r}; available: {', '.join(METHODS)}")
        rule = self.rule
        if self.budget_tokens <= rule.sink_tokens + rule.recent_tokens:
            raise ValueError(
                f"budget_tokens={self.budget_tokens} must be more than the {rule.sink_tokens} sinks "
                f"and {rule.recent_tokens} recent tokens, or nothing is left to choose"
            )
        if self.budget_tokens >= self.tokens:
            raise ValueError(
                f"budget_tokens={self.budget_tokens} must be below tokens={self.tokens}, or "
                "nothing is sparse"
            )

    @property
    def rule(self) -> SparseRule:
        return SparseRule(self.budget_tokens)


@dataclass(frozen=True)
class Step:
    """One step of the log.

    Attributes:
        loss: mean squared difference of logits; open_heads: E|z|_0, and retrieval_heads those that
            retrieve by now, both beyond layer 0.
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
        loss: with roles as they are decided; gated_loss: with gates as training samples them.
        right: share of answers all of whose tokens are the most probable ones; right_of_full: with
            full attention. The first token is left out: the prompt decides it.
        agrees: share of tokens that full attention chooses, too.
    """

    loss: float
    gated_loss: float | None
    right: float
    right_of_full: float
    agrees: float


@dataclass
class Trainer:
    """Gates of one model, step by step.

    Args:
        lean: on the device that trains; its weights are left alone.
        tokenizer: of transformers.

    Raises:
        ValueError: more target heads than the layers after layer 0 have, or texts longer than the
            model's context.
    """

    lean: LeanModel
    tokenizer: Any
    settings: Settings
    log: list[Step] = field(default_factory=list)

    def __post_init__(self) -> None:
        shape, settings = self.lean.shape, self.settings
        check_retrieval_heads(settings.target_heads, shape.num_layers, shape.num_kv_heads)
        self._texts = AnswerTexts(self.tokenizer, settings.tokens)
        longest = settings.tokens + self._texts.max_answer_tokens
        if longest > shape.max_context:
            raise ValueError(
                f"prompts of tokens={settings.tokens} and their answers take {longest} tokens, more "
                f"than the {shape.max_context} of this model ({self.lean.max_context_reason})"
            )
        for module in (self.lean.embed_tokens, self.lean.final_norm, self.lean.lm_head):
            module.requires_grad_(False)
        for layer in self.lean.layers:
            for module in vars(layer).values():
                if module is not None:
                    module.requires_grad_(False)
        self.device = self.lean.lm_head.weight.device
        gates = METHODS[settings.method]((shape.num_layers - 1, shape.num_kv_heads))
        self.gates: Gates = gates.to(self.device)
        self.multiplier = 0.0
        self._optimizer = torch.optim.Adam(
            self.gates.parameters(), settings.learning_rate, betas=(0.9, 0.99)
        )

    def step(self) -> Step:
        """One step of gradient descent for the gates, and of ascent for lambda."""
        number = len(self.log)
        text = self._read(self.settings.batch_size, self.settings.seed + number)
        noise = torch.Generator().manual_seed(self.settings.seed * 1_000_003 + number)
        logits = mixed_logits(
            self.lean, text, _with_layer_0(self.gates.sample(noise)), self.settings.rule
        )
        loss = _distance(logits, text)
        open_heads = self.gates.open_probability().sum()
        excess = (open_heads - self.settings.target_heads) / max(1, self.settings.target_heads)
        self._optimizer.zero_grad()
        (loss + self.multiplier * excess).backward()
        self._optimizer.step()
        taken = Step(
            number,
            float(loss.detach()),
            float(open_heads.detach()),
            int(self.retrieval[1:].sum()),
            self.multiplier,
        )
        if not np.isfinite(taken.loss):
            raise FloatingPointError(f"the loss of step {number} is {taken.loss}")
        self.multiplier = max(
            0.0, self.multiplier + self.settings.lambda_rate * float(excess.detach())
        )
        self.log.append(taken)
        return taken

    @property
    def retrieval(self) -> BoolArray:
        """bool [num_layers, num_kv_heads]: layer 0, and where E[z] > 0.5."""
        with torch.no_grad():
            decided = _with_layer_0(self.gates.mean()) > 0.5
        return decided.cpu().numpy()

    def held_out(
        self, retrieval: BoolArray | None = None, *, num_batches: int = 8, on_batch: Any = None
    ) -> HeldOut:
        """How roles, by default those that were learnt, do over text that no step has read."""
        roles = self.retrieval if retrieval is None else retrieval
        fixed = torch.from_numpy(np.ascontiguousarray(roles)).float().to(self.device)
        found = []
        with torch.no_grad():
            for number in range(num_batches):
                text = self._read(8, _HELD_OUT_SEED + number, held_out=True)
                logits = mixed_logits(self.lean, text, fixed, self.settings.rule)
                row = {"loss": float(_distance(logits, text)), **_right(logits, text)}
                if retrieval is None:
                    noise = torch.Generator().manual_seed(number)
                    gates = _with_layer_0(self.gates.sample(noise))
                    gated = mixed_logits(self.lean, text, gates, self.settings.rule)
                    row["gated_loss"] = float(_distance(gated, text))
                found.append(row)
                if on_batch is not None:
                    on_batch()
        means = {name: float(np.mean([row[name] for row in found])) for name in found[0]}
        return HeldOut(**({"gated_loss": None} | means))

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
            ValueError: it was saved with other settings, or for another model.
        """
        state = torch.load(path, map_location=self.device, weights_only=True)
        ours, theirs = asdict(self.settings), state["settings"]
        other = [f"{name}={theirs.get(name)!r}" for name in ours if ours[name] != theirs.get(name)]
        if other:
            asked = [f"{name}={ours[name]!r}" for name in ours if ours[name] != theirs.get(name)]
            raise ValueError(
                f"{path} was trained with {', '.join(other)}, not {', '.join(asked)}; give the same "
                "options, or another --out"
            )
        try:
            self.gates.load_state_dict(state["gates"])
        except RuntimeError as error:
            raise ValueError(f"{path} is of another model: {error}") from None
        self._optimizer.load_state_dict(state["optimizer"])
        self.multiplier = state["multiplier"]
        self.log = [Step(**step) for step in state["log"]]

    def _read(self, size: int, seed: int, *, held_out: bool = False) -> ReadText:
        tokens, answered = padded(self._texts.batch(size, seed, held_out=held_out))
        return read_text(
            self.lean, tokens.to(self.device), self.settings.tokens, answered.to(self.device)
        )


def write_log(path: Path, log: list[Step]) -> None:
    """A JSON object a line."""
    path.write_text("".join(json.dumps(asdict(step)) + "\n" for step in log), encoding="utf-8")


def train(
    trainer: Trainer,
    state: Path,
    *,
    on_step: Callable[[Step], None] | None = None,
    save_every: int = 200,
) -> None:
    """The steps that are left, saved now and then and whenever it ends, also by ctrl-C."""
    try:
        while len(trainer.log) < trainer.settings.steps:
            taken = trainer.step()
            if on_step is not None:
                on_step(taken)
            if len(trainer.log) % save_every == 0:
                trainer.save(state)
    finally:
        trainer.save(state)


def _with_layer_0(gates: Tensor) -> Tensor:
    return torch.cat([torch.ones_like(gates[:1]), gates])


def _distance(logits: Tensor, text: ReadText) -> Tensor:
    """Mean squared difference to the logits of full attention, over the answers' tokens."""
    squared = (logits - text.logits).square().mean(-1)
    return squared[text.answered].mean()


def _right(logits: Tensor, text: ReadText) -> dict[str, float]:
    """Numbers of `HeldOut`."""
    wanted = text.tokens[:, text.num_prompt + 1 :]
    matters = text.answered[:, 1:]  # what follows a token of the answer, and belongs to it
    ours, theirs = logits[:, :-1].argmax(-1), text.logits[:, :-1].argmax(-1)
    return {
        "right": float(((ours == wanted) | ~matters).all(-1).float().mean()),
        "right_of_full": float(((theirs == wanted) | ~matters).all(-1).float().mean()),
        "agrees": float((ours == theirs)[matters].float().mean()),
    }
