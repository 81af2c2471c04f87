"""Devices for the tests: every simulated one, and cuda:0 where there is a GPU (its parameter exists only then).

A test marked `cuda_is_silent(expected)` is judged on the simulated GPU and learned on hardware: whatever happens there
goes into the JUnit report as the property `learned`, and a departure from `expected` shows as skipped, with what was
seen.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
from collections.abc import Callable, Generator, Iterator

import numpy as np
import numpy.typing as npt
import pytest

from qcompiler.errors import CaptureRuleError, DeviceError
from qcompiler.plan.kernel import KernelSpec, Operand, ScalarOp, ScalarProgram
from qcompiler.plan.kinds.loop import AffineAccess, LoopKernel
from qcompiler.plan.plan import DeviceSlot, Plan
from qcompiler.runtime.backends import registry
from qcompiler.runtime.backends.base import Backend, Event, Kernel, Memory, Stream
from qcompiler.runtime.sim.device import captures, machine

N = 1000
Floats = npt.NDArray[np.float32]

DEVICES = ["sim:0", *(["cuda:0"] if registry.is_available("cuda:0") else [])]


def _spec(name: str, operands: tuple[Operand, ...], body: ScalarProgram) -> KernelSpec:
    unit = AffineAccess(offset=0, coefficients=(1,))
    loop = LoopKernel(extents=("n",), iterators=("parallel",), accesses=(unit,) * len(operands), body=body)
    return KernelSpec(name=name, symbols=("n",), operands=operands, body=loop)


def _operand(name: str, access: str) -> Operand:
    return Operand(name=name, dtype="f32", access=access, shape=("n",), strides=(1,))


def _program(inputs: tuple[str, ...], op: str, *args: str, value: str | None = None) -> ScalarProgram:
    constant = () if value is None else (ScalarOp(result="c", op="arith.constant", dtype="f32", value=value),)
    return ScalarProgram(
        inputs=tuple((name, "f32") for name in inputs),
        ops=(*constant, ScalarOp(result="r", op=op, dtype="f32", args=args)),
        yields=("r",),
    )


DOUBLE = _spec(
    "double_it",
    (_operand("x", "r"), _operand("y", "w")),
    _program(("x", "y"), "arith.mulf", "x", "c", value=(2.0).hex()),
)
ADD = _spec(
    "add_up",
    (_operand("a", "r"), _operand("b", "r"), _operand("z", "w")),
    _program(("a", "b", "z"), "arith.addf", "a", "b"),
)
INCREMENT = _spec(
    "increment",
    (_operand("x", "r"), _operand("y", "w")),
    _program(("x", "y"), "arith.addf", "x", "c", value=(1.0).hex()),
)


class Rig:
    """A backend with three kernels over N floats (y = 2x, z = a + b, y = x + 1) and short words for what tests do."""

    n = N

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        plan = Plan(
            devices=(DeviceSlot(name="d0", kind="cuda"),),
            streams=(),
            events=(),
            arenas=(),
            buffers=(),
            kernels=(DOUBLE, ADD, INCREMENT),
            entries=(),
        )
        self.plan = plan
        self.native = backend.build(plan)
        self.kernels = backend.load(plan, self.native)
        self.streams: list[Stream] = []

    def stream(self, name: str = "s", kind: str = "nonblocking") -> Stream:
        self.streams.append(self.backend.stream(name, kind=kind))
        return self.streams[-1]

    def end_captures(self) -> None:
        """Ends what a test left open: the next one, which uses the same device, must not pay for it."""
        for stream in (*self.streams, *self.streams):
            with contextlib.suppress(DeviceError, AssertionError):  # a fork's capture ends with its origin's
                if stream.is_capturing:
                    self.finish(stream)
        self.streams.clear()

    def legacy(self) -> Stream:
        return self.backend.legacy_stream()

    def empty(self, label: str = "empty", count: int = N) -> Memory:
        return self.backend.allocate(4 * count, label=label)

    def full(self, value: float, label: str = "full") -> Memory:
        """N floats of one value, there before anything else happens."""
        memory, stream = self.empty(label), self.stream("setup")
        self.fill(stream, memory, value)
        self.backend.synchronize(stream)
        return memory

    def fill(self, stream: Stream, memory: Memory, value: float) -> None:
        host = np.full(N, value, np.float32)
        self.backend.upload(stream, memory.address, host.ctypes.data, host.nbytes)

    def read(self, memory: Memory, stream: Stream | None = None) -> Floats:
        """The floats, after everything in `stream`; else after everything on the device."""
        if stream is None:
            self.backend.synchronize()
            stream = self.stream("readout")
        host = np.zeros(N, np.float32)
        self.backend.download(stream, host.ctypes.data, memory.address, host.nbytes)
        self.backend.synchronize(stream)
        return host

    def peek(self, memory: Memory) -> Floats:
        """The floats as they lie in a simulated device, which may be broken."""
        return np.frombuffer((ctypes.c_uint8 * (4 * N)).from_address(memory.address), np.float32).copy()

    def double(self, stream: Stream, x: Memory, y: Memory) -> None:
        self.launch(stream, "double_it", x, y)

    def add(self, stream: Stream, a: Memory, b: Memory, z: Memory) -> None:
        self.launch(stream, "add_up", a, b, z)

    def increment(self, stream: Stream, x: Memory, y: Memory) -> None:
        self.launch(stream, "increment", x, y)

    def launch(self, stream: Stream, name: str, *memory: Memory, count: int = N) -> None:
        kernel: Kernel = self.kernels[name]
        self.backend.launch(stream, kernel, [each.address for each in memory], [count])

    def copy(self, stream: Stream, target: Memory, source: Memory) -> None:
        self.backend.copy(stream, target.address, source.address, source.nbytes)

    def mark(self, stream: Stream) -> Event:
        """An event recorded on the stream now."""
        event = self.backend.event(f"mark on {getattr(stream, 'name', '')}")
        self.backend.record(event, stream)
        return event

    def order(self, first: Stream, then: Stream) -> None:
        """What comes on `then` waits for what is on `first`."""
        event = rig_of(first.device).mark(first)
        rig_of(then.device).backend.wait(then, event)

    def finish(self, stream: Stream) -> None:
        """Ends a capture, however it stands."""
        try:
            self.backend.end_capture(stream)
        except (DeviceError, CaptureRuleError):
            assert not stream.is_capturing


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """On hardware, what a test marked `cuda_is_silent` meets is noted, not judged."""
    report = yield
    marker = item.get_closest_marker("cuda_is_silent")
    where = getattr(item, "callspec", None)
    on_hardware = where is not None and str(where.params.get("rig", "")).startswith("cuda")
    if marker is None or not on_hardware or report.when != "call":
        return report
    expected = str(marker.args[0])
    seen = expected if call.excinfo is None else f"{call.excinfo.typename}: {call.excinfo.value}"[:500]
    fact = {"case": item.name, "expected": expected, "seen": seen}
    item.user_properties.append(("learned", json.dumps(fact)))  # of the report of the teardown, which JUnit reads
    if call.excinfo is not None:
        report.outcome = "skipped"
        report.longrepr = (str(item.path), 0, f"learned, not judged: expected {expected}; seen {seen}")
    return report


_rigs: dict[str, Rig] = {}


def rig_of(device: str) -> Rig:
    if device not in _rigs:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("QC_SIM_CHECK", "1")
            _rigs[device] = Rig(registry.backend(device, registry.architecture(device)))
    return _rigs[device]


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """No capture, no queued work and no finding outlives a test."""
    machine().reseed()
    yield
    for device, made in _rigs.items():
        if device.startswith("cuda"):
            made.end_captures()
    captures().abandon_all()
    machine().drop_all()


@pytest.fixture(params=DEVICES)
def rig(request: pytest.FixtureRequest) -> Rig:
    return rig_of(request.param)


@pytest.fixture
def sim() -> Rig:
    return rig_of("sim:0")


@pytest.fixture
def other() -> Rig:
    return rig_of("sim:1")


@pytest.fixture
def seeds() -> Callable[[int], Iterator[int]]:
    """Runs the body once for every seed of the order of execution."""

    def each(count: int) -> Iterator[int]:
        for seed in range(count):
            machine().reseed(seed)
            yield seed
            machine().drop_all()

    return each


@pytest.fixture
def expect() -> Callable[[int], contextlib.AbstractContextManager[None]]:
    """`with expect(905):` CUDA's code and the runtime API's name of it."""

    @contextlib.contextmanager
    def raises(code: int) -> Iterator[None]:
        with pytest.raises(DeviceError) as caught:
            yield
        assert (caught.value.code, caught.value.symbol) == (code, NAMES[code]), str(caught.value)

    return raises


NAMES = {
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
