"""Statements that pick and place by index, and those that make values from sizes alone."""

from __future__ import annotations

from graphfuzz.builder import Builder, Impossible
from graphfuzz.graphs import FLOATS, Type
from graphfuzz.rules import rule
from graphfuzz.rules_views import known, replaced
from graphfuzz.sizes import RANGES, Size, shape_of, text_of


@rule(3)
def take(b: Builder) -> None:
    """x[i], x[:, i], index_select, with an index of any rank."""
    x = b.pick(lambda t: t.rank >= 1)
    shape, dtype = b.shape(x), b.type(x).dtype
    axis = b.axis(x, lambda size: size.low >= 1)
    index_shape = b.random_shape(b.integer(1, 2))
    if b.chance(35):
        index = b.leaf(Type("int64", index_shape[:1]), f"index:{shape[axis].low}")
        b.emit(f"{x}.index_select({axis}, {index})", [x, index], replaced(shape, axis, index_shape[0]), dtype, "moves")
        return
    index = b.leaf(Type("int64", index_shape), f"signed:{shape[axis].low}")
    before = "".join([":, "] * axis)
    b.emit(f"{x}[{before}{index}]", [x, index], (*shape[:axis], *index_shape, *shape[axis + 1 :]), dtype, "moves")


@rule(2)
def take_pairs(b: Builder) -> None:
    """x[i, j]: neighbouring dims, or dims apart from each other."""
    x = b.pick(lambda t: t.rank >= 2 and all(size.low >= 1 for size in t.shape))
    shape, dtype = b.shape(x), b.type(x).dtype
    index_shape = b.random_shape(b.integer(1, 2))
    first = b.integer(0, len(shape) - 2)
    second = b.integer(first + 1, len(shape) - 1)
    i = b.leaf(Type("int64", index_shape), f"signed:{shape[first].low}")
    j = b.leaf(Type("int64", index_shape[-1:]), f"index:{shape[second].low}")
    written = [":"] * (second + 1)
    written[first], written[second] = i, j
    rest = tuple(size for a, size in enumerate(shape) if a not in (first, second))
    place = first if second == first + 1 else 0
    out = (*rest[:place], *index_shape, *rest[place:])
    b.emit(f"{x}[{', '.join(written)}]", [x, i, j], out, dtype, "moves")


@rule(2)
def gather(b: Builder) -> None:
    x = b.pick(lambda t: t.rank >= 1)
    shape, dtype = b.shape(x), b.type(x).dtype
    axis = b.axis(x, lambda size: size.low >= 1)
    count = Size.of(b.choose((1, 2, 3, "n")))
    out = replaced(shape, axis, count)
    index = b.leaf(Type("int64", out), f"index:{shape[axis].low}")
    b.emit(f"{x}.gather({axis}, {index})", [x, index], out, dtype, "moves")


@rule(2)
def put(b: Builder) -> None:
    """Writes rows; each at most once."""
    x = b.pick(lambda t: t.rank >= 1)
    shape, dtype = b.shape(x), b.type(x).dtype
    axis = b.axis(x, lambda size: size.low >= 1)
    count = b.integer(1, min(shape[axis].low, 3))
    index = b.leaf(Type("int64", (Size.of(count),)), f"order:{shape[axis].low}")
    y = b.want(Type(dtype, replaced(shape, axis, Size.of(count))))
    text = b.choose((f"{x}.index_copy({axis}, {index}, {y})", f"torch.index_put({x}, ({index},), {y})"))
    if "index_put" in text and axis:
        text = f"{x}.index_copy({axis}, {index}, {y})"
    b.emit(text, [x, index, y], shape, dtype, "moves")


@rule(2, needs="ScatterOp")
def scatter(b: Builder) -> None:
    x = b.pick(lambda t: t.rank >= 1 and t.dtype != "bool")
    shape, dtype = b.shape(x), b.type(x).dtype
    axis = b.axis(x, lambda size: size.low >= 1)
    count = b.integer(1, min(shape[axis].low, 3))
    out = replaced(shape, axis, Size.of(count))
    kind = b.choose(("scatter", "value", "scatter_add"))
    if kind == "scatter_add":
        index = b.leaf(Type("int64", out), f"index:{shape[axis].low}")
        y = b.want(Type(dtype, out))
        b.emit(
            f"{x}.scatter_add({axis}, {index}, {y})",
            [x, index, y],
            shape,
            dtype,
            "rounds" if b.type(x).is_float else "moves",
        )
        return
    positions = b.emit(f"torch.arange({count}).flip(0)", [], (Size.of(count),), "int64", "moves")
    view = ", ".join("1" if a != axis else str(count) for a in range(len(shape)))
    index = b.emit(f"{positions}.reshape({view}).expand({text_of(out)})", [positions], out, "int64", "moves")
    if kind == "value":
        number = b.number() if b.type(x).is_float else b.integer(0, 3)
        b.emit(f"{x}.scatter({axis}, {index}, {number})", [x, index], shape, dtype, "moves")
    else:
        y = b.want(Type(dtype, out))
        b.emit(f"{x}.scatter({axis}, {index}, {y})", [x, index, y], shape, dtype, "moves")


@rule(2)
def positions(b: Builder) -> None:
    """Numbers that depend on sizes only: computed once, at load, where that is right."""
    size = Size.of(b.choose((*RANGES, 4, 6)))
    known(b, (size,))
    kinds = [
        (f"torch.arange({size})", (size,), "int64"),
        (f"torch.arange(1, {size} + 1)", (size,), "int64"),
        (f"torch.arange({size}, dtype=torch.float32) * 0.1", (size,), "float32"),
        (f"torch.ones({size}, {size}, dtype=torch.bool).tril()", (size, size), "bool"),
        (f"torch.full(({size}, {size}), -1.0).triu(1)", (size, size), "float32"),
        (f"torch.zeros({size}, 3)", (size, Size.of(3)), "float32"),
        ("torch.arange(0, 6, 2)", (Size.of(3),), "int64"),
        ("torch.linspace(0, 1, 5)", (Size.of(5),), "float32"),
        (f"torch.arange({size})[:, None] - torch.arange({size})", (size, size), "int64"),
        (
            f"torch.eye({size})" if size.is_static else f"torch.arange({size}).float()",
            (size, size) if size.is_static else (size,),
            "float32",
        ),
    ]
    text, shape, dtype = b.choose(kinds)
    if dtype not in b.limits.dtypes:
        raise Impossible
    b.emit(text, [], shape, dtype, "ieee")


@rule(1)
def like(b: Builder) -> None:
    x = b.pick()
    shape, dtype = b.shape(x), b.type(x).dtype
    kinds = ["torch.zeros_like({x})", "torch.ones_like({x})", "{x}.new_zeros(3)", "{x}.new_ones({x}.shape)"]
    if dtype != "bool":
        kinds += ["torch.full_like({x}, 2)", "{x}.new_full((2, 2), 3)"]
    text = b.choose(kinds)
    out = shape
    if "(3)" in text:
        out = (Size.of(3),)
    elif "(2, 2)" in text:
        out = (Size.of(2), Size.of(2))
    b.emit(text.format(x=x), [x], out, dtype, "moves")


@rule(2)
def size_as_number(b: Builder) -> None:
    x = b.pick_float(1)
    shape, dtype = b.shape(x), b.type(x).dtype
    axis = b.axis(x, lambda size: size.low >= 1)
    text = b.choose(("{x} * {n}", "{x} / {n}", "{x} + {n}", "{n} - {x}", "{x} * {n} ** -0.5"))
    if "**" in text and not shape[axis].is_static:
        raise Impossible
    b.emit(text.format(x=x, n=f"{x}.shape[{axis}]"), [x], shape, dtype, "rounds")


@rule(1)
def mask_from_lengths(b: Builder) -> None:
    """positions < lengths: the padding masks of batches."""
    batch, length = Size.of(b.choose(("b", 2))), Size.of(b.choose(("s", "n")))
    lengths = b.leaf(Type("int64", (batch,)), "index:5")
    known(b, (length,))
    b.emit(f"torch.arange({length}) < {lengths}[:, None]", [lengths], (batch, length), "bool", "moves")


@rule(1)
def outer(b: Builder) -> None:
    """Two values on axes of their own."""
    x = b.pick(lambda t: t.rank == 1 and t.dtype in FLOATS)
    y = b.pick(lambda t: t.rank == 1 and t.dtype == b.type(x).dtype)
    if b.type(y).dtype != b.type(x).dtype:
        raise Impossible
    b.emit(f"{x}[:, None] * {y}", [x, y], (*b.shape(x), *b.shape(y)), b.type(x).dtype, "ieee")


@rule(2)
def state(b: Builder) -> None:
    """A buffer that is read, and written at the end of the call: a running mean, a window, a count."""
    dtype = b.choose(b.limits.dtypes)
    shape = shape_of(*(b.choose((1, 2, 3, 4, 8)) for _ in range(b.integer(0, 3))))
    if b.written_states and b.chance(60):
        raise Impossible
    buffer = b.leaf(Type(dtype, shape), None, "s")
    kind = b.integer(0, 3)
    if kind == 0 and shape:
        count = int(shape[0].static or 0)
        new = b.emit(f"{buffer}.roll({b.choose((1, -1))}, 0)", [buffer], shape, dtype, "moves")
        row = b.want(Type(dtype, shape[1:]))
        new = b.emit(
            f"torch.select_scatter({new}, {row}, 0, {b.integer(0, count - 1)})", [new, row], shape, dtype, "moves"
        )
    elif kind == 1 and shape:
        count = int(shape[0].static or 0)
        rows = b.integer(1, count)
        index = b.leaf(Type("int64", shape_of(rows)), f"order:{count}")
        new_rows = b.want(Type(dtype, (Size.of(rows), *shape[1:])))
        new = b.emit(f"{buffer}.index_copy(0, {index}, {new_rows})", [buffer, index, new_rows], shape, dtype, "moves")
    elif dtype in FLOATS:
        other = b.want(Type(dtype, shape))
        new = b.emit(f"torch.lerp({buffer}, {other}, 0.25)", [buffer, other], shape, dtype, coarse=True)
    elif dtype == "bool":
        other = b.want(Type(dtype, shape))
        new = b.emit(f"{buffer} ^ {other}", [buffer, other], shape, dtype, "moves")
    else:
        new = b.emit(f"{buffer} + 1", [buffer], shape, dtype, "moves")
    b.write(buffer, new)
