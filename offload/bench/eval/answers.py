"""Answers of one model under several policies to the same prompts, each prompt read once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from offload.bench.eval.bounds import Bound, read_within
from offload.bench.eval.forced import attended_tokens, measure_forced
from offload.bench.eval.prompt import prompt_text, prompt_tokens
from offload.bench.eval.reply import Reply
from offload.bench.eval.sample import PART_END, Sample, string_match_all
from offload.decode.sampling import Sampler, SamplingOptions
from offload.engine.runner import Passes
from offload.runtime.cache import OffloadedCache
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


def answer_samples(
    model: SharedModel,
    labels: Sequence[str],
    tokenizer: Any,
    samples: Sequence[Sample],
    *,
    chat: bool,
    decode_last: int = 0,
    bounds: Sequence[Bound] = (),
    together: bool = False,
    with_kl: bool = False,
) -> list[dict[str, Any]]:
    """What each policy answers to samples, and the scores; then each within each bound.

    Args:
        labels: of the runtimes of `model`, as the records shall name them.
        chat: use the tokenizer's chat template.
        decode_last: tokens at the prompt's end, fewer than it has, that are decoded one by one
            under each policy.
        bounds: on the host memory of prompt and answer, which is then as long as it may be.
        together: all samples are decoded in the same steps, of which each takes its share of the
            seconds and of what is attended to; not with bounds or corrections.
        with_kl: each policy is also given the answer of the first, full attention, one token at a
            time: what its logits diverge by, in nats a token.
    """
    asked = [
        _Asked.of(sample, model, tokenizer, chat=chat, decode_last=decode_last)
        for sample in samples
    ]
    answers: list[dict[str, Any]] = [{} for _ in samples]
    given: list[list[int]] = []
    with contextlib.ExitStack() as reading:
        prompts = [reading.enter_context(model.read(each.read)) for each in asked]
        for index, label in enumerate(labels):
            replies = [each.reply() for each in asked]
            if together:
                said = greedy_answers(model, index, prompts, replies)
            else:
                both = zip(prompts, replies, strict=True)
                said = [greedy_answer(model, index, *each) for each in both]
            for of_sample, each, answer in zip(answers, asked, said, strict=True):
                of_sample[label] = each.scored(answer)
                if with_kl and index == 0:
                    given.append([*each.unread, *answer.tokens])
        for of_sample, prompt, tokens in zip(answers, prompts, given, strict=False):
            full: list[torch.Tensor] = []
            for index, label in enumerate(labels):
                forced = measure_forced(model, index, prompt, tokens, full)
                of_sample[label]["kl"] = forced["kl"] / max(1, forced["tokens"])
    for index, label in enumerate(labels):
        for bound in bounds:
            for of_sample, each in zip(answers, asked, strict=True):
                further = len(each.unread) + each.sample.max_new_tokens
                with read_within(bound, model, index, each.read, further) as read:
                    answer = greedy_answer(read.model, 0, read.prompt, each.reply())
                    of_sample[bound.label(label)] = each.scored(answer) | read.measured()
    return [
        {
            "prompt_tokens": len(each.read) + len(each.unread),
            "truncated_tokens": each.truncated_tokens,
            "outputs": list(each.sample.outputs),
            "prefill_seconds": round(prompt.seconds, 4),
            "answers": of_sample,
        }
        for each, prompt, of_sample in zip(asked, prompts, answers, strict=True)
    ]


@dataclass(frozen=True)
class _Asked:
    """A sample as tokens: those that are read, and those that are decoded before the answer."""

    sample: Sample
    read: list[int]
    unread: list[int]
    truncated_tokens: int
    tokenizer: Any
    stop: frozenset[int]

    @staticmethod
    def of(
        sample: Sample, model: SharedModel, tokenizer: Any, *, chat: bool, decode_last: int
    ) -> _Asked:
        room = model.max_context - sample.max_new_tokens
        tokens, num_tokens = prompt_tokens(
            prompt_text(sample, tokenizer, chat=chat), tokenizer, room
        )
        if sample.decodes_prefix:
            decode_last = max(decode_last, len(_plain_tokens(tokenizer, sample.answer_prefix)))
        num_read = len(tokens) - decode_last
        if num_read < 1:
            raise ValueError(
                f"cannot decode the last {decode_last} of the {len(tokens)} tokens of a prompt; "
                "lower --decode-last or raise --context"
            )
        stop = frozenset(model.eos_tokens | {tokenizer.eos_token_id})
        parts = tokens[:num_read], tokens[num_read:]
        return _Asked(sample, *parts, num_tokens - len(tokens), tokenizer, stop)

    def reply(self) -> Reply:
        """Nothing said so far."""

        def question(template: str) -> Callable[[Sequence[int]], list[int]]:
            return lambda said: _plain_tokens(
                self.tokenizer, template.format(said=self._text(said).strip())
            )

        return Reply(
            self.unread,
            # What comes after all right answers can take none of them back.
            lambda tokens: tokens[-1] in self.stop or self._score(tokens) == 1,
            self.sample.max_new_tokens,
            questions=[question(template) for template in self.sample.questions],
            ends_part=lambda token: (
                token in self.stop or PART_END.search(self._text([token])) is not None
            ),
        )

    def scored(self, answer: Answer) -> dict[str, Any]:
        """For the record."""
        return {
            "answer": self._text(answer.tokens),
            "score": self._score(answer.tokens),
            "new_tokens": len(answer.tokens),
            "attended_tokens": answer.attended_tokens,
            "scored_tokens": answer.scored_tokens,
            "decode_seconds": round(answer.seconds, 4),
            "build_seconds": round(answer.build_seconds, 4),
        }

    def _text(self, tokens: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return text

    def _score(self, tokens: Sequence[int]) -> float:
        return string_match_all(self._text(tokens), self.sample.outputs)


def _plain_tokens(tokenizer: Any, text: str) -> list[int]:
    tokens: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return tokens


def greedy_answer(model: ContinuesPrompts, index: int, prompt: ReadPrompt, reply: Reply) -> Answer:
    """Decode a prompt's continuation under a policy: the tokens of the stock greedy loop."""
    runtime = model.runtimes[index]
    position = len(prompt.tokens)
    with runtime.generation(has_assistant=False), model.continued(index, prompt) as cache:
        runtime.attention.start_profile()
        reply.hear(int(runtime.first_tokens(prompt.logits)))
        while not reply.is_done:
            token = torch.tensor([reply.next_token()])
            chosen = runtime.choose_tokens(cache, token, torch.tensor([position]))
            position += 1
            reply.hear(int(chosen))
        steps = position - len(prompt.tokens)
        stats = runtime.current_generation.stats
        attended = attended_tokens(runtime, steps)
        scored = attended_tokens(runtime, steps, "scored_tokens")
    return Answer(reply.tokens, attended, scored, stats.decode_seconds, stats.index_seconds)


def greedy_answers(
    model: SharedModel, index: int, prompts: Sequence[ReadPrompt], replies: Sequence[Reply]
) -> list[Answer]:
    """`greedy_answer` of several prompts in the same steps, until the last of them is done."""
    runtime = model.runtimes[index]
    passes, greedy = Passes(runtime), Sampler(SamplingOptions())
    longest = max(map(len, (prompt.tokens for prompt in prompts)))
    most = longest + max(reply.num_given + reply.num_left for reply in replies)
    with contextlib.ExitStack() as forks, runtime.generation(has_assistant=False):
        runtime.decoder.begin_generation(len(prompts), most)
        caches = [forks.enter_context(model.continued(index, prompt)) for prompt in prompts]
        runtime.attention.start_profile()
        for prompt, reply in zip(prompts, replies, strict=True):
            reply.hear(int(runtime.first_tokens(prompt.logits)))
        running = _running(caches, replies)
        while running:
            seqs = [seq for seq, _ in running]
            is_given = any(reply.num_given for _, reply in running)
            left = 1 if is_given else min(reply.num_left for _, reply in running)

            def take(chosen: list[int], running: list[tuple[int, Reply]] = running) -> bool:
                for (_, reply), token in zip(running, chosen, strict=True):
                    reply.hear(token)
                return not any(reply.is_done or reply.num_given for _, reply in running)

            tokens = [reply.next_token() for _, reply in running]
            passes.choose(seqs, tokens, [greedy] * len(seqs), {}, left, take)
            running = _running(caches, replies)
        steps = sum(reply.num_steps for reply in replies)
        attended = attended_tokens(runtime, steps)
        scored = attended_tokens(runtime, steps, "scored_tokens")
        built = runtime.current_generation.stats.index_seconds
    runtime.decoder.trim()  # the next policy's prompts are as long
    share = (passes.seconds / len(replies), built / len(replies))
    return [Answer(reply.tokens, attended, scored, *share) for reply in replies]


def _running(caches: Sequence[OffloadedCache], replies: Sequence[Reply]) -> list[tuple[int, Reply]]:
    """Sequences whose answers go on."""
    return [
        (cache.seqs[0], reply)
        for cache, reply in zip(caches, replies, strict=True)
        if not reply.is_done
    ]
