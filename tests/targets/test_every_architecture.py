"""Every program has kernels on every CUDA architecture: a Llama block, a Llama, a Mixtral and a UNet with all of them
as targets.

The report says for each which engine serves each linear, mixture and attention, and why not the others; the kernels
that are emitted are those of the report.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest
import torch
from by_path import load

import qcompiler as qc
from qcompiler.kernels.cuda import attention, grouped_linear, linear
from qcompiler.kernels.cuda.emit import ENGINES, emit_kernel, emit_module
from qcompiler.kernels.cuda.signature import ARCHS
from qcompiler.runtime import nvrtc

DECISIONS: dict[str, Any] = {
    "linear": linear.decision_of, "grouped_linear": grouped_linear.decision_of, "attention": attention.decision_of
}  # fmt: skip


@cache
def compiled(name: str) -> qc.Program:
    """In bf16 and nf4 for every architecture; no GPU is there, and none is asked for."""
    options: dict[str, Any] = {"quant": "nf4", "device": "cuda:7", "targets": list(ARCHS)}
    if name == "block":
        x = torch.zeros(2, 7, 64, dtype=torch.bfloat16)
        dims = ({0: ("b", 1, 4), 1: ("s", 1, 96)},)
        return qc.qcompile(load("tests/models/blocks.py").LlamaBlock().bfloat16(), (x,), dynamic_shapes=dims, **options)
    if name == "unet":
        case = load("tests/models/test_vision.py").unet()
        x, t, states = case.example
        return qc.qcompile(
            case.model.bfloat16(), (x.bfloat16(), t, states.bfloat16()), dynamic_shapes=case.dynamic_shapes, **options
        )
    text = load("tests/models/oracles.py").zoo.TEXT[name].case(masked=False, positions=False, attention=None)
    return qc.qcompile(text.model.bfloat16(), kwargs=text.example, dynamic_shapes=text.dynamic_shapes, **options)


MODELS = ("block", *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "mixtral", "unet")))


@pytest.mark.parametrize("name", MODELS)
def test_the_report_names_an_engine_and_reasons_on_every_architecture_and_emission_follows(name: str) -> None:
    program = compiled(name)
    lines = [choice for choice in program.report().choices if choice.what.startswith("engines on ")]
    served = {ENGINES[kernel.template] for kernel in program.plan.kernels if len(ENGINES[kernel.template]) > 1}
    reported: dict[str, set[str]] = {arch: set() for arch in ARCHS}
    for choice in lines:
        matched = re.fullmatch(r"engines on (sm_\w+): (.*)", choice.what)
        assert matched is not None
        reported[matched[1]] |= {part.partition(": ")[2] for part in matched[2].split("; ")}
        assert choice.why
    for arch in ARCHS:
        emitted = {
            DECISIONS[spec.template](spec, arch).engine.name
            for spec in program.plan.kernels
            if spec.template in DECISIONS
        }
        assert reported[arch] == emitted
    assert len(served) >= 2
    text = " ".join(choice.why for choice in lines if " sm_75: " in choice.what)
    assert "tensor cores: bf16 mma: sm_80" in text
    assert "available" not in text


@pytest.mark.parametrize("name", MODELS)
def test_every_kernel_is_emitted_for_every_architecture(name: str) -> None:
    for spec in compiled(name).plan.kernels:
        for arch in ARCHS:
            kernel = emit_kernel(spec, arch)
            if spec.template in DECISIONS:
                uses = DECISIONS[spec.template](spec, arch).key.endswith("mma")
                assert kernel.engine == ("mma" if uses else "fma"), f"{spec.name} on {arch}"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["unet", "mixtral", "llama"])
def test_nvrtc_compiles_every_kernel_for_every_architecture(name: str) -> None:
    kernels = compiled(name).plan.kernels
    for arch in ARCHS:
        if arch == "sm_70" and not nvrtc.sm70_available():
            continue
        cubin = nvrtc.compile_cubin(emit_module(kernels, arch), arch, name=name)
        assert {f"qk_{spec.name}" for spec in kernels} <= set(cubin.resources)
        for symbol, taken in cubin.resources.items():
            hot = symbol.removeprefix("qk_").startswith(tuple(DECISIONS))
            spilled = (taken.spill_stores, taken.spill_loads)
            assert not hot or spilled == (0, 0), f"{symbol} spills on {arch}: {taken}"


def test_engines_of_every_template_end_with_one_that_requires_nothing() -> None:
    for listed in ENGINES.values():
        assert listed[-1].requires == ()
        assert all(engine.requires for engine in listed[:-1])
        assert all(engine.deterministic for engine in listed)
