"""What every GPU backend promises about streams, events and copies; on cuda:0 too where there is a GPU."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from qcompiler.errors import CaptureRuleError


def test_a_stream_keeps_its_order(rig: Any) -> None:
    stream, x, y, z = rig.stream(), rig.empty("x"), rig.empty("y"), rig.empty("z")
    rig.fill(stream, x, 3)
    rig.double(stream, x, y)
    rig.add(stream, x, y, z)
    rig.double(stream, z, x)
    assert (rig.read(x, stream) == 18).all()


def test_an_event_orders_two_streams(rig: Any) -> None:
    one, two, x, y, z = rig.stream("one"), rig.stream("two"), rig.full(1), rig.empty("y"), rig.empty("z")
    for _ in range(5):
        rig.double(one, x, y)
        rig.order(one, two)
        rig.add(two, y, x, z)
        rig.order(two, one)
        rig.increment(one, z, x)
    assert (rig.read(x, one) == 364).all()  # x -> 3x + 1, five times


def test_a_diamond_of_streams_joins(rig: Any) -> None:
    top, left, right = rig.stream("top"), rig.stream("left"), rig.stream("right")
    x, a, b, z = rig.full(5), rig.empty("a"), rig.empty("b"), rig.empty("z")
    rig.increment(top, x, z)
    start = rig.mark(top)
    rig.backend.wait(left, start)
    rig.backend.wait(right, start)
    rig.double(left, z, a)
    rig.increment(right, z, b)
    rig.order(left, top)
    rig.order(right, top)
    rig.add(top, a, b, x)
    assert (rig.read(x, top) == 19).all()


def test_a_wait_means_the_latest_record_before_it(rig: Any) -> None:
    one, two, x, y = rig.stream("one"), rig.stream("two"), rig.full(1), rig.empty("y")
    event = rig.backend.event("again")
    rig.backend.record(event, one)
    rig.double(one, x, y)
    rig.backend.record(event, one)
    rig.backend.wait(two, event)
    rig.double(two, y, x)
    assert (rig.read(x, two) == 4).all()


def test_waiting_for_an_event_that_was_never_recorded_does_nothing(rig: Any) -> None:
    stream, x, y = rig.stream(), rig.full(1), rig.empty("y")
    event = rig.backend.event("never")
    assert rig.backend.query(event)
    rig.backend.wait(stream, event)
    rig.double(stream, x, y)
    assert (rig.read(y, stream) == 2).all()


def test_an_event_of_an_empty_stream_is_done(rig: Any) -> None:
    stream = rig.stream()
    event = rig.mark(stream)
    rig.backend.synchronize(stream)
    assert rig.backend.query(event)
    assert rig.backend.query(stream)


def test_asking_again_and_again_comes_to_an_end(rig: Any) -> None:
    stream, x, y = rig.stream(), rig.full(1), rig.empty("y")
    for _ in range(20):
        rig.double(stream, x, y)
        rig.copy(stream, x, y)
    event = rig.mark(stream)
    while not rig.backend.query(event):
        pass
    while not rig.backend.query(stream):
        pass
    assert (rig.read(x, stream) == 2.0**20).all()


def test_an_upload_takes_the_bytes_of_the_moment(rig: Any) -> None:
    stream, x, y, z = rig.stream(), rig.full(1), rig.empty("y"), rig.empty("z")
    host = np.full(rig.n, 7, np.float32)
    rig.double(stream, x, y)  # the upload waits behind this
    rig.backend.upload(stream, y.address, host.ctypes.data, host.nbytes)
    host[:] = 99
    rig.double(stream, y, z)
    assert (rig.read(z, stream) == 14).all()


def test_memory_is_zero_until_written(rig: Any) -> None:
    assert (rig.read(rig.empty()) == 0).all()


def test_zero_clears_exactly_its_bytes(rig: Any) -> None:
    stream, x = rig.stream(), rig.full(1)
    rig.backend.zero(stream, x.address + 40, 80)
    values = rig.read(x, stream)
    assert (values[10:30] == 0).all()
    assert values.sum() == rig.n - 20


def test_a_copy_moves_exactly_its_bytes(rig: Any) -> None:
    stream, x, y = rig.stream(), rig.full(1), rig.full(2)
    rig.backend.copy(stream, y.address + 4, x.address + 8, 400)
    values = rig.read(y, stream)
    assert (values[1:101] == 1).all()
    assert values.sum() == 2 * rig.n - 100


def test_nothing_to_move_is_nothing_to_do(rig: Any) -> None:
    stream, x = rig.stream(), rig.full(1)
    nothing = rig.backend.allocate(0)
    assert (nothing.address, nothing.nbytes) == (0, 0)
    rig.backend.copy(stream, nothing.address, x.address, 0)
    rig.backend.upload(stream, nothing.address, 0, 0)
    rig.backend.download(stream, 0, nothing.address, 0)
    rig.backend.zero(stream, nothing.address, 0)
    assert rig.backend.query(stream)
    nothing.close()


def test_addresses_are_aligned(rig: Any) -> None:
    assert all(rig.backend.allocate(size).address % 256 == 0 for size in (1, 255, 256, 1000))


# --- the legacy stream -----------------------------------------------------------------------------------------------


def test_the_legacy_stream_waits_for_blocking_streams_and_they_for_it(rig: Any) -> None:
    one, two, legacy = rig.stream("one", "blocking"), rig.stream("two", "blocking"), rig.legacy()
    x, y, z = rig.full(1), rig.empty("y"), rig.empty("z")
    rig.double(one, x, y)  # y = 2
    rig.double(legacy, y, z)  # after `one`
    rig.double(two, z, x)  # after the legacy stream
    assert (rig.read(x, two) == 8).all()


def test_synchronizing_the_legacy_stream_waits_for_blocking_streams(rig: Any) -> None:
    one, x, y = rig.stream("one", "blocking"), rig.full(1), rig.empty("y")
    rig.double(one, x, y)
    rig.backend.synchronize(rig.legacy())
    assert (rig.read(y, rig.stream("readout")) == 2).all()


def test_a_nonblocking_stream_and_the_legacy_stream_need_an_event(rig: Any) -> None:
    one, legacy, x, y, z = rig.stream("one"), rig.legacy(), rig.full(1), rig.empty("y"), rig.empty("z")
    rig.double(one, x, y)
    rig.order(one, legacy)
    rig.double(legacy, y, z)
    rig.order(legacy, one)
    rig.double(one, z, x)
    assert (rig.read(x, one) == 8).all()


# --- the caller's stream ---------------------------------------------------------------------------------------------


def test_the_callers_stream_is_found_by_object_handle_and_protocol(rig: Any) -> None:
    class Holder:
        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, stream.handle

    stream = rig.stream("mine")
    for given in (stream, stream.handle, Holder()):
        assert rig.backend.caller_stream(given).handle == stream.handle
    assert rig.backend.caller_stream(0).handle == rig.legacy().handle
    assert rig.backend.caller_stream().handle == rig.legacy().handle


def test_a_stream_of_another_device_is_refused(rig: Any, other: Any, expect: Any) -> None:
    x = rig.full(1)
    with expect(400):
        rig.backend.zero(other.stream("foreign"), x.address, x.nbytes)
    with expect(400):
        rig.backend.synchronize(other.stream("foreign"))


def test_host_memory_stays_out_of_captures(rig: Any) -> None:
    stream, x = rig.stream(), rig.full(1)
    y, host = rig.empty("y"), np.zeros(rig.n, np.float32)
    rig.backend.begin_capture(stream)
    with pytest.raises(CaptureRuleError):
        rig.backend.upload(stream, x.address, host.ctypes.data, host.nbytes)
    with pytest.raises(CaptureRuleError):
        rig.backend.download(stream, host.ctypes.data, x.address, host.nbytes)
    rig.double(stream, x, y)
    assert rig.backend.end_capture(stream).shape.nodes == {"kernel": 1}  # the capture was not touched
    assert ctypes.sizeof(ctypes.c_float) * rig.n == host.nbytes
