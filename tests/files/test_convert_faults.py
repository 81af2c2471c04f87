"""Disks that are full, fail or are read-only, and kill -9, at each call that writes in a conversion."""

from __future__ import annotations

from pathlib import Path

import pytest
from by_path import load
from faulty import start
from gguf import GGMLQuantizationType as Type

from qcompiler.runtime import sanitize

writing = load("tests/files/writing.py")
pytestmark = pytest.mark.skipif(bool(sanitize.wanted()), reason="another library is preloaded then")

CONVERT = """
import hashlib, json, shutil, sys
from pathlib import Path
import qcompiler as qc
from faulty import every_write
folder, source, most, layout = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
target = folder / ("out.gguf" if layout == "gguf" else "out")
options = {"to": "q8_0", "lossy": True} if layout == "gguf" else {"layout": layout}

def convert():
    qc.convert(source, target, **options)

def contents():
    paths = sorted(path for path in target.rglob("*") if path.is_file()) if target.is_dir() else [target]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}

def remove():
    shutil.rmtree(target) if target.is_dir() else target.unlink(missing_ok=True)

def check(how):
    assert contents() == whole if target.exists() else how != "done", "half of a conversion"
    left = [path.name for path in folder.iterdir() if path != target]
    assert how == "killed" or not left, left
    remove()
    convert()  # works, and sweeps what a killed process left
    assert contents() == whole
    assert [path.name for path in folder.iterdir()] == [target.name], list(folder.iterdir())
    remove()

convert()
whole = contents()
remove()
print(json.dumps(every_write(folder, convert, check, most=most)))
"""


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["gguf", "gptq"])
def test_a_conversion_is_whole_or_not_there(tmp_path: Path, layout: str) -> None:
    writing.write(tmp_path / "llama.gguf", writing.build("Llama", num_hidden_layers=1), "llama", lambda name: Type.Q4_0)
    (tmp_path / "folder").mkdir()
    counts = start(CONVERT, tmp_path, tmp_path / "folder", tmp_path / "llama.gguf", 10_000, layout, QC_QUIET="1")
    print(counts)
    for kind, most in (("kill", "killed"), ("EIO", "refused"), ("ENOSPC", "refused"), ("EROFS", "refused")):
        assert counts[kind][most] >= 5, counts
