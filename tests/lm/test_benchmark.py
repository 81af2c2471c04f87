"""benchmarks/lm_cpu.py and model_cpu.py on tiny models: cells have figures, and a peer that is not there is named."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from by_path import ROOT, load


def run(*command: str) -> subprocess.CompletedProcess[str]:
    """A benchmark, run as by hand: it imports what lies beside it, which `make test-full`'s PYTHONSAFEPATH forbids."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


@pytest.mark.slow
def test_every_cell_has_figures_and_missing_peers_have_reasons(tmp_path: Path) -> None:
    report = tmp_path / "lm.json"
    command = [sys.executable, str(ROOT / "benchmarks/lm_cpu.py"), "--small", "--json", str(report)]
    done = run(*command)
    facts = json.loads(report.read_text())
    cells = {(cell["what"], cell["tokens"], cell["sequences"]): cell for cell in facts["cells"]}
    decodes = {("decode", context, batch) for context in (1, 64) for batch in (1, 8)}
    assert set(cells) == {*decodes, ("prompt", 16, 1)}
    engines = {"ours", "ours bf16", "ours int8", "transformers bf16"}
    if importlib.util.find_spec("torchao") is None:
        assert "not installed" in facts["missing"]["torchao int4"]
    else:
        engines.add("torchao int4")
    if importlib.util.find_spec("llama_cpp") is None:
        assert "not installed" in facts["missing"]["llama.cpp"] and "missing: llama.cpp" in done.stdout
    else:
        engines.add("llama.cpp")
    for cell in cells.values():
        assert set(cell["tokens_per_second"]) == set(cell["ratio"]) == engines
        assert min(cell["tokens_per_second"].values()) > 0 and 1 <= cell["tries"] <= 3
    assert all(0 < share < 1 for name in ("ours", "ours int8") for share in facts["not_product"][name]["1"].values())
    assert facts["first"]["token"] > 0


@pytest.mark.slow
def test_models_have_a_figure_in_each_arithmetic(tmp_path: Path) -> None:
    report = tmp_path / "models.json"
    command = [sys.executable, str(ROOT / "benchmarks/model_cpu.py"), "--small", "--json", str(report), "--tries", "1"]
    command += ["--models", "vit", "llama", "unet", "--formats", "nf4", "int8", "--no-compiled"]
    command += ["--peers", "openvino", "--peers-python", str(tmp_path / "no-python")]
    done = run(*command)
    facts = json.loads(report.read_text())
    assert "make bench-peers" in facts["missing"]["openvino"] and "missing: openvino" in done.stdout
    assert facts["missing"]["onnxruntime"] == "left out by --peers"
    cells = facts["cells"]
    assert [cell["model"] for cell in cells] == ["vit", "llama", "llama", "unet"]
    ours = {"nf4", "nf4 bf16", "int8", "int8 bf16", "int8 int8"}  # nf4 has no product of integers
    for cell in cells:
        rows = {row["runner"]: row for row in cell["rows"]}
        assert set(rows) == {"torch fp32", "torch bf16"} | ours
        assert all(row["ms"] > 0 for row in rows.values())
        assert rows["int8"]["error"] < 0.1 and rows["nf4"]["error"] < 0.3
        assert set(cell["missing"]) == {"torch bf16 compiled", "torchao int8 a8"}


PEER = """
import torch
from shared import ModelEngine, UnableError

VERSION = "1"


def use_threads(threads):
    torch.set_num_threads(threads)


def make(program, arrays, threads):
    module = torch.export.load(program).module()
    return lambda: module(**{"b": torch.from_numpy(arrays[1]), "a": torch.from_numpy(arrays[0])}).detach().numpy()


def cannot(program, arrays, threads):
    raise UnableError("no such thing")


ENGINES = {"itself": ModelEngine("fp32", make), "cannot": ModelEngine("int8", cannot)}
"""


def test_a_peer_computes_an_exported_model_in_its_own_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its inputs in their order; what it cannot do is named."""
    for name in ("process.py", "shared.py"):
        shutil.copy(ROOT / "benchmarks/cpupeers" / name, tmp_path)
    (tmp_path / "models_openvino.py").write_text(PEER)
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    models = load("benchmarks/model_cpu.py")
    monkeypatch.setattr(models.peers, "PROCESS", tmp_path / "process.py")
    (peer,), missing = models.peers.start(["openvino"], sys.executable, 1, "models")
    assert set(missing) == {"onnxruntime"}

    class Difference(torch.nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return a - 2 * b

    given = {"a": torch.randn(2, 3), "b": torch.randn(2, 3)}
    found, absent = models.loaded(peer, Difference(), given, tmp_path)
    assert absent == {"cannot": "no such thing"} and set(found) == {"itself"}
    turn, result = found["itself"]
    assert torch.equal(result, given["a"] - 2 * given["b"]) and 0 < turn() < 60
    peer.close()


@pytest.mark.slow
def test_the_benchmark_of_a_gpu_runs_on_the_simulated_one(tmp_path: Path) -> None:
    report = tmp_path / "lm.json"
    command = [sys.executable, str(ROOT / "benchmarks/lm_gpu.py"), "--small", "--device", "sim:0", "--formats", "q4_K"]
    done = run(*command, "--batches", "1", "--json", str(report))
    facts = json.loads(report.read_text())
    assert [(cell["prompt"], cell["batch"]) for cell in facts["cells"]] == [(8, 1), (64, 1)]
    assert all(cell["decode"] > 0 and cell["prefill"] > 0 and "of_copy" not in cell for cell in facts["cells"])
    kinds = {each["kind"] for each in facts["launches"]["q4_K at 64, batch 1"]}
    assert {"linear", "attention", "embedding", "sample"} <= kinds
    assert "q4_K at 8, batch 1" in facts["launches"] and "launches, the slowest kernels" in done.stdout
