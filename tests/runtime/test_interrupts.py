"""Ctrl-C at the bytecodes of a call, of load, save and compile: afterwards all works, and nothing is half there."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from interrupting import count, interrupt_at, places

from qcompiler.errors import SessionBusyError
from qcompiler.runtime import LoadedProgram, compiler, files, isa, load
from qcompiler.runtime.interrupts import interruption_point, uninterrupted

PLAIN = isa.supported_isas()[0]


@pytest.fixture
def run(loaded: Callable[..., LoadedProgram]) -> LoadedProgram:
    return loaded(num_threads=2)


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """A job in the background is started with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def everywhere(action: Callable[[], object], check: Callable[[int], object], most: int) -> int:
    """Interrupts the action at so many of its bytecodes; how many of them were interrupted."""
    action()
    total = count(action)
    hit = 0
    for at in places(total, most):
        hit += interrupt_at(action, at)
        check(at)
    assert hit > len(places(total, most)) // 2, "the interrupts came elsewhere"
    return hit


# --- calls -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stepwise", [False, True])
def test_a_session_works_after_an_interrupt_at_every_bytecode_of_a_call(
    small: Any, run: LoadedProgram, stepwise: bool
) -> None:
    session = run.session(stepwise=stepwise)
    x = small.x(3)
    want = session(x)["y"].tobytes()

    def check(at: int) -> None:
        assert not session._lock.locked(), f"busy for good after an interrupt at bytecode {at}"
        session.reset()
        assert session(x)["y"].tobytes() == want

    everywhere(lambda: session(x), check, 100_000 if not stepwise else 500)


def test_states_are_reset_read_and_written_whole_after_interrupts(small: Any, run: LoadedProgram) -> None:
    session = run.session()
    session(small.x(1))
    states = session.states()
    for action in (session.reset, session.states, lambda: session.set_states(states)):
        everywhere(action, lambda at: session.set_states(states), 300)
        assert session.states()["calls"].tobytes() == states["calls"].tobytes()


def test_two_calls_that_begin_at_once_are_one_and_an_error(small: Any, run: LoadedProgram) -> None:
    """Between the look at the lock and its taking the other call may come and go."""
    session = run.session()
    ticket = session.ticket()
    session(small.x(1))
    with session._lock, pytest.raises(SessionBusyError, match=r"program\.session\(\)"):
        session.begin(ticket)


# --- the shield ------------------------------------------------------------------------------------------------------


def test_an_interrupt_inside_the_shield_comes_at_its_end_or_at_a_point() -> None:
    steps: list[str] = []
    with pytest.raises(KeyboardInterrupt), uninterrupted, uninterrupted:
        signal.raise_signal(signal.SIGINT)
        steps.append("went on")
    assert steps == ["went on"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with uninterrupted:
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            interruption_point()
        interruption_point()


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_the_shield_leaves_other_handlers_alone(handler: signal.Handlers) -> None:
    before = signal.signal(signal.SIGINT, handler)
    try:
        with uninterrupted:
            assert signal.getsignal(signal.SIGINT) is handler
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_the_shield_is_the_main_threads_alone() -> None:
    seen: list[object] = []

    def look() -> None:
        with uninterrupted:
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]


def test_the_shield_itself_can_be_interrupted_anywhere() -> None:
    def work() -> None:
        with uninterrupted:
            work_inside.append(1)

    work_inside: list[int] = []
    for at in range(1, count(work) + 1):
        interrupt_at(work, at)
        assert uninterrupted._depth == 0, at
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, at
        work()  # raises nothing that was noted before


# --- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [200, pytest.param(100_000, marks=pytest.mark.slow)])
def test_a_file_is_the_old_one_or_the_new_one_after_an_interrupt(tmp_path: Path, most: int) -> None:
    target, contents = tmp_path / "file", [b"old" * 1000, b"new" * 2000]

    def write() -> None:
        with files.replacing(target) as file:
            file.write(contents[1])

    def check(at: int) -> None:
        assert target.read_bytes() in contents
        target.write_bytes(contents[0])

    target.write_bytes(contents[0])
    everywhere(write, check, most)
    write()
    assert list(tmp_path.iterdir()) == [target], "what an interrupt left, the next write removes"


@pytest.mark.parametrize("most", [24, pytest.param(400, marks=pytest.mark.slow)])
def test_save_and_load_work_after_interrupts(small: Any, tmp_path: Path, run: LoadedProgram, most: int) -> None:
    path, x = tmp_path / "p.qca", small.x(3)
    want = run(x)["y"].tobytes()
    run.save(path)

    def check(at: int) -> None:
        assert load(path, num_threads=1)(x)["y"].tobytes() == want, at

    everywhere(lambda: run.save(path), check, most)
    everywhere(lambda: load(path, num_threads=1), check, most)
    run.save(path)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("most", [12, pytest.param(200, marks=pytest.mark.slow)])
def test_kernels_are_compiled_after_interrupts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """A lock that stayed would make the next compilation wait for ever."""
    numbers = iter(range(10**6))
    monkeypatch.setenv("QC_CACHE_DIR", str(tmp_path))

    def compile_one() -> None:
        compiler.compile_code(f"int number_{next(numbers)};", PLAIN)

    def check(at: int) -> None:
        for library in (tmp_path / "native").glob("*.lock"):
            with files.held(library):  # nobody holds it
                pass

    everywhere(compile_one, check, most)
    compile_one()
    assert not list((tmp_path / "native").glob(f".building.*{files.SUFFIX}"))
    for library in (tmp_path / "native").glob("*.json"):
        assert np.frombuffer(library.with_suffix(".so").read_bytes()[:4], np.uint8).tobytes() == b"\x7fELF"
