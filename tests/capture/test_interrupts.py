"""Ctrl-C at the bytecodes of a call, a capture and a replay on a device: afterwards all of it works."""

from __future__ import annotations

import gc
from typing import Any

import pytest
from interrupting import count, interrupt_at, places

from qcompiler.runtime import LoadedProgram
from qcompiler.runtime.graph import _recording
from qcompiler.runtime.interrupts import uninterrupted


@pytest.mark.parametrize("what", ["call", "capture", "replay"])
@pytest.mark.parametrize("most", [25, pytest.param(1500, marks=pytest.mark.slow)])
def test_a_device_works_after_interrupts(small: Any, run: LoadedProgram, what: str, most: int) -> None:
    x, session = small.x(3), run.session()
    want = session(x)["y"].tobytes()
    graph = session.capture(x)
    action = {"call": lambda: session(x), "capture": lambda: session.capture(x), "replay": lambda: graph.replay(x)}[
        what
    ]
    action()
    states = session.states()
    total = count(action)
    hit = 0
    for at in places(total, most):
        hit += interrupt_at(action, at)
        assert gc.isenabled(), at
        assert not _recording._lock.locked(), at
        assert not session._lock.locked(), at
        assert uninterrupted._depth == 0, at
        assert not session.memory.freeze.frozen, at
        if what == "capture":  # it leaves states as they were, also when it is interrupted
            assert {name: each.tobytes() for name, each in session.states().items()} == {
                name: each.tobytes() for name, each in states.items()
            }, at
        assert session(x)["y"].tobytes() == want, at
        assert graph.replay(x)["y"].tobytes() == want, at
        session.set_states(states)
    assert hit > len(places(total, most)) // 2, "the interrupts came elsewhere"
    assert session.capture(x).replay(x)["y"].tobytes() == want
