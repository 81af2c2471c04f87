"""Captures and graphs of the cuda backend: cuda.core's GraphBuilder on existing streams, and its Graph.

Forks and joins are events between streams, which the driver follows; the builder begins, ends and instantiates.

Three functions of cuda.core 1.2.2 (graph/_graph_builder.pyx) are not used.  `end_building` first reads `is_building`,
which on an invalidated capture raises a RuntimeError without a code and leaves the capture open; `cuStreamEndCapture`
ends it and returns 901.  The destructor of a builder whose capture failed ends its stream's capture again, perhaps a
later one, and destroys a graph that the driver destroyed when the capture failed; such a builder is never released.
`GraphDefinition.nodes` reads the parameters of every node, and is missing in 1.0; nodes are counted by handle.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from qcompiler.errors import CaptureRuleError, DeviceError
from qcompiler.runtime.backends import base
from qcompiler.runtime.backends.cuda_driver import RUNTIME_NAMES, Api

CAPTURING = 1
"""CU_STREAM_CAPTURE_STATUS_ACTIVE. 0 means none, 2 an invalidated capture that must still be ended."""

NODE_NAMES = {"KERNEL": "kernel", "MEMCPY": "copy", "MEMSET": "zero", "EMPTY": "empty"}
"""Kinds of graph nodes under the plan's names; others keep CUDA's in lower case."""


@dataclass(frozen=True)
class CudaCapture:
    """A running capture, by `device` (its index) and the thread that began it."""

    device: int
    thread: int
    builder: Any


_captures: dict[int, CudaCapture] = {}
"""Captures that this backend began, by their stream's handle. The driver does not tell which thread captures."""


def captures_here(device: int) -> bool:
    """Whether this thread captures on some stream of the device."""
    here = (device, threading.get_ident())
    return any((capture.device, capture.thread) == here for capture in tuple(_captures.values()))


def begin(found: Api, device: int, stream: Any, mode: base.CaptureMode) -> None:
    """Begins a capture on a cuda.core Stream."""
    with found.translated("beginning a capture"):
        builder = stream.create_graph_builder()
        builder.begin_building(mode)
    handle = int(stream.handle)
    if (ended := _captures.pop(handle, None)) is not None:  # other code ended it, or this one could not have begun
        _keep_for_ever(ended.builder)
    _captures[handle] = CudaCapture(device, threading.get_ident(), builder)


def end(found: Api, stream: Any) -> tuple[Any, base.GraphShape]:
    """Ends the capture of a cuda.core Stream: a cuda.core Graph, and its contents.

    DeviceError 901…908 for a broken capture, which has ended, too (except for 908, another thread's); CaptureRuleError
    for an empty one.
    """
    handle = int(stream.handle)
    held = _captures.get(handle)
    if held is None:
        if _is_fork(found, stream.handle):
            done = found.driver.cuStreamEndCapture(stream.handle)  # gives 903
            found.check(done, "ending a capture where it did not begin")
        raise DeviceError("the stream does not capture, or not for this backend", 401, RUNTIME_NAMES[401])
    try:
        shape = _end(found, held.builder, stream.handle)
    except DeviceError:
        if not _capture_of(found, stream.handle)[0]:
            _captures.pop(handle, None)
            _keep_for_ever(held.builder)
        raise
    _captures.pop(handle, None)
    try:
        if not shape.count:
            raise CaptureRuleError("the capture recorded nothing; capture a step that does work")
        with found.relaxed(), found.translated("instantiating a graph"):  # this thread may capture on another stream
            return held.builder.complete(), shape
    finally:
        held.builder.close()


def _end(found: Api, builder: Any, handle: Any) -> base.GraphShape:
    status, graph, _ = _capture_of(found, handle)
    if status != CAPTURING:
        found.check(found.driver.cuStreamEndCapture(handle), "ending a capture")
        raise DeviceError("ending a capture gave no graph", 901, RUNTIME_NAMES[901])
    try:
        return _shape(found, graph)
    finally:
        with found.translated("ending a capture"):
            builder.end_building()


def _capture_of(found: Api, handle: Any) -> tuple[int, Any, int]:
    """The capture status of a stream, the graph it captures into, and the capture's number."""
    status, number, graph, *_ = found.check(
        found.driver.cuStreamGetCaptureInfo(handle), "asking for a stream's capture"
    )
    return int(status), graph, int(number)


def _is_fork(found: Api, handle: Any) -> bool:
    """Whether a stream takes part in a capture that this backend began on another one."""
    status, _, number = _capture_of(found, handle)
    if not status:
        return False
    for other in tuple(_captures):
        with contextlib.suppress(DeviceError):  # of a stream that is gone
            if _capture_of(found, found.driver.CUstream(other))[2] == number:
                return True
    return False


def _shape(found: Api, graph: Any) -> base.GraphShape:
    driver, check = found.driver, found.check
    _, count = check(driver.cuGraphGetNodes(graph, 0), "counting a graph's nodes")
    nodes = check(driver.cuGraphGetNodes(graph, count), "listing a graph's nodes")[0] if count else ()
    kinds: dict[str, int] = {}
    for node in nodes:
        kind = check(driver.cuGraphNodeGetType(node), "reading a node's kind")
        word = str(kind.name).removeprefix("CU_GRAPH_NODE_TYPE_")
        name = NODE_NAMES.get(word, word.lower())
        kinds[name] = kinds.get(name, 0) + 1
    return base.GraphShape(kinds)


def _keep_for_ever(builder: Any) -> None:
    """A reference that is never dropped, not even at the process' end (a module's list would be)."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(builder))


def closing(found: Api, context: Any, graph: Any) -> Callable[[], None]:
    """Destroys a cuda.core Graph from any thread that drops it, even one that captures at that moment."""

    def close() -> None:
        with found.current(context), found.relaxed():
            graph.close()

    return close
