"""A compiler that nobody here wrote takes what `to_mlir` writes: IREE runs it to the same numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import upstream_cases
from by_path import load

beside = load("benchmarks/iree_cpu.py")
recurrent, static_cache = load("tests/models/test_recurrent.py"), load("tests/models/test_static_cache.py")


@pytest.mark.parametrize("where", ["resources", "arguments"])
@pytest.mark.parametrize("shape", [(1, 32), (3, 21)], ids=["1 x 32", "3 x 21"])
def test_minilm_in_int8(shape: tuple[int, int], where: Any) -> None:
    agree(beside.minilm(shape=shape), where, 2e-6)


@pytest.mark.parametrize("quant", ["int8", "int4", "q4_K", "nf4:double_quant", "q6_K", "mxfp4", "fp8_e4m3", "tq1_0"])
def test_the_block_of_the_tiny_llama(quant: str) -> None:
    agree(beside.block(quant), "resources", 2e-6)


@pytest.mark.parametrize("quant", ["int4", "q4_K"])
def test_the_whole_tiny_llama(quant: str) -> None:
    agree(beside.whole(quant), "arguments", 1e-5)


def agree(job: Any, where: Any, tolerance: float) -> None:
    """Within a tolerance of the largest result, against the decoded weights in eager torch."""
    imported, module = upstream_cases.lowered(job.model, (), job.inputs, quant=job.quant, weights=where)
    with torch.no_grad():
        (wanted,) = upstream_cases.leaves(imported.quantized.module(**job.inputs))
    (got,) = beside.run_with_iree(module.text)(*module.arguments(*(x.numpy() for x in job.inputs.values())))
    assert got.shape == wanted.shape
    assert np.abs(got - wanted).max() <= tolerance * np.abs(wanted).max()


def test_a_cache_and_sizes_that_are_not_known() -> None:
    """A prompt and single tokens by one module of IREE's; states are arguments and results."""
    from transformers.integrations.executorch import TorchExportableModuleWithStaticCache

    step = TorchExportableModuleWithStaticCache(static_cache.llama(), batch_size=1, max_cache_len=static_cache.LENGTH)
    size = ("s", 1, 24)
    example = {"input_ids": torch.ones(1, 7, dtype=torch.int64), "cache_position": torch.arange(7)}
    dims = {"input_ids": {1: size}, "cache_position": {0: size}}
    _, module = upstream_cases.lowered(step, (), example, dynamic_shapes=dims, quant="int4", weights="resources")
    run = beside.run_with_iree(module.text)
    tokens = torch.randint(0, 97, (1, 9)).numpy()

    def call(first: int, last: int, held: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        got = run(*module.arguments(tokens[:, first:last], np.arange(first, last), states=held))
        return got[0], dict(zip(module.updates, got[module.outputs :], strict=True))

    whole, _ = call(0, 9, {})
    prompt, held = call(0, 7, {})
    np.testing.assert_allclose(prompt[:, -1], whole[:, 6], atol=1e-4)
    for place in (7, 8):
        logits, held = call(place, place + 1, held)
        np.testing.assert_allclose(logits[:, -1], whole[:, place], atol=1e-4)
