"""Inputs in forked children: everything is imported once, and an input that crashes or hangs ends its child alone.

time      SECONDS of processor time for each thing that is done with an input, by a kernel timer (SIGPROF ends the
          child, also inside of C code); the parent kills a child that sleeps
memory    the growth of resident memory over an input, by the kernel's high-water mark, which is reset before; less the
          pages of files that came in and stayed, since the first input to enter a library reads its pages (27 MB of
          torch, and more after the kernel took them back from an idle process)
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import re
import resource
import select
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from filefuzz.documents import Files
from filefuzz.targets import TARGETS, FuzzFinding, Steps, Target

SECONDS = 5.0
"""Processor time that one thing that is done with an input may take."""
ASLEEP = 60.0
"""Seconds of the clock after which a child is taken to wait for something that does not come."""
BATCH = 128
HEADROOM = 3 << 30
"""Address space of a child beyond what it has: protects the machine, not the promise."""


@dataclass
class Outcome:
    """`kind` is "refused", "accepted" or a finding's: "exception", "hang", "asleep", "crash", "memory", "message".

    `where` is the class of a finding: type and place.
    """

    kind: str
    where: str = ""
    detail: str = ""
    seconds: float = 0.0
    nbytes: int = 0
    messages: list[str] = field(default_factory=list)

    @property
    def found(self) -> bool:
        return self.kind not in ("refused", "accepted")


def run(target: str, inputs: Sequence[Files], batch: int = BATCH) -> list[Outcome]:
    """The outcome of each input."""
    found: list[Outcome] = []
    if not gc.get_freeze_count():  # what is there now is never looked at again: children would copy all of its pages
        gc.collect()
        gc.freeze()
    while len(found) < len(inputs):
        found += _child(TARGETS[target], inputs[len(found) : len(found) + batch])
    return found


# --- the parent ------------------------------------------------------------------------------------------------------


def _child(target: Target, inputs: Sequence[Files]) -> list[Outcome]:
    """Outcomes of as many inputs as one child came through, the one that ended it included."""
    reader, writer = os.pipe()
    with tempfile.TemporaryFile() as log:
        pid = os.fork()
        if not pid:
            _serve(target, inputs, reader, writer, log.fileno())
        os.close(writer)
        lines, asleep = _lines(reader, pid)
        _, status = os.waitpid(pid, 0)
        os.close(reader)
        log.seek(0)
        trace = log.read().decode("utf-8", "replace")
    found = [Outcome(**line) for line in lines]
    if len(found) < len(inputs):
        found.append(_ended(status, trace, asleep))
    return found


def _lines(reader: int, pid: int) -> tuple[list[dict[str, Any]], bool]:
    lines: list[dict[str, Any]] = []
    rest = b""
    while True:
        ready, _, _ = select.select([reader], [], [], ASLEEP)
        if not ready:
            os.kill(pid, signal.SIGKILL)
            return lines, True
        data = os.read(reader, 1 << 16)
        if not data:
            return lines, False
        *complete, rest = (rest + data).split(b"\n")
        lines += [json.loads(line) for line in complete]


def _ended(status: int, trace: str, asleep: bool) -> Outcome:
    if asleep:
        return Outcome("asleep", "asleep", trace[-2000:])
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    kind = "hang" if number == signal.SIGPROF else "crash"
    name = signal.Signals(number).name if number else f"exit {os.waitstatus_to_exitcode(status)}"
    return Outcome(kind, f"{name} in {_place_of_trace(trace)}", trace[-4000:])


def _place_of_trace(trace: str) -> str:
    """Of faulthandler's text (innermost first) the first frame of ours."""
    for file, number, name in re.findall(r'File "([^"]+)", line (\d+) in (\S+)', trace):
        if ours := _ours(file):
            del number
            return f"{ours}:{name}"
    return "unknown"


def _ours(file: str) -> str | None:
    """The path inside of the package, or None for a file of others."""
    match = re.search(r"/(qcompiler|passes|kernels|runtime)/([\w/]+\.py)$", file)
    return None if match is None or "site-packages" in file.replace("build/site", "") else f"{match[1]}/{match[2]}"


# --- the child -------------------------------------------------------------------------------------------------------


def _serve(target: Target, inputs: Sequence[Files], reader: int, writer: int, log: int) -> None:
    """Runs the inputs, a line of JSON for each, and ends the process."""
    status = 1
    try:
        os.close(reader)
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(nothing, descriptor)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGPROF):
            signal.signal(number, signal.SIG_DFL)
        faulthandler.enable(log)
        faulthandler.register(signal.SIGPROF, log, all_threads=False, chain=True)
        size = _status("VmSize") + HEADROOM
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        for outcome in _outcomes(target, inputs):
            os.write(writer, json.dumps(asdict(outcome)).encode() + b"\n")
        status = 0
    except BaseException:
        os.write(log, traceback.format_exc().encode())
    finally:
        os._exit(status)


def _outcomes(target: Target, inputs: Sequence[Files]) -> Iterator[Outcome]:
    for files in inputs:
        with tempfile.TemporaryDirectory(prefix="qc-fuzz-") as name:
            folder = Path(name) / "input"
            place(files, folder)
            yield _measured(target, folder, sum(len(data) for data in files.values()))


def place(files: Files, folder: Path) -> None:
    """Writes the files of an input."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, data in files.items():
        if isinstance(data, str):
            (folder / name).symlink_to(data)
        else:
            (folder / name).write_bytes(data)


def _measured(target: Target, folder: Path, size: int) -> Outcome:
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    before, files = _status("VmRSS"), _status("RssFile")
    began = resource.getrusage(resource.RUSAGE_SELF)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    outcome = _attempt(target, folder)
    signal.setitimer(signal.ITIMER_PROF, 0)
    ended = resource.getrusage(resource.RUSAGE_SELF)
    outcome.seconds = ended.ru_utime + ended.ru_stime - began.ru_utime - began.ru_stime
    outcome.nbytes = _status("VmHWM") - before - max(_status("RssFile") - files, 0)
    if not outcome.found and outcome.nbytes > target.base + target.times * size:
        limit = target.base + target.times * size
        detail = f"{outcome.nbytes:,} bytes for {size:,} (limit {limit:,}); {outcome.messages[:1]}"
        return Outcome("memory", "memory", detail, outcome.seconds, outcome.nbytes)
    return outcome


def _attempt(target: Target, folder: Path) -> Outcome:
    step = Steps(lambda: signal.setitimer(signal.ITIMER_PROF, SECONDS))
    try:
        target.run(folder, step)
    except FuzzFinding as error:
        return Outcome("message", f"message of {_place(error.__cause__ or error)}", str(error))
    except BaseException as error:
        try:
            text = str(error)[:500]
        except Exception:
            text = "?"
        trace = "".join(traceback.format_exception(error, limit=-12))[-6000:]
        return Outcome("exception", f"{type(error).__name__} in {_place(error)}", f"{text}\n{trace}")
    return Outcome("refused" if step.refused else "accepted", messages=step.messages[:3])


def _place(error: BaseException) -> str:
    """The innermost frame of ours in an error's traceback, file and function."""
    place = "unknown"
    for frame in traceback.extract_tb(error.__traceback__):
        if ours := _ours(frame.filename):
            place = f"{ours}:{frame.name}"
    return place


def _status(name: str) -> int:
    text = Path("/proc/self/status").read_text()
    return int(text.split(f"{name}:")[1].split()[0]) * 1024
