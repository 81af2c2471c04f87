"""Attention of one token to a cache of each type, beside torch's, in one interleaved run.

    .venv/bin/python benchmarks/attention_cpu.py [--rounds 15] [--threads 2] [--keys 512 4096] [--layers 16]
    .venv/bin/python benchmarks/attention_cpu.py --queries 128 --keys 128 --batch 32 --layers 2     # a prompt instead
    .venv/bin/python benchmarks/attention_cpu.py --queries 512 --keys 512 --types fp16 --json FILE

A turn of an engine is one call for each of `--layers` caches, so that a cache is not in the processor's caches because
it was read just before.  Every round has a turn of each engine, in a varying order; the table gives medians.  `GB/s`
counts the bytes of keys and values that the cache takes, `of read` is their share of what the same run reads from
memory far larger than the caches, and `x fp16` is how many times as fast it is as the cache in fp16.  Rows that say
`bf16` behind the type of the cache may multiply in bf16 (`compute`), the others are exact.  torch computes
`scaled_dot_product_attention` with grouped heads, in the type that is named.  With `--queries`, GFLOP/s of the two
products stand in the place of GB/s.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch
from cpubench.probes import Bench
from torch.nn import functional

from qcompiler.formats import cache_rows
from qcompiler.plan.kernel import DType, KernelSpec, Operand
from qcompiler.plan.kinds.attention import AttentionKernel
from qcompiler.runtime.bf16_units import UNITS
from qcompiler.runtime.isa import host_isa
from qcompiler.runtime.threads import resolve_num_threads

TYPES = ("fp32", "fp16", "bf16", *cache_rows.KINDS)
FLOATS: dict[str, tuple[DType, Any]] = {
    "fp32": ("f32", np.float32), "fp16": ("f16", np.float16), "bf16": ("bf16", ml_dtypes.bfloat16),
}  # fmt: skip
TORCH = {"fp32": torch.float32, "bf16": torch.bfloat16}

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Shape:
    """Query heads, heads of keys and values, and columns of a head."""

    heads: int
    kv_heads: int
    dim: int


SHAPES = (Shape(32, 4, 64), Shape(32, 8, 128), Shape(12, 12, 32))


@dataclass
class Engine:
    """`run(layer)` returns the seconds of one call; `nbytes` is the size of a layer's keys and values."""

    name: str
    run: Callable[[int], float]
    nbytes: int


@dataclass(frozen=True)
class Call:
    """The type of the cache, whether factors may be bf16, and how many rows there are."""

    kind: str
    bf16: bool
    keys: int
    queries: int = 1
    batch: int = 1

    @property
    def name(self) -> str:
        return f"{self.kind}, bf16" if self.bf16 else self.kind


def spec_of(call: Call, shape: Shape) -> KernelSpec:
    """The kernel of a call: q and out in fp32."""
    kind, keys, queries, batch = call.kind, call.keys, call.queries, call.batch
    is_rows = kind in cache_rows.KINDS
    dtype: DType = "i8" if is_rows else FLOATS[kind][0]
    width = cache_rows.row_bytes(shape.dim, cache_rows.kind_of(kind)) if is_rows else shape.dim

    def operand(name: str, dtype: DType, heads: int, rows: int, cols: int, access: Any = "r") -> Operand:
        sizes = (batch, heads, rows, cols)
        return Operand(
            name=name, dtype=dtype, access=access, shape=sizes, strides=(heads * rows * cols, rows * cols, cols, 1)
        )

    operands = (
        operand("q", "f32", shape.heads, queries, shape.dim),
        *(operand(name, dtype, shape.kv_heads, keys, width) for name in "kv"),
        operand("out", "f32", shape.heads, queries, shape.dim, "w"),
    )
    body = AttentionKernel(
        batch=batch, heads=shape.heads, kv_heads=shape.kv_heads, q_len=queries, kv_len=keys, head_dim=shape.dim,
        value_dim=shape.dim, scale=shape.dim**-0.5, causal=False, mask="none",
        cache=cache_rows.kind_of(kind) if is_rows else None, compute="bf16" if call.bf16 else None,
    )  # fmt: skip
    name = f"{kind}_{'bf16_' if call.bf16 else ''}{shape.heads}_{shape.dim}_{keys}"
    return KernelSpec(name=name, symbols=(), operands=operands, body=body)


def engines_of(bench: Bench, shape: Shape, calls_of: list[Call], layers: int) -> list[Engine]:
    """One for each call, and torch's, over the same numbers."""
    draw, first = np.random.default_rng(0), calls_of[0]
    q = draw.standard_normal((first.batch, shape.heads, first.queries, shape.dim)).astype(np.float32)
    numbers = draw.standard_normal((2, first.batch, shape.kv_heads, first.keys, shape.dim)).astype(np.float32)
    engines = []
    for call in calls_of:
        kind = call.kind
        is_rows = kind in cache_rows.KINDS
        kept = cache_rows.quantise(numbers, cache_rows.kind_of(kind)) if is_rows else numbers.astype(FLOATS[kind][1])
        caches = [_aligned(kept) for _ in range(layers)]
        spec, out = spec_of(call, shape), np.zeros_like(q)
        for dots in (True, False) if call.bf16 and bench.bf16 == UNITS["amx"] else (False,):
            calls = [bench.caller(spec, [q, cache[0], cache[1], out], [0], dots=dots) for cache in caches]
            name = f"{call.name} by dots" if dots else call.name
            engines.append(Engine(name, lambda layer, calls=calls: calls[layer](1), kept.nbytes))
    for kind, dtype in TORCH.items():
        given = torch.from_numpy(q).to(dtype)
        pairs = [torch.from_numpy(numbers).to(dtype, copy=True) for _ in range(layers)]

        def run(layer: int, given: torch.Tensor = given, pairs: list[torch.Tensor] = pairs) -> float:
            start = time.perf_counter()
            functional.scaled_dot_product_attention(given, pairs[layer][0], pairs[layer][1], enable_gqa=True)
            return time.perf_counter() - start

        engines.append(Engine(f"torch {kind}", run, pairs[0].nbytes))
    return engines


def _aligned(array: Array) -> Array:
    """A copy that begins at a multiple of 64 bytes."""
    buffer = np.zeros(array.nbytes + 64, np.uint8)
    begin = -buffer.ctypes.data % 64
    made = buffer[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)
    made[...] = array
    return made


def measure(bench: Bench, engines: list[Engine], layers: int, rounds: int) -> tuple[dict[str, float], float]:
    """Median seconds of a call by engine, and the median of what was read from memory, in bytes per second."""
    times: dict[str, list[float]] = {engine.name: [] for engine in engines}
    reads = []
    for turn in range(rounds + 1):
        first = turn % len(engines)
        for engine in (*engines[first:], *engines[:first])[:: 1 if turn % 2 else -1]:
            time.sleep(0.003)  # the other engine's threads stop spinning
            found = [engine.run(layer) for layer in range(layers)]
            if turn:  # the first round warms up
                times[engine.name].append(sum(found[1:]) / (layers - 1))
        reads.append(bench.bandwidth())
    return {name: statistics.median(each) for name, each in times.items()}, statistics.median(reads)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--keys", type=int, nargs="*", default=[512, 4096])
    parser.add_argument("--queries", type=int, default=1)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--layers", type=int, default=16, help="caches that take turns, at least 2")
    parser.add_argument("--types", nargs="+", choices=TYPES, default=list(TYPES), help="fp16 is always among them")
    parser.add_argument("--json", type=Path, help="writes the medians")
    options = parser.parse_args()
    threads = resolve_num_threads(options.threads)
    torch.set_num_threads(threads)
    cases = list(itertools.product(SHAPES, options.keys))
    kinds = [kind for kind in TYPES if kind in (*options.types, "fp16")]
    ways = list(itertools.product(kinds, (False, True)))
    results: list[dict[str, Any]] = []
    calls = {keys: [Call(*way, keys, options.queries, options.batch) for way in ways] for keys in options.keys}
    bench = Bench([spec_of(call, shape) for shape, keys in cases for call in calls[keys]], threads)
    print(f"{threads} threads, {host_isa()}, torch {torch.__version__}, medians of {options.rounds}\n")
    unit = "GB/s | of read" if options.queries == 1 else "GFLOP/s"
    print(f"| heads | keys | cache | MiB | us | {unit} | x fp16 |\n|{'---|' * (unit.count('|') + 7)}")
    with torch.no_grad():
        for shape, keys in cases:
            engines = engines_of(bench, shape, calls[keys], options.layers)
            times, read = measure(bench, engines, options.layers, options.rounds)
            products = 4 * options.batch * shape.heads * options.queries * keys * shape.dim
            for each in engines:
                results.append({
                    "heads": shape.heads, "kv_heads": shape.kv_heads, "dim": shape.dim, "queries": options.queries,
                    "keys": keys, "batch": options.batch, "engine": each.name, "seconds": times[each.name],
                    "gflops": products / times[each.name] / 1e9, "read": read,
                })  # fmt: skip
                rate = each.nbytes / times[each.name]
                speed = f"{rate / 1e9:.1f} | {rate / read:.0%}"
                if options.queries > 1:
                    speed = f"{products / times[each.name] / 1e9:.0f}"
                print(
                    f"| {shape.heads} over {shape.kv_heads} of {shape.dim} | {keys} | {each.name} | "
                    f"{each.nbytes / 2**20:.1f} | {1e6 * times[each.name]:.0f} | {speed} | "
                    f"{times['fp16'] / times[each.name]:.2f} |",
                    flush=True,
                )
    if options.json is not None:
        about = {"threads": threads, "isa": host_isa(), "torch": torch.__version__, "rounds": options.rounds}
        options.json.write_text(json.dumps({**about, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
