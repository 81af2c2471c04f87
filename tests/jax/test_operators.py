"""Every form of an operator that jax.numpy, jax.nn and jax.lax make, run by the interpreter beside jax.jit."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

R = np.random.default_rng(7)
X = R.standard_normal((3, 5)).astype(np.float32)
Y = (R.standard_normal((3, 5)) * 0.5).astype(np.float32)
W = R.standard_normal((2, 4, 6, 5)).astype(np.float32)
INDEX = np.array([2, -1, 0, 7], np.int32)
IDS = np.array([[1, 2], [0, 1]], np.int32)
COUNTS = np.array([[5, -7, 0, 2**31 - 1, -(2**31)]], np.int32)


def every_other(table: dict[str, Any]) -> list[Any]:
    """The names of a table; each second one only in the full run, which keeps the short run short."""
    return [pytest.param(name, marks=[pytest.mark.slow] if i % 2 else []) for i, name in enumerate(table)]


def of_first(function: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda x, y: function(x)


POINTWISE: dict[str, Callable[[Any, Any], Any]] = {
    name: of_first(getattr(jnp, name))
    for name in [
        "exp",
        "expm1",
        "log1p",
        "sin",
        "cos",
        "tan",
        "tanh",
        "sqrt",
        "floor",
        "ceil",
        "round",
        "rint",
        "sign",
        "square",
        "abs",
        "sinh",
        "cosh",
        "arctan",
        "arcsinh",
        "cbrt",
        "isnan",
        "isfinite",
        "isinf",
        "negative",
        "reciprocal",
        "log",
        "trunc",
        "nan_to_num",
        "logical_not",
        "sinc",
        "exp2",
        "signbit",
    ]
}
POINTWISE |= {
    name: getattr(jnp, name)
    for name in [
        "add",
        "subtract",
        "multiply",
        "divide",
        "maximum",
        "minimum",
        "power",
        "arctan2",
        "fmod",
        "remainder",
        "floor_divide",
        "hypot",
        "logaddexp",
        "equal",
        "not_equal",
        "less",
        "less_equal",
        "greater",
        "greater_equal",
        "copysign",
        "fmax",
        "fmin",
        "heaviside",
        "nextafter",
    ]
    if name not in ("nextafter",)
}
POINTWISE |= {
    f"nn.{name}": of_first(getattr(jax.nn, name))
    for name in [
        "relu",
        "relu6",
        "sigmoid",
        "softplus",
        "sparse_plus",
        "sparse_sigmoid",
        "soft_sign",
        "silu",
        "log_sigmoid",
        "leaky_relu",
        "hard_sigmoid",
        "hard_silu",
        "hard_tanh",
        "elu",
        "celu",
        "selu",
        "gelu",
        "squareplus",
        "mish",
        "softmax",
        "log_softmax",
        "standardize",
        "glu_of",
        "logsumexp",
    ]
    if hasattr(jax.nn, name)
}
POINTWISE |= {
    "nn.gelu exact": lambda x, y: jax.nn.gelu(x, approximate=False),
    "nn.glu": lambda x, y: jax.nn.glu(jnp.concatenate([x, y], 1)),
    "nn.softmax axis 0 where": lambda x, y: jax.nn.softmax(x, axis=0, where=y > 0),
    "nn.one_hot": lambda x, y: jax.nn.one_hot(jnp.array([1, 3, 9]), 4),
    "erf": lambda x, y: (lax.erf(x), lax.erfc(x), lax.erf_inv(y * 0.3)),
    "where clip": lambda x, y: jnp.where(x > 0, jnp.clip(x, 0.1, 0.5), y),
    "clamp": lambda x, y: lax.clamp(-0.5, x, y + 1),
    "integer_pow": lambda x, y: (x**2, x**3, x**-2, lax.integer_pow(x, 7), jnp.abs(x) ** 0.5),
    "bool": lambda x, y: ((x > 0) & (y > 0), (x > 0) | (y > 0), (x > 0) ^ (y > 0), ~(x > 0)),
    "casts": lambda x, y: (x.astype(jnp.int32), x.astype(jnp.bfloat16), (x > 0).astype(jnp.float32), x.astype(bool)),
    "half": lambda x, y: (x.astype(jnp.bfloat16) * y.astype(jnp.bfloat16), jnp.exp(x.astype(jnp.float16))),
    "reduce_precision": lambda x, y: lax.reduce_precision(x, 8, 7),
    "bits": lambda x, y: lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.int32) & -65536, jnp.float32),
    "reduce": lambda x, y: (x.sum(), x.mean(0), x.max(1), x.min(), x.prod(1), x.var(1), x.std(), jnp.any(x > 1)),
    "more reduce": lambda x, y: (jnp.all(x > -9, 0), jnp.median(x), jnp.ptp(x, 0), jnp.linalg.norm(x, axis=1),
                                 jnp.count_nonzero(x > 0), jnp.nanmax(x), jnp.average(x, 0), jnp.trace(x)),
    "reduce start": lambda x, y: jnp.sum(x, 1, initial=3.0, where=y > 0),
    "arg": lambda x, y: (jnp.argmax(x), jnp.argmax(x, 1), jnp.argmin(x, 0), jnp.argmin(x.astype(jnp.int32), 1)),
    "cumulative": lambda x, y: (jnp.cumsum(x, 1), jnp.cumprod(x, 0), lax.cummax(x, 1), lax.cummin(x, 0),
                                lax.cumsum(x, 1, reverse=True), lax.cumlogsumexp(x, 1)),
    "scan ops": lambda x, y: (jnp.diff(x, axis=1), jnp.interp(x, jnp.arange(5.0), y[0]), jnp.searchsorted(
        jnp.arange(5.0), x)),
    "sort": lambda x, y: (jnp.sort(x), jnp.argsort(x, 0), jnp.sort(x, descending=True), jnp.lexsort((y[0], x[0])),
                          lax.sort((x, y), num_keys=1), lax.sort((jnp.round(x), y), num_keys=2)[1]),
    "top_k": lambda x, y: (lax.top_k(x, 2), lax.top_k(x.T, 3)),
    "shapes": lambda x, y: (x.T, x.reshape(5, 3), x[None], x.ravel(), jnp.swapaxes(x, 0, 1), jnp.tile(x, (2, 1)),
                            jnp.repeat(x, 2, 1), jnp.flip(x, 1), jnp.roll(x, 2, 1), jnp.rot90(x), jnp.broadcast_to(
                                x, (2, 3, 5))),
    "joins": lambda x, y: (jnp.concatenate([x, y]), jnp.stack([x, y], 1), jnp.split(x, [2], 1), jnp.pad(x, 1),
                           jnp.pad(x, ((0, 1), (2, 0)), mode="edge"), lax.pad(x, 2.0, ((-1, 2, 1), (0, -1, 0)))),
    "made": lambda x, y: (jnp.arange(7), jnp.linspace(0, 1, 4), jnp.eye(3), jnp.tri(3), jnp.tril(x), jnp.triu(x, 1),
                          jnp.zeros_like(x), jnp.full((2, 2), 3), jnp.meshgrid(jnp.arange(3), jnp.arange(2))),
}  # fmt: skip

TOLERANCES = {"nn.mish": 1e-5, "half": 1e-2, "erf": 1e-5}


SHORT = set(list(POINTWISE)[::4]) | {"erf", "bool", "casts", "reduce", "arg", "sort", "top_k"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in SHORT else [pytest.mark.slow]) for n in POINTWISE])
def test_operators_of_two_matrices(name: str, check: Callable[..., Any]) -> None:
    function = POINTWISE[name]
    check(lambda a: function(*a), (X, Y), tolerance=TOLERANCES.get(name, 2e-5))


INDEXING: dict[str, Callable[[Any, Any, Any], Any]] = {
    "rows": lambda w, i, n: w.reshape(8, 30)[i],
    "take": lambda w, i, n: (jnp.take(w, i, axis=1), jnp.take(w, i, axis=2, mode="clip"), jnp.take(w, i[:2], axis=3)),
    "take wrap": lambda w, i, n: jnp.take(w, i, axis=1, mode="wrap"),
    "along": lambda w, i, n: jnp.take_along_axis(w, jnp.argsort(w, 2), 2),
    "static": lambda w, i, n: (w[1], w[:, -2:], w[..., ::2], w[:, None, 3], w[0, :, 1:5:2, 2], w[:, ::-1]),
    "two": lambda w, i, n: (w[:, i[:2], i[:2]], w[i[1], :, i[:2]], w[n[0], n[1]], w[:, n, n]),
    "mixed": lambda w, i, n: (w[0, i, :, 2], w[:, i[:, None], n[0]], w[..., n], w[n[0, 0]]),
    "dynamic": lambda w, i, n: (lax.dynamic_slice(w, (0, i[0], n[0, 0], 9), (1, 2, 3, 2)),
                                lax.dynamic_index_in_dim(w, i[0], 1), lax.dynamic_slice_in_dim(w, i[1], 2, 2)),
    "update": lambda w, i, n: (lax.dynamic_update_slice(w, w[:1, :2] * 2, (n[0, 0], i[0], 0, 0)),
                               lax.dynamic_update_slice_in_dim(w, w[:, :1] + 1, i[0], 1)),
    "set": lambda w, i, n: (w.at[1].set(2.0), w.at[:, i].set(0.5), w.at[0, 1, 2].set(9.0), w.at[..., 1].set(3.0)),
    "whole": lambda w, i, n: (w.at[...].set(2.0), w.at[...].add(n[0, 0]), w.at[...].max(0.5), n.at[()].multiply(n)),
    "set by two": lambda w, i, n: (w.at[n[0], n[1]].set(1.0), w.at[:, i[:2], i[:2]].set(4.0)),
    "add": lambda w, i, n: (w.at[:, i].add(1.0), w.at[n].add(2.0), w.at[n[0], :, i[:2]].add(w[0, :, :2].swapaxes(0, 1)
                                                                                              )),
    "others": lambda w, i, n: (w.at[n].multiply(2.0), w.at[n].max(0.0), w.at[n].min(0.0), w.at[:, 1:3].add(1.0)),
    "vmapped": lambda w, i, n: jax.vmap(lambda a, j: a[j])(w, n),
    "vmapped set": lambda w, i, n: jax.vmap(lambda a, j: a.at[j].set(7.0))(w, n),
    "segment_sum": lambda w, i, n: jax.ops.segment_sum(w.reshape(4, -1), jnp.array([0, 2, 0, 1]), 3),
    "bincount": lambda w, i, n: jnp.bincount(n.reshape(-1), length=4),
    "select": lambda w, i, n: lax.switch(n[0, 0], [lambda v: v + 1, lambda v: v * 2, lambda v: v], w),
    "cond": lambda w, i, n: lax.cond(n[0, 0] > 0, lambda v: (v + 1, v[0]), lambda v: (v, v[1]), w),
}  # fmt: skip


@pytest.mark.parametrize("name", every_other(INDEXING))
def test_indexing(name: str, check: Callable[..., Any]) -> None:
    function = INDEXING[name]
    check(lambda a: function(*a), (W, INDEX, IDS))


PRODUCTS: dict[str, Callable[[Any, Any], Any]] = {
    f"einsum {text}": functools.partial(jnp.einsum, text)
    for text in ("abcd,abed->abce", "abcd,abcd->ad", "abcd,abcd->", "abcd,afcd->bdf", "abcd,abcd->cabd")
}
PRODUCTS |= {
    "matmul": lambda a, b: (a @ b.swapaxes(2, 3), a[0, 0] @ b[0, 1].T, a[0, 0, 0] @ b[0, 0, 0], a[0, 0] @ b[0, 0, 1]),
    "outer": lambda a, b: (jnp.outer(a[0, 0, 0], b[0, 0, 0]), jnp.tensordot(a, b, ((0, 2), (0, 2))), jnp.vdot(a, b)),
    "dot_general": lambda a, b: lax.dot_general(a, b, (((3, 1), (3, 1)), ((0,), (0,)))),
    "bf16": lambda a, b: lax.dot_general(
        a[0, 0].astype(jnp.bfloat16), b[0, 0].astype(jnp.bfloat16), (((1,), (1,)), ((), ())),
        preferred_element_type=jnp.float32),
    "integers": lambda a, b: (a[0, 0] * 5).astype(jnp.int32) @ (b[0, 0].T * 5).astype(jnp.int32),
    "attention": lambda a, b: jax.nn.dot_product_attention(a, b, b, is_causal=False),
    "causal attention": lambda a, b: jax.nn.dot_product_attention(a, b, b, is_causal=True),
}  # fmt: skip


@pytest.mark.parametrize("name", every_other(PRODUCTS))
def test_products(name: str, check: Callable[..., Any]) -> None:
    function = PRODUCTS[name]
    check(lambda a: function(*a), (W, np.roll(W, 1, 2)))


IMAGE = R.standard_normal((2, 9, 8, 4)).astype(np.float32)
KERNEL = R.standard_normal((3, 3, 4, 6)).astype(np.float32)
NHWC = ("NHWC", "HWIO", "NHWC")
conv = functools.partial(lax.conv_general_dilated, dimension_numbers=NHWC)
WINDOWS: dict[str, Callable[[Any, Any], Any]] = {
    "same": lambda x, w: conv(x, w, (1, 1), "SAME"),
    "strided": lambda x, w: conv(x, w, (2, 2), "VALID"),
    "uneven": lambda x, w: conv(x, w, (1, 2), ((0, 2), (1, 0)), rhs_dilation=(2, 1)),
    "groups": lambda x, w: conv(x, w[:, :, :2], (1, 1), "SAME", feature_group_count=2),
    "depthwise": lambda x, w: conv(x, w[:, :, :1, :4], (1, 1), "SAME", feature_group_count=4),
    "transposed": lambda x, w: lax.conv_transpose(x, w, (2, 2), "SAME", dimension_numbers=NHWC),
    "NCHW": lambda x, w: lax.conv(x.transpose(0, 3, 1, 2), w.transpose(3, 2, 0, 1), (1, 1), "SAME"),
    "one dim": lambda x, w: lax.conv_general_dilated(
        x[:, 0], w[0], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")),
    "max pool": lambda x, w: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"),
    "avg pool": lambda x, w: lax.reduce_window(x, 0.0, lax.add, (1, 3, 3, 1), (1, 2, 2, 1), "SAME") / 9,
    "min dilated": lambda x, w: lax.reduce_window(x, jnp.inf, lax.min, (1, 2, 2, 1), (1, 1, 1, 1), "VALID",
                                                  window_dilation=(1, 2, 1, 1)),
    "resize": lambda x, w: jax.image.resize(x, (2, 18, 16, 4), "nearest"),
    "resize linear": lambda x, w: jax.image.resize(x, (2, 5, 16, 4), "linear"),
}  # fmt: skip


@pytest.mark.parametrize("name", every_other(WINDOWS))
def test_windows(name: str, check: Callable[..., Any]) -> None:
    function = WINDOWS[name]
    check(lambda a: function(*a), (IMAGE, KERNEL), tolerance=2e-5)


INTEGERS: dict[str, Callable[[Any], Any]] = {
    "arithmetic": lambda n: (n + 3, n * 5, n // 3, n % 3, -n, abs(n), lax.div(n, 4), lax.rem(n, 4), jnp.sign(n)),
    "bits": lambda n: (n << 3, n >> 2, lax.shift_right_logical(n, 5), n & 255, n | 64, n ^ -1, ~n),
    "wide shifts": lambda n: (n << jnp.abs(n), lax.shift_right_logical(n, jnp.full_like(n, 32))),
    "unsigned": lambda n: (n.astype(jnp.uint32) > 9, (n.astype(jnp.uint32) // 3).astype(jnp.int32),
                           jnp.maximum(n.astype(jnp.uint32), 7).astype(jnp.int32), n.astype(jnp.uint32).astype(
                               jnp.float32), (n.astype(jnp.uint32) % 10).astype(jnp.int32)),
    "small": lambda n: (n.astype(jnp.int8), n.astype(jnp.uint8), n.astype(jnp.int16) + 3),
}  # fmt: skip


@pytest.mark.parametrize("name", INTEGERS)
def test_integers(name: str, check: Callable[..., Any]) -> None:
    check(INTEGERS[name], COUNTS)


RANDOM: dict[str, Callable[[Any], Any]] = {
    "bits": lambda k: lax.bitcast_convert_type(jax.random.bits(k, (3, 7)), jnp.int32),
    "uniform": lambda k: jax.random.uniform(k, (5, 4)),
    "randint": lambda k: jax.random.randint(k, (11,), 0, 100),
    "split": lambda k: jax.random.bernoulli(jax.random.split(k)[1], 0.3, (9,)),
    "normal": lambda k: jax.random.normal(k, (4, 4)),
    "gumbel": lambda k: jax.random.categorical(k, jnp.arange(12.0).reshape(3, 4)),
    "permutation": lambda k: jax.random.permutation(k, 9),
}


@pytest.mark.parametrize("name", every_other(RANDOM))
@pytest.mark.parametrize("seed", ["fixed", "given"])
def test_random_numbers_have_the_bits_of_jax(name: str, seed: str, check: Callable[..., Any]) -> None:
    exact = name not in ("normal",)

    def function(n: Any) -> Any:
        key = jax.random.PRNGKey(42 if seed == "fixed" else n[0])
        return RANDOM[name](jax.random.fold_in(key, 3))

    check(function, np.array([12345], np.int32), tolerance=0.0 if exact else 1e-6)
