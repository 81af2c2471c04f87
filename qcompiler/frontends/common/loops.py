"""Loops and views over IR values: what the builders of every frontend write their operators with.

loops.pointwise([x, y], lambda m, a, b: m.add(a, b), compute="f32", result="bf16")
loops.reduce(x, (1,), "add", compute="f32")
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from xdsl.builder import Builder
from xdsl.ir import Operation, SSAValue
from xdsl.ir.affine import AffineDimExpr, AffineMap

from qcompiler.errors import DimError
from qcompiler.frontends.common.scalars import Scalars, cast
from qcompiler.ir import build
from qcompiler.ir.types import shape_of, tensor_dtype
from qcompiler.plan.dims import Dim, Range, dim
from qcompiler.plan.kernel import DType
from qcompiler.plan.weights import NUMPY_DTYPES

Shape = tuple[Dim, ...]
Number = int | float | bool


class Loops:
    """Builders of common forms of IR at one place of a function; `ranges` are those of the symbols of sizes."""

    builder: Builder
    ranges: Mapping[str, Range]

    def insert(self, op: Operation) -> SSAValue:
        return self.builder.insert(op).results[0]

    def low(self, size: Dim) -> int:
        """The smallest value of a size."""
        return dim(size).bounds(self.ranges)[0]

    def symbolic(self, size: Dim) -> SSAValue:
        """A size as a rank-0 i64 tensor: the last entry of a count from 1, which needs only loop indices."""
        expr, low = dim(size), self.low(size)
        shift = max(1 - low, 0)
        extent = (expr + shift).to_dim()
        counted = self.iota(extent, lambda m, i: m.add(i, m.const(1 - shift)))
        last = build.extract_slice(self.builder, counted, [(expr + (shift - 1)).to_dim()], [1])
        return build.reshape(self.builder, last, [])

    def extent(self, size: Dim) -> SSAValue | int:
        """A size for arithmetic: the number, or a rank-0 i64 tensor if it is symbolic."""
        expr = dim(size)
        return expr.value if expr.is_static else self.symbolic(size)

    def iota(self, size: Dim, body: Callable[[Scalars, SSAValue], SSAValue], dtype: DType = "i64") -> SSAValue:
        """A rank-1 tensor of `body(index)`; `dtype` is the type that the body computes and yields."""

        def build_body(inner: Builder, _arguments: Sequence[SSAValue]) -> SSAValue:
            math = Scalars(inner, dtype)
            return body(math, math.index(0))

        return build.generic(self.builder, [], [AffineMap.identity(1)], [size], dtype, ["parallel"], build_body)

    def full(self, value: Number, shape: Sequence[Dim], dtype: DType) -> SSAValue:
        return build.fill(self.builder, value, shape, dtype)

    def cast(self, value: SSAValue, dtype: DType) -> SSAValue:
        """`.to(dtype)`; the value itself if it has that type."""
        if tensor_dtype(value.type) == dtype:
            return value
        return build.pointwise(
            self.builder, [value], shape_of(value.type), dtype, lambda inner, xs: cast(inner, xs[0], dtype)
        )

    def pointwise(
        self,
        inputs: Sequence[SSAValue | Number],
        body: Callable[..., SSAValue],
        *,
        compute: DType,
        result: DType,
        shape: Sequence[Dim] | None = None,
        common: DType | None = None,
        exact: int | None = None,
    ) -> SSAValue:
        """Loops over the broadcast of all inputs.

        Elements and Python numbers are first rounded to `common` (torch's promoted type; default: none), converted to
        `compute`, and passed to `body(scalars, *elements)`; its result is converted to `result`.  The input number
        `exact` is not rounded to `common` if it is a number or has rank 0: torch's multiplication and division keep
        such a second operand in fp32, its addition does not.
        """
        tensors = [x for x in inputs if isinstance(x, SSAValue)]
        out_shape = tuple(shape) if shape is not None else broadcast_shapes([shape_of(x.type) for x in tensors])

        def build_body(inner: Builder, arguments: Sequence[SSAValue]) -> SSAValue:
            math, given = Scalars(inner, compute), iter(arguments)
            elements = []
            for position, x in enumerate(inputs):
                if not isinstance(x, SSAValue):
                    kept = common is None or (position == exact and common != "ui8")
                    rounded = x if kept or common is None else round_number(x, common)
                    elements.append(math.const(rounded))
                    continue
                element = next(given)
                if common is not None and (position != exact or shape_of(x.type)):
                    element = cast(inner, element, common)
                elements.append(cast(inner, element, compute))
            return cast(inner, body(math, *elements), result)

        return build.pointwise(self.builder, tensors, out_shape, result, build_body)

    def reduce(
        self,
        x: SSAValue,
        axes: Sequence[int],
        kind: build.Reduction,
        *,
        compute: DType,
        term: Callable[[Scalars, SSAValue], SSAValue] | None = None,
    ) -> SSAValue:
        """Reduces `axes` (dropped) of `term(x)`, accumulating in `compute`; the result has that type."""
        return self.fold([x], shape_of(x.type), axes, kind, compute=compute, term=term or (lambda m, value: value))

    def fold(
        self,
        inputs: Sequence[SSAValue | Number],
        shape: Sequence[Dim],
        axes: Sequence[int],
        kind: build.Reduction,
        *,
        compute: DType,
        term: Callable[..., SSAValue],
        elements: DType | None = None,
    ) -> SSAValue:
        """Reduces `axes` (dropped) of `term(scalars, *elements)` over `shape`, to which the inputs broadcast.

        Terms and the result have the type `compute`, and so have the elements passed to `term`, unless `elements` names
        another type.
        """
        given_as = elements or compute
        if not axes:  # each element is a sum with one term
            return self._terms(inputs, shape, compute, given_as, term)
        tensors = [x for x in inputs if isinstance(x, SSAValue)]
        kept = [a for a in range(len(shape)) if a not in axes]
        order = [*kept, *(a for a in range(len(shape)) if a in axes)]
        out = [shape[a] for a in kept]
        init = build.fill(self.builder, build.reduction_identity(kind, compute), out, compute)
        loops = [AffineDimExpr(order.index(a)) for a in range(len(shape))]
        maps = [
            AffineMap(len(shape), 0, tuple(e.replace_dims_and_symbols(loops, []) for e in spread.results))
            for spread in (build.broadcast_map(shape_of(x.type), shape) for x in tensors)
        ]
        maps.append(AffineMap(len(shape), 0, tuple(AffineDimExpr(i) for i in range(len(kept)))))

        def body(inner: Builder, arguments: Sequence[SSAValue]) -> SSAValue:
            math, given = Scalars(inner, compute), iter(arguments)
            values = [
                cast(inner, next(given), given_as) if isinstance(x, SSAValue) else Scalars(inner, given_as).const(x)
                for x in inputs
            ]
            return combine(math, kind, term(math, *values), arguments[-1])

        iterators: list[build.Iterator] = ["parallel"] * len(kept)
        iterators += ["reduction"] * (len(shape) - len(kept))
        return build.generic(self.builder, tensors, maps, out, compute, iterators, body, init=init)

    def _terms(
        self,
        inputs: Sequence[SSAValue | Number],
        shape: Sequence[Dim],
        compute: DType,
        given_as: DType,
        term: Callable[..., SSAValue],
    ) -> SSAValue:
        def body(inner: Builder, arguments: Sequence[SSAValue]) -> SSAValue:
            given = iter(arguments)
            values = [
                cast(inner, next(given), given_as) if isinstance(x, SSAValue) else Scalars(inner, given_as).const(x)
                for x in inputs
            ]
            return term(Scalars(inner, compute), *values)

        tensors = [x for x in inputs if isinstance(x, SSAValue)]
        return build.pointwise(self.builder, tensors, shape, compute, body)

    def keep_axes(self, value: SSAValue, shape: Sequence[Dim], axes: Sequence[int]) -> SSAValue:
        """A reduced value with the reduced axes of `shape` restored as 1."""
        return build.reshape(self.builder, value, [1 if i in axes else size for i, size in enumerate(shape)])

    # --- views ---

    def reshape(self, value: SSAValue, shape: Sequence[Dim]) -> SSAValue:
        return build.reshape(self.builder, value, shape)

    def transpose(self, value: SSAValue, permutation: Sequence[int]) -> SSAValue:
        return build.transpose(self.builder, value, permutation)

    def broadcast(self, value: SSAValue, shape: Sequence[Dim]) -> SSAValue:
        return build.broadcast_to(self.builder, value, shape)

    def slice(self, value: SSAValue, axis: int, start: Dim, size: Dim, step: int = 1) -> SSAValue:
        """`size` entries from `start` along one axis."""
        shape = shape_of(value.type)
        offsets: list[Dim] = [0] * len(shape)
        sizes, steps = list(shape), [1] * len(shape)
        offsets[axis], sizes[axis], steps[axis] = start, size, step
        return build.extract_slice(self.builder, value, offsets, sizes, steps)

    def move_axis(self, value: SSAValue, source: int, target: int) -> SSAValue:
        order = [a for a in range(len(shape_of(value.type))) if a != source]
        order.insert(target, source)
        return self.transpose(value, order)


def combine(math: Scalars, kind: build.Reduction, element: SSAValue, accumulator: SSAValue) -> SSAValue:
    """One step of a reduction."""
    match kind:
        case "add":
            return math.add(accumulator, element)
        case "mul":
            return math.mul(accumulator, element)
        case "max":
            return math.maximum(accumulator, element)
        case "min":
            return math.minimum(accumulator, element)
        case "or" | "and":
            return math.bitwise(kind, accumulator, element)


def broadcast_shapes(shapes: Sequence[Shape]) -> Shape:
    """NumPy's rule on symbolic shapes: equal, or 1 on one side. DimError otherwise."""
    rank = max((len(s) for s in shapes), default=0)
    out: list[Dim] = [1] * rank
    for shape in shapes:
        for axis, size in enumerate(shape, rank - len(shape)):
            if out[axis] == 1:
                out[axis] = size
            elif size not in (1, out[axis]):
                raise DimError(f"shapes {shapes} do not broadcast: {out[axis]} and {size}")
    return tuple(out)


def round_number(value: float | int | bool, dtype: DType) -> float | int | bool:
    """A Python number as a tensor of `dtype` holds it: -1 is 255 in ui8. Other integers and fp64 are exact."""
    if dtype == "ui8":
        return int(value) % 256
    if dtype not in ("f32", "f16", "bf16"):
        return value
    with np.errstate(over="ignore"):
        return float(np.float32(value).astype(NUMPY_DTYPES[dtype]))
