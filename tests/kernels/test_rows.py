"""Descriptions of row kernels: what an equation may say, and how each target writes it."""

from __future__ import annotations

import pytest

from qcompiler.kernels.cpu.vector import VECTOR_FORM
from qcompiler.kernels.rows import Fold, Keep, Rows, Value, expression, names_of, unwrapped
from qcompiler.kernels.scalar import SCALAR_FORM

NAMES = {"x": "v", "top": "t", "count": "3.0f"}


def test_an_equation_is_written_in_the_words_of_each_target() -> None:
    assert expression("exp(x - top) * 2", NAMES, SCALAR_FORM) == "qc_exp(v - t) * 2.0f"
    assert expression("exp(x - top) * 2", NAMES, VECTOR_FORM) == "vexp(v - t) * vset(2.0f)"
    assert expression("1 / sqrt(x / count + top)", NAMES, SCALAR_FORM) == "1.0f / sqrtf((v / 3.0f) + t)"


def test_operations_keep_their_order() -> None:
    """Each rounds: (x - top) - x is not x - (top - x)."""
    assert expression("x - (top - x)", NAMES, SCALAR_FORM) == "v - (t - v)"
    assert expression("x - top - x", NAMES, SCALAR_FORM) == "(v - t) - v"
    assert expression("(x - top) * (x + top)", NAMES, SCALAR_FORM) == "(v - t) * (v + t)"


@pytest.mark.parametrize("wrong", ["x ** 2", "y + 1", "x[0]", "round_up(x)", "exp(x, top)", "-x", "x + 1.5", "'x'"])
def test_what_is_no_equation_is_an_error_that_quotes_it(wrong: str) -> None:
    with pytest.raises(ValueError, match=r"row equation .* is outside the grammar"):
        expression(wrong, NAMES, SCALAR_FORM)


def test_only_parentheses_around_the_whole_vanish() -> None:
    assert [unwrapped(text) for text in ("(a + b)", "(a) + (b)", "f(a)", "a", "((a) + b)")] == [
        "a + b", "(a) + (b)", "f(a)", "a", "(a) + b",
    ]  # fmt: skip


def test_names_are_values_and_not_functions() -> None:
    assert names_of("exp(x - top) * scale") == {"x", "top", "scale"}


def test_x_is_gone_after_a_value_that_stands_for_it() -> None:
    """A target may hold the kept value where x was."""
    steps = (Fold("top", "max", "x"), Keep("power", "exp(x - top)"), Fold("sum", "sum", "power"))
    Rows("", 2, 3, (*steps, Value("scale", "1 / sum")), "power * scale", 1)
    with pytest.raises(ValueError, match="'x / sum' reads x, which an earlier step has replaced"):
        Rows("", 2, 3, steps, "x / sum", 1)
    with pytest.raises(ValueError, match="'x' reads x"):
        Rows("", 2, 3, (*steps[:2], Fold("sum", "sum", "x")), "power / sum", 1)
