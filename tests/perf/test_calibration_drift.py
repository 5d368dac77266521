"""How long temperatures last, as the script measures it: when they are solved for again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cases.tiny_models import byte_tokenizer, make_tiny_model, random_tokens

from perf.papers import calibration_drift as drift

READ, DECODE = 1088, 256  # quarters of one window of 64 queries each


def test_temperatures_are_solved_for_again_when_due(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tiny_model("llama", max_position_embeddings=2048).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")

    def text_window(kind: str, length: int, index: int) -> list[int]:
        return [int(x) for x in random_tokens(length, seed=len(kind) + index)]

    monkeypatch.setattr(drift, "text_window", text_window)
    monkeypatch.setattr(drift, "hide_loading_bars", lambda: None)  # of the whole process
    monkeypatch.setattr(drift.KeepsAll, "observed_queries", drift.WINDOW_QUERIES)
    arguments = [f"--model={tmp_path / 'model'}", f"--read={READ}", f"--decode={DECODE}"]
    arguments += ["--windows=1", f"--output={tmp_path}", "--commit=0123456", "--name=drift"]
    monkeypatch.setattr("sys.argv", ["calibration_drift", *arguments])
    drift.main()
    rows: list[dict[str, Any]] = json.loads((tmp_path / "drift.json").read_text())["rows"]
    assert len(rows) == 2 * 2 * 2 * len(drift.REFRESH) * (drift.QUARTERS + 1)
    for text in drift.TEXTS:
        for calibrate in drift.CALIBRATE:
            for top_p in drift.SHARES:
                found = {
                    (row["refresh"], row["quarter"]): (row["median"], row["p90"])
                    for row in rows
                    if (row["text"], row["calibrate"], row["top_p"]) == (text, calibrate, top_p)
                }
                first = {found[name, 1] for name in drift.REFRESH}
                assert len(first) == 1  # all have the temperatures of what was read
                for quarter in range(drift.QUARTERS + 1):
                    assert found["never", quarter] == found["every 512", quarter]
                for quarter in (2, 3):  # after 64 and 128 tokens, but not after 192
                    assert found["doubled", quarter] == found["every 64", quarter]
                if calibrate == "tokens":  # 35 % are too few of random keys: nothing is cut
                    assert found["never", 0] == found["every 64", 0]
                    continue
                for quarter in (2, 3):
                    assert found["doubled", quarter] != found["never", quarter]
                assert found["doubled", 4] != found["every 64", 4]
