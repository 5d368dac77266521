"""Answers as OpenAI's JSON: chat and completions."""

from __future__ import annotations

import codecs
import json
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from offload.engine.sampler import Chosen
from offload.serve.answers import Answers, Choice
from offload.serve.chat import Texts
from offload.serve.errors import ApiError
from offload.serve.protocol import ChatRequest, CompletionRequest, Sampled
from offload.serve.request_log import current
from offload.serve.tools import CallReader, ForcedCall

_LEAST_LOGPROB = -9999.0  # JSON has no -inf
_Utf8 = codecs.getincrementaldecoder("utf-8")


class Format:
    """What all objects of one answer share.

    Args:
        n: choices of each prompt.
    """

    kind, chunk_kind, prefix = "", "", ""

    def __init__(self, request: Sampled, model: str, texts: Texts) -> None:
        self.request, self.texts, self._n = request, texts, request.n
        self._head = {
            "id": f"{self.prefix}-{current().request_id}",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """The answer in one piece."""
        made = [
            {"index": c.index, **self.content(c), "finish_reason": self.finish_reason(c)}
            for c in choices
        ]
        return {**self._head, "object": self.kind, "choices": made, "usage": self.usage(choices)}

    def chunk(self, choices: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        """A part of a streamed answer."""
        return {**self._head, "object": self.chunk_kind, "choices": choices, **fields}

    async def events(
        self, answers: Answers, choices: Sequence[Choice]
    ) -> AsyncIterator[dict[str, str]]:
        """The answer as server-sent events, while it comes."""
        options, request = self.request.stream_options, self.request
        has_usage = options is not None and options.include_usage
        continuous = options is not None and options.continuous_usage_stats

        def chunk(choice: Choice, content: dict[str, Any]) -> dict[str, str]:
            made = {"index": choice.index, **content, "finish_reason": self.finish_reason(choice)}
            usage = {"usage": self.usage(choices) if continuous else None}
            return event(self.chunk([made], **(usage if has_usage or continuous else {})))

        for choice in choices:
            first = self.first(choice)
            if first is not None:
                yield chunk(choice, first)
        try:
            async for index, output in answers:
                choice = choices[index]
                read = choice.num_read
                text, tokens = choice.take(output)
                if request.return_progress and choice.num_read > read:
                    yield event(self.chunk([], prompt_progress=_prompt_progress(choice)))
                if text or choice.finish_reason or (tokens and request.num_logprobs is not None):
                    yield chunk(choice, self.delta(choice, text, tokens))
        except ApiError as error:
            yield event(error.body)
        else:
            if has_usage:
                yield event(self.chunk([], usage=self.usage(choices)))
        yield {"data": "[DONE]"}

    def usage(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """A prompt counts once, however many choices are its."""
        firsts = choices[:: self._n]
        prompt, answer = (
            sum(c.num_prompt_tokens for c in firsts),
            sum(c.num_tokens for c in choices),
        )
        return {
            "prompt_tokens": prompt,
            "completion_tokens": answer,
            "total_tokens": prompt + answer,
            "prompt_tokens_details": {"cached_tokens": sum(c.num_cached for c in firsts)},
        }

    def first(self, choice: Choice) -> dict[str, Any] | None:
        """The fields of a choice's first chunk; None if there is nothing to say."""
        raise NotImplementedError

    def content(self, choice: Choice) -> dict[str, Any]:
        """The fields of a whole choice."""
        raise NotImplementedError

    def delta(self, choice: Choice, text: str, tokens: Sequence[Chosen]) -> dict[str, Any]:
        """What is new of a choice."""
        raise NotImplementedError

    def finish_reason(self, choice: Choice) -> str | None:
        """As OpenAI names it, after `content` or `delta`."""
        return choice.finish_reason

    def token_text(self, token: int) -> str:
        """Half characters are replacement characters here."""
        return self.texts.token_bytes(token).decode(errors="replace")


class Chat(Format):
    """The format of /v1/chat/completions."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"
    request: ChatRequest

    def __init__(self, request: ChatRequest, model: str, texts: Texts) -> None:
        super().__init__(request, model, texts)
        self._readers: dict[int, CallReader] = {}  # by choice

    def first(self, choice: Choice) -> dict[str, Any]:
        """The role, once."""
        return {"delta": {"role": "assistant", "content": ""}, "logprobs": None}

    def content(self, choice: Choice) -> dict[str, Any]:
        """A message."""
        text, _ = self._read(choice, choice.text)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        calls = self._reader(choice).calls
        if calls:
            message |= {"content": text or None, "tool_calls": calls}
        return {"message": message, "logprobs": self._logprobs(choice.shown)}

    def delta(self, choice: Choice, text: str, tokens: Sequence[Chosen]) -> dict[str, Any]:
        """A part of it."""
        text, calls = self._read(choice, text)
        delta: dict[str, Any] = {"content": text} if text else {}
        if calls:
            delta["tool_calls"] = calls
        return {"delta": delta, "logprobs": self._logprobs(tokens)}

    def finish_reason(self, choice: Choice) -> str | None:
        """Calls are a reason of their own."""
        if choice.finish_reason == "stop" and self._reader(choice).calls:
            return "tool_calls"
        return choice.finish_reason

    def _reader(self, choice: Choice) -> CallReader:
        if choice.index not in self._readers:
            self._readers[choice.index] = (
                ForcedCall() if self.request.forced_tools else self.request.call_blocks()
            )
        return self._readers[choice.index]

    def _read(self, choice: Choice, text: str) -> tuple[str, list[dict[str, Any]]]:
        if not self.request.usable_tools:
            return text, []
        return self._reader(choice).take(text, choice.finish_reason)

    def _logprobs(self, tokens: Sequence[Chosen]) -> dict[str, Any] | None:
        if self.request.num_logprobs is None:
            return None
        content = [
            self._entry(chosen.token, chosen.logprob)
            | {"top_logprobs": [self._entry(*likely) for likely in chosen.likeliest]}
            for chosen in tokens
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float | None) -> dict[str, Any]:
        data = self.texts.token_bytes(token)
        return {
            "token": data.decode(errors="replace"),
            "logprob": _finite(logprob),
            "bytes": [*data],
        }


class Completion(Format):
    """The format of /v1/completions.

    Args:
        prompts: token ids, and their text.
    """

    kind, chunk_kind, prefix = "text_completion", "text_completion", "cmpl"
    request: CompletionRequest

    def __init__(
        self,
        request: CompletionRequest,
        model: str,
        texts: Texts,
        prompts: Sequence[tuple[list[int], str]],
    ) -> None:
        super().__init__(request, model, texts)
        self._prompts = prompts
        # In the text, by choice, and what has come of a character there.
        self._offsets: dict[int, tuple[int, codecs.IncrementalDecoder]] = {}

    def first(self, choice: Choice) -> dict[str, Any] | None:
        """The prompt, where it is echoed. With logprobs it has to be read first: see `delta`."""
        if not self.request.echo or self.request.num_logprobs is not None:
            return None
        return {"text": self._prompt(choice)[1], "logprobs": None}

    def content(self, choice: Choice) -> dict[str, Any]:
        """Text."""
        return self.delta(choice, choice.text, choice.shown, is_first=True)

    def delta(
        self,
        choice: Choice,
        text: str,
        tokens: Sequence[Chosen],
        *,
        is_first: bool = False,
    ) -> dict[str, Any]:
        """A part of it."""
        wants = self.request.num_logprobs is not None
        scored: list[Chosen] = [*tokens]
        is_first = is_first or (wants and choice.index not in self._offsets)
        if self.request.echo and is_first:
            ids, of_prompt = self._prompt(choice)
            text, scored = of_prompt + text, [Chosen(ids[0]), *choice.prompt_scores, *scored]
        return {"text": text, "logprobs": self._logprobs(choice.index, scored) if wants else None}

    def _key(self, token: int) -> str:
        """Halves of characters differ, as OpenAI spells them."""
        data = self.texts.token_bytes(token)
        name = data.decode(errors="replace")
        return "bytes:" + str(data)[2:-1] if "\ufffd" in name else name

    def _prompt(self, choice: Choice) -> tuple[list[int], str]:
        return self._prompts[choice.index // self._n]

    def _logprobs(self, index: int, tokens: Sequence[Chosen]) -> dict[str, Any]:
        names = [self.token_text(chosen.token) for chosen in tokens]
        offsets, (at, decoder) = [], self._offsets.get(index, (0, _Utf8("replace")))
        for chosen in tokens:
            offsets.append(at)
            at += len(decoder.decode(self.texts.token_bytes(chosen.token)))
        self._offsets[index] = at, decoder
        return {
            "tokens": names,
            "token_logprobs": [None if c.logprob is None else _finite(c.logprob) for c in tokens],
            "top_logprobs": [
                None
                if c.logprob is None
                else {
                    self._key(token): _finite(value)
                    for token, value in ((c.token, c.logprob), *c.likeliest)
                }
                for c in tokens
            ],
            "text_offset": offsets,
        }


def _finite(logprob: float | None) -> float:
    return _LEAST_LOGPROB if logprob is None else max(logprob, _LEAST_LOGPROB)


def _prompt_progress(choice: Choice) -> dict[str, int]:
    return {
        "index": choice.index,
        "total": choice.num_prompt_tokens,
        "cache": choice.num_cached,
        "processed": choice.num_read,
    }


def event(data: dict[str, Any]) -> dict[str, str]:
    """As sse_starlette sends it."""
    return {"data": json.dumps(data, ensure_ascii=False)}
