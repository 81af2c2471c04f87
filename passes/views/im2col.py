"""im2col: the index of an image (b, h, w, c) that each window reads, and `qc.windows` as a loop nest that copies."""

from __future__ import annotations

from collections.abc import Sequence

from xdsl.builder import Builder
from xdsl.ir import SSAValue
from xdsl.ir.affine import AffineDimExpr, AffineExpr, AffineMap
from xdsl.pattern_rewriter import PatternRewriter

from qcompiler.ir import build, qc
from qcompiler.ir.qc_conv import numbers
from qcompiler.ir.types import shape_of, tensor_dtype
from qcompiler.passes.loops.loops import producer
from qcompiler.passes.rewriting import pattern
from qcompiler.passes.views import views
from qcompiler.plan.dims import Dim, dim


def padded(
    builder: Builder, x: SSAValue, op: qc.Conv2dOp | qc.WindowsOp, size: Sequence[Dim], kernel: Sequence[int]
) -> SSAValue:
    """The image with its border of zeros, cut to the area that `size` windows with a kernel of this shape cover."""
    top, left, bottom, right = numbers(op.padding)
    b, h, w, c = shape_of(x.type)
    if top or left or bottom or right:
        sizes: list[Dim] = [b, (dim(h) + top + bottom).to_dim(), (dim(w) + left + right).to_dim(), c]
        zeros = build.fill(builder, 0, sizes, tensor_dtype(x.type))
        x = build.insert_slice(builder, x, zeros, [0, top, left, 0])
    places = zip(size, numbers(op.strides), kernel, numbers(op.dilation), strict=True)
    reach = [((dim(n) - 1) * s + ((k - 1) * d + 1)).to_dim() for n, s, k, d in places]
    return build.extract_slice(builder, x, [0, 0, 0, 0], [b, *reach, c])


def reads(
    op: qc.Conv2dOp | qc.WindowsOp, kernel: Sequence[int], loops_of: Sequence[int], channels: Sequence[int]
) -> list[AffineExpr]:
    """The index into a padded image: expressions of the loops `loops_of`, which are (batch, window row, window column,
    tap row, tap column), then the loops `channels`."""
    batch, *others = loops_of

    def place(axis: int) -> AffineExpr:
        step, reach = numbers(op.strides)[axis], numbers(op.dilation)[axis]
        window, tap = AffineDimExpr(others[axis]), AffineDimExpr(others[2 + axis])
        first: AffineExpr = window if step == 1 else window * step
        return first if kernel[axis] == 1 else first + (tap if reach == 1 else tap * reach)

    return [AffineDimExpr(batch), place(0), place(1), *(AffineDimExpr(c) for c in channels)]


def copy_nest(builder: Builder, x: SSAValue, index: Sequence[AffineExpr], shape: Sequence[Dim]) -> SSAValue:
    """A loop nest over `shape` that copies the elements of x at `index`."""
    rank = len(shape)
    maps = [AffineMap(rank, 0, tuple(index)), AffineMap.identity(rank)]
    kinds: list[build.Iterator] = ["parallel"] * rank
    return build.generic(builder, [x], maps, shape, tensor_dtype(x.type), kinds, lambda _, scalars: scalars[0])


@pattern
def windows_to_loops(op: qc.WindowsOp, rewriter: PatternRewriter) -> SSAValue | None:
    """Replaces a `qc.windows` by padding and a copy, unless the kernel of a linear reads the image directly."""
    if op.channels is not None or feeds_linear(op):
        return None
    kernel, shape = numbers(op.kernel), shape_of(op.result.type)
    x = padded(rewriter, op.x, op, shape[1:3], kernel)
    taps = [*shape[:3], *kernel, shape_of(op.x.type)[3]]
    copied = copy_nest(rewriter, x, reads(op, kernel, range(5), (5,)), taps)
    return build.reshape(rewriter, copied, shape)


def of_int8_rows(image: SSAValue) -> bool:
    """Whether an image (b, h, w, c) is the values of int8 rows."""
    return isinstance(producer(views.unreshaped(image)), qc.DequantizeRowsOp)


def feeds_linear(op: qc.WindowsOp) -> bool:
    """Whether the only reader of the windows is a linear that takes them as its rows."""
    value: SSAValue = op.result
    while True:
        user = value.get_user_of_unique_use()
        if isinstance(user, qc.LinearOp):
            return user.x is value and windows_of(value) is op
        if not isinstance(user, views.Reshape):
            return False
        value = user.result


def windows_of(value: SSAValue) -> qc.WindowsOp | None:
    """The `qc.windows` that defines a linear's x, through reshapes of leading dims, if nothing else reads it."""
    op = producer(value)
    while isinstance(op, views.Reshape):
        if not value.has_one_use() or shape_of(op.src.type)[-1] != shape_of(value.type)[-1]:
            return None
        value = op.src
        op = producer(value)
    return op if isinstance(op, qc.WindowsOp) and value.has_one_use() else None
