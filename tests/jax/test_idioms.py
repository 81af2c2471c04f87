"""Attention, rotary embeddings and norms of functions of JAX become one op, at every size, and compute the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax_forms as forms
import numpy as np
import pytest

from qcompiler.frontends.jax.frontend import import_jax
from qcompiler.ir.context import QCContext
from qcompiler.ir.interpreter import run
from qcompiler.ir.module import main_func
from qcompiler.passes.pipeline import run_pipeline, upto

SIZES = ((1, 7), (3, 7), (3, 1), (1, 1), (2, 8))
DYNAMIC: dict[str, Any] = {
    "": None,
    "batch": {"x": {0: ("b", 1, 4)}},
    "length": {"x": {1: ("s", 1, 37)}},
    "both": {"x": {0: ("b", 1, 4), 1: ("s", 1, 37)}},
}
TOLERANCE = {"float32": 2e-6, "bfloat16": 2e-2}
"""Relative L2. bf16 rounds to 2^-9 after each operator; an idiom has fewer roundings than the parts."""
QUICK = ("library, causal", "library, padding", "bhsd, all", "bshd, where -1e9", "grouped, compared", "repeated, added")
Relative = Callable[[Any, Any], float]


def cases(names: Any, quick: Any) -> list[Any]:
    """Each form at each size, and with symbols; a few at one token and one size stand in the short run."""
    found = []
    for name in names:
        for batch, length, dynamic, dtype in (
            *((b, s, "", "float32") for b, s in SIZES),
            *((3, 7, which, "float32") for which in ("batch", "length", "both")),
            (3, 7, "", "bfloat16"), (1, 7, "both", "bfloat16"), (1, 1, "", "bfloat16"),
        ):  # fmt: skip
            short = name in quick and batch == 1 and not dynamic and dtype == "float32"
            at = f"{batch}x{length}{'-' * bool(dynamic)}{dynamic}-{dtype}"
            label = name if isinstance(name, str) else name.__name__
            marks = () if short else pytest.mark.slow
            found.append(pytest.param(name, batch, length, dynamic, dtype, id=f"{label}-{at}", marks=marks))
    return found


def raised(form: Any, batch: int, length: int, dynamic: str, dtype: str, relative: Relative) -> tuple[list[Any], Any]:
    """The ops after hoisting, and the context; the interpreter's answer after it is jax.jit's."""
    shape = (batch, length, forms.HIDDEN)
    x = jnp.asarray(np.random.default_rng(0).standard_normal(shape), dtype)
    imported = import_jax(form, (x,), dynamic_shapes=DYNAMIC[dynamic])
    ctx = QCContext.default(weights=imported.weights)
    run_pipeline(imported.module, ctx, stages=upto("hoist-constant-masks"))
    found = run(imported.module, ctx.weights, [np.asarray(x)])[0]
    assert relative(found, jax.jit(form)(x)) < TOLERANCE[dtype]
    return list(main_func(imported.module).body.block.ops), ctx


@pytest.mark.parametrize(("name", "batch", "length", "dynamic", "dtype"), cases(forms.ATTENTIONS, QUICK))
def test_attention_becomes_one_op(
    name: str, batch: int, length: int, dynamic: str, dtype: str, relative: Relative
) -> None:
    form, groups, mask = forms.ATTENTIONS[name]
    ops, ctx = raised(form, batch, length, dynamic, dtype, relative)
    counts = Counter(op.name for op in ops)
    said = [(d.what, d.why) for d in ctx.report.of("raise-idioms")]
    assert counts["qc.attention"] == 1 and not counts["qc.softmax"] and not counts["qc.batch_matmul"], said
    (attention,) = (op for op in ops if op.name == "qc.attention")
    assert attention.k.type.get_shape()[1] == groups, "heads of keys are read once"
    if length > 1 or dynamic in ("length", "both"):
        assert (attention.causal is not None) == (mask == "causal")
        assert (attention.mask is not None) == (mask == "mask")


@pytest.mark.parametrize(
    ("form", "batch", "length", "dynamic", "dtype"), cases(forms.ROPES, (forms.split_halves, forms.pairs_stacked))
)
def test_rotary_embeddings_become_one_op(
    form: forms.Form, batch: int, length: int, dynamic: str, dtype: str, relative: Relative
) -> None:
    ops, ctx = raised(form, batch, length, dynamic, dtype, relative)
    counts = Counter(op.name for op in ops)
    said = [(d.what, d.why) for d in ctx.report.of("raise-idioms")]
    assert counts["qc.rope"] == 1 and counts["tensor.concat"] == (form is forms.part_of_each_head), said
    (rope,) = (op for op in ops if op.name == "qc.rope")
    assert (rope.interleaved is not None) == form.__name__.startswith("pairs")


def _apart(x: Any) -> Any:
    """The halves of two tensors."""
    a, b = jnp.split(x.reshape(*x.shape[:2], 4, 8), 2, -1)
    cos, sin = jnp.cos(x[:, :, None, :4]), jnp.sin(x[:, :, None, :4])
    return jnp.concatenate([a * cos - b * sin, b * sin + a * cos], -1)


def _tables_of_heads(x: Any) -> Any:
    h = x.reshape(*x.shape[:2], 4, 8)
    a, b = jnp.split(h, 2, -1)
    cos, sin = jnp.cos(h[..., :4]), jnp.sin(h[..., :4])
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def _between(x: Any) -> Any:
    q = x.reshape(*x.shape[:2], 4, 8)
    scores = jnp.sin(jnp.einsum("bqhd,bkhd->bhqk", q, q))
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, -1), q)


def _over_queries(x: Any) -> Any:
    q = x.reshape(*x.shape[:2], 4, 8)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, q), -2), q)


SCALE = np.random.default_rng(1).standard_normal(forms.HIDDEN).astype(np.float32)


def _varied(x: Any) -> Any:
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(jnp.var(x, -1, keepdims=True) + 1e-5)


def _over_deviation(x: Any) -> Any:
    return (x - jnp.mean(x, -1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5) * SCALE + SCALE


def _given_mean(x: Any) -> Any:
    mean = jnp.mean(x, -1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(jnp.var(x, -1, keepdims=True, mean=mean) + 1e-5)


def _not_negative(x: Any) -> Any:
    """As `equinox.nn.LayerNorm`."""
    wide = x.astype(jnp.float32)
    root = jax.lax.rsqrt(jnp.maximum(0.0, jnp.var(wide, -1, keepdims=True)) + 1e-5)
    return ((wide - wide.mean(-1, keepdims=True)) * root * SCALE + SCALE).astype(x.dtype)


@pytest.mark.parametrize(
    ("form", "batch", "length", "dynamic", "dtype"),
    cases((_varied, _over_deviation, _given_mean, _not_negative, jax.nn.standardize), (_not_negative,)),
)
def test_a_norm_by_var_becomes_one_op(
    form: forms.Form, batch: int, length: int, dynamic: str, dtype: str, relative: Relative
) -> None:
    ops, ctx = raised(form, batch, length, dynamic, dtype, relative)
    counts = Counter(op.name for op in ops)
    assert counts["qc.layer_norm"] == 1, [(d.what, d.why) for d in ctx.report.of("raise-idioms")]
    assert not counts["linalg.generic"] or dtype == "bfloat16"


def _sample_variance(x: Any) -> Any:
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(jnp.var(x, -1, keepdims=True, ddof=1) + 1e-5)


def _over_tokens(x: Any) -> Any:
    return (x - x.mean(1, keepdims=True)) * jax.lax.rsqrt(jnp.var(x, 1, keepdims=True) + 1e-5)


def _without_eps(x: Any) -> Any:
    return (x - x.mean(-1, keepdims=True)) / jnp.std(x, -1, keepdims=True)


LOOKALIKES: dict[Any, tuple[str, str]] = {
    _sample_variance: ("looks like a norm and stays", "not the mean over the last dim, of a fixed size"),
    _over_tokens: ("looks like a norm and stays", "not the mean over the last dim, of a fixed size"),
    _without_eps: ("looks like a norm and stays", "no constant is added to the mean under the root"),
    _apart: ("looks like a rotary embedding and stays", "its parts are not a * cos - b * sin and b * cos + a * sin"),
    _tables_of_heads: ("looks like a rotary embedding and stays", "its tables have a dim of heads"),
    _between: ("softmax between two matmuls stays", "its scores are not a matmul that is scaled, capped and masked"),
    _over_queries: ("softmax between two matmuls stays", "the softmax is not along the dim that the first matmul"),
}


@pytest.mark.parametrize("form", LOOKALIKES, ids=lambda form: form.__name__.strip("_"))
def test_what_looks_like_an_idiom_and_is_none_says_why(form: forms.Form, relative: Relative) -> None:
    what, why = LOOKALIKES[form]
    ops, ctx = raised(form, 2, 5, "", "float32", relative)
    said = [(d.what, d.why) for d in ctx.report.of("raise-idioms")]
    assert any(text == what and why in reason for text, reason in said), said
    assert not {"qc.attention", "qc.rope", "qc.layer_norm", "qc.rms_norm"} & {op.name for op in ops}
