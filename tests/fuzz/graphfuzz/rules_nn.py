"""Products, norms, attention, embeddings: the operators that have kernels and packed weights of their own."""

from __future__ import annotations

from graphfuzz.builder import Builder, Impossible
from graphfuzz.graphs import FLOATS, Type
from graphfuzz.rules import rule
from graphfuzz.rules_pointwise import condition_for
from graphfuzz.sizes import Shape, Size, shape_of, text_of

WIDTHS = (1, 2, 3, 5, 8, 16, 17, 32, 33, 40)
FORMATS = ("nf4", "int8", "int4:group=32", "nf4:block=128", "int4:group=32,symmetric=False")
COMPUTED = ("float32", "bfloat16", "float16")


def computed(b: Builder, rank: int) -> str:
    """A value that products take."""
    return b.pick(lambda t: t.dtype in COMPUTED and t.rank >= rank)


def weight(b: Builder, rows: int, cols: int, dtype: str) -> str:
    w = b.leaf(Type(dtype, shape_of(rows, cols)), "scaled", "p")
    if b.limits.quantised and b.chance(75):
        fits = [f for f in FORMATS if not f.startswith("int4") or cols % 32 == 0]
        b.quant[w.removeprefix("self.")] = b.choose(fits)
    return w


def fixed_width(b: Builder, rank: int = 1, dtypes: tuple[str, ...] = COMPUTED) -> str:
    return b.pick(lambda t: t.dtype in dtypes and t.rank >= rank and bool(t.shape[-1].static))


@rule(7)
def linear(b: Builder) -> None:
    x = fixed_width(b)
    shape, dtype = b.shape(x), b.type(x).dtype
    if b.limits.quantised and int(shape[-1].static or 0) % 32 and b.chance(70):
        x = b.want(Type(dtype, (*shape[:-1], Size.of(b.choose((32, 64, 96))))), "normal")
        shape = b.shape(x)
    rows, cols = b.choose(WIDTHS), int(shape[-1].static or 0)
    w = weight(b, rows, cols, dtype)
    bias = b.leaf(Type(dtype, shape_of(rows)), "unit", "p") if b.chance(50) else None
    names = [x, w, *([bias] if bias else [])]
    y = b.emit(f"F.linear({', '.join(names)})", names, (*shape[:-1], Size.of(rows)), dtype, coarse=True)
    match b.integer(0, 5):
        case 0:
            b.emit(f"F.gelu({y})", [y], b.shape(y), dtype)
        case 1:
            b.emit(f"torch.relu({y})", [y], b.shape(y), dtype, "moves")
        case 2:
            z = b.partner(b.shape(y), dtype)
            b.emit(f"{y} + {z}", [y, z], b.shape(y), dtype, "ieee")
        case 3:
            z = b.partner(b.shape(y), dtype)
            gate = b.emit(f"F.silu({y})", [y], b.shape(y), dtype)
            b.emit(f"{gate} * {z}", [gate, z], b.shape(y), dtype, "ieee")
        case _:
            pass


@rule(2)
def shared_weight(b: Builder) -> None:
    """One weight that is read twice: by linears, or once transposed."""
    w = b.pick(lambda t: t.rank == 2 and t.dtype in COMPUTED and all(size.is_static for size in t.shape))
    if not w.startswith("self.p"):
        raise Impossible
    rows, cols = b.shape(w)
    dtype = b.type(w).dtype
    lead = b.random_shape(b.integer(1, 2))
    if b.chance(60):
        x = b.want(Type(dtype, (*lead, cols)), "normal")
        b.emit(f"F.linear({x}, {w})", [x, w], (*lead, rows), dtype, coarse=True)
    else:
        x = b.want(Type(dtype, (*lead, rows)), "normal")
        b.emit(f"{x} @ {w}", [x, w], (*lead, cols), dtype, coarse=True)


@rule(4)
def matmul(b: Builder) -> None:
    x = computed(b, 1)
    shape, dtype = b.shape(x), b.type(x).dtype
    width = Size.of(b.choose((1, 2, 5, 8, "s", "n")))
    match b.integer(0, 4):
        case 0 if len(shape) > 1:
            y = b.want(Type(dtype, (shape[-1],)))
            b.emit(f"{x} @ {y}", [x, y], shape[:-1], dtype, coarse=True)
        case 1 if len(shape) == 2:
            y = b.want(Type(dtype, (shape[-1], width)))
            b.emit(b.choose((f"torch.mm({x}, {y})", f"{x} @ {y}")), [x, y], (shape[0], width), dtype, coarse=True)
        case 2 if len(shape) == 3:
            y = b.want(Type(dtype, (shape[0], shape[2], width)))
            b.emit(b.choose((f"torch.bmm({x}, {y})", f"{x} @ {y}")), [x, y], (*shape[:2], width), dtype, coarse=True)
        case 3 if len(shape) == 1:
            y = b.want(Type(dtype, shape))
            b.emit(f"torch.dot({x}, {y})", [x, y], (), dtype, coarse=True)
        case _:
            batch = () if b.chance(40) else shape[:-2]
            other = (*batch, shape[-1], width)
            if len(other) < 2:
                raise Impossible
            y = b.want(Type(dtype, other))
            b.emit(f"torch.matmul({x}, {y})", [x, y], (*shape[:-1], width), dtype, coarse=True)


@rule(2)
def product_with_itself(b: Builder) -> None:
    x = computed(b, 2)
    shape, dtype = b.shape(x), b.type(x).dtype
    scaled = b.emit(f"{x} * {b.choose((0.5, 0.25))}", [x], shape, dtype)
    b.emit(f"{scaled} @ {x}.transpose(-1, -2)", [scaled, x], (*shape[:-1], shape[-2]), dtype, coarse=True)


@rule(2)
def product_added(b: Builder) -> None:
    x = computed(b, 2)
    shape, dtype = b.shape(x), b.type(x).dtype
    width = Size.of(b.choose((1, 3, 8)))
    more = b.choose(("", f", alpha={b.number()}", f", beta={b.number()}", ", beta=0.5, alpha=2"))
    if len(shape) == 2:
        y = b.want(Type(dtype, (shape[1], width)))
        z = b.partner((shape[0], width), dtype)
        b.emit(f"torch.addmm({z}, {x}, {y}{more})", [x, y, z], (shape[0], width), dtype, coarse=True)
    elif len(shape) == 3:
        y = b.want(Type(dtype, (shape[0], shape[2], width)))
        z = b.partner((*shape[:2], width), dtype)
        b.emit(f"torch.baddbmm({z}, {x}, {y}{more})", [x, y, z], (*shape[:2], width), dtype, coarse=True)
    else:
        raise Impossible


@rule(1)
def einsum(b: Builder) -> None:
    x = b.pick(lambda t: t.dtype in COMPUTED and t.rank == 3)
    shape, dtype = b.shape(x), b.type(x).dtype
    width = Size.of(b.choose((1, 3, 8)))
    kind = b.choose(("abc,cd->abd", "abc,abc->ab", "abc,bc->ac", "abc,adc->abd", "abc->cab"))
    if kind == "abc->cab":
        b.emit(f"torch.einsum('{kind}', {x})", [x], (shape[2], shape[0], shape[1]), dtype, "moves")
        return
    others = {
        "abc,cd->abd": ((shape[2], width), (*shape[:2], width)),
        "abc,abc->ab": (shape, shape[:2]),
        "abc,bc->ac": (shape[1:], (shape[0], shape[2])),
        "abc,adc->abd": ((shape[0], width, shape[2]), (*shape[:2], width)),
    }
    wanted, out = others[kind]
    y = b.want(Type(dtype, wanted))
    b.emit(f"torch.einsum('{kind}', {x}, {y})", [x, y], out, dtype, coarse=True)


# --- norms -----------------------------------------------------------------------------------------------------------


@rule(4)
def layer_or_rms_norm(b: Builder) -> None:
    x = fixed_width(b, 1, FLOATS)
    shape, dtype = b.shape(x), b.type(x).dtype
    if dtype == "float64":
        raise Impossible
    count = 2 if len(shape) > 1 and (shape[-2].static or 0) > 0 and b.chance(25) else 1
    inner = shape[len(shape) - count :]
    sizes = ", ".join(map(str, inner)) + ("," if count == 1 else "")
    kind = b.choose(("layer_norm", "rms_norm"))
    names = [x]
    affine = b.choose(("", "weight", "both")) if kind == "layer_norm" else b.choose(("", "weight"))
    text = f"F.{kind}({x}, ({sizes})"
    if affine:
        names.append(b.leaf(Type(dtype, inner), "positive", "p"))
        text += f", {names[-1]}"
    if affine == "both":
        names.append(b.leaf(Type(dtype, inner), "unit", "p"))
        text += f", {names[-1]}"
    b.emit(f"{text}, eps={b.choose((1e-3, 1e-2, 1e-5))})", names, shape, dtype)


@rule(2)
def norm_by_hand(b: Builder) -> None:
    """RMSNorm and LayerNorm as models write them, statistics in fp32."""
    x = fixed_width(b, 1, COMPUTED)
    shape, dtype = b.shape(x), b.type(x).dtype
    thin = (*shape[:-1], Size.of(1))
    y = b.to_dtype(x, "float32")
    if b.chance(40):
        mean = b.emit(f"{y}.mean(-1, keepdim=True)", [y], thin, "float32")
        y = b.emit(f"{y} - {mean}", [y, mean], shape, "float32", "ieee")
    square = b.emit(f"{y}.pow(2)", [y], shape, "float32", "ieee")
    mean = b.emit(f"{square}.mean(-1, keepdim=True)", [square], thin, "float32")
    scale = b.emit(f"torch.rsqrt({mean} + 1e-3)", [mean], thin, "float32")
    z = b.emit(f"{y} * {scale}", [y, scale], shape, "float32", "ieee")
    z = b.to_dtype(z, dtype)
    w = b.leaf(Type(dtype, (shape[-1],)), "positive", "p")
    b.emit(f"{w} * {z}", [w, z], shape, dtype, "ieee")


@rule(2)
def group_norm(b: Builder) -> None:
    x = b.pick(lambda t: t.dtype in COMPUTED and t.rank >= 3 and bool(t.shape[1].static))
    shape, dtype = b.shape(x), b.type(x).dtype
    channels = int(shape[1].static or 0)
    groups = b.choose([g for g in (1, 2, 3, 4) if channels % g == 0])
    names, text = [x], f"F.group_norm({x}, {groups}"
    if b.chance(60):
        names += [b.leaf(Type(dtype, shape_of(channels)), fill, "p") for fill in ("positive", "unit")]
        text += f", {names[1]}, {names[2]}"
    else:
        text += ", None, None"
    b.emit(f"{text}, 1e-2)", names, shape, dtype)


@rule(2)
def batch_norm(b: Builder) -> None:
    x = b.pick(lambda t: t.dtype in COMPUTED and t.rank in (2, 3, 4) and bool(t.shape[1].static))
    shape, dtype = b.shape(x), b.type(x).dtype
    channels = shape_of(int(shape[1].static or 0))
    names = [x, *(b.leaf(Type(dtype, channels), fill, "c") for fill in ("unit", "positive"))]
    if b.chance(70):
        names += [b.leaf(Type(dtype, channels), fill, "p") for fill in ("positive", "unit")]
    b.emit(f"F.batch_norm({', '.join(names)}, eps=1e-2)", names, shape, dtype)


# --- attention, embeddings -------------------------------------------------------------------------------------------


@rule(4)
def attention(b: Builder) -> None:
    dtype = b.choose([d for d in b.limits.dtypes if d in COMPUTED])
    batch, queries = Size.of(b.choose(("b", 1, 2, "b"))), Size.of(b.choose(("s", 1, 3, "s", "n")))
    heads, depth = b.choose((1, 2, 4)), b.choose((3, 8, 16))
    groups = b.choose([g for g in (1, 2, 4) if heads % g == 0])
    kind = b.choose(("none", "causal", "bool", "float", "triangle", "window"))
    keys = queries if kind in ("causal", "triangle", "window") or b.chance(70) else Size.of(b.choose(("n", 4)))
    out_depth = depth if b.chance(70) else b.choose((4, 8))
    lead = (batch,)

    def heads_of(count: int, length: Size, size: int) -> str:
        if b.chance(50):
            return b.want(Type(dtype, (*lead, Size.of(count), length, Size.of(size))), "normal")
        flat = b.want(Type(dtype, (*lead, length, Size.of(count * size))), "normal")
        shape = (*lead, length, Size.of(count), Size.of(size))
        if b.shape(flat)[-1].static != count * size:
            raise Impossible
        y = b.emit(f"{flat}.reshape({text_of(shape)})", [flat], shape, dtype, "moves")
        return b.emit(f"{y}.transpose(1, 2)", [y], (*lead, Size.of(count), length, Size.of(size)), dtype, "moves")

    q, k, v = heads_of(heads, queries, depth), heads_of(groups, keys, depth), heads_of(groups, keys, out_depth)
    names, more = [q, k, v], ", is_causal=True" if kind == "causal" else ""
    full = (*lead, Size.of(heads), queries, keys)
    if kind == "bool":
        narrow = tuple(Size.of(1) if i < 3 and b.chance(50) else size for i, size in enumerate(full))
        names.append(b.want(Type("bool", narrow)))
        if not visible(b, names[-1]):
            raise Impossible
    elif kind == "float":
        narrow = tuple(Size.of(1) if i < 3 and b.chance(50) else size for i, size in enumerate(full))
        names.append(b.want(Type(dtype, narrow), "normal"))
    elif kind in ("triangle", "window"):
        names.append(position_mask(b, queries, keys, kind))
    if len(names) > 3:
        more += f", attn_mask={names[3]}"
    if heads != groups:
        more += ", enable_gqa=True"
    if b.chance(30):
        more += f", scale={b.choose((0.5, 0.125, 1.0))}"
    text = f"F.scaled_dot_product_attention({q}, {k}, {v}{more})"
    b.emit(text, names, (*lead, Size.of(heads), queries, Size.of(out_depth)), dtype, coarse=True)


def visible(b: Builder, mask: str) -> bool:
    """Whether every query sees a key."""
    return all(bool(trial.eager[mask].any(-1).all()) for trial in b.trials)


def position_mask(b: Builder, queries: Size, keys: Size, kind: str) -> str:
    """A bool (queries, keys) from positions alone."""
    i = b.emit(f"torch.arange({queries})", [], (queries,), "int64", "moves")
    j = b.emit(f"torch.arange({keys})", [], (keys,), "int64", "moves")
    i = b.emit(f"{i}[:, None]", [i], (queries, Size.of(1)), "int64", "moves")
    below = b.emit(f"{j} <= {i}", [i, j], (queries, keys), "bool", "moves")
    if kind == "triangle":
        return below
    near = b.emit(f"{j} > {i} - {b.choose((2, 3))}", [i, j], (queries, keys), "bool", "moves")
    return b.emit(f"{below} & {near}", [below, near], (queries, keys), "bool", "moves")


@rule(2)
def attention_by_hand(b: Builder) -> None:
    dtype = b.choose([d for d in b.limits.dtypes if d in COMPUTED])
    lead = (Size.of(b.choose(("b", 2))), Size.of(b.choose((1, 2, 3))))
    queries, keys, depth = Size.of(b.choose(("s", 3))), Size.of(b.choose(("s", "n"))), Size.of(b.choose((4, 8)))
    q = b.want(Type(dtype, (*lead, queries, depth)), "normal")
    k, v = (b.want(Type(dtype, (*lead, keys, depth)), "normal") for _ in range(2))
    scores = b.emit(f"{q} @ {k}.transpose(-1, -2)", [q, k], (*lead, queries, keys), dtype, coarse=True)
    scores = b.emit(b.choose((f"{scores} * 0.5", f"{scores} / 2.0")), [scores], (*lead, queries, keys), dtype, "ieee")
    match b.integer(0, 2):
        case 0 if queries == keys:
            mask = position_mask(b, queries, keys, "triangle")
            scores = b.emit(
                f"{scores}.masked_fill(~{mask}, float('-inf'))"
                if b.limits.special
                else f"{scores}.masked_fill(~{mask}, -1e4)",
                [scores, mask],
                b.shape(scores),
                dtype,
                "moves",
            )
        case 1:
            mask = condition_for(b, b.shape(scores))
            scores = b.emit(f"torch.where({mask}, {scores}, -1e4)", [mask, scores], b.shape(scores), dtype, "moves")
        case _:
            pass
    wide = b.emit(f"torch.softmax({scores}, -1, dtype=torch.float32)", [scores], b.shape(scores), "float32")
    p = b.to_dtype(wide, dtype)
    b.emit(f"{p} @ {v}", [p, v], (*lead, queries, depth), dtype, coarse=True)


@rule(3)
def embedding(b: Builder) -> None:
    rows, width = b.choose((3, 7, 20)), b.choose((1, 4, 8, 32))
    dtype = b.choose([d for d in b.limits.dtypes if d in COMPUTED])
    table = b.leaf(Type(dtype, shape_of(rows, width)), "normal", "p")
    if b.limits.quantised and b.chance(60):
        b.quant[table.removeprefix("self.")] = b.choose(
            ("int8", "nf4", *(("int4:group=32",) if width % 32 == 0 else ()))
        )
    shape: Shape = b.random_shape(b.integer(0, 3))
    ids = b.want(Type(b.choose(("int64", "int64", "int32")), shape), f"index:{rows}")
    b.emit(f"F.embedding({ids}, {table})", [ids, table], (*shape, Size.of(width)), dtype, "moves")


@rule(2)
def gated(b: Builder) -> None:
    x = b.pick(
        lambda t: t.dtype in COMPUTED and t.rank >= 1 and any(s.divided(2) is not None and s.is_static for s in t.shape)
    )
    axis = b.axis(x, lambda size: size.is_static and size.divided(2) is not None and bool(size.static))
    shape = b.shape(x)
    half = shape[axis].divided(2)
    assert half is not None
    b.emit(f"F.glu({x}, {axis})", [x], (*shape[:axis], half, *shape[axis + 1 :]), b.type(x).dtype, coarse=True)


@rule(2)
def rotary(b: Builder) -> None:
    x = b.pick(lambda t: t.dtype in COMPUTED and t.rank == 4 and (t.shape[3].static or 1) % 2 == 0)
    shape, dtype = b.shape(x), b.type(x).dtype
    half = int(shape[3].static or 0) // 2
    length = shape[2]
    t = b.emit(f"torch.arange({length}, dtype=torch.float32)", [], (length,), "float32", "moves")
    angles = b.emit(
        f"{t}[:, None] * 0.3 ** torch.arange({half}, dtype=torch.float32)", [t], (length, Size.of(half)), "float32"
    )
    both = b.emit(f"torch.cat(({angles}, {angles}), -1)", [angles], (length, shape[3]), "float32", "moves")
    cos = b.to_dtype(b.emit(f"{both}.cos()", [both], b.shape(both), "float32"), dtype)
    sin = b.to_dtype(b.emit(f"{both}.sin()", [both], b.shape(both), "float32"), dtype)
    turned = b.emit(f"torch.cat((-{x}[..., {half}:], {x}[..., :{half}]), -1)", [x], shape, dtype, "moves")
    left = b.emit(f"{x} * {cos}", [x, cos], shape, dtype, "ieee")
    right = b.emit(f"{turned} * {sin}", [turned, sin], shape, dtype, "ieee")
    b.emit(f"{left} + {right}", [left, right], shape, dtype, "ieee")
