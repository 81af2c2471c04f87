"""Brings the loops of a LoopKernel to a normal form before any text is written.

Loops of extent 1 disappear. Parallel loops are sorted by the strides of the first output, largest outermost. Adjacent
loops that every operand walks as one are collapsed: ``for i < b, for j < s*384`` with strides (384*s, 1) everywhere is
one loop. Guessed values of symbolic strides only affect the order of loops, never the result.
"""

from __future__ import annotations

import keyword
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from qcompiler.kernels.text import c_dim, identifier
from qcompiler.plan.dims import Expr, dim
from qcompiler.plan.kernel import KernelSpec, Operand, ScalarProgram
from qcompiler.plan.kinds.loop import LoopKernel

_GUESS = 61  # the value of every symbol when strides are compared
_MATH_COST = 10  # element operations that a transcendental function costs
_CHEAP_MATH = frozenset({"sqrt", "absf", "absi", "ceil", "floor", "round", "roundeven", "trunc", "copysign", "fma"})
_RESERVED_TEXT = """
arg auto before begin bool call case char chunk const count ctx default delete do double else end enum
extern false first float for half height if int int64_t item items j k lane last long memcpy n namespace
new op operator private protected public register row scratch short signed sizeof static step struct
switch sym task tasks template this tile true typename union unsigned using vf vi vm void while width
"""
_RESERVED = frozenset(_RESERVED_TEXT.split())


@dataclass(frozen=True)
class Loop:
    """One loop: its C++ variable, its extent, and the step of each operand (in elements) per iteration."""

    name: str
    extent: Expr
    steps: tuple[Expr, ...]
    axis: int | None  # the axis that linalg.index reads; such loops are not collapsed

    @property
    def limit(self) -> str:
        """The C++ constant that holds the extent."""
        return f"{self.name}_end"


@dataclass(frozen=True)
class Nest:
    """A LoopKernel in normal form. `indices` holds the C++ text of each original axis, for linalg.index."""

    spec: KernelSpec
    body: LoopKernel
    parallel: tuple[Loop, ...]
    reduction: tuple[Loop, ...]
    offsets: tuple[Expr, ...]
    indices: tuple[str, ...]
    names: tuple[str, ...]
    rows: int = 0
    """The number of parallel loops that stand in front of the others; see `build_nest`."""

    @property
    def program(self) -> ScalarProgram:
        return self.body.body

    @property
    def inputs(self) -> int:
        """The number of operands that are inputs; the outputs follow them."""
        return len(self.spec.operands) - len(self.program.yields)

    @property
    def outputs(self) -> tuple[Operand, ...]:
        return self.spec.operands[self.inputs :]

    @property
    def stored(self) -> tuple[str, ...]:
        """The types in which results are stored, as `write_statements` takes them."""
        return tuple(operand.dtype for operand in self.outputs)

    @property
    def loops(self) -> tuple[Loop, ...]:
        return self.parallel + self.reduction

    def used(self, operand: int) -> bool:
        """Whether the body reads an input. Unused inputs are not loaded."""
        name = self.program.inputs[operand][0]
        return name in self.program.yields or any(name in op.args for op in self.program.ops)

    def address(self, operand: int, loops: Sequence[Loop], at: dict[str, str] | None = None) -> str:
        """The C++ pointer expression at the given loops' variables; `at` replaces the text of some variables."""
        terms = [] if self.offsets[operand] == 0 else [c_dim(self.offsets[operand])]
        for loop in loops:
            step, variable = loop.steps[operand], (at or {}).get(loop.name, loop.name)
            if step == 1:
                terms.append(variable)
            elif step != 0:
                terms.append(f"{variable} * {c_dim(step)}")
        return " + ".join([self.names[operand], *terms])

    def limits(self) -> list[str]:
        return [f"const int64_t {loop.limit} = {c_dim(loop.extent)};" for loop in self.loops]

    def cost(self) -> int:
        """Approximate element operations per iteration."""
        return len(self.spec.operands) + sum(
            _MATH_COST if op.op.startswith("math.") and op.op[5:] not in _CHEAP_MATH else 1 for op in self.program.ops
        )


def guess(value: Expr) -> int:
    """A concrete value for a symbolic size, for comparisons only."""
    return value.evaluate(dict.fromkeys(value.symbols(), _GUESS))


def build_nest(spec: KernelSpec, reserved: frozenset[str] = frozenset(), rows: Collection[int] = ()) -> Nest:
    """The normal form. No operand gets one of the `reserved` names, which a target uses for its own variables.

    Loops over the axes in `rows` stand in front of the others, and are collapsed among themselves alone.
    plan/loop_contract.py proves that the parts of the nest fit together.
    """
    body = spec.body
    assert isinstance(body, LoopKernel)
    asked = {op.axis for op in body.body.ops if op.op == "linalg.index"}
    indices = ["0"] * len(body.extents)
    groups: dict[str, list[Loop]] = {"rows": [], "parallel": [], "reduction": []}
    for axis, (extent, kind) in enumerate(zip(body.extents, body.iterators, strict=True)):
        if dim(extent) == 1:
            continue
        steps = tuple(dim(access.coefficients[axis]) for access in body.accesses)
        groups["rows" if axis in rows else kind].append(
            Loop(f"i{axis}", dim(extent), steps, axis if axis in asked else None)
        )
        indices[axis] = f"i{axis}"
    inputs = len(spec.operands) - len(body.body.yields)
    in_front, parallel = (
        _collapse(sorted(groups[name], key=lambda loop: -guess(loop.steps[inputs]))) for name in ("rows", "parallel")
    )
    reduction = sorted(groups["reduction"], key=lambda loop: -max((guess(s) for s in loop.steps[:inputs]), default=0))
    return Nest(
        spec,
        body,
        (*in_front, *parallel),
        tuple(_collapse(reduction)),
        tuple(dim(access.offset) for access in body.accesses),
        tuple(indices),
        _operand_names(spec, _RESERVED | reserved),
        len(in_front),
    )


def _collapse(loops: Sequence[Loop]) -> list[Loop]:
    done: list[Loop] = []
    for loop in loops:
        outer = done[-1] if done else None
        if (
            outer is not None
            and outer.axis is None
            and loop.axis is None
            and all(a == b * loop.extent for a, b in zip(outer.steps, loop.steps, strict=True))
        ):
            done[-1] = Loop(outer.name, outer.extent * loop.extent, loop.steps, None)
        else:
            done.append(loop)
    return done


def _operand_names(spec: KernelSpec, reserved: frozenset[str]) -> tuple[str, ...]:
    """C++ names of the operands: their own names if these are usable and distinct."""
    names: list[str] = []
    for i, operand in enumerate(spec.operands):
        name = identifier(operand.name)
        usable = name.isidentifier() and name not in reserved and not keyword.iskeyword(name) and name not in names
        prefixed = name[:1] in "acijknprt" and name[1:].replace("_", "").isdigit()  # as loop variables
        own = usable and not prefixed and not name.startswith(("t_", "n_", "v_", "qc_", "q_", "lane"))
        names.append(name if own else f"operand{i}")
    return tuple(names)
