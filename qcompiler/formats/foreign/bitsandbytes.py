"""bitsandbytes' state dict.

    weight                                       uint8 (N * K / 2, 1), even element in the high nibble
    weight.absmax                                fp32 (blocks,), or uint8 with nested statistics
    weight.quant_map                             fp32 (16,), the table of the codes
    weight.nested_absmax, weight.nested_quant_map   fp32 (blocks / 256,), fp32 (256,)
    weight.quant_state.bitsandbytes__nf4         uint8: JSON with quant_type, blocksize, dtype, shape and, nested,
                                                 nested_blocksize, nested_dtype, nested_offset (…__fp4 for FP4)

    weight int8 (N, K), SCB fp32 (N,), weight_format uint8 () = 0        LLM.int8

Source: bitsandbytes 0.50, `functional.QuantState.as_dict(packed=True)`, `nn.Linear8bitLt._save_to_state_dict`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from qcompiler.errors import FormatError, FormatValueError
from qcompiler.formats import nested
from qcompiler.formats.base import PackedTensor
from qcompiler.formats.equation import Float32
from qcompiler.formats.foreign.arrays import Array, Arrays
from qcompiler.formats.foreign.json_text import json_object, shown
from qcompiler.formats.fp4 import FP4
from qcompiler.formats.llm_int8 import LLMInt8
from qcompiler.formats.nf4 import BLOCKS, NF4, TableFormat

TABLES: dict[str, type[TableFormat]] = {"nf4": NF4, "fp4": FP4}
DTYPES = ("float16", "bfloat16", "float32")

MAX_STATE = 1 << 16
"""Maximum bytes of a layer's state; usual states have some hundred."""

TOLERANCE = 1e-6
"""Maximum difference between a stored table and ours: bitsandbytes' own tolerance. Its kernels ignore the table."""

_STATE = "weight.quant_state.bitsandbytes__"
_PLAIN = ("weight", "weight.absmax", "weight.quant_map")
_NESTED = ("weight.nested_absmax", "weight.nested_quant_map")


def read(arrays: Mapping[str, Array], *, layer: str = "layer") -> tuple[PackedTensor, str | None]:
    """The weight (N, K) of a layer: nf4, fp4 or llm_int8; and the dtype it was quantised from (None for int8).

    FormatError (and its shape and value kinds) names the layer and the array.
    """
    if "SCB" in arrays:
        return _read_int8(Arrays(arrays, layer, "bitsandbytes int8")), None
    found = Arrays(arrays, layer, "bitsandbytes")
    states = [name for name in arrays if name.startswith(_STATE)]
    if len(states) != 1 or states[0][len(_STATE) :] not in TABLES:
        raise found.error(f"needs either SCB or one of {_STATE}nf4 and {_STATE}fp4; the layer has {', '.join(arrays)}")
    kind = states[0][len(_STATE) :]
    state = _state(found, states[0], kind)
    twice = "nested_offset" in state
    found.refuse_unknown((*_PLAIN, *(_NESTED if twice else ()), states[0]))
    rows, cols = state["shape"]
    fmt = TABLES[kind](block=state["blocksize"], double_quant=twice)
    codes = _codes(found, rows, cols)  # before anything of this size is allocated: the shape is untrusted
    packed = fmt.allocate(rows, cols)
    _check_table(found, "weight.quant_map", np.array(fmt.table, np.float32), kind)
    packed.section("codes")[:] = codes
    blocks = -(-rows * cols // state["blocksize"])
    why = f"{rows} x {cols} elements in blocks of {state['blocksize']}"
    absmax = found.shaped("weight.absmax", (np.uint8 if twice else np.float32,), (blocks,), why)
    packed.section("absmax")[:] = absmax
    if not twice:
        found.refuse_nonfinite("weight.absmax", absmax)
        return packed, state["dtype"]
    _check_table(found, "weight.nested_quant_map", nested.DYNAMIC, "the signed dynamic 8-bit type")
    scales = found.shaped("weight.nested_absmax", (np.float32,), (-(-blocks // nested.BLOCKS),), why)
    found.refuse_nonfinite("weight.nested_absmax", scales)
    packed.section("absmax_scales")[:] = scales
    packed.section("offset")[:] = state["nested_offset"]
    return packed, state["dtype"]


def _state(found: Arrays, name: str, kind: str) -> dict[str, Any]:
    """The checked JSON of the quantisation's state."""
    raw = found.get(name, (np.uint8,), 1)
    if raw.size > MAX_STATE:
        raise found.value_error(f"{name} has {raw.size} bytes, more than the limit of {MAX_STATE}")
    state = json_object(raw.tobytes(), f"{found.layer}: {found.system}: {name}", FormatValueError)
    double = "nested_offset" in state
    needed = {"quant_type", "blocksize", "dtype", "shape"}
    if double:
        needed |= {"nested_blocksize", "nested_dtype", "nested_offset"}
    if set(state) != needed:
        raise found.value_error(f"{name} holds {shown(sorted(state))[:200]}, not {', '.join(sorted(needed))}")
    shape = state["shape"]
    if not isinstance(shape, list) or len(shape) != 2 or not all(type(n) is int and 0 < n < 1 << 31 for n in shape):
        raise found.shape_error(f"{name} says the shape is {shown(shape)}, which is no matrix")
    expected: dict[str, tuple[Any, ...]] = {"quant_type": (kind,), "blocksize": BLOCKS, "dtype": DTYPES}
    if double:
        expected |= {"nested_blocksize": (nested.BLOCKS,), "nested_dtype": ("float32",)}
    for key, allowed in expected.items():
        if type(state[key]) is not type(allowed[0]) or state[key] not in allowed:
            raise found.value_error(f"{name} says {key} is {shown(state[key])}, not {' or '.join(map(str, allowed))}")
    if double and not (type(state["nested_offset"]) in (int, float) and abs(state["nested_offset"]) < 1e30):
        raise found.value_error(f"{name} says nested_offset is {shown(state['nested_offset'])}")
    return state


def _check_table(found: Arrays, name: str, table: Float32, what: str) -> None:
    stored = found.shaped(name, (np.float32,), table.shape, what)
    distance = float(np.abs(stored - table).max())
    if not distance <= TOLERANCE:
        raise found.value_error(f"{name} is not the table of {what}: it is off by up to {distance:g}")


def _codes(found: Arrays, rows: int, cols: int) -> Array:
    """The bytes of codes, which may be stored under any dtype (`quant_storage`)."""
    if not found.has("weight"):
        raise found.error(f"needs weight, and the layer has {', '.join(sorted(found.given))}")
    raw = np.ascontiguousarray(found.given["weight"]).reshape(-1).view(np.uint8)
    expected = -(-rows * cols // 2)
    if raw.size != expected:
        raise found.shape_error(f"weight has {raw.size} bytes; {rows} x {cols} elements take {expected}")
    return raw


def _read_int8(found: Arrays) -> PackedTensor:
    found.refuse_unknown(("weight", "SCB", "weight_format"))
    weight = found.get("weight", (np.int8,), 2)
    absmax = found.shaped("SCB", (np.float32,), (len(weight),), f"{len(weight)} rows")
    found.refuse_nonfinite("SCB", absmax)
    if found.has("weight_format"):
        order = np.asarray(found.given["weight_format"]).reshape(-1)
        if order.size != 1 or order[0] != 0:
            raise found.value_error(f"weight_format is {order.tolist()}, and only 0, row-major, is read; save it again")
    packed = LLMInt8().allocate(*weight.shape)
    packed.section("codes")[:] = weight
    packed.section("absmax")[:, 0] = absmax
    return packed


def write(packed: PackedTensor, *, dtype: str | None = None) -> dict[str, Array]:
    """The arrays of a layer with this weight: the inverse of `read`.

    `dtype` is the type that the 4-bit layer computes in: float16, bfloat16 or float32; int8 layers have none.
    FormatError for other formats and dtypes.
    """
    fmt = packed.format
    if isinstance(fmt, LLMInt8):
        return {
            "weight": packed.section("codes").copy(),
            "SCB": packed.section("absmax")[:, 0].copy(),
            "weight_format": np.zeros((), np.uint8),
        }
    if not isinstance(fmt, TableFormat):
        raise FormatError(f"bitsandbytes stores nf4, fp4 and llm_int8, and the tensor is {fmt}")
    if dtype not in DTYPES:
        raise FormatError(f"bitsandbytes stores the dtype of a 4-bit layer: {', '.join(DTYPES)}; got {dtype!r}")
    state: dict[str, Any] = {
        "quant_type": fmt.name,
        "blocksize": int(fmt.setting("block")),
        "dtype": dtype,
        "shape": [packed.rows, packed.cols],
    }
    arrays: dict[str, Array] = {
        "weight": packed.section("codes").reshape(-1, 1).copy(),
        "weight.absmax": packed.section("absmax").copy(),
        "weight.quant_map": np.array(fmt.table, np.float32),
    }
    if fmt.nested:
        arrays["weight.nested_absmax"] = packed.section("absmax_scales").copy()
        arrays["weight.nested_quant_map"] = nested.DYNAMIC.copy()
        state |= {
            "nested_blocksize": nested.BLOCKS,
            "nested_dtype": "float32",
            "nested_offset": float(packed.section("offset")[0]),
        }
    arrays[_STATE + fmt.name] = np.frombuffer(json.dumps(state).encode(), np.uint8)
    return arrays
