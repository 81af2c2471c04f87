"""The effect of calibration: the tiny Llama in formats that take an importance of columns, without and with it.

    python examples/importance.py [--formats q2_K q3_K q4_K] [--windows 128] [--inputs 32]

Inputs for calibration are pieces of the standard library that the model was trained on; quality is measured on the
held-out text, as in examples/tiny_llama.py.
"""

from __future__ import annotations

import argparse

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from tiny_llama import BATCH, LENGTH, calibration, held_out, load_model, log_probabilities, measure

import qcompiler as qc


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--formats", nargs="+", default=["q2_K", "q3_K", "q4_K"])
    parser.add_argument("--windows", type=int, default=128, help=f"windows of {LENGTH} held-out bytes")
    parser.add_argument("--inputs", type=int, default=32, help=f"calibration inputs of {LENGTH} bytes")
    chosen = parser.parse_args()
    torch.manual_seed(0)
    model, windows = load_model(), held_out()
    windows = windows[:: max(1, len(windows) // chosen.windows)][: chosen.windows]
    reference = [each.float() for each, _ in log_probabilities(model, windows)]
    table = Table("linears", "importance", "bits per byte", "KL", "top-1")
    base = measure(model, reference, windows)
    table.add_row("fp32", "", f"{base.bits_per_byte:.4f}", "0", "100 %")
    shapes = {"tokens": {0: ("batch", 1, BATCH), 1: ("length", 1, LENGTH)}}
    for text in track(chosen.formats, "formats"):
        for inputs in (None, calibration(chosen.inputs)):
            program = qc.qcompile(
                model,
                (torch.zeros(3, 37, dtype=torch.int64),),
                quant=qc.QuantConfig("float", linear=text, embedding="int8"),
                dynamic_shapes=shapes,
                calibrate=inputs,
            )
            found = measure(program.oracle, reference, windows)
            table.add_row(
                text,
                "no" if inputs is None else f"of {len(inputs)} inputs",
                f"{found.bits_per_byte:.4f}",
                f"{found.divergence:.2e}",
                f"{found.agreement * 100:.2f} %",
            )
    Console().print(table)


if __name__ == "__main__":
    main()
