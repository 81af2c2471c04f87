"""Dims of generated graphs: polynomials over the symbols, apart from `qcompiler.plan.dims`, which is under test."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache

RANGES: dict[str, tuple[int, int]] = {"b": (1, 7), "s": (1, 13), "n": (4, 11)}
"""The symbols of every graph. `n` is at least 4, so that slices which need some entries are legal."""


@dataclass(frozen=True)
class Size:
    """A sum of `coefficient * product of atoms`; an atom is a symbol or a bracketed expression in Python's syntax."""

    terms: tuple[tuple[tuple[str, ...], int], ...]

    @staticmethod
    def of(value: Size | int | str) -> Size:
        if isinstance(value, Size):
            return value
        if isinstance(value, int):
            return Size((((), value),) if value else ())
        return Size((((value,), 1),))

    @property
    def is_static(self) -> bool:
        return all(not atoms for atoms, _ in self.terms)

    @property
    def static(self) -> int | None:
        """The number, or None where it depends on a symbol."""
        return self.terms[0][1] if self.terms and self.is_static else (None if self.terms else 0)

    def __add__(self, other: Size | int) -> Size:
        return _collect([*self.terms, *Size.of(other).terms])

    def __sub__(self, other: Size | int) -> Size:
        return self + Size.of(other) * -1

    def __mul__(self, other: Size | int) -> Size:
        return _collect([(tuple(sorted(a + b)), m * n) for a, m in self.terms for b, n in Size.of(other).terms])

    def divided(self, by: int) -> Size | None:
        """self / by, if that is exact for every size."""
        if by == 0 or any(n % by for _, n in self.terms):
            return None
        return Size(tuple((atoms, n // by) for atoms, n in self.terms))

    def ceil_divided(self, by: int) -> Size:
        """(self + by - 1) // by"""
        exact, number = self.divided(by), self.static
        if number is not None:
            return Size.of(-(-number // by))
        return exact if exact is not None else Size.of(f"(({self + (by - 1)})//{by})")

    def at(self, symbols: Mapping[str, int]) -> int:
        return int(eval(_code(str(self)), {}, dict(symbols)))

    @property
    def low(self) -> int:
        """The smallest size within the ranges; every atom grows with its symbols, so corners suffice."""
        return min(self.at(corner) for corner in _corners())

    @property
    def is_traceable(self) -> bool:
        """torch.export takes symbols to be at least 2, and what is computed from them to be no 1: it would guard."""
        if self.is_static or str(self) in RANGES:
            return True
        return min(self.at({name: max(size, 2) for name, size in corner.items()}) for corner in _corners()) >= 2

    @property
    def high(self) -> int:
        return max(self.at(corner) for corner in _corners())

    def __str__(self) -> str:
        parts = [
            "*".join([*([str(n)] if n != 1 or not atoms else []), *atoms]) for atoms, n in sorted(self.terms, key=str)
        ]
        return " + ".join(parts) or "0"


def _collect(terms: Iterable[tuple[tuple[str, ...], int]]) -> Size:
    total: dict[tuple[str, ...], int] = {}
    for atoms, n in terms:
        total[atoms] = total.get(atoms, 0) + n
    return Size(tuple(sorted((atoms, n) for atoms, n in total.items() if n)))


@cache
def _code(text: str) -> object:
    return compile(text, "<size>", "eval")


@cache
def _corners() -> tuple[dict[str, int], ...]:
    found: list[dict[str, int]] = [{}]
    for name, bounds in RANGES.items():
        found = [{**corner, name: bound} for corner in found for bound in bounds]
    return tuple(found)


def product(sizes: Iterable[Size]) -> Size:
    total = Size.of(1)
    for size in sizes:
        total = total * size
    return total


Shape = tuple[Size, ...]


def shape_of(*sizes: Size | int | str) -> Shape:
    return tuple(Size.of(size) for size in sizes)


def text_of(shape: Shape) -> str:
    """`b, s, 8`, as arguments of a call."""
    return ", ".join(str(size) for size in shape)


def broadcast(*shapes: Shape) -> Shape | None:
    """The common shape; None if there is none at every size."""
    rank = max(map(len, shapes), default=0)
    out = [Size.of(1)] * rank
    for shape in shapes:
        for axis, size in enumerate(shape, rank - len(shape)):
            if out[axis].static == 1:
                out[axis] = size
            elif size.static != 1 and size != out[axis]:
                return None
    return tuple(out)
