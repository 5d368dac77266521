"""Text that every Debian machine can install by name, packed as token ids.

    python -m perf.long_context.text --tokenizer FOLDER --out corpus.npz

Downloads the packages below with apt-get (nothing is installed), checks their digests and tokenises
their English text. Two books and a manual are held out: `evaluate` reads nothing else.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import html
import html.parser
import io
import json
import lzma
import re
import struct
import subprocess
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

Reader = Callable[[bytes], list[str]]
_PARTS = ("train", "held_out")
_MIN_CHARACTERS = 400  # shorter files are indexes and stubs
_SKIPPED = re.compile(r"(genindex|search|copyright|changelog|index-all|bookindex|whatsnew)")


@dataclass(frozen=True)
class Source:
    """Files of a Debian package.

    Attributes:
        files: which paths are read, as a regular expression.
        reader: makes documents of a file.
        prose: True if what it holds reads like a book.
        held_out: never trained on; names a part of the documents, or all of them.
        most_tokens: what is used of it.
    """

    package: str
    version: str
    sha256: str
    files: str
    reader: Reader
    prose: bool
    held_out: str | None = None
    most_tokens: int = 2_000_000


@dataclass(frozen=True)
class Corpus:
    """Token ids of documents, one after another.

    Attributes:
        tokens: uint16 [num_tokens].
        starts: int64 [num_documents + 1], where each document starts.
        prose: bool [num_documents].
        names: of the documents' packages, one each.
    """

    tokens: npt.NDArray[np.uint16]
    starts: npt.NDArray[np.int64]
    prose: npt.NDArray[np.bool_]
    names: tuple[str, ...]


class _Html(html.parser.HTMLParser):
    """The words of a page, with a line for each block."""

    _BLOCKS = frozenset(
        {"p", "div", "section", "h1", "h2", "h3", "h4", "h5", "h6", "li", "tr", "dt", "dd"}
        | {"pre", "blockquote", "br"}
    )
    _SILENT = frozenset(("script", "style", "head", "nav", "footer", "title"))

    def __init__(self) -> None:
        super().__init__()
        self.words: list[str] = []
        self._silent = 0
        self._pre = 0

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self._silent += tag in self._SILENT
        self._pre += tag == "pre"
        if tag in self._BLOCKS:
            self.words.append("\n")

    def handle_endtag(self, tag: str) -> None:
        self._silent -= tag in self._SILENT
        self._pre -= tag == "pre"
        if tag in self._BLOCKS:
            self.words.append("\n")

    def handle_data(self, data: str) -> None:
        if self._silent <= 0:
            self.words.append(data if self._pre > 0 else re.sub(r"\s+", " ", data))


def _read_html(content: bytes) -> list[str]:
    head = content[:2000].lower()
    parser = _Html()
    parser.feed(content.decode("latin-1" if b"iso-8859-1" in head else "utf-8", "replace"))
    return [_tidy("".join(parser.words))]


def _read_text(content: bytes) -> list[str]:
    return [_tidy(_joined_lines(content.decode("utf-8", "replace")))]


def _read_rst(content: bytes) -> list[str]:
    text = content.decode("utf-8", "replace")
    text = re.sub(r"^\.\. .*\n", "", text, flags=re.M)  # directives and labels
    text = re.sub(r":[a-z:+-]+:`~?([^`<]*?)(?: ?<[^`>]*>)?`", r"\1", text)
    text = re.sub(r"``([^`]+)``", r"\1", text)
    return [_tidy(_joined_lines(text))]


def _read_fortunes(content: bytes) -> list[str]:
    return [_tidy(content.decode("utf-8", "replace").replace("\n%\n", "\n\n"))]


def _read_r_books(content: bytes) -> list[str]:
    """The character vectors of an R lazy-load database: zlib streams of lines of a book."""
    books = []
    for match in re.finditer(rb"\x78[\x01\x9c\xda]", content):
        try:
            data = zlib.decompressobj().decompress(content[match.start() :])
        except zlib.error:
            continue
        lines = list(_r_strings(data))
        if sum(map(len, lines)) > 100_000:
            books.append(_tidy(_joined_lines("\n".join(lines))))
    return books


def _r_strings(data: bytes) -> Iterator[str]:
    """CHARSXP items: four bytes of flags that end in 9, a length, the bytes."""
    place = 0
    while (place := data.find(b"\x00\x09", place)) >= 0:
        (length,) = struct.unpack(">i", data[place + 2 : place + 6].ljust(4, b"\0"))
        if data[place - 2 : place - 1] == b"\0" and 0 <= length < 400:
            yield data[place + 6 : place + 6 + length].decode("utf-8", "replace")
            place += 6 + length
        else:
            place += 1


def _joined_lines(text: str) -> str:
    """Paragraphs whose lines were broken at some width become one line each."""
    text = text.replace("\r\n", "\n").expandtabs()
    return re.sub(r"(?<=[^\n:])\n(?=[^\s*+\-#|=~^0-9.])", " ", text)


def _tidy(text: str) -> str:
    text = html.unescape(text).replace("\u00a0", " ").replace("\x08", "").replace("\x0c", "\n")
    text = re.sub(r"[ \t]+\n", "\n", text)
    text = re.sub(r"[-=~^*_#.]{8,}", "", text)  # rulers
    return re.sub(r"\n{3,}", "\n\n", text).strip()


# Free licences all: Debian main. Essays stay out, and the Python library's docstrings.
SOURCES = (
    Source(
        package="r-cran-janeaustenr",
        version="1.0.0-1",
        sha256="df6bddf211906d1ff404f8ff662c21b34e6660e7f54a311084e749050c019c95",
        files=r"data/Rdata\.rdb$",
        reader=_read_r_books,
        prose=True,
        held_out=r"(?i)persuasion",
    ),
    Source(
        package="cfi-en",
        version="3.0-10.2",
        sha256="a080fc8f3b1a36c645b22f769fec4acc2f0cded42bcc5d5865c846845c897da2",
        files=r"/ch\d+web\.htm$|preface\.htm$",
        reader=_read_html,
        prose=True,
        held_out=r"",
    ),
    Source(
        package="developers-reference",
        version="12.18",
        sha256="0dba82f6fa16e373f2a84ad07e7971aa9264ad2e7d2ae46b37edbc9c5fd57e2e",
        files=r"developers-reference\.txt\.gz$",
        reader=_read_text,
        prose=False,
        held_out=r"",
    ),
    Source(
        package="golang-1.19-src",
        version="1.19.8-2",
        sha256="2dfa82fe4f08f4e0193c532e561af4c91871f5235608f04f2bb8d57bb288df5a",
        files=r"src/testdata/Isaac\.Newton-Opticks\.txt$",
        reader=_read_text,
        prose=True,
    ),
    Source(
        package="debian-handbook",
        version="11.20220922",
        sha256="3d5dbeac1f1afc9c094eab9d0f701f6ecff99c4927d5a4794cf6c85678134faa",
        files=r"html/en-US/[^/]*\.html$",
        reader=_read_html,
        prose=True,
    ),
    Source(
        package="jargon-text",
        version="4.4.7-4.1",
        sha256="17d05997e30eb3d5d6713929b8e2f81b63a5f50073858ad2a06701c71f54dcdb",
        files=r"jargon\.txt\.gz$",
        reader=_read_text,
        prose=True,
        most_tokens=500_000,
    ),
    Source(
        package="fortunes",
        version="1:1.99.1-7.3",
        sha256="41d0551dc0ff52f875a2ecef7c39da2f672ab468c37e170119f7e0245a9d63c5",
        files=r"games/fortunes/(art|computers|cookie|definitions|education|food|fortunes|goedel|humorists|kids|knghtbrd|law|linux|linuxcookie|literature|magic|medicine|miscellaneous|news|paradoxum|people|perl|pets|platitudes|riddles|science|songs-poems|sports|startrek|tao|translate-me|wisdom|work|zippy)$",
        reader=_read_fortunes,
        prose=True,
        most_tokens=600_000,
    ),
    Source(
        package="harden-doc",
        version="3.19+nmu1",
        sha256="77ffacb6f8af4afbdf39f3de6040a710ae6ffcc40e2fab5b5d312dfb11d28d94",
        files=r"html/en-US/[^/]*\.html$",
        reader=_read_html,
        prose=True,
    ),
    Source(
        package="debian-reference-en",
        version="2.100",
        sha256="9f31d3a17df505de09689ca255512ea58c1fc47c59bb1b0c7bf1c23362e9743f",
        files=r"\.en\.html$|debian-reference/[^/]*\.en\.html$",
        reader=_read_html,
        prose=False,
    ),
    Source(
        package="debian-policy",
        version="4.6.2.0",
        sha256="ef9d01b625c3b87c3a845c2cd1b66f1a16e9240b2b9e5bee53472a00e8457a39",
        files=r"/policy\.txt\.gz$",
        reader=_read_text,
        prose=False,
    ),
    Source(
        package="maint-guide",
        version="1.2.53",
        sha256="762c8a400a36668d2eb814a3ba356b06488fd889dfce478eb11d5cfb189a47b5",
        files=r"\.en\.html$",
        reader=_read_html,
        prose=False,
    ),
    Source(
        package="git-doc",
        version="1:2.39.5-0+deb12u3",
        sha256="3c89668a11053a6bafade3de1f611f4613db31e082af63f43d8c5b69ad8795ec",
        files=r"(user-manual|gittutorial|gitcore-tutorial|giteveryday|gitworkflows|MyFirst|git[a-z-]+|howto/[^/]*)\.txt$",
        reader=_read_text,
        prose=False,
        most_tokens=500_000,
    ),
    Source(
        package="vim-doc",
        version="2:9.0.1378-2+deb12u2",
        sha256="6a7e9419d1e249ab5eabd4753bf600e807ccd564dbd9621d0fb90fa30d25e36d",
        files=r"vim/html/usr_\d+\.html$",
        reader=_read_html,
        prose=False,
    ),
    Source(
        package="python3.11-doc",
        version="3.11.2-6+deb12u9",
        sha256="5b3594189d6ef9a6963ce0347fd307a1cc67620ad697e144db366070e2e146be",
        files=r"_sources/(tutorial|howto|faq|reference|extending|installing)/[^/]*\.rst\.txt$",
        reader=_read_rst,
        prose=False,
    ),
    Source(
        package="postgresql-doc-15",
        version="15.20-0+deb12u1",
        sha256="4c44bf2c599f208b3f46454a6cf7a72e25ec46ff74d37b59dd31ad76b00eebb7",
        files=r"html/[^/]*\.html$",
        reader=_read_html,
        prose=False,
        most_tokens=1_200_000,
    ),
    Source(
        package="linux-doc-6.1",
        version="6.1.192-2",
        sha256="d1d1b5a602f0d439ecc39e713e044bf2df30d839fb4bf8a7b859ba3273c47993",
        files=r"_sources/(admin-guide|process|core-api|mm|scheduler|kernel-hacking|filesystems|RCU|locking|timers|networking|trace|block|security)/[^/]*\.rst\.txt$",
        reader=_read_rst,
        prose=False,
        most_tokens=1_800_000,
    ),
)


def build_corpus(tokenizer_folder: Path) -> dict[str, Corpus]:
    """The parts "train" and "held_out", from packages downloaded into a temporary folder.

    Raises:
        RuntimeError: a package of another digest than the one that was trained on.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    texts: dict[str, list[tuple[str, bool, npt.NDArray[np.uint16]]]] = {p: [] for p in _PARTS}
    with tempfile.TemporaryDirectory() as folder:
        for source in SOURCES:
            taken = 0
            for text in _documents(source, Path(folder)):
                ids = np.array(tokenizer.encode(text, add_special_tokens=False).ids, np.uint16)
                held_out = source.held_out is not None and re.search(source.held_out, text[:3000])
                if not held_out:
                    ids = ids[: source.most_tokens - taken]
                    taken += len(ids)
                if len(ids) == 0:
                    break
                texts[_PARTS[bool(held_out)]].append((source.package, source.prose, ids))
            print(f"{source.package}: {taken:,} tokens to train on", flush=True)
    return {part: _packed(documents) for part, documents in texts.items()}


def write_corpus(path: Path, corpora: dict[str, Corpus]) -> None:
    """One file, compressed by lzma: tokens of the two parts, and what they are."""
    described = {
        part: {
            "starts": corpus.starts.tolist(),
            "prose": corpus.prose.tolist(),
            "names": list(corpus.names),
        }
        for part, corpus in corpora.items()
    }
    header = json.dumps(described).encode()
    data = b"".join(corpora[part].tokens.astype("<u2").tobytes() for part in _PARTS)
    content = struct.pack("<Q", len(header)) + header + data
    path.write_bytes(lzma.compress(content, preset=6))


def read_corpus(path: Path) -> dict[str, Corpus]:
    """What `write_corpus` wrote."""
    content = lzma.decompress(path.read_bytes())
    (header_bytes,) = struct.unpack("<Q", content[:8])
    described = json.loads(content[8 : 8 + header_bytes])
    tokens = np.frombuffer(content, "<u2", offset=8 + header_bytes)
    corpora, place = {}, 0
    for part in _PARTS:
        starts = np.array(described[part]["starts"], np.int64)
        corpora[part] = Corpus(
            tokens[place : place + int(starts[-1])],
            starts,
            np.array(described[part]["prose"], np.bool_),
            tuple(described[part]["names"]),
        )
        place += int(starts[-1])
    if place != len(tokens):
        raise ValueError(f"{path} holds {len(tokens)} tokens, but describes {place}")
    return corpora


def _packed(documents: list[tuple[str, bool, npt.NDArray[np.uint16]]]) -> Corpus:
    names, prose, ids = zip(*documents, strict=True)
    starts = np.concatenate([[0], np.cumsum([len(tokens) for tokens in ids])]).astype(np.int64)
    return Corpus(np.concatenate(ids), starts, np.array(prose, np.bool_), names)


def _documents(source: Source, folder: Path) -> Iterator[str]:
    """Documents of a package, each once, in the order of their paths; manuals as one per folder."""
    pages: dict[str, list[str]] = {}
    seen: set[str] = set()
    for path, content in sorted(_files(source, folder)):
        for text in source.reader(content):
            if len(text) < _MIN_CHARACTERS or text in seen:
                continue
            seen.add(text)
            # The chapters of a book follow one another; books and files of a database do not.
            key = text[:40] if source.reader is _read_r_books else str(Path(path).parent)
            pages.setdefault(key, []).append(text)
    for texts in pages.values():
        yield "\n\n".join(texts)


def _files(source: Source, folder: Path) -> Iterator[tuple[str, bytes]]:
    subprocess.run(
        ["apt-get", "download", "-q", "-o", "APT::Sandbox::User=root",
         f"{source.package}={source.version}"],
        cwd=folder, check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    (package,) = folder.glob(f"{source.package}_*.deb")
    digest = hashlib.sha256(package.read_bytes()).hexdigest()
    if digest != source.sha256:
        raise RuntimeError(f"{package.name} has the sha256 {digest}, expected {source.sha256}")
    tar = subprocess.run(
        ["dpkg-deb", "--fsys-tarfile", str(package)], check=True, stdout=subprocess.PIPE
    ).stdout
    with tarfile.open(fileobj=io.BytesIO(tar)) as archive:
        for member in archive:
            name = member.name
            wanted = re.search(source.files, name) and not _SKIPPED.search(Path(name).name.lower())
            if member.isfile() and wanted and (file := archive.extractfile(member)):
                content = file.read()
                yield name, gzip.decompress(content) if name.endswith(".gz") else content
    package.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder of the stock model")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    corpora = build_corpus(arguments.tokenizer)
    write_corpus(arguments.out, corpora)
    for part, corpus in corpora.items():
        lengths = np.diff(corpus.starts)
        print(
            f"{part}: {len(corpus.tokens):,} tokens in {len(lengths)} documents, "
            f"{lengths[corpus.prose].sum():,} of them prose"
        )
    print(f"{arguments.out}: {arguments.out.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
