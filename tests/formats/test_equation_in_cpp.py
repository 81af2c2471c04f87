"""A declaration's equation printed as C++ computes the decoder's bits, for every entry a field can hold."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import numpy as np
import pytest

from qcompiler import formats
from qcompiler.formats.doc import variants

ALL = [fmt for cls in formats.FORMATS.values() for fmt in variants(cls)]
C_TYPES = {"uint": "const uint8_t*", "int": "const int8_t*", "f16": "const float*", "f32": "const float*"}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """One function per format: decode_<i>(n, fields…, out) over arrays with one entry per element."""
    text = ["#include <stdint.h>"]
    for i, fmt in enumerate(ALL):
        d = fmt.declaration
        arguments = ", ".join(f"{C_TYPES[f.kind]} {f.name}" for f in d.fields)
        table = ", ".join(f"{v!r}f" for v in d.table or (0.0,))
        value = d.decode.to_c({f.name: f"{f.name}[i]" for f in d.fields})
        text.append(
            f'extern "C" void decode_{i}(int64_t n, {arguments}, float* out) {{\n'
            f"    static const float table[] = {{{table}}};\n    (void)table;\n"
            f"    for (int64_t i = 0; i < n; ++i) out[i] = {value};\n}}"
        )
    folder: Path = tmp_path_factory.mktemp("equation")
    (folder / "decode.cpp").write_text("\n".join(text))
    command = ["g++", "-std=c++17", "-O2", "-ffp-contract=off", "-fPIC", "-shared", "-Wall", "-Werror"]
    subprocess.run([*command, "-o", folder / "decode.so", folder / "decode.cpp"], check=True)
    return ctypes.CDLL(str(folder / "decode.so"))


@pytest.mark.parametrize("index", range(len(ALL)), ids=[str(f) for f in ALL])
def test_printed_equation_gives_the_decoders_bits(library: ctypes.CDLL, index: int) -> None:
    fmt = ALL[index]
    weights = np.random.default_rng(0).standard_normal((40, 256)).astype(np.float32)
    packed = fmt.encode(weights)
    entries = []
    for f in fmt.declaration.fields:
        values = f.unpack(packed.section(f.name).reshape(-1).view(np.uint8))
        values = np.repeat(values, weights.size // values.size)
        entries.append(np.ascontiguousarray(values.astype(np.float32) if f.kind == "f16" else values))
    out = np.empty(weights.shape, np.float32)
    pointers = [ctypes.c_void_p(a.ctypes.data) for a in (*entries, out)]
    library[f"decode_{index}"](ctypes.c_int64(weights.size), *pointers)
    assert out.tobytes() == fmt.decode(packed).tobytes()
