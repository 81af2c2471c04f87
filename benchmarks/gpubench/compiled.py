"""Compiles the kernels of gpu_first.py and gpu_profile.py without a device: cubins to bring along.

Every kernel becomes a module of its own, as the benchmark loads it.  Its record in the cache (`plans/`) is found
without NVRTC on the machine that runs it, and with any version of NVRTC.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from gpubench import ours, probes, profiled
from gpubench.cells import Cell, Scale, sizes
from gpubench.rig import plan_of
from qcompiler.errors import QCompilerError
from qcompiler.plan.kernel import KernelSpec
from qcompiler.runtime.nvrtc import build_module, compiler_version

SCALES: tuple[Scale, ...] = ("full", "small")


def specs(cells: Sequence[Cell]) -> dict[str, KernelSpec]:
    """The kernels of cells at their full sizes, of profiled cells at both scales, and of the probes, by name."""
    every: list[tuple[Cell, Scale]] = [(cell, "full") for cell in cells]
    every += [(cell, "small") for cell in profiled.KERNELS.values()]
    wanted = [ours.spec_of(cell, sizes(cell, at)) for cell, at in every if not cell.is_peer and cell.kind != "layer"]
    return {spec.name: spec for spec in (probes.tiny_spec(), *wanted)}


def all_of(arch: str, cells: Sequence[Cell], jobs: int) -> int:
    """Compiles all of them for `arch`; 1 if one does not compile."""
    began, wanted = time.monotonic(), specs(cells)
    compiler_version(arch)  # imports the compiler's bindings, which threads must not do at the same time

    def one(spec: KernelSpec) -> str | None:
        try:
            build_module(plan_of(spec), arch)
        except QCompilerError as error:
            return f"{spec.name}: {error}"
        return None

    with ThreadPoolExecutor(jobs) as pool:
        failed = [each for each in pool.map(one, wanted.values()) if each]
    if any(cell.kind == "layer" for cell in cells):
        from gpubench import program

        for scale in SCALES:
            program.compiled("cuda:0", scale, targets=[arch])
    print("\n".join(failed))
    print(f"{len(wanted) - len(failed)} kernels for {arch} in {time.monotonic() - began:.0f} s; {len(failed)} failed")
    return 1 if failed else 0
