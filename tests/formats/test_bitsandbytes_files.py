"""bitsandbytes' state dict against the package: what it saves is read, what we write it loads; bit for bit."""

from __future__ import annotations

import json
from typing import Any

import bitsandbytes as bnb
import bitsandbytes.functional as F
import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qcompiler import formats
from qcompiler.errors import FormatError, FormatShapeError, FormatValueError
from qcompiler.formats.foreign import bitsandbytes as files

Arrays = dict[str, npt.NDArray[Any]]
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def saved(kind: str, shape: tuple[int, int], block: int, twice: bool, dtype: str = "float32") -> tuple[Arrays, Any]:
    """(arrays as bitsandbytes saves them, (codes, QuantState))."""
    weights = torch.from_numpy(np.random.default_rng(block).standard_normal(shape).astype(np.float32)).to(DTYPES[dtype])
    codes, state = F.quantize_4bit(weights, blocksize=block, compress_statistics=twice, quant_type=kind)
    tensors = {"weight": codes, **{f"weight.{k}": v for k, v in state.as_dict(packed=True).items()}}
    return {name: tensor.numpy() for name, tensor in tensors.items()}, (codes, state)


def assert_same(written: Arrays, arrays: Arrays) -> None:
    assert set(written) == set(arrays)
    for name, array in arrays.items():
        if name.endswith("nested_quant_map"):  # one of the package's own values is an ulp off on some machines
            np.testing.assert_allclose(written[name], array, rtol=2e-7)
            continue
        assert (written[name].dtype, written[name].shape) == (array.dtype, array.shape), name
        assert written[name].tobytes() == array.tobytes(), name


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("block", [32, 64, 256, 4096])
@pytest.mark.parametrize("shape", [(64, 64), (33, 97), (3, 5), (512, 384)])
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_what_it_saves_decodes_to_what_it_dequantises(
    kind: str, twice: bool, block: int, shape: tuple[int, int], dtype: str
) -> None:
    arrays, _ = saved(kind, shape, block, twice, dtype)
    packed, stored_dtype = files.read(arrays)
    assert stored_dtype == dtype
    assert packed.format == formats.get(kind, block=block, double_quant=twice)
    expected = by_formula(arrays, shape, block)
    np.testing.assert_array_equal(packed.format.decode(packed), expected)
    assert_same(files.write(packed, dtype=dtype), arrays)


def by_formula(arrays: Arrays, shape: tuple[int, int], block: int) -> npt.NDArray[np.float32]:
    """quant_map[code] * absmax, where nested absmax = nested_quant_map[code] * nested_absmax + offset; all in fp32."""
    state = json.loads(next(a for name, a in arrays.items() if "quant_state" in name).tobytes())
    raw = arrays["weight"].reshape(-1)
    codes = np.stack([raw >> 4, raw & 15], axis=1).reshape(-1)[: shape[0] * shape[1]]
    absmax = arrays["weight.absmax"]
    if "nested_offset" in state:
        scales = arrays["weight.nested_absmax"].repeat(256)[: len(absmax)]
        absmax = arrays["weight.nested_quant_map"][absmax] * scales + np.float32(state["nested_offset"])
    return (arrays["weight.quant_map"][codes] * absmax.repeat(block)[: codes.size]).reshape(shape)


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("twice", [False, True])
def test_it_loads_what_we_encode(kind: str, twice: bool) -> None:
    """On whole blocks per row only: with others bitsandbytes 0.50's CPU dequantiser reads the wrong absmax."""
    weights = np.random.default_rng(0).standard_normal((65, 128)).astype(np.float32)
    fmt = formats.get(kind, block=64, double_quant=twice)
    packed = fmt.encode(weights)
    tensors = {name: torch.from_numpy(a.copy()) for name, a in files.write(packed, dtype="float32").items()}
    codes = tensors.pop("weight")
    state = F.QuantState.from_dict(
        {name.removeprefix("weight."): t for name, t in tensors.items()}, torch.device("cpu")
    )
    # Its CPU kernels differ from the formula by an ulp of a product.
    np.testing.assert_allclose(F.dequantize_4bit(codes, state).numpy(), fmt.decode(packed), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_a_saved_layer_is_read(kind: str) -> None:
    layer = bnb.nn.Linear4bit(128, 40, bias=True, quant_type=kind, compute_dtype=torch.float32).to("cpu")
    state = {name: tensor.detach().numpy() for name, tensor in layer.state_dict().items()}
    assert {"weight", "bias", "weight.absmax"} < set(state)
    packed, _ = files.read(state, layer="model.o")
    assert (packed.rows, packed.cols, packed.format.name) == (40, 128, kind)
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((5, 128)).astype(np.float32))
    ours = x.numpy() @ packed.format.decode(packed).T + state["bias"]
    np.testing.assert_allclose(layer(x).detach().numpy(), ours, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("storage", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_codes_may_be_stored_under_any_type(storage: Any) -> None:
    arrays, _ = saved("nf4", (32, 64), 64, False)
    typed = {**arrays, "weight": arrays["weight"].reshape(-1).view(storage).reshape(-1, 1)}
    assert files.read(typed)[0].to_bytes() == files.read(arrays)[0].to_bytes()


@given(
    kind=st.sampled_from(["nf4", "fp4"]),
    rows=st.integers(1, 9),
    cols=st.integers(1, 150),
    block=st.sampled_from([32, 64, 128]),
    twice=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_any_encoded_matrix_round_trips(kind: str, rows: int, cols: int, block: int, twice: bool, seed: int) -> None:
    fmt = formats.get(kind, block=block, double_quant=twice)
    packed = fmt.encode(np.random.default_rng(seed).standard_normal((rows, cols)).astype(np.float32))
    again, dtype = files.read(files.write(packed, dtype="bfloat16"))
    assert (again.format, dtype, again.to_bytes()) == (fmt, "bfloat16", packed.to_bytes())
    np.testing.assert_array_equal(
        fmt.decode(packed), by_formula(files.write(packed, dtype="bfloat16"), (rows, cols), block)
    )


# --- int8 ---


def test_int8_layers_are_read_and_written_back() -> None:
    weights = np.random.default_rng(0).standard_normal((24, 40)).astype(np.float16)
    layer = bnb.nn.Linear8bitLt(40, 24, bias=False, has_fp16_weights=False, threshold=6.0)
    layer.weight = bnb.nn.Int8Params(torch.from_numpy(weights), requires_grad=False, has_fp16_weights=False)
    layer = layer.to("cpu")
    layer.weight = layer.weight._quantize("cpu") if layer.weight.dtype != torch.int8 else layer.weight
    arrays = {name: tensor.detach().numpy() for name, tensor in layer.state_dict().items()}
    assert set(arrays) == {"weight", "SCB", "weight_format"}
    packed, dtype = files.read(arrays)
    assert (packed.format, dtype) == (formats.get("llm_int8"), None)
    expected = F.int8_vectorwise_dequant(torch.from_numpy(arrays["weight"]), torch.from_numpy(arrays["SCB"])).numpy()
    np.testing.assert_array_equal(packed.format.decode(packed), expected)
    assert_same(files.write(packed), arrays)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"SCB": np.ones(3, np.float32)}, FormatShapeError, r"SCB has the shape \(3,\)"),
        ({"SCB": np.ones(4, np.float16)}, FormatError, "SCB is float16"),
        ({"SCB": np.full(4, np.nan, np.float32)}, FormatValueError, "SCB is nan"),
        ({"weight_format": np.array(2, np.uint8)}, FormatValueError, r"weight_format is \[2\], and only 0"),
        ({"weight": np.zeros((4, 8), np.uint8)}, FormatError, "weight is uint8"),
        ({"CxB": np.zeros(1)}, FormatError, "does not know CxB"),
    ],
)
def test_contradictions_of_int8_layers_are_named(change: Arrays, error: type[FormatError], message: str) -> None:
    arrays = {"weight": np.zeros((4, 8), np.int8), "SCB": np.ones(4, np.float32), **change}
    with pytest.raises(error, match=f"model.v: bitsandbytes int8: {message}"):
        files.read(arrays, layer="model.v")


# --- contradictions ---


def with_state(arrays: Arrays, **change: Any) -> Arrays:
    name = next(name for name in arrays if "quant_state" in name)
    state = {**json.loads(arrays[name].tobytes()), **change}
    state = {key: value for key, value in state.items() if value is not None}
    return {**arrays, name: np.frombuffer(json.dumps(state).encode(), np.uint8)}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"shape": [32, 66]}, FormatShapeError, "weight has 1024 bytes; 32 x 66 elements take 1056"),
        ({"shape": [2, 16, 64]}, FormatShapeError, "which is no matrix"),
        ({"shape": None}, FormatValueError, "holds \\['blocksize'"),
        ({"blocksize": 128}, FormatShapeError, "weight.absmax has the shape"),
        ({"blocksize": 48}, FormatValueError, "blocksize is 48, not 32 or 64"),
        ({"quant_type": "fp4"}, FormatValueError, "quant_type is 'fp4', not nf4"),
        ({"dtype": "float64"}, FormatValueError, "dtype is 'float64'"),
        ({"nested_blocksize": 64}, FormatValueError, "nested_blocksize is 64, not 256"),
        ({"nested_dtype": "float16"}, FormatValueError, "nested_dtype is 'float16'"),
        ({"nested_offset": "much"}, FormatValueError, "nested_offset is 'much'"),
        ({"nested_offset": float("nan")}, FormatValueError, "nested_offset is nan"),
        ({"nested_offset": None}, FormatValueError, "holds \\['blocksize'"),
    ],
)
def test_a_state_that_contradicts_the_arrays_is_named(
    change: dict[str, Any], error: type[FormatError], message: str
) -> None:
    arrays, _ = saved("nf4", (32, 64), 64, True)
    with pytest.raises(error, match=f"model.v: bitsandbytes: .*{message}"):
        files.read(with_state(arrays, **change), layer="model.v")


STATE = "weight.quant_state.bitsandbytes__nf4"


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"weight.quant_map": np.linspace(-1, 1, 16, dtype=np.float32)}, FormatValueError, "not the table of nf4"),
        ({"weight.quant_map": np.zeros(15, np.float32)}, FormatShapeError, "weight.quant_map has the shape"),
        ({"weight.quant_map": np.full(16, np.nan, np.float32)}, FormatValueError, "not the table of nf4"),
        ({"weight.nested_quant_map": np.zeros(256, np.float32)}, FormatValueError, "signed dynamic 8-bit type"),
        ({"weight.absmax": np.zeros(32, np.float32)}, FormatError, "weight.absmax is float32, not uint8"),
        ({"weight.nested_absmax": np.zeros(2, np.float32)}, FormatShapeError, "weight.nested_absmax has the shape"),
        ({"weight.nested_absmax": np.full(1, np.inf, np.float32)}, FormatValueError, "weight.nested_absmax is inf"),
        ({STATE: np.frombuffer(b"{", np.uint8)}, FormatValueError, "is no JSON"),
        ({STATE: np.frombuffer(b"[]", np.uint8)}, FormatValueError, "is no JSON object"),
        ({STATE: None}, FormatError, "needs either SCB or one of"),
        ({"weight": None}, FormatError, "needs weight"),
        ({"weight": np.zeros(100, np.uint8)}, FormatShapeError, "weight has 100 bytes"),
        ({"weight.zero": np.zeros(1)}, FormatError, "does not know weight.zero"),
    ],
)
def test_arrays_that_contradict_the_state_are_named(
    change: dict[str, Any], error: type[FormatError], message: str
) -> None:
    arrays = {**saved("nf4", (32, 64), 64, True)[0], **change}
    arrays = {name: array for name, array in arrays.items() if array is not None}
    with pytest.raises(error, match=f"model.v: bitsandbytes: .*{message}"):
        files.read(arrays, layer="model.v")


def test_what_bitsandbytes_cannot_hold_is_not_written() -> None:
    with pytest.raises(FormatError, match="stores nf4, fp4 and llm_int8"):
        files.write(formats.get("int8").encode(np.ones((4, 8), np.float32)))
    with pytest.raises(FormatError, match="got None"):
        files.write(formats.get("nf4").encode(np.ones((4, 8), np.float32)))
