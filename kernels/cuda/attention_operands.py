"""C++ text that the attention kernels share: operands, where heads begin, masks."""

from __future__ import annotations

from collections.abc import Sequence

from qcompiler.kernels.scalar import float_literal
from qcompiler.kernels.text import c_dim, identifier
from qcompiler.plan.kernel import KernelSpec, Operand
from qcompiler.plan.kinds.attention import AttentionKernel


def body_of(spec: KernelSpec) -> AttentionKernel:
    assert isinstance(spec.body, AttentionKernel)
    return spec.body


def roles(spec: KernelSpec) -> tuple[str, ...]:
    """q, k, v, [mask], [last], [sinks], out: the names of the operands in order."""
    body = body_of(spec)
    more = {"mask": body.mask != "none", "last": body.last, "sinks": body.sinks}
    return ("q", "k", "v", *(name for name, there in more.items() if there), "out")


def operand(spec: KernelSpec, role: str) -> Operand:
    return spec.operands[roles(spec).index(role)]


def stride(spec: KernelSpec, role: str) -> str:
    """Elements between consecutive rows of a head."""
    return c_dim(operand(spec, role).strides[2])


def head_pointers(spec: KernelSpec, wanted: Sequence[str], head: str = "h", prefix: str = "") -> list[str]:
    """Declares `<role>_head`: where head `head` (`kv_h` for k and v) of batch `b` begins."""
    lines = []
    for role in wanted:
        if role == "last":  # `last` has no heads
            continue
        each = operand(spec, role)
        at = "kv_h" if role in ("k", "v") else head
        terms = [
            f"{index} * {c_dim(step)}" for index, step in zip(("b", at), each.strides[:2], strict=True) if step != 0
        ]
        lines.append(f"const auto {prefix}{role}_head = {' + '.join([identifier(each.name), *terms])};")
    return lines


def rows_aligned(spec: KernelSpec) -> list[str]:
    """Declares `k_aligned` and `v_aligned`: whether rows begin at multiples of 16 bytes. Those of a cache do."""
    if body_of(spec).cache is not None:
        return []
    return [f"const bool {r}_aligned = qc_rows_aligned({r}_head, {stride(spec, r)});" for r in ("k", "v")]


def capped(spec: KernelSpec, score: str) -> str:
    """The scaled score, soft-capped if the spec says so."""
    cap = body_of(spec).softcap
    if cap is None:
        return score
    literal = float_literal(cap, "f32")
    return f"{literal} * tanhf(({score}) / {literal})"


def number_of(spec: KernelSpec, query: str) -> str:
    """The position of `query` of batch `b` among the keys: the query's own index, or the element of `last`."""
    if not body_of(spec).last:
        return query
    each = operand(spec, "last")
    terms = [f"{index} * {c_dim(step)}" for index, step in zip(("b", f"({query})"), each.strides, strict=True) if step]
    number = f"{identifier(each.name)}[{' + '.join(terms) or '0'}]"
    return f"qc_position({number})" if each.dtype == "i64" else f"(int64_t){number}"


def first_top(spec: KernelSpec, query: str) -> str:
    """The largest score of a query, whose head is declared, before it has seen a key: that of its sink."""
    if not body_of(spec).sinks:
        return "-INFINITY"
    step = operand(spec, "sinks").strides[2]
    return "qc_load(sinks_head)" if step == 0 else f"qc_load(sinks_head + ({query}) * {c_dim(step)})"


def first_total(spec: KernelSpec, top: str, once: str) -> str:
    """The total of its weights before it has seen a key: the sink's own weight, which is 1, since `top` is its score.
    Threads add up their totals, so only the one for which `once` is true has it."""
    return f"{once} && {top} != -INFINITY ? 1.0f : 0.0f" if body_of(spec).sinks else "0.0f"


def seen_keys(spec: KernelSpec, start: str, count: str, tile: int) -> list[str]:
    """Declares `first_key` (a multiple of `tile`) and `seen`: queries `start` to `start + count - 1` only see keys in
    [first_key, seen)."""
    body = body_of(spec)
    kv_len = c_dim(body.kv_len)
    if not body.last:
        first = "0" if body.window is None else f"qc_max(0, {start} + 1 - {body.window}) / {tile} * {tile}"
        seen = f"qc_min({kv_len}, {start} + {count})" if body.causal else kv_len
        return [f"const int64_t first_key = {first}, seen = {seen};"]
    lines = [f"const int64_t number = {number_of(spec, f'{start} + each')};"]
    if body.ring:
        return [
            f"int64_t lowest = {number_of(spec, start)}, highest = lowest;",
            f"for (int64_t each = 1; each < {count}; each++) {{",
            *("    " + line for line in lines),
            "    lowest = qc_min(lowest, number);",
            "    highest = qc_max(highest, number);",
            "}",
            f"const int64_t seen = qc_max(0, qc_min({kv_len}, highest + 1));",
            f"const int64_t first_key = {next_keys(spec, '0', tile)};",
        ]
    if body.window is not None:
        lines.append(f"first_key = qc_min(first_key, qc_max(0, number + 1 - {body.window}) / {tile} * {tile});")
    lines.append(f"seen = qc_max(seen, qc_min({kv_len}, number + 1));")
    return [
        f"int64_t first_key = {'0' if body.window is None else kv_len}, seen = 0;",
        f"for (int64_t each = 0; each < {count}; each++) {{",
        *("    " + line for line in lines),
        "}",
    ]


def next_keys(spec: KernelSpec, start: str, tile: int, step: int | None = None) -> str:
    """The first key of the next tile of `tile` keys, from `start` on. In a ring, tiles that no query of the block sees
    are skipped: `step` is the distance between the tiles of a warp."""
    body = body_of(spec)
    if not body.ring:
        return start
    span = f"highest - lowest + {body.window} + {tile - 1}"
    return f"qc_ring_keys({start}, {tile if step is None else step}, seen, highest, {span}, {c_dim(body.kv_len)})"


def hidden(spec: KernelSpec, query: str, key: str, beyond: str) -> str:
    """The condition under which the query at position `query` does not see a key, apart from masks. `beyond` is the
    condition that the key is past the last one."""
    body = body_of(spec)
    terms = [beyond]
    if body.causal or body.last:
        terms.append(f"{key} > {query}")
    if body.ring:
        terms.append(f"({query} - ({key})) % {c_dim(body.kv_len)} >= {body.window}")
    elif body.window is not None:
        terms.append(f"{key} <= {query} - {body.window}")
    return " || ".join(terms)


def masked(spec: KernelSpec, query: str, key: str, head: str = "mask_head") -> list[str]:
    """Statements that apply the mask to ``s``, the scaled score of query `query` and key `key`."""
    body = body_of(spec)
    if body.mask == "none":
        return []
    down, right = operand(spec, "mask").strides[2:]
    terms = [head]
    for index, step in ((query, down), (key, right)):
        if step != 0:
            terms.append(index if step == 1 else f"({index}) * {c_dim(step)}")
    address = " + ".join(terms)
    if body.mask == "bool":
        return [f"if (!qc_load({address})) s = -INFINITY;"]
    return [f"s += qc_load({address});"]


def place_of(each: Operand, indices: Sequence[str]) -> str:
    """The address of the first element at these leading indices."""
    terms = [f"{index} * {c_dim(step)}" for index, step in zip(indices, each.strides, strict=False) if step != 0]
    return " + ".join([identifier(each.name), *terms])
