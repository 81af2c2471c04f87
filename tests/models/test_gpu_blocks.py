"""The MLP and the attention block on the simulated GPU (and on cuda:0 where there is one): eager, captured, replayed.

Every byte a kernel touches is checked while these run: a race, a read past an operand, or a missing wait fails a test.
"""

from __future__ import annotations

import zipfile
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from by_path import load

import qcompiler as qc
from qcompiler.errors import ArgumentShapeError
from qcompiler.runtime.backends import registry

blocks = load("tests/models/blocks.py")

DEVICES = ["sim:0", *(["cuda:0"] if registry.is_available("cuda:0") else [])]
FORMATS = (None, "nf4", "int8", "int4")
DIMS = {0: ("b", 1, 4), 1: ("s", 1, 96)}
SHAPES = ((1, 1), (2, 3), (3, 21), (1, 67))  # one row; 2 to 8; 9 to 64; more
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1.2e-2, torch.float16: 2e-3}
"""Relative L2 against the eager oracle. 16-bit models round at other points than eager torch."""


def inputs(model: torch.nn.Module, b: int, s: int, dtype: torch.dtype, seed: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    hidden = model.out.in_features if hasattr(model, "out") else model.up.in_features
    x = torch.randn((b, s, hidden), generator=generator).to(dtype)
    if isinstance(model, blocks.BertBlock):
        lengths = torch.randint(1, s + 1, (b, 1), generator=generator)
        return x, (torch.arange(s)[None] < lengths).long()
    return (x,)


@cache
def compiled(kind: str, quant: str | None, dtype: torch.dtype, device: str) -> tuple[Any, Any]:
    # 48 and 104 are multiples of little: nf4's blocks run across rows, tiles end early. int4 needs whole groups of 32.
    sizes = {"hidden": 64, "inner": 96} if quant == "int4" else {"hidden": 48, "inner": 104}
    model = blocks.scaled(getattr(blocks, kind)(**({} if kind.endswith("Block") else sizes))).to(dtype)
    example = inputs(model, 2, 7, dtype, 0)
    dims = tuple(DIMS for _ in example)
    return model, qc.qcompile(model, example, quant=quant, dynamic_shapes=dims, device=device)


CASES = [
    *(("Mlp", quant, torch.float32) for quant in FORMATS),
    *(("GatedMlp", quant, torch.bfloat16) for quant in ("nf4", "int4")),
    ("BertBlock", "nf4", torch.float32),
    ("BertBlock", "int8", torch.float16),
    ("LlamaBlock", "int4", torch.bfloat16),
    ("LlamaBlock", "nf4", torch.float32),
]
NAMES = [f"{kind}-{quant or 'float'}-{str(dtype)[6:]}" for kind, quant, dtype in CASES]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize(("kind", "quant", "dtype"), CASES, ids=NAMES)
def test_a_block_equals_its_oracle_in_every_row_class(kind, quant, dtype, device):
    model, program = compiled(kind, quant, dtype, device)
    for seed, (b, s) in enumerate(SHAPES):
        args = inputs(model, b, s, dtype, seed)
        with torch.no_grad():
            expected = program.oracle(*args).double()
        result = program(*args)
        assert result.dtype == dtype and result.shape == expected.shape
        error = (result.double() - expected).norm() / expected.norm()
        assert error <= TOLERANCE[dtype], f"{b}x{s}: {error:.2e}"


@pytest.mark.parametrize(("kind", "quant", "dtype"), CASES, ids=NAMES)
def test_three_replays_with_fresh_inputs_equal_eager(kind, quant, dtype, device):
    model, program = compiled(kind, quant, dtype, device)
    graph = program.capture(*inputs(model, 2, 5, dtype, 100))
    for seed in (101, 102, 103):
        args = inputs(model, 2, 5, dtype, seed)
        replayed = graph.replay(*args)
        assert torch.equal(replayed, program(*args)), f"replay with seed {seed} saw other inputs"


def test_a_graph_refuses_another_shape(device):
    model, program = compiled("Mlp", "nf4", torch.float32, device)
    graph = program.capture(*inputs(model, 2, 5, torch.float32, 0))
    with pytest.raises(ArgumentShapeError, match=r"2, 5"):
        graph.replay(*inputs(model, 1, 5, torch.float32, 0))


def test_a_program_starts_on_another_device_than_it_was_compiled_for():
    model, program = compiled("LlamaBlock", "nf4", torch.float32, "sim:0")
    args = inputs(model, 2, 9, torch.float32, 5)
    moved = program.to("sim:1")
    assert moved.device == "sim:1"
    assert torch.equal(moved(*args), program(*args))


def test_numpy_in_numpy_out_and_the_file_runs_in_a_process_without_torch(tmp_path):
    model, program = compiled("BertBlock", "nf4", torch.float32, "sim:0")
    args = inputs(model, 2, 6, torch.float32, 9)
    program.save(tmp_path / "block.qca")
    loaded = qc.load(tmp_path / "block.qca", device="sim:2")
    arrays = [each.numpy() for each in args]
    result = loaded(*arrays)
    assert isinstance(result, np.ndarray)
    np.testing.assert_array_equal(result, program(*args).numpy())


def test_a_program_for_a_gpu_that_is_not_here_is_made_and_saved(tmp_path):
    model = blocks.scaled(blocks.Mlp(64, 96))
    args = inputs(model, 2, 7, torch.float32, 0)
    program = qc.qcompile(model, args, quant="int4", dynamic_shapes=(DIMS,), device="cuda:7", targets=["sm_90a"])
    assert "linear_int4" in program.ir("emit-kernels")
    with pytest.raises(qc.errors.DeviceUnavailableError, match="cuda:7"):
        program(*args)
    program.save(tmp_path / "mlp.qca")
    with zipfile.ZipFile(tmp_path / "mlp.qca") as file:
        assert "native/sm_90a.cubin" in file.namelist()
    loaded = qc.load(tmp_path / "mlp.qca", device="sim:0")
    with torch.no_grad():
        expected = program.oracle(*args)
    assert (loaded(*args) - expected).norm() <= 2e-6 * expected.norm()


def test_a_file_without_a_cubin_says_so(tmp_path, monkeypatch, capsys):
    model = blocks.scaled(blocks.Mlp())
    args = inputs(model, 2, 7, torch.float32, 0)
    program = qc.qcompile(model, args, quant="nf4", device="cuda:7", targets=["sm_90a"])

    def missing(plan, arch):
        raise qc.errors.MissingDependencyError("pip install 'qcompiler[cuda]'")

    monkeypatch.setattr("qcompiler.program.build_module", missing)
    monkeypatch.delenv("QC_QUIET", raising=False)
    program.save(tmp_path / "mlp.qca")
    assert "no cubin" in capsys.readouterr().err
    with zipfile.ZipFile(tmp_path / "mlp.qca") as file:
        assert not any(name.startswith("native/") for name in file.namelist())


def test_the_report_names_kernel_engine_grid_and_the_reason():
    _, program = compiled("LlamaBlock", "int4", torch.bfloat16, "sim:0")
    text = str(program.report())
    assert "mma" in text and "grid" in text
