"""Attention and rotary embeddings as people write them in JAX: each a function of x (batch, length, HEADS * DEPTH)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

HEADS, GROUPS, DEPTH = 4, 2, 8
HIDDEN = HEADS * DEPTH
Form = Callable[[Any], Any]
Mask = Callable[[Any], Any]
"""Scores (..., queries, keys) with their mask."""


def heads_of(x: Any, groups: int) -> tuple[Any, Any, Any]:
    b, s = x.shape[:2]
    k = x[..., : groups * DEPTH].reshape(b, s, groups, DEPTH)
    return x.reshape(b, s, HEADS, DEPTH), k, k * 2


# --- attention -------------------------------------------------------------------------------------------------------


def library(groups: int = GROUPS, made: Callable[[Any], dict[str, Any]] = lambda x: {}) -> Form:
    """`jax.nn.dot_product_attention` with the arguments that `made` makes of x."""
    return lambda x: jax.nn.dot_product_attention(*heads_of(x, groups), **made(x))


def _slopes(x: Any) -> dict[str, Any]:
    at = jnp.arange(x.shape[1])
    distance = (at[None, :] - at[:, None]).astype(x.dtype)
    return {"bias": (jnp.arange(HEADS, dtype=x.dtype)[:, None, None] * distance)[None]}


def _triangle(x: Any) -> dict[str, Any]:
    return {"mask": jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))[None, None], "scale": 0.3}


def _kept(x: Any) -> dict[str, Any]:
    return {"mask": (x[..., 0] > -1)[:, None, None, :]}


def _lengths(x: Any) -> dict[str, Any]:
    n = jnp.sum(x[..., 0] < 9, 1).astype(jnp.int32)  # data: nothing knows that it is the whole length
    return {"query_seq_lengths": n, "key_value_seq_lengths": n}


def bhsd(masked: Mask) -> Form:
    def form(x: Any) -> Any:
        q, k, v = (jnp.swapaxes(each, 1, 2) for each in heads_of(x, HEADS))
        weights = jax.nn.softmax(masked(jnp.einsum("bhqd,bhkd->bhqk", q, k) / np.sqrt(DEPTH)), -1)
        return jnp.swapaxes(jnp.einsum("bhqk,bhkd->bhqd", weights, v), 1, 2)

    return form


def bshd(masked: Mask) -> Form:
    def form(x: Any) -> Any:
        q, k, v = heads_of(x, HEADS)
        scores = masked(jnp.einsum("bqhd,bkhd->bhqk", q / jnp.sqrt(DEPTH).astype(x.dtype), k))
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores.astype(jnp.float32), -1).astype(x.dtype), v)

    return form


def grouped(masked: Mask) -> Form:
    """Queries in groups that share a head of the keys."""

    def form(x: Any) -> Any:
        q, k, v = heads_of(x, GROUPS)
        q = q.reshape(*q.shape[:2], GROUPS, HEADS // GROUPS, DEPTH)
        weights = jax.nn.softmax(masked(jnp.einsum("bqgrd,bkgd->bgrqk", q, k) * DEPTH**-0.5), -1)
        return jnp.einsum("bgrqk,bkgd->bqgrd", weights, v).reshape(*q.shape[:2], HEADS, DEPTH)

    return form


def repeated(masked: Mask) -> Form:
    """Heads of the keys that are repeated."""

    def form(x: Any) -> Any:
        q, k, v = heads_of(x, GROUPS)
        k, v = (jnp.repeat(each, HEADS // GROUPS, axis=2) for each in (k, v))
        weights = jax.nn.softmax(masked(jnp.einsum("bqhd,bkhd->bhqk", q, k) * DEPTH**-0.5), -1)
        return jnp.einsum("bhqk,bkhd->bqhd", weights, v)

    return form


def by_hand(masked: Mask) -> Form:
    """Products by `@`, and a softmax in parts."""

    def form(x: Any) -> Any:
        q, k, v = (each.transpose(0, 2, 1, 3) for each in heads_of(x, HEADS))
        scores = masked(q @ k.swapaxes(-1, -2) / DEPTH**0.5)
        shifted = jnp.exp(scores - scores.max(-1, keepdims=True))
        return (shifted / shifted.sum(-1, keepdims=True) @ v).transpose(0, 2, 1, 3)

    return form


def _where(number: Callable[[Any], Any]) -> Mask:
    def masked(scores: Any) -> Any:
        seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        return jnp.where(seen, scores, number(scores.dtype))

    return masked


def _compared(scores: Any) -> Any:
    at = jnp.arange(scores.shape[-1])
    return jnp.where(at[:, None] >= at[None, :], scores, -1e9)


def _added(scores: Any) -> Any:
    return scores + jnp.triu(jnp.full(scores.shape[-2:], -jnp.inf, scores.dtype), 1)


MASKS: dict[str, Mask] = {
    "all": lambda scores: scores,
    "where -inf": _where(lambda dtype: -jnp.inf),
    "where -1e9": _where(lambda dtype: -1e9),
    "where finfo": _where(lambda dtype: jnp.finfo(dtype).min),
    "compared": _compared,
    "added": _added,
}
ATTENTIONS: dict[str, tuple[Form, int, str]] = {
    "library": (library(HEADS), HEADS, ""),
    "library, causal": (library(GROUPS, lambda x: {"is_causal": True}), GROUPS, "causal"),
    "library, one head of keys": (library(1, lambda x: {"is_causal": True}), 1, "causal"),
    "library, bias": (library(GROUPS, _slopes), GROUPS, "mask"),
    "library, triangle": (library(GROUPS, _triangle), GROUPS, "causal"),
    "library, padding": (library(HEADS, _kept), HEADS, "mask"),
    "library, lengths": (library(GROUPS, _lengths), GROUPS, "mask"),
} | {
    f"{spelling.__name__}, {name}": (spelling(mask), kept, "" if name == "all" else "causal")
    for spelling, kept in ((bhsd, HEADS), (bshd, HEADS), (grouped, GROUPS), (repeated, GROUPS), (by_hand, HEADS))
    for name, mask in MASKS.items()
}
"""Form -> the function, the heads of keys that attention must read, and what its mask must become."""


# --- rotary embeddings -----------------------------------------------------------------------------------------------


def _angles(length: Any, depth: int = DEPTH) -> Any:
    return jnp.arange(length)[:, None] * (1e4 ** (-jnp.arange(0, depth, 2) / depth))


def _tables(angles: Any, dtype: Any) -> tuple[Any, Any]:
    """Cosine and sine for rows (batch, length, heads, depth)."""
    return jnp.cos(angles).astype(dtype)[None, :, None], jnp.sin(angles).astype(dtype)[None, :, None]


def _rows(x: Any) -> Any:
    return x.reshape(*x.shape[:2], HEADS, DEPTH)


def _joined(a: Any, b: Any, cos: Any, sin: Any, *tail: Any) -> Any:
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, *tail], -1)


def half_turned(x: Any) -> Any:
    h, angles = _rows(x), _angles(x.shape[1])
    cos, sin = _tables(jnp.concatenate([angles, angles], -1), x.dtype)
    return h * cos + jnp.concatenate([-h[..., DEPTH // 2 :], h[..., : DEPTH // 2]], -1) * sin


def split_halves(x: Any) -> Any:
    return _joined(*jnp.split(_rows(x), 2, -1), *_tables(_angles(x.shape[1]), x.dtype))


def split_heads(x: Any) -> Any:
    cos, sin = (each.swapaxes(1, 2) for each in _tables(_angles(x.shape[1]), x.dtype))
    return _joined(*jnp.split(_rows(x).swapaxes(1, 2), 2, -1), cos, sin)


def in_float32(x: Any) -> Any:
    wide = _rows(x).astype(jnp.float32)
    return _joined(*jnp.split(wide, 2, -1), *_tables(_angles(x.shape[1]), jnp.float32)).astype(x.dtype)


_STORED = 1e4 ** (-np.arange(0, DEPTH, 2) / DEPTH) * np.arange(40)[:, None]


def stored_tables(x: Any) -> Any:
    angles = jnp.asarray(_STORED.astype(np.float32))
    return _joined(*jnp.split(_rows(x), 2, -1), *_tables(angles[: x.shape[1]], x.dtype))


def gathered_tables(x: Any) -> Any:
    angles = jnp.asarray(_STORED.astype(np.float32))[jnp.arange(x.shape[1])]
    return _joined(*jnp.split(_rows(x), 2, -1), *_tables(angles, x.dtype))


def part_of_each_head(x: Any) -> Any:
    h, depth = _rows(x), DEPTH // 2
    tables = _tables(_angles(x.shape[1], depth), x.dtype)
    return _joined(*jnp.split(h[..., :depth], 2, -1), *tables, h[..., depth:])


def pairs_stacked(x: Any) -> Any:
    h, (cos, sin) = _rows(x), _tables(_angles(x.shape[1]), x.dtype)
    a, b = h[..., 0::2], h[..., 1::2]
    return jnp.stack([a * cos - b * sin, a * sin + b * cos], -1).reshape(h.shape)


def pairs_reshaped(x: Any) -> Any:
    h, (cos, sin) = _rows(x), _tables(_angles(x.shape[1]), x.dtype)
    split = h.reshape(*h.shape[:-1], DEPTH // 2, 2)
    a, b = split[..., 0], split[..., 1]
    return jnp.stack([a * cos - b * sin, a * sin + b * cos], -1).reshape(h.shape)


def pairs_turned(x: Any) -> Any:
    h = _rows(x)
    cos, sin = _tables(jnp.repeat(_angles(x.shape[1]), 2, -1), x.dtype)
    return h * cos + jnp.stack([-h[..., 1::2], h[..., 0::2]], -1).reshape(h.shape) * sin


ROPES: tuple[Form, ...] = (
    half_turned, split_halves, split_heads, in_float32, stored_tables, gathered_tables, part_of_each_head,
    pairs_stacked, pairs_reshaped, pairs_turned,
)  # fmt: skip
