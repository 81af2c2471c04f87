"""Memory of arguments and results: reused only when everybody is done with it, kept while the device still uses it."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from qcompiler.errors import ArgumentError, CaptureRuleError, DeviceError, DeviceUnavailableError, RuntimeFailure
from qcompiler.runtime import LoadedProgram
from qcompiler.runtime import session as session_module
from qcompiler.runtime.backends.base import Backend
from qcompiler.runtime.device_array import size_class
from qcompiler.runtime.executor import PlanExecutor


@pytest.fixture
def backend(run: LoadedProgram) -> Backend:
    return next(iter(run.slots.values())).backend


# --- reuse -----------------------------------------------------------------------------------------------------------


def test_a_result_is_not_overwritten_while_another_session_reads_it(
    small: Any, run: LoadedProgram, backend: Backend
) -> None:
    """`raw` goes from one session to another on a stream of its own, and is dropped before that is done."""
    makes, reads = run.session(), run.session()
    a, b = backend.stream("a"), backend.stream("b")
    x, other = run.array(small.x(3)), run.array(small.x(3, 5))
    backend.synchronize()
    read = reads(makes(x, stream=a)["raw"], stream=b)
    reads(other, stream=b)
    for _ in range(3):
        makes(other, stream=a)
    assert np.array_equal(read["raw"].numpy(), small.x(3))
    backend.synchronize()


def test_an_array_is_not_overwritten_while_a_session_reads_it(small: Any, run: LoadedProgram, backend: Backend) -> None:
    stream = backend.stream("b")
    read = run(run.array(small.x(3)), stream=stream)
    run(run.array(small.x(3, 1)), stream=stream)
    kept = [run.array(small.x(3, seed)) for seed in range(2, 5)]
    assert np.array_equal(read["raw"].numpy(), small.x(3))
    assert np.array_equal(kept[0].numpy(), small.x(3, 2))
    backend.synchronize()


def test_a_result_is_not_overwritten_while_its_caller_reads_it(
    small: Any, run: LoadedProgram, backend: Backend
) -> None:
    """What a caller does on one stream is not waited for by calls on another."""
    a, b = backend.stream("a"), backend.stream("b")
    x, mine = run.array(small.x(3)), backend.allocate(3 * 64 * 4, label="mine")
    backend.synchronize()
    raw = run(x, stream=a)["raw"]
    backend.copy(a, mine.address, raw.address, mine.nbytes)
    del raw
    for _ in range(3):
        run(x, stream=b)
    backend.synchronize()


def test_results_of_ever_other_sizes_share_memory() -> None:
    assert [size_class(n) for n in (0, 1, 512, 513, 5000, 100_000)] == [512, 512, 512, 1024, 5120, 114_688]
    assert all(n <= size_class(n) <= max(512, n * 5 // 4 + 512) for n in range(1, 200_000, 777))
    assert len({size_class(n) for n in range(1, 1 << 20)}) < 60


def test_out_that_is_still_written_elsewhere_is_waited_for(small: Any, run: LoadedProgram, backend: Backend) -> None:
    x = small.x(3)
    out = run(x, out=small.outputs(3, run), stream=backend.stream("a"))
    run.session()(small.x(3, 4), out=out, stream=backend.stream("b"))
    assert np.array_equal(out["raw"].numpy(), small.x(3, 4))


# --- states and captures ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("member", [True, False])
def test_states_are_left_alone_while_the_caller_captures(
    small: Any, run: LoadedProgram, backend: Backend, member: bool
) -> None:
    session, stream = run.session(), backend.stream("a")
    x, out = run.array(small.x(3)), small.outputs(3, run)
    other = LoadedProgram.from_image(small.image, run.device, stream=stream).session()
    backend.synchronize()
    backend.begin_capture(stream)
    session(x, out=out, stream=stream)
    for use in (session if member else other).reset, (session if member else other).states:
        with pytest.raises(DeviceError if member else CaptureRuleError, match="a capture"):
            use()
    assert backend.end_capture(stream).shape.nodes == {"copy": 2, "kernel": 3}
    gc.collect()
    assert float(session(x)["n"].numpy()[0]) == 11


def test_results_are_read_while_their_session_is_captured_elsewhere(
    small: Any, run: LoadedProgram, same: Callable[[Any, Any], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever reads them waits for an event and keeps off the streams that capture."""
    session, other = run.session(), run.session()
    raw = session(run.array(small.x(3)))["raw"]
    out = small.outputs(3, run) | {"raw": session(run.array(small.x(3)))["raw"]}
    original, here = PlanExecutor.run, threading.get_ident()
    read: list[Any] = []

    def use() -> None:
        read.extend([raw.numpy(), other(raw)["raw"].numpy(), other(small.x(3, 2), out=out)["raw"].numpy()])

    def record(self: Any, context: Any, arenas: Any, binding: Any) -> None:
        if session.memory.freeze.frozen and threading.get_ident() == here:
            thread = threading.Thread(target=use)
            thread.start()
            thread.join()
        original(self, context, arenas, binding)

    with monkeypatch.context() as patch:
        patch.setattr(PlanExecutor, "run", record)
        graph = session.capture(small.x(3))
    assert [each.tobytes() for each in read] == [small.x(3, seed).tobytes() for seed in (1, 1, 2)]
    session.reset()
    assert same(graph.replay(small.x(3, 4)), run.session()(small.x(3, 4)))


def test_capture_follows_the_callers_stream(small: Any, run: LoadedProgram, backend: Backend) -> None:
    stream = backend.stream("a")
    x, fresh = run.array(small.x(3)), run.array(small.x(3, 2))
    backend.synchronize()
    backend.copy(stream, x.address, fresh.address, x.nbytes)
    graph = run.capture(x, stream=stream)
    assert np.array_equal(graph.replay(x, stream=stream)["raw"].numpy(), small.x(3, 2))


def test_a_graphs_own_outputs_are_no_place_for_results(small: Any, run: LoadedProgram) -> None:
    graph = run.capture(small.x(3))
    with pytest.raises(ArgumentError, match=r"read `g\.outputs` afterwards"):
        graph.replay(small.x(3), out=graph.outputs)
    assert float(graph.replay(small.x(3))["n"][0]) == 11


def test_an_array_that_is_on_the_device_is_not_copied_there(small: Any, run: LoadedProgram) -> None:
    with pytest.raises(DeviceUnavailableError, match=r"this one is on .*; pass it to the program as it is"):
        run.array(run.array(small.x(3)))
    with pytest.raises(DeviceUnavailableError, match="this one is on meta; copy it to the host first"):
        run.array(torch.empty(3, device="meta"))


# --- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["host", "device"])
@pytest.mark.parametrize("after", [1, 3, 5])
def test_nothing_of_a_call_that_failed_midway_is_under_way(
    small: Any, run: LoadedProgram, monkeypatch: pytest.MonkeyPatch, after: int, place: str
) -> None:
    """The next call would meet it: streams of the session that the failed call did not join."""
    session = run.session()
    original = PlanExecutor.run

    def fail(self: Any, context: Any, arenas: Any, binding: Any) -> None:
        for step in self.prepare(binding).steps[:after]:
            step.issue(context, arenas)
        raise KeyboardInterrupt("midway")

    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(PlanExecutor, "run", fail)
            with pytest.raises(KeyboardInterrupt, match="midway"):
                session(run.array(small.x(3)) if place == "device" else small.x(3))
        assert PlanExecutor.run is original
        assert np.array_equal(session(small.x(3, 3))["y"], run.session()(small.x(3, 3))["y"])
    session.queues.first.backend.synchronize()


def test_host_memory_outlives_a_wait_that_fails(
    small: Any, run: LoadedProgram, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device writes there later on: into memory that is somebody else's if it was freed."""
    array = run(run.array(small.x(3)))["raw"]
    reads = [array.numpy, run.session().states, lambda: run(small.x(3))]
    made: list[weakref.ref[Any]] = []
    empty, block = np.empty, session_module.Block

    def fail(stream: Any = None) -> None:
        raise RuntimeFailure("interrupted")

    def remember(make: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            found = make(*args)
            made.append(weakref.ref(found))
            return found

        return call

    with monkeypatch.context() as patch:
        patch.setattr(backend, "synchronize", fail)
        patch.setattr(np, "empty", remember(empty))
        patch.setattr(session_module, "Block", remember(block))
        for read in reads:
            with pytest.raises(RuntimeFailure, match="interrupted"):
                read()
    gc.collect()
    assert len(made) >= 5 and all(each() is not None for each in made)
    backend.synchronize()


# --- fork ------------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_goes_on_while_its_parent_was_busy(small: Any) -> None:
    """The simulated GPU alone: a driver's context does not survive a fork."""
    run = LoadedProgram.from_image(small.image, "sim:3")
    want = run(small.x(3))["y"].tobytes()
    stop = threading.Event()

    def work(use: Callable[[], Any]) -> None:
        while not stop.is_set():
            use()

    session = run.session()
    graphs = run.session()
    uses: list[Callable[[], Any]] = [
        lambda: session(small.x(9)),
        lambda: graphs.capture(small.x(9)),
        lambda: run.array(small.x(9)),
    ]
    threads = [threading.Thread(target=work, args=(use,)) for use in uses]
    for thread in threads:
        thread.start()
    try:
        codes = [_child(run, small, want) for _ in range(4)]
    finally:
        stop.set()
        for thread in threads:
            thread.join(timeout=60)
    assert codes == [0] * 4
    assert run(small.x(3))["y"].tobytes() == want


def _child(run: LoadedProgram, small: Any, want: bytes) -> int:
    """The exit status of a child that calls, captures and uploads; 14 (SIGALRM) if it hangs."""
    child = os.fork()
    if child == 0:
        import signal

        signal.alarm(20)
        fresh = run.session()
        results = (
            fresh(run.array(small.x(3)))["y"].numpy(),
            fresh.capture(small.x(3)).replay(small.x(3))["y"],
            run(small.x(3))["y"],
        )
        os._exit(0 if gc.isenabled() and all(each.tobytes() == want for each in results) else 1)
    return os.waitpid(child, 0)[1]
