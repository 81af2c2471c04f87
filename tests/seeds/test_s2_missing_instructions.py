"""S2: an int8 kernel without the instruction it needs, which said so in the middle of a LoRA merge.

bitsandbytes multiplied int8 matrices with cuBLASLt's `igemmlt`, which needs the int8 tensor cores of sm_75.  On a V100
(sm_70) it raised "igemmlt not available", and there was no other kernel.  PEFT decoded an int8 weight for merging by
multiplying it with the identity matrix through that same kernel, so the error came in the middle of a merge: layers
that were merged before it stayed merged.

Here a kernel states what it needs and selection goes on to the next one, with the reason in the report, before
anything runs; merging decodes a weight by its format's declaration, needs no device, and changes nothing it was given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import qcompiler as qc
from qcompiler import formats
from qcompiler.errors import KernelSelectionError, MissingDependencyError
from qcompiler.kernels import select
from qcompiler.kernels.cuda import emit, signature
from qcompiler.runtime.backends.sim import SimBackend
from qcompiler.runtime.nvrtc import compile_cubin

WIDTH, RANK, ROWS = 64, 4, 20


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 96), nn.Linear(96, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


@cache
def compiled(*targets: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, qc.Program]:
    torch.manual_seed(0)
    model = Model().to(dtype)
    x = torch.randn(ROWS, WIDTH).to(dtype)
    recipe = qc.QuantConfig("int8", activations="int8", promise_bits=None)
    return model, qc.qcompile(model, (x,), quant=recipe, device="sim:0", targets=targets or None)


def adapter() -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    rng = np.random.default_rng(3)
    tensors = {}
    for name, rows, cols in (("up", 96, WIDTH), ("down", WIDTH, 96)):
        head = f"base_model.model.{name}"
        tensors[f"{head}.lora_A.weight"] = rng.standard_normal((RANK, cols)).astype(np.float32)
        tensors[f"{head}.lora_B.weight"] = 0.02 * rng.standard_normal((rows, RANK)).astype(np.float32)
    return tensors, {"r": RANK, "lora_alpha": 2 * RANK}


# --- the failure -----------------------------------------------------------------------------------------------------


def merge_through(matmul: Callable[[np.ndarray, np.ndarray], np.ndarray], weights: dict[str, Any]) -> None:
    """A merge in place that decodes int8 weights by multiplying them with the identity matrix."""
    tensors, _ = adapter()
    for name, weight in weights.items():
        head = f"base_model.model.{name}"
        delta = 2 * tensors[f"{head}.lora_B.weight"] @ tensors[f"{head}.lora_A.weight"]
        if isinstance(weight, np.ndarray):
            weights[name] = weight + delta
        else:
            eye = np.eye(weight.cols, dtype=np.float32)
            weights[name] = formats.get("int8").encode(matmul(eye, weight).T + delta)


def igemmlt_of(arch: str) -> Callable[[np.ndarray, Any], np.ndarray]:
    def igemmlt(x: np.ndarray, weight: Any) -> np.ndarray:
        if signature.arch_number(arch) < 75:
            raise RuntimeError("igemmlt not available (probably built with NO_CUBLASLT)")
        return x @ weight.format.decode(weight).T

    return igemmlt


def mixed_weights() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    up, down = (rng.standard_normal(shape).astype(np.float32) for shape in ((96, WIDTH), (WIDTH, 96)))
    return {"up": up, "down": formats.get("int8").encode(down)}


def test_without_a_fallback_the_merge_stops_half_way() -> None:
    weights, before = mixed_weights(), mixed_weights()
    with pytest.raises(RuntimeError, match="igemmlt not available"):
        merge_through(igemmlt_of("sm_70"), weights)
    assert not np.array_equal(weights["up"], before["up"])  # merged
    assert weights["down"].to_bytes() == before["down"].to_bytes()  # not merged: a model that nobody trained
    merge_through(igemmlt_of("sm_75"), weights)


def test_our_merge_needs_no_device_and_no_instruction(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("no device may be used for merging")

    for name in ("launch", "load", "allocate"):
        monkeypatch.setattr(SimBackend, name, refuse)
    weights, before = mixed_weights(), mixed_weights()
    tensors, config = adapter()
    merged, report = qc.merge_lora(weights, tensors, config=config)
    assert np.array_equal(weights["up"], before["up"]) and weights["down"].to_bytes() == before["down"].to_bytes()
    assert not np.array_equal(merged["up"], before["up"]) and merged["down"].to_bytes() != before["down"].to_bytes()
    assert [row.path for row in report.layers] == ["up", "down"]


# --- every architecture has a kernel, or says so before anything runs ------------------------------------------------


def rows_of_int8(x: torch.Tensor) -> torch.Tensor:
    """What int8 activations are worth: a scale per token."""
    scale = x.abs().amax(-1, keepdim=True) / 127
    return torch.round(x / torch.where(scale == 0, 1, scale)) * scale


def reference(model: nn.Module, weights: dict[str, Any], x: torch.Tensor) -> torch.Tensor:
    decoded = {name: torch.from_numpy(w.format.decode(w)) for name, w in weights.items()}
    with torch.no_grad():
        h = torch.relu(rows_of_int8(x) @ decoded["up"].T + model.up.bias)
        return rows_of_int8(h) @ decoded["down"].T + model.down.bias


def test_int8_runs_on_sm_70_and_goes_on_after_a_merge() -> None:
    model, program = compiled("sm_70")
    assert program.run.isa == "sm_70"
    weights = {
        name: formats.get("int8").encode(getattr(model, name).weight.detach().numpy()) for name in ("up", "down")
    }
    x = torch.randn(ROWS, WIDTH)
    before = program(x)
    assert (before - reference(model, weights, x)).norm() <= 5e-3 * before.norm()
    assert (before - program.oracle(x)).norm() <= 5e-3 * before.norm()
    tensors, config = adapter()
    merged, report = qc.merge_lora(program, tensors, config=config)
    packed, _ = qc.merge_lora(weights, tensors, config=config)
    after = merged(x)
    assert merged.isa == "sm_70" and len(report.layers) == 2
    assert (after - reference(model, packed, x)).norm() <= 5e-3 * after.norm()
    assert (after - before).norm() >= 0.1 * before.norm()
    assert torch.equal(program(x), before)  # what was merged is a program of its own
    graph = merged.capture(x)
    for seed in range(3):
        x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(graph.replay(x), merged(x))


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.float16])
def test_the_report_says_why_tensor_cores_were_passed_over(dtype: torch.dtype) -> None:
    linears = engines_of(without_values("sm_70", dtype), "sm_70")
    needs = "f16 mma: sm_75" if dtype == torch.float16 else "operands are f32"
    assert linears and all("CUDA cores" in what and needs in why for what, why in linears), linears
    if dtype == torch.float16:
        newer = engines_of(without_values("sm_80", dtype), "sm_80")
        assert newer and all("CUDA cores" not in what for what, _ in newer)  # where the instruction exists


def engines_of(program: qc.Program, arch: str) -> list[tuple[str, str]]:
    """(the engines of a linear on the architecture, why not the others) of each linear."""
    choices: Iterable[dict[str, str]] = program.report().as_dict()["choices"]
    return [(each["what"], each["why"]) for each in choices if f"engines on {arch}: " in each["what"]]


@cache
def without_values(target: str, dtype: torch.dtype) -> qc.Program:
    """Compiled to a plan and kernels' text, nothing else."""
    x = torch.randn(ROWS, WIDTH).to(dtype)
    return qc.qcompile(Model().to(dtype), (x,), quant="int8", device="sim:0", targets=[target], weights="none")


@pytest.mark.slow
@pytest.mark.parametrize("target", signature.ARCHS)
def test_int8_weights_and_activations_compile_for_every_architecture(target: str) -> None:
    """By NVRTC, where the one for the architecture is installed: CUDA 12's for sm_70, CUDA 13's for all others."""
    _, program = compiled(target)
    try:
        cubin = compile_cubin(emit.emit_module(program.plan.kernels, target), target)
    except MissingDependencyError as error:
        pytest.skip(str(error))
    assert cubin


def test_without_a_candidate_that_fits_nothing_is_compiled_and_nothing_has_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Selection with the one kernel of the story: the refusal names it, what it needs, and the place in the model."""

    def needs_sm_75(query: Any, isa: str) -> str | None:
        return None if signature.arch_number(isa) >= 75 else f"int8 tensor cores: sm_75, this is {isa}"

    only = (select.Candidate("linear.igemmlt", "large", (1, None), needs_sm_75),)
    monkeypatch.setitem(select.LINEAR, "cuda", only)
    with pytest.raises(
        KernelSelectionError, match=r"no linear kernel .*igemmlt: int8 tensor cores: sm_75, this is sm_70"
    ):
        without_values.__wrapped__("sm_70", torch.float32)
    assert without_values.__wrapped__("sm_80", torch.float32).plan.kernels
