"""Weights that become zero with their block's fp16 scale are said; those that a format rounds to zero are not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import qcompiler as qc
from qcompiler.config import resolve_format
from qcompiler.frontends.quantise.lost_weights import TINY, lost_share

EVERY = ("nf4", "fp4", "int8", "int4", "int4:group=128,symmetric=False", "int3", "int2", "llm_int8", "fp8_e4m3",
         "mxfp4", "nvfp4", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_K", "q3_K", "q4_K", "q5_K", "q6_K", "iq4_nl",
         "iq4_xs", "iq3_xxs", "tq1_0", "tq2_0")  # fmt: skip


def weights(scale: float) -> np.ndarray:
    return (np.random.default_rng(0).standard_normal((64, 512)) * scale).astype(np.float32)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("scale", [1e-12, 1e-7, 1e-5, 0.02, 1.0])
def test_the_share_is_that_of_a_decoding_of_everything(name: str, scale: float) -> None:
    fmt, matrix = resolve_format(name), weights(scale)
    matrix[:, 256:] = 0.02 * np.sign(matrix[:, 256:])  # half of all blocks are ordinary
    matrix[3] = 0
    packed = fmt.encode(matrix)
    block = fmt.declare().block_size(matrix.shape[1])
    gone = (fmt.decode(packed) == 0) & (matrix != 0)
    parts = np.arange(0, matrix.size, block)
    small = np.repeat(np.maximum.reduceat(np.abs(matrix).reshape(-1), parts) < TINY, block)[: matrix.size]
    want = np.count_nonzero(gone.reshape(-1) & small) / np.count_nonzero(matrix)
    assert lost_share(fmt, matrix, packed) == want


@pytest.mark.parametrize("name", EVERY)
def test_blocks_above_the_bound_keep_their_scale(name: str) -> None:
    """So that it is enough to look at blocks below."""
    fmt = resolve_format(name)
    matrix = weights(1.0)
    matrix *= TINY / np.abs(matrix).max(axis=1, keepdims=True)
    for start in range(0, 512, 32):  # every block of every format has a value of the bound
        matrix[:, start] = TINY
    decoded = fmt.decode(fmt.encode(matrix))
    assert (decoded[:, ::32] != 0).all(), "the largest value of a block is not lost"


class Two(nn.Module):
    def __init__(self, tiny: float) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        with torch.no_grad():
            self.second.weight[:32] *= tiny

    def forward(self, x: torch.Tensor) -> Any:
        return self.second(self.first(x))


@pytest.mark.parametrize(
    ("recipe", "scale", "said"), [("int4", 1e-30, True), ("int4", 1.0, False), ("nf4", 1e-30, False)]
)
def test_the_ledger_and_a_warning_name_the_parameter(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, recipe: str, scale: float, said: bool
) -> None:
    monkeypatch.delenv("QC_QUIET", raising=False)
    program = qc.qcompile(Two(scale), (torch.randn(2, 64),), quant=recipe)
    text = "50.00% of its non-zero weights became zero: too small for the format's scales"
    lines = [line for line in str(program.ledger).splitlines() if text in line]
    assert [line.split()[0] for line in lines] == (["second.weight"] if said else [])
    assert (f"parameter 'second.weight': {text}" in capfd.readouterr().err) == said
