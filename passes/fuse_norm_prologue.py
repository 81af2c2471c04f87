"""fuse-norm-prologue: moves a norm into a linear that reads it, as the linear's prologue.

    %n = qc.rms_norm %h weight(%g) {eps = 1e-05}       %y = qc.linear %h, %w affine(%g) prologue {
    %y = qc.linear %n, %w                        ->    ^bb0(%x: tensor<1x64xf32>, %a: tensor<64xf32>):
                                                         %n = qc.rms_norm %x weight(%a) {eps = 1e-05}
                                                         qc.yield %n }

Likewise `qc.quantize_rows`, which makes the rows of int8 that a linear multiplies, and a norm in front of it.

If other ops read the norm, or the rows of int8, as well, the linear keeps them, as a second result. It is the first
linear that takes them, and stands in front of the other readers:

    %n = qc.layer_norm %h                                   %y, %n = qc.linear %h, %w prologue {
    %y = qc.linear %n, %w                        ->           …
    %z = linalg.generic … (%y, %n)                            qc.yield %m, %m }
                                                            %z = linalg.generic … (%y, %n)

A norm that is added to a residual, and whose sum is normalised again, is the first of two in the prologue. What the
linear keeps is the sum, which the next residual is. (Where no linear reads the sum, or none can take the norm, the
norm's own kernel adds the residual.)

    %n = qc.rms_norm %y weight(%g)                          %z, %s = qc.linear %y, %w affine(%g, %h, %f) prologue {
    %s = linalg.generic … (%h, %n)  // addf                 ^bb0(…):
    %m = qc.rms_norm %s weight(%f)                 ->         %a = qc.rms_norm %x weight(%b) residual(%c)
    %z = qc.linear %m, %w                                     %m = qc.rms_norm %a weight(%d)
    %t = linalg.generic … (%s, …)                             qc.yield %m, %a }
                                                            %t = linalg.generic … (%s, …)

The kernel normalises the rows before it multiplies them, and rounds them to their type as the norm does. The sums are
those of the norm's own kernel, so results are the same to the bit.

A norm keeps a kernel of its own if
- no linear multiplies its rows, or one that does needs what another reader of the norm computes;
- the linear keeps other rows already: a linear has one result beside its own;
- the number of rows is known only at run time, or is so large that threads, or blocks, should share the norm;
- the estimate says that normalising in each block of a GPU takes longer than the launch (kernels/prologue_choice.py);
- `separate` has a pattern of its module path.
"""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.dialects.func import FuncOp
from xdsl.ir import Operation
from xdsl.passes import ModulePass
from xdsl.rewriter import InsertPoint

from qcompiler.ir import build, qc
from qcompiler.ir.context import QCContext, qc_context
from qcompiler.ir.effects import erase_if_dead
from qcompiler.ir.module import functions, is_named, path_of
from qcompiler.ir.qc_norm import NORMS
from qcompiler.ir.qc_prologue import prologue_region
from qcompiler.ir.types import shape_of, tensor_dtype
from qcompiler.kernels.prologue_choice import NormQuery, obstacle
from qcompiler.kernels.select import FLOATS
from qcompiler.passes.devices.placing import DEVICE
from qcompiler.passes.linears.residual_norms import add_residual
from qcompiler.passes.linears.row_readers import place_for, rows_read
from qcompiler.passes.lowering.rule import is_stored
from qcompiler.passes.views.views import base_of
from qcompiler.plan.dims import product

Maker = qc.RmsNormOp | qc.LayerNormOp | qc.QuantizeRowsOp


@dataclass(frozen=True)
class FuseNormProloguePass(ModulePass):
    """Moves norms into the linears that read them."""

    name = "fuse-norm-prologue"
    separate: tuple[str, ...] = ()

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        context = qc_context(ctx)
        for function in functions(op):
            for maker in self._makers(function):
                what, path = _what(maker), path_of(maker)
                chosen = "the recipe keeps it separate" if is_named(path, self.separate) else _choice(maker, context)
                if isinstance(chosen, str):
                    context.report.add_once(self.name, path, f"{what}: a kernel of its own", chosen)
                    continue
                others = rows_read(maker.result).beside(*chosen)
                readers = ", ".join(dict.fromkeys(map(_named, others)))
                why = f"its rows are kept for {readers}" if others else "nothing else reads the result"
                where = f"{what}: the prologue of {' and of '.join(map(_named, chosen))}"
                context.report.add_once(self.name, path, where, why)
                first, *more = chosen
                for linear in more:
                    _fuse(maker, linear, keeps=False)
                _fuse(maker, first, keeps=bool(others))

    def _makers(self, function: FuncOp) -> list[Maker]:
        """What makes rows: those of int8 first, then norms, then norms with residuals. Each reads the results of those
        behind it in this order."""
        for norm in [each for each in function.body.block.ops if isinstance(each, NORMS)]:
            if not is_named(path_of(norm), self.separate):
                add_residual(norm)
        ops = list(function.body.block.ops)
        norms = [each for each in ops if isinstance(each, NORMS)]
        return [
            *(each for each in ops if isinstance(each, qc.QuantizeRowsOp)),
            *sorted(norms, key=lambda norm: norm.residual is not None),
        ]


def _what(maker: Maker) -> str:
    if isinstance(maker, qc.QuantizeRowsOp):
        return "rows of int8"
    return "norm" if maker.residual is None else "norm and residual"


def _named(op: Operation) -> str:
    return f"'{path_of(op)}'" if path_of(op) else op.name


def _choice(norm: Maker, context: QCContext) -> list[qc.LinearOp] | str:
    """The linears that take the norm, or why none does: the reason against the first.

    On a CPU it is the first that can. On a GPU all that can take it: each of their blocks makes the rows in any case,
    and they may then share a launch (merge-launches). The first keeps the rows if others read them.
    """
    readers = rows_read(norm.result)
    if not readers.linears:
        (reader, *more) = readers.others or (norm,)
        if more:
            return "several ops read it, and no linear multiplies its rows alone"
        if isinstance(reader, qc.LinearOp):
            return f"'{path_of(reader)}' reads it, but does not multiply its rows"
        return f"{reader.name} reads it"
    able, reasons = list[qc.LinearOp](), list[str]()
    for linear in readers.linears:
        why = _obstacle(norm, linear, context)
        if why is None:
            able.append(linear)
        else:
            reasons.append(why)
    if not able:
        return reasons[0]
    every = context.target.kind == "cuda"
    if every and not readers.beside(*able):
        return able
    keeper = next((linear for linear in able if place_for(linear, norm.result) is not None), None)
    if keeper is None:
        return f"'{path_of(able[0])}' reads what another reader of the {_what(norm)} computes"
    return [keeper, *(linear for linear in able if linear is not keeper)] if every else [keeper]


def _obstacle(norm: Maker, linear: qc.LinearOp, context: QCContext) -> str | None:
    adds = not isinstance(norm, qc.QuantizeRowsOp) and norm.residual is not None
    if linear.norm is not None and not adds:
        return f"'{path_of(linear)}' has a norm already"
    if linear.residual_norm is not None:
        return f"'{path_of(linear)}' has a norm with a residual already"
    if linear.keeps == "norm":
        return f"'{path_of(linear)}' keeps the rows of its norm"
    if linear.keeps == "codes" and rows_read(norm.result).beside(linear):
        return f"'{path_of(linear)}' keeps its rows of int8, and other ops read those of the norm"
    if isinstance(norm, qc.QuantizeRowsOp):
        if norm.columns is not None:
            return "it leaves columns out, which a call finds"
        if norm.largest is not None:
            return "its rows share the scale of an image"
    elif norm.x.type != norm.result.type or tensor_dtype(norm.x.type) not in FLOATS:
        return f"it makes {tensor_dtype(norm.result.type)} of {tensor_dtype(norm.x.type)}, and prologues keep the type"
    if norm.attributes.get(DEVICE) != linear.attributes.get(DEVICE):
        return "they are on different devices"
    rows = [value for value in norm.operands if shape_of(value.type)[-1:] == shape_of(norm.x.type)[-1:]]
    if any(isinstance(base_of(value).owner, qc.StateOp) for value in rows):
        return "it reads a state, which a later step may change"
    n, k = shape_of(linear.w.type)
    m = product(shape_of(linear.x.type)[:-1]).to_dim()
    query = NormQuery(
        m=m,
        k=int(k),
        n=int(n),
        dtype=tensor_dtype(norm.x.type),
        affine=len(norm.operands) - 1 + (m - 1 if adds and isinstance(m, int) else 0),
        kind=context.target.kind,
        isas=context.target.isas,
        constant_weight=is_stored(linear.w, context),
        makes_codes=isinstance(norm, qc.QuantizeRowsOp),
        multiplies_codes=isinstance(norm, qc.QuantizeRowsOp) or linear.quantised is not None,
    )
    return obstacle(query)


def _fuse(norm: Maker, linear: qc.LinearOp, *, keeps: bool) -> None:
    place = place_for(linear, norm.result)
    if place is None:
        assert not keeps
        place = linear
    block = linear.parent
    assert block is not None
    for operand in linear.operands:
        if isinstance(operand.owner, qc.ConstOp) and place.is_before_in_block(operand.owner):
            block.detach_op(operand.owner)
            block.insert_op_before(operand.owner, place)
    builder = build.with_path(InsertPoint.before(place), path_of(linear))
    x = build.reshape(builder, norm.x, (*shape_of(linear.x.type)[:-1], shape_of(norm.x.type)[-1]))
    affine = [*norm.operands[1:], *linear.affine]
    norms, rows, kept = list(linear.norms), linear.quantised, linear.keeps
    if keeps:
        kept = "codes" if isinstance(norm, qc.QuantizeRowsOp) else "norm"
    if isinstance(norm, qc.QuantizeRowsOp):
        rows = norm
    else:
        norms.insert(0, norm)
        if norm.residual is not None:
            place_of = len(norm.operands) - 2
            affine[place_of] = build.reshape(builder, norm.residual, shape_of(x.type))
    epilogue = linear.epilogue.clone() if linear.epilogue.blocks else None
    made = qc.LinearOp(
        x, linear.w, linear.bias, linear.result.type, linear.extras, epilogue, pairs=linear.combines_pairs,
        affine=affine, prologue=prologue_region(norms, rows, x, affine, keeps=kept),
    )  # fmt: skip
    made.attributes.update(linear.attributes)
    builder.insert(made)
    linear.result.replace_all_uses_with(made.result)
    source = norm.result if keeps or not linear.kept else linear.kept[0]
    for each in made.kept:
        source.replace_all_uses_with(build.reshape(builder, each, shape_of(source.type)))
    erase_if_dead(linear)
    erase_if_dead(norm)
