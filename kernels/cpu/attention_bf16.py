"""C++ text of the two products of attention in bf16 (attention_bf16.h): register tiles of `vdpbf16ps`.

A word holds two columns of a key, or a column of two values. Weights are rounded where they lie: behind the softmax a
row of scores holds words of two weights.
"""

from __future__ import annotations

from qcompiler.kernels.cpu.attention_tiles import LANES, Ahead, RegisterTile
from qcompiler.kernels.text import indent
from qcompiler.plan.kinds.attention import AttentionKernel

GUARD = "#if defined(QC_AVX512) && !defined(QB_NO_BF16)"


def chosen(body: AttentionKernel, isa: str) -> bool:
    """Whether a program for `isa` has both kinds of kernel, since its processors may multiply pairs of bf16."""
    return body.compute == "bf16" and isa == "x86-64-v4"


def row_columns(depth: int) -> int:
    """bf16 numbers of a packed row of `depth` columns."""
    return -(-depth // (2 * LANES)) * 2 * LANES


def choose_task(kernel: str, *, by_tiles: bool = False) -> list[str]:
    """Declares `task_of`, the task function for this processor; `by_tiles` says that the kernel has one for AMX."""
    tiles = [f"if (ctx->bf16_units == QC_BF16_TILES) task_of = qk_{kernel}_amx_task;"]
    return [
        f"auto* task_of = qk_{kernel}_task;",
        GUARD,
        f'if (__builtin_cpu_supports("avx512bf16")) task_of = qk_{kernel}_bf16_task;',
        *(tiles if by_tiles else []),
        "#endif",
    ]


def guarded(text: str) -> str:
    return f"{GUARD}\n{text}#endif\n"


def scores_function(kernel: str, tile: RegisterTile, depth: int, key_block: int, ahead: Ahead | None = None) -> str:
    """``scores[r][j] = sum_w queries[r][w] . keys[w][j]``; rows of scores are `key_block` floats apart."""
    rows, panels, pitch = tile.rows, tile.panels, row_columns(depth) // 2
    words = -(-depth // 2)
    lines = [f"qf {', '.join(f'a{r}_{p} = {{}}' for p in range(panels))};" for r in range(rows)]
    lines.append(f"for (int64_t w = 0; w < {words}; w++) {{")
    if ahead is not None:
        for number in range(-(-tile.width * ahead.lines // words)):
            turn = f"(w + {number * words})" if number else "w"
            row = f"{turn} / {ahead.lines}" if ahead.lines > 1 else turn
            lines.append(
                f"    __builtin_prefetch(ahead + {row} * ahead_stride + {turn} % {ahead.lines} * {ahead.line}, 0, 2);"
            )
    lines += [
        f"    const qu k{p} = (qu)q_load((const int32_t*)keys + w * {tile.width} + {p * LANES});" for p in range(panels)
    ]
    for r in range(rows):
        dots = " ".join(f"qb_dot(a{r}_{p}, k{p}, queries + {r * pitch} + w);" for p in range(panels))
        lines.append(f"    {dots}")
    lines.append("}")
    for r in range(rows):
        lines += [f"q_store(scores + {r * key_block + p * LANES}, a{r}_{p});" for p in range(panels)]
    more = "" if ahead is None else ahead.parameters
    signature = f"qk_{kernel}_bf16_scores(const qb_word* queries, const float* keys, float* scores{more})"
    return "\n".join([f"static inline void {signature} {{", *indent(lines), "}", ""])


def values_functions(
    kernel: str, tile: RegisterTile, key_block: int, columns: int, kind: str, live: int, ahead: Ahead | None = None
) -> str:
    """``sums[r][c] += sum_j weights[r][j] values[j][c]``, two keys at a time: for one tile of columns, and for the
    columns that remain.

    Rows of sums are `columns` floats apart. Values are words of two keys (`kind` is "qb_word"), or rows of the C++ type
    `kind`, of which `live` columns are read.
    """
    found = []
    if live >= tile.width:
        found.append(_values_function(f"{kernel}_bf16_values", tile, key_block, columns, kind, LANES, ahead))
    if rest := live % tile.width:
        last = RegisterTile(tile.rows, -(-rest // LANES))
        lanes = rest % LANES or LANES
        found.append(_values_function(f"{kernel}_bf16_values_rest", last, key_block, columns, kind, lanes, ahead))
    return "\n".join(found)


def _values_function(
    name: str, tile: RegisterTile, key_block: int, columns: int, kind: str, lanes: int, ahead: Ahead | None
) -> str:
    """One of them: its last panel has `lanes` columns."""
    rows, panels, packed = tile.rows, tile.panels, kind == "qb_word"
    lines = [f"qf a{r}_{p} = q_load(sums + {r * columns + p * LANES});" for r in range(rows) for p in range(panels)]
    turn = []
    if ahead is not None:
        turn += [
            f"__builtin_prefetch(ahead + {row} * ahead_stride + {c}, 0, 2);"
            for row in ("j", "(j + 1)")
            for c in range(0, tile.width, ahead.line)
        ]
    for p in range(panels):
        short = p == panels - 1 and lanes < LANES
        turn.append(f"const qu v{p} = {_pair(p, lanes if short else LANES, packed=packed)};")
    dots = [
        " ".join(f"qb_dot(a{r}_{p}, v{p}, weights + {r * key_block} + j / 2);" for p in range(panels))
        for r in range(rows)
    ]
    if packed:
        lines += ["for (int64_t j = 0; j < count; j += 2) {", *indent([*turn, *dots]), "}"]
    else:
        last = [
            f"const qu v{p} = qb_pairs(vload_upto(values + j * stride + {p * LANES}, "
            f"{lanes if p == panels - 1 else LANES}), vzero());"
            for p in range(panels)
        ]
        lines += [
            "int64_t j = 0;",
            "for (; j + 1 < count; j += 2) {", *indent([*turn, *dots]), "}",
            "if (j < count) {", *indent([*last, *dots]), "}",
        ]  # fmt: skip
    lines += [f"q_store(sums + {r * columns + p * LANES}, a{r}_{p});" for r in range(rows) for p in range(panels)]
    more = "" if ahead is None else ahead.parameters
    operands = f"const qb_word* weights, const {kind}* values, int64_t stride, int64_t count, float* sums{more}"
    return "\n".join([f"static inline void qk_{name}({operands}) {{", *indent(lines), "}", ""])


def _pair(panel: int, lanes: int, *, packed: bool) -> str:
    """Words of 16 columns of the keys j and j + 1; `lanes` of them are read."""
    if packed:
        return f"(qu)q_load((const int32_t*)values + j / 2 * stride + {panel * LANES})"
    first, second = (f"values + {row} * stride + {panel * LANES}" for row in ("j", "(j + 1)"))
    if lanes < LANES:
        return f"qb_pairs(vload_n({first}, {lanes}), vload_n({second}, {lanes}))"
    return f"qb_beside({first}, {second})"


__all__ = ["GUARD", "choose_task", "chosen", "guarded", "row_columns", "scores_function", "values_functions"]
