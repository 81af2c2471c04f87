"""`Program.to_mlir`: text in upstream dialects alone, what it takes, and what it refuses. tests/mlir compiles it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import upstream_cases
from by_path import load
from torch import nn
from xdsl.context import Context
from xdsl.dialects.builtin import Builtin, ModuleOp
from xdsl.dialects.func import Func
from xdsl.dialects.linalg import Linalg
from xdsl.dialects.tensor import Tensor
from xdsl.parser import Parser

import qcompiler as qc
from qcompiler.cli import main
from qcompiler.errors import ArgumentError, MissingDependencyError, QCompilerError, WeightsError
from qcompiler.ir.interpreter import run
from qcompiler.ir.mlir_oracle import bindings
from qcompiler.ir.scalar_ops import ARITH, MATH
from qcompiler.plan.weights import WeightStore


def upstream(text: str) -> ModuleOp:
    """The text's module, parsed without any dialect of ours."""
    context = Context()
    for dialect in (Builtin, Func, Linalg, Tensor, ARITH, MATH):
        context.load_dialect(dialect)
    module = Parser(context, text).parse_module()
    module.verify()
    return module


class Counting(nn.Module):
    """A buffer that is written."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.tensor(3))
        self.linear = nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.linear(x) * self.calls


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 8)).eval()


@pytest.mark.parametrize("quant", ["q4_0", "int8:symmetric=False", None])
def test_the_text_means_what_the_program_does(quant: str | None) -> None:
    x = torch.randn(5, 64)
    imported, module = upstream_cases.lowered(model(), (x,), quant=quant)
    with torch.no_grad():
        wanted = imported.quantized.module(x).numpy()
    got = run(upstream(module.text), WeightStore(), module.arguments(x.numpy()))
    np.testing.assert_allclose(got[0], wanted, atol=1e-5)
    assert module.inputs == ("input",) and module.outputs == 1 and not module.states
    assert "qc." not in module.text.replace("// ", "")


def test_states_are_arguments_behind_the_inputs_and_results_behind_the_outputs() -> None:
    x = torch.randn(2, 32)
    _, module = upstream_cases.lowered(Counting().eval(), (x,), quant="int8")
    assert list(module.states) == list(module.updates) and len(module.updates) == 1
    first = run(upstream(module.text), WeightStore(), module.arguments(x.numpy()))
    assert first[1] == 4
    states = dict(zip(module.updates, first[1:], strict=True))
    assert run(upstream(module.text), WeightStore(), module.arguments(x.numpy(), states=states))[1] == 5
    with pytest.raises(ArgumentError, match="@main reads no state 'count'; its states are: calls"):
        module.arguments(x.numpy(), states={"count": np.asarray(1)})


def test_unsigned_bytes_become_signless_ones() -> None:
    class Bytes(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return (*x.sort(-1), x.cumsum(-1), (x + 7).float())

    x = torch.tensor([[200, 3, 255, 100]], dtype=torch.uint8)
    _, module = upstream_cases.lowered(Bytes(), (x,))
    assert "ui8" not in module.text
    values, places, sums, moved = run(upstream(module.text), WeightStore(), module.arguments(x.numpy().view(np.int8)))
    assert values.view(np.uint8).tolist() == [[3, 100, 200, 255]] and places.tolist() == [[1, 3, 0, 2]]
    assert sums.tolist() == [[200, 203, 458, 558]] and moved.tolist() == [[207, 10, 6, 107]]


def test_weights_are_resources_or_arguments_and_named_by_their_sections(tmp_path: Path) -> None:
    x = torch.randn(5, 64)
    program = qc.qcompile(model(), (x,), quant="int4", dynamic_shapes={"input": {0: ("b", 1, 8)}})
    held, given = program.to_mlir(), program.to_mlir("linalg", weights="arguments")
    assert not held.weights and len(held.arguments(x.numpy())) == 1
    assert {"0.weight:codes", "0.weight:scales", "3.bias"} <= set(given.weights)
    assert held.text.count("dense_resource<") == len(given.weights)
    assert "tensor<?x64xf32>" in given.text and "//   0: input input\n" in given.text
    codes = given.weights["0.weight:codes"]
    assert codes.tobytes().hex() in held.text and codes.dtype == np.int8
    held.save(tmp_path / "model.mlir")
    assert (tmp_path / "model.mlir").read_text() == held.text == str(held)
    with pytest.raises(ArgumentError, match=r"@main takes 1 inputs \(input\), not 2"):
        held.arguments(x.numpy(), x.numpy())
    with pytest.raises(ArgumentError, match=r"to_mlir\('stablehlo'\): the one choice is 'linalg'"):
        program.to_mlir("stablehlo")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="weights='files': choose 'resources' or 'arguments'"):
        program.to_mlir(weights="files")  # type: ignore[arg-type]


def test_a_program_without_values_has_no_text() -> None:
    program = qc.qcompile(model(), (torch.randn(5, 64),), quant="int8", weights="none")
    with pytest.raises(WeightsError, match='weights="none"'):
        program.to_mlir()


def test_what_torch_runs_is_refused_by_name() -> None:
    class Strange(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.special.bessel_j0(x)

    with pytest.raises(QCompilerError, match=r"qc.torch_call at .* cannot be lowered to linalg: torch runs it"):
        upstream_cases.lowered(Strange().eval(), (torch.randn(3),), fallback="torch")


def test_missing_packages_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torch_mlir", "torch_mlir.ir", "iree.compiler", "iree.runtime"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'qcompiler\[mlir\]'"):
        bindings()
    with pytest.raises(MissingDependencyError, match=r"pip install 'qcompiler\[iree\]'"):
        load("benchmarks/iree_cpu.py").iree()


def test_the_command_line_writes_the_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[Any]
) -> None:
    (tmp_path / "written_out.py").write_text(
        "import torch\n\n\ndef model():\n    return torch.nn.Linear(32, 8).eval(), (torch.randn(3, 32),)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["compile", "written_out:model", "-o", "a.qca", "--quant", "q8_0", "--mlir", "a.mlir"]) == 0
    assert "wrote a.mlir" in capsys.readouterr().err
    assert "dialect_resources" in (tmp_path / "a.mlir").read_text()
    assert main(["compile", "written_out:model", "--weights", "none", "--mlir", "a.mlir"]) == 1
    assert "--mlir writes the weights" in capsys.readouterr().err
