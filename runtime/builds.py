"""Native builds inside a program file: the contents of `native/`, and which build of a file a machine may run.

    native/x86-64-v4.so    the library | the thread pool's library | note (JSON) | its length (8 bytes) | "qcbuild1"
    native/sm_90a.cubin    the module  |                             note (JSON) | its length (8 bytes) | "qcbuild1"

The user trusts the sha256 of the whole member, so everything that affects how its code is called is in the member, in
the note: the instruction set it needs, the plan it was made from, the scratch memory it writes to.  program.json only
lists builds.  The thread pool is included because the machine that loads the file may have no compiler.
"""

from __future__ import annotations

import dataclasses
import hashlib
import platform
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from qcompiler.errors import CorruptFileError, TargetMismatchError, TrustError
from qcompiler.kernels.cpu.emit import NATIVE_ABI
from qcompiler.plan.kernel import Strict
from qcompiler.plan.plan import Plan
from qcompiler.runtime.backends import registry
from qcompiler.runtime.cache import cache_dir, keep, private_dir
from qcompiler.runtime.code import Code, read_code
from qcompiler.runtime.files import write_private
from qcompiler.runtime.image import NativeLibrary
from qcompiler.runtime.native import scratch_stride
from qcompiler.runtime.support import support_library

MAGIC = b"qcbuild1"

Trust = bool | str | Collection[str] | Mapping[str, str]
"""`True`, ``"sha256:<digest>"``, several such digests, or the result of `save`: digests by instruction set."""


class NativeNote(Strict, frozen=True):
    """A build's description of itself. `plan` is the sha256 of the plan's text in program.json.

    For a CPU build, `machine` and `system` are `platform.machine()` and `platform.system()`, `abi` is the version of
    kernels/cpu/abi.h it was compiled with, `scratch` the bytes that it needs per thread, and `pool` the bytes of the
    thread pool's library behind it.  For a GPU build all of these are empty or zero.
    """

    kind: Literal["cpu", "cuda"]
    isa: str
    plan: str
    emitter_version: str
    compiler: str = ""
    machine: str = ""
    system: str = ""
    abi: int = 0
    scratch: int = 0
    pool: int = 0


@dataclass(frozen=True)
class Build:
    """A build of a file: its member's name and digest, its note, and its parts."""

    file: str
    sha256: str
    note: NativeNote
    library: memoryview
    pool: memoryview


# --- writing ---------------------------------------------------------------------------------------------------------


def member_name(isa: str) -> str:
    """The name of a build's member: a module for a GPU's architecture, a library for the CPU's instruction set."""
    return f"native/{isa}.{'cubin' if isa.startswith('sm_') else 'so'}"


def pack_build(native: NativeLibrary, plan: Plan, plan_text: bytes) -> bytes:
    """The bytes of a build's member; `plan_text` is the plan as it will be in program.json."""
    library, pool = native.read(), b""
    note = NativeNote(
        kind="cuda", isa=native.isa, plan=_sha256(plan_text), emitter_version=native.emitter_version,
        compiler=native.compiler,
    )  # fmt: skip
    if not native.isa.startswith("sm_"):
        pool = (native.pool or support_library()).data
        scratch = scratch_stride(plan, native.isa) if native.scratch is None else native.scratch
        note = msgspec.structs.replace(
            note, kind="cpu", machine=platform.machine(), system=platform.system(), abi=NATIVE_ABI, scratch=scratch,
            pool=len(pool),
        )  # fmt: skip
    text = msgspec.json.encode(note, order="deterministic")
    return b"".join((library, pool, text, len(text).to_bytes(8, "little"), MAGIC))


# --- reading ---------------------------------------------------------------------------------------------------------


def unpack_build(file: str, sha256: str, data: memoryview) -> Build:
    """A member's parts. CorruptFileError if it is not a build, or its note claims more than it holds."""
    end = len(data) - len(MAGIC) - 8
    if end < 0 or data[end + 8 :] != MAGIC:
        raise CorruptFileError(f"'{file}' does not end like a native build")
    start = end - int.from_bytes(data[end : end + 8], "little")
    if start < 0:
        raise CorruptFileError(f"the note of '{file}' is longer than the build")
    try:
        note = msgspec.json.decode(data[start:end], type=NativeNote, strict=True)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise CorruptFileError(f"the note of '{file}' does not follow its schema: {error}") from error
    if not 0 <= note.pool <= start or file != member_name(note.isa):
        raise CorruptFileError(f"the note of '{file}' does not fit it ({note.isa[:40]!r}, {note.pool} bytes of pool)")
    code = start - note.pool
    return Build(file, sha256, note, data[:code], data[code:start])


# --- choosing --------------------------------------------------------------------------------------------------------


def trusted_build(
    builds: Sequence[Build], trust: Trust, plan_text: Callable[[], bytes], device: str, emitter: Callable[[], str]
) -> NativeLibrary:
    """The best build of a file that the caller trusts and `device` runs, written to the user's cache.

    `plan_text` is the plan's text in program.json, `emitter` the version of this installation's emitter for GPUs.
    TrustError if none is trusted; TargetMismatchError, with the reason for each, if none of the trusted ones runs here.
    """
    trusted = _trusted(builds, trust)
    able = registry.runs(device)
    reasons = {build.file: _refusal(build, device, able, emitter) for build in trusted}
    fitting = [build for build in trusted if reasons[build.file] is None]
    if not fitting:
        why = "; ".join(f"'{file}' {reason}" for file, reason in reasons.items())
        raise TargetMismatchError(
            f"no trusted build of the file runs on {_machine(device)}: {why}. Load without trust_native to compile the "
            "kernels here"
        )
    best = max(fitting, key=lambda build: able.index(build.note.isa))
    if best.note.plan != _sha256(plan_text()):
        raise TrustError(f"'{best.file}' was built from another plan than the one in the file; do not run it")
    library = _keep(best.library, Path(best.file).suffix)
    native = NativeLibrary(best.note.isa, library.path, best.note.emitter_version, best.note.compiler, code=library)
    if best.note.kind == "cuda":
        return native
    return dataclasses.replace(native, scratch=best.note.scratch, pool=_keep(best.pool, ".so"))


def runnable(builds: Sequence[Build], device: str, emitter: Callable[[], str]) -> list[Build]:
    """The builds that `device` runs, best first. Nothing is loaded."""
    able = registry.runs(device)
    fitting = [build for build in builds if _refusal(build, device, able, emitter) is None]
    return sorted(fitting, key=lambda build: able.index(build.note.isa), reverse=True)


def _trusted(builds: Sequence[Build], trust: Trust) -> list[Build]:
    if trust is True:
        wanted = None
    else:
        texts = _digests(trust)
        wanted = [
            text.removeprefix("sha256:") for text in texts if isinstance(text, str) and text.startswith("sha256:")
        ]
        if not texts or len(wanted) != len(texts):
            raise TrustError(
                f"trust_native={trust!r} is neither True, False, 'sha256:<digest of a build>' nor several of these"
            )
    if not builds:
        raise TrustError("the file holds no native build to trust; load it without trust_native")
    found = [build for build in builds if wanted is None or build.sha256 in wanted]
    if not found:
        have = ", ".join(f"{build.file} sha256:{build.sha256}" for build in builds)
        raise TrustError(f"the file has no native build with {trust}; it has: {have}")
    return found


def _digests(trust: Trust) -> list[str]:
    if isinstance(trust, bool):
        return []
    if isinstance(trust, str):
        return [trust]
    return list(trust.values() if isinstance(trust, Mapping) else trust)


def _refusal(build: Build, device: str, able: Sequence[str], emitter: Callable[[], str]) -> str | None:
    """Why `device` cannot run a build; None if it can."""
    note = build.note
    if note.kind == "cpu":
        here = (platform.machine(), platform.system())
        if (note.machine, note.system) != here:
            return f"is for {note.system} on {note.machine}, this is {here[1]} on {here[0]}"
    if note.isa not in able:
        return f"needs {note.isa}, {_machine(device)} runs {', '.join(able) or 'none but its own'}"
    if note.kind == "cpu" and note.abi != NATIVE_ABI:
        return f"was compiled for version {note.abi} of the kernels' interface, this qcompiler has {NATIVE_ABI}"
    if note.kind == "cuda" and note.emitter_version != (own := emitter()):
        # Launch geometry is derived from the emitter: another version of it may have another grid.
        return f"was made by the emitter {note.emitter_version}, this one is {own}"
    return None


def _machine(device: str) -> str:
    return "this machine" if device == "cpu" else device


def _keep(data: memoryview, suffix: str) -> Code:
    """The code as a file of the user's cache, named by its digest, which is checked each time."""
    digest = _sha256(data)
    path = cache_dir("trusted") / f"{digest}{suffix}"
    if (known := read_code(path, digest)) is not None:
        return known
    if not keep(path, bytes(data)):
        path = private_dir("trusted") / path.name
        write_private(path, bytes(data))
    return Code(path, bytes(data))


def _sha256(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()
