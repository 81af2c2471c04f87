"""Results of a module on given inputs, at the tensor level or at the schedule level."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from xdsl.dialects.builtin import ModuleOp, TensorType, f64

from qcompiler.errors import InterpreterError, QCompilerError
from qcompiler.ir import qc, rt
from qcompiler.ir.context import QCContext
from qcompiler.ir.interpreter import Interpreter, bind_symbols
from qcompiler.ir.interpreter_scalar import BitsError, unrounded
from qcompiler.ir.module import entry_funcs
from qcompiler.ir.rt_interpreter import RtInterpreter
from qcompiler.ir.types import shape_of, tensor_dtype
from qcompiler.passes.pack_weights import unpack
from qcompiler.plan.weights import NUMPY_DTYPES

Array = npt.NDArray[Any]


def answers(
    module: ModuleOp, ctx: QCContext, inputs: Sequence[Array], states: Mapping[str, Array]
) -> dict[str, list[Array]]:
    """The results of every entry point that takes inputs of these shapes, and the states it leaves, by entry name.

    States that are not given start as zeros. QCompilerError if no entry point takes the inputs.
    """
    if is_scheduled(module):
        return _scheduled_answers(module, ctx, inputs, states)
    interpreter = Interpreter(module, ctx.weights, unpack=unpack)
    found: dict[str, list[Array]] = {}
    refusals: list[str] = []
    for function in entry_funcs(module):
        name = function.sym_name.data
        try:
            bind_symbols(function, inputs)
        except InterpreterError as refusal:
            refusals.append(f"@{name}: {refusal}")
            continue
        held = {key: np.array(value) for key, value in {**initial_states(module), **states}.items()}
        results = interpreter.run(inputs, entry=name, states=held)
        found[name] = [*results, *(held[key] for key in sorted(held))]
    if not found:
        raise QCompilerError("no entry point takes the sample inputs: " + "; ".join(refusals))
    return found


def unrounded_answers(
    module: ModuleOp, ctx: QCContext, inputs: Sequence[Array], states: Mapping[str, Array]
) -> dict[str, list[Array]] | None:
    """The same with no rounding to 16 bits: such floats are held in fp32. None for a scheduled module, and if the
    program reads bits of theirs, or computes in fp64, which is rounded to fp32 besides."""
    if is_scheduled(module) or _computes_in_f64(module):
        return None
    given = [_widened(x) for x in inputs]
    held = {key: _widened(x) for key, x in {**initial_states(module), **states}.items()}
    with unrounded():
        try:
            return answers(module, ctx, given, held)
        except BitsError:
            return None


def _computes_in_f64(module: ModuleOp) -> bool:
    types = {value.type for op in module.walk() for value in op.results}
    return any((t.element_type if isinstance(t, TensorType) else t) == f64 for t in types)


def _widened(x: Array) -> Array:
    return x.astype(np.float32) if x.dtype in (NUMPY_DTYPES["bf16"], NUMPY_DTYPES["f16"]) else x


def initial_states(module: ModuleOp) -> dict[str, Array]:
    """Zeros for every declared state (states have static shapes)."""
    found: dict[str, Array] = {}
    for op in module.walk():
        if isinstance(op, qc.StateOp):
            shape = [int(size) for size in shape_of(op.result.type)]
            found[op.key] = np.zeros(shape, NUMPY_DTYPES[tensor_dtype(op.result.type)])
    return found


def is_scheduled(module: ModuleOp) -> bool:
    """Whether the module has been lowered to the `rt` dialect."""
    return any(isinstance(op, rt.NamedOp) for op in module.body.block.ops)


def _scheduled_answers(
    module: ModuleOp, ctx: QCContext, inputs: Sequence[Array], states: Mapping[str, Array]
) -> dict[str, list[Array]]:
    """The same at the schedule level: every entry that takes inputs of these shapes, on poisoned arenas."""
    interpreter = RtInterpreter(module, ctx.weights, unpack=unpack)
    found: dict[str, list[Array]] = {}
    refusals: list[str] = []
    for op in module.body.block.ops:
        if not isinstance(op, rt.EntryOp) or op.is_init:
            continue
        held = {key: np.array(value) for key, value in states.items()}
        try:
            results = interpreter.run(inputs, entry=op.sym, states=held)
        except InterpreterError as refusal:
            refusals.append(f"@{op.sym}: {refusal}")
            continue
        found[op.sym] = [*results, *(held[key] for key in sorted(held))]
    if not found:
        raise QCompilerError("no entry point takes the sample inputs: " + "; ".join(refusals))
    return found
