"""Linears that multiply integers: int8 rows by the integer codes of packed weights (int8.cuh).

    M class "2-8"          qi_linear_few: a block per panel of 16 rows of w and 8 rows of x, its warps share the columns
    "9-64", "large"        qi_linear_many: a panel per warp, four panels and 32 or 64 rows of x per block

Tensor cores multiply from sm_75 on, `dp4a` before; both read the same weight layout. Sums are exact, and they are
scaled in the order of formats/integer_product.py, so the bits are the same on every architecture and on the CPU.

Up to eight rows may be floats: then every block makes the rows of int8, of x or of a norm of it, in shared memory
(`qi_make_rows`), with the bits of quantize_rows.py and linear_norm.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from qcompiler import formats
from qcompiler.errors import KernelSelectionError
from qcompiler.formats.int8_rows import KINDS, clip_factors, row_bytes
from qcompiler.formats.integer_product import IntegerProduct, integer_product
from qcompiler.kernels.cuda import linear_norm
from qcompiler.kernels.cuda.geometry import CudaKernel, Geometry, SharedMemory, check_extent
from qcompiler.kernels.cuda.linear_finish import finish_of, linear_body
from qcompiler.kernels.cuda.signature import arch_number, signature
from qcompiler.kernels.cuda.weights import AS_THEY_ARE, LAYOUT, Weight, block, weight_of
from qcompiler.kernels.norm_prologue import note_of
from qcompiler.kernels.scalar import float_literal
from qcompiler.kernels.text import STORAGE_TYPES, c_dim, header_comment, identifier, indent
from qcompiler.plan.dims import Dim, dim
from qcompiler.plan.kernel import KernelSpec

TENSOR_CORES = 75
"""The first architecture whose tensor cores multiply bytes."""

SEGMENTS = 8
"""int8.cuh's SEGMENTS: segments of 32 columns in a round of `qi_linear_many`."""

WARPS = 4
"""Panels per block of `qi_linear_many`."""

FEW_ROWS = 8
"""The most rows of x in a block of `qi_linear_few`."""


def passed_over(arch: str) -> list[tuple[str, str]]:
    """Ways of multiplying that kernels for `arch` do without, best first, and why."""
    if arch_number(arch) >= TENSOR_CORES:
        return [("dp4a", "tensor cores multiply bytes")]
    return [("mma", f"int8 tensor cores: sm_{TENSOR_CORES}")]


def emit(spec: KernelSpec, arch: str) -> CudaKernel:
    """Text and geometry of one linear. KernelSelectionError for unsupported operands."""
    body, x, product = linear_body(spec), spec.operands[0], _product(spec)
    weight, finish = weight_of(spec.name, spec.operands[1]), finish_of(spec)
    engine = "mma" if arch_number(arch) >= TENSOR_CORES else "dp4a"
    shared, few = SharedMemory(), body.m_class in ("1", "2-8")
    name = identifier(spec.operands[1].name)
    struct, kind = f"qk_{spec.name}_p", f"QI_{engine.upper()}"
    rows = f"{identifier(x.name)}, {c_dim(x.strides[0])}"
    made = _Made.of(spec, weight, few=few)
    if made is not None:
        made.room(shared)
        rows = f"(const int8_t*)codes, {row_bytes(body.k)}"
    where = f"(const uint8_t*){name}, {rows}, {c_dim(body.m)}"
    if few:
        warps, tokens = _few_warps(weight), FEW_ROWS
        segments = 2 * warps
        slots = warps if product.columns(weight.cols) >= weight.cols else segments
        shared.add("sums_of", "int", slots * 128, 4)
        given = f"{where}, staged, runs, sums_of, finish{', make' * (made is not None)}"
        call = f"qi_linear_few<{struct}, {kind}, {warps}>({given});"
        grid: tuple[Dim, Dim, Dim] = (weight.panels, _blocks(body.m, tokens), 1)
    else:
        warps, segments = WARPS, SEGMENTS
        tokens = 64 if body.m_class == "large" and engine == "mma" else 32
        call = (
            f"qi_linear_many<{struct}, {kind}, {tokens // 8}, {warps}>({where}, {weight.panels}, staged, runs, finish);"
        )
        grid = (_blocks(body.m, tokens), -(-weight.panels // warps), 1)
    shared.add("staged", "uint32_t", tokens * (segments * 8 + 4), 4)
    shared.add("runs", "int", tokens * segments, 4)
    lines = [
        *shared.declarations(),
        f"const auto finish = [&](float sum{', float other' * body.pairs}, int64_t m, int64_t n) {{",
        f"    {finish.call(('sum', 'other') if body.pairs else ('sum',), 'm', 'n')}",
        "};",
        *(made.statements() if made is not None else []),
        call,
    ]
    geometry = Geometry(grid, (32 * warps, 1, 1), shared.nbytes)
    note = (
        f"M class {body.m_class}, int8 {engine}: {tokens} rows of x, {warps} warps "
        f"{'share the columns of a panel' if few else 'with a panel each'}; {shared.nbytes} bytes of shared memory"
    )
    definitions = weight.definitions + _struct(struct, weight, product, spec) + finish.definition
    notes: tuple[str, ...] = (note,)
    if made is not None:
        definitions += made.definition()
        notes = (made.note(), note)
    head = signature(spec, 32 * warps, 1)
    text = "\n".join([header_comment(spec, *notes), definitions + head, *indent(lines), "}\n"])
    return CudaKernel(text, geometry, engine, notes)


def _few_warps(weight: Weight) -> int:
    return 8 if weight.cols >= 2048 else 4


@dataclass(frozen=True)
class _Made:
    """How a block makes the rows of int8 that it multiplies."""

    spec: KernelSpec
    warps: int
    panels: int

    @classmethod
    def of(cls, spec: KernelSpec, weight: Weight, *, few: bool) -> _Made | None:
        """None for rows in memory. KernelSelectionError for more rows than a block takes."""
        body = linear_body(spec)
        if body.rows is None:
            return None
        if not few or not isinstance(body.m, int) or body.m > FEW_ROWS:
            raise KernelSelectionError(
                f"kernel '{spec.name}' ({spec.serves}): kernels for CUDA make up to {FEW_ROWS} rows of int8, and read "
                f"more from memory, where a quantize_rows kernel makes them; there are {body.m}"
            )
        return cls(spec, _few_warps(weight), weight.panels)

    @property
    def rows(self) -> int:
        rows = linear_body(self.spec).m
        assert isinstance(rows, int)
        return rows

    def room(self, shared: SharedMemory) -> None:
        body = linear_body(self.spec)
        shared.add("codes", "uint4", self.rows * row_bytes(body.k) // 16, 16)
        shared.add("tops", "int", self.warps, 4)
        if body.norms:
            linear_norm.room(shared, self.spec, self.rows)

    def definition(self) -> str:
        if not linear_body(self.spec).norms:
            return ""
        return linear_norm.definition(self.spec, self.warps, self.rows, self.panels)

    def statements(self) -> list[str]:
        """The statements that declare `make`."""
        body, x = linear_body(self.spec), self.spec.operands[0]
        assert body.rows is not None
        factor, fixed = clip_factors(body.rows.value) if body.rows.kind == "tensor" else (0.0, 0.0)
        numbers = ", ".join(float_literal(float(number), "f32") for number in (factor, fixed))
        sizes = f"{KINDS.index(body.rows.kind)}, {32 * self.warps}, {self.rows}, {body.k}, {STORAGE_TYPES[x.dtype]}"
        return [
            *([linear_norm.declaration(self.spec, "0")] if body.norms else []),
            "const auto make = [&] {",
            f"    qi_make_rows<{sizes}>({identifier(x.name)}, {c_dim(x.strides[0])}, {numbers}, (int8_t*)codes,",
            f"                 {row_bytes(body.k)}, tops{', norm' if body.norms else ''});",
            "};",
        ]

    def note(self) -> str:
        body = linear_body(self.spec)
        assert body.rows is not None
        made = f"rows of int8, {body.rows.kind}"
        return f"{made}, of a norm of the rows of x: {note_of(self.spec)}" if body.norms else f"{made}, of x"


def _product(spec: KernelSpec) -> IntegerProduct:
    w = spec.operands[1]
    where = f"kernel '{spec.name}'"
    if w.format is None or w.layout != LAYOUT:
        raise KernelSelectionError(f"{where}: integers are multiplied with packed weights in layout '{LAYOUT}'")
    check_extent(spec, w, 0)
    check_extent(spec, w, 1)
    product = integer_product(formats.get(w.format.name, **w.format.params))
    if isinstance(product, str):
        raise KernelSelectionError(f"{where}: {w.format.name} has no integer product: {product}")
    return product


def _struct(name: str, weight: Weight, product: IntegerProduct, spec: KernelSpec) -> str:
    """What int8.cuh needs to know about a product. Bytes are signed; of unsigned codes they hold the code minus 128."""
    reference = spec.operands[1].format
    assert reference is not None
    d = formats.get(reference.name, **reference.params).declaration
    parts = {g: f"p.of[{i}]" for i, g in enumerate(d.split.per_entry)}
    offset = product.first if weight.bits == 4 else product.first + 128
    slope = product.slope.to_c(parts, style=AS_THEY_ARE)
    zero = "0.0f" if product.intercept is None else product.intercept.to_c(parts, style=AS_THEY_ARE)
    lines = [
        f"struct {name} {{",
        f"    typedef {weight.struct} weight;",
        f"    static constexpr int64_t group = {product.columns(weight.cols)};",
        f"    static constexpr int offset = {offset};",
        f"    static constexpr bool pairs = {str(linear_body(spec).pairs).lower()};",
        f"    static constexpr bool affine = {str(product.intercept is not None).lower()};",
        f"    static QC_DEVICE float slope(const weight::parts& p) {{ return {slope}; }}",
        f"    static QC_DEVICE float intercept(const weight::parts& p) {{ return {zero}; }}",
        "};",
    ]
    return block(lines)


def _blocks(m: Dim, tokens: int) -> Dim:
    return ((dim(m) + (tokens - 1)) // tokens).to_dim()
