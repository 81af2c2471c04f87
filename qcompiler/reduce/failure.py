"""How a case fails, and when two failures are the same one.

Two failures are the same if these are equal:

* the kind: an error, a wrong answer (`verify_each="numerics"`), the end by a signal, a hang, or no memory;
* the pass in which it happened, or `reading` for the IR itself;
* of an error, its class, the class of the error that caused it, the first line of its message without names, numbers,
  types and quoted text, and for a Python exception that nobody meant to raise the function that raised it;
* of a wrong answer, the first line of the message without numbers;
* of a signal, its number.

Every case runs in a forked child, so that a crash, a hang or a changed global of one says nothing about the next.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import re
import resource
import select
import signal
import time
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NoReturn

from qcompiler.errors import NumericsError, QCompilerError
from qcompiler.reduce.case import Case

ROOM = 8 << 30
"""Bytes of address space that a child may take beyond those that it starts with."""

SLICE = 0.5
"""Seconds of one wait for a child."""

_NOISE = (
    (re.compile(r"\"[^\"]*\"|'[^']*'|`[^`]*`"), "''"),
    (re.compile(r"[%@][\w.$-]+"), "%"),
    (re.compile(r"\b\w+(?:\.\w+)+(?=[<: ])|![\w.]+"), "…"),
)
_NUMBER = re.compile(r"[-+]?(?:\binf\b|\bnan\b|\d[\w.]*(?:[eE][-+]?\d+)?)")


@dataclass(frozen=True)
class Failure:
    """`kind`, `where` and `what` say which failure it is; `message` is for people, and may differ."""

    kind: str
    where: str
    what: str
    message: str = field(compare=False, default="")

    def __str__(self) -> str:
        first = self.message.partition("\n")[0].rstrip(": ")
        where = "while the IR was verified" if self.where == READING else f"in {self.where}"
        return f"{self.kind} {where}: {first}" if first else f"{self.kind} {where}"


READING = "reading"


def observe(case: Case, seconds: float) -> Failure | None:
    """How the case fails, or None. It runs in a child that has so many seconds."""
    read, write = os.pipe()
    gc.freeze()  # the child shares what it does not write
    pid = os.fork()
    if pid == 0:
        os.close(read)
        _run(case, write, seconds)
    os.close(write)
    try:
        said, ended = _listen(read, seconds)
    except BaseException:
        _kill(pid)
        raise
    finally:
        os.close(read)
        gc.unfreeze()
    if not ended:
        _kill(pid)
        return Failure("hang", _where(said), "", f"longer than {seconds:g} s")
    return _judged(said, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def _listen(read: int, seconds: float) -> tuple[list[dict[str, str]], bool]:
    """What the child said, a line of JSON each, and whether it ended in time."""
    text, left = b"", seconds
    while left > 0:
        began = time.monotonic()
        ready = select.select([read], [], [], min(left, SLICE))[0]
        # Whoever stops this process (Ctrl-Z, a debugger) stops the child as well: that time is not the child's.
        left -= min(time.monotonic() - began, 2 * SLICE)
        if ready:
            part = os.read(read, 1 << 16)
            if not part:
                return _lines(text), True
            text += part
    return _lines(text), False


def _lines(text: bytes) -> list[dict[str, str]]:
    """Whole lines only: a child that is killed may leave a part of one."""
    return [json.loads(line) for line in text.split(b"\n")[:-1]]


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def _where(said: list[dict[str, str]]) -> str:
    """The pass that had begun last."""
    begun = [each["pass"] for each in said if "pass" in each]
    return begun[-1] if begun else READING


def _judged(said: list[dict[str, str]], status: int) -> Failure | None:
    for each in said:
        if "kind" in each:
            return Failure(**each)
    if status == 0:
        return None
    if status < 0:
        name = signal.Signals(-status).name
        return Failure("signal", _where(said), name, f"the process ended by {name}")
    return Failure("exit", _where(said), str(status), f"the process ended with status {status}")


# --- in the child ----------------------------------------------------------------------------------------------------


def _run(case: Case, write: int, seconds: float) -> NoReturn:
    """Runs the case and says how it failed; never returns, whatever happens."""
    status = 3
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, which then kills this process
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(10 * int(seconds) + 600)  # if the parent is killed; long, since a stopped process counts as well
        nowhere = os.open(os.devnull, os.O_RDWR)
        for standard in (0, 1, 2):  # what a crash prints is noise here
            os.dup2(nowhere, standard)
        faulthandler.disable()  # as is what Python prints, to a descriptor of its own
        _limit_memory()
        failure = _attempt(case, write)
        if failure is not None:
            _say(write, asdict(failure))
        status = 0
    finally:
        os._exit(status)


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").exists() else 0
    if pages:
        limit = pages * resource.getpagesize() + ROOM
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _say(write: int, what: dict[str, str]) -> None:
    os.write(write, json.dumps(what).encode() + b"\n")


def _attempt(case: Case, write: int) -> Failure | None:
    """Runs the passes one by one, and says before each that it begins: a crash says nothing itself."""
    running = READING
    run = case.run

    def begins(name: str) -> None:
        nonlocal running
        running = name
        _say(write, {"pass": name})

    try:
        run(begins)
    except MemoryError as error:
        return Failure("no memory", running, "", _short(error))
    except NumericsError as error:
        return Failure("wrong answer", running, _bare(str(error)), _short(error))
    except Exception as error:
        return Failure("error", running, _identity(error), f"{type(error).__name__}: {_short(error)}")
    return None


def _short(error: BaseException) -> str:
    return str(error)[:2000]


def _identity(error: BaseException) -> str:
    """The part of an error that says which one it is."""
    root = error
    while root.__cause__ is not None:
        root = root.__cause__
    classes = type(error).__name__ + (f" of {type(root).__name__}" if root is not error else "")
    parts = [classes, _bare(str(error))]
    if not isinstance(root, QCompilerError):
        frame = traceback.extract_tb(root.__traceback__)[-1]
        parts.append(f"{Path(frame.filename).name}:{frame.name}")
    for attribute in ("rule", "finding", "code"):
        if (value := getattr(error, attribute, None)) is not None:
            parts.append(f"{attribute} {value}")
    return "; ".join(parts)


def _bare(message: str) -> str:
    """The first line of a message without what differs from model to model."""
    text = _without_types(message.partition("\n")[0])
    for pattern, instead in _NOISE:
        text = pattern.sub(instead, text)
    return _NUMBER.sub("#", text)[:500]


def _without_types(text: str) -> str:
    """The text without what stands in angle brackets and square brackets, nested ones included."""
    kept, depth = [], 0
    for character in text:
        if character in "<[":
            depth += 1
        elif character in ">]" and depth:
            depth -= 1
        elif not depth:
            kept.append(character)
    return "".join(kept)


__all__ = ["READING", "Failure", "observe"]
