"""Numbered kernels: specs with all names replaced, for plans that may come from a file.

No string of a file becomes an identifier. `numbered(spec, 3)` is the spec with these names:

    its name        3, so that its function is `qk_3`
    its symbols     d0, d1, … in alphabetical order (size expressions change only by these names)
    its operands    the names of their roles in the kernel's contract (x, w, out); in0, in1, out0 of loops
    its values      v0, v1, … in a body and in an epilogue

The name that the file uses follows `serves`, which only appears in comments, through `text.comment`.
"""

from __future__ import annotations

import functools
import typing
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from qcompiler.errors import PlanError
from qcompiler.plan.contracts import contract_of
from qcompiler.plan.dims import Dim, Expr, dim
from qcompiler.plan.kernel import KernelSpec, Operand, ScalarProgram, Strict
from qcompiler.plan.kinds.loop import LoopKernel
from qcompiler.plan.kinds.parts import PartsKernel


def numbered(spec: KernelSpec, number: int) -> KernelSpec:
    """The spec without strings of its own; see the module. PlanError for operands that fit no contract."""
    symbols = {name: f"d{i:0{len(str(len(spec.symbols)))}}" for i, name in enumerate(sorted(spec.symbols))}
    names = _operand_names(spec)
    operands = tuple(
        msgspec.structs.replace(
            operand, name=name, shape=_sizes(operand.shape, symbols), strides=_sizes(operand.strides, symbols)
        )
        for operand, name in zip(spec.operands, names, strict=True)
    )
    return msgspec.structs.replace(
        spec,
        name=str(number),
        symbols=tuple(symbols[name] for name in spec.symbols),
        operands=operands,
        body=_renamed(spec.body, symbols),
        serves=f"{spec.serves} ({spec.name})" if spec.serves else spec.name,
    )


def numbered_all(specs: Iterable[KernelSpec]) -> tuple[KernelSpec, ...]:
    """Each spec, numbered by its position."""
    return tuple(numbered(spec, number) for number, spec in enumerate(specs))


def _operand_names(spec: KernelSpec) -> list[str]:
    if isinstance(spec.body, LoopKernel):
        inputs = len(spec.operands) - len(spec.body.body.yields)
        return [f"in{i}" if i < inputs else f"out{i - inputs}" for i in range(len(spec.operands))]
    if isinstance(spec.body, PartsKernel):
        return [f"{'in' if operand.access == 'r' else 'out'}{i}" for i, operand in enumerate(spec.operands)]
    roles = contract_of(spec).roles
    if len(roles) != len(spec.operands):
        raise PlanError(f"kernel '{spec.name}' has {len(spec.operands)} operands, not {len(roles)}")
    return [role.name for role in roles]


def _sizes(sizes: tuple[Dim, ...], symbols: Mapping[str, str]) -> tuple[Dim, ...]:
    return tuple(_size(size, symbols) for size in sizes)


def _size(size: Dim, symbols: Mapping[str, str]) -> Dim:
    if isinstance(size, int):
        return size
    expr = dim(size)
    return expr.substitute({name: Expr.symbol(symbols[name]) for name in expr.symbols()}).to_dim()


@functools.cache
def size_fields(record: type[Strict]) -> frozenset[str]:
    """The fields of a record that hold sizes. Text in other fields is a word of a closed list, or a number."""
    return frozenset(name for name, hint in typing.get_type_hints(record).items() if _holds_a_size(hint))


def _holds_a_size(hint: object) -> bool:
    """Whether a type mentions `Dim`, which is `int | str`."""
    arguments = typing.get_args(hint)
    return {int, str} <= set(arguments) or any(_holds_a_size(each) for each in arguments)


def _renamed(value: Any, symbols: Mapping[str, str], *, size: bool = False) -> Any:
    """A body with its sizes and values renamed; `size` says that text in this place is a size."""
    if isinstance(value, ScalarProgram):
        return _program(value)
    if isinstance(value, Strict) and not isinstance(value, Operand):
        sizes = size_fields(type(value))
        changes = {
            name: _renamed(getattr(value, name), symbols, size=name in sizes) for name in value.__struct_fields__
        }
        return msgspec.structs.replace(value, **changes)
    if isinstance(value, tuple):
        return tuple(_renamed(each, symbols, size=size) for each in value)
    return _size(value, symbols) if size and isinstance(value, str) else value


def _program(program: ScalarProgram) -> ScalarProgram:
    values = [name for name, _ in program.inputs] + [op.result for op in program.ops]
    names = {name: f"v{i}" for i, name in enumerate(values)}
    return ScalarProgram(
        inputs=tuple((names[name], dtype) for name, dtype in program.inputs),
        ops=tuple(
            msgspec.structs.replace(op, result=names[op.result], args=tuple(names[arg] for arg in op.args))
            for op in program.ops
        ),
        yields=tuple(names[name] for name in program.yields),
    )
