"""`qc inspect`, `qc opt` and `qc doctor`."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from qcompiler.cli import main
from qcompiler.plan.plan import from_json

FUNCTION = """
func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> {
  return %x : tensor<4xf32>
}
"""


def stdout(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(list(arguments)) == 0
    out: str = capsys.readouterr().out
    return out


def test_inspect_shows_signature_ranges_and_ledger(program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = stdout(capsys, "inspect", str(program))
    assert "(x: f32[b, 64]) -> dict(y=f32[b, 8])" in text
    assert "b in [1, 16]" in text and "recipe nf4" in text


def test_inspect_prints_json_plan_and_ir(program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = json.loads(stdout(capsys, "inspect", str(program), "--json"))
    assert facts["stages"][0] == "import" and facts["stages"][-1] == "emit-kernels"
    plan = from_json(stdout(capsys, "inspect", str(program), "--plan"))
    assert plan.entries[0].symbols[0].name == "b"
    assert "qc.linear" in stdout(capsys, "inspect", str(program), "--ir", "fuse-dequant-matmul")
    assert "extern" in stdout(capsys, "inspect", str(program), "--ir", "emit-kernels")


def test_inspect_lists_the_stages_when_one_is_unknown(program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(program), "--ir", "nothing"]) == 1
    assert "it holds: import, " in capsys.readouterr().err


def test_inspect_shows_the_ledger_the_kernels_an_op_and_a_difference(
    program: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = stdout(capsys, "inspect", str(program), "--ledger")
    assert "up.weight" in ledger and "promised 6.5" in ledger
    assert len(json.loads(stdout(capsys, "inspect", str(program), "--ledger", "--json"))["rows"]) == 4
    kernels = json.loads(stdout(capsys, "inspect", str(program), "--kernels", "--json"))
    text = stdout(capsys, "inspect", str(program), "--kernels")
    assert kernels and all(each["name"] in text for each in kernels)
    op = stdout(capsys, "inspect", str(program), "--op", 'path = "up"', "--stage", "fuse-epilogues")
    assert op.count("qc.linear") == 1 and "math.erf" in op
    shown = stdout(capsys, "inspect", str(program), "--diff", "pull-slices", "fuse-epilogues")
    assert "linalg.generic" in shown and "+      qc.yield" in shown
    (both,) = {json.loads(stdout(capsys, "inspect", str(program), "--diff", "dce", "dce", "--json"))["added"]}
    assert both == 0


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--op", "("], 2, "is not a regular expression"),
        (["--op", "no such op"], 1, "no op of"),
        (["--op", "linear", "--ledger"], 1, "--op searches the texts of stages"),
        (["--stage", "dce", "--plan"], 2, "not allowed with"),
        (["--diff", "dce", "nothing"], 1, "no stage 'nothing'"),
        (["--diff", "import", "dce", "--op", "no such op"], 1, "matches after import or dce"),
        (["--stage", "dce", "--dim", "b=1"], 1, "are of a timeline"),
        (["--ledger", "--entry", "main"], 1, "are of a timeline"),
        (["--perfetto", "trace.json", "--between", "0,1"], 1, "add --timeline"),
    ],
)
def test_what_inspect_cannot_show_is_one_message(
    program: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], status: int, message: str
) -> None:
    try:
        ended = main(["inspect", str(program), *arguments])
    except SystemExit as exit:
        ended = int(str(exit.code))
    assert ended == status and message in capsys.readouterr().err


def test_a_trace_is_written_beside_every_other_part(
    program: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.json"
    rows = json.loads(stdout(capsys, "inspect", str(program), "--ledger", "--json", "--perfetto", str(trace)))["rows"]
    assert len(rows) == 4 and json.loads(trace.read_text())


def test_the_ir_is_printed_after_the_passes_that_are_named_or_that_changed_it(
    program: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in.mlir").write_text(stdout(capsys, "inspect", str(program), "--stage", "dce"))
    passes = ["opt", str(tmp_path / "in.mlir"), "-p", "cse,fuse-dequant-matmul,dce"]
    monkeypatch.setenv("QC_PRINT_AFTER", "import,cse")  # as for a compile: import is no pass
    assert main(passes) == 0
    assert [each for each in capsys.readouterr().err.splitlines() if "-----" in each] == ["// ----- after cse"]
    assert main([*passes, "--print-after-change", "--timing"]) == 0
    errors = capsys.readouterr().err
    assert "// ----- after fuse-dequant-matmul\n" in errors and " s  in all" in errors
    assert main([*passes, "--print-after", "fuse-dequant"]) == 1
    assert "did you mean 'fuse-dequant-matmul'?" in capsys.readouterr().err


def test_opt_lists_every_pass_with_its_purpose(capsys: pytest.CaptureFixture[str]) -> None:
    lines = stdout(capsys, "opt", "--list").splitlines()
    names = [line.split()[0] for line in lines]
    assert {"canonicalize", "cse", "dce", "fuse-epilogues", "lower-to-rt", "verify-schedule"} <= set(names)
    assert all(len(line.split()) > 2 for line in lines), "a pass without a description"


@pytest.mark.parametrize("syntax", [[], ["--generic"], ["--mlir"]])
def test_opt_prints_what_it_can_read_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], syntax: list[str]
) -> None:
    (tmp_path / "in.mlir").write_text(FUNCTION)
    first = stdout(capsys, "opt", str(tmp_path / "in.mlir"), *syntax)
    (tmp_path / "again.mlir").write_text(first)
    assert stdout(capsys, "opt", str(tmp_path / "again.mlir"), *syntax) == first


@pytest.mark.parametrize("stage", ["import", "fuse-elementwise", "lower-to-rt", "verify-schedule"])
def test_the_stages_of_a_file_round_trip_through_opt(
    program: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], stage: str
) -> None:
    text = stdout(capsys, "inspect", str(program), "--ir", stage)
    (tmp_path / "stage.mlir").write_text(text)
    assert stdout(capsys, "opt", str(tmp_path / "stage.mlir")).strip() == text.strip()


def test_opt_runs_passes_over_standard_input(
    program: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = stdout(capsys, "inspect", str(program), "--ir", "import")
    assert "qc.dequantize" in text
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    out = stdout(capsys, "opt", "-p", "canonicalize,cse,dce,fuse-dequant-matmul,dce")
    assert "qc.linear" in out and "qc.dequantize" not in out


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        ("func.func @main(", [], "not a valid module"),
        (FUNCTION, ["-p", "fuse-everything"], "no pass 'fuse-everything'; the passes are: "),
        (None, [], "cannot read"),
    ],
)
def test_what_opt_cannot_do_is_one_message_and_status_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, arguments: list[str], message: str
) -> None:
    path = tmp_path / "in.mlir"
    if text is not None:
        path.write_text(text)
    status = main(["opt", str(path), *arguments])
    out, err = capsys.readouterr()
    assert (status, out) == (1, "")
    assert err.startswith("qc: ") and message in err


def test_doctor_prints_facts_as_text_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert "isa" in stdout(capsys, "doctor", "--no-measure")
    facts = json.loads(stdout(capsys, "doctor", "--json", "--no-measure"))
    assert {"python", "machine", "isa", "threads", "compiler", "cache", "torch", "xdsl"} <= set(facts)


@pytest.mark.parametrize("arguments", [[], ["unknown"], ["run"], ["compile"]])
def test_a_wrong_command_line_shows_the_usage(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: qc" in capsys.readouterr().err
