"""All places in which a model holds values (attributes, lists, dicts, tuples, plain objects), and their restoration.

A *place* identifies where a value is held: a key of a dictionary (a module's attributes are one), an index of a list,
an item of a tuple.  `walk` finds every place that a model reaches.  `Contents` records what all places hold at one
time, and restores it, whatever a call of the model has assigned, appended or removed in between.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

_LEAVES = (
    str,
    bytes,
    int,
    float,
    torch.SymInt,
    torch.SymFloat,
    torch.SymBool,
    type,
    torch.dtype,
    torch.device,
    torch.Size,
    torch.Tensor,
)
_MOST = 50_000
"""Maximum number of objects to visit: a configuration of transformers has some hundred."""
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
"""The attributes of nn.Module itself, such as its hooks."""
_MISSING = object()


class _Slots:
    """The attributes of a class, or of an object whose class has `__slots__`, as a writable dictionary."""

    def __init__(self, owner: object) -> None:
        self.of = owner

    def __getitem__(self, key: str) -> Any:
        try:
            return getattr(self.of, key)
        except AttributeError as error:
            raise KeyError(key) from error

    def __setitem__(self, key: str, value: Any) -> None:
        setattr(self.of, key, value)

    def __delitem__(self, key: str) -> None:
        delattr(self.of, key)


@dataclass(frozen=True)
class Place:
    """Where a value is held.  `owner` is the container; for an item of a tuple, the place of the tuple, which is
    replaced to change the item.

    `registered` is true for the buffers and parameters of a module, which torch knows.
    """

    path: str
    owner: Any
    key: Any
    registered: bool = False

    def get(self) -> Any:
        """The present value, or `missing`."""
        try:
            return (self.owner.get() if isinstance(self.owner, Place) else self.owner)[self.key]
        except (KeyError, IndexError, TypeError):
            return _MISSING

    def set(self, value: Any) -> None:
        """Stores a value. A tuple is replaced by a copy with another item."""
        if not isinstance(self.owner, Place):
            self.owner[self.key] = value
            return
        old = self.owner.get()
        items = [*old[: self.key], value, *old[self.key + 1 :]]
        self.owner.set(type(old)(*items) if hasattr(old, "_fields") else type(old)(items))


def is_missing(value: Any) -> bool:
    """Whether `Place.get` found nothing."""
    return value is _MISSING


def is_number(value: Any) -> bool:
    """Whether the value is a Python number, possibly symbolic."""
    return isinstance(value, bool | int | float | torch.SymInt | torch.SymFloat | torch.SymBool)


def walk(model: nn.Module) -> Iterator[tuple[Place, Any]]:
    """Every place that a model reaches, with its value; containers before their contents, each container once."""
    pending: list[Place] = []
    seen: set[int] = set()
    for name, module in model.named_modules():
        seen.add(id(module))
        pending += _of_module(name, module)
    pending += _of_classes(model)
    at = 0
    while at < len(pending) and len(seen) < _MOST:
        place = pending[at]
        at += 1
        value = place.get()
        if value is _MISSING:
            continue
        yield place, value
        if id(value) not in seen and not isinstance(value, _LEAVES):
            inside = list(_inside(place, value))
            if inside or isinstance(value, list | dict | deque):
                seen.add(id(value))
            pending += inside


def mirrors(model: nn.Module) -> tuple[str, ...]:
    """Lists in which torch itself keeps a second reference to parameters, and replaces them (recurrent layers).

    Assignments there are not made by the model's own code.
    """
    return tuple(
        f"{name}.{key}" if name else key
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, nn.RNNBase)
        for key in ("_flat_weights", "_flat_weight_refs")
    )


def _of_module(name: str, module: nn.Module) -> Iterator[Place]:
    prefix = f"{name}." if name else ""
    for key in vars(module):
        if key not in _OF_EVERY_MODULE:
            yield Place(f"{prefix}{key}", vars(module), key)
    for held in (module._buffers, module._parameters):
        for key in held:
            yield Place(f"{prefix}{key}", held, key, registered=True)


def _of_classes(model: nn.Module) -> Iterator[Place]:
    """Attributes of the model's classes that a call may change; all instances see such a change."""
    classes = {cls for module in model.modules() for cls in type(module).__mro__}
    for cls in sorted(classes, key=lambda cls: (cls.__module__, cls.__qualname__)):
        if cls.__module__.partition(".")[0] in ("builtins", "torch", "typing", "abc"):
            continue
        for key, value in list(vars(cls).items()):
            if not key.startswith("__") and isinstance(value, torch.Tensor | list | dict | deque | int | float):
                yield Place(f"{cls.__qualname__}.{key}", _Slots(cls), key)


def _inside(place: Place, value: Any) -> Iterator[Place]:
    """The places in a container or an object; none for a container such as a set, whose items cannot be addressed."""
    path = place.path
    if isinstance(value, nn.Module):  # in a list or an object: torch does not see it as a submodule
        yield from _of_module(path, value)
        for name, child in value._modules.items():
            if child is not None:
                yield Place(f"{path}.{name}", value._modules, name)
    elif isinstance(value, dict):
        yield from (Place(f"{path}.{key}", value, key) for key in list(value))
    elif isinstance(value, list | deque):
        yield from (Place(f"{path}.{index}", value, index) for index in range(len(value)))
    elif isinstance(value, tuple):
        yield from (Place(f"{path}.{index}", place, index) for index in range(len(value)))
    elif type(value).__module__ != "builtins" and not callable(value):
        if hasattr(value, "__dict__"):
            yield from (Place(f"{path}.{key}", vars(value), key) for key in list(vars(value)))
        for cls in type(value).__mro__:
            slots = cls.__dict__.get("__slots__", ())
            for key in (slots,) if isinstance(slots, str) else slots:
                if key not in ("__dict__", "__weakref__"):
                    yield Place(f"{path}.{key}", _Slots(value), key)


class Contents:
    """What every place of a model holds now.  `put_back` restores it; values written into tensors stay."""

    def __init__(self, model: nn.Module) -> None:
        self._owners: dict[int, tuple[Any, Any]] = {}
        self._slots: list[tuple[Place, Any]] = []
        self._registered = {id(held) for m in model.modules() for held in (m._buffers, m._parameters)}
        for module in model.modules():
            for owner in (vars(module), module._buffers, module._parameters):
                self._keep(owner)
        for place, value in walk(model):
            if isinstance(place.owner, _Slots):
                self._slots.append((place, value))
            elif not isinstance(place.owner, Place):
                self._keep(place.owner)
            if isinstance(value, list | dict | deque):  # including an empty one, which has no places
                self._keep(value)
            elif not isinstance(value, _LEAVES) and not callable(value) and hasattr(value, "__dict__"):
                self._keep(vars(value))

    def _keep(self, owner: Any) -> None:
        if id(owner) not in self._owners:
            self._owners[id(owner)] = (owner, dict(owner) if isinstance(owner, dict) else list(owner))

    def put_back(self, *, registered: bool = True) -> None:
        """Restores every container. Unchanged places are not touched, nor registered ones if `registered` is False."""
        for owner, before in self._owners.values():
            if not registered and id(owner) in self._registered:
                continue
            if isinstance(owner, dict):
                _put_back_keys(owner, before)
            elif len(owner) != len(before) or any(a is not b for a, b in zip(owner, before, strict=True)):
                owner.clear()
                owner.extend(before)
        for place, value in self._slots:
            if place.get() is not value:
                place.set(value)


def _put_back_keys(owner: dict[Any, Any], before: dict[Any, Any]) -> None:
    """Restores keys. A module's own bookkeeping is not touched: its hooks manage themselves."""
    for key in [key for key in owner if key not in before and key not in _OF_EVERY_MODULE]:
        del owner[key]
    for key, value in before.items():
        if key not in _OF_EVERY_MODULE and owner.get(key, _MISSING) is not value:
            owner[key] = value


@contextlib.contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Undoes all changes inside: what places hold, and values written into their tensors."""
    contents = Contents(model)
    held = {id(v): v for _, v in walk(model) if isinstance(v, torch.Tensor) and not isinstance(v, nn.Parameter)}
    tensors = [(v, v.detach().clone()) for v in held.values() if not v.is_meta and not _is_fake(v)]
    try:
        yield
    finally:
        contents.put_back()
        with torch.no_grad():
            for tensor, before in tensors:
                if not torch.equal(tensor, before):
                    tensor.copy_(before)


def _is_fake(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, torch._subclasses.FakeTensor)
