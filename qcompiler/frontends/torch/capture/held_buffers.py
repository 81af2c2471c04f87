"""Buffers that replace, during a trace, the tensors that a model holds without registering them.

torch.export sees such a tensor as a constant, and really writes it if no argument takes part (`length.add_(1)`): the
graph would not contain that write.  While a model is traced here, every call finds buffers in those places instead.  A
place that a call assigns (`self.h = …`) finds a copy of its buffer; at the end of the call, the value of the place is
copied into the buffer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from qcompiler.frontends.torch.capture import attributes
from qcompiler.frontends.torch.capture.attributes import Place


@dataclass
class _Bound:
    place: Place
    value: torch.Tensor
    """The value of the place outside a call."""
    buffer: str
    """The name of the registered buffer that replaces it."""


class HeldBuffers:
    """The buffers for one trace.

    `states` are the paths that a call assigns; `ends` are, by path, the values after the first call: two places are one
    state if they are one tensor before and after it.  With `states=None`, only tensors of plain objects are held, and
    torch.export handles a module's own attributes.
    """

    def __init__(self, model: nn.Module, states: Set[str] | None, ends: Mapping[str, Any]) -> None:
        self.model, self.states = model, states or frozenset()
        self.names: dict[str, str] = {}
        """Paths by the names of buffers: an attribute of a module gives its state its own path."""
        self._made: dict[str, torch.Tensor] = {}
        self._bound: list[_Bound] = []
        known: dict[Any, str] = {id(b): name for name, b in model.named_buffers(remove_duplicate=False)}
        direct = {id(vars(module)) for module in model.modules()}
        for place, value in attributes.walk(model):
            of_module = place.registered or id(place.owner) in direct
            assigned = place.path in self.states
            if not isinstance(value, torch.Tensor) or isinstance(value, nn.Parameter):
                continue
            if not assigned and (_is_registered(model, place) or (states is None and of_module)):
                continue
            key = (id(value), id(ends.get(place.path))) if assigned else id(value)
            if key not in known:
                name = known[key] = self._free_name(place.path.replace(".", "_"))
                self._made[name] = value.detach().clone() if assigned else value
                if of_module:
                    self.names[name] = place.path
            self._bound.append(_Bound(place, value, known[key]))

    def _free_name(self, wanted: str) -> str:
        name = wanted
        while hasattr(self.model, name) or name in self._made:
            name += "_held"
        return name

    @contextlib.contextmanager
    def registered(self) -> Iterator[None]:
        """Inside, the buffers are registered at the model itself."""
        for name, value in self._made.items():
            self.model.register_buffer(name, value, persistent=False)
        try:
            yield
        finally:
            for name in self._made:
                delattr(self.model, name)

    def bind(self) -> None:
        """Puts the buffers into the places. Called at the beginning of a call of the model."""
        copies: dict[str, torch.Tensor] = {}
        for bound in self._bound:
            buffer = self.model.get_buffer(bound.buffer)
            if bound.place.path in self.states:
                buffer = copies[bound.buffer] if bound.buffer in copies else buffer.clone()
                copies[bound.buffer] = buffer
            bound.place.set(buffer)

    def write_states(self, now: Mapping[str, Any]) -> None:
        """Copies the values of the states' places at the end of the call into their buffers."""
        news = {b.buffer: now.get(b.place.path) for b in self._bound if b.place.path in self.states}
        values = {name: value.clone() for name, value in news.items() if isinstance(value, torch.Tensor)}
        for name, value in values.items():
            self.model.get_buffer(name).copy_(value)

    def release(self) -> None:
        """Restores the previous values of the places."""
        for bound in self._bound:
            bound.place.set(bound.value)

    def overlaps(self) -> list[tuple[str, str]]:
        """Pairs of a state's path and another path whose tensors share memory before a call, but are not one state."""
        values = {place.path: value for place, value in attributes.walk(self.model)}
        return sharing(values, self.states, self.buffers)

    @property
    def buffers(self) -> dict[str, str]:
        """The names of buffers by the paths of the places that they replace."""
        return {bound.place.path: bound.buffer for bound in self._bound}


def _is_registered(model: nn.Module, place: Place) -> bool:
    """Whether torch.export itself sees the place as a buffer of the model."""
    parent, _, name = place.path.rpartition(".")
    try:
        module = model.get_submodule(parent)
    except AttributeError:
        return False
    return place.registered and module._buffers is place.owner and name in module._buffers


def sharing(values: Mapping[str, Any], states: Set[str], one: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Pairs of a state's path and another path whose tensors share memory, unless `one` says they are one."""
    memories: dict[int, list[str]] = {}
    for path, value in values.items():
        if isinstance(value, torch.Tensor) and value.numel() != 0:
            memories.setdefault(value.untyped_storage()._cdata, []).append(path)
    pairs = []
    for paths in memories.values():
        for state in (path for path in paths if path in states):
            others = (p for p in paths if p != state and (p not in one or one[p] != one.get(state)))
            pairs += [(state, other) for other in others]
    return pairs
