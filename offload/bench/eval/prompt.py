"""From a sample to the tokens that a model reads, as lm-eval makes them."""

from __future__ import annotations

import sys
from typing import Any

from offload.bench.eval.sample import CountPrompt, CountTokens, Sample


def uses_chat_template(tokenizer: Any, wanted: bool | None) -> bool:
    """Whether to use the tokenizer's chat template: `wanted`, or None if there is one.

    Raises:
        ValueError: there is none, and it is wanted.
    """
    has_one = bool(tokenizer.chat_template)
    if wanted and not has_one:
        raise ValueError("this tokenizer has no chat template; use --no-chat-template")
    return has_one if wanted is None else wanted


def prompt_text(sample: Sample, tokenizer: Any, *, chat: bool) -> str:
    """The prompt with the beginning of the answer, which the model continues."""
    if not chat:
        return sample.text + sample.delimiter + sample.answer_prefix
    turns = [
        {"role": "user", "content": sample.text},
        {"role": "assistant", "content": sample.answer_prefix},
    ]
    text: str = tokenizer.apply_chat_template(
        turns, tokenize=False, add_generation_prompt=False, continue_final_message=True
    )
    return text


def prompt_tokens(
    text: str, tokenizer: Any, max_tokens: int = sys.maxsize
) -> tuple[list[int], int]:
    """The last `max_tokens` of a prompt's tokens, and how many it has."""
    has_bos = tokenizer.bos_token is not None and text.startswith(tokenizer.bos_token)
    tokens: list[int] = tokenizer(text, add_special_tokens=not has_bos, verbose=False)["input_ids"]
    return tokens[-max_tokens:], len(tokens)


def text_counter(tokenizer: Any) -> CountTokens:
    """Counts a text's tokens, as lm-eval sizes its prompts: without a chat template's."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:  # other threads go on meanwhile, and no lists are made

        def count(text: str) -> int:
            return len(backend.encode_batch_fast([text])[0])

        return count
    return lambda text: len(tokenizer(text, verbose=False)["input_ids"])


def prompt_counter(tokenizer: Any, *, chat: bool) -> CountPrompt:
    """Counts what the model reads of a sample: the template and the answer's beginning, too."""

    def count(sample: Sample) -> int:
        return prompt_tokens(prompt_text(sample, tokenizer, chat=chat), tokenizer)[1]

    return count
