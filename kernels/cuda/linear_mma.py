"""Linears on tensor cores: `linear` kernels for 9 rows of x and more, over linear_mma.cuh.

A kernel becomes three pieces of CUDA C++: a struct that describes the weight (sections, block size, decode equation,
all from the format's declaration), a function that finishes an element (bias, epilogue, one rounding), and the kernel,
which instantiates `qm_linear` with the tile chosen here.

    "9-64"    16, 32 or 64 tokens; the columns of a block are split over its warps
    "large"   128 tokens by 128 rows of w, no split; smaller tiles where the output has few of those
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from qcompiler import formats
from qcompiler.errors import KernelSelectionError
from qcompiler.formats import Format
from qcompiler.formats.base import Section
from qcompiler.kernels import layouts
from qcompiler.kernels.cuda.geometry import SHARED_LIMIT, CudaKernel, Geometry
from qcompiler.kernels.cuda.linear import LAYOUT, code_values, finish_of, linear_body, split_equation
from qcompiler.kernels.layouts.panels import LANES as PANEL
from qcompiler.kernels.layouts.panels import straddles
from qcompiler.kernels.text import STORAGE_TYPES, c_dim, header_comment, identifier, indent
from qcompiler.plan.dims import Dim, dim
from qcompiler.plan.kernel import KernelSpec, LinearKernel

CHUNK, PAD, SUM_PAD, PASS = 64, 8, 4, 32
"""linear_mma.cuh's QM_CHUNK, QM_PAD, QM_SUM_PAD, QM_PASS; emitted kernels assert the shared bytes computed here."""


# --- tiles ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tile:
    """Template arguments of `qm_linear`: what a block computes and how its warps share it.

    tokens x (16 * panels * warps_n) outputs; `warps_k` warps split the columns; a ring of `stages` tiles of x; `depth`
    chunks of weights ahead in registers.
    """

    tokens: int
    warps_n: int
    warps_k: int
    panels: int
    stages: int
    depth: int

    @property
    def threads(self) -> int:
        return 32 * self.warps_n * self.warps_k

    @property
    def rows(self) -> int:
        """Rows of w per block."""
        return PANEL * self.panels * self.warps_n

    @property
    def shared(self) -> int:
        """Bytes of shared memory, as qm_shared."""
        ring = self.stages * self.tokens * (CHUNK * self.warps_k + PAD) * 2
        sums = self.warps_k * min(self.tokens, PASS) * (self.rows + SUM_PAD) * 4
        return max(ring, sums)

    def resident(self, limit: int, *, straddles: bool) -> int:
        """Blocks that a multiprocessor should hold at once, which bounds registers; `limit`: its shared memory.

        Two where the rings fit and 65536 registers suffice: not for 256 threads with more than 16 tokens, nor where
        blocks straddle rows.  One is said as well: left alone, ptxas aims at more blocks than there is shared memory
        for, and spills on sm_75 to get there.
        """
        small = self.threads <= 128 or (self.tokens <= 16 and not straddles)
        return 2 if small and 2 * self.shared <= limit else 1

    @property
    def arguments(self) -> str:
        """Tokens, warps along n and k, panels, stages: the template arguments that decide the shared bytes."""
        return f"{self.tokens}, {self.warps_n}, {self.warps_k}, {self.panels}, {self.stages}"


FEW: dict[int, tuple[Tile, ...]] = {
    16: (Tile(16, 1, 8, 2, 3, 3), Tile(16, 1, 4, 2, 3, 3)),
    32: (Tile(32, 1, 8, 2, 3, 3), Tile(32, 1, 4, 2, 3, 3)),
    64: (Tile(64, 1, 8, 2, 2, 3), Tile(64, 2, 4, 1, 3, 3), Tile(64, 2, 2, 1, 3, 3)),
}
"""Tiles of class "9-64" by tokens; the first whose ring fits the architecture's shared memory is taken.

Bandwidth is what counts: eight warps with 16 * panels * depth = 64 to 128 bytes per lane under way keep 16 to 32 KiB in
flight per block (an H200 needs about 25 KiB per multiprocessor: 4.8 TB/s times 700 ns over 132 of them).  32 rows of w
per block make 128 blocks of N = 4096.  Up to 32 tokens a warp reads the columns of its x once for two panels; at 64 the
tile of x would not fit, and two warps share the columns instead.
"""

LARGE = Tile(128, 4, 1, 2, 3, 1)
"""Per warp 32 x 128 outputs (128 accumulators): every fragment of x serves two products, every weight is decoded once
per block. 55 KiB of ring let two blocks share a multiprocessor."""

LARGE_SPLIT = Tile(64, 2, 2, 2, 3, 1)
"""Where 128 x 128 tiles are few: 64 x 64 outputs, and the columns split in two."""

BUSY = 96
"""Blocks below which a GPU of 108 to 148 multiprocessors is mostly idle."""


def tile_of(body: LinearKernel, bits: int, limit: int) -> Tile:
    """The tile for a linear whose weight stores `bits` bits, with `limit` bytes of shared memory per block."""
    tile = _tile_of(body, limit)
    return replace(tile, depth=max(1, tile.depth * 4 // bits))  # the depths below are for 4 bits


def _tile_of(body: LinearKernel, limit: int) -> Tile:
    known = body.m if isinstance(body.m, int) else None
    if body.m_class == "large":
        blocks = -(-body.n // LARGE.rows) * -(-(known or 512) // LARGE.tokens)
        return LARGE if blocks >= BUSY or (known is None and body.n >= 32 * LARGE.rows) else LARGE_SPLIT
    tokens = next((t for t in sorted(FEW) if known is not None and known <= t), max(FEW))
    fitting = [tile for tile in FEW[tokens] if tile.shared <= limit]
    return fitting[0]


# --- the weight -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Decoder:
    """What the weight's struct says of codes: flags for linear_mma.cuh, and the members that decode a code."""

    table: bool
    signed: bool
    members: tuple[str, ...]


def decoder_of(fmt: Format) -> Decoder:
    """The declared equation as `row`, `rows_of` and `value`.

    KernelSelectionError for 8-bit codes that are not integers (a table of 256 has no place in a warp's lanes).
    """
    d = fmt.declaration
    bits, values, equation = d.codes.bits, code_values(d), split_equation(d)
    fields = {f.name: "r.zero" if f.kind == "uint" else "r.scale" for f in d.fields if f.covers != 1}
    has_zero = "r.zero" in fields.values()
    state = "scale, zero" if has_zero else "scale"
    members = [
        f"struct row {{ float {state}; }};",
        f"static QC_DEVICE row rows_of(float scale, float zero) {{ return {{{state}}}; }}",
    ]
    rest, signed = equation.rest.to_c({**fields, "code": "code"}), d.codes.kind == "int"
    integers = values.view() if not signed else np.concatenate(np.split(values, 2)[::-1])  # in the order of the values
    first = int(integers[0])
    if not np.array_equal(integers, first + np.arange(values.size, dtype=np.float32)):
        if bits != 4:
            raise KernelSelectionError(f"no tensor-core kernel looks up {bits}-bit codes ('{d.decode.text}')")
        looked_up = rest.replace("(float)(code)", "table[code]")
        lookup = f"QC_DEVICE float value(uint32_t code, const row& r) const {{ return {looked_up}; }}"
        return Decoder(True, False, (*members, lookup, *_table(fmt, values)))
    # A code arrives as the float 128 + code or 2^23 + code (linear_mma.cuh, qm_pair); one exact subtraction undoes both
    # that and the equation's own constant.
    bias = (128 if bits == 4 else 1 << 23) - first
    scale = next(f for f in d.fields if f.kind in ("f16", "f32"))
    forms = {f"code * {scale.name}": "", f"(code - zeros) * {scale.name}": " + zero"}
    if bits == 4 and scale.kind == "f16" and equation.rest.text in forms:
        zero = forms[equation.rest.text]
        return Decoder(
            False,
            signed,
            (
                "struct row { float scale, shift; };",
                "static QC_DEVICE row rows_of(float scale, float zero) {",
                f"    return {{scale, -({bias}.0f{zero}) * scale}};",
                "}",
                "// The equation in one step, and exact: codes and constants have at most 9 bits, an fp16 scale 11.",
                "QC_DEVICE float value(float biased, const row& r) const { return fmaf(biased, r.scale, r.shift); }",
            ),
        )
    value = [
        "QC_DEVICE float value(float biased, const row& r) const {",
        f"    const float code = biased - {bias}.0f;",
        f"    return {rest};",
        "}",
    ]
    return Decoder(False, signed, (*members, *value))


def _table(fmt: Format, values: np.ndarray) -> list[str]:
    """What the 16 codes stand for: a member, and the function that gives each lane its entry."""
    entries = [f"{float(v).hex()}f" for v in values]
    choices = [f"entry == {i} ? {value} :" for i, value in enumerate(entries[:-1])]
    return [
        f"qm_table table;  // {split_equation(fmt.declaration).of_code.text}",
        "static QC_DEVICE float table_entry(int entry) {",
        "    return " + f"\n{' ' * 15}".join([*choices, f"{entries[-1]};"]),
        "}",
    ]


def weight_struct(spec: KernelSpec, fmt: Format | None) -> tuple[str, bool]:
    """The struct that describes the weight to linear_mma.cuh (see the list there), and whether it holds a table."""
    operand = spec.operands[1]
    n, k = (int(d) for d in operand.shape)
    places = {s.name: s for s in layouts.get(LAYOUT).sections(fmt, operand.dtype, n, k)}
    if fmt is None:
        title, facts, decoder = f"plain {operand.dtype}", _plain_facts(places, n, k), None
    else:
        title, decoder = f"{fmt}: {fmt.declaration.decode.text}", decoder_of(fmt)
        facts = _packed_facts(fmt, decoder, places, n, k)
    lines = [
        f"struct qk_{spec.name}_tiles {{  // {title}, in {operand.layout}",
        f"    typedef {STORAGE_TYPES[operand.dtype]} element;",
        *indent(facts),
        *indent(["typedef int row;"] if decoder is None else decoder.members),
        "};\n",
    ]
    return "\n".join(lines), decoder is not None and decoder.table


def _plain_facts(places: dict[str, Section], n: int, k: int) -> list[str]:
    return [
        "typedef uint8_t scale_type;",
        f"static constexpr int ROWS = {n}, COLS = {k}, BITS = 16, BLOCK = {max(k, 1)};",
        "static constexpr bool FLAT = false, TABLE = false, SIGNED = false, ZEROS = false;",
        f"static constexpr int64_t CODES = {places['values'].offset}, SCALES = 0, ZERO_POINTS = 0;",
    ]


def _packed_facts(fmt: Format, decoder: Decoder, places: dict[str, Section], n: int, k: int) -> list[str]:
    d, zeros = fmt.declaration, places.get("zeros")
    flat = next((s for name, s in places.items() if name.endswith("_flat")), None)
    scales = flat or places["scales"]
    flags = {"FLAT": flat is not None, "TABLE": decoder.table, "SIGNED": decoder.signed, "ZEROS": zeros is not None}
    listed = ", ".join(f"{name} = {str(value).lower()}" for name, value in flags.items())
    offsets = (
        f"CODES = {places['codes'].offset}, SCALES = {scales.offset}, ZERO_POINTS = {zeros.offset if zeros else 0}"
    )
    return [
        f"typedef {'qc_f16' if scales.dtype.itemsize == 2 else 'float'} scale_type;",
        f"static constexpr int ROWS = {n}, COLS = {k}, BITS = {d.codes.bits}, BLOCK = {d.block_size(k)};",
        f"static constexpr bool {listed};",
        f"static constexpr int64_t {offsets};",
    ]


# --- the kernel -------------------------------------------------------------------------------------------------------


def emit(spec: KernelSpec, arch: str) -> CudaKernel:
    """Text and geometry of a linear that `linear.engine_of` gives to tensor cores."""
    from qcompiler.kernels.cuda.emit import arch_number, signature

    body, (x, w) = linear_body(spec), spec.operands[:2]
    fmt = None if w.format is None else formats.get(w.format.name, **w.format.params)
    limit = SHARED_LIMIT[arch_number(arch)]
    tile = tile_of(body, 16 if fmt is None else fmt.declaration.codes.bits, limit)
    straddling = fmt is not None and straddles(fmt, body.k)
    weight, table = weight_struct(spec, fmt)
    finish = finish_of(spec)
    geometry = Geometry((_blocks(body.m, tile.tokens), -(-body.n // tile.rows), 1), (tile.threads, 1, 1), tile.shared)
    note = (
        f"M class {body.m_class}, mma: {tile.tokens} tokens x {tile.rows} rows of w per block of {tile.warps_n} x "
        f"{tile.warps_k} warps; {tile.stages} stages of x in {tile.shared} bytes, {tile.depth} chunks of w ahead"
    )
    struct, where = f"qk_{spec.name}_tiles", f"(const uint8_t*){identifier(w.name)}, {identifier(x.name)}"
    lines = [
        f'static_assert(qm_shared<{tile.arguments}>::BYTES == {tile.shared}, "shared memory");',
        f"QC_SHARED(uint4, shared, 0, {tile.shared // 16});",
        f"{struct} tiles;",
        *([f"tiles.table.entry = {struct}::table_entry((int)threadIdx.x % 16);"] if table else []),
        "const auto finish = [&](float sum, int64_t m, int64_t n) QM_LAMBDA {",
        f"    {finish.call('sum', 'm', 'n')}",
        "};",
        f"qm_linear<{struct}, {tile.arguments}, {tile.depth}>(",
        f"    tiles, {where}, {c_dim(x.strides[0])}, {c_dim(body.m)}, shared, finish);",
    ]
    head = signature(spec, tile.threads, tile.resident(limit, straddles=straddling))
    text = "\n".join([header_comment(spec, note), weight + finish.definition + head, *indent(lines), "}\n"])
    return CudaKernel(text, geometry, "mma", (note,))


def _blocks(m: Dim, tokens: int) -> Dim:
    return ((dim(m) + (tokens - 1)) // tokens).to_dim()
