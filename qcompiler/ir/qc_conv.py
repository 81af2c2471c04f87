"""The `qc` ops of convolutions. Import them from `qcompiler.ir.qc`."""

from __future__ import annotations

from collections.abc import Sequence

from xdsl.dialects.builtin import I64, DenseArrayBase, IntegerAttr, TensorType, i64
from xdsl.ir import Attribute, Operation, SSAValue
from xdsl.irdl import (
    AnyAttr,
    irdl_op_definition,
    operand_def,
    opt_operand_def,
    opt_prop_def,
    prop_def,
    result_def,
    traits_def,
)
from xdsl.traits import Pure

from qcompiler.formats.int8_rows import row_bytes
from qcompiler.ir.qc_base import QCOp
from qcompiler.ir.types import shape_of, tensor_dtype
from qcompiler.plan.dims import Dim, dim


def _list(values: Sequence[int]) -> DenseArrayBase[I64]:
    return DenseArrayBase.from_list(i64, list(values))


def numbers(values: DenseArrayBase[I64]) -> tuple[int, ...]:
    """The entries of `kernel`, `strides`, `padding` or `dilation`."""
    return tuple(int(v) for v in values.get_values())


def _expect_windows(
    op: Conv2dOp | WindowsOp, image: Sequence[Dim], kernel: Sequence[int], given: Sequence[Dim]
) -> tuple[Dim, ...]:
    """Checks the numbers; returns the rows and columns of windows in an image of (height, width)."""
    strides, padding, dilation = (numbers(p) for p in (op.strides, op.padding, op.dilation))
    op.expect(len(strides) == len(dilation) == 2, "strides and dilation need 2 entries")
    op.expect(len(padding) == 4, "padding needs 4 entries")
    op.expect(min(*strides, *dilation) >= 1, "strides and dilation must be positive")
    op.expect(min(padding) >= 0, "padding must not be negative")
    found: list[Dim] = []
    for i in range(2):
        extent = dilation[i] * (kernel[i] - 1) + 1
        size = ((dim(image[i]) + padding[i] + padding[2 + i] - extent) // strides[i] + 1).to_dim()
        # a symbolic quotient can be written in several ways; the interpreter compares its value
        found.append(given[i] if isinstance(size, str) and isinstance(given[i], str) else size)
    return tuple(found)


@irdl_op_definition
class Conv2dOp(QCOp):
    """NCHW convolution with `w (O, C/groups, kh, kw)`, zero padding `[top, left, bottom, right]`.

    x is rounded to the element type of w, where that is another, as in `qc.linear`.
    """

    name = "qc.conv2d"
    x = operand_def(TensorType)
    w = operand_def(AnyAttr())
    bias = opt_operand_def(TensorType)
    strides = prop_def(DenseArrayBase.constr(i64))
    padding = prop_def(DenseArrayBase.constr(i64))
    dilation = prop_def(DenseArrayBase.constr(i64))
    groups = prop_def(IntegerAttr)
    result = result_def(TensorType)
    traits = traits_def(Pure())

    def __init__(
        self,
        x: SSAValue,
        w: SSAValue,
        bias: SSAValue | None,
        type_: Attribute,
        *,
        strides: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        groups: int,
    ) -> None:
        super().__init__(
            operands=[x, w, [bias] if bias is not None else []],
            properties={
                "strides": _list(strides),
                "padding": _list(padding),
                "dilation": _list(dilation),
                "groups": IntegerAttr(groups, i64),
            },
            result_types=[type_],
        )

    def verify_op(self) -> None:
        x, w, groups = shape_of(self.x.type), shape_of(self.w.type), self.groups.value.data
        self.expect(len(x) == len(w) == 4, f"x and w need rank 4, not {len(x)} and {len(w)}")
        out, depth = int(w[0]), int(w[1])
        self.expect(groups >= 1 and out % groups == 0, f"{out} output channels are not a multiple of {groups} groups")
        self.expect(x[1] == depth * groups, f"x has {x[1]} channels but w and groups want {depth * groups}")
        kernel = (int(w[2]), int(w[3]))
        spatial = _expect_windows(self, x[2:], kernel, shape_of(self.result.type)[2:])
        self.expect_shape(self.result, (x[0], w[0], *spatial))
        if self.bias is not None:
            self.expect_shape(self.bias, (w[0],), "bias")


@irdl_op_definition
class WindowsOp(QCOp):
    """im2col: the windows of an image (B, H, W, C) as rows (B, H', W', kh*kw*C): the channels of each tap in turn.

    Outside the image there are zeros, `padding [top, left, bottom, right]` of them. A convolution is a linear of this.

    With `channels`, the pixels are int8 rows of so many columns (`qc.quantize_rows`), (B, H, W, row_bytes(C)). So are
    the windows, (B, H', W', row_bytes(kh*kw*C)), which have the scale of the first pixel of their image.
    """

    name = "qc.windows"
    x = operand_def(TensorType)
    kernel = prop_def(DenseArrayBase.constr(i64))
    strides = prop_def(DenseArrayBase.constr(i64))
    padding = prop_def(DenseArrayBase.constr(i64))
    dilation = prop_def(DenseArrayBase.constr(i64))
    channels = opt_prop_def(IntegerAttr)
    result = result_def(TensorType)
    traits = traits_def(Pure())

    def __init__(
        self,
        x: SSAValue | Operation,
        type_: Attribute,
        *,
        kernel: Sequence[int],
        strides: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        channels: int | None = None,
    ) -> None:
        given = {"kernel": kernel, "strides": strides, "padding": padding, "dilation": dilation}
        properties: dict[str, Attribute | None] = {name: _list(values) for name, values in given.items()}
        properties["channels"] = None if channels is None else IntegerAttr(channels, i64)
        super().__init__(operands=[x], properties=properties, result_types=[type_])

    @property
    def depth(self) -> int:
        """Channels of a pixel."""
        return int(shape_of(self.x.type)[3]) if self.channels is None else self.channels.value.data

    def verify_op(self) -> None:
        x, out, kernel = shape_of(self.x.type), shape_of(self.result.type), numbers(self.kernel)
        self.expect(len(x) == len(out) == 4, f"x and the result need rank 4, not {len(x)} and {len(out)}")
        self.expect(len(kernel) == 2 and min(kernel) >= 1, "kernel needs 2 positive entries")
        self.expect(isinstance(x[3], int), f"the number of channels '{x[3]}' must be fixed")
        size = _expect_windows(self, x[1:3], kernel, out[1:3])
        self.expect(tensor_dtype(self.x.type) == tensor_dtype(self.result.type), "element types differ")
        columns = kernel[0] * kernel[1] * self.depth
        if self.channels is not None:
            self.expect(self.depth >= 1 and tensor_dtype(self.x.type) == "i8", "int8 rows hold i8, of some channels")
            self.expect_shape(self.x, (*x[:3], row_bytes(self.depth)), "x")
            columns = row_bytes(columns)
        self.expect_shape(self.result, (x[0], *size, columns))
