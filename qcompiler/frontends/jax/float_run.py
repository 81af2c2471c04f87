"""`qcompile(calibrate=…)` for functions of JAX: the float graph runs over inputs, and shows what its linears read.

    before   %y = qc.linear %x, %w          %w = qc.const @layers.up.0, to be stored as q4_K
    run      for each input: x -> squares += (x * x).sum(rows)          (observers.py)
    or       all inputs together, op by op; at each linear codes = gptq(w, X^T X), and what they decode to from there on

The graph is imported once more with float weights, and the interpreter that defines the IR evaluates it.  It holds no
copy of the weights: the values of each are read from the function's arrays where an op needs them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from xdsl.dialects import func
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Operation, SSAValue

from qcompiler.calibrate.chosen_codes import NO_INPUTS, ROWS
from qcompiler.errors import (
    ArgumentDtypeError,
    ArgumentError,
    ArgumentShapeError,
    CalibrationError,
    InterpreterError,
)
from qcompiler.frontends.quantise.observers import InputStatistics
from qcompiler.ir import qc
from qcompiler.ir.interpreter import Watch, bind_symbols, run_together
from qcompiler.ir.interpreter_scalar import numpy_dtype
from qcompiler.ir.module import arg_names, find_func
from qcompiler.ir.types import shape_of
from qcompiler.plan.weights import WeightStore
from qcompiler.runtime.tree import input_flattener

Array = npt.NDArray[Any]
Values = Callable[[str], Array | None]
"""The values of a constant by its key; None for one that belongs to the graph."""


@dataclass
class Calibration:
    """The request of `calibrate=`: `inputs` are each an array, a tuple of arguments or a dict of keywords. `ran` counts
    them."""

    inputs: Iterable[Any]
    ran: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if isinstance(self.inputs, str) or not isinstance(self.inputs, Iterable):
            raise ArgumentError(f"calibrate={self.inputs!r}: give an iterable of inputs, calibrate=[(x,), …]")


@dataclass
class FloatRun:
    """The imported float graph, `module`, and the inputs that it runs over.

    `weights` holds the constants of the graph itself, `tree` describes the arguments (`plan.Signature`), and each input
    begins with `states`.
    """

    module: ModuleOp
    weights: WeightStore
    tree: dict[str, Any]
    states: Mapping[str, Array]
    calibration: Calibration
    reads: dict[str, list[qc.LinearOp]] = field(init=False)
    """By the key of a weight: the linears that multiply with it, in order."""
    held: list[list[Array]] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.reads = {}
        for op in self.main.body.block.ops:
            if isinstance(op, qc.LinearOp) and isinstance(op.w.owner, qc.ConstOp):
                self.reads.setdefault(op.w.owner.key, []).append(op)

    @property
    def main(self) -> func.FuncOp:
        found = find_func(self.module, "main")
        assert found is not None
        return found

    def leaves(self) -> Iterable[list[Array]]:
        """The flat arguments of each input: those that were held, or those that come."""
        if self.held is not None:
            return self.held
        return self._read()

    def hold(self) -> list[list[Array]]:
        """All inputs, which can be read again. CalibrationError for none."""
        if self.held is None:
            self.held = list(self._read())
        return self.held

    def _read(self) -> Iterable[list[Array]]:
        """Errors: subclasses of ArgumentError for an input that does not fit; CalibrationError for no inputs."""
        flatten, names = input_flattener(self.tree), arg_names(self.main)
        self.calibration.ran = 0
        for given in self.calibration.inputs:
            if isinstance(given, Mapping):
                flat = flatten((), dict(given))
            else:
                flat = flatten(tuple(given) if isinstance(given, tuple | list) else (given,), {})
            types = [argument.type for argument in self.main.body.block.args]
            arrays = [_array(x, name, numpy_dtype(t)) for x, name, t in zip(flat, names, types, strict=True)]
            try:
                bind_symbols(self.main, arrays)
            except InterpreterError as error:
                raise ArgumentShapeError(
                    f"an input for calibration does not fit: {error}; name dimensions that vary by dynamic_shapes"
                ) from None
            self.calibration.ran += 1
            yield arrays
        if not self.calibration.ran:
            raise CalibrationError(NO_INPUTS)

    def measure(self, cols: Mapping[str, int], values: Values, *, magnitudes: bool) -> dict[str, InputStatistics]:
        """Statistics of the inputs of these weights' linears, one input after the other. `cols` has K by key.

        CalibrationError for no inputs, and for values that are not finite.
        """
        found = {path: InputStatistics.of(k, magnitudes=magnitudes) for path, k in cols.items()}

        def see(path: str, x: list[Array]) -> None:
            rows = x[0].reshape(-1, x[0].shape[-1])
            for first in range(0, len(rows), ROWS):
                part = np.ascontiguousarray(rows[first : first + ROWS], np.float32)
                found[path].add(path, part)

        for leaves in self.leaves():
            self.together([leaves], cols, values, see)
        return found

    def together(
        self,
        inputs: Sequence[Sequence[Array]],
        watched: Iterable[str],
        values: Values,
        see: Callable[[str, list[Array]], None],
    ) -> None:
        """Runs the graph over inputs, op by op. `see` gets the key of a watched weight and the inputs x (…, K) of a
        linear that reads it, before the linear asks for the weight's values."""
        shown: dict[Operation, SSAValue] = {op: op.x for path in watched for op in self.reads.get(path, ())}
        keys: dict[Operation, str] = {op: path for path, ops in self.reads.items() for op in ops}

        def constant(op: qc.ConstOp) -> Array | None:
            found = values(op.key)
            if found is None:
                return None
            shape = tuple(int(size) for size in shape_of(op.result.type))
            return found.astype(numpy_dtype(op.result.type), copy=False).reshape(shape)

        watch = Watch(constant, shown, lambda op, x: see(keys[op], x))
        try:
            run_together(self.module, self.weights, inputs, watch, self.states)
        except (InterpreterError, IndexError, ValueError) as error:
            raise CalibrationError(f"an input for calibration fails: {error}") from error


def _array(value: Any, name: str, wanted: np.dtype[Any]) -> Array:
    """An argument as an array of the graph's type. ArgumentDtypeError for another type."""
    found = np.asarray(value)
    if isinstance(value, bool | int | float) and np.can_cast(found.dtype, wanted, "same_kind"):
        found = found.astype(wanted)
    if found.dtype != wanted:
        raise ArgumentDtypeError(
            f"an input for calibration has {found.dtype} for '{name}', the function takes {wanted}; convert it first"
        )
    return found


__all__ = ["Calibration", "FloatRun"]
