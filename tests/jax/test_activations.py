"""int8 activations and bf16 arithmetic for functions of JAX: programs beside the oracle, which shares no code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax_models as models
import numpy as np
import pytest

import qcompiler as qc
from qcompiler.config import Activations
from qcompiler.errors import FrontendError, RecipeError
from qcompiler.formats import int8_rows
from qcompiler.frontends.jax.exported import Arithmetic
from qcompiler.frontends.jax.frontend import import_jax
from qcompiler.frontends.jax.oracle import codes_of, in_arithmetic

ROWS = np.random.default_rng(1).standard_normal((33, models.H)).astype(np.float32)
STEP = (models.tokens(2, 1), models.cache(2, 8), np.array(3, np.int32))
MODELS: dict[str, tuple[Any, Any, tuple[Any, ...]]] = {
    "mlp": (models.mlp, models.mlp_params, (ROWS,)),
    "one row": (models.mlp, models.mlp_params, (ROWS[:1],)),
    "decode": (models.decode, models.llama_params, STEP),
    "llama": (models.llama, models.llama_params, (models.tokens(2, 7),)),
    "mixture": (models.mixture, models.mixture_params, (ROWS[:7],)),
}
RECIPES: dict[str, tuple[str, dict[str, Any]]] = {
    "int8": ("int8", {"activations": "int8"}),
    "exact": ("int8", {"activations": "int8", "compute": "exact"}),
    "compute": ("int4", {"compute": "int8"}),
    "nf4": ("nf4", {"activations": "int8"}),
    "llm_int8": ("int8", {"activations": "llm_int8:2.0"}),
    "llm_int8, nf4": ("nf4", {"activations": "llm_int8:2.0"}),
}
CHOSEN = [("mlp", recipe) for recipe in RECIPES]
CHOSEN += [
    ("one row", "int8"),
    ("one row", "llm_int8"),
    ("decode", "llm_int8"),
    ("llama", "exact"),
    ("mixture", "int8"),
]
CASES = [pytest.param(*case, marks=[] if case == ("mlp", "int8") else [pytest.mark.slow]) for case in CHOSEN]


def recipe_of(name: str) -> qc.QuantConfig:
    format_, options = RECIPES[name]
    return qc.QuantConfig(format_, promise_bits=None, **options)


# attention of other recipes rounds to bf16, and its oracle does not (docs/quantisation.md)
@pytest.mark.parametrize(("model", "recipe"), CASES)
def test_a_program_has_the_codes_of_its_oracle(model: str, recipe: str, relative: Callable[[Any, Any], float]) -> None:
    function, made, args = MODELS[model]
    program = qc.qcompile(function, (made(), *args), quant=recipe_of(recipe))
    leaves = jax.tree_util.tree_leaves
    found, wanted = leaves(program(*args)), leaves(jax.jit(program.oracle)(*args))
    assert max(relative(f, w) for f, w in zip(found, wanted, strict=True)) < 2e-6
    plain = import_jax(function, (made(), *args), None, qc.QuantConfig(RECIPES[recipe][0], promise_bits=None))
    floats = leaves(plain.oracle()(*args))
    assert max(relative(f, w) for f, w in zip(found, floats, strict=True)) > 1e-3  # x is quantised


def test_codes_of_weights_are_multiplied_as_integers_where_the_format_allows() -> None:
    for name, how, op in (("int8", "multiplied as integers", "qc.quantize_rows"),
                          ("nf4", "codes of nf4 stand for values of a table", "math.roundeven")):  # fmt: skip
        result = import_jax(models.mlp, (models.mlp_params(), ROWS), None, recipe_of(name))
        assert op in str(result.module)
        assert [(stage, path) for stage, path, _ in result.decisions if stage == "activations"] == [
            ("activations", "up.kernel"), ("activations", "down.kernel"),
        ]  # fmt: skip
        assert all(how in what for stage, _, what in result.decisions if stage == "activations")


@pytest.mark.parametrize("kind", ["int8", "llm_int8:1.5"])
def test_the_oracle_rounds_as_the_format_says(kind: str) -> None:
    parsed = Activations.of(kind)
    x = np.concatenate([ROWS[:5], np.zeros((1, models.H), np.float32), ROWS[:1] * 1e-30])
    x[3, 7] = np.nan
    columns = (np.abs(x) >= 1.5).any(0, keepdims=True) if kind != "int8" else None
    rows = int8_rows.quantise(x, parsed.kind, parsed.threshold if columns is not None else 0.0, columns)  # type: ignore[arg-type]
    wanted = int8_rows.dequantise(rows, models.H)
    wanted = wanted if columns is None else np.where(columns, x, wanted)
    found = np.asarray(codes_of(jnp.asarray(x), parsed, (1,), ()))
    np.testing.assert_allclose(found, wanted, rtol=2e-7)  # XLA's division may differ in the last bit


def test_layouts_batches_and_vectors_of_products(check: Callable[..., Any]) -> None:
    p = {"a": ROWS[:24].T.copy(), "b": ROWS[:30].reshape(30, 8, 8), "e": ROWS[:32].reshape(2, 16, 64)}

    def products(p: Any, x: Any) -> Any:
        heads = jnp.einsum("bsd,odc->bsoc", x[..., :8], p["b"])
        return x @ p["a"], x[0, 0] @ p["a"], heads, jnp.einsum("ebd,efd->ebf", x, p["e"])

    x = np.random.default_rng(2).standard_normal((2, 3, 64)).astype(np.float32)
    for name in ("int8", "llm_int8"):
        recipe = qc.QuantConfig("int8", promise_bits=None, **RECIPES[name][1])
        check(products, p, x, quant=recipe)


def test_rows_of_a_tied_table_are_no_weight_of_the_next_product(check: Callable[..., Any]) -> None:
    p = {"table": ROWS[:30], "w": ROWS[:32].T.copy(), "stack": ROWS[:32].reshape(2, 16, 64)}

    def tied(p: Any, ids: Any) -> Any:
        x = p["table"][ids]
        return x @ p["w"], x @ p["table"].T, x @ jnp.take(p["stack"], 1, axis=0).T

    check(tied, p, np.array([[3, 7]], np.int32), quant=recipe_of("int8"))


@pytest.mark.slow
def test_bf16_arithmetic_is_in_the_oracle(relative: Callable[[Any, Any], float]) -> None:
    function, made, args = MODELS["mlp"]
    program = qc.qcompile(function, (made(), *args), quant=qc.QuantConfig("nf4", promise_bits=None, compute="bf16"))
    # Without bf16 instructions kernels keep elements of weights in fp32: each differs by up to 2^-9 of itself.
    assert relative(program(*args), jax.jit(program.oracle)(*args)) < 2**-8
    assert "bf16" in program.ir("import")


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_bf16_arithmetic_of_convolutions_is_in_the_oracle(dtype: Any, relative: Callable[[Any, Any], float]) -> None:
    function, params = models.conv_net, jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), models.conv_params())
    x = jnp.asarray(models.images(2, 16), dtype)
    chosen, other = ("bf16", "exact") if dtype == jnp.float32 else ("exact", "bf16")
    program, model = (
        qc.qcompile(function, (params, x), quant=qc.QuantConfig("int8", promise_bits=None, compute=compute))
        for compute in (chosen, other)
    )
    linears = [each for each in program.plan.kernels if each.template == "linear" and each.body.window is not None]
    wanted = ("bf16", "bf16") if chosen == "bf16" else ("bf16", "f32")
    assert linears and {(each.operands[0].dtype, each.operands[1].dtype) for each in linears} == {wanted}
    assert relative(program(x), jax.jit(program.oracle)(x)) < 2**-7
    if chosen == "bf16":
        assert 1e-4 < relative(jax.jit(program.oracle)(x), jax.jit(model.oracle)(x)) < 2**-6, (
            "the oracle rounds as well"
        )


def _calls(w: Any, x: Any) -> list[Any]:
    """Products inside of each kind of call, and reducers, whose jaxpr is no call."""
    custom = jax.custom_vjp(lambda w, x: x @ w + 1)
    custom.defvjp(lambda w, x: (x @ w, None), lambda _, g: (g, g))
    named = jax.lax.composite(lambda w, x: x @ w, "a.product")
    y = jax.jit(lambda x: x @ w)(x)
    return [
        jax.checkpoint(lambda x: jax.nn.silu(x @ w))(x), custom(w, x), named(w, x),
        jax.lax.reduce(y, -jnp.inf, jnp.maximum, (1,)), jax.lax.reduce(y, np.float32(0), lambda a, b: a + b, (0, 1)),
        jax.lax.reduce_window(y, -jnp.inf, lambda a, b: jnp.maximum(a, b) + 0, (1, 4), (1, 4), "VALID"),
    ]  # fmt: skip


def test_the_oracle_goes_into_calls_and_not_into_reducers(relative: Callable[[Any, Any], float]) -> None:
    w, x, codes = ROWS[:24, :24], ROWS[:5, :24], Activations.of("int8")
    run = in_arithmetic(lambda leaves, args, kwargs: _calls(leaves[0], *args), {0: Arithmetic(codes, bf16=False)})
    wanted, found = jax.jit(lambda w, x: (_calls(w, codes_of(x, codes, (1,), ())), run([w], (x,), {})))(w, x)
    assert max(relative(f, w) for f, w in zip(found, wanted, strict=True)) < 1e-6


def test_recipes_without_a_meaning_are_refused() -> None:
    with pytest.raises(RecipeError, match=r"activations='int8:static' needs calibration data"):
        import_jax(models.mlp, (models.mlp_params(), ROWS), None, qc.QuantConfig("int8", activations="int8:static"))
    with pytest.raises(RecipeError, match="no linear has a quantised weight"):
        import_jax(lambda p, x: x + p["w"], ({"w": ROWS}, ROWS), None, recipe_of("int8"))
    with pytest.raises(RecipeError, match="rotate: this is for exported graphs of torch only"):
        import_jax(models.mlp, (models.mlp_params(), ROWS), None, qc.QuantConfig("int8", rotate=True))


def test_an_oracle_of_mixed_layers_is_refused() -> None:
    params = models.llama_params()
    recipe = qc.QuantConfig("int8", promise_bits=None, activations="int8", rules={"layers.wq.0": None})
    result = import_jax(models.llama, (params, models.tokens(2, 7)), None, recipe)
    with pytest.raises(FrontendError, match=r"all parts of 'layers\.wq' in one way"):
        result.oracle()
