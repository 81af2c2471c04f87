"""The kinds of kernel. Each has one module with its record, its contract and its cost (`plan/kernel_body.py`).

The modules of this package are the list of kinds. A kind's name is the name of its module and the tag of its record.
The other parts of a kind are in modules of the same name: `passes/lowering/kinds/<kind>.py`, and either
`kernels/kinds/<kind>.py` for every target or `kernels/cpu/<kind>.py` and `kernels/cuda/<kind>.py`. `modules_of` makes
tables of kinds; a missing part is an error.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from collections.abc import Collection, Mapping, Sequence
from types import ModuleType

from qcompiler.plan.kernel_body import KernelBody


def declared(module: ModuleType) -> type[KernelBody]:
    """The record that a module declares. NotImplementedError names what it lacks: the record, its tag, a method."""
    name, where = module.__name__.rpartition(".")[2], module.__name__
    bodies = [
        each
        for each in vars(module).values()
        if isinstance(each, type) and issubclass(each, KernelBody) and each.__module__ == where
    ]
    if len(bodies) != 1:
        raise NotImplementedError(f"{where} declares one subclass of KernelBody; it has {len(bodies)}")
    (body,) = bodies
    tag = body.__struct_config__.tag
    if tag != name:
        raise NotImplementedError(f"{where}: the tag of {body.__name__} is {tag!r}; it must be the module's name")
    missing = [part for part in dir(body) if getattr(getattr(body, part), "__isabstractmethod__", False)]
    if missing:
        raise NotImplementedError(f"{where}: {body.__name__} has no {' and no '.join(missing)}")
    return body


def modules_of(
    package: str, parts: Sequence[str], target: str = "", *, printed: Collection[str] = ()
) -> dict[str, ModuleType]:
    """The module of each kind in a package, by the kind's name; each has all `parts`.

    A kind that `lacks` the target is left out, and so is one of `printed` (kernels/kinds) without a module here.
    NotImplementedError if another kind has no module, or if a module lacks one of the parts.
    """
    found: dict[str, ModuleType] = {}
    for kind, body in KINDS.items():
        if target in body.lacks:
            continue
        where = f"{package}.{kind}"
        if importlib.util.find_spec(where) is None:
            if kind in printed:
                continue
            once = f", describe it for every target in kernels/kinds/{kind}.py" if printed else ""
            way_out = f"{once}, or say in {body.__name__}.lacks why {target} has none" if target else ""
            raise NotImplementedError(f"the kernel kind '{kind}' has no module {where}: write it{way_out}")
        module = importlib.import_module(where)
        missing = [part for part in parts if not hasattr(module, part)]
        if missing:
            raise NotImplementedError(f"{where} has no {' and no '.join(missing)}")
        found[kind] = module
    return found


def _collected() -> Mapping[str, type[KernelBody]]:
    names = sorted(each.name for each in pkgutil.iter_modules(__path__))
    return {name: declared(importlib.import_module(f"{__name__}.{name}")) for name in names}


KINDS: Mapping[str, type[KernelBody]] = _collected()
"""The record of each kind, by name."""
