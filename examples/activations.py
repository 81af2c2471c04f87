"""all-MiniLM-L6-v2 with activations in int8: products of integers beside the same codes computed in fp32.

    python examples/activations.py [--recipes int8 int8,int8 int8,llm_int8 int4,int8] [--batches 4]

A recipe is a format, or a format and what linears read.  For each: the cosine of the sentence embeddings against the
fp32 model, of the compiled program (which multiplies integers) and of its oracle, the rewritten torch program, which
computes with the values of the same codes in fp32; and how far the two lie apart.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import qcompiler as qc


def load_example() -> Any:
    """minilm.py beside this file, as a module."""
    spec = importlib.util.spec_from_file_location("minilm_example", Path(__file__).with_name("minilm.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--recipes", nargs="+", default=["int8", "int8,int8", "int8,llm_int8", "int4", "int4,int8"])
    parser.add_argument("--batches", type=int, default=None, help="of 16 sentences; default: all")
    options = parser.parse_args()
    example = load_example()
    model, batches = example.load_encoder(), example.load_batches()[: options.batches]
    reference = example.embed(model, batches)
    table = Table(title=f"Cosine against torch fp32 over {len(reference)} sentences")
    for column in ("weights", "activations", "mean", "worst", "in fp32: mean", "worst", "apart by at most"):
        table.add_column(column, justify="right" if column not in ("weights", "activations") else "left")
    for recipe in options.recipes:
        weights, _, activations = recipe.partition(",")
        quant = qc.QuantConfig(weights, activations=activations or None)
        program = example.compile_encoder(model, quant, None)
        found = [example.embed(run, batches) for run in (program, program.oracle)]
        ours, oracle = (example.cosines(each, reference) for each in found)
        apart = 1 - example.cosines(*found).min()
        numbers = (f"{ours.mean():.6f}", f"{ours.min():.6f}", f"{oracle.mean():.6f}", f"{oracle.min():.6f}")
        table.add_row(weights, activations or "float", *numbers, f"{apart:.1e}")
        assert np.isfinite(found[0]).all()
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
