"""Random graphs on what is slower to reach: upstream MLIR's compiler, and the CUDA kernels on the simulated GPU."""

from __future__ import annotations

import pytest
from graphfuzz import batch, generate, plan
from graphfuzz.keep import kept_files, read


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3000, 3005))
def test_upstream_mlir_agrees(seed: int) -> None:
    graphs, sizes = plan.for_mlir(seed)
    report = plan.hold(graphs, sizes, batch.Checks(native=False, mlir=True), f"seed {seed}")
    assert report.compared["mlir"] >= plan.SIZE


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4000, 4003))
def test_the_simulated_gpu_agrees(seed: int) -> None:
    sizes = generate.sizes_of(seed)
    profile = ("float", "bf16", "fp16")[seed % 3]
    graphs = [generate.graph_of(1000 * seed + i, sizes, profile) for i in range(10)]
    report = plan.hold(graphs, sizes, batch.Checks(native=False, sim=True), f"seed {seed}")
    assert report.compared["sim"] >= len(graphs)


@pytest.mark.slow
def test_graphs_that_failed_once_are_right_on_the_simulated_gpu() -> None:
    files = kept_files()
    graphs = [read(path) for path in files]
    what = f"the kept graphs ({', '.join(path.stem for path in files)})"
    report = plan.hold(graphs, generate.sizes_of(1), batch.Checks(native=False, sim=True), what)
    assert report.compared["sim"] >= len(graphs)
