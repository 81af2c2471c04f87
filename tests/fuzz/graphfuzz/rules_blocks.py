"""What layers of transformers are made of, and near misses: the forms that passes join into one launch.

Each rule makes one form on the values at hand: a norm and the linears that read it, a gated pair, a norm of a linear's
result before its residual, norms and rotations of heads, routing. A third of them are spoiled: something else reads a
value in the middle, a residual is another value, a slice or a cast stands between. A pass that joins too much gives
wrong numbers then, one that joins too little gives right ones.
"""

from __future__ import annotations

from collections.abc import Callable

from graphfuzz.builder import Builder
from graphfuzz.graphs import Type
from graphfuzz.rules import Rule
from graphfuzz.rules_nn import COMPUTED, weight
from graphfuzz.sizes import Shape, Size, shape_of, text_of

BLOCKS: dict[str, tuple[int, Rule]] = {}
"""Name -> (weight, function), for graphs of the profile "blocks"."""

ROWS = ((1,), (1, 1), (1, 1), (2,), (3,), (1, 3), (3, 1), (1, 7), (2, 2), (8,), (17,))
WIDTHS = (32, 64)
ACTIVATIONS = ("F.silu({})", "F.gelu({})", "F.gelu({}, approximate='tanh')", "torch.relu({})", "torch.sigmoid({})")


def block(times: int) -> Callable[[Rule], Rule]:
    """Registers a function of a builder under its name."""

    def register(function: Rule) -> Rule:
        assert function.__name__ not in BLOCKS
        BLOCKS[function.__name__] = (times, function)
        return function

    return register


# --- parts of layers --------------------------------------------------------------------------------------------------


def rows(b: Builder, dtype: str | None = None) -> str:
    """Rows of 32 or 64 numbers, mostly those that were made last."""

    def fits(t: Type) -> bool:
        known = t.dtype in COMPUTED if dtype is None else t.dtype == dtype
        return known and 1 <= t.rank <= 3 and all(s.is_static for s in t.shape) and t.shape[-1].static in WIDTHS

    found = [name for name, t in b.types.items() if fits(t) and not name.startswith("self.")]
    if found and b.chance(85):
        return b.choose(found[-3:])
    return b.leaf(Type(dtype or b.float_dtype(), shape_of(*b.choose(ROWS), b.choose(WIDTHS))), "normal")


def spoiled(b: Builder, x: str) -> str:
    """The value, or in a third of the cases one that is nearly the same, or the value with one more reader."""
    shape, dtype = b.shape(x), b.type(x).dtype
    match b.integer(0, 14):
        case 0:
            b.emit(f"{x} * 0.5", [x], shape, dtype, "ieee")
            return x
        case 1:
            b.emit(f"{x}.amax(-1)", [x], shape[:-1], dtype, "moves")
            return x
        case 2:
            other = b.choose([d for d in COMPUTED if d != dtype and d in b.limits.dtypes])
            return b.cast(b.cast(x, other), dtype)
        case 3 if len(shape) > 1:
            order = (*range(len(shape) - 2), len(shape) - 1, len(shape) - 2)
            there = (*shape[:-2], shape[-1], shape[-2])
            turned = b.emit(f"{x}.permute({', '.join(map(str, order))})", [x], there, dtype, "moves")
            if shape[-1] == shape[-2]:
                return turned
            return b.emit(f"{turned}.transpose(-1, -2)", [turned], shape, dtype, "moves")
        case 4:
            half = int(shape[-1].static or 0) // 2
            low, high = (
                b.emit(f"{x}[..., {cut}]", [x], (*shape[:-1], Size.of(half)), dtype, "moves")
                for cut in (f":{half}", f"{half}:")
            )
            first, second = (low, high) if b.chance(50) else (high, low)
            return b.emit(f"torch.cat(({first}, {second}), -1)", [first, second], shape, dtype, "moves")
        case _:
            return x


def project(b: Builder, x: str, width: int | None = None, bias: int = 25) -> str:
    """A linear; the weight is one that is there in a tenth of the cases."""
    shape, dtype = b.shape(x), b.type(x).dtype
    n, k = width or b.choose((16, 32, 48, 64)), int(shape[-1].static or 0)
    old = [w for w, t in b.types.items() if w.startswith("self.p") and t == Type(dtype, shape_of(n, k))]
    w = b.choose(old) if old and b.chance(10) else weight(b, n, k, dtype)
    key = w.removeprefix("self.")
    first = next(iter(b.quant.values()), "")
    if key in b.quant and b.chance(85) and (k % 32 == 0 or not first.startswith("int4")):
        b.quant[key] = first  # linears of one format can be merged
    names = [x, w, *([b.leaf(Type(dtype, shape_of(n)), "unit", "p")] if b.chance(bias) else [])]
    return b.emit(f"F.linear({', '.join(names)})", names, (*shape[:-1], Size.of(n)), dtype, coarse=True)


def normed(b: Builder, x: str) -> str:
    """A norm in one of its spellings."""
    shape, dtype = b.shape(x), b.type(x).dtype
    width, eps = shape[-1], b.choose(("1e-5", "1e-3"))
    kind = b.choose(("rms", "rms", "layer", "hand", "one more"))
    if kind in ("rms", "layer"):
        names = [x, *(b.leaf(Type(dtype, (width,)), "positive", "p") for _ in range(b.integer(0, 1)))]
        if kind == "layer" and len(names) == 2:
            names.append(b.leaf(Type(dtype, (width,)), "unit", "p"))
        more = "".join(f", {name}" for name in names[1:])
        return b.emit(f"F.{kind}_norm({x}, ({width},){more}, eps={eps})", names, shape, dtype)
    wide = b.to_dtype(x, "float32")
    thin = (*shape[:-1], Size.of(1))
    mean = b.emit(f"{wide}.pow(2).mean(-1, keepdim=True)", [wide], thin, "float32")
    scale = b.emit(f"torch.rsqrt({mean} + {eps})", [mean], thin, "float32")
    y = b.emit(f"{wide} * {scale}", [wide, scale], shape, "float32", "ieee")
    w = b.leaf(Type(dtype if kind == "hand" else "float32", (width,)), "positive", "p")
    if kind == "hand":
        y = b.to_dtype(y, dtype)
        return b.emit(f"{w} * {y}", [w, y], shape, dtype, "ieee")
    z = b.emit(f"{y} * (1.0 + {w})", [y, w], shape, "float32", "ieee")
    return b.to_dtype(z, dtype)


def added(b: Builder, x: str, y: str) -> str:
    """A residual; x and y in either order."""
    first, second = (x, y) if b.chance(50) else (y, x)
    return b.emit(f"{first} + {second}", [first, second], b.shape(x), b.type(x).dtype, "ieee")


def like(b: Builder, x: str) -> str:
    """A value of the same type: one that was made before, or an input."""
    found = [name for name, t in b.types.items() if t == b.type(x) and name != x and not name.startswith("self.")]
    return b.choose(found) if found and b.chance(80) else b.leaf(b.type(x), "normal")


# --- the forms --------------------------------------------------------------------------------------------------------


@block(6)
def norm_and_its_readers(b: Builder) -> None:
    """Linears that read one norm, of which one may have an activation or a residual; perhaps another reader."""
    h = rows(b)
    n = spoiled(b, normed(b, spoiled(b, h)))
    for _ in range(b.integer(1, 3)):
        y = project(b, n)
        match b.integer(0, 5):  # a linear whose result is the program's is never merged
            case 0 | 1:
                b.emit(b.choose(ACTIVATIONS).format(y), [y], b.shape(y), b.type(y).dtype)
            case 2:
                added(b, y, like(b, y))
            case 3:
                b.emit(f"{y} * {b.choose((0.125, 0.3))}", [y], b.shape(y), b.type(y).dtype, "ieee")
            case 4:
                cut = b.choose((8, 16))
                b.emit(f"{y}[..., :{cut}]", [y], (*b.shape(y)[:-1], Size.of(cut)), b.type(y).dtype, "moves")
            case _:
                pass
    if b.chance(25):
        added(b, n, like(b, n))


@block(5)
def gated_pair(b: Builder) -> None:
    """act(gate) * up, down and a residual, behind a norm or not; perhaps both from one projection."""
    h = rows(b)
    x = normed(b, h) if b.chance(60) else h
    x = spoiled(b, x)
    width = b.choose((16, 32, 64))
    if b.chance(30):
        both = spoiled(b, project(b, x, 2 * width if width < 64 else 64))
        wide = int(b.shape(both)[-1].static or 0)
        shape, dtype = (*b.shape(both)[:-1], Size.of(wide // 2)), b.type(both).dtype
        cuts = [f"[..., :{wide // 2}]", f"[..., {wide // 2}:]"]
        gate, up = (b.emit(f"{both}{cut}", [both], shape, dtype, "moves") for cut in cuts)
    else:
        gate = spoiled(b, project(b, x, width))
        up = spoiled(b, project(b, like(b, x) if b.chance(15) else x, width))
    if b.chance(30):
        gate, up = up, gate
    shape, dtype = b.shape(gate), b.type(gate).dtype
    act = spoiled(b, b.emit(b.choose(ACTIVATIONS).format(gate), [gate], shape, dtype))
    y = b.emit(f"{act} * {up}" if b.chance(50) else f"{up} * {act}", [act, up], shape, dtype, "ieee")
    if b.chance(70):
        y = project(b, spoiled(b, y), int(b.shape(h)[-1].static or 0))
        added(b, spoiled(b, y), h if b.chance(80) else like(b, y))


@block(5)
def norm_before_the_residual(b: Builder) -> None:
    """h + norm(linear(x)), as Gemma and OLMo2 have it, and the next norm with its linear."""
    x = rows(b)
    y = spoiled(b, project(b, x, b.choose(WIDTHS)))
    n = spoiled(b, normed(b, y))
    h = added(b, like(b, n), n)
    if b.chance(70):
        h2 = spoiled(b, h)
        z = project(b, spoiled(b, normed(b, h2)))
        if b.chance(40):
            n = normed(b, z) if b.shape(z)[-1].static in WIDTHS else z
            added(b, h if b.type(n) == b.type(h) else like(b, n), n)


@block(4)
def heads(b: Builder) -> None:
    """A projection in heads, with a norm of each head or none, rotated or not, and turned."""
    x = rows(b)
    y = project(b, x if b.chance(50) else normed(b, x), b.choose((32, 48, 64)))
    shape, dtype = b.shape(y), b.type(y).dtype
    wide = int(shape[-1].static or 0)
    depth = b.choose([d for d in (4, 8, 16, 32) if wide % d == 0])
    cut: Shape = (*shape[:-1], Size.of(wide // depth), Size.of(depth))
    y = b.emit(f"{y}.reshape({text_of(cut)})", [y], cut, dtype, "moves")
    if b.chance(60):
        y = spoiled(b, normed(b, y))
    if b.chance(60) and len(cut) >= 3:
        y = rotated(b, y)
    if b.chance(50) and len(cut) >= 3:
        there = (*cut[:-3], cut[-2], cut[-3], cut[-1])
        b.emit(f"{y}.transpose(-2, -3)", [y], there, dtype, "moves")


def rotated(b: Builder, x: str) -> str:
    """A rotation of halves or of pairs by tables, which are constants or arguments."""
    shape, dtype = b.shape(x), b.type(x).dtype
    half = int(shape[-1].static or 0) // 2
    thin = (*(Size.of(1) for _ in shape[:-3]), shape[-3], Size.of(1), shape[-1])
    cos, sin = (b.leaf(Type(dtype, thin), "unit", b.choose(("c", "x"))) for _ in "ab")
    if b.chance(70):
        turned = b.emit(f"torch.cat((-{x}[..., {half}:], {x}[..., :{half}]), -1)", [x], shape, dtype, "moves")
    else:
        text = f"torch.stack((-{x}[..., 1::2], {x}[..., ::2]), -1).flatten(-2)"
        turned = b.emit(text, [x], shape, dtype, "moves")
    left = b.emit(f"{x} * {cos}", [x, cos], shape, dtype, "ieee")
    right = b.emit(f"{turned} * {sin}", [turned, sin], shape, dtype, "ieee")
    return b.emit(f"{left} + {right}", [left, right], shape, dtype, "ieee")


@block(3)
def routing(b: Builder) -> None:
    """Softmax, top-k and the chosen divided by their sum, in the orders that models have."""
    x = rows(b)
    logits = spoiled(b, project(b, x, b.choose((16, 32)), bias=10))
    shape, dtype = b.shape(logits), b.type(logits).dtype
    k = b.choose((1, 2, 4))
    few = (*shape[:-1], Size.of(k))

    def chosen(p: str) -> str:
        kind = b.type(p).dtype
        return b.emit(f"torch.topk({p}, {k}, dim=-1)", [p], [few, few], [kind, "int64"], "moves").split(", ")[0]

    if b.chance(60):
        p = spoiled(b, b.emit(f"torch.softmax({logits}, -1, dtype=torch.float32)", [logits], shape, "float32"))
        v = spoiled(b, chosen(p)) if k > 1 else chosen(p)
        thin = (*shape[:-1], Size.of(1))
        total = b.emit(f"{v}.sum({b.choose((-1, -1, -1, -1, len(shape) - 1))}, keepdim=True)", [v], thin, "float32")
        if b.chance(25):
            total = b.emit(f"{total} + 1e-3", [total], thin, "float32", "ieee")
        w = b.emit(f"{v} / {total}", [v, total], few, "float32", "ieee")
        b.to_dtype(w, dtype)
    else:
        v = chosen(logits)
        b.emit(f"torch.softmax({v}, -1)", [v], few, dtype)


@block(2)
def scaled_part(b: Builder) -> None:
    """A projection whose columns are scaled by constants, and cut."""
    x = rows(b)
    y = project(b, x, b.choose((32, 48, 64)))
    shape, dtype = b.shape(y), b.type(y).dtype
    row = b.leaf(Type(dtype, shape[-1:]), "normal", b.choose(("p", "c")))
    y = b.emit(f"{y} * {row}" if b.chance(60) else f"{y} * {b.choose((0.25, 0.3))}", [y, row], shape, dtype, "ieee")
    cut = b.choose((8, 16))
    b.emit(f"{y}[..., :{cut}]", [y], (*shape[:-1], Size.of(cut)), dtype, "moves")
    if b.chance(60):
        rest = Size.of(int(shape[-1].static or 0) - cut)
        b.emit(f"{y}[..., {cut}:]", [y], (*shape[:-1], rest), dtype, "moves")
