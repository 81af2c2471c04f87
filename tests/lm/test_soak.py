"""A program that serves for long: nothing grows over 10,000 short texts, whatever ends them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from by_path import ROOT, environment

import qcompiler as qc

MEASURE = ROOT / "tests" / "lm" / "measure_soak.py"


def soaked(folder: Path, generations: int) -> list[dict[str, int]]:
    """What is counted after each block of texts."""
    path = folder / "model.qca"
    model = ROOT / "examples" / "models" / "tiny_llama"
    qc.compile_causal_lm(model, "q4_0", max_seq_len=64, max_batch=2, chunk=16).save(path)
    done = subprocess.run(
        [sys.executable, "-P", MEASURE, path, str(generations)],
        capture_output=True,
        text=True,
        check=False,
        timeout=1200,
        env=environment(),
    )
    assert done.returncode == 0, done.stderr
    found: list[dict[str, int]] = json.loads(done.stdout)
    return found


@pytest.mark.slow
def test_nothing_grows_over_ten_thousand_texts(tmp_path: Path) -> None:
    """A leak of 200 bytes for each text, or of one object of Python for every tenth, is beyond these bounds."""
    found = soaked(tmp_path, 10_000)
    half = found[len(found) // 2 :]
    texts = 10_000 / len(found) * np.arange(len(half))
    slopes = {name: float(np.polyfit(texts, [each[name] for each in half], 1)[0]) for name in ("anonymous", "blocks")}
    print({**slopes, "first": found[0], "last": found[-1]})
    assert slopes["anonymous"] < 200 and slopes["blocks"] < 0.1, (slopes, half)
    for name in ("threads", "tasks", "descriptors", "sessions", "conversations"):
        assert len({each[name] for each in found}) == 1, (name, found)
    assert found[-1]["conversations"] == 1, "the one that is kept"
