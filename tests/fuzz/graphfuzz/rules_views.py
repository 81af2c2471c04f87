"""Statements that move values: reshapes, transposes, slices, joins, paddings; views of views come by chance."""

from __future__ import annotations

from graphfuzz.builder import STATIC, Builder, Impossible
from graphfuzz.graphs import Type
from graphfuzz.rules import rule
from graphfuzz.sizes import RANGES, Shape, Size, product, shape_of, text_of


def replaced(shape: Shape, axis: int, *sizes: Size) -> Shape:
    return (*shape[:axis], *sizes, *shape[axis + 1 :])


def move(b: Builder, text: str, x: str, shape: Shape) -> str:
    return b.emit(text, [x], shape, b.type(x).dtype, "moves")


@rule(4)
def flatten(b: Builder) -> None:
    x = b.pick(lambda t: t.rank >= 2)
    shape = b.shape(x)
    first = b.integer(0, len(shape) - 2)
    last = b.integer(first + 1, len(shape) - 1)
    out = (*shape[:first], product(shape[first : last + 1]), *shape[last + 1 :])
    forms = [f"{x}.flatten({first}, {b.written(last, len(shape))})", f"{x}.reshape({text_of(out)})"]
    if sum(not size.is_static for size in out) <= 1 and all(size.low for size in out):
        sizes = ", ".join("-1" if not size.is_static else str(size) for size in out)
        forms.append(f"{x}.reshape({sizes})")
    move(b, b.choose(forms), x, out)


@rule(4)
def unflatten(b: Builder) -> None:
    x = b.pick(lambda t: 1 <= t.rank < 6)
    shape = b.shape(x)
    axis = b.axis(x)
    size, by = shape[axis], b.choose((1, 2, 3, 4, 5, 8))
    rest = size.divided(by)
    if rest is None or (not size.is_static and by == 1):
        raise Impossible
    parts = shape_of(by, rest) if b.chance(50) else shape_of(rest, by)
    out = replaced(shape, axis, *parts)
    inner = ", ".join("-1" if part is not parts[0] and part == rest and rest.low else str(part) for part in parts)
    move(b, b.choose((f"{x}.unflatten({axis}, ({inner}))", f"{x}.reshape({text_of(out)})")), x, out)


@rule(2)
def regroup(b: Builder) -> None:
    """All elements in another static shape: no dim of the result is one of the operand."""
    x = b.pick(lambda t: t.rank >= 1 and all(size.is_static for size in t.shape))
    count = int(product(b.shape(x)).static or 0)
    divisors = [d for d in STATIC if d and count % d == 0]
    first = b.choose(divisors)
    second = b.choose([d for d in STATIC if d and (count // first) % d == 0])
    move(
        b,
        f"{x}.reshape({first}, {second}, {count // first // second})",
        x,
        shape_of(first, second, count // first // second),
    )


@rule(4)
def unsqueeze(b: Builder) -> None:
    x = b.pick(lambda t: t.rank < 5)
    shape = b.shape(x)
    axis = b.integer(0, len(shape))
    out = (*shape[:axis], Size.of(1), *shape[axis:])
    indexed = ", ".join([":"] * axis + ["None"])
    move(b, b.choose((f"{x}.unsqueeze({b.written(axis, len(out))})", f"{x}[{indexed}]")), x, out)


@rule(3)
def squeeze(b: Builder) -> None:
    x = b.pick(lambda t: any(size.static == 1 for size in t.shape))
    axis = b.axis(x, lambda size: size.static == 1)
    shape = b.shape(x)
    texts = [f"{x}.squeeze({b.written(axis, len(shape))})", f"{x}.select({axis}, 0)", f"{x}.squeeze(({axis},))"]
    if sum(size.static == 1 for size in shape) == 1 and all(size.is_static for size in shape):
        texts.append(f"{x}.squeeze()")
    move(b, b.choose(texts), x, replaced(shape, axis))


@rule(6)
def permute(b: Builder) -> None:
    x = b.pick(lambda t: t.rank >= 2)
    shape = b.shape(x)
    if b.chance(40):
        first, second = b.integer(0, len(shape) - 1), b.integer(0, len(shape) - 1)
        out = list(shape)
        out[first], out[second] = out[second], out[first]
        move(b, f"{x}.transpose({b.written(first, len(shape))}, {b.written(second, len(shape))})", x, tuple(out))
        return
    order = b.permutation(len(shape))
    text = f"{x}.permute({', '.join(map(str, order))})"
    move(b, f"{x}.t()" if len(shape) == 2 and order == [1, 0] else text, x, tuple(shape[a] for a in order))


@rule(4)
def expand(b: Builder) -> None:
    x = b.pick(lambda t: t.rank < 5 and (t.rank == 0 or any(size.static == 1 for size in t.shape)))
    shape = b.shape(x)
    sizes = [Size.of(b.choose((*RANGES, 2, 3))) if size.static == 1 and b.chance(70) else size for size in shape]
    out = tuple(sizes)
    if b.chance(30):
        out = (Size.of(b.choose((*RANGES, 2))), *out)
    known(b, out)
    if not out:
        raise Impossible
    move(b, f"{x}.expand({text_of(out)})", x, out)


def known(b: Builder, shape: Shape) -> None:
    """Impossible if a symbol of the shape is no dim of an input: its size would be unknown."""
    have = {str(size) for leaf in b.leaves if leaf.is_input for size in leaf.type.shape}
    for size in shape:
        if any(name in str(size) and name not in have for name in RANGES):
            raise Impossible


@rule(2)
def repeat(b: Builder) -> None:
    x = b.pick(lambda t: 1 <= t.rank < 5)
    shape = b.shape(x)
    times = [b.choose((1, 1, 2, 3)) for _ in shape]
    if b.chance(25):
        times, shape = [2, *times], shape_of(1) + shape
    out = tuple(size * n for size, n in zip(shape, times, strict=True))
    move(b, f"{x}.repeat({', '.join(map(str, times))})", x, out)


@rule(1)
def repeat_interleave(b: Builder) -> None:
    x = b.pick(lambda t: 1 <= t.rank < 5)
    axis = b.axis(x)
    shape = b.shape(x)
    move(b, f"{x}.repeat_interleave(2, {axis})", x, replaced(shape, axis, shape[axis] * 2))


@rule(6)
def slice_dim(b: Builder) -> None:
    x = b.pick(lambda t: t.rank >= 1)
    shape, axis = b.shape(x), b.axis(x)
    size, low = shape[axis], shape[axis].low
    before = ", ".join([*([":"] * axis), ""])
    if not size.is_static:
        start, step = b.integer(0, min(low - (0 if b.limits.empty else 1), 2)), b.choose((1, 1, 1, 2, 3))
        kept = size - start
        if b.chance(25) and low > 1:
            head = b.integer(1, low)
            if head == low and axis > 0:
                raise Impossible  # torch.export guards on it: the slice is contiguous at the smallest size alone
            move(b, f"{x}[{before}{b.choose((f':{head}', f'-{head}:'))}]", x, replaced(shape, axis, Size.of(head)))
        elif b.chance(30) and step == 1 and low > start + 1:
            move(b, f"{x}[{before}{start}:-1]", x, replaced(shape, axis, kept - 1))
        else:
            text = f"{start or ''}:" + (f":{step}" if step > 1 else "")
            move(b, f"{x}[{before}{text}]", x, replaced(shape, axis, kept.ceil_divided(step)))
        return
    start = b.integer(0, max(low - 1, 0))
    stop, step = b.integer(start if b.limits.empty else start + 1, max(low, 1)), b.choose((1, 1, 1, 2, 3))
    count = -(-max(min(stop, low) - start, 0) // step)
    shown = (start - low if start and b.chance(20) else start, stop - low if stop < low and b.chance(30) else stop)
    text = f"{shown[0]}:{shown[1]}" + (f":{step}" if step > 1 else "")
    if step == 1 and b.chance(25):
        move(b, f"{x}.narrow({axis}, {start}, {count})", x, replaced(shape, axis, Size.of(count)))
    else:
        move(b, f"{x}[{before}{text}]", x, replaced(shape, axis, Size.of(count)))


@rule(4)
def select(b: Builder) -> None:
    x = b.pick(lambda t: t.rank >= 1)
    axis = b.axis(x, lambda size: size.low >= 1)
    shape = b.shape(x)
    low = shape[axis].low
    index = b.integer(-low, low - 1)
    before = "".join([":, "] * axis)
    move(b, b.choose((f"{x}.select({axis}, {index})", f"{x}[{before}{index}]")), x, replaced(shape, axis))


@rule(3)
def split(b: Builder) -> None:
    x = b.pick(lambda t: t.rank >= 1)
    axis = b.axis(x, lambda size: (size.static or 0) >= 2)
    shape = b.shape(x)
    size, dtype = int(shape[axis].static or 0), b.type(x).dtype
    if b.chance(30) and size <= 6:
        parts, text = [replaced(shape, axis)] * size, f"{x}.unbind({axis})"
    elif b.chance(50):
        first = b.integer(1, size - 1)
        parts = [replaced(shape, axis, Size.of(n)) for n in (first, size - first)]
        text = f"{x}.split([{first}, {size - first}], {axis})"
    else:
        count = b.choose((2, 2, 3))
        each = -(-size // count)
        sizes = [min(each, size - start) for start in range(0, size, each)]
        parts, text = (
            [replaced(shape, axis, Size.of(n)) for n in sizes],
            f"{x}.chunk({count}, {b.written(axis, len(shape))})",
        )
    if len(parts) < 2:
        raise Impossible
    b.emit(text, [x], parts, dtype, "moves")


@rule(4)
def join(b: Builder) -> None:
    x = b.pick(lambda t: 1 <= t.rank < 6)
    shape, dtype, axis = b.shape(x), b.type(x).dtype, b.axis(x)
    others = [
        n for n, t in b.types.items()
        if t.dtype == dtype and t.rank == len(shape) and replaced(t.shape, axis) == replaced(shape, axis)
    ]  # fmt: skip
    if b.chance(40):
        size = Size.of(b.choose((1, 2, 3, 5)))
        others = [b.want(Type(dtype, replaced(shape, axis, size)))]
    names = [b.choose(others) if b.chance(80) else x, x] if b.chance(50) else [x, b.choose(others)]
    if b.chance(25):
        names.append(b.choose(others))
    total = sum((b.shape(n)[axis] for n in names), Size.of(0))
    b.emit(
        f"torch.cat(({', '.join(names)}), {b.written(axis, len(shape))})",
        names,
        replaced(shape, axis, total),
        dtype,
        "moves",
    )


@rule(2)
def stack(b: Builder) -> None:
    x = b.pick(lambda t: t.rank < 5)
    shape, dtype = b.shape(x), b.type(x).dtype
    y = b.want(Type(dtype, shape))
    axis = b.integer(0, len(shape))
    out = (*shape[:axis], Size.of(2), *shape[axis:])
    b.emit(f"torch.stack(({x}, {y}), {b.written(axis, len(out))})", [x, y], out, dtype, "moves")


@rule(3)
def pad(b: Builder) -> None:
    x = b.pick(lambda t: 1 <= t.rank < 6)
    shape = list(b.shape(x))
    amounts: list[int] = []
    for axis in range(len(shape) - 1, max(len(shape) - 1 - b.integer(1, 2), -1), -1):
        low = 0 if not b.chance(20) else -min(shape[axis].low - 1, 1)
        before, after = b.integer(min(low, 0), 2), b.integer(0, 2)
        amounts += [before, after]
        shape[axis] = shape[axis] + (before + after)
    type_ = b.type(x)
    value = "" if b.chance(40) else f", value={b.number() if type_.is_float else b.integer(0, 3)}"
    if type_.dtype == "bool":
        value = ""
    move(b, f"F.pad({x}, ({', '.join(map(str, amounts))}){value})", x, tuple(shape))


@rule(2)
def flip_or_roll(b: Builder) -> None:
    x = b.pick(lambda t: t.rank >= 1)
    axis = b.axis(x, lambda size: size.low >= 1)
    shape = b.shape(x)
    text = b.choose((f"{x}.flip({axis})", f"{x}.flip((0, {len(shape) - 1}))" if len(shape) > 1 else f"{x}.flip(0)",
                     f"{x}.roll({b.integer(-1, 1)}, {axis})"))  # fmt: skip
    move(b, text, x, shape)


@rule(2)
def write_slice(b: Builder) -> None:
    x = b.pick(lambda t: t.rank >= 1)
    shape, dtype, axis = b.shape(x), b.type(x).dtype, b.axis(x)
    low = shape[axis].low
    if b.chance(40):
        index = b.integer(-low, low - 1)
        y = b.want(Type(dtype, replaced(shape, axis)))
        b.emit(f"torch.select_scatter({x}, {y}, {axis}, {index})", [x, y], shape, dtype, "moves")
        return
    start = b.integer(0, max(low - 1, 0))
    stop = b.integer(start + 1, low)
    y = b.want(Type(dtype, replaced(shape, axis, Size.of(stop - start))))
    b.emit(f"torch.slice_scatter({x}, {y}, {axis}, {start}, {stop})", [x, y], shape, dtype, "moves")


@rule(2)
def triangle(b: Builder) -> None:
    x = b.pick(lambda t: t.rank >= 2)
    move(b, f"torch.{b.choose(('tril', 'triu'))}({x}, {b.integer(-1, 1)})", x, b.shape(x))


@rule(1)
def copies(b: Builder) -> None:
    x = b.pick()
    move(b, b.choose((f"{x}.clone()", f"{x}.contiguous()", f"{x}.detach()")), x, b.shape(x))


@rule(2)
def transposed_and_back(b: Builder) -> None:
    """Heads, as attention splits and joins them."""
    x = b.pick(lambda t: t.rank == 3 and (t.shape[2].divided(2) is not None))
    shape, dtype = b.shape(x), b.type(x).dtype
    count = b.choose([n for n in (1, 2, 4) if shape[2].divided(n) is not None])
    inner = shape[2].divided(count)
    assert inner is not None
    split_ = (shape[0], shape[1], Size.of(count), inner)
    y = b.emit(
        f"{x}.view({text_of(split_)})" if contiguous(b, x) else f"{x}.reshape({text_of(split_)})",
        [x],
        split_,
        dtype,
        "moves",
    )
    out = (split_[0], split_[2], split_[1], split_[3])
    b.emit(f"{y}.transpose(1, 2)", [y], out, dtype, "moves")


def contiguous(b: Builder, x: str) -> bool:
    return all(trial.eager[x].is_contiguous() for trial in b.trials)
