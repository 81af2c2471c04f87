"""The kernel cache: damage is mended, strangers' folders are not used, and a full or read-only one costs time only."""

from __future__ import annotations

import ctypes
import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qcompiler.runtime import LoadedProgram, cache, code, compiler, files, isa, progress, sanitize

PLAIN = isa.supported_isas()[0]
SOURCE = 'extern "C" int answer() { return 42; }'
RUN = """
import sys, numpy as np
from qcompiler.runtime import load
np.save(sys.argv[3], load(sys.argv[1], num_threads=1)(np.load(sys.argv[2]))["y"])
"""
DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "cut": lambda data: data[: len(data) // 2],
    "cut in the last page": lambda data: data[:-100],
    "flipped": lambda data: data[: len(data) // 3] + bytes([data[len(data) // 3] ^ 0x10]) + data[len(data) // 3 + 1 :],
    "zeros": lambda data: bytes(len(data)),
}


@pytest.fixture
def cache_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QC_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("QC_QUIET", raising=False)
    progress.note_once.cache_clear()
    monkeypatch.setattr(cache, "_private_of", {})
    return tmp_path / "cache"


def answer(made: code.Code) -> int:
    return int(code.load(made).answer())


def python(text: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-c", text, *map(str, arguments)]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)


# --- damage ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_library_is_compiled_again(cache_path: Path, damage: str) -> None:
    made = compiler.compile_code(SOURCE, PLAIN)
    made.path.write_bytes(DAMAGES[damage](made.data))
    again = compiler.compile_code(SOURCE, PLAIN)
    assert again.path == made.path
    assert again.path.read_bytes() == again.data
    assert answer(again) == 42


@pytest.mark.parametrize("text", [b"", b"[]", b'"text"', b"{}", b"7", b"null", b'{"sha256": []}', b"\xff", b"[" * 9999])
def test_a_record_that_is_no_record_is_written_anew(cache_path: Path, text: bytes) -> None:
    made = compiler.compile_code(SOURCE, PLAIN)
    record = made.path.with_suffix(".json")
    whole = record.read_bytes()
    record.write_bytes(text)
    assert compiler.compile_code(SOURCE, PLAIN).data == made.data
    assert record.read_bytes() == whole


@pytest.mark.parametrize(
    "text", [b"", b"[]", b'"text"', b"{}", b'{"library": 5}', b'{"library": "../../x.so"}', b"[" * 9999]
)
def test_a_damaged_record_of_a_plan_costs_a_look_only(
    small: Any, loaded: Any, own_cache: Path, monkeypatch: pytest.MonkeyPatch, text: bytes
) -> None:
    from qcompiler.runtime.native import build_native, plan_key

    first = build_native(small.image.plan, isa.host_isa())
    record = own_cache / "plans" / f"{plan_key(small.image.plan, isa.host_isa())}.json"
    whole = record.read_bytes()
    record.write_bytes(text)
    monkeypatch.setattr(compiler._Job, "run", lambda *_: pytest.fail("compiled again"))
    assert build_native(small.image.plan, isa.host_isa()).path == first.path
    assert record.read_bytes() == whole


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_process_that_meets_a_damaged_library_gives_the_same_answer(
    small: Any, tmp_path: Path, cache_path: Path, damage: str
) -> None:
    """The pool's library and the program's; each ended the process at every start (SIGBUS, SIGILL)."""
    x = small.x(3)
    np.save(tmp_path / "x.npy", x)
    LoadedProgram.from_image(small.image).save(tmp_path / "p.qca")
    arguments = (tmp_path / "p.qca", tmp_path / "x.npy", tmp_path / "y.npy")
    libraries = list((cache_path / "native").glob("*.so"))
    assert {each.name.split("-")[0] for each in libraries} >= {"program"}
    for library in libraries:
        library.write_bytes(DAMAGES[damage](library.read_bytes()))
    done = python(RUN, *arguments)
    assert done.returncode == 0, done.stderr
    assert np.load(tmp_path / "y.npy").tobytes() == LoadedProgram.from_image(small.image)(x)["y"].tobytes()


@pytest.mark.skipif(bool(sanitize.wanted()), reason="sanitised code is loaded from its file")
def test_what_was_verified_is_what_is_loaded(cache_path: Path) -> None:
    made = compiler.compile_code(SOURCE.replace("42", "43"), PLAIN)
    made.path.write_bytes(b"not the code that was verified")
    assert code.load(made).answer() == 43


@pytest.mark.skipif(bool(sanitize.wanted()), reason="sanitised code is loaded from its file")
def test_a_library_that_is_cut_while_it_is_loaded_goes_on(cache_path: Path) -> None:
    """In place, as a full disk or a copying tool does it; a mapping of the file would be SIGBUS."""
    made = compiler.compile_code(SOURCE.replace("42", "44"), PLAIN)
    library = code.load(made)
    os.truncate(made.path, 0)
    assert library.answer() == 44


def test_libraries_of_closed_descriptors_are_not_confused(cache_path: Path) -> None:
    """The loader knows a library by its name, which holds the number of a descriptor."""
    answers = [code.load(compiler.compile_code(SOURCE.replace("42", str(n)), PLAIN)).answer() for n in (71, 72, 73)]
    assert answers == [71, 72, 73]


# --- whose it is -----------------------------------------------------------------------------------------------------


def test_the_cache_is_private(cache_path: Path) -> None:
    cache_path.mkdir(mode=0o755)
    for path in (cache.cache_dir(), cache.cache_dir("native")):
        assert path.is_relative_to(cache_path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o720, 0o702])
def test_a_folder_that_others_may_write_to_is_not_used(
    cache_path: Path, mode: int, capfd: pytest.CaptureFixture[str]
) -> None:
    cache_path.mkdir()
    cache_path.chmod(mode)
    assert answer(compiler.compile_code(SOURCE, PLAIN)) == 42
    compiler.compile_code(SOURCE + " ", PLAIN)
    assert not list(cache_path.iterdir())
    said = capfd.readouterr().err
    assert said.count("is not used") == 1, "said once"
    assert f"mode {mode:o}" in said
    assert "QC_CACHE_DIR" in said


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
@pytest.mark.parametrize("which", ["folder", "inner folder"])
def test_a_folder_of_another_user_is_not_used(cache_path: Path, which: str, capfd: pytest.CaptureFixture[str]) -> None:
    given = cache_path if which == "folder" else cache_path / "native"
    given.mkdir(parents=True)
    os.chown(given, 12345, 12345)
    assert answer(compiler.compile_code(SOURCE, PLAIN)) == 42
    assert not list(given.iterdir())
    assert "belongs to another user (uid 12345)" in capfd.readouterr().err


@pytest.mark.parametrize("how", ["another user's", "writable by others", "a link", "a fifo", "a folder"])
def test_a_library_that_others_could_have_written_is_not_used(cache_path: Path, how: str, tmp_path: Path) -> None:
    """It has the right name and a record with its digest."""
    good = compiler.compile_code(SOURCE, PLAIN)
    evil = compiler.compile_code(SOURCE.replace("42", "666"), PLAIN)
    good.path.with_suffix(".json").write_bytes(evil.path.with_suffix(".json").read_bytes())
    good.path.write_bytes(evil.data)
    assert answer(compiler.compile_code(SOURCE, PLAIN)) == 666, "who may write to the cache is trusted"
    if how == "another user's":
        if os.geteuid():
            pytest.skip("only root can give a file to another user")
        os.chown(good.path, 12345, 12345)
    elif how == "writable by others":
        good.path.chmod(0o666)
    else:
        good.path.rename(tmp_path / "elsewhere.so")
        if how == "a link":
            good.path.symlink_to(tmp_path / "elsewhere.so")
        elif how == "a fifo":
            os.mkfifo(good.path)
        else:
            good.path.mkdir()
    assert answer(compiler.compile_code(SOURCE, PLAIN)) == 42


# --- full, read-only -------------------------------------------------------------------------------------------------


class Refusing:
    """Makes every write below a folder fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, error: int) -> None:
        true_open = os.open

        def refuse(path: Any, flags: int, *rest: Any, **named: Any) -> int:
            if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) and str(path).startswith(str(folder)):
                raise OSError(error, os.strerror(error), str(path))
            return true_open(path, flags, *rest, **named)

        monkeypatch.setattr(os, "open", refuse)


@pytest.mark.parametrize("error", ["ENOSPC", "EROFS", "EIO", "EACCES", "EDQUOT"])
def test_a_cache_that_takes_no_files_is_read_and_else_done_without(
    cache_path: Path, monkeypatch: pytest.MonkeyPatch, error: str, capfd: pytest.CaptureFixture[str]
) -> None:
    import errno

    known = compiler.compile_code(SOURCE, PLAIN)
    before = sorted(cache_path.rglob("*"))
    Refusing(monkeypatch, cache_path, getattr(errno, error))
    assert compiler.compile_code(SOURCE, PLAIN).path == known.path, "what is there serves"
    made = compiler.compile_code(SOURCE.replace("42", "45"), PLAIN)
    assert answer(made) == 45
    assert not made.path.is_relative_to(cache_path)
    assert stat.S_IMODE(made.path.parent.stat().st_mode) == 0o700
    assert compiler.compile_code(SOURCE.replace("42", "45"), PLAIN).path == made.path, "once in a process"
    assert sorted(cache_path.rglob("*")) == before
    assert capfd.readouterr().err.count("the cache takes no files") == 1


def test_a_home_that_does_not_exist_and_cannot_be_made_is_no_error(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("QC_CACHE_DIR", "/proc/nothing/can/be/made/here")
    progress.note_once.cache_clear()
    assert answer(compiler.compile_code(SOURCE, PLAIN)) == 42
    assert "/proc/nothing" in capfd.readouterr().err


def test_the_folder_of_a_process_goes_with_it(tmp_path: Path) -> None:
    text = (
        "import os; from qcompiler.runtime import cache\n"
        "print(cache.private_dir('native'), flush=True)\n"
        "if os.fork() == 0: raise SystemExit\n"  # a child's end takes nothing away
        "os.wait(); assert cache.private_dir('native').is_dir()"
    )
    done = python(text, TMPDIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(tmp_path))
    assert not list(tmp_path.iterdir())


# --- what killed processes leave -------------------------------------------------------------------------------------

KILLED = """
import os, sys, signal
from pathlib import Path
from qcompiler.runtime import cache, files
with files.replacing(Path(sys.argv[1])) as file:
    file.write(b"half")
    file.flush()
    cache.private_dir("native")
    print("ready", flush=True)
    sys.stdin.read(1)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_temporaries_of_killed_processes_are_removed_and_those_of_living_ones_stay(tmp_path: Path) -> None:
    target = tmp_path / "model.qca"
    holder = subprocess.Popen(
        [sys.executable, "-P", "-c", KILLED, str(target)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env=os.environ | {"TMPDIR": str(tmp_path / "tmp")},
    )  # fmt: skip
    (tmp_path / "tmp").mkdir()
    assert holder.stdin and holder.stdout
    assert holder.stdout.readline() == b"ready\n"
    left = [path for path in tmp_path.iterdir() if path.name.endswith(files.SUFFIX)]
    assert len(left) == 1
    with files.replacing(target) as file:
        file.write(b"new")
    assert left[0].exists(), "its maker lives"
    holder.stdin.close()
    holder.wait(timeout=60)
    assert left[0].exists()
    with files.replacing(target) as file:
        file.write(b"newer")
    assert not left[0].exists()
    assert target.read_bytes() == b"newer"
    assert len(list((tmp_path / "tmp").iterdir())) == 1
    done = python("from qcompiler.runtime import cache; cache.private_dir()", TMPDIR=str(tmp_path / "tmp"))
    assert done.returncode == 0, done.stderr
    assert not list((tmp_path / "tmp").iterdir())


def test_a_killed_compilation_leaves_nothing_for_long(cache_path: Path, tmp_path: Path) -> None:
    slow = tmp_path / "slow-g++"
    slow.write_text(
        f'#!/bin/sh\ncase "$*" in *--version*) echo slow;; *) touch {tmp_path}/began; exec sleep 60;; esac\n'
    )
    slow.chmod(0o755)
    text = f"from qcompiler.runtime import compiler; compiler.compile_code('int f;', {PLAIN!r})"
    process = subprocess.Popen([sys.executable, "-P", "-c", text], env=os.environ | {"QC_CXX": str(slow)})
    while not (tmp_path / "began").exists() and process.poll() is None:
        time.sleep(0.01)
    process.kill()
    process.wait(timeout=60)
    assert list(cache_path.rglob(f".building.*{files.SUFFIX}"))
    compiler.compile_code("int g;", PLAIN)
    assert not list(cache_path.rglob(f"*{files.SUFFIX}"))


# --- between processes -----------------------------------------------------------------------------------------------


def test_the_lock_of_a_library_is_free_after_an_error(cache_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> bytes:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(compiler._Job, "_compile", interrupted)
        with pytest.raises(KeyboardInterrupt):
            compiler.compile_code(SOURCE, PLAIN)
    assert ctypes.CDLL(str(compiler.compile_library(SOURCE, PLAIN))).answer() == 42
