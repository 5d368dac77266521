"""Compiled callbacks go when a source changes that Numba does not look at."""

from __future__ import annotations

from pathlib import Path

from offload.policies.numba_cache import drop_stale


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
