"""lower-conv2d: convolutions become matrix products over the windows of an image whose channels come last.

    %y = qc.conv2d %x, %w, %b                             %p = tensor.insert_slice %x' into (zeros)
                                                     ->   %c = linalg.generic: %p[b, s*i + k, s*j + l, c]
                                                          %y = qc.linear %c, %w', %b      (b, h, w, kh*kw*c) rows

Everything that linears have is there for convolutions: packed weights in every format, epilogues, kernels for few and
many rows.  Windows of one element, and windows that do not overlap, need no copy of their own.  Groups become one
`qc.batch_matmul`; where each group is one channel, a loop over the taps.  Results stay channels last as far as their
readers allow (support/channels_last.py), so that one convolution feeds the next without a copy.
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
from xdsl.ir.affine import AffineDimExpr, AffineExpr, AffineMap
from xdsl.passes import ModulePass
from xdsl.rewriter import InsertPoint

from qcompiler.ir import build, qc
from qcompiler.ir.module import functions, path_of
from qcompiler.ir.types import ELEMENT_TYPES, shape_of, tensor, tensor_dtype
from qcompiler.passes.support import loops
from qcompiler.passes.support.channels_last import channels_last, keep_channels_last, to_first
from qcompiler.passes.support.numerics import Numerics, Reordered
from qcompiler.plan.dims import Dim, dim, product


@dataclass(frozen=True)
class LowerConv2dPass(ModulePass):
    """Convolutions as linears over windows."""

    name = "lower-conv2d"
    # taps are summed before channels
    numerics: ClassVar[Numerics] = Reordered(1e-5)

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        for function in functions(op):
            convolutions = [each for each in function.body.block.ops if isinstance(each, qc.Conv2dOp)]
            for each in convolutions:
                each.result.replace_all_uses_with(_Conv(each).lower())
                loops.erase_if_dead(each)
            if convolutions:
                keep_channels_last(function.body.block)


class _Conv:
    """One convolution: sizes of its windows, and the ops that replace it, made in front of it."""

    def __init__(self, op: qc.Conv2dOp) -> None:
        self.op = op
        self.builder: Builder = build.with_path(InsertPoint.before(op), path_of(op))
        self.dtype = tensor_dtype(op.result.type)
        self.groups = op.groups.value.data
        self.batch, self.channels, *self.size = shape_of(op.result.type)
        self.depth, *self.kernel = (int(n) for n in shape_of(op.w.type)[1:])
        self.strides, self.dilation = op.numbers(op.strides), op.numbers(op.dilation)
        self.x = self._windowed(channels_last(self.builder, op.x))

    def lower(self) -> SSAValue:
        if self.groups == 1:
            out = self._linear()
        else:
            out = self._biased(self._depthwise() if self.depth == 1 else self._grouped())
        return build.transpose(self.builder, out, to_first(4))

    def _windowed(self, x: SSAValue) -> SSAValue:
        """The image (b, h, w, c) with its border of zeros, cut to what the windows reach."""
        top, left, bottom, right = self.op.numbers(self.op.padding)
        b, h, w, c = shape_of(x.type)
        if top or left or bottom or right:
            sizes: list[Dim] = [b, (dim(h) + top + bottom).to_dim(), (dim(w) + left + right).to_dim(), c]
            zeros = build.fill(self.builder, 0, sizes, tensor_dtype(x.type))
            x = build.insert_slice(self.builder, x, zeros, [0, top, left, 0])
        reach = [
            ((dim(n) - 1) * s + ((k - 1) * d + 1)).to_dim()
            for n, s, k, d in zip(self.size, self.strides, self.kernel, self.dilation, strict=True)
        ]
        return build.extract_slice(self.builder, x, [0, 0, 0, 0], [b, *reach, c])

    # --- one group: a linear ---

    def _linear(self) -> SSAValue:
        w = build.transpose(self.builder, self.op.w, (0, 2, 3, 1))
        w = build.reshape(self.builder, w, [self.channels, self._columns()])
        type_ = tensor([self.batch, *self.size, self.channels], self.dtype)
        linear = qc.LinearOp(self._rows(), w, self.op.bias, type_)
        return self.builder.insert(linear).result

    def _columns(self) -> int:
        return self.kernel[0] * self.kernel[1] * self.depth

    def _rows(self) -> SSAValue:
        """(b, h, w, kh*kw*c): what each window sees."""
        (kh, kw), b = self.kernel, self.builder
        shape = [self.batch, *self.size, self._columns()]
        if (kh, kw) == (1, 1):
            steps = [1, *self.strides, 1]
            return build.extract_slice(b, self.x, [0, 0, 0, 0], [self.batch, *self.size, self.depth], steps)
        if tuple(self.kernel) == self.strides and self.dilation == (1, 1):  # the windows tile the image
            split = [self.batch, self.size[0], kh, self.size[1], kw, self.depth]
            tiles = build.transpose(b, build.reshape(b, self.x, split), (0, 1, 3, 2, 4, 5))
            return build.reshape(b, tiles, shape)
        taps = [self.batch, *self.size, kh, kw, self.depth]
        copied = self._nest([self.x], [self._reads(0, 1, 2, 3, 4, (5,))], taps, tensor_dtype(self.x.type))
        return build.reshape(b, copied, shape)

    def _reads(self, b: int, i: int, j: int, k: int, m: int, channels: Sequence[int]) -> list[AffineExpr]:
        """Where the image is read in loops over its batch, a window's row and column, a tap's, and channels."""

        def place(axis: int, window: int, tap: int) -> AffineExpr:
            step, reach = self.strides[axis], self.dilation[axis]
            first: AffineExpr = AffineDimExpr(window) if step == 1 else AffineDimExpr(window) * step
            if self.kernel[axis] == 1:
                return first
            return first + (AffineDimExpr(tap) if reach == 1 else AffineDimExpr(tap) * reach)

        return [AffineDimExpr(b), place(0, i, k), place(1, j, m), *(AffineDimExpr(c) for c in channels)]

    def _nest(
        self, inputs: Sequence[SSAValue], reads: Sequence[Sequence[AffineExpr]], shape: Sequence[Dim], dtype: str
    ) -> SSAValue:
        """A copy: loops over `shape`."""
        rank = len(shape)
        maps = [*(AffineMap(rank, 0, tuple(r)) for r in reads), AffineMap.identity(rank)]
        return build.generic(
            self.builder,
            inputs,
            maps,
            shape,
            dtype,
            ["parallel"] * rank,
            lambda _b, xs: xs[0],  # type: ignore[arg-type]
        )

    # --- groups ---

    def _grouped(self) -> SSAValue:
        """(g, M, K) @ (g, K, N), and back to (b, h, w, g*N)."""
        b, groups = self.builder, self.groups
        wide = int(self.channels) // groups
        image = shape_of(self.x.type)
        x = build.reshape(b, self.x, [*image[:3], groups, self.depth])
        taps = [groups, self.batch, *self.size, *self.kernel, self.depth]
        reads = self._reads(1, 2, 3, 4, 5, (0, 6))
        copied = self._nest([x], [reads], taps, tensor_dtype(x.type))
        rows = product([self.batch, *self.size]).to_dim()
        left = build.reshape(b, copied, [groups, rows, self._columns()])
        w = build.reshape(b, self.op.w, [groups, wide, self.depth, *self.kernel])
        w = build.reshape(b, build.transpose(b, w, (0, 3, 4, 2, 1)), [groups, self._columns(), wide])
        matmul = qc.BatchMatmulOp(left, w, tensor([groups, rows, wide], self.dtype))
        out = build.transpose(b, b.insert(matmul).result, (1, 0, 2))
        return build.reshape(b, out, [self.batch, *self.size, self.channels])

    def _depthwise(self) -> SSAValue:
        """Sums over the taps in fp32; channel c makes the results c*n … c*n + n - 1."""
        b, many = self.builder, int(self.channels) // self.groups
        w = build.transpose(b, self.op.w, (2, 3, 1, 0))
        w = build.reshape(b, w, [*self.kernel, self.groups, many])
        shape = [self.batch, *self.size, self.groups, many]
        out = [AffineDimExpr(n) for n in range(5)]
        maps = [
            AffineMap(7, 0, tuple(self._reads(0, 1, 2, 5, 6, (3,)))),
            AffineMap(7, 0, tuple(AffineDimExpr(n) for n in (5, 6, 3, 4))),
            AffineMap(7, 0, tuple(out)),
        ]

        def body(inner: Builder, scalars: Sequence[SSAValue]) -> SSAValue:
            x, tap = (_wide(inner, v) for v in scalars[:2])
            return inner.insert(arith.AddfOp(scalars[2], inner.insert(arith.MulfOp(x, tap)).result)).result

        iterators: list[build.Iterator] = ["parallel"] * 5
        init = build.fill(b, 0, shape, "f32")
        total = build.generic(
            b, [self.x, w], maps, shape, "f32", [*iterators, "reduction", "reduction"], body, init=init
        )
        return build.reshape(b, total, [self.batch, *self.size, self.channels])

    def _biased(self, out: SSAValue) -> SSAValue:
        """The bias added in fp32, and one rounding."""
        bias = self.op.bias
        if bias is None and tensor_dtype(out.type) == self.dtype:
            return out

        def body(inner: Builder, scalars: Sequence[SSAValue]) -> SSAValue:
            total = _wide(inner, scalars[0])
            if bias is not None:
                total = inner.insert(arith.AddfOp(total, _wide(inner, scalars[1]))).result
            return (
                total if self.dtype == "f32" else inner.insert(arith.TruncFOp(total, ELEMENT_TYPES[self.dtype])).result
            )

        inputs = [out] if bias is None else [out, bias]
        return build.pointwise(self.builder, inputs, shape_of(out.type), self.dtype, body)


def _wide(inner: Builder, value: SSAValue) -> SSAValue:
    f32 = ELEMENT_TYPES["f32"]
    return value if value.type == f32 else inner.insert(arith.ExtFOp(value, f32)).result
