"""`factor_of`: the scale of formats whose elements are a code's value times a scale."""

from __future__ import annotations

import numpy as np
import pytest

from qcompiler import formats
from qcompiler.formats.integer_product import factor_of


@pytest.mark.parametrize("name", ["nf4", "fp4", "int4", "q4_0", "q6_K"])
def test_elements_are_a_value_times_the_factor(name: str) -> None:
    declaration = formats.get(name).declaration
    factor = factor_of(declaration)
    assert factor is not None
    parts = dict.fromkeys(declaration.split.per_entry, np.array([3.0], np.float32))
    for value in np.array([[-2.0], [0.0], [5.0]], np.float32):
        element = declaration.split.per_element.evaluate({"code": value, **parts}, declaration.table_arrays)
        assert element == value * factor.evaluate(parts, declaration.table_arrays)


@pytest.mark.parametrize("name", ["q4_K", "q4_1", "q5_K"])
def test_formats_with_a_minimum_have_none(name: str) -> None:
    assert factor_of(formats.get(name).declaration) is None
