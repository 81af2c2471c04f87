"""The first numbers of a GPU, in one budget of time: linears, attention, norms, a decode step, and their peers.

    python benchmarks/gpu_first.py --json out.json --budget 300         # on cuda:0
    python benchmarks/gpu_first.py --json out.json --device sim:0 --only linear/nf4   # the same cells, small, no times
    python benchmarks/gpu_first.py --list                               # the cells, in the order of measuring
    python benchmarks/gpu_first.py --compile sm_90a                     # fills the cache of cubins; needs no GPU

Every cell is checked against float64 before it is timed: its output is poisoned, launched eagerly, captured, replayed.
Calls rotate through copies of the weight that exceed the L2 cache. Times are medians of rounds; the file keeps every
round, and is rewritten after each cell (benchmarks/gpubench/document.py describes it). Cells run in a process of their
own: a kernel that faults, crashes or hangs ends its cell, and a new process continues. A cell that fails is listed with
its error and does not end the run; cells for which there was no time are listed as left out.

Exit: 0 if anything was measured, even if cells failed; 0 with a message if there is no GPU; 1 if nothing could be
measured on a present device.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from gpubench.cells import Cell, Scale, chosen, sizes
from gpubench.document import Document, Probe, Row, commit, counted, write

HERE = Path(__file__).resolve().parent
PREDICTIONS = HERE / "predictions" / "h200.json"
BEGIN_LIMIT = 150.0
"""Seconds for a worker's start: imports, the context, the first probes."""

CELL_LIMIT = {"layer": 240.0}
USUAL_LIMIT = 60.0
MOST_RESTARTS = 12
TAIL = 4.0
"""Seconds of the budget that are reserved for the last writing."""


class Run:
    """One run: the document, and the remaining cells."""

    def __init__(self, arguments: argparse.Namespace, cells: Sequence[Cell]) -> None:
        self.arguments, self.end = arguments, time.monotonic() + arguments.budget
        self.began = self.limit = time.monotonic()
        self.left = [cell.id for cell in cells]
        self.cells = {cell.id: cell for cell in cells}
        self.predicted: dict[str, Any] = {}
        kind = kind_of(arguments.device)
        scale: Scale = "full" if kind == "gpu" and not arguments.small else "small"
        self.document = Document(
            kind=kind, device=arguments.device, timed=arguments.device.startswith("cuda"),
            scale=scale, commit=commit(), began=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            budget=arguments.budget,
        )  # fmt: skip
        self.rows: dict[str, Row] = {}

    # --- workers ---

    def all(self) -> None:
        """Starts workers, one after another, until every cell has its row or the time is over."""
        first = True
        while self.left and time.monotonic() < self.end - TAIL and len(self.document.restarts) < MOST_RESTARTS:
            if self.worker(first):
                break
            first = False
        self.save()

    def worker(self, first: bool) -> bool:
        """One worker over the remaining cells. True if it ended normally or for lack of time."""
        task = {
            "device": self.arguments.device, "scale": self.document.scale, "cells": self.left,
            "seconds": self.end - TAIL - time.monotonic(), "rounds": self.arguments.rounds, "first": first,
        }  # fmt: skip
        read, sent = os.pipe()
        process = subprocess.Popen(
            self.command(sent), stdin=subprocess.PIPE, pass_fds=(sent,), start_new_session=True
        )  # fmt: skip
        os.close(sent)
        assert process.stdin is not None
        process.stdin.write(json.dumps(task).encode())
        process.stdin.close()
        try:
            return self.listen(process, read)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            os.close(read)

    def command(self, sent: int) -> list[str]:
        """The command of a worker; it writes to the file descriptor `sent`."""
        return [sys.executable, "-P", str(HERE / "gpu_first.py"), "--worker", str(sent)]

    def listen(self, process: subprocess.Popen[bytes], read: int) -> bool:
        current: str | None = None
        self.limit = time.monotonic() + BEGIN_LIMIT
        for message in messages(read, lambda: min(self.limit, self.end)):
            if message is None:  # silence until the limit
                if time.monotonic() >= self.end - 0.5:
                    return True
                return self.ended(current, f"nothing was heard of it for {USUAL_LIMIT:.0f} s or more; it was killed")
            self.limit = time.monotonic() + USUAL_LIMIT
            if "begin" in message:
                current = str(message["begin"])
                self.limit = time.monotonic() + CELL_LIMIT.get(self.cells[current].kind, USUAL_LIMIT)
            elif "row" in message:
                self.keep(Row(**message["row"]))
                current = None
            elif "probe" in message:
                self.document.probes.append(Probe(**message["probe"]))
            elif "environment" in message:
                self.document.environment = message["environment"]
                self.expect()
            elif "lost" in message:
                self.document.restarts.append(f"the device was lost: {message['lost']}")
                return False
            elif "done" in message:
                return True
        return self.ended(current, f"the process ended with {process.wait()}")

    def ended(self, current: str | None, how: str) -> bool:
        """Handles a worker that crashed or hangs: its current cell has failed, a new worker takes the rest."""
        if current is None:
            self.document.restarts.append(f"outside of a cell: {how}")
            return False
        cell = self.cells[current]
        size = sizes(cell, self.document.scale)
        rows = "symbolic" if cell.symbolic else "static"
        self.keep(Row(cell.id, cell.kind, cell.engine, size.n, size.k, size.m, rows, "failed", how))
        self.document.restarts.append(f"at {current}: {how}")
        return False

    # --- the document ---

    def expect(self) -> None:
        """The frozen predictions, if they are for this GPU at these sizes; others do not apply."""
        found = known_predictions()
        gpu = str(self.document.environment.get("gpu", ""))
        if self.document.scale == "full" and found.get("device", "no device") in gpu:
            self.predicted, self.document.predictions = found["cells"], f"{found['device']}, {found['frozen']}"

    def keep(self, row: Row) -> None:
        row.predicted = self.predicted.get(row.id, {})
        self.rows[row.id] = row
        if row.id in self.left:
            self.left.remove(row.id)
        if row.status == "not run":
            self.document.peers_missing.setdefault(f"{row.engine} {row.kind}", row.reason)
        print(line(row), flush=True)
        self.save()

    def save(self) -> None:
        missing = [self.cells[name] for name in self.left]
        out = [Row(c.id, c.kind, c.engine, c.n, c.k, c.m, "symbolic" if c.symbolic else "static") for c in missing]
        order = {name: i for i, name in enumerate(self.cells)}
        self.document.cells = sorted([*self.rows.values(), *out], key=lambda row: order[row.id])
        self.document.seconds = round(time.monotonic() - self.began, 1)
        if self.arguments.json:
            write(self.document, self.arguments.json)


def messages(read: int, limit: Any) -> Iterator[dict[str, Any] | None]:
    """Messages of a pipe until it is closed; None if `limit()` passes before the next."""
    rest = b""
    while True:
        wait = max(0.0, limit() - time.monotonic())
        if not select.select([read], [], [], wait)[0]:
            yield None
            return
        data = os.read(read, 1 << 16)
        if not data:
            return
        *lines, rest = (rest + data).split(b"\n")
        for each in lines:
            yield json.loads(each)


def line(row: Row) -> str:
    """The printed line of one cell."""
    if row.median is None:
        errors = ", ".join(f"{mode} {error:.1e}" for mode, error in row.errors.items() if error is not None)
        return f"{row.status:8} {row.id:44} {errors} {row.reason}".rstrip()
    rate = row.nbytes / row.median / 1e3
    expected = row.predicted
    beside = f"  predicted {expected['low_us']:.1f} to {expected['high_us']:.1f}" if expected else ""
    return f"{row.status:8} {row.id:44} {row.median:10.2f} us  {rate:7.0f} GB/s{beside}"


def known_predictions() -> dict[str, Any]:
    """The frozen predictions; empty if there are none."""
    if not PREDICTIONS.exists():
        return {}
    found: dict[str, Any] = json.loads(PREDICTIONS.read_text(encoding="utf-8"))
    return found


def kind_of(device: str) -> str:
    """The kind of a device: a GPU, the simulated one, or a stub of the driver."""
    if not device.startswith("cuda"):
        return "sim"
    return "stub" if hasattr(ctypes.CDLL("libcuda.so.1"), "stub_calls") else "gpu"


def no_device(device: str) -> str | None:
    """Why nothing can be measured on `device`, or None."""
    try:
        from qcompiler.runtime.backends import registry

        registry.require(device)
    except Exception as error:  # no package, no driver, no such device: only the reason is needed
        return f"{type(error).__name__}: {error}"
    return None


def parsed(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="the document; written again after every cell")
    parser.add_argument("--budget", type=float, default=300.0, help="seconds for everything (default: 300)")
    parser.add_argument("--device", default="cuda:0", help="cuda:N, or sim:N for a run without times")
    parser.add_argument("--only", nargs="+", help="cells of these names, or whose names hold these texts")
    parser.add_argument("--small", action="store_true", help="the small sizes on a GPU, too")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--list", action="store_true", help="print the cells and exit")
    parser.add_argument("--compile", metavar="ARCH", help="compile every kernel for an architecture and exit")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="threads of --compile")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> int:
    arguments = parsed(given)
    if arguments.worker is not None:
        from gpubench import worker

        worker.main(json.load(sys.stdin), arguments.worker)
        return 0
    try:
        cells = chosen(arguments.only)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if arguments.list:
        print("\n".join(cell.id for cell in cells))
        return 0
    if arguments.compile:
        from gpubench import compiled

        return compiled.all_of(arguments.compile, cells, arguments.jobs)
    if (reason := no_device(arguments.device)) is not None:
        print(f"no GPU: {reason}; nothing was measured")
        if arguments.json:
            write(Document(device=arguments.device, reason=reason), arguments.json)
        return 0
    run = Run(arguments, cells)
    run.all()
    print(counted(run.document.cells), f"in {run.document.seconds:.0f} s")
    return 0 if any(row.status in ("ok", "wrong") for row in run.rows.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
