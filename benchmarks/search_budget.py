"""What `qc.search` is worth: its recipes beside uniform formats, llama.cpp's mixtures and random recipes of equal size.

    python benchmarks/search_budget.py                prints a table
    python benchmarks/search_budget.py --write        and writes it into docs/quantisation.md

The model is the repository's language model.  One search over windows from the last half of the held-out text serves
all rows: the recipe of a row is the point of its front for the bytes that the rival takes.  The KL divergence from the
fp32 model is measured with the quantised graphs in eager torch, on the first quarter of the text.  ± is one standard
error over windows; a random recipe is the mean of several, and its ± the standard error over them.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "examples")]

import chosen_codes  # noqa: E402
import tiny_llama  # noqa: E402
from page_marks import between  # noqa: E402

import qcompiler as qc  # noqa: E402
from qcompiler.frontends.quantise.insert_qdq import Quantized, insert_qdq  # noqa: E402
from qcompiler.frontends.torch.capture.export import export_model  # noqa: E402

PAGE = HERE.parent / "docs" / "quantisation.md"
CANDIDATES = ("int3", "int3:group=128", "q3_K", "int4", "int4:group=128", "nf4", "q4_K", "q5_K", "q6_K", "int8")
INPUTS = 32
"""Windows of 512 bytes for the search."""
RANDOM = 3
"""Random recipes of each size."""
SHAPES = {"tokens": {0: ("batch", 1, tiny_llama.BATCH), 1: ("length", 1, tiny_llama.LENGTH)}}
EXAMPLE = (torch.zeros(3, 37, dtype=torch.int64),)


def everywhere(text: str) -> qc.QuantConfig:
    """One format for all weights, the embedding included."""
    return qc.QuantConfig("float", linear=text, embedding=text)


RIVALS: dict[str, qc.QuantConfig] = {
    "q4_K_M (llama.cpp)": qc.QuantConfig("q4_K_M"),
    "q4_K everywhere": everywhere("q4_K"),
    "int4 everywhere": everywhere("int4"),
    "nf4 everywhere": everywhere("nf4"),
    "q3_K_M (llama.cpp)": qc.QuantConfig("q3_K_M"),
    "int3 everywhere": everywhere("int3"),
}


@dataclass
class Row:
    """KL in bits with its standard error: the rival's, the searched recipe's, random ones'; the sizes of the first."""

    name: str
    bits: float
    rival: tuple[float, float]
    searched: tuple[float, float]
    random: tuple[float, float]
    searched_bits: float


def quantised(model: Any, quant: qc.QuantConfig) -> Quantized:
    """The graph that a compile starts from, with packed weights, and its ledger."""
    return insert_qdq(export_model(model, EXAMPLE, dynamic_shapes=SHAPES), quant)


def mean(values: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """The mean and its standard error."""
    found = np.asarray(values)
    return float(found.mean()), float(found.std(ddof=1) / math.sqrt(len(found)))


def random_recipe(result: Any, nbytes: int, generator: np.random.Generator) -> qc.QuantConfig:
    """Formats drawn at random that take at most so many bytes, and nearly as many."""
    items, room = result.items, nbytes - result.kept.total(0)
    chosen = [int(generator.integers(len(item.texts))) for item in items]

    def taken() -> int:
        return sum(item.nbytes(item.texts[place]) for item, place in zip(items, chosen, strict=True))

    def move(larger: bool) -> bool:
        """Changes one item at random to a larger or a smaller format; false if none fits."""
        total = taken()
        moves = [
            (number, place)
            for number, item in enumerate(items)
            for place, text in enumerate(item.texts)
            if (more := item.nbytes(text) - item.nbytes(item.texts[chosen[number]])) != 0
            and (more > 0) == larger
            and (not larger or total + more <= room)
        ]
        if moves:
            number, chosen[number] = moves[int(generator.integers(len(moves)))]
        return bool(moves)

    while taken() > room:
        move(larger=False)
    while move(larger=True):
        pass
    return result.point_of(chosen).recipe


def rows(model: Any, result: Any, names: Sequence[str]) -> list[Row]:
    _, windows, reference = chosen_codes.judge()
    generator = np.random.default_rng(0)
    found = []
    for name in names:

        def judged(made: Quantized) -> np.ndarray:
            return chosen_codes.divergences(made.module, windows, reference)

        own = quantised(model, RIVALS[name])
        ledger, nbytes = own.ledger, own.ledger.bytes_after
        rival, point = mean(judged(own)), result.point(f"{nbytes} B")
        searched = mean(judged(quantised(model, point.recipe)))
        recipes = [random_recipe(result, nbytes, generator) for _ in range(RANDOM)]
        drawn = [float(judged(quantised(model, each)).mean()) for each in recipes]
        found.append(Row(name, ledger.bits_per_weight(), rival, searched, mean(drawn), point.bits))
        print(*cells(found[-1]), sep="  ", file=sys.stderr, flush=True)
    return found


COLUMNS = ("rival", "bits per weight", "KL, rival", "KL, searched", "KL, random", "searched / rival")


def cells(row: Row) -> list[str]:
    def text(each: tuple[float, float]) -> str:
        power = math.floor(math.log10(each[0]))
        return f"({each[0] / 10**power:.2f} ± {each[1] / 10**power:.2f})e{power:+03d}"

    ratio = f"{row.searched[0] / row.rival[0]:.2f}"
    return [row.name, f"{row.bits:.3f}", text(row.rival), text(row.searched), text(row.random), ratio]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=INPUTS, help="windows for the search")
    parser.add_argument("--workdir", type=Path, help="a folder in which a killed search can continue")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(HERE.parent)}")
    parser.add_argument("rivals", nargs="*", default=list(RIVALS))
    options = parser.parse_args()
    model, began = tiny_llama.load_model(), time.perf_counter()
    result = qc.search(
        model, chosen_codes.calibration(options.inputs), "4.5 bits", CANDIDATES, args=EXAMPLE, dynamic_shapes=SHAPES,
        workdir=options.workdir,
    )  # fmt: skip
    print(result.table(), f"{time.perf_counter() - began:.0f} s", sep="\n", file=sys.stderr)
    found = rows(model, result, options.rivals)
    table = Table(*COLUMNS)
    for each in found:
        table.add_row(*cells(each))
    Console().print(table)
    if options.write:
        lines = [f"| {' | '.join(COLUMNS)} |", "|---|" + "---:|" * (len(COLUMNS) - 1)]
        lines += [f"| {' | '.join(cells(each))} |" for each in found]
        begin, end = "<!-- searched budgets -->", "<!-- end of searched budgets -->"
        PAGE.write_text(between(PAGE.read_text(), begin, end, "\n".join(lines), str(PAGE)))


if __name__ == "__main__":
    main()
