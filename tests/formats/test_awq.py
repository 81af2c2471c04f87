"""AWQ's GEMM packing against a loop written from its published order, and against compressed-tensors' reader of it."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import torch
from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter
from hypothesis import given
from hypothesis import strategies as st

from qcompiler import formats
from qcompiler.errors import FormatError, FormatShapeError, FormatValueError
from qcompiler.formats.foreign import awq

Ints = npt.NDArray[np.int64]
Arrays = dict[str, npt.NDArray[Any]]


def pack(codes: Ints) -> npt.NDArray[np.int32]:
    """AutoAWQ's loop: word c of a row takes column 8c + order[i] at bit 4i."""
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    words = np.zeros((codes.shape[0], codes.shape[1] // 8), np.uint32)
    for c in range(words.shape[1]):
        for i in range(8):
            words[:, c] |= codes[:, 8 * c + order[i]].astype(np.uint32) << np.uint32(4 * i)
    return words.view(np.int32)


def layer(cols: int, rows: int, group: int, seed: int = 0, dtype: Any = np.float16) -> tuple[Arrays, Any]:
    """(arrays, weight (N, K) by the published formula)."""
    rng = np.random.default_rng(seed)
    groups = 1 if group == -1 else cols // group
    codes, zeros = rng.integers(0, 16, (cols, rows)), rng.integers(0, 16, (groups, rows))
    scales = rng.standard_normal((groups, rows)).astype(dtype)
    repeat = cols // groups
    shifted = (codes - np.repeat(zeros, repeat, axis=0)).astype(np.float32)
    weight = (shifted * np.repeat(scales.astype(np.float32), repeat, axis=0)).T
    return {"qweight": pack(codes), "qzeros": pack(zeros), "scales": scales}, weight


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
@pytest.mark.parametrize("group", [32, 64, 128, -1])
@pytest.mark.parametrize("shape", [(128, 8), (256, 40), (384, 64)])
def test_a_layer_decodes_to_the_formula_and_writes_back_the_same_bytes(
    dtype: Any, group: int, shape: tuple[int, int]
) -> None:
    arrays, weight = layer(*shape, group, dtype=dtype)
    packed = awq.read(arrays, group=group)
    assert packed.format.name == "int4"
    assert packed.format.params["symmetric"] is False
    np.testing.assert_array_equal(packed.format.decode(packed), weight)
    written = awq.write(packed)
    assert set(written) == set(arrays)
    for name, array in arrays.items():
        assert written[name].dtype == array.dtype
        assert written[name].tobytes() == array.tobytes(), name


@given(seed=st.integers(0, 2**32), cols=st.sampled_from([32, 96, 224]), words=st.integers(1, 9))
def test_any_layer_round_trips(seed: int, cols: int, words: int) -> None:
    arrays, weight = layer(cols, 8 * words, 32, seed)
    packed = awq.read(arrays, group=32, symmetric=False)
    np.testing.assert_array_equal(packed.format.decode(packed), weight)
    assert {name: array.tobytes() for name, array in awq.write(packed).items()} == {
        name: array.tobytes() for name, array in arrays.items()
    }


@pytest.mark.parametrize("shape", [(128, 8), (256, 72)])
def test_compressed_tensors_reads_the_same_codes(shape: tuple[int, int]) -> None:
    arrays, _ = layer(*shape, 64)
    weight, zeros = (torch.from_numpy(arrays[name]) for name in ("qweight", "qzeros"))
    codes, zero_points = AutoAWQConverter.reverse_awq_order(*AutoAWQConverter.unpack_awq(weight, zeros, 4), 4)
    packed = awq.read(arrays, group=64)
    np.testing.assert_array_equal(packed.format.entries(packed, "codes"), (codes & 15).numpy().T)
    np.testing.assert_array_equal(packed.section("zeros"), (zero_points & 15).numpy().T)


def test_layers_without_zero_points_are_symmetric() -> None:
    arrays, _ = layer(128, 16, 32)
    del arrays["qzeros"]
    packed = awq.read(arrays, group=32, symmetric=True)
    assert packed.format == formats.get("int4", group=32)
    with pytest.raises(FormatError, match="needs qzeros"):
        awq.read(arrays, group=32, symmetric=False)
    written = awq.write(packed)
    assert (written["qzeros"].view(np.uint32) == 0x88888888).all()
    assert awq.read(written, group=32).to_bytes() == packed.to_bytes()


def test_what_our_encoder_made_can_be_written_and_read_again() -> None:
    for group in (32, 128):
        for symmetric in (False, True):
            fmt = formats.get("int4", group=group, symmetric=symmetric)
            packed = fmt.encode(np.random.default_rng(0).standard_normal((24, 256)).astype(np.float32))
            again = awq.read(awq.write(packed), group=group)
            assert again.format == fmt
            assert again.to_bytes() == packed.to_bytes()


@pytest.mark.parametrize(
    ("change", "how", "error", "message"),
    [
        ({}, {"bits": 8}, FormatError, "8 bits"),
        ({}, {"group": 48}, FormatError, "groups of 48"),
        ({}, {"group": 64}, FormatShapeError, "scales has the shape"),
        ({}, {"symmetric": True}, FormatValueError, "the layer is said to be symmetric"),
        ({"g_idx": np.zeros(128, np.int32)}, {}, FormatError, "does not know g_idx"),
        ({"qzeros": np.zeros((4, 3), np.int32)}, {}, FormatShapeError, "qzeros has the shape"),
        ({"qweight": np.zeros((128, 2), np.uint8)}, {}, FormatError, "qweight is uint8"),
        ({"scales": np.full((4, 16), np.inf, np.float16)}, {}, FormatValueError, "scales is inf"),
    ],
)
def test_contradictions_are_named(
    change: dict[str, Any], how: dict[str, Any], error: type[FormatError], message: str
) -> None:
    arrays, _ = layer(128, 16, 32)
    with pytest.raises(error, match=f"model.q: AWQ: {message}"):
        awq.read({**arrays, **change}, **{"group": 32, "layer": "model.q", **how})


def test_what_awq_cannot_hold_is_not_written() -> None:
    with pytest.raises(FormatError, match="4-bit codes"):
        awq.write(formats.get("int8").encode(np.ones((8, 32), np.float32)))
    with pytest.raises(FormatShapeError, match="N = 9"):
        awq.write(formats.get("int4").encode(np.ones((9, 32), np.float32)))
    packed = formats.get("int4", symmetric=False).encode(np.ones((8, 32), np.float32))
    packed.section("zeros")[:] = 16
    with pytest.raises(FormatValueError, match="zero point of 16"):
        awq.write(packed)
