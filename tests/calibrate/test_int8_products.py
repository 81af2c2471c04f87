"""W8A8, W4A8 and LLM.int8 end to end: integers are multiplied, with the same bits on the CPU, on the simulated GPU, in
replays and in the interpreter, and the rewritten torch program says the same up to fp32's last places."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import qcompiler as qc
from qcompiler import formats
from qcompiler.formats import int8_rows, integer_product, llm_int8
from qcompiler.kernels.select import LinearQuery, choose_linear
from qcompiler.plan.kernel import FormatRef
from qcompiler.runtime.amx import INT8_FLAGS, tiles_refused

K, N = 96, 40
SHAPES = {"x": {0: ("s", 1, 40)}}
FORMATS = ["int8", *(pytest.param(name, marks=pytest.mark.slow) for name in ("int4", "llm_int8"))]


class Layer(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.up = nn.Linear(K, N)
        self.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.up(x))


def inputs(seed: int, rows: int) -> torch.Tensor:
    x = torch.randn(rows, K, generator=torch.Generator().manual_seed(seed))
    x[rows // 2, (7 * seed) % K] = 8.5
    if rows > 2:
        x[1] = 0
    return x


def compiled(kind: str, linear: str, device: str = "cpu", **more: Any) -> qc.Program:
    recipe = qc.QuantConfig(linear, activations=kind, promise_bits=None)
    return qc.qcompile(
        Layer().eval(),
        (inputs(0, 7),),
        quant=recipe,
        dynamic_shapes=SHAPES,
        device=device,
        verify_each="numerics",
        **more,
    )


def defined(kind: str, linear: str, x: torch.Tensor) -> np.ndarray:
    """The layer as formats/ defines it, in NumPy."""
    layer = Layer()
    packed = formats.get(linear).encode(layer.up.weight.detach().numpy())
    a = x.numpy()
    outliers = (np.abs(a) >= 6).any(axis=0)
    rows = int8_rows.quantise(a, "outliers" if kind == "llm_int8" else "token", 6.0, outliers)
    total = integer_product.multiply(int8_rows.codes_of(rows, K), int8_rows.scales_of(rows, K), packed)
    total = total + layer.up.bias.detach().numpy()
    if kind == "llm_int8":
        total = total + np.where(outliers, a, 0).astype(np.float32) @ packed.format.decode(packed).T
    return np.maximum(total, 0)


@pytest.mark.parametrize("linear", FORMATS)
def test_integers_are_multiplied_to_the_bit_in_eager_runs_and_replays(linear: str) -> None:
    cpu, gpu = compiled("int8", linear), compiled("int8", linear, "sim:0")
    assert "linear(dequantize" not in cpu.ir("select-kernels") and "qc.dequantize_rows" not in cpu.ir("select-kernels")
    graph = gpu.capture(inputs(0, 7).numpy())
    for seed in range(3):
        x = inputs(seed, 7)
        expected = defined("int8", linear, x)
        assert (cpu(x).detach().numpy() == expected).all()
        assert (np.asarray(gpu(x.numpy())) == expected).all()
        assert (np.asarray(graph.replay(x.numpy())) == expected).all(), f"replay {seed}"
        oracle = cpu.oracle(x).detach().numpy()
        assert np.abs(oracle - expected).max() < 2e-6 * np.abs(expected).max()
    for rows in (1, 2, 33):
        assert (cpu(inputs(5, rows)).detach().numpy() == defined("int8", linear, inputs(5, rows))).all()


class Mixture(nn.Module):
    """Each row goes through two of five experts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.w = nn.Parameter(torch.randn(5, N, K) / K**0.5)

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        rows = x.repeat_interleave(2, dim=0)
        return torch.relu(torch.bmm(self.w[index.reshape(-1)], rows.unsqueeze(-1)).squeeze(-1))


def chosen(seed: int, rows: int) -> torch.Tensor:
    return torch.randint(0, 5, (rows, 2), generator=torch.Generator().manual_seed(seed))


def test_experts_multiply_integers_to_the_bit_in_eager_runs_and_replays() -> None:
    model, recipe = Mixture().eval(), qc.QuantConfig("int8", activations="int8", promise_bits=None)
    shapes = {**SHAPES, "index": {0: ("s", 1, 40)}}
    given = (inputs(0, 7), chosen(0, 7))
    cpu, gpu = (
        qc.qcompile(model, given, quant=recipe, dynamic_shapes=shapes, device=device, verify_each="numerics")
        for device in ("cpu", "sim:0")
    )
    assert "int8 grouped_linear" in str(cpu.report()) and "multiplied as integers" in str(cpu.report())
    packed = formats.get("int8").encode(model.w.detach().numpy().reshape(5 * N, K))
    graph = gpu.capture(*(each.numpy() for each in given))
    for seed, count in ((0, 7), (1, 7), (2, 1), (3, 33)):
        x, index = inputs(seed, count), chosen(seed, count)
        rows = int8_rows.quantise(x.numpy(), "token", 0.0, None)
        total = integer_product.multiply(int8_rows.codes_of(rows, K), int8_rows.scales_of(rows, K), packed)
        pairs = np.arange(2 * count)
        expected = np.maximum(total.reshape(count, 5, N)[pairs // 2, index.numpy().reshape(-1)], 0)
        assert (cpu(x, index).detach().numpy() == expected).all(), count
        assert (np.asarray(gpu(x.numpy(), index.numpy())) == expected).all(), count
        if count == 7:
            assert (np.asarray(graph.replay(x.numpy(), index.numpy())) == expected).all(), f"replay {seed}"
        oracle = cpu.oracle(x, index).detach().numpy()
        assert np.abs(oracle - expected).max() < 2e-6 * np.abs(expected).max()


def test_experts_keep_floats_where_inputs_are_not_quantised_by_token() -> None:
    model = nn.ModuleDict({"a": Layer(), "b": Mixture()})

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = model

        def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
            return self.parts["b"](x, index).sum() + self.parts["a"](x)

    recipe = qc.QuantConfig("llm_int8", activations="llm_int8", promise_bits=None)
    program = qc.qcompile(Both().eval(), (inputs(0, 7), chosen(0, 7)), quant=recipe)
    assert "not quantised: the inputs of experts take a scale per token" in str(program.report())
    assert "int8 grouped_linear" not in str(program.report())


def test_llm_int8_multiplies_codes_and_keeps_outlier_columns_in_floating_point() -> None:
    cpu, gpu = compiled("llm_int8", "llm_int8"), compiled("llm_int8", "llm_int8", "sim:0")
    graph = gpu.capture(inputs(0, 7).numpy())
    layer = Layer()
    packed = formats.get("llm_int8").encode(layer.up.weight.detach().numpy())
    for seed in range(3):  # another column holds the outlier each time
        x = inputs(seed, 7)
        expected = defined("llm_int8", "llm_int8", x)
        bound = 2e-6 * np.abs(expected).max()  # the float product's sums have an order of their own
        assert np.abs(cpu(x).detach().numpy() - expected).max() < bound
        eager = np.asarray(gpu(x.numpy()))
        assert np.abs(eager - expected).max() < bound
        assert (np.asarray(graph.replay(x.numpy())) == eager).all(), f"replay {seed}"
        theirs = llm_int8.linear(x.numpy(), packed, bias=layer.up.bias.detach().numpy())
        assert np.abs(np.maximum(theirs, 0) - expected).max() < bound


@pytest.mark.slow
def test_static_scales_and_saved_programs_multiply_integers(tmp_path: Path) -> None:
    seen = torch.zeros(2, K)
    seen[1, 3] = -1.5
    program = compiled("int8:static", "int4", calibrate=[seen])
    packed = formats.get("int4").encode(Layer().up.weight.detach().numpy())
    program.save(tmp_path / "static.qca")
    loaded = qc.load(tmp_path / "static.qca")
    for seed in range(2):
        x = inputs(seed, 5)  # values beyond the clip saturate
        rows = int8_rows.quantise(x.numpy(), "tensor", 1.5, None)
        assert (np.abs(int8_rows.codes_of(rows, K)) == 127).sum() > 10
        found = integer_product.multiply(int8_rows.codes_of(rows, K), int8_rows.scales_of(rows, K), packed)
        expected = np.maximum(found + Layer().up.bias.detach().numpy(), 0)
        assert (program(x).detach().numpy() == expected).all()
        assert (np.asarray(loaded(x.numpy())) == expected).all()


def test_the_report_names_the_engines_passed_over_and_why() -> None:
    def rejected(kind: str, *isas: str) -> dict[str, str]:
        query = LinearQuery((1, 512), 64, 64, "i8", "f32", FormatRef(name="int8"), True, kind, isas, codes=True)
        choice = choose_linear(query)
        assert choice.layout is not None
        return dict(choice.rejected)

    assert rejected("cuda", "sm_70")["linear.int8.mma"] == "sm_70: int8 tensor cores: sm_75"
    assert rejected("cuda", "sm_90a") == {"linear.int8.dp4a": "sm_90a: tensor cores multiply bytes"}
    assert rejected("cuda", "sm_70", "sm_80").keys() == {"linear.int8.mma", "linear.int8.dp4a"}
    assert "asked for when the kernel runs" in rejected("cpu", "x86-64-v4")["linear.int8.pairs"]
    assert "linear.int8.vnni" in rejected("cpu", "x86-64-v3")
    text = str(compiled("int8", "int8").report())
    assert "int8 linear" in text and "multiplied as integers" in text


@pytest.mark.skipif(tiles_refused(INT8_FLAGS) is not None, reason=str(tiles_refused(INT8_FLAGS)))
def test_tiles_change_no_bit_of_a_program_on_all_threads_of_its_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(256, 768), nn.GELU(), nn.Linear(768, 256)).eval()
    x = torch.randn(200, 256)
    recipe = qc.QuantConfig("int4:group=32", activations="int8", promise_bits=None)
    qc.qcompile(model, (x,), quant=recipe).save(tmp_path / "model.qca")
    results = {}
    for asked in ("vnni", "amx"):
        monkeypatch.setenv("QC_INT8", asked)
        for threads in (1, 3):
            run = qc.load(tmp_path / "model.qca", num_threads=threads)
            results[asked, threads] = [np.asarray(run(x.numpy())).tobytes() for _ in range(5)]
    (first, *others) = results.values()
    assert len(set(first)) == 1 and all(other == first for other in others)


def test_formats_without_an_integer_product_compute_in_fp32_and_say_so() -> None:
    program = qc.qcompile(
        Layer().eval(), (inputs(0, 7),), quant=qc.QuantConfig("nf4:block=32", activations="int8", promise_bits=None)
    )
    assert "quantize_rows" not in program.ir("import")
    assert "multiplied in floating point: codes of nf4 stand for values of a table" in str(program.report())


@pytest.mark.slow
def test_half_precision_rounds_once() -> None:
    model, x = Layer(torch.bfloat16).eval(), inputs(2, 7).bfloat16()
    program = qc.qcompile(model, (x,), quant=qc.QuantConfig("int8", activations="int8", promise_bits=None))
    packed = formats.get("int8").encode(model.up.weight.detach().float().numpy())
    rows = int8_rows.quantise(x.float().numpy(), "token", 0.0, None)
    exact = integer_product.multiply(int8_rows.codes_of(rows, K), int8_rows.scales_of(rows, K), packed)
    exact = np.maximum(exact + model.up.bias.detach().float().numpy(), 0)
    assert (program(x).float().detach().numpy() == torch.from_numpy(exact).bfloat16().float().numpy()).all()
