"""How much anonymous memory a compile of stored codes takes: the largest tensor, never the model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from by_path import environment, load
from gguf import GGMLQuantizationType as Type

import qcompiler as qc

writing = load("tests/files/writing.py")

SLACK = 10 << 20
"""Bytes for the trace, the IR and tiles, whatever the weights."""

LARGE: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 4, "head_dim": 128}


def measured(small: Path, large: Path) -> dict[str, Any]:
    script = Path(__file__).with_name("measure.py")
    done = subprocess.run(
        [sys.executable, "-P", str(script), str(small), str(large)],
        capture_output=True, text=True, check=False, timeout=1200, env=environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return facts


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gguf", "gptq"])
def test_stored_codes_are_neither_inflated_nor_copied_as_a_whole(kind: str, tmp_path: Path) -> None:
    """200 MB of fp32 as 28 MB of codes: one inflated model, or two copies of its codes, break the bound."""
    paths = {}
    for name, sizes in (("small", {"num_hidden_layers": 1}), ("large", LARGE)):
        (tmp_path / name).mkdir()
        path = tmp_path / name / "model.gguf"
        writing.write(path, writing.build("Llama", **sizes), "llama", lambda name: Type.Q4_0)
        if kind == "gptq":
            folder = tmp_path / name / "folder"
            qc.convert(path, folder, layout="gptq")
            path = folder
        paths[name] = path
    facts = measured(paths["small"], paths["large"])
    bound = facts["largest"] + SLACK
    assert bound < facts["packed"] < facts["float"] / 6, facts
    assert facts["growth"] <= bound, facts
