"""Orthogonal matrices for any size, applied without being built: a Hadamard matrix times a small cosine transform.

    d = m * 2^k, m odd      T = C_m (x) H_(2^k): orthogonal, its first row is constant
    random signs s          rows:       Q = diag(s) T                    any orthogonal matrix will do
                            keeps ones: Q = T^t diag(s) T, s[0] = 1      Q 1 = 1, so the mean of a row stays

C_m is the orthonormal cosine transform (DCT-II) of m points; for m = 1 what is left is the randomised Hadamard
transform of QuaRot (arXiv 2404.00456).  T's first row is constant, so T 1 = sqrt(d) e_0, which diag(s) keeps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch


@dataclass(frozen=True)
class Rotation:
    """An orthogonal matrix Q of `size` columns, made from `seed`. With `keeps_ones`, Q 1 = 1."""

    size: int
    seed: int
    keeps_ones: bool = False

    @cached_property
    def _signs(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        signs = torch.randint(0, 2, (self.size,), generator=generator, dtype=torch.float64) * 2 - 1
        if self.keeps_ones:
            signs[0] = 1
        return signs

    @cached_property
    def _cosines(self) -> torch.Tensor:
        """C_m, fp64 (m, m)."""
        odd = self.size // (self.size & -self.size)
        points = torch.arange(odd, dtype=torch.float64)
        matrix = torch.cos(torch.outer(points, 2 * points + 1) * (math.pi / (2 * odd))) * math.sqrt(2 / odd)
        matrix[0] = 1 / math.sqrt(odd)
        return matrix

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """x Q for rows x (…, size) in fp64; a new tensor."""
        if self.keeps_ones:
            return self._transform(self._transform(x, transposed=True) * self._signs)
        return self._transform(x * self._signs)

    def _transform(self, x: torch.Tensor, *, transposed: bool = False) -> torch.Tensor:
        """x T, or x T^t."""
        low = self.size & -self.size
        found = x.reshape(-1, self.size // low, low)
        matrix = self._cosines.T if transposed else self._cosines
        found = torch.einsum("nml,mk->nkl", found, matrix) if low < self.size else found
        return hadamard_of_runs(found, low).reshape(x.shape)


def hadamard_of_runs(x: torch.Tensor, block: int) -> torch.Tensor:
    """Runs of `block` numbers of the last dim times the orthonormal Hadamard matrix, which is symmetric; in x's type.

    `block` is a power of two that divides the dim.  These are the butterflies of the fast Walsh-Hadamard transform.
    """
    found, width = x, 1
    while width < block:
        low, high = found.reshape(-1, 2, width).unbind(1)
        found = torch.stack((low + high, low - high), 1)
        width *= 2
    return (found / math.sqrt(block)).reshape(x.shape)


__all__ = ["Rotation", "hadamard_of_runs"]
