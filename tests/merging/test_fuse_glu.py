"""A gate and what it is multiplied with are one linear: the same bits, a launch less, every weight known by name."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from by_path import load
from torch import nn

import qcompiler as qc
from qcompiler.frontends.torch.frontend import import_torch
from qcompiler.ir.context import QCContext
from qcompiler.ir.interpreter import run
from qcompiler.ir.text import parse_module
from qcompiler.passes.lower_qc_to_linalg import LowerQcToLinalgPass
from qcompiler.passes.pipeline import parse_passes, run_pipeline, upto
from qcompiler.plan.kernel import KernelSpec
from qcompiler.plan.kinds.linear import LinearKernel
from qcompiler.runtime.isa import supported_isas

APART = ("*",)
K = 256
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "swiglu": F.silu, "geglu": F.gelu, "geglu_tanh": lambda x: F.gelu(x, approximate="tanh"), "reglu": F.relu,
}  # fmt: skip


class Glu(nn.Module):
    """act(gate(x)) * up(x), of two linears, and a sum over it that no epilogue takes."""

    def __init__(
        self, act: str = "swiglu", biases: tuple[bool, bool] = (False, False), f: int = 48, k: int = K
    ) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(k, f, bias=bias) for bias in biases)
        self.act = ACTIVATIONS[act]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.act(self.gate(x)) * self.up(x)).cumsum(-1)


class Halves(nn.Module):
    """The same of one linear's two halves, as Phi-3 has it, or the other way round, with more in the product."""

    def __init__(self, *, gate_first: bool = True, f: int = 48, bias: bool = False) -> None:
        super().__init__()
        self.both, self.gate_first = nn.Linear(K, 2 * f, bias=bias), gate_first
        self.scale = nn.Parameter(torch.randn(f))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.both(x).chunk(2, dim=-1)
        gate, up = (first, second) if self.gate_first else (second, first)
        return (F.silu(gate) * up * self.scale + x[..., : self.scale.shape[0]]).cumsum(-1)


def bodies(program: qc.Program) -> list[LinearKernel]:
    return [spec.body for spec in program.plan.kernels if isinstance(spec.body, LinearKernel)]


def launches(program: qc.Program) -> int:
    return len(program.plan.entries[0].steps)


def decisions(program: qc.Program) -> dict[str, str]:
    return {c.path: f"{c.what}: {c.why}" for c in program.report().choices if c.stage == "fuse-glu"}


def both(model: nn.Module, x: torch.Tensor, quant: str | None, dims: Any = None, **options: Any) -> list[qc.Program]:
    """The program, and the one without the fusion."""
    settings = {name: options.pop(name) for name in ("activations", "rules") if name in options}
    recipes = (qc.QuantConfig(quant or "float", separate=sep, promise_bits=None, **settings) for sep in ((), APART))
    return [qc.qcompile(model, (x,), dynamic_shapes=dims, quant=recipe, **options) for recipe in recipes]


def assert_same_bits(programs: list[qc.Program], shapes: list[tuple[int, ...]], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(7)
    for shape in shapes:
        x = torch.randn(*shape, generator=generator).to(dtype)
        x[..., :3] = torch.tensor([0.0, -0.0, 1e-30])
        ours, theirs = (program(x).contiguous().view(torch.uint8) for program in programs)
        assert torch.equal(ours, theirs), shape


def check(model: nn.Module, quant: str | None, dtype: torch.dtype = torch.float32, **options: Any) -> qc.Program:
    """Batches 1 and 3 of 1 and 7 tokens, and more: one launch less, and no bit differs."""
    dims = {"x": {0: ("b", 1, 4), 1: ("t", 1, 40)}}
    programs = both(model.eval().to(dtype), torch.randn(3, 5, K).to(dtype), quant, dims, **options)
    assert launches(programs[0]) == launches(programs[1]) - 1, decisions(programs[0])
    assert any(body.pairs for body in bodies(programs[0])) and not any(body.pairs for body in bodies(programs[1]))
    assert_same_bits(programs, [(1, 1, K), (3, 1, K), (1, 7, K), (3, 7, K), (4, 40, K)], dtype)
    return programs[0]


FORMATS = ("nf4", "int4:group=32", "q4_K", "int8", "float")
SLOW = pytest.mark.slow


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=SLOW)])
@pytest.mark.parametrize("quant", [pytest.param(each, marks=() if each == "nf4" else SLOW) for each in FORMATS])
def test_every_format_gives_the_same_bits(quant: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    check(Glu(), quant, dtype)


@SLOW
@pytest.mark.parametrize("quant", FORMATS)
@pytest.mark.parametrize("isa", supported_isas()[:-1])
def test_every_instruction_set_gives_the_same_bits(quant: str, isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QC_ISA", isa)
    torch.manual_seed(0)
    assert check(Glu("geglu"), quant).run.isa == isa


@SLOW
@pytest.mark.parametrize("act", list(ACTIVATIONS))
@pytest.mark.parametrize("biases", list(itertools.product((False, True), repeat=2)), ids=str)
def test_activations_and_biases(act: str, biases: tuple[bool, bool]) -> None:
    """A bias that only one of them has is -0.0 for the other: a sum of -0.0 stays one."""
    torch.manual_seed(1)
    model = Glu(act, biases)
    with torch.no_grad():
        model.gate.weight[:8] = -0.0
    check(model, "float")


@pytest.mark.parametrize("f", [48, pytest.param(35, marks=SLOW), pytest.param(3, marks=SLOW)])
def test_rows_of_int8_are_multiplied_in_pairs(f: int) -> None:
    """W8A8; and halves that do not fill their panels."""
    torch.manual_seed(2)
    program = check(Glu(f=f, biases=(True, True)), "int8", activations="int8")
    assert [body.codes for body in bodies(program) if body.pairs][:1] == [True]


@pytest.mark.parametrize("gate_first", [True, pytest.param(False, marks=SLOW)])
def test_halves_of_one_linear(gate_first: bool) -> None:
    """With what else the product meets as extra inputs of the epilogue."""
    torch.manual_seed(3)
    program = check(Halves(gate_first=gate_first, f=35, bias=True), "nf4")
    assert [weight.parts for weight in program.plan.weights if weight.name == "both.weight"] == [()]


@pytest.mark.parametrize("quant", ["nf4", pytest.param("q4_K", marks=SLOW), pytest.param("float", marks=SLOW)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=SLOW)])
def test_a_simulated_gpu_gives_the_same_bits(quant: str, dtype: torch.dtype) -> None:
    torch.manual_seed(4)
    dims = {"x": {0: ("b", 1, 3), 1: ("t", 1, 7)}}
    model, x = Glu(biases=(True, False)).eval().to(dtype), torch.randn(2, 3, K).to(dtype)
    programs = both(model, x, quant, dims, device="sim:0")
    assert launches(programs[0]) == launches(programs[1]) - 1
    assert_same_bits(programs, [(1, 1, K), (3, 1, K), (1, 7, K), (3, 7, K)], dtype)


@SLOW
def test_a_simulated_gpu_multiplies_rows_of_int8_in_pairs() -> None:
    torch.manual_seed(5)
    programs = both(Glu().eval(), torch.randn(3, K), "int8", activations="int8", device="sim:0")
    assert_same_bits(programs, [(3, K)], torch.float32)
    assert any(body.pairs and body.codes for body in bodies(programs[0]))


PAIRS = """
builtin.module {
  func.func @main(%x: tensor<?x9xf32, #qc.dims<["s", 9]>>, %w: tensor<6x9xf32>, %b: tensor<6xf32>, %e: tensor<1x3xf32>)
      -> tensor<?x3xf32, #qc.dims<["s", 3]>> attributes {qc.ranges = {s = array<i64: 1, 32>}} {
    %y = qc.linear %x, %w bias(%b) extras(%e) {pairs} : tensor<?x3xf32, #qc.dims<["s", 3]>> {
    ^bb0(%gate: f32, %up: f32, %extra: f32):
      %0 = math.tanh %gate : f32
      %1 = arith.mulf %0, %up : f32
      %2 = arith.addf %1, %extra : f32
      qc.yield %2
    }
    func.return %y : tensor<?x3xf32, #qc.dims<["s", 3]>>
  }
}
"""


def test_pairs_mean_the_same_in_plain_linalg() -> None:
    """The interpreter's meaning, the lowering to linalg for upstream MLIR, and NumPy."""
    rng = np.random.default_rng(0)
    inputs = [rng.standard_normal(shape).astype(np.float32) for shape in ((4, 9), (6, 9), (6,), (1, 3))]
    x, w, b, e = inputs
    ctx = QCContext.default()
    module = parse_module(PAIRS, ctx)
    module.verify()
    sums = x @ w.T + b
    wanted = np.tanh(sums[:, :3]) * sums[:, 3:] + e
    (found,) = run(module, ctx.weights, inputs)
    LowerQcToLinalgPass().apply(ctx, module)
    module.verify()
    assert "qc.linear" not in str(module)
    (lowered,) = run(module, ctx.weights, inputs)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(lowered, wanted, rtol=1e-5, atol=1e-6)


# --- what stays apart ------------------------------------------------------------------------------------------------


class Apart(nn.Module):
    """Pairs that look alike and may not become one, each for another reason."""

    def __init__(self) -> None:
        super().__init__()
        names = ("shared", "once", "twice", "kept", "beside", "nf4", "int8", "read", "also", "narrow", "wide")
        self.of = nn.ModuleDict({name: nn.Linear(K, 16, bias=False) for name in names})

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        of, y, z = self.of, x * 2, x * 3
        shared = (F.silu(of["shared"](x)) * of["once"](x), F.silu(of["shared"](y)) * of["twice"](y))
        kept = F.silu(of["kept"](z)) * of["beside"](z)
        formats = F.silu(of["nf4"](z + 1)) * of["int8"](z + 1)
        gate = of["read"](z + 2)
        rows = F.silu(of["narrow"](x * 5)) * of["wide"](x * 7)
        return (*shared, kept, formats, F.silu(gate) * of["also"](z + 2), gate, rows)


def test_pairs_that_may_not_be_one_say_why() -> None:
    torch.manual_seed(6)
    recipe = qc.QuantConfig("nf4", rules={"of.int8": "int8"}, separate=("of.beside",), promise_bits=None)
    program = qc.qcompile(Apart().eval(), (torch.randn(3, K),), quant=recipe)
    assert not any(body.pairs for body in bodies(program))
    said = decisions(program)
    assert "'of.shared.weight' is read elsewhere" in said["of.shared+once"] + said["of.shared+twice"]
    assert "the recipe keeps it separate" in said["of.kept+beside"]
    assert "stored as nf4 (f32) and as int8 (f32)" in said["of.nf4+int8"]
    assert not any("of.read" in path or "of.narrow" in path for path in said), "they are no pairs at all"


@pytest.mark.parametrize(("quant", "k", "why"), [
    ("nf4", 96, "run across rows"), ("nf4:double_quant", K, "stat|whole tensor|run across rows|elements"),
])  # fmt: skip
def test_formats_whose_rows_share_entries_stay_apart(quant: str, k: int, why: str) -> None:
    programs = both(Glu(k=k).eval(), torch.randn(3, k), quant)
    assert launches(programs[0]) == launches(programs[1])
    assert not any(body.pairs for body in bodies(programs[0]))
    (said,) = decisions(programs[0]).values()
    assert any(word in said for word in why.split("|")), said
    assert_same_bits(programs, [(3, k)], torch.float32)


def test_the_pass_can_be_left_out_or_told_what_to_leave() -> None:
    imported = import_torch(Glu().eval(), (torch.randn(3, K),), quant="nf4")
    for text, pairs in (("fuse-glu", 1), ('fuse-glu{separate="up"}', 0), ('fuse-glu{separate="*"}', 0)):
        module, ctx = imported.module.clone(), QCContext.default(weights=imported.weights.copy())
        run_pipeline(module, ctx, stages=upto("assign-devices"))
        (made,) = parse_passes(text)
        made.apply(ctx, module)
        module.verify()
        assert str(module).count("{pairs") == pairs


def test_the_interpreter_agrees_after_every_pass() -> None:
    """Before and after the fusion, and of the schedule, whose weights are in the order of pairs."""
    torch.manual_seed(8)
    for model in (Glu(biases=(True, False), f=35), Halves(f=35)):
        program = qc.qcompile(model.eval(), (torch.randn(3, K),), quant="nf4", verify_each="numerics")
        assert any(body.pairs for body in bodies(program))


# --- weights ---------------------------------------------------------------------------------------------------------


def test_the_ledger_names_each_weight_with_its_share() -> None:
    torch.manual_seed(9)
    fused, apart = both(Glu(biases=(True, True)).eval(), torch.randn(3, K), "int8")
    assert [row.parameters for row in fused.ledger] == [row.parameters for row in apart.ledger]
    assert fused.ledger.bytes_after == sum(entry.nbytes for entry in fused.plan.weights) == apart.ledger.bytes_after
    (weight,) = [entry for entry in fused.plan.weights if entry.parts and len(entry.shape) == 2]
    assert [(part.rows, *part.parameters) for part in weight.parts] == [(48, "gate.weight"), (48, "up.weight")]


@pytest.mark.parametrize("layout", ["target", pytest.param("canonical", marks=SLOW)])
def test_a_saved_program_gives_the_same_bits(layout: Any, tmp_path: Path) -> None:
    torch.manual_seed(10)
    fused, _ = both(Glu(f=35).eval(), torch.randn(3, K), "q4_K")
    fused.save(tmp_path / "glu.qca", layout=layout)
    loaded = qc.load(tmp_path / "glu.qca", verify="full")
    x = torch.randn(3, K)
    assert np.array_equal(np.asarray(loaded(x.numpy())), fused(x).numpy())


@pytest.mark.parametrize("quant", ["nf4", pytest.param("float", marks=SLOW)])
def test_an_adapter_is_merged_into_its_rows_alone(quant: str) -> None:
    torch.manual_seed(11)
    x = torch.randn(3, K)
    fused, apart = both(Glu(f=35).eval(), x, quant)
    name = "base_model.model.up"
    tensors = {f"{name}.lora_A.weight": torch.randn(4, K) * 0.1, f"{name}.lora_B.weight": torch.randn(35, 4) * 0.1}
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["up"]}
    ours, theirs = (qc.merge_lora(program, tensors, config=config)[0] for program in (fused, apart))
    found, wanted = (np.asarray(program(x.numpy())) for program in (ours, theirs))
    assert np.array_equal(found, wanted) and not np.array_equal(found, fused(x).numpy())


# --- models ----------------------------------------------------------------------------------------------------------


def specs_of(program: qc.Program) -> list[KernelSpec]:
    return [spec for spec in program.plan.kernels if isinstance(spec.body, LinearKernel) and spec.body.pairs]


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=SLOW)])
def test_a_llama_with_a_cache_gives_the_same_tokens(dtype: torch.dtype) -> None:
    static = load("tests/models/test_static_cache.py")
    recipes = ("nf4", qc.QuantConfig("nf4", separate=("*.up_proj",)))
    fused, apart = (static.compiled("cpu", dtype, recipe)[1] for recipe in recipes)
    assert specs_of(fused) and not specs_of(apart)
    for ours, theirs in zip(*(static.decode(p.session(), static.prompt(), 6) for p in (fused, apart)), strict=True):
        assert torch.equal(ours, theirs)
    for one, other in zip(fused.plan.entries, apart.plan.entries, strict=True):
        assert len(one.steps) == len(other.steps) - static.LAYERS
