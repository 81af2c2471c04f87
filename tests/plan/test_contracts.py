"""The contracts of kernels: one for each kind, whose words are those of what is emitted."""

from __future__ import annotations

import re

import msgspec
import pytest

from qcompiler.errors import DimError, PlanError
from qcompiler.kernels.cpu.emit import emit_kernel as emit_cpu
from qcompiler.kernels.cuda.emit import emit_kernel as emit_cuda
from qcompiler.kernels.scalar import SCALAR_TABLE
from qcompiler.plan.contracts import check_sizes, injective
from qcompiler.plan.dims import Dim, contiguous_strides, parse
from qcompiler.plan.kernel import KernelSpec, Operand, ScalarOp, ScalarProgram
from qcompiler.plan.kinds.attention import AttentionKernel
from qcompiler.plan.kinds.linear import LinearKernel
from qcompiler.plan.scalar_types import RULES, check_program
from qcompiler.plan.sizes import LARGEST_SIZE, check_extent, magnitude


def test_the_ops_of_bodies_are_those_that_are_printed():
    assert set(RULES) == set(SCALAR_TABLE)


RANGES = {"b": (0, 8), "s": (1, 64)}


@pytest.mark.parametrize(
    ("shape", "strides", "expected"),
    [
        ((4, 8), (8, 1), True),
        ((4, 8), (1, 4), True),
        ((4, 8), (16, 2), True),
        ((4, 8), (7, 1), False),
        ((4, 8), (0, 1), False),
        ((1, 8), (0, 1), True),
        ((4, 8), (-8, 1), True),
        (("b", "s", 8), ("8*s", 8, 1), True),
        (("s", "b"), ("b", 1), True),  # where b is 0 there is no element
        (("b", "s", 8), (8, "8*s", 1), False),
        (("b", "s"), (64, 1), True),
        (("b", "s"), (63, 1), False),
        (("b", "s - 1"), ("s", 1), True),
        (("b", "s"), ("s - 1", 1), False),
    ],
)
def test_writes_are_found_to_overlap_themselves(shape: tuple[Dim, ...], strides: tuple[Dim, ...], expected: bool):
    assert injective(shape, strides, RANGES) == expected


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("8*b*s", True),
        (str(LARGEST_SIZE), True),
        (str(LARGEST_SIZE + 1), False),
        (f"{LARGEST_SIZE // 64}*s", True),
        (f"{LARGEST_SIZE // 64 + 1}*s", False),
        (f"{2**60}*b - {2**60 - 1}*b", True),  # which is b
        (f"{2**60}*b - {2**60}*s", False),
        (f"max({-(2**64)}*s + 5, 1)", False),
        (f"(s // {2**64})", False),
        ("(s // (b + 1))", True),
        ("(s // b)", False),
        ("(s % (b - 9))", False),
        ("min(s, (s // b))", False),
    ],
)
def test_numbers_on_the_way_to_a_size_are_bounded(text: str, fits: bool):
    if fits:
        assert 1 <= magnitude(parse(text), RANGES) <= LARGEST_SIZE
    else:
        with pytest.raises(DimError):
            magnitude(parse(text), RANGES)


def test_a_magnitude_bounds_every_partial_result():
    """Terms in any order, factors in any order, at the ends of all ranges."""
    for text in ("8*b*s - 64*s + 3", "b*b*s*s - b*s", "max(8*b - 9*s, 5)*s", "((8*b + 15) // 16)*s - 4"):
        bound = magnitude(parse(text), RANGES)
        for b in RANGES["b"]:
            for s in RANGES["s"]:
                terms = [
                    parse(str(part)).evaluate({"b": b, "s": s})
                    for part in (type(parse(text))({m: c}) for m, c in parse(text).terms.items())
                ]
                assert sum(abs(term) for term in terms) <= bound


def test_extents_are_proven_not_negative():
    check_extent("s - 1", RANGES)
    check_extent("s", RANGES, least=1)
    for extent, least in (("s - 2", 0), ("b", 1), ("b - s", 0), (-1, 0), (0, 1)):
        with pytest.raises(DimError, match="negative"):
            check_extent(extent, RANGES, least=least)  # type: ignore[arg-type]


LLAMA_70B = {"hidden": 8192, "up": 28672, "words": 128256, "heads": 64, "kv_heads": 8, "dim": 128}


def _rows(name: str, *shape: Dim, access: str = "r") -> Operand:
    return Operand(name=name, dtype="bf16", access=access, shape=shape, strides=contiguous_strides(shape))  # type: ignore[arg-type]


def _linear(n: int, k: int) -> KernelSpec:
    body = LinearKernel(m="s", n=n, k=k, m_class="large", has_bias=False)
    operands = (_rows("x", "s", k), _rows("w", n, k), _rows("out", "s", n, access="w"))
    return KernelSpec(name="k", symbols=("s",), operands=operands, body=body)


@pytest.mark.parametrize(
    ("x", "w", "fits"),
    [("f32", "f32", True), ("f32", "bf16", True), ("f16", "f32", True), ("f16", "f16", True), ("f32", "f16", False),
     ("bf16", "f16", False)],
)  # fmt: skip
def test_a_weight_to_whose_type_no_kernel_rounds_x_is_refused(x: str, w: str, fits: bool):
    spec = _linear(64, 32)
    rows, weight, out = spec.operands
    operands = (msgspec.structs.replace(rows, dtype=x), msgspec.structs.replace(weight, dtype=w), out)
    if fits:
        spec.body.check_operands(operands)
        return
    with pytest.raises(PlanError, match=f"its x is {x} and its weight {w}"):
        spec.body.check_operands(operands)


def test_a_prefill_of_a_million_tokens_of_a_large_model_is_no_attack():
    """The kernels of a model of 70 B: no text multiplies what would not fit in 64 bits."""
    ranges, of = {"s": (1, 1 << 20)}, LLAMA_70B
    for n, k in ((of["words"], of["hidden"]), (2 * of["up"], of["hidden"]), (of["hidden"], of["up"])):
        check_sizes(_linear(n, k), ranges)
    with pytest.raises(PlanError, match=r"2\*\*54.*smaller maxima"):
        check_sizes(_linear(of["words"] << 5, of["hidden"]), ranges)
    query, key = (1, of["heads"], "s", of["dim"]), (1, of["kv_heads"], "s", of["dim"])
    for mask in ("none", "bool"):
        masks = (_rows("mask", 1, of["heads"], "s", "s"),) if mask == "bool" else ()
        masks = tuple(msgspec.structs.replace(each, dtype="i1", strides=(0, 0, "s", 1)) for each in masks)
        operands = (_rows("q", *query), _rows("k", *key), _rows("v", *key), *masks, _rows("out", *query, access="w"))
        body = AttentionKernel(
            batch=1, heads=of["heads"], kv_heads=of["kv_heads"], q_len="s", kv_len="s", head_dim=of["dim"],
            value_dim=of["dim"], scale=0.1, causal=mask == "none", mask=mask,
        )  # fmt: skip
        check_sizes(KernelSpec(name="k", symbols=("s",), operands=operands, body=body), ranges)


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_no_text_of_attention_multiplies_queries_by_keys(target: str):
    """Which is why its contract bounds no product of both."""
    operands = tuple(_rows(name, "b", 2, length, 64, access="w" if name == "out" else "r")
                     for name, length in (("q", "s"), ("k", "t"), ("v", "t"), ("out", "s")))  # fmt: skip
    body = AttentionKernel(batch="b", heads=2, kv_heads=2, q_len="s", kv_len="t", head_dim=64, value_dim=64, scale=0.1,
                           causal=False, mask="none")  # fmt: skip
    spec = KernelSpec(name="0", symbols=("b", "s", "t"), operands=operands, body=body)
    text = emit_cpu(spec, "x86-64-v3") if target == "cpu" else emit_cuda(spec, "sm_80").text
    keys, queries = r"(?:n_t|kv_len)", r"(?:n_s|q_len|blocks)"
    assert re.search(keys, text) and re.search(queries, text)
    for line in re.sub(r"//[^\n]*", "", text).split(";"):
        factors = [set(re.findall(rf"{keys}|{queries}", term)) for term in re.split(r"[-+,=<>?:(]", line)]
        assert not any({"n_t", "kv_len"} & each and {"n_s", "q_len", "blocks"} & each for each in factors), line


def op(result: str, name: str, *args: str, dtype: str = "f32", **more: object) -> ScalarOp:
    return ScalarOp(result=result, op=name, dtype=dtype, args=args, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "broken",
    [
        op("r", "arith.addf", "x"),
        op("r", "arith.addf", "x", "i"),
        op("r", "arith.addi", "x", "x"),
        op("r", "arith.addf", "x", "y"),
        op("x", "arith.negf", "x"),
        op("r", "arith.cmpi", "i", "i", dtype="i1", predicate="olt"),
        op("r", "arith.cmpi", "i", "i", dtype="i32", predicate="slt"),
        op("r", "arith.select", "i", "x", "x"),
        op("r", "arith.bitcast", "x", dtype="i64"),
        op("r", "linalg.index", dtype="index", axis=2),
        op("r", "linalg.index", dtype="index", axis=-1),
        op("r", "arith.constant", dtype="i32", value=str(2**32)),
        op("r", "arith.constant", dtype="i64", value=str(2**63)),
        op("r", "arith.constant", value="one"),
        op("r", "arith.constant"),
        op("r", "func.call", "x"),
    ],
)
def test_a_body_that_is_not_typed_is_refused(broken: ScalarOp):
    inputs: tuple[tuple[str, str], ...] = (("x", "f32"), ("i", "i32"))
    with pytest.raises(PlanError):
        check_program(ScalarProgram(inputs=inputs, ops=(broken,), yields=("x",)), 2)  # type: ignore[arg-type]
