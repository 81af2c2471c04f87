"""The processes of `make gpu-check`: pytest on a file, the matrix' workers, any other program; and the time they have.

Each has its own process group, and a limit that the budget shortens. Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DEVICE_CASES = "cuda:0"
SANITIZER_ERROR = 99
STOPPED = 124  # what `run` gives for a process that ran out of time
NOTHING_SELECTED = 5  # pytest's exit code
LOST = 77  # matrix_worker.LOST: the CUDA context is gone
SILENCE = 90.0
"""Seconds without a line after which a matrix worker hangs: compiling eight kernels and their twins takes ten."""
PYTEST_LIMIT, TOOL_LIMIT = 420.0, 900.0


def working(name: str) -> Path:
    """A file of this check's own, by its process: two checks of one tree (on a GPU and on the simulated one) are apart."""
    folder = ROOT / "build" / "gpu-reports" / str(os.getpid())
    folder.mkdir(parents=True, exist_ok=True)
    return folder / name


class Clock:
    """The time that is left: all of it without a budget of seconds."""

    def __init__(self, budget: float | None, began: float | None = None) -> None:
        self.end = None if budget is None else (time.monotonic() if began is None else began) + budget

    def limit(self, wanted: float) -> float:
        """Seconds that a step may take, `wanted` at most; 0 or less where none are left."""
        return wanted if self.end is None else min(wanted, self.end - time.monotonic())

    def within(self, budget: float | None) -> Clock:
        """A clock that ends when this one does, or after `budget` seconds from now."""
        made = Clock(budget)
        made.end = min((end for end in (self.end, made.end) if end is not None), default=None)
        return made


def run(command: Sequence[str], env: dict[str, str], limit: float) -> tuple[int, str, float]:
    """(exit code, output, seconds); `STOPPED` after the time limit, with what was written until then."""
    began = time.monotonic()
    with tempfile.TemporaryFile() as output:
        process = start(command, env, output)
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            end(process)
            code = STOPPED
        _running.discard(process)
        output.seek(0)
        text = output.read().decode(errors="replace")
    if code == STOPPED:
        text += f"\nstopped after {limit:.0f} s"
    return code, text, time.monotonic() - began


_running: set[subprocess.Popen[bytes]] = set()


def start(command: Sequence[str], env: dict[str, str], output: Any) -> subprocess.Popen[bytes]:
    """In a group of its own, and not in a session of its own: what ends the caller's session ends it too."""
    process = subprocess.Popen(
        command, env=env, cwd=ROOT / "build", stdout=output, stderr=subprocess.STDOUT, process_group=0
    )
    _running.add(process)
    return process


def end_all() -> None:
    """Every process that is running, for whoever is ended by a signal."""
    for process in tuple(_running):
        end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """The process and what it started."""
    with contextlib.suppress(ProcessLookupError):  # it ended just now
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


# --- pytest ----------------------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """What a JUnit report says."""

    counts: dict[str, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    learned: list[dict[str, str]] = field(default_factory=list)


def read_report(report: Path) -> Outcome:
    """Outcomes of a JUnit report; one failure where pytest did not live to write one, or not to its end."""
    try:
        root = ET.parse(report).getroot()
    except (OSError, ET.ParseError):
        return Outcome(failures=["the process died before its report"])
    found = Outcome({"passed": 0, "failed": 0, "skipped": 0})
    for case in root.iter("testcase"):
        wrong = next((child for child in case if child.tag in ("failure", "error")), None)
        skipped = case.find("skipped") is not None
        learned = [each.get("value") or "{}" for each in case.iter("property") if each.get("name") == "learned"]
        found.learned += [json.loads(each) for each in learned]
        counted = "failed" if wrong is not None else "skipped" if skipped and not learned else "passed"
        found.counts[counted] += 1
        if wrong is not None:
            first = (wrong.get("message") or "").strip().splitlines()[:1]
            found.failures.append(f"{case.get('name')}: {first[0][:200] if first else wrong.tag}")
    return found


@dataclass(frozen=True)
class Suite:
    """The tests of one file that `-k words` and `-m marks` choose."""

    file: Path
    words: str = DEVICE_CASES
    marks: str = ""

    @property
    def name(self) -> str:
        rest = self.words.removeprefix(DEVICE_CASES).removeprefix(" and ")
        return f"{self.file.parent.name}/{self.file.stem}" + (f" ({rest})" if rest and rest != self.words else "")


class Steps:
    """Makes the schema's steps of processes. `learned` collects what they learned."""

    def __init__(self, schema: ModuleType, env: dict[str, str], clock: Clock) -> None:
        self.schema, self.env, self.clock = schema, env, clock
        self.learned: list[Any] = []

    def left_out(self, part: str, name: str, how: str) -> Any:
        """A step for which the budget left no time."""
        failures = [f"left out: {how}, the budget is spent"]
        return self.schema.Step(part, name, True, 0.0, failures=failures, left_out=True)

    def pytest(
        self, part: str, suite: Suite, prefix: Sequence[str] = (), tool: str = "", expected: Sequence[str] = ()
    ) -> Any:
        """The suite in a process of its own: a kernel that faults takes its process' context with it.

        None where the file has no such test and is not `expected` to have one.
        """
        share = re.sub(r"\W+", "-", f"{suite.words}{suite.marks}")
        report = working(f"{tool or 'suite'}-{suite.file.stem}-{suite.file.parent.name}-{share}.xml")
        report.unlink(missing_ok=True)
        command = [*prefix, sys.executable, "-P", "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "--rootdir"]
        command += [str(ROOT), "-q", "-p", "no:cacheprovider", "-k", suite.words]
        command += [*(["-m", suite.marks] if suite.marks else []), f"--junitxml={report}", str(suite.file)]
        name = f"{tool}: {suite.file.stem}" if tool else suite.name
        wanted = TOOL_LIMIT if tool else PYTEST_LIMIT
        limit = self.clock.limit(wanted)
        if limit <= 0:
            return self.left_out(part, name, "not begun")
        code, output, seconds = run(command, self.env, limit)
        if code == STOPPED and limit < wanted:
            return self.left_out(part, name, f"stopped after {seconds:.0f} s")
        if code == NOTHING_SELECTED:
            if suite.file not in [ROOT / each for each in expected]:
                return None
            return self.schema.Step(part, name, False, seconds, failures=[f"no test matches {suite.words!r}"])
        found = read_report(report)
        self.learned += [self.schema.Learned(**each) for each in found.learned]
        if tool and code == SANITIZER_ERROR:
            found.failures += [line for line in output.splitlines() if "ERROR SUMMARY" in line]
        kept = "" if code == 0 else output[-6000:]
        return self.schema.Step(part, name, code == 0, seconds, found.counts, found.failures, kept)

    def program(self, part: str, name: str, command: Sequence[str], wanted: float) -> tuple[Any, str]:
        """(step, output) of any other program."""
        limit = self.clock.limit(wanted)
        if limit <= 0:
            return self.left_out(part, name, "not begun"), ""
        code, output, seconds = run(command, self.env, limit)
        if code == STOPPED and limit < wanted:
            return self.left_out(part, name, f"stopped after {seconds:.0f} s"), output
        return self.schema.Step(part, name, code == 0, seconds, output="" if code == 0 else output[-6000:]), output


# --- the matrix ------------------------------------------------------------------------------------------------------


class Matrix:
    """The matrix' workers. A process that ends early is followed by another, which goes on behind the case it met.

    `notify` is called every few seconds while there is something new in `failures`, `kernels` and `modules`.
    """

    def __init__(self, schema: ModuleType, env: dict[str, str], clock: Clock, notify: Callable[[], None]) -> None:
        self.schema, self.env, self.clock, self.notify = schema, env, clock, notify
        self.failures: list[Any] = []
        self.kernels: list[Any] = []
        self.modules: list[dict[str, Any]] = []
        self.references: dict[str, int] = {}
        self.silence = SILENCE
        self._lock = threading.Lock()

    def share(self, part: str, device: str, number: int, count: int, options: Sequence[str]) -> Any:
        """One of `count` shares, to its end."""
        name = f"gpu/matrix ({number + 1} of {count})"
        lines = working(f"matrix-{number}-{count}.jsonl")
        lines.unlink(missing_ok=True)
        command = [sys.executable, "-P", str(ROOT / "tests/gpu/matrix_worker.py"), "--device", device]
        command += ["--share", str(number), str(count), "--lines", str(lines), *options]
        began, progress, outputs = time.monotonic(), -1, ""
        reader = _Lines(lines, self)
        while True:
            code, output = self._process(command, reader)
            outputs += output
            if code == 0:
                break
            stuck = len(reader.seen) == progress
            progress = len(reader.seen)
            if code == STOPPED and self.clock.limit(1.0) <= 0:
                step = Steps(self.schema, self.env, self.clock).left_out(part, name, "stopped")
                step.counts, step.seconds = reader.counts, time.monotonic() - began
                return step
            why = "it ran without end" if code == STOPPED else f"its process ended with {code}"
            if code != LOST:
                reader.died(f"{why}: {output.strip()[-600:]}")
            if stuck:  # no case was begun: the next process would end as this one did
                failures = [f"the process ends with {code} before its first case"]
                return self.schema.Step(
                    part, name, False, time.monotonic() - began, reader.counts, failures, outputs[-6000:]
                )
        ok = not reader.counts["failed"]
        failures = [f"{each.kernel} ({each.mode}): {each.reason[:150] or each.error}" for each in reader.failed]
        return self.schema.Step(part, name, ok, time.monotonic() - began, reader.counts, failures, outputs[-3000:])

    def _process(self, command: Sequence[str], reader: _Lines) -> tuple[int, str]:
        if self.clock.limit(1.0) <= 0:
            return STOPPED, ""
        with tempfile.TemporaryFile() as output:
            process = start(command, self.env, output)
            heard = time.monotonic()
            while (code := process.poll()) is None:
                time.sleep(0.1)
                with self._lock:
                    news = reader.read()
                if news:
                    heard = time.monotonic()
                    self.notify()
                if self.clock.limit(1.0) <= 0 or time.monotonic() - heard > self.silence:
                    end(process)
                    code = STOPPED
                    break
            _running.discard(process)
            with self._lock:
                reader.read()
            output.seek(0)
            return code, output.read().decode(errors="replace")


class _Lines:
    """What a share's file says so far."""

    def __init__(self, file: Path, into: Matrix) -> None:
        self.file, self.into = file, into
        self.seen: dict[str, str] = {}  # case -> the mode that it began
        self.ended: set[str] = set()
        self.failed: list[Any] = []
        self.counts = {"passed": 0, "failed": 0, "skipped": 0}
        self._at = 0

    def read(self) -> bool:
        """Takes the lines that are new."""
        if not self.file.exists():
            return False
        with self.file.open("rb") as file:
            file.seek(self._at)
            new = file.read()
        new = new[: new.rfind(b"\n") + 1]
        self._at += len(new)
        for line in new.decode().splitlines():
            self._take(json.loads(line))
        return bool(new)

    def _take(self, data: dict[str, Any]) -> None:
        if "module" in data:
            self.into.modules.append(data)
        elif "mode" in data:
            self.seen[data["case"]] = data["mode"]
        else:
            self.seen.setdefault(data["case"], "eager")
            self._end(data)

    def _end(self, data: dict[str, Any]) -> None:
        self.ended.add(data["case"])
        named = {"template": data["template"], "format": data["format"], "shape": data["shape"]}
        failed = [self.into.schema.Failure(**named, kernel=data["case"], **each) for each in data["failures"]]
        if how := data.get("reference"):
            self.into.references[how] = self.into.references.get(how, 0) + 1
        self.failed += failed
        self.into.failures += failed
        self.counts["failed" if failed else "passed"] += 1
        if not failed:
            self.into.kernels.append(
                self.into.schema.Kernel(**named, kernel=data["case"], error=data["error"], bits=data["bits"])
            )

    def died(self, why: str) -> None:
        """A failure of the case that had begun when its process ended."""
        for case in [each for each in self.seen if each not in self.ended]:
            template = re.sub(r"_[0-9a-f]{8}\Z", "", case)
            data = {"case": case, "template": template, "format": "", "shape": "", "error": None, "bits": False}
            self._end({**data, "failures": [{"mode": self.seen[case], "reason": why}]})
