"""The `batch_matmul` template: batched products of strided operands, with gemm.h's microkernel.

For each product, gemm.h reads the strided matrix b as a weight (n, k) and packs it panel by panel into scratch. It
reads a in place if a is fp32 with unit stride along k; otherwise it converts a few rows at a time.
"""

from __future__ import annotations

from qcompiler.kernels import text as shared
from qcompiler.kernels.cpu import text
from qcompiler.kernels.cpu.linear import KC, block_of, finish_function, product_scratch, used_symbols
from qcompiler.kernels.text import STORAGE_TYPES, c_dim
from qcompiler.plan.dims import dim, product
from qcompiler.plan.kernel import ITEMSIZE, KernelSpec, Operand
from qcompiler.plan.kinds.batch_matmul import BatchMatmulKernel


def _converts(spec: KernelSpec) -> bool:
    """Whether rows of a are converted in scratch."""
    a = spec.operands[0]
    return a.dtype != "f32" or a.strides[-1] != 1


def headers(spec: KernelSpec) -> tuple[str, ...]:
    return ("decode.h", "gemm.h")


def scratch_bytes(spec: KernelSpec, isa: str) -> int:
    """Scratch bytes per thread, for any values of the symbols."""
    body = spec.body
    assert isinstance(body, BatchMatmulKernel)
    if isinstance(body.k, int):
        block = block_of(body.k)
        return product_scratch(isa, block, whole=block >= body.k)
    return product_scratch(isa, KC, whole=False)


def _offset(operand: Operand, rank: int) -> str:
    """C++ text of an operand's element offset for batch indices i0, i1, …"""
    terms = [f"i{axis} * {c_dim(stride)}" for axis, stride in enumerate(operand.strides[:rank]) if stride != 0]
    return " + ".join(terms) or "0"


def _select(spec: KernelSpec, body: BatchMatmulKernel) -> str:
    """The function that sets up a job for one product of the batch."""
    rank = len(body.batch)
    lines = ["int64_t rest = batch;"]
    for axis in range(rank - 1, -1, -1):
        lines.append(f"const int64_t i{axis} = rest % {c_dim(body.batch[axis])};")
        lines.append(f"rest /= {c_dim(body.batch[axis])};")
        lines.append(f"(void)i{axis};")
    for index, field, kind in ((0, "x", "const char*"), (1, "codes", "const char*"), (2, "out", "char*")):
        operand = spec.operands[index]
        offset = f"({_offset(operand, rank)}) * {ITEMSIZE[operand.dtype]}"
        lines.append(f"job->{field} = ({kind})job->op[{index}] + {offset};")
    return "\n".join(
        [
            f"static void qk_{spec.name}_select(qg_job* job, int64_t batch) {{",
            *shared.indent([*used_symbols(spec, lines, "job->sym"), *lines]),
            "}\n",
        ]
    )


def _finish(spec: KernelSpec) -> str:
    """Rounds the sums to the result's type and stores them."""
    out = spec.operands[2]
    kind = STORAGE_TYPES[out.dtype]
    down, right = (c_dim(s) for s in out.strides[-2:])
    if right == "1":
        store = "qg_store_lanes(out + n0 + j, vload(sums + j), lanes);"
    else:
        store = f"vstore_s(out + (n0 + j) * {right}, {right}, vload(sums + j), lanes);"
    lines = [
        "for (int64_t i = 0; i < rows; i++) {",
        "    const float* const sums = tile + i * stride;",
        f"    {kind}* const out = ({kind}*)job->out + (m0 + i) * {down};",
        "    for (int64_t j = 0; j < cols; j += 16) {",
        "        const int lanes = (int)qc_min(cols - j, 16);",
        f"        {store}",
        "    }",
        "}",
    ]
    return finish_function(spec, lines)


def emit(spec: KernelSpec, isa: str) -> str:
    """C++ text of one kernel."""
    body = spec.body
    assert isinstance(body, BatchMatmulKernel)
    a, b, _ = spec.operands
    scratch = scratch_bytes(spec, isa)
    bound = c_dim(body.k) if isinstance(body.k, int) else None
    size = f"qg_scratch({bound})" if bound else "qg_scratch_for(QG_KC, false)"
    lines = [
        "qg_job job = {};",
        f"job.m = {c_dim(body.m)}, job.n = {c_dim(body.n)}, job.k = {c_dim(body.k)};",
        f"job.x_row = {c_dim(a.strides[-2])}, job.x_col = {c_dim(a.strides[-1])};",
        *([f"job.load_x = qg_convert_x<{STORAGE_TYPES[a.dtype]}>;"] if _converts(spec) else []),
        f"job.w_row = {c_dim(b.strides[-1])}, job.w_col = {c_dim(b.strides[-2])};",
        f"job.decode = qg_decode_panel<qg_strided<{STORAGE_TYPES[b.dtype]}>>;",
        f"job.batches = {c_dim(product(dim(d) for d in body.batch))};",
        f"job.select = qk_{spec.name}_select, job.finish = qk_{spec.name}_finish;",
        "job.op = op, job.sym = sym;",
        "qg_run(ctx, &job);",
    ]
    assertion = f'static_assert({size} <= {scratch}, "scratch");'
    lines = [assertion, *used_symbols(spec, lines, "sym"), *lines]
    header = shared.header_comment(spec, f"b is packed panel by panel, {scratch} bytes of scratch a thread")
    return "\n".join([header, _select(spec, body) + _finish(spec), text.entry_function(spec, lines)])
