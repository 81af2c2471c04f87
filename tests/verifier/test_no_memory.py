"""A program that wants more memory than there is says so with an error of ours, and leaves everything usable."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from handmade import Maker, doubling, loop, operand, view_of

import qcompiler as qc
from qcompiler.errors import OutOfMemoryError
from qcompiler.runtime import interop
from qcompiler.runtime.loaded import LoadedProgram
from qcompiler.runtime.memory import Block
from qcompiler.runtime.program_file import save_image

HUGE = 1 << 52


def test_a_block_that_the_system_does_not_give_is_an_error_with_a_way_out() -> None:
    for nbytes in (HUGE, 1 << 62, 1 << 64):
        with pytest.raises(OutOfMemoryError, match=r"ENOMEM \(12\).*smaller maxima") as caught:
            Block(nbytes)
        assert f"{nbytes:,}" in str(caught.value) and caught.value.code == 12
    assert Block(1).bytes.tolist() == [0]


@pytest.mark.parametrize("kind", ["activations", "state", "init"])
def test_a_file_with_an_arena_of_petabytes_is_sound_and_has_no_room(kind: str, tmp_path: Path) -> None:
    maker = Maker()
    x, y = operand("x", (8, 16)), operand("y", (8, 16), "w")
    first = loop("first", (8, 16), (x, y), ((16, 1), (16, 1)), doubling().body.body.ops)  # type: ignore[union-attr]
    maker.input("x", x.shape)
    maker.output("y", y.shape)
    maker._arena("large", kind, HUGE, "main" if kind == "activations" else None)
    maker.launch(first, (view_of(x, "x"), view_of(y, "y")))
    path = tmp_path / "large.qca"
    save_image(maker.image(), path)
    with pytest.raises(OutOfMemoryError, match="smaller maxima"):
        qc.load(path)(np.ones((8, 16), np.float32))


@pytest.mark.parametrize("make", [interop.new_numpy, interop.new_torch])
def test_a_result_that_there_is_no_room_for(make: object) -> None:
    assert callable(make) and torch is not None
    with pytest.raises(OutOfMemoryError, match=r"a result of shape \(1048576, 1048576, 1024\)"):
        make((1 << 20, 1 << 20, 1 << 10), "f32")


def test_a_call_goes_on_after_one_that_had_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    program = LoadedProgram.from_image(Maker({"b": (1, 8)}).kernel(doubling(("b", 16), ("b",))).image())
    x = np.ones((2, 16), np.float32)

    def full(*_: object, **__: object) -> object:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(np, "empty", full)
        with pytest.raises(OutOfMemoryError, match="a result"):
            program(x)
    assert (program(x)[0] == 2).all()
