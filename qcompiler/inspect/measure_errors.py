"""Measures the ratios of an `ErrorReport` on one input: the float model, the oracle, the program, and each stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import ml_dtypes
import numpy as np
import numpy.typing as npt

from qcompiler.errors import ArgumentError, QCompilerError
from qcompiler.inspect.error_report import (
    Answers,
    ErrorReport,
    Finder,
    Value,
    layer_rows,
    result_rows,
    stage_row,
)
from qcompiler.inspect.explore.model import Errors, LayerSnr, StageSnr
from qcompiler.inspect.stage_answers import StagesAgain
from qcompiler.plan.moved import moved_of
from qcompiler.plan.plan import Plan
from qcompiler.plan.weights import NUMPY_DTYPES
from qcompiler.runtime import interop
from qcompiler.runtime.loaded import LoadedProgram
from qcompiler.runtime.tree import arguments_of, names_in_order

Array = npt.NDArray[Any]


class Graph(Protocol):
    """One run of the model's graph in the framework that it came from."""

    @property
    def nodes(self) -> Sequence[Value]: ...
    @property
    def results(self) -> Sequence[Array]: ...


class Compared(Protocol):
    """The runs that a program is compared with; `model` is None without a float model."""

    @property
    def oracle(self) -> Graph: ...
    @property
    def model(self) -> Graph | None: ...


@dataclass(frozen=True)
class Stages:
    """The stages to run again: on the text after the import, with states that begin as the model's."""

    again: StagesAgain
    text: str
    states: Mapping[str, Array]


@dataclass
class _Run:
    """One call of the program."""

    entry: str
    results: tuple[Array, ...]
    layers: tuple[LayerSnr, ...] = ()
    notes: list[str] = field(default_factory=list)


def measure(
    program: LoadedProgram, compared: Compared, stages: Stages, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> ErrorReport:
    """Runs the program in a session of its own, and the stages in the interpreter.

    Raises the errors of a call, and ArgumentError for a float model with results of other shapes.  What an interpreter
    cannot run is a note of the report.
    """
    oracle, model = compared.oracle, compared.model
    if model is not None:
        _check_results(model.results, oracle.results)
    names = program.binder.names
    results = names_in_order(program.signature.outputs, len(program.plan.entries[0].outputs))
    inputs = _arrays(program, args, kwargs)
    args, kwargs = arguments_of(program.signature.inputs, inputs)  # arrays of NumPy in, arrays of NumPy out
    run = _step_by_step(program, oracle, model, args, kwargs)
    if model is None:
        run.notes.append("float model: it was not given; add model= in Python, --model on the command line")
    rows, why = _stages(stages, inputs, oracle, model)
    errors = Errors(
        inputs=tuple(f"{name}: {array.dtype}{list(array.shape)}" for name, array in zip(names, inputs, strict=True)),
        entry=run.entry,
        results=result_rows(results, run.results, oracle.results, model.results if model else ()),
        layers=run.layers,
        stages=tuple(rows),
        notes=(*run.notes, *why),
    )
    return ErrorReport(errors)


def check_arguments(program: LoadedProgram, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """ArgumentError for arguments that the program does not take, before any model runs with them."""
    binder = program.binder
    values = program.flatten_inputs(tuple(args), dict(kwargs))
    held = [value if isinstance(value, bool | int | float) else host_array(value) for value in values]
    sources = [interop.read(*each) for each in zip(held, binder.names, binder.dtypes, strict=True)]
    binder.bind([source.shape for source in sources])


def _arrays(program: LoadedProgram, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Array]:
    """The arguments in the plan's order; a Python number in the type that the program takes."""
    values = program.flatten_inputs(tuple(args), dict(kwargs))
    return [
        np.asarray(value, NUMPY_DTYPES[dtype]) if isinstance(value, bool | int | float) else host_array(value)
        for value, dtype in zip(values, program.binder.dtypes, strict=True)
    ]


def _check_results(floats: Sequence[Array], oracle: Sequence[Array]) -> None:
    """ArgumentError if a float model's results are not of the shapes that the program's are."""
    given, wanted = ([list(each.shape) for each in results] for results in (floats, oracle))
    if given != wanted:
        raise ArgumentError(
            f"model= gives results of the shapes {given}, and the program {wanted}: give the float model that the "
            "program was compiled from"
        )


def host_array(value: Any) -> Array:
    """An argument or a result as an array of NumPy; bf16 as ml_dtypes."""
    if isinstance(value, np.ndarray):
        return value
    if type(value).__module__.partition(".")[0] == "torch":
        import torch

        tensor = value.detach().cpu().contiguous()
        if tensor.dtype == torch.bfloat16:
            half: Array = tensor.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
            return half
        array: Array = tensor.numpy()
        return array
    return np.asarray(value)


def _flat(program: LoadedProgram, results: Any) -> tuple[Array, ...]:
    return tuple(host_array(leaf) for leaf in program.flatten_outputs(results))


def _step_by_step(
    program: LoadedProgram, oracle: Graph, model: Graph | None, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> _Run:
    """One call, looking at what each step writes."""
    session = program.session(stepwise=True)
    finder = Finder(oracle.nodes)
    binding, results = session.step_results(lambda each: finder.see(each.step, each.values), args, kwargs)
    entry = program.plan.entries[binding.entry].name
    floats, notes = _pairs(oracle, model, program.plan)
    return _Run(entry, _flat(program, results), layer_rows(oracle.nodes, floats, finder, entry), notes)


_ELSEWHERE = ("rotate-hidden", "equalise", "smooth-scales", "awq-scales")
"""Rewrites after which the values between the linears are others than in the model."""


def _pairs(oracle: Graph, model: Graph | None, plan: Plan) -> tuple[dict[str, Array], list[str]]:
    """The float model's value for each node of the oracle that has a pair there, by name.

    Where weights were moved, a value with the same place in both graphs may be another number.
    """
    if not oracle.nodes:
        return {}, ["layers: only a model of torch has an oracle whose values can be looked at one by one"]
    if model is None:
        return {}, []
    moved = moved_of(plan) or {}
    elsewhere = sorted({by for each in moved.values() for by in each if by in _ELSEWHERE})
    if elsewhere:
        why = "values between linears are others than in the model, and only results are compared with it"
        return {}, [f"layers: {', '.join(elsewhere)} moved weights, so {why}"]
    folded = {path.rpartition(".")[0] for path, by in moved.items() if "fold-batch-norm" in by}
    there, here = _by_place(model.nodes), _by_place(oracle.nodes)
    found = {
        node.name: other.values
        for place, nodes in here.items()
        if len(nodes) == len(there.get(place, ())) and nodes[0].path not in folded
        for node, other in zip(nodes, there[place], strict=True)
    }
    missing = sum(node.name not in found and not node.op.startswith("qc.dequantize") for node in oracle.nodes)
    note = f"{missing} of {len(oracle.nodes)} values of the quantised graph have no pair in the float model's graph"
    return found, [note] if missing else []


def _by_place(nodes: Sequence[Value]) -> dict[Any, list[Value]]:
    """The values of each operator with results of one shape at one place of the model, in the order of the graph.

    Names of nodes are no help: they count operators on sizes, too, of which a graph with dynamic sizes has more.
    """
    found: dict[Any, list[Value]] = {}
    for node in nodes:
        found.setdefault((node.op, node.path, node.line, node.values.shape), []).append(node)
    return found


def _stages(
    stages: Stages, inputs: Sequence[Array], oracle: Graph, model: Graph | None
) -> tuple[list[StageSnr], list[str]]:
    """A row for each stage that changed the module, and why there are no more of them."""
    rows: list[StageSnr] = []
    seen: list[Answers] = []  # of the import, and of the stage before
    floats = model.results if model is not None else ()

    def see(name: str, now: Answers) -> None:
        before, start = (seen[-1], seen[0]) if seen else (None, None)
        rows.append(stage_row(name, now, before, start, oracle.results, floats))
        seen[1:] = [now]

    try:
        stages.again.run(stages.text, inputs, stages.states, see)
    except QCompilerError as error:
        where = f"after {rows[-1].stage}" if rows else "at the import"
        return rows, [f"stages: the interpreter stopped {where}: {error}"]
    return rows, []


__all__ = ["Compared", "Graph", "Stages", "check_arguments", "host_array", "measure"]
