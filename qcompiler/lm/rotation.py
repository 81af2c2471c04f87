"""The rotation of keys that are kept in 4 bits.

Keys of some models have a few columns that are many times as large as the others.  In 4 bits the step of a group
follows its largest number, and the other 31 columns are lost.  A Hadamard transform spreads such a column over all:

    k' = k H,  q' = q H,  q' · k' = |H|² q · k        H symmetric, H H = |H|² 1, elements ±2^-floor(p / 2)

for heads of 2^p columns; |H|² is 1, or 2 if p is odd, and the scale of the scores takes that back, exactly.  A head
with another number of columns is cut into blocks of the largest power of two that divides it.  (Rotations of this
kind: Ashkboos et al., "QuaRot", 2024.)
"""

from __future__ import annotations

import torch

LEAST = 8
"""Columns of the smallest block that is worth it."""


def block_of(dim: int) -> int:
    """Columns of a block: the largest power of two that divides `dim`, or 1 if that is too small to spread anything."""
    block = dim & -dim
    return block if block >= LEAST else 1


def hadamard(dim: int, dtype: torch.dtype) -> torch.Tensor:
    """H (dim, dim), by Sylvester's construction; `dim` has blocks of more than one column."""
    block, signs = block_of(dim), torch.ones(1, 1)
    while len(signs) < block:
        signs = torch.cat([torch.cat([signs, signs], 1), torch.cat([signs, -signs], 1)])
    half = (block.bit_length() - 1) // 2
    whole: torch.Tensor = torch.kron(torch.eye(dim // block), signs * 2.0**-half).to(dtype)
    return whole


def squared(dim: int) -> int:
    """|H|²: 1 or 2."""
    return 2 if block_of(dim).bit_length() % 2 == 0 else 1


__all__ = ["block_of", "hadamard", "squared"]
