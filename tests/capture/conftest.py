"""Programs for a GPU built by hand, on every simulated device and on cuda:0 where there is one.

`small`: two streams, an event between them, a state, an init table, a packed weight, a select, two entry points:

    s0: h = linear(x, w) + bias; n = calls so far (a state)    s1: raw = x; after h: y = relu(h) + table[None, :]

`double`: y = 2 x over 0 to 64 values.    `total`: a + b.    `hop`: 2 (x + 1), the product on a second device.

`split`: (x + 1) + 2 x, the product there, both at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qcompiler import formats
from qcompiler.kernels import layouts
from qcompiler.plan.kernel import FormatRef, KernelSpec, Operand, ScalarOp, ScalarProgram
from qcompiler.plan.kinds.linear import LinearKernel
from qcompiler.plan.kinds.loop import AffineAccess, LoopKernel
from qcompiler.plan.plan import (
    Arena,
    Buffer,
    Copy,
    DeviceSlot,
    EntryPoint,
    Event,
    Launch,
    Plan,
    Record,
    Select,
    SelectCase,
    Signature,
    Stream,
    Symbol,
    TensorSig,
    View,
    Wait,
    WeightEntry,
    initial_weight,
)
from qcompiler.plan.weights import StoredTensor, WeightStore
from qcompiler.runtime import LoadedProgram, ProgramImage, Target, build_image
from qcompiler.runtime.backends import registry

K, N, B_MAX = 64, 48, 12
NF4 = FormatRef(name="nf4", params=dict(formats.get("nf4", block=64).params))
DEVICES = ["sim:0", *(["cuda:0"] if registry.is_available("cuda:0") else [])]


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Kernels are compiled into a cache of this test run."""
    patch = pytest.MonkeyPatch()
    path = tmp_path_factory.mktemp("cache")
    patch.setenv("QC_CACHE_DIR", str(path))
    patch.delenv("QC_SIM_CHECK", raising=False)
    yield path
    patch.undo()


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# --- words for plans -------------------------------------------------------------------------------------------------


def strides(shape: tuple[Any, ...]) -> tuple[int, ...]:
    """Row-major; only the first extent may be symbolic."""
    steps = [1]
    for extent in reversed(shape[1:]):
        steps.append(steps[-1] * extent)
    return tuple(reversed(steps[: len(shape)])) if shape else ()


def operand(name: str, shape: tuple[Any, ...], access: Any) -> Operand:
    return Operand(name=name, dtype="f32", access=access, shape=shape, strides=strides(shape))


def view(buffer: str, *shape: Any) -> View:
    return View(buffer=buffer, dtype="f32", shape=shape, strides=strides(shape))


def op(result: str, name: str, *args: str, dtype: Any = "f32", **more: Any) -> ScalarOp:
    return ScalarOp(result=result, op=name, dtype=dtype, args=args, **more)


def loop(
    name: str, extents: tuple[Any, ...], operands: tuple[Operand, ...], accesses: tuple[Any, ...], *ops: ScalarOp,
    symbols: tuple[str, ...] = (),
) -> KernelSpec:  # fmt: skip
    body = LoopKernel(
        extents=extents,
        iterators=("parallel",) * len(extents),
        accesses=tuple(AffineAccess(offset=0, coefficients=c) for c in accesses),
        body=ScalarProgram(
            inputs=tuple((f"in{i}", o.dtype) for i, o in enumerate(operands)), ops=ops, yields=(ops[-1].result,)
        ),
    )
    return KernelSpec(name=name, symbols=symbols, operands=operands, body=body, serves=f"linalg.generic at {name}")


def constant(value: float) -> ScalarOp:
    return op("c", "arith.constant", value=value.hex())


def one_argument(result: Any = None) -> Signature:
    """f(x) -> `result` (a tree), or one tensor."""
    leaf = {"kind": "leaf", "index": 0}
    return Signature(
        inputs={
            "args": {"kind": "tuple", "items": [leaf]},
            "kwargs": {"kind": "dict", "keys": [], "items": []},
        },
        outputs=result or leaf,
    )


# --- small -----------------------------------------------------------------------------------------------------------


def linear(name: str, m_class: Any) -> KernelSpec:
    operands = (
        operand("x", ("b", K), "r"),
        Operand(name="w", dtype="f32", access="r", shape=(N, K), format=NF4, layout="cuda_t16_v1"),
        operand("bias", (N,), "r"),
        operand("out", ("b", N), "w"),
    )
    body = LinearKernel(m="b", n=N, k=K, m_class=m_class, has_bias=True)
    return KernelSpec(name=name, symbols=("b",), operands=operands, body=body, serves="qc.linear at model.proj")


def small_kernels() -> tuple[KernelSpec, ...]:
    relu_add = loop(
        "relu_add", ("b", N), (operand("h", ("b", N), "r"), operand("t", (N,), "r"), operand("out", ("b", N), "w")),
        ((N, 1), (0, 1), (N, 1)),
        constant(0.0), op("v1", "arith.maximumf", "in0", "c"), op("v2", "arith.addf", "v1", "in1"), symbols=("b",),
    )  # fmt: skip
    table = loop(
        "table", (N,), (operand("out", (N,), "w"),), ((1,),),
        op("v0", "linalg.index", dtype="index", axis=0), op("v1", "arith.index_cast", "v0", dtype="i32"),
        op("v2", "arith.sitofp", "v1"), constant(0.5), op("v4", "arith.mulf", "v2", "c"),
    )  # fmt: skip
    count = loop(
        "count", (4,), (operand("n", (4,), "r"), operand("out", (4,), "w")), ((1,), (1,)),
        constant(1.0), op("v1", "arith.addf", "in0", "c"),
    )  # fmt: skip
    return (
        linear("linear_one", "1"),
        linear("linear_few", "2-8"),
        linear("linear_many", "large"),
        relu_add,
        table,
        count,
    )


def small_entry(name: str, low: int, high: int) -> EntryPoint:
    weight = View(buffer="w", dtype="f32", shape=(N, K), format=NF4, layout="cuda_t16_v1")
    operands = (view(f"{name}.x", "b", K), weight, view("bias", N), view(f"{name}.h", "b", N))
    cases = (SelectCase(max=8, kernel="linear_few"), SelectCase(max=None, kernel="linear_many"))
    first = (
        Launch(kernel="linear_one", stream="s0", operands=operands)
        if high == 1
        else Select(on="b", cases=cases, stream="s0", operands=operands)
    )
    relu = (view(f"{name}.h", "b", N), view("table", N), view(f"{name}.y", "b", N))
    return EntryPoint(
        name=name,
        symbols=(Symbol(name="b", min=low, max=high),),
        inputs=(TensorSig(name="x", arena=f"{name}.x", dtype="f32", shape=("b", K)),),
        outputs=(
            TensorSig(name="y", arena=f"{name}.y", dtype="f32", shape=("b", N)),
            TensorSig(name="n", arena=f"{name}.n", dtype="f32", shape=(4,)),
            TensorSig(name="raw", arena=f"{name}.raw", dtype="f32", shape=("b", K)),
        ),
        steps=(
            first,
            Copy(stream="s1", source=view(f"{name}.x", "b", K), target=view(f"{name}.raw", "b", K)),
            Record(stream="s0", event="h"),
            Wait(stream="s1", event="h"),
            Launch(kernel="relu_add", stream="s1", operands=relu),
            Launch(kernel="count", stream="s0", operands=(view("calls", 4), view("calls", 4))),
            Copy(stream="s0", source=view("calls", 4), target=view(f"{name}.n", 4)),
        ),
    )


def small_plan(weights: tuple[WeightEntry, ...], constants: int) -> Plan:
    arenas = [
        Arena(name="constants", device="gpu", kind="constants", nbytes=constants),
        Arena(name="init", device="gpu", kind="init", nbytes=N * 4),
        Arena(name="calls", device="gpu", kind="state", nbytes=64),
    ]
    buffers = [
        *(Buffer(name=e.name, arena="constants", offset=e.offset, nbytes=e.nbytes) for e in weights),
        Buffer(name="table", arena="init", offset=0, nbytes=N * 4),
        Buffer(name="calls", arena="calls", offset=0, nbytes=16),
    ]
    for entry, most in (("one", 1), ("many", B_MAX)):
        sizes = {"x": most * K * 4, "y": most * N * 4, "n": 16, "raw": most * K * 4}
        arenas += [
            Arena(name=f"{entry}.{n}", device="gpu", kind="input" if n == "x" else "output", nbytes=size, entry=entry)
            for n, size in sizes.items()
        ]
        arenas.append(
            Arena(name=f"{entry}.act", device="gpu", kind="activations", nbytes=most * N * 4 + 64, entry=entry)
        )
        buffers += [Buffer(name=f"{entry}.{n}", arena=f"{entry}.{n}", offset=0, nbytes=s) for n, s in sizes.items()]
        buffers.append(Buffer(name=f"{entry}.h", arena=f"{entry}.act", offset=64, nbytes=most * N * 4))
    init = EntryPoint(
        name="init", symbols=(), inputs=(), outputs=(),
        steps=(Launch(kernel="table", stream="s1", operands=(view("table", N),)),),
    )  # fmt: skip
    return Plan(
        devices=(DeviceSlot(name="gpu", kind="cuda"),),
        streams=(Stream(name="s0", device="gpu"), Stream(name="s1", device="gpu")),
        events=(Event(name="h"),),
        arenas=tuple(arenas),
        buffers=tuple(buffers),
        kernels=small_kernels(),
        entries=(small_entry("one", 1, 1), small_entry("many", 2, B_MAX)),
        init=init,
        weights=weights,
    )


class Small:
    """The program and what it should compute. Its state begins at 10."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        fmt = formats.get("nf4", block=64)
        packed = fmt.encode(rng.standard_normal((N, K), np.float32))
        self.weight = fmt.decode(packed)
        self.bias = rng.standard_normal(N, np.float32)
        data = layouts.get("cuda_t16_v1").pack(fmt, "f32", N, K, packed.data)
        store = WeightStore()
        store.add(StoredTensor("w", "f32", (N, K), data, NF4, "cuda_t16_v1", ("model.proj.weight",)))
        store.add_array("bias", self.bias, ("model.proj.bias",))
        store.add_array(initial_weight("calls"), np.full(4, 10, np.float32))
        entries: list[WeightEntry] = []
        end = 0
        for each in store:
            entries.append(
                WeightEntry(
                    name=each.key, dtype="f32", shape=each.shape, offset=end, nbytes=each.data.nbytes,
                    format=each.format, layout=each.layout, parameters=each.parameters,
                )
            )  # fmt: skip
            end += -(-each.data.nbytes // 256) * 256
        tree = {"kind": "dict", "keys": ["y", "n", "raw"], "items": [{"kind": "leaf", "index": i} for i in range(3)]}
        self.image: ProgramImage = build_image(
            small_plan(tuple(entries), end), one_argument(tree), store, target=Target(kind="cuda", isa="sm_80")
        )

    def x(self, batch: int, seed: int = 1) -> np.ndarray:
        return np.random.default_rng(seed).standard_normal((batch, K), np.float32)

    def expected(self, x: np.ndarray) -> np.ndarray:
        table = np.arange(N, dtype=np.float32) * np.float32(0.5)
        return np.maximum(x @ self.weight.T + self.bias, 0) + table

    def outputs(self, batch: int, run: Any = None) -> dict[str, Any]:
        """Arrays for `out=`, on the host or on the program's device."""
        arrays = {
            "y": np.zeros((batch, N), np.float32),
            "n": np.zeros(4, np.float32),
            "raw": np.zeros((batch, K), np.float32),
        }
        return arrays if run is None else {name: run.array(value) for name, value in arrays.items()}


@pytest.fixture(scope="session")
def small(own_cache: Path) -> Small:
    return Small()


@pytest.fixture
def run(small: Small, device: str) -> LoadedProgram:
    """The small program on the device, with states of its own."""
    return LoadedProgram.from_image(small.image, device)


# --- double and hop --------------------------------------------------------------------------------------------------


def scale(name: str, operation: str, value: float) -> KernelSpec:
    return loop(
        name, ("n",), (operand("x", ("n",), "r"), operand("y", ("n",), "w")), ((1,), (1,)),
        constant(value), op("v", operation, "in0", "c"), symbols=("n",),
    )  # fmt: skip


ADD = loop(
    "add", ("n",), (operand("a", ("n",), "r"), operand("b", ("n",), "r"), operand("y", ("n",), "w")),
    ((1,), (1,), (1,)), op("v", "arith.addf", "in0", "in1"), symbols=("n",),
)  # fmt: skip


def vectors(
    plan: dict[str, Any], steps: tuple[Any, ...], places: dict[str, tuple[str, Any]], signature: Signature | None = None
) -> ProgramImage:
    """A program over vectors -> y of n in 0…64 values; `places` maps buffers to (slot, arena kind)."""
    inputs = tuple(
        TensorSig(name=name, arena=name, dtype="f32", shape=("n",))
        for name, (_, kind) in places.items()
        if kind == "input"
    )
    plan = plan | {
        "arenas": tuple(
            Arena(name=name, device=slot, kind=kind, nbytes=256, entry="main") for name, (slot, kind) in places.items()
        ),
        "buffers": tuple(Buffer(name=name, arena=name, offset=0, nbytes=256) for name in places),
        "kernels": (scale("twice", "arith.mulf", 2.0), scale("plus_one", "arith.addf", 1.0), ADD),
        "entries": (
            EntryPoint(
                name="main",
                symbols=(Symbol(name="n", min=0, max=64),),
                inputs=inputs,
                outputs=(TensorSig(name="y", arena="y", dtype="f32", shape=("n",)),),
                steps=steps,
            ),
        ),
    }
    return build_image(
        Plan(**plan), signature or one_argument(), WeightStore(), target=Target(kind="cuda", isa="sm_80")
    )


@pytest.fixture(scope="session")
def double(own_cache: Path) -> ProgramImage:
    plan = {
        "devices": (DeviceSlot(name="gpu", kind="cuda"),),
        "streams": (Stream(name="s0", device="gpu"),),
        "events": (),
    }
    step = Launch(kernel="twice", stream="s0", operands=(view("x", "n"), view("y", "n")))
    return vectors(plan, (step,), {"x": ("gpu", "input"), "y": ("gpu", "output")})


@pytest.fixture(scope="session")
def total(own_cache: Path) -> ProgramImage:
    """f(a, b) -> a + b"""
    plan = {
        "devices": (DeviceSlot(name="gpu", kind="cuda"),),
        "streams": (Stream(name="s0", device="gpu"),),
        "events": (),
    }
    step = Launch(kernel="add", stream="s0", operands=(view("a", "n"), view("b", "n"), view("y", "n")))
    leaves = [{"kind": "leaf", "index": i} for i in range(2)]
    signature = Signature(
        inputs={
            "args": {"kind": "tuple", "items": leaves},
            "kwargs": {"kind": "dict", "keys": [], "items": []},
        },
        outputs=leaves[0],
    )
    places: dict[str, tuple[str, Any]] = {"a": ("gpu", "input"), "b": ("gpu", "input"), "y": ("gpu", "output")}
    return vectors(plan, (step,), places, signature)


@pytest.fixture(scope="session")
def hop(own_cache: Path) -> ProgramImage:
    plan = {
        "devices": (DeviceSlot(name="near", kind="cuda"), DeviceSlot(name="far", kind="cuda", index=1)),
        "streams": (Stream(name="s", device="near"), Stream(name="t", device="far")),
        "events": (Event(name="there"), Event(name="back")),
    }
    steps = (
        Launch(kernel="plus_one", stream="s", operands=(view("x", "n"), view("a", "n"))),
        Record(stream="s", event="there"),
        Wait(stream="t", event="there"),
        Copy(stream="t", source=view("a", "n"), target=view("b", "n")),
        Launch(kernel="twice", stream="t", operands=(view("b", "n"), view("c", "n"))),
        Record(stream="t", event="back"),
        Wait(stream="s", event="back"),
        Copy(stream="s", source=view("c", "n"), target=view("y", "n")),
    )
    places: dict[str, tuple[str, Any]] = {
        "x": ("near", "input"), "a": ("near", "activations"), "b": ("far", "activations"),
        "c": ("far", "activations"), "y": ("near", "output"),
    }  # fmt: skip
    return vectors(plan, steps, places)


@pytest.fixture(scope="session")
def split(own_cache: Path) -> ProgramImage:
    """(x + 1) + 2 x, the product on a second device, which waits for nothing that the first one computes."""
    plan = {
        "devices": (DeviceSlot(name="near", kind="cuda"), DeviceSlot(name="far", kind="cuda", index=1)),
        "streams": (Stream(name="s", device="near"), Stream(name="t", device="far")),
        "events": (Event(name="back"),),
    }
    steps = (
        Copy(stream="t", source=view("x", "n"), target=view("b", "n")),
        Launch(kernel="twice", stream="t", operands=(view("b", "n"), view("c", "n"))),
        Record(stream="t", event="back"),
        Launch(kernel="plus_one", stream="s", operands=(view("x", "n"), view("a", "n"))),
        Wait(stream="s", event="back"),
        Copy(stream="s", source=view("c", "n"), target=view("d", "n")),
        Launch(kernel="add", stream="s", operands=(view("a", "n"), view("d", "n"), view("y", "n"))),
    )
    places: dict[str, tuple[str, Any]] = {
        "x": ("near", "input"), "a": ("near", "activations"), "b": ("far", "activations"),
        "c": ("far", "activations"), "d": ("near", "activations"), "y": ("near", "output"),
    }  # fmt: skip
    return vectors(plan, steps, places)


@pytest.fixture
def same() -> Callable[[Any, Any], bool]:
    """Whether two result trees are equal to the bit."""

    def check(a: Any, b: Any) -> bool:
        return a.keys() == b.keys() and all(np.asarray(a[k]).tobytes() == np.asarray(b[k]).tobytes() for k in a)

    return check
