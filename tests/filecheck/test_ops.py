"""Every op of `qc` and `rt` against its two files, in process: `x.mlir` parses, prints as its CHECK lines say and
parses again; each part of `x-invalid.mlir` is refused with the message in its CHECK line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from filecheck.finput import FInput
from filecheck.matcher import Matcher
from filecheck.options import Options
from filecheck.parser import Parser
from xdsl.ir import Dialect

from qcompiler.errors import QCompilerError
from qcompiler.ir.qc import QC
from qcompiler.ir.rt import RT
from qcompiler.ir.text import parse_module, print_module

HERE = Path(__file__).parent
FILES = sorted(path for dialect in (QC, RT) for path in (HERE / dialect.name).glob("*.mlir"))
INVALID = [path for path in FILES if path.stem.endswith("-invalid")]
VALID = [path for path in FILES if path not in INVALID]
CHECK = re.compile(r"// CHECK: (.*)")


def name_of(path: Path) -> str:
    return f"{path.parent.name}.{path.stem}"


def filecheck(path: Path, text: str) -> None:
    options = Options(str(path))
    matcher = Matcher(options, FInput(str(path), text), Parser.from_opts(options))
    assert matcher.run() == 0, text


@pytest.mark.parametrize("path", VALID, ids=name_of)
def test_prints_as_its_file_says_and_parses_again(path: Path) -> None:
    module = parse_module(path.read_text(), name=path.name)
    text = print_module(module)
    filecheck(path, text)
    assert parse_module(text).is_structurally_equivalent(module)


@pytest.mark.parametrize("path", INVALID, ids=name_of)
def test_every_invalid_part_is_refused_with_its_message(path: Path) -> None:
    for part in path.read_text().split("// -----"):
        (message,) = CHECK.findall(part)
        with pytest.raises(QCompilerError) as refused:
            parse_module(part, name=path.name)
        assert message in str(refused.value)


@pytest.mark.parametrize("dialect", [QC, RT], ids=lambda dialect: dialect.name)
def test_every_op_has_a_valid_and_an_invalid_file(dialect: Dialect) -> None:
    wanted = {op.name + suffix for op in dialect.operations for suffix in ("", "-invalid")}
    assert wanted == {name_of(path) for path in FILES if path.parent.name == dialect.name}
