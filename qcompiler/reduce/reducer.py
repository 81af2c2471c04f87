"""Makes a case smaller as long as it fails in the same way."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field, replace

from qcompiler.errors import ArgumentError
from qcompiler.ir.context import QCContext
from qcompiler.ir.text import print_module
from qcompiler.plan.weights import WeightStore
from qcompiler.reduce.case import Case
from qcompiler.reduce.ddmin import minimise
from qcompiler.reduce.failure import READING, Failure, observe
from qcompiler.reduce.removals import REMOVALS
from qcompiler.reduce.sizes import smaller
from qcompiler.runtime.progress import EVERY, is_quiet, note

SLOWEST = 60.0
"""Seconds that a case may take to fail at most, if the caller does not say."""

FACTOR, LEAST = 10.0, 5.0
"""A candidate has ten times the seconds in which the case failed, and five at least: less work should not take longer,
but the machine may be busy."""

CONFIRMATIONS = 3
"""How often the case runs at first. A failure that comes and goes cannot guide a search."""


@dataclass
class Reducer:
    """`best` is the smallest case so far that fails in the same way; `failure` is how."""

    best: Case
    failure: Failure
    seconds: float
    """The limit of a candidate."""
    tried: int = 0
    kept: int = 0
    began: float = field(default_factory=time.monotonic)
    _first: int = 0
    _said: float = field(default_factory=time.monotonic)

    @classmethod
    def of(cls, case: Case, seconds: float | None = None) -> Reducer:
        """Finds out how the case fails. ArgumentError if it does not, or not always in the same way."""
        began = time.monotonic()
        first = observe(case, seconds if seconds is not None else SLOWEST)
        took = time.monotonic() - began
        if first is None:
            passes = ", ".join(each.name for each in case.passes)
            raise ArgumentError(f"there is nothing to reduce: {passes} runs on this IR without a failure")
        if case.verify_each == "numerics" and first.where == READING:
            raise ArgumentError(
                f"the program does not run before any pass, so there is no answer to compare with: {first.message}; "
                "if it needs weights, --context names the file that lies beside the reproducer"
            )
        if first.kind == "hang":  # every look at a hang takes the whole limit
            limit = SLOWEST if seconds is None else seconds
            note(f"reduce: every candidate that hangs takes {limit:g} s; --timeout gives another limit")
        else:
            limit = max(FACTOR * took, LEAST) if seconds is None else seconds
            for _ in range(CONFIRMATIONS - 1):
                again = observe(case, limit)
                if again != first:
                    raise ArgumentError(
                        f"the failure comes and goes: '{first}' once, and '{again or 'no failure'}' another time; "
                        "what fails at random cannot be reduced"
                    )
        made = cls(case, first, limit)
        made._first = case.size
        return made

    def accept(self, candidate: Case) -> bool:
        """Runs a candidate. If it fails in the same way, it is the best one from now on."""
        self.tried += 1
        found = observe(candidate, self.seconds)
        if found == self.failure:
            self.best, self.failure, self.kept = candidate, found, self.kept + 1
        self._tell()
        return found == self.failure

    def reduce(self) -> None:
        """Applies all reductions until none of them helps any more."""
        if self.best.context is not None:
            self.accept(replace(self.best, context=None, samples=None))
        self._keep_only_failing_pass()
        while True:
            before = self.kept
            for removal in REMOVALS:
                minimise(self.best, removal.count, removal.without, self.accept)
                if removal.name == "passes":
                    self._run_passes_ahead()
            self._shrink_sizes()
            if self.kept == before:
                break
        self._drop_unread_weights()
        self._clear_line()

    def _keep_only_failing_pass(self) -> None:
        """The passes behind the failing one never ran."""
        names = [each.name for each in self.best.passes]
        if self.failure.where != READING and self.failure.where in names:
            last = names.index(self.failure.where) + 1
            if last < len(names):
                self.accept(replace(self.best, passes=self.best.passes[:last]))

    def _run_passes_ahead(self) -> None:
        """The passes before the last one are needed: keeps the IR that they make instead of them."""
        *ahead, last = self.best.passes
        if not ahead or self.failure.where != last.name:
            return
        module = self.best.module.clone()
        context = QCContext.default() if self.best.context is None else self.best.context.clone()
        for each in ahead:  # these ran in every child up to here
            each.apply(context, module)
        made = replace(self.best, module=module, passes=(last,))
        if not self.accept(made):
            self.accept(replace(made, context=context))

    def _drop_unread_weights(self) -> None:
        """The context of the result holds only weights that the module names."""
        context = self.best.context
        if context is None:
            return
        text = print_module(self.best.module)
        few = QCContext.default(
            target=context.target,
            devices=context.devices,
            device_map=context.device_map,
            weights=WeightStore(context.weights.moved),
        )
        for tensor in context.weights:
            if tensor.key in text:
                few.weights.add(tensor)
        self.accept(replace(self.best, context=few))

    def _shrink_sizes(self) -> None:
        """Takes the first smaller size that works, and starts again from there."""
        while any(self.accept(candidate) for candidate in smaller(self.best)):
            pass

    # --- progress ---

    def _tell(self) -> None:
        """A line that is written over on a terminal, else one every five seconds."""
        if is_quiet() or sys.stderr is None:
            return
        now = time.monotonic()
        text = f"{self.best.size} of {self._first} ops left, {self.tried} candidates, {now - self.began:.0f} s"
        if sys.stderr.isatty():
            if now - self._said >= 0.1:
                self._said = now
                print(f"\r\033[Kqc reduce: {text}", end="", file=sys.stderr, flush=True)
        elif now - self._said >= EVERY:
            self._said = now
            note(f"reduce: {text}")

    def _clear_line(self) -> None:
        if sys.stderr is not None and sys.stderr.isatty() and not is_quiet():
            print("\r\033[K", end="", file=sys.stderr, flush=True)

    def summary(self) -> str:
        """One line: from how much to how little, and at what cost."""
        took = time.monotonic() - self.began
        return f"{self._first} ops, now {self.best.size}; {self.tried} candidates in {took:.0f} s"


__all__ = ["Reducer"]
