"""`qcompile(calibrate=…)` of functions of JAX: codes and scales by the inputs that linears get."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jax_models as models
import numpy as np
import pytest
import torch
from jax import lax
from torch import nn

import qcompiler as qc
from qcompiler import formats
from qcompiler.calibrate import gptq
from qcompiler.config import resolve_format
from qcompiler.errors import (
    ArgumentDtypeError,
    ArgumentError,
    ArgumentShapeError,
    ArgumentStructureError,
    CalibrationError,
    RecipeError,
)
from qcompiler.formats import int8_rows
from qcompiler.frontends.jax.float_run import Calibration
from qcompiler.frontends.jax.frontend import import_jax
from qcompiler.frontends.quantise.calibrate import Calibration as TorchCalibration
from qcompiler.frontends.torch.frontend import import_torch
from qcompiler.ir.interpreter import run

K = 64
INT4 = resolve_format("int4:group=32")


def rows(count: int, cols: int = K, seed: int = 1) -> Any:
    """Correlated inputs, some columns larger than others."""
    r = np.random.default_rng(seed)
    x = r.standard_normal((count, cols)) * np.linspace(0.1, 3, cols)
    return (x + x @ np.random.default_rng(9).standard_normal((cols, cols)) / cols**0.5).astype(np.float32)


DATA = [rows(200, seed=seed) for seed in range(2)]


def recipe(**options: Any) -> qc.QuantConfig:
    fields: dict[str, Any] = {"preset": "int4:group=32", "promise_bits": None, "algorithm": "gptq"}
    return qc.QuantConfig(**fields | options)


def imported(function: Any, args: Any, quant: Any = None, data: Any = DATA, **options: Any) -> Any:
    calibration = Calibration(data) if data is not None else None
    return import_jax(function, args, None, quant or recipe(), calibration=calibration, **options)


def decoded(result: Any, key: str) -> Any:
    stored = result.weights[key]
    fmt = formats.get(stored.format.name, **stored.format.params)
    return fmt.decode(formats.PackedTensor(fmt, *stored.shape, np.asarray(stored.data)))


def said(result: Any, stage: str = "codes") -> dict[str, str]:
    return {path: what for found, path, what in result.decisions if found == stage}


def stacked(p: Any, x: Any) -> Any:
    return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, p["w"])[0]


STACK = {"w": models.weights(w=(2, K, K))["w"]}


# --- codes -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_codes_of_an_mlp_are_those_of_the_same_model_in_torch() -> None:
    p = models.mlp_params()
    model = nn.Sequential(nn.Linear(models.H, models.FF), nn.GELU("tanh"), nn.Linear(models.FF, models.H)).eval()
    for module, name in ((model[0], "up"), (model[2], "down")):
        module.weight.data = torch.from_numpy(np.array(p[name]["kernel"]).T.copy())  # type: ignore[union-attr]
        module.bias.data = torch.from_numpy(np.array(p[name]["bias"]))  # type: ignore[union-attr]
    given = [torch.from_numpy(x) for x in DATA]
    theirs = import_torch(model, (given[0],), quant=recipe(), calibration=TorchCalibration(given))
    ours = imported(models.mlp, (p, DATA[0]))
    for name, path in (("up", "0.weight"), ("down", "2.weight")):
        found, wanted = decoded(ours, f"{name}.kernel"), decoded(theirs, path)
        # Sums of fp32 in another order move what is rounded by ulps: codes at a tie, and those behind them, differ.
        assert np.mean(found == wanted) > 0.995
        assert said(ours)[f"{name}.kernel"] == {p: what for _, p, what in theirs.decisions}[path]


def test_each_layer_of_a_scan_is_solved_for_what_the_layers_before_it_decode_to() -> None:
    result, x = imported(stacked, (STACK, DATA[0])), np.concatenate(DATA)
    for layer in range(2):
        matrix = np.ascontiguousarray(np.asarray(STACK["w"][layer]).T)
        wide = x.astype(np.float64)
        solved = gptq.solve(matrix, INT4.encode(matrix), wide.T @ wide)
        found = decoded(result, f"w.{layer}")
        assert np.mean(found == INT4.decode(solved.packed)) > 0.995
        assert np.mean(found == INT4.decode(INT4.encode(matrix))) < 0.9
        x = np.tanh(x @ found.T)
    assert set(said(result)) == {"w.0", "w.1"}
    errors = []
    for each in (result, imported(stacked, (STACK, DATA[0]), "int4:group=32", None)):
        other = rows(200, seed=7)
        error = run(each.module, each.weights, [other])[0] - np.asarray(stacked(STACK, other))
        errors.append(float(np.square(error).sum()))
    assert errors[0] < 0.6 * errors[1]


@pytest.mark.slow
def test_a_weight_with_two_uses_and_what_keeps_its_nearest_codes() -> None:
    """The rows of the table are decoded from its nearest codes while the linear behind it is solved."""
    p = {"table": models.weights(t=(96, K))["t"], "w": STACK["w"][0]}

    def function(p: Any, ids: Any) -> Any:
        return jnp.tanh(p["table"][ids] @ p["w"]) @ p["w"] @ p["table"].T

    ids = np.random.default_rng(0).integers(0, 96, (2, 150)).astype(np.int32)
    result = imported(function, (p, ids), recipe(embedding="int4:group=32"), [ids])
    assert said(result)["table"] == "nearest codes: it is an embedding, too"
    assert said(result)["w"].endswith("of 300 rows, by the inputs of the first of its 2 uses")
    table = INT4.encode(np.asarray(p["table"]))
    np.testing.assert_array_equal(result.weights["table"].data, table.data)
    x = INT4.decode(table)[ids].reshape(-1, K)
    matrix = np.ascontiguousarray(np.asarray(p["w"]).T)
    solved = gptq.solve(matrix, INT4.encode(matrix), (x.T @ x).astype(np.float64))
    assert np.mean(decoded(result, "w") == INT4.decode(solved.packed)) > 0.995


@pytest.mark.slow
def test_experts_are_solved_for_their_own_rows() -> None:
    p = {"e": models.weights(e=(3, K, K))["e"]}
    x = np.stack([rows(200), np.zeros((200, K), np.float32), rows(200, seed=2)])
    result = imported(lambda p, x: jnp.einsum("ebk,ekn->ebn", x, p["e"]), (p, x), data=[x])
    for expert in range(3):
        matrix, wide = np.ascontiguousarray(np.asarray(p["e"][expert]).T), x[expert].astype(np.float64)
        solved = gptq.solve(matrix, INT4.encode(matrix), wide.T @ wide)
        assert np.mean(decoded(result, f"e.{expert}") == INT4.decode(solved.packed)) > 0.995
    searched = imported(lambda p, x: jnp.einsum("ebk,ekn->ebn", x, p["e"]), (p, x), recipe(preset="q4_0"), [x])
    plain = resolve_format("q4_0").encode(np.ascontiguousarray(np.asarray(p["e"][1]).T))
    np.testing.assert_array_equal(searched.weights["e.1"].data, plain.data)


@pytest.mark.slow
def test_convolutions_keep_their_nearest_codes() -> None:
    p = {"c": models.weights(c=(3, 3, 32, K))["c"], "w": STACK["w"][0]}

    def function(p: Any, x: Any) -> Any:
        made = lax.conv_general_dilated(x, p["c"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return made @ p["w"]

    x = np.random.default_rng(0).standard_normal((2, 8, 8, 32)).astype(np.float32)
    result = imported(function, (p, x), recipe(rules={"c": "int2:group=row"}), [x])
    assert said(result)["c"] == "nearest codes: it is no linear"
    other = imported(function, (p, x), recipe(rules={"c": "int8:group=row"}), [x])
    assert (np.asarray(result.weights["w"].data) != np.asarray(other.weights["w"].data)).any()


@pytest.mark.slow
def test_sizes_vary_and_an_input_begins_with_the_first_state() -> None:
    def step(p: Any, x: Any, sum_: Any) -> Any:
        return (x + sum_) @ p["w"], sum_ + x.sum(0)

    p, first = {"w": STACK["w"][0]}, np.ones(K, np.float32)
    whole = imported(step, (p, DATA[0], first), data=[(DATA[0],), {"x": DATA[1]}], donated=2)
    x = np.concatenate(DATA).astype(np.float64) + 1
    matrix = np.ascontiguousarray(np.asarray(p["w"]).T)
    wanted = INT4.decode(gptq.solve(matrix, INT4.encode(matrix), x.T @ x).packed)
    assert np.mean(decoded(whole, "w") == wanted) > 0.995
    sizes = {"x": {0: ("b", 1, 300)}}
    parts = [x[:50] for x in DATA] + [x[50:] for x in DATA]
    found = imported(stacked, (STACK, DATA[0]), data=parts, dynamic_shapes=sizes)
    assert "of 400 rows" in said(found)["w.0"]
    with pytest.raises(ArgumentShapeError, match=r"dimension 'b' is 301, outside of \[1, 300\]"):
        imported(stacked, (STACK, DATA[0]), data=[rows(301)], dynamic_shapes=sizes)


@pytest.mark.slow
def test_a_program_has_the_codes_and_the_report_names_the_inputs(tmp_path: Path) -> None:
    args = (models.mlp_params(), DATA[0])
    program = qc.qcompile(models.mlp, args, quant=recipe(), calibrate=DATA, workdir=tmp_path)
    oracle = jax.jit(program.oracle)(DATA[0])
    np.testing.assert_allclose(program(DATA[0]), oracle, atol=1e-5 * float(np.abs(oracle).max()))
    assert "codes by gptq" in str(program.report()) and "2 inputs" in str(program.report())
    result = imported(models.mlp, args)
    for other, same in (([rows(200, seed=5)], False), (DATA, True)):
        again = qc.qcompile(models.mlp, args, quant=recipe(), calibrate=other, workdir=tmp_path)
        codes = np.asarray(again._imported.quantized.weights["up.kernel"].data)
        assert (codes == np.asarray(result.weights["up.kernel"].data)).all() == same


@pytest.mark.slow
def test_a_text_of_stablehlo_is_calibrated() -> None:
    shapes = {"w": jax.ShapeDtypeStruct((2, K, K), "float32")}
    text = jax.export.export(jax.jit(stacked))(shapes, DATA[0]).mlir_module()
    model = qc.from_mlir(text, weights={"p.w": np.asarray(STACK["w"])})
    program = qc.qcompile(model, quant=recipe(), calibrate=DATA)
    other = rows(200, seed=7)
    errors = [np.linalg.norm(made(other) - np.asarray(stacked(STACK, other)))
              for made in (program, qc.qcompile(model, quant="int4:group=32"))]  # fmt: skip
    assert errors[0] < 0.8 * errors[1]
    np.testing.assert_allclose(program(other), program.oracle(other), atol=1e-4)


# --- importance ------------------------------------------------------------------------------------------------------


def test_scales_are_searched_for_the_columns_that_inputs_use() -> None:
    fmt, wide = resolve_format("q4_K"), models.weights(a=(256, 32), b=(256, 32))
    given = [rows(40, 256, seed) for seed in (1, 2)]
    given[0][:, 7] = 0
    function = lambda p, x: (x @ p["a"], jnp.zeros_like(x) @ p["b"])  # noqa: E731
    result = imported(function, (wide, given[0]), qc.QuantConfig("q4_K", promise_bits=None), given)
    importance = np.square(np.concatenate(given).astype(np.float64)).mean(0).astype(np.float32)
    matrix = np.ascontiguousarray(np.asarray(wide["a"]).T)
    wanted = fmt.encode(matrix, importance=importance)
    np.testing.assert_array_equal(result.weights["a"].data, wanted.data)
    assert (np.asarray(fmt.encode(matrix).data) != np.asarray(wanted.data)).any()
    assert said(result, "calibrate")["a"] == "importance of columns, of 80 rows"
    dead = fmt.encode(np.ascontiguousarray(np.asarray(wide["b"]).T))  # as without data
    np.testing.assert_array_equal(result.weights["b"].data, dead.data)
    assert "all of them are zero" in said(result, "calibrate")["b"]


# --- static scales ---------------------------------------------------------------------------------------------------


def static(text: str, **options: Any) -> qc.QuantConfig:
    return qc.QuantConfig(text, promise_bits=None, activations="int8:static", observer="minmax", **options)


def test_static_scales_are_those_of_each_layer_and_the_oracle_computes_them(relative: Any) -> None:
    """The first layer's inputs are the data; a larger input is clipped."""
    result = imported(stacked, (STACK, DATA[0]), static("int8"))
    clip = float(np.abs(np.concatenate(DATA)).max())
    assert said(result, "activations")["w.0"].endswith(f" {clip / 127:.3g}; multiplied as integers")
    assert said(result, "activations")["w.0"] != said(result, "activations")["w.1"]
    assert said(result, "calibrate")["w.1"] == "range, of 400 rows"
    for x in (DATA[0], 3 * DATA[1]):
        wanted = x
        for layer in (0, 1):
            clip = result.quantized.clips[f"w.{layer}"]
            rounded = int8_rows.dequantise(int8_rows.quantise(wanted, "tensor", clip, None), K)
            wanted = np.tanh(rounded @ decoded(result, f"w.{layer}").T)
        found = run(result.module, result.weights, [x])[0]
        assert relative(found, wanted) < 1e-6
        # Where sums in another order differ by an ulp, a code at a tie moves by one. That is clip / 127 of one of
        # 12,800 values: 2e-4 of their norm. The scale of another layer would be an error of 1e-2 and more.
        assert relative(found, np.asarray(jax.jit(result.oracle())(x))) < 1e-3


STATIC = {"mlp": models.mlp, "batches": None, "scan": stacked}


def _batches(p: Any, x: Any) -> Any:
    return jnp.einsum("abck,bakn->abcn", x, p["e"]) + jnp.einsum("abck,knc->abcn", x, p["f"])


@pytest.mark.slow
@pytest.mark.parametrize("text", ["int8", "nf4", "q4_K, else q4_0"])
@pytest.mark.parametrize("name", STATIC)
def test_a_program_of_static_scales_has_the_codes_of_its_oracle(name: str, text: str, relative: Any) -> None:
    function, p, data = STATIC[name] or _batches, models.mlp_params(), DATA
    if name == "batches":
        p = models.weights(e=(3, 2, K, K), f=(K, K, 200))
        data = [np.stack([rows(200, seed=i) * (1 + i) for i in range(6)]).reshape(2, 3, 200, K)]
    args = (STACK if name == "scan" else p, data[0])
    program = qc.qcompile(function, args, quant=static(text), calibrate=data)
    assert relative(program(data[0]), np.asarray(jax.jit(program.oracle)(data[0]))) < 1e-3
    report = str(program.report())
    assert "range, of" in report


# --- errors ----------------------------------------------------------------------------------------------------------

NAN = np.full((200, K), np.nan, np.float32)
BAD: dict[str, tuple[Any, type[Exception], str]] = {
    "structure": ([(DATA[0], DATA[1])], ArgumentStructureError, "1 positional argument"),
    "name": ([{"y": DATA[0]}], ArgumentStructureError, "'y'"),
    "dtype": ([DATA[0].astype(np.float64)], ArgumentDtypeError, "float64 for 'x', the function takes float32"),
    "shape": ([DATA[0][:, :3]], ArgumentShapeError, "'x'.*dynamic_shapes"),
    "none": ([], CalibrationError, "gave no inputs"),
    "nan": ([NAN], CalibrationError, r"'w\.0'"),
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in ("structure", "nan") else pytest.mark.slow) for case in BAD]
)
def test_data_that_does_not_fit_is_named(case: str) -> None:
    data, kind, text = BAD[case]
    with pytest.raises(kind, match=text):
        imported(stacked, (STACK, DATA[0]), data=data)
    if case == "nan":
        with pytest.raises(kind, match=text):
            imported(stacked, (STACK, DATA[0]), qc.QuantConfig("q4_0", promise_bits=None), data)


def test_data_that_serves_nothing_and_too_little_of_it() -> None:
    args = (STACK, DATA[0])
    with pytest.raises(ArgumentError, match="calibrate=4: give an iterable"):
        Calibration(4)  # type: ignore[arg-type]
    with pytest.raises(RecipeError, match=r"nothing here uses it.*q4_K"):
        imported(stacked, args, "nf4")
    with pytest.raises(RecipeError, match="gptq' needs calibration data"):
        imported(stacked, args, data=None)
    with pytest.raises(RecipeError, match="serves nothing here: the weights have no values"):
        imported(stacked, args, valued=False)
    with pytest.raises(RecipeError, match="algorithm='gptq', or nearest"):
        imported(stacked, args, recipe(algorithm="round"))
    with pytest.raises(CalibrationError, match=r"gave 15 rows to 'w\.0', which has 64 columns"):
        imported(stacked, (STACK, rows(15)), data=[rows(15)])
