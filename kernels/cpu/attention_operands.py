"""C++ text about operands that both attention kernels share."""

from __future__ import annotations

from qcompiler.kernels.scalar import float_literal
from qcompiler.kernels.text import STORAGE_TYPES, c_dim, indent
from qcompiler.plan.kernel import KernelSpec, Operand
from qcompiler.plan.kinds.attention import AttentionKernel


def head_pointers(spec: KernelSpec, names: tuple[str, ...]) -> list[str]:
    """Declares `q_head` and so on for the operands in `names`: where head `h` (`kv_h` for k and v) of batch `b`
    begins."""
    lines = []
    for i, operand in enumerate(spec.operands):
        name = operand_names(spec)[i]
        if name not in names or name == "last":  # `last` has no heads
            continue
        head = "kv_h" if name in ("k", "v") else "h"
        stride_b, stride_h = (c_dim(s) for s in operand.strides[:2])
        begin = f"{name} + b * {stride_b} + {head} * {stride_h}"
        kind = element_type(spec, name)
        if kind.startswith("qc_code_"):
            begin = f"(const {kind}*)({begin})"
        lines.append(f"const auto {name}_head = {begin};")
    return lines


def unpacks(body: AttentionKernel) -> bool:
    """Whether codes have a step for each 32 columns. All forms but tiles make blocks of them floats in scratch."""
    return body.cache == "int4"


def has_scales(body: AttentionKernel) -> bool:
    """Whether keys and values are codes with a scale for each row."""
    return body.cache is not None and not unpacks(body)


def element_type(spec: KernelSpec, name: str) -> str:
    """The C++ type of an operand's elements: the codes of a cache have one of their own (cache.h)."""
    body = spec.body
    assert isinstance(body, AttentionKernel)
    if body.cache is not None and not unpacks(body) and name in ("k", "v"):
        return f"qc_code_{body.cache}"
    return STORAGE_TYPES[operand(spec, name).dtype]


def operand_names(spec: KernelSpec) -> tuple[str, ...]:
    """q, k, v, [mask], [last], [sinks], out."""
    body = spec.body
    assert isinstance(body, AttentionKernel)
    more = {"mask": body.mask != "none", "last": body.last, "sinks": body.sinks}
    return ("q", "k", "v", *(name for name, there in more.items() if there), "out")


def operand(spec: KernelSpec, name: str) -> Operand:
    return spec.operands[operand_names(spec).index(name)]


def number_of(spec: KernelSpec, query: str) -> str:
    """The position of `query` of batch `b` among the keys: the query's own index, or the element of `last`."""
    body = spec.body
    assert isinstance(body, AttentionKernel)
    if not body.last:
        return query
    stride_b, stride_q = (c_dim(s) for s in operand(spec, "last").strides)
    number = f"last[b * {stride_b} + ({query}) * {stride_q}]"
    return f"qc_position({number})" if operand(spec, "last").dtype == "i64" else f"(int64_t){number}"


def first_top(spec: KernelSpec, query: str) -> str:
    """The largest score of a query, whose head is declared, before it has seen a key: that of its sink."""
    body = spec.body
    assert isinstance(body, AttentionKernel)
    return (
        f"qc_load(sinks_head + ({query}) * {c_dim(operand(spec, 'sinks').strides[2])})" if body.sinks else "-INFINITY"
    )


def seen_keys(spec: KernelSpec, start: str, count: str) -> list[str]:
    """Declares `first` and `seen`: queries `start` to `start + count - 1` only see keys in [first, seen)."""
    body = spec.body
    assert isinstance(body, AttentionKernel)
    if not body.last:
        first = "0" if body.window is None else f"qc_max(0, {start} + 1 - {body.window})"
        seen = f"qc_min(kv_len, {start} + {count})" if body.causal else "kv_len"
        return [f"const int64_t first = {first}, seen = {seen};"]
    if body.ring:
        return [
            *positions(spec, start, count),
            "const int64_t first = 0, seen = qc_max(0, qc_min(kv_len, highest + 1));",
        ]
    lines = [f"const int64_t number = {number_of(spec, f'{start} + each')};"]
    if body.window is not None:
        lines.append(f"first = qc_min(first, qc_max(0, number + 1 - {body.window}));")
    lines.append("seen = qc_max(seen, qc_min(kv_len, number + 1));")
    return [
        f"int64_t first = {'0' if body.window is None else 'kv_len'}, seen = 0;",
        f"for (int64_t each = 0; each < {count}; each++) {{",
        *indent(lines),
        "}",
    ]


def positions(spec: KernelSpec, start: str, count: str) -> list[str]:
    """Declares `lowest` and `highest`, of the positions of queries `start` to `start + count - 1`."""
    begin = f"int64_t lowest = {number_of(spec, start)}, highest = lowest;"
    if count == "1":
        return [begin]
    return [
        begin,
        f"for (int64_t each = 1; each < {count}; each++) {{",
        f"    const int64_t number = {number_of(spec, f'{start} + each')};",
        "    lowest = qc_min(lowest, number);",
        "    highest = qc_max(highest, number);",
        "}",
    ]


def ring_lines(spec: KernelSpec, query: str, key: str) -> list[str]:
    """Hides the scores of rows of a ring outside the window. Row `key` is at or before the query's position.

    `back` is how many positions row `key` lies behind the query. It falls from lane to lane, and starts again at
    kv_len - 1 behind the row of the query.
    """
    body = spec.body
    assert isinstance(body, AttentionKernel)
    return [
        f"const int64_t back = ({number_of(spec, query)} - ({key})) % kv_len;",
        f"const int old = (int)qc_max(0, qc_min(16, back + 1 - {body.window}));  // SIMD lanes before the window",
        "const int own = (int)qc_min(16, back + 1);  // up to the query's row",
        f"const int far = (int)qc_min(16, back + 1 + kv_len - {body.window});  // behind it, and before the window",
        "s = vsel(vfirst(old), vset(-INFINITY), vsel(vfirst(own), s, vsel(vfirst(far), vset(-INFINITY), s)));",
    ]


def skips(spec: KernelSpec, block: str) -> list[str]:
    """Ends the turn of a loop over blocks of `block` keys if no query of the task sees a row from `k0` on."""
    body = spec.body
    assert isinstance(body, AttentionKernel)
    if not body.ring:
        return []
    span = f"highest - lowest + {body.window} + {block} - 1"
    return [f"if ((highest - k0) % kv_len >= {span}) continue;  // the ring's rows outside the window"]


def score_lines(
    spec: KernelSpec, address: str, query: str, key: str, scales: str | None = None, *, scaled: bool = True
) -> list[str]:
    """Declares ``vf s``: the scores at `address`, scaled and masked for `query` and the 16 keys from `key` on.

    `scales` is the address of the keys' own scales, if scores are products with codes. Without `scaled` the scale of
    all scores is left out.
    """
    body = spec.body
    assert isinstance(body, AttentionKernel)
    times = f" * vset({float_literal(body.scale, 'f32')})" if scaled else ""
    lines = [f"vf s = vload({address}){times};"]
    if scales is not None:
        lines.append(f"s = s * vload({scales});")
    if body.softcap is not None:
        cap = f"vset({float_literal(body.softcap, 'f32')})"
        lines.append(f"s = {cap} * vtanh(s / {cap});")
    if body.ring:
        lines += ring_lines(spec, query, key)
    elif body.window is not None:
        far = f"{number_of(spec, query)} + 1 - {body.window} - ({key})"  # SIMD lanes whose key is before the window
        lines.append(f"s = vsel(vfirst((int)qc_max(0, qc_min(16, {far}))), vset(-INFINITY), s);")
    if body.mask == "none":
        return lines
    mask = operand(spec, "mask")
    stride_q, stride_k = mask.strides[2:]
    row = f"mask_head + {query} * {c_dim(stride_q)}"
    match stride_k:
        case 0:
            read = f"vset(qc_load({row}))"
        case 1:
            read = f"vload_upto({row} + {key}, n)"
        case _:
            read = f"vload_s({row} + ({key}) * {c_dim(stride_k)}, {c_dim(stride_k)}, n)"
    lines.append(f"s = vsel({read}, s, vset(-INFINITY));" if body.mask == "bool" else f"s = s + {read};")
    return lines
