"""What `offload generate` does once its options are known: prompt, model, answer, figures."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from offload.cli.console import stderr
from offload.system.stdlib_text import filler_prompt

if TYPE_CHECKING:
    from offload.policies import Policy
    from offload.runtime.quality import Quality

# Of a model's statistics. Sizes are of all ranks. What the policy keeps in addition to the KV cache
# took index_seconds to build, what a GPU needs before its first steps setup_seconds; neither
# counts as prefill or decode.
_SIZES = ("kv_host_bytes", "kv_device_bytes", "policy_host_bytes")
_OF_RUN = (
    "drafted_tokens",
    "accepted_tokens",
    "index_seconds",
    "setup_seconds",
    "prefill_seconds",
    "prefill_tokens_per_second",
    "decode_tokens_per_second",
)

# One answer, chosen token by token, whatever generation_config.json says: no option asks for else.
_ONE_ANSWER = {
    "num_beams": 1,
    "num_return_sequences": 1,
    "return_dict_in_generate": False,
    "token_healing": False,
    "penalty_alpha": None,
    "dola_layers": None,
    "constraints": None,
    "force_words_ids": None,
}


def check_context(model: str, context_tokens: int) -> None:
    """Refuse a context beyond the model's, before text is sought for it.

    Raises:
        ValueError: names both.
    """
    from transformers import AutoConfig

    from offload.loading.names import resolve_folder
    from offload.models import is_generic
    from offload.models.base import context_limit, stock_context_limit

    config = AutoConfig.from_pretrained(resolve_folder(model), trust_remote_code=False)
    limit_of = stock_context_limit if is_generic(config.to_dict()) else context_limit
    limit, reason = limit_of(config.get_text_config(decoder=True))
    if context_tokens > limit:
        raise ValueError(
            f"--context {context_tokens} exceeds the {limit} tokens of this model ({reason}); "
            "lower --context"
        )


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


def policy_label(name: str, resolved: str) -> str:
    """A policy as it was asked for, with what it came to: "auto (full)"."""
    return name if name == resolved else f"{name} ({resolved})"


class Screen:
    """Shows progress on stderr until the answer starts, then the answer on stdout."""

    def __init__(self, policy: str, context_tokens: int, *, shown: bool) -> None:
        from rich.progress import BarColumn, Progress, TextColumn

        self._shown = shown
        self._policy = policy
        self._read, self._total = 0.0, context_tokens
        columns, console = (TextColumn("{task.description}"), BarColumn()), stderr()
        self._progress = Progress(
            *columns, console=console, transient=True, disable=not console.is_interactive
        )
        self._task = self._progress.add_task(self._description(), total=context_tokens)
        self._started = False

    @property
    def is_untouched(self) -> bool:
        """Nothing was read, and nothing of an answer is shown."""
        return self._read == 0 and not self._started

    def __enter__(self) -> Screen:
        self._start = time.perf_counter()
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()
        if self._shown and self._started:
            print(flush=True)

    def read(self, num_tokens: float) -> None:
        """So many more tokens of the prompt are read."""
        self._read = min(self._read + num_tokens, self._total)
        speed = f", {self._read / (time.perf_counter() - self._start):,.0f} tokens/s"
        self._progress.update(
            self._task, completed=self._read, description=self._description() + speed
        )

    def _description(self) -> str:
        return f"{self._policy}: reading {round(self._read):,} of {self._total:,} tokens"

    def text(self, piece: str) -> None:
        """The next piece of the answer."""
        self._progress.stop()
        if not self._shown:
            return
        if not self._started:
            self._started = True
            stderr().print(f"{self._policy}:", style="dim")
        print(piece, end="", flush=True)


def answer(
    model: Any,
    policy: Policy,
    tokenizer: Any,
    input_ids: Any,
    screen: Screen,
    seed: int | None,
    sampling: dict[str, Any],
) -> dict[str, Any]:
    """Generate with the options `sampling`: the answer, and what it cost.

    Args:
        screen: hears what is read of the prompt, and gets the answer piece by piece.
    """
    import torch
    from transformers import TextStreamer

    class CallbackStreamer(TextStreamer):
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            screen.text(text)

        def on_tokens(self, num_tokens: int) -> None:
            # Each layer reads the prompt in turn: a token is read when it went through all.
            screen.read(num_tokens / num_layers)

    num_layers = model._offload.store.num_layers
    if seed is not None:
        torch.manual_seed(seed)
    input_ids = input_ids.to(model.device)
    streamer: Any = CallbackStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    has_bound = model._offload.config.host_bytes_per_sequence is not None
    cache = model.new_cache() if has_bound else None
    ranks = model._offload.ranks
    one_clock = {} if ranks is None else {"max_time": None}  # ranks have one each: it is refused
    output_ids = model.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        past_key_values=cache,
        streamer=streamer,
        tokenizer=tokenizer,  # which stop_strings of generation_config.json need
        **_ONE_ANSWER,
        **one_clock,
        **sampling,
    )
    new_ids = output_ids[0, input_ids.shape[1] :]
    stats = model.offload_stats()
    sizes = [getattr(stats, name) for name in _SIZES]
    if ranks is not None:
        with ranks.together():
            sizes = ranks.total(*sizes)
    return {
        "policy": policy.name,
        "resolved_policy": model.policy.name,
        "policy_reason": model.policy_reason,
        "policy_options": asdict(policy) | _resolved_cap(policy, model._offload.config.policy),
        "answer": tokenizer.decode(new_ids, skip_special_tokens=True).strip(),
        "context_tokens": input_ids.shape[1],
        "new_tokens": len(new_ids),
        **dict(zip(_SIZES, sizes, strict=True)),
        **{name: getattr(stats, name) for name in _OF_RUN},
        "condense_by": None if cache is None else _condensed_by(model),
        "condensed": None if cache is None else asdict(cache.tokens[0]),
        "quality": quality_row(model.quality()) if model._offload.config.quality_probe else None,
    }


def _resolved_cap(policy: Policy, loaded: Policy) -> dict[str, Any]:
    """What a cap of a step came to in tokens when the model was loaded, with the cap itself."""
    from offload.policies import HardKV

    has_cap = isinstance(policy, HardKV) and policy.step_cap
    return {"max_tokens": loaded.budget_tokens} if has_cap else {}


def quality_row(quality: Quality) -> dict[str, Any]:
    """As JSON can hold it: arrays as lists, null where nothing is known."""
    row = asdict(quality)
    for name, value in row.items():
        if isinstance(value, np.ndarray):
            known = value.astype(object)
            known[np.isnan(value)] = None
            row[name] = known.tolist()
    return row


def _condensed_by(model: Any) -> str:
    """What `condense_by` came to when the model was loaded."""
    return "reconstruction" if model._offload.store.per_head_pages else "attention"


def condensed_line(row: dict[str, Any], condense_by: str) -> str:
    """What became of a sequence with a bound, in words."""
    if row["seen"] == row["kept"]:
        return f"all {row['seen']:,} tokens are in the cache as they were"
    if condense_by == "reconstruction":
        return (
            f"of {row['seen']:,} tokens a KV head has {row['kept']:,} as they were, on average of "
            f"all heads, and the others are dropped"
        )
    merged = f"condensed into {row['condensed']:,}" if row["condensed"] else "dropped"
    return (
        f"of {row['seen']:,} tokens {row['kept']:,} are in the cache as they were, "
        f"{row['seen'] - row['kept']:,} {merged}"
    )


def quality_line(row: dict[str, Any]) -> str:
    """What a `quality_row` says, in words."""
    if not row["selecting_units"]:
        return "attended to all tokens" if row["exact_units"] else "decoded nothing by itself"
    kept, worst = row["mass_kept"], row["worst_head"]
    if worst is None:
        return "none of its selections was probed; decode more tokens or raise --quality-probe"
    words = (
        f"{_percent(kept['mean'])} % of the attention mass kept ({row['confidence']:.0%} sure: "
        f"{_percent(kept['low'])} to {_percent(kept['high'])}; {row['probes']:,} probes)"
    )
    of_worst = worst["mass_kept"]
    return (
        f"{words}; worst head: layer {worst['layer_idx']}, KV head {worst['kv_head']} with "
        f"{_percent(of_worst['mean'])} (at most {_percent(of_worst['high'])})"
    )


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"
