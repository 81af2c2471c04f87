"""Texts of MLIR for the tests of `from_mlir`, and what is done with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

import qcompiler as qc
from qcompiler.frontends.jax.importer import JaxImport
from qcompiler.frontends.mlir.frontend import import_mlir
from qcompiler.ir.interpreter import run

Array = npt.NDArray[Any]
NF4 = qc.QuantConfig("nf4", promise_bits=None)


def resources(**arrays: Array) -> str:
    """The section of a text that holds arrays."""
    lines = [f'{name}: "0x04000000{array.tobytes().hex()}"' for name, array in arrays.items()]
    return "\n{-#\n  dialect_resources: { builtin: {\n" + ",\n".join(lines) + "\n} }\n#-}\n"


def function(body: str, args: str = "%x: tensor<4x4xf32>", result: str = "tensor<4x4xf32>") -> str:
    """A module with one function, whose body returns `%0`."""
    return f"module {{\n  func.func @main({args}) -> {result} {{\n{body}\n    return %0 : {result}\n  }}\n}}\n"


def answers(result: JaxImport, inputs: Sequence[Any]) -> list[Array]:
    """What the interpreter makes of an imported text."""
    result.module.verify()
    return [np.asarray(y) for y in run(result.module, result.weights, [np.asarray(x) for x in inputs], states={})]


def read(
    text: Any, dynamic_shapes: Mapping[str, Any] | None = None, quant: Any = None, weights: Any = None
) -> JaxImport:
    """A text of this suite's, imported: test_isolated.py has those that are parsed in a process of their own."""
    return import_mlir(qc.from_mlir(text, weights, trusted=True), (), quant, dynamic_shapes)


def formats(result: Any) -> dict[str, str]:
    """By weight: its format, or why it was kept."""
    return {row.parameters[0]: (row.format or row.reason).partition(":")[0] for row in result.ledger}
