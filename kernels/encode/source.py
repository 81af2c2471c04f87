"""The C++ source of a format's encoder: the shared headers, and one function that contains the format's numbers.

The text contains what NumPy's encoder (`Format._encode_tile`) reads from the declaration: thresholds, block sizes, and
the bit positions of entries. A format without an entry in `_PRINTERS` has no compiled encoder.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from importlib import resources

import numpy as np
import numpy.typing as npt

from qcompiler.formats.base import Encoding, Format
from qcompiler.formats.codebook import Vectors
from qcompiler.formats.declaration import Field
from qcompiler.formats.fp8 import _FP8
from qcompiler.formats.ggml import LARGEST_IMPORTANCE, GgmlFormat
from qcompiler.formats.ggml_32 import Q8_0, MXFP4Ggml, _Affine32, _Searched32, _Symmetric32
from qcompiler.formats.ggml_search import Trials
from qcompiler.formats.i_quants import _IQuant
from qcompiler.formats.integers import IntegerFormat
from qcompiler.formats.iq4 import VALUES, _Iq4
from qcompiler.formats.k_quants import Q3_K, Q6_K, _Affine
from qcompiler.formats.llm_int8 import LARGEST_ABSMAX, SMALLEST_ABSMAX, LLMInt8
from qcompiler.formats.minifloat import E2M1, E4M3, MiniFloat
from qcompiler.formats.mx import _MX
from qcompiler.formats.nf4 import TableFormat
from qcompiler.formats.nvfp4 import NVFP4, SMALLEST_SCALE, ZERO_SCALE
from qcompiler.formats.packing import Piece, Pieces
from qcompiler.formats.ternary import TQ2_0
from qcompiler.formats.tq import TQ, UNIT
from qcompiler.formats.vector_search import ROUNDS, TRIALS

Array = npt.NDArray[np.generic]


@dataclass(frozen=True)
class CompiledEncoder:
    """How to encode the tiles of one format.

    `source` exports ``int32_t qc_encode(const qe_tile*)``. For a matrix that is being encoded, `sections` gives the
    arrays that `qe_tile.out` points to, and `statistics` (fp32) gives what the format computed from the whole matrix.
    If `takes` returns false, NumPy encodes instead.  Where NumPy is slow, `effort` is how many times fewer elements
    than for other formats are worth compiling.
    """

    source: str
    sections: Callable[[Encoding], list[Array]]
    statistics: Callable[[Encoding], Array | None] = lambda job: None
    takes: Callable[[Encoding], bool] = lambda job: True
    effort: int = 1


def compiled_encoder(fmt: Format) -> CompiledEncoder | None:
    """The encoder of a format; None if only NumPy's exists."""
    if isinstance(fmt, _MX | NVFP4) and fmt.takes_importance:
        return None  # a search for scales
    for base, printer in _PRINTERS:
        if isinstance(fmt, base):
            return printer(fmt)
    return None


# --- text ------------------------------------------------------------------------------------------------------------


def header(name: str) -> str:
    """A header of kernels/cpu or of this folder, without `#pragma once` and without includes of other such headers."""
    package = "qcompiler.kernels.cpu" if name == "vec.h" else "qcompiler.kernels.encode"
    text = resources.files(package).joinpath(name).read_text(encoding="utf-8")
    return re.sub(r'^#(pragma once|include ".*")[^\n]*\n', "", text, flags=re.M)


def translation_unit(headers: Iterable[str], tables: Iterable[str], call: str) -> str:
    """The source of a library whose `qc_encode` returns `call` for a tile `t`."""
    body = f"    const qe_tile& t = *tile;\n    return {call};"
    entry = f'extern "C" int32_t qc_encode(const qe_tile* tile) {{\n{body}\n}}\n'
    parts = [header(name) for name in ("vec.h", "tile.h", *headers)]
    return "\n".join((*parts, *tables, entry))


def float_text(value: float | np.float32) -> str:
    """An exact fp32 literal."""
    return f"{float(np.float32(value)).hex()}f"


def array_text(ctype: str, name: str, values: Iterable[str], size: str = "") -> str:
    return f"alignas(64) static const {ctype} {name}[{size}] = {{{', '.join(values)}}};\n"


def _importance_is_small(job: Encoding) -> bool:
    return job.importance is None or bool(job.importance.max() <= LARGEST_IMPORTANCE)


def _fields(*names: str) -> Callable[[Encoding], list[Array]]:
    return lambda job: [job.packed.section(name) for name in names]


# --- formats ---------------------------------------------------------------------------------------------------------


def _table_format(fmt: TableFormat) -> CompiledEncoder:
    tables = [array_text("float", "THRESHOLDS", map(float_text, fmt.thresholds), "16")]
    by_rank = "nullptr"
    if fmt.codes_by_rank is not None:
        tables.append(array_text("uint8_t", "BY_RANK", map(str, fmt.codes_by_rank)))
        by_rank = "BY_RANK"
    call = f"qe_nf4<{fmt.setting('block')}>(t, THRESHOLDS, {by_rank}, {fmt.zero_code})"
    return CompiledEncoder(
        translation_unit(("table.h", "nf4.h"), tables, call),
        lambda job: [job.packed.section("codes"), job.notes["absmax"]],
    )


def _integers(fmt: IntegerFormat) -> CompiledEncoder:
    group, symmetric = fmt.setting("group"), bool(fmt.setting("symmetric"))
    scale = {"fp16": "qe_f16", "bf16": "qe_bf16", "fp32": "qe_f32"}[str(fmt.setting("scale"))]
    size = 0 if group == "row" else group
    call = f"qe_integers<{fmt.bits}, {size}, {str(symmetric).lower()}, {scale}>(t)"
    names = ("codes", "scales") if symmetric else ("codes", "scales", "zeros")
    return CompiledEncoder(translation_unit(("integers.h",), (), call), _fields(*names))


def _llm_int8(fmt: LLMInt8) -> CompiledEncoder:
    call = f"qe_llm_int8(t, {float_text(LARGEST_ABSMAX)}, {float_text(SMALLEST_ABSMAX)})"
    return CompiledEncoder(translation_unit(("rows8.h",), (), call), _fields("codes", "absmax"))


def _mini(element: MiniFloat) -> str:
    exponent = {E2M1.name: 2, E4M3.name: 4}.get(element.name, 5)
    return f"qe_mini<{exponent}, {element.mantissa}>"


def _fp8(fmt: _FP8) -> CompiledEncoder:
    per, largest = fmt.setting("per"), float_text(fmt.element.largest)
    limit = "" if per == "tensor" else f", {float_text(fmt.element.largest_scale)}"
    call = f"qe_fp8_{per}<{_mini(fmt.element)}>(t, {largest}{limit})"
    return CompiledEncoder(translation_unit(("minifloat.h",), (), call), _fields("codes", "scales"))


def _mx(fmt: _MX) -> CompiledEncoder:
    element, rule = fmt.element, f"QE_{str(fmt.setting('exponent')).upper()}"
    call = f"qe_mx<{_mini(element)}, {element.mantissa}, {rule}>(t, {float_text(element.largest)}, {element.exponent})"
    return CompiledEncoder(translation_unit(("minifloat.h",), (), call), _fields("codes", "scales"))


def _nvfp4(fmt: NVFP4) -> CompiledEncoder:
    zero_scale = int(np.array(ZERO_SCALE).astype(E4M3.dtype).view(np.uint8))
    call = f"qe_nvfp4<{str(bool(fmt.setting('divisor'))).lower()}>(t, {float_text(SMALLEST_SCALE)}, {zero_scale})"
    return CompiledEncoder(translation_unit(("minifloat.h",), (), call), _fields("codes", "scales", "global_scale"))


def _trellis(fmt: TQ) -> CompiledEncoder:
    members = (
        f"static constexpr int BITS = {fmt.bits}, CODES = {fmt.trellis.codes};",
        f"static constexpr uint32_t MULTIPLIER = 0x{fmt.trellis.multiplier:08x};",
        f"static constexpr float FACTOR = {float_text(fmt.factor)}, UNIT = {float_text(UNIT)};",
    )
    struct = "\n    ".join(("struct qe_format {", *members)) + "\n};\n"
    paths = (
        'extern "C" void qc_paths(int64_t rows, const float* y, const float* w, const float* share, uint16_t* windows) '
        "{\n    qe_paths<qe_format>(rows, y, w, (const float (*)[64])share, windows);\n}\n"
    )
    source = translation_unit(("trellis.h",), (struct, paths), "qe_tq<qe_format>(t)")
    # NumPy takes a second or two for 2^13 elements.
    return CompiledEncoder(source, _fields("codes", "scales"), takes=_importance_is_small, effort=4096)


# --- formats of GGUF files -------------------------------------------------------------------------------------------


def _pieces(f: Field, entries: int) -> list[list[Piece]]:
    """For each entry of a record's field, the positions of its bits, lowest first. Bytes count from the record's
    start."""
    first = f.offset or 0
    if isinstance(f.packing, Pieces):
        return [[(first + byte, bit, width) for byte, bit, width in entry] for entry in f.packing.pieces]
    if f.bits >= 8:
        size = f.bits // 8
        return [[(first + e * size + i, 0, 8) for i in range(size)] for e in range(entries)]
    if f.packing is None and f.order == "low_first":
        return [[(first + e * f.bits // 8, e * f.bits % 8, f.bits)] for e in range(entries)]
    raise ValueError(f"field {f.name!r} is not made of pieces of bits")


def _field_text(f: Field, entries: int) -> str:
    """The field as `qe_piece`s of 32-bit words. Entries with fewer pieces than others get empty ones."""
    rows = []
    for entry in _pieces(f, entries):
        row, place = [], 0
        for byte, bit, width in entry:
            row.append((byte // 4, (1 << width) - 1, byte % 4 * 8 + bit, place))
            place += width
        rows.append(row)
    longest = max(map(len, rows))
    texts = []
    for row in rows:
        full = row + [(row[0][0], 0, 0, 0)] * (longest - len(row))
        texts.append("{" + ", ".join(f"{{{word}, {mask}, {bit}, {place}}}" for word, mask, bit, place in full) + "}")
    return f"static constexpr qe_piece {f.name}[{len(rows)}][{longest}] = {{{', '.join(texts)}}};"


def _parts(f: Field, entries: int) -> list[tuple[Field, int]]:
    """The field, or what is stored of codes that come from vectors: `index` and `flags`."""
    if not isinstance(f.packing, Vectors):
        return [(f, entries)]
    index, (_, flags) = f.packing.index, f.packing.stored_flags
    found = [(replace(f, name="index", packing=index), index.entries)]
    return [*found, (replace(f, name="flags", packing=flags), flags.entries)] if flags.entries else found


def _trials_text(name: str, trials: Trials) -> str:
    values = f"{float_text(trials.first)}, {float_text(trials.step)}, {trials.count}, {str(trials.absolute).lower()}"
    return f"static constexpr qe_trials {name} = {{{values}}};"


def _ggml(headers: tuple[str, ...], template: str, fmt: GgmlFormat, *members: str) -> CompiledEncoder:
    """An encoder of whole records. It calls the function `template` with the format as its first argument."""
    d = fmt.declaration
    lines = [
        f"static constexpr int BLOCK = {fmt.block}, BYTES = {d.record_bytes};",
        f"static constexpr float FAR = {float_text(min(fmt.far, float(np.finfo(np.float32).max)))};",
        _trials_text("WEIGHTED_TRIALS", Trials(-0.9, 0.05, 36)),
        *(_field_text(part, count) for f in d.fields for part, count in _parts(f, d.entries_per_block(f, fmt.block))),
        *members,
    ]
    # Without an anonymous namespace, the loader would give all encoders in a process the tables of the first.
    struct = "namespace {\nstruct qe_format {\n" + "".join(f"    {line}\n" for line in lines) + "};\n}  // namespace\n"
    name, _, more = template.partition("<")
    call = f"{name}<{', '.join(('qe_format', *filter(None, [more.rstrip('>')])))}>(t)"
    return CompiledEncoder(
        translation_unit(("blocks.h", "search.h", *headers), [struct], call),
        _fields("blocks"),
        lambda job: job.notes.get("mean_square"),
        _importance_is_small,
    )


def _ggml_32(fmt: _Searched32) -> CompiledEncoder:
    kind = "symmetric" if isinstance(fmt, _Symmetric32) else "affine"
    return _ggml(("ggml_32.h",), f"qe_{kind}32<{fmt.bits}>", fmt)


def _k_affine(fmt: _Affine) -> CompiledEncoder:
    sizes = f"static constexpr int SIZE = {fmt.size}, BITS = {fmt.bits}, LEVEL = {fmt.level};"
    return _ggml(("ggml_32.h", "k_quants.h"), "qe_affine256", fmt, sizes, _trials_text("TRIALS", fmt.trials))


def _iq4(fmt: _Iq4) -> CompiledEncoder:
    thresholds = ", ".join(f"{low + high}" for low, high in itertools.pairwise(VALUES))
    values = ", ".join(map(str, VALUES))
    table = f"static constexpr qe_table TABLE = {{{{{thresholds}}}, {{{values}}}}};"
    return _ggml(("ggml_32.h", "k_quants.h", "table.h", "iq4.h"), "qe_iq4", fmt, table)


def _i_quant(fmt: _IQuant) -> CompiledEncoder:
    sought, book = fmt.sought(), fmt.book
    count, points = len(sought.variants[0]), sought.variants[0].shape[1]
    members = [
        f"static constexpr int SIZE = {points}, SUB = {sought.sub}, LEVELS = {len(sought.steps)}, POINTS = {count};",
        f"static constexpr int VARIANTS = {len(sought.variants)}, IN_BOOK = {book.count};",
        f"static constexpr qe_signs SIGNS = QE_{fmt.signs.upper()};",
        f"static constexpr float LARGEST = {float_text(sought.largest)};",
        f"static constexpr float STEPS[] = {{{', '.join(map(float_text, sought.steps))}}};",
        f"static constexpr float BETWEEN[] = {{{', '.join(map(float_text, sought.between))}}};",
        f"static constexpr float TRIALS[] = {{{', '.join(map(float_text, TRIALS))}}};",
        f"static constexpr int ROUNDS = {ROUNDS};",
    ]
    for half, name in enumerate(("LOW", "HIGH")):
        of_variants = [variant[half] for variant in sought.halves]
        rows = ", ".join(f"{{{', '.join(_row_text(row) for row in each.rows)}}}" for each in of_variants)
        sizes = f"[{len(of_variants)}][{len(of_variants[0].rows)}][{points // 2}]"
        members.append(f"static constexpr float {name}{sizes} = {{{rows}}};")
        which = ", ".join(map(str, of_variants[0].which))
        members.append(f"static constexpr uint8_t {name}_OF[{count}] = {{{which}}};")
    # NumPy compares each vector with every point: it takes one to nine seconds for 2^18 elements.
    return replace(_ggml(("ggml_32.h", "i_quants.h"), "qe_i_quant", fmt, *members), effort=64)


def _row_text(row: npt.NDArray[np.float32]) -> str:
    return f"{{{', '.join(map(float_text, row))}}}"


_PRINTERS: tuple[tuple[type[Format], Callable[..., CompiledEncoder]], ...] = (
    (TableFormat, _table_format),
    (IntegerFormat, _integers),
    (LLMInt8, _llm_int8),
    (_FP8, _fp8),
    (_MX, _mx),
    (NVFP4, _nvfp4),
    (_Symmetric32, _ggml_32),
    (_Affine32, _ggml_32),
    (Q8_0, lambda fmt: _ggml(("ggml_32.h",), "qe_rounded_away<127, 0>", fmt)),
    (TQ2_0, lambda fmt: _ggml(("ggml_32.h",), "qe_rounded_away<1, 1>", fmt)),
    (MXFP4Ggml, lambda fmt: _ggml(("ggml_32.h",), "qe_mxfp4_ggml", fmt)),
    (_Affine, _k_affine),
    (Q3_K, lambda fmt: _ggml(("ggml_32.h", "k_quants.h"), "qe_q3_k", fmt)),
    (Q6_K, lambda fmt: _ggml(("ggml_32.h", "k_quants.h"), "qe_q6_k", fmt)),
    (_Iq4, _iq4),
    (_IQuant, _i_quant),
    (TQ, _trellis),
)
