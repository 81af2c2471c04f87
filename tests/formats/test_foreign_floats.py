"""fp8, nvfp4 and MX arrays under the names of DeepSeek, ModelOpt and gpt-oss; what foreign readers import."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import torch
from torchao.prototype.mx_formats.mx_tensor import to_dtype, to_mx
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale
from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight

from qcompiler import formats
from qcompiler.errors import FormatError, FormatShapeError
from qcompiler.formats.foreign import floats
from qcompiler.formats.foreign.arrays import Arrays


def found(**arrays: npt.NDArray[Any]) -> Arrays:
    return Arrays(arrays, "model.w", "test")


def normal(rows: int, cols: int) -> npt.NDArray[np.float32]:
    return np.random.default_rng(rows).standard_normal((rows, cols)).astype(np.float32)


@pytest.mark.parametrize("shape", [(256, 384), (200, 300), (1, 129), (576, 192)])
def test_deepseeks_squares_are_read_with_short_ones_at_the_edges(shape: tuple[int, int]) -> None:
    packed = formats.get("fp8_e4m3", per="block").encode(normal(*shape))
    weight, scale = floats.write_fp8(packed)
    assert (weight.dtype, scale.dtype) == (ml_dtypes.float8_e4m3fn, np.float32)
    again = floats.read_fp8(found(weight=weight, weight_scale_inv=scale), "weight", "weight_scale_inv", "block")
    assert again.to_bytes() == packed.to_bytes()
    decoded = again.format.decode(again)
    codes = torch.from_numpy(weight.view(np.uint8)).view(torch.float8_e4m3fn)
    for i, j in np.ndindex(*scale.shape):
        square = np.s_[128 * i : 128 * i + 128, 128 * j : 128 * j + 128]
        np.testing.assert_array_equal(decoded[square], codes.float().numpy()[square] * scale[i, j])
    theirs = _dequantize_fp8_weight(codes, torch.from_numpy(scale), [128, 128], torch.float32)
    np.testing.assert_array_equal(decoded, theirs.numpy())


def test_one_square_and_one_row_are_told_apart_by_what_is_asked() -> None:
    weight = np.zeros((1, 64), ml_dtypes.float8_e5m2)
    scale = np.ones((1, 1), np.float32)
    for per in ("row", "block", "tensor"):
        packed = floats.read_fp8(found(w=weight, s=scale), "w", "s", per)  # type: ignore[arg-type]
        assert packed.format == formats.get("fp8_e5m2", per=per)
    assert floats.read_fp8(found(w=weight, s=scale), "w", "s").format.params["per"] == "row"
    with pytest.raises(FormatShapeError, match=r"s has the shape \(2, 2\); a weight of 1 x 64 has"):
        floats.read_fp8(found(w=weight, s=np.ones((2, 2), np.float32)), "w", "s")


def test_row_scales_may_be_a_vector() -> None:
    packed = formats.get("fp8_e4m3").encode(normal(7, 33))
    weight, scale = floats.write_fp8(packed)
    again = floats.read_fp8(found(w=weight, s=scale.reshape(-1)), "w", "s")
    assert again.to_bytes() == packed.to_bytes()


@pytest.mark.parametrize("of_all", ["scalar", "vector"])
def test_modelopts_global_scale_multiplies(of_all: str) -> None:
    tensor = torch.from_numpy(normal(48, 160))
    theirs = NVFP4Tensor.to_nvfp4(tensor, per_tensor_scale=per_tensor_amax_to_scale(tensor.abs().max()))
    second = theirs.per_tensor_scale.numpy().reshape(() if of_all == "scalar" else (1,))
    scale = theirs.scale.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn)
    arrays = found(weight=theirs.qdata.view(torch.uint8).numpy(), weight_scale=scale, weight_scale_2=second)
    packed = floats.read_nvfp4(arrays, "weight", "weight_scale", "weight_scale_2", divisor=False)
    np.testing.assert_array_equal(packed.format.decode(packed), theirs.dequantize(torch.float32).numpy())
    written = floats.write_nvfp4(packed, divisor=False)
    assert [a.tobytes() for a in written] == [arrays.given[n].tobytes() for n in arrays.given]
    with pytest.raises(FormatError, match=r"holds nvfp4\(divisor=True\)"):
        floats.write_nvfp4(packed, divisor=True)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float4_e2m1fn_x2])
@pytest.mark.parametrize("apart", [False, True])
def test_mx_blocks_are_torchaos(dtype: torch.dtype, apart: bool) -> None:
    tensor = torch.from_numpy(normal(24, 96))
    scale, codes = to_mx(tensor, dtype, 32)
    raw = codes.view(torch.uint8).numpy()
    kinds = {torch.float8_e4m3fn: ml_dtypes.float8_e4m3fn, torch.float8_e5m2: ml_dtypes.float8_e5m2}
    weight = raw.view(kinds[dtype]) if dtype in kinds else raw
    if apart and dtype not in kinds:
        weight = weight.reshape(24, 3, 16)
    exponents = scale.view(torch.uint8).numpy()
    stored = exponents.view(ml_dtypes.float8_e8m0fnu) if apart else exponents
    packed = floats.read_mx(found(blocks=weight, scales=stored), "blocks", "scales")
    np.testing.assert_array_equal(
        packed.format.decode(packed), to_dtype(codes, scale, dtype, 32, torch.float32).numpy()
    )
    written, power = floats.write_mx(packed)
    assert written.tobytes() == raw.tobytes()
    np.testing.assert_array_equal(power, exponents)


def test_other_formats_are_not_written() -> None:
    nf4 = formats.get("nf4").encode(normal(4, 64))
    with pytest.raises(FormatError, match="fp8 checkpoints hold"):
        floats.write_fp8(nf4)
    with pytest.raises(FormatError, match="MX checkpoints hold"):
        floats.write_mx(nf4)
    with pytest.raises(FormatError, match="this checkpoint holds"):
        floats.write_nvfp4(nf4, divisor=False)


def test_foreign_packings_need_neither_torch_nor_the_systems_themselves() -> None:
    program = (
        "import sys\n"
        "for name in ('torch', 'xdsl', 'bitsandbytes', 'compressed_tensors', 'torchao'): sys.modules[name] = None\n"
        "import numpy, qcompiler.formats as f\n"
        "from qcompiler.formats.foreign import awq, bitsandbytes, compressed_tensors, floats, gptq\n"
        "p = f.get('int4').encode(numpy.ones((32, 32), 'f4'))\n"
        "print(gptq.read(gptq.write(p), bits=4, group=32)[0].to_bytes() == p.to_bytes())"
    )
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "True", done.stderr
