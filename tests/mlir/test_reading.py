"""Texts of torch-mlir in three dialects are read back: they mean what eager torch means, in float and quantised."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from mlir_models import DIALECTS, example, model, text
from mlir_texts import NF4, answers, formats, function, read

import qcompiler as qc
from qcompiler.errors import ExportError, IndexOutOfRangeError, QCompilerError, UnsupportedOperatorError
from qcompiler.frontends.mlir.torch_dialect import torch_program
from qcompiler.frontends.torch.frontend import import_torch
from qcompiler.ir.context import QCContext
from qcompiler.ir.mlir_oracle import mlir_jit
from qcompiler.passes.pipeline import run_pipeline, upto

MODELS = ("mlp", "conv", "encoder", "llama")
BATCH = {"arg0": {0: ("b", 1, 8)}}
INT8 = qc.QuantConfig("int8", promise_bits=None)


def imported(source: Any, dynamic: bool = False, quant: Any = None) -> Any:
    made = qc.from_mlir(source)
    if made.dialect != "torch":
        return read(source, BATCH if dynamic else None, quant)
    graph, args, sizes = torch_program(made, (), BATCH if dynamic else None)
    return import_torch(graph, args, dynamic_shapes=sizes, quant=quant)


def oracle(result: Any, dialect: str, x: torch.Tensor) -> Any:
    return np.asarray(result.oracle()(x if dialect == "torch" else x.numpy()))


def close(found: Any, wanted: Any, roundings: int = 512) -> bool:
    """Each result is the end of a few hundred fp32 roundings of numbers of its size: sums of 64 products, four deep."""
    found, wanted = np.asarray(found), np.asarray(wanted)
    return bool(np.abs(found - wanted).max() <= roundings * 2**-24 * np.abs(wanted).max())


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("name", MODELS)
def test_a_text_means_what_torch_means(name: str, dialect: str, batch: int) -> None:
    module, x = model(name), example(name, batch)
    source = text(module, x, dialect)
    with torch.no_grad():
        wanted = module(x).numpy()
    assert close(answers(imported(source), [x.numpy()])[0], wanted)
    for quant in (NF4, INT8):
        result = imported(source, quant=quant)
        assert close(answers(result, [x.numpy()])[0], oracle(result, dialect, x))


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("tokens", [1, 5])
def test_torchs_encoder_of_one_token(tokens: int, dialect: str) -> None:
    """Loops of one iteration lose their index: the argmax of a softmax's maximum then yields the constant 0."""
    torch.manual_seed(0)
    module = torch.nn.TransformerEncoderLayer(64, 4, 96, batch_first=True).eval()
    x = torch.randn(1, tokens, 64)
    with torch.no_grad():
        wanted = module(x).numpy()
    assert close(answers(imported(text(module, x, dialect)), [x.numpy()])[0], wanted)


class Extremes(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.argmax(-1), x.argmin(0), *x.max(-1), *x.min(1, keepdim=True)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_torchs_extremes_and_their_places(dialect: str) -> None:
    """The first of equal elements."""
    x = torch.tensor([[1.0, 3.0, 3.0, -2.0, -2.0], [3.0, 1.0, 0.0, -2.0, 5.0]])
    found = answers(imported(text(Extremes(), x, dialect)), [x.numpy()])
    for ours, theirs in zip(found, Extremes()(x), strict=True):
        np.testing.assert_array_equal(np.asarray(ours), theirs.numpy())


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("name", MODELS)
def test_a_text_with_any_batch_means_what_torch_means(name: str, dialect: str) -> None:
    module = model(name)
    source = text(module, example(name, 3), dialect, dynamic=True)
    result = imported(source, dynamic=True)
    for batch in (1, 2, 8):
        x = example(name, batch)
        with torch.no_grad():
            assert close(answers(result, [x.numpy()])[0], module(x).numpy())


@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_matrix_of_a_model_is_quantised_in_every_dialect(dialect: str) -> None:
    """Also a linear on three dimensions, which torch-mlir writes as a batch of products with a repeated matrix."""
    for name, linears, others in (("llama", 8, 1), ("encoder", 4, 0), ("mlp", 2, 0)):
        found = list(formats(imported(text(model(name), example(name, 2), dialect), quant=NF4)).values())
        assert found.count("nf4") == linears
        assert found.count("int8") == others  # the embedding, by the recipe


@pytest.mark.parametrize("dialect", DIALECTS)
def test_programs_run_with_checked_passes_and_load_again(dialect: str, tmp_path: Path) -> None:
    name = "llama" if dialect == "linalg" else "mlp"
    source = text(model(name), example(name, 3), dialect, dynamic=True)
    program = qc.qcompile(qc.from_mlir(source), quant=NF4, dynamic_shapes=BATCH, verify_each="numerics")
    program.save(tmp_path / "m.qca")
    loaded = qc.load(tmp_path / "m.qca")
    for batch in (1, 5):
        x = example(name, batch)
        wanted = program.oracle(x if dialect == "torch" else x.numpy())
        assert close(program(x.numpy()), wanted)
        assert np.array_equal(loaded(x.numpy()), program(x.numpy()))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_text_in_every_dialect_is_calibrated(dialect: str) -> None:
    """GPTQ makes the error of outputs fall, for correlated inputs that it has not seen."""
    module, x = model("mlp"), example("mlp", 600)
    width = x.shape[-1]
    x, seen = (x + x @ torch.from_numpy(np.random.default_rng(0).standard_normal((width, width))).float()).split(300)
    made, outputs = qc.from_mlir(text(module, x, dialect)), []
    for algorithm, data in (("nearest", None), ("gptq", [seen])):
        quant = qc.QuantConfig("int4:group=32", promise_bits=None, algorithm=algorithm)
        program = qc.qcompile(made, (), quant=quant, calibrate=data)
        outputs.append(np.asarray(program(x.numpy())))
    with torch.no_grad():
        errors = [np.square(found - module(x).numpy()).sum() for found in outputs]
    assert errors[1] < 0.9 * errors[0], errors
    report = str(program.report())
    assert "codes by gptq" in report and "1 input" in report


def test_a_program_for_a_simulated_gpu() -> None:
    x = example("mlp", 3)
    program = qc.qcompile(qc.from_mlir(text(model("mlp"), x, "linalg")), quant=NF4, device="sim:0")
    assert close(program(x.numpy()), program.oracle(x.numpy()))


@pytest.mark.parametrize("name", MODELS)
def test_our_own_text_is_read_back_and_means_the_same(name: str) -> None:
    module, x = model(name), example(name, 3)
    argument = {"mlp": "input", "conv": "x", "encoder": "src", "llama": "ids"}[name]
    sizes = {argument: {0: ("b", 1, 8)}}
    program = qc.qcompile(module, (x,), dynamic_shapes=sizes)
    result = read(program.to_mlir("linalg").text, BATCH)
    for batch in (1, 7):
        x = example(name, batch)
        with torch.no_grad():
            assert close(answers(result, [x.numpy()])[0], module(x).numpy())


def test_a_text_that_crashes_the_parser_is_an_error() -> None:
    """A permutation without a comma ends the process in MLIR 22's custom parser of linalg.transpose."""
    body = (
        "%e = tensor.empty() : tensor<4x3xf32>\n%0 = linalg.transpose ins(%x : tensor<3x4xf32>) "
        "outs(%e : tensor<4x3xf32>) permutation = [1 0]"
    )
    with pytest.raises(ExportError, match=r"MLIR's parser crashed on it \(SIGSEGV\)"):
        qc.from_mlir(function(body, "%x: tensor<3x4xf32>", "tensor<4x3xf32>"))


# --- idioms ----------------------------------------------------------------------------------------------------------


def raised(source: Any) -> set[str]:
    result = imported(source)
    context = QCContext.default(weights=result.weights)
    run_pipeline(result.module, context, stages=upto("raise-idioms"))
    found = {op.name for op in result.module.walk()}
    return found & {"qc.rms_norm", "qc.layer_norm", "qc.softmax", "qc.attention", "qc.rotary"}


IDIOMS = {
    ("llama", "torch"): {"qc.rms_norm", "qc.softmax"},
    ("llama", "linalg"): {"qc.rms_norm", "qc.softmax"},
    ("llama", "stablehlo"): {"qc.rms_norm", "qc.softmax"},
    ("encoder", "torch"): {"qc.layer_norm", "qc.softmax"},
    ("encoder", "linalg"): {"qc.layer_norm", "qc.softmax"},
    ("encoder", "stablehlo"): {"qc.layer_norm", "qc.softmax"},
}
"""What is recognised behind torch-mlir's decompositions: not attention, nor rotary embeddings."""


@pytest.mark.parametrize(("name", "dialect"), IDIOMS)
def test_these_idioms_are_recognised(name: str, dialect: str) -> None:
    assert raised(text(model(name), example(name, 2), dialect)) == IDIOMS[name, dialect]


# --- linalg, op by op, against upstream's engine ----------------------------------------------------------------------

ID = "affine_map<(d0, d1) -> (d0, d1)>"


def generic(maps: str, kinds: str, ins: str, outs: str, body: str) -> str:
    iterators = ", ".join(f'"{"parallel" if c == "p" else "reduction"}"' for c in kinds)
    return (
        f"linalg.generic {{indexing_maps = [{maps}], iterator_types = [{iterators}]}} ins({ins}) outs({outs}) "
        f"{{\n{body}\n}}"
    )


def folded(op: str, start: str) -> str:
    body = f"^bb0(%a: f32, %o: f32):\n %r = {op}\n linalg.yield %r : f32"
    return (
        f"%s = arith.constant {start} : f32\n%e = tensor.empty() : tensor<3xf32>\n"
        "%f = linalg.fill ins(%s : f32) outs(%e : tensor<3xf32>) -> tensor<3xf32>\n%0 = "
        + generic(f"{ID}, affine_map<(d0, d1) -> (d0)>", "pr", "%x : tensor<3x4xf32>", "%f : tensor<3xf32>", body)
        + " -> tensor<3xf32>"
    )


def pointwise(result: str, out: str, maps: str, body: str, shape: str = "3x4") -> str:
    return (
        f"%e = tensor.empty() : tensor<{result}xf32>\n%0 = "
        + generic(f"{maps}, {out}", "pp", f"%x : tensor<{shape}xf32>", f"%e : tensor<{result}xf32>", body)
        + f" -> tensor<{result}xf32>"
    )


ONE = "^bb0(%a: f32, %o: f32):\n %r = {}\n linalg.yield %r : f32"
OPS: dict[str, tuple[str, str]] = {
    "add from one": (folded("arith.addf %a, %o : f32", "1.0"), "3"),
    "product": (folded("arith.mulf %o, %a : f32", "2.0"), "3"),
    "maximum": (folded("arith.maximumf %a, %o : f32", "0xFF800000"), "3"),
    "minimum from a number": (folded("arith.minimumf %a, %o : f32", "0.25"), "3"),
    "maximum by a comparison": (
        folded("arith.select %c, %a, %o : f32", "0xFF800000").replace("%r =", "%c = arith.cmpf ogt, %a, %o : "
                                                                              "f32\n %r ="), "3"),
    "sum of a term": (folded("arith.addf %t, %o : f32", "0.0").replace("%r =", "%t = math.exp %a : f32\n %r ="), "3"),
    "transposed destination": (pointwise("4x3", "affine_map<(d0, d1) -> (d1, "
                                                "d0)>", ID, ONE.format("math.tanh %a : f32")), "4x3"),
    "transposed operand": (pointwise("4x3", ID, "affine_map<(d0, d1) -> (d1, "
                                                "d0)>", ONE.format("arith.negf %a : f32")), "4x3"),
    "a fixed row": (pointwise("2x4", ID, "affine_map<(d0, d1) -> (2, "
                                         "d1)>", ONE.format("arith.addf %a, %a : f32")), "2x4"),
    "a diagonal": (
        "%v = tensor.extract_slice %x[0, 1] [3, 3] [1, 1] : tensor<3x4xf32> to tensor<3x3xf32>\n"
        + pointwise("2x3", ID, "affine_map<(d0, d1) -> (d1, "
                               "d1)>", ONE.format("math.absf %a : f32"), "3x3").replace("%x :", "%v :"),
        "2x3"),
    "a sum of loops": (
        pointwise("2x3", ID, "affine_map<(d0, d1) -> (0, d0 + d1)>", ONE.format("math.absf %a : f32")), "2x3"),
    "strides": (pointwise("2x2", ID, "affine_map<(d0, d1) -> (d0 * 2, d1 + "
                                     "1)>", ONE.format("math.absf %a : f32")), "2x2"),
    "indices": (
        pointwise("3x4", ID, ID, "^bb0(%a: f32, %o: f32):\n %i = linalg.index 1 : index\n %j = "
                                 "arith.index_cast %i : index to i32\n"
                  " %k = arith.sitofp %j : i32 to f32\n %r = arith.mulf %a, %k : f32\n linalg.yield %r : f32"), "3x4"),
    "an extract": (
        pointwise("3x4", ID, ID, "^bb0(%a: f32, %o: f32):\n %i = linalg.index 1 : index\n %c = arith.constant "
                                 "3 : index\n"
                  " %k = arith.subi %c, %i : index\n %j = linalg.index 0 : index\n"
                  " %r = tensor.extract %x[%j, %k] : tensor<3x4xf32>\n linalg.yield %r : f32"), "3x4"),
    "a pad": ("%c = arith.constant 2.0 : f32\n%0 = tensor.pad %x low[1, 0] high[0, 2] {\n^bb0(%i: index, %j: index):\n"
              " tensor.yield %c : f32\n} : tensor<3x4xf32> to tensor<4x6xf32>", "4x6"),
    "slices": ("%s = tensor.extract_slice %x[1, 0] [2, 2] [1, 2] : tensor<3x4xf32> to tensor<2x2xf32>\n"
               "%0 = tensor.insert_slice %s into %x[0, 1] [2, 2] [2, 1] : tensor<2x2xf32> into tensor<3x4xf32>", "3x4"),
    "a row": ("%0 = tensor.extract_slice %x[1, 0] [1, 4] [1, 1] : tensor<3x4xf32> to tensor<4xf32>", "4"),
    "a concat": ("%0 = tensor.concat dim(1) %x, %x : (tensor<3x4xf32>, tensor<3x4xf32>) -> tensor<3x8xf32>", "3x8"),
    "collapse and expand": ("%c = tensor.collapse_shape %x [[0, 1]] : tensor<3x4xf32> into tensor<12xf32>\n"
                            "%0 = tensor.expand_shape %c [[0, 1, 2]] output_shape [2, 3, 2] : tensor<12xf32> "
                            "into tensor<2x3x2xf32>",
                            "2x3x2"),
    "a reduce": ("%e = tensor.empty() : tensor<4xf32>\n%s = arith.constant 0.0 : f32\n"
                 "%f = linalg.fill ins(%s : f32) outs(%e : tensor<4xf32>) -> tensor<4xf32>\n"
                 "%0 = linalg.reduce { arith.addf } ins(%x : tensor<3x4xf32>) outs(%f : tensor<4xf32>) "
                 "dimensions = [0]", "4"),
    "a broadcast": ("%e = tensor.empty() : tensor<3x2x4xf32>\n%0 = linalg.broadcast ins(%x : tensor<3x4xf32>) "
                    "outs(%e : "
                    "tensor<3x2x4xf32>) dimensions = [1]", "3x2x4"),
    "a product with a start": ("%e = tensor.empty() : tensor<3x3xf32>\n%s = arith.constant 0.5 : f32\n"
                               "%f = linalg.fill ins(%s : f32) outs(%e : tensor<3x3xf32>) -> tensor<3x3xf32>\n"
                               "%0 = linalg.generic {indexing_maps = [affine_map<(d0, d1, d2) -> (d0, d2)>, "
                               "affine_map<(d0, d1, d2) -> (d1, d2)>, affine_map<(d0, d1, d2) -> (d1, d0)>], "
                               "iterator_types = "
                               '["parallel", "parallel", "reduction"]} ins(%x, %x : tensor<3x4xf32>, tensor<3x4xf32>) '
                               "outs(%f : tensor<3x3xf32>) "
                               "{\n^bb0(%a: f32, %b: f32, %o: f32):\n %m = arith.mulf %a, %b : f32\n"
                               " %r = arith.addf %o, %m : f32\n linalg.yield %r : f32\n} -> tensor<3x3xf32>", "3x3"),
    "a vector of sums": ("%e = tensor.empty() : tensor<3xf32>\n%s = arith.constant 0.0 : f32\n"
                         "%f = linalg.fill ins(%s : f32) outs(%e : tensor<3xf32>) -> tensor<3xf32>\n"
                         "%v = tensor.extract_slice %x[1, 0] [1, 4] [1, 1] : tensor<3x4xf32> to tensor<4xf32>\n"
                         "%0 = linalg.matvec ins(%x, %v : tensor<3x4xf32>, tensor<4xf32>) outs(%f : "
                         "tensor<3xf32>) -> tensor<3xf32>", "3"),
}  # fmt: skip


@pytest.mark.parametrize("name", OPS)
def test_an_op_of_linalg_is_what_upstreams_engine_computes(name: str) -> None:
    body, shape = OPS[name]
    source = function(body, "%x: tensor<3x4xf32>", f"tensor<{shape}xf32>")
    x = np.random.default_rng(5).standard_normal((3, 4)).astype(np.float32)
    try:
        wanted = mlir_jit(source, [x])[0]
    except QCompilerError:
        assert name == "a concat"  # the engine's pipeline has no bufferisation for it
        wanted = np.concatenate([x, x], 1)
    found = answers(read(source), [x])[0]
    assert found.shape == wanted.shape
    assert np.allclose(found, wanted, rtol=2**-20, atol=2**-22)


@pytest.mark.parametrize(
    "op", ["arith.maxnumf %a, %o : f32", "arith.maximumf %a, %o : f32", "arith.select %c, %a, %o : f32"]
)
def test_a_maximum_takes_or_passes_over_nan_as_the_text_says(op: str) -> None:
    body = folded(op, "0xFF800000").replace("%r =", "%c = arith.cmpf ogt, %a, %o : f32\n %r =")
    source = function(body, "%x: tensor<3x4xf32>", "tensor<3xf32>")
    x = np.array([[1, np.nan, 3, 2], [np.nan] * 4, [0, 1, 2, np.nan]], np.float32)
    assert np.array_equal(answers(read(source), [x])[0], mlir_jit(source, [x])[0], equal_nan=True)


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_each_op_on_small_floats_rounds_as_upstream(kind: str) -> None:
    body = pointwise("3x4", ID, ID, ONE.format("arith.mulf %t, %a : f32")).replace(
        "%r =", "%t = arith.addf %a, %a : f32\n %r ="
    )
    source = function(body, "%x: tensor<3x4xf32>", "tensor<3x4xf32>").replace("f32", kind)
    dtype = {"f16": np.float16, "bf16": ml_dtypes.bfloat16}[kind]
    x = np.random.default_rng(5).standard_normal((3, 4)).astype(dtype)
    assert np.array_equal(answers(read(source), [x])[0], mlir_jit(source, [x])[0])


def test_an_argmax_is_found_in_a_generic_with_two_results() -> None:
    class Picks(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.argmax(-1)

    x = torch.tensor([[0.0, 2.0, 2.0], [5.0, -1.0, 4.0]])
    assert np.array_equal(answers(read(text(Picks(), x, "linalg")), [x.numpy()])[0], [1, 0])


@pytest.mark.parametrize("dialect", ["torch", "stablehlo"])  # the scatter of linalg is of a dialect of torch-mlir's
def test_an_index_by_tensors_alone_has_a_name_of_torchscript(dialect: str) -> None:
    """torch-mlir writes `index.Tensor_hacked_twin` where no index is None, which torch's dispatcher does not know."""

    class Picks(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows, columns = torch.tensor([1, 0, 1]), torch.tensor([1, 0, 2])
            y = torch.zeros(2, 3).index_put((rows, columns), x[torch.tensor([1, 0, 0]), columns])
            return y + x[1]

    x = torch.randn(2, 3)
    made = text(Picks(), x, dialect)
    assert np.allclose(answers(imported(made), [x.numpy()])[0], Picks()(x).numpy())


# --- starts, truth values, types and indices --------------------------------------------------------------------------


def typed(kinds: str, ins: Sequence[str], start: str, body: str) -> str:
    """One loop over operands of 4 such elements; the result has 4, or is one number for a fold ("r")."""
    one, whole = "affine_map<(d0) -> ()>", "affine_map<(d0) -> (d0)>"
    kind = start.rpartition(" : ")[2]
    result = f"tensor<{'' if kinds == 'r' else '4x'}{kind}>"
    maps = ", ".join([*[whole] * len(ins), one if kinds == "r" else whole])
    types = ", ".join(f"tensor<4x{each}>" for each in ins)
    given = ", ".join(f"%x{i}" for i in range(len(ins)))
    block = "^bb0(" + "".join(f"%{name}: {each}, " for name, each in zip("ab", ins, strict=False)) + f"%o: {kind}):\n"
    made = (
        f"%s = arith.constant {start}\n%e = tensor.splat %s : {result}\n%0 = "
        + generic(maps, kinds, f"{given} : {types}", f"%e : {result}", f"{block} {body}\n linalg.yield %r : {kind}")
        + f" -> {result}"
    )
    return function(made, ", ".join(f"%x{i}: tensor<4x{each}>" for i, each in enumerate(ins)), result)


def argmax(value: str, index: str, op: str = "ogt", best: str = "arith.maximumf %a, %v : f32") -> str:
    body = (
        f"^bb0(%a: f32, %v: f32, %p: i64):\n %i = linalg.index 0 : index\n %j = arith.index_cast %i : index to i64\n"
        f" %g = arith.cmpf {op}, %a, %v : f32\n %m = {best}\n %n = arith.select %g, %j, %p : i64\n"
        " linalg.yield %m, %n : f32, i64"
    )
    maps = "affine_map<(d0) -> (d0)>, affine_map<(d0) -> ()>, affine_map<(d0) -> ()>"
    loop = generic(maps, "r", "%x : tensor<4xf32>", "%s, %t : tensor<f32>, tensor<i64>", body)
    made = f"%s = arith.constant dense<{value}> : tensor<f32>\n%t = arith.constant dense<{index}> : tensor<i64>\n"
    made += f"%q:2 = {loop} -> (tensor<f32>, tensor<i64>)"
    return function(made, "%x: tensor<4xf32>", "tensor<i64>").replace("return %0", "return %q#1")


LEAST, LARGEST = "0xFF800000", "0x7F800000"


def test_an_argmax_is_read_from_the_start_that_its_op_has() -> None:
    x = np.array([-5, -2, -3, -4], np.float32)
    assert answers(read(argmax(LEAST, "0")), [x])[0] == mlir_jit(argmax(LEAST, "0"), [x])[0] == 1
    argmin = argmax(LARGEST, "0", "olt", "arith.select %g, %a, %v : f32")
    assert answers(read(argmin), [x])[0] == mlir_jit(argmin, [x])[0] == 0


@pytest.mark.parametrize(
    "source",
    [
        argmax("0.0", "7"), argmax("0.0", "0"), argmax(LEAST, "7"), argmax(LARGEST, "0"),
        argmax(LEAST, "0", best="arith.minimumf %a, %v : f32"), argmax(LEAST, "0", best="arith.addf %a, %v : f32"),
    ],
)  # fmt: skip
def test_an_argmax_from_another_start_or_of_another_value_is_refused(source: str) -> None:
    with pytest.raises(UnsupportedOperatorError, match=r"linalg\.generic \(<mlir>:"):
        read(source)


@pytest.mark.parametrize(
    ("op", "start"), [("muli", "true"), ("maxsi", "true"), ("minsi", "false"), ("maxui", "false"), ("minui", "true")]
)
def test_a_fold_of_truth_values_is_one_of_numbers_of_one_bit(op: str, start: str) -> None:
    source = typed("r", ["i1"], f"{start} : i1", f"%r = arith.{op} %a, %o : i1").replace(f"{start} : i1", start, 1)
    for bits in ([0, 1, 0, 1], [0, 0, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1]):
        x = np.array(bits, bool)
        assert np.array_equal(answers(read(source), [x])[0], mlir_jit(source, [x])[0])


PAIRS = [np.array([0, 0, 1, 1], bool), np.array([0, 1, 0, 1], bool)]


@pytest.mark.parametrize("op", ["addi", "subi", "muli", "maxsi", "minsi", "maxui", "minui", "cmpi slt,", "cmpi uge,"])
def test_an_op_on_truth_values_is_one_of_numbers_of_one_bit(op: str) -> None:
    inside = typed("p", ["i1", "i1"], "false : i1", f"%r = arith.{op} %a, %b : i1").replace("false : i1", "false", 1)
    wanted = mlir_jit(inside, PAIRS)[0]
    assert np.array_equal(answers(read(inside), PAIRS)[0], wanted)
    assert np.array_equal(qc.qcompile(qc.from_mlir(inside))(*PAIRS), wanted)
    if op in ("addi", "subi", "muli", "maxsi", "minsi"):  # the ops that are read outside of loops
        bits = "%x: tensor<4xi1>, %y: tensor<4xi1>"
        outside = function(f"%0 = arith.{op} %x, %y : tensor<4xi1>", bits, "tensor<4xi1>")
        assert np.array_equal(answers(read(outside), PAIRS)[0], wanted)


@pytest.mark.parametrize("kind", ["i1", "i8"])
@pytest.mark.parametrize("cast", ["sitofp", "uitofp"])
def test_a_factor_of_a_sum_of_products_is_converted_as_arith_does(cast: str, kind: str) -> None:
    body = f"%f = arith.{cast} %a : {kind} to f32\n %t = arith.mulf %f, %b : f32\n %r = arith.addf %o, %t : f32"
    source = typed("r", [kind, "f32"], "0.0 : f32", body)
    given = [np.array([1, 0, 1, 1]).astype({"i1": bool, "i8": np.int8}[kind]), np.array([1, 2, 4, 8], np.float32)]
    assert answers(read(source), given)[0] == mlir_jit(source, given)[0]


def test_a_window_is_folded_in_the_type_of_the_result() -> None:
    source = function(
        "%e = arith.constant dense<0.0> : tensor<1x1x1x1xf32>\n%w = tensor.empty() : tensor<2x2xf32>\n"
        "%0 = linalg.pooling_nhwc_sum ins(%x, %w : tensor<1x2x2x1xf16>, tensor<2x2xf32>) "
        "outs(%e : tensor<1x1x1x1xf32>) -> tensor<1x1x1x1xf32>",
        "%x: tensor<1x2x2x1xf16>",
        "tensor<1x1x1x1xf32>",
    )
    assert answers(read(source), [np.full((1, 2, 2, 1), 20000, np.float16)])[0].item() == 4 * 20000


def picked(table: str, places: int) -> str:
    """Elements `t[x0[i], x1[i]]` for each of two i, or the rows `t[x0[i], :]`."""
    rows, names = places == 1, ["%a", "%b"][:places]
    width = table.rpartition("x")[2]
    loops, result = ("d0, d1", f"tensor<2x{width}xf32>") if rows else ("d0", "tensor<2xf32>")
    maps = ", ".join([*[f"affine_map<({loops}) -> (d0)>"] * places, f"affine_map<({loops}) -> ({loops})>"])
    given = ", ".join(f"%x{i}" for i in range(places)) + " : " + ", ".join(["tensor<2xi64>"] * places)
    body = "^bb0(" + "".join(f"{name}: i64, " for name in names) + "%o: f32):\n"
    body += "".join(f" %i{i} = arith.index_cast {name} : i64 to index\n" for i, name in enumerate(names))
    body += " %i1 = linalg.index 1 : index\n" if rows else ""
    body += f" %r = tensor.extract %t[%i0, %i1] : tensor<{table}xf32>\n linalg.yield %r : f32"
    loop = generic(maps, "pp" if rows else "p", given, f"%e : {result}", body)
    arguments = [f'%t: tensor<{table}xf32> loc("t")', *(f"%x{i}: tensor<2xi64>" for i in range(places))]
    return function(f"%e = tensor.empty() : {result}\n%0 = {loop} -> {result}", ", ".join(arguments), result)


@pytest.mark.parametrize("quant", [None, NF4, "argument"])
def test_an_id_out_of_range_of_a_table_is_an_error(quant: Any) -> None:
    table = np.random.default_rng(5).standard_normal((15, 64)).astype(np.float32)
    given = [table] if quant == "argument" else []
    model = qc.from_mlir(picked("15x64", 1), None if given else {"t": table})
    program = qc.qcompile(model, quant=None if given else quant)
    good = program(*given, np.array([0, 14]))
    assert np.array_equal(good, program.oracle(*given, np.array([0, 14])))
    assert quant is NF4 or np.array_equal(good, table[[0, 14]])
    for wrong in (15, 10**9, -1, -15, -(2**63)):
        with pytest.raises(IndexOutOfRangeError):
            program(*given, np.array([0, wrong]))


TABLE = np.arange(15, dtype=np.float32).reshape(5, 3)


def test_each_index_of_an_element_is_checked() -> None:
    """Also where the linear index of a wrong pair is in range."""
    program = qc.qcompile(qc.from_mlir(picked("5x3", 2)))
    assert np.array_equal(program(TABLE, np.array([0, 4]), np.array([2, 1])), [2, 13])
    for i, j in ((1, 3), (1, -1), (-1, 0), (5, -1), (5, 0), (2**62, 0), (0, 2**62), (-(2**63), 0)):
        with pytest.raises(IndexOutOfRangeError):
            program(TABLE, np.array([0, i]), np.array([0, j]))


def test_each_index_of_a_table_of_any_size_is_checked() -> None:
    program = qc.qcompile(qc.from_mlir(picked("?x3", 2)), dynamic_shapes={"t": {0: ("n", 1, 8)}})
    assert np.array_equal(program(TABLE[:4], np.array([0, 3]), np.array([2, 1])), [2, 10])
    for i, j in ((4, 0), (-1, 0), (1, 3)):
        with pytest.raises(IndexOutOfRangeError):
            program(TABLE[:4], np.array([0, i]), np.array([0, j]))


# --- mistakes --------------------------------------------------------------------------------------------------------


def torch_text(body: str, result: str = "!torch.vtensor<[4],f32>") -> str:
    head = f"module {{\n func.func @main(%a: !torch.vtensor<[4],f32>) -> {result} {{"
    return f"{head}\n{body}\n return %0 : {result}\n}}\n}}"


def aten(name: str, types: str = "!torch.vtensor<[4],f32>") -> str:
    return torch_text(f'%0 = torch.operator "torch.{name}"(%a) : ({types}) -> !torch.vtensor<[4],f32>')


HUGE = (
    "%i = torch.constant.int {}\n%l = torch.prim.ListConstruct %i : (!torch.int) -> !torch.list<int>\n"
    "%n = torch.constant.none\n%0 = torch.aten.zeros %l, %n, %n, %n, %n : !torch.list<int>, !torch.none, !torch.none, "
    "!torch.none, !torch.none -> !torch.vtensor<[?],f32>"
)
FILE = (
    '%s = torch.constant.str "/etc/passwd"\n%n = torch.constant.none\n%0 = torch.operator "torch.aten.from_file"'
    "(%s, %n, %n) : (!torch.str, !torch.none, !torch.none) -> !torch.vtensor<[4],f32>"
)
BAD = {
    "a file": (torch_text(FILE), r"from_file.*<mlir>:5"),
    "a write": (aten("aten.relu_"), "writes into an argument"),
    "another library": (aten("qc.dequantize"), "has no lowering"),
    "an attribute of Python": (aten("aten.__class__.x"), "torch has no such operator"),
    "a wrong result": (torch_text("%0 = torch.aten.relu %a : !torch.vtensor<[4],f32> -> "
                                  "!torch.vtensor<[5],f32>", "!torch.vtensor<[5],f32>"),
                       r"\[5\],f32>, says the text, and torch computes \(4,\)"),
    "a huge tensor": (torch_text(HUGE.format(99999999999), "!torch.vtensor<[?],f32>"), "99999999999 elements"),
    "a negative size": (torch_text(HUGE.format(-5), "!torch.vtensor<[?],f32>"), "negative dimension"),
    "a branch": (torch_text("%t = torch.constant.bool true\n%0 = torch.prim.If %t -> (!torch.vtensor<[4],f32>) "
                            "{\n torch.prim.If.yield %a : "
                            "!torch.vtensor<[4],f32>\n} else {\n torch.prim.If.yield %a : "
                            "!torch.vtensor<[4],f32>\n}"), r"prim\.If"),
    "blocks": ("module "
               "{ func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> { %0 = arith.addf %x, %x : tensor<4xf32>\n"
               " cf.br ^b\n"
               "^b: return %0 : tensor<4xf32> } }", "2 blocks"),
    "scf": (function("%c = arith.constant true\n%0 = scf.if %c -> tensor<4x4xf32> "
                     "{ scf.yield %x : tensor<4x4xf32> } else { scf.yield %x : "
                     "tensor<4x4xf32> }"), r"scf\.if \(<mlir>:4\)"),
    "memory": ("module "
               "{ func.func @main(%x: memref<4xf32>) { %c = arith.constant 0 : index\n %f = arith.constant 0.0 : f32\n"
               " memref.store %f, %x[%c] : memref<4xf32>\n return } }", "memref<4xf32>"),
    "a slice outside": (function("%c = arith.constant 3 : index\n%0 = tensor.extract_slice %x[%c, 0] [4, 4] "
                                 "[1, 1] : tensor<4x4xf32> to "
                                 "tensor<4x4xf32>"), "reads 4 entries from 3"),
    "a huge destination": (function("%e = tensor.empty() : tensor<99999999999xf32>\n%0 = arith.addf %x, %x : "
                                    "tensor<4x4xf32>"), "elements"),
    "a size by value": ("module "
                        "{ func.func @main(%n: tensor<i64>) -> tensor<?xf32> { %v = tensor.extract %n[] : tensor<i64>\n"
                        " %i = arith.index_cast %v : i64 to index\n %0 = tensor.empty(%i) : tensor<?xf32>\n "
                        "return %0 : tensor<?xf32> } }",
                        "depends on values"),
    "a maximum that NaN confuses": (
        function(folded("arith.select %c, %a, %o : f32", "0xFF800000").replace("%r =", "%c = arith.cmpf ugt, "
                                                                                       "%a, %o : f32\n %r ="),
                 "%x: tensor<3x4xf32>", "tensor<3xf32>"), "another function than add"),
    "a signed truth value": (
        function("%0 = arith.sitofp %x : tensor<4x4xi1> to tensor<4x4xf32>", "%x: tensor<4x4xi1>"), "which is -1"),
    "a product of unsigned numbers": (
        function("%e = arith.constant dense<0> : tensor<1x1xi32>\n%0 = linalg.matmul {cast = "
                 "#linalg.type_fn<cast_unsigned>} ins(%x, %y : tensor<1x3xi8>, tensor<3x1xi8>) outs(%e : "
                 "tensor<1x1xi32>) -> tensor<1x1xi32>", "%x: tensor<1x3xi8>, %y: tensor<3x1xi8>",
                 "tensor<1x1xi32>"), r"linalg\.matmul \(<mlir>:4\): a cast of unsigned"),
    "a copy of unsigned numbers": (
        function("%e = tensor.empty() : tensor<4xi32>\n%0 = linalg.copy {cast = #linalg.type_fn<cast_unsigned>} "
                 "ins(%x : tensor<4xi8>) outs(%e : tensor<4xi32>) -> tensor<4xi32>", "%x: tensor<4xi8>",
                 "tensor<4xi32>"), r"linalg\.copy \(<mlir>:4\): a cast of unsigned"),
    "a copy of truth values": (
        function("%e = tensor.empty() : tensor<4xi32>\n%0 = linalg.copy ins(%x : tensor<4xi1>) outs(%e : "
                 "tensor<4xi32>) -> tensor<4xi32>", "%x: tensor<4xi1>", "tensor<4xi32>"),
        r"linalg\.copy \(<mlir>:4\): .*which is -1"),
    "unsigned 64-bit numbers": (
        typed("p", ["i64"], "0.0 : f32", "%r = arith.uitofp %a : i64 to f32"), r"arith\.uitofp \(<mlir>:.*64 bits"),
    "an exclusive or": (typed("r", ["i1"], "false : i1", "%r = arith.addi %a, %o : i1").replace("false : i1", "false"),
                        "another function than add"),
    "an order of truth values": (
        function("%0 = arith.cmpi slt, %x, %y : tensor<4xi1>", "%x: tensor<4xi1>, %y: tensor<4xi1>", "tensor<4xi1>"),
        r"slt on truth values.*<mlir>:3"),
    "another fold": (function(folded("arith.subf %o, %a : "
                                     "f32", "0.0"), "%x: tensor<3x4xf32>", "tensor<3xf32>"), "another function "
                                                                                             "than add"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_text_is_refused_with_the_reason(name: str) -> None:
    source, message = BAD[name]
    with pytest.raises(QCompilerError, match=message):
        imported(source)


def test_linalg_is_read_without_jax_and_torch(tmp_path: Path) -> None:
    path = tmp_path / "m.mlir"
    path.write_text(str(text(model("mlp"), example("mlp", 3), "linalg")))
    code = (
        "import sys\nfor name in ('jax', 'jaxlib', 'torch'): sys.modules[name] = None\nimport numpy as np, "
        "qcompiler as qc\n"
        f"p = qc.qcompile(qc.from_mlir({str(path)!r}), quant='nf4')\n"
        "x = np.ones((3, 8), np.float32)\nassert np.allclose(p(x), p.oracle(x), atol=1e-5)\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_example_of_the_page_runs() -> None:
    page = Path(__file__).parents[2] / "docs" / "doors.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    (block,) = (each for each in blocks if "torch_mlir" in each)
    names: dict[str, Any] = {}
    exec(block, names)
    assert close(names["y"].numpy(), names["prog"].oracle(names["x"].numpy()))
