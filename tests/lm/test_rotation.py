"""The rotation of keys in 4 bits: exact in every type, and what it saves."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from qcompiler.formats import cache_rows
from qcompiler.lm import rotation
from qcompiler.lm.probe import LayerShape, Probe


@pytest.mark.parametrize(
    ("dim", "block"), [(8, 8), (16, 16), (32, 32), (64, 64), (80, 16), (96, 32), (128, 128), (256, 256)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_it_is_its_own_inverse_and_has_powers_of_two_alone(dim: int, block: int, dtype: torch.dtype) -> None:
    turn = rotation.hadamard(dim, dtype).float()
    assert rotation.block_of(dim) == block
    assert torch.equal(turn @ turn, rotation.squared(dim) * torch.eye(dim)) and torch.equal(turn, turn.T)
    sizes = turn[turn != 0].abs().unique()
    assert len(sizes) == 1 and np.frexp(float(sizes[0]))[0] == 0.5


@pytest.mark.parametrize("dim", [1, 3, 20, 36, 100])
def test_a_size_with_no_power_of_two_is_left_alone(dim: int) -> None:
    assert rotation.block_of(dim) == 1


def test_large_columns_cost_the_others_less() -> None:
    draw = np.random.default_rng(0)
    keys, queries = draw.normal(size=(2, 256, 64)).astype(np.float32)
    keys[:, 5] *= 30
    queries[:, 5] /= 30
    turn = rotation.hadamard(64, torch.float32).numpy()
    errors = []
    for k, q in ((keys, queries), (keys @ turn, queries @ turn)):
        rounded = cache_rows.dequantise(cache_rows.quantise(k, "int4"), 64, "int4")
        errors.append(float(np.linalg.norm(q @ rounded.T - queries @ keys.T)))
    assert errors[1] < 0.6 * errors[0]


def test_keys_that_others_read_are_left_alone() -> None:
    """Layer 0 is read by attention, layer 1 by what no one saw, and layer 2 has a head of 20 columns."""
    seen = Probe({n: LayerShape(2, dim, dim, torch.float32) for n, dim in enumerate((64, 64, 20))})
    seen.uses = {0: [(None, None)], 2: [(None, None)]}
    assert seen.rotated() == {0}
