"""`QuantConfig(compute=…)`: the arithmetic of linears, convolutions and experts against the oracle, on every device."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import qcompiler as qc
from qcompiler.config import Activations
from qcompiler.errors import RecipeError
from qcompiler.runtime.bf16_units import UNITS, bf16_units
from qcompiler.runtime.isa import host_isa

SHAPES = {"x": {0: ("s", 1, 100)}}


class Block(nn.Module):
    """q, k and v of one norm, and what reads them."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(128)
        self.q, self.k, self.v = (nn.Linear(128, 64) for _ in range(3))
        self.out = nn.Linear(64, 128, bias=False)
        self.to(dtype).eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.norm(x)
        return x + self.out(torch.tanh(self.q(rows)) * self.k(rows) + self.v(rows))


class Tied(nn.Module):
    """An embedding whose table is the head's weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(96, 64)
        self.head = nn.Linear(64, 96, bias=False)
        self.head.weight = self.embed.weight
        self.eval()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(ids))


def compiled(compute: str | None, dtype: torch.dtype = torch.float32, weights: str = "nf4", **more: Any) -> qc.Program:
    recipe = qc.QuantConfig(weights, compute=compute, promise_bits=None)
    return qc.qcompile(
        Block(dtype), (torch.randn(7, 128).to(dtype),), quant=recipe, dynamic_shapes=SHAPES, verify_each="numerics",
        **more,
    )  # fmt: skip


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    wide = a.detach().double(), b.detach().double()
    return float((wide[0] - wide[1]).norm() / wide[1].norm())


def x_of(rows: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(rows, 128, generator=torch.Generator().manual_seed(rows)).to(dtype)


@pytest.mark.parametrize("weights", ["nf4", "q4_0", "int8"])
def test_bf16_is_the_oracle_up_to_one_rounding_of_a_factor(weights: str) -> None:
    program, exact = compiled("bf16", weights=weights), compiled("exact", weights=weights)
    for rows in (1, 7, 100):
        x = x_of(rows)
        given, oracle = program(x), program.oracle(x)
        assert apart(given, oracle) < 2e-3
        assert 1e-5 < apart(oracle, exact.oracle(x)) < 4e-3, "the oracle rounds as well"
        assert apart(exact(x), exact.oracle(x)) < 1e-6


def test_the_kernel_multiplies_what_the_ir_says() -> None:
    program = compiled("bf16")
    assert "xbf16, #qc.format" in program.ir("fuse-dequant-matmul")
    chosen = [choice.what for choice in program.report().choices if choice.stage == "compute"]
    assert chosen == ["bf16 arithmetic, x is float32"] * 4
    assert weight_types(program) == {"bf16"}
    launches = [len(p.plan.entries[0].steps) for p in (program, compiled("exact"))]
    assert launches[0] == launches[1], "no launch for the rounding of x"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_exact_widens_the_rows_of_a_narrow_model(dtype: torch.dtype) -> None:
    program = compiled("exact", dtype)
    for rows in (1, 100):
        x = x_of(rows, dtype)
        assert apart(program(x), program.oracle(x)) < (4e-3 if dtype == torch.bfloat16 else 6e-4)


def weight_types(program: qc.Program) -> set[str]:
    return {kernel.operands[1].dtype for kernel in program.plan.kernels if kernel.template == "linear"}


def test_a_model_in_bf16_has_bf16_arithmetic_unless_told_otherwise() -> None:
    assert weight_types(compiled(None, torch.bfloat16)) == {"bf16"}
    assert weight_types(compiled("exact", torch.bfloat16)) == {"f32"}
    assert weight_types(compiled(None)) == {"f32"}


@pytest.mark.parametrize("compute", ["bf16", "exact"])
def test_a_gpu_multiplies_the_same(compute: str) -> None:
    dtype = torch.float32 if compute == "bf16" else torch.bfloat16
    program = compiled(compute, dtype, device="sim:0")
    for rows in (1, 20):
        x = x_of(rows, dtype)
        assert apart(program(x), program.oracle(x)) < (1e-6 if compute == "bf16" else 4e-3)


def test_a_tied_weight_is_decoded_in_two_types_from_one_buffer(tmp_path: Path) -> None:
    recipe = qc.QuantConfig("int8", compute="bf16")
    program = qc.qcompile(Tied(), (torch.arange(9),), quant=recipe, verify_each="numerics")
    assert len(program.plan.weights) == 1
    given = program(torch.arange(9))
    assert apart(given, program.oracle(torch.arange(9))) < 2e-3
    program.save(tmp_path / "tied.qca")
    assert torch.equal(torch.as_tensor(qc.load(tmp_path / "tied.qca")(torch.arange(9).numpy())), given)


def test_another_arithmetic_in_place_of_int8_leaves_floats() -> None:
    recipe = qc.QuantConfig("int8", compute="int8")
    assert replace(recipe, compute="exact").inputs is None
    assert replace(recipe, compute=None).inputs is None and replace(recipe, compute=None).attention is None
    assert replace(recipe, activations="int8:static", compute=None).inputs == Activations("tensor")


def test_int8_is_the_same_as_activations() -> None:
    assert qc.QuantConfig("int8", compute="int8").inputs == qc.QuantConfig("int8", activations="int8").inputs
    assert qc.QuantConfig("int8", compute="int8", activations="llm_int8").inputs == Activations("outliers")
    x = x_of(5)
    ours = qc.qcompile(Block(), (x,), quant=qc.QuantConfig("int8", compute="int8"))(x)
    assert torch.equal(ours, qc.qcompile(Block(), (x,), quant=qc.QuantConfig("int8", activations="int8"))(x))


def test_linears_that_multiply_integers_keep_them() -> None:
    recipe = qc.QuantConfig("int8", rules={"out": "nf4"}, activations="int8", compute="bf16", promise_bits=None)
    program = qc.qcompile(Block(), (x_of(5),), quant=recipe)
    linears = [kernel for kernel in program.plan.kernels if kernel.template == "linear"]
    assert {(kernel.body.codes, kernel.operands[1].dtype) for kernel in linears} == {(True, "f32"), (False, "bf16")}


def test_a_recipe_without_quantised_linears_has_no_arithmetic_to_choose() -> None:
    with pytest.raises(
        RecipeError, match="compute='bf16', and no linear, convolution or expert has a quantised weight"
    ):
        qc.qcompile(Block(), (x_of(5),), quant=qc.QuantConfig("float", compute="bf16"))


def test_outliers_of_llm_int8_keep_their_precision() -> None:
    recipe = qc.QuantConfig("int8", activations="llm_int8", compute="bf16")
    program = qc.qcompile(Block(), (x_of(5),), quant=recipe)
    assert weight_types(program) == {"f32"}


@pytest.mark.parametrize("compute", ["fp16", "", 16])
def test_other_words_are_refused(compute: Any) -> None:
    with pytest.raises(RecipeError, match="compute="):
        qc.QuantConfig("nf4", compute=compute)


# --- convolutions ----------------------------------------------------------------------------------------------------


class Image(nn.Module):
    """Convolutions of 3 x 3, with strides, of 1 x 1, transposed, in groups, over one dimension, and one of 4 x 4
    patches, whose windows are a view."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.GroupNorm(4, 32)
        self.wide = nn.Conv2d(32, 64, 3, padding=1)
        self.down = nn.Conv2d(64, 32, 3, stride=2, padding=(1, 2), dilation=(1, 2))
        self.point = nn.Conv2d(32, 32, 1)
        self.up = nn.ConvTranspose2d(32, 16, 4, 2, 1)
        self.each = nn.Conv2d(32, 32, 3, groups=32)
        self.line = nn.Conv1d(32, 16, 5, padding=2)
        self.patch = nn.Conv2d(32, 64, 4, stride=4)
        self.to(dtype).eval()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        image = nn.functional.silu(self.norm(x))
        down = self.down(self.wide(image).relu())
        return self.up(self.point(down)), self.each(image), self.line(image.flatten(2)), self.patch(x), down


WINDOWS = ("wide", "down", "up", "line")
CONVOLUTIONS = (*WINDOWS, "point", "patch")


def image_of(batch: int, height: int, width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    seed = torch.Generator().manual_seed(batch + height)
    return torch.randn(batch, 32, height, width, generator=seed).to(dtype)


def convolving(compute: str | None, dtype: torch.dtype = torch.float32, weights: str = "int8", **more: Any) -> Any:
    recipe = qc.QuantConfig(weights, compute=compute, promise_bits=None, **more.pop("recipe", {}))
    x, batch = image_of(2, 16, 16, dtype), {"x": {0: ("b", 1, 8)}}
    return qc.qcompile(Image(dtype), (x,), quant=recipe, dynamic_shapes=batch, verify_each="numerics", **more)


def products(program: qc.Program) -> set[tuple[bool, str, str]]:
    """(whether x is windows of an image, the type of x, that of the weight) of all kernels of linears."""
    linears = [kernel for kernel in program.plan.kernels if kernel.template == "linear"]
    return {(each.body.window is not None, each.operands[0].dtype, each.operands[1].dtype) for each in linears}


@pytest.mark.parametrize("weights", ["int8", "nf4", pytest.param("q4_K, else q5_0, else int8", marks=pytest.mark.slow)])
def test_a_convolution_in_bf16_is_the_oracle_up_to_one_rounding_of_a_factor(weights: str) -> None:
    program, exact = convolving("bf16", weights=weights), convolving("exact", weights=weights)
    # Tiles of AMX round elements of nf4, in each of four convolutions one behind another.
    most = 8e-3 if weights == "nf4" and bf16_units(host_isa()) == UNITS["amx"] else 4e-3
    for batch in (1, 2, 3):
        x = image_of(batch, 16, 16)
        for n, (found, oracle, wide) in enumerate(zip(program(x), program.oracle(x), exact.oracle(x), strict=True)):
            assert apart(found, oracle) < most
            assert apart(oracle, wide) == 0 if n == 1 else 1e-4 < apart(oracle, wide) < 1e-2, "the oracle rounds too"


def test_an_image_is_rounded_once_in_front_of_its_windows() -> None:
    program, exact = convolving("bf16"), convolving("exact")
    assert products(program) == {(True, "bf16", "bf16"), (False, "f32", "bf16")}
    chosen = {c.path: c.what for c in program.report().choices if c.stage == "compute"}
    assert chosen == {f"{name}.weight": "bf16 arithmetic, x is float32" for name in CONVOLUTIONS}
    steps = [len(each.plan.entries[0].steps) for each in (program, exact)]
    assert steps[0] <= steps[1] + 1, "the silu before an image is read by two ops; other images are rounded as stored"


def test_exact_convolutions_read_the_pixels_of_a_narrow_model() -> None:
    program, x = convolving("exact", torch.bfloat16), image_of(2, 16, 16, torch.bfloat16)
    assert products(program) == {(True, "bf16", "f32"), (False, "bf16", "f32")}
    assert all(apart(*pair) < 8e-3 for pair in zip(program(x), program.oracle(x), strict=True))
    assert products(convolving(None, torch.bfloat16)) == {(True, "bf16", "bf16"), (False, "bf16", "bf16")}


@pytest.mark.parametrize(("compute", "dtype"), [("bf16", torch.float32), ("exact", torch.bfloat16)])
def test_a_gpu_convolves_the_same(compute: str, dtype: torch.dtype) -> None:
    program, x = convolving(compute, dtype, device="sim:0"), image_of(1, 16, 16, dtype)
    assert all(apart(*pair) < 8e-3 for pair in zip(program(x), program.oracle(x), strict=True))


def test_convolutions_of_codes_keep_them() -> None:
    program = convolving("bf16", recipe={"activations": "int8"})
    linears = [kernel for kernel in program.plan.kernels if kernel.template == "linear"]
    assert {each.operands[1].dtype for each in linears if each.body.codes} == {"f32"}
    assert {each.operands[1].dtype for each in linears if not each.body.codes} == {"bf16"}  # the transposed one


def test_a_saved_program_convolves_in_bf16_without_torch(tmp_path: Path) -> None:
    program, x = convolving("bf16"), image_of(3, 16, 16)
    program.save(tmp_path / "image.qca")
    loaded = qc.load(tmp_path / "image.qca")(x.numpy())
    assert all(torch.equal(torch.as_tensor(a), b) for a, b in zip(loaded, program(x), strict=True))


# --- experts ---------------------------------------------------------------------------------------------------------


class Mixture(nn.Module):
    """Gate and up, SwiGLU, down and the weighted sum of two of six experts for each row."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate_up = nn.Parameter(torch.randn(6, 192, 128) / 128**0.5)
        self.down = nn.Parameter(torch.randn(6, 128, 96) / 96**0.5)
        self.to(dtype).eval()

    def forward(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        pairs, rows = index.reshape(-1), x.repeat_interleave(2, dim=0)
        gate, up = torch.bmm(self.gate_up[pairs], rows.unsqueeze(-1)).squeeze(-1).chunk(2, dim=-1)
        out = torch.bmm(self.down[pairs], (nn.functional.silu(gate) * up).unsqueeze(-1)).squeeze(-1)
        return (out.reshape(-1, 2, 128) * weights.unsqueeze(-1)).sum(dim=1)


def routed(rows: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    seed = torch.Generator().manual_seed(rows)
    weights, index = torch.randn(rows, 6, generator=seed).softmax(-1).topk(2)
    return torch.randn(rows, 128, generator=seed).to(dtype), index, weights.to(dtype)


def mixing(compute: str | None, rows: int, dtype: torch.dtype = torch.float32, **more: Any) -> qc.Program:
    recipe = qc.QuantConfig(more.pop("weights", "int8"), compute=compute, promise_bits=None, **more.pop("recipe", {}))
    return qc.qcompile(Mixture(dtype), routed(rows, dtype), quant=recipe, **more)


def factors_of_experts(program: qc.Program) -> set[tuple[str, str]]:
    experts = [kernel for kernel in program.plan.kernels if kernel.template == "grouped_linear"]
    return {(each.operands[0].dtype, each.operands[1].dtype) for each in experts}


OFTEN = ((1, "int8"), (2, "q4_0"), (16, "nf4"), (61, "int8"))
"""Combined products of a token and of two, few and many rows of an expert; the other pairs are slow."""


@pytest.mark.parametrize(
    ("rows", "weights"),
    [
        pytest.param(*each, marks=() if each in OFTEN else pytest.mark.slow)
        for each in itertools.product((1, 2, 16, 61), ("int8", "nf4", "q4_0"))
    ],
)
def test_experts_in_bf16_are_the_oracle_up_to_one_rounding_of_a_factor(rows: int, weights: str) -> None:
    given = routed(rows)
    program = mixing("bf16", rows, weights=weights, verify_each="numerics")
    exact = mixing("exact", rows, weights=weights)
    assert factors_of_experts(program) == {("f32", "bf16")} and factors_of_experts(exact) == {("f32", "f32")}
    assert apart(program(*given), program.oracle(*given)) < 8e-3
    assert 1e-4 < apart(program.oracle(*given), exact.oracle(*given)) < 1e-2, "the oracle rounds as well"
    assert apart(exact(*given), exact.oracle(*given)) < 1e-6


def test_experts_of_a_narrow_model_have_its_type_unless_told_otherwise() -> None:
    assert factors_of_experts(mixing(None, 16, torch.bfloat16)) == {("bf16", "bf16")}
    program, given = mixing("exact", 16, torch.bfloat16), routed(16, torch.bfloat16)
    assert factors_of_experts(program) == {("bf16", "f32")}
    assert apart(program(*given), program.oracle(*given)) < 8e-3


@pytest.mark.parametrize(("compute", "dtype"), [("bf16", torch.float32), ("exact", torch.bfloat16)])
def test_a_gpu_multiplies_the_same_experts(compute: str, dtype: torch.dtype) -> None:
    for rows in (1, 40):
        program, given = mixing(compute, rows, dtype, device="sim:0"), routed(rows, dtype)
        assert apart(program(*given), program.oracle(*given)) < (1e-6 if compute == "bf16" else 8e-3)


def test_experts_that_multiply_integers_keep_them() -> None:
    program = mixing("bf16", 16, recipe={"activations": "int8"})
    experts = [kernel for kernel in program.plan.kernels if kernel.template == "grouped_linear"]
    assert experts and all(each.body.codes and each.operands[1].dtype == "f32" for each in experts)


def test_the_state_of_a_recurrent_layer_keeps_the_type_of_the_model() -> None:
    torch.manual_seed(0)
    model, x = nn.LSTM(64, 96, batch_first=True).eval(), torch.randn(2, 9, 64)
    program = qc.qcompile(model, (x,), quant=qc.QuantConfig("int8", compute="bf16", promise_bits=None))
    assert [choice.path for choice in program.report().choices if choice.stage == "compute"] == ["weight_ih_l0"]
    types = [(each.template, each.operands[1].dtype) for each in program.plan.kernels if each.template != "loop"]
    assert ("linear", "bf16") in types and ("recurrent", "f32") in types
    assert apart(program(x)[0], program.oracle(x)[0]) < 2e-3
