"""Stock MLIR, unregistered dialects allowed, parses what `print_for_mlir` and the generic form print."""

from __future__ import annotations

from pathlib import Path

import pytest

from qcompiler.errors import QCompilerError
from qcompiler.ir.mlir_oracle import parses_in_mlir
from qcompiler.ir.text import parse_module, print_for_mlir, print_module

TESTS = Path(__file__).parents[1]
FILES = sorted(p for p in (TESTS / "filecheck").rglob("*.mlir") if "invalid" not in p.stem)
SCHEDULES = sorted((TESTS / "rt" / "files" / "accepted").glob("*.mlir"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_every_filecheck_file_parses_in_mlir(path: Path) -> None:
    module = parse_module(path.read_text(), name=path.name)
    parses_in_mlir(print_for_mlir(module))
    parses_in_mlir(print_module(module, generic=True))


@pytest.mark.parametrize("path", SCHEDULES, ids=lambda p: p.stem)
def test_stock_mlir_reads_a_schedule_and_gives_it_back(path: Path) -> None:
    from torch_mlir import ir

    module = parse_module(path.read_text(), name=path.name)
    context = ir.Context()
    context.allow_unregistered_dialects = True
    parsed = ir.Module.parse(print_module(module, generic=True), context)
    back = parse_module(parsed.operation.get_asm(print_generic_op_form=True))
    assert back.is_structurally_equivalent(module)


def test_malformed_text_is_refused() -> None:
    with pytest.raises(QCompilerError, match="MLIR does not parse"):
        parses_in_mlir("func.func @f( {")
