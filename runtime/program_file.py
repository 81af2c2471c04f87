"""The program file `.qca`: an uncompressed zip that is mapped, checked and run. docs/program-file.md describes it.

qcompiler-program      the format's version, first in the file
program.json           `Header`: versions, signature, plan, digests of all members
weights.safetensors    one U8 tensor "weights" at a page boundary; its directory is in program.json
native/*.so, *.cubin   compiled kernels (run only with trust)
ir/*.gz, kernels/*.gz  for human readers; each is unpacked only when it is read
attachments/*          files that a layer above the runtime keeps with its program
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from qcompiler import __version__
from qcompiler.errors import (
    ArgumentError,
    CorruptFileError,
    FileBoundsError,
    ForeignFileError,
    NewerFileError,
    PlanError,
    TargetMismatchError,
    TruncatedFileError,
    TrustError,
)
from qcompiler.plan.kernel import Strict
from qcompiler.plan.plan import PLAN_VERSION, Plan, Signature, WeightEntry
from qcompiler.runtime.archive import MARK, PAGE, Member, Writer, read_members
from qcompiler.runtime.backends import registry
from qcompiler.runtime.builds import Build, Trust, member_name, pack_build, runnable, trusted_build, unpack_build
from qcompiler.runtime.cache import cache_dir, keep
from qcompiler.runtime.code import read_record
from qcompiler.runtime.emitter import emitter_version
from qcompiler.runtime.files import replacing
from qcompiler.runtime.image import (
    CHUNK,
    MappedFile,
    NativeLibrary,
    ProgramImage,
    ProgramTarget,
    check_directory,
    chunk_digests,
    constants_nbytes,
    open_program,
    with_digests,
)
from qcompiler.runtime.memory import Block, Bytes
from qcompiler.runtime.placement import choose_devices
from qcompiler.runtime.progress import Progress, note
from qcompiler.runtime.repack import canonical_directory, to_canonical, to_target
from qcompiler.units import human_bytes

FORMAT_VERSION = 1
MAX_JSON = 256 << 20
MAX_MESSAGE = 2000
MAX_TEXT = 1 << 30
MAX_ATTACHMENT = 256 << 20
ATTACHED = "attachments/"
PACKED = ".gz"
WAY_OUT = "Copy or download the file again, or compile the model again"
"""What to do about a file that a CorruptFileError is about."""
_OF_THE_FILE = (ForeignFileError, TruncatedFileError, CorruptFileError, NewerFileError)
"""Errors of reading a file: they get its name (`_message`)."""

Verify = Literal["auto", "full"]
Layout = Literal["target", "canonical"]


class NativeBuild(Strict, frozen=True):
    """A compiled build in the file: the machine it needs, and its digest."""

    file: str
    isa: str
    sha256: str
    emitter_version: str
    compiler: str = ""


class TextFile(Strict, frozen=True):
    """A file for human readers, with its digest. `nbytes` is the size of the unpacked text of a `.gz` file."""

    file: str
    sha256: str
    nbytes: int = 0


class Attachment(Strict, frozen=True):
    """A file that travels with the program, with its digest."""

    file: str
    sha256: str


class Header(Strict, frozen=True):
    """program.json. `stored` is the directory of the weights in the file, `plan.weights` that of the arena."""

    magic: Literal["qcompiler-program"]
    format: int
    qcompiler: str
    plan: Plan
    signature: Signature
    target: ProgramTarget
    emitter_version: str
    layout: Layout
    weights_nbytes: int
    stored: tuple[WeightEntry, ...]
    native: tuple[NativeBuild, ...] = ()
    texts: tuple[TextFile, ...] = ()
    attachments: tuple[Attachment, ...] = ()
    torch_calls: tuple[str, ...] = ()
    ledger: Any = None
    report: Any = None


class _Versions(msgspec.Struct):
    """The part of program.json that every version keeps: read before anything else."""

    magic: str
    format: int
    qcompiler: str = "?"


# --- writing ---------------------------------------------------------------------------------------------------------


def save_image(
    image: ProgramImage, path: str | Path, *, layout: Layout = "target", stages: bool = True
) -> dict[str, str]:
    """Writes a program file: streamed to a temporary file beside it, renamed when complete.

    `stages=False` leaves out the texts for human readers: those of the stages, and the source of the kernels.
    `layout="canonical"` stores weights in their formats' canonical bytes, for other targets; the plan stays the same.
    Returns the digests of the native builds, ``{"x86-64-v4": "sha256:…"}``, the argument of `trust_native`.
    """
    image.require_values()
    image.require_unchanged()
    path = Path(path)
    if not path.parent.is_dir():
        raise ArgumentError(f"there is no folder '{path.parent}' to write {path.name} to: make it first")
    if layout == "canonical":
        stored = canonical_directory(image.plan.weights)
        weights = to_canonical(image.plan.weights, image.weights, stored)
    elif layout == "target":
        stored, weights = image.plan.weights, image.weights
    else:
        raise ValueError(f"layout={layout!r} is neither 'target' nor 'canonical'")
    plan_text = msgspec.json.encode(image.plan, order="deterministic")
    natives = {member_name(native.isa): pack_build(native, image.plan, plan_text) for native in image.native}
    sizes = {name + PACKED: len(text.encode()) for name, text in image.texts.items()} if stages else {}
    texts = {name: _gzip(image.texts[name.removesuffix(PACKED)].encode()) for name in sizes}
    attached = {ATTACHED + name: check_attachment(name, data) for name, data in sorted(image.attachments.items())}
    header = Header(
        magic="qcompiler-program",
        format=FORMAT_VERSION,
        qcompiler=image.qcompiler,
        plan=image.plan,
        signature=image.signature,
        target=image.target,
        emitter_version=emitter_of(image.target.kind),
        layout=layout,
        weights_nbytes=weights.nbytes,
        stored=with_digests(stored, weights),
        native=tuple(
            NativeBuild(
                file=member_name(native.isa), isa=native.isa, sha256=_sha256(natives[member_name(native.isa)]),
                emitter_version=native.emitter_version, compiler=native.compiler,
            )
            for native in image.native
        ),
        texts=tuple(TextFile(file=name, sha256=_sha256(text), nbytes=sizes[name]) for name, text in texts.items()),
        attachments=tuple(Attachment(file=name, sha256=_sha256(data)) for name, data in attached.items()),
        torch_calls=image.torch_calls,
        ledger=image.ledger,
        report=image.report,
    )  # fmt: skip
    program = msgspec.json.encode(header, order="deterministic")
    _write(path, program, weights, natives | texts | attached)
    _remember(path, path.stat(), program)
    return {build.isa: f"sha256:{build.sha256}" for build in header.native}


def emitter_of(kind: str) -> str:
    """The version of this installation's emitter for a target."""
    return emitter_version("cpu" if kind == "cpu" else "cuda")


def _write(path: Path, program: bytes, weights: Bytes, others: dict[str, bytes]) -> None:
    with replacing(path) as file:
        writer = Writer(file)
        mark = f"format {FORMAT_VERSION}\n".encode()
        writer.add(MARK, [mark], len(mark))
        writer.add("program.json", [program], len(program))
        front = _safetensors_header(weights.nbytes)
        writer.add("weights.safetensors", _pieces(front, weights), len(front) + weights.nbytes, alignment=PAGE)
        for member, data in others.items():
            writer.add(member, [data], len(data))
        writer.close()


def _safetensors_header(nbytes: int) -> bytes:
    """The header of a file with one U8 tensor, padded to a page, so that the tensor's bytes begin at a page as well."""
    text = json.dumps({"weights": {"dtype": "U8", "shape": [nbytes], "data_offsets": [0, nbytes]}}).encode()
    return struct.pack("<Q", PAGE - 8) + text.ljust(PAGE - 8)


def _pieces(front: bytes, weights: Bytes) -> Iterator[bytes | memoryview]:
    yield front
    with Progress("writing weights", weights.nbytes) as progress:
        for start in range(0, weights.nbytes, CHUNK):
            part = weights.data[start : start + CHUNK]
            yield part
            progress.step(part.nbytes)


def _sha256(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()


# --- reading ---------------------------------------------------------------------------------------------------------


def load_image(
    path: str | Path,
    *,
    verify: Verify = "auto",
    trust_native: Trust = False,
    device: str | None = None,
    devices: Sequence[str] | None = None,
    copy: bool = False,
) -> tuple[ProgramImage, NativeLibrary | None]:
    """A program file as an image whose weights are mapped, with the file's own native build if that is trusted.

    With `copy` the file is read into memory once; that memory is checked and used.
    `device` and `devices` say where the program will run: a build that does not run there is refused.

    Raises, in the order of the checks: ForeignFileError, TruncatedFileError, NewerFileError, CorruptFileError (schema,
    digests), FileBoundsError, TrustError, TargetMismatchError. `verify="full"` reads all weights and checks their
    digests; `"auto"` does so unless the user's cache records the file as checked and unchanged.
    """
    if verify not in ("auto", "full"):
        raise ValueError(f"verify={verify!r} is neither 'auto' nor 'full'")
    path = Path(path)
    source = None if copy else MappedFile(path)
    data = _read(path) if source is None else source.data
    try:
        members = read_members(data)
        header, program, weights = _checked_members(data, members)
        if verify == "full" or source is None or not _remembered(path, source.status, program):
            _check_weights(header, weights)
            if source is not None:  # else memory was checked, and the file may have changed
                _remember(path, source.status, program)
        native = None
        if trust_native is not False:
            where = choose_devices(header.plan, device, devices)[0]
            builds = _builds(data, members, header)
            native = trusted_build(
                builds, trust_native, lambda: _plan_text(program), where, lambda: emitter_of("cuda")
            )  # fmt: skip
        texts, attachments = _Texts(data, members, header), _attachments(data, members, header)
    except (*_OF_THE_FILE, TrustError, TargetMismatchError) as error:
        raise type(error)(_message(path, error)) from error
    if header.layout == "canonical":
        note(f"packing the weights of {path.name} ({human_bytes(weights.nbytes)}) for this machine")
        weights = to_target(header.stored, weights, header.plan.weights, constants_nbytes(header.plan))
        source = None  # the packed weights are in memory
    image = ProgramImage(
        header.plan, header.signature, weights, header.target, header.ledger, header.report, header.torch_calls,
        texts, (), header.qcompiler, source=source, attachments=attachments,
    )  # fmt: skip
    return image, native


def read_program(path: str | Path) -> tuple[Header, Mapping[str, str]]:
    """A program file's header, and its texts for human readers. Nothing is compiled, repacked or run.

    Makes the checks of `load_image`, except for the weights' values and the safety of the plan; raises the same errors.
    """
    path = Path(path)
    data = MappedFile(path).data
    try:
        members = read_members(data)
        header, _, _ = _checked_members(data, members)
        return header, _Texts(data, members, header)
    except _OF_THE_FILE as error:
        raise type(error)(_message(path, error)) from error


def _message(path: Path, error: Exception) -> str:
    """The error with the file's name, and with the way out of a damaged file; quotes from the file may be long."""
    text = str(error)
    text = text if len(text) <= MAX_MESSAGE else text[:MAX_MESSAGE] + "…"
    return f"{path}: {text}. {WAY_OUT}" if isinstance(error, CorruptFileError) else f"{path}: {text}"


def _checked_members(data: memoryview, members: dict[str, Member]) -> tuple[Header, bytes, Bytes]:
    """program.json, decoded and as bytes, and the weights. Checks the directory and all digests except the weights'."""
    # One copy: the same bytes are checked, used, and compared with a trusted build, even if the file is overwritten
    # meanwhile.
    program = bytes(_member(data, members, "program.json", limit=MAX_JSON))
    if zlib.crc32(program) != members["program.json"].crc32:
        raise CorruptFileError("program.json is damaged: its checksum is wrong")
    header = read_header(program)
    weights = _weights(data, members, header)
    check_directory(header.stored, header.weights_nbytes)
    _check_stored(header)
    _check_digests(data, members, header)
    return header, program, weights


def _read(path: Path) -> memoryview:
    """The file's bytes in private memory. A file that shrinks meanwhile counts as truncated, without a SIGBUS."""
    with open_program(path) as file:
        block = Block(os.fstat(file.fileno()).st_size)
        done = 0
        while done < block.nbytes and (count := file.readinto(block.bytes[done:].data)):
            done += count
    return block.bytes[:done].data


def _member(data: memoryview, members: dict[str, Member], name: str, limit: int | None = None) -> memoryview:
    if name not in members:
        raise CorruptFileError(f"the file lacks '{name}'")
    member = members[name]
    if limit is not None and member.nbytes > limit:
        raise CorruptFileError(f"'{name}' has {member.nbytes} bytes, more than the limit of {limit}")
    return data[member.offset : member.offset + member.nbytes]


def read_header(program: bytes) -> Header:
    """program.json, versions first: a newer file may have a schema that this version cannot check."""
    versions = None
    try:
        versions = msgspec.json.decode(program, type=_Versions)
        if versions.magic != "qcompiler-program":
            raise ForeignFileError(f"program.json is of another kind ({versions.magic[:100]!r})")
        if versions.format > FORMAT_VERSION:
            raise NewerFileError(
                f"the file has format {versions.format} (written by qcompiler {versions.qcompiler[:40]}), this version "
                f"reads up to {FORMAT_VERSION}; update with `pip install --upgrade qcompiler`"
            )
        header = msgspec.json.decode(program, type=Header, strict=True)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        if versions is not None and _release(versions.qcompiler) > _release(__version__):
            # An unknown field may matter, so it is not ignored; but it does not mean that the file is damaged.
            raise NewerFileError(
                f"the file was written by qcompiler {versions.qcompiler[:40]}, this is {__version__}, which does not "
                f"know everything in it ({error}); update with `pip install --upgrade qcompiler`"
            ) from error
        raise CorruptFileError(f"program.json does not follow its schema: {error}") from error
    if header.plan.version > PLAN_VERSION:
        raise NewerFileError(
            f"the plan has version {header.plan.version}, this version reads up to {PLAN_VERSION}; "
            "update with `pip install --upgrade qcompiler`"
        )
    return header


def _release(version: str) -> tuple[int, ...]:
    """(0, 2, 1) for "0.2.1" and for "0.2.1rc1"; () for an invalid version."""
    found = re.match(r"\d{1,9}(\.\d{1,9}){0,3}", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def _weights(data: memoryview, members: dict[str, Member], header: Header) -> Bytes:
    member = _member(data, members, "weights.safetensors")
    if members["weights.safetensors"].offset % PAGE:
        raise CorruptFileError(f"weights.safetensors does not begin at a multiple of {PAGE} bytes")
    expected = _safetensors_header(header.weights_nbytes)
    if len(member) != PAGE + header.weights_nbytes:
        raise FileBoundsError(
            f"weights.safetensors has {len(member)} bytes, its directory needs {PAGE + header.weights_nbytes}"
        )
    if bytes(member[:PAGE]) != expected:
        raise CorruptFileError("the header of weights.safetensors is not that of one U8 tensor 'weights'")
    return np.frombuffer(member, np.uint8, count=header.weights_nbytes, offset=PAGE)


def _check_stored(header: Header) -> None:
    """The directory of the file describes the weights that the plan's directory names."""
    if header.layout == "target":
        wanted = [msgspec.structs.replace(entry, sha256=()) for entry in header.plan.weights]
        if [msgspec.structs.replace(entry, sha256=()) for entry in header.stored] != wanted:
            raise CorruptFileError("the file's weight directory is not the plan's, though its layout is 'target'")
        if header.weights_nbytes != constants_nbytes(header.plan):
            raise FileBoundsError(
                f"the file has {header.weights_nbytes} bytes of weights, the plan's constants "
                f"{constants_nbytes(header.plan)}"
            )
        return
    try:
        wanted_canonical = canonical_directory(header.plan.weights)
    except PlanError as error:
        raise CorruptFileError(f"the plan's weight directory is wrong: {error}") from error
    if [msgspec.structs.replace(entry, sha256=()) for entry in header.stored] != list(wanted_canonical):
        raise CorruptFileError("the file's canonical weight directory does not follow from the plan's")


def _check_digests(data: memoryview, members: dict[str, Member], header: Header) -> None:
    listed: dict[str, str] = {}
    entries: list[tuple[str, str]] = [(item.file, item.sha256) for item in header.native]
    entries += [(item.file, item.sha256) for item in header.texts]
    entries += [(item.file, item.sha256) for item in header.attachments]
    for name, digest in entries:
        if name in listed:
            raise CorruptFileError(f"program.json lists '{name}' twice")
        listed[name] = digest
    for name, digest in listed.items():
        if _sha256(_member(data, members, name)) != digest:
            raise CorruptFileError(f"'{name}' is damaged: its digest is wrong")
    if unlisted := set(members) - set(listed) - {MARK, "program.json", "weights.safetensors"}:
        raise CorruptFileError(f"program.json does not list {', '.join(sorted(unlisted))}")


def _check_weights(header: Header, weights: Bytes) -> None:
    with Progress("checking weights", sum(entry.nbytes for entry in header.stored)) as progress:
        for entry in header.stored:
            found = chunk_digests(weights[entry.offset : entry.offset + entry.nbytes])
            if found != entry.sha256:
                pairs = enumerate(zip(found, entry.sha256, strict=False))
                where = next((i for i, pair in pairs if pair[0] != pair[1]), 0)
                raise CorruptFileError(f"the weight '{entry.name}' is damaged (chunk {where} of {len(found)})")
            progress.step(entry.nbytes)


class _Texts(Mapping[str, str]):
    """A file's texts by name; each is unpacked when it is read. Their digests were checked before."""

    def __init__(self, data: memoryview, members: dict[str, Member], header: Header) -> None:
        self._raw = {item.file.removesuffix(PACKED): _member(data, members, item.file) for item in header.texts}
        self._packed = {
            item.file.removesuffix(PACKED): item.nbytes for item in header.texts if item.file.endswith(PACKED)
        }
        if len(self._raw) < len(header.texts):
            raise CorruptFileError("program.json lists a text both plain and compressed")

    def __getitem__(self, name: str) -> str:
        raw = self._raw[name]
        data = _gunzip(raw, self._packed[name], name) if name in self._packed else bytes(raw)
        return data.decode("utf-8", "replace")

    def __iter__(self) -> Iterator[str]:
        return iter(self._raw)

    def __len__(self) -> int:
        return len(self._raw)


def check_attachment(name: str, data: bytes) -> bytes:
    """The bytes. ArgumentError for a name that no member may have, or for more than MAX_ATTACHMENT bytes."""
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,100}", name):
        raise ArgumentError(f"{name!r} cannot name an attachment: use up to 100 letters, digits, '.', '_' and '-'")
    if len(data) > MAX_ATTACHMENT:
        raise ArgumentError(f"the attachment '{name}' has {len(data)} bytes, more than the limit of {MAX_ATTACHMENT}")
    return data


def _attachments(data: memoryview, members: dict[str, Member], header: Header) -> dict[str, bytes]:
    """Copies of a file's attachments by name. CorruptFileError for one elsewhere in the file, or above the limit."""
    found = {}
    for item in header.attachments:
        if not item.file.startswith(ATTACHED):
            raise CorruptFileError(f"program.json lists {item.file[:100]!r} as an attachment")
        found[item.file.removeprefix(ATTACHED)] = bytes(_member(data, members, item.file, limit=MAX_ATTACHMENT))
    return found


def _gzip(data: bytes) -> bytes:
    """gzip without a time, so that equal programs give equal files."""
    packer = zlib.compressobj(6, wbits=31)
    return packer.compress(data) + packer.flush()


def _gunzip(raw: memoryview, nbytes: int, name: str) -> bytes:
    """The unpacked text. CorruptFileError unless it has the size in program.json; no more than that is unpacked."""
    if not 0 <= nbytes <= MAX_TEXT:
        raise CorruptFileError(f"'{name}' claims {nbytes} bytes, more than the limit of {MAX_TEXT}")
    unpacker = zlib.decompressobj(wbits=31)
    try:
        data = unpacker.decompress(raw, nbytes + 1)
    except zlib.error as error:
        raise CorruptFileError(f"'{name}' is not compressed as gzip does it: {error}") from error
    if len(data) != nbytes or not unpacker.eof:
        raise CorruptFileError(f"'{name}' is compressed, and does not have the {nbytes} bytes that program.json states")
    return data


# --- native builds ---------------------------------------------------------------------------------------------------


def _builds(data: memoryview, members: dict[str, Member], header: Header) -> list[Build]:
    """The file's native builds in memory, with their own descriptions. CorruptFileError if program.json disagrees."""
    builds = []
    for item in header.native:
        code = bytes(_member(data, members, item.file))  # the bytes that run are those whose digest is compared here
        if _sha256(code) != item.sha256:
            raise CorruptFileError(f"'{item.file}' is damaged: its digest is wrong")
        builds.append(unpack_build(item.file, item.sha256, memoryview(code)))
    for item, build in zip(header.native, builds, strict=True):
        said, own = (item.isa, item.emitter_version, item.compiler), build.note
        if said != (own.isa, own.emitter_version, own.compiler) or own.kind != header.target.kind:
            raise CorruptFileError(f"'{item.file}' is for {own.kind} {own.isa}, program.json says otherwise")
    return builds


class _PlanText(msgspec.Struct):
    """The plan's own text inside program.json; builds name its digest."""

    plan: msgspec.Raw


def _plan_text(program: bytes) -> bytes:
    return bytes(msgspec.json.decode(program, type=_PlanText).plan)


def offers(path: str | Path, device: str | None = None, devices: Sequence[str] | None = None) -> str:
    """Advice for a machine without a compiler, as the end of an error message."""
    data = MappedFile(Path(path)).data
    members = read_members(data)
    header, _, _ = _checked_members(data, members)
    builds, where = _builds(data, members, header), choose_devices(header.plan, device, devices)[0]
    if fitting := runnable(builds, where, lambda: emitter_of("cuda")):
        best = fitting[0]
        return (
            f"; or run the build for {best.note.isa} in the file: if you trust its author, load with "
            f"trust_native='sha256:{best.sha256}'"
        )
    have = ", ".join(build.note.isa for build in builds)
    return (
        f"; or save it again with a build for this machine, by qcompile(targets=[…]) where there is a compiler: this "
        f"machine runs {', '.join(registry.runs(where)) or 'none'}, the file has {have or 'none'}"
    )


# --- the user's record of files whose weights were checked -----------------------------------------------------------


def _record(path: Path) -> Path:
    return cache_dir("files") / f"{hashlib.sha256(str(path.resolve()).encode()).hexdigest()}.json"


def _identity(path: Path, status: os.stat_result, program: bytes) -> dict[str, Any]:
    return {
        "path": str(path.resolve()),
        "device": status.st_dev,
        "inode": status.st_ino,
        "size": status.st_size,
        "mtime_ns": status.st_mtime_ns,
        "program": _sha256(program),
    }


def _remember(path: Path, status: os.stat_result, program: bytes) -> None:
    keep(_record(path), json.dumps(_identity(path, status, program)).encode())


def _remembered(path: Path, status: os.stat_result, program: bytes) -> bool:
    return read_record(_record(path)) == _identity(path, status, program)
