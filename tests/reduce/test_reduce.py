"""`qc reduce` on passes with planted bugs. A candidate runs in a fork of this process, so it has the same bug."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp

from qcompiler.cli import main
from qcompiler.inspect.opt import run_passes
from qcompiler.ir.text import parse_module
from qcompiler.passes.cse import CsePass
from qcompiler.passes.dce import DcePass
from qcompiler.passes.fuse_elementwise import FuseElementwisePass
from qcompiler.passes.pipeline import parse_passes
from qcompiler.reduce import reducer as reducing
from qcompiler.reduce.case import Case
from qcompiler.reduce.ddmin import minimise
from qcompiler.reduce.failure import observe
from qcompiler.reduce.reducer import Reducer
from qcompiler.reduce.sizes import smaller

Bug = Callable[[ModuleOp], None]


def program(layers: int) -> str:
    """A chain of layers, each a softmax of a softmax."""
    kind = 'tensor<?x64xf32, #qc.dims<["s", 64]>>'
    lines = [f"func.func @main(%x0: {kind}) -> {kind} attributes {{qc.ranges = {{s = array<i64: 1, 32>}}}} {{"]
    for number in range(layers):
        path = f'qc.path = "layers.{number}"'
        lines += [
            f"  %h{number} = qc.softmax %x{number} {{axis = 1, {path}}} : {kind}",
            f"  %x{number + 1} = qc.softmax %h{number} {{axis = 1, {path}}} : {kind}",
        ]
    return "\n".join([*lines, f"  func.return %x{layers} : {kind}", "}"])


def softmaxes(module: ModuleOp) -> int:
    return sum(op.name == "qc.softmax" for op in module.walk())


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Callable[[Bug], None]:
    """Puts a bug at the beginning of the pass dce."""

    def planted(bug: Bug) -> None:
        real = DcePass.apply

        def apply(self: DcePass, ctx: Context, op: ModuleOp) -> None:
            bug(op)
            real(self, ctx, op)

        monkeypatch.setattr(DcePass, "apply", apply)

    return planted


def fails_with_softmax(module: ModuleOp) -> None:
    if count := softmaxes(module):
        raise ValueError(f"a bug with {count} of them")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("QC_QUIET", "1")
    (tmp_path / "in.mlir").write_text(f"// RUN: qc opt -p cse,dce {tmp_path}/in.mlir\n{program(3)}")
    return tmp_path


def test_an_error_in_a_long_program_becomes_one_op_in_a_golden_that_fails(
    folder: Path, plant: Callable[[Bug], None]
) -> None:
    plant(fails_with_softmax)
    (folder / "long.mlir").write_text(f"// RUN: qc opt -p cse,dce long.mlir\n{program(40)}")
    assert main(["reduce", "long.mlir"]) == 0
    text = (folder / "dce.reduced.mlir").read_text()
    assert text.startswith(
        "// RUN: qc opt -p dce %s | filecheck %s\n// error in dce: ValueError: a bug with 1 of them\n"
    )
    assert "82 ops, now 3" in text
    module = parse_module(text)
    assert softmaxes(module) == 1 and "tensor<?x1xf32" in text and "qc.path" not in text
    with pytest.raises(ValueError, match="a bug with 1 of them"):
        run_passes(text, "dce")
    assert (
        main(["reduce", "dce.reduced.mlir", "-o", "again.mlir"]) == 0
    )  # its own RUN line is read, and nothing is left
    assert (folder / "again.mlir").read_text().partition("builtin")[2] == text.partition("builtin")[2]


def test_a_crash_is_the_same_only_if_the_signal_and_the_pass_are(folder: Path, plant: Callable[[Bug], None]) -> None:
    plant(lambda module: os.kill(os.getpid(), signal.SIGSEGV) if softmaxes(module) else None)
    assert main(["reduce", "in.mlir"]) == 0
    assert "// signal in dce: the process ended by SIGSEGV" in (folder / "dce.reduced.mlir").read_text()


@pytest.mark.slow
def test_a_candidate_that_fails_in_another_way_is_not_kept(folder: Path, plant: Callable[[Bug], None]) -> None:
    def bug(module: ModuleOp) -> None:
        if softmaxes(module) < 3:
            raise KeyError("another bug, of smaller programs")
        raise ValueError("the bug")

    plant(bug)
    assert main(["reduce", "in.mlir"]) == 0
    text = (folder / "dce.reduced.mlir").read_text()
    assert softmaxes(parse_module(text)) == 3 and "ValueError: the bug" in text


@pytest.mark.parametrize(
    ("run", "message"),
    [
        ('-p "cse', "the RUN line in its first line cannot be read: No closing quotation"),
        ("-p cse --context", "cannot be read: argument --context"),
        ("-p cse --verify-each bits", "cannot be read: argument --verify-each"),
    ],
)
def test_a_run_line_that_cannot_be_read_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], run: str, message: str
) -> None:
    (folder / "bad.mlir").write_text(f"// RUN: qc opt {run}\nbuiltin.module {{}}\n")
    assert main(["reduce", "bad.mlir"]) == 1
    assert message in capsys.readouterr().err and not list(folder.glob("*.reduced.mlir"))


def test_a_wrong_answer_of_a_program_that_does_not_run_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "empty.mlir").write_text("builtin.module {}\n")
    assert main(["reduce", "empty.mlir", "-p", "cse", "--verify-each", "numerics"]) == 1
    assert "does not run before any pass" in capsys.readouterr().err and not list(folder.glob("*.reduced.mlir"))


def test_what_does_not_fail_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reduce", "in.mlir"]) == 1
    assert "there is nothing to reduce: cse, dce runs on this IR without a failure" in capsys.readouterr().err
    assert not (folder / "dce.reduced.mlir").exists()


def test_a_failure_that_comes_and_goes_is_refused(
    folder: Path, plant: Callable[[Bug], None], capsys: pytest.CaptureFixture[str]
) -> None:
    seen = folder / "seen"

    def bug(_: ModuleOp) -> None:  # a file, since each run is a process of its own
        if seen.exists():
            seen.unlink()
        else:
            seen.touch()
            raise ValueError("now and then")

    plant(bug)
    assert main(["reduce", "in.mlir"]) == 1
    assert "the failure comes and goes: 'error in dce: ValueError: now and then' once, and 'no failure'" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("content", "arguments", "message"),
    [
        (b"import torch\n", ["-p", "dce"], "is not a valid module"),
        (b"\xec\x00", ["-p", "dce"], "cannot read"),
        (b"builtin.module {}\n", [], "does not say which passes fail"),
        (b"builtin.module {}\n", ["-p", "nothing"], "no pass 'nothing'"),
        (b"// RUN: qc opt -p dce %s --context %S/gone\nbuiltin.module {}\n", [], "gone"),
    ],
)
def test_what_cannot_be_reduced_is_one_message(
    folder: Path, capsys: pytest.CaptureFixture[str], content: bytes, arguments: list[str], message: str
) -> None:
    (folder / "bad.mlir").write_bytes(content)
    assert main(["reduce", "bad.mlir", *arguments]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("qc: ") and message in err and "Traceback" not in err


def test_an_interrupt_leaves_the_smallest_so_far(
    folder: Path, plant: Callable[[Bug], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(fails_with_softmax)
    ahead, calls = reducing.observe, []

    def interrupted(case: Case, seconds: float) -> object:
        calls.append(case.size)
        if len(calls) == 12:
            raise KeyboardInterrupt
        return ahead(case, seconds)

    monkeypatch.setattr(reducing, "observe", interrupted)
    assert main(["reduce", "in.mlir"]) == 130
    text = (folder / "dce.reduced.mlir").read_text()
    assert 1 <= softmaxes(parse_module(text)) < 6
    with pytest.raises(ValueError, match="a bug with"):
        run_passes(text, "dce")


@pytest.mark.slow
def test_a_wrong_answer_is_found_again_by_its_inputs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(self: FuseElementwisePass, ctx: Context, op: ModuleOp) -> None:
        for each in list(op.walk()):
            if each.name == "math.tanh":
                each.results[0].replace_all_uses_with(each.operands[0])

    monkeypatch.setattr(FuseElementwisePass, "apply", wrong)
    kind, maps = "tensor<2x8xf32>", "affine_map<(d0, d1) -> (d0, d1)>"
    loop = f'indexing_maps = [{maps}, {maps}], iterator_types = ["parallel", "parallel"]'
    (folder / "wrong.mlir").write_text(f"""func.func @main(%0: {kind}) -> {kind} {{
      %1 = qc.softmax %0 {{axis = 1}} : {kind}
      %2 = tensor.empty() : {kind}
      %3 = linalg.generic {{{loop}}} ins(%0 : {kind}) outs(%2 : {kind}) {{
      ^bb0(%4: f32, %5: f32):
        %6 = math.exp %4 : f32
        %7 = math.tanh %6 : f32
        linalg.yield %7 : f32
      }} -> {kind}
      %8 = qc.softmax %3 {{axis = 1}} : {kind}
      func.return %8 : {kind}
    }}""")
    assert main(["reduce", "wrong.mlir", "-p", "cse,fuse-elementwise", "--verify-each", "numerics"]) == 0
    text = (folder / "fuse-elementwise.reduced.mlir").read_text()
    assert re.search(r"^// RUN: qc opt -p fuse-elementwise %s --verify-each numerics\n// wrong answer", text)
    assert "math.tanh" in text and "softmax" not in text and "math.exp" not in text


def test_earlier_passes_are_replaced_by_the_ir_that_they_make(
    folder: Path, plant: Callable[[Bug], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def marks(self: CsePass, ctx: Context, op: ModuleOp) -> None:
        for each in op.walk():
            if each.name == "qc.softmax":
                each.attributes["marked"] = op.attributes.get("none", each.properties["axis"])

    def bug(module: ModuleOp) -> None:
        if any("marked" in op.attributes for op in module.walk()):
            raise ValueError("a bug with marks")

    monkeypatch.setattr(CsePass, "apply", marks)
    plant(bug)
    assert main(["reduce", "in.mlir"]) == 0
    text = (folder / "dce.reduced.mlir").read_text()
    assert text.startswith("// RUN: qc opt -p dce %s") and text.count("marked") == 1


def test_a_hang_is_killed_at_its_limit_and_told_apart_from_an_error(plant: Callable[[Bug], None]) -> None:
    plant(lambda module: time.sleep(60))
    case = Case(parse_module(program(1)), tuple(parse_passes("cse,dce")))
    began = time.monotonic()
    found = observe(case, 0.5)
    assert found is not None and (found.kind, found.where) == ("hang", "dce")
    assert time.monotonic() - began < 30  # and not 60: the child was killed


@pytest.mark.slow
def test_a_hang_is_reduced(folder: Path, plant: Callable[[Bug], None]) -> None:
    plant(lambda module: time.sleep(600) if softmaxes(module) else None)
    assert main(["reduce", "in.mlir", "--timeout", "1"]) == 0
    text = (folder / "dce.reduced.mlir").read_text()
    assert softmaxes(parse_module(text)) == 1 and "// hang in dce" in text


def test_memory_without_end_is_a_failure_of_the_child_alone(plant: Callable[[Bug], None]) -> None:
    plant(lambda module: bytearray(1 << 42) and None)
    found = observe(Case(parse_module(program(1)), tuple(parse_passes("dce"))), 20)
    assert found is not None and found.kind == "no memory"


def test_sizes_become_smaller_together_with_their_multiples() -> None:
    text = """
    func.func @main(%0: tensor<4x192xf32>, %1: tensor<4x64xf32>) -> tensor<4x64xf32> {
      %2 = "test.op"(%0) : (tensor<4x192xf32>) -> tensor<4x64xf32>
      func.return %2 : tensor<4x64xf32>
    }"""
    found = [str(case.module) for case in smaller(Case(parse_module(text), ()))]
    assert any("tensor<4x3xf32>" in each and "tensor<4x1xf32>" in each for each in found)
    for each in found:
        parse_module(each)


def test_ddmin_finds_the_two_things_that_are_needed_together() -> None:
    tried = 0

    module = parse_module(program(1))

    def case_of(numbers: frozenset[int]) -> Case:
        case = Case(module, ())
        object.__setattr__(case, "numbers", numbers)
        return case

    def without(case: Case, gone: frozenset[int]) -> Case:
        have = sorted(case.numbers)  # type: ignore[attr-defined]
        return case_of(frozenset(each for place, each in enumerate(have) if place not in gone))

    def accept(case: Case) -> bool:
        nonlocal tried
        tried += 1
        return {3, 70} <= case.numbers  # type: ignore[attr-defined]

    found = minimise(case_of(frozenset(range(100))), lambda c: len(c.numbers), without, accept)  # type: ignore
    assert found.numbers == {3, 70}  # type: ignore[attr-defined]
    assert tried < 100


def test_the_reducer_counts_what_it_tries(plant: Callable[[Bug], None]) -> None:
    plant(fails_with_softmax)
    made = Reducer.of(Case(parse_module(program(3)), tuple(parse_passes("dce"))))
    made.reduce()
    assert made.best.size == 3 and made.kept <= made.tried
    assert made.summary().startswith("8 ops, now 3; ")
