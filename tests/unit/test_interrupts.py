"""Ctrl-C: none is lost, none counts twice, and none is taken for an error of something else."""

import importlib
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from atoll._util import signals as interrupts
from atoll._util.signals import interruptible


def strike(number: int = signal.SIGINT) -> None:
    signal.raise_signal(number)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts, "ONE_S", 0.05)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_before_training_it_acts_at_once(number: int) -> None:
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), interruptible():
        strike(number)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers


def test_one_that_python_has_lost_is_heeded_at_the_next_look() -> None:
    with interruptible() as received:
        with suppress(KeyboardInterrupt):  # as inside an import
            strike()
        with pytest.raises(KeyboardInterrupt):
            received.raise_pending()


def test_one_that_python_has_lost_is_found_before_the_first_step() -> None:
    with interruptible() as received:
        with suppress(KeyboardInterrupt):
            strike()
        with pytest.raises(KeyboardInterrupt):
            received.wait_for_steps()


def test_an_error_after_one_is_what_became_of_it() -> None:
    def turns_it_into_an_error() -> None:
        try:
            strike()
        except KeyboardInterrupt:
            raise ValueError("device: must be auto or cpu") from None

    with pytest.raises(KeyboardInterrupt), interruptible():
        turns_it_into_an_error()


def test_an_error_without_one_is_an_error() -> None:
    with pytest.raises(ValueError, match="device"), interruptible():
        raise ValueError("device")


def test_in_training_it_is_noted_and_told_once_and_the_second_acts_at_once() -> None:
    told: list[str] = []
    with interruptible() as received:
        received.wait_for_steps()
        received.on_first = lambda: told.append("told")
        strike()
        strike()  # the same one, passed on by somebody
        assert list(received) == [signal.SIGINT] and told == ["told"]
        time.sleep(0.06)
        with pytest.raises(KeyboardInterrupt):
            strike()
        assert told == ["told"]


def test_the_same_one_does_not_break_into_what_it_has_started() -> None:
    with interruptible():
        with pytest.raises(KeyboardInterrupt):
            strike()
        strike()


def test_who_asks_inside_shares_what_was_noted() -> None:
    with interruptible() as outer, interruptible() as inner:
        assert inner is outer
    with interruptible() as later:
        assert later is not outer


def test_inside_an_import_it_waits_for_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There it could be lost, and torch's C++ would abort."""
    (tmp_path / "interrupted_on_import.py").write_text(
        "import signal, time\nsignal.raise_signal(signal.SIGINT)\ntime.sleep(0.1)\nended = True\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with interruptible():
        with pytest.raises(KeyboardInterrupt):
            import_and_wait("interrupted_on_import")
        assert sys.modules.pop("interrupted_on_import").ended


def import_and_wait(name: str) -> None:
    importlib.import_module(name)
    time.sleep(1)


def test_an_import_that_never_ends_is_no_shelter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "endless.py").write_text("import signal, time\nsignal.raise_signal(signal.SIGINT)\ntime.sleep(90)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(interrupts, "_IMPORTS_S", 0.1)
    began = time.monotonic()
    with interruptible(), pytest.raises(KeyboardInterrupt):
        importlib.import_module("endless")
    assert time.monotonic() - began < 60
