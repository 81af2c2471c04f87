"""Helpers of the tests of JAX: the interpreter's answer beside jax.jit's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import pytest

from qcompiler.frontends.jax.frontend import import_jax
from qcompiler.frontends.jax.importer import JaxImport
from qcompiler.ir.interpreter import run


def distance(found: Any, wanted: Any) -> float:
    """Relative L2 distance of floats in f64; integers and truth values must be equal (0 or infinity)."""
    found, wanted = np.asarray(found), np.asarray(wanted)
    assert found.shape == wanted.shape, (found.shape, wanted.shape)
    assert found.dtype == wanted.dtype, (found.dtype, wanted.dtype)
    if found.dtype.kind in "iub":
        return 0.0 if np.array_equal(found, wanted) else float("inf")
    a, b = found.astype(np.float64), wanted.astype(np.float64)
    special = ~np.isfinite(b)
    assert np.array_equal(a[special], b[special], equal_nan=True), "NaN and infinities differ"
    a, b = a[~special], b[~special]
    return float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30))


@pytest.fixture(scope="session")
def relative() -> Callable[[Any, Any], float]:
    """`relative(found, wanted)`."""
    return distance


@pytest.fixture(scope="session")
def interpreted() -> Callable[..., list[Any]]:
    """`interpreted(result, *arrays)`: what the interpreter makes of an imported module."""

    def answer(result: JaxImport, *arrays: Any) -> list[Any]:
        result.module.verify()
        return list(run(result.module, result.weights, [np.asarray(a) for a in arrays], states={}))

    return answer


@pytest.fixture(scope="session")
def check(interpreted: Callable[..., list[Any]]) -> Callable[..., JaxImport]:
    """Imports a function for these arguments and compares the interpreter with jax.jit, also for other arguments."""

    def compare(
        function: Callable[..., Any],
        *args: Any,
        tolerance: float = 1e-5,
        others: tuple[tuple[Any, ...], ...] = (),
        dynamic_shapes: Mapping[str, Any] | None = None,
        quant: Any = None,
    ) -> JaxImport:
        held = args if len(args) == 1 else args[1:]
        result = import_jax(function, args, None, quant, dynamic_shapes)
        for call in (held, *others):
            reference = result.oracle() if quant else (lambda *a: function(*args[: len(args) - len(held)], *a))
            wanted = jax.tree_util.tree_leaves(jax.jit(reference)(*call))
            found = interpreted(result, *(a for a in jax.tree_util.tree_leaves(call)))
            errors = [distance(f, w) for f, w in zip(found, wanted, strict=True)]
            assert max(errors, default=0.0) <= tolerance, errors
        return result

    return compare
