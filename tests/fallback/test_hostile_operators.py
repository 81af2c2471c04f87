"""Operators of torch with the arguments that a stranger chooses: none reads or writes memory that is not its own.

The calls run in processes of their own, in guarded memory (operatorfuzz/). What was found is refused by a condition in
`torch_guards.py`, or is not on the list any more.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from qcompiler.errors import RuntimeFailure
from qcompiler.frontends.torch.capture.torch_guards import CONDITIONS
from qcompiler.plan.torch_operators import SAFE_OPERATORS
from qcompiler.plan.torch_regions import TorchOp, TorchRegion, runner

sys.path.insert(0, str(Path(__file__).parent / "operatorfuzz"))

from sweep import sweep

MATRIX, WAVES, IMAGE, GRID, PAIR = ({"v": number} for number in range(5))
HOSTILE = {
    "a dim that is none": ("_fft_c2c", WAVES, (1 << 16,), 0, True),
    "a dim twice": ("_fft_r2c", MATRIX, (1, 1), 0, True),
    "a normalisation that is none": ("_fft_c2c", WAVES, (0,), 9, True),
    "more samples than frequencies": ("_fft_c2r", WAVES, (1,), 0, 600),
    "an interpolation that is none": ("grid_sampler_2d", IMAGE, GRID, 3, 0, True),
    "a padding that is none": ("grid_sampler_2d", IMAGE, GRID, 0, -1, True),
    "sizes of another input": ("native_group_norm", IMAGE, None, None, 2, 3, 4096, 1, 0.1),
    "short statistics": ("_native_batch_norm_legit_no_training", IMAGE, None, None, PAIR, PAIR, 0.1, 0.1),
    "more outputs than the factors make": ("_upsample_bilinear2d_aa", IMAGE, (4096, 4), False, 1.5, 1.5),
}


def values() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.rand(4, 6), torch.rand(4, 6).to(torch.complex64), torch.rand(2, 3, 4, 4), torch.rand(2, 4, 4, 2),
            torch.rand(2)]  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_what_torch_does_not_check_is_refused(name: str) -> None:
    target, *args = HOSTILE[name]
    op = TorchOp(target=f"aten.{target}.default", args=tuple(args))
    region = TorchRegion(inputs=5, ops=(op,), outputs=(5,))
    with pytest.raises(RuntimeFailure, match="torch does not check these arguments"):
        runner().prepare(region).evaluate(values(), (), torch.device("cpu"))


def test_each_condition_is_of_a_listed_operator() -> None:
    assert {name.split(".")[1] for name in CONDITIONS} <= SAFE_OPERATORS


def test_the_sweep_finds_what_leaves_its_memory(tmp_path: Path) -> None:
    """These are not on the list."""
    trusting = {"unfold_backward", "lu_unpack", "linalg_ldl_solve"}
    done = sweep(tmp_path, "--written", "--ops", *trusting, "--calls", "500")
    assert done.returncode == 1 and done.stdout.rstrip().endswith("found in 3"), done.stdout + done.stderr[-2000:]
    assert not trusting & SAFE_OPERATORS


def test_hostile_calls_of_operators_that_were_found(tmp_path: Path) -> None:
    done = sweep(tmp_path, "--written", "--calls", "30")
    assert done.returncode == 0 and "overloads" in done.stdout, done.stdout + done.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 10_000])
def test_hostile_calls_of_all_operators(tmp_path: Path, seed: int) -> None:
    done = sweep(tmp_path, "--seed", str(seed), "--calls", "300")
    assert done.returncode == 0 and "overloads" in done.stdout, done.stdout + done.stderr[-2000:]
