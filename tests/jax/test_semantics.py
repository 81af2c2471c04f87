"""Corners of StableHLO's meaning: what a short rule would get wrong without an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import qcompiler as qc
from qcompiler.errors import UnsupportedOperatorError
from qcompiler.frontends.jax.frontend import import_jax

X = np.random.default_rng(3).standard_normal((3, 5)).astype(np.float32)
IOTA = lax.broadcasted_iota


def pair(axis: int, region: Callable[[Any, Any], Any]) -> Callable[[Any], Any]:
    """A lax.reduce of the values and their positions along `axis`."""
    start = (jnp.float32(-jnp.inf), jnp.int32(0))
    return lambda x: lax.reduce((x, IOTA(jnp.int32, x.shape, axis)), start, region, [1])


def sums_positions(a: Any, b: Any) -> Any:
    return jnp.where(a[0] > b[0], a[0], b[0]), a[1] + b[1]


def keeps_the_last(a: Any, b: Any) -> Any:
    return jnp.where(a[0] > b[0], a[0], b[0]), jnp.where(a[0] > b[0], a[1], b[1])


@pytest.mark.parametrize("region", [sums_positions, keeps_the_last])
def test_a_reduction_of_two_tensors_is_no_argmax_unless_it_has_its_region(region: Any) -> None:
    with pytest.raises(UnsupportedOperatorError, match=r"jnp\.argmax or jnp\.argmin.*test_semantics\.py:\d+"):
        import_jax(pair(1, region), (X,))


def test_an_extreme_of_other_positions_is_no_argmax() -> None:
    def extreme(a: Any, b: Any) -> Any:
        wins = (a[0] > b[0]) | jnp.not_equal(a[0], a[0])
        ties = wins | ((a[0] == b[0]) & (a[1] < b[1]))
        return jnp.where(wins, a[0], b[0]), jnp.where(ties, a[1], b[1])

    import_jax(pair(1, extreme), (X,))
    with pytest.raises(UnsupportedOperatorError, match="neither argmax nor argmin"):
        import_jax(pair(0, extreme), (X,))


def windows(fold: Any, *, padded: bool) -> Callable[[Any], Any]:
    """Of the whole axis, and of two elements."""
    low = 4 if padded else 0

    def folds(x: Any) -> list[Any]:
        start = np.array([3]).astype(x.dtype)[0]
        return [lax.reduce_window(x, start, fold, (1, n), (1, 1), ((0, 0), (low, 0))) for n in (5, 2)]

    return folds


def test_a_fold_of_windows_does_not_lose_its_start(check: Any) -> None:
    """XLA leaves padding out, and StableHLO gives it the start: to an extreme it is the same."""
    for fold, padded in ((lax.add, False), (lax.mul, False), (lax.max, True), (lax.min, True)):
        folds = windows(fold, padded=padded)
        check(folds, X)
        check(lambda x, folds=folds: folds(x.astype(jnp.uint8)), np.abs(X) * 99)
    for fold in (lax.add, jnp.logaddexp):
        with pytest.raises(UnsupportedOperatorError, match="another start"):
            import_jax(windows(fold, padded=True), (X,))


def test_running_folds_of_each_kind(check: Any) -> None:
    check(lambda x: lax.cumsum(x.astype(jnp.uint32), 1).astype(jnp.int32), np.abs(X) * 9)
    check(lambda x: lax.cumlogsumexp(x, 1, reverse=True), X)


def test_another_sum_of_exponentials_is_no_logaddexp() -> None:
    def other(a: Any, b: Any) -> Any:  # the ops of logaddexp on other operands
        d = a - b
        return jnp.where(jnp.not_equal(d, d), a + b, a + jnp.log1p(jnp.exp(-jnp.abs(jnp.maximum(d, b)))))

    with pytest.raises(UnsupportedOperatorError, match="another function"):
        import_jax(lambda x: lax.reduce_window(x, np.float32(-np.inf), other, (1, 5), (1, 1), ((0, 0), (4, 0))), (X,))


def test_negative_padding_of_windows_cuts(check: Any) -> None:
    check(lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 2), (1, 1), ((0, 0), (-1, 2))), X)


def test_constant_integers_divide_as_the_kernels_do(interpreted: Any) -> None:
    least = -(2**31)

    def divides(x: Any) -> Any:
        a, b = jnp.array([6, 8, -7, least, 7], jnp.int32), jnp.array([2, 0, 2, 2, -2], jnp.int32)
        u, v = jnp.array([6, 8], jnp.uint8), jnp.array([4, 0], jnp.uint8)
        return x + lax.div(a, b), lax.rem(a, b), lax.div(u, v).astype(jnp.int32)

    x = np.zeros(5, np.int32)  # XLA itself ends with SIGFPE when it folds these
    found = interpreted(import_jax(divides, (x,)), x)
    assert [f.tolist() for f in found] == [[3, -1, -3, least // 2, -3], [0, 8, -1, 0, 1], [1, 255]]


def test_symbolic_sizes_divide_towards_zero_and_wrap_in_narrow_types(check: Any) -> None:
    def sizes(x: Any) -> Any:
        n = jnp.asarray(x.shape[0])
        return lax.div(n - 4, 2), lax.rem(n - 4, 2), (n * 100).astype(jnp.int8)

    check(sizes, np.ones((3, 2), np.float32), dynamic_shapes={"x": {0: ("b", 1, 8)}},
          others=((np.ones((7, 2), np.float32),),))  # fmt: skip


def test_nested_loops_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qcompiler.frontends.jax.reader.MAX_NODES", 300)

    def nested(x: Any) -> Any:
        return lax.fori_loop(0, 20, lambda i, a: lax.fori_loop(0, 20, lambda j, b: b * 0.5, a), x)

    with pytest.raises(UnsupportedOperatorError, match=r"nested loops multiply.*call the program once"):
        import_jax(nested, (X,))


def test_a_scan_over_layer_numbers_finds_each_layer(check: Any) -> None:
    stack = np.random.default_rng(0).standard_normal((20, 32, 32)).astype(np.float32) / 6
    x = np.ones((2, 32), np.float32)

    def layers(p: Any, x: Any) -> Any:
        return lax.scan(lambda h, i: (h @ p["w"][i], None), x, jnp.arange(20))[0]

    found = {row.parameters[0]: row.format for row in import_jax(layers, ({"w": stack}, x), None, "nf4").ledger}
    assert found["w.19"] == "nf4:block=64" and len(found) == 20, found


def test_floats_saturate_as_unsigned_integers(check: Any) -> None:
    x = np.array([300, -5, np.nan, 1e10, np.inf, 254.7], np.float32)
    check(lambda x: (x.astype(jnp.uint8), x.astype(jnp.uint16).astype(jnp.int32)), x)
    check(lambda x: x.astype(jnp.uint32).astype(jnp.float32), x)
    check(lambda x: (x.astype(jnp.int8), x.astype(jnp.int32)), x)
    check(lambda x: x.astype(jnp.bfloat16).astype(jnp.uint8), x)


def extremes(x: Any) -> Any:
    """Every fold that orders its elements."""
    at, some = jnp.array([0, 2, 0]), x[:, ::-1][jnp.array([1, 1, 0])]
    window = (1, 2), (1, 1), "SAME"
    smallest, largest = np.array([0], x.dtype)[0], np.array([-1]).astype(x.dtype)[0]
    found = (
        x.max(1), x.min(0), jnp.argmax(x, 1), jnp.argmin(x, 0), lax.cummax(x, 1), lax.cummin(x, 0, reverse=True),
        x.at[at].max(some), x.at[at].min(some), x.at[...].max(some), lax.clamp(x[:1, :1].max(), x, x.max()),
        lax.reduce_window(x, smallest, lax.max, *window), lax.reduce_window(x, largest, lax.min, *window),
        lax.reduce_window(x, x.dtype.type(9), lax.max, *window), jnp.max(x, initial=x.dtype.type(200)),
        *lax.top_k(x, 2),
    )  # fmt: skip
    return [y.astype(jnp.int32) for y in found]


@pytest.mark.parametrize("kind", ["uint32", pytest.param("uint16", marks=pytest.mark.slow)])
def test_extremes_of_unsigned_integers(kind: str, check: Any) -> None:
    """The IR holds them as signed ones: half of these have the sign bit set."""
    bits = np.random.default_rng(0).integers(-(2**31), 2**31, (3, 5)).astype(np.int32)
    check(lambda x: extremes(x.astype(kind)), bits, tolerance=0.0)


def test_a_product_without_rows_is_an_empty_constant(check: Any) -> None:
    result = check(lambda p, x: (x[:0] @ p["w"], x @ p["w"]), {"w": X.T}, X)
    assert str(result.module).count("qc.linear") == 1


def test_a_scatter_subtracts(check: Any) -> None:
    check(lambda x: x.at[jnp.array([2, 0, 2])].subtract(x[:1] * 2), X)
    check(
        lambda x: x.at[jnp.array([2, 0, 2])].subtract(jnp.array([[3], [4], [5]], jnp.int32)), (X * 9).astype(np.int32)
    )


MORE_BITS = [pytest.param(each, marks=pytest.mark.slow) for each in ((8, 7), (8, 23), (4, 3), (3, 10), (6, 23))]


@pytest.mark.parametrize("bits", [(5, 10), *MORE_BITS])
def test_a_reduced_precision_has_the_bits_of_xla(check: Any, bits: tuple[int, int]) -> None:
    x = np.array(
        [1e-6, -1e-6, 2**-14, 6.1e-5, 1.0003, 65519, 65520, 7e4, 0, -0.0, np.nan, -np.inf, 0.3, 7.99], np.float32
    )
    check(lambda x: lax.bitcast_convert_type(lax.reduce_precision(x, *bits)[:10], jnp.int32), x)
    check(lambda x: lax.reduce_precision(x, *bits), np.concatenate([x, X.ravel()]), tolerance=0.0)
    check(lambda x: lax.reduce_precision(x, *bits), X.astype(jnp.bfloat16), tolerance=0.0)


def test_a_constant_of_both_zeros_keeps_them(interpreted: Any) -> None:
    x = np.ones(2, np.float32)
    (found,) = interpreted(import_jax(lambda x: x / jnp.array([0.0, -0.0]), (x,)), x)
    assert found.tolist() == [np.inf, -np.inf]
    signs = np.array([[0.0, -0.0] * 2] * 2, np.float32)  # rows repeat, and columns only look as if they did
    (found,) = interpreted(import_jax(lambda x: jnp.copysign(x, signs), (np.ones((2, 4), np.float32),)), signs + 1)
    assert found.tolist() == [[1, -1, 1, -1]] * 2


def test_padding_spreads_nothing_in_an_empty_dimension(check: Any) -> None:
    check(lambda x: lax.pad(x[:, :0], 1.0, ((0, 0, 0), (2, 1, 3))), X)


@pytest.mark.parametrize("kind", [np.float32, jnp.bfloat16])
def test_the_total_order_of_floats(check: Any, kind: Any) -> None:
    x = np.array([-0.0, 0.0, np.nan, -np.nan, np.inf, -np.inf, 1, -1, -2], np.float32).astype(kind)
    both = (np.repeat(x, 9), np.tile(x, 9))
    check(lambda a: tuple(compare.bind(*a) for compare in (lax.lt_to_p, lax.le_to_p, lax.eq_to_p)), both)


# --- gathers at known places -----------------------------------------------------------------------------------------

CUTS: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "a range": (lambda x: x[:, jnp.array([2, 3, 4])], True),
    "a step": (lambda x: x[:, jnp.array([0, 2, 4])], True),
    "one": (lambda x: x[:, jnp.array([3])], True),
    "a slice beside a symbolic dim": (lambda x: x[:, 1:4], True),
    "a step beside a symbolic dim": (lambda x: x[:, ::2], True),
    "a window": (lambda x: lax.gather(
        x, jnp.array([1]), lax.GatherDimensionNumbers((0, 1), (), (1,)), (x.shape[0], 3)), True),
    "a window behind the end": (lambda x: lax.gather(
        x, jnp.array([4]), lax.GatherDimensionNumbers((0, 1), (), (1,)), (x.shape[0], 3), mode="clip"), True),
    "backwards": (lambda x: x[:, jnp.array([4, 3, 2])], False),
    "again": (lambda x: x[:, jnp.array([1, 1, 1])], False),
    "other steps": (lambda x: x[:, jnp.array([0, 1, 3])], False),
    "a matrix of places": (lambda x: x[:, jnp.array([[0, 1], [2, 3]])], False),
    "beyond the end": (lambda x: x.at[:, jnp.array([3, 4, 5])].get(mode="clip"), False),
}  # fmt: skip


@pytest.mark.parametrize(
    "dynamic", [None, pytest.param({"x": {0: ("b", 1, 4)}}, marks=pytest.mark.slow)], ids=["fixed", "dynamic"]
)
@pytest.mark.parametrize("name", CUTS)
def test_a_gather_at_known_places_in_even_steps_is_a_slice(name: str, dynamic: Any, check: Any) -> None:
    function, is_slice = CUTS[name]
    result = check(function, X, dynamic_shapes=dynamic, others=((X[:1],),) if dynamic else ())
    gathers = [op for op in result.module.walk() if op.name == "qc.gather"]
    assert bool(gathers) != is_slice


# --- numbers that are known ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [pytest.param(0.0, marks=pytest.mark.slow), -0.0])
def test_a_sum_from_a_zero_of_either_sign_is_the_sum(start: float, check: Any) -> None:
    """-0.0 changes no sum, and 0.0 only the sign of one of zeros alone."""
    zero = np.float32(start)
    for x in (X, np.full((2, 3), -0.0, np.float32), np.zeros((2, 0), np.float32)):
        check(lambda x: lax.reduce(x, zero, lax.add, (1,)), x, tolerance=1e-6)
        check(lambda x: lax.reduce_window(x, zero, lax.add, (1, 2), (1, 1), "SAME"), x, tolerance=1e-6)
    check(lambda x: lax.reduce_window(x, zero, lax.add, (1, 5), (1, 1), ((0, 0), (4, 0))), X, tolerance=1e-6)


def _loops(function: Any) -> int:
    return sum(op.name == "linalg.generic" for op in import_jax(function, (X,)).module.walk())


def test_single_whole_numbers_are_computed_with_and_others_are_not(check: Any) -> None:
    """What `jnp.var` divides by, and whether that is more than 0."""

    def whole(number: int, kind: Any = np.float32) -> Any:
        return lax.convert_element_type(lax.full((), number, jnp.int32), kind)

    def divided(count: int) -> Callable[[Any], Any]:
        return lambda x: jnp.where(lax.sub(np.float32(8), whole(count)) > 0, x, jnp.nan)

    assert _loops(divided(1)) == 0
    check(divided(1), X)
    check(divided(8), X)  # 0 is not more than 0: NaN everywhere
    zeros = X * 0
    check(lambda x: x + lax.sub(np.float32(2**24 + 2), whole(1)), zeros, tolerance=0.0)
    check(lambda x: x + whole(2**24 + 1), zeros, tolerance=0.0)
    check(lambda x: x + whole(257, jnp.bfloat16).astype(np.float32), zeros, tolerance=0.0)


@pytest.mark.parametrize("kind", [jnp.bfloat16, jnp.float16])
def test_sixteen_bits_as_a_float_and_back(kind: Any, interpreted: Any) -> None:
    """Every pattern but the NaNs, of which the hardware sets a bit; numbers are rounded in front of their bits."""
    patterns = np.arange(-(2**15), 2**15).astype(np.int16)
    (found,) = interpreted(import_jax(lambda i: lax.bitcast_convert_type(i, kind), (patterns,)), patterns)
    wanted = patterns.view(kind)
    numbers = ~np.isnan(wanted.astype(np.float32))
    assert found.dtype == wanted.dtype and np.isnan(found[~numbers].astype(np.float32)).all()
    assert np.array_equal(found[numbers].view(np.int16), patterns[numbers])
    (found,) = interpreted(import_jax(lambda x: lax.bitcast_convert_type(x, jnp.int16), (wanted,)), wanted)
    assert np.array_equal(found[numbers], patterns[numbers])


def test_bits_of_a_rounded_number_are_rounded_in_the_kernel() -> None:
    """Fusion deletes the conversion to 16 bits and back; the bits are those of the rounded number all the same."""
    x = np.array([1.0001, -3e-6, 65519.9, 65520, 1e-8, -0.0, np.inf, 6.1e-5, 0.1, 3e38], np.float32)

    def both(x: Any) -> Any:
        return [lax.bitcast_convert_type(x.astype(t), jnp.int16) for t in (jnp.bfloat16, jnp.float16)]

    for found, wanted in zip(qc.qcompile(both, (x,))(x), jax.jit(both)(x), strict=True):
        assert np.array_equal(found, wanted)


@pytest.mark.parametrize("kind", [jnp.bfloat16, jnp.float16])
def test_random_numbers_of_sixteen_bits(kind: Any, check: Any) -> None:
    check(lambda s: jax.random.uniform(jax.random.key(s[0]), (99,), kind), np.array([5], np.int32), tolerance=0.0)


def test_bits_are_counted_and_bytes_shifted(check: Any) -> None:
    for kind in (np.int8, np.uint8, np.int16, np.int32):
        whole = np.array([0, 1, -1, 77, np.iinfo(kind).min, np.iinfo(kind).max]).astype(kind)
        check(lambda x: (lax.population_count(x), lax.clz(x)), whole)
    all_bytes = np.arange(256).astype(np.uint8)
    check(lambda x: [f(x, jnp.uint8(3)) for f in (lax.shift_left, lax.shift_right_logical,
                                                  lax.shift_right_arithmetic)], all_bytes)  # fmt: skip
    check(lambda x: jnp.packbits(x > 0, axis=1), X)


def test_uint64_divides_where_its_sign_bit_is_set(check: Any) -> None:
    a = np.array([2**63 + 5, 2**64 - 1, 2**63, 7, 2**64 - 1, 9, 2**62 + 3, 0], np.uint64).view(np.int64)
    b = np.array([3, 2, 2**63 + 1, 2**63, 2**64 - 1, 0, 10, 4], np.uint64).view(np.int64)

    def unsigned(a: Any, b: Any) -> Any:
        x, y = (lax.bitcast_convert_type(v, jnp.uint64) for v in (a, b))
        found = (lax.div(x, y), lax.rem(x, y), jnp.maximum(x, y), jnp.minimum(x, y), jnp.sign(x))
        return [lax.bitcast_convert_type(v, jnp.int64) for v in found]

    with jax.enable_x64(True):
        check(lambda p, a, b: unsigned(a, b), {}, a, b)
        check(lambda s: jax.random.randint(jax.random.key(s[0]), (5,), 0, 10), np.array([2**40 + 7]))


def test_windows_start_anywhere_where_the_padding_does_not_count(check: Any) -> None:
    check(lambda x: lax.reduce_window(x, 0.5, lax.max, (1, 3), (1, 2), ((0, 0), (1, 2))), X)
    check(lambda x: lax.reduce_window(x, 0.0, lax.add, (4, 1), (1, 1), "VALID"), X)  # no window fits
    small, window = np.abs(X) * 99, ((1, 3), (1, 2), ((0, 0), (3, 2)))  # the first window has padding alone
    check(lambda x: lax.reduce_window(x.astype(jnp.uint8), np.uint8(0), lax.max, *window), small)
    check(lambda x: lax.reduce_window(x.astype(jnp.uint8), np.uint8(255), lax.min, *window), small)


SYMBOLIC = {
    "every second row": lambda x: x[:, ::2],
    "the last row, by a slice": lambda x: lax.dynamic_slice_in_dim(x, x.shape[1] - 1, 1, 1),
    "running sum": lambda x: jnp.cumsum(x, 1),
    "running maximum from the end": lambda x: lax.cummax(x, 0, reverse=True),
    "positions of a mask": lambda x: jnp.cumsum((x[..., 0] > 0).astype(jnp.int32), -1) - 1,
}


@pytest.mark.parametrize("name", SYMBOLIC)
def test_two_symbolic_sizes(name: str, check: Any) -> None:
    def rows(b: int, s: int) -> tuple[Any, ...]:
        return (np.random.default_rng(b + s).standard_normal((b, s, 2)).astype(np.float32),)

    check(SYMBOLIC[name], *rows(2, 3), dynamic_shapes={"x": {0: ("b", 1, 4), 1: ("s", 1, 8)}},
          others=(rows(1, 1), rows(4, 8)))  # fmt: skip
