"""Text to token ids and back."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError
from transformers.convert_slow_tokenizer import bytes_to_unicode

from offload.serve.errors import ApiError
from offload.serve.protocol import Message
from offload.serve.tools import OPEN, Tool

# What a template may raise where variables or messages have a type that it does not expect.
_OF_TEMPLATES = (
    *(TemplateError, ValueError, TypeError, RecursionError),
    *(ArithmeticError, AttributeError, LookupError),
)


class Texts:
    """A tokenizer for many threads.

    Args:
        tokenizer: a fast one of transformers.
        vocab_size: of the model.
        ends: tokens that end an answer.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, ends: Sequence[int]) -> None:
        self.tokenizer, self._vocab_size = tokenizer, vocab_size
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self.special = {*tokenizer.all_special_ids, *ends}
        decoder = json.loads(self._backend.to_str())["decoder"]
        is_byte_level = "ByteLevel" in json.dumps(decoder)
        pairs: dict[int, str] = bytes_to_unicode()  # type: ignore[no-untyped-call]
        self._byte_of = {c: b for b, c in pairs.items()} if is_byte_level else {}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids; other threads run meanwhile.

        Raises:
            ApiError: half of a surrogate pair, which JSON can have.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ApiError(400, f"the prompt is no text: {error.reason}") from error
        (encoded,) = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)
        return list(encoded.ids)

    def decode(
        self, tokens: Sequence[int], *, skip_special_tokens: bool = False, field: str = "tokens"
    ) -> str:
        """The text of ids.

        Args:
            field: of the request, which the ids are from.

        Raises:
            ApiError: an id outside the vocabulary.
        """
        for token in tokens:
            if not 0 <= token < self._vocab_size:
                message = f"{field}: id {token} is outside the vocabulary of {self._vocab_size}"
                raise ApiError(400, message, param=field)
        return str(self._backend.decode(list(tokens), skip_special_tokens=skip_special_tokens))

    def token_bytes(self, token: int) -> bytes:
        """What one token adds to the text; of special ones their name."""
        name = self._backend.id_to_token(token)
        if name is None:  # of a vocabulary that is padded
            return b""
        if all(c in self._byte_of for c in name) and token not in self.special:
            return bytes(self._byte_of[c] for c in name)
        if re.fullmatch("<0x[0-9A-F]{2}>", name):
            return bytes([int(name[3:5], 16)])
        return str(name.replace("\u2581", " ")).encode()

    def chat_ids(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        reads_calls: bool = False,
        field: str = "messages",
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """By the chat template; a last message of the assistant is continued.

        Args:
            reads_calls: the model must write calls of tools in a way that is known here.
            field: of the request, which the messages are from.
            template_kwargs: further variables of the template.

        Raises:
            ApiError: there is no template, or it refuses the messages, or it cannot tell of tools.
        """
        if not self.tokenizer.chat_template:
            raise ApiError(400, "this model has no chat template; use /v1/completions")
        plain = [tool.model_dump(exclude={"function": {"strict"}}) for tool in tools]
        variables = dict(template_kwargs or {})
        text = self._rendered(messages, plain, field, variables)
        if plain:
            if text == self._rendered(messages, [], field, variables):
                raise ApiError(400, "tools: the chat template ignores them", param="tools")
            if reads_calls and OPEN not in self.tokenizer.get_chat_template(tools=plain):
                raise ApiError(
                    400,
                    f"tool_choice: the chat template has no {OPEN} blocks, and other calls are not "
                    "read; 'required' and a named tool are possible",
                    param="tool_choice",
                )
        return self.encode(text, add_special_tokens=False)

    def _rendered(
        self,
        messages: Sequence[Message],
        tools: list[dict[str, Any]],
        field: str,
        variables: dict[str, Any],
    ) -> str:
        continued = messages[-1].role == "assistant"
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    [_plain(message) for message in messages],
                    tools=tools or None,
                    add_generation_prompt=not continued,
                    continue_final_message=continued,
                    tokenize=False,
                    **variables,
                )
            )
        except _OF_TEMPLATES as error:
            message = f"{field}: the chat template says: {error}"
            logged = f"{field}: the chat template refuses them: {type(error).__name__}"
            raise ApiError(400, message, param=field, logged=logged) from error


def _plain(message: Message) -> dict[str, Any]:
    """As templates take it: content is a string, of a message that only calls tools, too."""
    content = message.content or ""
    if isinstance(content, list):
        content = "\n".join(part.text for part in content)
    plain = {"role": message.role, "content": content} | (message.model_extra or {})
    if message.tool_calls:
        plain["tool_calls"] = [call.plain() for call in message.tool_calls]
    return plain
