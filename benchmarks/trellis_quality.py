"""The trellis code beside the k-quants of its size: what each costs the repository's language model.

    python benchmarks/trellis_quality.py                      prints a table
    python benchmarks/trellis_quality.py --write              and writes it into docs/quantisation.md
    python benchmarks/trellis_quality.py --write 3            the rows of 3 bits only; the others stay as they are

For each number of bits: the k-quant with the codes that ggml's encoder gives it (without data), the same with codes by
GPTQ, and `tq` without data and with GPTQ.  Linears only, the embedding stays fp32.  Calibration takes windows of 512
bytes from the last half of the held-out text, and the KL divergence from the fp32 model is measured on windows of its
first quarter.  ± is one standard error over windows: of the mean for KL, by the jackknife for the share.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "examples")]

import chosen_codes  # noqa: E402
from page_marks import rows_between  # noqa: E402

from qcompiler.config import resolve_format  # noqa: E402

PAGE = HERE.parent / "docs" / "quantisation.md"
BEGIN, END = "<!-- trellis and k-quants -->", "<!-- end of trellis and k-quants -->"
RIVALS = {4: "q4_K", 3: "q3_K", 2: "q2_K"}
"""By the bits of `tq`: the k-quant whose KL a row is divided by."""
INPUTS, JUDGED = 16, 32
"""Windows of 512 bytes: for calibration, and those that are judged."""
COLUMNS = ("linears", "codes", "bits", "KL", "share of the k-quant's with ggml's codes")
NAMES = {"nearest": "the encoder's", "gptq": "gptq"}


@dataclass
class Row:
    """A format and an algorithm: the stored bits of a linear's weight, and the KL of each window in bits."""

    text: str
    algorithm: str
    bits: float
    each: np.ndarray

    def cells(self, rival: np.ndarray) -> list[str]:
        """`rival` is the KL of each window with the k-quant."""
        mean, error = float(self.each.mean()), float(self.each.std(ddof=1) / np.sqrt(len(self.each)))
        share, of_share = chosen_codes.ratio(self.each, rival)
        codes = "ggml's" if self.text in RIVALS.values() and self.algorithm == "nearest" else NAMES[self.algorithm]
        compared = "1" if self.each is rival else f"{share:.2f} ± {of_share:.2f}"
        return [self.text, codes, f"{self.bits:.2f}", f"{mean:.2e} ± {error:.0e}", compared]


def bits_of(text: str) -> float:
    """Stored bits of an element of a row of 256."""
    return resolve_format(text).nbytes(1, 256) * 8 / 256


def rows(bits: int, inputs: chosen_codes.Windows, judged: chosen_codes.Judged) -> list[Row]:
    """The k-quant and `tq` of so many bits; the k-quant with ggml's codes comes first."""
    found = []
    for text in (RIVALS[bits], f"tq:bits={bits}"):
        for algorithm in ("nearest", "gptq"):
            _, each, seconds = chosen_codes.measured(text, algorithm, inputs, judged, embedding=None)
            found.append(Row(text, algorithm, bits_of(text), each))
            print(text, algorithm, f"{each.mean():.3e}  {seconds:.0f} s", file=sys.stderr, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=INPUTS, help="windows for calibration")
    parser.add_argument("--judged", type=int, default=JUDGED, help="windows to judge by")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(HERE.parent)}")
    parser.add_argument("bits", nargs="*", type=int, default=list(RIVALS))
    options = parser.parse_args()
    if unknown := set(options.bits) - set(RIVALS):
        parser.error(f"tq has 2, 3 or 4 bits, not {', '.join(map(str, sorted(unknown)))}")
    inputs, judged = chosen_codes.calibration(options.inputs), chosen_codes.judge(options.judged)
    table = Table(*COLUMNS)
    for bits in options.bits:
        found = rows(bits, inputs, judged)
        cells = [each.cells(found[0].each) for each in found]
        for each in cells:
            table.add_row(*each)
        if options.write:  # after each number of bits: a run that is stopped keeps what it has measured
            PAGE.write_text(rows_between(PAGE.read_text(), BEGIN, END, COLUMNS, cells, str(PAGE), keys=2))
    Console().print(table)


if __name__ == "__main__":
    main()
