"""A quantised program in upstream MLIR dialects only: what `Program.to_mlir("linalg")` returns.

    func.func @main(%x: tensor<?x64xf32>, %w_codes: tensor<2048xi8>, %w_scales: tensor<64xf16>) -> tensor<?x64xf32> {
      %0 = linalg.generic …      // decodes the bytes of a weight
      %1 = linalg.generic …      // multiplies

Dialects are builtin, func, linalg, tensor, arith and math, and scf where a recurrent layer loops over time. Any MLIR
reads the text without unregistered dialects: sizes are `?`, and names of this compiler stand in comments.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from xdsl.builder import Builder
from xdsl.dialects import arith, func
from xdsl.dialects.builtin import (
    DenseIntOrFPElementsAttr,
    DenseResourceAttr,
    IntegerType,
    ModuleOp,
    NoneAttr,
    Signedness,
    TensorType,
)
from xdsl.ir import Attribute, Block, SSAValue
from xdsl.rewriter import InsertPoint, Rewriter

from qcompiler.errors import ArgumentError, WeightsError
from qcompiler.ir.context import QCContext
from qcompiler.ir.linalg_lowering import CONSTANTS, STATES, UPDATES
from qcompiler.ir.mlir_oracle import constant_array, keys_of
from qcompiler.ir.module import arg_names, main_func, ranges_of, update_function_type
from qcompiler.ir.text import parse_module, print_for_mlir
from qcompiler.passes.loops.substitute import substitute_symbols
from qcompiler.passes.lower_qc_to_linalg import LowerQcToLinalgPass
from qcompiler.passes.specialize import Bucket, checked_buckets, default_buckets
from qcompiler.plan.dims import Range
from qcompiler.plan.weights import NO_VALUES, WeightStore
from qcompiler.runtime.files import replacing

Array = npt.NDArray[Any]
Weights = Literal["resources", "arguments"]

STAGE = "raise-idioms"
"""The stage whose IR is lowered: `qc` and linalg on tensors, one function, weights in their canonical bytes. What later
stages do (entry points by size, fusion, layouts) another compiler decides for itself."""


@dataclass(frozen=True)
class UpstreamModule:
    """The text, and what its function @main takes and gives.

    `inputs` are the names of the model's tensors. `states` are the initial values of what the model keeps between
    calls: arguments behind the inputs, by name. `weights` are the arguments behind those, empty if the text holds the
    weights as resources. @main returns `outputs` results of the model, then the states in `updates`.
    """

    code: str
    """The text without the section at its end that holds resources."""
    resources: Mapping[str, Array]
    """Contents of the resources that the code names."""
    inputs: tuple[str, ...]
    outputs: int
    states: Mapping[str, Array] = field(default_factory=dict)
    updates: tuple[str, ...] = ()
    weights: Mapping[str, Array] = field(default_factory=dict)

    @functools.cached_property
    def text(self) -> str:
        """The whole text. `save` writes a large one without holding it in memory."""
        return "".join(self._pieces())

    def __str__(self) -> str:
        return self.text

    def _pieces(self) -> Iterator[str]:
        yield self.code
        yield from _blobs(self.resources)

    def arguments(self, *inputs: Array, states: Mapping[str, Array] | None = None) -> list[Array]:
        """All arguments of @main for these inputs. ArgumentError if their number is wrong."""
        if len(inputs) != len(self.inputs):
            raise ArgumentError(f"@main takes {len(self.inputs)} inputs ({', '.join(self.inputs)}), not {len(inputs)}")
        known = {**self.states, **(states or {})}
        if len(known) > len(self.states):
            strange = sorted(set(known) - set(self.states))
            raise ArgumentError(
                f"@main reads no state '{strange[0]}'; its states are: {', '.join(self.states) or 'none'}"
            )
        return [*inputs, *known.values(), *self.weights.values()]

    def save(self, path: str | Path) -> None:
        """Writes the text, resources piece by piece."""
        with replacing(path) as file:
            file.writelines(piece.encode() for piece in self._pieces())


def upstream(
    text: str,
    weights: WeightStore,
    states: Mapping[str, Array],
    where: Weights,
    *,
    entry: str | None = None,
    buckets: Sequence[Bucket] | None = None,
    devices: int = 1,
) -> UpstreamModule:
    """The module of the stage `STAGE`, lowered, for all sizes or those of one entry point.

    `buckets` are the entry points that the caller of `qcompile` chose, and `devices` counts those of the program.
    QCompilerError names an op or a format that cannot be lowered, ArgumentError an unknown entry point.
    """
    if not weights.valued:
        raise WeightsError(NO_VALUES)
    module = parse_module(text, name=STAGE)
    ranges = _narrowed(main_func(module), entry, buckets)
    LowerQcToLinalgPass().apply(QCContext.default(), module)
    function = main_func(module)
    keys, read, updates = (keys_of(function, name) for name in (CONSTANTS, STATES, UPDATES))
    names = list(arg_names(function))[: len(function.body.block.args) - len(read) - len(keys)]
    outputs = len(function.function_type.outputs) - len(updates)
    arrays = {key: _signless(constant_array(key, weights)) for key in keys}
    notes = [f"Size {symbol}: from {low} to {high}." for symbol, (low, high) in ranges.items()]
    if entry is not None:
        notes.insert(0, f"Sizes are those of the entry point {entry}.")
    if devices > 1:
        notes.append(f"The program runs on {devices} devices; which part runs on which is not said here.")
    _plain(module)
    resources = _as_resources(function, arrays) if where == "resources" else {}
    _named(function, [*names, *read, *([] if where == "resources" else keys)])
    module.verify()
    return UpstreamModule(
        code=_head(names, read, keys if where == "arguments" else [], outputs, updates, notes) + print_for_mlir(module),
        resources=resources,
        inputs=tuple(names),
        outputs=outputs,
        states={key: np.asarray(states[key]) for key in read},
        updates=tuple(updates),
        weights=arrays if where == "arguments" else {},
    )


def _narrowed(main: func.FuncOp, entry: str | None, buckets: Sequence[Bucket] | None) -> Mapping[str, Range]:
    """Gives @main the sizes of an entry point. Returns the ranges of the sizes that are left."""
    if entry is None:
        return ranges_of(main)
    named = dict(default_buckets(main) if buckets is None else checked_buckets(main, buckets))
    if entry not in named:
        raise ArgumentError(f"entry={entry!r}: the program's entry points are {', '.join(named)}")
    ranges = {**ranges_of(main), **named[entry]}
    fixed = {symbol: low for symbol, (low, high) in ranges.items() if low == high}
    substitute_symbols(main, fixed)
    return {symbol: bounds for symbol, bounds in ranges.items() if symbol not in fixed}


# --- without attributes and types of our own -------------------------------------------------------------------------


def _plain_type(type_: Attribute) -> Attribute:
    """A type without names of sizes, and with signless integers."""
    if isinstance(type_, TensorType):
        return TensorType(_plain_type(type_.element_type), type_.get_shape(), NoneAttr())
    if isinstance(type_, IntegerType) and type_.signedness.data is not Signedness.SIGNLESS:
        return IntegerType(type_.width.data)
    return type_


def _plain(module: ModuleOp) -> None:
    """Takes our attributes and names of sizes out of a module."""
    for op in module.walk():
        for name in [name for name in op.attributes if name.startswith("qc.")]:
            del op.attributes[name]
        values: list[SSAValue] = list(op.results)
        for region in op.regions:
            values += [argument for block in region.blocks for argument in block.args]
        for value in values:
            plain = _plain_type(value.type)
            if plain != value.type:
                Rewriter.replace_value_with_new_type(value, plain)
        if isinstance(op, func.FuncOp):
            op.arg_attrs = None
            op.res_attrs = None
    for op in module.body.block.ops:
        if isinstance(op, func.FuncOp):
            update_function_type(op)


def _signless(array: Array) -> Array:
    return array.view(np.int8) if array.dtype == np.uint8 else array


def _identifier(name: str) -> str:
    """The name with letters, digits and underscores only."""
    made = re.sub(r"[^A-Za-z0-9_]+", "_", name).strip("_")
    return made if made and not made[0].isdigit() else f"v_{made}"


def _named(function: func.FuncOp, names: Sequence[str]) -> None:
    """Gives the arguments readable names."""
    for argument, name in zip(function.body.block.args, names, strict=True):
        argument.name_hint = _identifier(name)


def _head(
    inputs: Sequence[str],
    states: Sequence[str],
    weights: Sequence[str],
    outputs: int,
    updates: Sequence[str],
    notes: Sequence[str],
) -> str:
    """Comments that say what @main takes and gives. Names may come from a file: only printable ones are written."""
    kinds = [*[("input", n) for n in inputs], *[("state", n) for n in states], *[("weight", n) for n in weights]]
    lines = ["A quantised program by qcompiler, in upstream MLIR dialects. Arguments of @main:"]
    lines += [f"  {number}: {kind} {name}" for number, (kind, name) in enumerate(kinds)]
    lines.append(f"@main returns {outputs} results of the model" + (", then the new values of:" if updates else "."))
    lines += [*(f"  state {name}" for name in updates), *notes]
    return "".join(f"// {line if line.isprintable() else ascii(line)}\n" for line in lines)


# --- weights in the text ---------------------------------------------------------------------------------------------


def _as_resources(function: func.FuncOp, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Makes constants of the last arguments. Returns the contents of the resources that they name."""
    block: Block = function.body.block
    first = block.first_op
    assert first is not None
    builder, found = Builder(InsertPoint.before(first)), dict[str, Array]()
    for argument, (key, array) in zip(block.args[len(block.args) - len(arrays) :], arrays.items(), strict=True):
        type_ = argument.type
        assert isinstance(type_, TensorType)
        # Resources have no form for bits, nor for nothing; upstream MLIR never ends when it folds one of a scalar.
        if array.dtype == np.bool_ or array.size == 0 or array.ndim == 0:
            value: Any = DenseIntOrFPElementsAttr.from_list(type_, array.reshape(-1).tolist())
        else:
            handle = _unique(_identifier(key), found)
            found[handle] = array
            value = DenseResourceAttr.from_params(handle, type_)
        argument.replace_all_uses_with(builder.insert(arith.ConstantOp(value, type_)).result)
    for argument in list(block.args[len(block.args) - len(arrays) :]):
        block.erase_arg(argument)
    update_function_type(function)
    return found


def _unique(name: str, taken: Mapping[str, object]) -> str:
    number, found = 1, name
    while found in taken:
        number += 1
        found = f"{name}_{number}"
    return found


_PIECE = 1 << 20
"""Bytes of a resource that are turned into text at once."""


def _blobs(resources: Mapping[str, Array]) -> Iterator[str]:
    """The section of a text that holds resources: hexadecimal, behind the alignment as a 32-bit number."""
    if not resources:
        return
    yield "\n{-#\n  dialect_resources: {\n    builtin: {\n"
    for number, (name, array) in enumerate(resources.items()):
        alignment = max(array.dtype.itemsize, 4).to_bytes(4, "little").hex()
        yield (",\n" if number else "") + f'      {name}: "0x{alignment}'
        held = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        for begin in range(0, held.size, _PIECE):
            yield held[begin : begin + _PIECE].tobytes().hex()
        yield '"'
    yield "\n    }\n  }\n#-}\n"
