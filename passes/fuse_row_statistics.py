"""fuse-row-statistics: on GPUs, moves a norm of many rows into the linear that reads it. Another linear, which writes
the rows, gives their statistics.

    %h = qc.linear %a, %v {…}                   %h, %s = qc.linear %a, %v {…, statistics = "rms"}
    %n = qc.rms_norm %h weight(%g)        ->    %y = qc.linear %h, %w affine(%g, %s) prologue {
    %y = qc.linear %n, %w                       ^bb0(%x: …, %weight: …, %parts: …):
                                                  %m = qc.rms_norm %x weight(%weight) statistics(%parts)
                                                  qc.yield %m }

A linear of few rows takes the norm as it is (fuse-norm-prologue), since each block of it can read all rows. The blocks
of many rows cannot; they read the statistics of their own rows, in parts, which the first linear's blocks have written
of what they stored (qcompiler/plan/row_statistics.py). The norm rounds as its own kernel does, but the sums of the
statistics run in another order, so the last place of an element may differ.

A norm keeps a kernel of its own if
- a linear does not write its rows, or one that combines pairs, multiplies int8 or reads windows of an image does;
- others read the normalised rows beside one linear, or that linear multiplies int8 or has a norm already;
- the number of rows is known only at run time, or the program is for a CPU, whose threads share the norm;
- the estimate says that normalising in each block takes longer than the norm (kernels/statistics_choice.py);
- `separate` has a pattern of its module path.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import SSAValue
from xdsl.passes import ModulePass
from xdsl.rewriter import InsertPoint

from qcompiler.ir import build, qc
from qcompiler.ir.context import Target, qc_context
from qcompiler.ir.effects import erase_if_dead
from qcompiler.ir.module import functions, is_named, path_of
from qcompiler.ir.qc_norm import NORMS, Norm, kind_of, with_statistics
from qcompiler.ir.qc_prologue import prologue_region
from qcompiler.ir.types import shape_of, tensor_dtype
from qcompiler.kernels.select import FLOATS
from qcompiler.kernels.statistics_choice import StatisticsQuery, Verdict, verdict
from qcompiler.passes.checks.numerics import Numerics, Reordered
from qcompiler.passes.devices.placing import DEVICE
from qcompiler.passes.linears.row_readers import rows_read
from qcompiler.passes.views.im2col import windows_of
from qcompiler.passes.views.views import unreshaped
from qcompiler.plan.dims import product


@dataclass(frozen=True)
class FuseRowStatisticsPass(ModulePass):
    """Moves norms of many rows into the linears that read them."""

    name = "fuse-row-statistics"
    numerics: ClassVar[Numerics] = Reordered(1e-5)  # the statistics are joined from groups of columns
    separate: tuple[str, ...] = ()
    arch: str = ""
    """The architecture to decide for, such as "sm_90a"; the program's target if empty."""

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        context = qc_context(ctx)
        target = Target("cuda", self.arch) if self.arch else context.target
        if target.kind == "cpu":
            return
        for function in functions(op):
            for norm in [each for each in function.body.block.ops if isinstance(each, NORMS)]:
                path = path_of(norm)
                found = "the recipe keeps it separate" if is_named(path, self.separate) else _linears_of(norm)
                if isinstance(found, str):
                    context.report.add_once(self.name, path, "norm: a kernel of its own", found)
                    continue
                chosen = _verdict(norm, found, target)
                what = "norm: a kernel of its own"
                if chosen.pays:
                    what = f"norm: the prologue of '{path_of(found.reader)}', statistics of '{path_of(found.writer)}'"
                    _fuse(norm, found)
                context.report.add_once(self.name, path, what, chosen.why)


@dataclass(frozen=True)
class _Linears:
    """The linear that writes the rows of a norm, and the one that reads the normalised rows."""

    writer: qc.LinearOp
    reader: qc.LinearOp


def _linears_of(norm: Norm) -> _Linears | str:
    """The two linears around a norm, or why its statistics cannot pass from one to the other."""
    writer, readers = unreshaped(norm.x).owner, rows_read(norm.result)
    if not isinstance(writer, qc.LinearOp) or shape_of(writer.result.type)[-1:] != shape_of(norm.x.type)[-1:]:
        return "no linear writes its rows"
    if unreshaped(norm.x) is not writer.result:
        return "no linear writes its rows"
    if len(readers.linears) != 1 or readers.others:
        return "several ops read it" if readers.linears else "no linear multiplies its rows"
    (reader,) = readers.linears
    why = _obstacle(norm, writer, reader)
    return _Linears(writer, reader) if why is None else why


def _obstacle(norm: Norm, writer: qc.LinearOp, reader: qc.LinearOp) -> str | None:
    """What stops a writer, a reader or the norm itself."""
    first, second = f"'{path_of(writer)}'", f"'{path_of(reader)}'"
    if norm.residual is not None:
        return "it adds a residual"
    if norm.x.type != norm.result.type or tensor_dtype(norm.x.type) not in FLOATS:
        return f"it makes {tensor_dtype(norm.result.type)} of {tensor_dtype(norm.x.type)}, and prologues keep the type"
    if writer.combines_pairs or writer.multiplies_codes or windows_of(writer.x) is not None:
        return f"{first}, which writes its rows, combines pairs, multiplies int8 or reads windows of an image"
    if writer.beside:
        return f"{first}, which writes its rows, has a second result already"
    if reader.prologue.blocks or reader.multiplies_codes or windows_of(reader.x) is not None:
        return f"{second}, which reads it, has a prologue already, multiplies int8 or reads windows of an image"
    devices = {each.attributes.get(DEVICE) for each in (norm, writer, reader)}
    return "they are on different devices" if len(devices) > 1 else None


def _verdict(norm: Norm, found: _Linears, target: Target) -> Verdict:
    n, k = shape_of(found.reader.w.type)
    query = StatisticsQuery(
        m=product(shape_of(found.reader.x.type)[:-1]).to_dim(),
        k=int(k),
        n=int(n),
        dtype=tensor_dtype(norm.x.type),
        kind=kind_of(norm),
        vectors=tuple(tensor_dtype(value.type) for value in norm.operands[1:]),
    )
    return verdict(query, target.kind, target.isas)


def _fuse(norm: Norm, found: _Linears) -> None:
    writer, reader = found.writer, found.reader
    statistics = _with_statistics(writer, norm)
    builder = build.with_path(InsertPoint.before(reader), path_of(reader))
    lead = shape_of(reader.x.type)[:-1]
    x = build.reshape(builder, norm.x, (*lead, shape_of(norm.x.type)[-1]))
    parts = build.reshape(builder, statistics, (*lead, shape_of(statistics.type)[-1]))
    affine = [*norm.operands[1:], parts]
    apart = with_statistics(norm, parts)
    apart.attributes.update(norm.attributes)
    epilogue = reader.epilogue.clone() if reader.epilogue.blocks else None
    made = qc.LinearOp(
        x, reader.w, reader.bias, reader.result.type, reader.extras, epilogue, pairs=reader.combines_pairs,
        affine=affine, prologue=prologue_region([apart], None, x, affine),
    )  # fmt: skip
    made.attributes.update(reader.attributes)
    builder.insert(made)
    reader.result.replace_all_uses_with(made.result)
    apart.erase()
    erase_if_dead(reader)
    erase_if_dead(norm)


def _with_statistics(writer: qc.LinearOp, norm: Norm) -> SSAValue:
    """Gives a linear its second result, and returns it."""
    builder = build.with_path(InsertPoint.before(writer), path_of(writer))
    prologue = writer.prologue.clone() if writer.prologue.blocks else None
    made = qc.LinearOp(
        writer.x, writer.w, writer.bias, writer.result.type, writer.extras,
        writer.epilogue.clone() if writer.epilogue.blocks else None,
        affine=writer.affine, prologue=prologue, statistics=kind_of(norm),
    )  # fmt: skip
    made.attributes.update(writer.attributes)
    builder.insert(made)
    writer.result.replace_all_uses_with(made.result)
    erase_if_dead(writer)
    (statistics,) = made.beside
    return statistics
