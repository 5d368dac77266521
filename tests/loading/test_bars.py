"""Progress bars leave nothing on stderr."""

from __future__ import annotations

import io
import sys

import pytest
from transformers.utils import logging

from offload.loading.bars import passing_bars


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_a_bar_is_gone_when_it_is_done(
    stream: type[io.StringIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", stream())
    with passing_bars():
        assert list(logging.tqdm(range(3), desc="Loading")) == [0, 1, 2]
    written = sys.stderr.getvalue()
    assert ("Loading" in written) == (stream is Terminal)
    assert "\n" not in written
    assert written.rstrip("\r").rpartition("\r")[2].strip() == ""


def test_others_bars_stay_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with pytest.raises(RuntimeError), passing_bars():
        raise RuntimeError
    list(logging.tqdm(range(3), desc="Loading"))
    assert "100%" in sys.stderr.getvalue()


def test_a_hook_of_the_users_gets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def hook(factory, args, options):
        seen.append(options)
        return factory(*args, **options)

    previous = logging.set_tqdm_hook(hook)
    try:
        with passing_bars():
            list(logging.tqdm(range(3)))
        assert [options["leave"] for options in seen] == [False]
        assert logging.set_tqdm_hook(hook) is hook
    finally:
        logging.set_tqdm_hook(previous)
