"""The tokenizer in a GGUF file, with the ids that its model family's own tokenizer gives.

`tokenizer.ggml.pre` names how text is cut before pieces are merged. The splits here are those in
the families' own `tokenizer.json`, as tokenizers runs them; a value that is not known is refused,
since another family's split gives other tokens without a word.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from offload.loading.gguf_header import GgufHeader

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_logger = logging.getLogger(__name__)

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # of tokenizer.ggml.token_type
_CHAT_TEMPLATE = "tokenizer.chat_template"
_TEMPLATE_NAME = re.compile(r"[\w-]+", re.ASCII)
_SPACE = "\u2581"  # SentencePiece writes a space so
_GEMMA4_ENDS = ("<turn|>", "<|tool_response>")
_NOBODY_SAYS = "offload-answer"  # stands for an answer in a chat

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_SEED_CODER = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}"
    r"| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
# Letters with case, of the Unicode version that DeepSeek's tokenizer was made with.
_CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1"
    "\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd"
    "\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d"
    "\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4"
    "\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec"
    "\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b"
    "\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787"
    "\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2"
    "\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_PUNCTUATION = "!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002"


@dataclass(frozen=True)
class _Split:
    """How text is cut before pieces are merged.

    Attributes:
        patterns: regular expressions of tokenizers, applied one after the other.
        digits: every digit is a piece of its own, cut after the patterns.
        gpt2: GPT-2's own expression comes last.
        normalizes: text is brought to Unicode's form NFC first.
        ignore_merges: a piece that is a token is that token, whatever the merges.
        adds_bos: what a file that does not say so means.
    """

    patterns: tuple[str, ...] = ()
    digits: bool = False
    gpt2: bool = False
    normalizes: bool = False
    ignore_merges: bool = False
    adds_bos: bool = False


_OF_LLAMA3 = _Split((_LLAMA3,), ignore_merges=True, adds_bos=True)
_OF_QWEN2 = _Split((_QWEN2,), normalizes=True)
_OF_GPT2 = _Split(gpt2=True)
_OF_SMOLLM = _Split(digits=True, gpt2=True)
_SPLITS = {
    "deepseek-coder": _Split((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK), digits=True),
    "deepseek-llm": _Split(
        (r"[\r\n]", rf"\s?[{_CASED}]+", rf"\s?[{_PUNCTUATION}]+", r"\s+$", _CJK), digits=True
    ),
    "deepseek-r1-qwen": _OF_QWEN2,
    "falcon3": _OF_LLAMA3,
    "gpt-2": _OF_GPT2,
    "gpt-4o": _Split((_GPT4O,)),
    "gpt2": _OF_GPT2,
    "lfm2": _OF_LLAMA3,
    "llama-bpe": _OF_LLAMA3,
    "llama-v3": _OF_LLAMA3,
    "llama3": _OF_LLAMA3,
    "megrez": _OF_QWEN2,
    "midm-2.0": _OF_LLAMA3,
    "minerva-7b": _OF_SMOLLM,
    "pixtral": _OF_LLAMA3,
    "qwen2": _OF_QWEN2,
    "qwen35": _Split((_QWEN35,), normalizes=True),
    "seed-coder": _Split((_SEED_CODER,)),
    "smaug-bpe": _Split((_LLAMA3,)),
    "smollm": _OF_SMOLLM,
    "stablelm2": _OF_QWEN2,
    "starcoder": _OF_SMOLLM,
    "tekken": _Split((_TEKKEN,), ignore_merges=True, adds_bos=True),
}


def gguf_tokenizer(header: GgufHeader) -> Any:
    """The transformers tokenizer of a GGUF file.

    Raises:
        ValueError: metadata that is missing or makes no sense, a kind of tokenizer or a
            `tokenizer.ggml.pre` that is not supported: names the file and what is.
    """
    try:
        return _tokenizer(header)
    except Exception as error:  # tokenizers raises this class, whatever is wrong
        what = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
        raise ValueError(f"{header.path} has a damaged or unknown tokenizer: {what}") from error


def end_tokens(header: GgufHeader, tokenizer: Any) -> list[int]:
    """Ids that end an answer: eos, then eot, eom and what the chat template ends a turn with."""
    metadata = header.metadata
    named = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    ends = [*named, _end_of_turn(tokenizer)]
    if metadata.get("tokenizer.ggml.model") == "gemma4":  # files name one of its three
        ids = _ids(metadata["tokenizer.ggml.tokens"])
        ends += [ids.get(token) for token in _GEMMA4_ENDS]
    return list(dict.fromkeys(token for token in ends if token is not None))


def _tokenizer(header: GgufHeader) -> Any:
    from transformers import PreTrainedTokenizerFast

    metadata = header.metadata
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list):
        raise ValueError("tokenizer.ggml.tokens must be a list of strings")
    kinds = np.asarray(metadata.get("tokenizer.ggml.token_type", [_NORMAL] * len(tokens)))
    if len(kinds) != len(tokens):
        raise ValueError(f"tokenizer.ggml.token_type has {len(kinds)} of {len(tokens)} tokens")
    model = metadata.get("tokenizer.ggml.model")
    if model == "gpt2":
        made, adds_bos = _byte_level(metadata, tokens)
    elif model == "llama":
        made, adds_bos = _sentencepiece(metadata, tokens, kinds)
    elif model == "gemma4":
        made, adds_bos = _gemma4(metadata, tokens), False
        # Files say that it does; the family's own does not, whose chat template writes it.
        metadata = metadata | {"tokenizer.ggml.add_bos_token": False}
    else:
        raise ValueError(
            f"tokenizer.ggml.model={model!r} is not supported; available: gemma4, gpt2, llama"
        )
    special: dict[str, str] = {}
    for name, key in {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}.items():
        token = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token is not None:
            if not (type(token) is int and 0 <= token < len(tokens)):
                raise ValueError(
                    f"tokenizer.ggml.{key}_token_id={token!r} is none of its {len(tokens)} tokens"
                )
            special[f"{name}_token"] = tokens[token]
    _add_tokens(made, tokens, kinds, special.values())
    _add_ends(made, metadata, tokens, adds_bos=adds_bos)
    templates = _chat_templates(metadata)
    tokenizer_class: Any = PreTrainedTokenizerFast
    return tokenizer_class(
        tokenizer_object=made,
        clean_up_tokenization_spaces=False,
        padding_side="left",
        **({} if templates is None else {"chat_template": templates}),
        **special,
    )


def _chat_templates(metadata: dict[str, Any]) -> str | dict[str, str] | None:
    """The chat template; templates by name, as transformers has them, where there are others."""
    found = {}
    for key, template in metadata.items():
        if key != _CHAT_TEMPLATE and not key.startswith(f"{_CHAT_TEMPLATE}."):
            continue
        name = key.removeprefix(_CHAT_TEMPLATE).removeprefix(".") or "default"
        if not isinstance(template, str):
            raise ValueError(f"{key} must be a string, got {template!r:.60}")
        if not _TEMPLATE_NAME.fullmatch(name):  # it becomes a file's
            raise ValueError(
                f"{key!r:.60} names a chat template otherwise than by letters and digits"
            )
        found[name] = template
    return found if found.keys() - {"default"} else found.get("default")


def _byte_level(metadata: dict[str, Any], tokens: list[str]) -> tuple[Tokenizer, bool]:
    """Byte-level BPE, and whether it starts texts with BOS where the file does not say."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pre = metadata.get("tokenizer.ggml.pre")
    if pre is None:
        _logger.warning(
            "the GGUF file has no tokenizer.ggml.pre, so text is split as GPT-2 does, which may "
            "not be the model's way; a newer conversion has it"
        )
    split = _OF_GPT2 if pre is None else _SPLITS.get(pre)
    if split is None:
        raise ValueError(
            f"tokenizer.ggml.pre={pre!r} is not supported; available: {', '.join(sorted(_SPLITS))}"
        )
    made = Tokenizer(
        models.BPE(vocab=_ids(tokens), merges=_merges(metadata), ignore_merges=split.ignore_merges)
    )
    if split.normalizes:
        made.normalizer = normalizers.NFC()
    steps: list[Any] = [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in split.patterns
    ]
    if split.digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split.gpt2))
    made.pre_tokenizer = pre_tokenizers.Sequence(steps)
    made.decoder = decoders.ByteLevel()
    return made, split.adds_bos


def _gemma4(metadata: dict[str, Any], tokens: list[str]) -> Tokenizer:
    """BPE of characters with the merges in the file; what is no token becomes bytes."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    made = Tokenizer(
        models.BPE(
            vocab=_ids(tokens),
            merges=_merges(metadata),
            unk_token=tokens[metadata.get("tokenizer.ggml.unknown_token_id", 3)],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    made.normalizer = normalizers.Replace(" ", _SPACE)
    made.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return made


def _merges(metadata: dict[str, Any]) -> list[Any]:
    merges = metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list):
        raise ValueError("tokenizer.ggml.merges must be a list of strings")
    return [tuple(merge.split(" ", 1)) for merge in merges]


def _sentencepiece(
    metadata: dict[str, Any], tokens: list[str], kinds: Any
) -> tuple[Tokenizer, bool]:
    """SentencePiece's BPE: of two neighbours those first whose piece has the highest score."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        raise ValueError(f"tokenizer.ggml.scores must be a list of {len(tokens)} numbers")
    ids = _ids(tokens)
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    pieces = {
        token: (-float(scores[i]), i)
        for token, i in ids.items()
        if kinds[i] == _NORMAL and i != unknown
    }
    pairs = [
        (rank, token[:i], token[i:])
        for token, rank in pieces.items()
        for i in range(1, len(token))
        if token[:i] in pieces and token[i:] in pieces
    ]
    pairs.sort(key=lambda pair: (pair[0], len(pair[1])))
    made = Tokenizer(
        models.BPE(
            vocab=ids,
            merges=[(left, right) for _, left, right in pairs],
            unk_token=tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    has_prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    # A normalizer sees each part between special tokens, a pre-tokenizer only the first.
    prefix = [normalizers.Prepend(_SPACE)] if has_prefix else []
    made.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", _SPACE)])
    made.decoder = decoders.Sequence(
        [
            decoders.Replace(_SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *([decoders.Strip(" ", 1, 0)] if has_prefix else []),
        ]
    )
    return made, True


def _ids(tokens: list[str]) -> dict[str, int]:
    return {token: i for i, token in enumerate(tokens)}


def _add_tokens(made: Tokenizer, tokens: list[str], kinds: Any, special: Iterable[str]) -> None:
    """Control and user-defined tokens are found whole in a text, under the ids that they have."""
    from tokenizers import AddedToken

    named = set(special)
    for kind, is_special in ((_CONTROL, True), (_USER_DEFINED, False)):
        of_kind = (tokens[i] for i in np.flatnonzero(kinds == kind))
        added = [
            AddedToken(token, normalized=False, special=is_special or token in named)
            for token in of_kind
            if token
        ]
        add = made.add_special_tokens if is_special else made.add_tokens
        add(added)


def _add_ends(
    made: Tokenizer, metadata: dict[str, Any], tokens: list[str], *, adds_bos: bool
) -> None:
    """BOS before and EOS behind a text, where the file or its family has them."""
    from tokenizers import processors

    names: dict[str, tuple[str, int]] = {}
    for name, default in (("bos", adds_bos), ("eos", False)):
        token = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if metadata.get(f"tokenizer.ggml.add_{name}_token", default) and token is not None:
            names[name] = (tokens[token], token)
    if not names:
        return
    first = ["bos"] if "bos" in names else []
    last = ["eos"] if "eos" in names else []
    made.post_processor = processors.TemplateProcessing(
        single=[*first, "$A", *last],
        pair=[*first, "$A", *last, *(f"{x}:1" for x in first), "$B:1", *(f"{x}:1" for x in last)],
        special_tokens=[
            {"id": name, "ids": [i], "tokens": [token]} for name, (token, i) in names.items()
        ],
    )


def _end_of_turn(tokenizer: Any) -> int | None:
    """The special token that the chat template writes behind an answer."""
    if not tokenizer.chat_template:
        return None
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _NOBODY_SAYS}]
    try:
        ids = tokenizer.apply_chat_template(turns, tokenize=True, return_dict=False)
        before = tokenizer.decode(ids[: len(ids)], skip_special_tokens=False)
    except Exception:  # templates are programs of whoever made the file; one may want other turns
        return None
    behind = before.rpartition(_NOBODY_SAYS)[2].lstrip()
    special = {
        added.content: token
        for token, added in tokenizer.added_tokens_decoder.items()
        if added.special
    }
    found = [token for token in special if token and behind.startswith(token)]
    longest = max(found, key=len, default=None)
    if longest is None or longest == tokenizer.bos_token:
        return None
    return int(special[longest])
