"""Whether a step reads the states that it keeps.

A layer of transformers may write a state in every call and read it only in calls of one token: its path for several
tokens is then that of a prompt, which begins without a state.  The step is traced with several tokens, so that each
call of such a program would forget the ones before it.  No error would say so.

The check follows numbers, not values: one call on fake tensors, in which each result notes the states that it depends
on.  It needs no weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from qcompiler.errors import ExportError
from qcompiler.frontends.torch.capture.expert_weights import as_pairs

_aten = torch.ops.aten
_SHAPES_ONLY = {
    _aten.zeros_like, _aten.ones_like, _aten.empty_like, _aten.full_like, _aten.new_zeros, _aten.new_ones,
    _aten.new_empty, _aten.new_full, _aten.new_empty_strided,
}  # fmt: skip
"""Operators whose result has the shape of its argument, and none of its numbers."""


class _Origins(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Notes for each storage the states that its numbers depend on."""

    def __init__(self, states: dict[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.held: list[torch.UntypedStorage] = []  # a storage that is alive gives its address to no other
        self.found: dict[int, frozenset[str]] = {}
        for name, tensor in states.items():
            self._add(tensor, frozenset({name}))

    def of(self, value: Any) -> frozenset[str]:
        """The states that any tensor in `value` depends on."""
        tensors = [each for each in tree_iter(value) if isinstance(each, torch.Tensor)]
        return frozenset().union(*(self.found.get(_storage(each)._cdata, frozenset()) for each in tensors))

    def _add(self, tensor: torch.Tensor, names: frozenset[str]) -> None:
        storage = _storage(tensor)
        self.held.append(storage)
        self.found[storage._cdata] = self.found.get(storage._cdata, frozenset()) | names

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        names = self.of((args, given))
        results = func(*args, **given)
        if names and func.overloadpacket not in _SHAPES_ONLY:
            for each in tree_iter(results):
                if isinstance(each, torch.Tensor):
                    self._add(each, names)
        return results


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()


def check_read(step: nn.Module, model: nn.Module, names: list[str], inputs: dict[str, torch.Tensor]) -> None:
    """ExportError if the logits of a call with `inputs` do not depend on each of the step's buffers in `names`."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    origins = _Origins({name: step.get_buffer(name) for name in names})
    with torch.no_grad(), as_pairs(model), FakeTensorMode(allow_non_fake_inputs=True), origins:
        logits, _ = step(**inputs)
    unread = sorted(set(names) - origins.of(logits))
    if unread:
        raise ExportError(
            f"{type(model).__name__} keeps the states {', '.join(unread)} and does not read them in a call of several "
            "tokens, so that a text that is read in several calls would be forgotten. transformers' implementation "
            "of this model must read its states in such calls, too"
        )


__all__ = ["check_read"]
