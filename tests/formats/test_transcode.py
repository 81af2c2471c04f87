"""Transcoding: where formats compute alike nothing is lost, elsewhere the loss is said."""

from __future__ import annotations

import numpy as np
import pytest

from qcompiler import formats
from qcompiler.config import resolve_format
from qcompiler.errors import FormatError
from qcompiler.formats.transcode import Loss, loss_of, moved, require, transcode

LOSSLESS = [
    ("q4_0", "int4:group=32"), ("int4:group=32", "q4_0"), ("q4_0", "int4:group=32,symmetric=False"),
    ("q8_0", "int8:group=32,scale=fp16"), ("int8:group=32,scale=fp16", "q8_0"), ("q4_0", "q8_0"),
    ("q4_0", "int8:group=32,scale=fp32"), ("int4:group=128", "int4:group=32,symmetric=False"),
    ("int4:group=64,symmetric=False", "int4:group=32,symmetric=False"), ("int4:group=row", "q4_0"),
    ("int3:group=64,symmetric=False", "int8:group=64,scale=fp16"), ("int2:group=32", "int3:group=32"),
    ("nf4:double_quant", "nf4"), ("fp4:double_quant,block=128", "fp4:block=128"),
    ("mxfp4", "mxfp4_ggml"), ("mxfp4_ggml", "mxfp4"), ("int4:group=32,scale=bf16", "int4:group=32,scale=fp32"),
]  # fmt: skip


def matrix(kind: str = "normal") -> np.ndarray:
    values = np.random.default_rng(7).standard_normal((6, 512)).astype(np.float32)
    if kind == "edges":
        values[0] = 0
        values[1] = 3.0
        values[2, ::32] = -4.0
        values[3] *= 1e-7
        values[4] = -np.abs(values[4])
    return values


@pytest.mark.parametrize("kind", ["normal", "edges"])
@pytest.mark.parametrize(("source", "target"), LOSSLESS)
def test_moved_codes_decode_to_the_same_bits(source: str, target: str, kind: str) -> None:
    fmt, to = resolve_format(source), resolve_format(target)
    packed = fmt.encode(matrix(kind))
    made, loss = transcode(packed, to)
    assert not loss and made.format == to
    assert moved(packed, to) is not None, "and not by chance of encoding again"
    values, again = fmt.decode(packed), to.decode(made)
    same = values.view(np.uint32) == again.view(np.uint32)
    assert (same | ((values == 0) & (again == 0))).all()


def test_there_and_back_gives_the_same_bytes() -> None:
    for one, other in (("q4_0", "int4:group=32"), ("q8_0", "int8:group=32,scale=fp16"), ("mxfp4_ggml", "mxfp4")):
        packed = resolve_format(one).encode(matrix())
        there, _ = transcode(packed, resolve_format(other))
        back, _ = transcode(there, packed.format)
        assert back.to_bytes() == packed.to_bytes()


@pytest.mark.parametrize(("source", "target"), [
    ("q4_K", "int4:group=32"), ("int4:group=32", "int4:group=64"), ("int4:group=32,symmetric=False", "q4_0"),
    ("int8", "int4:group=32"), ("nf4", "nf4:double_quant"), ("int4:group=32,scale=fp32", "q4_0"),
])  # fmt: skip
def test_a_loss_is_measured_and_has_to_be_allowed(source: str, target: str) -> None:
    packed, to = resolve_format(source).encode(matrix()), resolve_format(target)
    made, loss = transcode(packed, to)
    before, after = packed.format.decode(packed).astype(np.float64), to.decode(made).astype(np.float64)
    assert loss.largest == np.abs(after - before).max() > 0
    assert loss.relative == pytest.approx(np.linalg.norm(after - before) / np.linalg.norm(before), rel=1e-9)
    require(loss, "w", packed, to, allowed=True)
    with pytest.raises(FormatError, match=r"'w' does not go from .* without loss: relative error .*, largest"):
        require(loss, "w", packed, to, allowed=False)


def test_codes_that_only_happen_to_fit_are_moved_and_others_are_not() -> None:
    """Asymmetric int4 whose zero points all are 8 is symmetric int4; with a zero point of 3, codes leave the range."""
    fmt = formats.get("int4", group=32, symmetric=False)
    packed = formats.get("int4", group=32).encode(matrix())
    asymmetric, _ = transcode(packed, fmt)
    assert (asymmetric.section("zeros") == 8).all()
    back, loss = transcode(asymmetric, packed.format)
    assert not loss and back.to_bytes() == packed.to_bytes()
    asymmetric.section("zeros")[:] = 3
    assert moved(asymmetric, packed.format) is None
    assert not loss_of(np.zeros((2, 2), np.float32), -np.zeros((2, 2), np.float32))
    assert str(Loss()) == "no loss" and loss_of(np.zeros((1, 1), np.float32), np.ones((1, 1), np.float32)).relative > 1
