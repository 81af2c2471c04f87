"""Linear kernels on a GPU beside torch's bf16 matmul (cuBLAS), per shape and M, in one interleaved run.

    python benchmarks/linear_cuda.py [--rounds 15] [--m 1 16 …] [--format nf4 …] [--json out.json]

Each engine is a CUDA graph of many calls that cycle through copies of the weight larger than the L2 cache together, so
that weights come from memory as they do in a model.  Every round replays each engine once; the table gives medians, the
bytes that a call must move (weight, input, output) per second, their share of what a device-to-device copy moves in the
same run, and the speed relative to torch.  Results are checked against the decoded weight before they are timed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from qcompiler import formats
from qcompiler.kernels import layouts
from qcompiler.kernels.cuda import emit
from qcompiler.plan.dims import Dim
from qcompiler.plan.kernel import FormatRef, KernelSpec, LinearKernel, Operand
from qcompiler.plan.plan import Plan
from qcompiler.runtime.backends.cuda import CudaBackend

SHAPES = ((4096, 4096), (11008, 4096))
MS = (1, 4, 16, 64, 512, 2048)
FORMATS: dict[str, dict[str, Any]] = {"nf4": {"block": 64}, "int4": {"group": 32}, "int8": {}}
LAYOUT = "cuda_t16_v1"
LEAST_CALLS = 8
PROBE_BYTES = 1 << 30
HEAD = (
    f"{'N x K':>11} {'M':>5} {'engine':>10} {'path':>7} {'us':>8} {'GB/s':>7} {'of copy':>8} {'TFLOP/s':>8} "
    f"{'x torch':>8}"
)


def m_class(m: int) -> Any:
    return "1" if m == 1 else "2-8" if m <= 8 else "9-64" if m <= 64 else "large"


def linear_spec(kind: str, m: int, n: int, k: int) -> KernelSpec:
    """A bf16 linear for one class of M, without bias."""
    rows: Dim = 1 if m == 1 else "m"

    def plain(name: str, shape: tuple[Dim, ...], access: Any) -> Operand:
        return Operand(name=name, dtype="bf16", access=access, shape=shape, strides=(shape[1], 1))

    packed = FormatRef(name=kind, params=FORMATS[kind])
    w = Operand(name="w", dtype="bf16", access="r", shape=(n, k), format=packed, layout=LAYOUT)
    body = LinearKernel(m=rows, n=n, k=k, m_class=m_class(m), has_bias=False)
    name = f"{kind}_{n}_{k}_{m_class(m).replace('-', '_')}"
    operands = (plain("x", (rows, k), "r"), w, plain("out", (rows, n), "w"))
    return KernelSpec(name=name, symbols=() if m == 1 else ("m",), operands=operands, body=body)


@dataclass
class Weight:
    """One weight: copies of its packed bytes on the device, and its decoded values (bf16, rows x columns)."""

    copies: list[Any]
    decoded: Any

    @property
    def nbytes(self) -> int:
        return int(self.copies[0].nbytes)


def copies_of(tensor: Any, cache: int) -> list[Any]:
    """The tensor and clones of it, more than twice the cache together."""
    count = max(1, min(64, -(-2 * cache // tensor.nbytes)))
    return [tensor, *(tensor.clone() for _ in range(count))]


def make_weight(kind: str, n: int, k: int, cache: int) -> Weight:
    fmt = formats.get(kind, **FORMATS[kind])
    w = np.random.default_rng(0).standard_normal((n, k)).astype(np.float32) / np.float32(k**0.5)
    packed = fmt.encode(w)
    data = torch.from_numpy(layouts.get(LAYOUT).pack(fmt, "bf16", n, k, packed.data)).cuda()
    return Weight(copies_of(data, cache), torch.from_numpy(fmt.decode(packed)).cuda().bfloat16())


class Engine:
    """A graph of `calls` calls."""

    def __init__(self, name: str, call: Callable[[int], None], calls: int, nbytes: int) -> None:
        self.name, self.calls, self.nbytes = name, calls, nbytes
        self.times: list[float] = []
        call(0)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for i in range(calls):
                call(i)
        self.graph.replay()
        torch.cuda.synchronize()

    def time(self) -> None:
        """One replay, in seconds per call."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self.graph.replay()
        end.record()
        end.synchronize()
        self.times.append(start.elapsed_time(end) / 1e3 / self.calls)

    @property
    def seconds(self) -> float:
        return statistics.median(self.times)


class Bench:
    """Our kernels on the current device, and torch's."""

    def __init__(self, kinds: Sequence[str], ms: Sequence[int]) -> None:
        index = torch.cuda.current_device()
        torch.cuda.init()
        self.backend = CudaBackend(index)
        self.cache = torch.cuda.get_device_properties(index).L2_cache_size
        chosen = {(kind, n, k, m_class(m)): linear_spec(kind, m, n, k) for kind in kinds for n, k in SHAPES for m in ms}
        self.specs = chosen
        plan = Plan(
            devices=(), streams=(), events=(), arenas=(), buffers=(), kernels=tuple(chosen.values()), entries=()
        )
        self.kernels = self.backend.load(plan, self.backend.build(plan))

    def ours(self, kind: str, m: int, n: int, k: int, weight: Weight, x: Any) -> Engine:
        spec = self.specs[kind, n, k, m_class(m)]
        kernel, out = self.kernels[spec.name], torch.empty((m, n), dtype=torch.bfloat16, device=x.device)
        symbols = () if m == 1 else (m,)

        def call(i: int) -> None:
            w = weight.copies[i % len(weight.copies)]
            addresses = (x.data_ptr(), w.data_ptr(), out.data_ptr())
            self.backend.launch(self.backend.caller_stream(), kernel, addresses, symbols)

        engine = Engine(kind, call, max(LEAST_CALLS, len(weight.copies)), weight.nbytes + x.nbytes + out.nbytes)
        want = x.float() @ weight.decoded.float().T
        error = float((out.float() - want).norm() / want.norm())
        if not error < 5e-3:
            raise SystemExit(f"{kind} at M = {m}, {n} x {k}: relative error {error:.2e} against the decoded weight")
        return engine

    def torchs(self, weights: list[Any], x: Any) -> Engine:
        out = torch.empty((x.shape[0], weights[0].shape[0]), dtype=x.dtype, device=x.device)

        def call(i: int) -> None:
            torch.mm(x, weights[i % len(weights)].T, out=out)

        nbytes = weights[0].nbytes + x.nbytes + out.nbytes
        return Engine("torch bf16", call, max(LEAST_CALLS, len(weights)), nbytes)

    def copying(self) -> Engine:
        """Device to device; bytes read and written."""
        source = torch.empty(PROBE_BYTES, dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)

        def call(i: int) -> None:
            del i
            target.copy_(source)

        return Engine("copy", call, 4, 2 * PROBE_BYTES)


def rows(bench: Bench, kinds: Sequence[str], n: int, k: int, ms: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    weights = {kind: make_weight(kind, n, k, bench.cache) for kind in kinds}
    plain = copies_of(next(iter(weights.values())).decoded, bench.cache)
    copy = bench.copying()
    found = []
    for m in ms:
        x = torch.randn((m, k), device="cuda").bfloat16()
        engines = [bench.torchs(plain, x), *(bench.ours(kind, m, n, k, weights[kind], x) for kind in kinds)]
        for turn in range(rounds + 2):
            for engine in (*engines, copy) if turn % 2 else (copy, *reversed(engines)):
                engine.time()
            if turn == 1:  # warm: the clocks are up
                for engine in (*engines, copy):
                    engine.times.clear()
        found += [row(engine, engines[0], copy, m, n, k, bench) for engine in engines]
    return found


def row(engine: Engine, torchs: Engine, copy: Engine, m: int, n: int, k: int, bench: Bench) -> dict[str, Any]:
    rate = engine.nbytes / engine.seconds
    spec = bench.specs.get((engine.name, n, k, m_class(m)))
    return {
        "n": n, "k": k, "m": m, "engine": engine.name, "us": 1e6 * engine.seconds, "gbytes": rate / 1e9,
        "of_copy": rate / (copy.nbytes / copy.seconds), "tflops": 2 * m * n * k / engine.seconds / 1e12,
        "speedup": torchs.seconds / engine.seconds, "copy_gbytes": copy.nbytes / copy.seconds / 1e9,
        "path": emit.emit_kernel(spec, bench.backend.isa).engine if spec else "cuBLAS",
        "spread": (max(engine.times) - min(engine.times)) / engine.seconds,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--m", type=int, nargs="+", default=list(MS))
    parser.add_argument("--format", nargs="+", default=list(FORMATS), choices=list(FORMATS))
    parser.add_argument("--json", type=Path, help="also write every row to this file")
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a GPU that torch sees")
    with torch.no_grad():
        bench = Bench(chosen.format, chosen.m)
        name, isa = torch.cuda.get_device_name(), bench.backend.isa
        print(f"{name}, {isa}, torch {torch.__version__}, medians of {chosen.rounds}")
        print(HEAD)
        found: list[dict[str, Any]] = []
        for n, k in SHAPES:
            for each in rows(bench, chosen.format, n, k, chosen.m, chosen.rounds):
                found.append(each)
                print(
                    f"{n:>5}x{k:<5} {each['m']:>5} {each['engine']:>10} {each['path']:>7} {each['us']:>8.1f} "
                    f"{each['gbytes']:>7.0f} {each['of_copy']:>8.1%} {each['tflops']:>8.1f} {each['speedup']:>8.2f}"
                )
                sys.stdout.flush()
    if chosen.json:
        chosen.json.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
