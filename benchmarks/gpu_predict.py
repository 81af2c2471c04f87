"""Predictions of gpu_first.py's cells on an H200, from the kernels' own cost data; `--freeze` writes them down.

    python benchmarks/gpu_predict.py                    # prints the model's predictions for the present kernels
    python benchmarks/gpu_predict.py --only m64 m4096
    python benchmarks/gpu_predict.py --freeze           # benchmarks/predictions/h200.json, with date and commit

Needs NVRTC and nvdisasm, both from wheels, and no GPU. benchmarks/gpubench/model.py is the model. A frozen file is not
changed after a measurement is compared with it: a later model gets a later file.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from gpubench import claims, model
from gpubench.cells import chosen
from gpubench.document import commit
from gpubench.rig import plan_of

from qcompiler.errors import SassError
from qcompiler.plan.kernel import KernelSpec
from qcompiler.runtime import nvrtc, sass

FROZEN = Path(__file__).resolve().parent / "predictions" / "h200.json"


def counted(spec: KernelSpec, bits: int, products: Fraction) -> model.Count:
    """Registers and, for the hot loop of a product, instructions per weight."""
    native = nvrtc.build_module(plan_of(spec), model.ARCH)
    symbol = nvrtc.kernel_symbol("0")  # the only kernel of its plan
    resources = json.loads(native.path.with_suffix(".json").read_text())["kernels"][symbol]
    registers = resources["registers"]
    if spec.template not in ("linear", "grouped_linear"):
        return model.Count(registers)
    try:
        loop = sass.hot_loop(sass.disassemble(native.path)[symbol], bits, products)
    except SassError as error:
        return model.Count(registers, reason=str(error)[:160])
    return model.Count(registers, loop.per_weight, {name: n / loop.weights for name, n in loop.opcodes.items()})


def document(only: list[str] | None) -> dict[str, Any]:
    """The document that `--freeze` writes."""
    cells, known = {}, {}

    def count(spec: KernelSpec, bits: int, products: Fraction) -> model.Count:
        if spec.name not in known:
            known[spec.name] = counted(spec, bits, products)
        return known[spec.name]

    for number, cell in enumerate(wanted := chosen(only)):
        print(f"\r{number}/{len(wanted)} {cell.id:50}", end="", file=sys.stderr)
        found = model.predict(cell, count)
        if found is not None:
            cells[cell.id] = found.as_json()
    print(file=sys.stderr)
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return {
        "model": model.VERSION, "frozen": f"{today} at {commit()}", "date": today, "commit": commit(),
        "device": model.H200.name, "compiler": nvrtc.compiler_version(model.ARCH),
        "claims": [each.as_json() for each in claims.CLAIMS], "cells": cells,
    }  # fmt: skip


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+")
    parser.add_argument("--freeze", action="store_true")
    chosen_ = parser.parse_args(given)
    found = document(chosen_.only)
    for name, each in found["cells"].items():
        terms = ", ".join(f"{term} {low:.1f}…{high:.1f}" for term, (low, high) in each["terms"].items())
        print(f"{name:46} {each['low_us']:8.1f} … {each['high_us']:8.1f} us  {each['bound']:7} {terms}")
    if chosen_.freeze:
        FROZEN.parent.mkdir(exist_ok=True)
        FROZEN.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
