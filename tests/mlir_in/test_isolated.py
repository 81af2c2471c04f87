"""A text is parsed in a process of its own first: what ends that process is an error here."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mlir_texts import answers, function

import qcompiler as qc
from qcompiler.errors import ExportError
from qcompiler.frontends.mlir import isolated
from qcompiler.frontends.mlir.frontend import import_mlir

ADD = "    %0 = stablehlo.add %x, %x : tensor<4x4xf32>"
BODIES = {
    "a crash": ("import os; os.abort()", "crashed on it .SIGABRT."),
    "an endless loop": (
        "import sys; sys.path[:] = __import__('json').loads(sys.argv[1])\n"
        "from qcompiler.frontends.mlir import isolated; isolated._limit(0, 0)\nwhile True: pass",
        "more than 30 s of processor time",
    ),
    "too much memory": (
        "import sys; sys.path[:] = __import__('json').loads(sys.argv[1])\n"
        "from qcompiler.frontends.mlir import isolated; isolated._limit(0, 9)\nbytearray(3 << 30)",
        "ended with 1: MemoryError",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BODIES)
def test_a_parser_that_ends_its_process_is_an_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    code, message = BODIES[name]
    monkeypatch.setattr(isolated, "_CODE", code)
    with pytest.raises(ExportError, match=f"<mlir>: .*{message}"):
        qc.from_mlir(function(ADD))


@pytest.mark.slow
def test_a_parser_that_waits_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolated, "_CODE", "import time; time.sleep(100)")
    monkeypatch.setattr(isolated, "SECONDS", 1)
    monkeypatch.setattr(isolated, "ASLEEP", 1)
    with pytest.raises(ExportError, match="did not end within 1 s"):
        qc.from_mlir(function(ADD))


def test_an_error_keeps_its_line_and_a_sound_text_its_meaning() -> None:
    with pytest.raises(ExportError, match="<mlir> does not parse: line 3:"):
        qc.from_mlir(function("    %0 = stablehlo.add %x, %y : tensor<4x4xf32>"))
    x = np.arange(16, dtype=np.float32).reshape(4, 4)
    assert np.array_equal(answers(import_mlir(qc.from_mlir(function(ADD)), ()), [x])[0], x * 2)


def test_a_module_of_bindings_and_a_trusted_text_start_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = qc.from_mlir(function(ADD), trusted=True).module
    monkeypatch.setattr(isolated, "printed", lambda *_: pytest.fail("a process was started"))
    assert [argument.name for argument in qc.from_mlir(module).inputs] == ["arg0"]
    qc.from_mlir(function(ADD), trusted=True)


LEVELS = 40
DOUBLED = {
    "types": (
        "!t0 = tuple<f32, f32>\n" + "".join(f"!t{n} = tuple<!t{n - 1}, !t{n - 1}>\n" for n in range(1, LEVELS)),
        ADD, f"%x: tensor<4x4xf32>, %y: !t{LEVELS - 1}",
    ),
    "places": (
        '#l0 = loc("a":1:2)\n'
        + "".join(f"#l{n} = loc(callsite(#l{n - 1} at #l{n - 1}))\n" for n in range(1, LEVELS)),
        f"{ADD} loc(#l{LEVELS - 1})", "%x: tensor<4x4xf32>",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", DOUBLED)
def test_aliases_that_stand_for_more_text_than_there_is_memory(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """2^40 types, or places, in 40 lines."""
    monkeypatch.setattr(isolated, "SECONDS", 5)
    aliases, body, args = DOUBLED[name]
    with pytest.raises(ExportError, match=r"processor time|did not end|the process that parses it ended|crashed on it"):
        qc.from_mlir(aliases + function(body, args))
