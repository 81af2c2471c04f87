"""Run by test_plumbing.py in a process whose libcuda.so.1 is stub_driver.cpp: the cuda backend on the real bindings.

python -P plumbing.py PLAN      the plan's cubin is already in the cache: NVRTC would ask the driver for more
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np

from qcompiler.errors import CaptureRuleError, DeviceError, OutOfMemoryError
from qcompiler.plan.plan import Plan, from_json
from qcompiler.runtime.backends import registry
from qcompiler.runtime.backends.base import CaptureMode
from qcompiler.runtime.backends.cuda import CudaBackend
from qcompiler.runtime.backends.cuda_driver import RUNTIME_NAMES

STUB = ctypes.CDLL("libcuda.so.1")
STUB.stub_calls.restype = ctypes.c_char_p


def calls() -> list[str]:
    """The stub's functions called since the last question: for loading, captures and graphs."""
    return STUB.stub_calls().decode().split()


def devices() -> CudaBackend:
    assert registry.is_available("cuda:0")
    assert not registry.is_available("cuda:1")
    assert registry.architecture("cuda:0") == "sm_90a"
    backend = CudaBackend(0)
    assert backend.isa == "sm_90a"
    return backend


def memory(backend: CudaBackend) -> None:
    stream, one, two = backend.stream("s"), backend.allocate(1000), backend.allocate(1000)
    assert one.address % 256 == 0
    resource = one.buffer.memory_resource
    assert isinstance(resource, backend.api.core.MemoryResource)
    assert (resource.device_id, resource.is_device_accessible, resource.is_host_accessible) == (0, True, False)
    assert (one.buffer.size, one.buffer.device_id) == (1000, 0)
    given, back = np.arange(250, dtype=np.float32), np.ones(250, np.float32)
    backend.download(stream, back.ctypes.data, one.address, 1000)
    assert not back.any(), "fresh memory is cleared"
    backend.upload(stream, one.address, given.ctypes.data, 1000)
    backend.copy(stream, two.address, one.address, 1000)
    backend.zero(stream, two.address, 4)
    backend.download(stream, back.ctypes.data, two.address, 1000)
    backend.synchronize(stream)
    assert np.array_equal(back, given)
    assert backend.device_of(given.ctypes.data) is None
    one.close()
    one.close()
    del one, two
    gc.collect()
    assert STUB.stub_live_allocations() == 0, "memory is freed, closed or dropped, as in a capture"
    del resource
    try:
        backend.allocate(1 << 40, label="weights")
    except OutOfMemoryError as error:
        assert "100 of 200" in str(error)
    else:
        raise AssertionError("a terabyte was given")


def queues(backend: CudaBackend) -> None:
    one, two, event = backend.stream("a"), backend.stream("b", kind="blocking"), backend.event("e")
    backend.record(event, one)
    backend.wait(two, event)
    assert backend.query(event)
    assert backend.query(two)
    backend.synchronize()
    assert backend.caller_stream(one.handle).handle == one.handle
    assert backend.caller_stream() is backend.legacy_stream()
    assert not backend.legacy_stream().is_capturing


def launches(backend: CudaBackend, plan: Plan) -> None:
    calls()
    kernels = backend.load(plan, backend.build(plan))
    assert calls() == ["cuLibraryLoadData", "cuFuncLoad"]
    again = CudaBackend(0)
    assert again.load(plan, again.build(plan)).keys() == kernels.keys()
    gc.collect()
    assert calls() == ["cuFuncLoad"], "a cubin is loaded once, and stays"
    spec, stream = plan.kernels[0], backend.stream("s")
    log = Path(os.environ["STUB_LAUNCHES"])
    backend.launch(stream, kernels[spec.name], [0x7F0000001000, 0x10], [7, 3])
    backend.launch(stream, kernels[spec.name], [1, 2], [7, 0])
    (line,) = log.read_text().splitlines()
    name, *numbers = line.split()
    assert name == "qk_0", "kernels have numbers for names"
    assert numbers[-3:] == [str(0x7F0000001000), str(0x10), "7"]
    one, two = backend.allocate(8), backend.allocate(8)
    given, back = np.arange(2, dtype=np.float32), np.zeros(2, np.float32)
    backend.upload(stream, two.address, given.ctypes.data, 8)
    backend.begin_capture(stream)
    assert stream.is_capturing
    backend.launch(stream, kernels[spec.name], [1, 2], [7, 3])
    backend.copy(stream, one.address, two.address, 8)
    backend.zero(stream, two.address, 8)
    graph = backend.end_capture(stream)
    assert graph.shape.nodes == {"kernel": 1, "copy": 1, "zero": 1}, graph.shape
    graph.launch(stream)
    backend.download(stream, back.ctypes.data, one.address, 8)
    assert np.array_equal(back, given), "a replay does what was captured"
    graph.launch(backend.legacy_stream())
    graph.launch(backend.caller_stream(stream.handle))
    graph.close()
    graph.close()
    assert STUB.stub_live_graphs() == 0


def refused(code: int, call: Callable[..., object], *arguments: object) -> None:
    try:
        call(*arguments)
    except DeviceError as error:
        assert (error.code, error.symbol) == (code, RUNTIME_NAMES[code]), error
    else:
        raise AssertionError(f"{code} was expected")


def captures(backend: CudaBackend) -> None:
    """Forks and joins by events, in every mode; captures that break, which have ended and left nothing behind."""
    main, side = backend.stream("main"), backend.stream("side")
    fork, join = backend.event("fork"), backend.event("join")
    modes: list[CaptureMode] = ["global", "thread_local", "relaxed"]

    def forked(mode: CaptureMode = "thread_local", joined: bool = True) -> None:
        backend.begin_capture(main, mode)
        assert STUB.stub_mode(ctypes.c_void_p(main.handle)) == modes.index(mode)
        backend.record(fork, main)
        backend.wait(side, fork)
        assert side.is_capturing
        backend.zero(side, 0x1000, 8)
        backend.zero(main, 0x2000, 8)
        backend.record(join, side)
        if joined:
            backend.wait(main, join)

    for mode in modes:
        forked(mode)
        graph = backend.end_capture(main)
        assert graph.shape.nodes == {"zero": 2}
        assert not main.is_capturing
        assert not side.is_capturing
        del graph
        gc.collect()
        assert STUB.stub_live_graphs() == 0, "a dropped graph is destroyed"

    def invalidated() -> None:
        forked()
        STUB.stub_invalidate(ctypes.c_void_p(main.handle))

    for code, broken in ((901, invalidated), (904, lambda: forked(joined=False))):
        broken()
        calls()
        refused(code, backend.end_capture, main)
        assert calls().count("cuStreamEndCapture") == 1
        assert not main.is_capturing
        assert not backend.captures_here()
        backend.begin_capture(main)  # what is left of the broken one must not end this
        gc.collect()
        assert main.is_capturing
        backend.zero(main, 0x1000, 8)
        backend.end_capture(main).close()
        assert STUB.stub_live_graphs() == 0

    forked()
    elsewhere = threading.Thread(target=refused, args=(908, backend.end_capture, main))
    elsewhere.start()
    elsewhere.join()
    assert backend.captures_here(), "another thread cannot end it"
    refused(401, backend.begin_capture, main)
    STUB.stub_instantiate(2)
    refused(2, backend.end_capture, main)
    STUB.stub_instantiate(0)
    assert STUB.stub_live_graphs() == 0
    assert not main.is_capturing

    refused(900, backend.begin_capture, backend.legacy_stream())
    refused(401, backend.end_capture, main)
    backend.begin_capture(main)
    try:
        backend.end_capture(main)
    except CaptureRuleError:
        assert STUB.stub_live_graphs() == 0
    else:
        raise AssertionError("an empty graph was made")


def threads(backend: CudaBackend) -> None:
    """cuda.core's devices are objects of one thread; a thread that never saw the device can use the backend."""
    failures: list[BaseException] = []

    def work() -> None:
        try:
            memory(backend)
            queues(backend)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]


def main() -> None:
    plan = from_json(Path(sys.argv[1]).read_bytes())
    backend = devices()
    for step in (memory, queues, threads, captures):
        step(backend)
    launches(backend, plan)
    _, current = backend.api.driver.cuCtxGetCurrent()
    assert int(current) == 0, "the caller's (absent) current context came back"
    print("plumbing works")


if __name__ == "__main__":
    main()
