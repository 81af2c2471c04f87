"""benchmarks/gpu_profile.py: its names, a launch on the simulated GPU, and what it says without a GPU."""

from __future__ import annotations

import pytest
from by_path import load

from qcompiler.runtime.backends import registry

profile = load("benchmarks/gpu_profile.py")
from gpubench import cells, profiled  # noqa: E402  # the folder is on the path now


def test_every_kernel_that_is_profiled_is_a_cell_that_is_timed(capsys: pytest.CaptureFixture[str]) -> None:
    assert profile.main(["--list"]) == 0
    names = capsys.readouterr().out.split()
    assert names == list(profiled.KERNELS) and len(names) == 11
    assert {cell.id for cell in profiled.KERNELS.values()} <= {cell.id for cell in cells.every()}


@pytest.mark.parametrize("name", ["rmsnorm", "grouped_linear"])
def test_it_says_what_it_launched(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert profile.main(["--kernel", name, "--device", "sim:0", "--launches", "2"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{name}: 2 launches of qk_") and profiled.KERNELS[name].id in said


@pytest.mark.slow
@pytest.mark.parametrize("name", profiled.KERNELS)
def test_every_kernel_is_launched(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert profile.main(["--kernel", name, "--device", "sim:0", "--launches", "1"]) == 0
    assert "qk_" in capsys.readouterr().out


def test_without_a_gpu_it_says_so_and_succeeds(capsys: pytest.CaptureFixture[str]) -> None:
    if registry.is_available("cuda:0"):
        pytest.skip("this machine has a GPU")
    assert profile.main(["--kernel", "nf4_m1"]) == 0
    assert capsys.readouterr().out.startswith("no GPU: ")


def test_nothing_to_do_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        profile.main([])
    assert "--kernel NAME, --list or --compile ARCH" in capsys.readouterr().err
