"""linear_attention on the simulated device against float64, in any order of threads, within the arrays."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from linear_attention_cases import FORMS, answer, assert_close, given, spec

from qcompiler.kernels.cuda import linear_attention

SPECS = {
    **{form: spec(f"k{i}", form) for i, form in enumerate(FORMS)},
    "static": spec("static", "delta rule", batch=2, steps=1),
    "apart": spec("apart", "mamba 2", apart=3),
}


@pytest.fixture(scope="module")
def kernels(sim_module: Callable[..., Any]) -> Any:
    return sim_module(list(SPECS.values()))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "delta rule" else pytest.mark.slow) for name in SPECS]
)
def test_every_form_equals_float64(kernels: Any, name: str) -> None:
    made = SPECS[name]
    for batch, steps in ((2, 1),) if name == "static" else ((4, 1), (4, 9), (1, 20)):
        for order in (0, 7):
            arrays = given(made, batch, steps)
            state, out = answer(made, arrays)
            found = kernels.run(made.name, arrays, (batch, steps) if made.symbols else (), seed=order)
            assert_close(found[0], state)
            assert_close(found[1], out)
            idle = slice(2, 3) if batch > 2 else slice(batch, None)
            assert np.array_equal(found[0][idle], arrays[0][idle])


def test_the_text_of_a_long_row_stays_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program file may name any depth; a loop over 32,768 registers must not be unrolled."""
    monkeypatch.setitem(FORMS, "long", {"width": 1, "depth": 1 << 20})
    text = linear_attention.emit(spec("long", "long"), "sm_90").text
    assert "float s[32768];" in text
    assert set(re.findall(r"#pragma unroll(.*)\n *for \(int i = ", text)) == {" 8"}
