"""Statistics of rows, in parts: what a linear writes beside its rows, for a norm in the linear that reads them.

A row of `columns` elements is cut into groups of `GROUP` columns; the last one may be shorter. Of each group there are

    "rms"      one fp32 number: the sum of the squares
    "layer"    two: the mean, and the sum of the squared distances from that mean

of the elements as they are stored, after rounding. The groups of a row follow one another. The statistics of the whole
row are those of Chan, Golub and LeVeque ("Updating formulae and a pairwise algorithm for computing sample variances",
1979), for all groups at a time: with count[g] elements, mean[g] and square[g] in group g,

    mean   = sum_g count[g] * mean[g] / columns
    square = sum_g square[g] + count[g] * (mean[g] - mean)²

No difference of large sums is formed: the mean of the squares less the square of the mean would cancel.
"""

from __future__ import annotations

from typing import Literal

Kind = Literal["layer", "rms"]

GROUP = 32
"""Columns of a group. Every kernel for many rows makes whole groups: its blocks make multiples of 32 columns."""


def groups(columns: int) -> int:
    """Groups of a row."""
    return -(-columns // GROUP)


def numbers(kind: str) -> int:
    """Numbers for each group."""
    return 2 if kind == "layer" else 1


def width(kind: str, columns: int) -> int:
    """fp32 numbers of a row's statistics."""
    return groups(columns) * numbers(kind)
