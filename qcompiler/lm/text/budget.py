"""What a chat template may use: steps, time, and sizes of the values that it makes."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

from qcompiler.errors import ChatTemplateError
from qcompiler.formats.foreign.json_text import shown

MAX_STEPS = 1_000_000
MAX_SECONDS = 10.0
MAX_TEXT = 16 << 20
"""Maximum characters of one text, and of the output."""
MAX_MADE = 64 << 20
"""Maximum characters of all texts that are made, and 8 times the elements of all lists; more for large messages."""
MAX_NODES = 1 << 18
"""Maximum values within one value."""
MAX_DEPTH = 64


class LimitError(Exception):
    """A limit was reached."""


class Budget:
    """What is left for one rendering."""

    def __init__(self, given: int) -> None:
        self._steps = 0
        self._made = 0
        self._output = 0
        self._limit = MAX_MADE + 64 * given
        self._until = time.monotonic() + MAX_SECONDS

    def step(self, count: int = 1) -> None:
        """Counts steps. LimitError if they, or the time, are used up."""
        self._steps += count
        if self._steps > MAX_STEPS:
            raise LimitError(f"it was stopped after {MAX_STEPS:,} steps (loops, calls and filters)")
        if time.monotonic() > self._until:
            raise LimitError(f"it was stopped after {MAX_SECONDS:.0f} seconds")

    def make(self, size: int) -> None:
        """Counts a value of `size` characters before it is made."""
        if size > MAX_TEXT:
            raise LimitError(f"it was stopped before it made a text of {size:,} characters; {MAX_TEXT:,} is the limit")
        self._made += size
        if self._made > self._limit:
            raise LimitError(f"it was stopped after it made texts of {self._limit:,} characters")

    def output(self, size: int) -> None:
        self._output += size
        if self._output > MAX_TEXT:
            raise LimitError(f"it was stopped after {MAX_TEXT:,} characters of output")


BUDGET: ContextVar[Budget] = ContextVar("the budget of the template that is being rendered")


def nodes(value: Any) -> int:
    """The number of values in a value, itself included. LimitError above MAX_NODES."""
    count, open_values = 0, [value]
    while open_values:
        each = open_values.pop()
        count += 1
        if isinstance(each, Mapping):
            open_values += [*each.keys(), *each.values()]
        elif isinstance(each, list | tuple):
            open_values += each
        if count + len(open_values) > MAX_NODES:
            raise LimitError(f"it was stopped at a value with more than {MAX_NODES:,} values in it")
    return count


def text_size(value: Any) -> int:
    """A bound on the characters of `str(value)` and of its JSON. LimitError for what has none that is known."""
    size, open_values = 0, [value]
    count = 0
    while open_values:
        each = open_values.pop()
        count += 1
        if isinstance(each, str):
            size += 2 + (len(each) if each is value else 10 * len(each))  # in a list, escapes: "\U0001f642"
        elif isinstance(each, Mapping):
            open_values += [*each.keys(), *each.values()]
            size += 4 + 2 * len(each)
        elif isinstance(each, list | tuple):
            open_values += each
            size += 4 + 2 * len(each)
        else:
            size += 340  # the longest float
        if size > 12 * MAX_TEXT or count > MAX_NODES:
            raise LimitError(f"it was stopped before it printed a value of {size:,} characters")
    return size


def plain(value: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    """The variables as plain values, and their size. ChatTemplateError, with the place, for anything else."""
    size = 0

    def convert(each: Any, where: str, depth: int) -> Any:
        nonlocal size
        if depth > MAX_DEPTH:
            raise ChatTemplateError(f"{where} is nested more than {MAX_DEPTH} deep")
        size += 1
        if each is None or isinstance(each, bool):
            return each
        for kind in (str, int, float):
            if isinstance(each, kind):
                size += len(each) if isinstance(each, str) else 0
                return kind(each) if type(each) is not kind else each
        if isinstance(each, Mapping):
            return {
                convert(key, where, depth + 1): convert(inner, f"{where}[{shown(key)}]", depth + 1)
                for key, inner in each.items()
            }
        if isinstance(each, list | tuple):
            return [convert(inner, f"{where}[{place}]", depth + 1) for place, inner in enumerate(each)]
        raise ChatTemplateError(
            f"{where} is {shown(each)} of the type {type(each).__name__}; a template takes texts, numbers, lists and "
            "dicts (describe a tool by its JSON schema)"
        )

    return {name: convert(each, name, 0) for name, each in value.items()}, size


__all__ = ["BUDGET", "MAX_TEXT", "Budget", "LimitError", "nodes", "plain", "text_size"]
