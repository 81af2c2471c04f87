"""Words for plans that are built by hand: operands, views, loops, signatures, and the program `small`.

`small` has every kind of arena, a packed weight, a state, an init table, a copy, a select and two entry points:

    h   = linear(x, w) + bias            x (b, 64) f32, w (48, 64) nf4
    y   = relu(h) + table[None, :]       init computes the table: table[i] = 0.5 * i
    n   = calls so far (a state)
    raw = x

For a GPU, `raw` and `y` are computed on a second stream, and an event stands between the streams.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from qcompiler import formats
from qcompiler.kernels import layouts
from qcompiler.plan.dims import contiguous_strides
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
    Step,
    Stream,
    Symbol,
    TensorSig,
    View,
    Wait,
    WeightEntry,
    initial_weight,
)
from qcompiler.plan.weights import StoredTensor, WeightStore
from qcompiler.runtime import ProgramImage, ProgramTarget, build_image

K, N = 64, 48
NF4 = FormatRef(name="nf4", params=dict(formats.get("nf4", block=64).params))
LEAF: Any = {"kind": "leaf", "index": 0}


def operand(name: str, shape: tuple[Any, ...], access: Any) -> Operand:
    """Row-major and f32."""
    return Operand(name=name, dtype="f32", access=access, shape=shape, strides=contiguous_strides(shape))


def view(buffer: str, *shape: Any) -> View:
    """The whole buffer, row-major and f32."""
    return View(buffer=buffer, dtype="f32", shape=shape, strides=contiguous_strides(shape))


def op(result: str, name: str, *args: str, dtype: Any = "f32", **more: Any) -> ScalarOp:
    return ScalarOp(result=result, op=name, dtype=dtype, args=args, **more)


def constant(value: float) -> ScalarOp:
    """The scalar `c`."""
    return op("c", "arith.constant", value=value.hex())


def loop(
    name: str, extents: tuple[Any, ...], operands: tuple[Operand, ...], accesses: tuple[Any, ...], *ops: ScalarOp,
    symbols: tuple[str, ...] = (),
) -> KernelSpec:  # fmt: skip
    """A parallel loop. `accesses` has the coefficients of each operand; the last scalar is stored."""
    body = LoopKernel(
        extents=extents,
        iterators=("parallel",) * len(extents),
        accesses=tuple(AffineAccess(offset=0, coefficients=c) for c in accesses),
        body=ScalarProgram(
            inputs=tuple((f"in{i}", o.dtype) for i, o in enumerate(operands)), ops=ops, yields=(ops[-1].result,)
        ),
    )
    return KernelSpec(name=name, symbols=symbols, operands=operands, body=body, serves=f"linalg.generic at {name}")


def arguments(count: int = 1, result: Any = None) -> Signature:
    """A function of `count` tensors -> `result` (a tree), or one tensor."""
    leaves = [{"kind": "leaf", "index": i} for i in range(count)]
    return Signature(
        inputs={
            "args": {"kind": "tuple", "items": leaves},
            "kwargs": {"kind": "dict", "keys": [], "items": []},
        },
        outputs=result or LEAF,
    )


class Small:
    """The program `small` as an image, and what it should compute.

    `most` is the largest batch; `cases` maps the largest batch of a case (None: any) to its linear kernel, which is one
    of linear_one, linear_few and linear_many. The state begins at `calls`.
    """

    def __init__(
        self, kind: str, cases: Mapping[int | None, str], *, most: int, calls: float = 0, **image: Any
    ) -> None:
        self.kind, self.cases, self.most = kind, cases, most
        self.slot, self.layout = ("cpu", "cpu_p16_v1") if kind == "cpu" else ("gpu", "cuda_t16_v1")
        rng = np.random.default_rng(0)
        fmt = formats.get("nf4", block=64)
        packed = fmt.encode(rng.standard_normal((N, K), np.float32))
        self.weight = fmt.decode(packed)
        self.bias = rng.standard_normal(N, np.float32)
        data = layouts.get(self.layout).pack(fmt, "f32", N, K, packed.data)
        store = WeightStore()
        store.add(StoredTensor("w", "f32", (N, K), data, NF4, self.layout, ("model.proj.weight",)))
        store.add_array("bias", self.bias, ("model.proj.bias",))
        if calls:
            store.add_array(initial_weight("calls"), np.full(4, calls, np.float32))
        tree = {"kind": "dict", "keys": ["y", "n", "raw"], "items": [{"kind": "leaf", "index": i} for i in range(3)]}
        self.image: ProgramImage = build_image(self._plan(store), arguments(1, tree), store, **image)

    def x(self, batch: int, seed: int = 1) -> np.ndarray:
        return np.random.default_rng(seed).standard_normal((batch, K), np.float32)

    def expected(self, x: np.ndarray) -> np.ndarray:
        """The result y."""
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

    # --- its plan ---

    def _plan(self, store: WeightStore) -> Plan:
        weights, constants = self._weights(store)
        slot = self.slot
        arenas = [
            Arena(name="constants", device=slot, kind="constants", nbytes=constants),
            Arena(name="init", device=slot, kind="init", nbytes=N * 4),
            Arena(name="calls", device=slot, kind="state", nbytes=64),
        ]
        buffers = [
            *(Buffer(name=e.name, arena="constants", offset=e.offset, nbytes=e.nbytes) for e in weights),
            Buffer(name="table", arena="init", offset=0, nbytes=N * 4),
            Buffer(name="calls", arena="calls", offset=0, nbytes=16),
        ]
        for entry, most in (("one", 1), ("many", self.most)):
            sizes = {"x": most * K * 4, "y": most * N * 4, "n": 16, "raw": most * K * 4}
            arenas += [
                Arena(name=f"{entry}.{n}", device=slot, kind="input" if n == "x" else "output", nbytes=s, entry=entry)
                for n, s in sizes.items()
            ]
            hidden = most * N * 4
            arenas.append(Arena(name=f"{entry}.act", device=slot, kind="activations", nbytes=hidden + 64, entry=entry))
            buffers += [Buffer(name=f"{entry}.{n}", arena=f"{entry}.{n}", offset=0, nbytes=s) for n, s in sizes.items()]
            buffers.append(Buffer(name=f"{entry}.h", arena=f"{entry}.act", offset=64, nbytes=hidden))
        table = Launch(kernel="table", stream=self._side, operands=(view("table", N),))
        return Plan(
            devices=(DeviceSlot(name=slot, kind=self.kind),),  # type: ignore[arg-type]
            streams=tuple(Stream(name=name, device=slot) for name in dict.fromkeys(("s0", self._side))),
            events=() if self._side == "s0" else (Event(name="h"),),
            arenas=tuple(arenas),
            buffers=tuple(buffers),
            kernels=self._kernels(),
            entries=(self._entry("one", 1, 1), self._entry("many", 2, self.most)),
            init=EntryPoint(name="init", symbols=(), inputs=(), outputs=(), steps=(table,)),
            weights=weights,
        )

    @property
    def _side(self) -> str:
        """The stream of what does not wait for the linear."""
        return "s0" if self.kind == "cpu" else "s1"

    def _weights(self, store: WeightStore) -> tuple[tuple[WeightEntry, ...], int]:
        """The weights in order, each at a multiple of 256 bytes, and the bytes of all."""
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
        return tuple(entries), end

    def _linear(self, name: str, m_class: Any) -> KernelSpec:
        operands = (
            operand("x", ("b", K), "r"),
            Operand(name="w", dtype="f32", access="r", shape=(N, K), format=NF4, layout=self.layout),
            operand("bias", (N,), "r"),
            operand("out", ("b", N), "w"),
        )
        body = LinearKernel(m="b", n=N, k=K, m_class=m_class, has_bias=True)
        return KernelSpec(name=name, symbols=("b",), operands=operands, body=body, serves="qc.linear at model.proj")

    def _kernels(self) -> tuple[KernelSpec, ...]:
        relu_add = loop(
            "relu_add", ("b", N),
            (operand("h", ("b", N), "r"), operand("t", (N,), "r"), operand("out", ("b", N), "w")),
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
        classes = {"linear_one": "1", "linear_few": "2-8", "linear_many": "large"}
        used = dict.fromkeys(("linear_one", *self.cases.values()))
        return (*(self._linear(name, classes[name]) for name in used), relu_add, table, count)

    def _entry(self, name: str, low: int, high: int) -> EntryPoint:
        weight = View(buffer="w", dtype="f32", shape=(N, K), format=NF4, layout=self.layout)
        operands = (view(f"{name}.x", "b", K), weight, view("bias", N), view(f"{name}.h", "b", N))
        cases = tuple(SelectCase(max=most, kernel=kernel) for most, kernel in self.cases.items())
        linear = (
            Launch(kernel="linear_one", stream="s0", operands=operands)
            if high == 1
            else Select(on="b", cases=cases, stream="s0", operands=operands)
        )
        relu = (view(f"{name}.h", "b", N), view("table", N), view(f"{name}.y", "b", N))
        order = () if self._side == "s0" else (Record(stream="s0", event="h"), Wait(stream=self._side, event="h"))
        steps: tuple[Step, ...] = (
            linear,
            Copy(stream=self._side, source=view(f"{name}.x", "b", K), target=view(f"{name}.raw", "b", K)),
            *order,
            Launch(kernel="relu_add", stream=self._side, operands=relu),
            Launch(kernel="count", stream="s0", operands=(view("calls", 4), view("calls", 4))),
            Copy(stream="s0", source=view("calls", 4), target=view(f"{name}.n", 4)),
        )
        return EntryPoint(
            name=name,
            symbols=(Symbol(name="b", min=low, max=high),),
            inputs=(TensorSig(name="x", arena=f"{name}.x", dtype="f32", shape=("b", K)),),
            outputs=(
                TensorSig(name="y", arena=f"{name}.y", dtype="f32", shape=("b", N)),
                TensorSig(name="n", arena=f"{name}.n", dtype="f32", shape=(4,)),
                TensorSig(name="raw", arena=f"{name}.raw", dtype="f32", shape=("b", K)),
            ),
            steps=steps,
        )


def small_on_cpu() -> Small:
    """The program for this processor, with texts, a ledger and a report."""
    return Small(
        "cpu", {1: "linear_one", None: "linear_many"}, most=300,
        texts={"ir/02-import.mlir": "builtin.module {}\n"}, ledger={"rows": []}, report="." * 200,
    )  # fmt: skip


def small_on_gpu() -> Small:
    """The program for a GPU; its state begins at 10."""
    return Small(
        "cuda",
        {8: "linear_few", None: "linear_many"},
        most=12,
        calls=10,
        target=ProgramTarget(kind="cuda", isa="sm_80"),
    )
