"""Smaller sizes: one size of the module, and all its multiples, become smaller everywhere at once.

    768 -> 12 where 64 -> 1:  tensor<?x768xf32>, #qc.dims<["b*s", 768]>, static_sizes = array<i64: 1, 12, 64>

So the sizes of a head, of all heads and of a weight still fit together.  Whether the ops take them is up to the
verifier, when the candidate runs.  Weights keep their sizes: a case that reads them from a context rejects the change.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from xdsl.dialects.builtin import (
    ArrayAttr,
    DenseArrayBase,
    DictionaryAttr,
    FunctionType,
    IntegerAttr,
    ModuleOp,
    TensorType,
    i64,
)
from xdsl.ir import Attribute

from qcompiler.ir.module import RANGES
from qcompiler.ir.types import DimsAttr, QTensorType
from qcompiler.reduce.case import Case

TARGETS = (1, 2, 3, 4, 8, 16, 32, 64, 128, 256)
"""What a size may become: the smallest that works is kept. Blocks of formats have 32, 64 or 256 elements."""

Resize = Callable[[int], int]
_INTEGER = re.compile(r"(?<![\w.])\d+(?![\w.])")


def smaller(case: Case) -> Iterator[Case]:
    """Candidates with one size, and its multiples, made smaller: in types, and then in integers of attributes, too."""
    for size in sorted(_sizes(case.module), reverse=True):
        for target in TARGETS:
            if target >= size:
                break
            for integers in (False, True):
                yield case.of(_resized(case.module, _scaled(size, target), integers=integers))


def _scaled(size: int, target: int) -> Resize:
    return lambda value: value // size * target if value > 0 and value % size == 0 else value


def _sizes(module: ModuleOp) -> set[int]:
    found: set[int] = set()
    for op in module.walk():
        values = [*op.results, *(arg for region in op.regions for block in region.blocks for arg in block.args)]
        for value in values:
            kind = value.type.inner if isinstance(value.type, QTensorType) else value.type
            if isinstance(kind, TensorType):
                found.update(size for size in kind.get_shape() if size > 1)
    return found


def _resized(module: ModuleOp, resize: Resize, *, integers: bool) -> ModuleOp:
    """A copy with other sizes; `integers` says whether those in attributes (numbers of heads, axes) count as sizes."""
    copy = module.clone()
    for op in copy.walk():
        for value in [*op.results, *(arg for region in op.regions for block in region.blocks for arg in block.args)]:
            value._type = _attribute(value.type, resize, integers=False)
        for held in (op.properties, op.attributes):
            for name, attribute in held.items():
                if name != RANGES:
                    sizes = integers or name.startswith("static_")
                    held[name] = _attribute(attribute, resize, integers=sizes)
    return copy


def _attribute(attribute: Attribute, resize: Resize, *, integers: bool) -> Attribute:
    match attribute:
        case TensorType():
            encoding = _attribute(attribute.encoding, resize, integers=integers)
            return TensorType(attribute.element_type, [resize(size) for size in attribute.get_shape()], encoding)
        case QTensorType():
            inner = TensorType(attribute.inner.element_type, [resize(size) for size in attribute.shape])
            return QTensorType(inner, attribute.format, attribute.layout)
        case DimsAttr():
            entries = [_INTEGER.sub(lambda found: str(resize(int(found[0]))), str(each)) for each in attribute.dims]
            return DimsAttr.of([int(each) if each.isdecimal() else each for each in entries])
        case FunctionType():
            return _function_type(attribute, resize)
        case ArrayAttr():
            return ArrayAttr([_attribute(each, resize, integers=integers) for each in attribute])
        case DictionaryAttr():
            return DictionaryAttr({k: _attribute(v, resize, integers=integers) for k, v in attribute.data.items()})
        case DenseArrayBase() if integers and attribute.elt_type == i64:
            return DenseArrayBase.from_list(i64, [resize(int(value)) for value in attribute.get_values()])
        case IntegerAttr() if integers and attribute.type == i64:
            return IntegerAttr(resize(attribute.value.data), i64)
        case _:
            return attribute


def _function_type(kind: FunctionType, resize: Resize) -> FunctionType:
    inputs, outputs = (
        [_attribute(each, resize, integers=False) for each in side] for side in (kind.inputs, kind.outputs)
    )
    return FunctionType.from_lists(inputs, outputs)


__all__ = ["smaller"]
