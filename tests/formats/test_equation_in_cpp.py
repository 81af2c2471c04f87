"""A declaration's equation printed as C++ computes the decoder's bits, for every entry a field can hold."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from qcompiler import formats
from qcompiler.formats import Field, Format, PackedTensor
from qcompiler.formats.doc import variants

ALL = [fmt for cls in formats.FORMATS.values() for fmt in variants(cls)]
C_TYPES = {"uint": "const uint8_t*", "int": "const int8_t*"}  # floats of every width are handed over as fp32


def c_type(fmt: Format, f: Field) -> str:
    """Of a field's entries; the codes of a trellis are handed over as windows."""
    windows = f.covers == 1 and fmt.declaration.trellis is not None
    return "const uint16_t*" if windows else C_TYPES.get(f.kind, "const float*")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """One function per format: decode_<i>(n, fields…, out) over arrays with one entry per element."""
    text = ["#include <stdint.h>"]
    for i, fmt in enumerate(ALL):
        d = fmt.declaration
        arguments = ", ".join(f"{c_type(fmt, f)} {f.name}" for f in d.fields)
        tables = "".join(
            f"    static const float {name}[] = {{{', '.join(f'{float(v).hex()}f' for v in values)}}};\n"
            for name, values in d.table_arrays.items()
        )
        value = d.decode.to_c({f.name: f"{f.name}[i]" for f in d.fields})
        text.append(
            f'extern "C" void decode_{i}(int64_t n, {arguments}, float* out) {{\n'
            f"{tables}"
            f"    for (int64_t i = 0; i < n; ++i) out[i] = {value};\n}}"
        )
    folder: Path = tmp_path_factory.mktemp("equation")
    (folder / "decode.cpp").write_text("\n".join(text))
    command = ["g++", "-std=c++17", "-O2", "-ffp-contract=off", "-fPIC", "-shared", "-Wall", "-Werror"]
    subprocess.run([*command, "-o", folder / "decode.so", folder / "decode.cpp"], check=True)
    return ctypes.CDLL(str(folder / "decode.so"))


def per_element(fmt: Format, packed: PackedTensor, f: Field) -> npt.NDArray[Any]:
    """A field's entries, one for each element (rows, cols)."""
    entries = fmt.entries(packed, f.name)
    if f.covers == 1 and fmt.declaration.trellis is not None:
        return fmt.declaration.trellis.windows(entries)
    if f.covers == "tensor":
        return np.full((packed.rows, packed.cols), entries[0])
    if entries.ndim == 1:
        return np.repeat(entries, int(f.covers))[: packed.rows * packed.cols].reshape(packed.rows, packed.cols)
    entries = np.repeat(entries, f.rows, axis=0)[: packed.rows]
    return np.repeat(entries, packed.cols if f.covers == "row" else int(f.covers), axis=1)[:, : packed.cols]


@pytest.mark.parametrize("index", range(len(ALL)), ids=[str(f) for f in ALL])
def test_printed_equation_gives_the_decoders_bits(library: ctypes.CDLL, index: int) -> None:
    fmt = ALL[index]
    weights = np.random.default_rng(0).standard_normal((40, 256)).astype(np.float32)
    packed = fmt.encode(weights)
    entries = []
    for f in fmt.declaration.fields:
        values = per_element(fmt, packed, f)
        entries.append(np.ascontiguousarray(values if f.kind in C_TYPES else values.astype(np.float32)))
    out = np.empty(weights.shape, np.float32)
    pointers = [ctypes.c_void_p(a.ctypes.data) for a in (*entries, out)]
    library[f"decode_{index}"](ctypes.c_int64(weights.size), *pointers)
    assert out.tobytes() == fmt.decode(packed).tobytes()
