"""StableHLO texts: they mean what the function of JAX means that they were made from, in float and quantised."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mlir_texts import NF4, answers, formats, function, read, resources
from safetensors.numpy import save_file

import qcompiler as qc
from qcompiler.cli import main
from qcompiler.errors import MissingDependencyError
from qcompiler.frontends.jax.frontend import import_jax

R = np.random.default_rng(7)
UP, DOWN = (R.standard_normal(shape).astype(np.float32) for shape in ((8, 16), (16, 4)))
PARAMS = {"up": {"w": UP}, "down": [DOWN]}
NAMED = {"p.up.w": UP, "p.down.0": DOWN}
INT8 = qc.QuantConfig("int8", promise_bits=None)
DYNAMIC = {"x": {0: ("b", 1, 64)}}


def mlp(p: Any, x: Any) -> Any:
    return jax.nn.gelu(x @ p["up"]["w"]) @ p["down"][0]


def text_of_jax(rows: Any) -> str:
    struct: Any = jax.ShapeDtypeStruct
    (shape,) = jax.export.symbolic_shape("b", constraints=["b <= 64"]) if rows is None else (rows,)
    exported = jax.export.export(jax.jit(mlp))(PARAMS, struct((shape, 8), jnp.float32))
    return str(exported.mlir_module())


MLP = f"""module {{
  func.func @main(%arg0: tensor<?x8xf32> loc("x")) -> tensor<?x4xf32> {{
    %w = stablehlo.constant dense_resource<up_torch.float32> : tensor<16x8xf32>
    %v = stablehlo.constant dense_resource<down> : tensor<16x4xf32>
    %t = stablehlo.transpose %w, dims = [1, 0] : (tensor<16x8xf32>) -> tensor<8x16xf32>
    %0 = stablehlo.dot_general %arg0, %t, contracting_dims = [1] x [0]
        : (tensor<?x8xf32>, tensor<8x16xf32>) -> tensor<?x16xf32>
    %1 = stablehlo.tanh %0 : tensor<?x16xf32>
    %2 = stablehlo.dot_general %1, %v, contracting_dims = [1] x [0]
        : (tensor<?x16xf32>, tensor<16x4xf32>) -> tensor<?x4xf32>
    return %2 : tensor<?x4xf32>
  }}
}}
{resources(**{"up_torch.float32": np.ascontiguousarray(UP.T), "down": DOWN})}"""


def reference(x: Any) -> Any:
    return np.tanh(x.astype(np.float64) @ UP) @ DOWN


@pytest.mark.parametrize("rows", [1, 3, None])
def test_a_text_of_jax_is_the_function(rows: int | None) -> None:
    """Sums of 16 products: 16 roundings of 2^-24, relative to the largest result; gelu adds a few."""
    result = read(text_of_jax(rows), DYNAMIC if rows is None else None, weights=NAMED)
    for count in [rows] if rows else [1, 2, 33]:
        x = R.standard_normal((count, 8)).astype(np.float32)
        wanted = np.asarray(jax.jit(mlp)(PARAMS, x))
        assert np.abs(answers(result, [x])[0] - wanted).max() <= 32 * 2**-24 * np.abs(wanted).max()


def test_weights_by_name_have_their_names_in_the_ledger_and_equal_the_oracle() -> None:
    result = read(text_of_jax(None), DYNAMIC, NF4, NAMED)
    assert formats(result) == {"p.up.w": "nf4", "p.down.0": "nf4"}
    x = R.standard_normal((5, 8)).astype(np.float32)
    assert np.array_equal(answers(result, [x])[0], result.oracle()(x))
    through_jax = import_jax(mlp, (PARAMS, x), quant=NF4)
    # The same codes by the other door; sums of 16 products of a few units each, in another order.
    assert np.abs(result.oracle()(x) - through_jax.oracle()(x)).max() < 1e-5


def test_constants_are_weights_by_the_names_of_their_resources() -> None:
    result = read(MLP, DYNAMIC, NF4)
    assert formats(result) == {"up": "nf4", "down": "nf4"}
    x = R.standard_normal((3, 8)).astype(np.float32)
    assert np.abs(answers(read(MLP, DYNAMIC), [x])[0] - reference(x)).max() < 1e-5
    numbers = [n for n, line in enumerate(MLP.splitlines(), 1) if "stablehlo.dot" in line]
    named = [line for path in ("up", "down") for line, _ in result.lines[path]]
    assert [line.rpartition(":")[2] for line in named] == [str(n) for n in numbers], "lines of the text itself"


def test_a_location_of_a_text_names_a_file_that_is_not_read(tmp_path: Path) -> None:
    """A text comes from anywhere, and may name any file of this machine."""
    other = tmp_path / "settings.py"
    other.write_text("KEY = 'of my own'\n")
    text = function(
        f'    %0 = stablehlo.tanh %x : tensor<2x2xf32> loc("{other}":1:0)\n', "%x: tensor<2x2xf32>", "tensor<2x2xf32>"
    )  # fmt: skip
    assert read(text).lines == {"settings.py:1": ((f"{other}:1", ("stablehlo.tanh",)),)}


def test_a_constant_that_is_read_twice_is_one_weight_and_numbers_are_none() -> None:
    text = function(
        "    %w = stablehlo.constant dense<[[1.0, 2.0], [3.0, 4.5]]> : tensor<2x2xf32>\n"
        "    %v = stablehlo.constant dense<[[1.0, 2.0], [3.0, 4.5]]> : tensor<2x2xf32>\n"
        "    %c = stablehlo.constant dense<2.0> : tensor<2x2xf32>\n"
        "    %a = stablehlo.dot %x, %w : (tensor<2x2xf32>, tensor<2x2xf32>) -> tensor<2x2xf32>\n"
        "    %b = stablehlo.dot %a, %v : (tensor<2x2xf32>, tensor<2x2xf32>) -> tensor<2x2xf32>\n"
        "    %0 = stablehlo.multiply %b, %c : tensor<2x2xf32>\n",
        "%x: tensor<2x2xf32>", "tensor<2x2xf32>",
    )  # fmt: skip
    result = read(text)
    assert list(formats(result)) == ["constant_0"]
    w = np.array([[1, 2], [3, 4.5]], np.float32)
    assert np.array_equal(answers(result, [w])[0], w @ w @ w * 2)


@pytest.mark.parametrize("kind", ["bf16", "i1", "i32", "f64"])
def test_constants_of_every_type_keep_their_bits(kind: str) -> None:
    values = {
        "bf16": "0x7F80, -1.5, 0x8000",
        "i1": "true, false, true",
        "i32": "-1, 2147483647, 0",
        "f64": "1.0e-300, 2.5, -0.0",
    }
    text = function(
        f"    %0 = stablehlo.constant dense<[{values[kind]}]> : tensor<3x{kind}>\n", "", f"tensor<3x{kind}>"
    )
    (found,) = answers(read(text), [])
    wanted = {
        "bf16": [np.inf, -1.5, -0.0],
        "i1": [True, False, True],
        "i32": [-1, 2**31 - 1, 0],
        "f64": [1e-300, 2.5, -0.0],
    }
    assert found.dtype.name == {"bf16": "bfloat16", "i1": "bool", "i32": "int32", "f64": "float64"}[kind]
    assert np.array_equal(found.astype(np.float64), wanted[kind])
    assert np.array_equal(np.signbit(found.astype(np.float64)), np.signbit(wanted[kind]))


def test_a_program_of_a_text_runs_saves_and_loads(tmp_path: Path) -> None:
    path = tmp_path / "mlp.mlir"
    path.write_text(MLP)
    program = qc.qcompile(qc.from_mlir(path), quant=INT8, dynamic_shapes=DYNAMIC, verify_each="numerics")
    program.save(tmp_path / "mlp.qca")
    loaded = qc.load(tmp_path / "mlp.qca")
    for rows in (1, 5):
        x = R.standard_normal((rows, 8)).astype(np.float32)
        assert np.allclose(program(x), program.oracle(x), atol=1e-5)
        assert np.array_equal(loaded(x=x), program(x))


@pytest.mark.slow
def test_the_command_line_takes_a_text_and_its_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, weights, out = tmp_path / "m.mlir", tmp_path / "w.safetensors", tmp_path / "m.qca"
    text.write_text(text_of_jax(3))
    save_file(NAMED, weights)
    status = main(["compile", str(text), "-o", str(out), "--quant", "nf4", "--weights", str(weights)])
    assert status == 0, capsys.readouterr().err
    x = R.standard_normal((3, 8)).astype(np.float32)
    assert qc.load(out)(x).shape == (3, 4)
    text.write_text(MLP)
    assert main(["compile", str(text), "--weights", "none"]) == 1
    assert "dynamic_shapes={'x': {0: ('b', 1, 64)}}" in capsys.readouterr().err
    assert main(["compile", str(text), "--weights", "none", "--dynamic", "x:0=b,1,64"]) == 0


def test_a_missing_parser_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_mlir", None)
    linalg = function("    %0 = arith.addf %x, %x : tensor<4x4xf32>")
    with pytest.raises(MissingDependencyError, match=r"linalg dialect.*pip install 'qcompiler\[mlir\]'"):
        qc.from_mlir(linalg)
    monkeypatch.setitem(sys.modules, "jaxlib.mlir.ir", None)
    monkeypatch.setitem(sys.modules, "jaxlib.mlir", None)
    with pytest.raises(MissingDependencyError, match=r"StableHLO.*pip install 'qcompiler\[jax\]'"):
        qc.from_mlir(MLP)


def test_the_door_is_light() -> None:
    code = (
        "import sys, qcompiler as qc; qc.from_mlir; "
        "print([m for m in ('torch', 'jax', 'jaxlib', 'torch_mlir', 'xdsl') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
