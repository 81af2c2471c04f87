"""A small program built by hand: every kind of arena, a packed weight, a copy, a select, two entry points and an init.

h   = linear(x, w) + bias            x (b, 64) f32, w (48, 64) nf4
y   = relu(h) + table[None, :]       table is computed by init: table[i] = 0.5 * i
n   = calls so far (a state)
raw = x
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

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
    Launch,
    Plan,
    Select,
    SelectCase,
    Signature,
    Stream,
    Symbol,
    TensorSig,
    View,
    WeightEntry,
)
from qcompiler.plan.weights import StoredTensor, WeightStore
from qcompiler.runtime import ProgramImage, build_image

K, N, B_MAX = 64, 48, 300
NF4 = FormatRef(name="nf4", params=dict(formats.get("nf4", block=64).params))


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Kernels are compiled into a cache of this test run, so a test never meets another run's libraries."""
    patch = pytest.MonkeyPatch()
    path = tmp_path_factory.mktemp("cache")
    patch.setenv("QC_CACHE_DIR", str(path))
    patch.delenv("QC_ISA", raising=False)
    patch.delenv("QC_NUM_THREADS", raising=False)
    return path


def _f32(name: str, shape: tuple[object, ...], access: str) -> Operand:
    strides = tuple(dim_product(shape[i + 1 :]) for i in range(len(shape)))
    return Operand(name=name, dtype="f32", access=access, shape=shape, strides=strides)  # type: ignore[arg-type]


def dim_product(shape: tuple[object, ...]) -> int:
    result = 1
    for extent in shape:
        assert isinstance(extent, int)
        result *= extent
    return result


def linear_spec(name: str, m_class: str) -> KernelSpec:
    operands = (
        _f32("x", ("b", K), "r"),
        Operand(name="w", dtype="f32", access="r", shape=(N, K), format=NF4, layout="cpu_p16_v1"),
        _f32("bias", (N,), "r"),
        _f32("out", ("b", N), "w"),
    )
    body = LinearKernel(m="b", n=N, k=K, m_class=m_class, has_bias=True)  # type: ignore[arg-type]
    return KernelSpec(name=name, symbols=("b",), operands=operands, body=body, serves="qc.linear at model.proj")


def loop_spec(
    name: str,
    extents: tuple[object, ...],
    operands: tuple[Operand, ...],
    accesses: tuple[tuple[object, ...], ...],
    ops: tuple[ScalarOp, ...],
    symbols: tuple[str, ...] = (),
) -> KernelSpec:
    body = LoopKernel(
        extents=extents,  # type: ignore[arg-type]
        iterators=("parallel",) * len(extents),
        accesses=tuple(AffineAccess(offset=0, coefficients=c) for c in accesses),  # type: ignore[arg-type]
        body=ScalarProgram(
            inputs=tuple((f"in{i}", o.dtype) for i, o in enumerate(operands)), ops=ops, yields=(ops[-1].result,)
        ),
    )
    return KernelSpec(name=name, symbols=symbols, operands=operands, body=body, serves=f"linalg.generic at {name}")


def _op(result: str, op: str, *args: str, dtype: str = "f32", **more: object) -> ScalarOp:
    return ScalarOp(result=result, op=op, dtype=dtype, args=args, **more)  # type: ignore[arg-type]


def kernels() -> tuple[KernelSpec, ...]:
    relu_add = loop_spec(
        "relu_add", ("b", N), (_f32("h", ("b", N), "r"), _f32("t", (N,), "r"), _f32("out", ("b", N), "w")),
        ((N, 1), (0, 1), (N, 1)),
        (
            _op("v0", "arith.constant", value=(0.0).hex()),
            _op("v1", "arith.maximumf", "in0", "v0"),
            _op("v2", "arith.addf", "v1", "in1"),
        ),
        symbols=("b",),
    )  # fmt: skip
    table = loop_spec(
        "table", (N,), (_f32("out", (N,), "w"),), ((1,),),
        (
            _op("v0", "linalg.index", dtype="index", axis=0),
            _op("v1", "arith.index_cast", "v0", dtype="i32"),
            _op("v2", "arith.sitofp", "v1"),
            _op("v3", "arith.constant", value=(0.5).hex()),
            _op("v4", "arith.mulf", "v2", "v3"),
        ),
    )  # fmt: skip
    count = loop_spec(
        "count", (4,), (_f32("n", (4,), "r"), _f32("out", (4,), "w")), ((1,), (1,)),
        (_op("v0", "arith.constant", value=(1.0).hex()), _op("v1", "arith.addf", "in0", "v0")),
    )  # fmt: skip
    return (linear_spec("linear_one", "1"), linear_spec("linear_many", "large"), relu_add, table, count)


def _view(buffer: str, *shape: object) -> View:
    strides = tuple(dim_product(shape[i + 1 :]) for i in range(len(shape)))
    return View(buffer=buffer, dtype="f32", shape=shape, strides=strides)  # type: ignore[arg-type]


def _entry(name: str, low: int, high: int, linear: Launch | Select) -> EntryPoint:
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
            linear,
            Launch(
                kernel="relu_add", stream="s0",
                operands=(_view(f"{name}.h", "b", N), _view("table", N), _view(f"{name}.y", "b", N)),
            ),
            Launch(kernel="count", stream="s0", operands=(_view("calls", 4), _view("calls", 4))),
            Copy(stream="s0", source=_view("calls", 4), target=_view(f"{name}.n", 4)),
            Copy(stream="s0", source=_view(f"{name}.x", "b", K), target=_view(f"{name}.raw", "b", K)),
        ),
    )  # fmt: skip


def _linear_operands(name: str) -> tuple[View, ...]:
    weight = View(buffer="w", dtype="f32", shape=(N, K), format=NF4, layout="cpu_p16_v1")
    return (_view(f"{name}.x", "b", K), weight, _view("bias", N), _view(f"{name}.h", "b", N))


def make_plan(weights: tuple[WeightEntry, ...], constants: int) -> Plan:
    arenas = [
        Arena(name="constants", device="cpu", kind="constants", nbytes=constants),
        Arena(name="init", device="cpu", kind="init", nbytes=N * 4),
        Arena(name="calls", device="cpu", kind="state", nbytes=64),
    ]
    buffers = [
        *(Buffer(name=e.name, arena="constants", offset=e.offset, nbytes=e.nbytes) for e in weights),
        Buffer(name="table", arena="init", offset=0, nbytes=N * 4),
        Buffer(name="calls", arena="calls", offset=0, nbytes=16),
    ]
    for entry, most in (("one", 1), ("many", B_MAX)):
        sizes = {"x": most * K * 4, "y": most * N * 4, "n": 16, "raw": most * K * 4}
        arenas += [
            Arena(name=f"{entry}.{n}", device="cpu", kind="input" if n == "x" else "output", nbytes=size, entry=entry)
            for n, size in sizes.items()
        ]
        arenas.append(
            Arena(name=f"{entry}.act", device="cpu", kind="activations", nbytes=most * N * 4 + 64, entry=entry)
        )
        buffers += [Buffer(name=f"{entry}.{n}", arena=f"{entry}.{n}", offset=0, nbytes=s) for n, s in sizes.items()]
        buffers.append(Buffer(name=f"{entry}.h", arena=f"{entry}.act", offset=64, nbytes=most * N * 4))
    one = Launch(kernel="linear_one", stream="s0", operands=_linear_operands("one"))
    cases = (SelectCase(max=1, kernel="linear_one"), SelectCase(max=None, kernel="linear_many"))
    many = Select(on="b", cases=cases, stream="s0", operands=_linear_operands("many"))
    init = EntryPoint(
        name="init", symbols=(), inputs=(), outputs=(),
        steps=(Launch(kernel="table", stream="s0", operands=(_view("table", N),)),),
    )  # fmt: skip
    return Plan(
        devices=(DeviceSlot(name="cpu", kind="cpu"),),
        streams=(Stream(name="s0", device="cpu"),),
        events=(),
        arenas=tuple(arenas),
        buffers=tuple(buffers),
        kernels=kernels(),
        entries=(_entry("one", 1, 1, one), _entry("many", 2, B_MAX, many)),
        init=init,
        weights=weights,
    )


SIGNATURE = Signature(
    inputs={
        "args": {"kind": "tuple", "items": [{"kind": "leaf", "index": 0}]},
        "kwargs": {"kind": "dict", "keys": [], "items": []},
    },
    outputs={
        "kind": "dict",
        "keys": ["y", "n", "raw"],
        "items": [{"kind": "leaf", "index": i} for i in range(3)],
    },
)


class Small:
    """The program and what it should compute."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        fmt = formats.get("nf4", block=64)
        packed = fmt.encode(rng.standard_normal((N, K), np.float32))
        self.weight = fmt.decode(packed)
        self.bias = rng.standard_normal(N, np.float32)
        data = layouts.get("cpu_p16_v1").pack(fmt, "f32", N, K, packed.data)
        store = WeightStore()
        store.add(StoredTensor("w", "f32", (N, K), data, NF4, "cpu_p16_v1", ("model.proj.weight",)))
        store.add_array("bias", self.bias, ("model.proj.bias",))
        second = -(-data.nbytes // 256) * 256
        entries = (
            WeightEntry(
                name="w", dtype="f32", shape=(N, K), offset=0, nbytes=data.nbytes, format=NF4, layout="cpu_p16_v1",
                parameters=("model.proj.weight",),
            ),
            WeightEntry(name="bias", dtype="f32", shape=(N,), offset=second, nbytes=N * 4),
        )  # fmt: skip
        texts = {"ir/02-import.mlir": "builtin.module {}\n"}
        self.image: ProgramImage = build_image(
            make_plan(entries, second + 256), SIGNATURE, store, texts=texts, ledger={"rows": []}, report="." * 200
        )

    def x(self, batch: int, seed: int = 1) -> np.ndarray:
        return np.random.default_rng(seed).standard_normal((batch, K), np.float32)

    def expected(self, x: np.ndarray) -> np.ndarray:
        table = np.arange(N, dtype=np.float32) * np.float32(0.5)
        return np.maximum(x @ self.weight.T + self.bias, 0) + table


@pytest.fixture(scope="session")
def small(own_cache: Path) -> Small:
    return Small()


@pytest.fixture(scope="session")
def loaded(small: Small) -> Callable[..., object]:
    """`loaded(**options)`: the program made ready to run."""
    from qcompiler.runtime import LoadedProgram

    return lambda **options: LoadedProgram.from_image(small.image, **options)
