"""Whole models in plain JAX: float ones beside jax.jit, quantised ones beside the oracle, at batch 1 and more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax_models as models
import numpy as np
import pytest

import qcompiler as qc
from qcompiler.api import compile_target, run_stages
from qcompiler.frontends.jax.frontend import import_jax
from qcompiler.inspect.dumps import StageDumps
from qcompiler.ir.context import QCContext

ROWS = np.random.default_rng(1).standard_normal((33, models.H)).astype(np.float32)
RECIPE = qc.QuantConfig("nf4", promise_bits=None)  # small models: norms and positions are a large share
WINDOW = {"ids": {0: ("b", 1, 32), 1: ("s", 1, 64)}}
POSITION = np.array(3, np.int32)

Case = tuple[Callable[..., Any], Callable[[], Any], tuple[Any, ...]]
CASES: dict[str, Case] = {
    "mlp, 1 row": (models.mlp, models.mlp_params, (ROWS[:1],)),
    "mlp, 32 rows": (models.mlp, models.mlp_params, (ROWS[:32],)),
    "mlp, 33 rows": (models.mlp, models.mlp_params, (ROWS,)),
    "llama, 1 token": (models.llama, models.llama_params, (models.tokens(1, 1),)),
    "llama, 2 x 7": (models.llama, models.llama_params, (models.tokens(2, 7),)),
    "llama, 32 x 8": (models.llama, models.llama_params, (models.tokens(32, 8),)),
    "decode, 1": (models.decode, models.llama_params, (models.tokens(1, 1), models.cache(1, 16), POSITION)),
    "decode, 5": (models.decode, models.llama_params, (models.tokens(5, 1), models.cache(5, 17), POSITION)),
    "vit, 1": (models.vit, models.vit_params, (models.images(1, 16),)),
    "vit, 3": (models.vit, models.vit_params, (models.images(3, 16),)),
    "conv net": (models.conv_net, models.conv_params, (models.images(2, 16),)),
    "conv net, odd": (models.conv_net, models.conv_params, (models.images(1, 15),)),
    "mixture, 1": (models.mixture, models.mixture_params, (ROWS[:1],)),
    "mixture, 7": (models.mixture, models.mixture_params, (ROWS[:7],)),
}
SHORT = {"mlp, 1 row", "decode, 1", "vit, 1", "mixture, 7"}


def cases(*short: str) -> list[Any]:
    """All cases; those outside of `short` only in the full run."""
    return [pytest.param(name, marks=[] if name in short else [pytest.mark.slow]) for name in CASES]


def errors(found: Any, wanted: Any, relative: Callable[[Any, Any], float]) -> list[float]:
    leaves = jax.tree_util.tree_leaves
    return [relative(f, w) for f, w in zip(leaves(found), leaves(wanted), strict=True)]


@pytest.mark.parametrize("name", cases(*SHORT))
def test_the_imported_function_is_the_function(
    name: str, interpreted: Callable[..., Any], relative: Callable[[Any, Any], float]
) -> None:
    function, made, args = CASES[name]
    params = made()
    result = import_jax(function, (params, *args))
    found = interpreted(result, *jax.tree_util.tree_leaves(args))
    assert max(errors(found, jax.jit(function)(params, *args), relative)) < 1e-5


@pytest.mark.parametrize("name", cases("mlp, 1 row"))
def test_a_quantised_program_equals_its_oracle(name: str, relative: Callable[[Any, Any], float]) -> None:
    function, made, args = CASES[name]
    params = made()
    program = qc.qcompile(function, (params, *args), quant=RECIPE, verify_each="numerics")
    assert max(errors(program(*args), jax.jit(program.oracle)(*args), relative)) < 1e-5
    assert any(row.format.startswith("nf4") for row in program.ledger)
    assert max(errors(program(*args), jax.jit(function)(params, *args), relative)) > 1e-3  # it is quantised


def test_one_program_serves_every_size(interpreted: Callable[..., Any], relative: Callable[[Any, Any], float]) -> None:
    params = models.llama_params()
    result = import_jax(models.llama, (params, models.tokens(2, 7)), dynamic_shapes=WINDOW)
    assert result.symbols == {"b": (1, 32), "s": (1, 64)}
    for batch, length in ((1, 1), (3, 16)):
        ids = models.tokens(batch, length)
        assert relative(interpreted(result, ids)[0], jax.jit(models.llama)(params, ids)) < 1e-5


@pytest.mark.slow
def test_a_dynamic_program_serves_every_size(relative: Callable[[Any, Any], float]) -> None:
    params = models.llama_params()
    program = qc.qcompile(models.llama, (params, models.tokens(2, 7)), quant=RECIPE, dynamic_shapes=WINDOW)
    for batch, length in ((1, 1), (1, 33), (32, 8)):
        ids = models.tokens(batch, length)
        assert relative(program(ids), jax.jit(program.oracle)(ids)) < 1e-5


@pytest.mark.slow
def test_tokens_in_turn_give_the_logits_of_all_at_once(relative: Callable[[Any, Any], float]) -> None:
    params, ids = models.llama_params(), models.tokens(2, 6)
    example = (params, ids[:, :1], models.cache(2, 8), POSITION)
    program = qc.qcompile(models.decode, example, quant=RECIPE)
    whole = qc.qcompile(models.llama, (params, ids), quant=RECIPE)(ids)
    cache = models.cache(2, 8)
    for n in range(6):
        logits, cache = program(ids[:, n : n + 1], cache, np.array(n, np.int32))
        assert relative(logits[:, 0], whole[:, n]) < 1e-5


def test_symbols_of_jax_bring_their_ranges(check: Callable[..., Any]) -> None:
    (size,) = jax.export.symbolic_shape("n", constraints=["n >= 2", "n <= 48"])
    struct = jax.ShapeDtypeStruct((size, models.H), jnp.float32)
    result = import_jax(models.mlp, (models.mlp_params(), struct))
    assert result.symbols == {"n": (2, 48)}
    assert result.quantized.exported.graph.arguments[0].shape == ("n", models.H)


@pytest.mark.slow
def test_rms_norms_and_layer_norms_become_one_op() -> None:

    for function, made, args, wanted in (
        (models.llama, models.llama_params, (models.tokens(2, 7),), "qc.rms_norm"),
        (models.vit, models.vit_params, (models.images(1, 16),), "qc.layer_norm"),
    ):
        result, dumps = import_jax(function, (made(), *args)), StageDumps(None)
        context = QCContext.default(weights=result.weights, target=compile_target(("cpu",), None))
        run_stages(result.module, context, dumps, {})
        assert wanted in dumps.text("raise-idioms")


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 3])
def test_norms_whose_gain_is_one_number_in_bf16(rows: int, relative: Callable[[Any, Any], float]) -> None:
    """Constants of 64 equal numbers are stored as one, which the kernels of norms and linears do not read."""

    def normed(p: Any, x: Any) -> Any:
        h, gain = x.astype(jnp.float32), jnp.full(64, 1.5, jnp.bfloat16).astype(jnp.float32)
        h = (h * jax.lax.rsqrt((h * h).mean(-1, keepdims=True) + 1e-6) * gain).astype(jnp.bfloat16)
        return h, h @ p["w"] + jnp.broadcast_to(p["bias"], 64)

    draw = np.random.default_rng(0)
    params = {"w": jnp.asarray(draw.standard_normal((64, 64)) / 8, jnp.bfloat16), "bias": jnp.ones(1, jnp.bfloat16)}
    x = jnp.asarray(draw.standard_normal((rows, 64)), jnp.bfloat16)
    program = qc.qcompile(normed, (params, x))
    for ours, theirs in zip(program(x), jax.jit(lambda x: normed(params, x))(x), strict=True):
        assert relative(ours, theirs) < 2**-8  # one rounding to bf16, which fusion may leave out
