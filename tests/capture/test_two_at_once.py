"""Two devices compute at the same time: nothing orders branches that need nothing of each other, in a call and in a
graph, and each of them comes first under some seed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from qcompiler.runtime import DeviceArray, LoadedProgram, ProgramImage
from qcompiler.runtime.sim.device import machine
from qcompiler.runtime.sim.queue import Machine, Op


class Watch:
    """The kernels that were submitted under the watch, with their clocks, and the order in which they ran.

    Work from before the watch may still be in the queue, which all programs of the process share: results that nobody
    has read. It runs between the watched kernels, and is none of them.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.kernels: list[Op] = []
        self.ran: list[tuple[str, int]] = []
        submit, execute = Machine.submit, Machine._execute

        def watched_submit(self_: Machine, *args: Any, **kwargs: Any) -> Op:
            op = submit(self_, *args, **kwargs)
            if op.work.kind == "kernel":
                self.kernels.append(op)
            return op

        def watched_execute(self_: Machine, op: Op) -> None:
            if op in self.kernels:
                self.ran.append((name(op), op.work.device))
            execute(self_, op)

        patch.setattr(Machine, "submit", watched_submit)
        patch.setattr(Machine, "_execute", watched_execute)

    def clear(self) -> None:
        self.kernels, self.ran = [], []


@pytest.fixture
def leave_work(double: ProgramImage) -> Callable[[], list[DeviceArray]]:
    """Makes results that nobody reads: so many kernels that one of them runs first in the next watched call."""
    run = LoadedProgram.from_image(double, "sim:0")
    x = run.array(np.arange(9, dtype=np.float32))
    sessions = [run.session() for _ in range(12)]
    return lambda: [session(x) for session in sessions]


@pytest.fixture
def watch() -> Iterator[Watch]:
    with pytest.MonkeyPatch.context() as patch:
        yield Watch(patch)
    machine().reseed()


def name(op: Op) -> str:
    return op.work.name.split("'")[1]


def comes_before(first: Op, second: Op) -> bool:
    """Whether streams, events and graphs order `second` after `first`, whatever order they happen to run in."""
    return second.clock.get(first.actor, 0) >= first.tick


@pytest.mark.parametrize("captured", [False, True])
def test_branches_on_two_devices_have_no_order_and_meet_where_they_must(
    split: ProgramImage, leave_work: Callable[[], list[DeviceArray]], watch: Watch, captured: bool
) -> None:
    run = LoadedProgram.from_image(split, "sim:0")
    x = np.arange(9, dtype=np.float32)
    call = run.capture(x).replay if captured else run
    unread, firsts = leave_work(), set()
    for seed in range(12):
        machine().reseed(seed)
        watch.clear()
        assert np.array_equal(call(x + seed), (x + seed + 1) + 2 * (x + seed))
        twice, plus, add = sorted(watch.kernels, key=lambda op: ["twice", "plus_one", "add"].index(name(op)))
        assert {op.work.device for op in (plus, add)} == {0} and twice.work.device == 1
        assert not comes_before(twice, plus) and not comes_before(plus, twice)
        assert comes_before(twice, add) and comes_before(plus, add)
        assert watch.ran[-1] == ("add", 0)
        firsts.add(watch.ran[0])
    assert firsts == {("twice", 1), ("plus_one", 0)}
    assert all(each.numpy().tolist() == [2.0 * i for i in range(9)] for each in unread)


@pytest.mark.parametrize("captured", [False, True])
def test_two_programs_on_two_devices_have_no_order(
    double: ProgramImage, leave_work: Callable[[], list[DeviceArray]], watch: Watch, captured: bool
) -> None:
    """One thread submits to both before it waits for either; device arrays in and out, so no call waits for its own."""
    runs = [LoadedProgram.from_image(double, device) for device in ("sim:1", "sim:2")]
    arrays = [run.array(np.arange(9, dtype=np.float32)) for run in runs]
    calls = [run.capture(x).replay for run, x in zip(runs, arrays, strict=True)] if captured else runs
    unread, firsts = leave_work(), set()
    for seed in range(12):
        machine().reseed(seed)
        watch.clear()
        results = [call(x) for call, x in zip(calls, arrays, strict=True)]
        one, other = watch.kernels
        assert not comes_before(one, other) and not comes_before(other, one)
        for each in reversed(results):
            assert each.numpy().tolist() == [2.0 * i for i in range(9)]
        firsts.add(watch.ran[0])
    assert firsts == {("twice", 1), ("twice", 2)}
    assert all(each.numpy().tolist() == [2.0 * i for i in range(9)] for each in unread)
