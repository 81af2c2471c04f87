"""`line_of`: scale and offset of formats whose elements are a code's value times a scale, plus an offset perhaps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from qcompiler import formats
from qcompiler.formats.integer_product import line_of

WITH_A_MINIMUM = (("q4_K", {}), ("q4_1", {}), ("q5_K", {}), ("int4", {"group": 32, "symmetric": False}))


@pytest.mark.parametrize("name", ["nf4", "fp4", "int4", "q4_0", "q6_K"])
def test_elements_are_a_value_times_the_scale(name: str) -> None:
    declaration = formats.get(name).declaration
    line = line_of(declaration)
    assert line is not None and line[1] is None
    parts = dict.fromkeys(declaration.split.per_entry, np.array([3.0], np.float32))
    for value in np.array([[-2.0], [0.0], [5.0]], np.float32):
        element = declaration.split.per_element.evaluate({"code": value, **parts}, declaration.table_arrays)
        assert element == value * line[0].evaluate(parts, declaration.table_arrays)


@pytest.mark.parametrize(("name", "params"), WITH_A_MINIMUM, ids=str)
def test_a_minimum_or_a_zero_point_is_an_offset_that_does_not_read_the_scale_of_the_code(
    name: str, params: dict[str, Any]
) -> None:
    """Powers of two, so that nothing is rounded; and a scale that is infinite where only the offset is asked for."""
    declaration = formats.get(name, **params).declaration
    line = line_of(declaration)
    assert line is not None and line[1] is not None
    parts = {each: np.array([2.0**i], np.float32) for i, each in enumerate(declaration.split.per_entry, 1)}
    for value in np.array([[0.0], [1.0], [15.0]], np.float32):
        element = declaration.split.per_element.evaluate({"code": value, **parts}, declaration.table_arrays)
        scale, offset = (each.evaluate(parts, declaration.table_arrays) for each in line)
        assert element == value * scale + offset
    if name != "int4":
        parts = {each: np.array([np.inf if each in line[0].text else 3.0], np.float32) for each in parts}
        assert np.isfinite(line[1].evaluate(parts, declaration.table_arrays)).all()
