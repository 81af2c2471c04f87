"""Prologues of `qc.linear`: norms of x and of what they multiply and add, and rows of int8, as the op's region.

    ^bb0(%x: tensor<1x64xf32>, %weight: tensor<64xf32>):
      %rows = qc.rms_norm %x weight(%weight) {eps = 1e-05} : tensor<1x64xf32>
      qc.yield %rows

`LinearOp.norms` are the norms in it, and `LinearOp.quantised` what makes rows of int8. The first norm may have a
residual; a second one is a norm of their sum. `qc.yield %rows, %first` keeps the rows that the first norm makes (the
sum if it has a residual) for other ops: the linear's second result. `qc.yield %codes, %codes` keeps rows of int8.
"""

from __future__ import annotations

from collections.abc import Sequence

from xdsl.ir import Block, Region, SSAValue

from qcompiler.formats import int8_rows
from qcompiler.ir.module import path_of, set_path
from qcompiler.ir.qc import Keeps, QuantizeRowsOp, YieldOp
from qcompiler.ir.qc_norm import Norm, norm_of
from qcompiler.ir.types import shape_of, tensor


def prologue_region(
    norms: Sequence[Norm],
    quantised: QuantizeRowsOp | None,
    x: SSAValue,
    affine: Sequence[SSAValue],
    *,
    keeps: Keeps | None = None,
) -> Region:
    """The prologue that makes the same of `x` as the `norms` and then `quantised` do, one after the other. `affine` are
    the weight, the bias and the residual of each norm, if it has them. `keeps` says which rows are yielded for other
    readers as well: those that the first norm makes, or those of int8."""
    block = Block(arg_types=[x.type, *(value.type for value in affine)])
    rows: SSAValue = block.args[0]
    given = block.args[1:]
    kept = list[SSAValue]()
    for norm in norms:
        count = len(norm.operands) - 1
        made = norm_of(norm, [rows, *given[:count]])
        given = given[count:]
        set_path(made, path_of(norm))
        block.add_op(made)
        rows = made.result
        kept = kept or [rows] * (keeps == "norm")
    if quantised is not None:
        shape = shape_of(x.type)
        type_ = tensor((*shape[:-1], int8_rows.row_bytes(int(shape[-1]))), "i8")
        codes = QuantizeRowsOp(rows, None, type_, kind=quantised.kind.data, value=quantised.value.value.data)
        block.add_op(codes)
        rows = codes.result
        kept += [rows] * (keeps == "codes")
    block.add_op(YieldOp(rows, *kept))
    return Region(block)
