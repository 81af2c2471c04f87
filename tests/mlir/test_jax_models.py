"""The third oracle for functions of JAX, which enter by another door: the text of each model of the suite runs."""

from __future__ import annotations

from typing import Any

import jax
import jax_models
import numpy as np
import pytest
import upstream_cases
from by_path import load

from qcompiler.frontends.jax.frontend import import_jax
from qcompiler.ir.mlir_oracle import mlir_jit, parses_in_mlir

models, libraries = load("tests/jax/test_models.py"), load("tests/jax/test_libraries.py")
FORMATS = (None, "nf4", "int8", "q8_0", "int4")


def agree(function: Any, example: Any, calls: Any, quant: Any, dynamic_shapes: Any = None) -> None:
    """The text for the sizes of `example`, the weights with them, at each of `calls`."""
    recipe = None if quant is None else models.qc.QuantConfig(quant, promise_bits=None)
    imported = import_jax(function, example, None, recipe, dynamic_shapes)
    oracle = jax.jit(imported.oracle())
    module = upstream_cases.of_stage(imported, "arguments")
    parses_in_mlir(module.text, upstream_only=True)
    for args in calls:
        given = [np.asarray(leaf) for leaf in jax.tree_util.tree_leaves(args)]
        got = mlir_jit(module.text, module.arguments(*given), level=0)
        wanted = [np.asarray(leaf) for leaf in jax.tree_util.tree_leaves(oracle(*args))]
        assert len(got) == module.outputs == len(wanted)
        for ours, theirs in zip(got, wanted, strict=True):
            assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
            assert np.linalg.norm(ours - theirs) <= 2e-5 * np.linalg.norm(theirs)


@pytest.mark.parametrize("name", models.CASES)
def test_models_in_plain_jax(name: str) -> None:
    function, made, args = models.CASES[name]
    agree(function, (made(), *args), [args], FORMATS[list(models.CASES).index(name) % len(FORMATS)])


@pytest.mark.parametrize("name", libraries.CASES)
def test_modules_of_flax_and_equinox(name: str) -> None:
    made, given, _, _ = libraries.CASES[name]
    function, args = made()
    agree(function, args, [(given,)], FORMATS[list(libraries.CASES).index(name) % len(FORMATS)])


def test_one_text_serves_every_size() -> None:
    tokens = jax_models.tokens
    calls = [(tokens(1, 1),), (tokens(3, 16),)]
    agree(jax_models.llama, (jax_models.llama_params(), tokens(2, 7)), calls, "nf4", models.WINDOW)


HOSTILE = (
    "quo\"te", "new\nline", "end\n#-}\n{-# dialect_resources: {", "back\\slash", "#} }", "sep\u2028arated", "é", "-",
    "1", 'x: "0x00', '%0 = "evil"()', "\x00", "", "a b", "a_b",
)  # fmt: skip


@pytest.mark.parametrize("weights", ["resources", "arguments"])
def test_names_of_parameters_do_not_reach_the_syntax(weights: Any) -> None:
    """Keys of a pytree may be any text; some become the same identifier."""
    made = np.random.default_rng(0)
    params = {name: made.standard_normal((32, 32)).astype(np.float32) / 6 for name in HOSTILE}

    def function(params: Any, x: Any) -> Any:
        for name in HOSTILE:
            x = jax.numpy.tanh(x @ params[name])
        return x

    x = made.standard_normal((2, 32)).astype(np.float32)
    imported = import_jax(function, (params, x), None, models.qc.QuantConfig("q8_0", promise_bits=None))
    wanted = np.asarray(jax.jit(imported.oracle())(x))
    module = upstream_cases.of_stage(imported, weights)
    parses_in_mlir(module.text, upstream_only=True)
    (got,) = mlir_jit(module.text, module.arguments(x), level=0)
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)
