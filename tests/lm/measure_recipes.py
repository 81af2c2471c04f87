"""Every recipe of weights, with and without int8 activations, with every type of cache, on a device: run by hand.

    PYTHONPATH=tests/support python -P tests/lm/measure_recipes.py --device cpu [--model Mixtral] [--formats nf4 q4_K]
        [--part 1/2] [--record FILE]

test_moe.py has each recipe with one cache. This compiles their whole product, of a mixture of experts with one layer,
and compares logits with the oracle's (a prompt in three calls). What is in the record is not run again. The last lines
are the largest errors, by what is rounded, and the cases that failed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from by_path import load
from oracle_logits import logits_limit, oracle_logits

import qcompiler as qc
from qcompiler import formats
from qcompiler.lm.compile import CACHE_TYPES

PROMPT = list(range(5, 12))


def error_of(model: Any, recipe: str, activations: Any, cache: Any, device: str) -> float:
    """Of the norm of the oracle's logits."""
    # with int8 rows attention rounds to bf16 by default, which the oracle does not
    quant = qc.QuantConfig(recipe, activations=activations, compute="exact", promise_bits=None)
    lm = qc.compile_causal_lm(model, quant, max_seq_len=24, chunk=8, kv_cache=cache, device=device)
    theirs, held = oracle_logits(lm, PROMPT), lm.conversation()
    ours = np.concatenate([held.read(PROMPT[:5], logits="all")[0], held.read(PROMPT[5:6])[0], held.read(PROMPT[6:])[0]])
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", default="Mixtral")
    parser.add_argument("--formats", nargs="+", default=list(formats.names()))
    parser.add_argument("--part", default="1/1")
    parser.add_argument("--record", type=Path, default=Path("build/recipes.json"))
    given = parser.parse_args()
    number, parts = map(int, given.part.split("/"))
    record = json.loads(given.record.read_text()) if given.record.exists() else {}
    model = load("tests/lm/test_moe.py").build(given.model)
    caches = [each for each in CACHE_TYPES if each != "auto"]
    cases = list(itertools.product(given.formats, (None, "int8"), caches))[number - 1 :: parts]
    for each, (recipe, activations, cache) in enumerate(cases):
        key = f"{given.model} {recipe} {activations} {cache} {given.device}"
        if key in record and not isinstance(record[key], str):
            continue
        start = time.time()
        try:
            record[key] = error_of(model, recipe, activations, cache, given.device)
        except qc.QCompilerError as error:
            record[key] = f"{type(error).__name__}: {error}"
        given.record.parent.mkdir(parents=True, exist_ok=True)
        given.record.write_text(json.dumps(record, indent=1))
        print(f"{each + 1}/{len(cases)} {key}: {record[key]} ({time.time() - start:.1f} s)", flush=True)
    return summary(record)


def summary(record: dict[str, Any]) -> int:
    """Prints the largest error of each kind, and what failed; 1 if anything did."""
    largest: dict[tuple[str, str, str], float] = {}
    bad = []
    for key, found in record.items():
        _, _, activations, cache, device = key.split(" ")
        limit = logits_limit(activations != "None", cache)
        if isinstance(found, str) or not found <= limit:
            bad.append(f"{key}: {found}")
            continue
        kind = (device, "int8 activations" if activations != "None" else "no activations", cache)
        largest[kind] = max(largest.get(kind, 0.0), found)
    for (device, how, cache), most in sorted(largest.items()):
        print(f"{device:6s} {how:18s} {cache:5s} {most:.1e} of {logits_limit(how == 'int8 activations', cache):.0e}")
    print(f"{len(record) - len(bad)} of {len(record)} within their limits", *bad, sep="\n")
    return bool(bad)


if __name__ == "__main__":
    raise SystemExit(main())
