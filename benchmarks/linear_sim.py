"""The cost of the simulated GPU: one 512 x 512 linear, compiled for sim:0 and run with every access checked.

    python benchmarks/linear_sim.py                 # checked
    QC_SIM_CHECK=0 python benchmarks/linear_sim.py  # without access checks

`first` is the time to load a program file with a cold kernel cache and to run it once: emitting, the host compiler, the
run.  `run` is the median of later calls.  Seconds; they show what tests cost, and nothing about a GPU.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from statistics import median

import torch

import qcompiler as qc

SIZE, ROUNDS = 512, 5


def measure(quant: str, dtype: torch.dtype, m: int, file: Path) -> tuple[float, float]:
    """(first, run) of one linear."""
    torch.manual_seed(0)
    model = torch.nn.Linear(SIZE, SIZE).to(dtype)
    x = torch.randn(m, SIZE).to(dtype)
    qc.qcompile(model, (x,), quant=quant, device="cuda:0", targets=["sm_80"]).save(file)
    began = time.perf_counter()
    program = qc.load(file, device="sim:0")
    program(x)
    first = time.perf_counter() - began
    times = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        program(x)
        times.append(time.perf_counter() - began)
    return first, median(times)


def main() -> None:
    checked = os.environ.get("QC_SIM_CHECK") != "0"
    print(f"{SIZE} x {SIZE} on sim:0, {'checked' if checked else 'unchecked'}")
    print("format  dtype     M    first s    run s")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["QC_CACHE_DIR"], os.environ["QC_QUIET"] = folder, "1"
        warm = torch.nn.Linear(32, 32)
        qc.qcompile(warm, (torch.randn(1, 32),), device="sim:0")(torch.randn(1, 32))  # builds the simulator itself
        for quant in ("nf4", "int4", "int8"):
            for dtype, m in ((torch.float32, 1), (torch.float32, 8), (torch.bfloat16, 16), (torch.bfloat16, 128)):
                first, run = measure(quant, dtype, m, Path(folder, "linear.qca"))
                print(f"{quant:6}  {str(dtype)[6:]:8} {m:3}  {first:8.2f} {run:8.3f}")


if __name__ == "__main__":
    main()
