"""Bad input to `qcompile` and to a program's call: an error of its own class that names the place and the way out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import qcompiler as qc
from qcompiler.errors import (
    ArgumentDtypeError,
    ArgumentError,
    ArgumentShapeError,
    ArgumentStructureError,
    DataDependentShapeError,
    FormatShapeError,
    NarrowedDimError,
    QCompilerError,
    TargetMismatchError,
    UnboundedDimError,
    UnknownFormatError,
    UnsupportedOperatorError,
)


class Of(nn.Module):
    """A linear layer, then a function."""

    def __init__(self, function: Any, width: int = 64) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(width, 32), function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self.layer(x))


def _first_rows(y: torch.Tensor) -> torch.Tensor:
    return y[:2] if y.shape[0] > 1 else y + 1


X = torch.randn(3, 64)
BAD: dict[str, tuple[Any, dict[str, Any], type[QCompilerError], str]] = {
    "operator": (Of(torch.lgamma), {}, UnsupportedOperatorError, r"aten\.lgamma.*test_bad_input\.py:\d+"),
    "data dependent": (Of(lambda y: y[y > 0]), {}, DataDependentShapeError, r"test_bad_input\.py:\d+"),
    "no maximum": (Of(torch.tanh), {"dynamic_shapes": {"x": {0: "b"}}}, UnboundedDimError, "dimension 0 of 'x'"),
    "a size of 0": (Of(torch.tanh), {"dynamic_shapes": {"x": {0: ("b", 0, 9)}}}, ArgumentError, r"\('b', 1, 9\)"),
    "range without 1": (
        Of(_first_rows),
        {"dynamic_shapes": {"x": {0: ("b", 1, 9)}}},
        NarrowedDimError,
        r"if y\.shape\[0\] > 1",
    ),
    "format": (Of(torch.tanh), {"quant": "nf5"}, UnknownFormatError, "nf5.*nf4"),
    "group": (
        Of(torch.tanh, 40),
        {"quant": qc.QuantConfig("nf4", linear="int4")},
        FormatShapeError,
        r"layer\.weight.*(32|group)",
    ),
    "isa": (Of(torch.tanh), {"targets": ["sparc"]}, TargetMismatchError, "sparc"),
}


@pytest.mark.parametrize("what", BAD)
def test_what_cannot_be_compiled_is_refused_by_qcompile(what: str) -> None:
    model, options, error, text = BAD[what]
    x = torch.randn(3, model.layer.in_features)
    with pytest.raises(error, match=text) as caught:
        qc.qcompile(model.eval(), (x,), **options)
    assert type(caught.value) is error


def test_each_kind_of_bad_input_has_a_class_of_its_own() -> None:
    classes = [error for _, _, error, _ in BAD.values()]
    assert len(set(classes)) == len(classes)


@pytest.fixture(scope="module")
def program() -> qc.Program:
    return qc.qcompile(Of(torch.tanh).eval(), (X,), dynamic_shapes={"x": {0: ("b", 1, 9)}})


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((torch.randn(3, 63),), ArgumentShapeError, r"'x'.*64"),
        ((torch.randn(10, 64),), ArgumentShapeError, r"b.*9"),
        ((torch.randn(0, 64),), ArgumentShapeError, r"b.*1"),
        ((torch.randn(64),), ArgumentShapeError, "'x'"),
        ((X.double(),), ArgumentDtypeError, r"'x'.*f(loat)?32"),
        ((X.numpy().astype(np.int32),), ArgumentDtypeError, "'x'"),
        ((X, X), ArgumentStructureError, "2"),
        ((), ArgumentStructureError, "1"),
        (((X,),), ArgumentStructureError, "x"),
        (({"x": X},), ArgumentStructureError, "x"),
    ],
    ids=["width", "above the range", "empty", "rank", "f64", "int32", "too many", "none", "tuple", "dict"],
)
def test_an_argument_that_does_not_fit_is_refused_by_the_call(
    program: qc.Program, arguments: Any, error: type[QCompilerError], text: str
) -> None:
    with pytest.raises(error, match=text):
        program(*arguments)
