"""Pointwise statements: functions, arithmetic of two, comparisons, selection, casts."""

from __future__ import annotations

from graphfuzz.builder import Builder, Exactness, Impossible
from graphfuzz.graphs import FLOATS, Type
from graphfuzz.rules import rule
from graphfuzz.sizes import Shape, broadcast, shape_of

INTEGERS = ("int64", "int32", "int16", "int8", "uint8")
RANK = {"bool": 0, "uint8": 1, "int8": 1, "int16": 2, "int32": 3, "int64": 4, "float16": 5, "bfloat16": 5, "float32": 6,
        "float64": 7}  # fmt: skip

# text -> what it does to exact operands
SAME: dict[str, Exactness] = {
    "torch.abs({x})": "moves", "-{x}": "moves", "torch.relu({x})": "moves", "F.relu6({x})": "moves",
    "torch.sign({x})": "moves", "torch.sgn({x})": "moves", "torch.ceil({x})": "moves", "torch.floor({x})": "moves",
    "torch.trunc({x})": "moves", "torch.round({x})": "moves", "torch.square({x})": "ieee",
    "torch.sigmoid({x})": "rounds", "F.silu({x})": "rounds", "F.mish({x})": "rounds", "F.gelu({x})": "rounds",
    "F.gelu({x}, approximate='tanh')": "rounds", "F.elu({x}, {c})": "rounds", "F.selu({x})": "rounds",
    "F.celu({x}, {p})": "rounds", "F.softplus({x}, {p})": "rounds", "F.leaky_relu({x}, {c})": "rounds",
    "F.hardtanh({x}, -{p}, {p})": "moves", "F.hardsigmoid({x})": "rounds", "F.hardswish({x})": "rounds",
    "F.hardshrink({x}, {p})": "moves", "F.softshrink({x}, {p})": "ieee", "F.threshold({x}, {c}, {p})": "moves",
    "F.logsigmoid({x})": "rounds", "F.tanhshrink({x})": "rounds", "F.softsign({x})": "rounds",
    "torch.exp({x})": "rounds", "torch.exp2({x})": "rounds", "torch.expm1({x})": "rounds", "torch.sin({x})": "rounds",
    "torch.cos({x})": "rounds", "torch.atan({x})": "rounds", "torch.sinh({x})": "rounds", "torch.cosh({x})": "rounds",
    "torch.tanh({x})": "rounds", "torch.asinh({x})": "rounds", "torch.erf({x})": "rounds", "torch.erfc({x})": "rounds",
    "torch.frac({x})": "ieee", "torch.nan_to_num({x}, {c})": "moves", "torch.deg2rad({x})": "rounds",
    "F.dropout({x}, 0.5, training=False)": "moves", "F.rrelu({x}, 0.1, 0.3, training=False)": "rounds",
}  # fmt: skip
POSITIVE = (
    "torch.log({x})", "torch.log2({x})", "torch.log10({x})", "torch.sqrt({x})", "torch.rsqrt({x})", "{x}.pow({c})",
    "torch.reciprocal({x})", "torch.log1p({x})", "{x}.pow(0.5)", "{x}.pow(-0.5)", "{p} ** {x}", "torch.tan({x} * 0.5)",
)  # fmt: skip
"""Of values that are kept away from zero; the guarded form is written out as statements of its own."""
ABOVE_ONE = ("torch.acosh({x})",)
WITHIN_ONE = ("torch.asin({x})", "torch.acos({x})", "torch.atanh({x})", "torch.erf({x})")
INTEGER_SAME = (
    "torch.abs({x})",
    "-{x}",
    "torch.sign({x})",
    "torch.relu({x})",
    "torch.square({x})",
    "{x} % 5",
    "{x} // 3",
    "{x} * 2",
    "{x} + 1",
    "1 - {x}",
    "{x}.clamp(-2, 3)",
    "{x}.clamp(max=4)",
    "{x}.pow(2)",
    "{x} & 6",
    "{x} | 3",
    "{x} ^ 5",
    "torch.bitwise_not({x})",
)


COMPOSITE = ("tan({x} * 0.5)", "tanhshrink", "softsign", "mse_loss", "lerp", "float_power", "rad", "frac", "hypot")
"""Several operators of ATen behind one name: 16-bit floats are rounded in between."""


def is_composite(text: str) -> bool:
    return any(word in text for word in COMPOSITE)


def fill_in(b: Builder, text: str, x: str) -> str:
    return text.format(x=x, c=b.number(), p=b.choose((0.5, 1.0, 2.0, 1.25)))


def promoted(b: Builder, x: str, y: str) -> str:
    """The dtype of x op y, as eager torch has it."""
    import torch

    values = b.trials[0].eager
    return str(torch.result_type(values[x], values[y])).removeprefix("torch.")


@rule(10)
def unary(b: Builder) -> None:
    x = b.pick_float()
    text = b.choose(tuple(SAME))
    b.emit(fill_in(b, text, x), [x], b.shape(x), b.type(x).dtype, SAME[text], coarse=is_composite(text))


def distant_from_zero(b: Builder, x: str) -> str:
    """|x| + a number, as statements."""
    positive = b.emit(f"torch.abs({x})", [x], b.shape(x), b.type(x).dtype, "moves")
    return b.emit(f"{positive} + {b.choose((0.25, 0.5, 1.0))}", [positive], b.shape(x), b.type(x).dtype, "ieee")


@rule(4)
def unary_positive(b: Builder) -> None:
    x = b.pick_float()
    y = x if b.limits.special or b.chance(30) else distant_from_zero(b, x)
    text = b.choose(POSITIVE)
    b.emit(fill_in(b, text, y), [y], b.shape(x), b.type(x).dtype, coarse=is_composite(text))


@rule(2)
def unary_bounded(b: Builder) -> None:
    x = b.pick_float()
    dtype, shape = b.type(x).dtype, b.shape(x)
    if b.chance(30):
        y = distant_from_zero(b, x)
        y = b.emit(f"{y} + 1.0", [y], shape, dtype, "ieee")
        b.emit(fill_in(b, b.choose(ABOVE_ONE), y), [y], shape, dtype)
        return
    y = b.emit(f"torch.tanh({x})", [x], shape, dtype)
    y = b.emit(f"{y} * 0.9", [y], shape, dtype)
    b.emit(fill_in(b, b.choose(WITHIN_ONE), y), [y], shape, dtype)


@rule(3)
def unary_of_integers(b: Builder) -> None:
    x = b.pick(lambda t: t.dtype in INTEGERS)
    dtype = b.type(x).dtype
    text = b.choose(INTEGER_SAME)
    if dtype == "uint8" and text in ("-{x}", "1 - {x}", "torch.sign({x})", "torch.relu({x})", "{x}.clamp(-2, 3)"):
        raise Impossible
    b.emit(text.format(x=x), [x], b.shape(x), dtype, "moves")


@rule(1)
def float_function_of_integers(b: Builder) -> None:
    """Promotes to fp32."""
    x = b.pick(lambda t: not t.is_float)
    text = b.choose(
        ("torch.tanh({x})", "torch.exp({x} * 0.1)", "torch.sigmoid({x})", "{x} / 3", "{x} * 0.5", "torch.sin({x})")
    )
    b.emit(text.format(x=x), [x], b.shape(x), "float32")


@rule(2)
def classify(b: Builder) -> None:
    x = b.pick_float()
    text = b.choose(("torch.isnan({x})", "torch.isinf({x})", "torch.isfinite({x})", "torch.logical_not({x})"))
    b.emit(text.format(x=x), [x], b.shape(x), "bool", "moves")


BINARY: dict[str, Exactness] = {
    "{x} + {y}": "ieee", "{x} - {y}": "ieee", "{x} * {y}": "ieee", "torch.maximum({x}, {y})": "moves",
    "torch.minimum({x}, {y})": "moves", "torch.add({x}, {y}, alpha={c})": "rounds",
    "torch.sub({x}, {y}, alpha={c})": "rounds", "torch.copysign({x}, {y})": "moves",
    "torch.hypot({x}, {y})": "rounds", "torch.lerp({x}, {y}, {c})": "rounds",
    "torch.rsub({x}, {y})": "ieee", "F.mse_loss({x}, {y}, reduction='none')": "rounds",
}  # fmt: skip
DIVISIONS: dict[str, Exactness] = {
    "{x} / {y}": "ieee", "torch.fmod({x}, {y})": "moves", "torch.remainder({x}, {y})": "rounds", "{x} // {y}": "rounds",
    "torch.div({x}, {y}, rounding_mode='trunc')": "rounds", "torch.atan2({x}, {y})": "rounds",
}  # fmt: skip
SAME_TYPES = ("hypot", "lerp", "mse_loss")


@rule(9)
def binary(b: Builder) -> None:
    x = b.pick_float()
    text = b.choose(tuple(BINARY))
    same = any(word in text for word in SAME_TYPES)
    other = b.type(x).dtype if same or b.chance(75) else b.choose(b.limits.dtypes)
    if other == "bool" and ("-" in text or "sub" in text or "alpha" in text):
        raise Impossible
    y = b.partner(b.shape(x), other)
    if b.chance(40):
        x, y = y, x
    dtype = promoted(b, x, y)
    shape = common_shape(b, x, y)
    b.emit(text.format(x=x, y=y, c=b.number()), [x, y], shape, dtype, BINARY[text], coarse=is_composite(text))


def common_shape(b: Builder, *names: str) -> Shape:
    shape = broadcast(*(b.shape(name) for name in names))
    if shape is None:
        raise Impossible
    return shape


@rule(3)
def division(b: Builder) -> None:
    x = b.pick_float()
    y = b.partner(b.shape(x), b.type(x).dtype, "positive" if b.chance(50) and not b.limits.special else None)
    if not b.limits.special and b.chance(40):
        y = distant_from_zero(b, y)
    text = b.choose(tuple(DIVISIONS))
    b.emit(text.format(x=x, y=y), [x, y], common_shape(b, x, y), b.type(x).dtype, DIVISIONS[text])


@rule(2)
def power(b: Builder) -> None:
    x = b.pick_float()
    base = distant_from_zero(b, x)
    y = b.partner(b.shape(x), b.type(x).dtype, "unit")
    b.emit(f"torch.pow({base}, {y})", [base, y], common_shape(b, base, y), b.type(x).dtype)


@rule(5)
def with_number(b: Builder) -> None:
    x = b.pick_float()
    text = b.choose(
        (
            "{x} + {c}",
            "{c} - {x}",
            "{x} * {c}",
            "{x} / {c}",
            "{x} - {c}",
            "{x}.pow(2)",
            "{x}.pow(3)",
            "{x} ** -2",
            "{x}.clamp(-0.5, 0.7)",
            "{x}.clamp(min={c})",
            "{x}.clamp(max={c})",
            "{c} / {x}",
            "{x} % {p}",
            "torch.fmod({x}, {p})",
            "{x} // {p}",
            "torch.div({x}, {p}, rounding_mode='trunc')",
            "torch.mul({x}, {k})",
            "torch.add({x}, {k}, alpha=2)",
            "torch.rsub({x}, {c})",
            "torch.float_power({x}, 2).to({x}.dtype)",
        )
    )
    exact: Exactness = "moves" if "clamp" in text else "ieee" if text[4:5] in "+-*" or "rsub" in text else "rounds"
    if "** -2" in text or text.startswith("{c} /"):
        x = distant_from_zero(b, x)
    full = text.format(x=x, c=b.number(), p=b.choose((0.5, 2.0, 1.25)), k=b.integer(-3, 3))
    b.emit(full, [x], b.shape(x), b.type(x).dtype, exact, coarse=is_composite(text))


@rule(3)
def binary_of_integers(b: Builder) -> None:
    x = b.pick(lambda t: t.dtype in INTEGERS)
    dtype = b.type(x).dtype
    text = b.choose(
        (
            "{x} + {y}",
            "{x} - {y}",
            "{x} * {y}",
            "{x} // {y}",
            "{x} % {y}",
            "torch.fmod({x}, {y})",
            "{x} / {y}",
            "torch.maximum({x}, {y})",
            "torch.minimum({x}, {y})",
            "{x} & {y}",
            "{x} | {y}",
            "{x} ^ {y}",
            "torch.div({x}, {y}, rounding_mode='trunc')",
        )
    )
    divides = "/" in text or "%" in text or "mod" in text or "div" in text
    other = dtype if b.chance(70) else b.choose([d for d in b.limits.dtypes if d in INTEGERS])
    y = b.partner(b.shape(x), other, "divisor" if divides else None)
    result = "float32" if text == "{x} / {y}" else promoted(b, x, y)
    b.emit(text.format(x=x, y=y), [x, y], common_shape(b, x, y), result, "ieee" if result == "float32" else "moves")


@rule(5)
def comparison(b: Builder) -> None:
    x = b.pick()
    shape, dtype = b.shape(x), b.type(x).dtype
    sign = b.choose(("<", "<=", ">", ">=", "==", "!="))
    if b.chance(40):
        number = b.number() if b.type(x).is_float else b.integer(-2, 3)
        if dtype == "bool":
            raise Impossible
        b.emit(f"{x} {sign} {number}", [x], shape, "bool", "moves")
        return
    other = dtype if b.chance(75) else b.choose(b.limits.dtypes)
    y = b.partner(shape, other)
    b.emit(f"{x} {sign} {y}", [x, y], common_shape(b, x, y), "bool", "moves")


@rule(3)
def logic(b: Builder) -> None:
    x = b.pick(lambda t: t.dtype == "bool")
    y = b.partner(b.shape(x), "bool" if b.chance(70) else b.choose(b.limits.dtypes))
    kinds = ["torch.logical_and({x}, {y})", "torch.logical_or({x}, {y})", "torch.logical_xor({x}, {y})"]
    if b.type(y).dtype == "bool":
        kinds += ["{x} & {y}", "{x} | {y}", "{x} ^ {y}", "~{x}", "{x} + {y}", "{x} * {y}"]
    b.emit(b.choose(kinds).format(x=x, y=y), [x, y], common_shape(b, x, y), "bool", "moves")


def condition_for(b: Builder, shape: Shape) -> str:
    """A bool that broadcasts with `shape`: one there is, an input, or a comparison of exact values."""
    if b.chance(40):
        y = b.partner(shape, b.choose([d for d in b.limits.dtypes if d != "bool"]))
        number = b.number() if b.type(y).is_float else b.integer(-1, 1)
        return b.emit(f"{y} > {number}", [y], b.shape(y), "bool", "moves")
    return b.partner(shape, "bool")


@rule(5)
def selection(b: Builder) -> None:
    x = b.pick(lambda t: t.rank < 6)
    dtype, shape = b.type(x).dtype, b.shape(x)
    condition = condition_for(b, shape)
    match b.integer(0, 3):
        case 0:
            number = "True" if dtype == "bool" else b.number() if b.type(x).is_float else b.integer(0, 3)
            b.emit(f"{x}.masked_fill({condition}, {number})", [x, condition], shape, dtype, "moves")
        case 1 if b.type(x).is_float:
            infinite = b.choose(("-1e4", "0.0", "-1.0", "1.0"))
            b.emit(f"torch.where({condition}, {x}, {infinite})", [x, condition], shape, dtype, "moves")
        case _:
            y = b.partner(shape, dtype if b.chance(80) else b.choose(b.limits.dtypes))
            text = b.choose(("torch.where({c}, {x}, {y})", "torch.where({c}, {y}, {x})"))
            exact: Exactness = "moves" if dtype == b.type(y).dtype else "ieee"
            b.emit(
                text.format(c=condition, x=x, y=y),
                [condition, x, y],
                common_shape(b, condition, x, y),
                promoted(b, x, y),
                exact,
            )


@rule(3)
def clamp_by_tensors(b: Builder) -> None:
    x = b.pick(lambda t: t.dtype != "bool")
    dtype, shape = b.type(x).dtype, b.shape(x)
    low, high = b.partner(shape, dtype), b.partner(shape, dtype)
    text = b.choose(("torch.clamp({x}, {low}, {high})", "{x}.clamp(min={low})", "{x}.clamp(max={high})"))
    b.emit(text.format(x=x, low=low, high=high), [x, low, high], common_shape(b, x, low, high), dtype, "moves")


@rule(2)
def multiply_add(b: Builder) -> None:
    x = b.pick_float()
    dtype, shape = b.type(x).dtype, b.shape(x)
    y, z = b.partner(shape, dtype), b.partner(shape, dtype)
    if b.chance(50):
        z = distant_from_zero(b, z)
        text = f"torch.addcdiv({x}, {y}, {z}, value={b.number()})"
    else:
        text = f"torch.addcmul({x}, {y}, {z}, value={b.number()})"
    b.emit(text, [x, y, z], common_shape(b, x, y, z), dtype)


@rule(6)
def conversion(b: Builder) -> None:
    x = b.pick()
    dtype = b.choose([d for d in b.limits.dtypes if d != b.type(x).dtype])
    source = b.type(x)
    if source.is_float and dtype not in (*FLOATS, "bool"):
        if dtype == "uint8":
            x = b.emit(f"torch.abs({x})", [x], source.shape, source.dtype, "moves")
        x = b.emit(f"{x}.clamp(-100, 100)", [x], source.shape, source.dtype, "moves")  # beyond the range is undefined
        if b.limits.special:
            x = b.emit(f"torch.nan_to_num({x}, 1.0)", [x], source.shape, source.dtype, "moves")
    elif source.dtype in ("int64", "int32", "int16", "int8") and dtype == "uint8":
        x = b.emit(f"torch.abs({x})", [x], source.shape, source.dtype, "moves")
    b.cast(x, dtype)


@rule(2)
def round_trip(b: Builder) -> None:
    """Computes in a wider type, as models do around norms."""
    x = b.pick(lambda t: t.dtype in ("bfloat16", "float16"))
    dtype, shape = b.type(x).dtype, b.shape(x)
    wide = b.emit(f"{x}.to(torch.float32)", [x], shape, "float32", "moves")
    y = b.emit(
        b.choose(("torch.tanh({x})", "{x} * {x}", "torch.sigmoid({x})")).format(x=wide), [wide], shape, "float32"
    )
    b.emit(f"{y}.to(torch.{dtype})", [y], shape, dtype)


@rule(2)
def channel_slopes(b: Builder) -> None:
    x = b.pick_float()
    dtype, shape = b.type(x).dtype, b.shape(x)
    count = shape[1].static if len(shape) > 1 else 1
    if count is None or b.chance(30):
        count = 1
    slopes = b.leaf(Type(dtype, shape_of(count)), "unit", "p")
    b.emit(f"F.prelu({x}, {slopes})", [x, slopes], shape, dtype)
