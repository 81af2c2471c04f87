"""Ctrl-C at a chosen bytecode: SIGINT becomes pending at the n-th bytecode that Python executes from `armed(n)` on.

A trace function in C does it: one in Python could not, since Python delivers a pending signal at the next call, which
would be one of the trace function's own.  Python then delivers the signal where it delivers signals: so every n is a
moment at which a true Ctrl-C can come, and all n together are all such moments.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

SOURCE = r"""
extern "C" {
struct object;
extern object _Py_TrueStruct;
int PyObject_SetAttrString(void*, const char*, object*);
void PyErr_SetInterrupt(void);
typedef int (*tracer)(void*, void*, int, void*);
void PyEval_SetTrace(tracer, void*);
long armed_at, seen;
int hook(void*, void* frame, int what, void*) {
    if (what == 0) PyObject_SetAttrString(frame, "f_trace_opcodes", &_Py_TrueStruct);  // a call
    if (what == 7 && ++seen == armed_at) PyErr_SetInterrupt();                           // a bytecode
    return 0;
}
void arm(long at) { armed_at = at; seen = 0; PyEval_SetTrace(hook, 0); }
long disarm(void) { PyEval_SetTrace(0, 0); return seen; }
}
"""


@functools.cache
def _library() -> ctypes.PyDLL:
    folder = Path(tempfile.mkdtemp(prefix="qc-interrupting-"))
    (folder / "hook.cpp").write_text(SOURCE)
    compiler = shutil.which("g++") or shutil.which("c++") or "c++"
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(folder / "hook.so"), str(folder / "hook.cpp")]
    subprocess.run(command, check=True)
    library = ctypes.PyDLL(str(folder / "hook.so"))
    shutil.rmtree(folder)
    library.arm.argtypes, library.disarm.restype = (ctypes.c_long,), ctypes.c_long
    return library


@contextlib.contextmanager
def armed(at: int) -> Iterator[list[int]]:
    """Around what is to be interrupted at its bytecode `at` (0: never). The list gets the number that were executed."""
    library, seen = _library(), []
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores SIGINT
    library.arm(at)
    try:
        yield seen
    finally:
        seen.append(library.disarm())
        signal.signal(signal.SIGINT, before)


def count(action: Callable[[], object]) -> int:
    """How many bytecodes an action takes."""
    with armed(0) as seen:
        action()
    return seen[0]


def interrupt_at(action: Callable[[], object], at: int) -> bool:
    """Whether KeyboardInterrupt came out of the action, or after it."""
    try:
        with armed(at):
            action()
            for _ in range(100):  # pending at the very end: it comes now
                len([])
    except KeyboardInterrupt:
        return True
    return False


def places(total: int, most: int) -> list[int]:
    """At most so many bytecodes of `total`, evenly spread, and each of the last ones (where things are given back)."""
    if total <= most:
        return list(range(1, total + 1))
    step = total / (most - most // 4)
    spread = {1 + round(number * step) for number in range(most - most // 4)}
    return sorted({at for at in spread if at <= total} | set(range(total - most // 4, total + 1)))
