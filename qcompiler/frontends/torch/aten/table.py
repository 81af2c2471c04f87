"""The complete table of builders: importing the module of each family of operators registers its builders."""

from __future__ import annotations

from qcompiler.frontends.torch.aten import (  # noqa: F401
    activations,
    attention,
    conv,
    index,
    nn,
    order,
    pointwise,
    pool,
    resize,
    scatter,
    views,
)
from qcompiler.frontends.torch.aten.scope import BUILDERS

__all__ = ["BUILDERS"]
