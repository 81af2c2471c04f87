"""linear_attention on the CPU against float64: its forms, sequences that begin, go on, end early or read nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from linear_attention_cases import FORMS, LARGE, answer, assert_close, given, spec

from qcompiler.kernels.cpu import linear_attention

SPECS = {
    **{form: spec(f"k{i}", form) for i, form in enumerate(FORMS | LARGE)},
    "static": spec("static", "delta rule", batch=2, steps=1),
    "apart": spec("apart", "mamba 2", apart=3),
}


@pytest.fixture(scope="module")
def kernels(build: Callable[..., Any], isa: str) -> Any:
    """With small tasks and blocks: tasks begin inside of heads, and 13 tokens pass in several blocks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear_attention, "_TASK_ROWS", 4)
        patch.setattr(linear_attention, "_BLOCK_FLOATS", 256)
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


@pytest.mark.parametrize("name", ["delta rule", "heads in parts", "rows in memory", "mamba 2", "mamba"])
def test_cuts_of_a_text_give_the_same_bits(kernels: Any, name: str) -> None:
    """13 tokens at once, or 6, 1 and 6: a token's arithmetic depends on nothing but the state before it. A call of one
    token takes rows one by one."""
    made = SPECS[name]
    whole = given(made, 1, 13)
    names = [operand.name for operand in made.operands]
    parts = []
    for begin, end in ((0, 6), (6, 7), (7, 13)):
        of_all = ("state", "rate")
        part = [
            each[:, begin:end] if each.ndim > 1 and names[i] not in of_all else each for i, each in enumerate(whole)
        ]
        parts.append([np.ascontiguousarray(each).copy() for each in part])
        parts[-1][names.index("counts")] = np.array([end - begin])
    state = given(made, 1, 13)[0]
    for part in parts:
        part[0] = state
        kernels.run(made.name, part, (1, part[1].shape[1]), threads=1)
    kernels.run(made.name, whole, (1, 13), threads=1)
    assert np.array_equal(state, whole[0])
    assert np.array_equal(np.concatenate([part[-1] for part in parts], 1), whole[-1])


def test_a_layer_of_usual_size_equals_float64(build: Callable[..., Any], isa: str) -> None:
    """Tasks and blocks as they are: 240 rows in shares of 64, and 40 tokens in blocks of 16."""
    made = spec("usual", "heads in parts")
    kernels = build([made], isa)
    for batch, steps in ((1, 1), (2, 40)):
        arrays = given(made, batch, steps)
        state, out = answer(made, arrays)
        found = kernels.run_both(made.name, lambda arrays=arrays: [each.copy() for each in arrays], (batch, steps))
        assert_close(found[0], state)
        assert_close(found[-1], out)
