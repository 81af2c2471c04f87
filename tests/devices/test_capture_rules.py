"""What stream capture forbids, one test for each rule: CUDA's code and name, and what becomes of the capture.

The same tests run on a GPU, so they state what CUDA does and nothing more; rules of our own are at the end. Where the
documentation names no code, or does not say what becomes of the capture, the test is marked `cuda_is_silent`: the
simulated GPU keeps to it, and on hardware the outcome is learned, not judged (`make gpu-check` lists both).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from qcompiler.errors import CaptureRuleError, DeviceError

MODES = ("thread_local", "global", "relaxed")


def in_thread(call: Callable[[], Any]) -> Exception | None:
    """What a call raised on another thread."""
    raised: list[Exception | None] = [None]

    def run() -> None:
        try:
            call()
        except Exception as error:  # the test judges it
            raised[0] = error

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return raised[0]


def ends_invalidated(rig: Any, stream: Any, expect: Any) -> None:
    """The capture was broken, says so, and leaves a stream that works."""
    with expect(901):
        rig.backend.end_capture(stream)
    assert not stream.is_capturing
    x, y = rig.full(1), rig.empty("y")
    rig.double(stream, x, y)
    assert (rig.read(y, stream) == 2).all()


# --- 900: not while a stream captures --------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["nonblocking", "blocking"])
@pytest.mark.parametrize("call", ["synchronize", "query"])
def test_a_capturing_stream_cannot_be_waited_for(rig: Any, expect: Any, mode: str, kind: str, call: str) -> None:
    stream = rig.stream("captured", kind)
    rig.backend.begin_capture(stream, mode)
    with expect(900):
        getattr(rig.backend, call)(stream)
    ends_invalidated(rig, stream, expect)


@pytest.mark.cuda_is_silent("900, and the capture is invalidated")
@pytest.mark.parametrize("mode", MODES)
def test_a_device_cannot_be_waited_for_while_it_captures(rig: Any, expect: Any, mode: str) -> None:
    stream = rig.stream()
    rig.backend.begin_capture(stream, mode)
    with expect(900):
        rig.backend.synchronize()
    ends_invalidated(rig, stream, expect)


@pytest.mark.cuda_is_silent("900 in the other thread, and the capture is invalidated")
def test_another_thread_cannot_wait_for_the_device_either(rig: Any, expect: Any) -> None:
    stream = rig.stream()
    rig.backend.begin_capture(stream, "thread_local")
    error = in_thread(rig.backend.synchronize)
    assert isinstance(error, DeviceError)
    assert error.code == 900
    ends_invalidated(rig, stream, expect)


@pytest.mark.cuda_is_silent("900, and the capture is invalidated")
@pytest.mark.parametrize("mode", ["thread_local", "global"])
def test_no_allocation_by_the_capturing_thread(rig: Any, expect: Any, mode: str) -> None:
    stream = rig.stream()
    rig.backend.begin_capture(stream, mode)
    with expect(900):
        rig.backend.allocate(1024)
    ends_invalidated(rig, stream, expect)


@pytest.mark.cuda_is_silent("900 in the other thread, and the capture is invalidated")
def test_no_allocation_by_any_thread_in_global_mode(rig: Any, expect: Any) -> None:
    stream = rig.stream()
    rig.backend.begin_capture(stream, "global")
    error = in_thread(lambda: rig.backend.allocate(1024))
    assert isinstance(error, DeviceError)
    assert (error.code, error.symbol) == (900, "cudaErrorStreamCaptureUnsupported")
    ends_invalidated(rig, stream, expect)


@pytest.mark.parametrize("mode", ["thread_local", "relaxed"])
def test_other_threads_may_allocate_and_wait_outside_global_mode(rig: Any, mode: str) -> None:
    stream, beside, x, y = rig.stream(), rig.stream("beside"), rig.full(1), rig.empty("y")
    rig.backend.begin_capture(stream, mode)
    rig.double(stream, x, y)
    assert in_thread(lambda: rig.backend.allocate(1024)) is None
    assert in_thread(lambda: rig.backend.synchronize(beside)) is None
    assert rig.backend.end_capture(stream).shape.nodes == {"kernel": 1}


@pytest.mark.cuda_is_silent("900 in the other thread, and the capture is invalidated")
def test_another_thread_cannot_wait_for_anything_in_global_mode(rig: Any, expect: Any) -> None:
    stream, beside = rig.stream(), rig.stream("beside")
    rig.backend.begin_capture(stream, "global")
    error = in_thread(lambda: rig.backend.synchronize(beside))
    assert isinstance(error, DeviceError)
    assert error.code == 900
    ends_invalidated(rig, stream, expect)


def test_relaxed_mode_lets_its_thread_allocate(rig: Any) -> None:
    stream, x = rig.stream(), rig.full(1)
    rig.backend.begin_capture(stream, "relaxed")
    y = rig.backend.allocate(x.nbytes)
    rig.double(stream, x, y)
    rig.backend.end_capture(stream)


@pytest.mark.cuda_is_silent("900 for kernels that are loaded already, and the capture is invalidated")
def test_no_module_is_loaded_by_the_capturing_thread(rig: Any, expect: Any) -> None:
    stream = rig.stream()
    rig.backend.begin_capture(stream)
    with expect(900):
        rig.backend.load(rig.plan, rig.native)
    ends_invalidated(rig, stream, expect)


@pytest.mark.cuda_is_silent("900")
def test_the_legacy_stream_cannot_be_captured(rig: Any, expect: Any) -> None:
    with expect(900):
        rig.backend.begin_capture(rig.legacy())
    assert not rig.legacy().is_capturing


# --- 901: an invalidated capture takes no work -----------------------------------------------------------------------


def test_an_invalidated_capture_refuses_work_on_all_its_streams(rig: Any, expect: Any) -> None:
    stream, fork, x, y = rig.stream("origin"), rig.stream("fork"), rig.full(1), rig.empty("y")
    rig.backend.begin_capture(stream)
    rig.double(stream, x, y)
    rig.order(stream, fork)
    with expect(900):
        rig.backend.query(stream)
    for each in (stream, fork):
        with expect(901):
            rig.double(each, x, y)
    with expect(901):
        rig.copy(stream, x, y)
    with expect(901):
        rig.backend.end_capture(stream)
    assert not stream.is_capturing
    assert not fork.is_capturing
    rig.double(fork, x, y)
    assert (rig.read(y, fork) == 2).all()


# --- 902, 905: what belongs to different captures, or to none, stays apart -------------------------------------------


@pytest.mark.cuda_is_silent("902, and both captures are invalidated")
def test_two_captures_cannot_be_merged(rig: Any, expect: Any) -> None:
    one, two, x, y, z = rig.stream("one"), rig.stream("two"), rig.full(1), rig.empty("y"), rig.empty("z")
    rig.backend.begin_capture(one)
    rig.backend.begin_capture(two)
    rig.double(one, x, y)
    rig.double(two, x, z)
    event = rig.mark(one)
    with expect(902):
        rig.backend.wait(two, event)
    for stream in (two, one):
        with expect(901):
            rig.backend.end_capture(stream)


def test_two_captures_side_by_side_are_two_graphs(rig: Any) -> None:
    one, two, x, y, z = rig.stream("one"), rig.stream("two"), rig.full(1), rig.empty("y"), rig.empty("z")
    rig.backend.begin_capture(one)
    rig.backend.begin_capture(two)
    rig.double(one, x, y)
    rig.double(two, x, z)
    rig.increment(two, z, z)
    first, second = rig.backend.end_capture(one), rig.backend.end_capture(two)
    assert (first.shape.count, second.shape.count) == (1, 2)


def test_a_capturing_stream_cannot_wait_for_an_event_outside(rig: Any, expect: Any) -> None:
    stream, beside, x, y = rig.stream(), rig.stream("beside"), rig.full(1), rig.empty("y")
    rig.double(beside, x, y)
    event = rig.mark(beside)
    rig.backend.begin_capture(stream)
    with expect(905):
        rig.backend.wait(stream, event)
    ends_invalidated(rig, stream, expect)


# --- 903, 904, 908: how captures end ---------------------------------------------------------------------------------


def test_a_capture_ends_on_the_stream_where_it_began(rig: Any, expect: Any) -> None:
    stream, fork, x, y = rig.stream("origin"), rig.stream("fork"), rig.full(1), rig.empty("y")
    rig.backend.begin_capture(stream)
    rig.order(stream, fork)
    rig.double(fork, x, y)
    rig.order(fork, stream)
    with expect(903):
        rig.backend.end_capture(fork)
    rig.finish(stream)
    assert not stream.is_capturing
    assert not fork.is_capturing


def test_a_fork_must_be_joined(rig: Any, expect: Any) -> None:
    stream, fork, x, y, z = rig.stream("origin"), rig.stream("fork"), rig.full(1), rig.empty("y"), rig.empty("z")
    rig.backend.begin_capture(stream)
    rig.double(stream, x, y)
    rig.order(stream, fork)
    rig.double(fork, x, z)
    with expect(904):
        rig.backend.end_capture(stream)
    assert not stream.is_capturing
    assert not fork.is_capturing


def test_a_fork_that_goes_on_after_its_join_must_be_joined_again(rig: Any, expect: Any) -> None:
    stream, fork, x, y, z = rig.stream("origin"), rig.stream("fork"), rig.full(1), rig.empty("y"), rig.empty("z")
    rig.backend.begin_capture(stream)
    rig.double(stream, x, y)
    rig.order(stream, fork)
    rig.double(fork, x, z)
    rig.order(fork, stream)
    rig.double(fork, z, x)
    with expect(904):
        rig.backend.end_capture(stream)
    assert not fork.is_capturing


@pytest.mark.cuda_is_silent("the capture ends well")
def test_a_fork_without_work_needs_no_join(rig: Any) -> None:
    stream, fork, x, y = rig.stream("origin"), rig.stream("fork"), rig.full(1), rig.empty("y")
    rig.backend.begin_capture(stream)
    rig.order(stream, fork)
    assert fork.is_capturing
    rig.double(stream, x, y)
    assert rig.backend.end_capture(stream).shape.nodes == {"kernel": 1}
    assert not fork.is_capturing


@pytest.mark.parametrize("mode", ["thread_local", "global"])
def test_a_capture_ends_on_the_thread_where_it_began(rig: Any, mode: str) -> None:
    stream, x, y = rig.stream(), rig.full(1), rig.empty("y")
    rig.backend.begin_capture(stream, mode)
    rig.double(stream, x, y)
    error = in_thread(lambda: rig.backend.end_capture(stream))
    assert isinstance(error, DeviceError)
    assert (error.code, error.symbol) == (908, "cudaErrorStreamCaptureWrongThread")
    rig.finish(stream)
    assert not stream.is_capturing


def test_a_relaxed_capture_ends_on_any_thread(rig: Any) -> None:
    stream, x, y = rig.stream(), rig.full(1), rig.empty("y")
    rig.backend.begin_capture(stream, "relaxed")
    rig.double(stream, x, y)
    assert in_thread(lambda: rig.backend.end_capture(stream)) is None
    assert not stream.is_capturing


# --- 906: the legacy stream is tied to blocking streams --------------------------------------------------------------


@pytest.mark.cuda_is_silent("906, and the capture is invalidated")
@pytest.mark.parametrize("call", ["work", "synchronize", "record"])
def test_no_use_of_the_legacy_stream_while_a_blocking_stream_captures(rig: Any, expect: Any, call: str) -> None:
    stream, x = rig.stream("captured", "blocking"), rig.full(1)
    rig.backend.begin_capture(stream)
    with expect(906):
        if call == "work":
            rig.backend.zero(rig.legacy(), x.address, x.nbytes)
        elif call == "synchronize":
            rig.backend.synchronize(rig.legacy())
        else:
            rig.mark(rig.legacy())
    ends_invalidated(rig, stream, expect)


def test_asking_whether_the_legacy_stream_captures_is_refused_but_breaks_nothing(rig: Any, expect: Any) -> None:
    stream, x, y = rig.stream("captured", "blocking"), rig.full(1), rig.empty("y")
    rig.backend.begin_capture(stream)
    with expect(906):
        _ = rig.legacy().is_capturing
    rig.double(stream, x, y)
    assert rig.backend.end_capture(stream).shape.count == 1


def test_the_legacy_stream_is_free_while_a_nonblocking_stream_captures(rig: Any) -> None:
    stream, x, y, z = rig.stream(), rig.full(1), rig.empty("y"), rig.empty("z")
    rig.backend.begin_capture(stream)
    rig.double(stream, x, y)
    rig.backend.zero(rig.legacy(), z.address, z.nbytes)
    assert not rig.legacy().is_capturing
    graph = rig.backend.end_capture(stream)
    graph.launch(stream)
    assert (rig.read(y, stream) == 2).all()


# --- 907: an event recorded in a capture stands for no work ----------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_a_captured_event_cannot_be_asked_for(rig: Any, expect: Any, mode: str) -> None:
    stream, x, y = rig.stream(), rig.full(1), rig.empty("y")
    rig.backend.begin_capture(stream, mode)
    rig.double(stream, x, y)
    event = rig.mark(stream)
    with expect(907):
        rig.backend.query(event)
    ends_invalidated(rig, stream, expect)


@pytest.mark.cuda_is_silent("907 until it is recorded again")
def test_a_captured_event_cannot_be_asked_for_after_the_capture(rig: Any, expect: Any) -> None:
    stream, x, y = rig.stream(), rig.full(1), rig.empty("y")
    rig.backend.begin_capture(stream)
    rig.double(stream, x, y)
    event = rig.mark(stream)
    rig.backend.end_capture(stream)
    with expect(907):
        rig.backend.query(event)
    rig.backend.record(event, stream)  # and is an ordinary event again
    rig.backend.synchronize(stream)
    assert rig.backend.query(event)


# --- 401: beginning twice, ending what was not begun -----------------------------------------------------------------


@pytest.mark.cuda_is_silent("401, and the capture goes on")
def test_beginning_twice_is_refused_and_the_capture_goes_on(rig: Any, expect: Any) -> None:
    stream, fork, x, y = rig.stream(), rig.stream("fork"), rig.full(1), rig.empty("y")
    rig.backend.begin_capture(stream)
    rig.order(stream, fork)
    for each in (stream, fork):
        with expect(401):
            rig.backend.begin_capture(each)
    rig.double(stream, x, y)
    assert rig.backend.end_capture(stream).shape.count == 1


@pytest.mark.cuda_is_silent("401")
def test_ending_what_was_not_begun_is_refused(rig: Any, expect: Any) -> None:
    with expect(401):
        rig.backend.end_capture(rig.stream())


# --- an exception in the middle --------------------------------------------------------------------------------------


def test_an_exception_inside_a_capture_leaves_nothing_dangling(rig: Any) -> None:
    stream, fork, x, y, z = rig.stream("origin"), rig.stream("fork"), rig.full(1), rig.empty("y"), rig.empty("z")

    def capture(fails: bool) -> Any:
        rig.backend.begin_capture(stream)
        try:
            rig.double(stream, x, y)
            rig.order(stream, fork)
            rig.double(fork, y, z)
            if fails:
                raise ZeroDivisionError
            rig.order(fork, stream)
        except ZeroDivisionError:
            rig.finish(stream)
            return None
        return rig.backend.end_capture(stream)

    assert capture(fails=True) is None
    assert not stream.is_capturing
    assert not fork.is_capturing
    rig.backend.synchronize()
    rig.backend.allocate(64).close()
    graph = capture(fails=False)
    graph.launch(stream)
    assert (rig.read(z, stream) == 4).all()


def test_captures_here_knows_this_threads_captures(rig: Any) -> None:
    stream, x, y = rig.stream(), rig.full(1), rig.empty("y")
    seen: list[bool] = []
    assert not rig.backend.captures_here()
    rig.backend.begin_capture(stream)
    rig.double(stream, x, y)
    assert rig.backend.captures_here()
    assert in_thread(lambda: seen.append(rig.backend.captures_here())) is None
    assert seen == [False]
    rig.backend.end_capture(stream)
    assert not rig.backend.captures_here()


# --- rules of our own ------------------------------------------------------------------------------------------------


def test_an_empty_graph_is_refused(rig: Any) -> None:
    stream = rig.stream()
    rig.backend.begin_capture(stream)
    with pytest.raises(CaptureRuleError):
        rig.backend.end_capture(stream)
    assert not stream.is_capturing


def test_a_graph_is_not_launched_inside_a_capture(sim: Any) -> None:
    stream, x, y = sim.stream(), sim.full(1), sim.empty("y")
    sim.backend.begin_capture(stream)
    sim.double(stream, x, y)
    graph = sim.backend.end_capture(stream)
    sim.backend.begin_capture(stream)
    with pytest.raises(CaptureRuleError, match="graph inside a graph"):
        graph.launch(stream)
    sim.increment(stream, x, y)
    assert sim.backend.end_capture(stream).shape.count == 1  # the capture was not touched
