"""MLIR attributes of StableHLO as plain Python values."""

from __future__ import annotations

import re
from typing import Any

import ml_dtypes
import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from qcompiler.frontends.jax.graph import NUMPY
from qcompiler.plan.dims import Dim

_NUMBERS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "#stablehlo.dot<": (
        stablehlo.DotDimensionNumbers,
        ("lhs_batching_dimensions", "rhs_batching_dimensions", "lhs_contracting_dimensions",
         "rhs_contracting_dimensions"),
    ),
    "#stablehlo.gather<": (
        stablehlo.GatherDimensionNumbers,
        ("offset_dims", "collapsed_slice_dims", "operand_batching_dims", "start_indices_batching_dims",
         "start_index_map", "index_vector_dim"),
    ),
    "#stablehlo.scatter<": (
        stablehlo.ScatterDimensionNumbers,
        ("update_window_dims", "inserted_window_dims", "input_batching_dims", "scatter_indices_batching_dims",
         "scattered_dims_to_operand_dims", "index_vector_dim"),
    ),
    "#stablehlo.conv<": (
        stablehlo.ConvDimensionNumbers,
        ("input_batch_dimension", "input_feature_dimension", "input_spatial_dimensions",
         "kernel_input_feature_dimension", "kernel_output_feature_dimension", "kernel_spatial_dimensions",
         "output_batch_dimension", "output_feature_dimension", "output_spatial_dimensions"),
    ),
}  # fmt: skip
"""The fields of dimension numbers, by the beginning of their text."""


def attributes_of(op: Any) -> dict[str, Any]:
    """Every attribute of an operation by name."""
    return {named: value_of(op.attributes[named]) for named in _names(op)}


def _names(op: Any) -> list[str]:
    return [item if isinstance(item, str) else item.name for item in op.attributes]


def value_of(attribute: Any) -> Any:
    """Numbers, texts, lists, NumPy arrays; dimension numbers as a dict; the word of an enum."""
    if isinstance(attribute, ir.BoolAttr | ir.IntegerAttr | ir.StringAttr | ir.FloatAttr | ir.FlatSymbolRefAttr):
        return attribute.value
    if isinstance(attribute, ir.DenseI64ArrayAttr | ir.DenseI32ArrayAttr | ir.DenseBoolArrayAttr):
        return list(attribute)
    if isinstance(attribute, ir.ArrayAttr):
        return [value_of(each) for each in attribute]
    if isinstance(attribute, ir.DictAttr):
        return {attribute[i].name: value_of(attribute[i].attr) for i in range(len(attribute))}
    if isinstance(attribute, ir.DenseElementsAttr | ir.DenseResourceElementsAttr):
        return array_of(attribute)
    text = str(attribute)
    for start, (cls, fields) in _NUMBERS.items():
        if text.startswith(start):
            numbers = cls(attribute)
            return {field: _plain(getattr(numbers, field)) for field in fields}
    word = re.fullmatch(r"#\w+<\w+ (\w+)>", text)
    return word[1] if word else text


def _plain(value: Any) -> Any:
    return value if isinstance(value, int) else list(value)


def array_of(attribute: Any) -> np.ndarray[Any, Any]:
    """The values of a dense constant. bf16 and i1 have no buffer of their own in the bindings."""
    name, shape = element_name(attribute.type), tuple(attribute.type.shape)
    if isinstance(attribute, ir.DenseResourceElementsAttr):
        buffer: Any = attribute
        return np.frombuffer(bytes(memoryview(buffer)), NUMPY[name]).reshape(shape)
    if attribute.is_splat:
        return np.full(shape, value_of(attribute.get_splat_value()), NUMPY[name])
    if name == "bf16":
        return _bf16_of(str(attribute)).reshape(shape)
    return np.array(attribute).astype(NUMPY[name]).reshape(shape)


def _bf16_of(text: str) -> np.ndarray[Any, Any]:
    """`dense<[1.5, 0x7F80]> : …` or `dense<"0x803F…"> : …`; the bindings give no access to values of this type."""
    found = re.match(r"dense<(.*)> : tensor<", text, re.DOTALL)
    assert found is not None
    if found[1].startswith('"0x'):
        return np.frombuffer(bytes.fromhex(found[1][3:-1]), ml_dtypes.bfloat16)
    made = np.zeros(0, ml_dtypes.bfloat16)
    for word in re.findall(r"0x[0-9A-Fa-f]+|[-+.\dEe]+", found[1]):
        bits = np.array([int(word, 16)], np.uint16) if word.startswith("0x") else None
        one = bits.view(ml_dtypes.bfloat16) if bits is not None else np.array([float(word)], ml_dtypes.bfloat16)
        made = np.concatenate([made, one])
    return made


def element_name(type_: Any) -> str:
    """`f32`, `ui32`, `i1`."""
    return str(type_.element_type)


def static_shape(type_: Any) -> tuple[Dim | None, ...]:
    """The sizes of a tensor type; None for a dynamic one."""
    return tuple(None if type_.is_dynamic_dim(i) else type_.get_dim_size(i) for i in range(type_.rank))
