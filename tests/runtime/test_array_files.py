"""Inputs of `qc run` are read as NumPy wrote them, without evaluating their headers; everything else is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from qcompiler.errors import ArgumentError
from qcompiler.runtime.array_files import read_arrays, write_archive

VALUES = np.arange(24, dtype=np.float32).reshape(2, 3, 4)


@pytest.mark.parametrize(
    "array",
    [VALUES, np.asfortranarray(VALUES), VALUES.astype(">i8"), VALUES > 3, np.float16(2), np.zeros((0, 5)),
     VALUES[:, ::2], np.arange(7, dtype=np.uint8)],
    ids=["f4", "columns first", "big-endian", "booleans", "no dimensions", "empty", "strided", "one dimension"],
)  # fmt: skip
def test_what_numpy_writes_is_read(array: np.ndarray, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", array)
    np.savez(tmp_path / "plain.npz", x=array, y=VALUES)
    np.savez_compressed(tmp_path / "packed.npz", x=array)
    alone, plain, packed = (read_arrays(tmp_path / name) for name in ("x.npy", "plain.npz", "packed.npz"))
    assert isinstance(plain, dict) and isinstance(packed, dict)
    assert list(plain) == ["x", "y"]
    for found in (alone, plain["x"], packed["x"]):
        assert found.dtype == np.asarray(array).dtype
        np.testing.assert_array_equal(found, array)


def test_results_of_any_name_are_written_and_read_by_numpy_and_by_us(tmp_path: Path) -> None:
    names = ["file", "allow_pickle", "self", "result.0", "keys/long", "größe", "a\0b", "a\0c", r"a\x00c", ""]
    arrays = {name: VALUES * number for number, name in enumerate(names)}
    with (tmp_path / "x.npz").open("wb") as file:
        write_archive(file, arrays)
    wanted = dict(zip([*names[:6], r"a\x00b", r"a\x00c", r"a\x00c_", ""], arrays.values(), strict=True))
    ours = read_arrays(tmp_path / "x.npz")
    with np.load(tmp_path / "x.npz", allow_pickle=False) as numpys:
        assert list(ours) == list(numpys) == list(wanted)
        assert all(np.array_equal(numpys[name], array) for name, array in wanted.items())
        assert all(np.array_equal(ours[name], array) for name, array in wanted.items())


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("{'descr': '|O', 'fortran_order': False, 'shape': (1,), }", "booleans, integers or floats"),
        ("{'descr': [('a', '<i4')], 'fortran_order': False, 'shape': (1,), }", "booleans, integers or floats"),
        ("{'descr': __import__('os').getcwd(), 'fortran_order': False, 'shape': (1,), }", "its header says"),
        ("{'descr': '<f4', 'fortran_order': False, 'shape': (4611686018427387904,), }", "its header says"),
        (
            "{'descr': '<f4', 'fortran_order': False, 'shape': (100000000000,), }",
            "400,000,000,000 bytes, and .* 16",
        ),
        ("{'descr': '<f3', 'fortran_order': False, 'shape': (1,), }", "its header says"),
    ],
)
def test_a_header_that_lies_is_refused_before_anything_is_made(header: str, message: str, tmp_path: Path) -> None:
    raw = header.encode() + b"\n"
    (tmp_path / "x.npy").write_bytes(b"\x93NUMPY\1\0" + len(raw).to_bytes(2, "little") + raw + bytes(16))
    with pytest.raises(ArgumentError, match=message):
        read_arrays(tmp_path / "x.npy")
