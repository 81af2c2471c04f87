"""The simulated GPUs: memory, streams, events and graphs of `sim:0` … `sim:7`.

Work does not run when it is submitted.  It runs when the host waits, in one of the orders that stream order, events and
the legacy stream's rules allow (`queue`); `capture` has the calls that CUDA forbids while a stream captures.

    device = sim_device(0)
    stream = device.stream("main")
    device.enqueue(stream, Work("kernel", …))     # executed, or recorded if the stream captures
    device.synchronize(stream)                    # raises the findings of kernels and clocks
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import os
import threading
import weakref
from collections.abc import Iterator
from time import perf_counter
from typing import Any

from qcompiler.errors import CaptureRuleError, DeviceUnavailableError, SimulationError
from qcompiler.runtime.backends.base import CaptureMode, Event, Graph, GraphShape, Memory, Stream, StreamKind
from qcompiler.runtime.sim.capture import Captures, GraphCapture, GraphNode, refuse
from qcompiler.runtime.sim.clocks import Access
from qcompiler.runtime.sim.engine import engine
from qcompiler.runtime.sim.queue import Allocation, Machine, Op, Work

DEVICES = 8
"""The number of simulated devices."""

_current = threading.local()
_handles = itertools.count(0x51_0000_0010, 0x10)


@functools.cache
def machine() -> Machine:
    """The one queue of this process. A fork waits until no other thread uses it, so the child's copy is consistent."""
    made = Machine(engine())
    os.register_at_fork(before=made.lock.acquire, after_in_parent=made.lock.release, after_in_child=made.lock.release)
    return made


@functools.cache
def captures() -> Captures:
    """The captures of this process."""
    return Captures()


class SimMemory(Memory):
    """Memory of a simulated device: freed by `close` or with the object, once submitted work has finished with it."""

    def __init__(self, allocation: Allocation | None, nbytes: int) -> None:
        self.allocation = allocation
        self.address = 0 if allocation is None else allocation.base
        self.nbytes = nbytes
        self._gone = None if allocation is None else weakref.finalize(self, machine().condemn, allocation)
        if self._gone is not None:
            self._gone.atexit = False

    def close(self) -> None:
        if self._gone is not None:
            self._gone()
            with machine().entry():  # frees condemned memory
                pass


class SimStream(Stream):
    """A stream: the last operation in it, or the capture it is part of. `kind` may also be "legacy"."""

    def __init__(self, device: SimDevice, kind: str, name: str, handle: int) -> None:
        self.owner = device
        self.device = device.name
        self.device_index = device.index
        self.kind = kind
        self.name = name
        self.handle = handle
        self.place = "the legacy stream" if kind == "legacy" else f"stream '{name or hex(handle)}'"
        self.actor = machine().new_actor()
        self.tail: Op | None = None
        self.capture: GraphCapture | None = None

    @property
    def is_capturing(self) -> bool:
        with machine().entry():
            return captures().is_capturing(self)


class SimEvent(Event):
    """An event: the operation that recorded it last, or the capture and the nodes it stands for.

    A timed one has the host's clock at which the simulation reached it.
    """

    def __init__(self, device: SimDevice, name: str, *, timed: bool = False) -> None:
        self.device = device.name
        self.device_index = device.index
        self.name = name or "an event"
        self.recorded: Op | None = None
        self.captured: tuple[GraphCapture, frozenset[int]] | None = None
        self.timed = timed
        self.reached: float | None = None

    def stamp(self, _seed: int) -> tuple[()]:
        """The action of its record: touches no memory."""
        self.reached = perf_counter()
        return ()


class SimGraph(Graph):
    """An instantiated graph. Launches of one graph follow each other, also on different streams."""

    def __init__(self, device: SimDevice, capture: GraphCapture) -> None:
        self._device = device
        self._nodes = tuple(capture.nodes)
        self._actors = {chain: machine().new_actor() for chain in sorted({node.chain for node in self._nodes})}
        self._last: Op | None = None
        self._closed = False
        kinds = [node.work.kind for node in self._nodes]
        self.shape = GraphShape({kind: kinds.count(kind) for kind in sorted(set(kinds))})

    def launch(self, stream: Stream) -> None:
        """SimulationError (use-after-free) if memory whose addresses the graph holds was freed."""
        with machine().entry():
            if self._closed:
                raise refuse(400, "the graph was closed")
            target = self._device.own(stream, "a graph launch")
            if target.capture is not None:
                captures().active(target)
                raise CaptureRuleError(f"{target.place} captures; a graph inside a graph is not supported here")
            self._check_memory()
            begin = self._device.submit(target, self._marker("begin"), [self._last] if self._last else [])
            ops: list[Op] = []
            for node in self._nodes:
                after = [ops[number] for number in sorted(node.after)] or [begin]
                ops.append(machine().submit(node.work, self._actors[node.chain], f"{node.stream} in a graph", after))
            self._last = self._device.submit(target, self._marker("end"), ops)

    def close(self) -> None:
        self._closed = True

    def _marker(self, what: str) -> Work:
        return Work("marker", f"the {what} of a graph of {len(self._nodes)} nodes", self._device.index)

    def _check_memory(self) -> None:
        for node in self._nodes:
            for allocation in node.work.memory:
                if not allocation.alive:
                    raise SimulationError(
                        f"the graph's {_node_name(node)} uses {allocation}, which was freed after the "
                        "capture; keep the memory for as long as the graph",
                        "use-after-free",
                    )


def _node_name(node: GraphNode) -> str:
    return f"{node.work.name} ({node.stream}{', ' + node.work.label if node.work.label else ''})"


class SimDevice:
    """One device. All backends of its index share it."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.name = f"sim:{index}"
        self._blocking: dict[int, Op] = {}
        self._streams: weakref.WeakValueDictionary[int, SimStream] = weakref.WeakValueDictionary()
        machine().engine.reserve(index)
        self.legacy = SimStream(self, "legacy", "", 0)

    # --- memory ---

    def allocate(self, nbytes: int, label: str) -> SimMemory:
        with machine().entry():
            machine().check_usable(self.index)
            captures().check_unsafe(f"an allocation of {nbytes} bytes")
            if nbytes == 0:
                return SimMemory(None, 0)
            base = machine().engine.allocate(self.index, nbytes, label)
            allocation = Allocation(base, nbytes, label, self.index)
            machine().adopt(allocation)
            return SimMemory(allocation, nbytes)

    def upload(self, stream: Stream, target: int, source: int, nbytes: int) -> None:
        with machine().entry():
            queue = self._transfer(stream, "an upload")
            if nbytes == 0:
                return
            allocation = machine().resolve(target, nbytes, "an upload")
            name = f"the upload of {nbytes} bytes to {allocation}"
            machine().host_access(source, source + nbytes, name)
            held: Any = source

            def run(seed: int) -> tuple[Access, ...]:
                ctypes.memmove(target, held, nbytes)
                machine().engine.mark_initialised(target, nbytes)
                return ()

            access = Access(target, target + nbytes, "w")
            op = self.submit(queue, Work("upload", name, self.index, (access,), (allocation,), run), [])
            if machine().is_ready(op):  # one of the allowed orders, and it saves a copy
                machine().run_now(op)
            else:
                held = ctypes.string_at(source, nbytes)

    def download(self, stream: Stream, target: int, source: int, nbytes: int) -> None:
        with machine().entry():
            queue = self._transfer(stream, "a download")
            if nbytes == 0:
                return
            allocation = machine().resolve(source, nbytes, "a download")

            def run(seed: int) -> tuple[Access, ...]:
                ctypes.memmove(target, source, nbytes)
                return ()

            accesses = (Access(source, source + nbytes, "r"), Access(target, target + nbytes, "w"))
            name = f"the download of {nbytes} bytes from {allocation}"
            self.submit(queue, Work("download", name, self.index, accesses, (allocation,), run), [])

    def copy(self, stream: Stream, target: int, source: int, nbytes: int) -> None:
        with machine().entry():
            queue = self.own(stream, "a copy")
            if nbytes == 0:
                return
            origin = machine().resolve(source, nbytes, "the source of a copy")
            goal = machine().resolve(target, nbytes, "the target of a copy")

            def run(seed: int) -> tuple[Access, ...]:
                engine = machine().engine
                if not engine.is_initialised(source, nbytes):
                    raise SimulationError(f"it copies bytes of {origin} that nothing has written", "uninitialised-read")
                ctypes.memmove(target, source, nbytes)
                engine.mark_initialised(target, nbytes)
                return ()

            accesses = (Access(source, source + nbytes, "r"), Access(target, target + nbytes, "w"))
            name = f"the copy of {nbytes} bytes from {origin} to {goal}"
            self.enqueue(queue, Work("copy", name, self.index, accesses, (origin, goal), run))

    def zero(self, stream: Stream, target: int, nbytes: int) -> None:
        with machine().entry():
            queue = self.own(stream, "a memset")
            if nbytes == 0:
                return
            allocation = machine().resolve(target, nbytes, "a memset")

            def run(seed: int) -> tuple[Access, ...]:
                ctypes.memset(target, 0, nbytes)
                machine().engine.mark_initialised(target, nbytes)
                return ()

            access = Access(target, target + nbytes, "w")
            name = f"the memset of {nbytes} bytes of {allocation}"
            self.enqueue(queue, Work("zero", name, self.index, (access,), (allocation,), run))

    # --- streams and events ---

    def stream(self, name: str, kind: StreamKind) -> SimStream:
        with machine().entry():
            made = SimStream(self, kind, name, next(_handles))
            self._streams[made.handle] = made
            return made

    def by_handle(self, handle: int) -> SimStream:
        """The stream of a handle; 0 and 1 are the legacy stream, as in CUDA."""
        if handle in (0, 1):
            return self.legacy
        found = self._streams.get(handle)
        if found is None:
            raise refuse(400, f"{self.name} has no stream with the handle {handle:#x}")
        return found

    def current(self) -> SimStream:
        """The thread's current stream (`sim_stream`), else the legacy one."""
        found: SimStream = getattr(_current, "streams", {}).get(self.index, self.legacy)
        return found

    def event(self, name: str, *, timed: bool = False) -> SimEvent:
        return SimEvent(self, name, timed=timed)

    def elapsed(self, begin: Event, end: Event) -> float:
        """Microseconds of the simulation between two timers."""
        times = [each.reached if isinstance(each, SimEvent) else None for each in (begin, end)]
        if times[0] is None or times[1] is None:
            raise refuse(400, "the time between two events needs timers that were recorded and waited for")
        return (times[1] - times[0]) * 1e6

    def record(self, event: Event, stream: Stream) -> None:
        with machine().entry():
            queue = self.own(stream, "recording an event")
            if not isinstance(event, SimEvent) or event.device_index != self.index:
                raise refuse(400, f"an event of {event.device} cannot be recorded on {queue.place} of {self.name}")
            capture = captures().active(queue)
            if capture is not None:
                event.captured, event.recorded = (capture, capture.reached[queue]), None
                return
            event.captured = None
            action = event.stamp if event.timed else None
            work = Work("marker", f"the record of '{event.name}'", self.index, action=action)
            event.recorded = self.submit(queue, work, [])

    def wait(self, stream: Stream, event: Event) -> None:
        with machine().entry():
            queue = self.own(stream, "waiting for an event")
            if not isinstance(event, SimEvent):
                raise refuse(400, f"{queue.place} of {self.name} cannot wait for an event of {event.device}")
            if captures().wait(queue, event) or event.recorded is None:
                return
            self.submit(queue, Work("marker", f"the wait for '{event.name}'", self.index), [event.recorded])

    def synchronize(self, stream: Stream | None) -> None:
        """Waits for the stream, or the whole device. Raises SimulationError for findings of its operations."""
        with machine().entry():
            machine().check_usable(self.index)
            if stream is None:
                captures().check_device(self.index, f"synchronizing {self.name}")
                machine().wait(self.index, machine().latest(self.index))
                machine().engine.check_red_zones(self.index)
                return
            machine().wait(self.index, self._work_of(stream, "synchronizing"))

    def query(self, what: Stream | Event) -> bool:
        """Whether it is done; the query makes some progress."""
        with machine().entry():
            if isinstance(what, SimEvent):
                machine().check_usable(self.index)
                captures().check_event(what, "asking for an event")
                if what.recorded is None:
                    return True
                captures().check_unsafe("asking for an event")
                return machine().poll(self.index, [what.recorded])
            assert isinstance(what, Stream)
            return machine().poll(self.index, self._work_of(what, "asking for"))

    def _work_of(self, stream: Stream, call: str) -> list[Op]:
        queue = self.own(stream, f"{call} a stream")
        captures().check_not_capturing(queue, f"{call} a stream")
        captures().check_unsafe(f"{call} {queue.place}")
        tails = [] if queue.tail is None else [queue.tail]
        return [*tails, *self._blocking.values()] if queue.kind == "legacy" else tails

    # --- captures ---

    def begin_capture(self, stream: Stream, mode: CaptureMode) -> None:
        with machine().entry():
            machine().check_usable(self.index)
            captures().begin(self.own(stream, "a capture", legacy=True), mode)

    def end_capture(self, stream: Stream) -> SimGraph:
        with machine().entry():
            return SimGraph(self, captures().end(self.own(stream, "the end of a capture", legacy=True)))

    # --- submitting ---

    def own(self, stream: Stream, call: str, *, legacy: bool = False) -> SimStream:
        """The stream, if it is this device's and may be used now (`legacy`: the caller checks the legacy stream)."""
        if not isinstance(stream, SimStream) or stream.device_index != self.index:
            raise refuse(400, f"{call} on {self.name} was given a stream of {stream.device}")
        if stream.kind == "legacy" and not legacy:
            captures().check_legacy(self.index, call)
        if not legacy:  # a capture can be ended on a broken device, too
            machine().check_usable(self.index)
        return stream

    def enqueue(self, stream: SimStream, work: Work) -> None:
        """Work that is recorded if the stream captures, and submitted otherwise."""
        capture = captures().active(stream)
        if capture is not None:
            capture.add(stream, work)
        else:
            self.submit(stream, work, [])

    def submit(self, stream: SimStream, work: Work, after: list[Op]) -> Op:
        """The stream's next operation: after its last one, `after`, and what the legacy stream's rules add."""
        before = [*after, *([] if stream.tail is None else [stream.tail])]
        if stream.kind == "legacy":
            before += self._blocking.values()
            self._blocking.clear()
        elif stream.kind == "blocking" and self.legacy.tail is not None:
            before.append(self.legacy.tail)
        stream.tail = machine().submit(work, stream.actor, stream.place, before)
        if stream.kind == "blocking":
            self._blocking[stream.actor] = stream.tail
        return stream.tail

    def _transfer(self, stream: Stream, call: str) -> SimStream:
        queue = self.own(stream, call)
        if captures().active(queue) is not None:
            raise CaptureRuleError(
                f"{call} cannot be part of a capture: a replay would repeat the host memory of today. Copy from device "
                "memory that is filled before each replay"
            )
        return queue


@functools.cache
def sim_device(index: int) -> SimDevice:
    """The device of an index. DeviceUnavailableError past the last."""
    if not 0 <= index < DEVICES:
        raise DeviceUnavailableError(f"there is no sim:{index}; there are sim:0 … sim:{DEVICES - 1}")
    return SimDevice(index)


def reset(device: str) -> None:
    """Makes a simulated GPU usable again after a finding: without memory, findings, and pending work.

    Programs, arrays and graphs on it are lost: using them is an error. DeviceUnavailableError for another device's
    name; CaptureRuleError while one of its streams captures.
    """
    kind, _, number = device.partition(":")
    if kind != "sim" or not number.isdigit():
        raise DeviceUnavailableError(f"{device!r} is no simulated GPU; there are sim:0 … sim:{DEVICES - 1}")
    index = sim_device(int(number)).index
    with machine().entry():
        if captures().any_on(index):
            raise CaptureRuleError(f"a stream of {device} captures; end the capture before the device is reset")
        machine().reset(index)


@contextlib.contextmanager
def sim_stream(stream: Stream) -> Iterator[Stream]:
    """Makes a stream the current one of its device for this thread."""
    assert isinstance(stream, SimStream)
    streams: dict[int, SimStream] = getattr(_current, "streams", {})
    _current.streams = {**streams, stream.device_index: stream}
    try:
        yield stream
    finally:
        _current.streams = streams
