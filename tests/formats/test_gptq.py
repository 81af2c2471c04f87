"""GPTQ's packing against loops written from its published layout; decoded values against its published formula."""

from __future__ import annotations

from typing import Any, Literal

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qcompiler import formats
from qcompiler.errors import FormatError, FormatShapeError, FormatValueError
from qcompiler.formats.foreign import gptq

Ints = npt.NDArray[np.int64]
BITS = (2, 3, 4, 8)


def pack_column(codes: list[int], bits: int) -> list[int]:
    """AutoGPTQ's loop over a column: 3 bits are ten codes and two pieces per word, other widths whole codes."""
    words = []
    if bits != 3:
        per_word = 32 // bits
        for i in range(0, len(codes), per_word):
            words.append(sum(code << bits * j for j, code in enumerate(codes[i : i + per_word])))
        return words
    for i in range(0, len(codes), 32):
        c = codes[i : i + 32]
        first = sum(c[j] << 3 * j for j in range(10)) | (c[10] & 3) << 30
        second = c[10] >> 2 | sum(c[11 + j] << 3 * j + 1 for j in range(10)) | (c[21] & 1) << 31
        third = c[21] >> 1 | sum(c[22 + j] << 3 * j + 2 for j in range(10))
        words += [first, second, third]
    return words


def pack_matrix(codes: Ints, bits: int) -> npt.NDArray[np.int32]:
    """Codes (n, count) to words (n, …)."""
    return np.array([pack_column(row.tolist(), bits) for row in codes], np.uint32).view(np.int32)


class Layer:
    """A random layer in published terms: codes (K, N), zeros and scales (groups, N), the group of each row."""

    def __init__(self, bits: int, cols: int, rows: int, group: int, *, seed: int = 0, **how: Any) -> None:
        rng = np.random.default_rng(seed)
        self.bits, self.group = bits, group
        groups = 1 if group == -1 else cols // group
        self.codes: Ints = rng.integers(0, 1 << bits, (cols, rows))
        zeros = rng.integers(how.get("lowest", 1), 1 << bits, (groups, rows))
        self.zeros: Ints = np.full_like(zeros, 1 << (bits - 1)) if how.get("symmetric") else zeros
        self.scales = rng.standard_normal((groups, rows)).astype(how.get("dtype", np.float16))
        self.g_idx = np.arange(cols) // (cols if group == -1 else group)
        if how.get("act_order"):
            self.g_idx = rng.permutation(self.g_idx)

    def arrays(self, version: int) -> dict[str, npt.NDArray[Any]]:
        return {
            "qweight": np.ascontiguousarray(pack_matrix(self.codes.T, self.bits).T),
            "qzeros": pack_matrix(self.zeros - (version == 1), self.bits),
            "scales": self.scales,
            "g_idx": self.g_idx.astype(np.int32),
        }

    def weight(self) -> npt.NDArray[np.float32]:
        """(N, K) by the formula: (code - zero) * scale, in fp32."""
        shifted = self.codes - self.zeros[self.g_idx]
        return (shifted.astype(np.float32) * self.scales.astype(np.float32)[self.g_idx]).T

    def read(self, version: Literal[1, 2] = 1, **how: Any) -> Any:
        return gptq.read(self.arrays(version), bits=self.bits, group=self.group, version=version, **how)


def assert_same(first: dict[str, npt.NDArray[Any]], second: dict[str, npt.NDArray[Any]]) -> None:
    assert set(first) == set(second)
    for name, array in first.items():
        assert (array.dtype, array.shape) == (second[name].dtype, second[name].shape), name
        assert array.tobytes() == second[name].tobytes(), name


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group", [32, 64, -1])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_a_layer_decodes_to_the_formula_and_writes_back_the_same_bytes(
    bits: int, group: int, version: Literal[1, 2], symmetric: bool, act_order: bool, dtype: Any
) -> None:
    layer = Layer(bits, 128, 64, group, symmetric=symmetric, act_order=act_order, dtype=dtype)
    packed, order = layer.read(version)
    name = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}[np.dtype(dtype).name]
    ours = "row" if group == -1 else group
    assert packed.format == formats.get(f"int{bits}", group=ours, symmetric=symmetric, scale=name)
    assert (order is not None) == (act_order and group != -1)
    decoded = packed.format.decode(packed)
    weight = layer.weight()
    np.testing.assert_array_equal(decoded, weight if order is None else weight[:, order])
    assert_same(gptq.write(packed, version=version, permutation=order), layer.arrays(version))


@pytest.mark.parametrize("bits", BITS)
def test_the_permuted_input_gives_the_layers_output(bits: int) -> None:
    layer = Layer(bits, 128, 32, 32, act_order=True, dtype=np.float32)
    packed, order = layer.read()
    x = np.random.default_rng(1).standard_normal((3, 128))
    np.testing.assert_allclose(x[:, order] @ packed.format.decode(packed).T.astype(float), x @ layer.weight().T)
    assert (np.diff(order.reshape(4, 32), axis=1) > 0).all()  # stable: columns of a group keep their order


def test_three_bit_codes_cross_words_where_the_layout_says() -> None:
    layer = Layer(3, 32, 32, -1)
    layer.codes[:] = 0
    layer.codes[10, 0], layer.codes[21, 1] = 0b110, 0b101
    words = layer.arrays(1)["qweight"].view(np.uint32)
    assert words[:, 0].tolist() == [0b10 << 30, 1, 0]
    assert words[:, 1].tolist() == [0, 1 << 31, 0b10]
    packed, _ = layer.read()
    codes = packed.format.entries(packed, "codes")
    assert (codes[0, 10], codes[1, 21], int(codes.sum())) == (6, 5, 11)


@given(
    bits=st.sampled_from(BITS),
    cols=st.sampled_from([32, 64, 96, 160]),
    rows=st.sampled_from([32, 96]),
    version=st.sampled_from([1, 2]),
    act_order=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_any_layer_round_trips(
    bits: int, cols: int, rows: int, version: Literal[1, 2], act_order: bool, seed: int
) -> None:
    layer = Layer(bits, cols, rows, 32, seed=seed, act_order=act_order, lowest=int(version == 1))
    packed, order = layer.read(version, symmetric=False)
    weight = layer.weight()
    np.testing.assert_array_equal(packed.format.decode(packed), weight if order is None else weight[:, order])
    assert_same(gptq.write(packed, version=version, permutation=order), layer.arrays(version))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("group", [32, 128, "row"])
def test_what_our_encoder_made_can_be_written_and_read_again(bits: int, symmetric: bool, group: Any) -> None:
    fmt = formats.get(f"int{bits}", group=group, symmetric=symmetric, scale="fp16")
    packed = fmt.encode(np.random.default_rng(0).standard_normal((64, 256)).astype(np.float32))
    arrays = gptq.write(packed, version=2)
    size = -1 if group == "row" else group
    again, order = gptq.read(arrays, bits=bits, group=size, version=2, symmetric=symmetric)
    assert (again.format, order) == (fmt, None)
    assert again.to_bytes() == packed.to_bytes()


def test_a_group_of_all_columns_is_a_row() -> None:
    layer = Layer(4, 96, 32, 96)
    assert layer.read()[0].format.params["group"] == "row"
    layer = Layer(4, 128, 32, 128)
    assert layer.read()[0].format.params["group"] == 128


# --- contradictions ---


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"qweight": None}, FormatError, "needs qweight, and the layer has g_idx, qzeros, scales"),
        ({"perm": np.zeros(3)}, FormatError, "does not know perm"),
        ({"qweight": np.zeros((16, 32), np.int64)}, FormatError, "qweight is int64, not int32"),
        ({"qweight": np.zeros(16, np.int32)}, FormatShapeError, "2 dimensions were expected"),
        ({"scales": np.zeros((4, 31), np.float16)}, FormatShapeError, r"scales has the shape \(4, 31\).*\(4, 32\)"),
        ({"scales": np.zeros((3, 32), np.float16)}, FormatShapeError, "groups of 32 give"),
        ({"scales": np.full((4, 32), np.nan, np.float16)}, FormatValueError, r"scales is nan at \(0, 0\)"),
        ({"scales": np.zeros((4, 32), np.float64)}, FormatError, "scales is float64"),
        ({"qzeros": np.zeros((4, 3), np.int32)}, FormatShapeError, "qzeros has the shape"),
        ({"g_idx": np.zeros(127, np.int32)}, FormatShapeError, r"g_idx has the shape \(127,\)"),
        ({"g_idx": np.zeros(128, np.int32)}, FormatValueError, "does not give each group 32 columns"),
        ({"g_idx": np.arange(128, dtype=np.int32) // 32 + 1}, FormatValueError, "numbered from 0"),
    ],
)
def test_arrays_that_contradict_each_other_are_named(
    change: dict[str, Any], error: type[FormatError], message: str
) -> None:
    arrays = {**Layer(4, 128, 32, 32).arrays(1), **change}
    arrays = {name: array for name, array in arrays.items() if array is not None}
    with pytest.raises(error, match=f"model.layers.3.mlp: GPTQ: .*{message}"):
        gptq.read(arrays, bits=4, group=32, layer="model.layers.3.mlp")


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ({"bits": 5}, FormatError, "5 bits; GPTQ has 2, 3, 4, 8"),
        ({"bits": 3}, FormatShapeError, "no whole number of 3-bit codes"),
        ({"bits": 8}, FormatShapeError, "scales has the shape"),
        ({"group": 16}, FormatError, "groups of 16; int4 has groups of 32, 64, 128 or a row"),
        ({"group": 64}, FormatShapeError, "scales has the shape"),
        ({"symmetric": True}, FormatValueError, "said to be symmetric, and the zero point of row 0, group 1 is"),
    ],
)
def test_a_config_that_contradicts_the_arrays_is_refused(
    how: dict[str, Any], error: type[FormatError], message: str
) -> None:
    arrays = Layer(4, 128, 32, 32).arrays(1)
    with pytest.raises(error, match=message):
        gptq.read(arrays, **{"bits": 4, "group": 32, **how})


def test_columns_out_of_order_contradict_desc_act_false() -> None:
    layer = Layer(4, 128, 32, 32, act_order=True)
    with pytest.raises(FormatValueError, match="desc_act false"):
        layer.read(act_order=False)


@pytest.mark.parametrize("bits", BITS)
def test_the_largest_stored_zero_point_of_version_one_must_be_explained(bits: int) -> None:
    layer = Layer(bits, 64, 32, 32, dtype=np.float32)
    arrays = layer.arrays(1)
    stored = layer.zeros - 1
    stored[1, 5] = (1 << bits) - 1
    arrays["qzeros"] = pack_matrix(stored, bits)
    with pytest.raises(FormatValueError, match=r"group 1, column 5.*full_zero='keep' or full_zero='wrap'"):
        gptq.read(arrays, bits=bits, group=32)
    layer.zeros[1, 5] = 0
    packed, _ = gptq.read(arrays, bits=bits, group=32, full_zero="wrap")
    np.testing.assert_array_equal(packed.format.decode(packed), layer.weight())
    with pytest.raises(FormatValueError, match="version 2 stores 0"):
        gptq.write(packed, version=1)
    if bits == 8:
        with pytest.raises(FormatValueError, match="256 does not fit"):
            gptq.read(arrays, bits=bits, group=32, full_zero="keep")
        return
    layer.zeros[1, 5] = 1 << bits
    packed, _ = gptq.read(arrays, bits=bits, group=32, full_zero="keep")
    np.testing.assert_array_equal(packed.format.decode(packed), layer.weight())
    assert_same(gptq.write(packed, version=1), arrays)
    with pytest.raises(FormatValueError, match="version 2"):
        gptq.write(packed, version=2)


def test_what_gptq_cannot_hold_is_not_written() -> None:
    with pytest.raises(FormatError, match="stores integer formats"):
        gptq.write(formats.get("nf4").encode(np.ones((32, 64), np.float32)))
    with pytest.raises(FormatShapeError, match="31 x 64"):
        gptq.write(formats.get("int4").encode(np.ones((31, 64), np.float32)))
    packed = formats.get("int4").encode(np.ones((32, 64), np.float32))
    with pytest.raises(FormatError, match="each of 64 columns once"):
        gptq.write(packed, permutation=np.zeros(64, np.intp))
