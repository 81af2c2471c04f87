"""The third oracle: upstream MLIR compiles each model of the suite from `to_mlir`'s text and agrees with eager torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import upstream_cases
from by_path import load

from qcompiler.ir.mlir_oracle import mlir_jit, parses_in_mlir

zoo = load("tests/models/zoo.py")
vision = load("tests/models/test_vision.py")

FORMATS = (
    "nf4", "int4", "q8_0", "int8", "nf4:double_quant", "q4_0", "fp8_e4m3", "mxfp4", "int3", "q5_1", "nvfp4", "iq4_nl",
    "fp4", "mxfp8", None, "llm_int8", "int4:symmetric=False", "q4_1", "int2:group=64", "q5_0", "mxfp4_ggml", "fp8_e5m2",
)  # fmt: skip
NAMES = (*zoo.ZOO, *zoo.TEXT)


def agree(model: torch.nn.Module, example: dict[str, Any], inputs: dict[str, torch.Tensor], **options: Any) -> None:
    imported, module = upstream_cases.lowered(model, (), example, **options)
    parses_in_mlir(module.text, upstream_only=True)
    with torch.no_grad():
        wanted = upstream_cases.leaves(imported.quantized.module(**inputs))
    got = mlir_jit(module.text, module.arguments(*(x.numpy() for x in inputs.values())))
    assert len(got) == module.outputs == len(wanted)
    for ours, theirs in zip(got, wanted, strict=True):
        assert ours.shape == theirs.shape
        assert np.linalg.norm(ours - theirs) <= 2e-5 * np.linalg.norm(theirs)


@pytest.mark.parametrize("name", NAMES)
def test_text_models(name: str) -> None:
    number = NAMES.index(name)
    case = zoo.ZOO[name]() if name in zoo.ZOO else zoo.TEXT[name].case(masked=number % 2 == 1)
    agree(
        case.model, case.example, case.inputs, quant=FORMATS[number % len(FORMATS)], dynamic_shapes=case.dynamic_shapes
    )
