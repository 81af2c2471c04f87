"""A norm in the linear that reads it: the same bits, a launch less, and a reason wherever it keeps its own kernel."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from by_path import load
from torch import nn

import qcompiler as qc
from qcompiler.errors import RecipeError
from qcompiler.ir.context import QCContext, Target
from qcompiler.ir.interpreter import run
from qcompiler.ir.text import parse_module
from qcompiler.kernels.cost import device_cost
from qcompiler.kernels.prologue_choice import NormQuery, obstacle, time_in_blocks
from qcompiler.passes.lower_qc_to_linalg import LowerQcToLinalgPass
from qcompiler.passes.pipeline import parse_passes
from qcompiler.plan.kinds.linear import LinearKernel, RowNorm
from qcompiler.plan.weights import NUMPY_DTYPES
from qcompiler.runtime.isa import supported_isas

SLOW = pytest.mark.slow
K = 256


class Gemma(nn.Module):
    """An RMS norm whose weight is stored less one."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (wide * (1.0 + self.weight.float())).type_as(x)


NORMS: dict[str, Callable[[int], nn.Module]] = {
    "rms": lambda k: nn.RMSNorm(k, eps=1e-6),
    "gemma": Gemma,
    "layer": nn.LayerNorm,
    "layer_bare": lambda k: nn.LayerNorm(k, elementwise_affine=False),
    "layer_weight": lambda k: nn.LayerNorm(k, bias=False),
}


class Block(nn.Module):
    """Two norms, a residual around each linear, and an activation."""

    def __init__(self, norm: str = "rms", k: int = K) -> None:
        super().__init__()
        self.first, self.second = NORMS[norm](k), NORMS[norm](k)
        self.q, self.fc = nn.Linear(k, k), nn.Linear(k, k, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.q(self.first(x))
        return x + torch.relu(self.fc(self.second(x)))


class Sandwich(nn.Module):
    """Layers as Gemma's: what a layer computes is normalised before it is added, and the sum is normalised again. With
    `pre=False` as OLMo 2's: linears multiply the sum itself."""

    def __init__(self, norm: str, k: int = K, *, pre: bool = True) -> None:
        super().__init__()
        self.pre = nn.ModuleList(NORMS[norm](k) if pre else nn.Identity() for _ in range(3))
        self.post = nn.ModuleList(NORMS[norm](k) for _ in range(3))
        self.fc = nn.ModuleList(nn.Linear(k, k, bias=i % 2 == 0) for i in range(3))
        self.head = nn.Linear(k, k)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for pre, fc, post in zip(self.pre, self.fc, self.post, strict=True):
            x = x + post(torch.tanh(fc(pre(x))))
        return self.head(x)


class PostNorm(nn.Module):
    """A block as in BERT: what a norm makes is multiplied, and added to the next result."""

    def __init__(self, norm: str, k: int = K) -> None:
        super().__init__()
        self.first, self.second = NORMS[norm](k), NORMS[norm](k)
        self.q, self.o, self.fc, self.out = (nn.Linear(k, k) for _ in range(4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.first(x)
        x = self.second(x + self.o(torch.tanh(self.q(x))))
        return x + self.out(torch.relu(self.fc(x))), x


def norms(program: qc.Program) -> list[RowNorm]:
    """The norms in prologues, in order."""
    bodies = [spec.body for spec in program.plan.kernels]
    return [norm for body in bodies if isinstance(body, LinearKernel) for norm in body.norms]


def launches(program: qc.Program, entry: int = 0) -> int:
    return len(program.plan.entries[entry].steps)


def decisions(program: qc.Program) -> dict[str, str]:
    return {c.path: f"{c.what}: {c.why}" for c in program.report().choices if c.stage == "fuse-norm-prologue"}


def both(model: nn.Module, x: torch.Tensor, quant: str = "nf4", **options: Any) -> list[qc.Program]:
    """The program, and the one whose norms keep their kernels."""
    recipes = (qc.QuantConfig(quant, separate=sep, promise_bits=None) for sep in ((), ("*",)))
    return [qc.qcompile(model, (x,), quant=recipe, **options) for recipe in recipes]


def check(model: nn.Module, quant: str, m: tuple[int, ...], dtype: torch.dtype = torch.float32, **options: Any) -> None:
    """Two launches less, and no bit differs."""
    k = model.fc.in_features
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(*m, k, generator=generator).to(dtype) * 3
    fused, apart = both(model.eval().to(dtype), x, quant, **options)
    assert launches(fused) == launches(apart) - 2, decisions(fused)
    assert len(norms(fused)) == 2 and not norms(apart)
    x[..., :1] = 0.0
    for each in (x, x * 1000, torch.zeros_like(x)):
        ours, theirs = (program(each).contiguous().view(torch.uint8) for program in (fused, apart))
        assert torch.equal(ours, theirs)


FORMATS = ("nf4", "int4:group=32", "q4_K", "int8", "float")


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=SLOW)])
@pytest.mark.parametrize("quant", [pytest.param(each, marks=() if each == "nf4" else SLOW) for each in FORMATS])
@pytest.mark.parametrize("m", [(1, 1), (7,), pytest.param((2, 4), marks=SLOW)], ids=str)
def test_every_format_gives_the_same_bits(quant: str, dtype: torch.dtype, m: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    check(Block(), quant, m, dtype)


@pytest.mark.parametrize(
    ("norm", "k"),
    [
        pytest.param(norm, k, marks=() if (norm, k) == ("layer", 97) else SLOW)
        for norm in NORMS
        for k in (97, 1)
        if (norm, k) != ("gemma", 1)  # the mean of one square is that square: what is left is no norm, but a loop
    ],
)
def test_every_norm_and_sizes_that_are_odd(norm: str, k: int) -> None:
    torch.manual_seed(1)
    check(Block(norm, k), "float", (2,), torch.bfloat16)


def test_many_rows_that_one_thread_normalises() -> None:
    """Panels are decoded: the kernel is that of many rows."""
    torch.manual_seed(2)
    check(Block("layer"), "nf4", (1, 17))


@pytest.mark.parametrize("activations", ["int8", pytest.param("int8:static", marks=SLOW)])
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=SLOW)])
def test_rows_of_int8_are_made_by_the_linear(activations: str, dtype: torch.dtype) -> None:
    """W8A8 takes as many launches as without: the norm, its codes and the product are one."""
    torch.manual_seed(6)
    model, x = Block().eval().to(dtype), torch.randn(3, K).to(dtype)
    options: dict[str, Any] = {"calibrate": [(x,)]} if "static" in activations else {}
    recipes = [
        qc.QuantConfig("int8", activations=given, separate=separate, promise_bits=None)
        for given, separate in ((None, ()), (activations, ()), (activations, ("*",)))
    ]
    float_rows, fused, apart = (
        qc.qcompile(model, (x,), quant=recipe, **(options if recipe.activations else {})) for recipe in recipes
    )
    made = [spec.body.rows for spec in fused.plan.kernels if isinstance(spec.body, LinearKernel)]
    assert len(made) == 2 and None not in made and len(norms(fused)) == 2, decisions(fused)
    assert launches(fused) == launches(float_rows) == launches(apart) - 4
    for each in (x, x * 1000, torch.zeros_like(x)):
        ours, theirs = (program(each).contiguous().view(torch.uint8) for program in (fused, apart))
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=SLOW)])
@pytest.mark.parametrize("m", [1, *(pytest.param(m, marks=SLOW) for m in (8, 9, 17, 32, 33, 64))])
def test_a_gpu_makes_rows_of_int8_in_the_linear(m: int, dtype: torch.dtype) -> None:
    torch.manual_seed(6)
    k = K if m <= 8 else 64  # the estimate keeps many rows that are wide apart
    model, x = Block(k=k).eval().to(dtype), torch.randn(m, k).to(dtype)
    recipes = [qc.QuantConfig("int8", activations="int8", separate=sep, promise_bits=None) for sep in ((), ("*",))]
    fused, apart = (qc.qcompile(model, (x,), quant=recipe, device="sim:0") for recipe in recipes)
    made = [spec.body.rows for spec in fused.plan.kernels if isinstance(spec.body, LinearKernel)]
    assert len(made) == 2 and None not in made and len(norms(fused)) == 2, decisions(fused)
    assert launches(fused) == launches(apart) - 4
    for each in (x, x * 1000, torch.zeros_like(x)):
        ours, theirs = (program(each).contiguous().view(torch.uint8) for program in (fused, apart))
        assert torch.equal(ours, theirs)


def test_a_gpu_makes_more_rows_of_int8_in_a_kernel_of_their_own() -> None:
    """And says so; the norm in front of them keeps its kernel, too."""
    recipe = qc.QuantConfig("int8", activations="int8", promise_bits=None)
    program = qc.qcompile(Block().eval(), (torch.randn(65, K),), quant=recipe, device="sim:0")
    said = " ".join(f"{c.what}: {c.why}" for c in program.report().choices if c.stage == "fuse-norm-prologue")
    assert not norms(program) and "there are 65 rows, and kernels for up to 64 make rows of int8" in said
    assert "qc.quantize_rows reads it" in said


KEPT = [
    ("layer", 97, (3, 1), torch.float32, "cpu"), ("rms", K, (1, 7), torch.bfloat16, "sim:0"),
    *(pytest.param(*each, marks=SLOW) for each in (
        ("layer", K, (1, 1), torch.bfloat16, "cpu"), ("gemma", 97, (3, 7), torch.bfloat16, "cpu"),
        ("layer_weight", 64, (1, 7), torch.float32, "sim:0"), ("layer", 97, (1, 1), torch.float32, "sim:0"),
        ("rms", K, (3, 1), torch.float32, "cpu"), ("layer", K, (1, 17), torch.float32, "cpu"),
    )),
]  # fmt: skip


@pytest.mark.parametrize(("norm", "k", "m", "dtype", "device"), KEPT)
def test_rows_that_others_read_are_kept(norm: str, k: int, m: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    """The next addition and the caller read them: no launch is a norm's, and no bit differs."""
    torch.manual_seed(8)
    model = PostNorm(norm, k).eval().to(dtype)
    x = torch.randn(*m, k).to(dtype)
    fused, apart = both(model, x, "nf4" if k % 64 == 0 else "float", device=device)
    assert launches(fused) == 4 == launches(apart) - 2, decisions(fused)
    assert [norm.keeps for norm in norms(fused)] == [True, True] and not norms(apart)
    for each in (x, x * 1000, torch.zeros_like(x)):
        for ours, theirs in zip(fused(each), apart(each), strict=True):
            assert torch.equal(ours.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8))


ADDED = [
    ("rms", True, K, (1, 1), torch.bfloat16, "cpu"), ("layer", False, 97, (3, 7), torch.float32, "cpu"),
    ("rms", True, 64, (1, 7), torch.bfloat16, "sim:0"),
    *(pytest.param(*each, marks=SLOW) for each in (
        ("gemma", True, 97, (3, 1), torch.bfloat16, "cpu"), ("layer", True, K, (1, 17), torch.bfloat16, "cpu"),
        ("rms", False, 64, (3, 1), torch.float32, "sim:0"), ("layer_weight", True, 97, (1, 1), torch.float32, "sim:0"),
        ("gemma", False, 256, (1, 7), torch.float16, "sim:0"),
    )),
]  # fmt: skip


@pytest.mark.parametrize(("norm", "pre", "k", "m", "dtype", "device"), ADDED)
def test_a_norm_in_front_of_a_residual_is_no_launch(
    norm: str, pre: bool, k: int, m: tuple[int, ...], dtype: torch.dtype, device: str
) -> None:
    """Four linears are four launches: norms, additions and norms of the sums are in them. No bit differs.

    Apart, a norm and the addition that reads it are one launch (merge-launches)."""
    torch.manual_seed(10)
    model = Sandwich(norm, k, pre=pre).eval().to(dtype)
    x = torch.randn(*m, k).to(dtype)
    fused, apart = both(model, x, "nf4" if k % 64 == 0 else "float", device=device)
    assert launches(fused) == 4 and launches(apart) == 4 + 3 + 3 * pre, decisions(fused)
    added = [each for each in norms(fused) if each.has_residual]
    assert [each.keeps for each in added] == [True, True, False] and not norms(apart)
    for each in (x, x * 1000, torch.zeros_like(x)):
        ours, theirs = (program(each).contiguous().view(torch.uint8) for program in (fused, apart))
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("device", ["cpu", pytest.param("sim:0", marks=SLOW)])
def test_rows_known_at_run_time_are_added_by_the_kernel_of_the_norm(device: str) -> None:
    """A norm and its residual are one kernel; apart they share a launch, too."""
    torch.manual_seed(11)
    model, x = Sandwich("rms", 64).eval().to(torch.bfloat16), torch.randn(1, 7, 64).to(torch.bfloat16)
    fused, apart = both(model, x, dynamic_shapes={"x": {1: ("s", 1, 24)}}, device=device)
    assert launches(fused) == launches(apart) == 10, decisions(fused)
    assert "residual" in decisions(fused)["post.0"]
    for rows in (1, 7, 24):
        each = torch.randn(1, rows, 64).to(torch.bfloat16)
        assert torch.equal(fused(each), apart(each))


DEVICES = ["cpu", pytest.param("sim:0", marks=SLOW)]


CODES_ON = [("cpu", 3, K), pytest.param("sim:0", 3, K, marks=SLOW), pytest.param("sim:0", 35, 64, marks=SLOW)]


@pytest.mark.parametrize(("device", "m", "k"), CODES_ON)
def test_codes_of_a_sum_with_a_residual(device: str, m: int, k: int) -> None:
    """W8A8: the norm, the addition, the norm of the sum, its codes and the product are one launch."""
    torch.manual_seed(12)
    model, x = Sandwich("rms", k).eval(), torch.randn(m, k)
    recipes = [qc.QuantConfig("int8", activations="int8", separate=sep, promise_bits=None) for sep in ((), ("*",))]
    fused, apart = (qc.qcompile(model, (x,), quant=recipe, device=device) for recipe in recipes)
    assert launches(fused) == 4, decisions(fused)
    assert torch.equal(fused(x), apart(x))


@pytest.mark.parametrize(("device", "m", "k"), CODES_ON)
def test_rows_of_int8_of_a_norm_that_others_read(device: str, m: int, k: int) -> None:
    """The linear keeps the floats, and multiplies the codes."""
    torch.manual_seed(9)
    model, x = PostNorm("rms", k).eval(), torch.randn(m, k)
    recipes = [qc.QuantConfig("int8", activations="int8", separate=sep, promise_bits=None) for sep in ((), ("*",))]
    fused, apart = (qc.qcompile(model, (x,), quant=recipe, device=device) for recipe in recipes)
    assert [norm.keeps for norm in norms(fused)] == [True, True] and launches(fused) == 4, decisions(fused)
    for ours, theirs in zip(fused(x), apart(x), strict=True):
        assert torch.equal(ours, theirs)


class Mixed(nn.Module):
    """Three linears of the same norm, two of them of one format, as q, k and v in llama.cpp's mixtures. With `post` the
    norm is a residual as well."""

    def __init__(self, norm: str, k: int = K, *, post: bool = False) -> None:
        super().__init__()
        self.norm, self.post = NORMS[norm](k), post
        self.q, self.k, self.v, self.o = (nn.Linear(k, k, bias=i % 2 == 0) for i in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = self.norm(x)
        return (n if self.post else x) + self.o(torch.tanh(self.q(n) * self.k(n)) + self.v(n))


MIXED = [
    ("rms", False, (1,), torch.float32, "cpu"), ("layer", False, (3,), torch.bfloat16, "cpu"),
    ("rms", True, (2,), torch.float32, "cpu"),
    *(pytest.param(*each, marks=SLOW) for each in (
        ("layer_bare", False, (1, 17), torch.float32, "cpu"), ("gemma", False, (8,), torch.bfloat16, "cpu"),
        ("layer", True, (1, 1), torch.bfloat16, "cpu"), ("rms", False, (1,), torch.bfloat16, "sim:0"),
        ("rms", True, (1,), torch.float32, "sim:0"),
    )),
]  # fmt: skip


@pytest.mark.parametrize(("norm", "post", "m", "dtype", "device"), MIXED)
def test_rows_of_int8_that_two_linears_read(
    norm: str, post: bool, m: tuple[int, ...], dtype: torch.dtype, device: str, tmp_path: Path
) -> None:
    """On a CPU the first keeps them for the second. Its norm is in it as well, unless others read that one's rows. On a
    GPU each makes its own."""
    torch.manual_seed(14)
    model, x = Mixed(norm, post=post).eval().to(dtype), torch.randn(*m, K).to(dtype)
    fused, apart = (
        qc.qcompile(model, (x,), device=device, quant=qc.QuantConfig(
            "int8", activations="int8", rules={"v": "int4:group=32"}, separate=separate, promise_bits=None,
        ))
        for separate in ((), ("*",))
    )  # fmt: skip
    bodies = [spec.body for spec in fused.plan.kernels if isinstance(spec.body, LinearKernel)]
    keeps = [body.rows is not None and body.rows.keeps for body in bodies]
    if device == "cpu":
        assert keeps == [True, False, False] and launches(fused) == 3 + post, decisions(fused)
        assert len(norms(fused)) == 1 - post
        said = decisions(fused)["norm"]
        assert ("keeps its rows of int8, and other ops read those of the norm" if post else "prologue of") in said
    else:
        assert not any(keeps) and launches(fused) <= 3
    fused.save(tmp_path / "mixed.qca")
    loaded = qc.load(tmp_path / "mixed.qca", device=device, verify="full")
    for each in (x, x * 1000, torch.zeros_like(x)):
        ours, theirs, again = (program(each).contiguous().view(torch.uint8) for program in (fused, apart, loaded))
        assert torch.equal(ours, theirs) and torch.equal(again, theirs)


def test_a_gpu_keeps_rows_of_int8_for_a_linear_of_too_many_blocks() -> None:
    """The estimate makes them once; yet no launch of their own."""
    torch.manual_seed(15)
    model = nn.ModuleDict({"norm": nn.RMSNorm(K), "q": nn.Linear(K, 64), "v": nn.Linear(K, 16384)}).eval()
    model.forward = lambda x: (model.q(model.norm(x)), model.v(model.norm(x)))  # type: ignore[method-assign]
    recipes = [
        qc.QuantConfig("int8", activations="int8", rules={"v": "int4:group=32"}, separate=separate, promise_bits=None)
        for separate in ((), ("*",))
    ]
    x = torch.randn(3, K)
    fused, apart = (qc.qcompile(model, (x,), quant=recipe, device="sim:0") for recipe in recipes)
    assert launches(fused) == 2 == launches(apart) - 2, decisions(fused)
    assert decisions(fused)["q"] == "rows of int8: the prologue of 'q': its rows are kept for 'v'"
    for ours, theirs in zip(fused(x), apart(x), strict=True):
        assert torch.equal(ours, theirs)


@SLOW
@pytest.mark.parametrize("isa", supported_isas()[:-1])
def test_every_instruction_set_gives_the_same_bits(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QC_ISA", isa)
    torch.manual_seed(0)
    check(Block("layer"), "nf4", (3,), torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=SLOW)])
@pytest.mark.parametrize("m", [(1, 1), pytest.param((8,), marks=SLOW)], ids=str)
def test_a_simulated_gpu_gives_the_same_bits(dtype: torch.dtype, m: tuple[int, ...]) -> None:
    torch.manual_seed(3)
    check(Block("rms"), "nf4", m, dtype, device="sim:0")


def test_the_interpreter_agrees_after_every_pass() -> None:
    torch.manual_seed(4)
    for norm, dtype in (("layer", torch.float32), ("rms", torch.bfloat16)):
        model = Block(norm, 64).eval().to(dtype)
        program = qc.qcompile(model, (torch.randn(2, 64).to(dtype),), quant="nf4", verify_each="numerics")
        assert len(norms(program)) == 2
    program = qc.qcompile(PostNorm("layer", 64).eval(), (torch.randn(2, 64),), quant="nf4", verify_each="numerics")
    assert [norm.keeps for norm in norms(program)] == [True, True]
    recipe = qc.QuantConfig("int8", activations="int8", rules={"v": "int4:group=32"}, promise_bits=None)
    for post in (True, False):
        model = Mixed("layer", 64, post=post).eval()
        program = qc.qcompile(model, (torch.randn(2, 64),), quant=recipe, verify_each="numerics")
        assert len(norms(program)) == 1 - post
    for pre in (True, False):
        model = Sandwich("layer", 64, pre=pre).eval()
        program = qc.qcompile(model, (torch.randn(2, 64),), quant="nf4", verify_each="numerics")
        assert len(norms(program)) == 3 + 3 * pre


def test_a_saved_program_gives_the_same_bits(tmp_path: Path) -> None:
    torch.manual_seed(5)
    x = torch.randn(1, K)
    program = qc.qcompile(PostNorm("layer").eval(), (x,), quant="nf4")
    program.save(tmp_path / "block.qca")
    loaded = qc.load(tmp_path / "block.qca", verify="full")
    for ours, theirs in zip(loaded(x.numpy()), program(x), strict=True):
        assert np.array_equal(np.asarray(ours), theirs.numpy())


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=SLOW)])
def test_a_llama_with_a_cache_gives_the_same_tokens(dtype: torch.dtype) -> None:
    """One token: two launches less for each layer, and one for the head. The prompt's rows are not known: none less."""
    static = load("tests/models/test_static_cache.py")
    recipes = ("nf4", qc.QuantConfig("nf4", separate=("*layernorm", "*.norm")))
    fused, apart = (static.compiled("cpu", dtype, recipe)[1] for recipe in recipes)
    for ours, theirs in zip(*(static.decode(p.session(), static.prompt(), 6) for p in (fused, apart)), strict=True):
        assert torch.equal(ours, theirs)
    names = [entry.name for entry in fused.plan.entries]
    saved = {name: launches(apart, i) - launches(fused, i) for i, name in enumerate(names)}
    assert saved == {"decode": 2 * static.LAYERS + 1, "prefill": 0}


# --- what the region means -------------------------------------------------------------------------------------------

ADDED_REGION = """
builtin.module {
  func.func @main(%x: tensor<3x9xbf16>, %w: tensor<5x9xbf16>, %g: tensor<9xbf16>, %h: tensor<3x9xbf16>,
      %b: tensor<9xbf16>) -> (tensor<3x5xbf16>, tensor<3x9xbf16>) {
    %y, %s = qc.linear %x, %w affine(%g, %h, %b) : tensor<3x5xbf16>, tensor<3x9xbf16> prologue {
    ^bb0(%rows: tensor<3x9xbf16>, %weight: tensor<9xbf16>, %residual: tensor<3x9xbf16>, %second: tensor<9xbf16>):
      %a = qc.rms_norm %rows weight(%weight) residual(%residual) {eps = 1.000000e-05} : tensor<3x9xbf16>
      %n = qc.layer_norm %a weight(%second) {eps = 1.000000e-05} : tensor<3x9xbf16>
      qc.yield %n, %a
    }
    func.return %y, %s : tensor<3x5xbf16>, tensor<3x9xbf16>
  }
}
"""


def test_a_residual_in_the_region_is_added_after_a_rounding() -> None:
    """The norm is rounded, and the sum is: torch's numbers, by the interpreter and in plain linalg."""
    torch.manual_seed(13)
    x, w, g, h, b = (torch.randn(*shape).bfloat16() for shape in ((3, 9), (5, 9), (9,), (3, 9), (9,)))
    wide = x.float()
    total = h + (wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * g.float()).bfloat16()
    wanted = nn.functional.layer_norm(total.float(), (9,), b.float(), None, 1e-5).bfloat16().float() @ w.float().T
    ctx = QCContext.default()
    module = parse_module(ADDED_REGION, ctx)
    module.verify()
    inputs = [each.float().numpy().astype(NUMPY_DTYPES["bf16"]) for each in (x, w, g, h, b)]
    for lowered in (False, True):
        if lowered:
            LowerQcToLinalgPass().apply(ctx, module)
            module.verify()
            assert "qc.linear" not in str(module)
        found, kept = run(module, ctx.weights, inputs)
        assert np.array_equal(np.asarray(kept, np.float32), total.float().numpy())
        np.testing.assert_allclose(np.asarray(found, np.float32), wanted.numpy(), rtol=2e-2, atol=2e-2)


REGION = """
builtin.module {
  func.func @main(%x: tensor<3x9xf32>, %w: tensor<5x9xf32>, %g: tensor<9xf32>, %b: tensor<9xf32>, %c: tensor<5xf32>)
      -> tensor<3x5xf32> {
    %y = qc.linear %x, %w bias(%c) affine(%g, %b) : tensor<3x5xf32> prologue {
    ^bb0(%rows: tensor<3x9xf32>, %weight: tensor<9xf32>, %shift: tensor<9xf32>):
      %n = qc.layer_norm %rows weight(%weight) bias(%shift) {eps = 1.000000e-05} : tensor<3x9xf32>
      qc.yield %n
    } {
    ^bb0(%sum: f32):
      %t = math.tanh %sum : f32
      qc.yield %t
    }
    func.return %y : tensor<3x5xf32>
  }
}
"""


def test_the_region_means_the_same_in_plain_linalg() -> None:
    """The interpreter's meaning, the lowering to linalg for upstream MLIR, and NumPy."""
    rng = np.random.default_rng(0)
    inputs = [rng.standard_normal(shape).astype(np.float32) for shape in ((3, 9), (5, 9), (9,), (9,), (5,))]
    x, w, g, b, c = inputs
    ctx = QCContext.default()
    module = parse_module(REGION, ctx)
    module.verify()
    centred = x - x.mean(-1, keepdims=True)
    rows = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * g + b
    wanted = np.tanh(rows @ w.T + c)
    (found,) = run(module, ctx.weights, inputs)
    LowerQcToLinalgPass().apply(ctx, module)
    module.verify()
    assert "qc.linear" not in str(module) and "qc.layer_norm" not in str(module)
    (lowered,) = run(module, ctx.weights, inputs)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(lowered, wanted, rtol=1e-5, atol=1e-6)


# --- what keeps a kernel of its own ----------------------------------------------------------------------------------

FIVE_LINES = """
builtin.module {{
  func.func @main(%x: {x}, %w: tensor<6x8xf32>) -> {out} attributes {{qc.ranges = {{s = array<i64: 1, 32>}}}} {{
    {lines}
  }}
}}
"""
ONE = "tensor<1x8xf32>"
NORM = "%n = qc.rms_norm %x {eps = 1.000000e-05} : tensor<1x8xf32>"
LINEAR = "%y = qc.linear %n, %w : tensor<1x6xf32>"
CASES = {
    "what another reader computes": (ONE, "tensor<1x8xf32>", [
        NORM, "%t = qc.softmax %n {axis = 1} : tensor<1x8xf32>", "%v = qc.const @v : tensor<8x8xf32>",
        "%z = qc.linear %n, %v extras(%t) : tensor<1x8xf32> {",
        "^bb0(%a: f32, %b: f32):", "qc.yield %b", "}", "func.return %z : tensor<1x8xf32>",
    ], "reads what another reader of the norm computes"),
    "the same linear as an extra": (ONE, ONE, [
        NORM, "%v = qc.const @v : tensor<8x8xf32>", "%z = qc.linear %n, %v extras(%n) : tensor<1x8xf32> {",
        "^bb0(%a: f32, %b: f32):", "qc.yield %b", "}", "func.return %z : tensor<1x8xf32>",
    ], "does not multiply its rows"),
    "readers without a linear": (ONE, ONE, [
        NORM, "%t = qc.softmax %n {axis = 1} : tensor<1x8xf32>", "%u = qc.softmax %n {axis = 0} : tensor<1x8xf32>",
        f"func.return %t : {ONE}",
    ], "several ops read it"),
    "the program's result": (ONE, ONE, [NORM, f"func.return %n : {ONE}"], "func.return reads it"),
    "an extra input": (ONE, "tensor<1x8xf32>", [
        NORM, "%v = qc.const @v : tensor<8x8xf32>", "%y = qc.linear %x, %v extras(%n) : tensor<1x8xf32> {",
        "^bb0(%a: f32, %b: f32):", "qc.yield %b", "}", "func.return %y : tensor<1x8xf32>",
    ], "does not multiply its rows"),
    "another type": ("tensor<1x8xbf16>", "tensor<1x6xf32>", [
        "%n = qc.rms_norm %x {eps = 1.000000e-05} : tensor<1x8xf32>", LINEAR, "func.return %y : tensor<1x6xf32>",
    ], "makes f32 of bf16"),
    "another device": (ONE, "tensor<1x6xf32>", [
        NORM, 'qc.device', "func.return %y : tensor<1x6xf32>",
    ], "different devices"),
    "rows known at run time": ("tensor<?x8xf32, #qc.dims<[\"s\", 8]>>", "tensor<?x6xf32, #qc.dims<[\"s\", 6]>>", [
        '%n = qc.rms_norm %x {eps = 1.000000e-05} : tensor<?x8xf32, #qc.dims<["s", 8]>>',
        '%y = qc.linear %n, %w : tensor<?x6xf32, #qc.dims<["s", 6]>>',
        'func.return %y : tensor<?x6xf32, #qc.dims<["s", 6]>>',
    ], "known only at run time"),
    "many rows": ("tensor<4097x8xf32>", "tensor<4097x6xf32>", [
        "%n = qc.rms_norm %x {eps = 1.000000e-05} : tensor<4097x8xf32>",
        "%y = qc.linear %n, %w : tensor<4097x6xf32>", "func.return %y : tensor<4097x6xf32>",
    ], "more than 32768 elements"),
    "a state": (ONE, "tensor<1x6xf32>", [
        "%s = qc.state @s : tensor<1x8xf32>", "%n = qc.rms_norm %s {eps = 1.000000e-05} : tensor<1x8xf32>", LINEAR,
        "func.return %y : tensor<1x6xf32>",
    ], "it reads a state"),
}  # fmt: skip


def fused(text: str, target: Target | None = None, passes: str = "fuse-norm-prologue") -> tuple[str, str]:
    """(the text after the pass, what it reports)."""
    ctx = QCContext.default() if target is None else QCContext.default(target=target)
    module = parse_module(text, ctx)
    (made,) = parse_passes(passes)
    made.apply(ctx, module)
    module.verify()
    return str(module), "; ".join(f"{d.what}: {d.why}" for d in ctx.report.of("fuse-norm-prologue"))


def text_of(x: str, out: str, lines: list[str]) -> str:
    if "qc.device" in lines:
        lines = [NORM.replace("{eps", '{qc.device = "cpu", eps'), LINEAR.replace(" :", ' {qc.device = "sim:0"} :')] + [
            line for line in lines if line.startswith("func")
        ]
    return FIVE_LINES.format(x=x, out=out, lines="\n    ".join(lines))


KEEPING = text_of(ONE, ONE, [
    NORM, "%t = qc.softmax %n {axis = 1} : tensor<1x8xf32>", LINEAR, f"func.return %t : {ONE}",
])  # fmt: skip


def test_a_linear_stands_in_front_of_all_who_read_the_rows_it_keeps() -> None:
    text, said = fused(KEEPING)
    assert "qc.rms_norm" in text.partition("prologue {")[2] and "its rows are kept for qc.softmax" in said
    assert text.index("qc.linear") < text.index("qc.softmax")


PLAIN = text_of(ONE, "tensor<1x6xf32>", [NORM, LINEAR, "func.return %y : tensor<1x6xf32>"])


def test_the_plain_case_is_fused() -> None:
    """So that what stops the others is their difference from it."""
    text, said = fused(PLAIN)
    assert "prologue {" in text and "nothing else reads the result" in said
    assert "prologue {" not in fused(PLAIN, passes='fuse-norm-prologue{separate="*"}')[0]


@pytest.mark.parametrize("case", CASES)
def test_what_keeps_a_kernel_of_its_own_says_why(case: str) -> None:
    x, out, lines, why = CASES[case]
    text, said = fused(text_of(x, out, lines))
    assert "prologue {" not in text and why in said, said


def test_a_gpu_normalises_up_to_eight_rows_before_a_constant_weight() -> None:
    target = Target("cuda", "sm_90a")
    assert "the weight is computed" in fused(PLAIN, target)[1]
    assert "there are 9 rows" in fused(PLAIN.replace("1x8x", "9x8x").replace("1x6x", "9x6x"), target)[1]


def query(**changes: Any) -> NormQuery:
    given: dict[str, Any] = {
        "m": 1, "k": 4096, "n": 6144, "dtype": "bf16", "affine": 1, "kind": "cuda", "isas": ("sm_90a",),
        "constant_weight": True,
    }  # fmt: skip
    return NormQuery(**{**given, **changes})


def test_a_norm_stays_where_too_many_blocks_would_repeat_it() -> None:
    """Estimated for an 8 B model: q, k and v take the norm, the gate and the up projection do not."""
    assert obstacle(query()) is None
    assert "1792 blocks take" in str(obstacle(query(n=28672)))
    assert obstacle(query(n=28672, kind="cpu", isas=("x86-64-v4",))) is None
    many = {"m": 17, "k": 192, "n": 384, "makes_codes": True, "multiplies_codes": True}
    assert obstacle(query(**many)) is None and obstacle(query(**{**many, "makes_codes": False})) is None
    assert "kernels for up to 8 take a norm" in str(obstacle(query(m=17, k=192)))
    assert "there are 65 rows, and kernels for up to 64" in str(obstacle(query(**{**many, "m": 65})))
    assert "96 blocks take" in str(obstacle(query(**{**many, "m": 42, "k": 768, "n": 3072})))
    slow = device_cost("sm_75")
    assert time_in_blocks(query(n=28672), slow, "sm_75") > time_in_blocks(
        query(n=28672), device_cost("sm_90a"), "sm_90a"
    )
    assert "sm_75" in str(obstacle(query(isas=("sm_90a", "sm_75")))), "one plan serves both"


def test_a_pattern_of_separate_must_name_something() -> None:
    with pytest.raises(RecipeError, match="matches no module"):
        both_named = qc.QuantConfig("nf4", separate=("thrid",), promise_bits=None)
        qc.qcompile(Block().eval(), (torch.randn(1, K),), quant=both_named)
