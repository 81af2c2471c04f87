"""Small builders of the tensor-level IR, for importers and passes.

Each takes a `Builder` (or a `PatternRewriter`) and returns the new `SSAValue`. Shapes are tuples of `Dim`. The IR is
valid both here and in stock MLIR: dynamic sizes are passed as `qc.dim` operands.

    %n = qc.dim "b*s" : index
    %e = tensor.empty(%n) : tensor<?x384xf32, #qc.dims<["b*s", 384]>>

Use `with_path` for a builder that sets `qc.path` on every op it inserts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Literal

from xdsl.builder import Builder
from xdsl.dialects import arith, tensor
from xdsl.dialects.builtin import (
    AffineMapAttr,
    AnyFloat,
    ArrayAttr,
    DenseArrayBase,
    FloatAttr,
    IndexType,
    IntegerAttr,
    IntegerType,
    TensorType,
    i64,
)
from xdsl.dialects.linalg.attrs import IteratorTypeAttr
from xdsl.dialects.linalg.ops import BroadcastOp, FillOp, GenericOp, TransposeOp, YieldOp
from xdsl.ir import Attribute, Block, Operation, Region, SSAValue
from xdsl.ir.affine import AffineConstantExpr, AffineDimExpr, AffineMap
from xdsl.rewriter import InsertPoint

from qcompiler.errors import QCompilerError
from qcompiler.ir import types
from qcompiler.ir.module import PATH, set_path
from qcompiler.ir.qc import DimOp
from qcompiler.ir.types import ELEMENT_TYPES, shape_of, tensor_dtype
from qcompiler.plan.dims import Dim, Expr, dim, product
from qcompiler.plan.kernel import DType

Body = Callable[[Builder, Sequence[SSAValue]], SSAValue | Operation]
"""Builds a scalar body from the inner builder and one scalar per input (then the accumulator). Returns the yielded
value."""

Iterator = Literal["parallel", "reduction"]
Reduction = Literal["add", "mul", "max", "min", "or", "and"]

_ITERATORS = {"parallel": IteratorTypeAttr.parallel(), "reduction": IteratorTypeAttr.reduction()}
_FLOATS = ("f64", "f32", "f16", "bf16")


def with_path(point: InsertPoint, path: str) -> Builder:
    """A builder whose ops carry `qc.path = path` (ops that already have one keep it; sizes and scalars need none)."""
    return Builder(point, operation_insertion_handler=[stamp(lambda: path)])


def stamp(path: Callable[[], str]) -> Callable[[Operation], None]:
    """What a builder does with each op it inserts, so that the op carries `qc.path`."""

    def handler(op: Operation) -> None:
        if PATH not in op.attributes and not isinstance(op, DimOp | arith.ConstantOp):
            set_path(op, path())

    return handler


# --- scalars, sizes, fresh tensors -----------------------------------------------------------------------------------


def dim_value(builder: Builder, size: Dim | Expr) -> SSAValue | int:
    """A size as an operand: an integer if it is static, else the result of a new `qc.dim`."""
    entry = dim(size).to_dim()
    return entry if isinstance(entry, int) else builder.insert(DimOp(entry)).result


def dynamic_sizes(builder: Builder, shape: Sequence[Dim]) -> list[SSAValue]:
    """Operands for the `?` entries of a shape, in order."""
    values = (dim_value(builder, size) for size in shape)
    return [value for value in values if isinstance(value, SSAValue)]


def scalar(builder: Builder, value: float | int | bool, dtype: DType) -> SSAValue:
    """An `arith.constant` of a scalar type. For ui8, of which arith has no constants, the bitcast of an i8."""
    if dtype == "ui8":
        byte = scalar(builder, int(value) - 256 * (int(value) > 127), "i8")
        return builder.insert(arith.BitcastOp(byte, ELEMENT_TYPES["ui8"])).results[0]
    element = ELEMENT_TYPES[dtype]
    if isinstance(element, IntegerType):
        number = int(bool(value)) if dtype == "i1" else int(value)  # as in torch, any number except 0 is true
        return builder.insert(arith.ConstantOp(IntegerAttr(number, element))).result
    assert isinstance(element, AnyFloat)
    return builder.insert(arith.ConstantOp(FloatAttr(float(value), element))).result


def index_constant(builder: Builder, value: int) -> SSAValue:
    """An `arith.constant` of index type."""
    return builder.insert(arith.ConstantOp(IntegerAttr(value, IndexType()))).result


def empty(builder: Builder, shape: Sequence[Dim], dtype: DType) -> SSAValue:
    """`tensor.empty`: a destination without defined values."""
    return builder.insert(tensor.EmptyOp(dynamic_sizes(builder, shape), types.tensor(shape, dtype))).tensor


def fill(builder: Builder, value: float | int | bool | SSAValue, shape: Sequence[Dim], dtype: DType) -> SSAValue:
    """A tensor that holds one value everywhere (`linalg.fill` of a `tensor.empty`; a loop for ui8, see `scalar`)."""
    if dtype == "ui8" and not isinstance(value, SSAValue):
        return pointwise(builder, [], shape, dtype, lambda inner, _: scalar(inner, value, "ui8"))
    item = value if isinstance(value, SSAValue) else scalar(builder, value, dtype)
    out = empty(builder, shape, dtype)
    return _insert(builder, FillOp([item], [out], [out.type]))


# --- linalg.generic --------------------------------------------------------------------------------------------------


def generic(
    builder: Builder,
    inputs: Sequence[SSAValue],
    maps: Sequence[AffineMap],
    out_shape: Sequence[Dim],
    dtype: DType,
    iterators: Sequence[Iterator],
    body_fn: Body,
    *,
    init: SSAValue | None = None,
) -> SSAValue:
    """A `linalg.generic` with one result.

    `maps` has one map per input, then the output's. `init` is the initial value of a reduction (a `fill`); without it
    the output is a new `tensor.empty`. `body_fn` gets one scalar per input, then the output's.
    """
    if len(maps) != len(inputs) + 1:
        raise QCompilerError(f"{len(inputs)} inputs need {len(inputs) + 1} indexing maps, not {len(maps)}")
    out = init if init is not None else empty(builder, out_shape, dtype)
    scalars = [_element(value.type) for value in (*inputs, out)]
    block = Block(arg_types=scalars)
    inner = Builder(InsertPoint.at_end(block))
    inner.insert(YieldOp(SSAValue.get(body_fn(inner, block.args))))
    op = GenericOp(
        list(inputs),
        [out],
        Region(block),
        [AffineMapAttr(m) for m in maps],
        [_ITERATORS[i] for i in iterators],
        [out.type],
    )
    return _insert(builder, op)


def _insert(builder: Builder, op: BroadcastOp | FillOp | GenericOp | TransposeOp) -> SSAValue:
    """Inserts an op and returns its one result."""
    result: SSAValue = builder.insert(op).results[0]
    return result


def _element(type_: Attribute) -> Attribute:
    return type_.element_type if isinstance(type_, TensorType) else type_


def broadcast_map(shape: Sequence[Dim], out_shape: Sequence[Dim]) -> AffineMap:
    """The map that reads an operand of `shape` in loops over `out_shape`, under NumPy's broadcasting rule."""
    rank, lead = len(out_shape), len(out_shape) - len(shape)
    if lead < 0:
        raise QCompilerError(f"shape {tuple(shape)} has a higher rank than {tuple(out_shape)}")
    results: list[AffineConstantExpr | AffineDimExpr] = []
    for axis, size in enumerate(shape):
        if size == out_shape[lead + axis]:
            results.append(AffineDimExpr(lead + axis))
        elif size == 1:
            results.append(AffineConstantExpr(0))
        else:
            raise QCompilerError(f"shape {tuple(shape)} does not broadcast to {tuple(out_shape)}")
    return AffineMap(rank, 0, tuple(results))


def pointwise(
    builder: Builder, inputs: Sequence[SSAValue], out_shape: Sequence[Dim], dtype: DType, body_fn: Body
) -> SSAValue:
    """A parallel `linalg.generic`; inputs broadcast to `out_shape` as in NumPy. Scalar inputs are allowed."""
    rank = len(out_shape)
    maps = [
        broadcast_map(shape_of(v.type), out_shape) if isinstance(v.type, TensorType) else AffineMap(rank, 0, ())
        for v in inputs
    ]
    maps.append(AffineMap.identity(rank))
    return generic(builder, inputs, maps, out_shape, dtype, ["parallel"] * rank, body_fn)


_COMBINE: dict[str, tuple[Callable[[SSAValue, SSAValue], Operation], Callable[[SSAValue, SSAValue], Operation]]] = {
    "add": (arith.AddfOp, arith.AddiOp),
    "mul": (arith.MulfOp, arith.MuliOp),
    "max": (arith.MaximumfOp, arith.MaxSIOp),
    "min": (arith.MinimumfOp, arith.MinSIOp),
    "or": (arith.OrIOp, arith.OrIOp),
    "and": (arith.AndIOp, arith.AndIOp),
}


def rounded(builder: Builder, value: SSAValue, dtype: DType) -> SSAValue:
    """A float tensor in a 16-bit type, rounded once: through fp32, if it is in the other one."""

    def body(inner: Builder, scalars: Sequence[SSAValue]) -> SSAValue:
        wide = scalars[0]
        if wide.type != ELEMENT_TYPES["f32"]:
            wide = inner.insert(arith.ExtFOp(wide, ELEMENT_TYPES["f32"])).result
        return inner.insert(arith.TruncFOp(wide, ELEMENT_TYPES[dtype])).result

    return pointwise(builder, [value], shape_of(value.type), dtype, body)


def reduction_identity(kind: Reduction, dtype: DType) -> float | int:
    """The neutral element. For max and min of integers it is the type's extreme; for booleans 0 or 1."""
    floating = dtype in _FLOATS
    match kind:
        case "add" | "or":
            return 0
        case "mul":
            return 1
        case "and":
            return 1 if dtype == "i1" else -1
        case "max" | "min":
            if floating:
                return float("-inf") if kind == "max" else float("inf")
            bits = int(dtype.lstrip("ui"))
            if dtype == "i1":
                return int(kind == "min")
            return -(1 << (bits - 1)) if kind == "max" else (1 << (bits - 1)) - 1


def reduce(builder: Builder, value: SSAValue, axes: Sequence[int], kind: Reduction) -> SSAValue:
    """Reduces `axes` (dropped from the shape) in the element type of `value`."""
    shape, dtype = shape_of(value.type), tensor_dtype(value.type)
    if not axes:
        return value
    kept = [axis for axis in range(len(shape)) if axis not in axes]
    out_shape = tuple(shape[axis] for axis in kept)
    init = fill(builder, reduction_identity(kind, dtype), out_shape, dtype)
    combine = _COMBINE[kind][0 if dtype in _FLOATS else 1]
    # parallel loops first, then the reductions in their original order
    order = [*kept, *(axis for axis in range(len(shape)) if axis in axes)]
    reads = tuple(AffineDimExpr(order.index(axis)) for axis in range(len(shape)))
    maps = [AffineMap(len(shape), 0, reads), AffineMap(len(shape), 0, tuple(map(AffineDimExpr, range(len(kept)))))]
    iterators: list[Iterator] = ["parallel"] * len(kept)
    iterators += ["reduction"] * (len(shape) - len(kept))

    def body(inner: Builder, arguments: Sequence[SSAValue]) -> Operation:
        return inner.insert(combine(arguments[0], arguments[1]))

    return generic(builder, [value], maps, out_shape, dtype, iterators, body, init=init)


# --- views -----------------------------------------------------------------------------------------------------------


def transpose(builder: Builder, value: SSAValue, permutation: Sequence[int]) -> SSAValue:
    """Result axis i is input axis `permutation[i]`."""
    shape = shape_of(value.type)
    if sorted(permutation) != list(range(len(shape))):
        raise QCompilerError(f"{list(permutation)} is not a permutation of {len(shape)} axes")
    if list(permutation) == list(range(len(shape))):
        return value
    out = empty(builder, [shape[axis] for axis in permutation], tensor_dtype(value.type))
    return _insert(builder, TransposeOp(value, out, DenseArrayBase.from_list(i64, list(permutation))))


def broadcast_in(builder: Builder, value: SSAValue, out_shape: Sequence[Dim], axes: Sequence[int]) -> SSAValue:
    """Input axis i becomes result axis `axes[i]` (ascending); other result axes repeat. A size of 1 stretches."""
    shape = shape_of(value.type)
    if len(axes) != len(shape) or list(axes) != sorted(set(axes)):
        raise QCompilerError(f"axes {list(axes)} do not place a tensor of rank {len(shape)}")
    for size, axis in zip(shape, axes, strict=True):
        if size not in (1, out_shape[axis]):
            raise QCompilerError(f"shape {shape} does not broadcast to {tuple(out_shape)} along axes {list(axes)}")
    kept = [i for i, axis in enumerate(axes) if shape[i] == out_shape[axis]]
    source = reshape(builder, value, [shape[i] for i in kept])
    added = [axis for axis in range(len(out_shape)) if axis not in {axes[i] for i in kept}]
    if not added:
        return source
    out = empty(builder, out_shape, tensor_dtype(value.type))
    return _insert(builder, BroadcastOp(source, out, DenseArrayBase.from_list(i64, added)))


def broadcast_to(builder: Builder, value: SSAValue, out_shape: Sequence[Dim]) -> SSAValue:
    """NumPy's broadcast_to."""
    lead = len(out_shape) - len(shape_of(value.type))
    return broadcast_in(builder, value, out_shape, range(lead, len(out_shape)))


def extract_slice(
    builder: Builder,
    value: SSAValue,
    offsets: Sequence[Dim],
    sizes: Sequence[Dim],
    steps: Sequence[int] | None = None,
) -> SSAValue:
    """`value[offset : offset + size * step : step]` along every axis. Steps are positive integers."""
    shape = shape_of(value.type)
    strides = list(steps) if steps is not None else [1] * len(shape)
    if not len(offsets) == len(sizes) == len(strides) == len(shape) or any(step < 1 for step in strides):
        raise QCompilerError(f"a slice of shape {shape} needs an offset, a size and a positive step for each axis")
    same = all(dim(a) == dim(b) for a, b in zip(shape, sizes, strict=True))
    if same and all(o == 0 for o in offsets) and all(s == 1 for s in strides):
        return value
    op = tensor.ExtractSliceOp(
        value,
        [dim_value(builder, o) for o in offsets],
        [dim_value(builder, s) for s in sizes],
        strides,
        types.tensor(sizes, tensor_dtype(value.type)),
    )
    return builder.insert(op).result


def insert_slice(
    builder: Builder,
    part: SSAValue,
    into: SSAValue,
    offsets: Sequence[Dim],
    steps: Sequence[int] | None = None,
) -> SSAValue:
    """`into` with `part` written at `offsets`, every `step`-th entry along each axis."""
    sizes = shape_of(part.type)
    entries = [dim_value(builder, o) for o in offsets], [dim_value(builder, n) for n in sizes]
    dynamic = [[e for e in group if isinstance(e, SSAValue)] for group in entries]
    static = [[e if isinstance(e, int) else types.DYNAMIC for e in group] for group in entries]
    op = tensor.InsertSliceOp.build(
        operands=[part, into, dynamic[0], dynamic[1], []],
        result_types=[into.type],
        properties={
            "static_offsets": DenseArrayBase.from_list(i64, static[0]),
            "static_sizes": DenseArrayBase.from_list(i64, static[1]),
            "static_strides": DenseArrayBase.from_list(i64, list(steps) if steps is not None else [1] * len(sizes)),
        },
    )
    return builder.insert(op).result


def concat(builder: Builder, values: Sequence[SSAValue], axis: int) -> SSAValue:
    """Joins tensors of equal rank along `axis`."""
    if len(values) == 1:
        return values[0]
    shapes = [shape_of(value.type) for value in values]
    total = sum((dim(shape[axis]) for shape in shapes), Expr.constant(0))
    out = (*shapes[0][:axis], total.to_dim(), *shapes[0][axis + 1 :])
    op = tensor.ConcatOp(list(values), axis, types.tensor(out, tensor_dtype(values[0].type)))
    return builder.insert(op).result


# --- reshape ---------------------------------------------------------------------------------------------------------

Group = tuple[tuple[int, int], tuple[int, int]]
"""Half-open ranges of source axes and of target axes with equal products."""


def reshape_groups(source: Sequence[Dim], target: Sequence[Dim]) -> list[Group]:
    """The finest split of two shapes of equal size into consecutive groups of equal products, none of them empty.

    Groups are separated where prefix products agree. Unit dims join the group before them. QCompilerError if the sizes
    differ.
    """
    if product(source) != product(target):
        raise QCompilerError(f"cannot reshape {tuple(source)} to {tuple(target)}: the element counts differ")
    if product(source) == 0:
        return [((0, len(source)), (0, len(target)))]
    ends = [_last_prefixes(shape) for shape in (source, target)]
    cuts = [(0, 0)]
    for value, i in ends[0].items():
        j = ends[1].get(value)
        if j is not None and i > cuts[-1][0] and j > cuts[-1][1]:
            cuts.append((i, j))
    if len(cuts) > 1:
        cuts.pop()  # the last group takes the trailing unit dims of both sides
    cuts.append((len(source), len(target)))
    groups: list[Group] = []
    for (i0, j0), (i1, j1) in itertools.pairwise(cuts):
        groups += _split_equal(source, target, (i0, i1), (j0, j1))
    return groups


def _last_prefixes(shape: Sequence[Dim]) -> dict[Expr, int]:
    """Prefix product -> the longest prefix that has it (at least one axis)."""
    total, found = Expr.constant(1), {}
    for index, size in enumerate(shape):
        total = total * dim(size)
        found[total] = index + 1
    return found


def _split_equal(source: Sequence[Dim], target: Sequence[Dim], s: tuple[int, int], t: tuple[int, int]) -> list[Group]:
    """Splits leading and trailing axes of equal size off a group, so that unchanged unit dims cause no collapse."""
    (i, i1), (j, j1) = s, t
    before: list[Group] = []
    behind: list[Group] = []
    while i1 - i > 1 and j1 - j > 1 and dim(source[i]) == dim(target[j]):
        before.append(((i, i + 1), (j, j + 1)))
        i, j = i + 1, j + 1
    while i1 - i > 1 and j1 - j > 1 and dim(source[i1 - 1]) == dim(target[j1 - 1]):
        i1, j1 = i1 - 1, j1 - 1
        behind.insert(0, ((i1, i1 + 1), (j1, j1 + 1)))
    return [*before, ((i, i1), (j, j1)), *behind]


def reshape(builder: Builder, value: SSAValue, new_shape: Sequence[Dim]) -> SSAValue:
    """Any reshape: at most one `collapse_shape`, then at most one `expand_shape`.

    A tensor without elements is created anew: collapsing (0, "s") gives a static 0, which MLIR does not accept.
    """
    source, target = shape_of(value.type), tuple(dim(size).to_dim() for size in new_shape)
    if source == target:
        return value
    if product(source) == 0 and product(target) == 0:
        return fill(builder, 0, target, tensor_dtype(value.type))
    groups = reshape_groups(source, target)
    if not source:  # rank 0 to units; expand_shape cannot start from rank 0 here
        out = empty(builder, target, tensor_dtype(value.type))
        added = DenseArrayBase.from_list(i64, list(range(len(target))))
        return _insert(builder, BroadcastOp(value, out, added))
    if not target:
        return collapse(builder, value, [])
    collapsed = collapse(builder, value, [list(range(*s)) for s, _ in groups])
    return expand(builder, collapsed, [list(range(*t)) for _, t in groups], target)


def _reassociation(groups: Sequence[Sequence[int]]) -> ArrayAttr[ArrayAttr[IntegerAttr]]:
    return ArrayAttr([ArrayAttr([IntegerAttr(axis, i64) for axis in group]) for group in groups])


def collapse(builder: Builder, value: SSAValue, groups: Sequence[Sequence[int]]) -> SSAValue:
    """`tensor.collapse_shape`: each group of consecutive axes becomes one axis. No groups: unit dims become rank 0."""
    shape = shape_of(value.type)
    if len(groups) == len(shape):
        return value
    out = [product(shape[axis] for axis in group).to_dim() for group in groups]
    op = tensor.CollapseShapeOp(
        operands=[value],
        result_types=[types.tensor(out, tensor_dtype(value.type))],
        properties={"reassociation": _reassociation(groups)},
    )
    return builder.insert(op).result


def expand(builder: Builder, value: SSAValue, groups: Sequence[Sequence[int]], out_shape: Sequence[Dim]) -> SSAValue:
    """`tensor.expand_shape`: axis i becomes the axes `groups[i]` of `out_shape`."""
    if len(groups) == len(out_shape):
        return value
    type_ = types.tensor(out_shape, tensor_dtype(value.type))
    operands = dynamic_sizes(builder, out_shape)
    op = tensor.ExpandShapeOp(value, operands, _reassociation(groups), type_.get_shape(), type_)
    return builder.insert(op).result
