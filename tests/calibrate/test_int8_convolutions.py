"""Convolutions with int8 activations end to end: codes are multiplied, with the same bits on the CPU, on the simulated
GPU, in replays and from a saved program, and the rewritten torch program says the same up to fp32's last places."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import qcompiler as qc
from qcompiler import formats
from qcompiler.errors import RecipeError
from qcompiler.formats import int8_rows, integer_product


class Layers(nn.Module):
    """A convolution of an image, and one of a line behind it."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.image = nn.Conv2d(33, 24, 3, stride=2, padding=1)
        self.line = nn.Conv1d(24, 19, 3, padding=2, dilation=2, bias=False)
        self.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.line(torch.relu(self.image(x)).flatten(2))


def images(batch: int, height: int, width: int, seed: int = 0) -> torch.Tensor:
    x = torch.randn(batch, 33, height, width, generator=torch.Generator().manual_seed(seed))
    x[0, seed % 33, 1, 2] = 9.5
    return x


def compiled(model: nn.Module, x: torch.Tensor, weights: str = "int8", **more: Any) -> qc.Program:
    recipe = qc.QuantConfig(weights, activations=more.pop("activations", "int8"), promise_bits=None)
    return qc.qcompile(model.eval(), (x,), quant=recipe, verify_each="numerics", **more)


def convolved(x: np.ndarray, weight: torch.Tensor, bias: torch.Tensor | None, name: str, **given: Any) -> np.ndarray:
    """A convolution of (b, h, w, c) as formats/ defines it, in NumPy: (b, h', w', o)."""
    o, c, kh, kw = weight.shape
    packed = formats.get(name).encode(weight.detach().permute(0, 2, 3, 1).reshape(o, kh * kw * c).numpy())
    largest = np.abs(x).reshape(len(x), -1).max(axis=1)
    rows = int8_rows.quantise(x, "image", 0.0, None, largest)
    seen = int8_rows.windows(rows, c, kernel=(kh, kw), **given)
    flat = seen.reshape(-1, seen.shape[-1])
    codes, scales = int8_rows.codes_of(flat, packed.cols), int8_rows.scales_of(flat, packed.cols)
    out = integer_product.multiply(codes, scales, packed)
    out = out if bias is None else out + bias.detach().numpy()
    return out.reshape(*seen.shape[:3], o)


def defined(model: Layers, x: torch.Tensor, name: str) -> np.ndarray:
    given: Any = {"strides": (2, 2), "padding": (1, 1, 1, 1), "dilation": (1, 1)}
    y = convolved(x.permute(0, 2, 3, 1).contiguous().numpy(), model.image.weight, model.image.bias, name, **given)
    y = np.maximum(y, 0).reshape(len(y), 1, -1, y.shape[-1])
    line: Any = {"strides": (1, 1), "padding": (0, 2, 0, 2), "dilation": (1, 2)}
    return convolved(y, model.line.weight.unsqueeze(2), None, name, **line)[:, 0].transpose(0, 2, 1)


@pytest.mark.slow
def test_codes_are_multiplied_to_the_bit_at_every_size() -> None:
    model = Layers()
    dims = {"x": {0: ("b", 1, 4), 2: ("h", 6, 40), 3: ("w", 6, 40)}}
    cpu = compiled(model, images(2, 12, 13), dynamic_shapes=dims)
    assert "qc.dequantize_rows" not in cpu.ir("select-kernels") and "qc.conv2d" not in cpu.ir("select-kernels")
    report = str(cpu.report())
    assert "int8, a scale per image; multiplied as integers  [image.weight and 1 more]" in report
    for size in ((1, 6, 8), (3, 11, 40)):
        x = images(*size)
        expected = defined(model, x, "int8")
        assert (cpu(x).detach().numpy() == expected).all(), size
        oracle = cpu.oracle(x).detach().numpy()
        assert np.abs(oracle - expected).max() < 2e-6 * np.abs(expected).max()


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["int8", "int4:group=32", "q4_0"])
def test_the_simulated_gpu_and_its_replays_have_the_same_bits(weights: str) -> None:
    model = nn.Sequential(nn.Conv2d(32, 24, (3, 2), padding=1), nn.ReLU())
    x = torch.randn(2, 32, 9, 8)
    cpu, gpu = compiled(model, x, weights), compiled(model, x, weights, device="sim:0")
    graph = gpu.capture(x.numpy())
    for seed in range(3):
        x = torch.randn(2, 32, 9, 8, generator=torch.Generator().manual_seed(seed))
        expected = cpu(x).detach().numpy()
        assert (np.asarray(gpu(x.numpy())) == expected).all()
        assert (np.asarray(graph.replay(x.numpy())) == expected).all(), f"replay {seed}"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_models_of_16_bits_round_once(dtype: torch.dtype) -> None:
    model = nn.Conv2d(40, 24, 3, padding=1).to(dtype)
    x = torch.randn(2, 40, 7, 9).to(dtype)
    program = compiled(model, x)
    given: Any = {"strides": (1, 1), "padding": (1, 1, 1, 1), "dilation": (1, 1)}
    pixels = x.float().permute(0, 2, 3, 1).contiguous().numpy()
    found = convolved(pixels, model.weight.float(), model.bias.float(), "int8", **given)
    wanted = torch.from_numpy(found.transpose(0, 3, 1, 2)).to(dtype)
    assert torch.equal(program(x), wanted)


@pytest.mark.slow
def test_a_saved_program_has_the_same_bits(tmp_path: Path) -> None:
    model, x = Layers(), images(2, 12, 13)
    program = compiled(model, x)
    program.save(tmp_path / "conv.qca")
    assert (np.asarray(qc.load(tmp_path / "conv.qca")(x.numpy())) == program(x).detach().numpy()).all()


def test_one_image_changes_no_other_and_a_nan_stays_in_its_own() -> None:
    model = nn.Conv2d(24, 8, 3, padding=1)
    program = compiled(model, torch.randn(3, 24, 6, 5))
    x = torch.randn(3, 24, 6, 5)
    before = program(x)
    x[1] *= 100
    x[2, 3, 4, 4] = torch.nan
    after = program(x)
    assert torch.equal(before[0], after[0]) and after[2].isnan().all() and not after[1].isnan().any()


@pytest.mark.slow
def test_convolutions_that_keep_floats_say_why() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Conv2d(3, 32, 3)
            self.up = nn.ConvTranspose2d(32, 24, 2, stride=2)
            self.grouped = nn.Conv2d(24, 24, 3, groups=3)
            self.whole = nn.Conv2d(24, 8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.whole(self.grouped(self.up(self.stem(x))))

    model, x = Mixed(), torch.randn(1, 3, 8, 8)
    report = str(compiled(model, x).report())
    assert "a pixel of 3 channels takes 12 bytes in fp32 and 96 as a row of int8  [stem.weight]" in report
    assert "not quantised: the windows of a transposed convolution" in report
    assert "grouped convolution: its kernels read plain numbers" in report
    assert "int8, a scale per image; multiplied as integers  [whole.weight]" in report
    for kind in ("llm_int8", "int8:static"):
        both = nn.Sequential(nn.Conv2d(24, 24, 3), nn.Flatten(2), nn.Linear(16, 8))
        image = torch.randn(1, 24, 6, 6)
        given = {"calibrate": [image]} if kind == "int8:static" else {}
        text = str(compiled(both, image, activations=kind, **given).report())
        assert "not quantised: the inputs of convolutions take a scale per image, activations='int8', not" in text, kind


@pytest.mark.slow
def test_formats_without_an_integer_product_round_in_fp32_and_say_so() -> None:
    model, x = nn.Conv2d(64, 24, 3, padding=1), torch.randn(2, 64, 7, 7)
    program = compiled(model, x, "nf4:block=64")
    assert "multiplied in floating point: codes of nf4" in str(program.report())
    found, oracle = program(x), program.oracle(x)
    assert (found - oracle).norm() < 1e-5 * oracle.norm()
    plain = qc.qcompile(model.eval(), (x,), quant=qc.QuantConfig("nf4:block=64", promise_bits=None))(x)
    assert 1e-4 < (found - plain).norm() / plain.norm() < 0.05  # the inputs are rounded


def test_a_model_without_a_quantised_product_is_refused() -> None:
    with pytest.raises(RecipeError, match="none of them has a quantised weight"):
        compiled(nn.Conv2d(24, 24, 3, groups=24), torch.randn(1, 24, 6, 6))
