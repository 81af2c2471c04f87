"""Compiles emitted kernels and calls them through ctypes, on one or two real threads."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qcompiler.kernels.cpu.emit import emit_kernels, header, scratch_bytes
from qcompiler.plan.kernel import KernelSpec
from qcompiler.runtime import sanitize
from qcompiler.runtime.amx import BF16_FLAGS, INT8_FLAGS, tiles_refused
from qcompiler.runtime.compiler import find_compiler, flags_for, optimisation
from qcompiler.runtime.isa import cpuinfo_flags

CPU_FLAGS = {"x86-64": "sse2", "x86-64-v3": "avx2", "x86-64-v4": "avx512bw"}
ISAS = tuple(CPU_FLAGS) if platform.machine() == "x86_64" else ("generic",)
PARALLEL = r"""
#include <pthread.h>
// Two threads take tasks from one counter; thread 0 owns the first scratch area, thread 1 the second. Two take the last
// task first, one takes the first: of two tasks that write the same element, another one then has the last word.
struct pool { qc_task fn; void* arg; char* scratch; int64_t tasks, stride; int64_t next; bool falling; };
extern "C" { int64_t test_tasks; }
struct worker { pool* p; int id; };
static void* work(void* arg) {
    worker* w = (worker*)arg;
    for (;;) {
        const int64_t t = __atomic_fetch_add(&w->p->next, 1, __ATOMIC_RELAXED);
        if (t >= w->p->tasks) return 0;
        w->p->fn(w->p->arg, w->p->falling ? w->p->tasks - 1 - t : t, w->p->scratch + w->id * w->p->stride);
    }
}
extern "C" void test_parallel(struct qc_ctx* ctx, int64_t tasks, qc_task fn, void* arg) {
    test_tasks = tasks;
    pool p = {fn, arg, ctx->scratch, tasks, ctx->scratch_stride, 0, ctx->num_threads > 1};
    worker w[2] = {{&p, 0}, {&p, 1}};
    pthread_t other;
    const bool two = ctx->num_threads > 1 && pthread_create(&other, 0, work, &w[1]) == 0;
    work(&w[0]);
    if (two) pthread_join(other, 0);
}
"""


class Context(ctypes.Structure):
    """qc_ctx of abi.h."""

    _fields_ = [
        ("parallel", ctypes.c_void_p), ("pool", ctypes.c_void_p), ("scratch", ctypes.c_void_p),
        ("scratch_stride", ctypes.c_int64), ("num_threads", ctypes.c_int32), ("error_code", ctypes.c_int32),
        ("error_value", ctypes.c_int64), ("error_limit", ctypes.c_int64), ("error_kernel", ctypes.c_int32),
        ("int8_units", ctypes.c_int32), ("bf16_units", ctypes.c_int32),
    ]  # fmt: skip


def level_for(isa: str, source: str) -> str:
    """-O3, which users get. The short run keeps it for one in 16 sources for the widest vectors of this machine.

    No result depends on the level.  Which sources depends on their text alone, so that libraries can be kept.
    """
    widest = next(name for name in reversed(ISAS) if runnable(name))
    chosen = hashlib.sha256(source.encode()).digest()[0] % 16 == 0
    return "-O3" if isa == widest and chosen else optimisation()


def compile_source(source: str, isa: str, folder: Path, level: str | None = None) -> ctypes.CDLL:
    sanitized = sanitize.flags()  # they say -O0, which then decides
    sanitize.require_runtime()
    level = level or level_for(isa, source)
    compiler = find_compiler()
    key = "\0".join((isa, level, compiler.version, str(sanitized), source))
    digest = hashlib.sha256(key.encode()).hexdigest()[:16]
    library = folder / f"{digest}.so"
    if not library.exists():
        cpp, made = folder / f"{digest}.{os.getpid()}.cpp", folder / f"{digest}.{os.getpid()}.so"
        cpp.write_text(source)
        users = [level if flag.startswith("-O") else flag for flag in flags_for(isa)]
        flags = ["-DQC_TASK_COST=500", *users, "-Wall", *sanitized]
        # GCC 12 warns about its own intrinsics' undefined registers.
        command = [*compiler.command, *flags, "-Werror", "-Wno-maybe-uninitialized", "-Wno-uninitialized", str(cpp)]
        done = subprocess.run(
            [*command, "-o", str(made), "-lm", "-lpthread"], capture_output=True, text=True, check=False,
            env=sanitize.compiler_environment(),
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[:4000]
        made.replace(library)
        cpp.unlink()
    return ctypes.CDLL(str(library))


class Kernels:
    """A compiled set of specs. `run` calls one of them on NumPy arrays (bases of the operands), in place."""

    def __init__(self, specs: Sequence[KernelSpec], isa: str, folder: Path, before: str = "") -> None:
        self.specs = {spec.name: spec for spec in specs}
        self.isa = isa
        self.int8_units = self.bf16_units = 0
        self.source = before + emit_kernels(tuple(specs), isa)
        self.library = compile_source(self.source + PARALLEL, isa, folder)

    def context(self, scratch: int, threads: int) -> tuple[Context, Any]:
        """A context whose scratch is full of NaNs, and the memory to keep alive."""
        stride = max(64, -(-scratch // 64) * 64)
        memory = np.full(stride * threads + 64 + 64, 0xFF, np.uint8)
        base = -(-memory.ctypes.data // 64) * 64
        parallel = ctypes.cast(self.library.test_parallel, ctypes.c_void_p)
        return Context(parallel, None, base, stride, threads, 0, 0, 0, -1, self.int8_units, self.bf16_units), memory

    def run(self, name: str, operands: Sequence[Any], symbols: Sequence[int] = (), threads: int = 1) -> Context:
        """Returns the context, for the error fields. An operand is an array (its first element's address is passed)."""
        context, memory = self.context(scratch_bytes(self.specs[name], self.isa), threads)
        addresses = (ctypes.c_void_p * max(len(operands), 1))(*(array.ctypes.data for array in operands))
        values = (ctypes.c_int64 * max(len(symbols), 1))(*symbols)
        function = self.library[f"qk_{name}"]
        function.restype = None
        function(ctypes.byref(context), addresses, values)
        guard = memory[context.scratch - memory.ctypes.data + context.scratch_stride * threads :]
        assert (guard == 0xFF).all(), f"{name} wrote behind its scratch"
        return context

    def run_both(self, name: str, operands: Callable[[], Sequence[Any]], symbols: Sequence[int] = ()) -> Sequence[Any]:
        """Runs on one and on two threads over fresh operands, demands equal bits, and returns the first operands."""
        one, two = operands(), operands()
        self.run(name, one, symbols, threads=1)
        self.run(name, two, symbols, threads=2)
        for a, b in zip(one, two, strict=True):
            assert a.tobytes() == b.tobytes(), f"{name} depends on the number of threads"
        return one


def runnable(isa: str) -> bool:
    if isa == "generic":
        return True
    return CPU_FLAGS[isa] in Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")


@pytest.fixture(scope="session")
def build_folder() -> Path:
    """Of libraries by the digest of all that decides them: a kernel that nobody edited is not compiled again."""
    folder = Path(__file__).resolve().parents[2] / "build" / "test-kernels"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _choices() -> list[Any]:
    """The narrowest vectors wait for the full run where the machine has wider ones: a library is compiled for each."""
    narrow = [pytest.mark.slow] if "x86-64-v3" in ISAS and runnable("x86-64-v3") else []
    return [pytest.param(name, marks=narrow if name == "x86-64" else []) for name in ISAS]


@pytest.fixture(scope="session", params=_choices())
def isa(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if not runnable(name):
        pytest.skip(f"this CPU cannot run {name}")
    return name


@pytest.fixture(scope="session")
def build(build_folder: Path) -> Callable[[Sequence[KernelSpec], str], Kernels]:
    """``build(specs, isa)`` compiles once per distinct source."""
    return lambda specs, isa: Kernels(specs, isa, build_folder)


VNNI_FLAGS = {"avx512_vnni", "avx512vbmi"}
INT8_ENGINES: dict[str, tuple[str, set[str], str, int]] = {
    "vex": ("x86-64-v3", {"avx512vl", "avx512_vnni"}, "#define QI_EVEX 1\n", 0),
    "model": ("x86-64-v4", VNNI_FLAGS, Path(__file__).with_name("amx_model.h").read_text(), 2),
    "amx": ("x86-64-v4", VNNI_FLAGS | {*INT8_FLAGS}, "", 2),
}
"""Engines of int8.h that not every processor has: AVX-VNNI's product in the EVEX encoding of AVX-512, AMX on a model of
its tiles, and AMX itself. (ISA, what the processor needs, text before the kernels, `int8_units`.)"""


@pytest.fixture(scope="session", params=INT8_ENGINES)
def int8_engine(request: pytest.FixtureRequest, build_folder: Path) -> Callable[[Sequence[KernelSpec]], Kernels]:
    """``int8_engine(specs)`` compiles kernels that use one of these engines."""
    isa, needs, before, units = INT8_ENGINES[request.param]
    if lacks := needs - (cpuinfo_flags(Path("/proc/cpuinfo")) or frozenset()):
        pytest.skip(f"this processor lacks {', '.join(sorted(lacks))}")
    if request.param == "amx" and (why := tiles_refused(INT8_FLAGS)) is not None:
        pytest.skip(why)

    def compiled(specs: Sequence[KernelSpec]) -> Kernels:
        kernels = Kernels(specs, isa, build_folder, before)
        kernels.int8_units = units
        return kernels

    return compiled


TILES_OF_BF16 = {
    "model": ({"avx512_bf16"}, Path(__file__).with_name("amx_model.h").read_text()),
    "processor": ({*BF16_FLAGS}, ""),
}
"""Tiles of bf16: what the processor needs, text before the kernels."""


@pytest.fixture(scope="session", params=TILES_OF_BF16)
def bf16_tiles(request: pytest.FixtureRequest, build_folder: Path) -> Callable[[Sequence[KernelSpec]], Kernels]:
    """``bf16_tiles(specs)`` compiles kernels that multiply bf16 by tiles of AMX, or of a model of it."""
    needs, before = TILES_OF_BF16[request.param]
    if lacks := needs - (cpuinfo_flags(Path("/proc/cpuinfo")) or frozenset()):
        pytest.skip(f"this processor lacks {', '.join(sorted(lacks))}")
    if request.param == "processor" and (refused := tiles_refused(BF16_FLAGS)) is not None:
        pytest.skip(refused)

    def compiled(specs: Sequence[KernelSpec]) -> Kernels:
        kernels = Kernels(specs, "x86-64-v4", build_folder, before)
        kernels.bf16_units = 1
        return kernels

    return compiled


@pytest.fixture(scope="session")
def compile_text(build_folder: Path) -> Callable[[str, str, str], ctypes.CDLL]:
    """``compile_text(source, isa, level)``: any C++ text behind the common headers."""
    common = "\n".join(header(name) for name in ("abi.h", "task.h", "vec.h", "vmath.h", "scalar.h", "rows.h"))
    return lambda source, isa, level: compile_source(common + source, isa, build_folder, level)


@pytest.fixture(scope="session")
def harness() -> Any:
    """This module: `Context` and `compile_source` for tests that call more than one kernel."""
    return sys.modules[__name__]
