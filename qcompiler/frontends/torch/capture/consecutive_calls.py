"""Checks that consecutive calls of a model and of its graph agree, if a call assigns something that is kept.

Each call has other values, and sizes change between the calls if they may: a table that grows with the longest call so
far shows only then.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from qcompiler.errors import ExportError
from qcompiler.frontends.torch.capture import attributes, eager_graph
from qcompiler.frontends.torch.capture.narrowing import same_values
from qcompiler.frontends.torch.common import empty_weights

Call = tuple[tuple[Any, ...], dict[str, Any]]


def check(model: nn.Module, program: ExportedProgram, calls: Sequence[Call], doubts: Mapping[str, ExportError]) -> None:
    """Raises the first of the doubts if model and graph differ in a sequence of calls; nothing without doubts.

    `calls` are the arguments at the traced sizes and at others.  A model without values cannot be run, and then only
    tensors that keep their shape are in doubt: nothing is checked.
    """
    if not doubts or empty_weights.has_empty_parameters(model):
        return
    first = calls[0]
    sequence = [_other_numbers(call, n) for n, call in enumerate([first, first, first, *calls[1:], first])]
    wanted = _run(model, sequence)
    try:
        found = _run(eager_graph.runnable(program), sequence)
    except (RuntimeError, AssertionError, IndexError):
        found = []
    if len(wanted) != len(found) or not all(map(_same, wanted, found)):
        raise next(iter(doubts.values()))


def _run(module: nn.Module, sequence: Sequence[Call]) -> list[Any]:
    """The leaves of all results. The module is restored: model and graph share the memory of some tensors."""
    results = []
    with torch.no_grad(), attributes.unchanged(module):
        for args, kwargs in sequence:
            tree = module(*copy.deepcopy(args), **copy.deepcopy(kwargs))
            results += [
                leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf
                for leaf in pytree.tree_leaves(tree)
                if leaf is not None
            ]
    return results


def _other_numbers(call: Call, number: int) -> Call:
    """The same call with other values: floats are scaled and shifted, integers are permuted, the rest stays."""
    random = torch.Generator().manual_seed(number)

    def other(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.numel() == 0:
            return leaf
        if leaf.is_floating_point() and bool(leaf.isfinite().all()):
            noise = torch.randn(leaf.shape, generator=random, dtype=torch.float32).to(leaf)
            return leaf * (1 - number / 8) + noise
        return leaf.roll(number) if not leaf.is_floating_point() and leaf.dim() else leaf

    changed: Call = pytree.tree_map(other, call)
    return changed


def _same(a: Any, b: Any) -> bool:
    floats = isinstance(a, torch.Tensor) and a.is_floating_point()
    precision = 100 * torch.finfo(a.dtype).eps if floats else 0.0
    return same_values(a, b, relative=precision, absolute=precision)
