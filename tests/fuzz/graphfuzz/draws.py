"""Where choices come from: hypothesis, which can repeat and explore them, or a plain seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Draws(Protocol):
    """A source of choices."""

    def integer(self, low: int, high: int) -> int:
        """A number from `low` to `high`, both included."""


class Seeded:
    """Choices of a random generator."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def integer(self, low: int, high: int) -> int:
        return self._random.randint(low, high)


class Drawn:
    """Choices that hypothesis makes through the `draw` of a composite strategy."""

    def __init__(self, draw: Callable[[Any], Any]) -> None:
        from hypothesis import strategies as st

        self._draw = draw
        self._integers = st.integers

    def integer(self, low: int, high: int) -> int:
        return int(self._draw(self._integers(low, high)))


def choose(draws: Draws, options: Sequence[T]) -> T:
    return options[draws.integer(0, len(options) - 1)]


def chance(draws: Draws, percent: int) -> bool:
    return draws.integer(1, 100) <= percent
