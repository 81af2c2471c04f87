"""Kinds that are described once for every target: `form(spec)` says what their kernels compute.

A target prints a form (`items.py` and `rows.py` in `kernels/cpu` and `kernels/cuda`) unless it has a kernel of its own,
in a module of the kind's name.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import cast

from qcompiler.kernels.items import Items
from qcompiler.kernels.rows import Rows
from qcompiler.plan.kernel import KernelSpec
from qcompiler.plan.kinds import KINDS

Form = Items | Rows


def described(module: ModuleType) -> Callable[[KernelSpec], Form]:
    """The function of a module that describes a kind. NotImplementedError names what is missing."""
    name = module.__name__.rpartition(".")[2]
    if name not in KINDS:
        raise NotImplementedError(f"{module.__name__}: no kernel kind is called {name!r} (qcompiler/plan/kinds)")
    if not hasattr(module, "form"):
        raise NotImplementedError(f"{module.__name__} has no form")
    return cast(Callable[[KernelSpec], Form], module.form)


FORMS: Mapping[str, Callable[[KernelSpec], Form]] = {
    each.name: described(importlib.import_module(f"{__name__}.{each.name}")) for each in pkgutil.iter_modules(__path__)
}
"""By kind."""
