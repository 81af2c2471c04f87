"""Small modules for tests: the fixture `module_of` builds one function from shapes, dtypes and a body."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from xdsl.builder import Builder
from xdsl.dialects import func
from xdsl.dialects.builtin import FunctionType, ModuleOp, TensorType
from xdsl.ir import Attribute, Block, Region, SSAValue
from xdsl.rewriter import InsertPoint

from qcompiler.ir import types
from qcompiler.plan.dims import Dim
from qcompiler.plan.kernel import DType

Body = Callable[[Builder, Sequence[SSAValue]], Sequence[SSAValue]]
Spec = tuple[tuple[Dim, ...], DType]


def _module_of(arguments: Sequence[Spec], body: Body, *, name: str = "main") -> ModuleOp:
    """A module with one function; `body(builder, arguments)` returns what is returned."""
    return ModuleOp([_function_of(arguments, body, name=name)])


def _function_of(arguments: Sequence[Spec], body: Body, *, name: str = "main") -> func.FuncOp:
    inputs: list[TensorType[Attribute]] = [types.tensor(shape, dtype) for shape, dtype in arguments]
    block = Block(arg_types=inputs)
    builder = Builder(InsertPoint.at_end(block))
    results = list(body(builder, block.args))
    builder.insert(func.ReturnOp(*results))
    return func.FuncOp(name, FunctionType.from_lists(inputs, [r.type for r in results]), Region(block))


@pytest.fixture
def module_of() -> Callable[..., ModuleOp]:
    return _module_of


@pytest.fixture
def function_of() -> Callable[..., func.FuncOp]:
    return _function_of
