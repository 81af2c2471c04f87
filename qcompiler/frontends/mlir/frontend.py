"""From a text of MLIR to the IR, in the stages of every frontend: export (read the text), insert-qdq, import."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from qcompiler.config import QuantConfig
from qcompiler.errors import ArgumentStructureError, ExportError
from qcompiler.frontends.jax.exported import Exported
from qcompiler.frontends.jax.float_run import Calibration
from qcompiler.frontends.jax.graph import NUMPY, Graph, Value
from qcompiler.frontends.jax.importer import JaxImport, import_graph, import_in_stages
from qcompiler.frontends.jax.quantise import quantise
from qcompiler.frontends.mlir import sizes
from qcompiler.frontends.mlir.batches import share_matrices
from qcompiler.frontends.mlir.constants import Constants
from qcompiler.frontends.mlir.linalg_ops import read_linalg
from qcompiler.frontends.mlir.model import MlirModel
from qcompiler.frontends.mlir.types import Argument
from qcompiler.frontends.weights.weight_files import WeightFiles
from qcompiler.ir.interpreter import run
from qcompiler.plan.dims import Dim, Range, dim

Array = npt.NDArray[Any]


def import_mlir(
    model: MlirModel,
    args: Sequence[Any] = (),
    quant: QuantConfig | str | None = None,
    dynamic_shapes: Mapping[str, Any] | None = None,
    valued: bool = True,
    files: WeightFiles | None = None,
    calibration: Calibration | None = None,
) -> JaxImport:
    """Runs the three stages for StableHLO and linalg; `result.texts` holds the dumps "00-export" and "01-insert-qdq".

    `args` are example inputs, for `verify_each="numerics"`; without them numbers are drawn.
    """
    export = functools.partial(_export, model, args, dynamic_shapes)
    return import_in_stages(export, quant, valued=valued, files=files, calibration=calibration)


def _export(model: MlirModel, args: Sequence[Any], dynamic_shapes: Mapping[str, Any] | None) -> Exported:
    """The function as a graph: weights by name and constants of the text are its leaves."""
    shapes, ranges = sizes.resolve(model.inputs, dynamic_shapes)
    shape_by_name = {argument.name: shape for argument, shape in zip(model.inputs, shapes, strict=True)}
    graph = Graph(ranges=ranges)
    constants = Constants(graph, model.text.resources, {argument.name for argument in model.arguments})
    values = []
    for argument in model.arguments:
        weight = model.weights.get(argument.name)
        shape = shape_by_name[argument.name] if weight is None else weight.shape
        value = Value(shape, argument.element, name=argument.name)
        values.append(value)
        if weight is None:
            graph.arguments.append(value)
        else:
            graph.leaves[value] = None
            constants.arrays[value] = weight
    _read(model, graph, values, constants)
    share_matrices(graph)
    exported = Exported(
        graph, [constants.arrays[leaf] for leaf in graph.leaves], _inputs(model), _outputs(len(graph.returned)),
        [argument.name for argument in model.inputs], samples(model.inputs, shapes, ranges, args),
        _no_run, lambda leaf, name: np.asarray(leaf), np.asarray,
    )  # fmt: skip
    exported.run = _oracle(exported)
    return exported


def _read(model: MlirModel, graph: Graph, values: list[Value], constants: Constants) -> None:
    try:
        if model.dialect == "stablehlo":
            from qcompiler.frontends.mlir.stablehlo import read_stablehlo  # jaxlib

            read_stablehlo(model, graph, values, constants)
        else:
            read_linalg(model, graph, values, constants)
    except (KeyError, IndexError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ExportError(
            f"{model.file} is not a module that is understood: {type(error).__name__}: {str(error)[:200]}"
        ) from error


def _inputs(model: MlirModel) -> dict[str, Any]:
    leaves = [{"kind": "leaf", "index": i} for i in range(len(model.inputs))]
    return {
        "args": {"kind": "tuple", "items": leaves},
        "kwargs": {"kind": "dict", "keys": [], "items": []},
        "names": [argument.name for argument in model.inputs],
    }


def _outputs(count: int) -> dict[str, Any]:
    leaves = [{"kind": "leaf", "index": i} for i in range(count)]
    return leaves[0] if count == 1 else {"kind": "tuple", "items": leaves}


def samples(
    arguments: Sequence[Argument], shapes: Sequence[Sequence[Dim]], ranges: Mapping[str, Range], args: Sequence[Any]
) -> list[Array]:
    """Example inputs: the caller's, or small numbers of the arguments' types. ArgumentStructureError if they differ."""
    if args:
        if len(args) != len(arguments):
            raise ArgumentStructureError(
                f"{len(args)} example inputs were given, and the function takes {len(arguments)}: "
                f"{', '.join(argument.name for argument in arguments)}"
            )
        return [np.asarray(each) for each in args]
    chosen = {name: min(max(3, low), high) for name, (low, high) in ranges.items()}
    draw = np.random.default_rng(0)
    found = []
    for argument, shape in zip(arguments, shapes, strict=True):
        kind, plain = NUMPY[argument.element], [dim(size).evaluate(chosen) for size in shape]
        floating = argument.element.startswith(("f", "bf"))
        found.append(draw.standard_normal(plain).astype(kind) if floating else np.zeros(plain, kind))
    return found


def _no_run(leaves: Sequence[Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    raise NotImplementedError


def _oracle(exported: Exported) -> Any:
    """The text's meaning with these weights, by the interpreter: `run(leaves, args, kwargs)`.

    It is imported once for the same weights: a program's oracle calls with the same ones each time.
    """
    made: list[tuple[Sequence[Any], JaxImport]] = []

    def imported(leaves: Sequence[Any]) -> JaxImport:
        if not made or any(a is not b for a, b in zip(made[0][0], leaves, strict=True)):
            made[:] = [(list(leaves), import_graph(quantise(replace(exported, leaves=list(leaves)), None)))]
        return made[0][1]

    def answer(leaves: Sequence[Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        given = [*args, *(kwargs[name] for name in exported.names[len(args) :])]
        plain = imported(leaves)
        found = run(plain.module, plain.weights, [np.asarray(each) for each in given], states={})
        return found[0] if len(found) == 1 else tuple(found)

    return answer
