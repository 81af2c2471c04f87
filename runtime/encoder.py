"""Encoding on the CPU: compiled code if a format has it and there is a compiler, else NumPy. The bytes are the same.

`Format.encode` is the definition and needs only NumPy; long work calls `encode` of this module.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import platform
import threading
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from qcompiler.errors import CompileFailedError, CompilerMissingError
from qcompiler.formats.base import Bytes, Encoding, Format, PackedTensor, TileEncoder, Weights
from qcompiler.formats.equation import Float32
from qcompiler.formats.made import MadeMatrix
from qcompiler.kernels.encode.source import CompiledEncoder, compiled_encoder
from qcompiler.runtime import sanitize
from qcompiler.runtime.cache import cache_dir
from qcompiler.runtime.code import Code, load, remember
from qcompiler.runtime.compiler import compile_code, cpu_flags, recorded
from qcompiler.runtime.isa import host_isa
from qcompiler.runtime.progress import note_once
from qcompiler.runtime.threads import resolve_num_threads

WORTH_COMPILING = 1 << 24
"""After this many elements of a format its encoder is compiled, which takes about as long as NumPy for as many. Of a
format with a `CompiledEncoder.effort`, as many times fewer are enough."""

SECTIONS = 4


class _Tile(ctypes.Structure):
    """`qe_tile` of kernels/encode/tile.h."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("start", ctypes.c_int64),
        ("count", ctypes.c_int64),
        ("cols", ctypes.c_int64),
        ("out", ctypes.c_void_p * SECTIONS),
        ("importance", ctypes.c_void_p),
        ("statistics", ctypes.c_void_p),
    )


def encode(
    fmt: Format,
    weights: Weights,
    *,
    out: Bytes | None = None,
    threads: int | None = None,
    importance: npt.ArrayLike | None = None,
    step: Callable[[int], object] | None = None,
) -> PackedTensor:
    """`fmt.encode`, with compiled tiles if that pays; by default on all threads (`QC_NUM_THREADS`).

    The bytes and the errors are those of `fmt.encode`.  Without a compiler NumPy does the work; stderr says so once.
    `step` is called with the number of elements of each tile, from the thread that encodes it.
    """
    weights = np.asarray(weights)
    tiles = tile_encoder(fmt, weights.size)
    return fmt.encode(
        weights,
        out=out,
        threads=resolve_num_threads(threads),
        importance=importance,
        tiles=tiles if step is None else _counted(tiles, step),
    )


def encode_made(fmt: Format, weights: MadeMatrix, *, out: Bytes | None = None) -> PackedTensor:
    """`fmt.encode_made`, with compiled tiles."""
    return fmt.encode_made(weights, out=out, tiles=tile_encoder(fmt, weights.size))


def _counted(tiles: TileEncoder | None, step: Callable[[int], object]) -> TileEncoder:
    def encode_tile(job: Encoding, start: int, tile: Float32) -> bool:
        done = tiles is not None and tiles(job, start, tile)
        step(tile.size)
        return done

    return encode_tile


# --- the choice of an implementation ---------------------------------------------------------------------------------

_elements: dict[Format, int] = {}
_lock = threading.Lock()


def tile_encoder(fmt: Format, elements: int) -> TileEncoder | None:
    """The compiled tiles of a format that has `elements` more to encode; None if NumPy is to do it.

    Compiling waits until a process has seen elements worth it (`WORTH_COMPILING`); code from the cache is used at once.
    """
    with _lock:
        seen = _elements[fmt] = _elements.get(fmt, 0) + elements
    return _tiles(fmt, host_isa(), seen)


@functools.cache
def _encoder(fmt: Format) -> CompiledEncoder | None:
    return compiled_encoder(fmt)


_loaded: dict[tuple[Format, str], TileEncoder | None] = {}


def _tiles(fmt: Format, isa: str, seen: int) -> TileEncoder | None:
    with _lock:
        if (fmt, isa) in _loaded:
            return _loaded[fmt, isa]
        encoder = _encoder(fmt)
        if encoder is None:
            return None
        try:
            code = _code(encoder, isa, seen * encoder.effort >= WORTH_COMPILING)
        except (CompilerMissingError, CompileFailedError) as error:
            note_once(f"weights are encoded by NumPy, which is slower: {str(error).splitlines()[0]}")
            _loaded[fmt, isa] = None
            return None
        if code is None:
            return None
        made = _loaded[fmt, isa] = _load(encoder, code)
        return made


def _code(encoder: CompiledEncoder, isa: str, worth_compiling: bool) -> Code | None:
    """The compiled source, from the cache if it is there; None if it is not, and not worth compiling."""
    record = cache_dir("plans") / f"encoder-{_key(encoder, isa)}.json"
    code = recorded(record, "encoder")
    if code is None and worth_compiling:
        code = compile_code(encoder.source, isa, name="encoder", extra_flags=sanitize.flags())
        remember(record, code)
    return code


def _key(encoder: CompiledEncoder, isa: str) -> str:
    return hashlib.sha256(json.dumps([encoder.source, isa, platform.machine(), cpu_flags(isa)]).encode()).hexdigest()


def _load(encoder: CompiledEncoder, code: Code) -> TileEncoder:
    function: Callable[..., int] = load(code).qc_encode  # releases the interpreter lock
    function.restype, function.argtypes = ctypes.c_int32, (ctypes.POINTER(_Tile),)  # type: ignore[attr-defined]

    def encode_tile(job: Encoding, start: int, tile: Float32) -> bool:
        if not encoder.takes(job):
            return False
        sections = encoder.sections(job)
        out = (ctypes.c_void_p * SECTIONS)(*(section.ctypes.data for section in sections))
        statistics = encoder.statistics(job)
        done = function(
            _Tile(
                tile.ctypes.data,
                start,
                tile.size,
                job.packed.cols,
                out,
                None if job.importance is None else job.importance.ctypes.data,
                None if statistics is None else statistics.ctypes.data,
            )
        )
        return done == 0

    return encode_tile


# --- paths through a trellis ------------------------------------------------------------------------------------------

Windows = npt.NDArray[np.uint16]
PathSolver = Callable[[Float32, Float32, Float32], Windows]
"""Compiled `paths` of qcompiler/calibrate/trellis_gptq.py: (wanted, weights, share) to windows, with the same bits."""


@functools.cache
def path_solver(fmt: Format) -> PathSolver | None:
    """The compiled search of a trellis that makes up for errors; None without a compiler, which stderr says once."""
    encoder, isa = _encoder(fmt), host_isa()
    assert encoder is not None
    try:
        with _lock:
            code = _code(encoder, isa, worth_compiling=True)
    except (CompilerMissingError, CompileFailedError) as error:
        note_once(f"codes of {fmt} are chosen by NumPy, which is slower: {str(error).splitlines()[0]}")
        return None
    assert code is not None
    function: Callable[..., None] = load(code).qc_paths  # releases the interpreter lock
    function.restype = None  # type: ignore[attr-defined]
    function.argtypes = (ctypes.c_int64, *[ctypes.c_void_p] * 4)  # type: ignore[attr-defined]

    def paths(wanted: Float32, weights: Float32, share: Float32) -> Windows:
        given = [np.ascontiguousarray(each, np.float32) for each in (wanted, weights, share)]
        found = np.empty(wanted.shape, np.uint16)
        function(len(wanted), *(each.ctypes.data for each in given), found.ctypes.data)
        return found

    return paths
