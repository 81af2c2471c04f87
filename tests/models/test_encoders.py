"""Encoders of transformers through the compiler: answers, what the IR has become of each, and the table of models."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from by_path import load

oracles = load("tests/models/oracles.py")
zoo = oracles.zoo

QUICK = {("t5", "int8", True)}
"""(architecture, format, with a padding mask): what `make test` compiles in fp32."""
QUICK_BF16: set[tuple[str, str | None, bool]] = set()


@pytest.mark.parametrize(("name", "quant", "masked"), oracles.fp32_cases(zoo.ENCODERS, QUICK))
def test_fp32_equals_the_eager_oracle(name, quant, masked):
    _, program = oracles.compiled(name, quant, masked=masked)
    inputs = [zoo.tokens(*size, masked) for size in oracles.SIZES]
    oracles.assert_equals_the_oracle(program, inputs, least=1.0)


@pytest.mark.parametrize(("name", "quant", "masked"), oracles.bf16_cases(zoo.ENCODERS, QUICK_BF16))
def test_bf16_is_as_close_to_float64_as_torch(name, quant, masked):
    case, program = oracles.compiled(name, quant, torch.bfloat16, masked=masked)
    oracles.assert_as_close_to_float64_as_torch(case, program, case.inputs)


@pytest.mark.slow
@pytest.mark.parametrize("name", zoo.ENCODERS)
def test_every_form_is_raised_and_nothing_is_left_between(name):
    """Each layer's norms and attention are one op; what else remains is known (zoo.py), and so is its number."""
    _, program = oracles.compiled(name)
    assert oracles.shape_of_the_program(program) == zoo.OPS[name]


def test_the_position_bias_of_t5_is_gathered_at_load_time():
    """The bias depends on the length alone: a call reads a part of what init has made, and gathers nothing."""
    _, program = oracles.compiled("t5", "int8", masked=True)
    parts = program.ir("fuse-elementwise").split("func.func @")
    (main,), (init,) = ([part for part in parts if part.startswith(name)] for name in ("main", "init"))
    assert "qc.gather" not in main and main.count("= qc.embedding") == 1, "the embedding of the ids is the only one"
    assert init.count("= qc.embedding") == 1, "that of the distances"
    assert oracles.shape_of_the_program(program)["constant"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("name", "attention"), [(n, a) for n, each in zoo.ENCODERS.items() for a in each.others])
def test_the_other_attention_implementation(name, attention, masked):
    _, program = oracles.compiled(name, masked=masked, attention=attention)
    assert oracles.shape_of_the_program(program).get("attention") == 2, "attention written out is attention, too"
    inputs = [zoo.tokens(*size, masked) for size in oracles.SIZES]
    oracles.assert_equals_the_oracle(program, inputs, least=1.0)


def test_the_page_of_models_says_what_the_tests_check():
    page = Path(__file__).parents[2] / "docs" / "models.md"
    table = oracles.table_of_models()
    assert table in page.read_text(), f"docs/models.md needs this table:\n{table}"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "quant"), [("t5", "nf4"), ("mpnet", "int8")])
def test_on_the_simulated_gpu(name, quant):
    _, program = oracles.compiled(name, quant, masked=True, device="sim:0")
    for size in ((2, 9), (1, 1)):
        inputs = zoo.tokens(*size, masked=True)
        with torch.no_grad():
            wanted = oracles.leaves(program.oracle(**inputs))
        for ours, theirs in zip(oracles.leaves(program(**inputs)), wanted, strict=True):
            assert np.linalg.norm(ours - theirs) <= 1e-5 * np.linalg.norm(theirs)
