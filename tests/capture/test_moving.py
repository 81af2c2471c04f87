"""Moving a program to another device: all of it, or nothing. Every call that the move makes of a device is made to fail
once; the program then goes on where it is, its graphs too, and neither device keeps anything of the attempt."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from qcompiler.errors import DeviceUnavailableError, RuntimeFailure
from qcompiler.runtime import LoadedProgram, ProgramImage, load, save_image
from qcompiler.runtime.backends.sim import SimBackend
from qcompiler.runtime.sim.device import machine

CALLS = ("allocate", "build", "load", "stream", "event", "upload", "download", "copy", "zero", "launch", "record",
         "wait", "synchronize")  # fmt: skip
"""What a move asks of a backend."""


class Broken(RuntimeFailure):
    """Out of memory, or whatever a driver says."""


class Counter:
    """Counts calls of all simulated devices, and lets one of them fail."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.made: list[str] = []
        self.fail_at = -1
        self.error: type[BaseException] = Broken
        for name in CALLS:
            patch.setattr(SimBackend, name, self._watched(name, getattr(SimBackend, name)))

    def _watched(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(backend: SimBackend, *args: Any, **kwargs: Any) -> Any:
            self.made.append(f"{name} on {backend.device}")
            if len(self.made) - 1 == self.fail_at:
                raise self.error(f"call {self.fail_at}, {self.made[-1]}, fails")
            return method(backend, *args, **kwargs)

        return call

    def start(self, fail_at: int = -1) -> None:
        self.made, self.fail_at = [], fail_at


@pytest.fixture
def counter() -> Iterator[Counter]:
    with pytest.MonkeyPatch.context() as patch:
        yield Counter(patch)


def held() -> dict[int, int]:
    """Bytes in use by device, once the collector has been through."""
    gc.collect()
    with machine().entry():
        pass
    found: dict[int, int] = {}
    for allocation in machine()._allocations.values():
        found[allocation.device] = found.get(allocation.device, 0) + allocation.nbytes
    return found


def calls(result: Any) -> float:
    return float(result["n"][0])


@pytest.mark.parametrize("stride", [4, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_whatever_fails_on_the_way_nothing_has_moved_and_nothing_stays_behind(
    small: Any, counter: Counter, stride: int
) -> None:
    """Every fourth call in the short run, every one in the long one."""
    there = held().get(1, 0)
    run = LoadedProgram.from_image(small.image, "sim:0")
    graph = run.capture(small.x(3))
    x, count = small.x(3), 10.0
    want = run(x)["y"]
    counter.start()
    moved = run.to("sim:1")
    made = list(counter.made)
    assert {f"{name} on sim:1" for name in ("allocate", "build", "load", "upload", "launch")} <= set(made)
    counter.start()
    assert calls(moved(x)) == calls(run(x)) == count + 2
    count += 2
    del moved
    before = held()
    assert before.get(1, 0) == there
    for at, what in list(enumerate(made))[::stride]:
        counter.error = Broken if at % 5 else KeyboardInterrupt
        counter.start(at)
        try:
            run.to("sim:1")
        except (Broken, KeyboardInterrupt) as error:
            assert what in str(error)
        else:
            pytest.fail(f"{what} failed, and the move went on")
        counter.start()
        assert held() == before, f"{what} failed, and memory stayed"
        replayed, again = graph.replay(x), run(x)
        count += 2
        assert (calls(replayed), calls(again)) == (count - 1, count), what
        assert np.array_equal(again["y"], want) and np.array_equal(replayed["y"], want), what
    assert calls(run.to("sim:1")(x)) == count + 1
    assert len(made) > 30


def test_a_device_that_is_not_there_is_found_before_anything_is_made(hop: ProgramImage, counter: Counter) -> None:
    run = LoadedProgram.from_image(hop, "sim:6")
    counter.start()
    with pytest.raises(DeviceUnavailableError, match="sim:8 is not available"):
        run.to("sim:7")  # the second slot would be sim:8
    assert counter.made == []


@pytest.mark.slow
def test_half_of_the_devices_may_stay(hop: ProgramImage, counter: Counter) -> None:
    """From (1, 2) to (2, 3) and to (2, 1): what lies on a device that both use is made anew there, too."""
    run = LoadedProgram.from_image(hop, devices=("sim:1", "sim:2"))
    x = np.arange(9, dtype=np.float32)
    for devices in (("sim:2", "sim:3"), ("sim:2", "sim:1")):
        moved = run.to(devices[0], devices=devices)
        assert moved.devices == devices
        assert np.array_equal(moved(x), run(x)) and np.array_equal(run(x), 2 * (x + 1))
        del moved
    before = held()
    counter.start()
    run.to("sim:2", devices=("sim:2", "sim:3"))
    made = list(counter.made)
    for at in range(len(made)):
        counter.start(at)
        with pytest.raises(Broken):
            run.to("sim:2", devices=("sim:2", "sim:3"))
        counter.start()
        assert held() == before, made[at]
        assert np.array_equal(run(x), 2 * (x + 1))


def test_the_graphs_of_a_program_that_moved_stay_where_they_were(small: Any) -> None:
    before = held()
    run = LoadedProgram.from_image(small.image, "sim:0")
    x, graph = small.x(2), run.capture(small.x(2))
    moved = run.to("sim:3")
    graphs = {"sim:0": graph, "sim:3": moved.capture(x)}
    assert [calls(each.replay(x)) for each in graphs.values()] == [11, 11]
    assert [calls(each.replay(x)) for each in graphs.values()] == [12, 12]
    assert {each.session.program.device for each in graphs.values()} == set(graphs)
    del run, graph
    assert calls(graphs.pop("sim:0").replay(x)) == 13  # the graph keeps what it needs
    assert held().get(0, 0) == before.get(0, 0)
    assert calls(moved(x)) == 13


def test_sessions_other_than_the_default_one_do_not_move(small: Any) -> None:
    run = LoadedProgram.from_image(small.image, "sim:0")
    other = run.session()
    x = small.x(1)
    for _ in range(4):
        other(x)
    run(x)
    moved = run.to("sim:1")
    assert (calls(other(x)), calls(moved(x)), calls(moved.session()(x))) == (15, 12, 11)


def test_a_program_starts_elsewhere_without_touching_the_device_it_was_made_for(
    hop: ProgramImage, small: Any, counter: Counter, tmp_path: Any
) -> None:
    save_image(small.image, tmp_path / "one.qca")
    save_image(hop, tmp_path / "two.qca")
    counter.start()
    before = held()
    one = load(tmp_path / "one.qca", device="sim:5")
    two = load(tmp_path / "two.qca", devices=("sim:5", "sim:6"))
    x = np.arange(9, dtype=np.float32)
    assert np.array_equal(two(x), 2 * (x + 1))
    assert np.allclose(one(small.x(3))["y"], small.expected(small.x(3)), atol=1e-5)
    assert {each.rpartition(" ")[2] for each in counter.made} == {"sim:5", "sim:6"}
    assert {device for device, nbytes in held().items() if nbytes != before.get(device, 0)} == {5, 6}
