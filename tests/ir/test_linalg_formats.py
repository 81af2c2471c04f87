"""The decoder in linalg refuses bytes that it was not written for, instead of reading them as others."""

from __future__ import annotations

import pytest
from xdsl.builder import Builder, InsertPoint
from xdsl.ir import Block

from qcompiler.config import parse_format
from qcompiler.errors import QCompilerError
from qcompiler.ir.linalg_formats import decode_weight
from qcompiler.ir.types import QTensorType


@pytest.mark.parametrize(
    "text",
    [
        "nf4:double_quant",
        "int8:group=32",
        "int8:symmetric=False",
        "int4:scale=fp32",
        "int4:group=row",
        "fp4",
        "llm_int8",
    ],
)
def test_later_formats_and_parameters_are_refused_by_name(text: str) -> None:
    block = Block()
    builder = Builder(InsertPoint.at_end(block))
    type_ = QTensorType.of((4, 256), "f32", parse_format(text))
    with pytest.raises(QCompilerError, match=f"the format '{text.partition(':')[0]}'.* has no decoder in linalg yet"):
        decode_weight(builder, type_, {})
    assert block.is_empty
