"""What the tests of whole models share: compiled programs, their oracles, and what they are compared by."""

from __future__ import annotations

import collections
import copy
import re
from collections.abc import Iterable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from by_path import load
from stored_rows import parameter_rows

import qcompiler as qc
from qcompiler import formats
from qcompiler.inspect.checks import recomputed_per_call
from qcompiler.kernels import layouts

zoo = load("tests/models/zoo.py")

SIZES = ((zoo.BATCH, zoo.LENGTH), (1, 1), (8, zoo.LONGEST), (2, 1), (1, 2))
"""(batch, sequence): inside of the ranges, and their ends."""


FORMATS = ("nf4", "int4", "int8")
Case = tuple[str, "str | None", bool]  # architecture, format, with a padding mask


def fp32_cases(names: Iterable[str], quick: set[Case]) -> list[object]:
    """Every architecture in float with and without a mask, and in every format; whether that has a mask alternates."""
    every: list[Case] = []
    for i, name in enumerate(names):
        every += [(name, None, False), (name, None, True)]
        every += [(name, quant, (i + j) % 2 == 1) for j, quant in enumerate(FORMATS)]
    return _cases(every, quick)


def bf16_cases(names: Iterable[str], quick: set[Case]) -> list[object]:
    """Every architecture in float and in one format, one of them with a mask."""
    every: list[Case] = []
    for i, name in enumerate(names):
        every += [(name, None, i % 2 == 0), (name, FORMATS[i % 3], i % 2 == 1)]
    return _cases(every, quick)


def _cases(every: list[Case], quick: set[Case]) -> list[object]:
    """As parameters, `quick` added; all but `quick` are slow."""
    return [
        pytest.param(*case, id="-".join([case[0], case[1] or "float", "masked" if case[2] else "plain"]),
                     marks=[] if case in quick else [pytest.mark.slow])
        for case in dict.fromkeys([*every, *sorted(quick, key=str)])
    ]  # fmt: skip


@cache
def compiled(
    name: str,
    quant: str | None = None,
    dtype: torch.dtype = torch.float32,
    *,
    masked: bool = False,
    positions: bool = False,
    attention: str | None = None,
    device: str | None = None,
) -> tuple[Any, qc.Program]:
    """The case of an architecture, its model in `dtype`, and the model's program."""
    case = zoo.TEXT[name].case(masked=masked, positions=positions, attention=attention)
    case.model.to(dtype)
    options = {"quant": quant, "dynamic_shapes": case.dynamic_shapes, "device": device}
    return case, qc.qcompile(case.model, kwargs=case.example, **options)


def leaves(result: Any) -> list[np.ndarray[Any, Any]]:
    """Every tensor of a result as float64."""
    if isinstance(result, torch.Tensor):
        return [result.detach().double().numpy()]
    values = result.values() if isinstance(result, dict) else result
    return [leaf for value in values if value is not None for leaf in leaves(value)]


def assert_equals_the_oracle(program: qc.Program, inputs: Iterable[dict[str, torch.Tensor]], least: float) -> None:
    """fp32 answers within 1e-5 of eager torch, none off by 1e-4 rms; the first output of the first inputs shows it."""
    assert not program.image.torch_calls
    for number, each in enumerate(inputs):
        with torch.no_grad():
            expected = leaves(program.oracle(**each))
        if number == 0:
            assert expected[0].std() >= least, "outputs too small to show errors"
        for ours, theirs in zip(leaves(program(**each)), expected, strict=True):
            assert ours.shape == theirs.shape
            assert np.linalg.norm(ours - theirs) <= 1e-5 * np.linalg.norm(theirs)
            assert np.abs(ours - theirs).max() <= 1e-4 * np.sqrt((theirs**2).mean())


def assert_as_close_to_float64_as_torch(case: Any, program: qc.Program, inputs: dict[str, torch.Tensor]) -> None:
    """bf16 answers no further from float64 (with the same decoded weights) than eager torch's, in no row or column.

    Left out are rows that are NaN in float64: its least number is -inf in the fp32 of eager's softmax, so a query that
    sees no key has no answer there.  Half of the rows must have one.
    """
    wide = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
    with torch.no_grad():
        exact, eager = leaves(float64_model(case.model, program)(**wide)), leaves(program.oracle(**inputs))
    for results in zip(leaves(program(**inputs)), eager, exact, strict=True):
        rows = [each.reshape(-1, each.shape[-1]) for each in results]
        known = ~np.isnan(rows[2]).any(1)
        assert 2 * known.sum() >= known.size
        ours, theirs, truth = (each[known] for each in rows)
        if any(name.endswith("experts") for name, _ in case.model.named_modules()):
            # A token whose two best experts are almost alike may go to another one after any rounding, with all that
            # attends to it: then it is far from float64, in eager torch as well, and tells nothing about arithmetic.
            middle, allowed = (np.median(np.linalg.norm(each - truth, axis=1)) for each in (ours, theirs))
            assert middle <= 1.5 * allowed
            continue
        assert np.linalg.norm(ours - truth) <= 1.5 * np.linalg.norm(theirs - truth)
        squares, eagers = (ours - truth) ** 2, (theirs - truth) ** 2
        for axis, name in ((1, "row"), (0, "column")):
            worst, allowed = (np.sqrt(each.mean(axis)).max() for each in (squares, eagers))
            assert worst <= max(4 * np.sqrt(squares.mean()), 1.5 * allowed), f"one {name} is far worse than the rest"


def float64_model(model: torch.nn.Module, program: qc.Program, *, rounded: bool = True) -> torch.nn.Module:
    """The model in float64 with the weights that the program decodes to (each rounded to the model's dtype, unless
    `rounded` is false: a kernel may leave that out)."""
    model = copy.deepcopy(model)
    if not rounded:
        model = model.double()
    for entry in program.plan.weights:
        if entry.format is None:
            continue
        fmt = formats.get(entry.format.name, **entry.format.params)
        stored = program.image.weights[entry.offset : entry.offset + entry.nbytes]
        canonical = layouts.get(entry.layout).unpack(fmt, entry.dtype, *entry.shape, stored)
        decoded = fmt.decode(formats.from_bytes(fmt, *entry.shape, canonical))
        for parameter, rows in parameter_rows(entry):
            target = model.get_parameter(parameter)
            values = torch.from_numpy(decoded[rows])
            if type(model.get_submodule(parameter.rpartition(".")[0])).__name__ == "Conv1D":
                values = values.T  # stored (in, out), and the shape does not tell where it is square
            with torch.no_grad():  # the matrices of experts lie one below the other
                target.copy_(values.reshape(target.shape).to(target.dtype))
    for module in model.modules():  # products of groups, which transformers chooses for experts, know no float64
        if getattr(getattr(module, "config", None), "_experts_implementation", None) is not None:
            module.config._experts_implementation = "eager"
    return model.double()


_COUNTED = re.compile(r"= (qc\.\w+|linalg\.generic|tensor\.concat)")
_NAMES = {"linalg.generic": "loop", "tensor.concat": "concat"}
_VIEWS = ("qc.const", "qc.dim")


def shape_of_the_program(program: qc.Program) -> dict[str, int]:
    """How many ops of each kind a call computes (`loop`: elementwise and reducing nests), and `steps` of its plan."""
    text = program.ir("fuse-elementwise")
    main = text[text.index("func.func @main") :].partition("func.func @init")[0]
    counts = collections.Counter(_COUNTED.findall(main))
    found = {_NAMES.get(op, op.removeprefix("qc.")): count for op, count in counts.items() if op not in _VIEWS}
    (entry,) = program.plan.entries
    return dict(sorted(found.items())) | {"steps": len(entry.steps), "constant": len(recomputed_per_call(program.plan))}


def table_of_models() -> str:
    """The table of docs/models.md, from what the tests check."""
    lines = ["| model | class | attention | attn | norms | linears | loops | other | steps | to know |",
             "|---|---|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for name, each in zoo.TEXT.items():
        ops = dict(zoo.OPS[name])
        norms = ops.pop("rms_norm", 0) + ops.pop("layer_norm", 0)
        front = [ops.pop("attention"), norms, ops.pop("linear"), ops.pop("loop", 0)]
        steps = ops.pop("steps")
        constant = ops.pop("constant")
        ops["of sizes alone"] = constant
        other = ", ".join(f"{count} {kind}" for kind, count in ops.items() if count)
        kinds = ", ".join((each.attention, *each.others))
        cells = [name, f"`{each.model}`", kinds, *front, other, steps, each.note]
        lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return "\n".join(lines) + "\n"
