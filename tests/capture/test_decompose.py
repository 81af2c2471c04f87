"""The table of decompositions is made once, and again when somebody registers an operator."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from qcompiler.frontends.torch.aten.table import BUILDERS
from qcompiler.frontends.torch.capture import decompose
from qcompiler.frontends.torch.capture.export import export_model

KEEP = frozenset(BUILDERS)


class Calls(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x) + 1


def targets(function: Any) -> set[str]:
    exported = export_model(Calls(function), (torch.ones(3, 4),), {}, None)
    return {str(node.target) for node in exported.graph.nodes if node.op == "call_function"}


def test_a_composite_operator_registered_later_is_decomposed() -> None:
    targets(nn.functional.mish)  # one that torch takes apart
    before = decompose._table(KEEP)
    assert decompose._table(KEEP) is before, "the table is made again for every model"
    library = torch.library.Library("qctestlate", "DEF")
    try:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x.sin().cos(), "CompositeImplicitAutograd")
        assert decompose._table(KEEP) is not before
        found = targets(torch.ops.qctestlate.twice)
        assert {"aten.sin.default", "aten.cos.default"} <= found
        assert not any(name.startswith("qctestlate") for name in found)
    finally:
        library._destroy()
    assert targets(nn.functional.mish) == targets(nn.functional.mish)


def test_operators_outside_of_a_trace_are_as_before() -> None:
    """Tracing replaces how torch takes composite operators; afterwards torch has its own way again."""
    x = torch.randn(3, 4)
    wanted = nn.functional.mish(x)
    kernels = dict(torch.ops.aten.instance_norm.default.py_kernels)
    targets(lambda x: nn.functional.instance_norm(nn.functional.mish(x)[None]))
    assert torch.ops.aten.instance_norm.default.py_kernels == kernels
    assert torch.equal(nn.functional.mish(x), wanted)
