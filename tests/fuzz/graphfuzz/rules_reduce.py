"""Reductions, scans, orders and softmax."""

from __future__ import annotations

from graphfuzz.builder import Builder, Exactness, Impossible
from graphfuzz.graphs import FLOATS, Type
from graphfuzz.rules import rule
from graphfuzz.sizes import Shape, Size

REDUCTIONS: dict[str, Exactness] = {
    "sum": "rounds", "mean": "rounds", "amax": "moves", "amin": "moves", "var": "rounds", "std": "rounds",
    "logsumexp": "rounds",
}  # fmt: skip


def reduced(shape: Shape, axes: tuple[int, ...], keep: bool) -> Shape:
    if keep:
        return tuple(Size.of(1) if i in axes else size for i, size in enumerate(shape))
    return tuple(size for i, size in enumerate(shape) if i not in axes)


def some_axes(b: Builder, x: str) -> tuple[int, ...]:
    order = b.permutation(len(b.shape(x)))
    return tuple(sorted(order[: b.choose((1, 1, 1, 2, 3))]))


@rule(7)
def reduction(b: Builder) -> None:
    x = b.pick_float(1)
    shape, dtype = b.shape(x), b.type(x).dtype
    kind = b.choose(tuple(REDUCTIONS))
    if b.chance(12):
        text = {"amax": f"{x}.amax()", "amin": f"{x}.min()", "logsumexp": None}.get(kind, f"{x}.{kind}()")
        if text is None:
            raise Impossible
        b.emit(text, [x], (), dtype, REDUCTIONS[kind])
        return
    axes, keep = some_axes(b, x), b.chance(45)
    if kind != "sum" and any(shape[axis].low < 1 for axis in axes):
        raise Impossible
    written = b.written(axes[0], len(shape)) if len(axes) == 1 else axes
    more = ", unbiased=False" if kind in ("var", "std") and b.chance(60) else ""
    y = b.emit(f"{x}.{kind}({written}{more}, keepdim={keep})", [x], reduced(shape, axes, keep), dtype, REDUCTIONS[kind])
    if keep and b.chance(50):
        b.emit(f"{x} - {y}", [x, y], shape, dtype, "ieee")


@rule(3)
def reduction_of_integers(b: Builder) -> None:
    x = b.pick(lambda t: not t.is_float and t.rank >= 1)
    shape, dtype = b.shape(x), b.type(x).dtype
    axes, keep = some_axes(b, x), b.chance(40)
    axis = axes[0]
    kinds = [
        (f"{x}.sum({axes}, keepdim={keep})", axes, "int64"),
        (f"{x}.any({axis}, keepdim={keep})", (axis,), "bool"),
        (f"{x}.all({axes}, keepdim={keep})", axes, "bool"),
        (f"{x}.cumsum({axis})", None, "int64"),
        (f"{x}.count_nonzero({axis})", (axis,), "int64"),
        (f"{x}.any()", tuple(range(len(shape))), "bool"),
        (f"{x}.sum({axis}, dtype=torch.float32, keepdim={keep})", (axis,), "float32"),
    ]
    if dtype != "bool" and all(shape[a].low >= 1 for a in axes):
        kinds += [
            (f"{x}.amax({axes}, keepdim={keep})", axes, dtype),
            (f"{x}.argmax({axis}, keepdim={keep})", (axis,), "int64"),
            (f"{x}.prod({axis}, keepdim={keep})", (axis,), "int64"),
        ]
    text, gone, result = b.choose(kinds)
    keeps = "keepdim=True" in text
    exact: Exactness = "ieee" if result in FLOATS else "moves"
    b.emit(text, [x], shape if gone is None else reduced(shape, gone, keeps), result, exact)


@rule(2)
def extreme_and_place(b: Builder) -> None:
    x = b.pick(lambda t: t.rank >= 1 and t.dtype != "bool")
    shape, dtype, keep = b.shape(x), b.type(x).dtype, b.chance(40)
    axis = b.axis(x, lambda size: size.low >= 1)
    out = reduced(shape, (axis,), keep)
    match b.integer(0, 2):
        case 0:
            b.emit(
                f"{x}.{b.choose(('max', 'min'))}({axis}, keepdim={keep})", [x], [out, out], [dtype, "int64"], "moves"
            )
        case 1:
            b.emit(
                f"{x}.{b.choose(('argmax', 'argmin'))}({b.written(axis, len(shape))}, keepdim={keep})",
                [x],
                out,
                "int64",
                "moves",
            )
        case _:
            b.emit(f"{x}.{b.choose(('argmax', 'argmin'))}()", [x], (), "int64", "moves")


@rule(2, needs="SortOp")
def order(b: Builder) -> None:
    x = b.pick(lambda t: t.rank >= 1 and t.dtype != "bool")
    shape, dtype = b.shape(x), b.type(x).dtype
    axis = b.axis(x, lambda size: size.low >= 1)
    if b.chance(50) and b.is_exact(x):
        down = b.chance(50)
        b.emit(
            f"torch.sort({x}, dim={axis}, descending={down}, stable=True)",
            [x],
            [shape, shape],
            [dtype, "int64"],
            "moves",
        )
        return
    k = b.integer(1, min(shape[axis].low, 4))
    out = (*shape[:axis], Size.of(k), *shape[axis + 1 :])
    b.emit(f"torch.topk({x}, {k}, dim={axis})[0]", [x], out, dtype, "moves")


@rule(3)
def softmax(b: Builder) -> None:
    x = b.pick_float(1)
    axis = b.written(b.axis(x), len(b.shape(x)))
    text = b.choose(("torch.softmax({x}, {axis})", "F.log_softmax({x}, {axis})", "F.softmin({x}, {axis})",
                     "torch.softmax({x}, {axis}, dtype=torch.float32)"))  # fmt: skip
    dtype = "float32" if "dtype" in text else b.type(x).dtype
    if dtype == "float32" and b.type(x).dtype == "float64":
        raise Impossible
    b.emit(text.format(x=x, axis=axis), [x], b.shape(x), dtype)


@rule(3)
def norm(b: Builder) -> None:
    x = b.pick_float(1)
    axes, keep = some_axes(b, x), b.chance(50)
    kind = b.choose(("2", "1", "float('inf')", "-float('inf')", "3", "0"))
    if any(b.shape(x)[axis].low < 1 for axis in axes):
        raise Impossible
    text = f"torch.linalg.vector_norm({x}, {kind}, {axes}, keepdim={keep})"
    b.emit(text, [x], reduced(b.shape(x), axes, keep), b.type(x).dtype)


@rule(2)
def scan(b: Builder) -> None:
    x = b.pick_float(1)
    b.emit(f"{x}.cumsum({b.written(b.axis(x), len(b.shape(x)))})", [x], b.shape(x), b.type(x).dtype)


@rule(1)
def product_of_floats(b: Builder) -> None:
    x = b.pick_float(1)
    axis, keep = b.axis(x), b.chance(50)
    b.emit(f"{x}.prod({axis}, keepdim={keep})", [x], reduced(b.shape(x), (axis,), keep), b.type(x).dtype)


@rule(1)
def variance_and_mean(b: Builder) -> None:
    if b.limits.special:  # eager's one-pass mean of an infinity is NaN; here, as by torch.mean, it is that infinity
        raise Impossible
    x = b.pick_float(1)
    axes, keep = some_axes(b, x), b.chance(50)
    if any(b.shape(x)[axis].low < 1 for axis in axes):
        raise Impossible
    out = reduced(b.shape(x), axes, keep)
    text = f"torch.var_mean({x}, dim={axes}, correction={b.choose((0, 0, 1))}, keepdim={keep})"
    b.emit(text, [x], [out, out], b.type(x).dtype)


@rule(2)
def masked_mean(b: Builder) -> None:
    """As sentence models pool."""
    x = b.pick_float(2)
    dtype, shape = b.type(x).dtype, b.shape(x)
    mask = b.want(Type("int64", (*shape[:-1], Size.of(1))), "flag")
    y = b.emit(f"{x} * {mask}", [x, mask], shape, dtype, "ieee")
    axis = len(shape) - 2
    total = b.emit(f"{y}.sum({axis})", [y], reduced(shape, (axis,), False), dtype)
    count = b.emit(
        f"{mask}.sum({axis}).clamp(min=1)", [mask], reduced((*shape[:-1], Size.of(1)), (axis,), False), "int64", "moves"
    )
    b.emit(f"{total} / {count}", [total, count], b.shape(total), dtype, "ieee")
