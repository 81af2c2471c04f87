"""Verifiers with a fault: a rule taken out of the source, or the ordering made lax.

`without_rule("live-overlap")` is `verify_plan` of modules compiled anew, in which no statement raises that rule.
`LAX` changes what orders two steps, or what counts as written.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

from qcompiler.plan import hazards, verify, verify_steps, verify_views
from qcompiler.plan.plan import Plan

_MODULES = (hazards, verify_views, verify_steps, verify)
"""Each uses names of those in front of it."""


class _RuleRemoval(ast.NodeTransformer):
    """`raise ScheduleError(…, rule=…)` becomes `pass` where the rule is the wanted one; `return` where something is
    missing without which the function cannot go on."""

    def __init__(self, rule: str) -> None:
        self.rule = rule
        self.removed = 0
        self._instead: ast.stmt = ast.Pass()

    def visit_If(self, node: ast.If) -> ast.stmt:
        before = self._instead
        test = node.test
        if isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.Is) and ast.unparse(test).endswith("is None"):
            self._instead = ast.Return()
        self.generic_visit(node)
        self._instead = before
        return node

    def visit_Raise(self, node: ast.Raise) -> ast.stmt:
        call = node.exc
        if isinstance(call, ast.Call):
            for keyword in call.keywords:
                if keyword.arg == "rule" and self.rule in _rules(keyword.value):
                    self.removed += 1
                    return ast.copy_location(self._instead, node)
        return node


def _rules(value: ast.expr) -> tuple[str, ...]:
    """The rules that an expression may stand for: a text, or an entry of one of the tables of rules."""
    if isinstance(value, ast.Constant):
        return (str(value.value),)
    if isinstance(value, ast.Subscript) and isinstance(value.value, ast.Name):
        tables: dict[str, Mapping[Any, str]] = {
            "_UNORDERED": hazards._UNORDERED,
            "_READ_ONLY": verify_steps._READ_ONLY,
        }
        return tuple(tables[value.value.id].values())
    return ()


def without_rule(rule: str) -> Callable[[Plan], None]:
    """The verifier without a rule; AssertionError if it has none of that name."""
    removal = _RuleRemoval(rule)
    made: dict[str, Any] = {}
    for module in _MODULES:
        tree = ast.fix_missing_locations(removal.visit(ast.parse(inspect.getsource(module))))
        faulty = ModuleType(f"{module.__name__}_without_{rule}")
        sys.modules[faulty.__name__] = faulty  # dataclasses look their module up
        exec(compile(tree, str(module.__file__), "exec"), vars(faulty))
        for name, value in made.items():  # what the module imported from the sound ones
            if name in vars(faulty) and not _is_from(vars(faulty)[name], faulty):
                vars(faulty)[name] = value
        made |= {name: value for name, value in vars(faulty).items() if _is_from(value, faulty)}
    assert removal.removed, f"no statement raises the rule '{rule}'"
    found: Callable[[Plan], None] = made["verify_plan"]
    return found


def _is_from(value: object, module: ModuleType) -> bool:
    return getattr(value, "__module__", "") == module.__name__


# --- laxer ordering --------------------------------------------------------------------------------------------------


def _wait_for_everything(self: hazards.Clocks, event: str, stream: int, step: int) -> None:
    """As if a wait were for all streams' work so far."""
    _wait(self, event, stream, step)
    self.clocks[stream] = [max(column) for column in zip(*self.clocks, strict=True)]


def _record_everything(self: hazards.Clocks, event: str, stream: int, step: int) -> None:
    """As if a record stood for all streams' work so far."""
    _record(self, event, stream, step)
    self._events[event].clock = tuple(max(column) for column in zip(*self.clocks, strict=True))


_wait, _record = hazards.Clocks.wait, hazards.Clocks.record

LAX: dict[str, tuple[object, str, object]] = {
    "a wait orders after everything": (hazards.Clocks, "wait", _wait_for_everything),
    "a record stands for every stream": (hazards.Clocks, "record", _record_everything),
    "no two views of a buffer meet": (hazards, "disjoint", lambda *_: True),
    "a buffer takes no memory from others": (hazards.Arenas, "claim", lambda *_: []),
    "memory is reused without order": (hazards.AccessChecker, "_inherit", staticmethod(lambda *_: None)),
    "dead buffers may be read": (hazards.AccessChecker, "_refuse_dead", staticmethod(lambda *_: None)),
    "results are not looked at": (verify_steps.EntryVerifier, "_check_outputs", lambda *_: None),
    "buffers are not compared with arenas": (verify, "_check_buffer", lambda *_: None),
}
"""What is patched: an object, an attribute of it, and what stands there instead.  Reads of partly written buffers
are not here: mutants take whole steps away, and tests/plan/test_coverage.py has the parts."""


@contextmanager
def lax(name: str) -> Iterator[Callable[[Plan], None]]:
    """The verifier with one of `LAX`."""
    owner, attribute, value = LAX[name]
    with mock.patch.object(owner, attribute, value):
        yield verify.verify_plan
