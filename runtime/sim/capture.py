"""Stream capture with CUDA's rules, and the captured graphs.

The rules are those of the CUDA C++ Programming Guide ("Creating a Graph Using Stream Capture", "Prohibited and
Unhandled Operations") and of the driver API's pages on cuStreamBeginCapture, cuStreamEndCapture, cuStreamIsCapturing
and cuThreadExchangeStreamCaptureMode.  A call that breaks one raises `DeviceError` with CUDA's code and, as CUDA does,
invalidates the captures it concerns: from then on their streams refuse work (901) until `end` takes them out of
capture.  Our own rules raise `CaptureRuleError` and leave the capture unchanged.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from qcompiler.errors import CaptureRuleError, DeviceError
from qcompiler.runtime.backends.base import CaptureMode
from qcompiler.runtime.sim.queue import Work

SYMBOLS = {
    1: "cudaErrorInvalidValue",
    400: "cudaErrorInvalidResourceHandle",
    401: "cudaErrorIllegalState",
    900: "cudaErrorStreamCaptureUnsupported",
    901: "cudaErrorStreamCaptureInvalidated",
    902: "cudaErrorStreamCaptureMerge",
    903: "cudaErrorStreamCaptureUnmatched",
    904: "cudaErrorStreamCaptureUnjoined",
    905: "cudaErrorStreamCaptureIsolation",
    906: "cudaErrorStreamCaptureImplicit",
    907: "cudaErrorCapturedEvent",
    908: "cudaErrorStreamCaptureWrongThread",
}


def refuse(code: int, message: str) -> DeviceError:
    """CUDA's error with this code."""
    return DeviceError(message, code, SYMBOLS[code])


@dataclass(frozen=True)
class GraphNode:
    """One node of a graph: its work, the stream it was captured on, and the nodes it depends on."""

    work: Work
    stream: str
    chain: int
    after: frozenset[int]


@dataclass(eq=False)
class GraphCapture:
    """A capture sequence: its origin stream, thread and mode, and for each of its streams the latest nodes."""

    origin: Any
    mode: CaptureMode
    thread: int = field(default_factory=threading.get_ident)
    nodes: list[GraphNode] = field(default_factory=list)
    reached: dict[Any, frozenset[int]] = field(default_factory=dict)
    broken: str = ""
    ended: bool = False

    def __post_init__(self) -> None:
        self.reached[self.origin] = frozenset()

    def add(self, stream: Any, work: Work) -> None:
        """Adds a node behind the stream's latest nodes."""
        chain = list(self.reached).index(stream)
        self.nodes.append(GraphNode(work, stream.place, chain, self.reached[stream]))
        self.reached[stream] = frozenset([len(self.nodes) - 1])

    def join(self, stream: Any, nodes: frozenset[int]) -> None:
        """The stream's next node depends on these nodes, too; a new stream becomes part of the capture."""
        self.reached[stream] = self.reached.get(stream, frozenset()) | nodes
        stream.capture = self

    def before(self, nodes: Collection[int]) -> set[int]:
        """The nodes and everything they depend on."""
        found: set[int] = set()
        left = list(nodes)
        while left:
            node = left.pop()
            if node not in found:
                found.add(node)
                left += self.nodes[node].after
        return found

    def unjoined(self) -> Any | None:
        """A stream whose work the origin has not waited for."""
        joined = self.before(self.reached[self.origin])
        return next((stream for stream, nodes in self.reached.items() if not nodes <= joined), None)


class Captures:
    """All running captures on all devices, and the calls that they forbid."""

    def __init__(self) -> None:
        self._active: list[GraphCapture] = []

    # --- checks of calls ---

    def check_unsafe(self, call: str) -> None:
        """A call that a capture cannot record: refused while this thread captures, or any thread in mode `global`."""
        thread = threading.get_ident()
        met = [
            capture
            for capture in self._active
            if capture.mode == "global" or (capture.mode == "thread_local" and capture.thread == thread)
        ]
        if met:
            raise self._break(met, 900, f"{call} is not permitted while {self._names(met)} captures")

    def check_legacy(self, device: int, call: str) -> None:
        """The legacy stream is tied to all blocking streams of its device: it cannot be used while one captures."""
        met = self._blocking(device)
        if met:
            raise self._break(
                met,
                906,
                f"{call} would make the legacy stream depend on {self._names(met)}, which captures; "
                "make the stream non-blocking or use another than the legacy one",
            )

    def check_device(self, device: int, call: str) -> None:
        """Refuses to wait for a device while one of its streams captures, on any thread."""
        met = [capture for capture in self._active if any(s.device_index == device for s in capture.reached)]
        if met:
            raise self._break(met, 900, f"{call} is not permitted while {self._names(met)} captures")

    def any_on(self, device: int) -> bool:
        """Whether a stream of the device captures."""
        return any(s.device_index == device for capture in self._active for s in capture.reached)

    def check_not_capturing(self, stream: Any, call: str) -> None:
        """Refuses to wait for a stream that captures: its work does not run."""
        if stream.capture is not None:
            raise self._break([stream.capture], 900, f"{call} is not permitted: {stream.place} captures")

    def is_capturing(self, stream: Any) -> bool:
        """The result of cuStreamIsCapturing; a query of the legacy stream may be refused, but breaks no capture."""
        if stream.kind == "legacy" and self._blocking(stream.device_index):
            raise refuse(906, "the legacy stream encompasses a blocking stream that captures")
        return stream.capture is not None

    def captures_here(self, device: int) -> bool:
        """Whether this thread began a capture that a stream of the device is part of."""
        thread = threading.get_ident()
        return any(
            capture.thread == thread and any(stream.device_index == device for stream in capture.reached)
            for capture in self._active
        )

    def active(self, stream: Any) -> GraphCapture | None:
        """The capture that takes a stream's work, if it is part of one. 901 if that was invalidated."""
        capture: GraphCapture | None = stream.capture
        if capture is not None and capture.broken:
            raise self.invalid(capture)
        return capture

    # --- events ---

    def check_event(self, event: Any, call: str) -> None:
        """Refuses to wait for an event that was last recorded in a capture: it stands for no work."""
        if event.captured is not None:
            capture = event.captured[0]
            raise self._break(
                [] if capture.ended else [capture], 907, f"{call}: '{event.name}' was last recorded in a capture"
            )

    def wait(self, stream: Any, event: Any) -> bool:
        """A stream's wait for an event if a capture is concerned; False if none is."""
        capture, captured = self.active(stream), event.captured
        if captured is None:
            if capture is not None:
                raise self._break(
                    [capture],
                    905,
                    f"{stream.place} captures and cannot wait for '{event.name}', recorded outside the capture",
                )
            return False
        other, nodes = captured
        if other.ended:
            raise self._break(
                [] if capture is None else [capture],
                907,
                f"'{event.name}' was last recorded in a capture that has ended; record it again",
            )
        if other.broken:
            raise self.invalid(other)
        if capture is not None and capture is not other:
            raise self._break(
                [capture, other],
                902,
                f"{stream.place} is part of one capture and '{event.name}' of another; waiting would merge them",
            )
        if stream.kind == "legacy":
            raise self._break([other], 906, f"the legacy stream cannot join a capture by waiting for '{event.name}'")
        other.join(stream, nodes)
        return True

    # --- beginning and ending ---

    def begin(self, stream: Any, mode: CaptureMode) -> None:
        """900 on the legacy stream, 401 on a stream that already captures (that capture continues)."""
        if stream.kind == "legacy":
            raise refuse(900, "the legacy stream cannot be captured; use a stream of your own")
        if stream.capture is not None:
            raise refuse(401, f"{stream.place} captures already")
        if mode not in ("thread_local", "global", "relaxed"):
            raise refuse(1, f"there is no capture mode {mode!r}")
        stream.capture = GraphCapture(stream, mode)
        self._active.append(stream.capture)

    def end(self, stream: Any) -> GraphCapture:
        """Takes all streams of a capture out of it, then raises any error of the graph.

        401: nothing to end. 903: the capture began on another stream. 908: it began on another thread. The latter two
        invalidate the capture; it must still be ended where it began. 901: invalidated. 904: a fork was not joined.
        """
        capture: GraphCapture | None = stream.capture
        if capture is None:
            raise refuse(401, f"{stream.place} does not capture")
        if capture.origin is not stream:
            raise self._break([capture], 903, f"the capture began on {capture.origin.place}, not on {stream.place}")
        if capture.mode != "relaxed" and capture.thread != threading.get_ident():
            raise self._break([capture], 908, f"the capture of {stream.place} began on another thread")
        unjoined = None if capture.broken else capture.unjoined()
        self._close(capture)
        if capture.broken:
            raise self.invalid(capture)
        if unjoined is not None:
            raise refuse(
                904,
                f"{unjoined.place} was forked from {stream.place} and not joined; record an event on it and wait for "
                f"that on {stream.place} before the end",
            )
        if not capture.nodes:
            raise CaptureRuleError(f"the capture of {stream.place} recorded nothing; capture a step that does work")
        return capture

    def abandon_all(self) -> None:
        """Ends every capture without a graph (between tests)."""
        for capture in list(self._active):
            self._close(capture)

    def invalid(self, capture: GraphCapture) -> DeviceError:
        """The refusal of every call except the end."""
        return refuse(901, f"the capture of {capture.origin.place} was invalidated: {capture.broken}")

    def _close(self, capture: GraphCapture) -> None:
        capture.ended = True
        for stream in capture.reached:
            stream.capture = None
        self._active.remove(capture)

    def _blocking(self, device: int) -> list[GraphCapture]:
        return [
            capture
            for capture in self._active
            if any(stream.device_index == device and stream.kind == "blocking" for stream in capture.reached)
        ]

    def _break(self, captures: Iterable[GraphCapture], code: int, message: str) -> DeviceError:
        """Invalidates captures and returns the error."""
        for capture in captures:
            capture.broken = capture.broken or message
        return refuse(code, message)

    @staticmethod
    def _names(captures: Iterable[GraphCapture]) -> str:
        return " and ".join(capture.origin.place for capture in captures)
