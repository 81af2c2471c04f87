"""C++ text of the two products of attention: register tiles of fused multiply-adds."""

from __future__ import annotations

from dataclasses import dataclass

from qcompiler.kernels.text import indent

LANES = 16


@dataclass(frozen=True)
class RegisterTile:
    """Register tile: `rows` queries by `panels` vectors of 16 floats."""

    rows: int
    panels: int

    @property
    def width(self) -> int:
        return self.panels * LANES


@dataclass(frozen=True)
class Ahead:
    """What a product fetches into the second cache meanwhile, some lines in each turn of its loop: rows of `columns`
    elements of a C++ type, at `ahead` and `ahead_stride` elements apart."""

    kind: str
    columns: int

    @property
    def parameters(self) -> str:
        return f", const {self.kind}* ahead, int64_t ahead_stride"

    @property
    def line(self) -> int:
        """Elements of a cache line."""
        return 64 // ELEMENT_BYTES[self.kind]

    @property
    def lines(self) -> int:
        """Lines of a row."""
        return -(-self.columns // self.line)


ELEMENT_BYTES = {"float": 4, "qc_f16": 2, "qc_bf16": 2, "qc_code_int8": 1, "qc_code_fp8": 1}


def scores_function(kernel: str, tile: RegisterTile, depth: int, key_block: int, ahead: Ahead | None = None) -> str:
    """``scores[r][j] = sum_d queries[r][d] keys[d][j]`` for one tile; rows of scores are `key_block` floats apart."""
    rows, panels = tile.rows, tile.panels
    lines = [f"vf {', '.join(f'a{r}_{p} = vzero()' for p in range(panels))};" for r in range(rows)]
    lines.append(f"for (int64_t d = 0; d < {depth}; d++) {{")
    if ahead is not None:
        row = f"d / {ahead.lines}" if ahead.lines > 1 else "d"
        lines.append(f"    __builtin_prefetch(ahead + {row} * ahead_stride + d % {ahead.lines} * {ahead.line}, 0, 2);")
    lines += [f"    const vf k{p} = vload(keys + d * {tile.width} + {p * LANES});" for p in range(panels)]
    for r in range(rows):
        products = " ".join(f"a{r}_{p} = vfma(q{r}, k{p}, a{r}_{p});" for p in range(panels))
        lines.append(f"    const vf q{r} = vset(queries[{r * depth} + d]); {products}")
    lines.append("}")
    for r in range(rows):
        lines += [f"vstore(scores + {r * key_block + p * LANES}, a{r}_{p});" for p in range(panels)]
    more = "" if ahead is None else ahead.parameters
    signature = f"qk_{kernel}_scores(const float* queries, const float* keys, float* scores{more})"
    return "\n".join([f"static inline void {signature} {{", *indent(lines), "}", ""])


def values_functions(
    kernel: str, tile: RegisterTile, key_block: int, columns: int, kind: str, live: int, ahead: Ahead | None = None
) -> str:
    """``sums[r][c] += sum_j weights[r][j] values[j][c]``: for one tile of columns, and for the columns that remain.

    Rows of sums are `columns` floats apart, a multiple of 16. Values are of the C++ type `kind`, and their rows have
    `live` columns, which are all that is read.
    """
    found = []
    if live >= tile.width:
        found.append(_values_function(f"{kernel}_values", tile, key_block, columns, kind, LANES, ahead))
    if rest := live % tile.width:
        last = RegisterTile(tile.rows, -(-rest // LANES))
        lanes = rest % LANES or LANES
        found.append(_values_function(f"{kernel}_values_rest", last, key_block, columns, kind, lanes, ahead))
    return "\n".join(found)


def _values_function(
    name: str, tile: RegisterTile, key_block: int, columns: int, kind: str, lanes: int, ahead: Ahead | None
) -> str:
    """One of them: its last panel has `lanes` columns."""
    rows, panels = tile.rows, tile.panels
    lines = [f"vf a{r}_{p} = vload(sums + {r * columns + p * LANES});" for r in range(rows) for p in range(panels)]
    lines.append("for (int64_t j = 0; j < count; j++) {")
    if ahead is not None:
        lines += [
            f"    __builtin_prefetch(ahead + j * ahead_stride + {c}, 0, 2);" for c in range(0, tile.width, ahead.line)
        ]
    for p in range(panels):
        at = f"values + j * stride + {p * LANES}"
        short = p == panels - 1 and lanes < LANES
        lines.append(f"    const vf v{p} = {f'vload_n({at}, {lanes})' if short else f'vload({at})'};")
    for r in range(rows):
        products = " ".join(f"a{r}_{p} = vfma(w{r}, v{p}, a{r}_{p});" for p in range(panels))
        lines.append(f"    const vf w{r} = vset(weights[{r * key_block} + j]); {products}")
    lines.append("}")
    lines += [f"vstore(sums + {r * columns + p * LANES}, a{r}_{p});" for r in range(rows) for p in range(panels)]
    more = "" if ahead is None else ahead.parameters
    operands = f"const float* weights, const {kind}* values, int64_t stride, int64_t count, float* sums{more}"
    return "\n".join([f"static inline void qk_{name}({operands}) {{", *indent(lines), "}", ""])


@dataclass(frozen=True)
class Weighing:
    """C++ expressions for a block's values: the first row, its stride, the number of rows, where their sums begin, and
    what is fetched meanwhile (its first row and its stride)."""

    values: str
    stride: str
    count: str
    sums: str
    ahead: tuple[str, str] | None = None


def weigh_values(kernel: str, tile: RegisterTile, live: int, block: Weighing, weights: str = "scores") -> list[str]:
    """Calls of `values_functions` for all columns: `weights` times the values, added to their sums."""
    full, lines = live // tile.width * tile.width, []

    def call(name: str, column: int | str) -> str:
        more = "" if block.ahead is None else f", {block.ahead[0]} + {column}, {block.ahead[1]}"
        rows = f"{block.values} + {column}, {block.stride}, {block.count}, {block.sums} + {column}{more}"
        return f"qk_{kernel}_{name}({weights}, {rows});"

    if full:
        lines += [f"for (int64_t c = 0; c < {full}; c += {tile.width})", f"    {call('values', 'c')}"]
    if live % tile.width:
        lines.append(call("values_rest", full))
    return lines
