"""Small programs made by hand, a kernel each: what attacks and mutants of kernels, views and sizes are edits of.

Every operand lies in memory of its own: what is read in an input, what is written in an output, what is read and
written in a state, a packed or fixed weight in the constants.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from qcompiler.plan.dims import Dim, contiguous_strides, product
from qcompiler.plan.kernel import ITEMSIZE, KernelSpec, Operand, ScalarOp, ScalarProgram
from qcompiler.plan.kinds.loop import AffineAccess, LoopKernel
from qcompiler.plan.plan import (
    Arena,
    Buffer,
    DeviceSlot,
    EntryPoint,
    Launch,
    Plan,
    Signature,
    Step,
    Stream,
    Symbol,
    TensorSig,
    View,
    WeightEntry,
)
from qcompiler.plan.weights import StoredTensor, WeightStore
from qcompiler.runtime.image import ProgramImage, ProgramTarget, build_image

Ranges = Mapping[str, tuple[int, int]]
replace = msgspec.structs.replace


def operand(name: str, shape: Sequence[Dim], access: str = "r", dtype: str = "f32", **more: Any) -> Operand:
    """A row-major operand; `strides`, `format`, `layout` as keywords."""
    if "layout" not in more:
        more.setdefault("strides", contiguous_strides(tuple(shape)))
    return Operand(name=name, dtype=dtype, access=access, shape=tuple(shape), **more)  # type: ignore[arg-type]


def view_of(spec: Operand, buffer: str, offset: Dim = 0) -> View:
    return View(
        buffer=buffer, dtype=spec.dtype, shape=spec.shape, strides=spec.strides, offset=offset, format=spec.format,
        layout=spec.layout,
    )  # fmt: skip


@dataclass
class Maker:
    """Collects the parts of a plan with one entry point, ``main``."""

    ranges: Ranges = field(default_factory=dict)
    kind: str = "cpu"
    arenas: list[Arena] = field(default_factory=list)
    buffers: list[Buffer] = field(default_factory=list)
    kernels: list[KernelSpec] = field(default_factory=list)
    inputs: list[TensorSig] = field(default_factory=list)
    outputs: list[TensorSig] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    init: list[Step] = field(default_factory=list)
    store: WeightStore = field(default_factory=WeightStore)

    def _arena(self, name: str, kind: str, nbytes: int, entry: str | None = None) -> str:
        self.arenas.append(Arena(name=name, device="d", kind=kind, nbytes=nbytes, entry=entry))  # type: ignore[arg-type]
        self.buffers.append(Buffer(name=name, arena=name, offset=0, nbytes=nbytes))
        return name

    def _largest(self, shape: Sequence[Dim], dtype: str) -> int:
        return product(shape).tight_bounds(self.ranges)[1] * ITEMSIZE[dtype]

    def input(self, name: str, shape: Sequence[Dim], dtype: str = "f32") -> str:
        """An argument; the name of its buffer."""
        self.inputs.append(TensorSig(name=name, arena=name, dtype=dtype, shape=tuple(shape)))  # type: ignore[arg-type]
        return self._arena(name, "input", self._largest(shape, dtype), "main")

    def output(self, name: str, shape: Sequence[Dim], dtype: str = "f32") -> str:
        self.outputs.append(TensorSig(name=name, arena=name, dtype=dtype, shape=tuple(shape)))  # type: ignore[arg-type]
        return self._arena(name, "output", self._largest(shape, dtype), "main")

    def state(self, name: str, nbytes: int) -> str:
        return self._arena(name, "state", nbytes)

    def activation(self, name: str, nbytes: int) -> str:
        return self._arena(name, "activations", nbytes, "main")

    def launch(self, spec: KernelSpec, views: Sequence[View]) -> None:
        if spec not in self.kernels:
            self.kernels.append(spec)
        self.steps.append(Launch(kernel=spec.name, stream="q", operands=tuple(views)))

    def kernel(self, spec: KernelSpec, weights: Mapping[str, StoredTensor] | None = None) -> Maker:
        """A launch of the kernel on memory of its own for every operand: see the module."""
        views = []
        for each in spec.operands:
            if weights and each.name in weights:
                self.store.add(weights[each.name])
                buffer = f"weight {each.name}"
            elif each.access == "rw":
                buffer = self.state(each.name, self._largest(each.shape, each.dtype))
            else:
                make = self.input if each.access == "r" else self.output
                buffer = make(each.name, each.shape, each.dtype)
            views.append(view_of(each, buffer))
        self.launch(spec, views)
        return self

    def image(self, isa: str = "x86-64") -> ProgramImage:
        entries, end = [], 0
        buffers = []
        for tensor in self.store:
            entries.append(
                WeightEntry(
                    name=tensor.key, dtype=tensor.dtype, shape=tensor.shape, offset=end, nbytes=tensor.nbytes,
                    format=tensor.format, layout=tensor.layout,
                )
            )  # fmt: skip
            buffers.append(Buffer(name=f"weight {tensor.key}", arena="w", offset=end, nbytes=tensor.nbytes))
            end = -(-(end + tensor.nbytes) // 256) * 256
        constants = [Arena(name="w", device="d", kind="constants", nbytes=end)] if end else []
        init = EntryPoint(name="init", symbols=(), inputs=(), outputs=(), steps=tuple(self.init))
        plan = Plan(
            devices=(DeviceSlot(name="d", kind=self.kind),),  # type: ignore[arg-type]
            streams=(Stream(name="q", device="d"),),
            events=(),
            arenas=(*constants, *self.arenas),
            buffers=(*buffers, *self.buffers),
            kernels=tuple(self.kernels),
            entries=(
                EntryPoint(
                    name="main",
                    symbols=tuple(Symbol(name=n, min=low, max=high) for n, (low, high) in self.ranges.items()),
                    inputs=tuple(self.inputs), outputs=tuple(self.outputs), steps=tuple(self.steps),
                ),
            ),
            init=init if self.init else None,
            weights=tuple(entries),
        )  # fmt: skip
        target = ProgramTarget(kind="cpu" if self.kind == "cpu" else "cuda", isa=isa)
        return build_image(plan, signature(len(self.inputs), len(self.outputs)), self.store, target=target)


def signature(inputs: int, outputs: int) -> Signature:
    leaves = [{"kind": "leaf", "index": i} for i in range(inputs)]
    results = [{"kind": "leaf", "index": i} for i in range(outputs)]
    return Signature(
        inputs={"args": {"kind": "tuple", "items": leaves}, "kwargs": {"kind": "dict", "keys": [], "items": []}},
        outputs={"kind": "tuple", "items": results},
    )


# --- loops -----------------------------------------------------------------------------------------------------------


def op(result: str, name: str, *args: str, dtype: str = "f32", **more: Any) -> ScalarOp:
    return ScalarOp(result=result, op=name, dtype=dtype, args=args, **more)  # type: ignore[arg-type]


def loop(
    name: str,
    extents: Sequence[Dim],
    operands: Sequence[Operand],
    coefficients: Sequence[Sequence[Dim]],
    ops: Sequence[ScalarOp],
    *,
    symbols: Sequence[str] = (),
    iterators: Sequence[str] | None = None,
    init: Sequence[str] = (),
    yields: Sequence[str] | None = None,
    offsets: Sequence[Dim] | None = None,
) -> KernelSpec:
    """A loop kernel whose operands begin at element 0 (or at `offsets`); the last op gives the one result."""
    at = offsets or (0,) * len(operands)
    body = LoopKernel(
        extents=tuple(extents),
        iterators=tuple(iterators or ("parallel",) * len(extents)),  # type: ignore[arg-type]
        accesses=tuple(
            AffineAccess(offset=begin, coefficients=tuple(each)) for begin, each in zip(at, coefficients, strict=True)
        ),
        body=ScalarProgram(
            inputs=tuple((f"in{i}", each.dtype) for i, each in enumerate(operands)),
            ops=tuple(ops),
            yields=tuple(yields) if yields is not None else (ops[-1].result,),
        ),
        init=tuple(init),
    )
    return KernelSpec(name=name, symbols=tuple(symbols), operands=tuple(operands), body=body)


ONE = op("one", "arith.constant", value=(1.0).hex())
DOUBLE = op("twice", "arith.addf", "in0", "in0")


def doubling(shape: Sequence[Dim] = (8, 16), symbols: Sequence[str] = (), name: str = "double") -> KernelSpec:
    """``y = x + x`` over row-major operands."""
    steps = contiguous_strides(tuple(shape))
    operands = (operand("x", shape), operand("y", shape, "w"))
    return loop(name, shape, operands, (steps, steps), (DOUBLE,), symbols=symbols)


# --- edits -----------------------------------------------------------------------------------------------------------


def with_kernel(plan: Plan, number: int = 0, **changes: Any) -> Plan:
    """The plan with other fields in one kernel's spec."""
    kernels = list(plan.kernels)
    kernels[number] = replace(kernels[number], **changes)
    return replace(plan, kernels=tuple(kernels))


def with_body(plan: Plan, number: int = 0, **changes: Any) -> Plan:
    return with_kernel(plan, number, body=replace(plan.kernels[number].body, **changes))


def with_operand(plan: Plan, place: int, number: int = 0, **changes: Any) -> Plan:
    """The plan with other fields in one operand of a kernel, and in the views that are passed for it."""
    spec = plan.kernels[number]
    operands = list(spec.operands)
    operands[place] = replace(operands[place], **changes)
    plan = with_kernel(plan, number, operands=tuple(operands))
    seen = {key: value for key, value in changes.items() if key in ("dtype", "shape", "strides", "format", "layout")}

    def changed(step: Step) -> Step:
        if not isinstance(step, Launch) or step.kernel != spec.name:
            return step
        views = list(step.operands)
        views[place] = replace(views[place], **seen)
        return replace(step, operands=tuple(views))

    entries = tuple(replace(entry, steps=tuple(map(changed, entry.steps))) for entry in plan.entries)
    return replace(plan, entries=entries)


def with_arena(plan: Plan, name: str, **changes: Any) -> Plan:
    """The plan with other fields in an arena, and the buffer of that name as large as it."""
    arenas = tuple(replace(each, **changes) if each.name == name else each for each in plan.arenas)
    nbytes = next(each.nbytes for each in arenas if each.name == name)
    buffers = tuple(replace(each, nbytes=nbytes) if each.name == name else each for each in plan.buffers)
    return replace(plan, arenas=arenas, buffers=buffers)


def arguments(image: ProgramImage, symbols: Mapping[str, int], seed: int = 0) -> list[Any]:
    """Values for the arguments of the entry ``main`` at these sizes: small numbers, indices within 0 and 1."""
    from qcompiler.plan.dims import dim
    from qcompiler.plan.weights import NUMPY_DTYPES

    rng = np.random.default_rng(seed)
    found = []
    for sig in image.plan.entries[0].inputs:
        shape = tuple(dim(extent).evaluate(symbols) for extent in sig.shape)
        whole = sig.dtype in ("i64", "i32", "i16", "i8", "ui8", "i1")
        values = rng.integers(0, 2, shape) if whole else rng.standard_normal(shape)
        found.append(np.ascontiguousarray(values.astype(NUMPY_DTYPES[sig.dtype])))
    return found
