"""What `qc inspect --stage`, `--op` and `--diff` show of texts, without a compiler."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from qcompiler.errors import ArgumentError
from qcompiler.inspect.stage_texts import StageTexts, difference, ops_text, read_stages

BEFORE = """builtin.module {
  func.func @main(%0: tensor<4xf32>) -> tensor<4xf32> {
    %1 = qc.const @w {qc.path = "a.w"} : tensor<4xf32>
    %2 = qc.linear %0, %1 {qc.path = "a"} : tensor<4xf32> {
    ^bb0(%3: f32):
      %4 = math.tanh %3 : f32
      qc.yield %4
    }
    %5 = qc.softmax %2 {qc.path = "b"} : tensor<4xf32>
    func.return %5 : tensor<4xf32>
  }
}
"""
RENUMBERED = BEFORE.replace("%2", "%12").replace("%5", "%15").replace("%4", "%14").replace("%3", "%13")


def texts(**stages: str) -> StageTexts:
    return StageTexts(
        "x.qca", {f"ir/{number:02}-{name}.mlir": text for number, (name, text) in enumerate(stages.items())}
    )


def found(pattern: str, text: str = BEFORE) -> list[str]:
    return [op.text.strip() for op in texts(a=text).matching(re.compile(pattern), "a")["a"]]


def test_an_op_comes_with_its_regions_and_is_found_by_its_own_lines_only() -> None:
    (linear,) = found(r"qc\.linear")
    assert linear.startswith("%2 = qc.linear") and linear.endswith("qc.yield %4\n    }")
    assert found("tanh") == ["%4 = math.tanh %3 : f32"]
    assert found("nothing") == []


def test_ops_are_found_by_path_and_outermost_first() -> None:
    assert [each.partition(" {")[0] for each in found('path = "a')] == ["%1 = qc.const @w", "%2 = qc.linear %0, %1"]
    (whole,) = found("@main")
    assert whole.count("\n") == 9


def test_an_op_has_its_line() -> None:
    (op,) = texts(a=BEFORE).matching(re.compile("softmax"), "a")["a"]
    assert BEFORE.splitlines()[op.line - 1].strip() == op.text.strip()


def test_a_function_of_c_comes_with_the_comment_above_it() -> None:
    source = (
        "#include <x>\n// kernel 0: linear for a.b\nvoid qk_0(int n) {\n    if (n) {\n        go();\n    }\n}\nint y;\n"
    )
    assert found("linear for a", source) == [
        "// kernel 0: linear for a.b\nvoid qk_0(int n) {\n    if (n) {\n        go();\n    }\n}"
    ]


def test_stages_that_only_renumber_share_a_line() -> None:
    three = texts(one=BEFORE, two=RENUMBERED, three=RENUMBERED.replace("tanh", "exp"))
    text = ops_text(three.matching(re.compile("linear")))
    assert text.count("qc.linear") == 2 and "// after two: the same\n// after three: 1 op\n" in text


def test_renumbered_texts_do_not_differ() -> None:
    assert difference(BEFORE, RENUMBERED).hunks == ()


def test_another_operand_is_a_difference_though_only_a_number_changed() -> None:
    shown = difference(BEFORE, RENUMBERED.replace("qc.softmax %12", "qc.softmax %0"))
    assert (shown.removed, shown.added) == (1, 1)
    text = shown.text("one", "two")
    assert '-    %5 = qc.softmax %2 {qc.path = "b"}' in text and '+    %15 = qc.softmax %0 {qc.path = "b"}' in text


def test_a_deleted_op_that_nothing_reads_is_the_only_difference() -> None:
    line = "    %1 = qc.const @w"
    longer = re.sub(r"%([1-5])", lambda found: f"%{int(found[1]) + 1}", BEFORE).replace(
        "    %2 = qc.const @w", '    %1 = qc.dim "s" : index\n    %2 = qc.const @w'
    )
    assert line in BEFORE and line not in longer
    shown = difference(longer, BEFORE)
    assert (shown.removed, shown.added) == (1, 0), shown.text("a", "b")


def test_an_op_that_read_a_deleted_value_differs() -> None:
    first = "%1 = a.x : t\n%2 = a.cast %1 : t\n%3 = a.use %2 : t"
    second = "%1 = a.x : t\n%2 = a.use %1 : t"
    assert [line for hunk in difference(first, second).hunks for line in hunk if line[0] != " "] == [
        "-%2 = a.cast %1 : t",
        "-%3 = a.use %2 : t",
        "+%2 = a.use %1 : t",
    ]


def test_texts_of_any_shape_are_compared() -> None:
    for first, second in [("", ""), ("", "a"), ("a", ""), ("a\na", "a"), ("a", "a\na\na")]:
        shown = difference(first, second)
        assert shown.added - shown.removed == len(second.split()) - len(first.split())


def test_a_folder_of_dumps_is_read_as_a_program_is(tmp_path: Path) -> None:
    (tmp_path / "00-export.txt").write_text("graph\n")
    (tmp_path / "02-import.mlir").write_text(BEFORE + "\x1b[31m")
    (tmp_path / "notes.md").write_text("not a dump")
    stages = read_stages(tmp_path)
    assert stages.names == ("export", "import")
    assert stages.text("2") == BEFORE + "\\x1b[31m"
    with pytest.raises(ArgumentError, match="holds no stage 'dce'; it holds: export, import"):
        stages.text("dce")


def test_a_folder_without_dumps_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="without dumps"):
        read_stages(tmp_path)
