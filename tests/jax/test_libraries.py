"""Modules of Flax (Linen and NNX) and of Equinox: programs equal their oracles, and the ledger has readable paths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import qcompiler as qc

pytestmark = pytest.mark.slow
eqx = pytest.importorskip("equinox", reason="a dependency of the tests alone")
nn = pytest.importorskip("flax.linen", reason="a dependency of the tests alone")
nnx = pytest.importorskip("flax.nnx", reason="a dependency of the tests alone")

X = np.random.default_rng(0).standard_normal((2, 6, 64)).astype(np.float32)
IDS = np.arange(12, dtype=np.int32).reshape(2, 6)
KEY = jax.random.key(0)
RECIPE = qc.QuantConfig("int8", promise_bits=None)
"""Small models: norms are a large share of their weights."""


class LinenLayers(nn.Module):  # type: ignore[misc]
    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.LayerNorm()(nn.gelu(nn.Dense(128)(x)))
        x = nn.RMSNorm()(nn.Dense(64)(x))
        mask = nn.make_causal_mask(x[..., 0])
        return x + nn.MultiHeadDotProductAttention(num_heads=4, qkv_features=64)(x, x, mask=mask)


class LinenTokens(nn.Module):  # type: ignore[misc]
    @nn.compact
    def __call__(self, ids: Any) -> Any:
        x = nn.SelfAttention(num_heads=4)(nn.Embed(50, 64)(ids))
        return nn.Dense(8)(nn.Conv(32, (3,))(x))


def rotated(x: Any) -> Any:
    """Rows (batch, length, heads, depth)."""
    depth = x.shape[-1]
    angles = jnp.arange(x.shape[1])[:, None] * (1e4 ** (-jnp.arange(0, depth, 2) / depth))
    cos, sin = jnp.cos(angles)[None, :, None], jnp.sin(angles)[None, :, None]
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def block(x: Any, dense: Callable[..., Any], norm: Callable[..., Any]) -> Any:
    """A block of Llama with 4 heads of queries and 2 of keys."""
    h = norm("input_norm")(x)
    q, k, v = (dense(n, size)(h).reshape(*x.shape[:2], -1, 16) for n, size in (("q", 64), ("k", 32), ("v", 32)))
    y = jax.nn.dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
    x = x + dense("o", 64)(y.reshape(x.shape))
    h = norm("post_norm")(x)
    return x + dense("down", 64)(jax.nn.silu(dense("gate", 96)(h)) * dense("up", 96)(h))


class LinenBlock(nn.Module):  # type: ignore[misc]
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return block(x, lambda n, size: nn.Dense(size, use_bias=False, name=n), lambda n: nn.RMSNorm(name=n))


class NnxBlock(nnx.Module):  # type: ignore[misc]
    def __init__(self, rngs: Any) -> None:
        for name, inner, outer in (
            ("q", 64, 64), ("k", 64, 32), ("v", 64, 32), ("o", 64, 64),
            ("gate", 64, 96), ("up", 64, 96), ("down", 96, 64),
        ):  # fmt: skip
            setattr(self, name, nnx.Linear(inner, outer, use_bias=False, rngs=rngs))
        self.input_norm, self.post_norm = nnx.RMSNorm(64, rngs=rngs), nnx.RMSNorm(64, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return block(x, lambda n, size: getattr(self, n), lambda n: getattr(self, n))


class NnxLayers(nnx.Module):  # type: ignore[misc]
    def __init__(self, rngs: Any) -> None:
        self.embed = nnx.Embed(50, 64, rngs=rngs)
        self.norm = nnx.LayerNorm(64, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(num_heads=4, in_features=64, decode=False, rngs=rngs)
        self.conv = nnx.Conv(64, 32, kernel_size=(3,), rngs=rngs)

    def __call__(self, ids: Any) -> Any:
        return self.conv(self.attention(self.norm(self.embed(ids))))


class EquinoxLayers(eqx.Module):  # type: ignore[misc]
    linear: Any
    norm: Any
    attention: Any
    scale: float = eqx.field(static=True)

    def __call__(self, x: Any) -> Any:
        h = jax.vmap(self.norm)(jax.vmap(self.linear)(x))
        return self.scale * self.attention(h, h, h)


def split(module: Any) -> tuple[Any, Any]:
    """A function of the state, and the state."""
    graph, state = nnx.split(module)
    return lambda weights, x: nnx.merge(graph, weights)(x), state


def linen(module: Any, x: Any) -> tuple[Any, tuple[Any, ...]]:
    return module.apply, (module.init(KEY, x), x)


def nnx_split(module: Any, x: Any) -> tuple[Any, tuple[Any, ...]]:
    function, state = split(module)
    return function, (state, x)


def equinox_layers() -> Any:
    attention = eqx.nn.MultiheadAttention(4, 64, key=KEY)
    return EquinoxLayers(eqx.nn.Linear(64, 64, key=KEY), eqx.nn.LayerNorm(64), attention, 0.5)


CASES: dict[str, tuple[Callable[[], tuple[Any, tuple[Any, ...]]], Any, str, dict[str, int]]] = {
    "linen": (
        lambda: linen(LinenLayers(), X), X, "params.Dense_0.kernel",
        {"qc.attention": 1, "qc.layer_norm": 1, "qc.rms_norm": 1},
    ),
    "linen, tokens": (lambda: linen(LinenTokens(), IDS), IDS, "params.Embed_0.embedding", {"qc.attention": 1}),
    "linen, llama": (
        lambda: linen(LinenBlock(), X), X, "params.gate.kernel", {"qc.attention": 1, "qc.rope": 2, "qc.rms_norm": 2}
    ),
    "nnx, llama, split": (
        lambda: nnx_split(NnxBlock(nnx.Rngs(0)), X), X, "gate.kernel",
        {"qc.attention": 1, "qc.rope": 2, "qc.rms_norm": 2},
    ),
    "nnx, llama, itself": (
        lambda: (NnxBlock(nnx.Rngs(0)), (X,)), X, "gate.kernel", {"qc.attention": 1, "qc.rope": 2, "qc.rms_norm": 2}
    ),
    "nnx, tokens, split": (
        lambda: nnx_split(NnxLayers(nnx.Rngs(0)), IDS), IDS, "embed.embedding",
        {"qc.attention": 1, "qc.layer_norm": 1},
    ),
    "equinox, mlp": (lambda: (eqx.nn.MLP(64, 8, 128, 2, key=KEY), (X[0, 0],)), X[0, 0], "layers.0.weight", {}),
    "equinox, itself": (
        lambda: (equinox_layers(), (X[0],)), X[0], "attention.query_proj.weight",
        {"qc.attention": 1, "qc.layer_norm": 1},
    ),
}  # fmt: skip
"""The function and its arguments, what the program is called with, a path of the ledger, the idioms."""


@pytest.mark.parametrize("name", CASES)
def test_modules_of_libraries_compile_and_equal_their_oracles(name: str, relative: Callable[[Any, Any], float]) -> None:
    made, given, path, idioms = CASES[name]
    function, args = made()
    program = qc.qcompile(function, args, quant=RECIPE)
    assert relative(program(given), jax.jit(program.oracle)(given)) < 1e-5
    formats = {row.parameters[0]: row.format for row in program.ledger}
    assert formats[path].startswith("int8"), formats
    assert not any(each.endswith(".value") for each in formats), formats
    text = program.ir("raise-idioms")
    assert {each: text.count(f"= {each} ") for each in idioms} == idioms
