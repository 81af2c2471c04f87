"""Device memory of the engine: which device, which allocation, what has a value, what lies beside it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest

from qcompiler.errors import OutOfMemoryError, SimulationError
from qcompiler.runtime.sim.engine import SimEngine, engine


@pytest.fixture
def sim() -> Iterator[SimEngine]:
    yield engine()


def test_addresses_tell_their_device(sim: SimEngine) -> None:
    a, b = sim.allocate(3, 100, "a"), sim.allocate(4, 100, "b")
    assert (sim.device_of(a), sim.device_of(b + 99), sim.device_of(0x1000)) == (3, 4, None)
    assert a % 256 == 0 and b % 256 == 0
    assert sim.allocation_of(a + 99) == (a, 100, "a")
    assert sim.allocation_of(a + 100) is None and sim.allocation_of(a - 1) is None
    sim.free(a)
    sim.free(b)
    assert sim.allocation_of(a) is None and sim.device_of(a) == 3


@pytest.mark.parametrize(("device", "size"), [(8, 100), (9, 100_000)])
def test_freed_memory_comes_back_zeroed_and_uninitialised(sim: SimEngine, device: int, size: int) -> None:
    first = sim.allocate(device, size)
    ctypes.memset(first, 7, size)
    sim.mark_initialised(first, size)
    sim.free(first)
    second = sim.allocate(device, size)
    assert second == first  # the space is used again
    assert ctypes.string_at(second, size) == bytes(size) and not sim.is_initialised(second, size)
    sim.free(second)


def test_neighbours_merge_when_freed(sim: SimEngine) -> None:
    parts = [sim.allocate(5, 1000) for _ in range(4)]
    for part in (parts[1], parts[3], parts[0], parts[2]):
        sim.free(part)
    whole = sim.allocate(5, 5000)
    assert whole == parts[0]
    sim.free(whole)


def test_initialisation_is_kept_by_the_byte(sim: SimEngine) -> None:
    a = sim.allocate(3, 1000)
    assert not sim.is_initialised(a, 1)
    sim.mark_initialised(a + 61, 70)
    assert sim.is_initialised(a + 61, 70) and sim.is_initialised(a + 61, 0)
    assert not sim.is_initialised(a + 60, 2) and not sim.is_initialised(a + 130, 2)
    with pytest.raises(SimulationError, match="no live allocation"):
        sim.mark_initialised(a + 999, 2)
    sim.free(a)
    with pytest.raises(SimulationError, match="no live allocation"):
        sim.is_initialised(a, 1)
    with pytest.raises(SimulationError, match="nothing is allocated"):
        sim.free(a)


@pytest.mark.parametrize("offset", [-1, 100])
def test_host_code_that_writes_beside_an_allocation_is_found(sim: SimEngine, offset: int) -> None:
    a = sim.allocate(6, 100)
    sim.check_red_zones(6)
    kept = ctypes.string_at(a + offset, 1)
    ctypes.memset(a + offset, 1, 1)
    with pytest.raises(SimulationError, match="sim:6") as caught:
        sim.check_red_zones(6)
    assert caught.value.finding == "out-of-bounds"
    ctypes.memmove(a + offset, kept, 1)
    sim.free(a)


def test_more_than_a_device_can_address_is_refused(sim: SimEngine) -> None:
    with pytest.raises(OutOfMemoryError, match="no room"):
        sim.allocate(3, 1 << 40)


def test_empty_allocations_have_addresses_of_their_own(sim: SimEngine) -> None:
    a, b = sim.allocate(3, 0), sim.allocate(3, 0)
    assert a != b
    sim.free(a)
    sim.free(b)
