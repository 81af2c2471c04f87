"""A working folder: whatever a kill leaves, what is used again is whole, and what is not is made again."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qcompiler.errors import WorkdirError
from qcompiler.frontends.weights import workdir
from qcompiler.frontends.weights.weight_files import Entry, Unnamed
from qcompiler.frontends.weights.workdir import WorkFolder
from qcompiler.plan.weights import Bytes

SIZES = [5000, 1, 70_000, 0, 4096, 30_000, 12_345]


def entries(sizes: Sequence[int] = SIZES, format_: str = "int8") -> list[Entry]:
    return [Entry(f"layers.{i}.weight", format_, "f32", (n, 1), n) for i, n in enumerate(sizes)]


def content(entry: Entry, salt: int = 0) -> Bytes:
    seed = [len(entry.key), int(entry.key.split(".")[1]), entry.nbytes, salt]
    return np.random.default_rng(seed).integers(0, 256, entry.nbytes, np.uint8)


def compile_into(
    path: Path,
    wanted: Sequence[Entry],
    salts: dict[str, int] | None = None,
    before_fill: Callable[[int, Bytes], None] = lambda number, out: None,
) -> tuple[dict[str, bytes], WorkFolder, list[Bytes]]:
    """What `insert-qdq` does: the stored bytes by key, and the folder with its counts."""
    files = WorkFolder(path)
    found: dict[str, bytes] = {}
    views: list[Bytes] = []
    try:
        files.begin(wanted, 0)
        for number, entry in enumerate(wanted):
            salt = (salts or {}).get(entry.key, 0)

            def fill(out: Bytes, entry: Entry = entry, number: int = number, salt: int = salt) -> None:
                assert not out.any(), "room is zeroed"
                before_fill(number, out)
                out[...] = content(entry, salt)

            views.append(files.store(entry, lambda salt=salt: {"sha256": str(salt)}, fill))  # type: ignore[misc]
            found[entry.key] = views[-1].tobytes()
        files.finish()
    finally:
        files.abandon()
    return found, files, views


def expected(wanted: Sequence[Entry], salts: dict[str, int] | None = None) -> dict[str, bytes]:
    return {e.key: content(e, (salts or {}).get(e.key, 0)).tobytes() for e in wanted}


def folder_of(path: Path) -> Path:
    (folder,) = [p for p in path.iterdir() if p.is_dir()]
    return folder


@pytest.fixture(autouse=True)
def _quiet_and_safe_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QC_QUIET", "1")
    monkeypatch.setattr(workdir, "COMMIT_BYTES", 1)


def killed(work: Callable[[], object]) -> None:
    """Runs `work`, which kills itself with SIGKILL, in a child."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(1)  # it was not killed
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL


def kill_at(number: int, *, half: bool) -> Callable[[int, Bytes], None]:
    def before_fill(at: int, out: Bytes) -> None:
        if at == number:
            if half:
                out[: out.size // 2] = 0xAB
            os.kill(os.getpid(), signal.SIGKILL)

    return before_fill


# --- kills -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("half", [False, True], ids=["before a write", "in the middle of a write"])
@pytest.mark.parametrize("number", [0, 2, 6])
def test_a_killed_run_goes_on_where_it_was(tmp_path: Path, number: int, half: bool) -> None:
    wanted = entries()
    killed(lambda: compile_into(tmp_path, wanted, before_fill=kill_at(number, half=half)))
    found, files, _ = compile_into(tmp_path, wanted)
    assert found == expected(wanted)
    assert (files.reused, files.encoded) == (number, len(wanted) - number)
    again = compile_into(tmp_path, wanted)[1]
    assert (again.reused, again.encoded) == (len(wanted), 0)


@pytest.mark.parametrize("call", range(9))
def test_a_kill_at_any_sync_leaves_only_what_is_whole(
    tmp_path: Path, call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between a weight's bytes and its line, between two lines, and while the journal is written anew."""
    wanted, sync, calls = entries(SIZES[:3]), os.fsync, iter(range(100))

    def fsync(descriptor: int) -> None:
        if next(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)
        sync(descriptor)

    def work() -> None:
        monkeypatch.setattr(os, "fsync", fsync)
        compile_into(tmp_path, wanted)

    killed(work)
    found, files, _ = compile_into(tmp_path, wanted)
    assert found == expected(wanted) and files.reused + files.encoded == 3
    # Calls: the folder once; then data and journal of each weight; then the new journal, and its folder.
    assert files.reused >= min(3, max(0, call - 1) // 2)


def test_two_kills_one_after_the_other(tmp_path: Path) -> None:
    wanted = entries()
    for number in (2, 5):
        killed(lambda number=number: compile_into(tmp_path, wanted, before_fill=kill_at(number, half=True)))
    found, files, _ = compile_into(tmp_path, wanted)
    assert found == expected(wanted) and (files.reused, files.encoded) == (5, 2)


def test_an_error_keeps_what_was_done(tmp_path: Path) -> None:
    def fail(number: int, out: Bytes) -> None:
        if number == 4:
            raise ValueError("bad weight")

    with pytest.raises(ValueError, match="bad weight"):
        compile_into(tmp_path, entries(), before_fill=fail)
    assert compile_into(tmp_path, entries())[1].reused == 4


# --- damage ----------------------------------------------------------------------------------------------------------


def _flip(folder: Path) -> None:
    data = bytearray((folder / "weights-1.bin").read_bytes())
    data[10] ^= 1
    (folder / "weights-1.bin").write_bytes(data)


def _cut(folder: Path) -> None:
    os.truncate(folder / "weights-1.bin", 8192)


def _lose(folder: Path) -> None:
    (folder / "weights-1.bin").unlink()


def _rewrite(change: Callable[[list[bytes]], list[bytes]]) -> Callable[[Path], None]:
    def work(folder: Path) -> None:
        path = folder / "journal.jsonl"
        path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))

    return work


def _outside(lines: list[bytes]) -> list[bytes]:
    line = json.loads(lines[0])
    return [json.dumps({**line, "file": "../../secret"}).encode() + b"\n", *lines[1:]]


def _behind(lines: list[bytes]) -> list[bytes]:
    line = json.loads(lines[0])
    return [json.dumps({**line, "offset": offset}).encode() + b"\n" for offset in (-4096, 1 << 40)][:1] + lines[1:]


@pytest.mark.parametrize(
    ("damage", "reused"),
    [
        (_flip, 6),  # one bit of the first weight
        (_cut, 2),  # the first weight's two pages, and the one of no bytes
        (_lose, 0),
        (_rewrite(lambda lines: [*lines[:3], lines[3][:-20]]), 3),  # torn inside
        (_rewrite(lambda lines: [*lines[:3], lines[3][:-1]]), 3),  # torn at its end
        (_rewrite(lambda lines: [*lines[:3], b"\0" * 50 + b"\n", *lines[3:]]), 3),
        (_rewrite(lambda lines: []), 0),
        (_rewrite(_outside), 6),
        (_rewrite(_behind), 6),
        (_rewrite(lambda lines: [*lines, lines[0].replace(b'"int8"', b'"nf4"')]), 6),  # the last line of a key counts
    ],
)
def test_damage_is_noticed_and_made_good(tmp_path: Path, damage: Callable[[Path], None], reused: int) -> None:
    wanted = entries()
    compile_into(tmp_path, wanted)
    damage(folder_of(tmp_path))
    found, files, _ = compile_into(tmp_path, wanted)
    assert found == expected(wanted)
    assert files.reused == reused and files.encoded == len(wanted) - reused
    assert compile_into(tmp_path, wanted)[1].reused == len(wanted)


# --- other weights ---------------------------------------------------------------------------------------------------


def test_other_values_are_encoded_again_and_the_rest_is_not(tmp_path: Path) -> None:
    wanted, salts = entries(), {"layers.2.weight": 1, "layers.5.weight": 1}
    compile_into(tmp_path, wanted)
    found, files, _ = compile_into(tmp_path, wanted, salts)
    assert found == expected(wanted, salts) and (files.reused, files.encoded) == (5, 2)


def test_a_program_keeps_its_bytes_when_another_compile_takes_its_place(tmp_path: Path) -> None:
    wanted = entries()
    found, _, views = compile_into(tmp_path, wanted)
    salts = {e.key: 1 for e in wanted}
    other, files, _ = compile_into(tmp_path, wanted, salts)
    assert other == expected(wanted, salts) and files.reused == 0
    assert [view.tobytes() for view in views] == list(found.values())
    assert [p.name for p in folder_of(tmp_path).glob("weights-*")] == ["weights-2.bin"]  # room is given back


def test_a_program_may_write_to_its_bytes_and_the_folder_does_not_change(tmp_path: Path) -> None:
    _, _, views = compile_into(tmp_path, entries())
    for view in views:
        view[...] = 0
    assert compile_into(tmp_path, entries())[1].reused == len(SIZES)


@pytest.mark.parametrize(
    "other",
    [entries(format_="nf4"), entries(SIZES[:-1]), entries([*SIZES[:-1], 7]), list(reversed(entries()))],
    ids=["another recipe", "fewer weights", "another shape", "another order"],
)
def test_another_model_or_recipe_has_a_folder_of_its_own(tmp_path: Path, other: list[Entry]) -> None:
    compile_into(tmp_path, entries())
    found, files, _ = compile_into(tmp_path, other)
    assert found == expected(other) and files.reused == 0
    assert len([p for p in tmp_path.iterdir() if p.is_dir()]) == 2
    assert compile_into(tmp_path, entries())[1].reused == len(SIZES)


def test_another_version_of_the_encoders_starts_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_into(tmp_path, entries())
    monkeypatch.setattr(workdir, "_encoders", lambda: "another")
    assert compile_into(tmp_path, entries())[1].reused == 0


# --- two at once, and no room ----------------------------------------------------------------------------------------


def test_a_second_process_is_told_who_works_there(tmp_path: Path) -> None:
    first = WorkFolder(tmp_path)
    first.begin(entries(), 0)
    with pytest.raises(WorkdirError, match=f"the process {os.getpid()} compiles the same weights"):
        WorkFolder(tmp_path).begin(entries(), 0)
    other = WorkFolder(tmp_path)
    other.begin(entries(format_="nf4"), 0)  # other weights are no conflict
    other.abandon()
    first.abandon()
    assert compile_into(tmp_path, entries())[1].encoded == len(SIZES)


def test_the_lock_of_a_killed_process_is_no_lock(tmp_path: Path) -> None:
    killed(lambda: compile_into(tmp_path, entries(), before_fill=kill_at(0, half=False)))
    assert compile_into(tmp_path, entries())[1].encoded == len(SIZES)


def test_a_full_disk_is_an_error_that_can_be_gone_on_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fallocate(descriptor: int, offset: int, nbytes: int, real: Any = os.posix_fallocate) -> None:
        if offset > 0:
            raise OSError(28, "No space left on device")
        real(descriptor, offset, nbytes)

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", fallocate)
        with pytest.raises(WorkdirError, match="has no room for 1 more bytes"):
            compile_into(tmp_path, entries())
        with pytest.raises(WorkdirError, match=r"cannot make a file|has no room"):
            patched.setattr(os, "posix_fallocate", lambda *_: fallocate(0, 1, 1))
            Unnamed(tmp_path).room(1 << 20)
    assert compile_into(tmp_path, entries())[1].reused == 1


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(WorkdirError, match="cannot work in"):
        WorkFolder(tmp_path / "file").begin(entries(), 0)


# --- files without a name --------------------------------------------------------------------------------------------


@pytest.fixture
def descriptors() -> Iterator[Callable[[], int]]:
    yield lambda: len(os.listdir("/proc/self/fd"))  # noqa: PTH208


def test_many_weights_take_few_descriptors_and_leave_no_file(tmp_path: Path, descriptors: Callable[[], int]) -> None:
    before, files = descriptors(), Unnamed(tmp_path)
    wanted = entries([5000] * 300)
    files.begin(wanted, 0)
    held = [files.store(e, lambda: {}, lambda out, e=e: out.__setitem__(..., content(e))) for e in wanted]  # type: ignore[misc]
    held += [files.room(9000) for _ in range(300)]
    files.finish()
    assert descriptors() - before <= 2 and not list(tmp_path.iterdir())
    assert all(a.tobytes() == content(e).tobytes() for a, e in zip(held, wanted, strict=False))
    del held
    files.abandon()
    assert descriptors() == before


def test_the_working_folder_takes_few_descriptors_too(tmp_path: Path, descriptors: Callable[[], int]) -> None:
    before = descriptors()
    _, _, views = compile_into(tmp_path, entries([5000] * 300))
    assert descriptors() - before <= 2
    del views
