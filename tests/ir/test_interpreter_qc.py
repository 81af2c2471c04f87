"""Every qc op means what torch (or a loop) computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from xdsl.builder import Builder
from xdsl.dialects import arith, math
from xdsl.ir import Block, Region
from xdsl.rewriter import InsertPoint

from qcompiler import formats
from qcompiler.errors import ArgumentError, InterpreterError, PlanError
from qcompiler.frontends.torch.qc_ops.torch_ring import ring_attention
from qcompiler.ir import build, qc, types
from qcompiler.ir.interpreter import Interpreter, evaluate_op, run
from qcompiler.ir.module import set_ranges, set_result_keys
from qcompiler.plan.kernel import FormatRef
from qcompiler.plan.torch_regions import TorchOp, TorchRegion
from qcompiler.plan.weights import NUMPY_DTYPES, StoredTensor, WeightStore

T = types.tensor
ModuleOf = Callable[..., Any]


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def one(module_of: ModuleOf, make: Callable[..., Any], arrays: Sequence[np.ndarray], count: int = 1) -> Any:
    """The results of a module whose body is one op over static arguments."""
    names = {np.dtype(v): k for k, v in _NUMPY.items()}
    specs = [(a.shape, names[a.dtype]) for a in arrays]

    def body(builder: Builder, arguments: Sequence[Any]) -> Sequence[Any]:
        return builder.insert(make(*arguments)).results

    module = module_of(specs, body)
    module.verify()
    results = run(module, WeightStore(), arrays)
    assert len(results) == count
    return results[0] if count == 1 else results


_NUMPY = {
    "f32": np.float32, "f64": np.float64, "bf16": ml_dtypes.bfloat16, "f16": np.float16, "i64": np.int64,
    "i32": np.int32, "i1": np.bool_,
}  # fmt: skip


def f32(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def close(got: np.ndarray, wanted: torch.Tensor | np.ndarray, tolerance: float = 2e-6) -> None:
    expected = wanted.numpy() if isinstance(wanted, torch.Tensor) else wanted
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype
    np.testing.assert_allclose(got, expected, rtol=tolerance * 10, atol=tolerance * max(1, np.abs(expected).max()))


def t(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array)


def test_linear_with_bias(module_of: ModuleOf, rng: np.random.Generator) -> None:
    x, w, b = f32(rng, 2, 5, 19), f32(rng, 7, 19), f32(rng, 7)
    got = one(module_of, lambda x, w, b: qc.LinearOp(x, w, b, T((2, 5, 7), "f32")), [x, w, b])
    close(got, F.linear(t(x), t(w), t(b)))


def test_linear_epilogue_sees_f32_accumulator_and_extras(module_of: ModuleOf, rng: np.random.Generator) -> None:
    x, w, b = f32(rng, 5, 19).astype(ml_dtypes.bfloat16), f32(rng, 7, 19).astype(ml_dtypes.bfloat16), None
    extra = f32(rng, 5, 7)

    def make(x: Any, w: Any, extra: Any) -> qc.LinearOp:
        block = Block(arg_types=[types.ELEMENT_TYPES["f32"], types.ELEMENT_TYPES["f32"]])
        inner = Builder(InsertPoint.at_end(block))
        act = inner.insert(math.TanhOp(block.args[0]))
        total = inner.insert(arith.AddfOp(act, block.args[1]))
        inner.insert(qc.YieldOp(inner.insert(arith.TruncFOp(total, types.ELEMENT_TYPES["bf16"]))))
        return qc.LinearOp(x, w, None, T((5, 7), "bf16"), [extra], Region(block))

    got = one(module_of, make, [x, w, extra])
    exact = np.tanh(x.astype(np.float64) @ w.astype(np.float64).T) + extra
    assert got.dtype == ml_dtypes.bfloat16
    np.testing.assert_allclose(got.astype(np.float64), exact, rtol=2**-8, atol=1e-6)
    assert b is None


def test_bf16_linear_rounds_once(module_of: ModuleOf, rng: np.random.Generator) -> None:
    x, w = f32(rng, 3, 200).astype(ml_dtypes.bfloat16), f32(rng, 4, 200).astype(ml_dtypes.bfloat16)
    got = one(module_of, lambda x, w: qc.LinearOp(x, w, None, T((3, 4), "bf16")), [x, w])
    exact = (x.astype(np.float64) @ w.astype(np.float64).T).astype(np.float32).astype(ml_dtypes.bfloat16)
    assert (got == exact).mean() > 0.9  # a sum in bf16 would agree almost nowhere
    np.testing.assert_allclose(got.astype(np.float32), exact.astype(np.float32), rtol=2**-7)


def test_grouped_linear(module_of: ModuleOf, rng: np.random.Generator) -> None:
    x, w, index = f32(rng, 3, 8), f32(rng, 20, 8), np.array([3, 0, 0, 2, 3, 3], np.int64)
    got = one(module_of, lambda *a: qc.GroupedLinearOp(*a, T((6, 5), "f32"), experts=4, repeat=2), [x, w, index])
    close(got, np.stack([w[5 * e : 5 * e + 5] @ x[p // 2] for p, e in enumerate(index)]))


def test_an_expert_that_does_not_exist_is_an_error(module_of: ModuleOf, rng: np.random.Generator) -> None:
    x, w, index = f32(rng, 2, 8), f32(rng, 20, 8), np.array([3, 4], np.int32)
    with pytest.raises(InterpreterError, match="there is no expert 4; there are 4"):
        one(module_of, lambda *a: qc.GroupedLinearOp(*a, T((2, 5), "f32"), experts=4), [x, w, index])


def test_batch_matmul(module_of: ModuleOf, rng: np.random.Generator) -> None:
    a, b = f32(rng, 2, 3, 4, 5), f32(rng, 2, 3, 5, 6)
    close(one(module_of, lambda a, b: qc.BatchMatmulOp(a, b, T((2, 3, 4, 6), "f32")), [a, b]), t(a) @ t(b))


@pytest.mark.parametrize(("groups", "stride", "padding", "dilation"), [(1, 1, 0, 1), (2, 2, 1, 1), (4, 1, 2, 2)])
def test_conv2d(
    module_of: ModuleOf, rng: np.random.Generator, groups: int, stride: int, padding: int, dilation: int
) -> None:
    x, w, b = f32(rng, 2, 4, 9, 11), f32(rng, 8, 4 // groups, 3, 2), f32(rng, 8)
    wanted = F.conv2d(t(x), t(w), t(b), stride, padding, dilation, groups)

    def make(x: Any, w: Any, b: Any) -> qc.Conv2dOp:
        return qc.Conv2dOp(
            x, w, b, T(tuple(wanted.shape), "f32"), strides=[stride] * 2, padding=[padding] * 4,
            dilation=[dilation] * 2, groups=groups,
        )  # fmt: skip

    close(one(module_of, make, [x, w, b]), wanted, 1e-5)


def test_conv2d_rounds_x_to_the_type_of_its_weight(module_of: ModuleOf, rng: np.random.Generator) -> None:
    x, w = f32(rng, 2, 4, 9, 11), f32(rng, 8, 4, 3, 2).astype(NUMPY_DTYPES["bf16"])
    rounded = t(x).bfloat16().float()
    wanted = F.conv2d(rounded, t(w.astype(np.float32)))

    def make(x: Any, w: Any) -> qc.Conv2dOp:
        type_ = T(tuple(wanted.shape), "f32")
        return qc.Conv2dOp(x, w, None, type_, strides=[1, 1], padding=[0] * 4, dilation=[1, 1], groups=1)

    close(one(module_of, make, [x, w]), wanted, 1e-5)
    assert float((wanted - F.conv2d(t(x), t(w.astype(np.float32)))).abs().max()) > 1e-3


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", ["none", "bool", "float"])
def test_attention_with_grouped_heads(module_of: ModuleOf, rng: np.random.Generator, mask: str, causal: bool) -> None:
    q, k, v = f32(rng, 2, 4, 5, 8), f32(rng, 2, 2, 7, 8), f32(rng, 2, 2, 7, 6)
    keep = rng.random((2, 1, 5, 7)) > 0.3
    keep[..., 0] = True
    extra = {"none": [], "bool": [keep], "float": [f32(rng, 2, 1, 5, 7)]}[mask]

    def make(q: Any, k: Any, v: Any, m: Any = None) -> qc.AttentionOp:
        return qc.AttentionOp(q, k, v, m, T((2, 4, 5, 6), "f32"), scale=0.3, causal=causal)

    full = torch.zeros(2, 1, 5, 7)
    if mask == "bool":
        full = full.masked_fill(~t(keep), -torch.inf)
    elif mask == "float":
        full = full + t(extra[0])
    if causal:
        full = full.masked_fill(~torch.ones(5, 7, dtype=torch.bool).tril(), -torch.inf)
    rep = [t(x).repeat_interleave(2, 1) for x in (k, v)]
    wanted = F.scaled_dot_product_attention(t(q), *rep, attn_mask=full.expand(2, 4, 5, 7), scale=0.3)
    close(one(module_of, make, [q, k, v, *extra]), wanted, 1e-6)


def test_attention_with_a_window_and_a_softcap(module_of: ModuleOf, rng: np.random.Generator) -> None:
    q, k, v = (rng.standard_normal((1, 2, n, 8)).astype(np.float32) for n in (10, 7, 7))

    def make(q: Any, k: Any, v: Any) -> qc.AttentionOp:
        return qc.AttentionOp(q, k, v, None, T((1, 2, 10, 8), "f32"), scale=0.3, window=3, softcap=1.5)

    got = one(module_of, make, [q, k, v])
    scores = 1.5 * torch.tanh(torch.from_numpy(q) @ torch.from_numpy(k).mT * 0.3 / 1.5)
    near = torch.arange(7)[None] > torch.arange(10)[:, None] - 3
    weights = scores.masked_fill(~near, -torch.inf)[:, :, :-1].softmax(-1)  # the last query sees key 7 on: none
    np.testing.assert_allclose(got[:, :, :-1], (weights @ torch.from_numpy(v)).numpy(), rtol=1e-5, atol=1e-6)
    assert not got[:, :, -1].any()


@pytest.mark.parametrize("axes", ["h", "bhs"])
def test_a_sink_takes_weight_and_adds_nothing(module_of: ModuleOf, rng: np.random.Generator, axes: str) -> None:
    q, k, v = f32(rng, 2, 4, 5, 8), f32(rng, 2, 2, 7, 8), f32(rng, 2, 2, 7, 6)
    sinks = f32(rng, *(size if axis in axes else 1 for axis, size in zip("bhs", (2, 4, 5), strict=True)), 1)
    keep = rng.random((2, 1, 5, 7)) > 0.3
    keep[:, :, 3] = False

    def make(*given: Any) -> qc.AttentionOp:
        return qc.AttentionOp(*given[:4], T((2, 4, 5, 6), "f32"), scale=0.3, sinks=given[4])

    got = one(module_of, make, [q, k, v, keep, sinks])
    keys, values = (t(x).repeat_interleave(2, 1) for x in (k, v))
    scores = (t(q) @ keys.mT * 0.3).masked_fill(~t(keep), -torch.inf)
    weights = torch.cat([scores, t(sinks).expand(2, 4, 5, 1)], -1).softmax(-1)[..., :-1]
    close(got, weights @ values, 1e-6)
    assert not got[:, :, 3].any()
    assert one(module_of, make, [q, k, v, keep, np.full_like(sinks, -np.inf)])[:, :, :3].any()


def test_attention_to_a_ring_is_that_to_all_keys(module_of: ModuleOf, rng: np.random.Generator) -> None:
    keys, values, q = (rng.standard_normal((2, 2, n, 8)).astype(np.float32) for n in (60, 60, 5))
    last = np.array([[0, 1, 2, 3, 4], [50, 51, 52, 53, 54]])
    size, window = 13, 9
    k, v = np.full((2, 2, size, 8), np.float32(1e3)), np.full((2, 2, size, 8), np.float32(1e3))
    for b, newest in enumerate(last[:, -1]):  # keys come one by one, each to the row of its position
        for position in range(newest + 1):
            k[b, :, position % size], v[b, :, position % size] = keys[b, :, position], values[b, :, position]
    type_ = T((2, 2, 5, 8), "f32")

    def ring(q: Any, k: Any, v: Any, last: Any) -> qc.AttentionOp:
        return qc.AttentionOp(q, k, v, None, type_, scale=0.3, window=window, softcap=1.5, last=last, ring=True)

    def whole(q: Any, k: Any, v: Any, last: Any) -> qc.AttentionOp:
        return qc.AttentionOp(q, k, v, None, type_, scale=0.3, window=window, softcap=1.5, last=last)

    wanted = one(module_of, whole, [q, keys, values, last])
    np.testing.assert_allclose(one(module_of, ring, [q, k, v, last]), wanted, rtol=1e-5, atol=1e-6)
    eager = ring_attention(*map(torch.from_numpy, (q, k, v, last)), window, 0.3, 1.5)
    np.testing.assert_allclose(eager.numpy(), wanted, rtol=1e-5, atol=1e-6)

    def with_sinks(q: Any, k: Any, v: Any, last: Any, sinks: Any) -> qc.AttentionOp:
        limits: Any = {"window": window, "softcap": 1.5, "last": last, "ring": True}
        return qc.AttentionOp(q, k, v, None, type_, scale=0.3, sinks=sinks, **limits)

    sinks = np.array([0.5, -1.0], np.float32).reshape(1, 2, 1, 1)
    eager = ring_attention(*map(torch.from_numpy, (q, k, v, last)), window, 0.3, 1.5, torch.from_numpy(sinks))
    got = one(module_of, with_sinks, [q, k, v, last, sinks])
    np.testing.assert_allclose(eager.numpy(), got, rtol=1e-5, atol=1e-6)
    assert np.abs(got).max() < np.abs(wanted).max()


@pytest.mark.parametrize("wrong", [torch.zeros(3), torch.zeros(1, 3, 1, 1), torch.zeros(1, 2, 1, 1, dtype=torch.int64)])
def test_sinks_of_a_ring_that_do_not_fit_are_refused(wrong: torch.Tensor) -> None:
    q, k, last = torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 9, 8), torch.zeros(1, 3, dtype=torch.int64)
    with pytest.raises(ArgumentError, match=r"sinks are torch.*of shape"):
        ring_attention(q, k, k, last, 4, 0.3, None, wrong)


def test_attention_row_without_keys_gives_zeros(module_of: ModuleOf, rng: np.random.Generator) -> None:
    q, k, v = f32(rng, 1, 1, 3, 4), f32(rng, 1, 1, 3, 4), f32(rng, 1, 1, 3, 4)
    keep = np.array([[True] * 3, [False] * 3, [True] * 3])[None, None]
    got = one(module_of, lambda *a: qc.AttentionOp(*a, T((1, 1, 3, 4), "f32"), scale=1.0), [q, k, v, keep])
    assert np.all(got[0, 0, 1] == 0)
    assert np.all(np.isfinite(got))


def test_norms(module_of: ModuleOf, rng: np.random.Generator) -> None:
    x, w, b = f32(rng, 4, 33), f32(rng, 33), f32(rng, 33)
    got = one(module_of, lambda x, w, b: qc.LayerNormOp(x, w, b, T((4, 33), "f32"), eps=1e-5), [x, w, b])
    close(got, F.layer_norm(t(x), (33,), t(w), t(b), 1e-5))
    got = one(module_of, lambda x, w: qc.RmsNormOp(x, w, T((4, 33), "f32"), eps=1e-6), [x, w])
    close(got, F.rms_norm(t(x), (33,), t(w), 1e-6))
    got = one(module_of, lambda x: qc.LayerNormOp(x, None, None, T((4, 33), "f32"), eps=1e-5), [x])
    close(got, F.layer_norm(t(x), (33,), eps=1e-5))


def test_softmax_on_an_inner_axis(module_of: ModuleOf, rng: np.random.Generator) -> None:
    x = f32(rng, 4, 9, 3)
    close(one(module_of, lambda x: qc.SoftmaxOp(x, T((4, 9, 3), "f32"), axis=1), [x]), t(x).softmax(1))


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope(module_of: ModuleOf, rng: np.random.Generator, interleaved: bool) -> None:
    x, angle = f32(rng, 2, 3, 5, 8), f32(rng, 1, 1, 5, 4)
    angle = np.repeat(angle, 2, -1) if interleaved else np.concatenate([angle, angle], -1)
    cos, sin = np.cos(angle), np.sin(angle)
    got = one(module_of, lambda *a: qc.RopeOp(*a, T(x.shape, "f32"), interleaved=interleaved), [x, cos, sin])
    wanted = np.empty_like(x)
    pairs = [(2 * i, 2 * i + 1) for i in range(4)] if interleaved else [(i, i + 4) for i in range(4)]
    for a, b in pairs:  # a rotation of each pair
        wanted[..., a] = x[..., a] * cos[..., a] - x[..., b] * sin[..., a]
        wanted[..., b] = x[..., b] * cos[..., b] + x[..., a] * sin[..., b]
    close(got, wanted)


def test_embedding_and_its_range_check(module_of: ModuleOf, rng: np.random.Generator) -> None:
    table, ids = f32(rng, 10, 4), np.array([[1, 9], [0, 3]])
    close(one(module_of, lambda i, w: qc.EmbeddingOp(i, w, T((2, 2, 4), "f32")), [ids, table]), table[ids])
    with pytest.raises(InterpreterError, match="index 10 is out of range for 10 entries"):
        one(module_of, lambda i, w: qc.EmbeddingOp(i, w, T((1, 4), "f32")), [np.array([10]), table])


def test_gather_take_and_along(module_of: ModuleOf, rng: np.random.Generator) -> None:
    x, index = f32(rng, 3, 5, 2), np.array([[0, -1], [2, 4]])
    close(one(module_of, lambda x, i: qc.GatherOp(x, i, T((3, 2, 2, 2), "f32"), axis=1), [x, index]), x[:, index])
    along = rng.integers(0, 5, (2, 4, 2))
    got = one(module_of, lambda x, i: qc.GatherOp(x, i, T((2, 4, 2), "f32"), axis=1, mode="along"), [x, along])
    close(got, t(x).gather(1, t(along)))


@pytest.mark.parametrize("reduce", ["none", "add"])
def test_scatter(module_of: ModuleOf, rng: np.random.Generator, reduce: str) -> None:
    x, src = f32(rng, 4, 6), f32(rng, 3, 6)
    index = np.stack([rng.permutation(4)[:3] for _ in range(6)], 1)
    if reduce == "add":
        index[1] = index[0]  # two summands for one place
    got = one(module_of, lambda *a: qc.ScatterOp(*a, T((4, 6), "f32"), axis=0, reduce=reduce), [x, index, src])
    call = torch.Tensor.scatter if reduce == "none" else torch.Tensor.scatter_add
    close(got, call(t(x), 0, t(index), t(src)))


def test_index_update(module_of: ModuleOf, rng: np.random.Generator) -> None:
    x, index, src = f32(rng, 2, 5, 3), np.array([4, 1]), f32(rng, 2, 2, 3)
    got = one(module_of, lambda *a: qc.IndexUpdateOp(*a, T((2, 5, 3), "f32"), axis=1), [x, index, src])
    close(got, t(x).index_copy(1, t(index), t(src)))
    for bad in (-1, 5):  # as torch, and as the kernels
        with pytest.raises(InterpreterError, match=f"index {bad} is out of range"):
            one(module_of, lambda *a: qc.IndexUpdateOp(*a, T((2, 5, 3), "f32"), axis=1), [x, np.array([4, bad]), src])


def test_scans_and_orders(module_of: ModuleOf, rng: np.random.Generator) -> None:
    x = rng.integers(0, 4, (3, 8)).astype(np.float32)  # many ties
    close(one(module_of, lambda x: qc.CumsumOp(x, T((3, 8), "f32"), axis=1), [x]), t(x).cumsum(1))
    both = [T((3, 8), "f32"), T((3, 8), "i64")]
    for descending in (False, True):
        values, order = one(module_of, lambda x, d=descending: qc.SortOp(x, both, axis=1, descending=d), [x], 2)
        wanted = t(x).sort(dim=1, stable=True, descending=descending)
        close(values, wanted.values)
        close(order, wanted.indices)
    top = [T((3, 2), "f32"), T((3, 2), "i64")]
    values, order = one(module_of, lambda x: qc.TopkOp(x, top, k=2, axis=1), [x], 2)
    wanted = t(x).sort(dim=1, stable=True, descending=True)
    close(values, wanted.values[:, :2])
    close(order, wanted.indices[:, :2])
    close(one(module_of, lambda x: qc.ArgmaxOp(x, T((3,), "i64"), axis=1), [x]), x.argmax(1))


def test_cumsum_of_booleans_counts_in_i64(module_of: ModuleOf) -> None:
    x = np.array([True, False, True, True])
    close(one(module_of, lambda x: qc.CumsumOp(x, T((4,), "i64"), axis=0), [x]), np.array([1, 1, 2, 3]))


# --- constants, formats, init, states --------------------------------------------------------------------------------


def stored(key: str, w: np.ndarray, name: str, layout: str = "canonical", **params: Any) -> StoredTensor:
    data = formats.get(name, **params).encode(w).data
    return StoredTensor(key, "f32", w.shape, data, FormatRef(name=name, params=params), layout)


@pytest.mark.parametrize(("name", "params"), [("nf4", {"block": 64}), ("int8", {}), ("int4", {"group": 32}),
                                              ("int4", {"group": 32, "symmetric": False})])  # fmt: skip
def test_packed_weight_is_decoded_alike_by_linear_embedding_and_dequantize(
    module_of: ModuleOf, rng: np.random.Generator, name: str, params: dict[str, Any]
) -> None:
    w, weights = f32(rng, 6, 64), WeightStore()
    weights.add(stored("w", w, name, **params))
    packed = types.QTensorType.of((6, 64), "f32", weights["w"].format)

    def body(b: Builder, args: Any) -> Any:
        value = b.insert(qc.ConstOp("w", packed)).result
        return [
            b.insert(qc.LinearOp(args[0], value, None, T((3, 6), "f32"))).result,
            b.insert(qc.EmbeddingOp(args[1], value, T((2, 64), "f32"))).result,
            b.insert(qc.DequantizeOp(value, T((6, 64), "f32"))).result,
        ]

    module = module_of([((3, 64), "f32"), ((2,), "i64")], body)
    module.verify()
    x, ids = f32(rng, 3, 64), np.array([5, 0])
    linear, rows, plain = run(module, weights, [x, ids])
    fmt = formats.get(name, **params)
    decoded = fmt.decode(formats.from_bytes(fmt, 6, 64, weights["w"].data))
    assert np.array_equal(plain, decoded)
    assert np.array_equal(rows, decoded[ids])
    close(linear, x @ decoded.T)


def test_quantize_then_dequantize_is_the_formats_round_trip(module_of: ModuleOf, rng: np.random.Generator) -> None:
    x, ref = f32(rng, 4, 32), FormatRef(name="int8", params={})
    packed = types.QTensorType.of((4, 32), "f32", ref)

    def body(b: Builder, args: Any) -> Any:
        return [b.insert(qc.DequantizeOp(b.insert(qc.QuantizeOp(args[0], packed)), T((4, 32), "f32"))).result]

    fmt = formats.get("int8")
    assert np.array_equal(run(module_of([((4, 32), "f32")], body), WeightStore(), [x])[0], fmt.decode(fmt.encode(x)))


def test_other_layouts_need_the_unpack_hook(rng: np.random.Generator) -> None:
    w = f32(rng, 4, 64)
    canonical = stored("w", w, "int8")
    op = qc.DequantizeOp(
        qc.ConstOp("w", types.QTensorType.of((4, 64), "f32", canonical.format, "reversed")).result, T((4, 64), "f32")
    )
    turned = canonical.data[::-1].copy()
    with pytest.raises(InterpreterError, match="layout 'reversed'"):
        evaluate_op(op, [turned], {})
    got = evaluate_op(op, [turned], {}, unpack=lambda _f, _l, _d, _s, data: data[::-1])[0]
    assert np.array_equal(got, formats.get("int8").decode(formats.get("int8").encode(w)))


def test_init_runs_once_and_feeds_constants(module_of: ModuleOf, function_of: Any) -> None:
    module = module_of(
        [((2,), "f32")],
        lambda b, a: [
            build.pointwise(
                b, [a[0], b.insert(qc.ConstOp("init.0", T((2,), "f32"))).result], (2,), "f32",
                lambda i, s: i.insert(arith.AddfOp(s[0], s[1])),
            )
        ],
    )  # fmt: skip
    init = function_of([], lambda b, _a: [build.fill(b, 3.0, (2,), "f32")], name="init")
    set_result_keys(init, ["init.0"])
    module.body.block.add_op(init)
    interpreter = Interpreter(module, WeightStore())
    x = np.array([1, 2], np.float32)
    assert interpreter.run([x])[0].tolist() == [4, 5]
    init.detach()
    assert interpreter.run([x])[0].tolist() == [4, 5]


def test_states_are_written_at_exit(module_of: ModuleOf) -> None:
    def body(b: Builder, args: Any) -> Any:
        old = b.insert(qc.StateOp("kv", T((3,), "f32"))).result
        new = build.pointwise(b, [old, args[0]], (3,), "f32", lambda i, s: i.insert(arith.AddfOp(s[0], s[1])))
        b.insert(qc.StateUpdateOp("kv", new))
        return [old]

    module = module_of([((3,), "f32")], body)
    states = {"kv": np.zeros(3, np.float32)}
    x = np.ones(3, np.float32)
    assert run(module, WeightStore(), [x], states=states)[0].tolist() == [0, 0, 0]
    assert run(module, WeightStore(), [x], states=states)[0].tolist() == [1, 1, 1]
    assert states["kv"].tolist() == [2, 2, 2]
    with pytest.raises(InterpreterError, match="state 'kv' has no value"):
        run(module, WeightStore(), [x])


def test_inputs_that_do_not_fit_are_named(module_of: ModuleOf) -> None:
    module = module_of([(("s", 4), "f32"), (("2*s",), "f32")], lambda _b, a: [a[0]])
    set_ranges(module.body.block.first_op, {"s": (1, 8)})

    def call(a: np.ndarray, b: np.ndarray) -> None:
        run(module, WeightStore(), [a, b])

    good, half = np.zeros((3, 4), np.float32), np.zeros(6, np.float32)
    call(good, half)
    for bad, message in [
        ((good.astype(np.float64), half), "'arg0' is float64"),
        ((good[0], half), "of rank 1"),
        ((good, half[1:]), r"'arg1' has shape \(5,\), not \(6,\)"),
        ((np.zeros((9, 4), np.float32), np.zeros(18, np.float32)), r"dimension 's' is 9, outside of \[1, 8\]"),
    ]:
        with pytest.raises(InterpreterError, match=message):
            call(*bad)


def test_torch_call_means_what_torch_computes(module_of: ModuleOf) -> None:
    call = TorchOp(target="aten.mul.Tensor", args=({"v": 0}, 3.0))
    region = TorchRegion(inputs=1, ops=(call,), outputs=(1,))
    x = np.array([[1, -2], [0.5, 4]], np.float32)
    y = one(module_of, lambda a: qc.TorchCallOp(region, [a], [T((2, 2), "f32")]), [x])
    np.testing.assert_array_equal(y, x * 3)
    unknown = TorchRegion(inputs=1, ops=(TorchOp(target="aten.foo.default", args=({"v": 0},)),), outputs=(1,))
    with pytest.raises(PlanError, match=r"aten\.foo"):
        one(module_of, lambda a: qc.TorchCallOp(unknown, [a], [T((2, 2), "f32")]), [x])


def test_wrong_result_type_is_reported_with_the_place(module_of: ModuleOf) -> None:
    def make(x: Any) -> qc.CumsumOp:
        op = qc.CumsumOp(x, T((3,), "f32"), axis=0)
        op.attributes["qc.path"] = types.StringAttr("head.norm")
        op.results[0]._type = T((4,), "f32")
        return op

    with pytest.raises(InterpreterError, match=r"qc.cumsum at 'head.norm': result 0 has shape \(3,\)"):
        module = module_of([((3,), "f32")], lambda b, a: [b.insert(make(a[0])).result])
        run(module, WeightStore(), [np.zeros(3, np.float32)])
