"""fuse-norm-prologue: moves a norm into the linear that alone reads it, as the linear's prologue.

    %n = qc.rms_norm %h weight(%g) {eps = 1e-05}       %y = qc.linear %h, %w affine(%g) prologue {
    %y = qc.linear %n, %w                        ->    ^bb0(%x: tensor<1x64xf32>, %a: tensor<64xf32>):
                                                         %n = qc.rms_norm %x weight(%a) {eps = 1e-05}
                                                         qc.yield %n }

Likewise `qc.quantize_rows`, which makes the rows of int8 that a linear multiplies, and a norm in front of it.

The kernel normalises the rows before it multiplies them, and rounds them to their type as the norm does. The sums are
those of the norm's own kernel, so results are the same to the bit.

A norm keeps a kernel of its own if
- anything but one linear reads it (merge-linears has made one of q, k and v, and fuse-glu one of a gate and its pair);
- the number of rows is known only at run time, or is so large that threads, or blocks, should share the norm;
- the estimate says that normalising in each block of a GPU takes longer than the launch (kernels/prologue_choice.py);
- `separate` has a pattern of its module path.
"""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Operation, SSAValue
from xdsl.passes import ModulePass
from xdsl.rewriter import InsertPoint

from qcompiler.ir import build, qc
from qcompiler.ir.context import QCContext, qc_context
from qcompiler.ir.effects import erase_if_dead
from qcompiler.ir.module import functions, path_of
from qcompiler.ir.qc_norm import NORMS
from qcompiler.ir.qc_prologue import prologue_region
from qcompiler.ir.types import shape_of, tensor_dtype
from qcompiler.kernels.prologue_choice import NormQuery, obstacle
from qcompiler.kernels.select import FLOATS
from qcompiler.passes.devices.placing import DEVICE
from qcompiler.passes.lowering.rule import is_stored
from qcompiler.passes.views.views import Reshape, base_of, unreshaped
from qcompiler.plan.dims import product

Maker = qc.RmsNormOp | qc.LayerNormOp | qc.QuantizeRowsOp


@dataclass(frozen=True)
class FuseNormProloguePass(ModulePass):
    """Moves norms into the linears that read them."""

    name = "fuse-norm-prologue"
    separate: tuple[str, ...] = ()

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        context = qc_context(ctx)
        said: dict[tuple[str, str, str], None] = {}
        for function in functions(op):
            ops = list(function.body.block.ops)
            rows = [each for each in ops if isinstance(each, qc.QuantizeRowsOp)]
            for maker in (*rows, *(each for each in ops if isinstance(each, NORMS))):
                what = "rows of int8" if isinstance(maker, qc.QuantizeRowsOp) else "norm"
                linear = _only_reader(maker)
                why = "the recipe keeps it separate" if self._is_named(maker) else _obstacle(maker, linear, context)
                if isinstance(linear, qc.LinearOp) and why is None:
                    read = f"{what}: the prologue of '{path_of(linear)}'"
                    said[path_of(maker), read, "nothing else reads the result"] = None
                    _fuse(maker, linear)
                else:
                    said[path_of(maker), f"{what}: a kernel of its own", why or ""] = None
        for path, what, why in said:
            context.report.add(self.name, path, what, why)

    def _is_named(self, norm: Maker) -> bool:
        return any(fnmatch.fnmatchcase(path_of(norm), pattern) for pattern in self.separate)


def _only_reader(norm: Maker) -> Operation | None:
    """The one op that reads the norm, directly or through reshapes. None if several do."""
    value: SSAValue = norm.result
    while (reader := value.get_user_of_unique_use()) is not None and isinstance(reader, Reshape):
        value = reader.result
    return reader


def _obstacle(norm: Maker, linear: Operation | None, context: QCContext) -> str | None:
    if linear is None:
        return "several ops read it"
    if not isinstance(linear, qc.LinearOp):
        return f"{linear.name} reads it"
    if unreshaped(linear.x) is not norm.result or shape_of(linear.x.type)[-1:] != shape_of(norm.result.type)[-1:]:
        return f"'{path_of(linear)}' reads it, but does not multiply its rows"
    if isinstance(norm, qc.QuantizeRowsOp):
        if norm.columns is not None:
            return "it leaves columns out, which a call finds"
    elif norm.x.type != norm.result.type or tensor_dtype(norm.x.type) not in FLOATS:
        return f"it makes {tensor_dtype(norm.result.type)} of {tensor_dtype(norm.x.type)}, and prologues keep the type"
    if norm.attributes.get(DEVICE) != linear.attributes.get(DEVICE):
        return "they are on different devices"
    if isinstance(base_of(norm.x).owner, qc.StateOp):
        return "it reads a state, which a later step may change"
    n, k = shape_of(linear.w.type)
    query = NormQuery(
        m=product(shape_of(linear.x.type)[:-1]).to_dim(),
        k=int(k),
        n=int(n),
        dtype=tensor_dtype(norm.x.type),
        affine=len(norm.operands) - 1,
        kind=context.target.kind,
        isas=context.target.isas,
        constant_weight=is_stored(linear.w, context),
        makes_codes=isinstance(norm, qc.QuantizeRowsOp),
    )
    return obstacle(query)


def _fuse(norm: Maker, linear: qc.LinearOp) -> None:
    builder = build.with_path(InsertPoint.before(linear), path_of(linear))
    x = build.reshape(builder, norm.x, (*shape_of(linear.x.type)[:-1], shape_of(norm.x.type)[-1]))
    affine = norm.operands[1:]
    norms, rows = (None, norm) if isinstance(norm, qc.QuantizeRowsOp) else (norm, linear.quantised)
    epilogue = linear.epilogue.clone() if linear.epilogue.blocks else None
    made = qc.LinearOp(
        x, linear.w, linear.bias, linear.result.type, linear.extras, epilogue, pairs=linear.combines_pairs,
        affine=affine, prologue=prologue_region(norms, rows, x, affine),
    )  # fmt: skip
    made.attributes.update(linear.attributes)
    builder.insert(made)
    linear.result.replace_all_uses_with(made.result)
    erase_if_dead(linear)
