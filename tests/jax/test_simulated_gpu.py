"""Functions of JAX on the simulated GPU: equal to the CPU, captured, and replayed with new inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax_models as models
import numpy as np
import pytest

import qcompiler as qc

R = np.random.default_rng(4)
RECIPE = qc.QuantConfig("int4", promise_bits=None)


def rows(count: int) -> Any:
    return R.standard_normal((count, models.H)).astype(np.float32)


def cache() -> Any:
    return jax.tree_util.tree_map(lambda a: R.standard_normal(a.shape).astype(np.float32), models.cache(1, 4, 1))


STEP = np.array(1, np.int32)
CASES: dict[str, tuple[Any, Any, tuple[Any, ...], tuple[Any, ...]]] = {
    "mlp": (models.mlp, models.mlp_params(), (rows(3),), (rows(3),)),
    "llama": (models.llama, models.llama_params(1), (models.tokens(1, 3),), (models.tokens(1, 3) // 2,)),
    "decode": (models.decode, models.llama_params(1), (models.tokens(1, 1), cache(), STEP),
               (models.tokens(1, 1) // 3, cache(), STEP + np.int32(1))),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_captured_function_equals_the_cpu(name: str, relative: Callable[[Any, Any], float]) -> None:
    function, params, first, second = CASES[name]
    there = qc.qcompile(function, (params, *first), quant=RECIPE, device="sim:0")
    oracle = jax.jit(there.oracle)
    leaves = jax.tree_util.tree_leaves
    graph = there.capture(*first)
    for args in (first, second):
        wanted = leaves(oracle(*args))
        for call in (there, graph.replay):
            found = call(*jax.tree_util.tree_map(jnp.asarray, args))
            assert all(isinstance(each, jax.Array) for each in leaves(found))
            assert max(relative(f, w) for f, w in zip(leaves(found), wanted, strict=True)) < 1e-5
    here = leaves(qc.qcompile(function, (params, *first), quant=RECIPE)(*second))
    assert max(relative(f, w) for f, w in zip(leaves(found), here, strict=True)) < 1e-5
