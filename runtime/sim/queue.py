"""The queue of all simulated devices: work runs when the host waits, in an order that a seed chooses.

Any order may happen that streams, events and the legacy stream's rules allow, on all devices together.  Every operation
is checked against the others by its clock (`clocks`), whatever the order was.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from qcompiler.errors import SimulationError
from qcompiler.runtime.interrupts import interruption_point, uninterrupted
from qcompiler.runtime.sim.clocks import Access, AccessMap, Clock, Conflict, Stamped, join
from qcompiler.runtime.sim.engine import SimEngine

HOST = 0
"""The actor of all host threads: once one of them has waited for an operation, it is over for all of them."""

Action = Callable[[int], Iterable[Access]]
"""Does an operation's work, given a seed; returns its observed accesses."""

_labels = threading.local()


@contextlib.contextmanager
def step_label(text: str) -> Iterator[None]:
    """Names the step of the plan that this thread's operations belong to, for reports."""
    before = getattr(_labels, "text", "")
    _labels.text = text
    try:
        yield
    finally:
        _labels.text = before


@dataclass(eq=False)
class Allocation:
    """A piece of device memory and the history of its bytes. `alive` until it is freed.

    `planned` holds declared accesses, in the order of submission, so that a missing wait is found before anything
    runs; `executed` holds observed accesses as well, in the order of execution.
    """

    base: int
    nbytes: int
    label: str
    device: int
    alive: bool = True
    planned: AccessMap = field(default_factory=AccessMap)
    executed: AccessMap = field(default_factory=AccessMap)

    def __str__(self) -> str:
        return f"'{self.label or 'memory'}' of sim:{self.device}" if self.device >= 0 else self.label


@dataclass(frozen=True)
class Work:
    """The work of an operation, independent of its time: eager work and nodes of a graph alike.

    `kind` is "kernel", "copy" or "zero" ("upload", "download", "marker" are never captured); `name` is for reports;
    `memory` lists the allocations whose addresses it holds.
    """

    kind: str
    name: str
    device: int
    accesses: tuple[Access, ...] = ()
    memory: tuple[Allocation, ...] = ()
    action: Action | None = None
    label: str = field(default_factory=lambda: getattr(_labels, "text", ""))


@dataclass(eq=False)
class Op:
    """An operation in the queue: its number in the order of submission, its clock, and what it waits for."""

    number: int
    work: Work
    place: str
    actor: int
    tick: int
    clock: Clock
    blockers: int = 0
    followers: list[Op] = field(default_factory=list)
    is_done: bool = False
    failure: SimulationError | None = None
    """The finding of this operation, or of one that it depends on; in that case it is not carried out."""

    def __str__(self) -> str:
        step = f", {self.work.label}" if self.work.label else ""
        return f"{self.work.name} (operation {self.number} on {self.place} of sim:{self.work.device}{step})"


class _Entry:
    """A call of the machine from outside, on one thread at a time."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def __enter__(self) -> None:
        uninterrupted.__enter__()
        self._machine.lock.acquire()
        try:
            self._machine.release_condemned()
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        self._machine.lock.release()
        uninterrupted.__exit__()


class Machine:
    """All devices' queue, clocks and findings. Every method is safe to call from several threads."""

    def __init__(self, engine: SimEngine) -> None:
        self.engine = engine
        self.lock = threading.RLock()
        self.host: Clock = {HOST: 1}
        self._outside = Allocation(0, 0, "host memory", -1)
        self._touched: set[Allocation] = set()
        self._allocations: dict[int, Allocation] = {}
        self._bases: list[int] = []
        self._freed: list[Allocation] = []
        self._condemned: deque[Allocation] = deque()
        self._leaving: list[tuple[Allocation, set[Op]]] = []
        self._latest: dict[int, dict[int, Op]] = {}
        self._pending: dict[Op, None] = {}
        self._ready: list[Op] = []
        self._floor: Clock = {}
        self._actors = HOST
        self._ticks: dict[int, int] = {}
        self._numbers = 0
        self._findings: list[tuple[SimulationError, frozenset[int]]] = []
        self._reported: set[tuple[int, int]] = set()
        self._broken: dict[int, SimulationError] = {}
        self.reseed()

    def reseed(self, seed: int | None = None) -> None:
        """Restarts the choice of orders, from `seed` or else from QC_SIM_SEED (0)."""
        self._random = random.Random(int(os.environ.get("QC_SIM_SEED", "0")) if seed is None else seed)

    def entry(self) -> _Entry:
        """Encloses every call from outside: one at a time, after freeing memory that the garbage collector released.

        An interrupt is raised between two executed operations, or at the end.
        """
        return _Entry(self)

    def release_condemned(self) -> None:
        while self._condemned:
            self._release(self._condemned.popleft())

    # --- memory ---

    def adopt(self, allocation: Allocation) -> None:
        self._allocations[allocation.base] = allocation
        insort(self._bases, allocation.base)

    def allocation_at(self, address: int) -> Allocation | None:
        """The live allocation that contains the address (its end counts, for operands of no bytes)."""
        at = bisect_right(self._bases, address) - 1
        if at < 0:
            return None
        found = self._allocations[self._bases[at]]
        return found if address <= found.base + found.nbytes else None

    def resolve(self, address: int, nbytes: int, what: str) -> Allocation:
        """The allocation that contains the bytes. SimulationError: "use-after-free", "out-of-bounds"."""
        found = self.allocation_at(address)
        if found is None or (nbytes and address == found.base + found.nbytes):
            for freed in reversed(self._freed):
                if freed.base <= address < freed.base + freed.nbytes:
                    raise SimulationError(f"{what} uses {freed}, which was freed", "use-after-free")
            raise SimulationError(f"{what} uses the address {address:#x}, which is no device memory", "out-of-bounds")
        if address + nbytes > found.base + found.nbytes:
            raise SimulationError(
                f"{what} uses bytes {address - found.base}…{address - found.base + nbytes} of {found}, "
                f"which has {found.nbytes}",
                "out-of-bounds",
            )
        return found

    def condemn(self, allocation: Allocation) -> None:
        """Memory to be freed once all work submitted so far has finished; later work must not use it.

        The garbage collector may call this at any moment and on any thread, so it only makes a note.
        """
        self._condemned.append(allocation)

    def _release(self, allocation: Allocation) -> None:
        if not allocation.alive:  # lost by a reset of its device
            return
        allocation.alive = False
        self._touched.discard(allocation)
        users = {op for op in self._pending if allocation in op.work.memory}
        del self._allocations[allocation.base]
        self._bases.remove(allocation.base)
        self._freed = [*self._freed[-255:], allocation]
        if users:
            self._leaving.append((allocation, users))
        else:
            self.engine.free(allocation.base)

    def _release_unused(self, done: Op) -> None:
        for allocation, users in self._leaving:
            users.discard(done)
            if not users:
                self.engine.free(allocation.base)
        self._leaving = [(allocation, users) for allocation, users in self._leaving if users]

    # --- submitting ---

    def new_actor(self) -> int:
        self._actors += 1
        return self._actors

    def submit(self, work: Work, actor: int, place: str, after: Iterable[Op]) -> Op:
        """Queues an operation behind others (finished ones order it, too)."""
        clock: Clock = {}
        blockers = []
        for op in dict.fromkeys(after):
            join(clock, op.clock)
            if not op.is_done:
                blockers.append(op)
        join(clock, self.host)
        tick = self._ticks[actor] = self._ticks.get(actor, 0) + 1
        clock = {other: at for other, at in clock.items() if at > self._floor.get(other, 0)}
        clock[actor] = tick
        self._numbers += 1
        op = Op(self._numbers, work, place, actor, tick, clock, blockers=len(blockers))
        for blocker in blockers:
            blocker.followers.append(op)
        self._pending[op] = None
        self._latest.setdefault(work.device, {})[actor] = op
        self._check(op, work.accesses, "planned")
        if not blockers:
            self._ready.append(op)
        return op

    def latest(self, device: int) -> list[Op]:
        """The last operation of every actor on a device, unless the host has waited for it."""
        return list(self._latest.get(device, {}).values())

    def host_access(self, lo: int, hi: int, what: str) -> None:
        """A host read of [lo, hi), now. SimulationError if a download to these bytes has not been waited for."""
        self._ticks[HOST] = self.host[HOST] = self.host[HOST] + 1
        op = Op(self._numbers, Work("host", what, 0), "the host", HOST, self.host[HOST], dict(self.host))
        self._touched.add(self._outside)
        for conflict in self._outside.planned.touch(op, lo, hi, writes=False):
            raise SimulationError(
                f"{what} reads host memory that {conflict.other} writes, and the host has not waited for it; "
                "synchronize its stream first",
                "unordered-access",
            )

    # --- executing ---

    def run(self, targets: Iterable[Op], limit: int | None = None) -> bool:
        """Executes operations until the targets are done, or at most `limit`; returns whether they are done."""
        targets = [op for op in targets if not op.is_done]
        executed = 0
        while any(not op.is_done for op in targets):
            if executed == limit:
                return False
            interruption_point()
            at = self._random.randrange(len(self._ready))
            self._ready[at], self._ready[-1] = self._ready[-1], self._ready[at]
            self._execute(self._ready.pop())
            executed += 1
        return True

    def wait(self, device: int, targets: Sequence[Op]) -> None:
        """Executes the targets; the host then knows that they are over. Raises findings of the device."""
        self.run(targets)
        self.learn(targets)
        self.raise_findings(device)

    def poll(self, device: int, targets: Sequence[Op]) -> bool:
        """Makes some progress; returns whether the targets are done (then as `wait`)."""
        done = self.run(targets, limit=self._random.randint(1, max(1, len(self._pending))))
        if done:
            self.learn(targets)
            self.raise_findings(device)
        return done

    def is_ready(self, op: Op) -> bool:
        return op.blockers == 0 and not op.is_done

    def run_now(self, op: Op) -> None:
        """Executes an operation that waits for nothing."""
        self._ready.remove(op)
        self._execute(op)

    def learn(self, targets: Iterable[Op]) -> None:
        """The host knows that the targets are over; histories drop what no longer matters."""
        before = dict(self.host)
        for op in targets:
            join(self.host, op.clock)
        if before == self.host:
            return
        for actor, tick in self.host.items():
            low = min((op.clock.get(actor, self._floor.get(actor, 0)) for op in self._pending), default=tick)
            self._floor[actor] = max(self._floor.get(actor, 0), min(tick, low))
        self.host = {a: t for a, t in self.host.items() if a == HOST or t > self._floor.get(a, 0)}
        for latest in self._latest.values():
            for actor in [actor for actor, op in latest.items() if self._is_over(op)]:
                del latest[actor]
        for allocation in list(self._touched):
            allocation.planned.prune(self._is_over)
            allocation.executed.prune(self._is_over)
            if not len(allocation.planned) + len(allocation.executed):
                self._touched.discard(allocation)

    def _is_over(self, op: Stamped) -> bool:
        return op.tick <= self._floor.get(op.actor, 0)

    def _execute(self, op: Op) -> None:
        try:
            if op.failure is None:
                self._check(op, op.work.accesses, "executed")
                if op.work.action is not None:
                    self._check(op, op.work.action(self._random.getrandbits(31)), "executed")
        except SimulationError as error:
            op.failure = SimulationError(f"{op}: {error}", error.finding)
            self._report(op.failure, op.work.device)
        except BaseException as error:
            op.failure = SimulationError(f"{op} was not carried out: {error!r}", "failed")
            self._report(op.failure, op.work.device)
            raise
        finally:
            self._finish(op)

    def _finish(self, op: Op) -> None:
        op.is_done = True
        del self._pending[op]
        for follower in op.followers:
            follower.blockers -= 1
            if op.failure is not None and follower.failure is None:
                # Operations behind a failed one would only fail because of it, on other devices as well.
                follower.failure = op.failure
                if follower.work.device != op.work.device:
                    self._report(op.failure, follower.work.device)
            if follower.blockers == 0:
                self._ready.append(follower)
        op.followers = []
        if self._leaving:
            self._release_unused(op)

    # --- findings ---

    def _check(self, op: Op, accesses: Iterable[Access], when: Literal["planned", "executed"]) -> None:
        for access in dict.fromkeys(accesses):
            allocation = self._find(access.lo, op.work.memory)
            self._touched.add(allocation)
            history = allocation.planned if when == "planned" else allocation.executed
            for writes in [writes for letter, writes in (("r", False), ("w", True)) if letter in access.kind]:
                for conflict in history.touch(op, access.lo, access.hi, writes=writes):
                    self._unordered(op, access, writes, conflict, allocation)

    def _find(self, address: int, memory: tuple[Allocation, ...]) -> Allocation:
        for allocation in memory:
            if allocation.base <= address < allocation.base + allocation.nbytes:
                return allocation
        return self._outside

    def _unordered(self, op: Op, access: Access, writes: bool, conflict: Conflict, allocation: Allocation) -> None:
        other = conflict.other
        assert isinstance(other, Op)
        pair = (min(op.number, other.number), max(op.number, other.number))
        if pair in self._reported:
            return
        self._reported.add(pair)
        first, second = (op, other) if op.number < other.number else (other, op)
        deeds = {op: "writes" if writes else "reads", other: "writes" if conflict.wrote else "reads"}
        where = f"bytes {conflict.lo - allocation.base}…{conflict.hi - allocation.base} of {allocation}"
        operand = f" (operand '{access.label}')" if access.label else ""
        message = (
            f"{first} {deeds[first]} and {second} {deeds[second]} {where}{operand}, and nothing orders the two. "
            f"Let {second.place} wait for an event that is recorded on {first.place} after {first.work.name}"
        )
        self._report(SimulationError(message, "unordered-access"), op.work.device, other.work.device)

    def _report(self, finding: SimulationError, *devices: int) -> None:
        """Keeps a finding until the host waits for one of the devices."""
        self._findings.append((finding, frozenset(devices)))

    def raise_findings(self, device: int) -> None:
        """Raises the first finding of a device, with the number of others. The device is unusable from then on."""
        found = list(dict.fromkeys(finding for finding, devices in self._findings if device in devices))
        if not found:
            return
        found.sort(key=lambda finding: finding.finding != "unordered-access")  # it may be the cause of the others
        error = found[0]
        if len(found) > 1:
            others = "; ".join(dict.fromkeys(f"{each.finding}: {each}" for each in found[1:4]))
            error = SimulationError(f"{found[0]} [and {len(found) - 1} more: {others}]", found[0].finding)
        self._broken[device] = error
        self._stop(device, error)
        raise error

    def check_usable(self, device: int) -> None:
        """SimulationError on a device with a finding: the contents of its memory are invalid.

        In the same way, a GPU's context is lost after an illegal access, with everything loaded in it.
        """
        first = self._broken.get(device)
        if first is not None:
            raise SimulationError(
                f"sim:{device} cannot be used after a finding, like a GPU's context after a fault: {first}. Restart "
                f"it with qcompiler.runtime.reset_simulated_gpu('sim:{device}'); programs loaded there are then lost",
                first.finding,
            )

    def reset(self, device: int) -> None:
        """Forgets the findings of a device and all its memory; its pending work never runs."""
        self._stop(device, SimulationError(f"sim:{device} was reset", "reset"))
        operations = [op for op in self._pending if op.work.device == device]
        self.run(operations)
        self.learn(operations)
        self._findings = [(finding, devices) for finding, devices in self._findings if device not in devices]
        self._broken.pop(device, None)
        for allocation in [each for each in self._allocations.values() if each.device == device]:
            allocation.label = f"{allocation.label or 'memory'} (lost when sim:{device} was reset)"
            self._release(allocation)

    def _stop(self, device: int, why: SimulationError) -> None:
        """Cancels the pending work of a device: its addresses may belong to freed host memory."""
        for op in self._pending:
            if op.work.device == device and op.failure is None:
                op.failure = why

    def drop_all(self) -> None:
        """Executes the remaining work and forgets all findings (between tests)."""
        with self.lock:
            self.run(list(self._pending))
            self.learn([])
            self._findings.clear()
            self._broken.clear()
            self._reported.clear()
