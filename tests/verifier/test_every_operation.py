"""What the checks take of a loop's body, all of it, becomes text that compiles, and that does nothing undefined.

Every operation with every combination of types that its rule accepts is a loop of its own: 500 loops, in few programs.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from handmade import Maker, loop, op, operand
from specmutants import judge_cpu

from qcompiler.kernels.cpu import emit
from qcompiler.kernels.cuda import emit as emit_cuda
from qcompiler.kernels.numbered import numbered_all
from qcompiler.plan.kernel import KernelSpec, ScalarOp
from qcompiler.plan.scalar_types import BITS, FLOATS, RULES
from qcompiler.runtime.compiler import find_compiler

DTYPES = tuple(BITS)
PREDICATES = {"arith.cmpf": ("olt", "oeq", "ueq", "ord", "uno", "false"), "arith.cmpi": ("slt", "ult", "eq", "sge")}


def combinations() -> Iterator[tuple[tuple[str, ...], ScalarOp]]:
    """Types of arguments (all alike, or a condition before them), and an operation that takes them."""
    groups = [
        (),
        *((kind,) * count for kind in DTYPES for count in (1, 2, 3)),
        *(("i1", kind, kind) for kind in DTYPES),
    ]
    for arguments in dict.fromkeys(groups):
        names = tuple(f"a{i}" for i in range(len(arguments)))
        for name, rule in RULES.items():
            for dtype in DTYPES:
                for predicate in PREDICATES.get(name, (None,)):
                    value = "1" if name == "arith.constant" and dtype not in FLOATS else (1.0).hex()
                    more = {"value": value} if name == "arith.constant" else {}
                    axis = {"axis": 0} if name == "linalg.index" else {}
                    made = op("r", name, *names, dtype=dtype, predicate=predicate, **more, **axis)
                    if rule(made, arguments):
                        yield arguments, made


def loops() -> list[KernelSpec]:
    """``y = op(x…)``; indices are loaded, and stored, as i64."""
    made = []
    for number, (arguments, operation) in enumerate(combinations()):
        before, after, stored = [], [], operation.dtype
        for i, kind in enumerate(arguments):
            if kind == "index":
                before.append(op(f"a{i}", "arith.index_cast", f"in{i}", dtype="index"))
        if operation.dtype == "index":
            after.append(op("z", "arith.index_cast", "r", dtype="i64"))
            stored = "i64"
        kinds = ["i64" if kind == "index" else kind for kind in arguments]
        operands = [*(operand(f"x{i}", ("s",), dtype=kind) for i, kind in enumerate(kinds)),
                    operand("y", ("s",), "w", stored)]  # fmt: skip
        spec = loop(f"k{number}", ("s",), operands, ((1,),) * len(operands), (), symbols=("s",), yields=("z",))
        names = [f"a{i}" if kind != "index" else f"in{i}" for i, kind in enumerate(arguments)]
        inputs = (*zip(names, kinds, strict=True), ("out", stored))
        body = type(spec.body.body)(  # type: ignore[union-attr]
            inputs=inputs, ops=(*before, operation, *after), yields=("z" if after else "r",)  # type: ignore[arg-type]
        )  # fmt: skip
        made.append(type(spec)(**{**fields(spec), "body": type(spec.body)(**{**fields(spec.body), "body": body})}))
    return made


def fields(record: object) -> dict[str, object]:
    return {name: getattr(record, name) for name in record.__struct_fields__}  # type: ignore[attr-defined]


def compiles(text: str, folder: Path, *flags: str) -> None:
    source = folder / "all.cpp"
    source.write_text(text)
    command = [*find_compiler().command, "-std=c++17", "-fsyntax-only", "-w", *flags, str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:4000]


def test_there_are_all_operations_and_hundreds_of_combinations() -> None:
    found = list(combinations())
    assert {operation.op for _, operation in found} == set(RULES)
    assert len(found) > 450


def test_all_that_is_accepted_compiles_for_the_cpu(tmp_path: Path) -> None:
    specs = tuple(loops())
    texts = [emit.emit_numbered(spec, number, "x86-64-v3") for number, spec in enumerate(specs)]
    assert any("lanes along" in text for text in texts) and any("scalar (" in text for text in texts)
    compiles("\n".join([emit.prelude(specs), *texts]), tmp_path, "-march=x86-64-v3")


def test_all_that_is_accepted_compiles_for_the_simulated_gpu(tmp_path: Path) -> None:
    compiles(emit_cuda.emit_sim_module(numbered_all(loops()), "sm_80"), tmp_path, "-Wno-unknown-pragmas")


@pytest.mark.slow
def test_no_value_makes_an_operation_undefined(tmp_path: Path) -> None:
    """Run with the sanitisers on numbers of all kinds: the smallest and largest, zero, infinities, NaN."""
    jobs = [judge_cpu.job_of(Maker({"s": (1, 40)}).kernel(spec).image("x86-64-v3")) for spec in loops()]
    for start in range(0, len(jobs), 64):
        part = jobs[start : start + 64]
        found = judge_cpu.judge(part, tmp_path, "-O0", "-fsanitize=float-cast-overflow")
        wrong = [(said, spec.specs) for said, spec in zip(found, part, strict=True) if said != "clean"]
        assert not wrong, wrong[:3]
