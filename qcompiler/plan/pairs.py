"""Pairs of rows: the weight of a linear has two halves, and its epilogue combines row n of one with row n of the other.

What the layouts (kernels/layouts/pairs.py), the kernels and the verifier must agree on: panel p of the stored rows
holds rows 8 p … 8 p + 7 of the first half, then the same rows of the second.
"""

from __future__ import annotations

HALF = 8
"""Rows of a half in a panel of 16: rows g and g + 8 are the two that one warp lane holds of `mma`'s operand A."""

PAIR_LAYOUTS: dict[str, str] = {
    "cpu_p16_pairs_v1": "cpu_p16_v1", "cpu_p16_pairs_v2": "cpu_p16_v2", "cuda_t16_pairs_v1": "cuda_t16_v1",
}  # fmt: skip
"""The layouts of paired rows, and what each is of the rows in their new order."""


def stored_rows(rows: int) -> int:
    """Rows of whole panels that hold a matrix of so many rows, both halves counted."""
    return 2 * HALF * -(-rows // (2 * HALF))
