"""Text to token ids and back."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jinja2 import TemplateError
from transformers.convert_slow_tokenizer import bytes_to_unicode

from offload.serve import conversation
from offload.serve.conversation import Path, marked
from offload.serve.errors import ApiError
from offload.serve.protocol import Message
from offload.serve.tools import OPEN, Tool

# What a template may raise where variables or messages have a type that it does not expect.
_OF_TEMPLATES = (
    *(TemplateError, ValueError, TypeError, RecursionError),
    *(ArithmeticError, AttributeError, LookupError),
)
# A template that has this string knows the role.
_DEVELOPER = re.compile(r"""(["'])developer\1""")
_MOST_TRIES = 256  # each renders the conversation


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
            ApiError: there is no template, or it refuses the messages, or ignores a text of theirs
                or of the tools, or calls could not be read.
        """
        if not self.tokenizer.chat_template:
            raise ApiError(400, "this model has no chat template; use /v1/completions")
        plain = [tool.given for tool in tools]
        template = self.tokenizer.get_chat_template(tools=plain or None)
        has_developer = _DEVELOPER.search(template) is not None
        said = conversation.of_messages(messages, field, has_developer=has_developer)
        given = {"messages": said, "tools": plain}
        variables = dict(template_kwargs or {})
        try:
            text = self._rendered(given, variables)
        except _OF_TEMPLATES as error:
            message = f"{field}: the chat template says: {error}"
            logged = f"{field}: the chat template refuses them: {type(error).__name__}"
            raise ApiError(400, message, param=field, logged=logged) from error
        self._check_shown(given, text, field, variables)
        if reads_calls and OPEN not in template:
            raise ApiError(
                400,
                f"tool_choice: the chat template has no {OPEN} blocks, and other calls are not "
                "read; 'required' and a named tool are possible",
                param="tool_choice",
            )
        return self.encode(text, add_special_tokens=False)

    def _rendered(self, given: dict[str, Any], variables: dict[str, Any]) -> str:
        continued = given["messages"][-1]["role"] == "assistant"
        return str(
            self.tokenizer.apply_chat_template(
                given["messages"],
                tools=given["tools"] or None,
                add_generation_prompt=not continued,
                continue_final_message=continued,
                tokenize=False,
                **variables,
            )
        )

    def _check_shown(
        self, given: dict[str, Any], text: str, field: str, variables: dict[str, Any]
    ) -> None:
        """Refuse what changes nothing in the prompt, which is `text`.

        All texts are marked at once. Those whose mark the template drops have another try without
        the others, whose marks may have been why; the first of the rest decides by itself.
        """

        def rendered(paths: Sequence[Path], change: Callable[[Any, int], Any]) -> str | None:
            try:
                return self._rendered(conversation.changed(given, paths, change), variables)
            except _OF_TEMPLATES:
                return None  # it read what was changed

        token = secrets.token_hex(8)
        left = [*conversation.texts(given)]
        for _ in range(_MOST_TRIES):
            if not left:
                return
            told = rendered(left, lambda value, i: marked(value, f"{token}x{i}z")) or ""
            seen = {int(number) for number in re.findall(rf"{token}x(\d+)z", told)}
            missing = [path for i, path in enumerate(left) if i not in seen]
            if len(missing) == len(left):
                first, *missing = missing
                changes: list[Callable[[Any, int], Any]] = [
                    lambda value, _: marked(value, token),
                    lambda value, _: token + value if isinstance(value, str) else None,
                ]
                if all(rendered([first], change) == text for change in changes):
                    raise conversation.ignored(given, first, field)
            left = missing
