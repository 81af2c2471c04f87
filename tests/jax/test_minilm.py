"""all-MiniLM-L6-v2 with its true weights, in plain JAX: the same program as from the module of torch."""

from __future__ import annotations

from types import ModuleType

import jax
import numpy as np
import pytest
from by_path import load

import qcompiler as qc
from qcompiler.frontends.jax.float_run import Calibration
from qcompiler.frontends.jax.frontend import import_jax

pytestmark = pytest.mark.slow
EPSILON = 2.0**-24
LAYERS, WIDTH, FFN = 6, 384, 1536


@pytest.mark.parametrize("name", ["nf4", "int8"])
def test_both_doors_give_the_same_embeddings(name: str, example: ModuleType) -> None:
    """The codes are the same, to the bit. Results differ by roundings alone, where the two write a sum in another order
    or a function by another name: JAX sums the squares of a norm by itself, gelu is x * (1 + erf) / 2 or erfc, and both
    are one more rounding in each of some ten sums a layer, of up to FFN terms. Independent roundings of sums of n terms
    grow as sqrt(n): 10 * LAYERS sums of sqrt(FFN) units are 3e-4 relative at the very most, and 1e-5 in the norm, since
    each sum's own error is averaged over its WIDTH results. Both sides have such errors: twice that.
    """
    tolerance = 10 * LAYERS * np.sqrt(FFN) * EPSILON / np.sqrt(WIDTH) * 2
    params, peer = example.load_params(), example.torch_example()
    batches = peer.load_batches(8)[:3]
    program = example.compile_encoder(params, name)
    twin = peer.compile_encoder(peer.load_encoder(), name, None)
    ours, theirs = example.embed(program, batches, np.int32), example.embed(twin, batches, np.int64)
    worst = np.linalg.norm(ours - theirs, axis=1).max()
    assert worst <= tolerance, (worst, tolerance)
    oracle = jax.jit(program.oracle)
    wanted = example.embed(oracle, batches, np.int32)
    assert np.linalg.norm(ours - wanted, axis=1).max() <= tolerance
    quantised, expected = (
        {
            row.parameters[0].removeprefix("bert.").removeprefix("encoder."): row.format
            for row in each.ledger
            if row.format
        }
        for each in (program, twin)
    )
    assert quantised.items() <= expected.items()
    text = program.ir("raise-idioms")
    assert text.count("= qc.attention ") == LAYERS and text.count("= qc.layer_norm ") == 2 * LAYERS + 1


def test_codes_by_data_give_embeddings_of_other_sentences_nearer_to_the_float_models(example: ModuleType) -> None:
    """GPTQ in int4 over 128 sentences, judged on 24 others by the oracle (docs/doors.md#calibration)."""
    params, batches = example.load_params(), example.torch_example().load_batches(8)
    sizes = {name: {0: ("b", 1, 64), 1: ("s", 1, 256)} for name in ("input_ids", "attention_mask")}
    data = [tuple(np.asarray(batch[name]).astype(np.int32) for name in sizes) for batch in batches[8:24]]
    wanted, cosines = example.embed(lambda *a: example.encode(params, *a), batches[:3], np.int32), []
    for algorithm, given in (("nearest", None), ("gptq", Calibration(data))):
        quant = qc.QuantConfig("int4:group=32", promise_bits=None, embedding="int8", algorithm=algorithm)
        shape = np.ones((3, 11), np.int32)
        result = import_jax(example.encode, (params, shape, shape), None, quant, sizes, calibration=given)
        found = example.embed(jax.jit(result.oracle()), batches[:3], np.int32)
        norms = np.linalg.norm(found, axis=1) * np.linalg.norm(wanted, axis=1)
        cosines.append((found * wanted).sum(1) / norms)
    print([(each.mean(), each.min()) for each in cosines])
    assert 1 - cosines[1].mean() < 0.5 * (1 - cosines[0].mean())


@pytest.fixture(scope="module")
def example() -> ModuleType:
    return load("examples/jax_minilm.py")
