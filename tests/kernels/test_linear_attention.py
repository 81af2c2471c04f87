"""linear_attention on the CPU against float64: its forms, sequences that begin, go on, end early or read nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from linear_attention_cases import FORMS, answer, assert_close, given, spec

SPECS = {
    **{form: spec(f"k{i}", form) for i, form in enumerate(FORMS)},
    "static": spec("static", "delta rule", batch=2, steps=1),
    "apart": spec("apart", "mamba 2", apart=3),
}


@pytest.fixture(scope="module")
def kernels(build: Callable[..., Any], isa: str) -> Any:
    return build(list(SPECS.values()), isa)


@pytest.mark.parametrize("name", SPECS)
def test_every_form_equals_float64(kernels: Any, name: str) -> None:
    made = SPECS[name]
    for batch, steps in ((2, 1),) if name == "static" else ((1, 1), (4, 1), (4, 13), (2, 40), (3, 0)):
        arrays = given(made, batch, steps)
        state, out = answer(made, arrays)
        symbols = (batch, steps) if made.symbols else ()
        found = kernels.run_both(made.name, lambda arrays=arrays: [each.copy() for each in arrays], symbols)
        assert_close(found[0], state)
        assert_close(found[-1], out)
        idle = slice(2, 3) if batch > 2 and steps else slice(batch, None)
        assert np.array_equal(found[0][idle], arrays[0][idle])  # to the bit


def test_cuts_of_a_text_give_the_same_bits(kernels: Any) -> None:
    """13 tokens at once, or 6 and 7: a token's arithmetic depends on nothing but the state before it."""
    made = SPECS["delta rule"]
    whole = given(made, 1, 13)
    names = [operand.name for operand in made.operands]
    parts = []
    for begin, end in ((0, 6), (6, 13)):
        part = [each[:, begin:end] if each.ndim > 2 and names[i] != "state" else each for i, each in enumerate(whole)]
        parts.append([np.ascontiguousarray(each) for each in part])
        parts[-1][names.index("counts")] = np.array([end - begin])
    kernels.run(made.name, whole, (1, 13), threads=1)
    parts[0][0] = state = given(made, 1, 13)[0]
    kernels.run(made.name, parts[0], (1, 6), threads=1)
    parts[1][0] = state
    kernels.run(made.name, parts[1], (1, 7), threads=1)
    assert np.array_equal(state, whole[0])
    assert np.array_equal(np.concatenate([parts[0][-1], parts[1][-1]], 1), whole[-1])
