"""How long this machine takes for a linear in a format: measured with the kernel that a program would run.

    times = measured([Case(4096, 14336, "q4_K", "f32", rows=1, copies=9)], threads=2)     # nanoseconds for each

The kernel is the one that select-kernels chooses for a stored weight of that shape and that number of rows, without
bias and epilogue.  It multiplies by one copy of the weight after the other, so that a copy comes back to the caches
as cold as the weight of a model does (`copies_for`).  Each product is timed by itself.  A time is the median over the
copies of the best that each took: what else the machine does only takes away.

A time is kept in the user's cache, in `times/<digest>.json`.  The digest covers the processor's name, the number of
threads, the copies, the compiler with its flags, and the kernel's C++ text with all of its headers: an edit of a kernel
measures that kernel again, and no other one.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic

import numpy as np
import numpy.typing as npt

from qcompiler.config import parse_format
from qcompiler.formats import get
from qcompiler.formats.base import Bytes
from qcompiler.frontends.quantise.sensitivity import FLOAT
from qcompiler.inspect.machine import processor
from qcompiler.kernels import layouts
from qcompiler.kernels.cpu import emit
from qcompiler.kernels.select import LinearQuery, choose_linear, weight_layout
from qcompiler.plan.kernel import DType, KernelSpec, Operand
from qcompiler.plan.kinds.linear import LinearKernel
from qcompiler.plan.weights import NUMPY_DTYPES
from qcompiler.runtime.cache import cache_dir, keep
from qcompiler.runtime.code import load, read_record
from qcompiler.runtime.compiler import compile_code, cpu_flags, find_compiler
from qcompiler.runtime.encoder import encode
from qcompiler.runtime.isa import host_isa
from qcompiler.runtime.memory import Block
from qcompiler.runtime.profile_cpu import Figures, Step
from qcompiler.runtime.progress import Runs
from qcompiler.runtime.support import Context, parallel_address, profiler

VERSION = 2
"""Grows when a time is measured in another way."""

PASSES, MOST_PASSES = 7, 1000
SECONDS = 0.2
"""Passes over all copies, one that warms up besides: at least seven, and more until they took this long."""

TIMES_THE_CACHE = 2
"""Copies together take so many times the bytes of the last cache; then nothing is left of a copy when it comes back."""

UNKNOWN_CACHE = 32 << 20
"""The last cache of a system that does not tell its size."""

CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


@dataclass(frozen=True)
class Case:
    """A linear with a weight (n, k) in a format ("float": as it is in `dtype`), `rows` rows of x in `dtype`."""

    n: int
    k: int
    format: str
    dtype: DType
    rows: int
    copies: int

    def __str__(self) -> str:
        return f"{self.n} x {self.k} in {self.format}, {self.rows} row{'s' * (self.rows != 1)} of {self.dtype}"


def copies_for(nbytes: int, model_bytes: int) -> int:
    """The copies of a weight of `nbytes` that take as much memory as all weights of its model do, at least one.

    Twice the last cache is enough.  A model that fits into the caches runs from the caches, and so do its copies.
    `model_bytes` count as the next power of two, so that models of nearly one size share their times.
    """
    wanted = min(1 << max(model_bytes - 1, 0).bit_length(), TIMES_THE_CACHE * last_cache())
    return max(1, -(-wanted // max(nbytes, 1)))


def last_cache() -> int:
    """Bytes of the largest cache that the first processor reaches."""
    found = []
    for file in CACHES.glob("index*/size"):
        text = file.read_text().strip()
        if text[:-1].isdigit() and text[-1] in "KM":
            found.append(int(text[:-1]) << (10 if text[-1] == "K" else 20))
    return max(found, default=UNKNOWN_CACHE)


def measured(cases: Iterable[Case], threads: int) -> dict[Case, int]:
    """Nanoseconds of each case on so many threads: from the cache, or measured now with a progress bar.

    CompilerMissingError without a C++ compiler.
    """
    wanted = list(dict.fromkeys(cases))
    kernels = {case: _Kernel.of(case, threads) for case in wanted}
    found = {case: known for case, kernel in kernels.items() if (known := kernel.read()) is not None}
    missing = [case for case in wanted if case not in found]
    if not missing:
        return found
    with Runs("timing linears", [case.n * case.k for case in missing]) as progress:
        for case in missing:
            found[case] = kernels[case].measure()
            progress.step(case.n * case.k)
    return found


@dataclass(frozen=True)
class _Kernel:
    """A case with its kernel, and where its time is kept."""

    case: Case
    threads: int
    spec: KernelSpec
    isa: str
    source: str
    record: Path

    @staticmethod
    def of(case: Case, threads: int) -> _Kernel:
        isa, spec = host_isa(), _spec(case)
        source = emit.emit_kernels((spec,), isa)
        facts = [VERSION, processor(measure=False).name, threads, asdict(case), find_compiler().version, cpu_flags(isa)]
        digest = hashlib.sha256(json.dumps([*facts, source]).encode()).hexdigest()
        return _Kernel(case, threads, spec, isa, source, cache_dir("times") / f"{digest}.json")

    def read(self) -> int | None:
        """The time that was kept; None if there is none, or no time."""
        found = read_record(self.record).get("ns")
        return found if isinstance(found, int) and not isinstance(found, bool) and found > 0 else None

    def measure(self) -> int:
        """Measures the time and keeps it."""
        library = load(compile_code(self.source, self.isa, name="linear-time"))
        address = ctypes.cast(library[f"qk_{self.spec.name}"], ctypes.c_void_p).value or 0
        ns = _Walk(self, address).nanoseconds()
        name = processor(measure=False).name
        facts = {**asdict(self.case), "threads": self.threads, "processor": name, "isa": self.isa}
        keep(self.record, json.dumps({"ns": ns, "of": facts}).encode())
        return ns


class _Walk:
    """A pass over all copies of a weight, in the pool's floating-point state and on its threads."""

    def __init__(self, kernel: _Kernel, address: int) -> None:
        case, isa = kernel.case, kernel.isa
        kind = NUMPY_DTYPES[case.dtype]
        generator = np.random.default_rng(0)
        data = _packed(case, kernel.spec, generator)
        step = -(-data.size // 64) * 64  # each copy begins at a line of the caches
        self._weights = Block(step * case.copies)
        for number in range(case.copies):
            self._weights.bytes[step * number : step * number + data.size] = data
        self._x = generator.standard_normal((case.rows, case.k)).astype(np.float32).astype(kind)
        self._out = np.zeros((case.rows, case.n), kind)
        self._scratch = Block((stride := -(-max(64, emit.scratch_bytes(kernel.spec, isa)) // 64) * 64) * kernel.threads)
        self._context = Context(
            parallel=parallel_address(), scratch=self._scratch.address, scratch_stride=stride,
            num_threads=kernel.threads, error_kernel=-1,
        )  # fmt: skip
        self._operands = [
            (ctypes.c_void_p * 3)(self._x.ctypes.data, self._weights.address + step * number, self._out.ctypes.data)
            for number in range(case.copies)
        ]
        self._symbols = (ctypes.c_int64 * 1)()
        steps = [(address, ctypes.addressof(each), ctypes.addressof(self._symbols)) for each in self._operands]
        self._steps = (Step * case.copies)(*(Step(*each) for each in steps))
        self._figures = (Figures * case.copies)()
        self._call = profiler()

    def nanoseconds(self) -> int:
        """Of one product: the median over copies of the best of all passes."""
        self._pass()
        began, best = monotonic(), self._pass()
        for number in range(1, MOST_PASSES):
            if number >= PASSES and monotonic() - began > SECONDS:
                break
            best = np.minimum(best, self._pass())
        return max(1, round(float(np.median(best))))

    def _pass(self) -> npt.NDArray[np.int64]:
        """The nanoseconds of each copy's product."""
        at = [ctypes.addressof(each) for each in (self._steps, self._context, self._figures)]
        ctypes.memset(self._figures, 0, ctypes.sizeof(self._figures))  # the call adds to them
        failed = self._call(at[0], len(self._operands), at[1], at[2], False)
        assert not failed, "a linear reports no errors"
        return np.array([each.ns for each in self._figures])


def _spec(case: Case) -> KernelSpec:
    """x, w and out, as lower-to-rt makes them of a linear without bias and epilogue."""
    ref = None if case.format == FLOAT else parse_format(case.format)
    (chosen,) = choose_linear(LinearQuery(
        m=(case.rows, case.rows), n=case.n, k=case.k, x_dtype=case.dtype, out_dtype=case.dtype, format=ref,
        constant_weight=True, kind="cpu", isas=(host_isa(),),
    )).cases  # fmt: skip
    operands = (
        Operand(name="x", dtype=case.dtype, access="r", shape=(case.rows, case.k), strides=(case.k, 1)),
        Operand(name="w", dtype=case.dtype, access="r", shape=(case.n, case.k), format=ref,
                layout=weight_layout("cpu", ref)),
        Operand(name="out", dtype=case.dtype, access="w", shape=(case.rows, case.n), strides=(case.n, 1)),
    )  # fmt: skip
    body = LinearKernel(m=case.rows, n=case.n, k=case.k, m_class=chosen.m_class, has_bias=False)
    return KernelSpec(name="timed", symbols=(), operands=operands, body=body)


def _packed(case: Case, spec: KernelSpec, generator: np.random.Generator) -> Bytes:
    """The bytes that the kernel reads of a weight of normal numbers."""
    values = generator.standard_normal((case.n, case.k), np.float32)
    operand = spec.operands[1]
    fmt = None if operand.format is None else get(operand.format.name, **operand.format.params)
    canonical = encode(fmt, values).data if fmt else values.astype(NUMPY_DTYPES[case.dtype]).view(np.uint8).reshape(-1)
    return layouts.get(str(operand.layout)).pack(fmt, case.dtype, case.n, case.k, canonical)


__all__ = ["Case", "copies_for", "last_cache", "measured"]
