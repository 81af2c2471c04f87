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
