"""The table of lowerings, complete: importing this module registers every builder."""

from __future__ import annotations

from qcompiler.frontends.jax import bits, folds, indexing, order, pointwise, products, views
from qcompiler.frontends.jax.scope import BUILDERS

__all__ = ["BUILDERS", "COMPOSITES", "bits", "folds", "indexing", "order", "pointwise", "products", "views"]

COMPOSITES = frozenset(name for name in BUILDERS if name.startswith("chlo."))
"""Composites with a lowering of their own; all others are read as their decomposition."""
