"""Dimension expressions: arithmetic is that of integers, texts are canonical, bounds are sound, C computes the same."""

from __future__ import annotations

import ctypes
import itertools
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qcompiler.errors import DimError
from qcompiler.plan.dims import Expr, contiguous_strides, dim, never_negative, parse, product

SYMBOLS = ("b", "s", "n")
RANGES = {"b": (1, 4), "s": (1, 9), "n": (0, 5)}
BINDINGS = [dict(zip(RANGES, point, strict=True)) for point in itertools.product((1, 3, 4), (1, 2, 7, 9), (0, 5))]

leaves = st.one_of(st.integers(-6, 9).map(Expr.constant), st.sampled_from(SYMBOLS).map(Expr.symbol))
positive = st.one_of(st.integers(1, 7).map(Expr.constant), st.sampled_from(("b", "s")).map(Expr.symbol))


def grow(inner: st.SearchStrategy[Expr]) -> st.SearchStrategy[Expr]:
    pair = st.tuples(inner, inner)
    divided = st.tuples(inner, positive)
    return st.one_of(
        pair.map(lambda p: p[0] + p[1]),
        pair.map(lambda p: p[0] - p[1]),
        pair.map(lambda p: p[0] * p[1]),
        pair.map(lambda p: p[0].maximum(p[1])),
        pair.map(lambda p: p[0].minimum(p[1])),
        divided.map(lambda p: p[0] // p[1]),
        divided.map(lambda p: p[0] % p[1]),
    )


exprs = st.recursive(leaves, grow, max_leaves=6)


@given(exprs, exprs, positive)
def test_arithmetic_is_that_of_integers(x, y, d):
    for symbols in BINDINGS:
        a, b, c = (e.evaluate(symbols) for e in (x, y, d))
        assert (x + y).evaluate(symbols) == a + b
        assert (x - y).evaluate(symbols) == a - b
        assert (x * y).evaluate(symbols) == a * b
        assert (x // d).evaluate(symbols) == a // c
        assert (x % d).evaluate(symbols) == a % c
        assert x.maximum(y).evaluate(symbols) == max(a, b)
        assert x.minimum(y).evaluate(symbols) == min(a, b)


@given(exprs)
def test_text_is_read_back_as_the_same_expression(x):
    assert parse(str(x)) == x
    assert str(parse(str(x))) == str(x)
    assert dim(x.to_dim()) == x


@given(exprs, exprs, exprs)
def test_equal_polynomials_have_one_text(x, y, z):
    assert str(x * (y + z)) == str(y * x + x * z)
    assert str(x + y - x) == str(y)


@given(exprs)
def test_bounds_hold_at_every_point(x):
    low, high = x.bounds(RANGES)
    tight_low, tight_high = x.tight_bounds(RANGES)
    assert low <= tight_low
    assert tight_high <= high
    for symbols in BINDINGS:
        assert tight_low <= x.evaluate(symbols) <= tight_high


@settings(max_examples=300, deadline=None)
@given(exprs, exprs)
def test_what_is_never_negative_is_so_for_every_value(x, y):
    for each in (x, y - x, x.maximum(y) - x, y - x.minimum(y), 3 * y - 2 * (x // 3)):
        try:
            proven = never_negative(each, RANGES)
        except DimError:
            continue
        if proven:
            assert min(each.evaluate(binding) for binding in BINDINGS) >= 0, each


@pytest.mark.parametrize(
    "text",
    [
        "320*n - (48*((n + 2) // 3) + 304*n - 32)",  # x[:, :, ::3]: the last byte of a strided slice
        "s - min(s, 512)",
        "4*b*s - 4*b*min(s, 512)",
        "max(s, 16) - s",
        "s - 2*(s // 2)",
        "s - min(s, 512) // 2 - s // 2",
        "min(s, 512) - 1",
    ],
)
def test_ends_of_slices_are_proven_to_lie_inside(text):
    assert never_negative(parse(text), {"b": (1, 8), "s": (1, 4096), "n": (1, 100)})


@pytest.mark.parametrize(
    "text", ["s - min(s, 512) - 1", "2*(s // 2) - s", "min(s, 512) - s", "s // 3 - 1", "s - max(s, 2)"]
)
def test_ends_that_lie_outside_somewhere_are_not_proven(text):
    assert not never_negative(parse(text), {"s": (1, 4096)})


def test_tight_bounds_are_exact_for_view_ends():
    ranges = {"b": (1, 8), "s": (1, 512)}
    assert parse("384*b*s - 384*s + 384").tight_bounds(ranges) == (384, 384 * 8 * 512 - 384 * 512 + 384)
    assert parse("s*s - s").tight_bounds(ranges) == (0, 512 * 511)
    assert parse("s*s - s").bounds(ranges)[0] < 0  # which is why tight_bounds exists


@given(exprs, exprs)
def test_substitution_is_evaluation_in_two_steps(x, y):
    for symbols in BINDINGS[::5]:
        inner = y.evaluate(symbols)
        if inner <= 0:  # b and s also divide, so they stay positive
            continue
        assert x.substitute({"s": y}).evaluate(symbols) == x.evaluate({**symbols, "s": inner})


@given(exprs, positive)
def test_exact_division_undoes_multiplication(x, d):
    assert (x * d).divide_exact(d) == x


@given(exprs)
def test_symbols_are_all_that_evaluation_needs(x):
    needed = x.symbols()
    x.evaluate({name: value for name, value in BINDINGS[0].items() if name in needed})
    for name in needed:
        with pytest.raises(DimError, match=name):
            x.evaluate({other: 1 for other in SYMBOLS if other != name})


SAMPLES = [
    "0", "-3", "b", "b*s", "2*b*s + 384", "(s - 5)//2", "(n - 7)%3", "max(b, s - 3)", "min(n, 4)*s",
    "((s + 15)//16)*16", "max(min(b, n), s//2) - b*b", "(b*s - 9)//(s)", "-n//4 + (0 - n)%5",
]  # fmt: skip


def test_c_text_computes_the_same_as_python(tmp_path: Path):
    compiler = shutil.which("g++")
    assert compiler is not None, "this test needs a C++ compiler (Debian package g++)"
    helpers = """
#include <cstdint>
static inline int64_t qc_min(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t qc_max(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t qc_floordiv(int64_t a, int64_t b) { return a / b - (a % b != 0 && (a < 0) != (b < 0)); }
static inline int64_t qc_mod(int64_t a, int64_t b) { return a - qc_floordiv(a, b) * b; }
"""
    cases = "\n".join(f"case {i}: return {parse(text).to_c()};" for i, text in enumerate(SAMPLES))
    arguments = "int which, int64_t b, int64_t s, int64_t n"
    body = f'extern "C" int64_t f({arguments}) {{ switch (which) {{ {cases} }} return 0; }}'
    source, library = tmp_path / "dims.cpp", tmp_path / "dims.so"
    source.write_text(helpers + body)
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", str(source), "-o", str(library)], check=True)
    function = ctypes.CDLL(str(library)).f
    function.restype = ctypes.c_int64
    function.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64]
    for i, text in enumerate(SAMPLES):
        for symbols in BINDINGS:
            assert function(i, *symbols.values()) == parse(text).evaluate(symbols), text


def test_c_helpers_are_those_of_the_kernels():
    header = (Path(__file__).parents[2] / "kernels" / "cpu" / "task.h").read_text()
    for name in ("qc_min", "qc_max", "qc_floordiv", "qc_mod"):
        assert f"static inline int64_t {name}(" in header


@settings(max_examples=50)
@given(st.lists(st.one_of(st.integers(1, 9), st.sampled_from(SYMBOLS)), max_size=4))
def test_contiguous_strides_are_products_of_inner_sizes(shape):
    strides = contiguous_strides(tuple(shape))
    for index, stride in enumerate(strides):
        assert dim(stride) == product(shape[index + 1 :])


@pytest.mark.parametrize(
    "text", ["", "a b", "f(x)", "1.5", "a**2", "a/b", "max(a)", "max(a, b, c)", "True", "a if b else c", "x" * 5000]
)
def test_other_texts_are_refused(text):
    with pytest.raises(DimError):
        parse(text)


def test_division_by_zero_is_refused():
    with pytest.raises(DimError, match="zero"):
        parse("a // 0")
    with pytest.raises(DimError, match="zero"):
        parse("a // b").evaluate({"a": 4, "b": 0})
    with pytest.raises(DimError, match="divisor"):
        parse("a % b").bounds({"a": (0, 4), "b": (0, 4)})
    with pytest.raises(DimError, match="remainder"):
        parse("a + 1").divide_exact(2)
