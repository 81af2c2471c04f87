"""The caller's streams: work is ordered between what the caller did before and does after, captures included."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from qcompiler.errors import CaptureRuleError, DeviceError
from qcompiler.runtime import DeviceArray, LoadedProgram
from qcompiler.runtime.backends.base import Backend, Stream

NODES = {"kernel": 3, "copy": 2}


class Caller:
    """Somebody with a stream: fills the argument and reads the result there, without waiting on the host."""

    def __init__(self, small: Any, run: LoadedProgram, stream: Stream) -> None:
        self.small, self.run, self.stream = small, run, stream
        self.backend: Backend = next(iter(run.slots.values())).backend
        self.x: DeviceArray = run.array(small.x(3, 1))
        self.fresh = run.array(small.x(3, 2))
        self.out = small.outputs(3, run)
        self.result = run.array(np.zeros((3, 48), np.float32))
        self.backend.synchronize(self.backend.legacy_stream())

    def fill(self) -> None:
        self.backend.copy(self.stream, self.x.address, self.fresh.address, self.x.nbytes)

    def keep(self) -> None:
        self.backend.copy(self.stream, self.result.address, self.out["y"].address, self.result.nbytes)

    def check(self) -> None:
        self.backend.synchronize(self.stream)
        want = self.run.session()(self.small.x(3, 2))["y"]
        assert np.array_equal(self.result.numpy(), want)


@pytest.fixture
def backend(run: LoadedProgram) -> Backend:
    return next(iter(run.slots.values())).backend


@pytest.fixture
def capturing(backend: Backend) -> Iterator[Callable[[Stream], None]]:
    """`capturing(stream)` begins a capture, which is ended if the test has not."""
    begun: list[Stream] = []

    def begin(stream: Stream) -> None:
        backend.begin_capture(stream)
        begun.append(stream)

    yield begin
    for stream in begun:
        if stream.is_capturing:
            backend.end_capture(stream)


def test_the_default_stream_is_waited_for_and_waits(small: Any, run: LoadedProgram, backend: Backend) -> None:
    caller = Caller(small, run, backend.legacy_stream())
    caller.fill()
    run(caller.x, out=caller.out)
    caller.keep()
    caller.check()


@pytest.mark.parametrize("kind", ["nonblocking", "blocking"])
def test_a_side_stream_is_waited_for_and_waits(small: Any, run: LoadedProgram, backend: Backend, kind: Any) -> None:
    caller = Caller(small, run, backend.stream("side", kind=kind))
    caller.fill()
    run(caller.x, out=caller.out, stream=caller.stream)
    caller.keep()
    caller.check()


def test_the_stream_of_load_is_the_callers_at_every_call(small: Any, run: LoadedProgram, backend: Backend) -> None:
    side = backend.stream("side")
    other = LoadedProgram.from_image(small.image, run.device, stream=side.handle)
    caller = Caller(small, other, side)
    caller.fill()
    other(caller.x, out=caller.out)
    caller.keep()
    caller.check()


def test_replays_are_ordered_like_calls(small: Any, run: LoadedProgram, backend: Backend) -> None:
    caller = Caller(small, run, backend.stream("side"))
    graph = run.capture(small.x(3))
    caller.fill()
    graph.replay(caller.x, out=caller.out, stream=caller.stream)
    caller.keep()
    caller.check()


def test_a_result_of_one_session_is_read_by_another_in_order(small: Any, run: LoadedProgram, backend: Backend) -> None:
    """Even from a stream that did not wait for it: the array knows where it became ready."""
    x = small.x(3)
    side = backend.stream("side")
    raw = run.session()(run.array(x))["raw"]
    again = run.session()(raw, stream=side)
    assert np.array_equal(again["raw"].numpy(), x)


# --- a caller who captures -------------------------------------------------------------------------------------------


def test_a_capturing_caller_is_joined(
    small: Any, run: LoadedProgram, backend: Backend, capturing: Callable[[Stream], None]
) -> None:
    caller = Caller(small, run, backend.stream("side"))
    capturing(caller.stream)
    run(caller.x, out=caller.out, stream=caller.stream)
    caller.keep()
    graph = backend.end_capture(caller.stream)
    assert graph.shape.nodes == NODES | {"copy": NODES["copy"] + 1}
    for seed in (2, 3, 4):
        values = small.x(3, seed)
        backend.upload(caller.stream, caller.x.address, values.ctypes.data, values.nbytes)
        graph.launch(caller.stream)
        backend.synchronize(caller.stream)
        assert np.array_equal(caller.result.numpy(), run.session()(values)["y"])


def test_a_session_is_usable_again_after_the_callers_capture(
    small: Any, run: LoadedProgram, backend: Backend, capturing: Callable[[Stream], None]
) -> None:
    caller = Caller(small, run, backend.stream("side"))
    another = backend.stream("another")
    capturing(caller.stream)
    run(caller.x, out=caller.out, stream=caller.stream)
    with pytest.raises(CaptureRuleError, match="this thread records a capture on another stream"):
        run(caller.x, out=caller.out, stream=another)
    with ThreadPoolExecutor(1) as pool, pytest.raises(CaptureRuleError, match="part of a capture that has not ended"):
        pool.submit(run, caller.x, out=caller.out, stream=another).result()
    backend.end_capture(caller.stream).close()
    caller.fill()
    run(caller.x, out=caller.out, stream=caller.stream)
    caller.keep()
    caller.check()


@pytest.mark.parametrize("kind", ["nonblocking", "blocking"])
def test_a_capture_is_refused_on_the_legacy_stream_before_anything_is_touched(
    small: Any, run: LoadedProgram, backend: Backend, capturing: Callable[[Stream], None], kind: Any
) -> None:
    """The call would go to the legacy stream and miss the capture (or break it): the capture goes on unharmed."""
    caller = Caller(small, run, backend.stream("side", kind=kind))
    calls = float(run(small.x(3))["n"][0])
    capturing(caller.stream)
    with pytest.raises(DeviceError, match="pass the capturing stream as `stream=`") as refusal:
        run(caller.x, out=caller.out)
    assert refusal.value.code == 906
    run(caller.x, out=caller.out, stream=caller.stream)
    graph = backend.end_capture(caller.stream)
    assert graph.shape.nodes == NODES
    assert float(run(small.x(3))["n"][0]) == calls + 1


def test_what_a_capture_forbids_is_refused_before_anything_is_touched(
    small: Any, run: LoadedProgram, backend: Backend, capturing: Callable[[Stream], None]
) -> None:
    caller = Caller(small, run, backend.stream("side"))
    mine = LoadedProgram.from_image(small.image, run.device, stream=caller.stream)
    graph = mine.capture(small.x(3))
    capturing(caller.stream)
    refused: list[tuple[Callable[[], Any], str]] = [
        (lambda: mine(small.x(3), out=caller.out), "a host argument would be copied at capture only"),
        (lambda: mine(caller.x), "pass `out=` with arrays on the device"),
        (lambda: mine(caller.x, out=small.outputs(3)), "a host array cannot be filled"),
        (lambda: mine.capture(caller.x), r"capture\(\) inside a capture"),
        (lambda: graph.replay(caller.x, out=caller.out), r"replay\(\) inside a capture"),
        (lambda: mine.array(small.x(3)), "nothing is uploaded"),
        (mine.session, "make the session before"),
    ]
    for call, reason in refused:
        with pytest.raises(CaptureRuleError, match=reason):
            call()
    with pytest.raises(DeviceError, match="906"):
        caller.result.numpy()
    mine(caller.x, out=caller.out)
    assert backend.end_capture(caller.stream).shape.nodes == NODES
