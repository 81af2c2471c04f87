"""Calls of compiled kernels, and the limits of the machine beside them (qcompiler/runtime/limits.py)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from qcompiler.kernels.cpu import emit
from qcompiler.plan.kernel import KernelSpec
from qcompiler.runtime.bf16_units import bf16_units
from qcompiler.runtime.compiler import compile_library
from qcompiler.runtime.int8_units import int8_units
from qcompiler.runtime.isa import host_isa
from qcompiler.runtime.limits import Limits, middle, probes_text
from qcompiler.runtime.support import Context, parallel_address

CLOCK_PROCESS_CPUTIME_ID = 2

CALLS = r"""
extern "C" double qb_call(qc_kernel kernel, qc_ctx* ctx, void* const* op, const int64_t* sym, int64_t times) {
    const double start = seconds();
    for (int64_t i = 0; i < times; i++) kernel(ctx, op, sym);
    return (seconds() - start) / times;
}

// The kernels of `steps`, one after another, for each of `copies` sets of operands.
extern "C" double qb_pass(const qc_kernel* kernels, int64_t steps, qc_ctx* ctx, void* const* const* op,
                          const int64_t* sym, int64_t copies) {
    const double start = seconds();
    for (int64_t copy = 0; copy < copies; copy++)
        for (int64_t step = 0; step < steps; step++) kernels[step](ctx, op[copy * steps + step], sym);
    return seconds() - start;
}
"""


def aligned(data: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """A copy of bytes that begins at a multiple of 64."""
    buffer = np.zeros(data.size + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    buffer[start : start + data.size] = data
    return buffer[start : start + data.size]


class Bench:
    """The compiled kernels of all cases, a context on the runtime's pool, and the probes.

    With `cpu_time` clocks count the processor time of the process.  `isa` and `units` (of runtime/int8_units.py) are by
    default those of the environment; `before` is text in front of the kernels."""

    def __init__(
        self, specs: Sequence[KernelSpec], threads: int, *, cpu_time: bool = False, isa: str | None = None,
        units: int | None = None, before: str = "",
    ) -> None:  # fmt: skip
        isa = isa or host_isa()
        self.units = int8_units(isa) if units is None else units
        self.bf16 = bf16_units(isa)
        unique = tuple({spec.name: spec for spec in specs}.values())
        source = before + emit.emit_kernels(unique, isa) + probes_text() + CALLS
        self.library = ctypes.CDLL(str(compile_library(source, isa, name="bench-linear")))
        for probe in ("qb_call", "qb_pass", "qb_fp32", "qb_bf16", "qb_int8", "qb_read"):
            getattr(self.library, probe).restype = ctypes.c_double
        scratch = max([64, *(emit.scratch_bytes(spec, isa) for spec in unique)])
        self.stride = -(-scratch // 64) * 64
        self.use_threads(threads)
        if cpu_time:
            ctypes.c_int.in_dll(self.library, "qb_clock").value = CLOCK_PROCESS_CPUTIME_ID
        self.memory = np.ones(64 << 20, np.float32)

    def use_threads(self, threads: int) -> None:
        """Runs kernels and probes on so many threads from now on."""
        self.scratch = aligned(np.zeros(self.stride * threads, np.uint8))
        self.context, self.dots = self._context(threads, self.bf16), self._context(threads, 0)

    def _context(self, threads: int, bf16: int) -> Context:
        return Context(
            parallel=parallel_address(), scratch=self.scratch.ctypes.data, scratch_stride=self.stride,
            num_threads=threads, error_kernel=-1, int8_units=self.units, bf16_units=bf16,
        )  # fmt: skip

    def peak(self) -> float:
        """Operations per second of fused multiply-adds of fp32."""
        return float(self.library.qb_fp32(ctypes.byref(self.context)))

    def bandwidth(self) -> float:
        """Bytes per second."""
        pointer = ctypes.c_void_p(self.memory.ctypes.data)
        return float(self.library.qb_read(ctypes.byref(self.context), pointer, ctypes.c_int64(self.memory.size)))

    def limits(self, rounds: int = 3) -> Limits:
        """The medians of all probes."""
        return middle([self._limits() for _ in range(rounds)])

    def _limits(self) -> Limits:
        context = ctypes.byref(self.context)
        bf16, int8 = (float(probe(context)) or None for probe in (self.library.qb_bf16, self.library.qb_int8))
        return Limits(self.bandwidth(), self.peak(), bf16, int8)

    def caller(
        self, spec: KernelSpec, arrays: Sequence[npt.NDArray[Any]], symbols: Sequence[int], *, dots: bool = False
    ) -> Callable[[int], float]:
        """`call(times)` returns the seconds of one call; the operands stay the same. `dots`: as with `QC_BF16=dots`."""
        kernel = ctypes.cast(self.library[f"qk_{spec.name}"], ctypes.c_void_p)
        operands = (ctypes.c_void_p * len(arrays))(*(a.ctypes.data for a in arrays))
        values = (ctypes.c_int64 * len(symbols))(*symbols)

        def call(times: int) -> float:
            keep = arrays  # the addresses above point into them
            context = ctypes.byref(self.dots if dots else self.context)
            found = self.library.qb_call(kernel, context, operands, values, ctypes.c_int64(times))
            del keep
            return float(found)

        return call

    def passes(
        self,
        specs: Sequence[KernelSpec],
        copies: Sequence[Sequence[Sequence[npt.NDArray[Any]]]],
        symbols: Sequence[int],
    ) -> Callable[[], float]:
        """`call()` returns the seconds of a pass: for each copy the kernels in order, each with its own operands."""
        kernels = (ctypes.c_void_p * len(specs))(*(self._address(spec) for spec in specs))
        flat = [[a.ctypes.data for a in arrays] for copy in copies for arrays in copy]
        lists = [(ctypes.c_void_p * len(each))(*each) for each in flat]
        operands = (ctypes.c_void_p * len(lists))(*(ctypes.addressof(each) for each in lists))
        values = (ctypes.c_int64 * len(symbols))(*symbols)
        counts = ctypes.c_int64(len(specs)), ctypes.c_int64(len(copies))

        def call() -> float:
            keep = copies, lists  # the addresses above point into them
            context = ctypes.byref(self.context)
            found = self.library.qb_pass(kernels, counts[0], context, operands, values, counts[1])
            del keep
            return float(found)

        return call

    def _address(self, spec: KernelSpec) -> int:
        return ctypes.cast(self.library[f"qk_{spec.name}"], ctypes.c_void_p).value or 0
