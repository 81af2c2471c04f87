"""Arguments by the names that `qc inspect` prints: by position and by keyword, from Python, from files, on the command
line, whichever way the program was compiled."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import qcompiler as qc
from qcompiler.cli import main
from qcompiler.errors import ArgumentStructureError


class Masked(nn.Module):
    """Arguments that cannot be told apart by shape, so that a wrong order gives wrong numbers."""

    def forward(
        self,
        ids: torch.Tensor,
        bias: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
        *,
        scale: Any = None,
    ) -> torch.Tensor:
        y = ids * 2 + (0 if bias is None else bias)
        y = y if mask is None else y * mask
        return y if scale is None else y / scale


IDS, BIAS, MASK, SCALE = (np.arange(4, dtype=np.float32) + 10 * k for k in (1, 2, 3, 4))
GIVEN = {"ids": IDS, "bias": BIAS, "mask": MASK, "scale": SCALE}


def _ways(names: tuple[str, ...]) -> list[tuple[list[Any], dict[str, Any]]]:
    """All splits of a call into leading positional arguments and keywords; `scale` is a keyword always."""
    most = sum(name != "scale" for name in names)
    return [
        ([GIVEN[name] for name in names[:count]], {name: GIVEN[name] for name in reversed(names[count:])})
        for count in range(most + 1)
    ]


NAMES = (("ids",), ("ids", "bias"), ("ids", "bias", "mask"), ("ids", "bias", "mask", "scale"))


@pytest.mark.parametrize("names", NAMES, ids=",".join)
def test_every_argument_goes_by_position_and_by_keyword(tmp_path: Path, names: tuple[str, ...]) -> None:
    tensors = {name: torch.from_numpy(GIVEN[name]) for name in names}
    expected = Masked()(**tensors).numpy()
    for number, (args, kwargs) in enumerate(_ways(names)):
        made = qc.qcompile(
            Masked(), *[torch.utils._pytree.tree_map(torch.from_numpy, part) for part in (tuple(args), kwargs)]
        )
        path = tmp_path / f"{number}.qca"
        made.save(path)
        for run, (given, named) in itertools.product((made, qc.load(path)), _ways(names)):
            assert np.array_equal(run(*given, **named), expected), (kwargs.keys(), named.keys())


def test_a_parameter_that_was_left_out_keeps_its_place() -> None:
    made = qc.qcompile(Masked(), (torch.from_numpy(IDS),), {"mask": torch.from_numpy(MASK)})
    assert np.array_equal(made(IDS, mask=MASK), IDS * 2 * MASK)
    with pytest.raises(ArgumentStructureError, match=r"compiled without 'bias', the parameter at this position"):
        made(IDS, MASK)


def test_what_does_not_fit_is_named() -> None:
    made = qc.qcompile(Masked(), (torch.from_numpy(IDS), torch.from_numpy(BIAS)))
    with pytest.raises(ArgumentStructureError, match=r"'ids' is given twice, by position and by keyword"):
        made(IDS, ids=IDS)
    with pytest.raises(ArgumentStructureError, match=r"'bias' is missing .*takes 2 arguments: 'ids', 'bias'\)"):
        made(IDS)
    with pytest.raises(ArgumentStructureError, match=r"unexpected keyword arguments: 'mask'.*'ids', 'bias'"):
        made(IDS, BIAS, mask=MASK)
    with pytest.raises(ArgumentStructureError, match=r"takes 2 positional arguments, the call has 3"):
        made(IDS, BIAS, MASK)


def test_an_exported_program_and_a_graph_module_keep_their_names() -> None:
    args = (torch.from_numpy(IDS), torch.from_numpy(BIAS))
    exported = torch.export.export(Masked(), args)
    for model in (exported, exported.module()):
        made = qc.qcompile(model, args)
        assert np.array_equal(made(bias=BIAS, ids=IDS), IDS * 2 + BIAS)


class Nested(nn.Module):
    def forward(self, pair: tuple[torch.Tensor, dict[str, torch.Tensor]], *rest: torch.Tensor) -> torch.Tensor:
        return pair[0] - pair[1]["a"] * rest[0]


@pytest.fixture(scope="module")
def files(workspace: Path) -> Path:
    args = tuple(torch.from_numpy(GIVEN[name]) for name in ("ids", "bias", "mask"))
    qc.qcompile(Masked(), args).save(workspace / "masked.qca")
    qc.qcompile(Nested(), ((args[0], {"a": args[1]}), args[2])).save(workspace / "nested.qca")
    for name in ("ids", "bias", "mask"):
        np.save(workspace / f"{name}.npy", GIVEN[name])
    return workspace


@pytest.mark.parametrize(("program", "expected"), [("masked", (IDS * 2 + BIAS) * MASK), ("nested", IDS - BIAS * MASK)])
def test_the_names_that_inspect_prints_are_those_that_run_takes(
    files: Path, capsys: pytest.CaptureFixture[str], program: str, expected: np.ndarray
) -> None:
    assert main(["inspect", f"{program}.qca"]) == 0
    printed = re.search(r"main\((.*?)\)", capsys.readouterr().out)
    assert printed is not None
    given = [f"{name}={each}.npy" for name, each in zip(printed[1].split(", "), ("ids", "bias", "mask"), strict=True)]
    assert main(["run", f"{program}.qca", *reversed(given), "-o", "result"]) == 0
    with np.load(files / "result") as found:
        assert np.array_equal(found["result"], expected)


def test_the_signature_names_every_argument(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "masked.qca"]) == 0
    assert "(ids: f32[4], bias: f32[4], mask: f32[4]) -> f32[4]" in capsys.readouterr().out
    assert main(["inspect", "nested.qca"]) == 0
    assert "(pair: (f32[4], dict(a=f32[4])), f32[4]) -> f32[4]" in capsys.readouterr().out


def test_run_mixes_positions_and_names(files: Path) -> None:
    assert main(["run", "masked.qca", "ids.npy", "mask=mask.npy", "bias=bias.npy", "-o", "mixed.npz"]) == 0
    assert np.array_equal(np.load(files / "mixed.npz")["result"], (IDS * 2 + BIAS) * MASK)
