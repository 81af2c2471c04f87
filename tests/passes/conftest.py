"""Small modules for pass tests, and the check that nothing input-independent is left to a call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from xdsl.builder import Builder
from xdsl.dialects import arith, func
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Block, Operation, OpResult, Region, SSAValue
from xdsl.rewriter import InsertPoint

from qcompiler.ir import build, qc
from qcompiler.ir.context import QCContext
from qcompiler.ir.module import entry_funcs, find_func, set_ranges
from qcompiler.ir.types import ELEMENT_TYPES, shape_of, tensor, tensor_dtype
from qcompiler.passes.pipeline import STAGES, run_pipeline, with_options
from qcompiler.passes.specialize import Bucket, bucket_text

Array = np.ndarray[Any, Any]
NARROW = (ELEMENT_TYPES["bf16"], ELEMENT_TYPES["f16"])


@dataclass
class Make:
    """A module under construction: `make.pointwise(arith.AddfOp, x, y)`, …; `run` passes it through stages."""

    ranges: Mapping[str, tuple[int, int]] = field(default_factory=lambda: {"b": (1, 4), "s": (1, 32)})
    ctx: QCContext = field(default_factory=QCContext.default)
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    buckets: Sequence[Bucket] | None = None

    def __post_init__(self) -> None:
        self.block = Block()
        self.builder = Builder(InsertPoint.at_end(self.block))
        self.module: ModuleOp | None = None

    def arg(self, shape: Sequence[build.Dim], dtype: str = "f32") -> SSAValue:
        return self.block.insert_arg(tensor(shape, dtype), len(self.block.args))  # type: ignore[arg-type]

    def const(self, *shape: int, values: Array | None = None) -> SSAValue:
        key = f"w{len(self.ctx.weights)}"
        array = (self.rng.standard_normal(shape) / 4).astype(np.float32) if values is None else values
        self.ctx.weights.add_array(key, array)
        return self.op(qc.ConstOp(key, tensor(array.shape, self.ctx.weights[key].dtype)))

    def op(self, op: Operation) -> SSAValue:
        return self.builder.insert(op).results[0]

    def pointwise(self, kind: Callable[..., Operation], *values: SSAValue) -> SSAValue:
        """One op on broadcast inputs, computed in f32 and rounded once, as import writes it."""
        shape: tuple[build.Dim, ...] = ()
        for value in values:
            other = shape_of(value.type)
            long, short = (other, shape) if len(other) > len(shape) else (shape, other)
            short = (1,) * (len(long) - len(short)) + tuple(short)
            shape = tuple(b if a == 1 else a for a, b in zip(long, short, strict=True))
        dtype = tensor_dtype(values[0].type)

        def body(inner: Builder, arguments: Sequence[SSAValue]) -> Operation:
            wide = [self._widen(inner, a) for a in arguments[:-1]]
            result = inner.insert(kind(*wide))
            if ELEMENT_TYPES[dtype] not in NARROW:
                return result
            return inner.insert(arith.TruncFOp(result.results[0], ELEMENT_TYPES[dtype]))

        return build.pointwise(self.builder, list(values), shape, dtype, body)

    def _widen(self, inner: Builder, value: SSAValue) -> SSAValue:
        if value.type not in NARROW:
            return value
        return inner.insert(arith.ExtFOp(value, ELEMENT_TYPES["f32"])).result

    def scaled(self, value: SSAValue, factor: float, kind: Any = arith.MulfOp) -> SSAValue:
        def body(inner: Builder, arguments: Sequence[SSAValue]) -> Operation:
            return inner.insert(kind(arguments[0], build.scalar(inner, factor, tensor_dtype(value.type))))

        return build.pointwise(self.builder, [value], shape_of(value.type), tensor_dtype(value.type), body)

    def linear(self, x: SSAValue, w: SSAValue, bias: SSAValue | None = None) -> SSAValue:
        shape = (*shape_of(x.type)[:-1], shape_of(w.type)[0])
        return self.op(qc.LinearOp(x, w, bias, tensor(shape, tensor_dtype(x.type))))

    def finish(self, *results: SSAValue) -> ModuleOp:
        self.builder.insert(func.ReturnOp(*results))
        types = [a.type for a in self.block.args], [r.type for r in results]
        function = func.FuncOp("main", types, Region(self.block))
        set_ranges(function, self.ranges)
        self.module = ModuleOp([function])
        self.module.verify()
        return self.module

    def run(self, stages: Sequence[str], inputs: Sequence[Array] | None = None) -> None:
        """The named stages; with inputs, each is checked against the interpreter."""
        assert self.module is not None
        options = {} if self.buckets is None else {"buckets": tuple(bucket_text(*each) for each in self.buckets)}
        chosen = with_options([stage for stage in STAGES if stage.name in stages], {"specialize": options})
        verify = "numerics" if inputs is not None else None
        run_pipeline(self.module, self.ctx, stages=chosen, verify_each=verify, sample_inputs=inputs)  # type: ignore[arg-type]

    def ops(self, entry: str = "main") -> list[str]:
        """Names of the ops that compute something, in order."""
        assert self.module is not None
        function = find_func(self.module, entry)
        assert function is not None
        quiet = ("qc.const", "qc.dim", "tensor.empty", "arith.constant", "func.return")
        return [op.name for op in function.body.block.ops if op.name not in quiet]


@pytest.fixture
def make() -> Make:
    return Make()


@pytest.fixture
def maker() -> type[Make]:
    return Make


def computed_per_call_without_input(module: ModuleOp) -> list[str]:
    """Ops of entry points that compute a tensor from nothing but constants; views and a reduction's start do not count.

    Written without any help of the passes: plain data flow over the final module.
    """
    quiet = ("qc.const", "qc.dim", "tensor.empty", "linalg.transpose", "linalg.broadcast", "tensor.expand_shape")
    quiet += ("tensor.collapse_shape", "tensor.extract_slice")
    found = []
    for function in entry_funcs(module):
        constant: set[Operation] = set()
        for op in function.body.block.ops:
            owners = [v.owner if isinstance(v, OpResult) else None for v in op.operands]
            if op.name == "qc.state" or not op.results or not all(o is not None and o in constant for o in owners):
                continue
            constant.add(op)
            starts = op.name == "linalg.fill" and all(u.operation.name == "linalg.generic" for u in op.results[0].uses)
            if op.name not in quiet and not op.name.startswith("arith.") and not starts:
                found.append(f"@{function.sym_name.data}: {op.name}")
    return found


@pytest.fixture
def per_call() -> Callable[[ModuleOp], list[str]]:
    return computed_per_call_without_input
