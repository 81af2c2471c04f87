"""Hostile and mistaken texts: each ends in an error that names the place and the way out, and allocates little."""

from __future__ import annotations

import contextlib
import resource
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlir_texts import formats, function, read, resources
from safetensors.numpy import save_file

import qcompiler as qc
from qcompiler.errors import (
    ArgumentError,
    ArgumentStructureError,
    ExportError,
    QCompilerError,
    UnboundedDimError,
    UnsupportedOperatorError,
    WeightsError,
)
from qcompiler.frontends.mlir.frontend import import_mlir
from qcompiler.frontends.mlir.text import MAX_DEPTH, read_text

ADD = "    %0 = stablehlo.add %x, %x : tensor<4x4xf32>"
SLICE = "    %0 = stablehlo.slice %w [0:4, 0:4] : (tensor<{n}x{n}xf32>) -> tensor<4x4xf32>"


def op(text: str) -> str:
    return f"    %0 = {text} : (tensor<4x4xf32>) -> tensor<4x4xf32>"


def calls(depth: int) -> str:
    """Functions that call the next one twice each: 2^depth calls without an operator."""
    body = "func.func private @f0(%x: tensor<4xf32>) -> tensor<4xf32> { return %x : tensor<4xf32> }\n"
    for n in range(1, depth + 1):
        head = f"func.func {'public @main' if n == depth else f'private @f{n}'}(%x: tensor<4xf32>) -> tensor<4xf32>"
        call = f"call @f{n - 1}(%{{}}) : (tensor<4xf32>) -> tensor<4xf32>"
        body += f"{head} {{ %0 = {call.format('x')}\n %1 = {call.format('0')}\n return %1 : tensor<4xf32> }}\n"
    last = "func.func private @g(%x: tensor<4xf32>) -> tensor<4xf32> { %0 = stablehlo.add %x, %x : tensor<4xf32>\n"
    return f"module {{ {body} {last} return %0 : tensor<4xf32> }} }}"


CASES: dict[str, tuple[str, str]] = {
    "empty": ("", "no MLIR"),
    "prose": ("not a module\nat all", "no MLIR"),
    "bytecode": ("ML\ufffdR{", "bytecode"),
    "cut off": ("module {\n  func.func @main(", "line 2:"),
    "other dialect": ("module { func.func @main() { \"tosa.add\"() : () -> () } }", "a dialect that is not read"),
    "deep brackets": ("module { func.func " + "(" * (MAX_DEPTH + 1), "nests brackets"),
    "deep signs": ("#m = affine_map<(d0) -> (" + "-" * 5000 + "1)>\nfunc.func @main", "nests brackets"),
    "unregistered": (function(op('"evil.op"(%x)') + "\n    %1 = stablehlo.abs %x : "
                                                    "tensor<4x4xf32>"), r"evil\.op.*<mlir>:3"),
    "no lowering": (function(op("stablehlo.cholesky %x, lower = "
                                "true").replace("(tensor<4x4xf32>) -> ", "")), r"cholesky.*<mlir>:3"),
    "windows of no size": (function(
        "    %c = stablehlo.constant dense<0> : tensor<2xi32>\n    %p = stablehlo.constant dense<0> : tensor<1x2xi32>\n"
        "    %z = stablehlo.constant dense<0.0> : tensor<f32>\n"
        "    %0 = stablehlo.custom_call @stablehlo.dynamic_reduce_window(%x, %z, %c, %c, %c, %c, %p) : "
        "(tensor<4x4xf32>, tensor<f32>, tensor<2xi32>, tensor<2xi32>, tensor<2xi32>, tensor<2xi32>, tensor<1x2xi32>)"
        " -> tensor<4x4xf32>"
    ), r"windows whose sizes or steps.*<mlir>:6"),
    "a library": (function(op("stablehlo.custom_call @system(%x)")), "'system' has no lowering"),
    "a side effect": (function(f"    %t = stablehlo.create_token : !stablehlo.token\n{ADD}"), "create_token"),
    "an endless loop": (
        function("    %0 = stablehlo.while(%i = %x) : tensor<4x4xf32>\n cond "
                 "{ %c = stablehlo.constant dense<true> : tensor<i1>\n"
                 " stablehlo.return %c : tensor<i1> } do { stablehlo.return %i : "
                 "tensor<4x4xf32> }"), "more than 512 trips"),
    "two functions": (function(ADD) .replace("}\n}", "}\n  func.func @b() { return "
                                                     "}\n}").replace("@main", "@a"), r"2 public functions \(a, "
                                                                                     r"b\).*entry="),
    "recursion": ("module "
                  "{ func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> { %0 = call @main(%x) : (tensor<4xf32>) -> "
                  "tensor<4xf32>\n %1 = stablehlo.add %0, %0 : tensor<4xf32>\n return %1 : tensor<4xf32> "
                  "} }", "in a circle"),
    "calls that multiply": (calls(40), "1099511627776 calls|calls, with those"),
    "no body": ("module "
                "{ func.func private @p(tensor<4xf32>) -> tensor<4xf32>\n"
                " func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> "
                "{ %0 = call @p(%x) : (tensor<4xf32>) -> tensor<4xf32>\n %1 = stablehlo.add %0, %0 : tensor<4xf32>\n"
                " return %1 : tensor<4xf32> } }", "@p, whose body is not in the text"),
    "a resource that is not there": (function("    %0 = stablehlo.constant dense_resource<w> : "
                                              "tensor<4x4xf32>"), "'w' is not in the text"),
    "a short resource": (function("    %0 = stablehlo.constant dense_resource<w> : "
                                  "tensor<4x4xf32>") + resources(w=np.ones(3, np.float32)),
                         "12 bytes.*takes 64"),
    "a long resource": (function("    %0 = stablehlo.constant dense_resource<w> : "
                                 "tensor<4x4xf32>") + resources(w=np.ones(17, np.float32)),
                        "68 bytes.*takes 64"),
    "bits": (function("    %0 = stablehlo.constant dense_resource<w> : "
                      "tensor<4x4xi1>", "", "tensor<4x4xi1>") + resources(w=np.ones(2, np.uint8)), "bits"),
    "a huge resource": (function("    %w = stablehlo.constant dense_resource<w> : "
                                 "tensor<40000x40000xf32>\n" + SLICE.format(n=40000)) +
                        resources(w=np.ones(16, np.float32)), "64 bytes.*takes 6400000000"),
    "a huge splat": (function("    %w = stablehlo.constant dense<1.0> : "
                              "tensor<40000x40000xf32>\n" + SLICE.format(n=40000)), "equal elements"),
    "more than 2^64 elements": (function("    %w = stablehlo.constant dense<1.0> : "
                                         "tensor<4294967296x4294967296xf32>\n" +
                                         SLICE.format(n=4294967296)), "18446744073709551616 elements"),
    "a huge argument": (function(SLICE.format(n=100000), "%w: tensor<100000x100000xf32>"), "10000000000 elements"),
    "a huge broadcast": (function("    %c = stablehlo.constant dense<1.0> : tensor<f32>\n    %w = "
                                  "stablehlo.broadcast_in_dim %c, dims = [] : "
                                  "(tensor<f32>) -> tensor<100000x100000xf32>\n" + SLICE.format(n=100000)), "elements"),
    "complex": (function("    %0 = stablehlo.add %x, %x : "
                         "tensor<4xcomplex<f32>>", "%x: tensor<4xcomplex<f32>>",
                         "tensor<4xcomplex<f32>>"), "ranked tensors"),
    "8-bit floats": (function("    %0 = stablehlo.add %x, %x : "
                              "tensor<4xf8E4M3FN>", "%x: tensor<4xf8E4M3FN>",
                              "tensor<4xf8E4M3FN>"), "f8E4M3FN|ranked tensors"),
    "an assertion": (function(f'{ADD}\n    %c = arith.constant false\n    cf.assert %c, '
                              f'"no"'), "programs check nothing"),
    "a dimension": (function("    %0 = stablehlo.add %x, %x : "
                             "tensor<?x4xf32>", "%x: tensor<?x4xf32> loc(\"x\")", "tensor<?x4xf32>"),
                    r"dynamic_shapes=\{'x': \{0: \('b', 1, 64\)\}\}"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_bad_text_is_refused_with_the_reason(name: str) -> None:
    text, message = CASES[name]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(QCompilerError, match=message):
        read(text)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500 << 10, "more than 500 MB were allocated"


@pytest.mark.parametrize("unit", ["{-#", '"\\', "a", 'a:"0x', "//"])
@pytest.mark.parametrize("frame", ["{}", "func.func {{-# {} #-}}"])
def test_a_hostile_text_is_looked_at_in_time_proportional_to_its_size(unit: str, frame: str) -> None:
    """16 times the text: at most 48 times as long, where a scan from each character takes 256 times as long."""

    def seconds(count: int) -> float:
        text, found = frame.format(unit * count), []
        for _ in range(3):
            began = time.process_time()
            with contextlib.suppress(ExportError):
                read_text(text, "f")
            found.append(time.process_time() - began)
        return min(found)

    assert seconds(24_000) <= 48 * max(seconds(1_500), 1e-3)


def test_names_of_a_text_are_cleaned() -> None:
    text = function(ADD, '%x: tensor<4x4xf32> {qc.name = "x\\22); system(\\22rm\\0A"}')
    (argument,) = qc.from_mlir(text, trusted=True).inputs
    assert argument.name.replace("_", "").isalnum()


NAMED = function(
    "    %0 = stablehlo.dot %x, %w : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>",
    '%x: tensor<4x4xf32> loc("x"), %w: tensor<4x4xf32> loc("layer.w")',
)
W = np.ones((4, 4), np.float32)


@pytest.mark.parametrize(
    ("weights", "kind", "message"),
    [
        ({"w": W}, WeightsError, r"no argument 'w'; its arguments are 'x', 'layer\.w'"),
        ({"layer.w": W[:3]}, WeightsError, "'layer.w' has the shape 3x4, and the text says 4x4xf32"),
        ({"layer.w": W.astype(np.float64)}, WeightsError, r"is float64.*array\.astype\('float32'\)"),
        ({"layer.w": "text"}, WeightsError, "."),
        ("nowhere.safetensors", WeightsError, "no file"),
        (3, ArgumentError, "a dict of arrays"),
    ],
)
def test_weights_that_do_not_fit_are_named(weights: Any, kind: type[QCompilerError], message: str) -> None:
    with pytest.raises(kind, match=message):
        qc.from_mlir(NAMED, weights, trusted=True)


def test_a_file_that_is_no_safetensors_is_refused(tmp_path: Path) -> None:
    (tmp_path / "w.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(WeightsError, match="no safetensors file"):
        qc.from_mlir(NAMED, tmp_path / "w.safetensors", trusted=True)
    save_file({"layer.w": W}, tmp_path / "good.safetensors")
    assert list(formats(read(NAMED, weights=tmp_path / "good.safetensors"))) == ["layer.w"]
    with pytest.raises(ExportError, match="no file"):
        qc.from_mlir(tmp_path / "none.mlir")
    with pytest.raises(ExportError, match="was given a int"):
        qc.from_mlir(3)


@pytest.mark.parametrize(("shapes", "kind", "message"), [
    ("b", ArgumentError, "write"), ({"y": {0: ("b", 1, 4)}}, ArgumentError, "the arguments are x"),
    ({"x": {1: ("b", 1, 4)}}, ArgumentError, "the text says 4"),
    ({"x": {2: ("b", 1, 4)}}, ArgumentError, "dimensions 0 to 1"),
    ({"x": {0: ("b", 4, 1)}}, ArgumentError, "low <= high"), ({"x": {0: ("b c", 1, 4)}}, ArgumentError, "symbol"),
    ({"x": {0: ("b", 1, 1 << 40)}}, ArgumentError, "low <= high"), (None, UnboundedDimError, "'x' is `\\?`"),
])  # fmt: skip
def test_malformed_sizes_are_refused(shapes: Any, kind: type[QCompilerError], message: str) -> None:
    text = function(
        "    %0 = stablehlo.add %x, %x : tensor<?x4xf32>", '%x: tensor<?x4xf32> loc("x")', "tensor<?x4xf32>"
    )
    with pytest.raises(kind, match=message):
        read(text, shapes)


def test_arguments_of_qcompile_that_a_text_does_not_take() -> None:
    model = qc.from_mlir(function(ADD), trusted=True)
    for given in ({"kwargs": {"x": W}}, {"weights": "w.safetensors"}, {"calibrate": 4}, {"fallback": "torch"}):
        with pytest.raises(ArgumentError):
            qc.qcompile(model, **given)  # type: ignore[arg-type]
    with pytest.raises(ArgumentStructureError, match="2 example inputs"):
        import_mlir(model, (W, W))


def test_a_size_that_no_symbol_makes_equal_is_refused() -> None:
    text = function(
        "    %0 = stablehlo.add %x, %y : tensor<?xf32>",
        '%x: tensor<?xf32> loc("x"), %y: tensor<?xf32> loc("y")',
        "tensor<?xf32>",
    )
    both = {"x": {0: ("a", 1, 4)}, "y": {0: ("b", 1, 4)}}
    with pytest.raises(UnsupportedOperatorError):
        read(text, both)
    read(text, {"x": {0: ("a", 1, 4)}, "y": {0: ("a", 1, 4)}})
