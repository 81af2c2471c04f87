"""Which arrays are weights, how they are stored, and what the ledger says of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax_models as models
import numpy as np
import pytest

import qcompiler as qc
from qcompiler.errors import ExportError, FormatShapeError, RecipeError, WeightsError
from qcompiler.frontends.jax import trees
from qcompiler.frontends.jax.frontend import import_jax
from qcompiler.frontends.jax.importer import JaxImport

R = np.random.default_rng(2)
X = R.standard_normal((3, models.H)).astype(np.float32)
SHARED = "it is read as several matrices with common elements (two orientations, two types or overlapping slices)"
ANY_SIZE = qc.QuantConfig("nf4", promise_bits=None)
IDS = np.array([[1, 2, 3]], np.int32)
W = models.weights(w=(models.H, models.H))["w"]


def formats(result: JaxImport) -> dict[str, str]:
    return {row.parameters[0]: row.format or row.reason for row in result.ledger}


def test_the_ledger_shows_pytree_paths_and_the_shape_that_the_function_has() -> None:
    result = import_jax(models.mlp, (models.mlp_params(), X), quant="nf4")
    assert formats(result) == {
        "down.bias": "fewer than two dimensions", "down.kernel": "nf4:block=64",
        "up.bias": "fewer than two dimensions", "up.kernel": "nf4:block=64",
    }  # fmt: skip
    assert next(row for row in result.ledger if row.parameters == ("up.kernel",)).shape == (models.H, models.FF)


def test_stacked_layers_are_one_weight_each() -> None:
    params = models.llama_params(3)
    found = formats(
        import_jax(models.llama, (params, models.tokens(1, 5)), quant=qc.QuantConfig("nf4", promise_bits=None))
    )
    assert [found[f"layers.wq.{n}"] for n in range(3)] == ["nf4:block=64"] * 3
    assert found["embed"].startswith("int8")  # read as rows and as the head: one tensor


def test_a_rule_names_a_layer_of_a_stack() -> None:
    rules = {"layers.down.1": None, "layers.w?.0": "int8"}
    quant = qc.QuantConfig("nf4", rules=rules, promise_bits=None)
    found = formats(import_jax(models.llama, (models.llama_params(), models.tokens(1, 5)), quant=quant))
    assert found["layers.down.1"].startswith("rule") and found["layers.wk.0"].startswith("int8")
    with pytest.raises(RecipeError, match="matches no module"):
        import_jax(models.mlp, (models.mlp_params(), X), quant=qc.QuantConfig("nf4", rules={"upp": None}))


def test_weights_of_experts_are_one_weight_each() -> None:
    found = formats(import_jax(models.mixture, (models.mixture_params(), X), quant="nf4"))
    assert {found[f"down.{n}"] for n in range(4)} == {"nf4:block=64"}
    assert found["gate"] == "nf4:block=64"


def test_a_matrix_in_two_orientations_is_kept_with_the_reason() -> None:
    found = formats(
        import_jax(lambda p, x: (x @ p["w"]) @ p["w"].T, ({"w": W}, X), quant=qc.QuantConfig("nf4", promise_bits=None))
    )
    assert found == {"w": SHARED}


def test_a_format_that_does_not_fit_names_the_path() -> None:
    with pytest.raises(FormatShapeError, match=r"parameter 'up\.kernel' \(128 x 64\)"):
        import_jax(models.mlp, (models.mlp_params(), X), quant=qc.QuantConfig("nf4", rules={"up": "q4_K"}))


class Layer(NamedTuple):
    """A pytree with fields."""

    weight: Any
    bias: Any

    def __call__(self, x: Any) -> Any:
        return x @ self.weight + self.bias


@jax.tree_util.register_pytree_with_keys_class
class Module:
    """A callable pytree, as an Equinox module is; `activation` is no array and stays as it is."""

    def __init__(self, layers: Any, activation: Any) -> None:
        self.layers, self.activation = layers, activation

    def tree_flatten_with_keys(self) -> Any:
        return [(jax.tree_util.GetAttrKey("layers"), self.layers)], self.activation

    @classmethod
    def tree_unflatten(cls, activation: Any, children: Any) -> Any:
        return cls(children[0], activation)

    def __call__(self, x: Any) -> Any:
        for layer in self.layers:
            x = self.activation(layer(x))
        return x


def test_a_callable_pytree_holds_its_own_weights() -> None:
    module = Module([Layer(W, jnp.zeros(models.H))], jax.nn.relu)
    result = import_jax(module, (X,), quant="int8")
    assert list(formats(result)) == ["layers.0.weight", "layers.0.bias"]
    assert result.signature.inputs["args"]["items"] == [{"kind": "leaf", "index": 0}]


def test_a_function_of_one_argument_has_no_weights() -> None:
    result = import_jax(lambda x: x @ x.T, (X,))
    assert not formats(result)


def test_a_conversion_behind_a_weight_is_the_arithmetic() -> None:
    result = import_jax(lambda p, x: x.astype(jnp.bfloat16) @ p["w"].astype(jnp.bfloat16), ({"w": W}, X), quant="int8")
    assert result.weights["w"].dtype == "bf16" and formats(result) == {"w": "int8"}


def test_compute_bf16_decodes_linears_to_bf16() -> None:
    result = import_jax(models.mlp, (models.mlp_params(), X), quant=qc.QuantConfig("int8", compute="bf16"))
    assert "tensor<128x64xbf16>" in str(result.module)


def test_a_plan_without_values_has_sizes() -> None:
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), models.mlp_params())
    result = import_jax(models.mlp, (shapes, X), quant="nf4", valued=False)
    assert result.ledger.rows[1].bytes_after == 64 * 128 * 36 // 64
    with pytest.raises(WeightsError, match=r'weights="none"'):
        result.oracle()


def test_a_saved_program_runs_where_jax_cannot_be_imported(tmp_path: Path) -> None:
    program = qc.qcompile(models.mlp, (models.mlp_params(), X), quant="nf4")
    program.save(tmp_path / "mlp.qca")
    np.save(tmp_path / "x.npy", X)
    np.save(tmp_path / "y.npy", program(jnp.asarray(X)))
    code = (
        "import sys; sys.modules.update(jax=None, jaxlib=None, torch=None, xdsl=None)\n"
        "import numpy as np, qcompiler as qc\n"
        "y = qc.load(sys.argv[1] + '/mlp.qca')(np.load(sys.argv[1] + '/x.npy'))\n"
        "assert np.array_equal(y, np.load(sys.argv[1] + '/y.npy'))\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)


def both_slices(p: Any, x: Any) -> Any:
    return x @ p["w"][0:32], x @ p["w"][16:48]


def both_orientations(p: Any, x: Any) -> Any:
    return (x @ p["s"][0]) @ p["s"][0].T


def both_names(p: Any, x: Any) -> Any:
    return x @ p["s"][0] + x @ p["s.0"]


@pytest.mark.parametrize(("function", "leaf", "why"), [
    (both_slices, "w", SHARED), (both_orientations, "s", SHARED),
    (both_names, "s", "its part 's.0' has the name of another array"),
])  # fmt: skip
def test_matrices_that_share_elements_or_names_stay_one_tensor(check: Any, function: Any, leaf: str, why: str) -> None:
    params = {"w": R.standard_normal((48, 64)), "s": R.standard_normal((2, 32, 32)), "s.0": R.standard_normal((32, 32))}
    params = {name: w.astype(np.float32) for name, w in params.items()}
    result = check(function, params, X[:, :32], quant=ANY_SIZE)
    assert next(row for row in result.ledger if row.parameters == (leaf,)).reason == why


def test_slices_side_by_side_are_weights_of_their_own(check: Any) -> None:
    w = R.standard_normal((32, 128)).astype(np.float32)
    result = check(lambda p, x: (x @ p["w"][:, :64], x @ p["w"][:, 64:]), {"w": w}, X[:, :32], quant=ANY_SIZE)
    assert formats(result) == {"w.0-64": "nf4:block=64", "w.64-128": "nf4:block=64"}


def test_a_weight_that_is_rounded_and_widened_keeps_its_rounding(check: Any) -> None:
    w = {"w": R.standard_normal((32, 32)).astype(np.float32)}
    check(lambda p, x: x @ p["w"].astype(jnp.bfloat16).astype(jnp.float32), w, X[:, :32], quant=ANY_SIZE)
    check(lambda p, x: x @ p["w"].astype(jnp.bfloat16).astype(jnp.float32), w, X[:, :32])


def test_sixteen_bits_that_are_widened_decode_to_fp32(check: Any) -> None:
    """The oracle does not round what the program does not: bf16 would be 1e-3 off."""
    w = {"w": jnp.asarray(R.standard_normal((32, 32)), jnp.bfloat16)}
    check(lambda p, x: x @ p["w"].astype(jnp.float32), w, X[:, :32], quant=ANY_SIZE)


def layers_of_sixteen_bits(p: Any, ids: Any) -> Any:
    """The types of the weights decide the function's arithmetic."""
    h = p["embed"].astype(p["stack"].dtype).astype(jnp.float32)[ids]
    h = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w.astype(h.dtype)), None), h, p["stack"])[0]
    return jax.lax.conv(h.swapaxes(1, 2), p["kernel"].astype(jnp.float32), (1,), "SAME")


@pytest.mark.slow
@pytest.mark.parametrize("activations", [None, "int8"])
def test_widened_weights_of_every_kind(check: Any, activations: Any) -> None:
    sizes = {"embed": (50, 32), "stack": (2, 32, 32), "kernel": (8, 32, 3)}
    params = {name: jnp.asarray(R.standard_normal(size), jnp.bfloat16) / 8 for name, size in sizes.items()}
    params["embed"] = params["embed"].astype(jnp.float16)
    quant = qc.QuantConfig("int8", promise_bits=None, activations=activations)
    # an int8 code of an activation may differ by one where its value is at a boundary
    check(layers_of_sixteen_bits, params, IDS, quant=quant, tolerance=1e-5 if activations is None else 1e-3)


def test_two_arrays_with_one_path_are_refused() -> None:
    params = {"a.b": np.ones((4, 4), np.float32), "a": {"b": np.ones((4, 4), np.float32)}}
    with pytest.raises(ExportError, match=r"two arrays.*'a\.b'"):
        import_jax(lambda p, x: x @ p["a.b"] + x @ p["a"]["b"], (params, np.ones((2, 4), np.float32)))


class _Variable:
    """Stands for a variable of Flax NNX: a node whose only leaf is its value."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _variables(module: str) -> Any:
    """A pytree with a class of the name `Variable` of a module, and a subclass."""
    base = type("Variable", (_Variable,), {"__module__": module})
    found = type("Param", (base,), {"__module__": "elsewhere"})
    jax.tree_util.register_pytree_with_keys(
        found, lambda v: (((jax.tree_util.GetAttrKey("value"), v.value),), None), lambda _, parts: found(*parts)
    )
    return found


@pytest.mark.parametrize(("module", "path"), [("flax.nnx.variablelib", "up.kernel"), ("other", "up.kernel.value")])
def test_a_variable_of_nnx_has_the_path_of_its_place_and_no_value_in_it(module: str, path: str) -> None:
    """Told by the class's name and module: a class of the same name elsewhere keeps its path."""
    variable = _variables(module)
    (found,) = trees.leaf_paths({"up": {"kernel": variable(W)}})
    assert trees.path_text(found[0]) == path and found[1] is W
    result = import_jax(lambda p, x: x @ p["up"]["kernel"].value, ({"up": {"kernel": variable(W)}}, X), quant=ANY_SIZE)
    assert formats(result) == {path: "nf4:block=64"}


def test_typed_keys_beside_the_weights_stay_fixed(check: Any) -> None:
    """A module of NNX with dropout holds its stream of random numbers, also where dropout is off."""
    params = {"w": jnp.ones((4, 4)), "key": jax.random.key(3), "count": jnp.uint32(2)}

    def dropped(p: Any, x: Any) -> Any:
        kept = jax.random.bernoulli(jax.random.fold_in(p["key"], p["count"]), 0.5, x.shape)
        return jnp.where(kept, x @ p["w"], 0)

    found = check(dropped, params, np.ones((3, 4), np.float32))
    assert {row.parameters[0] for row in found.ledger} == {"w", "count"}


def test_a_callable_pytree_without_arrays_is_a_function(check: Any) -> None:
    """What `equinox.filter_jit` makes of a function is one: the module that it takes is the first argument."""
    wrapped = jax.tree_util.Partial(lambda p, x: x @ p["w"])
    found = check(wrapped, {"w": jnp.ones((4, 2))}, np.ones((3, 4), np.float32))
    assert [row.parameters[0] for row in found.ledger] == ["w"]


def test_a_constraint_on_the_place_of_an_array_changes_nothing(check: Any) -> None:
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    check(lambda x: jax.lax.with_sharding_constraint(x * 2, place) + 1, np.ones((3, 4), np.float32))


@pytest.mark.parametrize("scale", [jnp.float32(2), jnp.uint8(3), jnp.array(True)], ids=str)
def test_a_single_number_is_a_weight_without_dimensions(scale: Any, check: Any) -> None:
    params = {"w": jnp.ones((4, 4)), "scale": scale}
    check(lambda p, x: x @ p["w"] * p["scale"].astype(jnp.float32), params, np.ones((3, 4), np.float32))
