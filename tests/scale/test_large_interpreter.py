"""The reference interpreter on a tensor of more than 2**31 elements: both ends of it, by every way to read a part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from xdsl.builder import Builder
from xdsl.dialects import func
from xdsl.dialects.builtin import FunctionType, ModuleOp
from xdsl.ir import Block, Region, SSAValue
from xdsl.ir.affine import AffineExpr, AffineMap
from xdsl.rewriter import InsertPoint

from qcompiler.errors import InterpreterError
from qcompiler.ir import build, qc, types
from qcompiler.ir.interpreter import run
from qcompiler.plan.weights import WeightStore

Array = npt.NDArray[Any]
ROWS, COLS = 34_000_001, 64
BORDER = (1 << 31) // COLS
"""The row that begins with element 2**31."""
WRITTEN = (0, (ROWS - 1) // 2, BORDER - 1, BORDER, ROWS - 3, ROWS - 2, ROWS - 1)


@pytest.fixture(scope="module")
def table() -> Array:
    """2.2e9 bytes, of which seven rows are there; the last has the largest value."""
    table = np.zeros((ROWS, COLS), np.int8)
    for row in WRITTEN:
        table[row] = np.random.default_rng(row).integers(1, 100, COLS)
    table[-1, -1] = 127
    assert table.size > 1 << 31
    return table


Body = Callable[[Builder, SSAValue, SSAValue], Sequence[SSAValue]]


def interpreted(table: Array, index: Sequence[int], body: Body) -> list[Array]:
    """The results of a function of the table and of an index."""
    given = [types.tensor(table.shape, "i8"), types.tensor((len(index),), "i64")]
    block = Block(arg_types=given)
    builder = Builder(InsertPoint.at_end(block))
    results = list(body(builder, *block.args))
    builder.insert(func.ReturnOp(*results))
    main = func.FuncOp("main", FunctionType.from_lists(given, [value.type for value in results]), Region(block))
    module = ModuleOp([main])
    module.verify()
    return run(module, WeightStore(), [table, np.array(index, np.int64)])


def test_gathers_and_slices_at_both_ends(table: Array) -> None:
    index = [ROWS - 1, 0, BORDER, BORDER - 1, ROWS - 3, -2]

    def body(b: Builder, x: SSAValue, index: SSAValue) -> list[SSAValue]:
        return [
            b.insert(qc.GatherOp(x, index, types.tensor((6, COLS), "i8"), axis=0)).result,
            build.extract_slice(b, x, [ROWS - 3, 5], [3, 7]),
            build.extract_slice(b, x, [BORDER - 1, 0], [2, COLS]),
            build.extract_slice(b, x, [0, 0], [3, COLS], [(ROWS - 1) // 2, 1]),
        ]

    gathered, end, border, steps = interpreted(table, index, body)
    assert np.array_equal(gathered, table[np.array(index)])
    assert np.array_equal(end, table[-3:, 5:12])
    assert np.array_equal(border, table[BORDER - 1 : BORDER + 1])
    assert np.array_equal(steps, table[:: (ROWS - 1) // 2])
    assert all(part.all() for part in (gathered, end, border, steps)), "each row that is read is one that was written"
    with pytest.raises(InterpreterError, match=f"index {ROWS} is out of range"):
        interpreted(table, [ROWS, 0, 0, 0, 0, 0], body)


def test_loops_and_reductions_over_all_of_it(table: Array) -> None:
    step = (ROWS - 1) // 2
    d0, d1 = AffineExpr.dimension(0), AffineExpr.dimension(1)

    def body(b: Builder, x: SSAValue, _index: SSAValue) -> list[SSAValue]:
        far = [AffineMap(2, 0, (d0 * step, d1 * -1 + (COLS - 1))), AffineMap.identity(2)]
        return [
            build.generic(b, [x], far, (3, COLS), "i8", ["parallel"] * 2, lambda _b, s: s[0]),
            build.reduce(b, x, [0, 1], "max"),
            build.reduce(b, x, [1], "max"),
        ]

    loop, largest, by_row = interpreted(table, [0], body)
    assert np.array_equal(loop, table[::step, ::-1])
    assert int(largest) == 127, "the last element of all is the largest"
    assert by_row.shape == (ROWS,)
    assert np.array_equal(np.flatnonzero(by_row), WRITTEN)
    assert np.array_equal(by_row[np.array(WRITTEN)], table[np.array(WRITTEN)].max(axis=1))
