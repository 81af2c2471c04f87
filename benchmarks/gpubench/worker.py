"""Measures cells in a process of its own and reports line by line: a kernel's fault ends only this process.

The parent (gpu_first.py) passes a `Task` as JSON on stdin and reads messages, one JSON object per line, from a pipe:

    {"environment": {…}}  {"begin": "linear/…"}  {"row": {…}}  {"probe": {…}}  {"lost": "why"}  {"done": true}
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import platform
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from gpubench import ours, probes
from gpubench.cells import Cell, Scale, chosen, sizes
from gpubench.document import Probe, Row
from gpubench.rig import Rig, rig_of
from gpubench.weights import Store

ROUNDS, FEW_ROUNDS, SMALL_ROUNDS, WARM = 15, 7, 3, 2
REPLAY = 2e-3
"""Target seconds of a replay: the time to start a graph, some microseconds, must not matter."""

MOST_CALLS, LEAST_CALLS, SMALL_CALLS = 400, 8, 3
PROBE_EVERY = 60
"""Cells between two probes of the copy bandwidth, which show clocks that change."""

RESERVE = 6.0
"""Seconds that the last probes take."""

PACKAGES = (
    "torch", "triton", "bitsandbytes", "numpy", "cuda-core", "cuda-bindings", "nvidia-cuda-nvrtc", "nvidia-cublas",
    "xdsl", "msgspec",
)  # fmt: skip
CLOCKS = "clocks.sm,clocks.mem,clocks.max.sm,power.draw,temperature.gpu,clocks_event_reasons.active,pstate"


@dataclass
class Task:
    """A worker's task: cells by name, in order; `seconds` after which none begins; `first` has the probes."""

    device: str
    scale: Scale
    cells: list[str]
    seconds: float
    rounds: int = ROUNDS
    first: bool = True


class Worker:
    def __init__(self, task: Task, say: Callable[[dict[str, Any]], None]) -> None:
        self.task, self._say = task, say
        self._end = time.monotonic() + task.seconds
        self.rig = rig_of(task.device)
        self.store = Store(self.rig)
        self._rounds = task.rounds if task.scale == "full" else SMALL_ROUNDS

    def run(self) -> None:
        """Every cell for which there is time; ends early once the device is lost."""
        known = {cell.id: cell for cell in chosen(None)}
        cells = [known[name] for name in self.task.cells]
        if self.task.first:
            self._say({"environment": environment(self.rig)})
            self._probe("before")
        wanted = (ours.weight_of(cell, sizes(cell, self.task.scale)) for cell in cells if not cell.is_peer)
        self.store.prefetch(dict.fromkeys(each for each in wanted if each is not None))
        try:
            for number, cell in enumerate(cells):
                if number and number % PROBE_EVERY == 0:
                    gc.collect()
                    self._probe(f"before cell {number}")
                if time.monotonic() > self._end - RESERVE:
                    break
                self._say({"begin": cell.id})
                row = self.measure(cell)
                self._say({"row": dataclasses.asdict(row)})
                if row.status == "failed" and (lost := self.rig.healthy()) is not None:
                    self._say({"lost": lost})
                    return
            self._probe("after")
            self._say({"done": True})
        finally:
            self.store.close()

    def _probe(self, moment: str) -> None:
        for probe in (probes.copy, probes.launch):
            if probe is probes.launch and moment not in ("before", "after"):
                continue
            try:
                found = probe(self.rig, moment, self.task.scale, 5)
            except Exception as error:  # a failed probe is reported, and the cells are measured all the same
                found = Probe(probe.__name__, moment, reason=_text(error))
            self._say({"probe": dataclasses.asdict(found)})
        self._say({"probe": dataclasses.asdict(clocks(self.rig, moment))})

    def measure(self, cell: Cell) -> Row:
        """One cell. Its exceptions become the row's reason."""
        began, size = time.monotonic(), sizes(cell, self.task.scale)
        row = Row(
            cell.id, cell.kind, cell.engine, size.n, size.k, size.m, "symbolic" if cell.symbolic else "static", "failed"
        )
        try:
            if cell.is_peer:
                self._peer(cell, row)
            elif cell.kind == "layer":
                from gpubench import program  # imports torch, which the other cells do without

                program.measure(self.rig, self.task.scale, row, self._rounds)
            else:
                self._kernel(cell, row)
        except Exception as error:  # the row reports it; the device's health is checked afterwards
            row.status, row.reason = "failed", _text(error)
        row.seconds = round(time.monotonic() - began, 3)
        return row

    def _kernel(self, cell: Cell, row: Row) -> None:
        work = ours.work_of(self.rig, self.store, cell, sizes(cell, self.task.scale))
        row.nbytes, row.operations, row.copies = work.nbytes, work.operations, work.copies
        row.path, row.kernel, row.tolerance = work.path, work.facts, work.tolerance
        work.poison()
        work.call(0)
        self.rig.synchronize()
        row.errors["eager"] = work.error()
        bits = work.output()
        row.calls = calls_of(work, self.task.scale)
        graph = self.rig.capture(lambda: [work.call(i) for i in range(row.calls)])
        try:
            row.nodes = dict(graph.shape.nodes)
            work.poison()
            self.rig.replay(graph)
            same = work.output() == bits
            row.errors["replay"] = row.errors["eager"] if same else work.error()
            self._judge(row, same=same)
            if row.status == "ok":
                seconds = self._timed(lambda: graph.launch(self.rig.stream))
                row.samples = [1e6 * each / row.calls for each in seconds or []]
        finally:
            graph.close()

    def _judge(self, row: Row, *, same: bool) -> None:
        assert row.tolerance is not None
        missed = [
            f"{mode}: error {error:.2e}, at most {row.tolerance:.0e} is right"
            for mode, error in row.errors.items()
            if error is None or not error <= row.tolerance
        ]
        if not same:
            missed.append("a replay gave other bits than an eager launch")
        row.status, row.reason = ("wrong", "; ".join(missed)) if missed else ("ok", "")

    def _timed(self, run: Callable[[], object]) -> list[float] | None:
        warm = self.rig.time(run, WARM)
        if warm is None:
            return None
        return self.rig.time(run, self._rounds if warm[-1] < 10 * REPLAY else min(self._rounds, FEW_ROUNDS))

    def _peer(self, cell: Cell, row: Row) -> None:
        try:
            from gpubench import peers

            place = peers.place_of(cell, self.rig.device)
            peer = peers.peer_of(cell, sizes(cell, self.task.scale), place, self.rig.cache)
            row.nbytes, row.operations, row.copies, row.path = peer.nbytes, peer.operations, peer.copies, peer.path
            row.tolerance, row.extra["place"] = peers.WRONG, place
            row.errors["eager"] = peer.error()
        except Exception as error:  # another project's kernel: any exception is the reason that it did not run
            row.status, row.reason = "not run", _text(error)
            if self.rig.healthy() is not None:
                row.status = "failed"
            return
        if place == "fake":
            row.status, row.reason = "ok", "arguments checked by torch's shape rules alone: nothing was computed"
            return
        self._judge(row, same=True)
        if row.status == "ok" and place == "cuda":
            row.calls = calls_of(peer, self.task.scale)
            row.samples = [1e6 * each / row.calls for each in peers.seconds(peer, row.calls, self._rounds)]


def calls_of(work: Any, scale: Scale) -> int:
    """Calls of a graph: at least one per copy, and enough for a replay of about `REPLAY` seconds."""
    if scale == "small":
        return SMALL_CALLS
    estimate = 2e-6 + max(work.nbytes / 4e12, work.operations / 5e14)
    return max(LEAST_CALLS, work.copies, min(MOST_CALLS, int(REPLAY / estimate)))


def _text(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {' '.join(lines[:3])[:400]}"


# --- the machine -----------------------------------------------------------------------------------------------------


def environment(rig: Rig) -> dict[str, Any]:
    """Device, packages, the compiler of cubins."""
    packages = {}
    for name in PACKAGES:
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            packages[name] = None
    return {
        **rig.environment(), "python": platform.python_version(), "machine": platform.machine(),
        "cores": os.cpu_count(), "packages": packages,
    }  # fmt: skip


def clocks(rig: Rig, moment: str) -> Probe:
    """`nvidia-smi`'s clocks, power and throttling; nothing is changed."""
    if rig.kind != "cuda":
        return Probe("clocks", moment, reason="no GPU")
    command = ["nvidia-smi", f"--query-gpu={CLOCKS}", "--format=csv,noheader", f"--id={rig.device.partition(':')[2]}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return Probe("clocks", moment, reason=_text(error))
    values = [each.strip() for each in done.stdout.splitlines()[0].split(",")]
    return Probe("clocks", moment, dict(zip(CLOCKS.split(","), values, strict=False)))


def main(task: dict[str, Any], descriptor: int) -> None:
    """Runs a task; messages go to the file descriptor."""
    with open(descriptor, "w", encoding="utf-8", closefd=True) as pipe:

        def say(message: dict[str, Any]) -> None:
            pipe.write(json.dumps(message) + "\n")
            pipe.flush()

        Worker(Task(**task), say).run()
