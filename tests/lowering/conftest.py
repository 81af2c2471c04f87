"""Small tensor-level modules for the lower stages, built by hand so that nothing else has to work."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from xdsl.builder import Builder
from xdsl.dialects import func
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Block, Region, SSAValue
from xdsl.rewriter import InsertPoint

from qcompiler import formats
from qcompiler.ir import module as modules
from qcompiler.ir.context import QCContext
from qcompiler.ir.types import tensor
from qcompiler.plan.dims import Dim, Range
from qcompiler.plan.kernel import DType, FormatRef
from qcompiler.plan.weights import StoredTensor

Body = Callable[[Builder, Sequence[SSAValue]], Sequence[SSAValue]]


class Bench:
    """A context and a way to make a one-function module."""

    def __init__(self) -> None:
        self.ctx = QCContext.default()
        self.rng = np.random.default_rng(7)

    def packed(self, key: str, rows: int, cols: int, name: str, **params: int | bool) -> FormatRef:
        """Encodes a random matrix into the weight store."""
        fmt = formats.get(name, **params)
        packed = fmt.encode(self.rng.standard_normal((rows, cols)).astype(np.float32))
        ref = FormatRef(name=fmt.name, params=dict(fmt.params))
        self.ctx.weights.add(StoredTensor(key, "f32", (rows, cols), np.asarray(packed.data), ref))
        return ref

    def plain(self, key: str, *shape: int) -> None:
        self.ctx.weights.add_array(key, self.rng.standard_normal(shape).astype(np.float32))

    def module(
        self, arguments: Sequence[tuple[Sequence[Dim], DType]], ranges: dict[str, Range], body: Body
    ) -> ModuleOp:
        types = [tensor(shape, dtype) for shape, dtype in arguments]
        block = Block(arg_types=types)
        builder = Builder(InsertPoint.at_end(block))
        results = list(body(builder, block.args))
        builder.insert(func.ReturnOp(*results))
        function = func.FuncOp("main", (types, [value.type for value in results]), Region(block))
        modules.set_ranges(function, ranges)
        module = ModuleOp([function])
        module.verify()
        return module


@pytest.fixture
def bench() -> Bench:
    return Bench()
