"""What a GPU's kernels count in 32 bits, or launch at most, is refused by name when a model is compiled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from xdsl.builder import Builder
from xdsl.dialects import func
from xdsl.dialects.builtin import FunctionType, ModuleOp
from xdsl.ir import Block, Region, SSAValue
from xdsl.rewriter import InsertPoint

from qcompiler.errors import KernelSelectionError
from qcompiler.ir import qc, types
from qcompiler.ir.context import QCContext, Target
from qcompiler.ir.module import set_path
from qcompiler.kernels.cuda import emit
from qcompiler.kernels.cuda.geometry import MAX_EXTENT
from qcompiler.passes.select_kernels import SelectKernelsPass
from qcompiler.plan.kernel import KernelSpec, Operand
from qcompiler.plan.kinds.embedding import EmbeddingKernel
from qcompiler.plan.kinds.linear import LinearKernel
from qcompiler.plan.weights import NoBytes, StoredTensor, WeightStore

BORDER = 1 << 31


def selected(kind: str, op: str, rows: int, cols: int) -> None:
    """select-kernels on one op that reads a weight of this shape; the weight has a size and no bytes."""
    store = WeightStore()
    store.add(StoredTensor("w0", "bf16", (rows, cols), NoBytes(2 * rows * cols), parameters=("lm_head.weight",)))
    context = QCContext.default(weights=store, target=Target(kind, "sm_90a" if kind == "cuda" else "x86-64-v3"))
    weight = types.tensor((rows, cols), "bf16")
    given = types.tensor((3, cols), "bf16") if op == "linear" else types.tensor((3,), "i64")
    result = types.tensor((3, rows if op == "linear" else cols), "bf16")
    block = Block(arg_types=[given])
    builder = Builder(InsertPoint.at_end(block))
    table = builder.insert(qc.ConstOp("w0", weight)).result
    operands: Sequence[SSAValue] = (block.args[0], table)
    made = qc.LinearOp(*operands, None, result) if op == "linear" else qc.EmbeddingOp(*operands, result)
    set_path(made, "lm_head")
    builder.insert(func.ReturnOp(builder.insert(made).result))
    main = func.FuncOp("main", FunctionType.from_lists([given], [result]), Region(block))
    SelectKernelsPass().apply(context, ModuleOp([main]))


@pytest.mark.parametrize(
    ("op", "rows", "cols", "named"),
    [
        ("linear", 16, BORDER, "'lm_head.weight' has 2,147,483,648 columns"),
        ("linear", BORDER, 16, "'lm_head.weight' has 2,147,483,648 rows"),
        ("embedding", 16, BORDER, "'lm_head.weight' has 2,147,483,648 columns"),
    ],
)
def test_too_long_rows_are_refused_with_the_parameter_and_the_limit(op: str, rows: int, cols: int, named: str) -> None:
    with pytest.raises(KernelSelectionError) as refused:
        selected("cuda", op, rows, cols)
    for part in (f"qc.{op} at 'lm_head'", named, f"at most {MAX_EXTENT:,}", "compile for the CPU"):
        assert part in str(refused.value)
    selected("cpu", op, rows, cols)
    selected("cuda", op, min(rows, MAX_EXTENT), min(cols, MAX_EXTENT))


def test_a_table_of_more_than_2_to_the_31_rows_is_none_of_these() -> None:
    selected("cuda", "embedding", BORDER + 64, 16)


def specs(rows: int, cols: int) -> dict[str, KernelSpec]:
    """A linear and an embedding of a weight of this shape, as a program file may hold them."""

    def of(body: Any, *operands: Operand) -> KernelSpec:
        return KernelSpec(name="k", symbols=(), operands=operands, body=body, serves="qc.linear at lm_head")

    def plain(name: str, dtype: Any, access: Any, *shape: int) -> Operand:
        return Operand(name=name, dtype=dtype, access=access, shape=shape, strides=(*shape[1:], 1))

    weight = Operand(name="w", dtype="bf16", access="r", shape=(rows, cols), layout="cuda_t16_v1")
    linear = LinearKernel(m=3, n=rows, k=cols, m_class="9-64", has_bias=False)
    return {
        "linear": of(linear, plain("x", "bf16", "r", 3, cols), weight, plain("y", "bf16", "w", 3, rows)),
        "embedding": of(
            EmbeddingKernel(count=3, rows=rows, cols=cols), plain("i", "i64", "r", 3), weight,
            plain("y", "bf16", "w", 3, cols),
        ),
    }  # fmt: skip


@pytest.mark.parametrize("op", ["linear", "embedding"])
def test_emitters_refuse_what_a_file_may_ask_for(op: str) -> None:
    with pytest.raises(KernelSelectionError, match=r"qc.linear at lm_head.*'w' has 2,147,483,648 columns"):
        emit.emit_kernel(specs(16, BORDER)[op], "sm_90a")
    assert "qk_k(" in emit.emit_kernel(specs(16, MAX_EXTENT)[op], "sm_90a").text


def test_a_grid_that_cuda_cannot_launch_is_refused_when_the_kernel_is_emitted() -> None:
    """65535 blocks of 32 rows along y: a weight of more rows is refused before anything runs."""
    rows = 65535 * 32
    assert emit.emit_kernel(specs(rows, 16)["linear"], "sm_90a").geometry.grid[1] == 65535
    with pytest.raises(KernelSelectionError, match=r"lm_head.*needs 65,536 blocks along y.*at most 65,535"):
        emit.emit_kernel(specs(rows + 1, 16)["linear"], "sm_90a")
