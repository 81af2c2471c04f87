"""Symbols from shapes: solved where a shape determines them, checked everywhere, and the right entry point chosen."""

from __future__ import annotations

from typing import Any

import pytest

from qcompiler.errors import ArgumentShapeError, PlanError
from qcompiler.plan.plan import EntryPoint, Plan, Symbol, TensorSig
from qcompiler.runtime.binding import Binder, EntryBinder


def entry(name: str, symbols: dict[str, tuple[int, int]], *inputs: tuple[Any, ...], output: Any = ()) -> EntryPoint:
    return EntryPoint(
        name=name,
        symbols=tuple(Symbol(name=n, min=low, max=high) for n, (low, high) in symbols.items()),
        inputs=tuple(TensorSig(name=f"x{i}", arena=f"{name}.x{i}", dtype="f32", shape=s) for i, s in enumerate(inputs)),
        outputs=(TensorSig(name="y", arena=f"{name}.y", dtype="bf16", shape=output),),
        steps=(),
    )


def plan(*entries: EntryPoint) -> Plan:
    return Plan(devices=(), streams=(), events=(), arenas=(), buffers=(), kernels=(), entries=entries)


BS = {"b": (1, 8), "s": (1, 512)}


@pytest.mark.parametrize(
    ("shapes", "given", "symbols"),
    [
        ([("b", "s")], [(3, 7)], {"b": 3, "s": 7}),
        ([("2*s", "b")], [(14, 3)], {"b": 3, "s": 7}),
        ([("s + 1", "b")], [(8, 3)], {"b": 3, "s": 7}),
        ([("3*s - 2", "b")], [(19, 3)], {"b": 3, "s": 7}),
        ([("b*s",), ("b",)], [(21,), (3,)], {"b": 3, "s": 7}),
        ([("s // 2", "s", "b")], [(3, 7, 3)], {"b": 3, "s": 7}),
        ([(4, "b"), ("s",)], [(4, 3), (7,)], {"b": 3, "s": 7}),
    ],
)
def test_symbols_are_solved(shapes: Any, given: Any, symbols: dict[str, int]) -> None:
    binding = EntryBinder(0, entry("e", BS, *shapes, output=("b", "s + 1"))).bind(given)
    assert binding.symbols == symbols
    assert list(binding.array) == [3, 7]
    assert binding.outputs == ((3, 8),)
    assert binding.output_nbytes == (48,)


@pytest.mark.parametrize(
    ("shapes", "given", "text"),
    [
        ([("b", "s"), ("b", 4)], [(3, 7), (2, 4)], r"'x1' has shape \(2, 4\).* dimension 0 is 2 instead of 3 \(= b\)"),
        ([("b", "s"), ("b", 4)], [(3, 7), (3, 5)], r"'x1' has shape \(3, 5\).* is 5 instead of 4, the size"),
        ([("b", "2*s")], [(3, 7)], r"dimension 1 is 7, which is not 2\*s for any whole number s"),
        ([("b", "s")], [(9, 7)], r"expected \(b, s\) with b in 1…8, s in 1…512: dimension 0 .* in 1…8, the range"),
        ([("b", "s", "s // 2")], [(3, 7, 4)], r"dimension 2 is 4 instead of 3"),
        ([("b", "s")], [(3, 7, 1)], "3 dimensions instead of 2"),
    ],
)
def test_shapes_that_do_not_fit_name_argument_and_dimension(shapes: Any, given: Any, text: str) -> None:
    with pytest.raises(ArgumentShapeError, match=text):
        EntryBinder(0, entry("e", BS, *shapes)).bind(given)


@pytest.mark.parametrize("shapes", [[("b",)], [("b", "s // 2")], [("b", "s*s")], [("b", "8 // s")], [("b + s",)]])
def test_symbols_that_shapes_do_not_determine_are_refused_at_load(shapes: Any) -> None:
    with pytest.raises(PlanError, match="do not determine"):
        EntryBinder(0, entry("e", BS, *shapes))


def test_the_first_entry_that_fits_is_taken() -> None:
    binder = Binder(
        plan(
            entry("decode", {"b": (1, 8)}, ("b", 1)),
            entry("short", {"b": (1, 8), "s": (1, 16)}, ("b", "s")),
            entry("long", BS, ("b", "s")),
        )
    )
    assert [binder.bind([shape]).entry for shape in ((2, 1), (2, 2), (2, 16), (2, 17), (8, 512))] == [0, 1, 1, 2, 2]
    with pytest.raises(ArgumentShapeError, match=r"no entry point takes(?s:.*)decode(?s:.*)short(?s:.*)long"):
        binder.bind([(2, 513)])


def test_entries_with_different_arguments_are_refused() -> None:
    with pytest.raises(PlanError, match="'one' and 'two' take other arguments"):
        Binder(plan(entry("one", {}, (1,)), entry("two", {}, (1,), (2,))))
