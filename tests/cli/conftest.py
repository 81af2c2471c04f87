"""A model that `qc compile` can find, and its compiled file."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from qcompiler.cli import main

MODEL = """
import torch
from torch import nn


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(64, 32), nn.Linear(32, 8)

    def forward(self, x):
        return {"y": self.down(nn.functional.gelu(self.up(x)))}


def model():
    return Small().eval(), (), {"x": torch.randn(5, 64)}, {"x": {0: ("b", 1, 16)}}


def other():
    small, *rest = model()
    small.up.weight.data *= 2
    return small, *rest


def unsupported():
    return Strange().eval(), (torch.randn(5, 5),)


class Strange(nn.Module):
    def forward(self, x):
        return torch.special.bessel_j0(x)
"""


@pytest.fixture(scope="session", autouse=True)
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The current folder of all these tests, with the model in it and a cache of its own."""
    folder, path, cwd = tmp_path_factory.mktemp("cli"), list(sys.path), Path.cwd()
    (folder / "small_model.py").write_text(MODEL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QC_CACHE_DIR", str(folder / "cache"))
        patch.delenv("QC_DUMP_IR", raising=False)
        os.chdir(folder)
        yield folder
    os.chdir(cwd)
    sys.path[:] = path
    sys.modules.pop("small_model", None)


@pytest.fixture(scope="session")
def program(workspace: Path) -> Path:
    path = workspace / "small.qca"
    assert main(["compile", "small_model:model", "-o", str(path), "--quant", "nf4"]) == 0
    return path
