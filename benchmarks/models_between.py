"""Models compiled by two revisions of this repository, kernels and all, in one process, in turns.

    .venv/bin/python benchmarks/models_between.py --before 24b5b75a [--models minilm vit unet llama ffn]
        [--formats nf4 int8] [--compute bf16] [--rounds 15] [--threads 2] [--json out.json]

The models are those of model_cpu.py (in the folder of the working tree), and `ffn`: two linears with GELU between them,
in the sizes of MiniLM and ViT, for many rows and for few. The revision is installed beside the working tree, in a
folder that is deleted. Each of the two compiles a model in a process of its own and saves it with its native build; the
runtime of the working tree runs both, and trusts these builds. (kernels_between.py compares kernels alone,
lm_between.py programs that the working tree's kernels run.) Each round has one turn of each program, in alternating
order. It prints medians and lower quartiles of both, and the median of their ratios within rounds: where the processor
has two rates, quartiles compare the higher one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cpubench.turns import about, ratio_within, times_in_turns
from lm_between import install, timed

import qcompiler as qc


@dataclass
class Cell:
    """Seconds of both versions: medians, lower quartiles, and the median of their ratios."""

    model: str
    case: str
    quant: str
    before: float
    after: float
    before_quartile: float
    after_quartile: float
    ratio: float


def make(model: str, quant: str, compute: Any, path: str) -> None:
    """Compiles a model, and saves it and its build's digest: in a process of one of the two revisions."""
    program = _model(model).compiled(qc.QuantConfig(quant, compute=compute, promise_bits=None))
    Path(path).with_suffix(".json").write_text(json.dumps(program.save(path)))
    print(f"compiled by {Path(qc.__file__).parent}", flush=True)


FEED_FORWARD = {"384": (384, 1536, (128, 4096)), "768": (768, 3072, (197, 1576))}
"""Columns, columns between the linears, and numbers of rows."""


def _feed_forward(name: str) -> Any:
    import model_cpu
    import torch
    from torch import nn

    torch.manual_seed(0)
    columns, inner, counts = FEED_FORWARD[name]
    module = nn.Sequential(nn.Linear(columns, inner), nn.GELU(), nn.Linear(inner, columns)).eval()
    shapes = {"input": {0: ("rows", 1, max(counts))}}
    given = torch.zeros(max(counts), columns)
    cases = [(f"{rows} rows", {"input": torch.randn(rows, columns)}, 4.0 * rows * columns * inner) for rows in counts]

    def compiled(quant: qc.QuantConfig) -> Any:
        return qc.qcompile(module, (given,), dynamic_shapes=shapes, quant=quant)

    return model_cpu.Model(f"ffn {name}", module, compiled, cases)


def _model(name: str) -> Any:
    import model_cpu

    if name.startswith("ffn"):
        return _feed_forward(name.removeprefix("ffn"))
    options = argparse.Namespace(models=[name], layers=4, small=False)
    (found,) = model_cpu.models(options)
    return found


def compiled(model: str, quant: str, given: argparse.Namespace, site: Path | None, path: Path) -> Any:
    """A model as the working tree compiles it, or the revision that is installed in `site`."""
    told = model, quant, given.compute, str(path)
    paths = [*([str(site)] if site is not None else []), str(Path(__file__).parent)]
    code = f"import models_between; models_between.make(*{told!r})"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    subprocess.run([sys.executable, "-P", "-c", code], check=True, env=environment)
    digests = json.loads(path.with_suffix(".json").read_text())
    return qc.load(path, trust_native=digests, num_threads=given.threads)


def cell(model: str, case: str, quant: str, programs: list[Any], inputs: dict[str, Any], rounds: int) -> Cell:
    for program in programs:
        program(**inputs)
    times = times_in_turns([timed(lambda _, program=program: program(**inputs)) for program in programs], rounds)
    middles = [statistics.median(each) for each in times]
    low = [statistics.quantiles(each, n=4)[0] for each in times]
    return Cell(model, case, quant, *middles, *low, ratio_within(times))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--before", required=True, help="a revision of this repository")
    parser.add_argument("--models", nargs="+", default=["minilm", "vit", "llama", "unet"])
    parser.add_argument("--formats", nargs="+", default=["int4"])
    parser.add_argument("--compute", default=None, choices=("exact", "bf16", "int8"))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if given.rounds < 2:
        parser.error("--rounds: quartiles need two or more")
    found = list[Cell]()
    models = [
        each for name in given.models for each in ([f"ffn{n}" for n in FEED_FORWARD] if name == "ffn" else [name])
    ]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        site = install(given.before, folder)
        for model in models:
            for quant in given.formats:
                programs = [
                    compiled(model, quant, given, place, folder / f"{which}.qca")
                    for which, place in (("before", site), ("after", None))
                ]
                for case, inputs, _ in _model(model).cases:
                    found.append(cell(model, case, quant, programs, inputs, given.rounds))
                    at = found[-1]
                    print(
                        f"{model} {case} {quant}: {at.before * 1e3:.2f} -> {at.after * 1e3:.2f} ms, {at.ratio:.2f} of "
                        f"the time; lower quartiles {at.before_quartile * 1e3:.2f} -> {at.after_quartile * 1e3:.2f} ms",
                        flush=True,
                    )
    if given.json:
        what = about(**{name: value for name, value in vars(given).items() if name != "json"})
        given.json.write_text(json.dumps(what | {"cells": [asdict(each) for each in found]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
