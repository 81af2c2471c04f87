"""Program files whose regions of torch operators were made to do harm: refused when the file is loaded.

Each differs in one place from a sound program of one linear, one torch call and one linear.  What only a run can show,
results of another shape or type than the plan says, is an error before the program's memory is written.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace as changed
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

import qcompiler as qc
from qcompiler.errors import PlanError, QCompilerError, RuntimeFailure, ScheduleError, TrustError
from qcompiler.inspect.files import summary
from qcompiler.plan.plan import Plan, TorchCall
from qcompiler.plan.torch_regions import TensorMemory, TorchOp, TorchRegion, runner
from qcompiler.plan.verify import verify_plan
from qcompiler.runtime import loaded
from qcompiler.runtime.image import ProgramImage
from qcompiler.runtime.program_file import save_image

replace = msgspec.structs.replace


class Sound(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.lgamma(self.first(x)))


@pytest.fixture(scope="module")
def image() -> ProgramImage:
    torch.manual_seed(0)
    program = qc.qcompile(Sound().eval(), (torch.rand(3, 8),), dynamic_shapes={"x": {0: ("b", 1, 4)}}, fallback="torch")
    return program.image


def the_call(plan: Plan) -> TorchCall:
    (call,) = (step for step in plan.entries[0].steps if isinstance(step, TorchCall))
    return call


def with_call(plan: Plan, call: TorchCall) -> Plan:
    entry = plan.entries[0]
    steps = tuple(call if isinstance(step, TorchCall) else step for step in entry.steps)
    return replace(plan, entries=(replace(entry, steps=steps),))


def with_region(plan: Plan, region: TorchRegion) -> Plan:
    return with_call(plan, replace(the_call(plan), region=region))


def region(*ops: TorchOp, outputs: tuple[int, ...] = (1,)) -> TorchRegion:
    return TorchRegion(inputs=1, ops=ops, outputs=outputs)


def op(target: str, *args: Any, results: int = 1, **kwargs: Any) -> TorchOp:
    return TorchOp(target=target, args=args, kwargs=kwargs, results=results)


def loads(image: ProgramImage, plan: Plan, folder: Path, **options: Any) -> Any:
    path = folder / "attack.qca"
    save_image(changed(image, plan=plan), path)
    return qc.load(path, **options)


def refusal(image: ProgramImage, plan: Plan, folder: Path, **options: Any) -> QCompilerError:
    """The error of loading it, before anything is built."""

    def reached(*_: Any, **__: Any) -> Any:
        raise AssertionError("the plan passed its checks")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loaded.registry, "backend", reached)
        with pytest.raises(QCompilerError) as caught:
            loads(image, plan, folder, **options)
    return caught.value


X = {"v": 0}


def test_the_sound_program_runs(image: ProgramImage, tmp_path: Path) -> None:
    x = np.random.default_rng(0).random((2, 8), np.float32)
    assert np.array_equal(loads(image, image.plan, tmp_path)(x), loaded.LoadedProgram.from_image(image)(x))


UNTRUSTED = {
    "reads and writes a file": op("aten.from_file.default", "name", True, 4),
    "in place": op("aten.add_.Tensor", X, 1),
    "into an argument": op("aten.add.out", X, 1),
    "storage": op("aten.set_.source_Tensor", X, X),
    "memory nobody wrote": op("aten.empty_like.default", X),
    "beyond the storage": op("aten.as_strided.default", X, [1 << 30], [1]),
    "random": op("aten.rand_like.default", X),
    "unchecked indices": op("aten._unsafe_index.Tensor", X, [X]),
    "another library": op("quantized.linear.default", X),
    "a Python module": op("os.system.default", "ls"),
    "attributes": op("aten.__class__.default", X),
    "profiler": op("profiler._record_function_enter.default", "x"),
}


@pytest.mark.parametrize("name", UNTRUSTED)
def test_an_operator_that_is_not_listed_is_refused(image: ProgramImage, tmp_path: Path, name: str) -> None:
    error = refusal(image, with_region(image.plan, region(UNTRUSTED[name])), tmp_path)
    assert isinstance(error, TrustError) and UNTRUSTED[name].target in str(error)


@pytest.mark.parametrize(
    "target", ["os.system.default", "aten.abs.__globals__", "aten.abs.__call__", "aten.add_.Tensor", "aten.add.out"]
)
def test_trust_does_not_make_an_operator_of_what_is_none(image: ProgramImage, tmp_path: Path, target: str) -> None:
    plan = with_region(image.plan, region(op(target, X, 1)))
    assert isinstance(refusal(image, plan, tmp_path, trust_operators=[target]), PlanError)


MALFORMED = {
    "overload that writes": op("aten.sort.values", X),
    "overload of lists": op("aten.add.t", [1], [2]),
    "no such overload": op("aten.abs.nothing", X),
    "an attribute as overload": op("aten.abs.__class__", X),
    "text for a number": op("aten.roll.default", X, "shifts"),
    "number for a list of tensors": op("aten.cat.default", 7),
    "too few": op("aten.add.Tensor", X),
    "too many": op("aten.abs.default", X, X),
    "unknown keyword": op("aten.abs.default", X, other=1),
    "twice": op("aten.add.Tensor", X, 1, other=2),
    "device": op("aten.zeros_like.default", X, device=None),
    "later value": op("aten.abs.default", {"v": 1}),
    "negative value": op("aten.abs.default", {"v": -1}),
    "size that is not there": op("aten.roll.default", X, {"size": 0}),
    "unknown dtype": op("aten._to_copy.default", X, dtype={"dtype": "quint8"}),
    "unknown reference": op("aten.abs.default", {"module": "os"}),
    "two references": op("aten.abs.default", {"v": 0, "size": 0}),
    "a number beyond 64 bits": op("aten.add.Tensor", X, 1 << 63),
    "text with a path": op("aten.pad.default", X, [1, 1], "/etc/passwd"),
    "no results": op("aten.abs.default", X, results=0),
    "a million results": op("aten.abs.default", X, results=1_000_000),
    "a name that is none": op("abs", X),
    "branches without a condition": replace(op("aten.abs.default", X), branches=(region(op("aten.abs.default", X)),)),
    "one branch": replace(op("cond", X, X), branches=(region(op("aten.abs.default", X)),)),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_call_that_torchs_schema_does_not_allow_is_refused(image: ProgramImage, tmp_path: Path, name: str) -> None:
    assert isinstance(refusal(image, with_region(image.plan, region(MALFORMED[name])), tmp_path), QCompilerError)


def test_a_listed_operator_inside_a_branch_is_checked_too(image: ProgramImage, tmp_path: Path) -> None:
    bad = region(op("aten.from_file.default", "name", True, 4))
    good = region(op("aten.abs.default", X))
    call = replace(op("cond", X, X), branches=(good, bad))
    assert isinstance(refusal(image, with_region(image.plan, region(call)), tmp_path), TrustError)


def test_conditions_without_end_are_refused(image: ProgramImage, tmp_path: Path) -> None:
    inner = region(op("aten.abs.default", X))
    for _ in range(40):
        inner = region(replace(op("cond", X, X), branches=(inner, inner)))
        if len(msgspec.json.encode(inner)) > 200_000:
            break
    assert isinstance(refusal(image, with_region(image.plan, inner), tmp_path), QCompilerError)


@pytest.mark.parametrize("depth", [20, 100, 200, 450])
def test_nested_plans_are_refused_in_our_words(image: ProgramImage, tmp_path: Path, depth: int) -> None:
    """Lists in arguments, and conditions, as deep as the decoder of JSON takes them; `inspect` refuses them as well."""
    deep: Any = 1
    for _ in range(depth):
        deep = [deep]
    inner = region(op("aten.abs.default", X))
    for _ in range(min(depth, 150)):
        inner = region(replace(op("cond", X, X), branches=(inner, region(op("aten.abs.default", X)))))
    for each in (region(op("aten.roll.default", X, deep)), inner):
        path = tmp_path / "attack.qca"
        save_image(changed(image, plan=with_region(image.plan, each)), path)
        with pytest.raises(QCompilerError):
            qc.load(path)
        with contextlib.suppress(QCompilerError):
            summary(path)


def _inputs(change: Callable[[Any], Any]) -> Callable[[TorchCall], TorchCall]:
    return lambda call: replace(call, inputs=tuple(map(change, call.inputs)))


def _outputs(change: Callable[[Any], Any]) -> Callable[[TorchCall], TorchCall]:
    return lambda call: replace(call, outputs=tuple(map(change, call.outputs)))


SCHEDULES: dict[str, tuple[str, Callable[[TorchCall], TorchCall]]] = {
    "beyond the buffer": ("view-outside-buffer", _outputs(lambda v: replace(v, offset=1))),
    "strided input": ("torch-operand", _inputs(lambda v: replace(v, strides=(8, 2)))),
    "strided output": ("torch-operand", _outputs(lambda v: replace(v, shape=("b", 4), strides=(16, 1)))),
    "half of the result": ("unwritten-read", _outputs(lambda v: replace(v, shape=("b", 8), strides=(8, 1)))),
    "another count of inputs": ("torch-region", lambda call: replace(call, inputs=call.inputs * 2)),
    "no output": ("torch-region", lambda call: replace(call, outputs=())),
    "in place": ("operand-alias", lambda call: replace(call, outputs=call.inputs)),
    "a size of nobody's": ("unbound-symbol", lambda call: replace(call, sizes=("z",))),
    "a stream of nobody's": ("unknown-stream", lambda call: replace(call, stream="s9")),
    "a buffer of nobody's": ("unknown-buffer", _inputs(lambda v: replace(v, buffer="none"))),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_schedule_of_a_torch_call_is_verified(image: ProgramImage, tmp_path: Path, name: str) -> None:
    rule, change = SCHEDULES[name]
    plan = with_call(image.plan, change(the_call(image.plan)))
    with pytest.raises(ScheduleError) as caught:
        verify_plan(plan)
    assert caught.value.rule == rule, caught.value
    refusal(image, plan, tmp_path)


def test_torch_is_not_called_at_load_nor_in_a_capture(image: ProgramImage) -> None:
    entry = image.plan.entries[0]
    with pytest.raises(ScheduleError) as caught:
        verify_plan(image.plan, captured=(entry.name,))
    assert caught.value.rule == "capture-host-work"
    init = replace(entry, name="init", inputs=(), outputs=(), symbols=(), steps=(the_call(image.plan),))
    with pytest.raises(ScheduleError) as caught:
        verify_plan(replace(image.plan, init=init))
    assert caught.value.rule == "torch-at-init"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (op("aten.sum.default", X), r"torch\.float32 \[\].*compiled for torch\.float32 \[2, 16\]"),
        (op("aten.repeat.default", X, [2, 1]), r"\[4, 16\]"),
        (op("aten._to_copy.default", X, dtype={"dtype": "float64"}), r"torch\.float64 \[2, 16\]"),
        (op("aten._to_copy.default", X, dtype={"dtype": "complex64"}), r"torch\.complex64"),
        (op("aten.unbind.int", X, results=1), r"gave 2 results; the program expects 1"),
        (op("aten.reshape.default", X, [-1, -1]), r"aten\.reshape\.default failed"),
        (op("aten.index.Tensor", X, [X]), r"aten\.index\.Tensor failed"),
    ],
)
@pytest.mark.parametrize("stepwise", [False, True])
def test_results_that_are_not_the_declared_ones_are_not_written(
    image: ProgramImage, tmp_path: Path, call: TorchOp, message: str, stepwise: bool
) -> None:
    run = loads(image, with_region(image.plan, region(call)), tmp_path, stepwise=stepwise)
    with pytest.raises(RuntimeFailure, match=message):
        run(np.ones((2, 8), np.float32))


def test_truth_values_are_bytes_of_0_and_1_whatever_a_region_gives() -> None:
    """Kernels load them as `bool`. A region may view any bytes as truth values."""
    call = op("aten.view.dtype", X, {"dtype": "bool"})
    given, taken = np.array([0, 1, 2, 255], np.uint8), np.full(4, 7, np.uint8)
    places = [
        TensorMemory(address=array.ctypes.data, dtype=dtype, shape=(4,), written=written)
        for array, dtype, written in ((given, "ui8", False), (taken, "i1", True))
    ]
    runner().prepare(region(call)).on_host([], places[:1], places[1:])
    assert taken.tolist() == [0, 1, 1, 1]


def test_a_file_is_not_written_by_an_operator_that_could(image: ProgramImage, tmp_path: Path) -> None:
    target = tmp_path / "made"
    call = op("aten.from_file.default", "made", True, 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        refusal(image, with_region(image.plan, region(call)), tmp_path)
    assert not target.exists()
