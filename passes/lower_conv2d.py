"""lower-conv2d: turns convolutions into linears over im2col windows of an image with its channels last.

    %y = qc.conv2d %x, %w, %b                             %t = linalg.transpose %x [0, 2, 3, 1]
                                                     ->   %c = qc.windows %t                 (b, h, w, kh*kw*c)
                                                          %l = qc.linear %c, %w', %b         (b, h, w, out)
                                                          %y = linalg.transpose %l [0, 3, 1, 2]

So convolutions have everything that linears have: packed weights in every format, epilogues, and kernels for few and
for many rows. Windows of one element are a slice, and windows that tile the image are a view (those of int8 rows are
not: fuse-dequant-matmul makes windows of codes of them). A convolution with groups becomes one `qc.batch_matmul`, or a
loop over the taps if each group is one channel. Results keep their channels last wherever their readers allow it
(views/channels_last.py), so one convolution feeds the next without a copy. An image in another type than a weight in
bf16 is rounded in front of its windows, once for all taps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from xdsl.builder import Builder
from xdsl.context import Context
from xdsl.dialects import arith
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import SSAValue
from xdsl.ir.affine import AffineDimExpr, AffineMap
from xdsl.passes import ModulePass
from xdsl.pattern_rewriter import PatternRewriter

from qcompiler.ir import build, qc
from qcompiler.ir.module import functions
from qcompiler.ir.qc_conv import numbers
from qcompiler.ir.types import ELEMENT_TYPES, shape_of, tensor, tensor_dtype
from qcompiler.passes.checks.numerics import Numerics, Reordered
from qcompiler.passes.rewriting import pattern, rewrite
from qcompiler.passes.views.channels_last import channels_last, keep_channels_last, to_first
from qcompiler.passes.views.im2col import copy_nest, of_int8_rows, padded, reads
from qcompiler.plan.dims import Dim, product


@dataclass(frozen=True)
class LowerConv2dPass(ModulePass):
    """Replaces every `qc.conv2d`."""

    name = "lower-conv2d"
    # taps are summed before channels
    numerics: ClassVar[Numerics] = Reordered(1e-5)

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        for function in functions(op):
            if rewrite(list(function.body.block.ops), [lower_conv2d], again=False):
                keep_channels_last(function.body.block)


@pattern
def lower_conv2d(op: qc.Conv2dOp, rewriter: PatternRewriter) -> SSAValue | None:
    """Replaces a convolution by a linear over windows, a product for each group, or a sum over taps."""
    return _Conv(op, rewriter).lower()


class _Conv:
    """One convolution. Its methods insert the ops that replace it, in front of it."""

    def __init__(self, op: qc.Conv2dOp, builder: Builder) -> None:
        self.op = op
        self.builder = builder
        self.dtype = tensor_dtype(op.result.type)
        self.groups = op.groups.value.data
        self.batch, self.channels, *self.size = shape_of(op.result.type)
        self.depth, *self.kernel = (int(n) for n in shape_of(op.w.type)[1:])
        self.columns = self.kernel[0] * self.kernel[1] * self.depth
        self.x = channels_last(self.builder, op.x)

    def lower(self) -> SSAValue:
        if self.groups == 1:
            out = self._linear()
        else:
            out = self._biased(self._depthwise() if self.depth == 1 else self._grouped())
        return build.transpose(self.builder, out, to_first(4))

    # --- one group: a linear ---

    def _linear(self) -> SSAValue:
        w = build.transpose(self.builder, self.op.w, (0, 2, 3, 1))
        w = build.reshape(self.builder, w, [self.channels, self.columns])
        type_ = tensor([self.batch, *self.size, self.channels], self.dtype)
        return self.builder.insert(qc.LinearOp(self._rows(), w, self.op.bias, type_)).result

    def _rows(self) -> SSAValue:
        """(b, h, w, kh*kw*c): the elements of each window."""
        (kh, kw), b, op = self.kernel, self.builder, self.op
        strides, dilation, padding = numbers(op.strides), numbers(op.dilation), numbers(op.padding)
        shape = [self.batch, *self.size, self.columns]
        views_do = not any(padding) and not of_int8_rows(self.x)  # windows that are views of floats
        if (kh, kw) == (1, 1) and (views_do or (strides == (1, 1) and not any(padding))):
            return build.extract_slice(b, self.x, [0, 0, 0, 0], shape, [1, *strides, 1])
        if views_do and (kh, kw) == strides and dilation == (1, 1):  # the windows tile the image
            image = padded(b, self.x, op, self.size, self.kernel)
            split = [self.batch, self.size[0], kh, self.size[1], kw, self.depth]
            tiles = build.transpose(b, build.reshape(b, image, split), (0, 1, 3, 2, 4, 5))
            return build.reshape(b, tiles, shape)
        image = self._rounded()
        type_ = tensor(shape, tensor_dtype(image.type))
        windows = qc.WindowsOp(image, type_, kernel=self.kernel, strides=strides, padding=padding, dilation=dilation)
        return b.insert(windows).result

    def _rounded(self) -> SSAValue:
        """The image in the type of the weight, if that is bf16."""
        dtype, given = tensor_dtype(self.op.w.type), tensor_dtype(self.x.type)
        return self.x if dtype != "bf16" or given == dtype else build.rounded(self.builder, self.x, dtype)

    # --- groups ---

    def _grouped(self) -> SSAValue:
        """The product (g, M, K) @ (g, K, N), reshaped to (b, h, w, g*N)."""
        b, groups = self.builder, self.groups
        wide = int(self.channels) // groups
        x = padded(b, self._rounded(), self.op, self.size, self.kernel)
        x = build.reshape(b, x, [*shape_of(x.type)[:3], groups, self.depth])
        taps: list[Dim] = [groups, self.batch, *self.size, *self.kernel, self.depth]
        copied = copy_nest(b, x, reads(self.op, self.kernel, (1, 2, 3, 4, 5), (0, 6)), taps)
        rows = product([self.batch, *self.size]).to_dim()
        left = build.reshape(b, copied, [groups, rows, self.columns])
        w = build.reshape(b, self.op.w, [groups, wide, self.depth, *self.kernel])
        w = build.reshape(b, build.transpose(b, w, (0, 3, 4, 2, 1)), [groups, self.columns, wide])
        matmul = qc.BatchMatmulOp(left, w, tensor([groups, rows, wide], "f32"))  # rounded once, behind the bias
        out = build.transpose(b, b.insert(matmul).result, (1, 0, 2))
        return build.reshape(b, out, [self.batch, *self.size, self.channels])

    def _depthwise(self) -> SSAValue:
        """A sum over the taps in fp32. Channel c gives the results c*n … c*n + n - 1."""
        b, many = self.builder, int(self.channels) // self.groups
        x = padded(b, self._rounded(), self.op, self.size, self.kernel)
        w = build.transpose(b, self.op.w, (2, 3, 1, 0))
        w = build.reshape(b, w, [*self.kernel, self.groups, many])
        shape: list[Dim] = [self.batch, *self.size, self.groups, many]
        maps = [
            AffineMap(7, 0, tuple(reads(self.op, self.kernel, (0, 1, 2, 5, 6), (3,)))),
            AffineMap(7, 0, tuple(AffineDimExpr(n) for n in (5, 6, 3, 4))),
            AffineMap(7, 0, tuple(AffineDimExpr(n) for n in range(5))),
        ]

        def body(inner: Builder, scalars: Sequence[SSAValue]) -> SSAValue:
            seen, tap = (_wide(inner, v) for v in scalars[:2])
            return inner.insert(arith.AddfOp(scalars[2], inner.insert(arith.MulfOp(seen, tap)).result)).result

        kinds: list[build.Iterator] = ["parallel"] * 5
        kinds += ["reduction"] * 2
        total = build.generic(b, [x, w], maps, shape, "f32", kinds, body, init=build.fill(b, 0, shape, "f32"))
        return build.reshape(b, total, [self.batch, *self.size, self.channels])

    def _biased(self, out: SSAValue) -> SSAValue:
        """Adds the bias in fp32 and rounds once."""
        bias = self.op.bias
        if bias is None and tensor_dtype(out.type) == self.dtype:
            return out

        def body(inner: Builder, scalars: Sequence[SSAValue]) -> SSAValue:
            total = _wide(inner, scalars[0])
            if bias is not None:
                total = inner.insert(arith.AddfOp(total, _wide(inner, scalars[1]))).result
            narrow = self.dtype != "f32"
            return inner.insert(arith.TruncFOp(total, ELEMENT_TYPES[self.dtype])).result if narrow else total

        inputs = [out] if bias is None else [out, bias]
        return build.pointwise(self.builder, inputs, shape_of(out.type), self.dtype, body)


def _wide(inner: Builder, value: SSAValue) -> SSAValue:
    f32 = ELEMENT_TYPES["f32"]
    return value if value.type == f32 else inner.insert(arith.ExtFOp(value, f32)).result
