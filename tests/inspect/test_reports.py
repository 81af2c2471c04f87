"""Dumps, reports and the questions asked of a plan."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from qcompiler import errors
from qcompiler.inspect.checks import recomputed_per_call
from qcompiler.inspect.doctor import examine, problems
from qcompiler.inspect.dumps import StageDumps
from qcompiler.inspect.report import Choice, ProgramReport, choices_text
from qcompiler.ledger import Ledger, LedgerRow
from qcompiler.runtime import ProgramImage
from qcompiler.units import human_bytes


@pytest.fixture(scope="module")
def plans() -> ModuleType:
    """The module that builds plans by hand (conftest is no module that tests can import by name)."""
    spec = importlib.util.spec_from_file_location("inspect_plans", Path(__file__).parent / "conftest.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_stage_is_written_as_it_ends(tmp_path: Path) -> None:
    dumps = StageDumps(tmp_path / "dumps")
    dumps.add("export", "graph", 0.25, "txt")
    dumps.add("import", "module", 0.5)
    assert sorted(p.name for p in (tmp_path / "dumps").iterdir()) == ["00-export.txt", "01-import.mlir"]
    assert (tmp_path / "dumps" / "01-import.mlir").read_text() == "module"
    assert dumps.names == ("export", "import")
    assert dumps.text("import") == dumps.text("1") == dumps.text("01-import.mlir") == "module"
    assert dumps.timing().splitlines()[-1].split() == ["0.750", "s", "in", "all"]


def test_a_folder_of_dumps_is_no_mixture_of_two_compiles(tmp_path: Path) -> None:
    first = StageDumps(tmp_path, known=("export", "import", "dce"))
    for name in ("export", "import", "dce"):
        first.add(name, "first", 0.0)
    (tmp_path / "02-notes.txt").write_text("of the user")
    (tmp_path / "dce.mlir").write_text("of the user")
    (tmp_path / "2024-export.txt").write_text("of the user")
    second = StageDumps(tmp_path, known=("export", "import", "dce"))
    second.add("export", "second", 0.0, "txt")  # and then it fails
    kept = {file.name: file.read_text() for file in tmp_path.iterdir()}
    of_user = dict.fromkeys(("02-notes.txt", "dce.mlir", "2024-export.txt"), "of the user")
    assert kept == {"00-export.txt": "second", **of_user}


def test_an_unknown_stage_lists_the_stages_there_are() -> None:
    dumps = StageDumps()
    dumps.add("export", "graph", 0.0, "txt")
    with pytest.raises(errors.ArgumentError, match="no stage 'impart'; the stages are: export"):
        dumps.text("impart")


def test_equal_decisions_are_counted_and_keep_their_reason() -> None:
    choices = [Choice("select-kernels", f"layer.{i}", "linear m=1", "fits a register tile") for i in range(3)]
    text = choices_text([*choices, Choice("pack-weights", "embed", "canonical", "")])
    assert "select-kernels: linear m=1  [layer.0 and 2 more]\n      fits a register tile" in text
    assert "pack-weights: canonical  [embed]" in text


def test_a_report_shows_plan_memory_and_choices(image: ProgramImage) -> None:
    short = "fewer than two dimensions"
    rows = [
        LedgerRow(("a.weight",), (8, 64), "float32", "int8", "", 2048, 576, counts=True),
        LedgerRow(("a.bias",), (8,), "float32", "", short, 32, 32, counts=False),
        LedgerRow(("b.bias",), (8,), "float32", "", f"{short}; 4 bytes of padding", 32, 36, counts=False, padding=4),
        LedgerRow(("c",), (8,), "float32", "", "folded into b.bias", 32, 0, counts=False),
    ]
    report = ProgramReport("title", Ledger(tuple(rows), "int8"), image.plan, [Choice("s", "p", "what", "why")])
    text = str(report)
    assert text.splitlines()[:8] == [
        "title", report.ledger.totals(), "  int8: 1 tensor, 2.0 kB -> 576 B", "  float32: 2 tensors, 64 B -> 68 B",
        f"    2 x {short}, 68 B", "  dropped: 1 tensor, 32 B -> 0 B", "    1 x folded into b.bias, 0 B", "",
    ]  # fmt: skip
    assert text.split("\n\n")[1].startswith("Plan: 2 kernels, 1 entry point")
    assert text.endswith(f"\n\nLedger\n{report.ledger.table()}")
    assert "main(b in [1, 64]): 1 launch" in text
    assert "init, once at load: 1 step" in text
    assert report.as_dict()["arenas"]["y"] == {"kind": "output", "bytes": 1024}
    assert report.as_dict()["choices"] == [{"stage": "s", "path": "p", "what": "what", "why": "why"}]


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (999_949, "999.9 kB"),
        (999_950, "1.0 MB"),
        (3 << 29, "1.6 GB"),
        (10**18, "1000000.0 TB"),
    ],
)
def test_bytes_are_shown_in_the_largest_fitting_unit(count: int, text: str) -> None:
    assert human_bytes(count) == text


def test_a_kernel_that_depends_on_no_input_is_reported(plans: ModuleType) -> None:
    assert recomputed_per_call(plans.make_plan("x")) == []
    assert recomputed_per_call(plans.make_plan("table")) == ["main: add"]


def test_doctor_names_the_command_that_mends_a_lack() -> None:
    facts = examine()
    assert facts["python"].startswith("3.")
    lacking = problems({**facts, "compiler": "missing", "torch": "missing"})
    assert any("apt install g++" in line for line in lacking)
    assert any("pip install 'qcompiler[torch]'" in line for line in lacking)
    assert problems({**facts, "compiler": "g++", "torch": "2"}) == []


def test_doctor_reports_a_missing_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("QC_CXX", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    assert examine()["compiler"] == "missing"
