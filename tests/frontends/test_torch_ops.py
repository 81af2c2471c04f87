"""The torch operators against `fmt.decode` and `fmt.encode`, which were written separately from the same documents."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from qcompiler import formats
from qcompiler.config import format_text, parse_format, resolve_format
from qcompiler.errors import UnknownFormatError
from qcompiler.formats import Format, from_bytes
from qcompiler.formats.doc import variants
from qcompiler.frontends.torch.qc_ops import torch_ops  # noqa: F401  (registers the operators)
from qcompiler.plan.kernel import FormatRef


def every_variant() -> list[Format]:
    return [fmt for cls in formats.FORMATS.values() for fmt in variants(cls)]


FORMATS = [
    "nf4", "nf4:block=128", "nf4:block=4096", "int8", "int4", "int4:group=64", "int4:group=32,symmetric=False",
    "int4:group=128,symmetric=False",
]  # fmt: skip
SHAPES = [(5, 128), (1, 256), (16, 384)]
ODD = [(3, 7), (1, 1), (33, 5), (7, 65)]


def _cases() -> list[tuple[str, tuple[int, int]]]:
    return [(f, s) for f in FORMATS for s in (SHAPES if f.startswith("int4") else [*SHAPES, *ODD])]


def _weights(shape: tuple[int, int]) -> np.ndarray:
    w = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    w[0, :] *= 0  # a row of zeros
    return w


@pytest.mark.parametrize(("name", "shape"), _cases())
def test_dequantize_equals_the_numpy_decoder_to_the_bit(name: str, shape: tuple[int, int]) -> None:
    fmt = resolve_format(name)
    packed = fmt.encode(_weights(shape))
    text = format_text(parse_format(name))
    found = torch.ops.qc.dequantize(torch.from_numpy(packed.data), text, list(shape), torch.float32)
    assert np.array_equal(found.numpy(), fmt.decode(packed))


DECLARED = [format_text(parse_format(text)) for text in (
    "nf4:double_quant=True", "nf4:block=32,double_quant=True", "fp4:block=128", "fp4:double_quant=True", "llm_int8",
    "int8:group=64", "int8:symmetric=False", "int8:group=32,symmetric=False,scale=bf16", "int4:group=row",
    "int4:group=row,symmetric=False", "int4:scale=bf16", "int4:group=64,symmetric=False,scale=fp32", "int3:group=64",
    "int3:group=row,symmetric=False", "int2", "int2:group=128,symmetric=False,scale=fp32",
)]  # fmt: skip
EVERY = sorted({*DECLARED, *(format_text(FormatRef(name=f.name, params=f.params)) for f in every_variant())})


# NumPy takes long to encode a trellis; random bytes of one are decoded below.
BY_COST = [pytest.param(name, marks=[pytest.mark.slow] * (resolve_format(name).name == "tq")) for name in EVERY]


@pytest.mark.parametrize("name", BY_COST)
def test_every_declared_format_decodes_in_torch_to_the_bit(name: str) -> None:
    fmt = resolve_format(name)
    flat = fmt.declaration.blocking == "flat" or fmt.declaration.tail == "short"
    for shape in [(5, 256), (130, 768), *(ODD if flat else [])]:
        packed = fmt.encode(_weights(shape))
        found = torch.ops.qc.dequantize(torch.from_numpy(packed.data), name, list(shape), torch.float32)
        assert found.numpy().tobytes() == fmt.decode(packed).tobytes(), shape


def test_random_bytes_of_every_format_decode_in_torch_to_the_bit() -> None:
    """Also codes that no encoder writes."""
    rng = np.random.default_rng(0)
    for name in EVERY:
        fmt = resolve_format(name)
        data = rng.integers(0, 256, fmt.nbytes(9, 512), np.uint8)
        found = torch.ops.qc.dequantize(torch.from_numpy(data), name, [9, 512], torch.float32)
        with np.errstate(all="ignore"):
            np.testing.assert_array_equal(found.numpy(), fmt.decode(from_bytes(fmt, 9, 512, data)), err_msg=name)


def test_formats_that_torch_does_not_encode_are_refused_by_name() -> None:
    for text in ("fp4:block=64", "nf4:block=64,double_quant=True", "int8:group=64", "int4:group=row,symmetric=True"):
        with pytest.raises(UnknownFormatError, match=f"does not encode '{text}'; it encodes nf4"):
            torch.ops.qc.quantize(torch.zeros(2, 64), text)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dequantize_rounds_once(dtype: torch.dtype) -> None:
    packed = torch.from_numpy(resolve_format("nf4").encode(_weights((4, 64))).data)
    wide = torch.ops.qc.dequantize(packed, "nf4:block=64", [4, 64], torch.float32)
    assert torch.equal(torch.ops.qc.dequantize(packed, "nf4:block=64", [4, 64], dtype), wide.to(dtype))


@pytest.mark.parametrize(("name", "shape"), _cases())
def test_quantize_equals_the_numpy_encoder_to_the_byte(name: str, shape: tuple[int, int]) -> None:
    w = _weights(shape)
    found = torch.ops.qc.quantize(torch.from_numpy(w), format_text(parse_format(name)))
    assert np.array_equal(found.numpy(), resolve_format(name).encode(w).data)


@pytest.mark.parametrize("name", ["nf4:block=64", "int8", "int4:group=32,symmetric=False"])
def test_operators_pass_torchs_own_checks(name: str) -> None:
    x = torch.from_numpy(_weights((4, 128)))
    packed = torch.ops.qc.quantize(x, name)
    torch.library.opcheck(torch.ops.qc.quantize.default, (x, name))
    torch.library.opcheck(torch.ops.qc.dequantize.default, (packed, name, [4, 128], torch.bfloat16))


def test_quantize_flattens_leading_dims_and_traces_with_dynamic_rows() -> None:
    x = torch.randn(2, 3, 64)
    assert torch.equal(torch.ops.qc.quantize(x, "int8"), torch.ops.qc.quantize(x.reshape(6, 64), "int8"))

    class Quantize(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.ops.qc.quantize(x, "int8")

    program = torch.export.export(
        Quantize(), (torch.randn(3, 64),), dynamic_shapes=({0: torch.export.Dim("b", min=1, max=9)},)
    )
    assert program.module()(torch.randn(5, 64)).numel() == 5 * 64 + 5 * 4


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(UnknownFormatError, match="nf3"):
        torch.ops.qc.dequantize(torch.zeros(4, dtype=torch.uint8), "nf3", [2, 2], torch.float32)
