"""Whole models through the compiler, against the eager oracle (fp32) and a float64 oracle (bf16)."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from by_path import load

import qcompiler as qc
from qcompiler.errors import ArgumentError, KernelSelectionError, UnsupportedOperatorError
from qcompiler.inspect.checks import recomputed_per_call

oracles = load("tests/models/oracles.py")
zoo = oracles.zoo

QUICK = [("minilm", "nf4"), ("gpt2", "nf4"), ("mlp", "int8")]
SLOW = [(m, q) for m in ("minilm", "bert", "gpt2", "mlp") for q in (None, "nf4", "int8", "int4") if (m, q) not in QUICK]
CASES = [pytest.param(m, q, id=f"{m}-{q}") for m, q in QUICK]
CASES += [pytest.param(m, q, id=f"{m}-{q}", marks=pytest.mark.slow) for m, q in SLOW]


@cache
def compiled(name: str, quant: str | None, dtype: torch.dtype) -> tuple[Any, Any]:
    case = zoo.ZOO[name]()
    model = case.model.to(dtype)
    example = {k: v.to(dtype) if v.is_floating_point() else v for k, v in case.example.items()}
    return case, qc.qcompile(model, kwargs=example, quant=quant, dynamic_shapes=case.dynamic_shapes)


@pytest.mark.parametrize(("name", "quant"), CASES)
def test_fp32_equals_the_eager_oracle(name, quant):
    case, program = compiled(name, quant, torch.float32)
    with torch.no_grad():
        expected = oracles.leaves(program.oracle(**case.inputs))
    assert not program.image.torch_calls
    assert expected[0].std() >= (1.0 if name != "minilm" else 0.05), "outputs too small to show errors"
    for ours, theirs in zip(oracles.leaves(program(**case.inputs)), expected, strict=True):
        rms = np.sqrt((theirs**2).mean())
        assert np.linalg.norm(ours - theirs) <= 1e-5 * np.linalg.norm(theirs)
        assert np.abs(ours - theirs).max() <= 1e-4 * rms


@pytest.mark.parametrize(
    ("name", "quant"),
    [pytest.param(*c.values, id=c.id, marks=[] if c.id == "mlp-int8" else pytest.mark.slow) for c in CASES],
)
def test_bf16_is_as_close_to_float64_as_torch(name, quant):
    case, program = compiled(name, quant, torch.bfloat16)
    inputs = {k: v.to(torch.bfloat16) if v.is_floating_point() else v for k, v in case.inputs.items()}
    wide = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
    with torch.no_grad():
        exact, unrounded = (
            oracles.leaves(oracles.float64_model(case.model, program, rounded=rounded)(**wide))
            for rounded in (True, False)
        )
        eager = oracles.leaves(program.oracle(**inputs))
    for ours, theirs, truth, other in zip(oracles.leaves(program(**inputs)), eager, exact, unrounded, strict=True):
        # Kernels of few rows leave out the rounding of weights (docs/decisions/031-arithmetic.md), or round the values
        # of codes instead; those of many rows do not. So ours may be off by as much more as that rounding changes.
        own = min(truth, other, key=lambda each, ours=ours: np.linalg.norm(ours - each))
        rounding = np.linalg.norm(truth - other)
        assert np.linalg.norm(ours - own) <= 1.5 * (np.linalg.norm(theirs - truth) + rounding)
        squares, eagers = (
            ((got - wanted) ** 2).reshape(-1, truth.shape[-1]) for got, wanted in ((ours, own), (theirs, truth))
        )
        for axis, what in ((1, "row"), (0, "column")):
            worst, allowed = (np.sqrt(each.mean(axis)).max() for each in (squares, eagers))
            assert worst <= max(4 * np.sqrt(squares.mean()), 1.5 * allowed), f"one {what} is far worse than the rest"


@pytest.mark.parametrize("name", ["minilm", "gpt2"])
def test_result_structure_is_the_models_own(name):
    case, program = compiled(name, "nf4", torch.float32)
    with torch.no_grad():
        expected = case.model(**case.inputs)
    result = program(**case.inputs)
    assert type(result) is type(expected)
    assert list(result.keys()) == list(expected.keys())


def test_padding_does_not_change_the_tokens_before_it():
    _, program = compiled("minilm", "nf4", torch.float32)
    ids = torch.randint(1000, 2000, (1, 7))
    short = program(input_ids=ids, attention_mask=torch.ones(1, 7, dtype=torch.int64)).last_hidden_state
    padded = torch.cat([ids, torch.zeros(1, 6, dtype=torch.int64)], 1)
    mask = torch.tensor([[1] * 7 + [0] * 6])
    longer = program(input_ids=padded, attention_mask=mask).last_hidden_state[:, :7]
    torch.testing.assert_close(short, longer, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("batch", "length"), [(1, 1), (1, 2), (8, 1), (2, 61)])
def test_extreme_sizes_of_the_declared_range(batch, length):
    _, program = compiled("gpt2", "nf4", torch.float32)
    ids = torch.randint(0, 199, (batch, length))
    with torch.no_grad():
        expected = oracles.leaves(program.oracle(input_ids=ids))
    for ours, theirs in zip(oracles.leaves(program(input_ids=ids)), expected, strict=True):
        assert np.linalg.norm(ours - theirs) <= 1e-5 * np.linalg.norm(theirs)


def test_causal_model_computes_no_mask_or_position_grid_per_call():
    _, program = compiled("gpt2", "nf4", torch.float32)
    assert recomputed_per_call(program.plan) == []


def test_recipe_keeps_its_promise_on_minilm():
    _, program = compiled("minilm", "nf4", torch.float32)
    assert program.ledger.bits_per_weight() <= 6.5
    formats_used = {row.format.split(":")[0] for row in program.ledger if row.format}
    assert formats_used == {"nf4", "int8"}


def test_what_this_release_cannot_do_is_refused_before_anything_is_compiled():
    model, x = torch.nn.Linear(4, 4).eval(), torch.zeros(1, 4)
    with pytest.raises(ArgumentError, match=r"fallback='numpy': choose 'torch', or None"):
        qc.qcompile(model, (x,), fallback="numpy")
    with pytest.raises(ArgumentError, match=r"verify_each='number': choose 'ir', 'numerics' or None"):
        qc.qcompile(model, (x,), verify_each="number")


def test_an_unsupported_operator_recommends_only_what_works():
    class Gamma(torch.nn.Module):
        def forward(self, x):
            return torch.lgamma(x)

    with pytest.raises(UnsupportedOperatorError, match=r"aten\.lgamma.*outside of the compiled model") as caught:
        qc.qcompile(Gamma(), (torch.ones(3),))
    assert 'fallback="torch"' in str(caught.value)


@pytest.mark.parametrize("name", ["softmax", "layer_norm"])
def test_double_precision_is_refused_with_its_place(name):
    class Double(torch.nn.Module):
        def forward(self, x):
            x = x.double()
            return x.softmax(1) if name == "softmax" else torch.nn.functional.layer_norm(x, (4,))

    with pytest.raises(KernelSelectionError, match=r"test_models\.py:\d+' is f64, and its kernels .*\.float\(\)"):
        qc.qcompile(Double(), (torch.ones(4, 4),))


def test_products_over_nothing_are_zero():
    class Nothing(torch.nn.Module):
        def forward(self, x):
            return x[:, :0] @ x.new_zeros(0, 3), x[:, :0].sum(1)

    program = qc.qcompile(Nothing(), (torch.ones(4, 6),), verify_each="numerics")
    product, total = program(torch.ones(4, 6))
    assert torch.equal(product, torch.zeros(4, 3)) and torch.equal(total, torch.zeros(4))
