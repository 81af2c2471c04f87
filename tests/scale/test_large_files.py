"""Files of more than 4 GiB: program files and safetensors, with holes where weights are zero."""

from __future__ import annotations

import json
import os
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import qcompiler as qc
from qcompiler import formats
from qcompiler.errors import CorruptFileError
from qcompiler.formats.base import Bytes
from qcompiler.frontends.weights.safetensors_files import read_tensors
from qcompiler.kernels import layouts
from qcompiler.kernels.layouts.base import views
from qcompiler.plan.kernel import FormatRef, KernelSpec, Operand, ScalarOp, ScalarProgram
from qcompiler.plan.kinds.embedding import EmbeddingKernel
from qcompiler.plan.kinds.loop import AffineAccess, LoopKernel
from qcompiler.plan.plan import (
    Arena,
    Buffer,
    DeviceSlot,
    EntryPoint,
    Launch,
    Plan,
    Signature,
    Stream,
    TensorSig,
    View,
    WeightEntry,
)
from qcompiler.runtime import LoadedProgram, ProgramImage, program_file

ROWS, COLS = 34_000_000, 128
"""An int8 table whose codes alone have 4.35e9 bytes; its scales lie behind them."""
IDS = np.array([ROWS - 1, 0, (1 << 32) // COLS, ROWS - 17], np.int64)
INT8 = FormatRef(name="int8", params={})


def operand(name: str, dtype: Any, access: Any, *shape: int, **packed: Any) -> Operand:
    strides = () if packed else (*shape[1:], 1)
    return Operand(name=name, dtype=dtype, access=access, shape=shape, strides=strides, **packed)


def view(buffer: str, dtype: Any, *shape: int, **packed: Any) -> View:
    return View(buffer=buffer, dtype=dtype, shape=shape, strides=() if packed else (*shape[1:], 1), **packed)


def kernels() -> tuple[KernelSpec, KernelSpec]:
    """Rows of the table, and the bias added to them."""
    count = len(IDS)
    rows = KernelSpec(
        name="rows", symbols=(), body=EmbeddingKernel(count=count, rows=ROWS, cols=COLS), serves="embed",
        operands=(
            operand("ids", "i64", "r", count),
            operand("table", "f32", "r", ROWS, COLS, format=INT8, layout="canonical"),
            operand("out", "f32", "w", count, COLS),
        ),
    )  # fmt: skip
    add = ScalarOp(result="sum", op="arith.addf", dtype="f32", args=("a", "b"))
    body = LoopKernel(
        extents=(count, COLS), iterators=("parallel", "parallel"),
        accesses=tuple(AffineAccess(offset=0, coefficients=c) for c in ((COLS, 1), (0, 1), (COLS, 1))),
        body=ScalarProgram(inputs=(("a", "f32"), ("b", "f32"), ("c", "f32")), ops=(add,), yields=("sum",)),
    )  # fmt: skip
    operands = (
        operand("a", "f32", "r", count, COLS),
        operand("bias", "f32", "r", COLS),
        operand("out", "f32", "w", count, COLS),
    )
    return rows, KernelSpec(name="add", symbols=(), operands=operands, body=body, serves="add")


def plan(weights: tuple[WeightEntry, WeightEntry], nbytes: int) -> Plan:
    count = len(IDS)
    sizes = {"ids": count * 8, "out": count * COLS * 4, "h": count * COLS * 4}
    kinds: dict[str, Any] = {"ids": "input", "out": "output", "h": "activations"}
    arenas = [Arena(name="constants", device="cpu", kind="constants", nbytes=nbytes)]
    arenas += [Arena(name=n, device="cpu", kind=kinds[n], nbytes=size, entry="main") for n, size in sizes.items()]
    buffers = [Buffer(name=w.name, arena="constants", offset=w.offset, nbytes=w.nbytes) for w in weights]
    buffers += [Buffer(name=name, arena=name, offset=0, nbytes=size) for name, size in sizes.items()]
    table = view("table", "f32", ROWS, COLS, format=INT8, layout="canonical")
    h, out = view("h", "f32", count, COLS), view("out", "f32", count, COLS)
    steps = (
        Launch(kernel="rows", stream="s", operands=(view("ids", "i64", count), table, h)),
        Launch(kernel="add", stream="s", operands=(h, view("bias", "f32", COLS), out)),
    )
    entry = EntryPoint(
        name="main", symbols=(), steps=steps,
        inputs=(TensorSig(name="ids", arena="ids", dtype="i64", shape=(count,)),),
        outputs=(TensorSig(name="out", arena="out", dtype="f32", shape=(count, COLS)),),
    )  # fmt: skip
    return Plan(
        devices=(DeviceSlot(name="cpu", kind="cpu"),), streams=(Stream(name="s", device="cpu"),), events=(),
        arenas=tuple(arenas), buffers=tuple(buffers), kernels=kernels(), entries=(entry,), weights=weights,
    )  # fmt: skip


def image(sparse: Any) -> tuple[ProgramImage, np.ndarray]:
    """The program, and what it computes for IDS."""
    fmt, kind = formats.get("int8"), layouts.get("canonical")
    sections = kind.sections(fmt, "f32", ROWS, COLS)
    table_bytes = kind.nbytes(fmt, "f32", ROWS, COLS)
    second = -(-table_bytes // 256) * 256
    assert sections[1].offset > 1 << 32 and second > 1 << 32
    entries = (
        WeightEntry(
            name="table", dtype="f32", shape=(ROWS, COLS), offset=0, nbytes=table_bytes, format=INT8,
            parameters=("embed.weight",),
        ),
        WeightEntry(name="bias", dtype="f32", shape=(COLS,), offset=second, nbytes=COLS * 4, parameters=("bias",)),
    )  # fmt: skip
    data: Bytes = sparse((second + 4096,), "u8")
    whole = views(data[:table_bytes], sections)
    expected = np.zeros((len(IDS), COLS), np.float32)
    for i, row in enumerate(IDS):
        packed = fmt.encode(np.random.default_rng(i).standard_normal((1, COLS)).astype(np.float32))
        one = views(packed.data, kind.sections(fmt, "f32", 1, COLS))
        for name, values in whole.items():
            values.reshape(ROWS, -1)[row] = one[name].reshape(-1)
        expected[i] = fmt.decode(packed)[0]
    bias = np.random.default_rng(9).standard_normal(COLS).astype(np.float32)
    data[second : second + COLS * 4] = bias.view(np.uint8)
    leaf = {"kind": "leaf", "index": 0}
    inputs = {"args": {"kind": "tuple", "items": [leaf]}, "kwargs": {"kind": "dict", "keys": [], "items": []}}
    return ProgramImage(plan(entries, data.nbytes), Signature(inputs=inputs, outputs=leaf), data), expected + bias


class WithHoles:
    """A file in which zeros that are written become holes: the disk of a test machine is not filled with them."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, data: Any) -> None:
        if len(data) >= 1 << 16 and not np.frombuffer(data, np.uint8).any():
            self._file.seek(len(data), os.SEEK_CUR)
        else:
            self._file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> WithHoles:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()


@pytest.mark.slow
def test_a_program_file_of_more_than_4_gib_is_saved_checked_and_run(
    far: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QC_CACHE_DIR", str(tmp_path / "cache"))
    program, expected = image(far.sparse)
    path = tmp_path / "large.qca"
    opened = os.fdopen
    with monkeypatch.context() as patch:
        patch.setattr(program_file.os, "fdopen", lambda *args: WithHoles(opened(*args)))
        program_file.save_image(program, path)
    assert path.stat().st_size > 1 << 32
    assert path.stat().st_blocks * 512 < 1 << 30, "zeros are holes"
    with zipfile.ZipFile(path) as archive:  # another reader of zip64 finds the members where they are
        member = archive.getinfo("weights.safetensors")
        assert member.file_size > 1 << 32
        assert archive.infolist()[-1].filename == "weights.safetensors"

    with monkeypatch.context() as patch:
        patch.setattr(program_file, "_check_weights", None)  # known to be whole since it was saved: nothing is read
        loaded, _ = program_file.load_image(path, verify="auto")
    assert [w.offset for w in loaded.plan.weights] == [w.offset for w in program.plan.weights]
    run = LoadedProgram.from_image(loaded)
    np.testing.assert_array_equal(run(IDS), expected)

    with path.open("r+b") as file:
        members = program_file.read_members(program_file.MappedFile(path).data)
        begin = members["weights.safetensors"].offset
        file.seek(begin + program_file.PAGE + (1 << 32) + 5)
        file.write(b"\1")
    with pytest.raises(CorruptFileError, match=r"'table' is damaged \(chunk 256 of"):
        program_file.load_image(path, verify="auto")  # it has changed, and so it is read


def test_safetensors_behind_byte_2_to_the_32(tmp_path: Path) -> None:
    """A shard with a hole of 4.3 GB, and the parameters of a model behind it."""
    torch.manual_seed(0)
    model = torch.nn.Linear(24, 8).eval()
    first = (1 << 32) + 4096
    values = {name: value.detach().numpy() for name, value in model.named_parameters()}
    described: dict[str, Any] = {"unused": {"dtype": "I8", "shape": [first], "data_offsets": [0, first]}}
    at = first
    for name, value in values.items():
        described[name] = {"dtype": "F32", "shape": list(value.shape), "data_offsets": [at, at + value.nbytes]}
        at += value.nbytes
    header = json.dumps(described).encode()
    header += b" " * (-len(header) % 8)
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.seek(first - 1, os.SEEK_CUR)
        file.write(b"\7")
        for value in values.values():
            file.write(value.tobytes())
    assert path.stat().st_size > 1 << 32 > path.stat().st_blocks * 512
    tensors = read_tensors(path)
    assert int(tensors["unused"].view()[-1]) == 7
    assert torch.equal(tensors["weight"].view(), model.weight)
    with qc.empty_weights():
        empty = torch.nn.Linear(24, 8).eval()
    x = torch.randn(3, 24)
    program = qc.qcompile(empty, (x,), weights=qc.Shards(path, ignore=["unused"]))
    torch.testing.assert_close(program(x), model(x))
