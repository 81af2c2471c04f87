"""What `qcompile` takes and gives: kinds of models, dtypes, arguments, structures."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import qcompiler as qc


class Mixed(nn.Module):
    """Takes a dict, a keyword and a scale; gives a tuple with a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(64, 96), nn.Linear(96, 32), nn.LayerNorm(64)

    def forward(self, parts: dict[str, torch.Tensor], *, shift: torch.Tensor, scale: float = 1.0) -> Any:
        x = self.norm(parts["a"] + parts["b"])
        hidden = nn.functional.gelu(self.up(x)) * scale
        return hidden, {"y": [self.down(hidden) + shift], "none": None}


def arguments(dtype: torch.dtype, batch: int) -> tuple[Any, Any]:
    torch.manual_seed(batch)
    a, b, shift = (torch.randn(batch, n).to(dtype) for n in (64, 64, 32))
    return ({"a": a, "b": b},), {"shift": shift, "scale": 0.5}


SHAPES = {"parts": {"a": {0: ("b", 1, 16)}, "b": {0: ("b", 1, 16)}}, "shift": {0: ("b", 1, 16)}, "scale": None}


@pytest.mark.parametrize(
    ("dtype", "quant"),
    [
        (torch.float32, None),
        (torch.bfloat16, "nf4"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((torch.float32, "nf4"), (torch.bfloat16, None), (torch.float16, None), (torch.float16, "nf4"))
        ),
    ],
    ids=str,
)
def test_structures_and_dtypes_go_in_and_come_out(dtype: torch.dtype, quant: str | None) -> None:
    torch.manual_seed(0)
    args, kwargs = arguments(dtype, 5)
    program = qc.qcompile(Mixed().eval().to(dtype), args, kwargs, quant=quant, dynamic_shapes=SHAPES)
    for batch in (1, 2, 13):
        args, kwargs = arguments(dtype, batch)
        got, wanted = program(*args, **kwargs), program.oracle(*args, **kwargs)
        assert isinstance(got, tuple) and got[1]["none"] is None and isinstance(got[1]["y"], list)
        for ours, theirs in ((got[0], wanted[0]), (got[1]["y"][0], wanted[1]["y"][0])):
            assert ours.dtype == theirs.dtype == dtype
            error = (ours.double() - theirs.double()).norm() / theirs.double().norm()
            assert error <= 4 * torch.finfo(dtype).eps


def simple() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 48), nn.GELU(), nn.Linear(48, 32)).eval()


def _module(model: nn.Module) -> tuple[Any, dict[str, Any]]:
    return model, {"args": (torch.randn(3, 64),), "dynamic_shapes": ({0: ("b", 1, 9)},)}


def _graph_module(model: nn.Module) -> tuple[Any, dict[str, Any]]:
    return torch.fx.symbolic_trace(model), _module(model)[1]


def _exported(model: nn.Module) -> tuple[Any, dict[str, Any]]:
    dims = ({0: torch.export.Dim("b", min=1, max=9)},)
    return torch.export.export(model, (torch.randn(3, 64),), dynamic_shapes=dims), {}


@pytest.mark.parametrize("kind", [_module, _graph_module, _exported])
def test_every_kind_of_model_runs_at_every_size(kind: Any) -> None:
    model = simple()
    given, options = kind(model)
    program = qc.qcompile(given, quant="int8", **options)
    for batch in (1, 7, 9):
        x = torch.randn(batch, 64)
        torch.testing.assert_close(program(x), program.oracle(x), rtol=1e-5, atol=1e-5)
        assert isinstance(program(x.numpy()), np.ndarray)
    assert {row.format for row in program.ledger if len(row.shape) == 2} == {"int8"}


def test_a_rule_by_glob_changes_the_format_of_what_it_names_and_nothing_else() -> None:
    config = qc.QuantConfig("nf4", rules={"0*": "int8"}, promise_bits=None)
    program = qc.qcompile(simple(), (torch.randn(3, 64),), quant=config)
    stored = {entry.name: entry.format.name for entry in program.plan.weights if entry.format is not None}
    assert stored == {"0.weight": "int8", "2.weight": "nf4"}
    assert "rule" in next(row.reason for row in program.ledger if row.parameters == ("0.weight",))
