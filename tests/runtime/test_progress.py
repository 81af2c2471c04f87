"""What is said of long work: in the time promised, of the stage that it is in, and nothing where nothing is wanted."""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from qcompiler.runtime import progress
from qcompiler.runtime.compile_rate import compiling
from qcompiler.runtime.progress import Counted, Progress, Runs, Stages, Step, expecting, stage


class Screen(io.StringIO):
    """Stands in for stderr; `saw` is set when the text that is waited for is written."""

    def __init__(self, *, terminal: bool) -> None:
        super().__init__()
        self.terminal, self.wanted, self.saw = terminal, "", threading.Event()

    def isatty(self) -> bool:
        return self.terminal

    def write(self, text: str) -> int:
        count = super().write(text)
        if self.wanted in self.getvalue():
            self.saw.set()
        return count

    def wait_for(self, text: str) -> bool:
        self.wanted = text
        self.saw.clear()
        return text in self.getvalue() or self.saw.wait(60)


@pytest.fixture(autouse=True)
def no_stage_of_others() -> Iterator[list[threading.Thread]]:
    """Other tests of this process interrupt compiles at every bytecode, so also between a stage's beginning and the
    statement that ends it. Gives the threads that are there before the test."""
    token = progress._CURRENT.set(None)
    yield threading.enumerate()
    progress._CURRENT.reset(token)


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Screen]:
    """Sets stderr, and how long work may be silent."""
    monkeypatch.delenv("QC_QUIET", raising=False)

    def make(*, terminal: bool, after: float = 0.01) -> Screen:
        shown = Screen(terminal=terminal)
        monkeypatch.setattr(sys, "stderr", shown)
        monkeypatch.setattr(progress, "BAR_AFTER", after)
        monkeypatch.setattr(progress, "EVERY", 0.01)
        monkeypatch.setenv("TERM", "xterm")
        return shown

    return make


@pytest.mark.parametrize("terminal", [False, True])
def test_long_work_says_which_stage_it_is_in(
    screen: Callable[..., Screen], no_stage_of_others: list[threading.Thread], terminal: bool
) -> None:
    shown = screen(terminal=terminal)
    with Stages(23):
        stage("export")
        assert shown.wait_for("stage 1 of 23" if terminal else "export (stage 1 of 23")
        stage("insert-qdq")
        assert shown.wait_for("stage 2 of 23" if terminal else "insert-qdq (stage 2 of 23")
    assert "export" in shown.getvalue() and "insert-qdq" in shown.getvalue()
    left = [each for each in threading.enumerate() if each not in no_stage_of_others]
    assert not [each for each in left if each.name == "qcompiler-progress"]


def test_bytes_within_a_stage_share_its_terminal(
    screen: Callable[..., Screen], capsys: pytest.CaptureFixture[str]
) -> None:
    shown = screen(terminal=True)
    with Stages(2):
        stage("insert-qdq")
        with Progress("writing a[/b].gguf", 90_900_000) as bar:
            assert shown.wait_for("writing a[/b].gguf"), "names of files are no markup"
            bar.reach(12_000_000)
            assert shown.wait_for("12.0 MB of 90.9 MB")
            print("of the caller")
            assert capsys.readouterr().out == "of the caller\n", "stdout is no terminal, and keeps what is written"
    assert progress.BARS._bars is None, "the display goes with the last bar"


def test_runs_of_unequal_work_tell_the_time_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    runs, tokens = Runs("measuring", [30, 10, 60]), Counted("evaluating", 4000, "tokens")
    assert (runs._far, tokens._far) == ("0 of 3 runs", "0 of 4000 tokens")
    clock[0] += 20
    runs.step(30)
    runs.step(10)
    assert runs._far == "2 of 3 runs, 30 s left", "40 of 100 in 20 s"
    tokens.reach(10)
    assert tokens._far == "10 of 4000 tokens, 0.5/s, 2 h 13 min left"
    tokens.reach(2_469_200)
    assert tokens._far == "2469200 tokens, 123,460/s", "a total that cannot be true is not told, nor a time left"
    for total in (0, 4_000_000):
        packing = Progress("packing weights", total)
        clock[0] += 1
        packing.step(4_500_000)
        assert packing._far == "4.5 MB, 4.5 MB/s"


def test_short_and_quiet_work_says_nothing(screen: Callable[..., Screen], monkeypatch: pytest.MonkeyPatch) -> None:
    shown = screen(terminal=False, after=3600)
    with Stages(1):
        stage("export")
    quiet = screen(terminal=False)
    monkeypatch.setenv("QC_QUIET", "1")
    with Stages(1) as stages:
        stage("export")
        assert stages._speaker.ident is None
    assert shown.getvalue() == quiet.getvalue() == ""


def test_a_stage_that_nobody_follows_is_no_error() -> None:
    stage("export")


def test_a_failure_leaves_no_speaker_behind(screen: Callable[..., Screen]) -> None:
    shown = screen(terminal=True)
    with pytest.raises(KeyError), Stages(1):
        stage("export")
        assert shown.wait_for("export")
        raise KeyError
    assert progress._CURRENT.get() is None and progress.BARS._bars is None


def test_an_interrupt_while_the_speaker_starts_leaves_no_stage_behind(
    screen: Callable[..., Screen], monkeypatch: pytest.MonkeyPatch
) -> None:
    screen(terminal=False)
    before, start = threading.enumerate(), threading.Thread.start

    def interrupted(self: threading.Thread) -> None:
        start(self)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt), Stages(1):
        pass
    assert progress._CURRENT.get() is None
    for thread in [each for each in threading.enumerate() if each not in before]:
        thread.join(5)
    assert [each for each in threading.enumerate() if each not in before] == []


def test_the_callback_gets_every_stage_in_order_and_may_end_the_work() -> None:
    seen: list[Step] = []
    with Stages(2, seen.append):
        stage("export")
        stage("import")
    assert [(each.stage, each.number, each.of) for each in seen] == [("export", 1, 2), ("import", 2, 2)]

    def stop(step: Step) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), Stages(2, stop):
        stage("export")


def test_a_compiler_has_the_time_left_that_its_last_rate_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    monkeypatch.setenv("QC_QUIET", "1")
    with Stages(32) as stages:
        stage("compile-kernels")
        with compiling("compile 2 kernels", "x" * 1000, tmp_path / "native", ("g++ 12", "-O3")):
            assert stages.step.left is None  # nothing is known yet
            now[0] += 10
        with compiling("compile 2 kernels", "x" * 3000, tmp_path / "native", ("g++ 12", "-O3")):
            now[0] += 8
            assert stages.step.left == pytest.approx(22)
            assert str(stages.step) == "compile-kernels (stage 1 of 32, 18 s, about 22 s left at 100 B/s)"
            now[0] += 23
            assert stages.step.left is None  # longer than expected: no number would be true
        assert stages.step.left is None
        with compiling("compile 2 kernels", "x" * 3000, tmp_path / "native", ("g++ 12", "-Og")):
            assert stages.step.left is None  # other flags, another rate


def test_a_compile_that_fails_or_a_damaged_record_gives_no_rate(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), compiling("compile", "x", tmp_path / "native", ("g++",)):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []
    with compiling("compile", "x" * 1000, tmp_path / "native", ("g++",)):
        pass
    (record,) = tmp_path.iterdir()
    for text in ("", "{", '{"bytes_per_second": "fast"}', '{"bytes_per_second": 0}', '{"bytes_per_second": Infinity}',
                 '{"bytes_per_second": true}', '{"bytes_per_second": -1}', '{"bytes_per_second": 1e-300}',
                 '{"bytes_per_second": 1%s}' % ("0" * 400)):  # fmt: skip
        record.write_text(text)
        with Stages(2) as stages, compiling("compile", "x" * 1000, tmp_path / "native", ("g++",)):
            assert stages.step.left is None, text


def test_work_of_another_program_without_stages_is_one_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen(terminal=False)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(progress, "BAR_AFTER", 0.01)
    monkeypatch.delenv("QC_QUIET", raising=False)
    screen.wanted = "about"
    with expecting("compile 5 kernels", 99.5):
        assert screen.saw.wait(10)
    assert "qcompiler: compile 5 kernels (0 s, about " in screen.getvalue()
