"""The table of rules: what kinds of statements there are, and how often each is tried."""

from __future__ import annotations

from collections.abc import Callable

from graphfuzz.builder import Builder
from qcompiler.passes.lowering.kinds import TEMPLATES

Rule = Callable[[Builder], None]

RULES: dict[str, tuple[int, Rule]] = {}
"""Name -> (weight, function). A rule raises Impossible where it does not apply."""


def rule(weight: int, *, needs: str | None = None) -> Callable[[Rule], Rule]:
    """Registers a function of a builder under its name; `needs` names a qc op that has to have a kernel."""

    def register(function: Rule) -> Rule:
        assert function.__name__ not in RULES
        if needs is not None and needs not in {op.__name__ for op in TEMPLATES}:
            return function
        RULES[function.__name__] = (weight, function)
        return function

    return register
