"""Which layers select best under TidalDecode (ICLR 2025, Figure 5), by a model's own answers.

A model reads texts once with full attention; then it says the answers again, teacher-forced, with
some layers that select and the others reusing (`mixed_attention`). What counts is how far the
answers' logits are from those of full attention, over all budgets together: as KL divergence, which
is large where an answer gets lost and small where it could go on in several ways. Attention mass,
which layers were chosen by before, tells neither.

The first layer after the dense ones always selects: one that did so later would leave another layer
dense before it, which costs as much. Others are added one at a time, each the best beside those
before (the first of them is the paper's sweep), then exchanged one at a time while that helps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from offload.models import LeanModel
from offload.system.memory import format_bytes, host_memory_limit_bytes
from offload.training.answers import MIN_PROMPT_TOKENS, AnswerTexts, padded
from offload.training.mixed_attention import ReadText, SparseRule, mixed_logits, read_text

ANSWER_TOKENS = 40  # at most
_HELD_OUT_SEED = 1_000_003  # of no batch
_MOST_EXCHANGES = 3
Layers = tuple[int, ...]


@dataclass(frozen=True)
class SweepSettings:
    """What a sweep depends on, besides the model; errors name options of `offload calibrate`.

    Attributes:
        num_select_layers: that are chosen, the first one, which is fixed, among them.
        tokens: of a prompt; budgets: tokens that a layer which reuses attends to.
        batch_size: texts that are read together; seven are of as many kinds.
    """

    num_select_layers: int
    dense_layers: int = 2
    tokens: int = 4096
    budgets: tuple[int, ...] = (1024, 320)
    num_batches: int = 8
    batch_size: int = 7
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_select_layers", "num_batches", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.dense_layers < 0:
            raise ValueError(f"--dense-layers {self.dense_layers} must be at least 0")
        if self.tokens < MIN_PROMPT_TOKENS:
            raise ValueError(f"--context {self.tokens} must be at least {MIN_PROMPT_TOKENS}")
        if not self.budgets:
            raise ValueError("budgets is empty: give at least one")
        for rule in self.rules:
            least = rule.sink_tokens + rule.recent_tokens
            if not least < rule.budget_tokens < self.tokens:
                raise ValueError(
                    f"--budget-tokens {rule.budget_tokens} must be in ({least}, {self.tokens}): "
                    f"more than the {rule.sink_tokens} sinks and {rule.recent_tokens} recent "
                    "tokens, and less than --context, or nothing is selected"
                )

    @property
    def rules(self) -> list[SparseRule]:
        return [SparseRule(budget) for budget in self.budgets]


@dataclass(frozen=True)
class Score:
    """Answers with these select layers and this budget, teacher-forced; means over the texts.

    Attributes:
        kl: of their logits from those of full attention, per token.
        agrees: share of tokens that full attention thinks most probable, too.
        right: share of the answers that full attention gives right (`num_right`) which these give
            right, too; None if there are none. All tokens of such an answer are the most probable
            ones; the first is left out: the prompt decides it.
    """

    select_layers: Layers
    budget_tokens: int
    kl: float
    agrees: float
    right: float | None


@dataclass(frozen=True)
class Sweep:
    """What a sweep has found.

    Attributes:
        select_layers: the chosen ones.
        path: the choice after each layer that was added or exchanged, the fixed one alone first.
        scores: of everything that was tried, a score for each budget.
        held_out: of chosen layers and others to compare with, over text that nothing was chosen by.
        num_right: answers of this other text that full attention gives right.
    """

    select_layers: Layers
    path: list[Layers]
    scores: list[Score]
    held_out: list[Score]
    num_right: int


class LayerSweep:
    """Texts that a model has read, and the search for layers over them.

    Args:
        lean: the model, on the device that sweeps.
        tokenizer: of transformers.
        on_batch: called when a batch of texts was read.

    Raises:
        ValueError: more layers than there are after the dense ones, texts longer than the model's
            context, or more of them than fit in memory.
    """

    def __init__(
        self,
        lean: LeanModel,
        tokenizer: Any,
        settings: SweepSettings,
        *,
        on_batch: Callable[[], None] | None = None,
    ) -> None:
        check_num_select_layers(
            settings.num_select_layers, lean.shape.num_layers, settings.dense_layers
        )
        self._lean, self._settings = lean, settings
        self._check_sizes()
        self._texts = AnswerTexts(tokenizer, settings.tokens, ANSWER_TOKENS)
        self._scores: dict[Layers, list[Score]] = {}
        self._read: list[ReadText] = []
        for number in range(settings.num_batches):
            self._read.append(self._batch(settings.seed + number, held_out=False))
            if on_batch is not None:
                on_batch()

    def run(
        self,
        compared: Sequence[Layers] = (),
        *,
        on_round: Callable[[int], None] = lambda more: None,
        on_scored: Callable[[], None] = lambda: None,
    ) -> Sweep:
        """Choose layers.

        Args:
            compared: sets of layers that the chosen ones are compared with on other texts.
            on_round: is told of so many more sets of layers to come.
            on_scored: called after each.
        """

        def best(candidates: Iterable[Layers]) -> Layers:
            wanted = list(dict.fromkeys(candidates))
            new = [layers for layers in wanted if layers not in self._scores]
            on_round(len(new))
            for layers in new:
                self._scores[layers] = self._score(layers, self._read)
                on_scored()
            return min(wanted, key=self._distance)

        settings = self._settings
        free = range(settings.dense_layers + 1, self._lean.shape.num_layers)
        path = [best([(settings.dense_layers,)])]
        while len(path[-1]) < settings.num_select_layers:
            path.append(best(_with(path[-1], layer) for layer in free if layer not in path[-1]))
        for _ in range(_MOST_EXCHANGES):
            exchanged = best(
                [path[-1]]
                + [
                    _with([kept for kept in path[-1] if kept != gone], layer)
                    for gone in path[-1][1:]
                    for layer in free
                    if layer not in path[-1]
                ]
            )
            if exchanged == path[-1]:
                break
            path.append(exchanged)
        scores = [score for of_layers in self._scores.values() for score in of_layers]
        self._read.clear()
        held_out, num_right = self._held_out([path[-1], *compared, path[0]])
        return Sweep(path[-1], path, scores, held_out, num_right)

    def _distance(self, layers: Layers) -> float:
        """What is least of the best layers: of all budgets alike."""
        of_layers = self._scores[layers]
        return sum(score.kl for score in of_layers) / len(of_layers)

    def _held_out(self, sets: Sequence[Layers]) -> tuple[list[Score], int]:
        seeds = range(_HELD_OUT_SEED, _HELD_OUT_SEED + self._settings.num_batches)
        read = [self._batch(seed, held_out=True) for seed in seeds]
        num_right = sum(int(_right(text.logits, text).sum()) for text in read)
        scores = [x for layers in dict.fromkeys(sets) for x in self._score(layers, read)]
        return scores, num_right

    def _score(self, layers: Layers, read: Sequence[ReadText]) -> list[Score]:
        """The score at each budget.

        Raises:
            ValueError: a KL divergence is no finite number.
        """
        attends_all = attending_layers(layers, len(self._lean.layers))
        scores = []
        for rule in self._settings.rules:
            answers = [
                compared(mixed_logits(self._lean, text, attends_all, rule), text) for text in read
            ]
            kl, agrees, right, _ = means_of(answers)
            if not math.isfinite(kl):
                raise ValueError(
                    f"the KL divergence with select layers {layers} is {kl}: the model computes no "
                    "finite numbers; check its weights, or take --dtype float32"
                )
            scores.append(Score(layers, rule.budget_tokens, kl, agrees, right))
        return scores

    def _batch(self, seed: int, *, held_out: bool) -> ReadText:
        settings = self._settings
        examples = self._texts.batch(settings.batch_size, seed, held_out=held_out)
        tokens, answered = padded(examples)
        device = self._lean.lm_head.device
        return read_text(self._lean, tokens.to(device), settings.tokens, answered.to(device))

    def _check_sizes(self) -> None:
        settings, shape = self._settings, self._lean.shape
        longest = settings.tokens + ANSWER_TOKENS
        if longest > shape.max_context:
            raise ValueError(
                f"prompts of --context {settings.tokens} and their answers take {longest} tokens, "
                f"more than the {shape.max_context} of this model ({self._lean.max_context_reason})"
            )
        device, item_bytes = self._lean.lm_head.device, self._lean.lm_head.dtype.itemsize
        text_bytes = settings.tokens * shape.kv_token_bytes * item_bytes // 2
        text_bytes += ANSWER_TOKENS * shape.vocab_size * 4
        wanted = settings.num_batches * settings.batch_size * text_bytes
        on_gpu = device.type == "cuda"
        free = torch.cuda.mem_get_info(device)[0] if on_gpu else host_memory_limit_bytes()
        if wanted > free:
            raise ValueError(
                f"{settings.num_batches} batches of {settings.batch_size} texts of "
                f"{settings.tokens} tokens take {format_bytes(wanted)} of keys, values and logits, "
                f"but {device} has {format_bytes(free)}; lower "
                "--batches, --batch-size or --context"
            )


def check_num_select_layers(count: int, num_layers: int, dense_layers: int) -> None:
    """Refuse more select layers than leave another layer to reuse what they select."""
    most = num_layers - dense_layers - 1
    if most < 1:
        raise ValueError(
            f"--dense-layers {dense_layers} leave nothing to choose: of this model's {num_layers} "
            "layers one has to select and one to reuse what it selects; lower --dense-layers"
        )
    if not 1 <= count <= most:
        raise ValueError(
            f"--select-layers {count} must be in [1, {most}]: this model has {num_layers} "
            f"layers, of which the first {dense_layers} (--dense-layers) select nothing and at "
            "least one has to reuse what others select"
        )


def attending_layers(layers: Sequence[int], num_layers: int) -> list[bool]:
    """Whether each layer of TidalDecode attends to everything.

    What dense layers would hand down, the first select layer behind them replaces.
    """
    return [layer in layers or layer < min(layers) for layer in range(num_layers)]


def _with(layers: Sequence[int], layer: int) -> Layers:
    return tuple(sorted([*layers, layer]))


def compared(logits: Tensor, text: ReadText) -> Tensor:
    """[4, batch]: of each answer the mean kl and the share that agrees over its tokens; 1.0 if it
    is right as that of full attention is; 1.0 if that is right."""
    ours, full = logits.log_softmax(-1), text.logits.log_softmax(-1)
    kl = (full.exp() * (full - ours)).sum(-1)
    same = (ours.argmax(-1) == full.argmax(-1)).float()
    lengths = text.answered.sum(-1)
    kl, same = ((x * text.answered).sum(-1) / lengths for x in (kl, same))
    wanted = _right(text.logits, text)
    return torch.stack([kl, same, (_right(logits, text) & wanted).float(), wanted.float()])


def means_of(answers: list[Tensor]) -> tuple[float, float, float | None, int]:
    """(kl, agrees, right, num_right) of what `compared` gave; see `Score`."""
    kl, agrees, right, wanted = torch.cat(answers, dim=1).double().cpu().unbind()
    num_right = int(wanted.sum())
    kept = float(right.sum()) / num_right if num_right else None
    return float(kl.mean()), float(agrees.mean()), kept, num_right


def _right(logits: Tensor, text: ReadText) -> Tensor:
    """bool [batch]."""
    wanted = text.tokens[:, text.num_prompt + 1 :]
    matters = text.answered[:, 1:]  # what follows a token of the answer, and belongs to it
    return ((logits[:, :-1].argmax(-1) == wanted) | ~matters).all(-1)
