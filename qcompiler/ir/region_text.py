"""Regions of torch operators as MLIR attributes, so that dumps show them as readable text.

{inputs = 1 : i64, ops = [{target = "aten._fft_r2c.default", args = [{v = 0 : i64}, [1 : i64], 0 : i64, true]}], …}
"""

from __future__ import annotations

from typing import Any

import msgspec
from xdsl.dialects.builtin import (
    ArrayAttr,
    DictionaryAttr,
    FloatAttr,
    IntegerAttr,
    IntegerType,
    StringAttr,
    UnitAttr,
    f64,
    i1,
    i64,
)
from xdsl.ir import Attribute

from qcompiler.errors import PlanError
from qcompiler.plan.torch_regions import TorchRegion, region_from_json, region_to_json


def attribute_of(region: TorchRegion) -> DictionaryAttr:
    """The region as a dictionary."""
    found = _attribute(msgspec.json.decode(region_to_json(region)))
    assert isinstance(found, DictionaryAttr)
    return found


def region_of(attribute: DictionaryAttr) -> TorchRegion:
    """The region that a dictionary holds. PlanError if it is not a region."""
    return region_from_json(msgspec.json.encode(_value(attribute)).decode())


def _attribute(value: Any) -> Attribute:
    match value:
        case None:
            return UnitAttr()
        case bool():
            return IntegerAttr(int(value), i1)
        case int():
            return IntegerAttr(value, i64)
        case float():
            return FloatAttr(value, f64)
        case str():
            return StringAttr(value)
        case list():
            return ArrayAttr([_attribute(item) for item in value])
        case _:
            return DictionaryAttr({name: _attribute(item) for name, item in value.items()})


def _value(attribute: Attribute) -> Any:
    match attribute:
        case UnitAttr():
            return None
        case IntegerAttr():
            is_truth = isinstance(attribute.type, IntegerType) and attribute.type.width.data == 1
            return bool(attribute.value.data) if is_truth else attribute.value.data
        case FloatAttr():
            return attribute.value.data
        case StringAttr():
            return attribute.data
        case ArrayAttr():
            return [_value(item) for item in attribute]
        case DictionaryAttr():
            return {name: _value(item) for name, item in attribute.data.items()}
    raise PlanError(f"{attribute} is no part of a region of torch operators")
