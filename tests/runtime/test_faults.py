"""Disks that are full, fail or are read-only, and kill -9, at each call that writes in save and in the kernel cache."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faulty import start

from qcompiler.errors import ArgumentError, FileWriteError
from qcompiler.runtime import load, sanitize, save_image

pytestmark = pytest.mark.skipif(bool(sanitize.wanted()), reason="another library is preloaded then")

SAVE = """
import json, sys
from pathlib import Path
import numpy as np
from faulty import every_write
from qcompiler.runtime import files, load
folder, program, x, most = Path(sys.argv[1]), load(sys.argv[2], num_threads=1), np.load(sys.argv[3]), int(sys.argv[4])
target, old = folder / "model.qca", load(sys.argv[5], num_threads=1)
answers = [each(x)["y"].tobytes() for each in (old, program)]
assert answers[0] != answers[1]

def save():
    old.save(target) if not target.exists() else None
    program.save(target)

def check(how):
    found = load(target, num_threads=1, verify="full")(x)["y"].tobytes() if target.exists() else None
    assert found in (answers[1],) if how == "done" else found in (None, *answers), "half a file"
    left = [path.name for path in folder.iterdir() if path != target]
    assert how == "killed" or not left, left
    old.save(target)  # works, and sweeps what a killed process left
    assert load(target)(x)["y"].tobytes() == answers[0]
    assert [path.name for path in folder.iterdir()] == ["model.qca"], list(folder.iterdir())

old.save(target)
print(json.dumps(every_write(folder, save, check, most=most)))
"""

CACHE = """
import json, os, shutil, sys
from pathlib import Path
from faulty import every_write
from qcompiler.runtime import code, compiler, files, isa
cache, most = Path(os.environ["QC_CACHE_DIR"]), int(sys.argv[1])
plain = isa.supported_isas()[0]
compiler.find_compiler()

def compile_one():
    for answer in (41, 42):
        made = compiler.compile_code('extern "C" int answer() { return %d; }' % answer, plain)
        assert code.load(made).answer() == answer

def check(how):
    compile_one()
    made = compiler.compile_code("int other;", plain)
    assert made.path.is_relative_to(cache)
    assert not list((cache / "native").glob(".building.*")), "a killed compilation is swept by the next"
    for record in (cache / "native").glob("*.json"):
        assert code.read_code(record.with_suffix(".so"), code.read_record(record)["sha256"]) is not None
    shutil.rmtree(cache)

print(json.dumps(every_write(cache, compile_one, check, most=most, must_succeed=("ENOSPC", "EROFS"))))
"""


@pytest.fixture
def files(small: Any, tmp_path: Path) -> tuple[Path, Path, Path]:
    """Two programs of one plan, and an input."""
    from dataclasses import replace

    save_image(small.image, tmp_path / "new.qca")
    entry = next(entry for entry in small.image.plan.weights if entry.name == "bias")
    weights = small.image.weights.copy()
    weights[entry.offset : entry.offset + entry.nbytes] = np.full(entry.nbytes // 4, 3, np.float32).view(np.uint8)
    save_image(replace(small.image, weights=weights), tmp_path / "old.qca")
    np.save(tmp_path / "x.npy", small.x(3))
    return tmp_path / "new.qca", tmp_path / "old.qca", tmp_path / "x.npy"


@pytest.mark.parametrize("most", [2, pytest.param(10_000, marks=pytest.mark.slow)])
def test_save_leaves_the_old_file_or_the_new_one(files: tuple[Path, Path, Path], tmp_path: Path, most: int) -> None:
    (tmp_path / "folder").mkdir()
    new, old, x = files
    counts = start(SAVE, tmp_path, tmp_path / "folder", new, x, most, old)
    print(counts)
    assert counts["kill"]["killed"] >= min(5, most)
    for kind in ("EIO", "ENOSPC", "EROFS"):
        assert counts[kind]["refused"] >= min(5, most), counts


@pytest.mark.parametrize("most", [1, pytest.param(100, marks=pytest.mark.slow)])
def test_the_cache_works_or_is_done_without(tmp_path: Path, most: int) -> None:
    (tmp_path / "tmp").mkdir()
    environment = {"QC_CACHE_DIR": str(tmp_path / "cache"), "TMPDIR": str(tmp_path / "tmp"), "QC_QUIET": "1"}
    counts = start(CACHE, tmp_path, most, **environment)
    print(counts)
    assert counts["kill"]["killed"] >= min(10, most) // 2, counts
    for kind in ("ENOSPC", "EROFS"):
        assert counts[kind]["refused"] == 0 and counts[kind]["done"] >= min(10, most) // 2, counts


def test_a_limit_on_the_size_of_files_is_an_error_that_says_so(files: tuple[Path, Path, Path], tmp_path: Path) -> None:
    new, old, _ = files
    before = old.read_bytes()
    code = (
        "import resource, sys; from qcompiler.runtime import load\n"
        "run = load(sys.argv[1]); resource.setrlimit(resource.RLIMIT_FSIZE, (8192, resource.RLIM_INFINITY))\n"
        "run.save(sys.argv[2])"
    )
    command = [sys.executable, "-P", "-c", code, str(new), str(old)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 8192
    assert f"FileWriteError: cannot write {old}: File too large" in done.stderr
    assert "ulimit -f" in done.stderr
    assert old.read_bytes() == before
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("folder", ["missing", "file"])
def test_a_folder_that_is_none_is_named_before_anything_is_written(small: Any, tmp_path: Path, folder: str) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ArgumentError, match=rf"no folder '.*{folder}' to write p\.qca to: make it first"):
        save_image(small.image, tmp_path / folder / "p.qca")


def test_an_error_of_save_names_the_file_and_the_way_out(small: Any, tmp_path: Path) -> None:
    path = tmp_path / "p.qca"
    path.mkdir()  # a folder has the name
    with pytest.raises(FileWriteError, match=r"cannot write .*p\.qca: ") as info:
        save_image(small.image, path)
    assert info.value.errno == errno.EISDIR
    assert isinstance(info.value, OSError)


def test_a_name_of_any_length_can_be_saved(small: Any, tmp_path: Path) -> None:
    path = tmp_path / ("n" * 251 + ".qca")
    save_image(small.image, path)
    assert os.listdir(tmp_path) == [path.name]  # noqa: PTH208
    assert load(path)
