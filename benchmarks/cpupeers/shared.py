"""What the projects' files share: the numbers of a case, and how an engine is described."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


class UnableError(Exception):
    """An engine cannot compute a case; the text says why."""


def reason(error: Exception) -> str:
    """An error in a line."""
    words = " ".join(str(error).split())
    return words[:300] if isinstance(error, UnableError) else f"{type(error).__name__}: {words[:300]}"


class Case:
    """Rows x (m, k) and weights (n, k), in fp32. Each copy of the weight has its rows turned by one more than the copy
    before: no two are equal, since onnxruntime would keep one of them, and the products are known from the first."""

    def __init__(self, m: int, n: int, k: int, threads: int) -> None:
        self.m, self.n, self.k, self.threads, self.copies = m, n, k, threads, 1
        rng = np.random.default_rng(0)
        self.x = rng.standard_normal((m, k)).astype(np.float32)
        self.first = rng.standard_normal((n, k)).astype(np.float32)
        self.product = self.x @ self.first.T

    def with_copies(self, copies: int) -> Case:
        other = copy.copy(self)
        other.copies = copies
        return other

    def turned(self, first: Array) -> list[Array]:
        """An array whose first axis is the weight's rows, for every copy."""
        return [np.roll(first, turn, axis=0) for turn in range(self.copies)]

    def weights(self) -> list[Array]:
        return self.turned(self.first)

    def error(self, result: Array, turn: int) -> float:
        """Of the result of the copy with this number, relative to the product in fp32."""
        expected = np.roll(self.product, turn, axis=1)
        got = np.asarray(result, np.float32).reshape(expected.shape)
        return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


Made = tuple[Callable[[], Any], Callable[[Any], Array]]
"""(computes the products of all copies and returns their results, makes an fp32 array of one of these)."""


@dataclass(frozen=True)
class Engine:
    """`kind` is its arithmetic, `bits` those that a weight takes with its scales."""

    kind: str
    bits: float
    make: Callable[[Case], Made]


@dataclass(frozen=True)
class ModelEngine:
    """`make` takes the file of an exported program, its arrays and the number of threads."""

    kind: str
    make: Callable[[Path, list[Array], int], Callable[[], Array]]


def per_product(call: Callable[[], Any], copies: int, least: float) -> float:
    """Seconds of a product: passes over all copies for a third of `least` to get warm, then for at least `least`."""
    warm = time.perf_counter() + least / 3
    while time.perf_counter() < warm:
        call()
    passes, begin = 0, time.perf_counter()
    while (taken := time.perf_counter() - begin) < least or not passes:
        call()
        passes += 1
    return taken / (passes * copies)


def groups_of_4_bits(w: Array, group: int) -> tuple[Array, Array]:
    """(codes 0 … 15 (n, k), scales (n, k / group)): value = scale * (code - 8)."""
    n, k = w.shape
    grouped = w.reshape(n, k // group, group)
    scales = (np.abs(grouped).max(axis=2) / 7.5).astype(np.float32)
    codes = np.clip(np.rint(grouped / scales[..., None]) + 8, 0, 15).astype(np.uint8)
    return codes.reshape(n, k), scales


def rows_of_8_bits(w: Array) -> tuple[Array, Array]:
    """(int8 (n, k), scales (n)): value = scale * code."""
    scales = (np.abs(w).max(axis=1) / 127).astype(np.float32)
    return np.rint(w / scales[:, None]).astype(np.int8), scales
