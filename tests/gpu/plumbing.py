"""Run by test_plumbing.py in a process whose libcuda.so.1 is stub_driver.cpp: the cuda backend on the real bindings.

python -P plumbing.py PLAN      the plan's cubin is already in the cache: NVRTC would ask the driver for more
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
from pathlib import Path

import numpy as np

from qcompiler.errors import DeviceError, OutOfMemoryError
from qcompiler.plan.plan import Plan, from_json
from qcompiler.runtime.backends import registry
from qcompiler.runtime.backends.cuda import CudaBackend


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
    del one, two
    gc.collect()
    assert ctypes.CDLL("libcuda.so.1").stub_live_allocations() == 0, "dropped memory is freed, as in a capture"
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
    kernels = backend.load(plan, backend.build(plan))
    spec, stream = plan.kernels[0], backend.stream("s")
    log = Path(os.environ["STUB_LAUNCHES"])
    backend.launch(stream, kernels[spec.name], [0x7F0000001000, 0x10], [7, 3])
    backend.launch(stream, kernels[spec.name], [1, 2], [7, 0])
    (line,) = log.read_text().splitlines()
    name, *numbers = line.split()
    assert name == f"qk_{spec.name}"
    assert numbers[-3:] == [str(0x7F0000001000), str(0x10), "7"]
    backend.begin_capture(stream)
    assert stream.is_capturing
    backend.launch(stream, kernels[spec.name], [1, 2], [7, 3])
    backend.copy(stream, 0x1000, 0x2000, 8)
    backend.zero(stream, 0x1000, 8)
    graph = backend.end_capture(stream)
    assert graph.shape.nodes == {"kernel": 1, "copy": 1, "zero": 1}, graph.shape
    graph.launch(stream)
    graph.close()
    for wrong, code in ((backend.legacy_stream(), 900), (stream, 401)):
        try:
            (backend.begin_capture if code == 900 else backend.end_capture)(wrong)
        except DeviceError as error:
            assert error.code == code
        else:
            raise AssertionError(f"{code} was expected")


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
    for step in (memory, queues, threads):
        step(backend)
    launches(backend, plan)
    _, current = backend.api.driver.cuCtxGetCurrent()
    assert int(current) == 0, "the caller's (absent) current context came back"
    print("plumbing works")


if __name__ == "__main__":
    main()
