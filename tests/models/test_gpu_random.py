"""Random models (`random_models`) on the CPU and on a GPU, the simulated one at least.

The two answers and the eager oracle's are held against the model in float64 with the weights that the program decodes,
and captured graphs against eager calls, to the bit. `QC_SIM_ARCH` and `QC_SIM_SEED` choose what the simulated GPU
stands in for and the order in which it runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from by_path import load

import qcompiler as qc
from qcompiler.runtime.backends import registry

oracles = load("tests/models/oracles.py")
random_models = load("tests/models/random_models.py")

DEVICES = ["sim:0", *(["cuda:0"] if registry.is_available("cuda:0") else [])]
QUICK = (2, 11)  # int4, int8
SEEDS = [
    *(pytest.param(seed, id="-".join([*DEVICES, str(seed)])) for seed in QUICK),
    *(pytest.param(seed, id="-".join([*DEVICES, str(seed)]), marks=pytest.mark.slow) for seed in (5, 8)),
    *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(100, 160)),
]
"""The first ones (int4, int8, nf4, float; f32, bf16, f16) name the devices: `make gpu-check` chooses tests by that."""
SIZES = [(1, 1), (2, 4), (1, 17), (3, 43)]
"""b x s: 1, 8, 17 and 129 rows, on both sides of the borders between row classes."""
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}
"""What a program may be off by beside its oracle's own error: about eight roundings of the dtype at unit size."""


def assert_close(what: str, ours: torch.Tensor, oracle: torch.Tensor, exact: torch.Tensor) -> None:
    assert ours.dtype == oracle.dtype and ours.shape == oracle.shape, what
    assert bool(ours.isfinite().all()) == bool(oracle.isfinite().all()), f"{what} is not finite"
    size = float(exact.norm()) + 0.3 * exact.numel() ** 0.5
    error, allowed = float((ours.double() - exact).norm()), float((oracle.double() - exact).norm())
    few = 1 + 4 / max(exact.numel(), 1) ** 0.5  # a single number may be off by much more, or less, than is usual
    limit = few * (1.5 * allowed + ROUNDING[oracle.dtype] * size)
    assert error <= limit, f"{what}: off by {error / size:.2e}, the oracle by {allowed / size:.2e}"


def in_double(args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(each.double() if each.is_floating_point() else each for each in args)


def bits(result: Any) -> bytes:
    """The bytes of a tensor, or of an array on a device."""
    if isinstance(result, torch.Tensor):
        return bytes(result.reshape(-1).view(torch.uint8).numpy())
    return bytes(result.numpy().tobytes())


def check_elsewhere(case: Any, program: qc.Program, file: Path, args: tuple[torch.Tensor, ...]) -> None:
    """The program from its file, on another device, from arrays that are there, gives the same bits."""
    program.save(file, layout="canonical" if case.seed % 2 else "target")
    loaded = qc.load(file, device=program.device.replace("sim:0", "sim:1"))
    results = loaded(*(loaded.array(each) for each in args))
    for theirs, ours in zip(results, program(*args), strict=True):
        assert bits(theirs) == bits(ours), f"the file of {case} gives other bits"


def check(case: Any, devices: list[str], sizes: list[tuple[int, int]], file: Path) -> None:
    """Compiles for each device, compares at each size, and replays the graph of the last one with fresh inputs."""
    example = case.inputs(case.b[0], case.s[0], 0)
    exact = None
    for device in devices:
        program = qc.qcompile(case.model, example, quant=case.quant, dynamic_shapes=case.dynamic_shapes, device=device)
        exact = exact or oracles.float64_model(case.model, program)
        for b, s in case.sizes(sizes):
            args = case.inputs(b, s, 1)
            with torch.no_grad():
                expected, truth = program.oracle(*args), exact(*in_double(args))
            results = program(*args)
            for number, triple in enumerate(zip(results, expected, truth, strict=True)):
                assert_close(f"output {number} of {device} at {b}x{s} of {case}", *triple)
        if device == "cpu":
            continue
        graph = program.capture(*case.inputs(b, s, 2))
        for seed in (3, 4):
            args = case.inputs(b, s, seed)
            for replayed, eager in zip(graph.replay(*args), program(*args), strict=True):
                assert torch.equal(replayed, eager), f"a replay on {device} is not the eager call of {case}"
        check_elsewhere(case, program, file, args)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_model_on_cpu_and_gpu_equals_its_oracle_and_its_replays(seed: int, tmp_path: Path) -> None:
    check(random_models.random_case(seed), ["cpu", *DEVICES], SIZES, tmp_path / "random.qca")
