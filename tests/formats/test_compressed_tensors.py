"""compressed-tensors' packings against its own compressors: their arrays are read, and ours decompressed by them."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from hypothesis import given
from hypothesis import strategies as st

from qcompiler import formats
from qcompiler.errors import FormatError, FormatShapeError, FormatValueError
from qcompiler.formats.foreign import compressed_tensors as ct

Arrays = dict[str, npt.NDArray[Any]]
ML: dict[torch.dtype, Any] = {
    torch.bfloat16: ml_dtypes.bfloat16,
    torch.float8_e4m3fn: ml_dtypes.float8_e4m3fn,
    torch.float8_e5m2: ml_dtypes.float8_e5m2,
}
BYTES = {torch.bfloat16: torch.uint16, torch.float8_e4m3fn: torch.uint8, torch.float8_e5m2: torch.uint8}


def to_numpy(tensor: torch.Tensor) -> npt.NDArray[Any]:
    if tensor.dtype in ML:
        return tensor.contiguous().view(BYTES[tensor.dtype]).numpy().view(ML[tensor.dtype])
    return tensor.contiguous().numpy()


def to_torch(array: npt.NDArray[Any]) -> torch.Tensor:
    for dtype, numpy_dtype in ML.items():
        if array.dtype == numpy_dtype:
            return torch.from_numpy(np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")).view(dtype)
    return torch.from_numpy(np.ascontiguousarray(array))


def scheme(activations: bool = False, **args: Any) -> QuantizationScheme:
    weights = QuantizationArgs(**args)
    extra = {"input_activations": QuantizationArgs(num_bits=8, type=args["type"])} if activations else {}
    return QuantizationScheme(targets=["Linear"], weights=weights, **extra)


def compress(kind: str, weight: torch.Tensor, how: QuantizationScheme) -> Arrays:
    """The arrays that compressed-tensors makes of a weight, with its own scales and zero points."""
    args = how.weights
    assert args is not None
    blocks = {
        "tensor": lambda w: w.reshape(1, -1),
        "channel": lambda w: w,
        "group": lambda w: w.reshape(len(w), -1, args.group_size),
        "tensor_group": lambda w: w.reshape(len(w), -1, args.group_size),
        "block": lambda w: torch.nn.functional.pad(w, (0, -w.shape[1] % 128, 0, -w.shape[0] % 128))
        .unflatten(0, (-1, 128)).unflatten(2, (-1, 128)).transpose(1, 2).flatten(2),
    }[str(args.strategy)](weight)  # fmt: skip
    state = {"weight": weight}
    if args.strategy == "tensor_group":
        state["weight_global_scale"] = generate_gparam(weight.min(), weight.max())
    of_all = state.get("weight_global_scale")
    scale, zero = calculate_qparams(blocks.amin(-1), blocks.amax(-1), args, global_scale=of_all)
    if args.strategy == "channel":
        scale, zero = scale[:, None], zero[:, None]
    state |= {"weight_scale": scale, "weight_zero_point": zero}
    done = BaseCompressor.get_value_from_registry(kind).compress(state, how)
    return {name: to_numpy(tensor) for name, tensor in done.items()}


def decompress(kind: str, arrays: Arrays, how: QuantizationScheme) -> npt.NDArray[np.float32]:
    state = {name: to_torch(array) for name, array in arrays.items()}
    return BaseCompressor.get_value_from_registry(kind).decompress(state, how)["weight"].float().numpy()


def assert_same(written: Arrays, arrays: Arrays) -> None:
    assert set(written) == set(arrays)
    for name, array in arrays.items():
        assert (written[name].dtype, written[name].shape) == (array.dtype, array.shape), name
        assert written[name].tobytes() == array.tobytes(), name


def normal(rows: int, cols: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(rows).standard_normal((rows, cols)).astype(np.float32)).to(dtype)


# --- pack-quantized ---


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(("strategy", "group"), [("group", 32), ("group", 128), ("channel", None)])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_it_packs_decodes_to_what_it_unpacks(
    bits: int, strategy: str, group: int | None, symmetric: bool, dtype: torch.dtype
) -> None:
    how = scheme(num_bits=bits, type="int", strategy=strategy, group_size=group, symmetric=symmetric)
    weight = normal(48, 256, dtype)
    weight[3] = weight[3].abs()  # a zero point at the end of the range
    arrays = compress("pack-quantized", weight, how)
    packed, order = ct.read(arrays, kind="pack-quantized", bits=bits, group=group or "row", symmetric=symmetric)
    assert order is None
    codes = unpack_from_int32(torch.from_numpy(arrays["weight_packed"]), bits, torch.Size((48, 256))).float().numpy()
    scales = arrays["weight_scale"].astype(np.float32)
    zeros = np.zeros_like(scales)
    if not symmetric:
        stored = torch.from_numpy(arrays["weight_zero_point"])
        zeros = unpack_from_int32(stored, bits, torch.Size(scales.shape), packed_dim=0).float().numpy()
    repeat = 256 // scales.shape[1]
    expected = (codes - zeros.repeat(repeat, axis=1)) * scales.repeat(repeat, axis=1)
    np.testing.assert_array_equal(packed.format.decode(packed), expected)
    if dtype == torch.float32:
        np.testing.assert_array_equal(packed.format.decode(packed), decompress("pack-quantized", arrays, how))
    assert_same(ct.write(packed, kind="pack-quantized"), arrays)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_columns_ordered_by_group_are_sorted_and_come_back(bits: int, symmetric: bool) -> None:
    rng = np.random.default_rng(bits)
    half = 1 << (bits - 1)
    g_idx = rng.permutation(np.arange(128) // 32).astype(np.int32)
    codes = torch.from_numpy(rng.integers(-half, half, (40, 128)).astype(np.int8))
    scales = rng.standard_normal((40, 4)).astype(np.float16)
    zeros = torch.from_numpy(rng.integers(-half, half, (40, 4)).astype(np.int8))
    arrays: Arrays = {
        "weight_packed": pack_to_int32(codes, bits).numpy(),
        "weight_scale": scales,
        "weight_shape": np.array([40, 128]),
        "weight_g_idx": g_idx,
    }
    if not symmetric:
        arrays["weight_zero_point"] = pack_to_int32(zeros, bits, packed_dim=0).numpy()
    packed, order = ct.read(arrays, kind="pack-quantized", bits=bits, group=32, symmetric=symmetric)
    shift = np.zeros((40, 4), np.float32) if symmetric else zeros.numpy().astype(np.float32)
    expected = (codes.numpy().astype(np.float32) - shift[:, g_idx]) * scales.astype(np.float32)[:, g_idx]
    assert order is not None
    np.testing.assert_array_equal(packed.format.decode(packed), expected[:, order])
    assert_same(ct.write(packed, kind="pack-quantized", permutation=order), arrays)
    arrays["weight_g_idx"] = np.full(128, -1, np.int32)  # as the package creates it: in order
    assert ct.read(arrays, kind="pack-quantized", bits=bits, group=32)[1] is None


def test_zero_points_of_older_files_stand_unpacked() -> None:
    how = scheme(num_bits=4, type="int", strategy="group", group_size=32, symmetric=False)
    arrays = compress("pack-quantized", normal(16, 64), how)
    packed, _ = ct.read(arrays, kind="pack-quantized", bits=4, group=32)
    unpacked = unpack_from_int32(torch.from_numpy(arrays["weight_zero_point"]), 4, torch.Size((16, 2)), packed_dim=0)
    older = {**arrays, "weight_zero_point": unpacked.numpy()}
    assert ct.read(older, kind="pack-quantized", bits=4, group=32)[0].to_bytes() == packed.to_bytes()
    older["weight_zero_point"] = np.full((16, 2), 8, np.int8)
    with pytest.raises(FormatValueError, match="not within -8 to 7"):
        ct.read(older, kind="pack-quantized", bits=4, group=32)


def test_a_scale_of_the_tensor_serves_every_row() -> None:
    how = scheme(num_bits=4, type="int", strategy="tensor", symmetric=True)
    arrays = compress("pack-quantized", normal(16, 64), how)
    assert arrays["weight_scale"].size == 1
    packed, _ = ct.read(arrays, kind="pack-quantized", bits=4, group="tensor")
    assert packed.format.params["group"] == "row"
    np.testing.assert_array_equal(packed.format.decode(packed), decompress("pack-quantized", arrays, how))


@given(
    bits=st.sampled_from([2, 3, 4, 8]),
    rows=st.integers(1, 70),
    groups=st.integers(1, 4),
    seed=st.integers(0, 2**32),
    symmetric=st.booleans(),
)
def test_any_packed_layer_round_trips(bits: int, rows: int, groups: int, seed: int, symmetric: bool) -> None:
    """Zero points are packed along the rows, whose number need not fill words."""
    rng, half = np.random.default_rng(seed), 1 << (bits - 1)
    codes = torch.from_numpy(rng.integers(-half, half, (rows, 32 * groups)).astype(np.int8))
    zeros = torch.from_numpy(rng.integers(-half, half, (rows, groups)).astype(np.int8))
    arrays: Arrays = {
        "weight_packed": pack_to_int32(codes, bits).numpy(),
        "weight_scale": rng.standard_normal((rows, groups)).astype(np.float32),
        "weight_shape": np.array(codes.shape),
    }
    if not symmetric:
        arrays["weight_zero_point"] = pack_to_int32(zeros, bits, packed_dim=0).numpy()
    packed, _ = ct.read(arrays, kind="pack-quantized", bits=bits, group=32, symmetric=symmetric)
    assert_same(ct.write(packed, kind="pack-quantized"), arrays)
    shift = 0 if symmetric else zeros.numpy().astype(np.float32).repeat(32, axis=1)
    expected = (codes.numpy().astype(np.float32) - shift) * arrays["weight_scale"].repeat(32, axis=1)
    np.testing.assert_array_equal(packed.format.decode(packed), expected)


# --- int-quantized, float-quantized ---


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("strategy", "group"), [("channel", None), ("group", 64), ("tensor", None)])
@pytest.mark.parametrize("kind", ["int-quantized", "naive-quantized"])
def test_int8_weights_are_its(symmetric: bool, strategy: str, group: int | None, kind: Any) -> None:
    how = scheme(num_bits=8, type="int", strategy=strategy, group_size=group, symmetric=symmetric)
    arrays = compress(kind, normal(19, 192), how)
    shared = group or ("row" if strategy == "channel" else "tensor")
    packed, _ = ct.read(arrays, kind=kind, group=shared, symmetric=symmetric)
    np.testing.assert_array_equal(packed.format.decode(packed), decompress(kind, arrays, how))
    if strategy != "tensor":
        zero = arrays.get("weight_zero_point")
        if zero is not None:
            arrays["weight_zero_point"] = zero.astype(np.int8)
        assert_same(ct.write(packed), arrays)


@pytest.mark.parametrize("strategy", ["tensor", "channel", "block"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(256, 128), (200, 300), (1, 64), (64, 1)])
def test_fp8_weights_are_its(strategy: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    block = [128, 128] if strategy == "block" else None
    how = scheme(activations=True, num_bits=8, type="float", strategy=strategy, block_structure=block)
    arrays = compress("float-quantized", normal(*shape, dtype), how)
    per: Any = {"tensor": "tensor", "channel": "row", "block": "block"}[strategy]
    packed, _ = ct.read(arrays, kind="float-quantized", group=per)
    assert packed.format == formats.get("fp8_e4m3", per=per)
    scales = arrays["weight_scale"].astype(np.float32)
    wide = scales.repeat(128, axis=0).repeat(128, axis=1)[: shape[0], : shape[1]] if block else scales
    np.testing.assert_array_equal(packed.format.decode(packed), arrays["weight"].astype(np.float32) * wide)
    assert_same(ct.write(packed, scale_dtype=arrays["weight_scale"].dtype), arrays)
    guessed, _ = ct.read(arrays, kind="naive-quantized")
    np.testing.assert_array_equal(guessed.format.decode(guessed), packed.format.decode(packed))


def test_fp8_scales_that_a_type_cannot_hold_are_not_written() -> None:
    packed = formats.get("fp8_e5m2").encode(normal(4, 32).numpy())
    with pytest.raises(FormatValueError, match="4 of 4 scales are not exact in bfloat16"):
        ct.write(packed, scale_dtype=ml_dtypes.bfloat16)
    again, _ = ct.read(ct.write(packed), kind="float-quantized", group="row")
    assert (again.format, again.to_bytes()) == (packed.format, packed.to_bytes())


def test_powers_of_two_as_scales_of_squares_are_widened() -> None:
    """DeepSeek's later checkpoints store E8M0 scales."""
    codes = np.arange(126 * 2, dtype=np.uint8).reshape(2, 126) & 0x77
    scale = np.array([[130]], np.uint8).view(ml_dtypes.float8_e8m0fnu)
    packed, _ = ct.read(
        {"weight": codes.view(ml_dtypes.float8_e4m3fn), "weight_scale": scale}, kind="float-quantized", group="block"
    )
    expected = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * np.float32(8)
    np.testing.assert_array_equal(packed.format.decode(packed), expected)
    assert ct.write(packed, scale_dtype=ml_dtypes.float8_e8m0fnu)["weight_scale"].tobytes() == scale.tobytes()


# --- nvfp4, mx ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nvfp4_weights_are_its(dtype: torch.dtype) -> None:
    how = scheme(
        num_bits=4, type="float", strategy="tensor_group", group_size=16, scale_dtype=torch.float8_e4m3fn,
        zp_dtype=torch.float8_e4m3fn,
    )  # fmt: skip
    arrays = compress("nvfp4-pack-quantized", normal(33, 96, dtype), how)
    packed, _ = ct.read(arrays, kind="nvfp4-pack-quantized")
    assert packed.format == formats.get("nvfp4", divisor=True)
    state = {name: to_torch(array) for name, array in arrays.items()}
    scale = (state["weight_scale"].float() / state["weight_global_scale"]).numpy().repeat(16, axis=1)
    nibbles = np.stack([arrays["weight_packed"] & 15, arrays["weight_packed"] >> 4], axis=2).reshape(33, 96)
    expected = nibbles.astype(np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32) * scale
    np.testing.assert_array_equal(packed.format.decode(packed), expected)
    np.testing.assert_allclose(decompress("nvfp4-pack-quantized", arrays, how), expected, rtol=2**-7)
    assert_same(ct.write(packed), arrays)


@pytest.mark.parametrize("bits", [4, 8])
def test_mx_weights_are_its(bits: int) -> None:
    kind: Any = "mxfp4-pack-quantized" if bits == 4 else "mxfp8-quantized"
    how = scheme(
        num_bits=bits, type="float", strategy="group", group_size=32, scale_dtype=torch.uint8, zp_dtype=torch.uint8
    )
    arrays = compress(kind, normal(17, 128), how)
    packed, _ = ct.read(arrays, kind=kind)
    assert packed.format.name == f"mxfp{bits}"
    np.testing.assert_array_equal(packed.format.decode(packed), decompress(kind, arrays, how))
    assert_same(ct.write(packed), arrays)
    if bits == 4:  # gpt-oss keeps the blocks apart
        blocks = {"weight_packed": arrays["weight_packed"].reshape(17, 4, 16), "weight_scale": arrays["weight_scale"]}
        assert ct.read(blocks, kind=kind)[0].to_bytes() == packed.to_bytes()


# --- contradictions ---


def packed_arrays(**change: Any) -> Arrays:
    how = scheme(num_bits=4, type="int", strategy="group", group_size=32, symmetric=False)
    arrays = {**compress("pack-quantized", normal(16, 64), how), **change}
    return {name: array for name, array in arrays.items() if array is not None}


@pytest.mark.parametrize(
    ("change", "how", "error", "message"),
    [
        ({"weight_shape": np.array([16, 96])}, {}, FormatShapeError, "weight_packed has the shape"),
        ({"weight_shape": np.array([1, 16, 64])}, {}, FormatShapeError, "weight_shape has the shape"),
        ({"weight_scale": None}, {}, FormatError, "needs weight_scale"),
        ({"weight_scale": np.ones((16, 3), np.float32)}, {}, FormatShapeError, "weight_scale has the shape"),
        ({"weight_scale": np.full((16, 2), np.inf, np.float32)}, {}, FormatValueError, "scales is inf"),
        ({"weight_zero_point": None}, {"symmetric": False}, FormatError, "needs weight_zero_point"),
        ({"weight_zero_point": np.zeros((3, 2), np.int32)}, {}, FormatShapeError, "weight_zero_point has the shape"),
        ({"weight_g_idx": np.zeros(64, np.int32)}, {}, FormatValueError, "does not give each group 32 columns"),
        ({"weight_global_scale": np.ones(1)}, {}, FormatError, "does not know weight_global_scale"),
        ({}, {"symmetric": True}, FormatValueError, "the layer is said to be symmetric"),
        ({}, {"group": 64}, FormatShapeError, "weight_scale has the shape"),
        ({}, {"group": 16}, FormatError, "groups of 16"),
        ({}, {"group": "tensor"}, FormatShapeError, "said to have one scale"),
        ({}, {"group": "block"}, FormatError, "square blocks"),
        ({}, {"bits": 3}, FormatShapeError, "weight_packed has the shape"),
        ({}, {"bits": 6}, FormatError, "6 bits"),
        ({}, {"kind": "sparse"}, FormatError, "is none of"),
    ],
)
def test_contradictions_of_packed_layers_are_named(
    change: dict[str, Any], how: dict[str, Any], error: type[FormatError], message: str
) -> None:
    with pytest.raises(error, match=f"^model.k: compressed-tensors [a-z-]*: .*{message}"):
        ct.read(packed_arrays(**change), **{"kind": "pack-quantized", "bits": 4, "layer": "model.k", **how})


FP8 = np.zeros((4, 32), ml_dtypes.float8_e4m3fn)


@pytest.mark.parametrize(
    ("arrays", "how", "error", "message"),
    [
        ({"weight": np.zeros((4, 32), np.int8)}, {"kind": "float-quantized"}, FormatError, "weight is int8"),
        ({"weight": FP8}, {"kind": "int-quantized"}, FormatError, "weight is float8_e4m3fn"),
        ({"weight": FP8, "weight_scale": np.ones((3, 1), np.float32)}, {}, FormatShapeError, "has the shape"),
        ({"weight": FP8, "weight_scale": np.ones((4, 1), np.float64)}, {}, FormatError, "weight_scale is float64"),
        ({"weight": FP8, "weight_scale": np.ones((4, 1), np.float32)}, {"group": "tensor"}, FormatShapeError, "tensor"),
        ({"weight": FP8, "weight_scale": np.ones((4, 1), np.float32)}, {"group": 32}, FormatError, "groups of 32"),
        ({"weight": FP8, "weight_scale": np.full((4, 1), np.nan, np.float32)}, {}, FormatValueError, "is nan"),
        (
            {"weight": FP8, "weight_scale": np.ones(1, np.float32), "weight_zero_point": np.ones(1, np.int8)},
            {}, FormatValueError, "floats have no zero points",
        ),
        ({"weight": np.full((4, 32), 9, np.int8)}, {"bits": 4, "kind": "int-quantized"}, FormatValueError, "4 bits"),
        (
            {"weight": FP8, "weight_scale": np.zeros((4, 2), np.uint8)},
            {"kind": "mxfp8-quantized"}, FormatShapeError, "weight_scale has the shape",
        ),
        (
            {"weight": FP8, "weight_scale": np.full((4, 1), 255, np.uint8)},
            {"kind": "mxfp8-quantized"}, FormatValueError, "is nan",
        ),
        ({"weight_packed": np.zeros((4, 20), np.uint8)}, {"kind": "mxfp4-pack-quantized"}, FormatShapeError, "K = 40"),
        (
            {"weight_packed": np.zeros((4, 16), np.uint8), "weight_scale": np.zeros((4, 2), ml_dtypes.float8_e4m3fn)},
            {"kind": "nvfp4-pack-quantized"}, FormatError, "needs weight_global_scale",
        ),
        (
            {
                "weight_packed": np.zeros((4, 16), np.uint8),
                "weight_scale": np.zeros((4, 2), ml_dtypes.float8_e4m3fn),
                "weight_global_scale": np.zeros(1, np.float32),
            },
            {"kind": "nvfp4-pack-quantized"}, FormatValueError, "weight_global_scale is 0",
        ),
    ],
)  # fmt: skip
def test_contradictions_of_plain_layers_are_named(
    arrays: Arrays, how: dict[str, Any], error: type[FormatError], message: str
) -> None:
    with pytest.raises(error, match=message):
        ct.read(arrays, **{"kind": "naive-quantized", **how})


def test_formats_without_a_packing_are_not_written() -> None:
    for name, params in (("nf4", {}), ("nvfp4", {}), ("q4_0", {})):
        with pytest.raises(FormatError, match="has no packing for"):
            ct.write(formats.get(name, **params).encode(np.ones((4, 64), np.float32)))
    with pytest.raises(FormatError, match="stores integer formats"):
        ct.write(formats.get("nf4").encode(np.ones((4, 64), np.float32)), kind="pack-quantized")
    int8 = formats.get("int8").encode(np.ones((4, 64), np.float32))
    with pytest.raises(FormatError, match="has no order of columns"):
        ct.write(int8, permutation=np.arange(64))
    with pytest.raises(FormatError, match="stores int8"):
        ct.write(formats.get("int4").encode(np.ones((4, 64), np.float32)), kind="int-quantized")
