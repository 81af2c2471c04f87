"""qcompile, killed with SIGKILL while it packs weights, goes on: the file it saves is that of an undisturbed run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

SCRIPT = """
import os, signal, sys
import numpy as np, torch
from torch import nn
import qcompiler as qc
from qcompiler.formats.nf4 import NF4
from qcompiler.frontends.weights import workdir
from qcompiler.runtime import encoder, program_file

workdir.COMMIT_BYTES = 1
encoder.tile_encoder = lambda fmt, elements: None  # NumPy, whatever was compiled on this machine before
folder, die_in, source = sys.argv[1], sys.argv[2], sys.argv[3]
calls, encode, pieces = 0, NF4._encode_tile, program_file._pieces

def counted(self, job, start, tile):
    global calls
    calls += start == 0
    if die_in == str(calls):
        job.packed.data[: job.packed.data.size // 2] = 0xAB
        os.kill(os.getpid(), signal.SIGKILL)
    encode(self, job, start, tile)

def half_a_file(front, weights):
    yield front
    yield weights.data[: weights.nbytes // 2]
    if die_in == "save":
        os.kill(os.getpid(), signal.SIGKILL)
    yield weights.data[weights.nbytes // 2 :]

NF4._encode_tile, program_file._pieces = counted, half_a_file
torch.manual_seed(0)
build = lambda: nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))).eval()
model = build()
if source == "shards":
    with qc.empty_weights():
        model = build()
program = qc.qcompile(
    model, (torch.ones(3, 64),), quant="nf4", workdir=folder + "/work",
    weights=folder + "/m.safetensors" if source == "shards" else None,
)
program.save(folder + "/p.qca")
print(calls, program.oracle(torch.ones(3, 64)).sum().item(), program(torch.ones(3, 64)).sum().item())
"""


def compiled(folder: Path, die_in: object, source: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-P", "-c", SCRIPT, str(folder), str(die_in), source],
        capture_output=True, text=True, check=False, timeout=600, env={**os.environ, "QC_QUIET": "1"},
    )  # fmt: skip
    assert done.returncode in (0, -signal.SIGKILL), done.stderr[-3000:]
    return done.returncode, done.stdout


@pytest.mark.parametrize("source", [pytest.param("module", marks=pytest.mark.slow), "shards"])
@pytest.mark.slow
def test_a_killed_compile_ends_in_the_same_file(tmp_path: Path, source: str) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir()
    broken.mkdir()
    if source == "shards":
        torch.manual_seed(0)
        save_file(nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))).state_dict(), whole / "m.safetensors")
        (broken / "m.safetensors").hardlink_to(whole / "m.safetensors")
    _, expected = compiled(whole, "never", source)
    assert int(expected.split()[0]) == 6
    assert compiled(broken, 4, source)[0] == -signal.SIGKILL  # three are finished, one is half written
    assert compiled(broken, "save", source)[0] == -signal.SIGKILL  # encodes the rest, dies in the .qca
    assert not (broken / "p.qca").exists()
    code, found = compiled(broken, "never", source)
    assert code == 0
    assert found.split() == ["0", *expected.split()[1:]]  # nothing was left to encode
    assert (broken / "p.qca").read_bytes() == (whole / "p.qca").read_bytes()
