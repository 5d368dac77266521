"""Tokens of GGUF files are those of the models' own tokenizers."""

from __future__ import annotations

import io
import itertools
import json
import random
import unicodedata
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import regex
import sentencepiece
from cases.tiny_models import byte_tokenizer, make_tiny_model
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import GemmaTokenizer

from offload import OffloadedModel, load_tokenizer
from offload.loading.embedded_package import embedded_gguf
from offload.loading.gguf_header import GgufHeader, read_gguf_header
from offload.loading.gguf_tokenizer import _SPLITS, end_tokens, gguf_tokenizer

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
PIECES = [
    *(
        "the",
        " The",
        "don't",
        "WE'LL",
        "it's",
        " ",
        "  ",
        "     ",
        "\n",
        "\n\n",
        " \n",
        "\t",
        "\r\n",
    ),
    *(
        "1",
        "23",
        "4567",
        "3.14",
        "x86_64",
        "½",
        "٣٤",
        "Ⅷ",
        "def f(x):",
        "    return",
        "!=",
        "/*",
        "//",
    ),
    *(
        "你好",
        "世界，",
        "日本語",
        "ひらがな",
        "한국어",
        "Привет",
        "Ωμέγα",
        "ñandú",
        "e\u0301",
        "🙂",
        "👩‍💻",
        "…",
    ),
    *(
        "[INST]",
        "http://a.b/c?d=1",
        "'",
        '"',
        "—",
        "。",
        "\u3000",
        "\u00a0",
        "ǅ",
        "ʰ",
        "SQLite",
        "iOS",
    ),
]
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
OTHER = r"[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SHORT = r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]|"
# As other projects that read these files write them, for the package regex.
REFERENCES = {
    "llama-bpe": [SHORT + OTHER % r"\p{N}{1,3}"],
    "qwen2": [SHORT + OTHER % r"\p{N}"],
    "smollm": [r"\p{N}", GPT2],
    "gpt-2": [GPT2],
    "seed-coder": [
        SHORT + r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "deepseek-coder": [
        *(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"),
        r"\p{N}",
    ],
    "deepseek-llm": [
        *(r"[\r\n]", r"\s?(?:(?=[\p{Ll}\p{Lu}\p{Lt}])\P{Han})+"),
        *("\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+", r"\s+$"),
        *("[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}"),
    ],
    "tekken": [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
}


def texts(count: int = 300) -> list[str]:
    draw = random.Random(7)
    return ["".join(draw.choices(PIECES, k=draw.randint(1, 12))) for _ in range(count)]


def header(tokens: list[str], kinds: Any = None, **values: Any) -> GgufHeader:
    kinds = np.ones(len(tokens), np.int32) if kinds is None else np.asarray(kinds)
    metadata = {f"tokenizer.ggml.{name}": value for name, value in values.items()}
    metadata |= {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds}
    return GgufHeader(Path("made.gguf"), {"tokenizer.ggml.model": "gpt2", **metadata}, {})


@lru_cache(maxsize=1)
def merges() -> list[tuple[str, str]]:
    """Trained over whole texts, so that every split shows."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=900, initial_alphabet=ALPHABET, show_progress=False, special_tokens=[]
    )
    made.train_from_iterator(texts(2000), trainer)
    return [tuple(pair) for pair in json.loads(made.to_str())["model"]["merges"]]


def reference(text: str, patterns: list[str], vocab: dict[str, int], *, whole: bool) -> list[int]:
    """Splits by each pattern in turn, then merges pair by pair, lowest rank first."""
    parts = [text]
    for pattern in patterns:
        cut = []
        for part in parts:
            at = 0
            for found in regex.finditer(pattern, part):
                cut += [part[at : found.start()], found.group()]
                at = found.end()
            cut.append(part[at:])
        parts = [part for part in cut if part]
    byte_letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    ranks = {pair: rank for rank, pair in enumerate(merges())}
    ids = []
    for part in parts:
        spelled = "".join(piece for piece, _ in byte_letters.pre_tokenize_str(part))
        symbols = [spelled] if whole and spelled in vocab else list(spelled)
        while True:
            pairs = [(ranks.get(p, 10**9), i) for i, p in enumerate(itertools.pairwise(symbols))]
            rank, i = min(pairs, default=(10**9, 0))
            if rank == 10**9:
                break
            symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]
        ids += [vocab[symbol] for symbol in symbols]
    return ids


@pytest.mark.parametrize("pre", REFERENCES)
def test_every_split(pre: str) -> None:
    tokens = [*ALPHABET, *("".join(pair) for pair in merges())]
    tokens = list(dict.fromkeys(tokens))
    vocab = {token: i for i, token in enumerate(tokens)}
    made = gguf_tokenizer(header(tokens, pre=pre, merges=[" ".join(p) for p in merges()]))
    whole = pre in ("llama-bpe", "tekken")
    for text in texts():
        normal = unicodedata.normalize("NFC", text) if pre == "qwen2" else text
        expected = reference(normal, REFERENCES[pre], vocab, whole=whole)
        assert made(text, add_special_tokens=False).input_ids == expected, text
        assert made.decode(expected) == normal


def test_the_embedded_model() -> None:
    made = gguf_tokenizer(read_gguf_header(embedded_gguf()))
    assert made.tokenize("Steps:\n\n1.") == ["Steps", ":", "ĊĊ", "1", "."]
    assert made("12 a").input_ids == made.convert_tokens_to_ids(["1", "2", "Ġa"])


def test_what_is_not_known_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^made.gguf .*ggml.pre='poro-chat' is not supported; "):
        gguf_tokenizer(header(ALPHABET, pre="poro-chat", merges=[]))
    with pytest.raises(ValueError, match=r"tokenizer.ggml.model='t5' is not supported; available"):
        gguf_tokenizer(header(ALPHABET, model="t5"))
    with pytest.raises(ValueError, match=r"padding_token_id=999 is none of its 256 tokens"):
        gguf_tokenizer(header(ALPHABET, pre="qwen2", merges=[], padding_token_id=999))
    assert set(REFERENCES) < set(_SPLITS)


R1 = [
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<think>",
]
R1_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}"
    "{% else %}<｜Assistant｜>{{ m.content }}<｜end▁of▁sentence｜>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<｜Assistant｜><think>{% endif %}"
)


@pytest.mark.parametrize(
    ("model_type", "pre"), [("llama", "llama-bpe"), ("qwen2", "deepseek-r1-qwen")]
)
def test_special_tokens_that_are_not_ascii(
    model_type: str, pre: str, written: Callable[..., Path]
) -> None:
    """The ids of DeepSeek-R1-Distill's chat are exactly those that the file lists."""
    stock = make_tiny_model(model_type)
    tokens = byte_tokenizer().convert_ids_to_tokens(range(stock.config.vocab_size))
    first = len(tokens) - len(R1)
    tokens[first:] = R1
    metadata = {
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * first + [3, 3, 4, 4, 4],
        "tokenizer.ggml.bos_token_id": first,
        "tokenizer.ggml.eos_token_id": first + 1,
        "tokenizer.ggml.padding_token_id": first + 1,
        "tokenizer.chat_template": R1_TEMPLATE,
    }
    path = written(stock, metadata=metadata)
    made = load_tokenizer(path)
    chat = [{"role": "user", "content": "a"}]
    ids = made.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert ids == [first, first + 2, tokens.index("a"), first + 3, first + 4]
    assert (made.bos_token_id, made.eos_token_id) == (first, first + 1)
    assert made("a<think>").input_ids[-2:] == [tokens.index("a"), first + 4]
    model = OffloadedModel.from_pretrained(path, num_threads=1)
    assert model.generation_config.eos_token_id == first + 1


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "smollm"])
def test_a_converted_tokenizer_is_the_files(
    model_type: str, pre: str, written: Callable[..., Path]
) -> None:
    """Whatever tokenizer other models of the type have."""
    stock = make_tiny_model(model_type)
    metadata = {
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.add_bos_token": 1,
        "tokenizer.ggml.padding_token_id": None,
    }
    path = written(stock, metadata=metadata)
    made, loaded = gguf_tokenizer(read_gguf_header(path)), load_tokenizer(path)
    assert len(loaded) == len(made) == stock.config.vocab_size
    assert (loaded.pad_token, loaded.unk_token) == (None, None)
    for text in [*texts(50), "the 1234 e\u0301", "<eos>a"]:
        ids = made(text).input_ids
        assert loaded(text).input_ids == ids, text
        assert loaded.decode(ids) == made.decode(ids)


def test_several_chat_templates(written: Callable[..., Path]) -> None:
    """With tools transformers takes the one of that name, as from the model's own tokenizer."""
    templates = {"tokenizer.chat_template": "plain", "tokenizer.chat_template.tool_use": "tools"}
    metadata = {**templates, "tokenizer.chat_templates": ["tool_use"]}
    made = load_tokenizer(written(metadata=metadata))
    assert made.chat_template == {"default": "plain", "tool_use": "tools"}
    chat = [{"role": "user", "content": "a"}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert made.apply_chat_template(chat, tokenize=False) == "plain"
    assert made.apply_chat_template(chat, tools=tools, tokenize=False) == "tools"


def test_llama3_adds_bos_and_takes_whole_pieces() -> None:
    tokens = [*ALPHABET, "<|begin_of_text|>", "abc"]
    kinds = [1] * 256 + [3, 1]
    made = gguf_tokenizer(header(tokens, kinds, pre="llama-bpe", merges=[], bos_token_id=256))
    assert made("abc").input_ids == [256, 257]  # no merge leads to it
    values = {"pre": "llama-bpe", "merges": [], "bos_token_id": 256, "add_bos_token": False}
    assert gguf_tokenizer(header(tokens, kinds, **values))("abc").input_ids == [257]
    values = {"pre": "qwen2", "merges": [], "bos_token_id": 256}
    assert gguf_tokenizer(header(tokens, kinds, **values))("abc").input_ids == [
        made.convert_tokens_to_ids(x) for x in "abc"
    ]


def test_what_ends_an_answer() -> None:
    tokens = [*ALPHABET, "<eos>", "<eot>", "<eom>", "<turn>", "<pad>"]
    template = (
        "{% for m in messages %}{{ m.content }}"
        "{% if m.role == 'assistant' %} <turn>\n{% endif %}{% endfor %}"
    )
    ids = {"eos_token_id": 256, "eot_token_id": 257, "eom_token_id": 258}
    described = header(tokens, [1] * 256 + [3] * 5, pre="qwen2", merges=[], **ids)
    described.metadata["tokenizer.chat_template"] = template
    assert end_tokens(described, gguf_tokenizer(described)) == [256, 257, 258, 259]
    described.metadata["tokenizer.chat_template"] = "{{ raise_exception('no') }}"
    assert end_tokens(described, gguf_tokenizer(described)) == [256, 257, 258]


def test_generation_stops_at_every_end(written: Callable[..., Path]) -> None:
    stock = make_tiny_model("llama")
    ends = {"tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.eom_token_id": 9}
    model = OffloadedModel.from_pretrained(written(stock, metadata=ends), num_threads=1)
    expected = [stock.config.eos_token_id, 7, 9]
    assert model.generation_config.eos_token_id == expected
    assert model.config.eos_token_id == expected


@pytest.mark.parametrize("has_prefix", [True, False])
def test_sentencepiece(has_prefix: bool) -> None:
    """As the package that such models are trained with, prefix or not, after special tokens too."""
    trained = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts(3000)),
        model_writer=trained,
        model_type="bpe",
        vocab_size=700,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=has_prefix,
        character_coverage=0.98,
        minloglevel=3,
    )
    own = sentencepiece.SentencePieceProcessor(model_proto=trained.getvalue())
    count = own.get_piece_size()
    kinds = [
        2 if own.is_unknown(i) else 3 if own.is_control(i) else 6 if own.is_byte(i) else 1
        for i in range(count)
    ]
    described = header(
        [own.id_to_piece(i) for i in range(count)],
        kinds,
        model="llama",
        scores=np.array([own.get_score(i) for i in range(count)], np.float32),
        bos_token_id=own.bos_id(),
        eos_token_id=own.eos_id(),
        unknown_token_id=own.unk_id(),
        add_space_prefix=has_prefix,
    )
    made = gguf_tokenizer(described)
    for text in [*texts(), "Hello", " Hello", "   three", "", "a  b"]:
        ids = own.encode(text)
        assert made(text).input_ids == [own.bos_id(), *ids], text
        assert made.decode(ids) == own.decode(ids)
    behind = made("<s>[INST] a", add_special_tokens=False).input_ids
    assert behind == [own.bos_id(), *own.encode("[INST] a")]


def test_gemma4() -> None:
    """As transformers' class, with the three tokens that end an answer."""
    first = ["<pad>", "<eos>", "<bos>", "<unk>", "<|tool_response>", "<turn|>"]
    trained = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    trained.normalizer = normalizers.Replace(" ", "\u2581")
    trainer = trainers.BpeTrainer(
        vocab_size=800,
        special_tokens=first + [f"<0x{byte:02X}>" for byte in range(256)],
        limit_alphabet=90,
        show_progress=False,
    )
    trained.train_from_iterator((text.replace("\n", " ") for text in texts(2000)), trainer)
    merged = [tuple(pair) for pair in json.loads(trained.to_str())["model"]["merges"]]
    vocab = trained.get_vocab()
    tokens = sorted(vocab, key=vocab.__getitem__)
    described = header(
        tokens,
        [3] * 6 + [6] * 256 + [1] * (len(tokens) - 262),
        model="gemma4",
        merges=[" ".join(pair) for pair in merged],
        bos_token_id=2,
        eos_token_id=1,
        unknown_token_id=3,
        add_bos_token=True,
    )
    made = gguf_tokenizer(described)
    own = GemmaTokenizer(vocab=vocab, merges=merged)
    own.add_special_tokens({"additional_special_tokens": first[4:]})
    for text in [*texts(), "a <turn|>\n b", " x  y\n\n"]:
        assert made(text).input_ids == own(text).input_ids
        assert made.decode(made(text).input_ids) == text
    assert end_tokens(described, made) == [1, 5, 4]
