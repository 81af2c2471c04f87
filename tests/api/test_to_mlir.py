"""`Program.to_mlir`: text in upstream dialects alone, what it takes, and what it refuses. tests/mlir compiles it."""

from __future__ import annotations

import sys
import tracemalloc
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
from qcompiler.frontends.torch.frontend import import_torch
from qcompiler.inspect.upstream import STAGE, UpstreamModule
from qcompiler.inspect.upstream import upstream as write
from qcompiler.ir.context import QCContext
from qcompiler.ir.interpreter import run
from qcompiler.ir.mlir_oracle import bindings
from qcompiler.ir.scalar_ops import ARITH, MATH
from qcompiler.ir.text import print_module
from qcompiler.passes.pipeline import run_pipeline, upto
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


class Odd(nn.Module):
    """A scalar weight, results that are an input and weights, and no use of the second input."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.tensor(2.5))
        self.linear = nn.Linear(32, 4)

    def forward(self, x: torch.Tensor, i: torch.Tensor) -> Any:
        return self.linear(x) * self.factor, x, self.linear.bias, self.factor + 1


def test_scalars_are_no_resources_and_results_may_be_inputs_and_weights() -> None:
    """Upstream MLIR never ends when it folds a resource of rank 0."""
    x = torch.randn(3, 32)
    given = (x, torch.arange(3))
    imported, module = upstream_cases.lowered(Odd().eval(), given, quant="q8_0", weights="resources")
    assert "dense<2.5" in module.text and "factor" not in module.resources
    upstream(module.text)
    imported, module = upstream_cases.lowered(Odd().eval(), given, quant="q8_0")
    with torch.no_grad():
        wanted = upstream_cases.leaves(imported.quantized.module(*given))
    got = run(upstream(module.text), WeightStore(), module.arguments(*(each.numpy() for each in given)))
    for ours, theirs in zip(got, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_a_large_weight_is_written_piece_by_piece(tmp_path: Path) -> None:
    """`save` holds a piece of the text and not the whole."""
    array = np.arange(1 << 22, dtype=np.int32)
    module = UpstreamModule("module {}\n", {"w": array}, (), 0)
    tracemalloc.start()
    module.save(tmp_path / "a.mlir")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < array.nbytes / 2, "its text has two characters for each byte"
    text = (tmp_path / "a.mlir").read_text()
    assert text == module.text and f'w: "0x04000000{array.tobytes().hex()}"' in text


def test_an_entry_point_that_is_none_is_refused_and_a_loaded_program_says_what_to_do(tmp_path: Path) -> None:
    x = torch.randn(5, 64)
    program = qc.qcompile(
        model(), (x,), dynamic_shapes={"input": {0: ("b", 1, 8)}}, buckets=[("one", {"b": (1, 1)}), ("more", {})]
    )
    assert "tensor<1x64xf32>" in program.to_mlir(entry="one").text
    assert "// Size b: from 1 to 8.\n" in program.to_mlir(entry="more").text
    with pytest.raises(ArgumentError, match="entry='two': the program's entry points are one, more"):
        program.to_mlir(entry="two")
    program.save(tmp_path / "a.qca")
    with pytest.raises(ArgumentError, match="Compile the model again and call to_mlir on the result"):
        qc.load(tmp_path / "a.qca").to_mlir("linalg")


def test_the_head_says_that_places_are_lost() -> None:
    imported = import_torch(model(), (torch.randn(5, 64),))
    run_pipeline(imported.module, QCContext.default(weights=imported.weights), stages=upto(STAGE))
    module = write(print_module(imported.module), imported.weights, {}, "arguments", devices=2)
    assert "// The program runs on 2 devices; which part runs on which is not said here.\n" in module.text


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
