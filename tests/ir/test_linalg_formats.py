"""The decoders in linalg, written from the formats' documents, give the values of `Format.decode` bit for bit."""

from __future__ import annotations

import format_cases
import linalg_cases
import numpy as np
import pytest
from by_path import ROOT
from xdsl.builder import Builder, InsertPoint
from xdsl.ir import Block

from qcompiler import formats
from qcompiler.errors import QCompilerError
from qcompiler.ir import linalg_formats
from qcompiler.ir.context import QCContext
from qcompiler.ir.interpreter import run
from qcompiler.ir.mlir_oracle import arguments_of
from qcompiler.ir.types import QTensorType
from qcompiler.passes.lower_qc_to_linalg import LowerQcToLinalgPass
from qcompiler.plan.kernel import FormatRef
from qcompiler.plan.weights import NUMPY_DTYPES


def test_every_format_has_a_decoder() -> None:
    assert set(linalg_formats.DECODERS) == set(formats.names())


def test_the_page_counts_the_choices_of_parameters() -> None:
    text = (ROOT / "docs" / "mlir.md").read_text()
    assert f"({sum(len(format_cases.all_parameters(name)) for name in formats.names())} in all)" in text


def _bits(x: np.ndarray) -> np.ndarray:
    """The bits of floats; all NaNs count as one."""
    return np.where(np.isnan(x.astype(np.float32)), x.dtype.type(np.nan), x).view(f"i{x.itemsize}")


@pytest.mark.parametrize("name", formats.names())
def test_decoders_give_the_bits_of_the_definition_for_all_parameters(name: str) -> None:
    for number, params in enumerate(format_cases.all_parameters(name)):
        fmt, shape = formats.get(name, **params), format_cases.shape_of(name, params)
        for data in (format_cases.encoded(name, params), format_cases.arbitrary(name, params)):
            if data is None:
                continue
            dtype = ("f32", "bf16", "f16")[number % 3]
            case = linalg_cases.decoded(name, shape, data, dtype, **params)
            LowerQcToLinalgPass().apply(QCContext.default(), case.module)
            got = run(case.module, case.weights, arguments_of(case.module, case.weights, []))[0]
            with np.errstate(all="ignore"):
                wanted = fmt.decode(formats.from_bytes(fmt, *shape, data)).astype(NUMPY_DTYPES[dtype])
            np.testing.assert_array_equal(_bits(got), _bits(wanted), str(fmt))


def test_a_format_without_a_decoder_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(linalg_formats.DECODERS, "nf4")
    type_ = QTensorType.of((4, 256), "f32", FormatRef(name="nf4", params={"block": 64}))
    with pytest.raises(QCompilerError, match="the format 'nf4' has no decoder in linalg"):
        linalg_formats.decode_weight(Builder(InsertPoint.at_end(Block())), type_, {})


def test_another_layout_than_the_canonical_one_is_refused() -> None:
    type_ = QTensorType.of((16, 64), "f32", FormatRef(name="nf4", params={"block": 64}), "cpu_p16_v2")
    with pytest.raises(QCompilerError, match=r"canonical bytes only, not layout 'cpu_p16_v2'.* before the stage pack"):
        linalg_formats.decode_weight(Builder(InsertPoint.at_end(Block())), type_, {})
