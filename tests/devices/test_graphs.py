"""Graphs: what a capture records, and what a replay does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from qcompiler.errors import DeviceError


def test_a_capture_records_and_does_nothing(rig: Any) -> None:
    stream, x, y = rig.stream(), rig.full(1), rig.full(5)
    rig.backend.begin_capture(stream)
    assert stream.is_capturing
    rig.double(stream, x, y)
    graph = rig.backend.end_capture(stream)
    assert not stream.is_capturing
    assert (rig.read(y, stream) == 5).all()
    graph.launch(stream)
    assert (rig.read(y, stream) == 2).all()


def test_every_replay_sees_fresh_inputs(rig: Any, seeds: Any) -> None:
    stream, fork = rig.stream("origin"), rig.stream("fork")
    x, a, b, z = rig.full(0), rig.empty("a"), rig.empty("b"), rig.empty("z")

    def step() -> None:
        rig.order(stream, fork)
        rig.double(stream, x, a)
        rig.increment(fork, x, b)
        rig.order(fork, stream)
        rig.add(stream, a, b, z)

    rig.backend.begin_capture(stream)
    step()
    graph = rig.backend.end_capture(stream)
    assert graph.shape.nodes == {"kernel": 3}
    rng = np.random.default_rng(0)
    for _ in seeds(10):
        host = rng.standard_normal(rig.n).astype(np.float32)
        rig.backend.upload(stream, x.address, host.ctypes.data, host.nbytes)
        graph.launch(stream)
        replayed = rig.read(z, stream)
        rig.backend.zero(stream, z.address, z.nbytes)
        step()
        eager = rig.read(z, stream)
        assert np.array_equal(replayed, eager)
        assert np.array_equal(replayed, host * 2 + (host + 1))


def test_nodes_are_counted_by_kind(rig: Any) -> None:
    stream, x, y = rig.stream(), rig.full(1), rig.empty("y")
    rig.backend.begin_capture(stream)
    rig.backend.zero(stream, y.address, y.nbytes)
    rig.copy(stream, y, x)
    rig.double(stream, x, y)
    rig.double(stream, y, x)
    graph = rig.backend.end_capture(stream)
    assert graph.shape.nodes == {"copy": 1, "kernel": 2, "zero": 1}
    assert graph.shape.count == 4


def test_what_came_before_the_capture_is_no_part_of_it(rig: Any) -> None:
    stream, x, y = rig.stream(), rig.full(1), rig.empty("y")
    rig.increment(stream, x, x)
    rig.backend.begin_capture(stream)
    rig.double(stream, x, y)
    graph = rig.backend.end_capture(stream)
    assert graph.shape.count == 1
    graph.launch(stream)
    assert (rig.read(y, stream) == 4).all()


def test_launches_of_one_graph_follow_each_other(rig: Any) -> None:
    stream, x = rig.stream(), rig.full(0)
    one, two = rig.stream("one"), rig.stream("two")
    rig.backend.begin_capture(stream)
    for _ in range(3):
        rig.increment(stream, x, x)
    graph = rig.backend.end_capture(stream)
    rig.order(stream, one)
    for target in (one, one, one):
        graph.launch(target)
    rig.order(one, two)
    graph.launch(two)
    assert (rig.read(x, two) == 12).all()


def test_a_graph_never_runs_beside_itself(rig: Any, seeds: Any) -> None:
    for _ in seeds(10):
        one, two, x, y = rig.stream("one"), rig.stream("two"), rig.full(1), rig.empty("y")
        rig.backend.begin_capture(one)
        rig.double(one, x, y)
        rig.increment(one, y, x)
        graph = rig.backend.end_capture(one)
        graph.launch(one)
        graph.launch(two)  # no event between them
        rig.order(one, two)
        assert (rig.read(x, two) == 7).all()


def test_several_graphs_live_side_by_side(rig: Any) -> None:
    stream, x = rig.stream(), rig.full(1)

    def capture(step: Any) -> Any:
        rig.backend.begin_capture(stream)
        step(stream, x, x)
        return rig.backend.end_capture(stream)

    doubling, counting = capture(rig.double), capture(rig.increment)
    for graph in (doubling, counting, counting, doubling):
        graph.launch(stream)
    assert (rig.read(x, stream) == 8).all()


def test_a_graph_runs_on_any_stream_and_between_other_work(rig: Any) -> None:
    origin, stream, x, y = rig.stream("origin"), rig.stream("elsewhere"), rig.full(1), rig.empty("y")
    rig.backend.begin_capture(origin)
    rig.double(origin, x, y)
    rig.increment(origin, y, x)
    graph = rig.backend.end_capture(origin)
    rig.double(stream, x, x)  # 2
    graph.launch(stream)  # 5
    rig.double(stream, x, x)  # 10
    assert (rig.read(x, stream) == 10).all()


def test_a_graph_on_the_legacy_stream_waits_for_blocking_streams(rig: Any) -> None:
    origin, blocking, x, y = rig.stream("origin"), rig.stream("blocking", "blocking"), rig.full(1), rig.empty("y")
    rig.backend.begin_capture(origin)
    rig.double(origin, x, y)
    graph = rig.backend.end_capture(origin)
    rig.double(blocking, x, x)
    graph.launch(rig.legacy())
    rig.double(blocking, y, x)
    assert (rig.read(x, blocking) == 8).all()


def test_a_blocking_stream_can_be_captured(rig: Any) -> None:
    stream, x, y = rig.stream("captured", "blocking"), rig.full(1), rig.empty("y")
    rig.double(rig.legacy(), x, x)  # before the capture, so no part of it
    rig.backend.begin_capture(stream)
    rig.double(stream, x, y)
    graph = rig.backend.end_capture(stream)
    graph.launch(stream)
    assert (rig.read(y, stream) == 4).all()


def test_a_caller_who_captures_is_joined(rig: Any) -> None:
    """A library's own streams, forked from the caller's capture and joined again, become part of its graph."""
    caller, inner, x, y, z = rig.stream("caller"), rig.stream("inner"), rig.full(1), rig.empty("y"), rig.empty("z")
    rig.backend.begin_capture(caller)
    rig.double(caller, x, y)
    assert not inner.is_capturing
    rig.order(caller, inner)
    assert inner.is_capturing
    rig.double(inner, y, z)
    rig.order(inner, caller)
    rig.increment(caller, z, x)
    graph = rig.backend.end_capture(caller)
    assert graph.shape.nodes == {"kernel": 3}
    graph.launch(caller)
    assert (rig.read(x, caller) == 5).all()


def test_a_closed_graph_is_not_launched(rig: Any) -> None:
    stream, x, y = rig.stream(), rig.full(1), rig.empty("y")
    rig.backend.begin_capture(stream)
    rig.double(stream, x, y)
    graph = rig.backend.end_capture(stream)
    graph.launch(stream)
    graph.close()
    with pytest.raises(DeviceError):
        graph.launch(stream)
    assert (rig.read(y, stream) == 2).all()


def test_an_event_after_a_graph_covers_all_of_it(rig: Any) -> None:
    stream, fork, then = rig.stream("origin"), rig.stream("fork"), rig.stream("then")
    x, y, z = rig.full(1), rig.empty("y"), rig.empty("z")
    rig.backend.begin_capture(stream)
    rig.order(stream, fork)
    rig.double(fork, x, y)
    rig.order(fork, stream)
    graph = rig.backend.end_capture(stream)
    graph.launch(stream)
    rig.order(stream, then)
    rig.double(then, y, z)
    assert (rig.read(z, then) == 4).all()
