"""Stage `export`: turns an nn.Module, ExportedProgram or fx.GraphModule into one functional ATen graph with named
sizes.

Operators that the importer has a builder for are kept (linear, attention, norms, activations, …); everything else is
decomposed by torch's own core ATen table.  The kept set is the importer's table itself, so the two cannot disagree.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from qcompiler.errors import (
    ArgumentError,
    DataDependentShapeError,
    ExportError,
    NarrowedDimError,
    QCompilerError,
    UnboundedDimError,
    UnsupportedOperatorError,
)
from qcompiler.frontends.torch.aten import recurrent
from qcompiler.frontends.torch.aten.table import BUILDERS
from qcompiler.frontends.torch.capture import attributes, consecutive_calls, dynamic, expert_weights, narrowing, pooling
from qcompiler.frontends.torch.capture.decompose import KeepOps, decompose
from qcompiler.frontends.torch.capture.dynamic import TraceInputs
from qcompiler.frontends.torch.capture.export_progress import counting_modules
from qcompiler.frontends.torch.capture.one_at_a_time import TRACING, alone
from qcompiler.frontends.torch.capture.real_parts import use_real_parts
from qcompiler.frontends.torch.capture.remembered import Remembered
from qcompiler.frontends.torch.capture.settled_conditions import settled_conditions
from qcompiler.frontends.torch.capture.signature import names_in, parameter_names
from qcompiler.frontends.torch.capture.state import declare_states
from qcompiler.frontends.torch.capture.writes import refuse_written_arguments
from qcompiler.frontends.torch.common import empty_weights
from qcompiler.frontends.torch.common.origins import describe, line_of_exception, readable
from qcompiler.frontends.torch.common.symbols import Symbols
from qcompiler.plan.dims import Range


@dataclass
class Exported:
    """A decomposed program, the user's name of each torch symbol, each symbol's range, and notes for the report."""

    program: ExportedProgram
    symbols: Symbols
    ranges: dict[str, Range] = field(default_factory=dict)
    notes: tuple[narrowing.Note, ...] = ()
    parameters: tuple[str, ...] = ()
    """Names of the positional parameters of the model's forward, in order."""
    config: Any = None
    """The model's `config`, if it has one."""

    @property
    def graph(self) -> fx.Graph:
        graph: fx.Graph = self.program.graph
        return graph

    def text(self) -> str:
        """The contents of the dump `00-export.txt`."""
        return readable(self.program.graph_module) + f"\n# ranges: {self.ranges}\n{self.program.graph_signature}\n"


def export_model(
    model: nn.Module | ExportedProgram,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
    *,
    keep: KeepOps | None = None,
    refused: list[Refusal] | None = None,
) -> Exported:
    """Exports a model.

    `dynamic_shapes` names dimensions as in dynamic.py, or as in torch.export; an ExportedProgram has its own.  `keep`
    are the operators not to decompose (default: all that the importer knows).
    With `refused`, operators that no program can hold are appended to that list instead of raising the first of them.

    Several threads trace one after another.

    Errors, all naming the user's line where there is one: ExportError, DataDependentShapeError, UnboundedDimError,
    NarrowedDimError, ArgumentError.
    """
    with alone(model) if isinstance(model, nn.Module) else contextlib.nullcontext(), TRACING:
        return _exported(model, args, kwargs, dynamic_shapes, keep, refused)


def _exported(
    model: nn.Module | ExportedProgram,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    dynamic_shapes: Any,
    keep: KeepOps | None,
    refused: list[Refusal] | None,
) -> Exported:
    if isinstance(model, ExportedProgram):
        if dynamic_shapes is not None:
            raise ArgumentError(
                "an ExportedProgram brings its own dynamic shapes; export the model again to change them"
            )
        exported = _decompose(declare_states(model), keep)
        _refuse(exported, refused)
        exported.ranges = _ranges_of(exported)
        exported.parameters = names_in(model)
    else:
        if not isinstance(model, nn.Module):
            raise ExportError(
                f"cannot compile a {type(model).__name__}: give an nn.Module, an ExportedProgram or an fx.GraphModule"
            )
        given = pytree.tree_leaves((args, kwargs), is_leaf=lambda leaf: isinstance(leaf, PackedSequence))
        if any(isinstance(leaf, PackedSequence) for leaf in given):
            recurrent.refuse_packed()
        with dynamic.named_keywords(model, args, kwargs or {}), expert_weights.as_pairs(model):
            exported = _export_module(model, tuple(args), dict(kwargs or {}), dynamic_shapes, keep, refused)
        exported.parameters = parameter_names(model)
        exported.config = getattr(model, "config", None)
    return exported


def _export_module(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dynamic_shapes: Any,
    keep: KeepOps | None,
    refused: list[Refusal] | None,
) -> Exported:
    inputs = dynamic.prepare(model, args, kwargs, dynamic_shapes)

    def trace() -> ExportedProgram:
        # opt_einsum, where it is installed (JAX brings it), asks for sizes as numbers, which fixes dynamic ones.
        in_order = torch.backends.opt_einsum.flags(enabled=False)
        with (
            warnings.catch_warnings(),
            pooling.sizes_that_follow(),
            recurrent.whole_layers(),
            settled_conditions(),
            in_order,
            counting_modules(model),
        ):
            warnings.simplefilter("ignore")
            return empty_weights.export(model, inputs.args, inputs.kwargs, inputs.dynamic_shapes)

    paths = {id(module): path for path, module in model.named_modules()}
    why = narrowing.blame(trace, paths, inputs.sizes, inputs.ranges)
    remembered = Remembered(model, trace)
    try:
        program = declare_states(remembered.run(), model, remembered.names)
    except QCompilerError:
        raise
    except Exception as error:  # whatever the model's own code raises under tracing
        raise _translate(error, model, inputs, why) from error
    exported = _decompose(program, keep)
    _refuse(exported, refused)
    exported.symbols = Symbols(_names(exported.program, inputs))
    exported.ranges = dict(inputs.ranges)
    if refused:
        return exported  # a refused graph cannot be run at other sizes
    narrowing.check_ranges(exported.program, exported.symbols.names, inputs.ranges, inputs.derived, why)
    missing = set(inputs.ranges) - set(exported.symbols.names.values())
    if missing:
        raise NarrowedDimError(f"the model fixes the size of {', '.join(sorted(missing))}" + why(sorted(missing)))
    probes = _probes(model, args, kwargs, dynamic_shapes, inputs)
    calls = [(inputs.args, inputs.kwargs), *((each.args, each.kwargs) for each in probes)]
    consecutive_calls.check(model, exported.program, calls, remembered.doubts)
    with attributes.unchanged(model):
        exported.notes = narrowing.probe(model, exported.program, exported.symbols, probes, why)
    exported.notes += tuple(remembered.notes)
    return exported


# --- dimensions ------------------------------------------------------------------------------------------------------


def _names(program: ExportedProgram, inputs: TraceInputs) -> dict[str, str]:
    """The user's names of torch's symbols: a symbol's hint is its traced size, and those are all different."""
    by_size = {size: name for name, size in inputs.sizes.items()}
    names: dict[str, str] = {}
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if node.op != "placeholder" or not isinstance(value, torch.Tensor):
            continue
        for size in value.shape:
            if isinstance(size, torch.SymInt):
                hints = size.node.shape_env.backed_var_to_val
                for symbol in size.node.expr.free_symbols:
                    hint = int(hints[symbol])
                    if hint in by_size:
                        names[str(symbol)] = by_size[hint]
    return names


def _ranges_of(exported: Exported) -> dict[str, Range]:
    """The ranges of a given ExportedProgram's input symbols, under torch's names."""
    ranges: dict[str, Range] = {}
    for node in exported.graph.nodes:
        value = node.meta.get("val")
        if node.op != "placeholder" or not isinstance(value, torch.Tensor):
            continue
        for axis, size in enumerate(value.shape):
            found: set[Any] = size.node.expr.free_symbols if isinstance(size, torch.SymInt) else set()
            for symbol in found:
                bounds = exported.program.range_constraints.get(symbol)
                if bounds is None or not getattr(bounds.upper, "is_Integer", isinstance(bounds.upper, int)):
                    raise UnboundedDimError(
                        f"dimension {axis} of '{node.name}' ('{symbol}') has no maximum: export with "
                        f"torch.export.Dim(…, min=1, max=…)"
                    )
                ranges[str(symbol)] = (max(int(bounds.lower), 1), int(bounds.upper))
    return ranges


def _probes(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any, inputs: TraceInputs
) -> list[narrowing.Probe]:
    """Each symbol alone at its minimum, and all of them together."""
    minima = {name: low for name, (low, _) in inputs.ranges.items() if low < inputs.sizes[name]}
    cases = [{name: low} for name, low in minima.items()]
    if len(minima) > 1:
        cases.append(minima)
    probes = []
    for case in cases:
        sizes = {**inputs.sizes, **case}
        at = dynamic.prepare(model, args, kwargs, dynamic_shapes, sizes=sizes)
        probes.append(narrowing.Probe(case, sizes, at.args, at.kwargs))
    return probes


# --- decomposition ---------------------------------------------------------------------------------------------------


def _decompose(program: ExportedProgram, keep: KeepOps | None) -> Exported:
    if keep is None:
        keep = frozenset(BUILDERS)
    decomposed = decompose(program, keep)
    use_real_parts(decomposed)
    return Exported(decomposed, Symbols())


# --- refusals --------------------------------------------------------------------------------------------------------


Refusal = tuple[fx.Node, QCompilerError]
"""A node that no program can hold, and the error with the reason."""


def _refuse(exported: Exported, refused: list[Refusal] | None) -> None:
    """Raises refusals before the model is run at other sizes, where they would look like a narrowed range."""
    for node, error in (*_side_effects(exported.program), *_data_dependence(exported)):
        if refused is None:
            raise error
        refused.append((node, error))
    _refuse_kinds(exported.program)


def _side_effects(program: ExportedProgram) -> Iterator[Refusal]:
    for node in program.graph.nodes:
        if node.target is not torch.ops.higher_order.with_effects:
            continue
        _, op, *arguments = node.args
        checks = op is torch.ops.aten._linalg_check_errors.default  # raises if a matrix is singular
        name = f"torch.{arguments[1]}" if checks else op
        way = ', let torch run it (fallback="torch")' if checks else ""
        yield (
            node,
            UnsupportedOperatorError(
                f"the operator {name} has side effects, such as an error that depends on values, and no lowering"
                f"{describe(node)}. Rewrite that line{way}, or compute it outside of the compiled model and pass the "
                "result in"
            ),
        )


def _data_dependence(exported: Exported) -> Iterator[Refusal]:
    for node in exported.graph.nodes:
        values = node.meta.get("val")
        for value in values if isinstance(values, list | tuple) else [values]:
            sizes = value.shape if isinstance(value, torch.Tensor) else [value] if _is_symbolic(value) else []
            if any(_is_symbolic(s) and torch.fx.experimental.symbolic_shapes.free_unbacked_symbols(s) for s in sizes):
                states = " and ".join(f"'{name}'" for name in _states_behind(exported.program, node))
                source = f", computed from the state {states}" if states else ""
                way = (
                    ". If the model counts the positions of a cache, give it positions and a mask of the cache's length"
                    " (docs/state.md)"
                )
                yield (
                    node,
                    DataDependentShapeError(
                        f"{node.target} gives a size that depends on the values of a tensor{source}{describe(node)}. "
                        "Shapes may depend on input shapes only: use a mask, torch.where, or a fixed maximum"
                        + (way if states else "")
                    ),
                )
                break


def _states_behind(program: ExportedProgram, node: fx.Node) -> list[str]:
    """The written buffers whose values a node is computed from."""
    signature = program.graph_signature
    written = set(signature.buffers_to_mutate.values())
    found: list[str] = []
    seen: set[fx.Node] = set()
    waiting = [node]
    while waiting:
        each = waiting.pop()
        if each in seen or each.target is torch.ops.aten.sym_size.int:  # a size is not a value
            continue
        seen.add(each)
        waiting += each.all_input_nodes
        buffer = signature.inputs_to_buffers.get(each.name)
        if buffer in written:
            found.append(buffer)
    return sorted(found)


def _is_symbolic(value: Any) -> bool:
    return isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)


def _refuse_kinds(program: ExportedProgram) -> None:
    refuse_written_arguments(program)
    for input_spec in program.graph_signature.input_specs:
        if input_spec.kind in (InputKind.TOKEN, InputKind.CUSTOM_OBJ):
            raise ExportError(f"the exported program takes a {input_spec.kind.name}, which is not supported")


def _translate(
    error: Exception, model: nn.Module, inputs: TraceInputs, why: Callable[[Sequence[str]], str]
) -> Exception:
    """torch's exception as ours, with the user's line."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    line = line_of_exception(error)
    place = f" ({line})" if line else ""
    text = str(error).strip().split("\n\n")[0]
    chain = [error, error.__cause__, error.__context__]
    if any(
        isinstance(e, GuardOnDataDependentSymNode | DataDependentOutputException | DynamicOutputShapeException)
        for e in chain
    ):
        return DataDependentShapeError(
            f"{type(model).__name__} branches on, or makes a shape from, the values of a tensor{place}. Shapes and "
            "control flow may depend on input shapes only: use a mask or torch.where. torch says: "
            + text.splitlines()[0]
        )
    if "Constraints violated" in str(error):
        names = [name for name in inputs.ranges if f"({name})" in text or f"{name} = " in text or f" {name} " in text]
        blamed = why(names)
        if not blamed:  # then torch's words are all there is
            details = [s.strip(" -") for s in text.splitlines() if s.strip().startswith("-")]
            blamed = f": {details[0].split('. If you')[0] if details else text.splitlines()[0]}"
        return NarrowedDimError(f"the model narrows {', '.join(names) or 'a dimension'}{blamed}")
    if "in output, which is not a known type" in text:
        kind = text.partition("<class '")[2].partition("'")[0]
        return ExportError(
            f"{type(model).__name__} returns a {kind}, which a program cannot rebuild: use tuple, list, dict, a "
            "namedtuple or a ModelOutput (for a cache of transformers: use_cache=False)"
        )
    sizes = ", ".join(f"{name} = {inputs.sizes[name]}" for name in inputs.ranges if name in inputs.sizes)
    traced = (
        f". It was traced at {sizes}: dynamic_shapes= must name a size in every argument that has it, and give it a "
        "range that the model takes"
        if sizes
        else ""
    )
    what = f"{type(model).__name__}{place}: {type(error).__name__}: {text[:2000]}"
    return ExportError(f"torch.export cannot trace {what}{traced}")
