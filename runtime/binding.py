"""From the shapes of a call's arguments to an entry point and the values of its symbols."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

from qcompiler.errors import ArgumentShapeError, DimError, PlanError
from qcompiler.plan.dims import Dim, dim
from qcompiler.plan.equations import SizeEquation, plan_equations
from qcompiler.plan.kernel import ITEMSIZE
from qcompiler.plan.plan import EntryPoint, Plan, TensorSig
from qcompiler.units import counted

Shape = tuple[int, ...]

FIXED = ", the size that it was compiled for (dynamic_shapes= makes it a range)"


@dataclass(frozen=True)
class Binding:
    """One entry point at one size. `array` holds the symbols in the entry's order, for C; `address` is its address."""

    entry: int
    symbols: dict[str, int]
    array: ctypes.Array[ctypes.c_int64]
    address: int
    outputs: tuple[Shape, ...]
    input_nbytes: tuple[int, ...]
    output_nbytes: tuple[int, ...]


class EntryBinder:
    """Binds one entry point. PlanError if its inputs' shapes do not determine its symbols."""

    def __init__(self, index: int, entry: EntryPoint) -> None:
        self.index = index
        self.entry = entry
        self.ranges = {symbol.name: (symbol.min, symbol.max) for symbol in entry.symbols}
        self.order = tuple(symbol.name for symbol in entry.symbols)
        self.equations = self._plan_equations()
        self.outputs = [[dim(extent) for extent in sig.shape] for sig in entry.outputs]

    def _plan_equations(self) -> list[SizeEquation]:
        planned, known = plan_equations([sig.shape for sig in self.entry.inputs])
        used = {name for sig in self.entry.inputs for extent in sig.shape for name in dim(extent).symbols()}
        if missing := (set(self.order) | used) - known:
            raise PlanError(
                f"entry point '{self.entry.name}': the shapes of its inputs do not determine "
                f"{', '.join(sorted(missing))}"
            )
        return planned

    def bind(self, shapes: Sequence[Shape]) -> Binding:
        """ArgumentShapeError names the argument that does not fit."""
        for sig, shape in zip(self.entry.inputs, shapes, strict=True):
            if len(shape) != len(sig.shape):
                raise self._error(sig, shape, f"{counted(len(shape), 'dimension')} instead of {len(sig.shape)}")
        symbols: dict[str, int] = {}
        for equation in self.equations:
            sig, shape = self.entry.inputs[equation.argument], shapes[equation.argument]
            extent = shape[equation.axis]
            if equation.solves is not None:
                self._solve(equation, extent, symbols, sig, shape)
            expected = equation.expr.evaluate(symbols)
            if expected != extent:
                why = f" (= {equation.expr})" if not equation.expr.is_static else FIXED
                raise self._error(sig, shape, f"dimension {equation.axis} is {extent} instead of {expected}{why}")
        outputs = tuple(tuple(extent.evaluate(symbols) for extent in shape) for shape in self.outputs)
        values = (ctypes.c_int64 * max(len(self.order), 1))(*(symbols[name] for name in self.order))
        return Binding(
            self.index, symbols, values, ctypes.addressof(values), outputs,
            _nbytes(self.entry.inputs, shapes), _nbytes(self.entry.outputs, outputs),
        )  # fmt: skip

    def _solve(
        self, equation: SizeEquation, extent: int, symbols: dict[str, int], sig: TensorSig, shape: Shape
    ) -> None:
        assert equation.solves is not None
        name = equation.solves.name
        low, high = self.ranges[name]
        value = equation.solves.solve(extent, symbols)
        if value is None:
            why = f"which is not {equation.expr} for any whole number {name}"
            raise self._error(sig, shape, f"dimension {equation.axis} is {extent}, {why}")
        if not low <= value <= high:
            raise self._error(
                sig,
                shape,
                f"dimension {equation.axis} ({equation.expr}) is {extent}, and {name} must lie in {low}…{high}, the "
                "range that it was compiled for (dynamic_shapes=)",
            )
        symbols[name] = value

    def _error(self, sig: TensorSig, shape: Shape, why: str) -> ArgumentShapeError:
        return ArgumentShapeError(
            f"argument '{sig.name}' has shape {tuple(shape)}, expected {self.describe(sig)}: {why}"
        )

    def describe(self, sig: TensorSig) -> str:
        """`(b, s) with b in 1…8, s in 1…512`."""
        names = sorted({name for extent in sig.shape for name in dim(extent).symbols()})
        shape = f"({', '.join(map(str, sig.shape))}{',' if len(sig.shape) == 1 else ''})"
        ranges = ", ".join(
            f"{name} in {self.ranges[name][0]}…{self.ranges[name][1]}" for name in names if name in self.ranges
        )
        return f"{shape} with {ranges}" if ranges else shape


class Binder:
    """Chooses the first of a plan's entry points, in the plan's order, that fits the shapes."""

    def __init__(self, plan: Plan) -> None:
        if not plan.entries:
            raise PlanError("the plan has no entry point")
        try:
            self.entries = [EntryBinder(index, entry) for index, entry in enumerate(plan.entries)]
        except DimError as error:
            raise PlanError(f"an entry point's shape is malformed: {error}") from error
        first = plan.entries[0]
        for entry in plan.entries[1:]:
            if _interface(entry) != _interface(first):
                raise PlanError(
                    f"entry points '{first.name}' and '{entry.name}' take other arguments or give other results"
                )
        self.names = tuple(sig.name for sig in first.inputs)
        self.dtypes = tuple(sig.dtype for sig in first.inputs)
        self.output_dtypes = tuple(sig.dtype for sig in first.outputs)
        self.output_names = tuple(sig.name for sig in first.outputs)

    def bind(self, shapes: Sequence[Shape]) -> Binding:
        errors: list[tuple[str, ArgumentShapeError]] = []
        for entry in self.entries:
            try:
                return entry.bind(shapes)
            except ArgumentShapeError as error:
                errors.append((entry.entry.name, error))
        if len(errors) == 1:
            raise errors[0][1]
        lines = "\n".join(f"  {name}: {error}" for name, error in errors)
        raise ArgumentShapeError(f"no entry point takes these shapes:\n{lines}")


def _interface(entry: EntryPoint) -> tuple[tuple[tuple[str, str], ...], ...]:
    """The interface that all entry points of a program share."""
    return tuple(tuple((sig.name, sig.dtype) for sig in sigs) for sigs in (entry.inputs, entry.outputs))


def _nbytes(sigs: Sequence[TensorSig], shapes: Sequence[Shape]) -> tuple[int, ...]:
    return tuple(element_count(shape, {}) * ITEMSIZE[sig.dtype] for sig, shape in zip(sigs, shapes, strict=True))


def element_count(shape: Sequence[Dim], symbols: dict[str, int]) -> int:
    count = 1
    for extent in shape:
        count *= extent if isinstance(extent, int) else dim(extent).evaluate(symbols)
    return count
