"""What `offload generate` does once its options are known: prompt, model, answer, figures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from offload.cli.options import Scalar
from offload.policies import Policy
from offload.system.stdlib_text import filler_prompt


@dataclass(frozen=True)
class ModelChoice:
    """Which model to load, and how; the policy is chosen per run."""

    name: str
    dtype: str
    device: str
    backend: str | None
    max_memory: dict[int | str, int | str] | None
    num_threads: int | None
    tensor_parallel_size: int = 1
    placement: Path | None = None


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen; a temperature of 0 is greedy decoding."""

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None

    def generate_options(self) -> dict[str, Any]:
        """Keyword arguments of `generate()`."""
        if self.temperature == 0.0:
            return {"max_new_tokens": self.max_new_tokens, "do_sample": False}
        return {
            "max_new_tokens": self.max_new_tokens,
            "do_sample": True,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
        }


@dataclass(frozen=True)
class Run:
    """One answer and what it cost. Rates are tokens per second, sizes bytes of all ranks.

    The policy's own state beside the KV cache took policy_host_bytes and index_seconds to build,
    what a GPU needs before its first steps setup_seconds; neither counts as prefill or decode.
    """

    policy: str
    policy_options: dict[str, Scalar]
    answer: str
    context_tokens: int
    new_tokens: int
    kv_host_bytes: int
    kv_device_bytes: int
    policy_host_bytes: int
    index_seconds: float
    setup_seconds: float
    prefill_seconds: float
    prefill_tokens_per_second: float
    decode_tokens_per_second: float


def prompt_tokens(
    tokenizer: Any,
    prompt: str,
    *,
    chat: bool | None,
    context_tokens: int | None,
    needle: str | None,
) -> Any:
    """The token ids [1, num_tokens] of what the model reads.

    Args:
        chat: wrap the prompt in the tokenizer's chat template; None does if there is one.
        context_tokens: put the prompt behind so many tokens of text, the template included.
        needle: a sentence to hide in the middle of that text.

    Raises:
        ValueError: no chat template, an empty prompt, or a context too short for any text.
    """
    if chat and not tokenizer.chat_template:
        raise ValueError("this tokenizer has no chat template; use --no-chat")
    use_chat = bool(tokenizer.chat_template) if chat is None else chat

    def count_tokens(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False)["input_ids"])

    def encode(message: str) -> Any:
        if use_chat:
            turns = [{"role": "user", "content": message}]
            message = tokenizer.apply_chat_template(
                turns, add_generation_prompt=True, tokenize=False
            )
        encoded = tokenizer(message, add_special_tokens=not use_chat, return_tensors="pt")
        return encoded["input_ids"]

    if context_tokens is not None:
        template_tokens = encode("").shape[1]
        prompt = filler_prompt(
            count_tokens,
            num_tokens=context_tokens - template_tokens,
            question=prompt,
            needle=needle,
        )
    if not prompt.strip():
        raise ValueError("the prompt is empty")
    return encode(prompt)


def load(choice: ModelChoice, policy: Policy) -> Any:
    """The model under a policy."""
    from offload.runtime.model import OffloadedModel

    return OffloadedModel.from_pretrained(
        choice.name,
        policy=policy,
        dtype=choice.dtype,
        device=choice.device,
        backend=choice.backend,
        max_memory=choice.max_memory,
        num_threads=choice.num_threads,
        tensor_parallel_size=choice.tensor_parallel_size,
        placement=choice.placement,
    )


def answer(
    model: Any,
    policy: Policy,
    sampling: Sampling,
    tokenizer: Any,
    input_ids: Any,
    on_text: Callable[[str], None],
) -> Run:
    """Generate; `on_text` gets the answer piece by piece."""
    import torch

    if sampling.seed is not None:
        torch.manual_seed(sampling.seed)
    input_ids = input_ids.to(model.device)
    output_ids = model.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        streamer=_streamer(tokenizer, on_text),
        **sampling.generate_options(),
    )
    new_ids = output_ids[0, input_ids.shape[1] :]
    stats = model.offload_stats()
    sizes = [stats.kv_host_bytes, stats.kv_device_bytes, stats.policy_host_bytes]
    ranks = model._offload.ranks
    if ranks is not None:
        with ranks.together():
            sizes = ranks.total(*sizes)
    return Run(
        policy=policy.name,
        policy_options=asdict(policy),
        answer=tokenizer.decode(new_ids, skip_special_tokens=True).strip(),
        context_tokens=input_ids.shape[1],
        new_tokens=len(new_ids),
        kv_host_bytes=sizes[0],
        kv_device_bytes=sizes[1],
        policy_host_bytes=sizes[2],
        index_seconds=stats.index_seconds,
        setup_seconds=stats.setup_seconds,
        prefill_seconds=stats.prefill_seconds,
        prefill_tokens_per_second=stats.prefill_tokens_per_second,
        decode_tokens_per_second=stats.decode_tokens_per_second,
    )


def _streamer(tokenizer: Any, on_text: Callable[[str], None]) -> Any:
    from transformers import TextStreamer

    class CallbackStreamer(TextStreamer):
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            on_text(text)

    return CallbackStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
