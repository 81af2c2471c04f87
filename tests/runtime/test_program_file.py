"""The program file: round trips, and every kind of damage refused with its own error."""

from __future__ import annotations

import gzip
import json
import os
import re
import stat
import struct
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from qcompiler import __version__
from qcompiler.errors import (
    ArgumentError,
    CorruptFileError,
    FileBoundsError,
    ForeignFileError,
    NewerFileError,
    PlanError,
    ProgramFileError,
    TargetMismatchError,
    TruncatedFileError,
    TrustError,
)
from qcompiler.runtime import load, program_file
from qcompiler.runtime.image import NativeLibrary, ProgramImage
from qcompiler.runtime.loaded import check_image
from qcompiler.runtime.memory import address_of
from qcompiler.runtime.program_file import load_image, save_image


@pytest.fixture
def file(small: Any, tmp_path: Path) -> Path:
    path = tmp_path / "small.qca"
    save_image(small.image, path)
    return path


def edit_header(path: Path, change: Callable[[dict[str, Any]], None], *, keep_digest: bool = False) -> None:
    """Rewrites program.json in place (padded with spaces to its size), with a right checksum unless told otherwise."""
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo("program.json")
        header = json.loads(archive.read(info))
    header["report"] = None  # frees the room that changes may need
    change(header)
    text = json.dumps(header, separators=(",", ":")).encode()
    assert len(text) <= info.file_size
    text = text.ljust(info.file_size)
    data = bytearray(path.read_bytes())
    start = info.header_offset + 30 + struct.unpack_from("<H", data, info.header_offset + 26)[0]
    start += struct.unpack_from("<H", data, info.header_offset + 28)[0]
    data[start : start + len(text)] = text
    if not keep_digest:
        old, new = struct.pack("<I", info.CRC), struct.pack("<I", zlib.crc32(text))
        data = data.replace(old, new)
    path.write_bytes(data)


def weights_start(path: Path) -> int:
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo("weights.safetensors")
    data = path.read_bytes()
    name, extra = struct.unpack_from("<HH", data, info.header_offset + 26)
    return int(info.header_offset + 30 + name + extra + 4096)


# --- what a good file is ---------------------------------------------------------------------------------------------


def test_round_trip_gives_the_same_plan_and_weights(small: Any, file: Path) -> None:
    image, native = load_image(file, verify="full")
    assert native is None
    bare = msgspec.structs.replace(image.plan)
    assert bare == small.image.plan
    assert np.array_equal(image.weights, small.image.weights)
    assert image.signature == small.image.signature
    assert image.texts == small.image.texts
    assert image.ledger == small.image.ledger


def test_file_is_a_plain_zip_with_safetensors_inside(file: Path, small: Any) -> None:
    import safetensors.numpy as safetensors

    with zipfile.ZipFile(file) as archive:
        assert archive.testzip() is None
        assert all(info.compress_type == zipfile.ZIP_STORED for info in archive.infolist())
        tensors = safetensors.load(archive.read("weights.safetensors"))
        assert gzip.decompress(archive.read("ir/02-import.mlir.gz")) == b"builtin.module {}\n"
    assert np.array_equal(tensors["weights"], small.image.weights)


def test_weights_lie_at_a_page_boundary_and_are_mapped(file: Path) -> None:
    assert weights_start(file) % 4096 == 0
    image, _ = load_image(file)
    assert address_of(image.weights) % 4096 == 0
    assert not image.weights.flags.writeable


def test_equal_programs_give_equal_files(small: Any, file: Path, tmp_path: Path) -> None:
    save_image(small.image, tmp_path / "again.qca")
    assert (tmp_path / "again.qca").read_bytes() == file.read_bytes()


def test_saving_over_a_mapped_file_leaves_the_running_program_alone(small: Any, file: Path) -> None:
    image, _ = load_image(file)
    before = image.weights.copy()
    other = ProgramImage(small.image.plan, small.image.signature, np.zeros_like(small.image.weights))
    save_image(other, file)
    assert np.array_equal(image.weights, before)
    assert [p.name for p in file.parent.iterdir()] == [file.name]  # no temporary file is left


def test_a_failed_save_leaves_the_old_file(small: Any, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = file.read_bytes()

    def fail(self: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(program_file.Writer, "close", fail)
    with pytest.raises(OSError, match="disk full"):
        save_image(small.image, file)
    assert file.read_bytes() == before
    assert [p.name for p in file.parent.iterdir()] == [file.name]


def test_canonical_file_is_packed_again_to_the_same_bytes(small: Any, tmp_path: Path, capfd: Any) -> None:
    path = tmp_path / "portable.qca"
    save_image(small.image, path, layout="canonical")
    image, _ = load_image(path, verify="full")
    assert np.array_equal(image.weights, small.image.weights)
    assert "packing the weights" in capfd.readouterr().err
    with zipfile.ZipFile(path) as archive:
        stored = json.loads(archive.read("program.json"))["stored"]
    assert {entry["layout"] for entry in stored} == {"canonical"}


# --- what a bad file is ----------------------------------------------------------------------------------------------


def test_a_file_of_another_kind_is_foreign(tmp_path: Path) -> None:
    path = tmp_path / "x.qca"
    path.write_bytes(b"GGUF" + bytes(1000))
    with pytest.raises(ForeignFileError, match="not a qcompiler program but a GGUF file"):
        load_image(path)


@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize("kind", ["pipe", "folder", "device"])
def test_what_is_no_regular_file_is_foreign_and_not_waited_for(kind: str, copy: bool, tmp_path: Path) -> None:
    path = tmp_path / "p.qca"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(ForeignFileError, match="not a regular file"):
        load_image(path, copy=copy)


def test_a_zip_of_another_kind_is_foreign(tmp_path: Path) -> None:
    path = tmp_path / "x.qca"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data.pkl", b"\x80\x04N.")
    with pytest.raises(ForeignFileError, match="a zip, but not a qcompiler program"):
        load_image(path)


@pytest.mark.parametrize("keep", [0, 3, 20, 40, 1000, 0.5, -1, -22, -60, -200])
def test_a_cut_file_is_truncated_wherever_it_was_cut(file: Path, keep: float) -> None:
    data = file.read_bytes()
    size = int(len(data) * keep) if isinstance(keep, float) else keep if keep >= 0 else len(data) + keep
    file.write_bytes(data[:size])
    with pytest.raises(TruncatedFileError, match=rf"{re.escape(str(file))}: .*cut off \(copy or download it again\)"):
        load_image(file)


def test_a_newer_file_says_how_to_update(file: Path) -> None:
    def newer(header: dict[str, Any]) -> None:
        header["format"], header["qcompiler"] = 9, "9.0"
        header["something"] = 1

    edit_header(file, newer)
    with pytest.raises(NewerFileError, match=r"format 9.*9\.0.*pip install --upgrade"):
        load_image(file)


def test_a_field_of_a_later_release_is_newer_and_the_same_field_otherwise_damage(file: Path) -> None:
    """Fields may be added without a new format: an older reader neither passes them over nor calls the file damaged."""

    def written_by(version: str) -> Callable[[dict[str, Any]], None]:
        return lambda header: header.update(qcompiler=version, hints=1)

    edit_header(file, written_by("99.0.0"))
    with pytest.raises(NewerFileError, match=r"written by qcompiler 99\.0\.0, .*`hints`.*pip install --upgrade"):
        load_image(file)
    for version in (__version__, "0.0.9", "unknown"):
        edit_header(file, written_by(version))
        with pytest.raises(CorruptFileError, match=r"does not follow its schema.*`hints`"):
            load_image(file)


def test_fields_that_an_earlier_release_did_not_write_have_their_defaults(file: Path) -> None:
    edit_header(file, lambda header: [header.pop(name) for name in ("native", "torch_calls", "ledger", "report")])
    image, _ = load_image(file)
    assert (image.torch_calls, image.ledger, image.report) == ((), None, None)


def test_a_newer_plan_is_newer(file: Path) -> None:
    edit_header(file, lambda header: header["plan"].update(version=7))
    with pytest.raises(NewerFileError, match="version 7"):
        load_image(file)


def test_an_unknown_field_is_a_corrupt_schema(file: Path) -> None:
    edit_header(file, lambda header: header.update(x=1))
    with pytest.raises(CorruptFileError, match="schema"):
        load_image(file)


def test_a_damaged_header_is_noticed_by_its_checksum(file: Path) -> None:
    edit_header(file, lambda header: header["target"].update(isa="x86-64-"), keep_digest=True)
    with pytest.raises(CorruptFileError, match=rf"^{file}: .*checksum is wrong\. Copy or download the file again, or"):
        load_image(file)


def both(header: dict[str, Any], index: int, **changes: Any) -> None:
    """Changes a weight's entry in the plan and in the file's directory, so that only bounds checks can object."""
    header["plan"]["weights"][index].update(changes)
    header["stored"][index].update(changes)


def test_a_weight_that_leaves_the_file(file: Path) -> None:
    edit_header(file, lambda header: both(header, 1, offset=1 << 20))
    with pytest.raises(FileBoundsError, match=r"'bias' claims bytes .* but the weights have"):
        load_image(file)


def test_weights_that_overlap(file: Path) -> None:
    edit_header(file, lambda header: both(header, 1, offset=256))
    with pytest.raises(FileBoundsError, match="'bias' starts at 256, inside 'w'"):
        load_image(file)


def test_a_negative_offset(file: Path) -> None:
    edit_header(file, lambda header: both(header, 0, offset=-64))
    with pytest.raises(FileBoundsError, match="'w' claims bytes -64"):
        load_image(file)


def test_a_weight_section_of_another_size(file: Path) -> None:
    edit_header(file, lambda header: header.update(weights_nbytes=256))
    with pytest.raises(FileBoundsError, match=r"weights\.safetensors has"):
        load_image(file)


def test_a_buffer_that_leaves_its_arena_is_refused_before_anything_runs(file: Path) -> None:
    def move(header: dict[str, Any]) -> None:
        for buffer in header["plan"]["buffers"]:
            if buffer["name"] == "table":
                buffer["offset"] = 512

    edit_header(file, move)
    image, _ = load_image(file)
    with pytest.raises(PlanError, match="table"):
        check_image(image)


@pytest.mark.parametrize("place", ["name", "dim", "constant", "comment"])
def test_text_that_would_become_code_is_refused(file: Path, place: str) -> None:
    def inject(header: dict[str, Any]) -> None:
        kernel = header["plan"]["kernels"][2]
        if place == "name":
            kernel["name"] = "a;b"
        elif place == "dim":
            kernel["body"]["extents"][0] = "b;x"
        elif place == "constant":
            kernel["body"]["body"]["ops"][0]["value"] = "x()"
        else:
            kernel["serves"] = "*/ x"

    edit_header(file, inject)
    image, _ = load_image(file)
    with pytest.raises(CorruptFileError):
        check_image(image)


def flip(path: Path, at: int) -> None:
    """Damages one byte, keeping size and times as a failing disk would."""
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x40]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_damaged_weights_are_named(file: Path) -> None:
    flip(file, weights_start(file) + 100)
    with pytest.raises(CorruptFileError, match=r"weight 'w' is damaged \(chunk 0 of 1\)\. Copy or download the file"):
        load_image(file, verify="full")


def test_weights_of_an_unknown_file_are_checked_once(file: Path, tmp_path: Path) -> None:
    stranger = tmp_path / "copied.qca"
    stranger.write_bytes(file.read_bytes())
    flip(stranger, weights_start(stranger) + 100)
    with pytest.raises(CorruptFileError, match="damaged"):
        load_image(stranger)
    with pytest.raises(CorruptFileError, match="damaged"):  # a failed check is not remembered
        load_image(stranger)


def test_a_file_in_the_users_record_is_not_read_again(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("weights were read though the file is known")

    monkeypatch.setattr(program_file, "_check_weights", fail)
    load_image(file)  # saved by this user: known
    with pytest.raises(AssertionError):
        load_image(file, verify="full")
    os.utime(file)  # changed, as far as anybody can tell
    with pytest.raises(AssertionError):
        load_image(file)


def test_the_record_is_private(file: Path, own_cache: Path) -> None:
    load_image(file)
    records = list((own_cache / "files").iterdir())
    assert records
    assert all(stat.S_IMODE(record.stat().st_mode) == 0o600 for record in records)
    assert stat.S_IMODE((own_cache / "files").stat().st_mode) == 0o700


def test_texts_are_small_in_the_file_and_can_be_left_out(small: Any, tmp_path: Path) -> None:
    long = "%0 = arith.addf %1, %2 : f32\n" * 20_000
    image = replace(small.image, texts={"ir/02-import.mlir": long, "kernels/program.cpp": "// x\n"})
    sizes = {}
    for stages in (True, False):
        path = tmp_path / f"{stages}.qca"
        save_image(image, path, stages=stages)
        sizes[stages] = path.stat().st_size
        assert dict(load_image(path)[0].texts) == (dict(image.texts) if stages else {})
    assert sizes[True] - sizes[False] < len(long) / 50


def test_attachments_travel_with_the_program(small: Any, tmp_path: Path) -> None:
    image = replace(small.image, attachments={"lm.json": b'{"a": 1}', "empty": b""})
    save_image(image, tmp_path / "a.qca", stages=False)
    assert load_image(tmp_path / "a.qca")[0].attachments == image.attachments
    program = load(tmp_path / "a.qca")
    program.save(tmp_path / "b.qca")
    program.save(tmp_path / "c.qca", attachments={"other": b"x"})
    found = [load_image(tmp_path / name)[0].attachments for name in ("b.qca", "c.qca")]
    assert found == [image.attachments, {"other": b"x"}]


def test_attachments_of_other_names_and_sizes_are_refused(
    small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("../x", "a/b", "", "x" * 101):
        with pytest.raises(ArgumentError, match="cannot name an attachment"):
            save_image(replace(small.image, attachments={name: b""}), tmp_path / "a.qca")
    monkeypatch.setattr(program_file, "MAX_ATTACHMENT", 4)
    with pytest.raises(ArgumentError, match="5 bytes, more than the limit of 4"):
        save_image(replace(small.image, attachments={"a": b"12345"}), tmp_path / "a.qca")


def test_a_damaged_attachment_and_one_under_another_name_are_noticed(small: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.qca"
    save_image(replace(small.image, attachments={"lm.json": b"0123456789abcdef"}), path)
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"0123456789abcdef", b"0123456789abcdeX"))
    with pytest.raises(CorruptFileError, match=r"attachments/lm\.json"):
        load_image(path)
    path.write_bytes(whole)

    def elsewhere(header: dict[str, Any]) -> None:
        header["attachments"].append({"file": header["texts"][0]["file"], "sha256": header["texts"][0]["sha256"]})
        header["texts"] = header["texts"][1:]

    edit_header(path, elsewhere)
    with pytest.raises(CorruptFileError, match=rf"^{path}: .*as an attachment\. Copy or download the file again"):
        load_image(path)


@pytest.mark.parametrize(("claimed", "message"), [
    (1, "does not have the 1 bytes"), (10**6, "does not have the 1000000 bytes"), (-1, "more than the limit"),
    (1 << 40, "more than the limit"),
])  # fmt: skip
def test_a_text_is_unpacked_to_the_size_that_is_claimed_and_no_further(file: Path, claimed: int, message: str) -> None:
    """Only when it is read: a program runs without its texts."""

    def claim(header: dict[str, Any]) -> None:
        header["texts"][0]["nbytes"] = claimed

    edit_header(file, claim)
    image, _ = load_image(file)
    with pytest.raises(CorruptFileError, match=message):
        list(image.texts.values())


def test_damaged_text_is_noticed_always(file: Path) -> None:
    at = file.read_bytes().index(b"\x1f\x8b\x08") + 12  # inside the first text, as gzip packs it
    flip(file, at)
    with pytest.raises(CorruptFileError, match=r"02-import\.mlir\.gz' is damaged"):
        load_image(file)


def test_members_with_strange_names_are_not_looked_at(file: Path) -> None:
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr("../../evil.so", b"evil")
    with pytest.raises(ProgramFileError):  # appending also moves the directory to a form that is not ours
        load_image(file)


@pytest.mark.parametrize("seed", range(40))
def test_random_damage_is_an_error_of_ours_or_harmless(file: Path, small: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    data = bytearray(file.read_bytes())
    directory = data.rindex(b"PK\x06\x06") - 600
    for _ in range(3):
        at = int(rng.integers(directory, len(data))) if seed % 2 else int(rng.integers(0, len(data)))
        data[at] = int(rng.integers(0, 256))
    file.write_bytes(data)
    try:
        image, _ = load_image(file, verify="full")
    except ProgramFileError:
        return
    assert np.array_equal(image.weights, small.image.weights)


# --- trust -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def with_native(small: Any, tmp_path: Path) -> Path:
    library = tmp_path / "lib.so"
    library.write_bytes(b"\x7fELF of x86-64")
    plain = NativeLibrary("generic" if os.uname().machine != "x86_64" else "x86-64", library, "1")
    path = tmp_path / "native.qca"
    save_image(small.image.with_native(plain), path)
    return path


def digest_in(path: Path) -> str:
    with zipfile.ZipFile(path) as archive:
        digest: str = json.loads(archive.read("program.json"))["native"][0]["sha256"]
    return digest


def test_native_code_in_a_file_is_not_touched_without_trust(with_native: Path) -> None:
    assert load_image(with_native)[1] is None


@pytest.mark.parametrize("by_digest", [True, False])
def test_native_code_is_used_with_trust(with_native: Path, by_digest: bool) -> None:
    native = load_image(with_native, trust_native=f"sha256:{digest_in(with_native)}" if by_digest else True)[1]
    assert native is not None
    assert native.path.read_bytes() == b"\x7fELF of x86-64"


def test_a_digest_that_does_not_match_is_refused(with_native: Path) -> None:
    with pytest.raises(TrustError, match=digest_in(with_native)):
        load_image(with_native, trust_native="sha256:" + "0" * 64)


def test_trust_in_a_file_without_native_code_is_an_error(file: Path) -> None:
    with pytest.raises(TrustError, match="no native build"):
        load_image(file, trust_native=True)


def test_native_code_for_another_machine(small: Any, tmp_path: Path) -> None:
    library = tmp_path / "lib.so"
    library.write_bytes(b"\x7fELF of rv64")
    save_image(small.image.with_native(NativeLibrary("rv64", library, "1", scratch=0)), tmp_path / "p.qca")
    with pytest.raises(TargetMismatchError, match=r"needs rv64, this machine runs .*Load without trust_native"):
        load_image(tmp_path / "p.qca", trust_native=True)


def test_a_listing_that_calls_a_build_another_instruction_set_is_refused(with_native: Path) -> None:
    """What a build needs stands in the build, whose digest is trusted, and not in program.json."""
    edit_header(with_native, lambda header: header["native"][0].update(isa="rv64"))
    with pytest.raises(CorruptFileError, match=r"program\.json says otherwise"):
        load_image(with_native, trust_native=True)


def test_damaged_native_code_is_noticed_without_trust_too(with_native: Path) -> None:
    flip(with_native, with_native.read_bytes().index(b"ELF of"))
    with pytest.raises(CorruptFileError, match=r"native/.* is damaged"):
        load_image(with_native)


def after(monkeypatch: pytest.MonkeyPatch, step: str, deed: Callable[[], None]) -> None:
    """Somebody writes to the file just after a step of loading it."""
    true = getattr(program_file, step)

    def stepped(*args: Any) -> Any:
        made = true(*args)
        deed()
        return made

    monkeypatch.setattr(program_file, step, stepped)


def overwrite(path: Path, old: bytes, new: bytes) -> None:
    """In place: a mapping of the file sees it."""
    at = path.read_bytes().index(old)
    with path.open("r+b") as file:
        file.seek(at)
        file.write(new)


def test_code_that_changes_after_its_digest_was_checked_does_not_run(
    with_native: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    after(monkeypatch, "_check_digests", lambda: overwrite(with_native, b"ELF of x86-64", b"ELF of others"))
    with pytest.raises(CorruptFileError, match=r"native/.* is damaged"):
        load_image(with_native, trust_native=True)


def test_a_build_is_compared_with_the_plan_that_is_used(with_native: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan was read from the mapped file a second time for this: another one could stand there by then."""
    edit_header(with_native, lambda header: header["plan"]["streams"][0].update(name="x"))
    hostile = program_file._member(*_parts(with_native), "program.json").tobytes()
    image_of_the_build = hostile.replace(b'"name":"x"', b'"name":"q"', 1)
    assert image_of_the_build != hostile
    seen: list[bytes] = []
    monkeypatch.setattr(program_file, "_plan_text", lambda program: seen.append(program) or b"")
    after(monkeypatch, "read_header", lambda: overwrite(with_native, hostile[:4000], image_of_the_build[:4000]))
    with pytest.raises(TrustError, match="another plan"):
        load_image(with_native, trust_native=True)
    assert seen == [hostile]


def _parts(path: Path) -> tuple[memoryview, dict[str, Any]]:
    data = memoryview(path.read_bytes())
    return data, program_file.read_members(data)
