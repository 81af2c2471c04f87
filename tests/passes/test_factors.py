"""Factors of dims: a reshape finds which parts of dims are the same part of another tensor's."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xdsl.ir.affine import AffineConstantExpr, AffineDimExpr

from qcompiler.passes.views.factors import Factor, fresh, leaves, listing, reshaped, size_of
from qcompiler.plan.dims import dim


def sizes(dims: Any) -> list[list[Any]]:
    return [[factor.size for factor in factors] for factors in leaves(dims)]


def flat(dims: Any) -> list[Factor]:
    return [factor for factors in dims for factor in factors]


def test_a_split_of_one_tensor_splits_the_dim_of_every_other() -> None:
    whole = fresh((4, 6))
    turned = [whole[1], whole[0]]
    split = reshaped(flat(whole), (2, 2, 6))
    assert split is not None and sizes(split) == [[2], [2], [6]]
    assert sizes(whole) == [[2, 2], [6]] and sizes(turned) == [[6], [2, 2]]
    assert leaves(turned)[1] == flat(leaves(split[:2]))  # the same parts, not parts of the same size


def test_a_dim_may_be_a_whole_factor_and_a_part_of_the_next() -> None:
    whole = fresh((2, 3, 4))
    joined = reshaped(flat(whole), (12, 2))
    assert joined is not None and sizes(joined) == [[2, 3, 2], [2]] and sizes(whole) == [[2], [3], [2, 2]]
    assert size_of(leaves(joined)[0]) == 12


@pytest.mark.parametrize(
    ("shape", "other"), [((4, 3), (6, 2)), ((0, 4), (4, 0)), ((4,), (2,)), ((4,), (4, 2)), (("b", 3), (3, "b"))]
)
def test_what_is_no_product_of_factors_is_none(shape: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    assert reshaped(flat(fresh(shape)), other) is None


def test_sizes_may_be_symbols_and_ones_hold_nothing() -> None:
    whole = fresh(("b", 1, 8))
    assert sizes(whole) == [["b"], [], [8]]
    joined = reshaped(flat(whole), ("4*b", 1, 2))
    assert joined is not None and sizes(joined) == [["b", 4], [], [2]]
    assert dim(size_of(leaves(joined)[0])) == dim("4*b")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.data())
def test_joining_and_splitting_again_gives_the_dims_that_were(parts: list[int], data: Any) -> None:
    whole = fresh(parts)
    cut = data.draw(st.integers(0, len(parts)))
    joined = [int(size_of(flat(whole[:cut]))), int(size_of(flat(whole[cut:])))]
    found = reshaped(flat(whole), joined)
    assert found is not None and flat(leaves(found)) == flat(leaves(whole))
    again = reshaped(flat(found), parts)
    assert again is not None and leaves(again) == leaves(whole)


def test_a_tensor_that_is_read_whole_has_its_dims_listed() -> None:
    d0, d1, zero = AffineDimExpr(0), AffineDimExpr(1), AffineConstantExpr(0)
    assert listing((d1, zero, d0), (3, 1, 2), (2, 3)) == (1, 0)
    assert listing((d0, d0), (2, 2), (2, 2)) is None  # a diagonal
    assert listing((d0,), (2,), (2, 3)) is None  # repeats along d1
    assert listing((d0, d1), (1, 3), (2, 3)) is None  # is read at more places than it has
