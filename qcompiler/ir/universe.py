"""What a plain `xdsl-opt` sees of qcompiler, through the entry point `xdsl.universe`: both dialects and every pass.

    xdsl-opt 02-import.mlir -p fold-views,fuse-elementwise

Names must not clash with xDSL's own, so passes such as `cse` are called `qc-cse` here. Passes belong to a higher layer,
so they are imported by name when they are requested.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping

from xdsl.ir import Dialect
from xdsl.passes import ModulePass
from xdsl.transforms import get_all_passes
from xdsl.universe import Universe

PassFactory = Callable[[], type[ModulePass]]


def _qc() -> Dialect:
    from qcompiler.ir.qc import QC

    return QC


def _rt() -> Dialect:
    from qcompiler.ir.rt import RT

    return RT


def _renamed(name: str, factory: PassFactory) -> PassFactory:
    """The same pass under another name."""

    def make() -> type[ModulePass]:
        found = factory()
        return dataclasses.dataclass(frozen=True)(type(found.__name__, (found,), {"name": name}))

    return make


def _passes() -> dict[str, PassFactory]:
    pipeline = importlib.import_module("qcompiler.passes.pipeline")
    ours: Mapping[str, PassFactory] = pipeline.ALL_PASSES
    taken = get_all_passes()
    passes: dict[str, PassFactory] = {}
    for name, factory in ours.items():
        if name in taken:
            passes[f"qc-{name}"] = _renamed(f"qc-{name}", factory)
        else:
            passes[name] = factory
    return passes


UNIVERSE = Universe(all_dialects={"qc": _qc, "rt": _rt}, all_passes=_passes())
