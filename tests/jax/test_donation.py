"""Donated arguments as states: a cache that the program keeps, beside the functional form."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax_models as models
import numpy as np
import pytest

import qcompiler as qc
from qcompiler.errors import ArgumentError
from qcompiler.frontends.jax.frontend import import_jax
from qcompiler.inspect.checks import copied_bytes

R = np.random.default_rng(0)
W = R.standard_normal((8, 8)).astype(np.float32)
X = R.standard_normal((6, 2, 8)).astype(np.float32)
CACHE = {"k": R.standard_normal((5, 2, 8)).astype(np.float32)}


def step(w: Any, x: Any, cache: Any, n: Any) -> Any:
    """Writes row n of the cache and sums it."""
    k = jax.lax.dynamic_update_slice(cache["k"], (x @ w)[None], (n, 0, 0))
    return k.sum(0) + x, {"k": k}


def numbers(count: int) -> list[np.ndarray[Any, Any]]:
    return [np.array(n, np.int32) for n in range(count)]


EXAMPLE = (W, X[0], CACHE, numbers(1)[0])


@pytest.fixture(scope="module")
def program() -> qc.Program:
    return qc.qcompile(step, EXAMPLE, donate_argnums=2)


def functional(turns: int) -> list[Any]:
    cache, found = CACHE, []
    for n in numbers(turns):
        y, cache = jax.jit(step)(W, X[n], cache, n)
        found.append(np.asarray(y))
    return found


def test_the_state_gives_what_the_functional_form_gives(program: qc.Program) -> None:
    assert copied_bytes(program.plan) == {"main": {}}  # in place
    session, mine, wanted = program.session(), program.session(), functional(5)
    for n in numbers(5):
        y, gone = session(X[n], n)
        assert gone is None and np.allclose(y, wanted[n], rtol=1e-5, atol=1e-5)
    assert np.allclose(mine(x=X[0], n=numbers(1)[0])[0], wanted[0], rtol=1e-5, atol=1e-5)  # a session of its own
    session.reset()
    assert np.allclose(session(jnp.asarray(X[0]), numbers(1)[0])[0], wanted[0], rtol=1e-5, atol=1e-5)


def test_a_state_begins_as_the_example_and_is_in_the_file(program: qc.Program, tmp_path: Path) -> None:
    program.save(tmp_path / "step.qca")
    loaded = qc.load(tmp_path / "step.qca")
    assert np.array_equal(loaded(X[0], numbers(1)[0])[0], program.session()(X[0], numbers(1)[0])[0])
    assert "state" in str(program.report())
    struct = jax.tree_util.tree_map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), CACHE)
    assert not import_jax(step, (W, X[0], struct, numbers(1)[0]), donated=2).states["cache.k"].any()


class Two(NamedTuple):
    a: Any
    y: Any
    b: Any


def forms(p: Any, x: Any, a: Any, b: Any) -> Two:
    return Two(a + x, (x @ p).sum(), b * 2)


def test_arguments_of_one_kind_are_paired_in_order() -> None:
    result = import_jax(forms, (W, X[0], X[1], X[2]), donated=(2, 3))
    assert list(result.states) == ["a", "b"]
    assert list(result.quantized.exported.graph.states.values()) == [0, 2]
    assert result.signature.inputs["names"] == ["x"] and result.signature.outputs["keys"] == ["a", "y", "b"]
    assert [item["kind"] for item in result.signature.outputs["items"]] == ["none", "leaf", "none"]
    assert len([what for what, _ in result.notes if "is a state" in what]) == 2


def test_a_jitted_functions_own_donation_changes_no_call() -> None:
    jitted = jax.jit(step, donate_argnums=2)
    plain = import_jax(jitted, EXAMPLE)
    assert plain.states == {} and plain.signature.inputs["names"] == ["x", "cache", "n"]
    ((what, way),) = plain.notes
    assert what == "the donated argument 'cache' stays an input" and "donate_argnums=2" in way
    assert list(import_jax(jitted, EXAMPLE, donated=2).states) == ["cache.k"]  # the number of the note
    left = import_jax(jitted, EXAMPLE, donated=())
    assert left.states == {} and left.notes == []


@pytest.mark.slow
def test_a_donated_argument_that_is_no_cache_is_passed_as_ever() -> None:
    def moved(w: Any, x: Any, t: Any) -> Any:
        return x @ w * t

    t = np.float32(2)
    program = qc.qcompile(jax.jit(moved, donate_argnums=1), (W, X[0], t))
    assert np.allclose(program(X[0], t), moved(W, X[0], t), rtol=1e-5, atol=1e-5)
    assert "donate_argnums=1" in str(program.report())


def test_a_donated_keyword_is_noted() -> None:
    jitted = jax.jit(lambda p, x, *, c: (x @ p, c + 1), donate_argnames="c")
    result = import_jax(jitted, (W, X[0]), {"c": X[1]})
    assert result.states == {} and [what for what, _ in result.notes] == ["a donated keyword argument stays an input"]


@pytest.mark.parametrize(("donated", "message"), [
    (0, "holds the weights"), (4, "arguments 0 to 3"), (-1, "arguments 0 to 3"), (True, "arguments 0 to 3"),
    (3, r"'n' becomes a state if.*of 1 such arguments there are 0 results"),
])  # fmt: skip
def test_donations_without_a_result_are_refused(donated: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        import_jax(step, EXAMPLE, donated=donated)


def test_ambiguous_and_dynamic_donations_are_refused() -> None:
    with pytest.raises(ArgumentError, match="of 1 such arguments there are 2 results"):
        import_jax(lambda p, x: (x + 1, x @ p), (W, X[0]), donated=1)
    with pytest.raises(ArgumentError, match="'x' has a dynamic size"):
        import_jax(lambda p, x: x @ p, (W, X[0]), None, None, {"x": {0: ("b", 1, 4)}}, donated=1)
    with pytest.raises(ArgumentError, match="states in its buffers"):
        import torch

        qc.qcompile(torch.nn.Linear(2, 2), (torch.ones(1, 2),), donate_argnums=0)


@pytest.mark.slow
def test_a_decode_step_with_its_cache_as_state(relative: Callable[[Any, Any], float]) -> None:
    recipe, ids = qc.QuantConfig("nf4", promise_bits=None), models.tokens(2, 6)
    example = (models.llama_params(), ids[:, :1], models.cache(2, 8), numbers(1)[0])
    program = qc.qcompile(models.decode, example, quant=recipe, donate_argnums=2)
    oracle, cache = jax.jit(program.oracle), models.cache(2, 8)  # the oracle keeps the functional form
    for n in numbers(6):
        wanted, cache = oracle(ids[:, n : n + 1], cache, n)
        logits, gone = program(ids[:, n : n + 1], n)
        assert gone is None and relative(logits, wanted) < 1e-5


@pytest.mark.slow
def test_a_captured_step_advances_the_state_on_the_simulated_gpu() -> None:
    program, wanted = qc.qcompile(step, EXAMPLE, donate_argnums=2, device="sim:0"), functional(4)
    graph = program.capture(X[0], numbers(1)[0])
    for n in numbers(3):
        assert np.allclose(graph.replay(X[n], n)[0], wanted[n], rtol=1e-5, atol=1e-5)
    last = program(jnp.asarray(X[3]), jnp.int32(3))[0]
    assert isinstance(last, jax.Array) and np.allclose(last, wanted[3], rtol=1e-5, atol=1e-5)
    program.reset()
    assert np.allclose(graph.replay(X[0], numbers(1)[0])[0], wanted[0], rtol=1e-5, atol=1e-5)
