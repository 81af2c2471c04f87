"""fuse-glu: a gate and what it is multiplied with become one linear, whose epilogue combines pairs of rows.

    %g = qc.linear %x, %gate                         %y = qc.linear %x, %gate_up {pairs} {
    %y = qc.linear %x, %up extras(%g) {        ->    ^bb0(%g: f32, %u: f32):
    ^bb0(%u: f32, %g: f32): silu, mulf … }              silu, mulf … }

    %h = qc.linear %x, %gate_up                      %y = qc.linear %x, %gate_up {pairs} {
    %g = tensor.extract_slice %h[…, 0]         ->    ^bb0(%g: f32, %u: f32):
    %u = tensor.extract_slice %h[…, F]                  silu, mulf … }
    %y = linalg.generic ins(%g, %u) { silu, mulf … }

Any pointwise combination of two linears of the same rows of x is one: SwiGLU, GeGLU, ReGLU, with biases and other
extra inputs.  The weights of two linears are put one below the other as in merge-linears, under the same rules, and
`separate` keeps them apart in the same way.  The kernels read row n of both halves in one panel (kernels/layouts/
pairs.py), so the layout is another one, and every reader of the weight must combine its pairs.  A row's sum does not
depend on the rows beside it, and roundings stay where they are: results are the same to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.dialects.func import FuncOp
from xdsl.dialects.linalg import ops
from xdsl.dialects.tensor import ExtractSliceOp
from xdsl.ir import Block, Operation, Region, SSAValue
from xdsl.passes import ModulePass
from xdsl.rewriter import InsertPoint

from qcompiler.ir import build, qc
from qcompiler.ir.context import QCContext, qc_context
from qcompiler.ir.effects import erase_if_dead
from qcompiler.ir.module import functions, path_of
from qcompiler.ir.types import ELEMENT_TYPES, shape_of, tensor_dtype
from qcompiler.kernels.cuda.geometry import MAX_EXTENT
from qcompiler.kernels.layouts import pairs
from qcompiler.passes.checks.numerics import Numerics, Reordered
from qcompiler.passes.fuse_epilogues import MAX_EXTRAS, combining_reader, pointwise_accesses, rounding
from qcompiler.passes.linears.constants import Constants, finish, keys_of, read_elsewhere, rows_of
from qcompiler.passes.linears.stacked import format_of
from qcompiler.passes.loops import loops
from qcompiler.passes.loops.extras import as_extra, can_be_extra
from qcompiler.passes.views.views import slice_of, unreshaped
from qcompiler.plan.dims import Dim
from qcompiler.plan.paths import joined_paths


@dataclass(frozen=True)
class FuseGluPass(ModulePass):
    """Makes one linear of each gate and what its activation is multiplied with."""

    name = "fuse-glu"
    separate: tuple[str, ...] = ()
    numerics: ClassVar[Numerics] = Reordered(1e-5)  # the interpreter's matmul may sum a wider matrix in another order

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        _Fusing(op, qc_context(ctx), self.separate).run()


@dataclass(frozen=True, eq=False)
class _Pair:
    """What becomes one linear: two of them, of which the second reads the first's result, or one and its reader."""

    linears: tuple[qc.LinearOp, ...]
    reader: ops.GenericOp | None = None

    @property
    def path(self) -> str:
        return joined_paths([path_of(op) for op in self.linears])

    @property
    def last(self) -> Operation:
        return self.reader if self.reader is not None else self.linears[-1]


@dataclass
class _Fusing:
    """One module."""

    module: ModuleOp
    context: QCContext
    separate: tuple[str, ...]
    constants: Constants = field(init=False)

    def __post_init__(self) -> None:
        self.constants = Constants(self.context)

    def run(self) -> None:
        found = [pair for function in functions(self.module) for pair in _pairs(function)]
        reasons = {pair: self._obstacle(pair) for pair in found}
        self._check_company(reasons)
        for pair, why in reasons.items():
            if why is None:
                what = f"one linear of {sum(map(rows_of, pair.linears))} rows combines its pairs"
                self._say(pair, what, "what is computed of a pair of rows is its epilogue")
                self._fuse(pair)
            else:
                self._say(pair, "pairs of rows stay apart", why)

    def _say(self, pair: _Pair, what: str, why: str) -> None:
        self.context.report.add_once(FuseGluPass.name, pair.path, what, why)

    def _obstacle(self, pair: _Pair) -> str | None:
        for op in pair.linears:
            why = self.constants.obstacle(op, self.separate)
            if why is not None:
                return why
        if len(pair.linears) > 1 and (why := self.constants.disagreement(pair.linears)) is not None:
            return why
        if sum(map(rows_of, pair.linears)) > MAX_EXTENT:
            return f"together they have more than {MAX_EXTENT:,} rows"
        if sum(len(op.extras) for op in pair.linears) > MAX_EXTRAS:
            return f"their epilogues read more than {MAX_EXTRAS} operands"
        weight = self.constants.weight(pair.linears[0])
        return pairs.obstacle(format_of(weight), weight.shape[1])

    def _check_company(self, reasons: dict[_Pair, str | None]) -> None:
        """Fills in why a pair stays apart of which something else reads a constant: it would be stored twice."""
        while True:
            kept = [pair for pair, why in reasons.items() if why is None]
            shared = read_elsewhere(self.module, [pair.linears for pair in kept])
            apart = {pair: next((k for k in keys_of(pair.linears) if k in shared), None) for pair in kept}
            for pair, elsewhere in apart.items():
                if elsewhere is not None:
                    reasons[pair] = f"'{elsewhere}' is read elsewhere, too"
            if not any(apart.values()):
                return

    # --- the rewriting ---

    def _fuse(self, pair: _Pair) -> None:
        fused = self._combined(pair) if pair.reader is None else _combined_halves(pair.linears[0], pair.reader)
        loops.insert_before(pair.last, fused)
        finish(fused, pair.last, pair.path)
        pair.last.results[0].replace_all_uses_with(fused.result)
        erase_if_dead(pair.last)

    def _combined(self, pair: _Pair) -> qc.LinearOp:
        """Two linears as one, in front of the second: its epilogue, with the first's where it read that result."""
        gate, up = pair.linears
        builder = build.with_path(InsertPoint.before(up), pair.path)
        w, bias = self.constants.insert(builder, pair.linears)
        ours = [each for each in up.extras if each is not gate.result]
        body, (gate_sum, up_sum) = _sums()
        arguments = {each: _argument(body, each) for each in ours}
        arguments[gate.result] = _inlined(gate, [gate_sum, *(_argument(body, each) for each in gate.extras)], body)
        _end(body, _inlined(up, [up_sum, *(arguments[each] for each in up.extras)], body))
        return qc.LinearOp(up.x, w, bias, up.result.type, [*ours, *gate.extras], Region(body), pairs=True)


def _combined_halves(linear: qc.LinearOp, reader: ops.GenericOp) -> qc.LinearOp:
    """One linear whose halves `reader` combines."""
    slices = halves_of(linear)
    assert slices is not None
    body, sums = _sums()
    known: dict[SSAValue, SSAValue] = {
        half.result: _inlined(linear, [total], body) for half, total in zip(slices, sums, strict=True)
    }
    extras: list[SSAValue] = []
    arguments: list[SSAValue] = []
    for value, index in pointwise_accesses(reader):
        read = value if value in known else as_extra(reader, value, index, shape_of(reader.res[0].type))
        if read not in known:
            extras.append(read)
            known[read] = _argument(body, read)
        arguments.append(known[read])
    _end(body, _inlined(reader, arguments, body))
    return qc.LinearOp(linear.x, linear.w, linear.bias, reader.res[0].type, extras, Region(body), pairs=True)


# --- bodies ----------------------------------------------------------------------------------------------------------


def _sums() -> tuple[Block, tuple[SSAValue, SSAValue]]:
    """An epilogue that is not written yet, and its two accumulators."""
    body = Block(arg_types=[ELEMENT_TYPES["f32"]] * 2)
    body.add_op(qc.YieldOp(body.args[0]))
    return body, (body.args[0], body.args[1])


def _argument(body: Block, extra: SSAValue) -> SSAValue:
    """The element of another input, as the body's new last argument."""
    return body.insert_arg(ELEMENT_TYPES[tensor_dtype(extra.type)], len(body.args))


def _inlined(op: qc.LinearOp | ops.GenericOp, arguments: Sequence[SSAValue], body: Block) -> SSAValue:
    """An element of an op's result, computed at the end of `body`."""
    end = body.last_op
    assert end is not None
    if isinstance(op, ops.GenericOp):
        source = op.body.block
    else:
        source = op.epilogue.block if op.epilogue.blocks else rounding(op)
    return loops.inline_body(source, arguments, None, end, move=False)


def _end(body: Block, result: SSAValue) -> None:
    end = body.last_op
    assert end is not None
    end.operands = [result]
    loops.tidy_body(body)


# --- matching --------------------------------------------------------------------------------------------------------


def _pairs(function: FuncOp) -> list[_Pair]:
    """What could become one linear, the later ones last; a linear belongs to one of them at most."""
    found: list[_Pair] = []
    taken: set[qc.LinearOp] = set()
    for op in function.body.block.ops:
        if not isinstance(op, qc.LinearOp) or op in taken:
            continue
        gates = (_gate_of(op, extra) for extra in op.extras)
        gate = next((each for each in gates if each is not None and each not in taken), None)
        if gate is not None:
            found.append(_Pair((gate, op)))
            taken |= {gate, op}
        elif (reader := _reader_of_halves(op)) is not None:
            found.append(_Pair((op,), reader))
            taken.add(op)
    return found


def _gate_of(up: qc.LinearOp, extra: SSAValue) -> qc.LinearOp | None:
    """The linear of the same rows whose result only the epilogue of `up` reads."""
    gate = extra.owner
    if not isinstance(gate, qc.LinearOp) or not extra.has_one_use() or gate.combines_pairs or up.combines_pairs:
        return None
    same_rows = unreshaped(gate.x) is unreshaped(up.x) and shape_of(gate.x.type) == shape_of(up.x.type)
    return gate if same_rows and shape_of(extra.type) == shape_of(up.result.type) else None


def _reader_of_halves(linear: qc.LinearOp) -> ops.GenericOp | None:
    """What combines the two halves of a linear's columns, element by element, and alone reads them."""
    halves = halves_of(linear)
    reader = combining_reader([each.result for each in halves]) if halves is not None else None
    if halves is None or reader is None:
        return None
    results = [each.result for each in halves]
    rank = len(shape_of(linear.result.type))
    others = {access for access in pointwise_accesses(reader) if access[0] not in results}
    in_step = all(index == loops.identity(rank) for value, index in pointwise_accesses(reader) if value in results)
    fits = in_step and all(can_be_extra(*access) for access in others) and len(others) <= MAX_EXTRAS
    return reader if fits else None


def halves_of(linear: qc.LinearOp | qc.GroupedLinearOp) -> tuple[ExtractSliceOp, ExtractSliceOp] | None:
    """The first and the second half of a linear's columns, if nothing else reads its result."""
    shape, found = shape_of(linear.result.type), dict[Dim, ExtractSliceOp]()
    half, rest = divmod(int(shape[-1]), 2)
    if rest or linear.extras or linear.combines_pairs:
        return None
    for use in linear.result.uses:
        part = use.operation
        known = slice_of(part) if isinstance(part, ExtractSliceOp) else None
        if not isinstance(part, ExtractSliceOp) or known is None or known[1] != (*shape[:-1], half):
            return None
        if set(known[2]) != {1} or any(known[0][:-1]) or known[0][-1] in found:
            return None
        found[known[0][-1]] = part
    return (found[0], found[half]) if found.keys() == {0, half} else None
