"""Linear attention with decay: tasks take some rows of the states, and the tokens of their sequences in order.

Rows of a state need each other at no token, so that one sequence has work for every thread. Tokens pass in blocks: the
keys and queries of a block are copied to scratch, where they stay in the first cache, for all rows of a group of heads.
Some rows at a time are held in registers while a block passes (linear_attention.h), or, where a row is too long for the
registers of the instruction set, stay in memory. A token's arithmetic depends on nothing but the state before it.
"""

from __future__ import annotations

from dataclasses import dataclass

from qcompiler.kernels.cpu.text import entry_function, pointer, task_function
from qcompiler.kernels.text import c_dim, header_comment, indent, offset
from qcompiler.plan.kernel import KernelSpec, Operand
from qcompiler.plan.kinds.linear_attention import LinearAttentionKernel

_LANES = 16

_HELD_VECTORS = {"x86-64-v4": 24, "x86-64-v3": 5}
"""Vectors of a state that fit in registers: 24 of 32, or 10 of 16 that have half the lanes. What is left holds a key, a
query and the sums. Other instruction sets have a fourth of the lanes and room for 2 vectors."""

_BLOCK_FLOATS = 2048
"""Columns of all keys of a block: with the queries 16 KiB, half of a first cache. Wide heads have blocks of fewer
tokens, so that their values take twice as much at most."""

_TASK_ROWS = 64
"""Rows that a task has at least: it copies the keys and queries of all tokens, which is worth it for many rows."""


def headers(spec: KernelSpec) -> tuple[str, ...]:
    return ("linear_attention.h",)


def _body(spec: KernelSpec) -> LinearAttentionKernel:
    assert isinstance(spec.body, LinearAttentionKernel)
    return spec.body


@dataclass(frozen=True)
class _Shape:
    """How the rows of a state are taken: `rows` at a time, in registers if `held`, for `tokens` tokens a block."""

    rows: int
    held: bool
    tokens: int
    wide: int
    """Columns of a row in whole vectors."""

    @property
    def per_token(self) -> int:
        """Floats that have one number for each token of a block, in whole vectors."""
        return -(-self.tokens // _LANES) * _LANES


def _shape(body: LinearAttentionKernel, isa: str) -> _Shape:
    vectors = -(-body.depth // _LANES)
    room = _HELD_VECTORS.get(isa, 2) // vectors
    rows = min(room, 4) if room else (4 if isa == "x86-64-v4" else 2)
    tokens = max(1, min(64, _BLOCK_FLOATS // (vectors * _LANES), 4 * _BLOCK_FLOATS // body.width))
    return _Shape(min(rows, body.width), room > 0, tokens, vectors * _LANES)


def scratch_bytes(spec: KernelSpec, isa: str) -> int:
    """The keys, queries and decays of a block of tokens."""
    body, shape = _body(spec), _shape(_body(spec), isa)
    columns = 3 if body.decays_columns or body.has_rate else 2
    return 4 * (columns * shape.tokens * shape.wide + 3 * shape.per_token + shape.tokens * body.width)


def _packed(spec: KernelSpec, named: dict[str, Operand], shape: _Shape) -> list[str]:
    """The keys and queries of a block, which the heads of a group share."""
    body = _body(spec)
    at = {name: offset(named[name], ["b", "t0 + t", "g", "0"]) for name in ("key", "query")}
    product = f"products[t] = qa_product<{body.depth}>(k + t * {shape.wide}, q + t * {shape.wide});"
    return [
        "for (int64_t t = 0; t < tokens; t++) {",
        f"    qa_pack<{body.depth}>(key + {at['key']}, k + t * {shape.wide});",
        f"    qa_pack<{body.depth}>(query + {at['query']}, q + t * {shape.wide});",
        *([f"    {product}"] if body.has_beta else []),
        "}",
    ]


def _decays(spec: KernelSpec, named: dict[str, Operand], shape: _Shape) -> list[str]:
    """What the tokens of a block keep of a head's columns, and their betas."""
    body = _body(spec)
    decay = f"decay[{offset(named['decay'], ['b', 't0 + t', 'h', '0'])}]"
    each: list[str] = []
    if body.has_rate:
        rate = f"rate + {offset(named['rate'], ['h', '0'])}"
        each.append(f"qa_decays<{body.depth}>({rate}, {decay}, keeps + t * {shape.wide});")
    elif body.decays_columns:
        each.append(f"qa_decays<{body.depth}>(&{decay}, 1.0f, keeps + t * {shape.wide});")
    else:
        each.append(f"kept[t] = {decay};")
    if body.has_beta:
        each.append(f"betas[t] = beta[{offset(named['beta'], ['b', 't0 + t', 'h'])}];")
    lines = ["for (int64_t t = 0; t < tokens; t++) {", *indent(each), "}"]
    if not body.has_rate and not body.decays_columns:
        lines.append("for (int64_t t = 0; t < tokens; t += 16) vstore(kept + t, vexp(vload(kept + t)));")
    return lines


def _rows(spec: KernelSpec, named: dict[str, Operand], shape: _Shape) -> list[str]:
    """The rows of item `j`, from `p` on, for a block of tokens."""
    body, state = _body(spec), named["state"]

    def call(rows: int, p: str = "p") -> str:
        columns = body.decays_columns or body.has_rate
        options = (rows, body.depth, *(str(flag).lower() for flag in (shape.held, body.has_beta, columns)))
        template = ", ".join(str(option) for option in options)
        begins = f"t0 == 0 && first[{offset(named['first'], ['b'])}] == 0"
        return f"qa_tokens<{template}>(s, {c_dim(state.strides[2])}, {begins}, block, x + {p});"

    rest, whole = body.width % shape.rows, call(shape.rows)
    return [
        f"const int64_t p = j % {-(-body.width // shape.rows)} * {shape.rows};",
        f"float* s = state + {offset(state, ['b', 'h', 'p', '0'])};",
        *([] if shape.rows == 1 else [
            "if (tokens == 1) {  // each row is read and written once: the shortest way lets more of them be under way",
            f"    const int64_t over = qc_min({body.width}, p + {shape.rows});",
            f"    for (int64_t one = p; one < over; one++, s += {c_dim(state.strides[2])}) {call(1, 'one')}",
            "    continue;",
            "}",
        ]),
        whole if not rest else f"if (p + {shape.rows} <= {body.width}) {whole} else {call(rest)}",
    ]  # fmt: skip


def _task(spec: KernelSpec, named: dict[str, Operand], shape: _Shape, items: str, tasks: str) -> list[str]:
    """The items of a task, which are parts of heads; those of one sequence and group share keys and queries."""
    body, steps = _body(spec), c_dim(_body(spec).steps)
    parts = -(-body.width // shape.rows)
    of_group, columns = body.heads // body.groups * parts, body.decays_columns or body.has_rate
    size = shape.tokens * shape.wide
    room = {"k": size, "q": size, "keeps": size if columns else 0, "kept": shape.per_token, "betas": shape.per_token}
    room |= {"products": shape.per_token, "x": shape.tokens * body.width}
    starts, at = [], 0
    for name, floats in room.items():
        starts.append(f"float* const {name} = " + (f"(float*)scratch + {at};" if floats else "nullptr;"))
        at += floats
    value, result = (offset(named[name], ["b", "t0 + t", "h", "p"]) for name in ("value", "out"))
    zero = offset(named["out"], ["b", "t", "h", "p"])
    return [
        *(pointer(operand, number, name, "call->op") for number, (name, operand) in enumerate(named.items())),
        *starts,
        f"const int64_t items = {items}, tasks = {tasks};",
        "const int64_t end = qc_share(items, task + 1, tasks);",
        "for (int64_t i = qc_share(items, task, tasks), upto; i < end; i = upto) {",
        f"    const int64_t number = i / {of_group}, b = number / {body.groups}, g = number % {body.groups};",
        *indent(_count(spec, named)),
        f"    upto = qc_min(end, (number + 1) * {of_group});",
        f"    for (int64_t t0 = 0; t0 < count; t0 += {shape.tokens}) {{",
        f"        const int64_t tokens = qc_min({shape.tokens}, count - t0);",
        *indent(_packed(spec, named, shape), 2),
        "        for (int64_t j = i; j < upto;) {",
        f"            const int64_t h = j / {parts} % {body.heads}, last = qc_min(upto, (j / {parts} + 1) * {parts});",
        f"            const int64_t from = j % {parts} * {shape.rows};",
        f"            const int64_t behind = qc_min({body.width}, from + (last - j) * {shape.rows});",
        *indent(_decays(spec, named, shape), 3),
        "            for (int64_t t = 0; t < tokens; t++)",
        f"                for (int64_t p = from; p < behind; p++) x[t * {body.width} + p] = value[{value}];",
        f"            const qa_block block = {{k, q, keeps, kept, betas, products, tokens, {body.width}}};",
        "            for (; j < last; j++) {",
        *indent(_rows(spec, named, shape), 4),
        "            }",
        "            for (int64_t t = 0; t < tokens; t++)",
        f"                for (int64_t p = from; p < behind; p++) out[{result}] = x[t * {body.width} + p];",
        "        }",
        "    }",
        f"    for (int64_t t = count; t < {steps}; t++)",
        "        for (int64_t j = i; j < upto; j++) {",
        f"            const int64_t h = j / {parts} % {body.heads}, from = j % {parts} * {shape.rows};",
        f"            const int64_t behind = qc_min({body.width}, from + {shape.rows});",
        f"            for (int64_t p = from; p < behind; p++) out[{zero}] = 0.0f;",
        "        }",
        "}",
    ]


def _narrow_task(spec: KernelSpec, named: dict[str, Operand], items: str, tasks: str) -> list[str]:
    """The heads of a task where a state is one row (Mamba): some heads at a time, whose states stay in the first cache,
    token by token."""
    body, state = _body(spec), named["state"]
    at = {name: offset(named[name], ["b", "t", "h", "0"]) for name in ("value", "decay", "out")}
    at |= {name: offset(named[name], ["b", "t", "g", "0"]) for name in ("key", "query")}
    rate = f"rate + {offset(named['rate'], ['h', '0'])}" if body.has_rate else "nullptr"
    row, columns = offset(state, ["b", "h", "0", "0"]), str(body.decays_columns).lower()
    return [
        *(pointer(operand, number, name, "call->op") for number, (name, operand) in enumerate(named.items())),
        f"const int64_t items = {items}, tasks = {tasks};",
        "const int64_t end = qc_share(items, task + 1, tasks);",
        "for (int64_t i = qc_share(items, task, tasks), upto; i < end; i = upto) {",
        f"    const int64_t b = i / {body.heads}, from = i % {body.heads}, g = from / {body.heads // body.groups};",
        f"    const int64_t most = from + qc_min(end - i, {_TASK_ROWS});",
        f"    const int64_t behind = qc_min((g + 1) * {body.heads // body.groups}, most);",
        "    upto = i + behind - from;",
        *indent(_count(spec, named)),
        f"    if (count > 0 && first[{offset(named['first'], ['b'])}] == 0)",
        f"        for (int64_t h = from; h < behind; h++) memset(state + {row}, 0, {4 * body.depth});",
        "    for (int64_t t = 0; t < count; t++)",
        "        for (int64_t h = from; h < behind; h++)",
        f"            out[{at['out']}] = qa_step<{body.depth}, {columns}>(",
        f"                state + {row}, key + {at['key']}, query + {at['query']}, value[{at['value']}],",
        f"                decay + {at['decay']}, {rate});",
        f"    for (int64_t t = count; t < {c_dim(body.steps)}; t++)",
        f"        for (int64_t h = from; h < behind; h++) out[{at['out']}] = 0.0f;",
        "}",
    ]


def _count(spec: KernelSpec, named: dict[str, Operand]) -> list[str]:
    """How many tokens sequence b reads."""
    return [
        f"const int64_t given = counts[{offset(named['counts'], ['b'])}];",
        f"const int64_t count = qc_max(0, qc_min(given, {c_dim(_body(spec).steps)}));",
    ]


def emit(spec: KernelSpec, isa: str) -> str:
    """C++ text of one kernel."""
    body, shape = _body(spec), _shape(_body(spec), isa)
    named = dict(zip(body.names, spec.operands, strict=True))
    items = f"{c_dim(body.batch)} * {body.heads * -(-body.width // shape.rows)}"
    shares = f"{c_dim(body.batch)} * {-(-body.heads * body.width // _TASK_ROWS)}"
    tasks = f"qc_tasks({shares}, {c_dim(body.steps)} * {6 * _TASK_ROWS * body.depth})"
    is_narrow = body.width == 1 and not body.has_beta
    task = _narrow_task(spec, named, items, tasks) if is_narrow else _task(spec, named, shape, items, tasks)
    launch = [f"qc_run(ctx, op, sym, {tasks}, qk_{spec.name}_task);"]
    place = "in registers" if shape.held else "in memory"
    note = f"up to {_TASK_ROWS} states of one row at a time, token by token"
    if not is_narrow:
        note = f"{shape.rows} row(s) of a state at a time, {place}, for blocks of {shape.tokens} token(s) in order"
    head = header_comment(spec, note)
    return "\n".join([head, task_function(spec, task), entry_function(spec, launch)])
