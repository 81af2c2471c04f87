"""pack-weights: gives stored weights the layout that their kernels need. No other pass changes a layout.

    before  %w = qc.const @l.w : !qc.qtensor<1536x384xf32, nf4, #qc.layout<"canonical">>
            %y = qc.linear %x, %w {qc.layout = "cpu_p16_v1"}
    after   %w = qc.const @l.w : !qc.qtensor<1536x384xf32, nf4, #qc.layout<"cpu_p16_v1">>
            %y = qc.linear %x, %w

A weight has one layout per target: the kernels of all row classes, and the embedding of a tied weight, read the same
bytes. A plain (float) matrix is packed, too; the weight store and the plan record this, the tensor type does not.

The pass itself moves no bytes. They are rearranged once, when they are read into the program's image, so there is never
a second copy of a model's weights.
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
    """The layout that the users of a constant ask for. LayoutError if two of them ask for different ones.

    A plain matrix stays row-major if an op reads it that knows no layouts. Only linears (grouped or not), recurrent
    layers and embeddings know them.
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
    """Whether a use is the weight of a linear, of experts or of a recurrent layer, or the table of an embedding."""
    if isinstance(use.operation, RecurrentOp):
        return use.index in use.operation.weights
    return isinstance(use.operation, LinearOp | GroupedLinearOp | EmbeddingOp) and use.index == 1


@dataclass(frozen=True)
class Repacked:
    """The bytes of a weight in another layout. Each read computes them from the canonical bytes."""

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
    """The canonical bytes of a (rows, cols) matrix in `layout`. The interpreters take this function as their
    `unpack`."""
    if layout == "canonical":
        return data
    rows, cols = shape
    return layouts.get(layout).unpack(_format(ref), dtype, rows, cols, data)


def _format(ref: FormatRef | None) -> formats.Format | None:
    return None if ref is None else formats.get(ref.name, **ref.params)
