"""Mixtures of experts through the compiler: formats, batches, lengths, caches, devices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from by_path import load

import qcompiler as qc
from qcompiler.plan.kinds.grouped_linear import GroupedLinearKernel

transformers = pytest.importorskip("transformers")

oracles = load("tests/models/oracles.py")
zoo = oracles.zoo

QUANTS = (None, "nf4", "int8", "q4_0", "q8_0")
"""The other formats of test_decoders.py are here as well: this is the list of those that experts are tested with."""


@pytest.mark.parametrize(("name", "quant"), [
    pytest.param(name, quant, id=f"{name}-{quant or 'float'}",
                 marks=pytest.mark.slow)
    for name in ("mixtral", "qwen3-moe") for quant in QUANTS
])  # fmt: skip
def test_experts_of_every_format_equal_the_eager_oracle(name: str, quant: str | None) -> None:
    """Batch and sequence from one token, where each expert has a row or none, to 8 x 24."""
    _, program = oracles.compiled(name, quant)
    oracles.assert_equals_the_oracle(program, [zoo.tokens(*size) for size in oracles.SIZES], least=1.0)
    rows = [row for row in program.ledger if "experts" in row.parameters[0]]
    assert len(rows) == 4 and all(row.counts and len(row.shape) == 3 for row in rows)
    wanted = "" if quant is None else quant
    assert all(row.format.partition(":")[0] == wanted for row in rows)
    kernels = [k for k in program.plan.kernels if isinstance(k.body, GroupedLinearKernel)]
    assert kernels and all((k.operands[1].format is None) == (quant is None) for k in kernels)
    assert not [k for k in program.plan.kernels if k.template in ("gather", "batch_matmul")], "no weight is gathered"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "quant"), [("mixtral", "q8_0"), ("qwen3-moe", "nf4")])
def test_on_the_simulated_gpu(name: str, quant: str) -> None:
    _, program = oracles.compiled(name, quant, device="sim:0")
    for size in ((2, 9), (1, 1)):
        inputs = zoo.tokens(*size)
        with torch.no_grad():
            (wanted,) = oracles.leaves(program.oracle(**inputs))
        (got,) = oracles.leaves(program(**inputs))
        assert np.linalg.norm(got - wanted) <= 1e-5 * np.linalg.norm(wanted)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe"])
def test_in_bf16_every_pass_keeps_its_promise(name: str) -> None:
    """A rounding that a pass deletes may send a token to another expert: what is compared then has no roundings."""
    model: Any = zoo.DECODERS[name].build()
    qc.qcompile(model.bfloat16(), kwargs=zoo.tokens(1, 31), verify_each="numerics")


LENGTH = 24


@pytest.mark.slow
def test_tokens_one_by_one_over_a_static_cache() -> None:
    """The entry point of one token runs the kernel of a known number of pairs; a prompt runs that of any."""
    from transformers.integrations.executorch import TorchExportableModuleWithStaticCache

    model: Any = zoo.DECODERS["qwen3-moe"].build()
    model.config.use_cache = model.generation_config.use_cache = True
    model.generation_config.cache_implementation = "static"
    step = TorchExportableModuleWithStaticCache(model, batch_size=1, max_cache_len=LENGTH)
    size = ("s", 1, 16)
    program = qc.qcompile(
        step,
        kwargs={"input_ids": torch.ones(1, 7, dtype=torch.int64), "cache_position": torch.arange(7)},
        dynamic_shapes={"input_ids": {1: size}, "cache_position": {0: size}},
        buckets=[("decode", {"s": (1, 1)}), ("prefill", {"s": (1, 16)})],
    )
    bodies = [k.body for k in program.plan.kernels if isinstance(k.body, GroupedLinearKernel)]
    assert {body.rows for body in bodies} >= {1, "s"}
    ids = zoo.tokens(1, LENGTH - 2)["input_ids"]
    found = [program(input_ids=ids[:, :9], cache_position=torch.arange(9))]
    found += [
        program(input_ids=ids[:, p : p + 1], cache_position=torch.arange(p, p + 1)) for p in range(9, ids.shape[1])
    ]
    with torch.no_grad():
        wanted = model(input_ids=ids, use_cache=False).logits
    got = torch.cat([each.reshape(1, -1, wanted.shape[-1]) for each in found], dim=1)
    assert (got - wanted).norm() <= 1e-5 * wanted.norm()
