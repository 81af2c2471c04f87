"""A program file in use: what a new file under its name, overwriting and cutting do to programs that have it mapped."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qcompiler.errors import ChangedFileError, CorruptFileError, ProgramFileError, TruncatedFileError
from qcompiler.runtime import LoadedProgram, ProgramImage, image, load, program_file, save_image

CHANGES: dict[str, Callable[[Path], object]] = {
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "emptied": lambda path: os.truncate(path, 0),
    "longer": lambda path: os.truncate(path, path.stat().st_size + 4096),
    "overwritten": lambda path: overwrite(path, b"\xff" * 256),
}


def overwrite(path: Path, data: bytes) -> None:
    """In place, in the weights; the clock has moved on since the file was written."""
    later = path.stat().st_mtime_ns + 10_000_000
    with path.open("r+b") as file:
        file.seek(program_file.read_members(image.MappedFile(path).data)["weights.safetensors"].offset + 4096)
        file.write(data)
    os.utime(path, ns=(later, later))


@pytest.fixture
def file(small: Any, tmp_path: Path) -> Path:
    save_image(small.image, tmp_path / "small.qca")
    return tmp_path / "small.qca"


def other_weights(small: Any) -> ProgramImage:
    """The same plan with all bytes of the bias changed."""
    from dataclasses import replace

    entry = next(entry for entry in small.image.plan.weights if entry.name == "bias")
    weights = small.image.weights.copy()
    weights[entry.offset : entry.offset + entry.nbytes] = np.full(entry.nbytes // 4, 3, np.float32).view(np.uint8)
    return replace(small.image, weights=weights)


@pytest.mark.parametrize("copied", [False, True])
def test_a_new_file_under_the_name_leaves_loaded_programs_as_they_are(small: Any, file: Path, copied: bool) -> None:
    x = small.x(3)
    old = load(file, copy=copied)
    before = old(x)["y"].tobytes()
    inode = file.stat().st_ino
    save_image(other_weights(small), file)
    assert file.stat().st_ino != inode, "written in place"
    new = load(file)
    after = new(x)["y"].tobytes()
    assert after != before
    assert old(x)["y"].tobytes() == before
    assert old.session()(x)["y"].tobytes() == before
    old.save(file)
    assert load(file)(x)["y"].tobytes() == before
    assert new.session()(x)["y"].tobytes() == after
    file.unlink()
    assert old.session()(x)["y"].tobytes() == before


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_was_written_to_in_place_is_refused_by_new_sessions_and_by_save(
    file: Path, tmp_path: Path, change: str
) -> None:
    program = load(file)
    CHANGES[change](file)
    for use in (
        program.session,
        lambda: program.save(tmp_path / "other.qca"),
        lambda: LoadedProgram.from_image(program.image),
    ):
        with pytest.raises(ChangedFileError, match=r"small\.qca was written to .*copy=True"):
            use()
    assert not (tmp_path / "other.qca").exists()


@pytest.mark.parametrize("change", CHANGES)
def test_a_copied_program_needs_its_file_no_more(small: Any, file: Path, tmp_path: Path, change: str) -> None:
    x = small.x(3)
    want = load(file)(x)["y"].tobytes()
    program = load(file, copy=True)
    CHANGES[change](file)
    assert program(x)["y"].tobytes() == want
    assert program.session()(x)["y"].tobytes() == want
    program.save(tmp_path / "other.qca")
    assert load(tmp_path / "other.qca")(x)["y"].tobytes() == want


def test_a_copy_is_checked_in_full_though_the_file_is_remembered(file: Path) -> None:
    load(file)
    status = file.stat()
    overwrite(file, b"\xff" * 64)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))  # as an edit within one tick of the clock leaves it
    load(file)  # known and unchanged, as far as the system tells
    with pytest.raises(CorruptFileError, match="damaged"):
        load(file, copy=True)
    with pytest.raises(CorruptFileError, match="damaged"):
        load(file, verify="full")


def test_a_file_that_shrinks_while_it_is_read_is_a_cut_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    true_block = program_file.Block

    def cut_meanwhile(nbytes: int) -> Any:
        os.truncate(file, nbytes // 2)
        return true_block(nbytes)

    monkeypatch.setattr(program_file, "Block", cut_meanwhile)
    with pytest.raises(TruncatedFileError):
        load(file, copy=True)


@pytest.mark.parametrize("copied", [False, True])
def test_empty_and_foreign_files_are_refused(tmp_path: Path, copied: bool) -> None:
    for data in (b"", b"PK", b"x" * 10_000):
        (tmp_path / "p.qca").write_bytes(data)
        with pytest.raises(ProgramFileError):
            load(tmp_path / "p.qca", copy=copied)


def test_what_the_page_on_security_says_of_a_cut_file_is_so(small: Any, file: Path, tmp_path: Path) -> None:
    """A mapped program whose file was cut dies of SIGBUS when it reads what is gone: copy=True is the way out."""
    np.save(tmp_path / "x.npy", small.x(3))
    code = (
        "import os, sys, numpy as np; from qcompiler.runtime import load\n"
        "run = load(sys.argv[1], copy=sys.argv[3] == 'copy'); x = np.load(sys.argv[2])\n"
        "os.truncate(sys.argv[1], 0); run(x); print('went well')"
    )
    for how, status in (("copy", 0), ("map", -signal.SIGBUS)):
        shutil.copy(file, tmp_path / "cut.qca")
        command = [sys.executable, "-P", "-c", code, str(tmp_path / "cut.qca"), str(tmp_path / "x.npy"), how]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == status, done.stderr


def test_weights_are_mapped_and_not_read_unless_asked(file: Path) -> None:
    assert load(file).image.source is not None
    assert load(file, copy=True).image.source is None
