"""Compiled callbacks go when a source changes that Numba does not look at."""

from __future__ import annotations

import errno
import logging
from pathlib import Path
from typing import Any

import pytest

from offload.selection.callback import callback, read_context
from offload.selection.compiled import _say_compiling, _warn_slow, cached_njit
from offload.selection.numba_cache import drop_stale


def test_what_was_compiled_from_other_sources_goes(tmp_path: Path) -> None:
    folder, other = tmp_path / "policies", tmp_path / "other"
    compiled = folder / "lfps" / "__pycache__" / "step.nbi"
    compiled.parent.mkdir(parents=True)
    other.mkdir()
    constants = (folder / "layout.py", other / "codes.py")
    for constant in constants:
        constant.write_text("TILE = 64")
        compiled.write_bytes(b"of other sources")
        drop_stale(folder, [other])
        assert not compiled.exists()
        compiled.write_bytes(b"of these")
        drop_stale(folder, [other])
        assert compiled.exists()
    drop_stale(tmp_path / "missing" / "folder")


def add_one(x: int) -> int:
    return x + 1


def keep_first(pointer: Any) -> None:
    read_context(pointer).num_indices = 1


def test_damaged_files_are_compiled_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("numba.config.CACHE_DIR", str(tmp_path))
    said = "compiling policies for this processor, once"
    with caplog.at_level(logging.INFO, logger="offload"):
        for lines in ([said], []):
            _say_compiling.cache_clear()
            assert cached_njit()(add_one)(1) == 2
            assert caplog.messages == lines
            caplog.clear()
    files = list(tmp_path.rglob("*.nb[ci]"))
    assert len(files) == 2
    for path in files:
        whole = path.read_bytes()
        for kept in (0, len(whole) // 2):
            path.write_bytes(whole[:kept])
            assert cached_njit()(add_one)(1) == 2
            again = cached_njit()(add_one)
            assert (again(1), sum(again.stats.cache_hits.values())) == (2, 1)


def test_without_a_folder_to_write_to(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise PermissionError("read-only")

    _warn_slow.cache_clear()
    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    with caplog.at_level(logging.WARNING):
        assert [cached_njit()(add_one)(x) for x in (1, 2)] == [2, 3]
    assert caplog.text.count("name a folder in NUMBA_CACHE_DIR") == 1


def test_a_folder_without_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was compiled is used all the same, by callbacks too."""

    def full(*args: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("numba.config.CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("numba.core.caching.IndexDataCacheFile.save", full)
    assert cached_njit()(add_one)(1) == 2
    assert callback(keep_first).address
    assert not list(tmp_path.rglob("*.nb[ci]"))
