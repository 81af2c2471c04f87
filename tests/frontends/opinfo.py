"""PyTorch's own database of operators as the yardstick: sample inputs through import, interpreter and CPU kernels.

    .venv/bin/python -P tests/frontends/opinfo.py --out build/opinfo.json      # interpreter: all operators
    .venv/bin/python -P tests/frontends/opinfo.py --compile --ops amax flip    # CPU kernels of some
    .venv/bin/python -P tests/frontends/opinfo.py --page docs/opinfo.md --out build/opinfo.json

Each sample ends in one of four classes: `equal`, `refused` (a QCompilerError, which a user can read), `wrong`, and
`error` (any other exception).  Samples that eager torch itself refuses, and those whose result is no real tensor, are
not counted.  Many samples share one program; where one fails, its batch is halved until the culprit is alone.
"""

from __future__ import annotations

import argparse
import copy
import json
import re
import sys
import types
import unittest
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch import nn

import qcompiler as qc
from qcompiler.errors import QCompilerError
from qcompiler.frontends.torch.common.values import to_numpy
from qcompiler.frontends.torch.frontend import import_torch
from qcompiler.ir.interpreter import run

ROOT = Path(__file__).resolve().parents[2]
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool)
OTHER_NAMES = {
    "convolution": "conv2d", "_softmax": "softmax", "_log_softmax": "log_softmax", "_cdist_forward": "cdist",
    "_native_batch_norm_legit_no_training": "nn.functional.batch_norm", "index": "__getitem__", "index_copy": "take",
}  # fmt: skip
"""Operators that the database knows by the function that reaches them."""
ANY_OF_EQUALS = {"kthvalue": 1, "topk": 1, "median": 1, "nanmedian": 1, "mode": 1, "sort": 1, "argsort": 0}
"""Operators that give positions along a dim, and of equal values any position, by the number of that result."""
ANY_VALUES = ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")
"""Operators of which only shape and type are said."""


def database() -> list[Any]:
    """torch's list of OpInfos. Its module imports `expecttest`, of which it needs nothing but a base class here."""
    if "expecttest" not in sys.modules:
        try:
            import expecttest  # noqa: F401
        except ImportError:
            stand_in = types.ModuleType("expecttest")
            stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
            sys.modules["expecttest"] = stand_in
    from torch.testing._internal.common_methods_invocations import op_db

    return list(op_db)


def documented() -> list[Any]:
    """The OpInfos of the operators that docs/operators.md lists."""
    page = (ROOT / "docs/operators.md").read_text()
    listed = set(re.findall(r"^\| `(\w+)`", page, re.M))
    listed |= {OTHER_NAMES[name] for name in listed if name in OTHER_NAMES}

    def names(info: Any) -> set[str]:
        return {info.name, info.name.rpartition(".")[2], info.aten_name, *(alias.name for alias in info.aliases)}

    return [info for info in database() if names(info) & listed]


def named(info: Any) -> str:
    """The name of an OpInfo with its variant: `div.trunc_rounding`."""
    return f"{info.name}.{info.variant_test_name}" if info.variant_test_name else str(info.name)


@dataclass
class Sample:
    """One call of one operator: its arguments, what eager torch gives, and what became of it."""

    operator: str
    dtype: str
    number: int
    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    wanted: list[torch.Tensor] = field(default_factory=list)
    outcome: str = ""
    detail: str = ""

    @property
    def name(self) -> str:
        return f"{self.operator} {self.dtype} #{self.number}"

    def tensors(self) -> list[torch.Tensor]:
        leaves = pytree.tree_leaves((self.args, self.kwargs))
        return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def apply(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The operator on other tensors in the places of its own."""
        given = iter(tensors)
        args, kwargs = pytree.tree_map(
            lambda leaf: next(given) if isinstance(leaf, torch.Tensor) else leaf, (self.args, self.kwargs)
        )
        return [leaf for leaf in pytree.tree_leaves(self.call(*args, **kwargs)) if isinstance(leaf, torch.Tensor)]


def samples(info: Any, dtype: torch.dtype, most: int) -> Iterator[Sample]:
    """Up to `most` samples spread over all, after those with 0-d, empty and one-element inputs."""
    if dtype not in info.dtypes:
        return
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = list(info.sample_inputs("cpu", dtype, requires_grad=False))
    small = [n for n, s in enumerate(made) if isinstance(s.input, torch.Tensor) and s.input.numel() <= 1]
    step = max(1, len(made) // max(most, 1))
    chosen = sorted({*small[: most // 2], *range(0, len(made), step)})[: most + most // 2]
    kind = str(dtype).removeprefix("torch.")
    for number in chosen:
        given = made[number]
        sample = Sample(named(info), kind, number, info.op, (given.input, *given.args), dict(given.kwargs))
        if sample.tensors() and _expect(sample):
            yield sample


def _expect(sample: Sample) -> bool:
    """Runs eager torch twice; False where there is nothing to compare (it fails, is random, or has no real tensors)."""
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            sample.wanted = sample.apply(copy.deepcopy(sample.tensors()))
            again = sample.apply(copy.deepcopy(sample.tensors()))
    except Exception:
        return False
    tensors = (*sample.wanted, *sample.tensors())
    plain = all(t.layout == torch.strided and not t.is_complex() and not t.is_quantized for t in tensors)
    return bool(sample.wanted) and plain and all(same(a, b) for a, b in zip(sample.wanted, again, strict=True))


def same(wanted: torch.Tensor, found: Any) -> bool:
    """Equal in shape, type and value; floats within a few roundings of their type at the largest magnitude."""
    if not isinstance(found, torch.Tensor) or wanted.shape != found.shape or wanted.dtype != found.dtype:
        return False
    if not wanted.is_floating_point():
        return bool(torch.equal(wanted, found))
    a, b = wanted.double(), found.double()
    finite = a[a.isfinite()]
    relative, of_largest = {torch.bfloat16: (2e-2, 1e-2), torch.float16: (4e-3, 2e-3)}.get(wanted.dtype, (1e-4, 1e-5))
    largest = float(finite.abs().max()) if finite.numel() else 0.0  # sums that cancel are as good as their terms
    return torch.allclose(a, b, rtol=relative, atol=of_largest * largest + 1e-30, equal_nan=True)


def _another_equal(sample: Sample, result: int, wanted: torch.Tensor, found: Any) -> bool:
    """Whether torch may give this as well: any values, or positions that differ only among equal values."""
    if sample.operator in ANY_VALUES and isinstance(found, torch.Tensor):
        return wanted.shape == found.shape and wanted.dtype == found.dtype
    position = ANY_OF_EQUALS.get(sample.operator.partition(".")[0])
    if position != result or sample.kwargs.get("stable") or not isinstance(found, torch.Tensor):
        return False
    x = sample.tensors()[0]
    if wanted.dtype != torch.int64 or wanted.shape != found.shape:
        return False
    for axis in range(x.ndim):
        one, other = (t if t.ndim == x.ndim else t.unsqueeze(axis) for t in (wanted, found))
        if _fits(x, axis, one) and _fits(x, axis, other) and torch.equal(x.gather(axis, one), x.gather(axis, other)):
            return True
    return False


def _fits(x: torch.Tensor, axis: int, index: torch.Tensor) -> bool:
    """Whether every position of an index is one of x along an axis, and the other dims are those of x."""
    same_dims = all(a == b for n, (a, b) in enumerate(zip(x.shape, index.shape, strict=True)) if n != axis)
    return same_dims and (index.numel() == 0 or (int(index.min()) >= 0 and int(index.max()) < x.shape[axis]))


class Batch(nn.Module):
    """Samples as one model."""

    def __init__(self, batch: Sequence[Sample]) -> None:
        super().__init__()
        self.batch = (tuple(batch),)

    def forward(self, tensors: list[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
        return [sample.apply(given) for sample, given in zip(self.batch[0], tensors, strict=True)]


Execute = Callable[[Sequence[Sample]], list[torch.Tensor]]


def interpreted(batch: Sequence[Sample]) -> list[torch.Tensor]:
    """Results of the imported module under the interpreter."""
    given = [sample.tensors() for sample in batch]
    result = import_torch(Batch(batch), (given,))
    arrays = [to_numpy(t) for t in pytree.tree_leaves(given)]
    found = run(result.module, result.weights, arrays)
    wanted = [t for sample in batch for t in sample.wanted]
    return [_as_torch(array, like) for array, like in zip(found, wanted, strict=True)]


def _as_torch(array: Any, like: torch.Tensor) -> torch.Tensor:
    array = np.array(array)
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.uint16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array)


def compiled(batch: Sequence[Sample]) -> list[torch.Tensor]:
    """Results of the program for this machine's CPU."""
    given = [sample.tensors() for sample in batch]
    return pytree.tree_leaves(qc.qcompile(Batch(batch), (given,))(given))


def judge(batch: Sequence[Sample], execute: Execute) -> None:
    """Runs a batch and notes the outcome of each sample."""
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            found = iter(execute(batch))
            for sample in batch:
                pairs = [(wanted, next(found, None)) for wanted in sample.wanted]
                bad = [pair for n, pair in enumerate(pairs) if not (same(*pair) or _another_equal(sample, n, *pair))]
                sample.outcome = "wrong" if bad else "equal"
                sample.detail = f"{bad[0][0]!s:.200} but {bad[0][1]!s:.200}" if bad else ""
    except Exception as error:
        if len(batch) > 1:
            middle = len(batch) // 2
            judge(batch[:middle], execute)
            judge(batch[middle:], execute)
            return
        batch[0].outcome = "refused" if isinstance(error, QCompilerError) else "error"
        batch[0].detail = f"{type(error).__name__}: {error}"[:600]


def examine(infos: Sequence[Any], execute: Execute, most: int, size: int) -> Iterator[Sample]:
    """All samples of the operators with their outcomes, `size` of them in one program."""
    waiting: list[Sample] = []
    for info in infos:
        for dtype in DTYPES:
            waiting += samples(info, dtype, most)
            while len(waiting) >= size:
                batch, waiting = waiting[:size], waiting[size:]
                judge(batch, execute)
                yield from batch
    if waiting:
        judge(waiting, execute)
        yield from waiting


Counts = dict[str, dict[str, dict[str, Any]]]
"""By operator and dtype: how many samples are equal and wrong and errors, and how often each reason refuses one."""


def count(found: Counts, sample: Sample) -> None:
    """Adds a judged sample."""
    empty: dict[str, Any] = {"equal": 0, "wrong": 0, "error": 0, "refused": {}}
    counts = found.setdefault(sample.operator, {}).setdefault(sample.dtype, empty)
    if sample.outcome == "refused":
        why = reason(sample.detail)
        counts["refused"][why] = counts["refused"].get(why, 0) + 1
    else:
        counts[sample.outcome] += 1


def reason(detail: str) -> str:
    """What is refused, without the place and the sizes of the sample."""
    line = detail.partition("\n")[0].partition(": ")[2]
    line = re.sub(r" at '[^']*'", "", line)
    line = re.sub(r" \([^ ]*\.py:.*", "", line)  # the line of this module, which is no user's
    return re.sub(r"\d+(\.\d+)?", "…", line)[:160]


def page(found: Counts) -> str:
    """docs/opinfo.md."""
    total: Counter[str] = Counter()
    rows, reasons = [], Counter[str]()
    for operator in sorted(found):
        mine: Counter[str] = Counter()
        for counts in found[operator].values():
            mine.update({key: counts[key] for key in ("equal", "wrong", "error")})
            mine["refused"] += sum(counts["refused"].values())
            reasons.update(counts["refused"])
        total += mine
        dtypes = ", ".join(dtype for dtype in found[operator])
        numbers = " | ".join(str(mine[key]) for key in ("equal", "refused", "wrong", "error"))
        rows.append(f"| `{operator}` | {dtypes} | {sum(mine.values())} | {numbers} |")
    summary = (
        f"{len(found)} operators and variants, {sum(total.values())} samples: {total['equal']} equal, "
        f"{total['refused']} refused, {total['wrong']} wrong, {total['error']} errors."
    )
    why = "\n".join(f"| {text.replace('|', chr(92) + '|')} | {number} |" for text, number in reasons.most_common())
    return PAGE.format(summary=summary, rows="\n".join(rows), why=why)


PAGE = """# PyTorch's operator database

Generated by `tests/frontends/opinfo.py --page docs/opinfo.md`. PyTorch tests its operators with a database of samples
(`torch.testing._internal.common_methods_invocations.op_db`). Samples of every operator in [operators.md](operators.md),
in float32, bfloat16, int64 and bool, go through export and import. The interpreter, which defines the meaning of the
IR, runs them, and the results are compared with eager torch. *Equal*: floats within a few roundings of their type,
everything else exactly; if torch leaves the position among equal values open, any of them. *Refused*: an error that
says why. *Wrong* and *errors* (Python exceptions that do not help a user) must be 0. For each operator and type this
page counts up to `--most` samples, spread over all, small ones first; `tests/frontends/test_opinfo.py` uses all of them
in the full run, some as compiled kernels, and a few in every run.
Samples that eager torch itself refuses, random ones, and complex, sparse or quantised tensors are not counted.

{summary}

## What is refused

| reason | samples |
|---|---|
{why}

## Operators

| operator | types | samples | equal | refused | wrong | errors |
|---|---|---|---|---|---|---|
{rows}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ops", nargs="*", help="names in the database; all that operators.md lists otherwise")
    parser.add_argument("--part", default="0/1", help="i/n: every n-th operator, beginning with the i-th")
    parser.add_argument("--most", type=int, default=24, help="samples of an operator and dtype")
    parser.add_argument("--size", type=int, default=24, help="samples in one program")
    parser.add_argument("--compile", action="store_true", help="CPU kernels instead of the interpreter")
    parser.add_argument("--out", type=Path, help="counts, written after each operator; those in it are not run again")
    parser.add_argument("--page", type=Path, help="write the page from --out and end")
    options = parser.parse_args()
    found: Counts = json.loads(options.out.read_text()) if options.out and options.out.exists() else {}
    if options.page:
        options.page.write_text(page(found))
        return
    part, parts = map(int, options.part.split("/"))
    infos = [i for i in documented() if not options.ops or i.name in options.ops][part::parts]
    execute = compiled if options.compile else interpreted
    for info in infos:
        if named(info) in found:
            continue
        for sample in examine([info], execute, options.most, options.size):
            count(found, sample)
            if sample.outcome in ("wrong", "error"):
                print(sample.outcome, sample.name, sample.detail[:300].replace("\n", " "), flush=True)
        if options.out:
            options.out.write_text(json.dumps(found, indent=1))
    print(page(found).partition("## ")[0])


if __name__ == "__main__":
    main()
