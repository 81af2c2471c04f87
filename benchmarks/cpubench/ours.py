"""Turns of our linears: a product by each of several copies of a weight, so that none is in the caches at its turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from qcompiler.formats.int8_rows import row_bytes
from qcompiler.plan.kernel import KernelSpec

from .linears import KIND, Array, Product, linear_spec, numbers, operands, packed, rows_spec
from .probes import Bench, aligned

TIMES_THE_CACHE = 4
"""All copies together take so many times the bytes of the last-level cache."""

MOST_COPIES = 64
"""Peers compile a graph with a product for each copy."""


@dataclass
class Runner:
    """A way to compute a case. `turn(least)` returns seconds of a product from passes that take `least` seconds."""

    name: str
    kind: str
    weight_bytes: int
    copies: int
    error: float
    turn: Callable[[float], float]
    ours: bool = True


def cache_bytes() -> int:
    """Of the largest cache of the first core; 32 MiB where the machine does not say."""
    found = [0]
    for size in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = size.read_text().strip()
        found.append(int(text[:-1]) << {"K": 10, "M": 20}[text[-1]])
    return max(found) or 32 << 20


def copies_of(weight_bytes: int, total: int, most: int) -> int:
    """At least two: one copy would stay where it is."""
    return max(2, min(most, -(-total // weight_bytes)))


def specs(product: Product, m: int, n: int, k: int) -> list[KernelSpec]:
    return [rows_spec(k)] * product.codes + [linear_spec(product, m, n, k)]


def runner(bench: Bench, product: Product, m: int, n: int, k: int, total: int, most: int = MOST_COPIES) -> Runner:
    """`total` is the number of bytes of all copies, of which there are at most `most`. Products of codes make rows of
    int8 each time."""
    x, bias, expected = numbers(m, n, k)
    data = packed(product, n, k)
    copies = copies_of(data.size, total, most)
    given, _, bias, out = operands(product, x, data, bias)
    sets: list[list[Sequence[Array]]] = []
    for weight in [data, *(aligned(data) for _ in range(copies - 1))]:
        rows = [[x, given]] if product.codes else []
        sets.append([*rows, [given, weight, bias, out]])
    if product.codes:
        given[:] = np.zeros((m, row_bytes(k)), np.int8)
    call = bench.passes(specs(product, m, n, k), sets, [m])

    def turn(least: float) -> float:
        warm = 0.0
        while warm < least / 3:
            warm += call()
        taken, passes = 0.0, 0
        while taken < least or not passes:
            taken += call()
            passes += 1
        return taken / (passes * copies)

    call()
    error = float(np.linalg.norm(out.astype(np.float32) - expected) / np.linalg.norm(expected))
    return Runner(product.name, KIND[product.arithmetic], data.size, copies, error, turn)
