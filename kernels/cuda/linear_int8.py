"""Linears that multiply integers: int8 rows by the integer codes of packed weights (int8.cuh).

    M class "2-8"          qi_linear_few: a block per panel of 16 rows of w and 8 rows of x, its warps share the columns
    "9-64", "large"        qi_linear_many: a panel per warp, four panels and 32 or 64 rows of x per block

Tensor cores multiply from sm_75 on, `dp4a` before; both read the same weight layout. Sums are exact, and they are
scaled in the order of formats/integer_product.py, so the bits are the same on every architecture and on the CPU.
"""

from __future__ import annotations

from qcompiler import formats
from qcompiler.errors import KernelSelectionError
from qcompiler.formats.integer_product import IntegerProduct, integer_product
from qcompiler.kernels.cuda.geometry import CudaKernel, Geometry, SharedMemory, check_extent
from qcompiler.kernels.cuda.linear_finish import finish_of, linear_body
from qcompiler.kernels.cuda.signature import arch_number, signature
from qcompiler.kernels.cuda.weights import AS_THEY_ARE, LAYOUT, Weight, block, weight_of
from qcompiler.kernels.text import c_dim, header_comment, identifier, indent
from qcompiler.plan.dims import Dim, dim
from qcompiler.plan.kernel import KernelSpec

TENSOR_CORES = 75
"""The first architecture whose tensor cores multiply bytes."""

SEGMENTS = 8
"""int8.cuh's SEGMENTS: segments of 32 columns in a round of `qi_linear_many`."""

WARPS = 4
"""Panels per block of `qi_linear_many`."""


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
    where = f"(const uint8_t*){name}, {identifier(x.name)}, {c_dim(x.strides[0])}, {c_dim(body.m)}"
    if few:
        warps = 8 if weight.cols >= 2048 else 4
        tokens, segments = 8, 2 * warps
        slots = warps if product.columns(weight.cols) >= weight.cols else segments
        shared.add("sums_of", "int", slots * 128, 4)
        call = f"qi_linear_few<{struct}, {kind}, {warps}>({where}, staged, runs, sums_of, finish);"
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
        call,
    ]
    geometry = Geometry(grid, (32 * warps, 1, 1), shared.nbytes)
    note = (
        f"M class {body.m_class}, int8 {engine}: {tokens} rows of x, {warps} warps "
        f"{'share the columns of a panel' if few else 'with a panel each'}; {shared.nbytes} bytes of shared memory"
    )
    definitions = weight.definitions + _struct(struct, weight, product, spec) + finish.definition
    head = signature(spec, 32 * warps, 1)
    text = "\n".join([header_comment(spec, note), definitions + head, *indent(lines), "}\n"])
    return CudaKernel(text, geometry, engine, (note,))


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
