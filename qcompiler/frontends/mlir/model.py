"""`from_mlir`: a text of MLIR as a model for `qcompile`.

model = qc.from_mlir("model.mlir", weights={"up.weight": array})
prog = qc.qcompile(model, quant="nf4", dynamic_shapes={"x": {0: ("b", 1, 64)}})
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors

from qcompiler.errors import ArgumentError, ExportError, WeightsError
from qcompiler.frontends.jax.graph import NUMPY
from qcompiler.frontends.mlir import bindings, isolated, names
from qcompiler.frontends.mlir.text import Dialect, ModuleText, read_text
from qcompiler.frontends.mlir.types import Argument, parse_type

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class MlirModel:
    """A parsed function of MLIR, with the values of those of its arguments that are weights.

    `inputs` are the arguments that the program takes, `weights` the arrays of the others; constants of the text are
    weights, too, and are found when it is compiled.
    """

    file: str
    dialect: Dialect
    text: ModuleText
    module: Any
    function: Any
    functions: Mapping[str, Any]
    arguments: tuple[Argument, ...]
    weights: Mapping[str, Array]

    @property
    def inputs(self) -> tuple[Argument, ...]:
        return tuple(argument for argument in self.arguments if argument.name not in self.weights)

    def line(self, location: str) -> str:
        """`model.mlir:12`, or the line of Python that a location names; empty without one."""
        return names.line_of(location, self.file)

    def __repr__(self) -> str:
        given = ", ".join(f"{a.name}: {_shape(a)}" for a in self.inputs)
        return f"<{self.dialect} of {self.file}: ({given}), {len(self.weights)} weights by name>"


def from_mlir(
    source: Any,
    weights: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    *,
    entry: str | None = None,
    trusted: bool = False,
) -> MlirModel:
    """Reads a function in StableHLO, in torch-mlir's torch dialect, or in linalg on tensors.

    `source` is the text, the path of a `.mlir` file, or a module of any MLIR bindings (`str(module)` is read).
    `weights` are values of arguments by name, a dict of arrays or the path of a safetensors file: these arguments
    become constants of the program, and are quantised by `qcompile` like all constants of the text.  An argument has
    the name of its attribute `qc.name` or of its location (`loc("up.weight")`), else `arg0`, `arg1`, ….
    `entry` is the function to compile; by default the only public one, or @main.

    A text is parsed in a process of its own first (0.5 s), since MLIR's parsers crash on some damaged texts.
    `trusted=True` parses it in this process alone, as a module of bindings always is, which MLIR printed here.

    StableHLO needs the extra qcompiler[jax], torch and linalg need qcompiler[mlir]; MissingDependencyError has the
    command.  ExportError for a text that is refused, WeightsError for weights that do not fit its arguments.
    """
    text, file = _source(source)
    read = read_text(text, file)
    bindings.load(read, file)
    if not trusted and isinstance(source, str | bytes | os.PathLike):
        read = isolated.printed(read, file)
    module = bindings.parse(read, file)
    functions = _functions(module, file)
    function = _entry(functions, entry, file)
    _refuse_recursion(functions, file)
    arguments = _arguments(function, functions, file)
    given = _weights(weights)
    _check(arguments, given, file)
    return MlirModel(file, read.dialect, read, module, function, functions, arguments, given)


def _source(source: Any) -> tuple[str, str]:
    if isinstance(source, bytes):
        source = source.decode("utf-8", "replace")
    if isinstance(source, str) and source.strip() and not ("\n" in source or "{" in source):
        source = Path(source)
    if isinstance(source, os.PathLike):
        path = Path(source)
        if not path.is_file():
            raise ExportError(f"there is no file '{path}': name a .mlir file, or pass the text of a module")
        return path.read_text("utf-8", "replace"), path.name
    if isinstance(source, str):
        return source, "<mlir>"
    operation = getattr(source, "operation", None)
    if operation is not None and callable(getattr(operation, "get_asm", None)):
        return str(operation.get_asm(enable_debug_info=True)), "<mlir>"
    raise ExportError(
        f"from_mlir takes a text, the path of a .mlir file or a module of MLIR's bindings, and was given a "
        f"{type(source).__name__}"
    )


# --- functions -------------------------------------------------------------------------------------------------------


def _functions(module: Any, file: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for each in module.body.operations:
        op = each.operation
        if op.name in ("func.func", "ml_program.global", "util.global"):
            found[_text(op.attributes["sym_name"])] = op
            continue
        where = names.line_of(str(op.location), file)
        raise ExportError(f"{file} has a {op.name} ({where}) beside its functions, which is not read")
    return found


def _entry(functions: Mapping[str, Any], entry: str | None, file: str) -> Any:
    bodies = {name: op for name, op in functions.items() if op.name == "func.func" and len(op.regions[0].blocks)}
    if entry is not None and entry not in bodies:
        raise ArgumentError(f"entry={entry!r}: {file} has the functions {', '.join(bodies) or 'none'}")
    public = [name for name, op in bodies.items() if _text(op.attributes, "sym_visibility") != "private"]
    name = entry or ("main" if "main" in bodies else public[0] if len(public) == 1 else None)
    if name is None:
        raise ExportError(
            f"{file} has {len(public)} public functions ({', '.join(public[:10]) or 'none'}): name the one to compile, "
            "from_mlir(…, entry='main')"
        )
    function = bodies[name]
    for other in bodies.values():
        if len(other.regions[0].blocks) > 1:
            raise ExportError(
                f"the function @{_text(other.attributes['sym_name'])} of {file} has {len(other.regions[0].blocks)} "
                "blocks: branches (cf.br, cf.cond_br) have no lowering. Choose with select, or write StableHLO"
            )
    return function


def _refuse_recursion(functions: Mapping[str, Any], file: str) -> None:
    """ExportError for functions that call themselves, for calls of what is not there, and for too many calls."""
    calls: dict[str, list[str]] = {name: [] for name in functions}
    for name, function in functions.items():
        for op in bindings.walk(function):
            for key in ("callee", "decomposition"):
                callee = _text(op.attributes, key) if op.name in _CALLS else ""
                if callee and (callee not in functions or not len(functions[callee].regions[0].blocks)):
                    raise ExportError(f"@{name} of {file} calls @{callee}, whose body is not in the text")
                calls[name] += [callee] if callee else []
    total: dict[str, int] = {}
    while len(total) < len(calls):
        ready = [name for name in calls if name not in total and all(callee in total for callee in calls[name])]
        if not ready:
            left = sorted(calls.keys() - total.keys())
            raise ExportError(f"the functions {', '.join(left[:5])} of {file} call each other in a circle")
        for name in ready:
            total[name] = sum(1 + total[callee] for callee in calls[name])
            if total[name] > MAX_CALLS:
                raise ExportError(
                    f"@{name} of {file} makes {total[name]} calls, with those inside of calls, and each is read anew; "
                    f"the limit is {MAX_CALLS}"
                )


_CALLS = ("func.call", "stablehlo.composite")
MAX_CALLS = 10_000
"""Calls of a function, with those of the functions that it calls. A text of a few lines can make 2^1000."""


def _text(attributes: Any, key: str = "") -> str:
    """A string or symbol attribute without its marks; of a table of attributes, that of a key, or an empty text."""
    if key:
        if key not in attributes:
            return ""
        attributes = attributes[key]
    return str(attributes).strip('"').removeprefix("@").strip('"')


# --- arguments and weights -------------------------------------------------------------------------------------------


def _arguments(function: Any, functions: Mapping[str, Any], file: str) -> tuple[Argument, ...]:
    block = function.regions[0].blocks[0]
    attributes = function.attributes.get("arg_attrs", None)
    given = []
    for number, value in enumerate(block.arguments):
        table = attributes[number] if attributes is not None else {}
        named = next((_text(table, key) for key in names.ATTRIBUTES if key in table), "")
        given.append(
            names.clean(named) or names.of_location(_location(value)) or _inner_name(function, functions, value)
        )
    found = []
    for name, value in zip(names.distinct(given), block.arguments, strict=True):
        shape, element = parse_type(str(value.type), f"the argument '{name}' of {file}")
        found.append(Argument(name, shape, element))
    for number, type_ in enumerate(_results(function)):
        parse_type(type_, f"result {number} of {file}")
    return tuple(found)


def _inner_name(function: Any, functions: Mapping[str, Any], value: Any) -> str:
    """The name in the function that is called with the argument: JAX wraps functions with symbolic sizes so."""
    for each in function.regions[0].blocks[0].operations:
        op = each.operation
        if op.name != "func.call":
            continue
        for position, operand in enumerate(op.operands):
            if operand == value:
                inner = functions[_text(op.attributes, "callee")].regions[0].blocks
                return names.of_location(_location(inner[0].arguments[position])) if len(inner) else ""
    return ""


def _location(value: Any) -> str:
    return str(getattr(value, "location", ""))


def _results(function: Any) -> list[str]:
    terminator = list(function.regions[0].blocks[0].operations)[-1].operation
    return [str(value.type) for value in terminator.operands]


def _weights(weights: Any) -> dict[str, Array]:
    if weights is None:
        return {}
    if isinstance(weights, Mapping):
        return {str(name): _array(str(name), value) for name, value in weights.items()}
    if isinstance(weights, str | os.PathLike):
        path = Path(weights)
        if not path.is_file():
            raise WeightsError(f"there is no file '{path}': weights is a safetensors file, or a dict of arrays by name")
        try:
            with safetensors.safe_open(path, "numpy") as file:
                return {name: np.asarray(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118
        except (safetensors.SafetensorError, TypeError, ValueError) as error:
            raise WeightsError(f"'{path}' is no safetensors file of plain arrays: {error}") from error
    raise ArgumentError(f"weights={type(weights).__name__}: give a dict of arrays by name, or a safetensors file")


def _array(name: str, value: Any) -> Array:
    """Arrays of NumPy and JAX, and tensors of torch."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        if str(value.dtype) == "torch.bfloat16":
            return np.asarray(value.contiguous().view(_torch_int16(value)).numpy().view(NUMPY["bf16"]))
        return np.asarray(value.numpy())
    array = np.asarray(value)
    if array.dtype == object:
        raise WeightsError(f"the weight '{name}' is a {type(value).__name__}, and no array")
    return array


def _torch_int16(value: Any) -> Any:
    import torch

    del value
    return torch.int16


def _check(arguments: tuple[Argument, ...], weights: Mapping[str, Array], file: str) -> None:
    known = {argument.name: argument for argument in arguments}
    extra = [name for name in weights if name not in known]
    if extra:
        raise WeightsError(
            f"{file} has no argument {_few(extra)}; its arguments are {_few(list(known)) or 'none'}. Weights are named "
            'by loc("…") or the attribute qc.name of an argument'
        )
    for name, array in weights.items():
        argument = known[name]
        kind = NUMPY[argument.element]
        fits = len(argument.shape) == array.ndim and all(
            size in (None, have) for size, have in zip(argument.shape, array.shape, strict=True)
        )
        if not fits:
            raise WeightsError(
                f"the weight '{name}' has the shape {'x'.join(map(str, array.shape)) or 'of a number'}, and the text "
                f"says {_shape(argument)}"
            )
        if array.dtype != kind:
            raise WeightsError(
                f"the weight '{name}' is {array.dtype}, and the text says {argument.element}: convert it, "
                f"array.astype({kind.name!r})"
            )


def _few(found: list[str]) -> str:
    return ", ".join(f"'{name}'" for name in found[:10]) + (f" … ({len(found)} in all)" if len(found) > 10 else "")


def _shape(argument: Argument) -> str:
    return "x".join([*("?" if size is None else str(size) for size in argument.shape), argument.element])
