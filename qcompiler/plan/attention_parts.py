"""What the attention that divides its keys into parts, and the kernel that joins these, have in common."""

from __future__ import annotations

FEW_QUERIES = 4
"""The most queries whose keys may be divided into parts: those of the kernels for few queries, which read keys in
place. More queries have blocks enough."""

MOST_PARTS = 256
"""The most parts of the keys: a block that joins them has a thread for each."""

COLUMNS_BEHIND = 2
"""Columns behind the sums of a part: the largest score, and the total of the weights."""
