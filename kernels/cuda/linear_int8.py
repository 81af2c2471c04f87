"""Linears that multiply integers: int8 rows by the integer codes of packed weights.

    M class "2-8"          a block per panel of 16 rows of w and 8 rows of x, its warps share the columns: a tile
                           (int8_tiles.cuh), or qi_linear_few (int8.cuh)
    "9-64", "large"        linear_int8_tiles.py, or qi_linear_many: a panel per warp, four panels and 32 or 64 rows of x
                           per block

Tiles need tensor cores (sm_75) and take most groups (int8_tile.py, `takes`); the others take `dp4a` and any group. All
read the same weight layout. Sums are exact, and they are scaled in the order of formats/integer_product.py, so the bits
are the same on every architecture and on the CPU.

Up to 64 rows may be floats: then every block makes the rows of int8 that it multiplies, of x or of a norm of it, in
shared memory (`qi_make_rows`), with the bits of quantize_rows.py and linear_norm.py. All threads of a block share a row
where there are few; of many, several rows are made at once, by a part of a warp each.
"""

from __future__ import annotations

from dataclasses import dataclass

from qcompiler.errors import KernelSelectionError
from qcompiler.formats.int8_rows import KINDS, clip_factors, row_bytes
from qcompiler.formats.integer_product import IntegerProduct
from qcompiler.kernels.cuda import im2col, int8_tile, linear_norm
from qcompiler.kernels.cuda.geometry import SHARED_LIMIT, CudaKernel, Geometry, SharedMemory
from qcompiler.kernels.cuda.int8_product import engine_of, product_of, struct_of
from qcompiler.kernels.cuda.int8_tile import Groups, Tile, groups_of
from qcompiler.kernels.cuda.linear_finish import finish_of, linear_body, row_offset
from qcompiler.kernels.cuda.panel_text import Launch, PanelText
from qcompiler.kernels.cuda.signature import arch_number, signature
from qcompiler.kernels.cuda.weights import Weight, weight_of
from qcompiler.kernels.norm_prologue import kept_codes_of, note_of
from qcompiler.kernels.scalar import float_literal
from qcompiler.kernels.text import STORAGE_TYPES, c_dim, header_comment, identifier, indent
from qcompiler.plan.dims import Dim, dim
from qcompiler.plan.kernel import KernelSpec
from qcompiler.plan.kinds.linear import Window

SEGMENTS = 8
"""int8.cuh's SEGMENTS: segments of 32 columns in a round of `qi_linear_many`."""

WARPS = 4
"""Panels per block of `qi_linear_many`."""

LEAST_WARPS = 4
"""Of a block of `qi_linear_few`: a thread owns one of 16 rows of w times 8 rows of x."""

FEW_ROWS = 8
"""The most rows of x in a block of `qi_linear_few`."""

ROWS_OF_MANY = 32
"""Rows of x in a block of `qi_linear_many` that makes its rows."""

MOST_MADE = 64
"""The most rows that a kernel makes."""


def few(spec: KernelSpec, arch: str, launch: Launch | None = None) -> PanelText:
    """One linear of the M classes "1" and "2-8". KernelSelectionError for unsupported operands."""
    body, weight, engine = linear_body(spec), weight_of(spec.name, spec.operands[1]), engine_of(arch)
    product = product_of(spec)
    warps = (launch.warps if launch is not None else None) or warps_of_few(weight.cols)
    made = MadeRows.of(spec, warps, weight.panels, many=False)
    x = RowsOfX(spec, made, f"(int64_t)blockIdx.y * {FEW_ROWS}", FEW_ROWS)
    if int8_tile.takes(spec, arch, body.k):
        tiles = _few_tiles(spec, weight, warps, x)
        if tiles.geometry.shared <= SHARED_LIMIT[arch_number(arch)]:  # rows that a block makes may leave no room
            return tiles
    shared = SharedMemory()
    x.room(shared)
    add_few(shared, product, weight.cols, warps)
    given = f"{_weight(spec)}, {x.rows}, {c_dim(body.m)}, panel, staged, runs, sums_of, finish{x.make}"
    lines = [
        *shared.declarations(),
        *_finish(spec),
        *x.statements(),
        f"qi_linear_few<{struct_name(spec)}, QI_{engine.upper()}, {warps}>({given});",
    ]
    note = (
        f"M class {body.m_class}, int8 {engine}: {FEW_ROWS} rows of x, {warps} warps share the columns of a panel; "
        f"{shared.nbytes} bytes of shared memory"
    )
    definitions = definitions_of(spec, weight, x)
    geometry = Geometry((weight.panels, _blocks(body.m, FEW_ROWS), 1), (32 * warps, 1, 1), shared.nbytes)
    return PanelText(definitions, tuple(lines), geometry, x.notes(note), engine, 1, LEAST_WARPS)


def _few_tiles(spec: KernelSpec, weight: Weight, warps: int, x: RowsOfX) -> PanelText:
    """The same by tiles of one panel."""
    body, finish, shared = linear_body(spec), finish_of(spec), SharedMemory()
    tile = int8_tile.few_tile(warps)
    x.room(shared)
    add_tile(shared, tile, groups_of(spec))
    sums = ("sums", "others") if body.pairs else ("sums",)
    given = f"{_weight(spec)}, {x.rows}, {c_dim(body.m)}, {x.first}, panel * 16, shared, scales, row_ones, finish"
    lines = [
        *shared.declarations(),
        f"const auto finish = [&]({', '.join(f'const float (&{each})[1]' for each in sums)}, int64_t m, int64_t n) {{",
        f"    {finish.call(tuple(f'{each}[0]' for each in sums), 'm', 'n')}",
        "};",
        *x.statements(),
        f"qi_linear_tiles<{struct_name(spec)}, qi_tile<{tile.arguments}>, 1>({given}{x.make});",
    ]
    note = (
        f"M class {body.m_class}, int8 mma: {FEW_ROWS} rows of x, {warps} warps share the columns of a panel, "
        f"{tile.ahead} steps ahead; {shared.nbytes} bytes of shared memory"
    )
    definitions = definitions_of(spec, weight, x)
    geometry = Geometry((weight.panels, _blocks(body.m, FEW_ROWS), 1), (tile.threads, 1, 1), shared.nbytes)
    return PanelText(definitions, tuple(lines), geometry, x.notes(note), "mma", 1, LEAST_WARPS)


def add_tile(shared: SharedMemory, tile: Tile, groups: Groups) -> None:
    """Adds the room of `qi_linear_tiles` for one tile."""
    add_room(shared, tile.shared(groups), tile.tokens)


def add_room(shared: SharedMemory, nbytes: int, tokens: int) -> None:
    """The same for tiles of up to `nbytes` bytes and `tokens` rows of x."""
    shared.add("shared", "uint8_t", nbytes, 1)
    shared.add("scales", "float", tokens, 4)
    shared.add("row_ones", "int", tokens, 4)


def emit_many(spec: KernelSpec, arch: str) -> CudaKernel:
    """One linear of the other M classes. KernelSelectionError for unsupported operands."""
    body, weight, engine = linear_body(spec), weight_of(spec.name, spec.operands[1]), engine_of(arch)
    blocks = -(-weight.panels // WARPS)
    made = MadeRows.of(spec, WARPS, blocks, many=True)
    large = body.m_class == "large" and engine == "mma" and made is None
    shared, tokens = SharedMemory(), 64 if large else 32
    x = RowsOfX(spec, made, f"(int64_t)blockIdx.x * {tokens}", tokens)
    x.room(shared)
    add_staged(shared, tokens, SEGMENTS, product_of(spec))
    given = f"{_weight(spec)}, {x.rows}, {c_dim(body.m)}, {weight.panels}, staged, runs, finish{x.make}"
    lines = [
        *shared.declarations(),
        *_finish(spec),
        *x.statements(),
        f"qi_linear_many<{struct_name(spec)}, QI_{engine.upper()}, {tokens // 8}, {WARPS}>(",
        f"    {given});",
    ]
    note = (
        f"M class {body.m_class}, int8 {engine}: {tokens} rows of x, {WARPS} warps with a panel each; "
        f"{shared.nbytes} bytes of shared memory"
    )
    notes = x.notes(note)
    geometry = Geometry((_blocks(body.m, tokens), blocks, 1), (32 * WARPS, 1, 1), shared.nbytes)
    definitions = definitions_of(spec, weight, x)
    text = [header_comment(spec, *notes), definitions + signature(spec, 32 * WARPS, 1), *indent(lines), "}\n"]
    return CudaKernel("\n".join(text), geometry, engine, notes)


def warps_of_few(columns: int) -> int:
    """Warps of a block of `qi_linear_few`."""
    return 8 if columns >= 2048 else LEAST_WARPS


def add_few(shared: SharedMemory, product: IntegerProduct, columns: int, warps: int) -> None:
    """Adds the room of `qi_linear_few`: sums between its warps, and a round of x."""
    slots = warps if product.columns(columns) >= columns else 2 * warps * _runs_of_segment(product)
    shared.add("sums_of", "int", slots * 128, 4)
    add_staged(shared, FEW_ROWS, 2 * warps, product)


def _runs_of_segment(product: IntegerProduct) -> int:
    """Sums that 32 columns have: two where groups are of 16."""
    return 2 if product.group % 32 else 1


def add_staged(shared: SharedMemory, tokens: int, segments: int, product: IntegerProduct) -> None:
    """Adds the room for a round of x."""
    shared.add("staged", "uint32_t", tokens * (segments * 8 + 4), 4)
    shared.add("runs", "int", tokens * segments * _runs_of_segment(product), 4)


@dataclass(frozen=True)
class RowsOfX:
    """Where a block, whose first row is `first`, has its rows of int8: in memory, in an image whose windows they are,
    or in shared memory, where the block makes them."""

    spec: KernelSpec
    made: MadeRows | None
    first: str
    tokens: int

    @property
    def window(self) -> Window | None:
        """How rows are read from an image."""
        return linear_body(self.spec).window

    @property
    def rows(self) -> str:
        """The argument."""
        x = self.spec.operands[0]
        if self.made is not None:
            return self.made.rows_argument
        if self.window is not None:
            return f"qi_window_rows{{{identifier(x.name)}, window, places, {linear_body(self.spec).k}}}"
        step = c_dim(x.strides[0])
        return f"qi_rows{{{{{identifier(x.name)} + {self.first} * {step}, {step}}}}}"

    @property
    def make(self) -> str:
        """The last argument, if a block does something before it reads its rows."""
        return "" if self.made is None and self.window is None else ", make"

    def notes(self, *others: str) -> tuple[str, ...]:
        """Notes for a comment, from what makes the rows on."""
        return others if self.made is None else (self.made.note(), *others)

    def room(self, shared: SharedMemory) -> None:
        if self.made is not None:
            self.made.room(shared)
        if self.window is not None:
            shared.add("places", "qc_window_place", self.tokens, im2col.PLACE_BYTES)

    def statements(self) -> list[str]:
        """The statements that declare `make`."""
        if self.made is not None:
            return self.made.statements()
        if self.window is None:
            return []
        m = c_dim(linear_body(self.spec).m)
        return [
            im2col.declaration(self.spec.operands[0], self.window),
            "const auto make = [&] {",
            f"    qc_place_windows<{self.tokens}>(window, {self.first}, {m}, places);",
            "    __syncthreads();",
            "};",
        ]


def _weight(spec: KernelSpec) -> str:
    return f"(const uint8_t*){identifier(spec.operands[1].name)}"


def _finish(spec: KernelSpec) -> list[str]:
    """The statements that declare `finish`."""
    pairs, finish = linear_body(spec).pairs, finish_of(spec)
    return [
        f"const auto finish = [&](float sum{', float other' * pairs}, int64_t m, int64_t n) {{",
        f"    {finish.call(('sum', 'other') if pairs else ('sum',), 'm', 'n')}",
        "};",
    ]


def struct_name(spec: KernelSpec) -> str:
    return f"qk_{spec.name}_p"


def definitions_of(spec: KernelSpec, weight: Weight, x: RowsOfX) -> str:
    """What stands before a kernel."""
    struct = struct_of(struct_name(spec), weight, spec, pairs=linear_body(spec).pairs)
    made = "" if x.made is None else x.made.definition()
    return weight.definitions + struct + finish_of(spec).definition + made


def shape_of_many(arch: str) -> tuple[int, int]:
    """(panels, warps) of a block that makes more than eight rows: of a tile, or with `dp4a`."""
    return (2, 8) if engine_of(arch) == "mma" else (WARPS, WARPS)


def lanes_of(columns: int, threads: int, rows: int) -> int:
    """Threads that share a row of a block that makes `rows` rows: all of them for few rows. Of many rows it is a part
    of a warp, whose threads keep their columns in registers (32 of them, int8.cuh) if there are no more than 1,024."""
    if rows <= FEW_ROWS:
        return threads
    pieces = -(-columns // 64) * 4
    return min(32, max(4, 1 << (-(-pieces // 2) - 1).bit_length()))


@dataclass(frozen=True)
class MadeRows:
    """How a block makes the rows of int8 that it multiplies: `rows` of them, at most."""

    spec: KernelSpec
    rows: int
    warps: int
    blocks: int
    many: bool
    rows_of_tile: int | None = None

    @classmethod
    def of(
        cls, spec: KernelSpec, warps: int, blocks: int, *, many: bool, rows_of_tile: int | None = None
    ) -> MadeRows | None:
        """For `blocks` blocks along the rows of the weight, of few rows of x or of many. None for rows in memory.
        KernelSelectionError for more rows than a kernel makes. `rows_of_tile`: a block's rows of the weight where the
        kernel says by `m0` and `n0` where its outputs begin."""
        body = linear_body(spec)
        if body.rows is None:
            return None
        most = MOST_MADE if many else FEW_ROWS
        if not isinstance(body.m, int) or body.m > most:
            raise KernelSelectionError(
                f"kernel '{spec.name}' ({spec.serves}): kernels for CUDA of M class {body.m_class} make up to {most} "
                f"rows of int8, and read more from memory, where a quantize_rows kernel makes them; there are {body.m}"
            )
        return cls(spec, min(ROWS_OF_MANY if many else FEW_ROWS, body.m), warps, blocks, many, rows_of_tile)

    @property
    def rows_argument(self) -> str:
        """The arguments that say where the rows are."""
        return f"qi_rows{{{{(const int8_t*)codes, {row_bytes(linear_body(self.spec).k)}}}}}"

    @property
    def _several(self) -> bool:
        """Whether blocks share the rows: then they begin at `m0`."""
        m = linear_body(self.spec).m
        assert isinstance(m, int)
        return m > self.rows

    def room(self, shared: SharedMemory) -> None:
        body = linear_body(self.spec)
        shared.add("codes", "uint4", self.rows * row_bytes(body.k) // 16, 16)
        shared.add("tops", "int", self.warps, 4)
        if body.norms:
            linear_norm.room(shared, self.spec, self.rows)

    def definition(self) -> str:
        if not linear_body(self.spec).norms:
            return ""
        return linear_norm.definition(self.spec, self.warps, self.rows, self.blocks)

    def statements(self) -> list[str]:
        """The statements that declare `make`."""
        body, x = linear_body(self.spec), self.spec.operands[0]
        assert body.rows is not None
        factor, fixed = clip_factors(body.rows.value) if body.rows.kind == "tensor" else (0.0, 0.0)
        numbers = ", ".join(float_literal(float(number), "f32") for number in (factor, fixed))
        threads, (row, live), begin = 32 * self.warps, ("0", str(self.rows)), list[str]()
        if self._several:
            row, live = "m0", f"(int)qc_min({self.rows}, {body.m} - m0)"
            if self.rows_of_tile is None:
                begin.append(f"const int64_t m0 = (int64_t)blockIdx.x * {self.rows};")
        kept = kept_codes_of(self.spec)
        if self.many and (body.keeps or kept is not None):
            part = "blockIdx.y" if self.rows_of_tile is None else f"(uint32_t)(n0 / {self.rows_of_tile})"
            begin.append(f"const uint32_t panel = {part};  // which part of the kept rows this block writes")
        at = identifier(x.name) if row == "0" else f"{identifier(x.name)} + m0 * {c_dim(x.strides[0])}"
        sizes = (KINDS.index(body.rows.kind), threads, lanes_of(body.k, threads, self.rows), body.k)
        return [
            *begin,
            *([linear_norm.declaration(self.spec, row)] if body.norms else []),
            "const auto make = [&] {",
            f"    qi_make_rows<{', '.join(map(str, sizes))}, {STORAGE_TYPES[x.dtype]}>(",
            f"        {at}, {c_dim(x.strides[0])}, {live}, {numbers}, (int8_t*)codes,",
            f"        {row_bytes(body.k)}, tops{', norm' if body.norms else ''});",
            *([] if kept is None else self._keeping(kept, row, live)),
            "};",
        ]

    def _keeping(self, place: int, row: str, live: str) -> list[str]:
        """The statements by which the first block writes the rows for others."""
        kept, width = self.spec.operands[place], row_bytes(linear_body(self.spec).k)
        to = f"{identifier(kept.name)} + {row_offset(kept, row)}"
        return [
            f"    if (panel == 0) qi_keep_rows<{width}>((const int8_t*)codes, {live}, {to}, {c_dim(kept.strides[0])});"
        ]

    def note(self) -> str:
        body = linear_body(self.spec)
        assert body.rows is not None
        made = f"rows of int8, {body.rows.kind}"
        return f"{made}, of a norm of the rows of x: {note_of(self.spec)}" if body.norms else f"{made}, of x"


def _blocks(m: Dim, tokens: int) -> Dim:
    return ((dim(m) + (tokens - 1)) // tokens).to_dim()
