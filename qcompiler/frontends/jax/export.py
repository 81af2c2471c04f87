"""Stage `export`: a jittable function as StableHLO, and that as a `Graph`.

The first argument (of two or more) holds the weights: its arrays become constants of the program, by their pytree
paths, and all else in it is fixed, typed keys of random numbers too. A callable pytree that holds arrays, such as an
Equinox module, is its own first argument. Numbers, texts and None among the other arguments are fixed, too.

`jax.export` traces and lowers the function; its module is read with jaxlib's MLIR bindings.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import chlo, mhlo, sdy, stablehlo

from qcompiler.errors import ExportError
from qcompiler.frontends.jax import donation, symbolic
from qcompiler.frontends.jax.attributes import element_name
from qcompiler.frontends.jax.exported import Exported
from qcompiler.frontends.jax.graph import Graph, Value
from qcompiler.frontends.jax.oracle import in_arithmetic
from qcompiler.frontends.jax.reader import Reader, functions_of
from qcompiler.frontends.jax.refusals import check_effects, check_results, refused
from qcompiler.frontends.jax.side_effects import Replaced, line_of, watched
from qcompiler.frontends.jax.side_effects import check as check_replaced
from qcompiler.frontends.jax.trees import (
    Tree,
    flattened,
    is_array,
    is_key,
    leaf_paths,
    numbered,
    path_text,
    shape_struct,
    tree_of,
)

Array = npt.NDArray[Any]


class _Call:
    """A function and its example arguments, taken apart: arrays of weights, arrays of inputs, and what is fixed."""

    def __init__(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.is_module = any(is_array(leaf) for leaf in jax.tree_util.tree_leaves(function))
        self.function = (lambda first, *rest, **named: first(*rest, **named)) if self.is_module else function
        parameters = _parameters(function)
        if self.is_module:
            self.has_weights, first, self.args = True, function, tuple(args)
        else:
            self.has_weights = len(args) + len(kwargs) > 1 and bool(args)
            first, self.args = (args[0], tuple(args[1:])) if self.has_weights else (None, tuple(args))
            self.label = parameters[0] if parameters else "params"
            parameters = parameters[1:] if self.has_weights else parameters
        self.kwargs, self.parameters = dict(kwargs), parameters
        found, self.first_tree = leaf_paths(first), jax.tree_util.tree_structure(first)
        self.first = [leaf for _, leaf in found]
        self.weights: dict[str, int] = {}
        for i, (path, leaf) in enumerate(found):
            if is_array(leaf) and not is_key(leaf):
                _claim(self.weights, path_text(path), i)
        if "" in self.weights:  # the argument is one array
            self.weights = {self.label: self.weights[""]}
        named, self.rest_tree = flattened((self.args, self.kwargs))
        self.rest = [leaf for _, leaf in named]
        self.inputs = [i for i, leaf in enumerate(self.rest) if is_array(leaf)]
        self.input_names = _distinct([_input_name(path, parameters) for path, _ in named])
        self.argument_of = [path[1].idx if path[0].idx == 0 else None for path, _ in named]
        """The number of the positional argument that each leaf is in."""

    def of(self, weights: Sequence[Any], args: Any, kwargs: Any) -> Any:
        """The function's result with these arrays in the first argument."""
        return self.function(*self._first_with(weights), *args, **kwargs)

    def _first_with(self, weights: Sequence[Any]) -> list[Any]:
        """The first argument, if there is one that holds weights."""
        if not self.has_weights:
            return []
        leaves = list(self.first)
        for position, array in zip(self.weights.values(), weights, strict=True):
            leaves[position] = array
        return [jax.tree_util.tree_unflatten(self.first_tree, leaves)]

    def flat(self, weights: Sequence[Any], inputs: Sequence[Any]) -> tuple[Any, list[Replaced]]:
        """The same for the arrays of the other arguments; and which arrays the function replaced in its arguments."""
        leaves = list(self.rest)
        for position, array in zip(self.inputs, inputs, strict=True):
            leaves[position] = array
        args, kwargs = jax.tree_util.tree_unflatten(self.rest_tree, leaves)
        first = self._first_with(weights)
        arguments, arrays = (first, args, kwargs), [*weights, *inputs]
        return watched(lambda: self.function(*first, *args, **kwargs), arguments, arrays)

    @property
    def argument_names(self) -> list[str]:
        """What messages call the positional arguments."""
        return [self.parameters[i] if i < len(self.parameters) else f"args[{i}]" for i in range(len(self.args))]

    def tree(self, states: Collection[int] = ()) -> Tree:
        """The signature's inputs, without the positional arguments of these numbers."""
        taken = [position for position in self.inputs if self.argument_of[position] not in states]
        number = {position: {"kind": "leaf", "index": i} for i, position in enumerate(taken)}
        shape = numbered(self.rest_tree)
        leaf_of = {
            i: number.get(i) or tree_of(leaf, {}, f"the argument '{self.input_names[i]}'")
            for i, leaf in enumerate(self.rest)
            if self.argument_of[i] not in states
        }
        args = [tree_of(arg, leaf_of, f"args[{i}]") for i, arg in enumerate(shape[0]) if i not in states]
        kwargs = {key: tree_of(value, leaf_of, key) for key, value in shape[1].items()}
        tree: Tree = {
            "args": {"kind": "tuple", "items": args},
            "kwargs": {"kind": "dict", "keys": list(kwargs), "items": list(kwargs.values())},
        }
        names = [name for i, name in enumerate(self.parameters) if i not in states]
        known = {*names[: len(args)], *kwargs}
        last = max((n for n, name in enumerate(names, 1) if name in known), default=0)
        if last:
            tree["names"] = names[:last]
        return tree


def _claim(weights: dict[str, int], path: str, position: int) -> None:
    if path in weights:
        raise ExportError(
            f"two arrays of the first argument have the path '{path}', by which weights are stored: a key with a dot "
            "in it reads as two keys. Rename one of them"
        )
    weights[path] = position


def export_function(
    function: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    dynamic_shapes: Mapping[str, Any] | None,
    composites: Collection[str],
    donated: int | Sequence[int] | None = None,
) -> Exported:
    """Exports a function for these example arguments; a `jax.ShapeDtypeStruct` has no values, and may have symbols.

    `donated` are the numbers of arguments that become states (donation.py).

    ExportError and its subclasses for what cannot be traced, ArgumentStructureError for pytrees that a program cannot
    rebuild, UnsupportedOperatorError for calls into libraries and for loops without a fixed number of trips.
    """
    call = _Call(function, args, kwargs or {})
    call.tree()  # refuses what a program cannot rebuild
    first_is_weights = call.has_weights and not call.is_module
    chosen = donation.numbers(donated, len(args), first_is_weights)
    weights = [shape_struct(call.first[i], name) for name, i in call.weights.items()]
    structs = [shape_struct(call.rest[i], call.input_names[i]) for i in call.inputs]
    names = [call.input_names[i] for i in call.inputs]
    structs, limits = symbolic.apply(structs, names, dynamic_shapes)
    results: list[Any] = []
    effects: list[Replaced] = []

    def traced(leaves: list[Any], given: list[Any]) -> list[Any]:
        result, effects[:] = call.flat(leaves, given)
        named, tree = jax.tree_util.tree_flatten_with_path(result)
        check_results(((jax.tree_util.keystr(path), leaf) for path, leaf in named), function)
        results[:] = [tree]
        return [leaf for _, leaf in named]

    try:
        jitted = jax.jit(traced, keep_unused=True)
        jaxpr = jitted.trace(weights, structs).jaxpr
        check_effects(jaxpr)
        exported = jax.export.export(jitted, platforms=["cpu"])(weights, structs)  # the trace is remembered
    except Exception as error:  # whatever the function raises under tracing
        raise refused(error, function) from error
    ranges = symbolic.ranges_of([struct.shape for struct in structs], limits)
    graph = Graph(ranges=ranges)
    _read(exported, graph, list(call.weights), names, composites)
    check_replaced(effects, graph, lambda number: line_of(lambda *a: call.flat(*a)[1], (weights, structs), number))
    given = [
        donation.Leaf(i, call.argument_of[position], struct)
        for i, (position, struct) in enumerate(zip(call.inputs, structs, strict=True))
    ]
    if donated is None:
        found = donation.donated_by_function(jaxpr, len(weights))
        donation.note(found, call.argument_names, given, first_is_weights, graph.notes)
    states = donation.pair(call.args, call.argument_names, given, chosen, results[0], exported.out_avals, graph.notes)
    graph.states = {graph.arguments[i]: result for i, result in states.items()}
    outputs = donation.outputs(results[0], states.values())
    samples = [symbolic.sample(call.rest[i], struct, ranges) for i, struct in zip(call.inputs, structs, strict=True)]
    kept = {i: _first(call.rest[call.inputs[i]]) for i in states}
    leaves = [call.first[i] for i in call.weights.values()]
    inputs = call.tree({leaf.argument for leaf in given if leaf.number in states and leaf.argument is not None})
    return Exported(
        graph, leaves, inputs, outputs, names, [s for i, s in enumerate(samples) if i not in states], call.of,
        values_of, jnp.asarray, functools.partial(in_arithmetic, call.of),
        states={graph.arguments[i].name: values for i, values in kept.items()},
    )  # fmt: skip


def _first(leaf: Any) -> Array:
    """The first values of a state: those of the example, zeros for a shape alone."""
    return np.zeros(leaf.shape, leaf.dtype) if isinstance(leaf, jax.ShapeDtypeStruct) else np.asarray(leaf)


def _read(
    exported: Any, graph: Graph, weights: Sequence[str], names: Sequence[str], composites: Collection[str]
) -> None:
    """Fills the graph from the exported module."""
    context = ir.Context()
    context.allow_unregistered_dialects = True  # custom calls have attributes of mhlo, and get an error of their own
    stablehlo.register_dialect(context)
    chlo.register_dialect(context)
    sdy.register_dialect(context)
    mhlo.register_mhlo_dialect(context)
    with context, ir.Location.unknown():
        module = stablehlo.deserialize_portable_artifact(context, exported.mlir_module_serialized)
        main = functions_of(module)["main"]
        kinds = [element_name(argument.type) for argument in main.regions[0].blocks[0].arguments]
        values = [
            Value(symbolic.dims_of(aval.shape), kind, name=name)
            for aval, kind, name in zip(exported.in_avals, kinds, [*weights, *names], strict=True)
        ]
        graph.leaves = dict.fromkeys(values[: len(weights)])
        graph.arguments = values[len(weights) :]
        Reader(module, graph, composites).run(values)


def _parameters(function: Any) -> list[str]:
    """The names of the parameters that a call may pass by position and by keyword."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a builtin without a signature
        return []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in parameters if p.kind in kinds]


def _input_name(path: tuple[Any, ...], parameters: Sequence[str]) -> str:
    """`x`, or `cache.k` for a leaf of an argument's container."""
    where, name, *inner = path
    first = str(getattr(name, "key", ""))
    if where.idx == 0:
        number = name.idx
        first = parameters[number] if number < len(parameters) else f"args_{number}"
    return ".".join(filter(None, [first, path_text(tuple(inner))]))


def _distinct(names: list[str]) -> list[str]:
    seen: dict[str, int] = {}
    found = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        found.append(name if seen[name] == 1 else f"{name}_{seen[name]}")
    return found


def values_of(leaf: Any, name: str) -> Array:
    """The values of an array. ExportError for one that has a shape only."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        raise ExportError(
            f"the weight '{name}' is a ShapeDtypeStruct, which has no values: pass the array, or compile for plan and "
            'sizes only, weights="none"'
        )
    return np.asarray(leaf)
