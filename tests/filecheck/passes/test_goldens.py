"""Every pass against its goldens. A file is named `<pass>.<case>.mlir`; its CHECK lines are the whole output.

// RUN: qc opt -p fold-views %s | filecheck %s
<the IR before>
// CHECK: <first line of the IR after>
// CHECK-NEXT: <the others>
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from qcompiler.cli import main
from qcompiler.inspect.opt import run_passes
from qcompiler.ir.text import parse_module, print_module
from qcompiler.passes.pipeline import STAGES

HERE = Path(__file__).parent
FILES = sorted(HERE.glob("*.mlir"))
RUN = re.compile(r"// RUN: qc opt (?:-p (\S+) )+%s")
MIDDLE = [s.name for s in STAGES[3:12]]


def split(text: str) -> tuple[str, str, list[str]]:
    """(the RUN line, the input, the expected lines)."""
    run, _, rest = text.partition("\n")
    lines = rest.splitlines()
    expected = [re.sub(r"^// CHECK(-NEXT)?: ", "", line) for line in lines if line.startswith("// CHECK")]
    return run, "\n".join(line for line in lines if not line.startswith("// CHECK")).strip(), expected


def check_lines(output: str) -> str:
    first, *others = output.strip().splitlines()
    return "\n".join([f"// CHECK: {first}", *(f"// CHECK-NEXT: {line}" for line in others)])


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_pass_makes_what_its_golden_says(path: Path, request: pytest.FixtureRequest) -> None:
    run, given, expected = split(path.read_text())
    assert RUN.match(run), f"the first line of {path.name} must be a RUN line"
    passes = re.findall(r"-p (\S+)", run)
    assert path.name.partition(".")[0] in [each.partition("{")[0] for each in passes]
    output = run_passes(given, ",".join(passes)).strip()
    if request.config.getoption("--update-goldens", default=False):
        path.write_text(f"{run}\n{given}\n\n{check_lines(output)}\n")
        return
    assert output.splitlines() == expected


def test_the_command_of_a_run_line_gives_the_golden(capsys: pytest.CaptureFixture[str]) -> None:
    path = HERE / "lower-conv2d.groups.mlir"
    run, _, expected = split(path.read_text())
    assert run.count(" -p ") > 1, "each -p counts, and not the last one alone"
    assert main([*run.removeprefix("// RUN: qc ").partition(" %s")[0].split(), str(path)]) == 0
    assert capsys.readouterr().out.strip().splitlines() == expected


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_what_a_pass_makes_parses_again(path: Path) -> None:
    run, given, _ = split(path.read_text())
    output = run_passes(given, ",".join(re.findall(r"-p (\S+)", run)))
    assert print_module(parse_module(output)) == output


def test_every_pass_in_the_middle_has_a_positive_and_a_negative_golden() -> None:
    cases = {(name, case.startswith("not-")) for name, _, case in (p.stem.partition(".") for p in FILES)}
    missing = {(name, negative) for name in MIDDLE for negative in (False, True)} - cases
    assert not missing
