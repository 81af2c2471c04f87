"""Whole models on the simulated GPU (and on cuda:0 where there is one): the same plan and kernels as on hardware."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from by_path import load

import qcompiler as qc
from qcompiler.runtime.backends import registry

zoo = load("tests/models/zoo.py")

DEVICES = ["sim:0", *(["cuda:0"] if registry.is_available("cuda:0") else [])]
pytestmark = pytest.mark.slow


def leaves(result: Any) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result.double()]
    values = result.values() if isinstance(result, dict) else result
    return [leaf for value in values if value is not None for leaf in leaves(value)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "quant"), [("bert", "nf4"), ("bert", "int8"), ("gpt2", "int4"), ("minilm", "nf4")])
def test_a_model_on_a_gpu_equals_the_eager_oracle_and_its_own_replay(name, quant, device):
    case = zoo.ZOO[name]()
    program = qc.qcompile(
        case.model, kwargs=case.example, quant=quant, dynamic_shapes=case.dynamic_shapes, device=device
    )
    with torch.no_grad():
        expected = leaves(program.oracle(**case.inputs))
    results = leaves(program(**case.inputs))
    for ours, theirs in zip(results, expected, strict=True):
        assert (ours - theirs).norm() <= 1e-5 * theirs.norm()
    graph = program.capture(**case.inputs)
    for ours, replayed in zip(results, leaves(graph.replay(**case.inputs)), strict=True):
        assert torch.equal(ours, replayed)
