"""Small models in plain JAX, with weights of a fixed seed: each a function of (params, inputs) and its example."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

H, HEADS, KV, D, FF, V = 64, 4, 2, 16, 128, 96


def weights(**shapes: tuple[int, ...]) -> dict[str, Any]:
    """Gaussian arrays by name, scaled by the square root of their first dimension."""
    r = np.random.default_rng(3)
    return {
        name: jnp.asarray(r.standard_normal(s) / np.sqrt(s[-2] if len(s) > 1 else 4), jnp.float32)
        for name, s in shapes.items()
    }


def images(batch: int, side: int, channels: int = 3) -> Any:
    return np.random.default_rng(5).standard_normal((batch, side, side, channels)).astype(np.float32)


def tokens(batch: int, length: int) -> Any:
    return np.random.default_rng(6).integers(0, V, (batch, length)).astype(np.int32)


# --- an MLP ----------------------------------------------------------------------------------------------------------


def mlp_params() -> Any:
    layers = weights(w1=(H, FF), b1=(FF,), w2=(FF, H), b2=(H,))
    return {
        "up": {"kernel": layers["w1"], "bias": layers["b1"]},
        "down": {"kernel": layers["w2"], "bias": layers["b2"]},
    }


def mlp(params: Any, x: Any) -> Any:
    hidden = jax.nn.gelu(x @ params["up"]["kernel"] + params["up"]["bias"])
    return hidden @ params["down"]["kernel"] + params["down"]["bias"]


# --- Llama -----------------------------------------------------------------------------------------------------------


def rms_norm(x: Any, weight: Any) -> Any:
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * weight


def rope(x: Any, positions: Any) -> Any:
    frequencies = 1e4 ** (-jnp.arange(0, D, 2) / D)
    angles = positions[..., None, None] * frequencies
    first, second = jnp.split(x, 2, -1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def layer_params(count: int) -> Any:
    return weights(
        wq=(count, H, HEADS * D), wk=(count, H, KV * D), wv=(count, H, KV * D), wo=(count, HEADS * D, H),
        gate=(count, H, FF), up=(count, H, FF), down=(count, FF, H), norm1=(count, H), norm2=(count, H),
    )  # fmt: skip


def layer(p: Any, x: Any, positions: Any, attend: Any) -> Any:
    b, s, _ = x.shape
    h = rms_norm(x, p["norm1"])
    q = rope((h @ p["wq"]).reshape(b, s, HEADS, D), positions)
    k = rope((h @ p["wk"]).reshape(b, s, KV, D), positions)
    x = x + attend(q, k, (h @ p["wv"]).reshape(b, s, KV, D)).reshape(b, s, -1) @ p["wo"]
    h = rms_norm(x, p["norm2"])
    return x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]


def llama_params(count: int = 2) -> Any:
    return {"embed": weights(e=(V, H))["e"], "layers": layer_params(count), "norm": jnp.ones(H)}


def llama(params: Any, ids: Any) -> Any:
    """Logits of all positions; the layers are scanned over stacked weights, and the embedding is tied."""
    positions = jnp.arange(ids.shape[1])[None]

    def body(x: Any, p: Any) -> Any:
        return layer(p, x, positions, lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True)), None

    x, _ = lax.scan(body, params["embed"][ids], params["layers"])
    return rms_norm(x, params["norm"]) @ params["embed"].T


def cache(batch: int, length: int, count: int = 2) -> Any:
    zeros = np.zeros((count, batch, length, KV, D), np.float32)
    return {"k": zeros, "v": zeros.copy()}


def decode(params: Any, ids: Any, cache: Any, position: Any) -> Any:
    """Logits of one new token for each sequence, and the cache with it: returned caches are the state."""
    length = cache["k"].shape[2]

    def body(x: Any, given: Any) -> Any:
        p, old_k, old_v = given
        kept = {}

        def attend(q: Any, k: Any, v: Any) -> Any:
            kept["k"] = lax.dynamic_update_slice(old_k, k, (0, position, 0, 0))
            kept["v"] = lax.dynamic_update_slice(old_v, v, (0, position, 0, 0))
            seen = (jnp.arange(length) <= position)[None, None, None]
            return jax.nn.dot_product_attention(q, kept["k"], kept["v"], mask=seen)

        x = layer(p, x, position[None, None], attend)
        return x, (kept["k"], kept["v"])

    x, (k, v) = lax.scan(body, params["embed"][ids], (params["layers"], cache["k"], cache["v"]))
    return rms_norm(x, params["norm"]) @ params["embed"].T, {"k": k, "v": v}


# --- images ----------------------------------------------------------------------------------------------------------


def layer_norm(x: Any, scale: Any, bias: Any) -> Any:
    mean = x.mean(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-5) * scale + bias


def vit_params() -> Any:
    return weights(
        patch=(4, 4, 3, H), place=(17, H), cls=(1, 1, H), qkv=(H, 3, HEADS, D), out=(HEADS, D, H), up=(H, FF),
        down=(FF, H), s1=(H,), b1=(H,), s2=(H,), b2=(H,), head=(H, 10),
    )  # fmt: skip


def vit(p: Any, x: Any) -> Any:
    """Patches by a convolution, weights of three dimensions for the heads (as Flax has them), a class token."""
    x = lax.conv_general_dilated(x, p["patch"], (4, 4), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    x = x.reshape(x.shape[0], -1, H)
    x = jnp.concatenate([jnp.broadcast_to(p["cls"], (x.shape[0], 1, H)), x], 1) + p["place"]
    h = layer_norm(x, p["s1"], p["b1"])
    q, k, v = jnp.moveaxis(jnp.einsum("bsd,dthk->bsthk", h, p["qkv"]), 2, 0)
    scores = jax.nn.softmax(jnp.einsum("bshk,bthk->bhst", q, k) / np.sqrt(D), -1)
    x = x + jnp.einsum("bshk,hkd->bsd", jnp.einsum("bhst,bthk->bshk", scores, v), p["out"])
    x = x + jax.nn.gelu(layer_norm(x, p["s2"], p["b2"]) @ p["up"], approximate=False) @ p["down"]
    return x[:, 0] @ p["head"]


def conv_params() -> Any:
    return weights(c1=(3, 3, 3, 8), c2=(3, 3, 8, 16), b1=(8,), b2=(16,), head=(16, 10))


def conv_net(p: Any, x: Any) -> Any:
    for name in ("1", "2"):
        x = lax.conv_general_dilated(x, p["c" + name], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        x = jax.nn.relu(x + p["b" + name])
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    return x.mean((1, 2)) @ p["head"]


# --- a mixture of experts --------------------------------------------------------------------------------------------


def mixture_params(experts: int = 4) -> Any:
    return weights(router=(H, experts), gate=(experts, H, FF), up=(experts, H, FF), down=(experts, FF, H))


def mixture(p: Any, x: Any) -> Any:
    """The two best experts of four for each row; every expert computes every row, as is usual in plain JAX."""
    chosen, places = lax.top_k(jax.nn.softmax(x @ p["router"]), 2)
    share = jnp.zeros((x.shape[0], p["router"].shape[1])).at[jnp.arange(x.shape[0])[:, None], places].set(chosen)
    share = share / share.sum(-1, keepdims=True)
    hidden = jax.nn.silu(jnp.einsum("td,edf->etf", x, p["gate"])) * jnp.einsum("td,edf->etf", x, p["up"])
    return jnp.einsum("etd,te->td", jnp.einsum("etf,efd->etd", hidden, p["down"]), share)
