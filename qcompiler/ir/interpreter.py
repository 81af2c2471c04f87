"""The reference interpreter: defines the meaning of the tensor-level IR with NumPy and ml_dtypes.

    outputs = run(module, weights, [x])                        # one call, `@init` included
    interpreter = Interpreter(module, weights)                 # many calls: `@init` and decoded weights are kept
    outputs = interpreter.run([x], entry="main", states={"kv": kv})
    run_together(module, weights, [[x], [y]], Watch(…))         # op by op over several inputs, for calibration

`interpreter_qc.py`, `interpreter_attention.py`, `interpreter_linear_attention.py`, `interpreter_linalg.py` and
`interpreter_scalar.py` hold one rule per op. Every result is checked against the type that the IR states.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from xdsl.dialects import func
from xdsl.dialects.builtin import ModuleOp, TensorType
from xdsl.dialects.linalg.abstract_ops import LinalgStructuredOperation
from xdsl.ir import Operation, SSAValue

from qcompiler.errors import DimError, InterpreterError
from qcompiler.ir import (  # they register their rules
    interpreter_attention,  # noqa: F401
    interpreter_linalg,  # noqa: F401
    interpreter_linear_attention,  # noqa: F401
    interpreter_qc,  # noqa: F401
    qc,
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

__all__ = ["RULES", "Interpreter", "Unpack", "Watch", "bind_symbols", "evaluate_op", "run", "run_together"]

Arrays = Sequence[npt.NDArray[Any]]


@dataclass(frozen=True)
class Watch:
    """What a run over several inputs is told and shows (`run_together`).

    `constant` gives the values of a constant (None: those of the weight store). It is asked at each use, so that the
    values may change between two of them. `shown` gives an op's value that `see` gets, of each input, before the op
    runs and before its constants are asked for.
    """

    constant: Callable[[qc.ConstOp], Array | None]
    shown: Mapping[Operation, SSAValue]
    see: Callable[[Operation, list[Array]], None]


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


def run_together(
    module: ModuleOp,
    weights: WeightStore,
    inputs: Sequence[Arrays],
    watch: Watch,
    states: Mapping[str, Array] | None = None,
) -> None:
    """Runs `@main`, of a module without `@init`, over all inputs in step: each op over all of them before the next op.

    Each input begins with `states`. Values live until their last use, once for each input. Results are dropped.
    InterpreterError if an input does not fit.
    """
    function = find_func(module, "main")
    assert function is not None and init_func(module) is None
    frames = [Frame(bind_symbols(function, given), weights, dict(states or {})) for given in inputs]
    _in_step(function, inputs, frames, watch)


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


def _call(function: func.FuncOp, inputs: Arrays, frame: Frame, watch: Watch | None = None) -> list[Array]:
    """Runs a function's block. Each value is dropped after its last use."""
    return _in_step(function, [inputs], [frame], watch)[0]


def _in_step(
    function: func.FuncOp, inputs: Sequence[Arrays], frames: Sequence[Frame], watch: Watch | None = None
) -> list[list[Array]]:
    """Runs a function's block for several inputs, one op after the other, each over all inputs."""
    block = function.body.block
    calls: list[dict[SSAValue, Array]] = [dict(zip(block.args, given, strict=True)) for given in inputs]
    remaining: dict[SSAValue, int] = {}
    later: dict[SSAValue, Operation] = {}
    for frame, values in zip(frames, calls, strict=True):
        frame.values = values
    with np.errstate(all="ignore"):
        for op in block.ops:
            if watch is not None and _is_read_later(op):
                later[op.results[0]] = op
                continue
            if watch is not None and op in watch.shown:
                watch.see(op, [values[watch.shown[op]] for values in calls])
            constants = {v: _watched(later[v], [], watch, frames[0])[0] for v in op.operands if v in later and watch}
            given = [[constants[v] if v in constants else values[v] for v in op.operands] for values in calls]
            if isinstance(op, func.ReturnOp):
                return given
            for values, operands, frame in zip(calls, given, frames, strict=True):
                found = _evaluate(op, operands, frame) if watch is None else _watched(op, operands, watch, frame)
                values.update(zip(op.results, found, strict=True))
            remaining.update((value, value.uses.get_length()) for value in op.results)
            for value in op.operands:
                if value in remaining:
                    remaining[value] -= 1
                    if remaining[value] == 0:
                        del remaining[value]
                        for values in calls:
                            del values[value]
    raise InterpreterError(f"@{function.sym_name.data} does not end in func.return")


def _is_read_later(op: Operation) -> bool:
    """Whether a constant's values may be asked for at each use: no body of a loop reads it as a whole tensor."""
    return isinstance(op, qc.ConstOp) and all(use.operation.parent is op.parent for use in op.result.uses)


def _watched(op: Operation, operands: Sequence[Array], watch: Watch, frame: Frame) -> list[Array]:
    given = watch.constant(op) if isinstance(op, qc.ConstOp) else None
    if given is None:
        return _evaluate(op, operands, frame)
    check_result(op, 0, given, frame)
    return [given]


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
