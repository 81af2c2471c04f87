"""Random weights for kernels, their copies on a device, and reference products.

Weights are encoded on the host, all of a run's concurrently.  The copies of a weight together exceed the L2 cache, so
calls that rotate through them read from memory, as a model's layers do.  Values are random, never zero: zeros hide
wrong indexing, and multiply faster.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from gpubench.cells import FORMATS, INTEGERS
from qcompiler import formats
from qcompiler.kernels import layouts

LAYOUT = "cuda_t16_v1"
BF16 = np.dtype(ml_dtypes.bfloat16)
MOST_COPIES = 64

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[Any]


@dataclass(frozen=True)
class Packed:
    """A weight's bytes in the layout of CUDA targets; its values (rows, columns) in the kernel's type."""

    data: Bytes
    values: Floats


def packed(engine: str, n: int, k: int) -> Packed:
    """Random values of an engine's format; plain bf16 where it has none."""
    w = np.random.default_rng([n, k]).standard_normal((n, k), np.float32) / np.float32(k**0.5)
    kind = FORMATS[engine]
    if kind is None:
        plain = w.astype(BF16)
        raw = np.ascontiguousarray(plain).view(np.uint8).reshape(-1)
        return Packed(layouts.get(LAYOUT).pack(None, "bf16", n, k, raw), plain)
    fmt = formats.get(kind[0], **kind[1])
    encoded = fmt.encode(w)
    values = fmt.decode(encoded)
    if engine in INTEGERS:  # the values of an entry stay fp32
        return Packed(layouts.get(LAYOUT).pack(fmt, "f32", n, k, encoded.data), values)
    return Packed(layouts.get(LAYOUT).pack(fmt, "bf16", n, k, encoded.data), values.astype(BF16))


class Store:
    """Weights by (engine, n, k), encoded ahead by threads and kept on `rig` from their first use on."""

    def __init__(self, rig: Any) -> None:
        self._rig = rig
        self._ahead: dict[tuple[str, int, int], Future[Packed]] = {}
        self._there: dict[tuple[str, int, int], tuple[list[Any], Any]] = {}
        self._pool = ThreadPoolExecutor(max(1, min(8, (os.cpu_count() or 2) - 1)))

    def prefetch(self, wanted: Iterable[tuple[str, int, int]]) -> None:
        for key in wanted:
            if key not in self._ahead and key not in self._there:
                self._ahead[key] = self._pool.submit(packed, *key)

    def get(self, engine: str, n: int, k: int) -> tuple[list[Any], Any]:
        """(copies on the device, values in the form of the rig's reference)."""
        key = (engine, n, k)
        if key not in self._there:
            self.prefetch([key])
            made = self._ahead.pop(key).result()
            count = copies_of(made.data.nbytes, self._rig.cache)
            self._there[key] = [self._rig.upload(made.data) for _ in range(count)], self._rig.reference(made.values)
        return self._there[key]

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def copies_of(nbytes: int, cache: int) -> int:
    """The number of copies that exceed a cache twice; at least 2, so that calls differ."""
    return max(2, min(MOST_COPIES, -(-2 * cache // max(nbytes, 1)) + 1))
