"""Every op of the `rt` dialect against its two files, in process: `x.mlir` parses, prints as its CHECK lines say and
parses again; each part of `x-invalid.mlir` is refused with the message in its CHECK line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from filecheck.finput import FInput
from filecheck.matcher import Matcher
from filecheck.options import Options
from filecheck.parser import Parser

from qcompiler.errors import QCompilerError
from qcompiler.ir.rt import RT
from qcompiler.ir.text import parse_module, print_module

HERE = Path(__file__).parent
FILES = sorted(HERE.glob("*.mlir"))
INVALID = [path for path in FILES if path.stem.endswith("-invalid")]
VALID = [path for path in FILES if path not in INVALID]
CHECK = re.compile(r"// CHECK: (.*)")


def filecheck(path: Path, text: str) -> None:
    options = Options(str(path))
    matcher = Matcher(options, FInput(str(path), text), Parser.from_opts(options))
    assert matcher.run() == 0, text


@pytest.mark.parametrize("path", VALID, ids=lambda p: p.stem)
def test_prints_as_its_file_says_and_parses_again(path: Path) -> None:
    module = parse_module(path.read_text(), name=path.name)
    text = print_module(module)
    filecheck(path, text)
    assert parse_module(text).is_structurally_equivalent(module)


@pytest.mark.parametrize("path", INVALID, ids=lambda p: p.stem)
def test_every_invalid_part_is_refused_with_its_message(path: Path) -> None:
    for part in path.read_text().split("// -----"):
        (message,) = CHECK.findall(part)
        with pytest.raises(QCompilerError) as refused:
            parse_module(part, name=path.name)
        assert message in str(refused.value)


def test_every_op_has_a_valid_and_an_invalid_file() -> None:
    wanted = {op.name.removeprefix("rt.") + suffix for op in RT.operations for suffix in ("", "-invalid")}
    assert wanted == {path.stem for path in FILES}
