"""benchmarks/matmul_cuda.py as far as it can be seen without a GPU: medians, ratios, table, JSON, order, kernels."""

from __future__ import annotations

import json
import subprocess
import sys
from io import StringIO
from pathlib import Path
from types import ModuleType

import pytest
from by_path import load

from qcompiler.kernels.cuda.emit import emit_kernel
from qcompiler.runtime.backends import registry

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "matmul_cuda.py"


@pytest.fixture(scope="module")
def matmul() -> ModuleType:
    return load("benchmarks/matmul_cuda.py")


def measured(matmul: ModuleType) -> tuple[list, object]:
    """4096 x 4096 at M = 1: torch in 10 us, nf4 in 2.5 us with one slow round; a copy of 4 TB/s."""
    torchs = matmul.Measured(4096, 4096, 1, matmul.BASELINE, "cuBLAS", 32_000_000, [11e-6, 10e-6, 9e-6])
    nf4 = matmul.Measured(4096, 4096, 1, "nf4", "mma", 9_000_000, [2.5e-6, 2.4e-6, 90e-6])
    return [torchs, nf4], matmul.Measured(0, 0, 0, "copy", "copy", 2 << 30, [(2 << 30) / 4e12] * 3)


def test_rows_hold_medians_and_shares_of_the_copy_and_of_torch(matmul: ModuleType) -> None:
    torchs, nf4 = matmul.rows(*measured(matmul))
    assert (torchs["us"], torchs["of_bf16"]) == (pytest.approx(10), 1)
    assert nf4["us"] == pytest.approx(2.5), "one slow round moves no median"
    assert nf4["of_bf16"] == pytest.approx(4)
    assert nf4["gbytes"] == pytest.approx(3600)
    assert nf4["of_copy"] == pytest.approx(0.9)
    assert nf4["tflops"] == pytest.approx(2 * 4096 * 4096 / 2.5e-6 / 1e12)
    assert nf4["spread"] == pytest.approx((90 - 2.4) / 2.5)
    assert (nf4["n"], nf4["k"], nf4["m"], nf4["engine"], nf4["path"], nf4["rounds"]) == (4096, 4096, 1, "nf4", "mma", 3)


def test_rows_without_one_baseline_are_refused(matmul: ModuleType) -> None:
    engines, copy = measured(matmul)
    for wrong in (engines[1:], [engines[0], *engines]):
        with pytest.raises(ValueError, match="'torch bf16'"):
            matmul.rows(wrong, copy)


def test_the_document_is_json_and_names_what_did_not_run(matmul: ModuleType) -> None:
    found = matmul.rows(*measured(matmul))
    absent = [matmul.NotRun("bitsandbytes nf4", "ModuleNotFoundError: No module named 'bitsandbytes'")]
    document = json.loads(json.dumps(matmul.document({"gpu": "H200"}, found, absent)))
    assert (document["schema"], document["device"]["gpu"]) == (matmul.SCHEMA, "H200")
    assert document["rows"] == found
    assert document["not_run"] == [vars(absent[0])]


def test_the_table_shows_every_row_with_its_shares(matmul: ModuleType) -> None:
    from rich.console import Console

    text = StringIO()
    Console(file=text, width=140).print(matmul.table(matmul.rows(*measured(matmul))))
    line = next(line for line in text.getvalue().splitlines() if "nf4" in line)
    assert all(cell in line for cell in ("4096x4096", "mma", "2.5", "90.0%", "4.00x"))


def test_every_size_is_measured_once_the_telling_ones_first(matmul: ModuleType) -> None:
    order = list(matmul.sizes(matmul.SHAPES, matmul.MS))
    assert len(order) == len(set(order)) == len(matmul.SHAPES) * len(matmul.MS)
    assert [m for _, _, m in order[:8]] == [1, 1, 16, 16, 512, 512, 2048, 2048]
    assert matmul.MS == (1, 2, 4, 8, 16, 32, 64, 128, 512, 1024, 2048)


def test_every_kernel_of_the_benchmark_is_emitted(matmul: ModuleType) -> None:
    engines = matmul.engines()
    for kind, params in matmul.FORMATS.items():
        for m in matmul.MS:
            spec = engines.linear_spec(kind, params, m, 4096, 4096)
            assert emit_kernel(spec, "sm_90a").engine == "mma"


def test_without_a_gpu_it_says_so_and_succeeds(matmul: ModuleType, tmp_path: Path) -> None:
    if registry.is_available("cuda:0"):
        pytest.skip("this machine has a GPU; `make gpu-check` runs the benchmark there")
    report = tmp_path / "matmul.json"
    command = [sys.executable, "-I", "-S", str(SCRIPT), "--json", str(report)]  # not even torch is there
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout[:8]) == (0, "no GPU: "), done.stderr
    assert json.loads(report.read_text())["rows"] == []
