"""Storage formats: the only place that defines a block's bytes. NumPy only; neither torch nor xdsl.

fmt = formats.get("nf4", block=64)
packed = fmt.encode(w)          # float array (rows, cols) -> PackedTensor, one buffer
packed.to_bytes()               # canonical bytes
fmt.decode(packed)              # -> float32 (rows, cols)
"""

from __future__ import annotations

import difflib

import numpy as np
import numpy.typing as npt

from qcompiler.errors import FormatError, UnknownFormatError
from qcompiler.formats.base import Declaration, Field, Format, Numerics, PackedTensor, Parameter, ParamValue, Section
from qcompiler.formats.fp4 import FP4
from qcompiler.formats.fp8 import FP8E4M3, FP8E5M2
from qcompiler.formats.ggml_32 import Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, MXFP4Ggml
from qcompiler.formats.i_quants import IQ1_M, IQ1_S, IQ2_S, IQ2_XS, IQ2_XXS, IQ3_S, IQ3_XXS
from qcompiler.formats.integers import Int2, Int3, Int4, Int8
from qcompiler.formats.iq4 import IQ4_NL, IQ4_XS
from qcompiler.formats.k_quants import Q2_K, Q3_K, Q4_K, Q5_K, Q6_K
from qcompiler.formats.llm_int8 import LLMInt8
from qcompiler.formats.mx import MXFP4, MXFP8
from qcompiler.formats.nf4 import NF4
from qcompiler.formats.nvfp4 import NVFP4
from qcompiler.formats.ternary import TQ1_0, TQ2_0
from qcompiler.formats.tq import TQ

Buffer = bytes | bytearray | memoryview | npt.NDArray[np.uint8]

__all__ = [
    "FORMATS",
    "Buffer",
    "Declaration",
    "Field",
    "Format",
    "Numerics",
    "PackedTensor",
    "Parameter",
    "Section",
    "from_bytes",
    "get",
    "names",
]

_COMMON: tuple[type[Format], ...] = (NF4, Int8, Int4, Int3, Int2, FP4, LLMInt8)
_GGML: tuple[type[Format], ...] = (
    Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS, IQ3_S, IQ3_XXS, IQ2_S,
    IQ2_XS, IQ2_XXS, IQ1_M, IQ1_S, TQ1_0, TQ2_0, MXFP4Ggml,
)  # fmt: skip
_FLOATS: tuple[type[Format], ...] = (FP8E4M3, FP8E5M2, MXFP4, MXFP8, NVFP4)
_TRELLIS: tuple[type[Format], ...] = (TQ,)
FORMATS: dict[str, type[Format]] = {cls.name: cls for cls in (*_COMMON, *_FLOATS, *_TRELLIS, *_GGML)}


def names() -> tuple[str, ...]:
    """The names of all formats."""
    return tuple(FORMATS)


def get(name: str, /, **params: ParamValue) -> Format:
    """The format of that name; missing parameters take their defaults. UnknownFormatError lists the choices.

    Types of GGUF files have ggml's names ("q4_K", "iq4_nl"), except that ggml's MXFP4 is "mxfp4_ggml": "mxfp4" are the
    same values in the layout of safetensors files.
    """
    if name not in FORMATS:
        close = difflib.get_close_matches(str(name), FORMATS, n=1)
        hint = f" (did you mean '{close[0]}'?)" if close else ""
        raise UnknownFormatError(f"no storage format is called {name!r}{hint}; there are: {', '.join(FORMATS)}")
    return FORMATS[name](**params)


def from_bytes(fmt: Format, rows: int, cols: int, buffer: Buffer) -> PackedTensor:
    """A tensor over canonical bytes, without a copy. FormatError when the buffer has the wrong number of bytes."""
    data = np.frombuffer(buffer, np.uint8)
    expected = fmt.nbytes(rows, cols)
    if data.size != expected:
        raise FormatError(f"{fmt} of {rows} x {cols} takes {expected} bytes, and the buffer has {data.size}")
    return PackedTensor(fmt, rows, cols, data)
