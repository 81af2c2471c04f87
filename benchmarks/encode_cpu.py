"""GB of fp32 input that encoders process per second, compiled and NumPy's, beside ggml's C code and reading memory.

    python benchmarks/encode_cpu.py [--formats nf4 q4_K …] [--threads 2] [--rounds 5] [--ggml LIBRARY] [--json FILE]

The input is 64 MiB of normal weights (NumPy and ggml get as many of its rows as take them about half a second).  All
encoders run in turn on the same number of threads, each thread over its share of the rows; the table gives medians of
rounds.  `compiled` and `read` (of 256 MiB) are per second of wall time, the rest per second of processor time, summed
over threads.  On an idle machine, wall time is processor time divided by the number of threads; on a busy machine only
processor time is meaningful.

The peer is ggml's `quantize_*`, the code of `llama-quantize`: from the library of an installed llama_cpp package (pip
install llama-cpp-python), or from any that exports these functions (`--ggml`).
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qcompiler import formats
from qcompiler.formats.ggml import GgmlFormat
from qcompiler.runtime import encoder
from qcompiler.runtime.isa import host_isa

ROWS, COLS = 4096, 4096
READ_BYTES = 1 << 28
FORMATS = (
    "nf4", "fp4", "int8", "int4", "int3", "int2", "llm_int8", "fp8_e4m3", "fp8_e5m2", "mxfp4", "mxfp8", "nvfp4",
    "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "mxfp4_ggml", "q2_K", "q3_K", "q4_K", "q5_K", "q6_K", "iq4_nl", "iq4_xs",
    "tq2_0",
)  # fmt: skip

Values = npt.NDArray[Any]
Engine = Callable[[int], object]
"""Encodes that many rows on all threads."""


def find_ggml(given: str | None) -> ctypes.CDLL | None:
    """The library with ggml's quantisers, or None."""
    if given is not None:
        return ctypes.CDLL(given)
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or not spec.submodule_search_locations:
        return None
    found = sorted(Path(spec.submodule_search_locations[0]).glob("lib/*ggml-base*"))
    return ctypes.CDLL(str(found[0])) if found else None


def engines(
    name: str, weights: Values, importance: Values | None, threads: int, ggml: ctypes.CDLL | None
) -> dict[str, Engine]:
    """The encoders to time for a format, by name."""
    fmt = formats.get(name)
    out = np.zeros(fmt.nbytes(*weights.shape), np.uint8)
    tiles = encoder.tile_encoder(fmt, encoder.WORTH_COMPILING)
    assert tiles is not None, "there is no compiler here"

    def run(rows: int, compiled: bool) -> object:
        room = out[: fmt.nbytes(rows, COLS)]
        return fmt.encode(
            weights[:rows], out=room, threads=threads, importance=importance, tiles=tiles if compiled else None
        )

    found: dict[str, Engine] = {"compiled": lambda rows: run(rows, True), "numpy": lambda rows: run(rows, False)}
    function = getattr(ggml, "quantize_" + name.removesuffix("_ggml"), None)
    if isinstance(fmt, GgmlFormat) and function is not None:
        found["ggml"] = _ggml(function, fmt, weights, importance, threads, out)
    return found


def _ggml(
    function: Any, fmt: formats.Format, weights: Values, importance: Values | None, threads: int, out: Values
) -> Engine:
    function.restype = ctypes.c_size_t
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)
    of_row = fmt.nbytes(1, COLS)
    given = None if importance is None else importance.ctypes.data

    def run(rows: int) -> None:
        share = -(-rows // threads)
        with ThreadPoolExecutor(threads) as pool:
            for first in range(0, rows, share):
                source, target = weights.ctypes.data + first * COLS * 4, out.ctypes.data + first * of_row
                pool.submit(function, source, target, min(share, rows - first), COLS, given)

    return run


def read_memory(memory: Values, threads: int) -> float:
    """Bytes per second when reading memory that is in no cache."""
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(np.bitwise_or.reduce, np.array_split(memory[:4096], threads)))  # starts the threads
        began = time.perf_counter()
        list(pool.map(np.bitwise_or.reduce, np.array_split(memory, threads)))
        return memory.nbytes / (time.perf_counter() - began)


def measure(
    name: str, weights: Values, importance: Values | None, ggml: ctypes.CDLL | None, memory: Values, options: Any
) -> dict[str, Any]:
    """GB/s of each engine, and of reading, for one format."""
    ran = engines(name, weights, importance, options.threads, ggml)
    rows: dict[str, int] = {}
    for engine, run in ran.items():
        run(64)  # page in, and measure the time
        began = time.perf_counter()
        run(64)
        fitting = int(64 * 0.5 / (time.perf_counter() - began)) // 64 * 64
        rows[engine] = ROWS if engine == "compiled" else min(ROWS, max(64, fitting))
    wall: dict[str, list[float]] = {engine: [] for engine in ran}
    busy: dict[str, list[float]] = {engine: [] for engine in ran}
    reads = []
    for _ in range(options.rounds):
        reads.append(read_memory(memory, options.threads) / 1e9)
        for engine, run in ran.items():
            began, used = time.perf_counter(), time.process_time()
            run(rows[engine])
            nbytes = rows[engine] * COLS * 4 / 1e9
            wall[engine].append(nbytes / (time.perf_counter() - began))
            busy[engine].append(nbytes / (time.process_time() - used))
    found = {"read": statistics.median(reads), "importance": importance is not None}
    for engine in ran:
        found |= {engine: statistics.median(wall[engine]), f"{engine}_cpu": statistics.median(busy[engine])}
    return {"format": name, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--formats", nargs="+", default=FORMATS)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ggml", help="a library that exports ggml's quantize_* functions")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    ggml = find_ggml(options.ggml)
    if ggml is None:
        print("no column for ggml: no llama_cpp package is installed, and --ggml names no library")
    rng = np.random.default_rng(0)
    weights = (0.02 * rng.standard_normal((ROWS, COLS), np.float32)).astype(np.float32)
    importance = rng.exponential(1, COLS).astype(np.float32)
    memory = np.ones(READ_BYTES // 8, np.uint64)
    load = os.getloadavg()[0]
    print(f"{host_isa()}, {options.threads} threads, load {load:.1f}; GB of fp32 input per second\n")
    print(f"{'':<24}{'wall time':>18}{'processor time':>27}")
    columns = ("compiled", "read", "compiled", "numpy", "ggml", "to ggml")
    print(f"{'format':<12}{'importance':<12}" + "".join(f"{column:>9}" for column in columns))
    results = []
    for name in options.formats:
        for given in (None, importance) if formats.get(name).takes_importance else (None,):
            row = measure(name, weights, given, ggml, memory, options)
            results.append(row)
            peer = f"{row['ggml_cpu']:>9.3f}{row['compiled_cpu'] / row['ggml_cpu']:>9.1f}" if "ggml" in row else ""
            print(
                f"{name:<12}{'yes' if given is not None else '':<12}{row['compiled']:>9.2f}{row['read']:>9.1f}"
                f"{row['compiled_cpu']:>9.2f}{row['numpy_cpu']:>9.3f}{peer}",
                flush=True,
            )
    if options.json is not None:
        machine = {"machine": platform.processor() or platform.machine(), "isa": host_isa()}
        settings = {"threads": options.threads, "rounds": options.rounds, "load": load}
        options.json.write_text(json.dumps({**machine, **settings, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
