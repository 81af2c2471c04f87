"""Decoders of transformers through the compiler: answers, what the IR has become of each, masks and positions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from by_path import load

import qcompiler as qc
from qcompiler.errors import ExportError

oracles = load("tests/models/oracles.py")
zoo = oracles.zoo

QUICK = {("llama", "nf4", True), ("gemma2", None, False)}
"""(architecture, format, with a padding mask): what `make test` compiles in fp32."""
QUICK_BF16 = {("llama", "nf4", True)}


@pytest.mark.parametrize(("name", "quant", "masked"), oracles.fp32_cases(zoo.DECODERS, QUICK))
def test_fp32_equals_the_eager_oracle(name, quant, masked):
    _, program = oracles.compiled(name, quant, masked=masked)
    inputs = [zoo.tokens(*size, masked) for size in oracles.SIZES]
    if masked:
        inputs.append(zoo.tokens(4, 11, masked=True, left=True))  # the first queries of a row see no key
    oracles.assert_equals_the_oracle(program, inputs, least=1.0)


@pytest.mark.parametrize(("name", "quant", "masked"), oracles.bf16_cases(zoo.DECODERS, QUICK_BF16))
@pytest.mark.slow
def test_bf16_is_as_close_to_float64_as_torch(name, quant, masked):
    case, program = oracles.compiled(name, quant, torch.bfloat16, masked=masked)
    oracles.assert_as_close_to_float64_as_torch(case, program, case.inputs)


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[] if (name, None, False) in QUICK else [pytest.mark.slow]) for name in zoo.DECODERS
])  # fmt: skip
def test_every_form_is_raised_and_nothing_is_left_between(name):
    """Each layer's norms, rope and attention are one op; what else remains is known (zoo.py), and so is its number."""
    _, program = oracles.compiled(name)
    assert oracles.shape_of_the_program(program) == zoo.OPS[name]


@pytest.mark.parametrize(("name", "causal", "windows", "caps", "masks"), [
    ("gemma2", 2, 1, 2, 0),
    pytest.param("mistral", 2, 2, 0, 0, marks=pytest.mark.slow),
    pytest.param("gemma3", 2, 1, 0, 0, marks=pytest.mark.slow),
    pytest.param("falcon-alibi", 0, 0, 0, 2, marks=pytest.mark.slow),
])  # fmt: skip
def test_windows_caps_and_causality_are_flags_of_attention(name, causal, windows, caps, masks):
    text = oracles.compiled(name)[1].ir("fuse-elementwise")
    lines = [line for line in text.splitlines() if "= qc.attention " in line]
    found = [sum(flag in line for line in lines) for flag in (", causal", "window = 5", "softcap = 5.0", "mask(")]
    assert len(lines) == 2 and found == [causal, windows, caps, masks]


def test_padding_joins_the_flag_as_a_mask_of_keys():
    """The triangle of a padded batch is a flag: what remains of the mask has one row for all queries."""
    text = oracles.compiled("llama", "nf4", masked=True)[1].ir("fuse-elementwise")
    lines = [line for line in text.splitlines() if "= qc.attention " in line]
    assert all("causal" in line and "mask(" in line for line in lines)
    kernels = [k for k in oracles.compiled("llama", "nf4", masked=True)[1].plan.kernels if "attention" in k.name]
    assert all(operand.strides[2] == 0 for k in kernels for operand in k.operands if operand.name == "mask")


def test_padding_does_not_change_the_tokens_before_it():
    _, program = oracles.compiled("llama", "nf4", masked=True)
    ids = zoo.tokens(1, 7)["input_ids"]
    short = program(input_ids=ids, attention_mask=torch.ones(1, 7, dtype=torch.int64)).logits
    padded = torch.cat([ids, torch.zeros(1, 6, dtype=torch.int64)], 1)
    longer = program(input_ids=padded, attention_mask=(torch.arange(13) < 7).long()[None]).logits[:, :7]
    torch.testing.assert_close(short, longer, rtol=1e-4, atol=1e-4)


def test_the_result_is_the_models_own_output_class():
    case, program = oracles.compiled("llama", "nf4", masked=True)
    with torch.no_grad():
        expected = case.model(**case.inputs)
    result = program(**case.inputs)
    assert type(result) is type(expected) and list(result.keys()) == list(expected.keys())


@pytest.mark.slow
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("name", "attention"), [(n, a) for n, each in zoo.DECODERS.items() for a in each.others])
def test_the_other_attention_implementation(name, attention, masked):
    _, program = oracles.compiled(name, masked=masked, attention=attention)
    assert oracles.shape_of_the_program(program).get("attention") == 2, "attention written out is attention, too"
    inputs = [zoo.tokens(*size, masked) for size in oracles.SIZES]
    if masked:
        inputs.append(zoo.tokens(4, 11, masked=True, left=True))
    oracles.assert_equals_the_oracle(program, inputs, least=1.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "phi3", "neox", "falcon"])
def test_positions_given_by_the_caller(name):
    _, program = oracles.compiled(name, positions=True)
    oracles.assert_equals_the_oracle(program, [zoo.tokens(*s, positions=True) for s in oracles.SIZES], least=1.0)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "quant"), [("gemma2", "nf4"), ("falcon", "int8"), ("neox", "int4")])
def test_on_the_simulated_gpu(name, quant):
    _, program = oracles.compiled(name, quant, device="sim:0")
    for size in ((2, 9), (1, 1)):
        inputs = zoo.tokens(*size)
        with torch.no_grad():
            (wanted,) = oracles.leaves(program.oracle(**inputs))
        (got,) = oracles.leaves(program(**inputs))
        assert np.linalg.norm(got - wanted) <= 1e-5 * np.linalg.norm(wanted)


def test_a_cache_in_the_result_is_refused_with_the_way_out():
    """It has no place in a program."""
    case = zoo.DECODERS["llama"].case()
    case.model.config.use_cache = True
    with pytest.raises(ExportError, match=r"DynamicCache.*use_cache=False"):
        qc.qcompile(case.model, kwargs=case.example, dynamic_shapes=case.dynamic_shapes)
