"""The passes on schedules against their files, in process: RUN names the passes, CHECK lines say what comes out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from filecheck.finput import FInput
from filecheck.matcher import Matcher
from filecheck.options import Options
from filecheck.parser import Parser

from qcompiler.errors import ScheduleError
from qcompiler.ir.context import QCContext
from qcompiler.ir.text import parse_module, print_module
from qcompiler.passes.pipeline import load_pass

FILES = sorted(Path(__file__).parent.glob("*.mlir"))
INVALID = [path for path in FILES if path.stem.endswith("-invalid")]
VALID = [path for path in FILES if path not in INVALID]


def run(path: Path) -> str:
    source = path.read_text()
    found = re.search(r"^// RUN: qc opt -p (\S+) ", source)
    assert found is not None
    module = parse_module(source, name=path.name)
    for name in found.group(1).split(","):
        load_pass(name)().apply(QCContext.default(), module)
        module.verify()
    return print_module(module)


@pytest.mark.parametrize("path", VALID, ids=lambda p: p.stem)
def test_output_is_as_the_file_says(path: Path) -> None:
    options = Options(str(path))
    text = run(path)
    assert Matcher(options, FInput(str(path), text), Parser.from_opts(options)).run() == 0, text


@pytest.mark.parametrize("path", INVALID, ids=lambda p: p.stem)
def test_unsound_schedule_is_refused(path: Path) -> None:
    found = re.search(r"^// ERROR: (.*)$", path.read_text(), re.MULTILINE)
    assert found is not None
    with pytest.raises(ScheduleError, match=re.escape(found.group(1))):
        run(path)
