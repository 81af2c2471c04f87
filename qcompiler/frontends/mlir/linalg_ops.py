"""Rules of the linalg reader: ops of tensor, named ops of linalg, and what stands between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from qcompiler.frontends.jax.fold import entries_of, scalar_of
from qcompiler.frontends.jax.graph import Body, Graph, Node, Value
from qcompiler.frontends.jax.scope import splat
from qcompiler.frontends.mlir import generics
from qcompiler.frontends.mlir.affine import apply_map
from qcompiler.frontends.mlir.constants import Constants
from qcompiler.frontends.mlir.dense import ints
from qcompiler.frontends.mlir.linalg import DYNAMIC, LinalgReader, Rule, Values, element_of, is_zero
from qcompiler.frontends.mlir.model import MlirModel
from qcompiler.frontends.mlir.types import parse_type
from qcompiler.ir import build
from qcompiler.plan.dims import Dim, dim

# --- constants and sizes ---------------------------------------------------------------------------------------------


def _constant(r: LinalgReader, op: Any, operands: list[Value], values: Values) -> list[Value]:
    del operands, values
    return [r.constant(op, str(op.attributes["value"]), str(op.results[0].type))]


def _dim(r: LinalgReader, op: Any, operands: list[Value], values: Values) -> list[Value]:
    del values
    axis = scalar_of(operands[1])
    if not isinstance(axis, int) or not 0 <= axis < operands[0].rank:
        raise r.unsupported(op, "its dimension is not a number within the rank")
    return [r.known(operands[0].shape[axis])]


def _apply(r: LinalgReader, op: Any, operands: list[Value], values: Values) -> list[Value]:
    """affine.apply of sizes."""
    del values
    return [r.known(apply_map(str(op.attributes["map"]), [dim(r.size(value, op)) for value in operands]))]


def _global(r: LinalgReader, op: Any, operands: list[Value], values: Values) -> list[Value]:
    del operands, values
    name = str(op.attributes["global"]).removeprefix("@").strip('"')
    held = r.model.functions.get(name)
    if held is None or "value" not in held.attributes or "is_mutable" in held.attributes:
        raise r.unsupported(op, f"@{name} is no constant global of the text")
    return [r.constant(op, str(held.attributes["value"]), str(op.results[0].type))]


def _assert(r: LinalgReader, op: Any, operands: list[Value], values: Values) -> list[Value]:
    del values
    holds = scalar_of(operands[0])
    if not isinstance(holds, int) or not holds:
        raise r.unsupported(
            op, f"{op.attributes['msg']}: whether it holds depends on values or sizes, or it does not hold; programs "
            "check nothing while they run. Take it out, or fix the sizes"
        )  # fmt: skip
    return []


def _call(r: LinalgReader, op: Any, operands: list[Value], values: Values) -> list[Value]:
    del values
    name = str(op.attributes["callee"]).removeprefix("@").strip('"')
    return r.function(r.model.functions[name], operands)


# --- making tensors --------------------------------------------------------------------------------------------------


def _empty(r: LinalgReader, op: Any, operands: list[Value], values: Values) -> list[Value]:
    del values
    kind = element_of(str(op.results[0].type))
    return [r.node("mlir.empty", [], r.result_shape(op, operands), kind, op)]


def _splat(r: LinalgReader, op: Any, operands: list[Value], values: Values) -> list[Value]:
    del values
    return [r.broadcast(operands[0], r.result_shape(op, operands[1:]), [], op)]


def _fill(r: LinalgReader, op: Any, operands: list[Value], values: Values) -> list[Value]:
    del values
    value = r.convert(operands[0], operands[1].type, op)
    return [r.broadcast(value, operands[1].shape, [], op)]


def _from_elements(r: LinalgReader, op: Any, operands: list[Value], values: Values) -> list[Value]:
    del values
    shape = r.result_shape(op, [])
    wide = [r.reshape(value, [1], op) for value in operands]
    kind = element_of(str(op.results[0].type))
    joined = wide[0] if len(wide) == 1 else r.node("stablehlo.concatenate", wide, [len(wide)], kind, op, dimension=0)
    return [r.reshape(joined, shape, op)]


def _generate(r: LinalgReader, op: Any, operands: list[Value], values: Values) -> list[Value]:
    """tensor.generate: a loop over nothing but its indices."""
    shape = r.result_shape(op, operands)
    return [generics.generate(r, op, shape, values)]


# --- views -----------------------------------------------------------------------------------------------------------


def _cast(r: LinalgReader, op: Any, operands: list[Value], values: Values) -> list[Value]:
    del values
    r.refined(op, operands[0].shape)
    return operands


def _collapse(r: LinalgReader, op: Any, operands: list[Value], values: Values) -> list[Value]:
    del values
    x, found = operands[0], []
    for group in op.attributes["reassociation"]:
        total = dim(1)
        for axis in ints(group):
            total = total * dim(x.shape[axis])
        found.append(total.to_dim())
    return [r.reshape(x, r.refined(op, found), op)]


def _expand(r: LinalgReader, op: Any, operands: list[Value], values: Values) -> list[Value]:
    del values
    shape = _mixed(r, op, ints(op.attributes["static_output_shape"]), operands[1:])
    return [r.reshape(operands[0], r.refined(op, shape), op)]


def _mixed(r: LinalgReader, op: Any, static: Sequence[int], dynamic: Sequence[Value]) -> list[Dim]:
    given = iter(dynamic)
    return [r.size(next(given), op) if n == DYNAMIC else n for n in static]


def _reshape(r: LinalgReader, op: Any, operands: list[Value], values: Values) -> list[Value]:
    del values
    shape = entries_of(operands[1])
    if shape is None:
        raise r.unsupported(op, "its shape depends on values, or is no expression of the sizes of arguments")
    return [r.reshape(operands[0], r.refined(op, shape), op)]


def _transpose(r: LinalgReader, op: Any, operands: list[Value], values: Values) -> list[Value]:
    del values
    return [r.transpose(operands[0], ints(op.attributes["permutation"]), op)]


def _broadcast(r: LinalgReader, op: Any, operands: list[Value], values: Values) -> list[Value]:
    del values
    added, shape = ints(op.attributes["dimensions"]), operands[1].shape
    return [r.broadcast(operands[0], shape, [i for i in range(len(shape)) if i not in added], op)]


def _parts(r: LinalgReader, op: Any, dynamic: list[Value]) -> tuple[list[Dim], list[Dim], list[int]]:
    """Offsets, sizes and strides of a slice."""
    found = []
    rest = list(dynamic)
    for name in ("static_offsets", "static_sizes", "static_strides"):
        static = ints(op.attributes[name])
        count = static.count(DYNAMIC)
        found.append(_mixed(r, op, static, rest[:count]))
        rest = rest[count:]
    if not all(isinstance(step, int) for step in found[2]):
        raise r.unsupported(op, "a stride that is no number")
    return found[0], found[1], [int(step) for step in found[2]]


def _extract_slice(r: LinalgReader, op: Any, operands: list[Value], values: Values) -> list[Value]:
    del values
    offsets, sizes, steps = _parts(r, op, operands[1:])
    made = r.slice(operands[0], offsets, sizes, steps, op)
    declared = element_shape(op)
    kept = _kept(sizes, declared)
    return [r.reshape(made, r.refined(op, [sizes[i] for i in kept]), op)]


def element_shape(op: Any) -> list[Dim | None]:
    return list(parse_type(str(op.results[0].type), op.name)[0])


def _kept(sizes: Sequence[Dim], declared: Sequence[Dim | None]) -> list[int]:
    """The dims of a slice that its result keeps: some of size 1 may be dropped."""
    drop = len(sizes) - len(declared)
    kept: list[int] = []
    for axis, size in enumerate(sizes):
        wanted = declared[len(kept)] if len(kept) < len(declared) else -1
        if drop and size == 1 and wanted != 1:
            drop -= 1
            continue
        kept.append(axis)
    return [i for i in kept if not (drop and sizes[i] == 1)] if len(kept) > len(declared) else kept


def _insert_slice(r: LinalgReader, op: Any, operands: list[Value], values: Values) -> list[Value]:
    del values
    part, into = operands[:2]
    offsets, sizes, steps = _parts(r, op, operands[2:])
    r.slice(into, offsets, sizes, steps, op)  # refuses places outside
    wide = r.reshape(part, sizes, op)
    return [r.node("mlir.insert", [wide, into], into.shape, into.type, op, offsets=offsets, steps=steps)]


def _concat(r: LinalgReader, op: Any, operands: list[Value], values: Values) -> list[Value]:
    del values
    axis = int(op.attributes["dim"].value)
    total = sum((dim(value.shape[axis]) for value in operands), dim(0))
    shape = [total.to_dim() if i == axis else size for i, size in enumerate(operands[0].shape)]
    kind = operands[0].type
    return [r.node("stablehlo.concatenate", operands, r.refined(op, shape), kind, op, dimension=axis)]


def _pad(r: LinalgReader, op: Any, operands: list[Value], values: Values) -> list[Value]:
    x = operands[0]
    low = ints(op.attributes["static_low"])
    high = ints(op.attributes["static_high"])
    count = low.count(DYNAMIC)
    lows = _mixed(r, op, low, operands[1 : 1 + count])
    highs = _mixed(r, op, high, operands[1 + count :])
    if not all(isinstance(n, int) for n in (*lows, *highs)):
        raise r.unsupported(op, "padding by a symbolic amount")
    block = op.regions[0].blocks[0]
    ops = [each.operation for each in block.operations]
    inner: Values = dict(values)
    for each in ops[:-1]:
        if each.name != "arith.constant":
            raise r.unsupported(op, "a padding that is no constant")
        inner.update(zip(each.results, _constant(r, each, [], inner), strict=True))
    fill = inner.get(ops[-1].operands[0])
    if fill is None:
        raise r.unsupported(op, "a padding that depends on its place")
    shape = [(dim(n) + dim(a) + dim(b)).to_dim() for n, a, b in zip(x.shape, lows, highs, strict=True)]
    return [
        r.node(
            "stablehlo.pad", [x, fill], r.refined(op, shape), x.type, op,
            edge_padding_low=lows, edge_padding_high=highs, interior_padding=[0] * x.rank,
        )
    ]  # fmt: skip


def _extract(r: LinalgReader, op: Any, operands: list[Value], values: Values) -> list[Value]:
    """One element, at known places."""
    del values
    x, places = operands[0], [scalar_of(value) for value in operands[1:]]
    if any(place is None for place in places):
        raise r.unsupported(op, "a place that depends on values; read it inside of a linalg.generic")
    part = r.slice(x, [dim(place).to_dim() for place in places if place is not None], [1] * x.rank, [1] * x.rank, op)
    return [r.reshape(part, [], op)]


# --- elementwise ops by name -----------------------------------------------------------------------------------------

_NAMED = {
    "add": "add", "sub": "subtract", "mul": "multiply", "div": "divide", "max": "maximum", "min": "minimum",
    "exp": "exponential", "log": "log", "abs": "abs", "ceil": "ceil", "floor": "floor", "negf": "negate",
    "rsqrt": "rsqrt", "sqrt": "sqrt", "tanh": "tanh", "powf": "power", "square": "square", "reciprocal": "reciprocal",
    "erf": "erf", "copy": "copy", "select": "select",
}  # fmt: skip


def _elementwise(r: LinalgReader, op: Any, operands: list[Value], values: Values) -> list[Value]:
    del values
    name, given = _NAMED[op.name.removeprefix("linalg.")], operands[:-1]
    shape, kind = operands[-1].shape, operands[-1].type
    for value in given:
        if value.shape != shape:
            raise r.unsupported(op, f"operands of the shapes {list(value.shape)} and {list(shape)}")
    if name == "copy":
        return [r.convert(given[0], kind, op)]
    if name == "square":
        return [r.node("stablehlo.multiply", [given[0], given[0]], shape, kind, op)]
    if name == "reciprocal":
        one = r.broadcast(r.known(1.0, kind), shape, [], op)
        return [r.node("stablehlo.divide", [one, given[0]], shape, kind, op)]
    dialect = "chlo" if name == "erf" else "stablehlo"
    return [r.node(f"{dialect}.{name}", given, shape, kind, op)]


# --- convolutions and windows ----------------------------------------------------------------------------------------

_CONVOLUTIONS = {  # (image, kernel, result): b batch, c channels, o filters, g groups
    "conv_2d_nchw_fchw": ("bc01", "oc01", "bo01"), "conv_2d_nhwc_hwcf": ("b01c", "01co", "b01o"),
    "conv_2d_nhwc_fhwc": ("b01c", "o01c", "b01o"), "conv_1d_ncw_fcw": ("bc0", "oc0", "bo0"),
    "conv_1d_nwc_wcf": ("b0c", "0co", "b0o"), "depthwise_conv_2d_nchw_chw": ("bc01", "o01", "bo01"),
    "depthwise_conv_2d_nhwc_hwc": ("b01c", "01o", "b01o"), "depthwise_conv_1d_ncw_cw": ("bc0", "o0", "bo0"),
    "conv_2d_ngchw_gfchw": ("bgc01", "goc01", "bgo01"), "conv_2d_ngchw_fgchw": ("bgc01", "ogc01", "bgo01"),
}  # fmt: skip


def _convolution(r: LinalgReader, op: Any, operands: list[Value], values: Values) -> list[Value]:
    del values
    name = op.name.removeprefix("linalg.")
    image, kernel, result = _CONVOLUTIONS[name]
    x, w, start = operands
    shape = list(start.shape)
    groups = 1
    if "g" in image:  # the groups of the image are folded into its channels
        groups = int(w.shape[kernel.index("g")])
        x = r.reshape(x, _merged(x.shape, image.index("g")), op)
        w = r.transpose(w, _front(kernel, "g"), op)
        w = r.reshape(w, _merged(w.shape, 0), op)
        shape = _merged(shape, result.index("g"))
        image, kernel, result = (text.replace("g", "") for text in (image, kernel, result))
    elif name.startswith("depthwise"):
        groups = int(w.shape[kernel.index("o")])
        w = r.reshape(w, [*w.shape, 1], op)
        kernel += "c"
    count = sum(c.isdigit() for c in image)
    x, padding = _without_padding(x, image)
    numbers = {
        "input_batch_dimension": image.index("b"), "input_feature_dimension": image.index("c"),
        "input_spatial_dimensions": [image.index(str(i)) for i in range(count)],
        "kernel_input_feature_dimension": kernel.index("c"), "kernel_output_feature_dimension": kernel.index("o"),
        "kernel_spatial_dimensions": [kernel.index(str(i)) for i in range(count)],
        "output_batch_dimension": result.index("b"), "output_feature_dimension": result.index("o"),
        "output_spatial_dimensions": [result.index(str(i)) for i in range(count)],
    }  # fmt: skip
    made = r.node(
        "stablehlo.convolution", [x, w], shape, start.type, op, dimension_numbers=numbers, padding=padding,
        window_strides=_steps(op, "strides", count), rhs_dilation=_steps(op, "dilations", count),
        feature_group_count=groups,
    )  # fmt: skip
    made = r.reshape(made, start.shape, op)
    return [made if is_zero(start) else r.node("stablehlo.add", [made, start], start.shape, start.type, op)]


def _steps(op: Any, name: str, count: int) -> list[int]:
    return ints(op.attributes[name]) if name in op.attributes else [1] * count


def _merged(shape: Sequence[Dim], axis: int) -> list[Dim]:
    """Two neighbouring dims as one."""
    both = (dim(shape[axis]) * dim(shape[axis + 1])).to_dim()
    return [*shape[:axis], both, *shape[axis + 2 :]]


def _front(letters: str, letter: str) -> list[int]:
    at = letters.index(letter)
    return [at, *(i for i in range(len(letters)) if i != at)]


def _without_padding(x: Value, image: str) -> tuple[Value, Any]:
    """An image that was padded with zeros around its spatial dims, and the amounts, which the convolution takes."""
    spatial = [image.index(c) for c in image if c.isdigit()]
    spatial.sort(key=lambda axis: image[axis])
    none = np.zeros((len(spatial), 2), np.int64)
    owner = x.owner
    if owner is None or owner.op != "stablehlo.pad" or not is_zero(owner.operands[1]):
        return x, none
    low, high = owner.attrs["edge_padding_low"], owner.attrs["edge_padding_high"]
    others = [i for i in range(x.rank) if i not in spatial]
    if any(low[i] or high[i] for i in others):
        return x, none
    return owner.operands[0], np.array([[low[i], high[i]] for i in spatial], np.int64)


_POOLINGS = {"nchw": "bc01", "nhwc": "b01c", "ncw": "bc0", "nwc": "b0c"}


def _pooling(r: LinalgReader, op: Any, operands: list[Value], values: Values) -> list[Value]:
    del values
    _, layout, kind = op.name.removeprefix("linalg.").split("_", 2)
    letters, (x, window, start) = _POOLINGS[layout], operands
    x = r.convert(x, start.type, op)  # the op casts each entry before it folds
    spatial = [i for i, c in enumerate(letters) if c.isdigit()]
    ones = [1] * x.rank
    sizes, steps, gaps = list(ones), list(ones), list(ones)
    strides, dilations = (_steps(op, name, len(spatial)) for name in ("strides", "dilations"))
    for number, axis in enumerate(spatial):
        size = window.shape[number]
        if not isinstance(size, int):
            raise r.unsupported(op, "a window of a symbolic size")
        sizes[axis], steps[axis], gaps[axis] = size, strides[number], dilations[number]
    fold = {"sum": "add", "max": "maximum", "min": "minimum"}[kind]
    neutral = build.reduction_identity({"sum": "add", "max": "max", "min": "min"}[kind], x.dtype)  # type: ignore[arg-type]
    begin = r.known(float(neutral) if x.floating else int(neutral), x.type)
    arguments = [Value((), x.type, name=f"arg{i}") for i in range(2)]
    inner = Node(f"stablehlo.{fold}", list(arguments), {})
    inner.results = [Value((), x.type, owner=inner, name="0")]
    made = r.node(
        "stablehlo.reduce_window", [x, begin], start.shape, x.type, op, window_dimensions=sizes, window_strides=steps,
        window_dilations=gaps, padding=np.zeros((x.rank, 2), np.int64),
    )  # fmt: skip
    assert made.owner is not None
    made.owner.regions = [Body(arguments, [inner], inner.results)]
    if splat(start) == neutral:
        return [made]
    return [r.node(f"stablehlo.{fold}", [made, start], start.shape, start.type, op)]


RULES: Mapping[str, Rule] = {
    "arith.constant": _constant, "tensor.dim": _dim, "affine.apply": _apply, "cf.assert": _assert, "func.call": _call,
    "ml_program.global_load_const": _global, "ml_program.global_load": _global,
    "tensor.empty": _empty, "tensor.splat": _splat, "tensor.from_elements": _from_elements, "tensor.cast": _cast,
    "tensor.generate": _generate, "tensor.collapse_shape": _collapse, "tensor.expand_shape": _expand,
    "tensor.reshape": _reshape, "tensor.extract_slice": _extract_slice, "tensor.insert_slice": _insert_slice,
    "tensor.concat": _concat, "tensor.pad": _pad, "tensor.extract": _extract,
    "linalg.fill": _fill, "linalg.transpose": _transpose, "linalg.broadcast": _broadcast,
    "linalg.generic": generics.read_generic, "linalg.map": generics.read_map, "linalg.reduce": generics.read_reduce,
    **{f"linalg.{name}": generics.read_product for name in generics.PRODUCTS},
    **{f"linalg.{name}": _elementwise for name in _NAMED},
    **{f"linalg.{name}": _convolution for name in _CONVOLUTIONS},
    **{f"linalg.pooling_{layout}_{kind}": _pooling for layout in _POOLINGS for kind in ("sum", "max", "min")},
}  # fmt: skip
"""Every op that is read, beside arith on sizes."""


def read_linalg(model: MlirModel, graph: Graph, values: Sequence[Value], constants: Constants) -> None:
    """Fills the graph from the function, whose arguments have these values. UnsupportedOperatorError with the line."""
    graph.returned = LinalgReader(model, graph, constants, RULES).function(model.function, list(values))
