"""all-MiniLM-L6-v2 with activations in int8: integer products beside the same codes computed in fp32.

    python examples/activations.py [--recipes int8 int8,int8 int8,llm_int8 int4,int8] [--batches 4]

A recipe is a format, or a format and the type of linears' inputs.  For each recipe: the cosine of the sentence
embeddings against the fp32 model, for the compiled program (which multiplies integers) and for its oracle, the
rewritten torch program, which computes with the values of the same codes in fp32; and the distance between the two.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import Any

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
    print(f"cosine against torch fp32 over {len(reference)} sentences")
    print(f"{'weights':10} {'activations':12} {'mean':>10} {'worst':>10} {'in fp32':>10} {'worst':>10} {'apart':>8}")
    for recipe in options.recipes:
        weights, _, activations = recipe.partition(",")
        quant = qc.QuantConfig(weights, activations=activations or None)
        program = example.compile_encoder(model, quant, None)
        found = [example.embed(run, batches) for run in (program, program.oracle)]
        ours, oracle = (example.cosines(each, reference) for each in found)
        apart = 1 - example.cosines(*found).min()
        numbers = " ".join(f"{number:10.6f}" for number in (ours.mean(), ours.min(), oracle.mean(), oracle.min()))
        print(f"{weights:10} {activations or 'float':12} {numbers} {apart:8.1e}", flush=True)


if __name__ == "__main__":
    main()
