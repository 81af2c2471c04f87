"""Linear attention with decay: one task takes a share of the heads of all sequences, and a head's tokens in order.

A head's state stays in a cache while its tokens pass.  Each row of it is read and written once for a token, 16 columns
at a time; with the delta rule a second time, since what is added depends on the whole decayed row.
"""

from __future__ import annotations

from qcompiler.kernels.cpu.text import entry_function, pointer, task_function
from qcompiler.kernels.text import c_dim, header_comment, indent, offset
from qcompiler.plan.kernel import KernelSpec, Operand
from qcompiler.plan.kinds.linear_attention import LinearAttentionKernel

_LANES = 16


def headers(spec: KernelSpec) -> tuple[str, ...]:
    return ()


def _body(spec: KernelSpec) -> LinearAttentionKernel:
    assert isinstance(spec.body, LinearAttentionKernel)
    return spec.body


def scratch_bytes(spec: KernelSpec, isa: str) -> int:
    """What a token's decay leaves of each column, in whole vectors."""
    return 4 * _LANES * -(-_body(spec).depth // _LANES)


def _columns(body: LinearAttentionKernel, lines: list[str]) -> list[str]:
    """A loop over the columns of a row: `j` is the first of `lanes`."""
    whole, rest = body.depth // _LANES * _LANES, body.depth % _LANES
    loop: list[str] = []
    if whole:
        loop += [f"for (int64_t j = 0; j < {whole}; j += {_LANES}) {{", f"    constexpr int lanes = {_LANES};"]
        loop += [*indent(lines), "}"]
    if rest:
        loop += ["{", f"    constexpr int64_t j = {whole};", f"    constexpr int lanes = {rest};", *indent(lines), "}"]
    return loop


def _decays(spec: KernelSpec, named: dict[str, Operand]) -> list[str]:
    """`keeps(j, lanes)`: what the token's decay leaves of the columns from j on."""
    body = _body(spec)
    decay = offset(named["decay"], ["b", "t", "h", "0"])
    if not body.decays_columns and not body.has_rate:
        return [f"const vf kept = vexp(vset(decay[{decay}]));"]
    source = f"vload_upto(decay + {decay} + j, lanes)"
    if body.has_rate:
        source = f"vset(decay[{decay}]) * vload_upto(rate + {offset(named['rate'], ['h', '0'])} + j, lanes)"
    return _columns(body, [f"vstore(keeps + j, vexp({source}));"])


def _token(spec: KernelSpec, named: dict[str, Operand]) -> list[str]:
    """One token of one head."""
    body = _body(spec)
    kept = "vload(keeps + j)" if body.decays_columns or body.has_rate else "kept"
    value = f"value[{offset(named['value'], ['b', 't', 'h', 'p'])}]"
    row = ["float* const row = s + p * state_row;", f"float u = {value};"]
    if body.has_beta:
        row += [
            "vf seen = vzero();",
            *_columns(body, [
                f"const vf x = vload_upto(row + j, lanes) * {kept};",
                "vstore_upto(row + j, x, lanes);",
                "seen = vfma(x, vload_upto(k + j, lanes), seen);",
            ]),
            f"u = beta[{offset(named['beta'], ['b', 't', 'h'])}] * (u - vsum(seen));",
        ]  # fmt: skip
    before = "vload_upto(row + j, lanes)" + ("" if body.has_beta else f" * {kept}")
    row += [
        "vf sum = vzero();",
        *_columns(body, [
            f"const vf x = vfma(vset(u), vload_upto(k + j, lanes), {before});",
            "vstore_upto(row + j, x, lanes);",
            "sum = vfma(x, vload_upto(q + j, lanes), sum);",
        ]),
        f"out[{offset(named['out'], ['b', 't', 'h', 'p'])}] = vsum(sum);",
    ]  # fmt: skip
    return [
        f"const float* const k = key + {offset(named['key'], ['b', 't', 'g', '0'])};",
        f"const float* const q = query + {offset(named['query'], ['b', 't', 'g', '0'])};",
        *_decays(spec, named),
        f"for (int64_t p = 0; p < {body.width}; p++) {{",
        *indent(row),
        "}",
    ]


def emit(spec: KernelSpec, isa: str) -> str:
    """C++ text of one kernel."""
    body = _body(spec)
    named = dict(zip(body.names, spec.operands, strict=True))
    items, steps = f"{c_dim(body.batch)} * {body.heads}", c_dim(body.steps)
    cost = f"qc_tasks({items}, {steps} * {6 * body.width * body.depth})"
    state = named["state"]
    needs_room = body.decays_columns or body.has_rate
    task = [
        *(pointer(operand, number, name, "call->op") for number, (name, operand) in enumerate(named.items())),
        *(["float* const keeps = (float*)scratch;"] if needs_room else []),
        f"const int64_t items = {items}, tasks = {cost}, state_row = {c_dim(state.strides[2])};",
        "for (int64_t i = qc_share(items, task, tasks); i < qc_share(items, task + 1, tasks); i++) {",
        f"    const int64_t b = i / {body.heads}, h = i % {body.heads}, g = h / {body.heads // body.groups};",
        f"    const int64_t given = counts[{offset(named['counts'], ['b'])}];",
        f"    const int64_t count = qc_max(0, qc_min(given, {steps}));",
        f"    float* const s = state + {offset(state, ['b', 'h', '0', '0'])};",
        f"    if (count > 0 && first[{offset(named['first'], ['b'])}] == 0)",
        f"        for (int64_t p = 0; p < {body.width}; p++) memset(s + p * state_row, 0, {4 * body.depth});",
        "    for (int64_t t = 0; t < count; t++) {",
        *indent(_token(spec, named), 2),
        "    }",
        f"    for (int64_t t = count; t < {steps}; t++)",
        f"        for (int64_t p = 0; p < {body.width}; p++) out[{offset(named['out'], ['b', 't', 'h', 'p'])}] = 0.0f;",
        "}",
    ]
    launch = [f"qc_run(ctx, op, sym, {cost}, qk_{spec.name}_task);"]
    head = header_comment(spec, "heads shared among tasks; the tokens of a head in order")
    return "\n".join([head, task_function(spec, task), entry_function(spec, launch)])
