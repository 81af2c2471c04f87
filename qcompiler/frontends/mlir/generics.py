"""linalg.generic: products, loops with a body, and folds.

    yield(out + a * b), maps of dims                       stablehlo.dot_general, and a transpose
    all loops parallel                                     mlir.pointwise over operands that are aligned to the loops
    yield(combine(out, term))                              mlir.pointwise of the term, mlir.fold
    %e = tensor.extract %table[%i, index 2]                a row of the table: stablehlo.gather, which is an embedding
    tensor.extract, or a map such as 2 * d0 + d1           mlir.take of a linear index

An operand is aligned to the loops by a transpose and a reshape that gives it a dim of size 1 for each loop that it does
not follow. Then NumPy's broadcasting is what the maps say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from qcompiler.frontends.jax.fold import scalar_of
from qcompiler.frontends.jax.graph import Value
from qcompiler.frontends.jax.scope import splat
from qcompiler.frontends.mlir.affine import Index, constant, dim_of, index_of, parse_map
from qcompiler.frontends.mlir.bodies import OPS, Scalar, ScalarBody, predicate
from qcompiler.frontends.mlir.dense import ints, scalar_number
from qcompiler.ir import build
from qcompiler.plan.dims import Dim, dim, product

if TYPE_CHECKING:
    from qcompiler.frontends.mlir.linalg import LinalgReader, Values

PRODUCTS = {
    "matmul": "mk,kn->mn", "matmul_transpose_a": "km,kn->mn", "matmul_transpose_b": "mk,nk->mn",
    "batch_matmul": "bmk,bkn->bmn", "batch_matmul_transpose_a": "bkm,bkn->bmn",
    "batch_matmul_transpose_b": "bmk,bnk->bmn", "matvec": "mk,k->m", "vecmat": "k,kn->n", "dot": "k,k->",
    "batch_matvec": "bmk,bk->bm", "batch_vecmat": "bk,bkn->bn", "batch_reduce_matmul": "bmk,bkn->mn",
}  # fmt: skip
"""Named products, as in numpy.einsum."""

_FOLDS: dict[str, build.Reduction] = {
    "arith.addf": "add", "arith.addi": "add", "arith.mulf": "mul", "arith.muli": "mul", "arith.maximumf": "max",
    "arith.maxnumf": "max", "arith.maxsi": "max", "arith.minimumf": "min", "arith.minnumf": "min",
    "arith.minsi": "min", "arith.andi": "and", "arith.ori": "or",
}  # fmt: skip
_BITS = {
    "arith.addi": "arith.xori", "arith.subi": "arith.xori", "arith.muli": "arith.andi", "arith.maxsi": "arith.andi",
    "arith.minsi": "arith.ori", "arith.maxui": "arith.ori", "arith.minui": "arith.andi",
}  # fmt: skip
"""Ops on i1, a number of one bit of which the set one is -1."""
_NOWHERE = -(1 << 62)
"""An index that is out of range of every tensor, from its start and from its end."""
_GREATER, _LESS = ("ogt", "oge", "sgt", "sge"), ("olt", "ole", "slt", "sle")
"""Comparisons that NaN fails, so that it never wins."""


@dataclass
class _Loops:
    """A generic op: its loops, its body, and the operands of the body by place."""

    r: LinalgReader
    op: Any
    shape: list[Dim]
    body: ScalarBody
    given: dict[int, Value] = field(default_factory=dict)
    """Operands aligned to the loops (or of rank 0), by place."""
    fixed: dict[int, set[int]] = field(default_factory=dict)
    """The loops that an operand follows."""

    def align(self, value: Value, indices: Sequence[Index]) -> tuple[Value, set[int]]:
        """The operand at these indices, with one dim for each loop, and the loops that it follows."""
        plain = [dim_of(index) for index in indices]
        numbers = [constant(index) for index in indices]
        seen = [d for d in plain if d is not None]
        simple = all(d is not None or n is not None for d, n in zip(plain, numbers, strict=True))
        if not simple or len(seen) != len(set(seen)) or not self._fits(value, plain):
            return self._taken(value, indices)
        for axis, number in enumerate(numbers):
            if number is not None:
                value = self._one(value, axis, number)
        kept = [axis for axis, d in enumerate(plain) if d is not None]
        value = self.r.reshape(value, [value.shape[axis] for axis in kept], self.op)
        order = sorted(range(len(kept)), key=lambda i: seen[i])
        value = self.r.transpose(value, order, self.op)
        wide = [self.shape[d] if d in seen else 1 for d in range(len(self.shape))]
        return self.r.reshape(value, wide, self.op), set(seen)

    def _fits(self, value: Value, plain: Sequence[int | None]) -> bool:
        """Whether each dim is as long as its loop; a longer one is read in part."""
        return all(d is None or value.shape[axis] == self.shape[d] for axis, d in enumerate(plain))

    def _one(self, value: Value, axis: int, number: int) -> Value:
        offsets: list[Dim] = [0] * value.rank
        sizes = list(value.shape)
        offsets[axis], sizes[axis] = number, 1
        return self.r.slice(value, offsets, sizes, [1] * value.rank, self.op)

    def _taken(self, value: Value, indices: Sequence[Index]) -> tuple[Value, set[int]]:
        """Any other access: an index of the flat operand for each iteration."""
        places = [index_of(index, self.body) for index in indices]
        return self.take(value, places, [self._inside(i, n) for i, n in zip(indices, value.shape, strict=True)])

    def _inside(self, index: Index, size: Dim) -> bool:
        """Whether an index is in range for every iteration, whatever the symbolic sizes are."""
        low = high = dim(index.offset)
        for d, factor in index.factors.items():
            reach = (dim(self.shape[d]) - 1) * factor
            low, high = (low, high + reach) if factor > 0 else (low + reach, high)
        ranges = self.r.graph.ranges
        return low.tight_bounds(ranges)[0] >= 0 and (dim(size) - 1 - high).tight_bounds(ranges)[0] >= 0

    # --- extracts ---

    def take(self, value: Value, places: Sequence[int], inside: Sequence[bool] = ()) -> tuple[Value, set[int]]:
        """`value[places]`, where places of the body are computed for each iteration. Each is checked unless it is known
        to be `inside` of its axis: a linear index may be in range where they are not."""
        plain = [self._dim_at(place) for place in places]
        if value.rank == 2 and plain[1] is not None and value.shape[1] == self.shape[plain[1]]:
            follows = self.follows(places[0])
            if plain[1] not in follows:
                return self._rows(value, places[0], plain[1]), follows | {plain[1]}
        if all(d is not None for d in plain) and len(set(plain)) == len(plain) and self._fits(value, plain):
            return self.align(value, [Index({d: 1}, 0) for d in plain if d is not None])
        if not value.rank:
            return value, set()
        total = places[0]
        for axis in range(1, value.rank):
            size = self.body.add(Scalar("arith.constant", (), "i64", self._number(value.shape[axis])))
            total = self.body.add(Scalar("arith.muli", (total, size), "i64"))
            total = self.body.add(Scalar("arith.addi", (total, places[axis]), "i64"))
        for axis, d in enumerate(plain):
            loop = d is not None and value.shape[axis] == self.shape[d]
            if not loop and not (inside and inside[axis]):
                total = self._checked(total, places[axis], value.shape[axis])
        follows = self.follows(total)
        index = self.pointwise(total, [n if d in follows else 1 for d, n in enumerate(self.shape)])
        flat = self.r.reshape(value, [product(list(value.shape)).to_dim()], self.op)
        return self.r.node("mlir.take", [flat, index], index.shape, value.type, self.op), follows

    def _checked(self, total: int, place: int, size: Dim) -> int:
        """`total`, or nowhere where the place is not in [0, size)."""
        add = self.body.add
        if isinstance(size, int):
            end = add(Scalar("arith.constant", (), "i64", size))
        else:
            end = _input(self, self.r.known(size), set())
        outside = add(Scalar("arith.cmpi", (place, end), "i1", "uge"))  # a negative one is a large one without sign
        nowhere = add(Scalar("arith.constant", (), "i64", _NOWHERE))
        return add(Scalar("arith.select", (outside, nowhere, total), "i64"))

    def _number(self, size: Dim) -> int:
        if not isinstance(size, int):
            raise self.r.unsupported(self.op, f"an access by computed places to a tensor of the symbolic size {size}")
        return size

    def _rows(self, table: Value, place: int, axis: int) -> Value:
        """Rows of a table, one for each iteration of the other loops."""
        follows = self.follows(place)
        index = self.pointwise(place, [n if d in follows else 1 for d, n in enumerate(self.shape)])
        rest = [size for d, size in enumerate(index.shape) if d != axis]
        index = self.r.reshape(index, rest, self.op)
        numbers = {
            "offset_dims": [len(rest)], "collapsed_slice_dims": [0], "operand_batching_dims": [],
            "start_indices_batching_dims": [], "start_index_map": [0], "index_vector_dim": len(rest),
        }  # fmt: skip
        rows = self.r.node(
            "stablehlo.gather", [table, index], [*rest, table.shape[1]], table.type, self.op,
            dimension_numbers=numbers, slice_sizes=[1, table.shape[1]], checked=True,
        )  # fmt: skip
        order = list(range(len(rest)))
        order.insert(axis, len(rest))
        return self.r.transpose(rows, order, self.op)

    def counts(self, place: int, loop: int) -> bool:
        """Whether a place is the loop's index. That of a single iteration may be written as the constant 0."""
        return self._dim_at(place) == loop or (self.shape[loop] == 1 and self._known_at(place) == 0)

    def _dim_at(self, place: int) -> int | None:
        """The loop whose index a place is: also select(n == 1, 0, index) for a loop of n iterations."""
        op = self.body.op_at(place)
        if op is None:
            return None
        if op.op == "linalg.index":
            return int(op.number)
        if op.op in ("arith.index_cast", "arith.extsi", "arith.trunci") and op.element in ("i32", "i64"):
            return self._dim_at(op.operands[0])
        if op.op != "arith.select":
            return None
        condition, zero, index = op.operands
        found, one = self._dim_at(index), self.body.op_at(condition)
        if found is None or self._known_at(zero) != 0 or one is None or one.op != "arith.cmpi" or one.number != "eq":
            return None
        size, unit = (self._known_at(each) for each in one.operands)
        return found if unit == 1 and size is not None and dim(size) == dim(self.shape[found]) else None

    def _known_at(self, place: int) -> Any:
        op = self.body.op_at(place)
        if op is not None:
            return op.number if op.op == "arith.constant" else None
        return scalar_of(self.given[place]) if place in self.given else None

    # --- nodes ---

    def follows(self, place: int) -> set[int]:
        """The loops on which a value depends."""
        found: set[int] = set()
        for each in self.body.needs([place]):
            op = self.body.op_at(each)
            if op is None:
                found |= self.fixed.get(each, set())
            elif op.op == "linalg.index":
                found.add(int(op.number))
        return found

    def pointwise(self, place: int, shape: Sequence[Dim]) -> Value:
        """The tensor of a value, over loops of this shape."""
        op = self.body.op_at(place)
        kind = self.body.element(place)
        kind = "i64" if kind == "index" else kind
        reads = sorted(self.body.reads(place))
        if op is None and self.given[place].shape == tuple(shape):
            return self.given[place]
        if op is None:
            value, rank = self.given[place], len(shape)
            return self.r.broadcast(value, shape, range(rank - value.rank, rank), self.op)
        if op.op == "arith.constant" and not reads:
            return self.r.broadcast(self.r.known(op.number, kind), shape, [], self.op)
        return self.r.node(
            "mlir.pointwise", [self.given[each] for each in reads], shape, kind, self.op, body=self.body, places=reads,
            place=place,
        )  # fmt: skip


# --- reading ---------------------------------------------------------------------------------------------------------


def read_generic(r: LinalgReader, op: Any, operands: list[Value], values: Values) -> list[Value]:
    """All results of a linalg.generic."""
    maps = [parse_map(str(each)) for each in op.attributes["indexing_maps"]]
    kinds = ["reduction" if "reduction" in str(each) else "parallel" for each in op.attributes["iterator_types"]]
    return _generic(r, op, operands, values, maps, kinds)


def read_map(r: LinalgReader, op: Any, operands: list[Value], values: Values) -> list[Value]:
    """linalg.map: one loop for each dim."""
    rank = operands[-1].rank
    maps = [[Index({d: 1}, 0) for d in range(rank)] for _ in operands]
    return _generic(r, op, operands, values, maps, ["parallel"] * rank)


def read_reduce(r: LinalgReader, op: Any, operands: list[Value], values: Values) -> list[Value]:
    """linalg.reduce: loops over the dims of its inputs."""
    axes, rank, half = ints(op.attributes["dimensions"]), operands[0].rank, len(operands) // 2
    whole = [Index({d: 1}, 0) for d in range(rank)]
    kept = [Index({d: 1}, 0) for d in range(rank) if d not in axes]
    kinds = ["reduction" if d in axes else "parallel" for d in range(rank)]
    return _generic(r, op, operands, values, [whole] * half + [kept] * half, kinds)


def read_product(r: LinalgReader, op: Any, operands: list[Value], values: Values) -> list[Value]:
    """A named product; the ops of today may say otherwise in `indexing_maps`."""
    del values
    letters = PRODUCTS[op.name.removeprefix("linalg.")]
    inputs, result = letters.split("->")
    order = list(dict.fromkeys(letters.replace(",", "").replace("->", "")))
    dims = [[order.index(c) for c in part] for part in (*inputs.split(","), result)]
    if "indexing_maps" in op.attributes:
        maps = [parse_map(str(each)) for each in op.attributes["indexing_maps"]]
        found = [[dim_of(index) for index in each] for each in maps]
        if any(d is None for each in found for d in each):
            raise r.unsupported(op, "a product with a broadcast in its maps; write it as linalg.generic")
        dims = [[d for d in each if d is not None] for each in found]
    x, y, start = operands
    return [_product(r, op, x, y, start, dims)]


def generate(r: LinalgReader, op: Any, shape: list[Dim], values: Values) -> Value:
    """tensor.generate: block arguments are the indices."""
    loops = _Loops(r, op, shape, ScalarBody([]))
    block = op.regions[0].blocks[0]
    places = {a: loops.body.add(Scalar("linalg.index", (), "i64", i)) for i, a in enumerate(block.arguments)}
    (place,) = _read_body(loops, block, places, values)
    return loops.pointwise(place, shape)


def _generic(
    r: LinalgReader, op: Any, operands: list[Value], values: Values, maps: list[list[Index]], kinds: list[str]
) -> list[Value]:
    block = op.regions[0].blocks[0]
    outs = len(op.results)
    ins = len(operands) - outs
    shape = _loop_shape(r, op, operands, maps, len(kinds))
    arguments = list(block.arguments)
    body = ScalarBody([_element(str(a.type)) for a in arguments])
    if len(arguments) != len(operands):  # linalg.map and reduce leave out what they do not read
        body.inputs = [value.type for value in operands]
    loops = _Loops(r, op, shape, body)
    places = {a: i for i, a in enumerate(arguments)}
    raw = dict(enumerate(operands))
    yields = _read_body(loops, block, places, values, dict(zip(raw, maps, strict=True)), raw)
    found = []
    for number, place in enumerate(yields):
        result = _one(loops, operands, maps, kinds, ins, number, place, yields)
        found.append(result)
    return found


def _one(
    loops: _Loops,
    operands: list[Value],
    maps: list[list[Index]],
    kinds: list[str],
    ins: int,
    number: int,
    place: int,
    yields: list[int],
) -> Value:
    """One result."""
    r, op, mine = loops.r, loops.op, ins + number
    axes = [d for d, kind in enumerate(kinds) if kind == "reduction"]
    start, out = operands[mine], maps[mine]
    if not axes:
        _align_all(loops, operands, maps, loops.body.reads(place))
        return _placed(loops, loops.pointwise(place, loops.shape), out, [], start)
    if (factors := _factors(loops, place, mine)) is not None and ins == 2:
        dims = [[dim_of(index) for index in each] for each in (maps[0], maps[1], out)]
        plain = all(d is not None for each in dims for d in each) and _whole(loops, operands, maps)
        if plain and _is_product(dims, axes):  # type: ignore[arg-type]
            x, y = (r.convert(operands[f], start.type, op) for f in (0, 1)) if factors else operands[:2]
            return _product(r, op, x, y, start, dims)  # type: ignore[arg-type]
    if (axis := _argmax_axis(loops, place, yields, operands, mine, axes)) is not None:
        _align_all(loops, operands, maps, {0})
        x = loops.pointwise(0, loops.shape)
        kept = [n for d, n in enumerate(loops.shape) if d != axis[0]]
        r.note("an argmax takes NaN as the extreme", "the text passes over NaN")
        made = r.node("mlir.argmax", [x], kept, start.type, op, axis=axis[0], largest=axis[1])
        return _placed(loops, made, out, axes, start)
    kind, term = _fold_of(loops, place, mine)
    _align_all(loops, operands, maps, loops.body.reads(term))
    whole = loops.pointwise(term, loops.shape)
    kept = [n for d, n in enumerate(loops.shape) if d not in axes]
    made = _placed(loops, r.node("mlir.fold", [whole], kept, start.type, op, axes=axes, by=kind), out, axes, start)
    neutral = build.reduction_identity(kind, start.dtype)
    known = splat(start)
    if known is not None and known == neutral:
        return made
    name = {"add": "add", "mul": "multiply", "max": "maximum", "min": "minimum", "and": "and", "or": "or"}[kind]
    return r.node(f"stablehlo.{name}", [made, start], start.shape, start.type, op)


def _whole(loops: _Loops, operands: list[Value], maps: list[list[Index]]) -> bool:
    return all(loops._fits(v, [dim_of(i) for i in m]) for v, m in zip(operands, maps, strict=True))


def _align_all(loops: _Loops, operands: list[Value], maps: list[list[Index]], wanted: set[int]) -> None:
    for place in sorted(wanted):
        if place < len(operands) and place not in loops.given:
            loops.given[place], loops.fixed[place] = loops.align(operands[place], maps[place])


def _placed(loops: _Loops, made: Value, out: list[Index], axes: list[int], start: Value) -> Value:
    """A result over the loops that are kept, in the order and shape of the destination."""
    r, op = loops.r, loops.op
    kept = [d for d in range(len(loops.shape)) if d not in axes]
    dims = [dim_of(index) for index in out]
    order = [d for d in dims if d is not None]
    unit = all(d is not None or (constant(index) == 0 and size == 1) for d, index, size in
               zip(dims, out, start.shape, strict=True))  # fmt: skip
    if sorted(order) != kept or not unit:
        raise r.unsupported(
            op, "a destination that is not written in whole: each parallel loop must be one of its dims"
        )
    return r.reshape(r.transpose(made, [kept.index(d) for d in order], op), start.shape, op)


def _loop_shape(r: LinalgReader, op: Any, operands: list[Value], maps: list[list[Index]], count: int) -> list[Dim]:
    """The iterations of each loop, of the last operand that has it as a dim: destinations come last."""
    found: dict[int, Dim] = {}
    for value, indices in zip(operands, maps, strict=True):
        if len(indices) != value.rank:
            raise r.unsupported(op, "a map of another rank than its operand")
        for size, index in zip(value.shape, indices, strict=True):
            d = dim_of(index)
            if d is None:
                continue
            if found.setdefault(d, size) != size:
                raise r.unsupported(op, f"loop {d} has {found[d]} iterations for one operand, and {size} for another")
    if len(found) < count:
        raise r.unsupported(op, "a loop that is no dim of any operand")
    return [found[d] for d in range(count)]


# --- bodies ----------------------------------------------------------------------------------------------------------


def _read_body(
    loops: _Loops,
    block: Any,
    places: dict[Any, int],
    values: Values,
    maps: dict[int, list[Index]] | None = None,
    raw: dict[int, Value] | None = None,
) -> list[int]:
    """Reads a block's ops into the body; returns the places of the yielded values. `places` grows."""
    r, body = loops.r, loops.body

    def place_of(value: Any) -> int:
        if value not in places:
            places[value] = _captured(loops, values[value])
        return places[value]

    for each in block.operations:
        op = each.operation
        name = str(op.name)
        r.counted()
        if name in ("linalg.yield", "tensor.yield"):
            return [place_of(value) for value in op.operands]
        if name == "cf.assert":
            r.note(
                "assertions inside of loops are not checked",
                "an index that a loop reads by is: out of range it is an error on a CPU, and gives NaN on a GPU",
            )
            continue
        if name == "tensor.extract":
            where = [place_of(value) for value in list(op.operands)[1:]]
            for place in {i for p in where for i in body.reads(p)}:
                if raw is not None and maps is not None and place in raw and place not in loops.given:
                    loops.given[place], loops.fixed[place] = loops.align(raw[place], maps[place])
            made, follows = loops.take(values[op.operands[0]], where)
            places[op.results[0]] = _input(loops, made, follows)
            continue
        if name not in OPS:
            raise r.unsupported(op, "it has no lowering inside of a linalg.generic")
        operands = tuple(place_of(value) for value in op.operands)
        name = _exact(r, op, name)
        number: Any = None
        if name == "arith.constant":
            number = scalar_number(str(op.attributes["value"]))
        elif name == "linalg.index":
            number = int(op.attributes["dim"].value)
        elif name in ("arith.cmpi", "arith.cmpf"):
            number = predicate(name, int(op.attributes["predicate"].value))
        places[op.results[0]] = body.add(Scalar(name, operands, _element(str(op.results[0].type)), number))
    raise r.unsupported(loops.op, "its body has no terminator")


def _exact(r: LinalgReader, op: Any, name: str) -> str:
    """The op's name, or that of the one that it is on truth values. UnsupportedOperatorError where bodies differ."""
    kinds = [str(value.type) for value in op.operands]
    if name == "arith.uitofp" and kinds == ["i64"]:
        raise r.unsupported(op, "unsigned numbers of 64 bits; use arith.sitofp, if none is negative")
    return _BITS.get(name, name) if "i1" in kinds else name


def _captured(loops: _Loops, value: Value) -> int:
    """A number or a size from outside of the body."""
    number = splat(value)
    if value.rank:
        raise loops.r.unsupported(loops.op, "its body uses a tensor that is no operand")
    if number is not None and value.known is not None and value.known.dtype != object:
        return loops.body.add(Scalar("arith.constant", (), value.type, number))
    return _input(loops, value, set())


def _input(loops: _Loops, value: Value, follows: set[int]) -> int:
    """A new input of the body, at a place of its own."""
    place = _NEW_INPUT + len(loops.body.extra)
    loops.given[place], loops.fixed[place] = value, follows
    loops.body.extra[place] = value.type
    return place


_NEW_INPUT = 1 << 30
"""Places of inputs that are found while the body is read."""


def _element(text: str) -> str:
    return "i64" if text == "index" else text


# --- products and folds ----------------------------------------------------------------------------------------------


def _factors(loops: _Loops, place: int, accumulator: int) -> bool | None:
    """Whether the body is `out + a * b`: True if a and b are converted first, False if not, None if it is another."""
    body = loops.body
    total = body.op_at(place)
    if total is None or total.op not in ("arith.addf", "arith.addi") or accumulator not in total.operands:
        return None
    a, b = total.operands
    times = body.op_at(b if a == accumulator else a)
    if times is None or times.op not in ("arith.mulf", "arith.muli"):
        return None
    reads, converted = [], False
    for operand in times.operands:
        op = body.op_at(operand)
        if op is not None and op.op in ("arith.extf", "arith.extsi", "arith.sitofp"):
            if body.element(op.operands[0]) == "i1":
                return None  # -1, and conversions of tensors make it 1
            converted, operand = True, op.operands[0]  # noqa: PLW2901
        reads.append(operand)
    return converted if sorted(reads) == [0, 1] else None


def _is_product(dims: list[list[int]], axes: list[int]) -> bool:
    x, y, out = (set(each) for each in dims)
    once = all(len(set(each)) == len(each) for each in dims)
    shared = x & y
    return once and set(axes) == shared - out and (x | y) == out | set(axes) and bool(axes)


def _product(r: LinalgReader, op: Any, x: Value, y: Value, start: Value, dims: Sequence[Sequence[int]]) -> Value:
    """A contraction, by the loops that each dim of x, y and the result follows."""
    a, b, out = (list(each) for each in dims)
    batch = [d for d in a if d in b and d in out]
    summed = [d for d in a if d in b and d not in out]
    free = [d for d in a if d not in b], [d for d in b if d not in a]
    sizes = dict(zip([*a, *b], [*x.shape, *y.shape], strict=True))
    for d, size in zip([*a, *b], [*x.shape, *y.shape], strict=True):
        if sizes[d] != size:
            raise r.unsupported(op, f"operands of the shapes {list(x.shape)} and {list(y.shape)} do not fit")
    if not summed or set(out) != {*batch, *free[0], *free[1]}:
        raise r.unsupported(op, "a product that sums over one operand only; write it as linalg.generic")
    numbers = {
        "lhs_batching_dimensions": [a.index(d) for d in batch], "rhs_batching_dimensions": [b.index(d) for d in batch],
        "lhs_contracting_dimensions": [a.index(d) for d in summed],
        "rhs_contracting_dimensions": [b.index(d) for d in summed],
    }  # fmt: skip
    order = [*batch, *free[0], *free[1]]
    made = r.node(
        "stablehlo.dot_general", [x, y], [sizes[d] for d in order], start.type, op, dot_dimension_numbers=numbers
    )
    made = r.transpose(made, [order.index(d) for d in out], op)
    if made.shape != start.shape:
        raise r.unsupported(op, f"a result of the shape {list(made.shape)} for a destination of {list(start.shape)}")
    known = splat(start)
    if known is not None and float(known) == 0:
        return made
    return r.node("stablehlo.add", [made, start], start.shape, start.type, op)


def _fold_of(loops: _Loops, place: int, accumulator: int) -> tuple[build.Reduction, int]:
    """The reduction and its term."""
    body, op = loops.body, loops.body.op_at(place)
    kind = _FOLDS.get(op.op) if op is not None else None
    if op is not None and kind is not None and op.operands.count(accumulator) == 1:
        term = next(each for each in op.operands if each != accumulator)
        if accumulator not in body.reads(term):
            return kind, _without_nan(body, term, kind) if op.op in ("arith.maxnumf", "arith.minnumf") else term
    if op is not None and op.op == "arith.select":
        compared, (_, term, other) = body.op_at(op.operands[0]), op.operands
        signed = body.element(term) != "i1"
        if compared is not None and signed and other == accumulator and accumulator not in body.reads(term):
            first = compared.operands == (term, accumulator)
            if first or compared.operands == (accumulator, term):
                larger = compared.number in (_GREATER if first else _LESS)
                if larger or compared.number in (_LESS if first else _GREATER):
                    found: build.Reduction = "max" if larger else "min"
                    return found, _without_nan(body, term, found) if compared.op == "arith.cmpf" else term
    raise loops.r.unsupported(loops.op, "a reduction by another function than add, mul, max, min, and, or")


def _without_nan(body: ScalarBody, term: int, kind: build.Reduction) -> int:
    """A term that a maximum by comparison, or C's fmax, passes over if it is NaN."""
    element = body.element(term)
    nan = body.add(Scalar("arith.cmpf", (term, term), "i1", "uno"))
    least = body.add(Scalar("arith.constant", (), element, build.reduction_identity(kind, element)))  # type: ignore[arg-type]
    return body.add(Scalar("arith.select", (nan, least, term), element))


def _argmax_axis(
    loops: _Loops, place: int, yields: list[int], operands: list[Value], mine: int, axes: list[int]
) -> tuple[int, bool] | None:
    """The axis and the direction if a result is the place of the extreme that another result is, from no start."""
    body, op = loops.body, loops.body.op_at(place)
    if len(yields) != 2 or mine != 2 or len(axes) != 1 or op is None or op.op != "arith.select":
        return None
    compared = body.op_at(op.operands[0])
    if compared is None or op.operands[2] != mine or not loops.counts(op.operands[1], axes[0]):
        return None
    strict = {"ogt": True, "sgt": True, "olt": False, "slt": False}
    if compared.operands != (0, 1) or compared.number not in strict or body.element(0) == "i1":
        return None
    largest, (_, best, start) = strict[str(compared.number)], operands
    kind: build.Reduction = "max" if largest else "min"
    if not _is_extreme(body, yields[0], op.operands[0], kind):
        return None
    if splat(best) != build.reduction_identity(kind, best.dtype) or splat(start) != 0:
        raise loops.r.unsupported(
            loops.op, f"an arg{kind} from another start than {'the least' if largest else 'the largest'} value at 0"
        )
    return axes[0], largest


def _is_extreme(body: ScalarBody, place: int, condition: int, kind: build.Reduction) -> bool:
    """Whether a value is the better one of the input 0 and the accumulator 1, by this comparison or by an op."""
    op = body.op_at(place)
    if op is None:
        return False
    if op.op == "arith.select":
        return op.operands == (condition, 0, 1)
    return _FOLDS.get(op.op) == kind and sorted(op.operands) == [0, 1]


__all__ = ["PRODUCTS", "generate", "read_generic", "read_map", "read_product", "read_reduce"]
