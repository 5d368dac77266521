"""What the text of a token ends with, and how good a place to cut the text is after it.

The levels are those of LycheeCluster (arXiv 2603.08453, Table 4): 1 paragraph breaks, Markdown
fences and rules, closing brackets; 2 sentence ends and single newlines; 3 phrase punctuation;
4 whitespace. They are decided on bytes, from the tokenizer's own strings: every token of the
vocabulary gets a mark of one byte once, and `cut_level` looks at the marks of a few neighbours,
because a delimiter may span tokens (two newline tokens, the bytes of a CJK full stop, `--` + `-`).

Where the table alone would cut a unit in two, the text decides: `.` ends a sentence only before
whitespace (not in `os.path` or `3.14`), closing quotes and line ends stay with what they close,
`->` and `a > b` are no brackets, and a fence that opens a code block belongs to the block.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from offload.selection.compiled import cached_njit

# The kind of a token's end: the low six bits of its mark.
_PARAGRAPH = 1
_NEWLINE = 2
_FENCE = 3
_BRACKET = 4
_SENTENCE = 5  # if whitespace follows
_SENTENCE_SURE = 6  # whatever follows
_PHRASE = 7
_BLANK = 8
_CLOSER = 9  # closing quotes and parentheses: they belong to what they close
_BACKTICK = 10  # one, or two (11): with neighbours they may make a fence
_DASH = 12
_STAR = 14
_E3, _E3_80, _EF, _EF_BC = 16, 17, 18, 19  # the first bytes of a CJK delimiter
_BYTE_80, _BYTE_BC = 20, 21  # a token that is its second byte
_LAST_BYTES = 22  # … its last byte (+ index into _WIDE_LAST)
_LAST_TWO_BYTES = 30  # … its last two bytes (+ index into _WIDE)

_KIND = 0x3F
_STARTS_BLANK = 0x40  # the text begins with whitespace
_WHOLE = 0x80  # the token is nothing but its delimiter

# 。 、 ！ ， ： ； ？ without their first byte, and the level of each.
_WIDE = (b"\x80\x82", b"\x80\x81", b"\xbc\x81", b"\xbc\x8c", b"\xbc\x9a", b"\xbc\x9b", b"\xbc\x9f")
_WIDE_LEVEL = np.array([2, 3, 2, 3, 3, 3, 2], np.int64)
_WIDE_LAST = (b"\x82", b"\x81", b"\x8c", b"\x9a", b"\x9b", b"\x9f")
_AFTER_E3_80 = np.array([2, 3, 0, 0, 0, 0], np.int64)  # the level that a last byte gives
_AFTER_EF_BC = np.array([0, 2, 3, 3, 3, 2], np.int64)

_LEVEL = np.zeros(64, np.int64)
_LEVEL[[_PARAGRAPH, _FENCE, _BRACKET]] = 1
_LEVEL[[_NEWLINE, _SENTENCE, _SENTENCE_SURE]] = 2
_LEVEL[_PHRASE] = 3
_LEVEL[_BLANK] = 4

_KIND_OF = dict.fromkeys("}]", _BRACKET)
_KIND_OF |= dict.fromkeys(".?!", _SENTENCE) | dict.fromkeys("。？！", _SENTENCE_SURE)
_KIND_OF |= dict.fromkeys(",;:，；：、", _PHRASE)
_KIND_OF |= dict.fromkeys("\"')”’»）」』", _CLOSER)
_RUNS = {"`": _BACKTICK, "-": _DASH, "*": _STAR}
_FRAGMENTS = {b"\x80": _BYTE_80, b"\xbc": _BYTE_BC}
_FRAGMENTS |= {last: _LAST_BYTES + i for i, last in enumerate(_WIDE_LAST)}
_FRAGMENTS |= {last: _LAST_TWO_BYTES + i for i, last in enumerate(_WIDE)}
_OPENINGS = ((b"\xe3\x80", _E3_80), (b"\xef\xbc", _EF_BC), (b"\xe3", _E3), (b"\xef", _EF))


def delimiter_classes(tokenizer: Any) -> npt.NDArray[np.uint8] | None:
    """The mark of every token: uint8 [vocab_size, added tokens included].

    Args:
        tokenizer: a transformers tokenizer, byte-level or SentencePiece.

    Returns:
        None if the tokenizer does not tell the strings of its tokens.
    """
    try:
        vocabulary: dict[str, int] = tokenizer.get_vocab()
    except (AttributeError, NotImplementedError):
        return None
    if not vocabulary:
        return None
    added = {str(token) for token in getattr(tokenizer, "added_tokens_encoder", {})}
    byte_level = any("Ġ" in token or "Ċ" in token for token in vocabulary)
    blank = "Ġ" if byte_level else "▁"
    marks = np.zeros(max(vocabulary.values()) + 1, np.uint8)
    for token, index in vocabulary.items():
        word = token.removeprefix(blank)
        if word.isalnum() and word.isascii() and token not in added:
            # As text_mark has it, at once: most tokens are words, and who loads a model waits.
            marks[index] = _STARTS_BLANK if len(word) < len(token) else 0
            continue
        if token in added:
            text = token.encode()
        else:
            text = _bytes_of_byte_level(token) if byte_level else _bytes_of_sentencepiece(token)
        marks[index] = text_mark(text)
    return marks


@cache
def _byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes stand for themselves, the others for U+0100 onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    characters = {chr(byte): byte for byte in printable}
    return characters | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def _bytes_of_byte_level(token: str) -> bytes:
    alphabet = _byte_of_character()
    if all(character in alphabet for character in token):
        return bytes(alphabet[character] for character in token)
    return token.encode()


def _bytes_of_sentencepiece(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes([int(token[3:5], 16)])
    return token.replace("▁", " ").encode()


def text_mark(text: bytes) -> int:
    """The mark of a token with this text."""
    if not text:
        return 0
    if text in _FRAGMENTS:
        return _FRAGMENTS[text] | _WHOLE
    string = text.decode("utf-8", "surrogateescape")
    first = _STARTS_BLANK if string[0].isspace() else 0
    for opening, kind in _OPENINGS:
        if text.endswith(opening):
            return kind | first
    kind, whole = _end_of(string)
    return kind | first | (_WHOLE if whole else 0)


def _end_of(string: str) -> tuple[int, bool]:
    """Kind of the strongest delimiter that the string ends with; whether there is nothing else."""
    core = string.rstrip()
    newlines = string[len(core) :].count("\n")
    blanks = len(core) < len(string)
    kind = _BLANK if not core else 0
    length = 0  # of the trailing run of delimiters
    for position in range(len(core) - 1, -1, -1):
        character = core[position]
        found = _KIND_OF.get(character, 0)
        if character == ">" and _closes_tag(string, position):
            found = _BRACKET
        if found == 0:
            break
        length += 1
        kind = found if kind == 0 else min(kind, found)
    if core and length == 0:
        kind, length = _run_of(core)
    whole = length == len(core)
    if newlines >= 2:
        return _PARAGRAPH, whole
    if newlines == 1:
        return (kind if _LEVEL[kind] == 1 else _NEWLINE), whole
    if blanks:
        if kind == _SENTENCE:
            return _SENTENCE_SURE, whole
        return (kind if _LEVEL[kind] else _BLANK), whole
    return kind, whole and kind != 0


def _closes_tag(string: str, position: int) -> bool:
    """Whether this `>` may close a tag: not in `->`, `=>`, `>>`, `a > b`."""
    return string == ">" or (position > 0 and string[position - 1] not in "-=> \t\n")


def _run_of(core: str) -> tuple[int, int]:
    """Kind and length of a trailing run of fence characters."""
    character = core[-1]
    if character not in _RUNS:
        return 0, 0
    length = len(core) - len(core.rstrip(character))
    return (_FENCE if length >= 3 else _RUNS[character] + length - 1), length


@cached_njit()
def _is_newline(mark: int) -> bool:
    kind = mark & _KIND
    return kind in (_NEWLINE, _PARAGRAPH)


@cached_njit()
def _is_fence(marks: Any, i: int) -> bool:
    """Whether a fence or rule ends with token i, alone or with the tokens before it."""
    kind = marks[i] & _KIND
    if kind == _FENCE:
        return True
    if kind < _BACKTICK or kind > _STAR + 1:
        return False
    character = kind & ~1
    length = 1 + (kind & 1)
    j = i
    while length < 3 and marks[j] & _WHOLE and j > 0:
        j -= 1
        before = marks[j] & _KIND
        if before & ~1 != character:
            return False
        length += 1 + (before & 1)
    return bool(length >= 3)


@cached_njit()
def _wide_level(marks: Any, i: int) -> int:
    """Level of a CJK delimiter whose last bytes are token i; 0 if it is none."""
    kind = marks[i] & _KIND
    if i == 0 or kind < _LAST_BYTES:
        return 0
    before = marks[i - 1] & _KIND
    if kind >= _LAST_TWO_BYTES:
        opens = _E3 if kind - _LAST_TWO_BYTES < 2 else _EF
        return int(_WIDE_LEVEL[kind - _LAST_TWO_BYTES]) if before == opens else 0
    if i > 1 and before == _BYTE_80 and marks[i - 2] & _KIND == _E3:
        before = _E3_80
    if i > 1 and before == _BYTE_BC and marks[i - 2] & _KIND == _EF:
        before = _EF_BC
    if before == _E3_80:
        return int(_AFTER_E3_80[kind - _LAST_BYTES])
    if before == _EF_BC:
        return int(_AFTER_EF_BC[kind - _LAST_BYTES])
    return 0


@cached_njit()
def _own_level(marks: Any, i: int, n: int) -> int:
    """Level of the delimiter that ends with token i, whatever stands before it."""
    kind = marks[i] & _KIND
    if kind >= _LAST_BYTES:
        return _wide_level(marks, i)
    if kind == _SENTENCE:
        ends = i + 1 >= n or marks[i + 1] & _STARTS_BLANK or marks[i + 1] & _KIND == _CLOSER
        return 2 if ends else 0
    if kind == _FENCE or _BACKTICK <= kind <= _STAR + 1:
        # Followed by more on its line it opens a code block, or is a dash or emphasis.
        return 1 if _is_fence(marks, i) and (i + 1 >= n or _is_newline(marks[i + 1])) else 0
    return int(_LEVEL[kind])


@cached_njit()
def cut_level(marks: Any, i: int, n: int) -> int:
    """How good a cut after token i is: 1 (best) to 4, or 0 for none.

    Args:
        marks: uint8 [n] of consecutive tokens of the text.
        n: how many are known; beyond them the text is taken to end.
    """
    level = _own_level(marks, i, n)
    if level == 1:
        return 1
    mark = marks[i]
    if mark & _WHOLE and i > 0:
        # A line end or a closing quote goes with the delimiter before it.
        before = marks[i - 1]
        if _is_newline(mark) and _is_newline(before):
            return 1
        kind = mark & _KIND
        if kind in (_CLOSER, _PHRASE, _NEWLINE):
            inherited = _own_level(marks, i - 1, n)
            if marks[i - 1] & _KIND == _SENTENCE and i + 1 < n:
                inherited = 2 if marks[i + 1] & _STARTS_BLANK else 0
            if inherited and (level == 0 or inherited < level):
                level = inherited
    if i + 1 < n:
        after = marks[i + 1]
        fence = _is_newline(mark) and after & _KIND == _FENCE and after & _WHOLE
        if fence and i + 2 < n and not _is_newline(marks[i + 2]):
            return 1  # a code block opens
        if level == 0 and after & _STARTS_BLANK:
            return 4
    return level
