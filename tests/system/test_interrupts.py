"""Handlers of signals wait while a shield is open, whichever signal it is."""

from __future__ import annotations

import _signal
import signal
import sys
from collections.abc import Generator
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from offload.system.interrupts import finish, shielded


class TimeOutError(Exception):
    pass


@pytest.fixture(params=[signal.SIGALRM, signal.SIGINT, signal.SIGUSR1, signal.SIGRTMIN])
def signum(request: Any) -> Any:
    def time_out(number: int, frame: Any) -> None:
        raise TimeOutError(number)

    before = signal.signal(request.param, time_out)
    yield request.param
    signal.signal(request.param, before)


def test_a_handler_waits(signum: signal.Signals) -> None:
    before, lines = signal.getsignal(signum), []
    with pytest.raises(TimeOutError), shielded():  # noqa: PT012 (it is raised at the end)
        with shielded() as inner, inner():
            signal.raise_signal(signum)
            lines.append("inner")
        lines.append("outer")
    assert lines == ["inner", "outer"]
    assert signal.getsignal(signum) is before


def test_an_exposed_part_is_interrupted(signum: signal.Signals) -> None:
    before = signal.getsignal(signum)
    with shielded() as exposed:
        signal.raise_signal(signum)
        with pytest.raises(TimeOutError), exposed():
            pytest.fail("it came before")
        with pytest.raises(TimeOutError), exposed():
            signal.raise_signal(signum)
    assert signal.getsignal(signum) is before


def test_two_signals_both_come(signum: signal.Signals) -> None:
    came = []
    before = signal.signal(signal.SIGUSR2, lambda number, frame: came.append(number))
    try:
        with pytest.raises(TimeOutError), shielded():  # noqa: PT012 (likewise)
            signal.raise_signal(signum)
            signal.raise_signal(signal.SIGUSR2)
            assert came == []
        assert came == [signal.SIGUSR2]
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_handlers_are_put_back_whatever_comes_meanwhile(
    signum: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A handler that is back may raise while others still wait to be."""
    of_other = signal.signal(signal.SIGUSR2, lambda number, frame: None)
    before = [signal.getsignal(number) for number in (signum, signal.SIGUSR2)]
    put_back = []

    def put(number: int, handler: Any) -> Any:
        result = _signal.signal(number, handler)
        if handler in before:
            put_back.append(number)
            if len(put_back) == 1:
                raise TimeOutError(number)
        return result

    try:
        with monkeypatch.context() as patch:
            fake = SimpleNamespace(getsignal=_signal.getsignal, signal=put)
            patch.setattr("offload.system.interrupts._signal", fake)
            with pytest.raises(TimeOutError), shielded():
                pass
        assert [signal.getsignal(number) for number in (signum, signal.SIGUSR2)] == before
        assert {signum, signal.SIGUSR2} <= {*put_back}
    finally:
        signal.signal(signal.SIGUSR2, of_other)


def test_a_second_ctrl_c_does_not_keep_work_from_being_closed() -> None:
    seen: list[str] = []

    def work() -> Generator[None, None, None]:
        try:
            yield
        except BaseException as error:
            sys.settrace(None)
            seen.append(type(error).__name__)
            raise

    def again(frame: FrameType, event: str, arg: object) -> None:
        """Where a function begins handlers of signals may run."""
        if frame.f_code.co_name != "work":
            sys.settrace(None)
            raise KeyboardInterrupt

    def interrupt() -> None:
        sys.settrace(again)
        raise KeyboardInterrupt

    try:
        with pytest.raises(KeyboardInterrupt) as caught:
            finish(work(), interrupt)
    finally:
        sys.settrace(None)
    assert seen == ["GeneratorExit"]  # while the traceback keeps the generator
    del caught
