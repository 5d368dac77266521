"""Answers of one model under several policies to the same prompts, each prompt read once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from offload.bench.eval.bounds import Bound, read_within
from offload.bench.eval.prompt import prompt_text, prompt_tokens
from offload.bench.eval.sample import Sample, string_match_all
from offload.runtime.runtime import Runtime
from offload.runtime.shared_model import ContinuesPrompts, ReadPrompt, SharedModel


@dataclass(frozen=True)
class Answer:
    """What a policy made of a prompt.

    Attributes:
        tokens: of the answer, the one that ends it included.
        attended_tokens, scored_tokens: per decode step, layer and selection unit, dense layers
            included: attended to, and whose keys were scored to select; None where there was no
            decode step, or a GPU attends, which does not count.
        seconds: of decoding, without what the policy builds first (`build_seconds`).
    """

    tokens: list[int]
    attended_tokens: float | None
    scored_tokens: float | None
    seconds: float
    build_seconds: float


def answer_sample(
    model: SharedModel,
    labels: Sequence[str],
    tokenizer: Any,
    sample: Sample,
    *,
    chat: bool,
    decode_last: int = 0,
    bounds: Sequence[Bound] = (),
) -> dict[str, Any]:
    """What each policy answers to a sample, and the scores; then each within each bound.

    Args:
        labels: of the runtimes of `model`, as the record shall name them.
        chat: use the tokenizer's chat template.
        decode_last: tokens at the prompt's end, fewer than it has, that are decoded one by one
            under each policy.
        bounds: on the host memory of prompt and answer, which is then as long as it may be.
    """
    text = prompt_text(sample, tokenizer, chat=chat)
    room = model.max_context - sample.max_new_tokens
    tokens, num_tokens = prompt_tokens(text, tokenizer, room)
    stop = model.eos_tokens | {tokenizer.eos_token_id}
    record: dict[str, Any] = {
        "prompt_tokens": len(tokens),
        "truncated_tokens": num_tokens - len(tokens),
        "outputs": list(sample.outputs),
    }

    def said_by(tokens: list[int]) -> str:
        text: str = tokenizer.decode(tokens, skip_special_tokens=True)
        return text

    def score_of(tokens: list[int]) -> float:
        return string_match_all(said_by(tokens), sample.outputs)

    num_read = len(tokens) - decode_last
    if num_read < 1:
        raise ValueError(
            f"cannot decode the last {decode_last} of the {len(tokens)} tokens of a prompt; "
            "lower --decode-last or raise --context"
        )

    def answered(by: ContinuesPrompts, index: int, prompt: ReadPrompt) -> dict[str, Any]:
        answer = greedy_answer(
            by,
            index,
            prompt,
            # What comes after all right answers can take none of them back.
            lambda tokens: tokens[-1] in stop or score_of(tokens) == 1,
            sample.max_new_tokens,
            unread=tokens[num_read:],
        )
        return {
            "answer": said_by(answer.tokens),
            "score": score_of(answer.tokens),
            "new_tokens": len(answer.tokens),
            "attended_tokens": answer.attended_tokens,
            "scored_tokens": answer.scored_tokens,
            "decode_seconds": round(answer.seconds, 4),
            "build_seconds": round(answer.build_seconds, 4),
        }

    answers = {}
    with model.read(tokens[:num_read]) as prompt:
        record["prefill_seconds"] = round(prompt.seconds, 4)
        for index, label in enumerate(labels):
            answers[label] = answered(model, index, prompt)
    further = decode_last + sample.max_new_tokens
    for index, label in enumerate(labels):
        for bound in bounds:
            with read_within(bound, model, index, tokens[:num_read], further) as read:
                said = answered(read.model, 0, read.prompt)
                answers[bound.label(label)] = said | read.measured()
    return record | {"answers": answers}


def greedy_answer(
    model: ContinuesPrompts,
    index: int,
    prompt: ReadPrompt,
    is_done: Callable[[list[int]], bool],
    max_new_tokens: int,
    *,
    unread: Sequence[int] = (),
) -> Answer:
    """Decode a prompt's continuation under a policy: the tokens of the stock greedy loop.

    Args:
        is_done: gets the answer's tokens so far.
        unread: tokens of the prompt after those that were read; decode steps take them.
    """
    runtime = model.runtimes[index]
    position = len(prompt.tokens)
    with runtime.generation(has_assistant=False), model.continued(index, prompt) as cache:

        def step(token: Tensor) -> Tensor:
            nonlocal position
            position += 1
            return runtime.choose_tokens(cache, token, torch.tensor([position - 1]))[:, 0]

        runtime.attention.start_profile()
        token = runtime.first_tokens(prompt.logits)
        for given in unread:
            token = step(torch.tensor([given]))
        tokens = [int(token)]
        while len(tokens) < max_new_tokens and not is_done(tokens):
            token = step(token)
            tokens.append(int(token))
        steps = position - len(prompt.tokens)
        stats = runtime.current_generation.stats
        attended = attended_tokens(runtime, steps)
        scored = attended_tokens(runtime, steps, "scored_tokens")
    return Answer(tokens, attended, scored, stats.decode_seconds, stats.index_seconds)


def attended_tokens(runtime: Runtime, steps: int, count: str = "attended_tokens") -> float | None:
    """Per step, layer and unit, dense layers included, since the profile was started.

    Args:
        count: of `NativeAttention.profile`, in tokens x units.
    """
    attention = runtime.attention
    if not steps or runtime.device.type != "cpu":
        return None
    per_query_head = attention.policy.selects and attention.policy.per_query_head
    num_units = attention.num_qo_heads if per_query_head else attention.store.num_kv_heads
    counted: float = attention.profile()[count] / num_units
    return counted / steps / attention.num_layers
