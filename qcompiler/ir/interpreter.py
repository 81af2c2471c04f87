"""The reference interpreter: defines the meaning of the tensor-level IR with NumPy and ml_dtypes.

    outputs = run(module, weights, [x])                        # one call, `@init` included
    interpreter = Interpreter(module, weights)                 # many calls: `@init` and decoded weights are kept
    outputs = interpreter.run([x], entry="main", states={"kv": kv})

`interpreter_qc.py`, `interpreter_linear_attention.py`, `interpreter_linalg.py`, `interpreter_scalar.py` hold one rule
per op. Every result is checked against the type that the IR states.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from xdsl.dialects import func
from xdsl.dialects.builtin import ModuleOp, TensorType
from xdsl.dialects.linalg.abstract_ops import LinalgStructuredOperation
from xdsl.ir import Operation, SSAValue

from qcompiler.errors import DimError, InterpreterError
from qcompiler.ir import (  # they register their rules
    interpreter_linalg,  # noqa: F401
    interpreter_linear_attention,  # noqa: F401
    interpreter_qc,  # noqa: F401
)
from qcompiler.ir.interpreter_base import RULES, Array, Frame, Unpack, check_result, where
from qcompiler.ir.interpreter_linalg import evaluate_structured
from qcompiler.ir.interpreter_scalar import evaluate_scalar, numpy_dtype
from qcompiler.ir.module import arg_names, find_func, functions, init_func, ranges_of, result_keys
from qcompiler.ir.types import shape_of
from qcompiler.plan.dims import dim
from qcompiler.plan.equations import solve
from qcompiler.plan.kernel import DType
from qcompiler.plan.weights import WeightStore

__all__ = ["RULES", "Interpreter", "Unpack", "bind_symbols", "evaluate_op", "run"]

Arrays = Sequence[npt.NDArray[Any]]


class Interpreter:
    """Runs the functions of a module, which must not change meanwhile. `@init` runs at the first call."""

    def __init__(self, module: ModuleOp, weights: WeightStore, *, unpack: Unpack | None = None) -> None:
        self._module = module
        self._weights = weights
        self._unpack = unpack
        self._constants: dict[str, Array] | None = None
        self._decoded: dict[tuple[int, DType], tuple[Array, Array]] = {}

    def run(
        self, inputs: Arrays, *, entry: str = "main", states: MutableMapping[str, Array] | None = None
    ) -> list[Array]:
        """The results as new arrays. `states` is read at entry and written at exit. InterpreterError if inputs do not
        fit."""
        if self._constants is None:
            self._constants = self._run_init()
        function = find_func(self._module, entry)
        if function is None:
            names = ", ".join(f"@{f.sym_name.data}" for f in functions(self._module)) or "none"
            raise InterpreterError(f"the module has no function @{entry} (functions: {names})")
        frame = Frame(
            symbols=bind_symbols(function, inputs),
            weights=self._weights,
            states=states,
            unpack=self._unpack,
            constants=self._constants,
            decoded=self._decoded,
        )
        results = _call(function, inputs, frame)
        if states is not None:
            states.update(frame.updates)
        return [np.array(result, order="C") for result in results]

    def _run_init(self) -> dict[str, Array]:
        function = init_func(self._module)
        if function is None:
            return {}
        keys = result_keys(function)
        frame = Frame(symbols={}, weights=self._weights, unpack=self._unpack, decoded=self._decoded)
        results = _call(function, [], frame)
        if len(keys) != len(results):
            raise InterpreterError(f"@init has {len(results)} results but names {len(keys)} of them in qc.results")
        return dict(zip(keys, results, strict=True))


def run(
    module: ModuleOp,
    weights: WeightStore,
    inputs: Arrays,
    entry: str = "main",
    states: MutableMapping[str, Array] | None = None,
    *,
    unpack: Unpack | None = None,
) -> list[Array]:
    """One call of one entry point, `@init` included; see `Interpreter.run`."""
    return Interpreter(module, weights, unpack=unpack).run(inputs, entry=entry, states=states)


def evaluate_op(
    op: Operation,
    operands: Arrays,
    symbols: Mapping[str, int],
    weights: WeightStore | None = None,
    *,
    unpack: Unpack | None = None,
) -> list[Array]:
    """The results of one op. Quantised operands are passed as their packed bytes (uint8, rank 1)."""
    frame = Frame(symbols=symbols, weights=weights if weights is not None else WeightStore(), unpack=unpack)
    with np.errstate(all="ignore"):
        return _evaluate(op, operands, frame)


def bind_symbols(function: func.FuncOp, inputs: Arrays) -> dict[str, int]:
    """Values of the function's symbols, from the shapes of its inputs.

    InterpreterError, naming the argument, if a shape, a dtype or a range does not fit.
    """
    arguments, names = function.body.block.args, arg_names(function)
    if len(arguments) != len(inputs):
        raise InterpreterError(f"@{function.sym_name.data} takes {len(arguments)} inputs, not {len(inputs)}")
    for argument, name, array in zip(arguments, names, inputs, strict=True):
        assert isinstance(argument.type, TensorType)
        shape, dtype = shape_of(argument.type), numpy_dtype(argument.type)
        if array.dtype != dtype or array.ndim != len(shape):
            wanted = f"{dtype} of rank {len(shape)}"
            raise InterpreterError(f"argument '{name}' is {array.dtype} of rank {array.ndim}, not {wanted}")
    try:
        symbols = solve([shape_of(argument.type) for argument in arguments], [array.shape for array in inputs], names)
    except DimError as error:
        raise InterpreterError(f"argument {error}") from None
    for argument, name, array in zip(arguments, names, inputs, strict=True):
        shape = shape_of(argument.type)
        expected = tuple(dim(entry).evaluate(symbols) for entry in shape)
        if expected != array.shape:
            raise InterpreterError(f"argument '{name}' has shape {array.shape}, not {expected} (declared {shape})")
    for symbol, (low, high) in ranges_of(function).items():
        if symbol in symbols and not low <= symbols[symbol] <= high:
            raise InterpreterError(f"dimension '{symbol}' is {symbols[symbol]}, outside of [{low}, {high}]")
    return symbols


def _call(function: func.FuncOp, inputs: Arrays, frame: Frame) -> list[Array]:
    """Runs a function's block. Each value is dropped after its last use."""
    block = function.body.block
    values: dict[SSAValue, Array] = dict(zip(block.args, inputs, strict=True))
    remaining: dict[SSAValue, int] = {}
    frame.values = values
    with np.errstate(all="ignore"):
        for op in block.ops:
            operands = [values[v] for v in op.operands]
            if isinstance(op, func.ReturnOp):
                return operands
            for value, result in zip(op.results, _evaluate(op, operands, frame), strict=True):
                values[value] = result
                remaining[value] = sum(1 for _ in value.uses)
            for value in op.operands:
                if value in remaining:
                    remaining[value] -= 1
                    if remaining[value] == 0:
                        del values[value], remaining[value]
    raise InterpreterError(f"@{function.sym_name.data} does not end in func.return")


def _evaluate(op: Operation, operands: Sequence[Array], frame: Frame) -> list[Array]:
    rule = RULES.get(type(op))
    if rule is not None:
        results = list(rule(op, operands, frame))
    elif isinstance(op, LinalgStructuredOperation):
        results = evaluate_structured(op, operands, frame)
    else:
        scalar = evaluate_scalar(op, tuple(operands))
        if scalar is None:
            raise InterpreterError(f"{where(op)} has no meaning in the interpreter")
        results = [scalar]
    for index, value in enumerate(results):
        check_result(op, index, value, frame)
    return results
