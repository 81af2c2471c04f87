"""The simulated GPU as judge: runs a plan without asking the verifier, and says what it found or what came out.

A plan is run eagerly and captured, in several orders of execution.  `Judge.harm` is the first finding (unordered
accesses, uninitialised reads, results left unwritten, accesses out of bounds or on another device, use of freed memory,
a broken rule of captures), any other error, or a difference from the original's answers; None if there is nothing.

A session gives all activation arenas of a device one block, with room between them.  Here each has memory of its own
and of just its size, with the simulator's red zones around it, so that an access past an arena is seen as one.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np

from planmutants.graph import replace as replace_struct
from planmutants.programs import Arguments, Case
from qcompiler.errors import QCompilerError
from qcompiler.plan.plan import EntryPoint, Plan
from qcompiler.runtime import loaded, session
from qcompiler.runtime.backends import registry
from qcompiler.runtime.placement import SessionMemory, SlotDevice
from qcompiler.runtime.sim import engine
from qcompiler.runtime.sim.device import captures, machine

Answer = tuple[bytes, ...]


@dataclass(frozen=True)
class Way:
    """One way to run a program: an order of execution, eagerly or captured."""

    seed: int
    captured: bool

    def __str__(self) -> str:
        return f"{'captured' if self.captured else 'eager'}, seed {self.seed}"


WAYS = (Way(0, False), Way(0, True), Way(1, False), Way(2, True))
"""Findings do not depend on the order of execution; the answers of a broken plan may."""


class ExactMemory(SessionMemory):
    """Activation arenas one by one."""

    def __init__(self, plan: Plan, entries: Sequence[EntryPoint], slots: Mapping[str, SlotDevice]) -> None:
        nothing = replace_struct(plan, arenas=tuple(arena for arena in plan.arenas if arena.kind != "activations"))
        super().__init__(nothing, entries, slots)
        self.slot_of = {arena.name: arena.device for arena in plan.arenas}
        self._arenas = {
            arena.name: (arena.entry, self.allocate(arena.device, arena.nbytes, arena.name))
            for arena in plan.arenas
            if arena.kind == "activations"
        }

    def bases(self, entry: EntryPoint) -> dict[str, int]:
        own = {name: memory.address for name, (of, memory) in self._arenas.items() if of in (None, entry.name)}
        return super().bases(entry) | own


@contextlib.contextmanager
def exact_memory() -> Iterator[None]:
    """Programs and sessions made meanwhile use `ExactMemory`."""
    with (
        mock.patch.object(loaded, "SessionMemory", ExactMemory),
        mock.patch.object(session, "SessionMemory", ExactMemory),
    ):
        yield


class Judge:
    """Runs plans that differ from a case's in their schedule only: the kernels are compiled and loaded once."""

    def __init__(self, case: Case) -> None:
        self.case = case
        backends = [registry.backend(f"sim:{index}", case.image.target.isa) for index in (0, 1)]
        build = backends[0].build(case.image.plan)
        self._devices = [(backend, build, backend.load(case.image.plan, build)) for backend in backends]
        self._answers = {captured: list(self._run(case.image.plan, Way(0, captured))) for captured in (False, True)}

    @mock.patch.object(engine, "_source_lines", lambda library, offset: [])  # a process for each line of a report
    def harm(self, plan: Plan, ways: Sequence[Way] = WAYS) -> str | None:
        """What is wrong with running a plan, or None."""
        for way in ways:
            try:
                answers = itertools.zip_longest(self._run(plan, way), self._answers[way.captured])
                if any(ours != wanted for ours, wanted in answers):
                    return f"another answer ({way})"
            except QCompilerError as error:
                kind = getattr(error, "finding", None) or type(error).__name__
                return f"{kind} ({way}): {error}"
            finally:
                _clean()
        return None

    def _run(self, plan: Plan, way: Way) -> Iterator[Answer]:
        """The answers of every call, and the states after every script."""
        slots = {
            slot.name: SlotDevice(slot.name, *device) for slot, device in zip(plan.devices, self._devices, strict=False)
        }
        machine().reseed(way.seed)
        with exact_memory():
            program = loaded.LoadedProgram(replace(self.case.image, plan=plan), slots)
            sessions = [program._default, *(program.session() for _ in self.case.scripts[1:])]
        for own, script in zip(sessions, self.case.scripts, strict=True):
            calls = self._replays(own, script) if way.captured else (own(**call) for call in script)
            yield from map(_leaves, calls)
            yield tuple(each.tobytes() for each in own.states().values())

    @staticmethod
    def _replays(own: Any, script: Sequence[Arguments]) -> Iterator[Any]:
        """Every call of the script as a replay, then all of them again with the graphs that are there."""
        graphs: dict[tuple[Any, ...], Any] = {}
        for call in (*script, *script):
            shapes = tuple(each.shape for each in call.values())
            if shapes not in graphs:
                graphs[shapes] = own.capture(**call)
            yield graphs[shapes].replay(**call)


def _leaves(result: Any) -> tuple[bytes, ...]:
    values = result.values() if hasattr(result, "values") else (result,)
    return tuple(np.ascontiguousarray(value).tobytes() for value in values if value is not None)


def _clean() -> None:
    """Nothing of a failed run is left: no capture, no work, no finding."""
    with machine().entry():
        captures().abandon_all()
    machine().drop_all()
