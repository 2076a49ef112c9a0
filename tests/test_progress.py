"""What standard error says of work that lasts, where it is no terminal."""

import io
import sys
import threading

import pytest

from aot.cli.progress import Progress


class Clock:
    """Seconds that pass only when a test says so."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_piped_progress_is_a_line_every_ten_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    with Progress("compiling", clock) as progress:
        for done in range(1, 26):
            clock.now += 1
            progress.update(done, 25)
    assert capsys.readouterr() == ("", "compiling: 10 of 25 after 10 s\ncompiling: 20 of 25 after 20 s\n")


def test_piped_progress_says_what_comes_next(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    with Progress("tuning", clock) as progress:
        clock.now += 61.2
        progress.update(3, 48, "up M=16")
    assert capsys.readouterr().err == "tuning: 3 of 48 after 61 s, now up M=16\n"


def test_piped_progress_is_told_while_nothing_is_finished(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    with Progress("compiling", clock) as progress:
        clock.now += 11
        progress.say_if_due()
        progress.update(1, 25)
        clock.now += 10
        progress.say_if_due()
        progress.say_if_due()
    assert capsys.readouterr().err == "compiling: after 11 s\ncompiling: 1 of 25 after 21 s\n"


def test_a_thread_says_how_far_piped_work_has_come(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aot.cli.progress._LINE_EVERY_S", 0.01)
    said = threading.Event()
    with Progress("compiling") as progress:
        monkeypatch.setattr(progress, "say_if_due", said.set)
        assert said.wait(10)


def test_short_work_prints_no_progress(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    with Progress("compiling", clock) as progress:
        for done in range(10):
            progress.update(done, 10)
        clock.now += 9.9
        progress.update(10, 10)
    assert capsys.readouterr() == ("", "")


def test_progress_that_was_stopped_says_nothing_more(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    with Progress("compiling", clock) as progress:
        pass
    clock.now += 60
    progress.update(1, 2)
    assert capsys.readouterr() == ("", "")


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar_and_no_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, clock = _Terminal(), Clock()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with Progress("compiling", clock) as progress:
        clock.now += 1.9
        progress.update(1, 4)
        assert terminal.getvalue() == ""
        clock.now += 60
        progress.update(3, 4)
        progress.warn("a kernel failed")
    assert "3/4" in terminal.getvalue()
    assert "warning: a kernel failed\n" in terminal.getvalue()
    assert "3 of 4" not in terminal.getvalue()
