"""pack-weights: stored weights take the layout their kernels chose. The only pass that changes a layout.

    before  %w = qc.const @l.w : !qc.qtensor<1536x384xf32, nf4, #qc.layout<"canonical">>
            %y = qc.linear %x, %w {qc.layout = "cpu_p16_v1"}
    after   %w = qc.const @l.w : !qc.qtensor<1536x384xf32, nf4, #qc.layout<"cpu_p16_v1">>
            %y = qc.linear %x, %w

One layout per weight and target: all row classes and the embedding gather of a tied weight read the same bytes.  A
plain (float) matrix is packed too; its tensor type says nothing of that, the weight store and the plan do.

The pass decides and counts bytes; they are rearranged when they are read, which is once, into their place in the
program's image.  So no second copy of a model's weights exists in between.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp, StringAttr
from xdsl.ir import Use
from xdsl.passes import ModulePass
from xdsl.rewriter import Rewriter

from qcompiler import formats
from qcompiler.errors import LayoutError
from qcompiler.ir.context import qc_context
from qcompiler.ir.qc import ConstOp, EmbeddingOp, GroupedLinearOp, LinearOp, RecurrentOp
from qcompiler.ir.types import QTensorType
from qcompiler.kernels import layouts
from qcompiler.plan.kernel import DType, FormatRef
from qcompiler.plan.weights import Bytes, StoredTensor

WANTED_LAYOUT = "qc.layout"


@dataclass(frozen=True)
class PackWeightsPass(ModulePass):
    """Repacks each constant whose users ask for a layout (attribute `qc.layout`, set by select-kernels)."""

    name = "pack-weights"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        context = qc_context(ctx)
        constants: dict[str, list[ConstOp]] = {}
        for each in op.walk():
            if isinstance(each, ConstOp) and each.key in context.weights:
                constants.setdefault(each.key, []).append(each)
        for key, ops in constants.items():
            layout = _wanted(key, ops)
            if layout is None or layout == context.weights[key].layout:
                continue
            before = context.weights[key]
            context.weights.replace(pack(before, layout))
            for const in ops:
                old = const.result.type
                if isinstance(old, QTensorType):
                    new = QTensorType.of(old.shape, old.dtype, old.format.ref, layout)
                    Rewriter.replace_value_with_new_type(const.result, new)
            why = f"from {before.layout}, {before.nbytes} to {context.weights[key].nbytes} bytes"
            context.report.add("pack-weights", key, layout, why)
        for each in op.walk():
            each.attributes.pop(WANTED_LAYOUT, None)


def _wanted(key: str, ops: list[ConstOp]) -> str | None:
    """The one layout that the users of a constant ask for; LayoutError if two of them disagree.

    A plain matrix that some op other than a linear (grouped or not) or an embedding reads stays row-major: only those
    know layouts.
    """
    wanted: dict[str, str] = {}
    for const in ops:
        for use in const.result.uses:
            attribute = use.operation.attributes.get(WANTED_LAYOUT)
            if _reads_weight(use) and isinstance(attribute, StringAttr):
                wanted.setdefault(attribute.data, use.operation.name)
            elif not _reads_weight(use) and not isinstance(const.result.type, QTensorType):
                return None
    if len(wanted) > 1:
        raise LayoutError(f"the users of weight '{key}' ask for different layouts: {', '.join(sorted(wanted))}")
    return next(iter(wanted), None)


def _reads_weight(use: Use) -> bool:
    """Whether a use is the weight of a linear, of experts or of steps, or the table of an embedding."""
    if isinstance(use.operation, RecurrentOp):
        return use.index in use.operation.weights
    return isinstance(use.operation, LinearOp | GroupedLinearOp | EmbeddingOp) and use.index == 1


@dataclass(frozen=True)
class Repacked:
    """The bytes of a weight in another layout, made anew from the canonical ones each time."""

    tensor: StoredTensor
    layout: str

    @property
    def nbytes(self) -> int:
        rows, cols = self.tensor.shape
        return layouts.get(self.layout).nbytes(_format(self.tensor.format), self.tensor.dtype, rows, cols)

    @property
    def valued(self) -> bool:
        return self.tensor.valued

    def write(self, out: Bytes) -> None:
        tensor, (rows, cols) = self.tensor, self.tensor.shape
        canonical = unpack(tensor.format, tensor.layout, tensor.dtype, tensor.shape, tensor.data)
        layouts.get(self.layout).pack_into(_format(tensor.format), tensor.dtype, rows, cols, canonical, out)


def pack(tensor: StoredTensor, layout: str) -> StoredTensor:
    """The same weight in another layout."""
    return replace(tensor, source=Repacked(tensor, layout), layout=layout)


def unpack(ref: FormatRef | None, layout: str, dtype: DType, shape: tuple[int, ...], data: Bytes) -> Bytes:
    """Canonical bytes of a (rows, cols) matrix stored in `layout`; what the interpreters take as their `unpack`."""
    if layout == "canonical":
        return data
    rows, cols = shape
    return layouts.get(layout).unpack(_format(ref), dtype, rows, cols, data)


def _format(ref: FormatRef | None) -> formats.Format | None:
    return None if ref is None else formats.get(ref.name, **ref.params)
