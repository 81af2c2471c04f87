"""Writes ggml.npz, ggml.json and i_quants.json beside it: what ggml's C code makes of the matrices of `cases`.

    python tests/formats/golden/make_ggml.py path/to/llama.cpp

The source is ggml/src/ggml-quants.c of the llama.cpp that llama-cpp-python 0.3.36 ships (vendor/llama.cpp), compiled
with ``gcc -O2 -ffp-contract=off -DNDEBUG`` so that every operation rounds as it is written.  ggml.npz holds bytes of
small matrices by name ("q4_K/bell/importance"), ggml.json the SHA-256 of the bytes of larger ones.  i_quants.json
holds the errors that ggml's encoders of i-quants leave, which are others than ours.

Inputs come from integers alone, so that they are the same bits with every NumPy.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]

HERE = Path(__file__).parent
BLOCKS = {
    "q4_0": (32, 18), "q4_1": (32, 20), "q5_0": (32, 22), "q5_1": (32, 24), "q8_0": (32, 34), "q2_K": (256, 84),
    "q3_K": (256, 110), "q4_K": (256, 144), "q5_K": (256, 176), "q6_K": (256, 210), "iq4_nl": (32, 18),
    "iq4_xs": (256, 136), "tq1_0": (256, 54), "tq2_0": (256, 66), "mxfp4": (32, 17),
}  # fmt: skip
SEARCHED = ("q4_0", "q4_1", "q5_0", "q5_1", "q2_K", "q3_K", "q4_K", "q5_K", "q6_K", "iq4_nl", "iq4_xs")
I_QUANTS = {
    "iq3_s": (21, 110), "iq3_xxs": (18, 98), "iq2_s": (22, 82), "iq2_xs": (17, 74), "iq2_xxs": (16, 66),
    "iq1_m": (29, 56), "iq1_s": (19, 50),
}  # fmt: skip
"""The number of the type and the bytes of a record of 256, by name."""
SMALL, LARGE = (2, 256), (48, 1024)
CASES = ("bell", "tails", "sparse", "positive", "negative", "steps", "constant", "tiny", "mixed")
SMALL_CASES = ("bell", "steps", "tiny", "mixed")


def numbers(seed: int, count: int) -> npt.NDArray[np.uint64]:
    """`count` 64-bit numbers: splitmix64 (Steele, Lea, Flood 2014) of a counter."""
    z = (np.arange(1, count + 1, dtype=np.uint64) + np.uint64(seed << 32)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def cases(shape: tuple[int, int]) -> Iterator[tuple[str, Float32, Float32]]:
    """(name, weights, importance of the columns)."""
    rows, cols = shape
    for seed, name in enumerate(
        ("bell", "tails", "sparse", "positive", "negative", "steps", "constant", "tiny", "mixed")
    ):
        raw = numbers(seed, rows * cols).reshape(rows, cols)
        parts = raw[..., None].view(np.uint16).astype(np.int64).reshape(rows, cols, 4)
        bell = (parts.sum(axis=2) - 2 * 65535).astype(np.float64) / 2**20  # nearly normal, sigma 0.036
        if name == "tails":
            bell *= 2.0 ** (parts[..., 0] % 64 == 0).astype(np.float64) * 2.0 ** (parts[..., 1] % 8)
        elif name == "sparse":
            bell *= parts[..., 3] % 16 == 0
        elif name == "positive":
            bell = np.abs(bell)
        elif name == "negative":
            bell = -np.abs(bell) - 0.25
        elif name == "steps":  # halves and whole numbers: ties everywhere
            bell = np.floor(bell * 512) / 2
        elif name == "constant":  # of each 16
            bell = np.repeat(bell[:, ::16], 16, axis=1)
        elif name == "tiny":  # denormals, and blocks with fp16 denormals for a scale
            bell *= np.where(np.arange(rows)[:, None] % 2, 2.0**-125, 2.0**-20)
        elif name == "mixed":
            bell *= 2.0 ** np.repeat(parts[:, ::16, 1] % 40 - 30, 16, axis=1).astype(np.float64)
        importance = (numbers(seed + 100, cols) >> np.uint64(52)).astype(np.float32)
        yield name, bell.astype(np.float32), importance * importance


_STUBS = r"""
#include <stdlib.h>
#include "ggml.h"
static const int sizes[][3] = {%s};
void ggml_abort(const char * file, int line, const char * fmt, ...) { abort(); }
const char * ggml_type_name(enum ggml_type type) { return ""; }
size_t ggml_type_size(enum ggml_type type) { abort(); }
size_t ggml_row_size(enum ggml_type type, int64_t n) {
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; ++i)
        if (sizes[i][0] == (int) type) return n / sizes[i][1] * sizes[i][2];
    abort();
}
"""


def compiled(llama: Path, folder: Path) -> ctypes.CDLL:
    """ggml's quantisers as a library."""
    ggml = llama / "ggml"
    blocks = BLOCKS | {name: (256, size) for name, (_, size) in I_QUANTS.items()}
    sizes = ", ".join(f"{{GGML_TYPE_{name.upper()}, {block}, {size}}}" for name, (block, size) in blocks.items())
    (folder / "stubs.c").write_text(_STUBS % sizes)
    command = ["gcc", "-O2", "-ffp-contract=off", "-DNDEBUG", "-fPIC", "-shared", "-w", f"-I{ggml}/include"]
    command += [f"-I{ggml}/src", f"{ggml}/src/ggml-quants.c", str(folder / "stubs.c"), "-lm", "-o", f"{folder}/ggml.so"]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(folder / "ggml.so"))


def quantize(library: ctypes.CDLL, name: str, weights: Float32, importance: Float32 | None) -> npt.NDArray[np.uint8]:
    """What ``quantize_<name>`` writes."""
    block, size = BLOCKS[name] if name in BLOCKS else (256, I_QUANTS[name][1])
    out = np.zeros(weights.size // block * size, np.uint8)
    function = getattr(library, f"quantize_{name}")
    function.restype = ctypes.c_size_t
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p]
    address = None if importance is None else importance.ctypes.data
    written = function(np.ascontiguousarray(weights).ctypes.data, out.ctypes.data, *weights.shape, address)
    assert written == out.size
    return out


WEIGHTED = ("bell", "tails", "sparse", "constant")
"""The cases of `errors`: those whose weights are not all of one sign, nor out of fp16's reach."""


def weighted_cases() -> Iterator[tuple[str, Float32, Float32, str]]:
    """(case, weights, importance, name of the result): each of WEIGHTED with ones for an importance, and with one."""
    for case, weights, importance in cases((4, 512)):
        if case in WEIGHTED:
            yield case, weights, np.ones_like(importance), case
            yield case, weights, importance, f"{case}/importance"


def errors(library: ctypes.CDLL) -> dict[str, float]:
    """The sum of importance times squared error that ggml's encoders leave, decoded by gguf-py."""
    for number in (16, 17, 22, 19, 29):
        library.iq2xs_init_impl(number)
    for count in (256, 512):
        library.iq3xs_init_impl(count)
    found = {}
    for _, weights, importance, key in weighted_cases():
        for name, (number, size) in I_QUANTS.items():
            raw = quantize(library, name, weights, importance).reshape(len(weights), -1)
            assert raw.shape[1] == weights.shape[1] // 256 * size
            decoded = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(number)).astype(np.float64)
            found[f"{name}/{key}"] = float((importance * np.square(decoded - weights)).sum())
    return found


def main() -> None:
    """Writes the files."""
    with tempfile.TemporaryDirectory() as folder:
        library = compiled(Path(sys.argv[1]), Path(folder))
        small, digests = {}, {}
        for shape in (SMALL, LARGE):
            for case, weights, importance in cases(shape):
                if shape == SMALL and case not in SMALL_CASES:
                    continue
                for name in BLOCKS:
                    for given in (None, importance) if name in SEARCHED else (None,):
                        made = quantize(library, name, weights, given)
                        key = f"{name}/{case}" + ("" if given is None else "/importance")
                        if shape == SMALL:
                            small[key] = made
                        else:
                            digests[key] = hashlib.sha256(made.tobytes()).hexdigest()
        (HERE / "i_quants.json").write_text(json.dumps(errors(library), indent=1) + "\n")
    np.savez_compressed(HERE / "ggml.npz", **small)
    (HERE / "ggml.json").write_text(json.dumps(digests, indent=1) + "\n")


if __name__ == "__main__":
    main()
