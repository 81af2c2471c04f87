"""The third oracle: upstream MLIR compiles the text of each model of the suite, and agrees with eager torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import upstream_cases
from by_path import load

import qcompiler as qc
from qcompiler.formats import int8_rows
from qcompiler.frontends.torch.frontend import import_torch
from qcompiler.ir.mlir_oracle import mlir_jit, parses_in_mlir

zoo = load("tests/models/zoo.py")
vision, recurrent = load("tests/models/test_vision.py"), load("tests/models/test_recurrent.py")
states, static_cache = load("tests/models/test_states.py"), load("tests/models/test_static_cache.py")

FORMATS = (
    "nf4", "int4", "q8_0", "int8", "nf4:double_quant", "q4_0", "fp8_e4m3", "mxfp4", "int3", "q5_1", "nvfp4", "iq4_nl",
    "fp4", "mxfp8", None, "llm_int8", "int4:symmetric=False", "q4_1", "int2:group=64", "q5_0", "mxfp4_ggml", "fp8_e5m2",
)  # fmt: skip
NAMES = (*zoo.ZOO, *zoo.TEXT)


Tensors = dict[str, torch.Tensor] | tuple[torch.Tensor, ...]


def agree(model: torch.nn.Module, example: Tensors, inputs: Tensors, *, level: int = 0, **options: Any) -> None:
    named = isinstance(example, dict)
    args, kwargs = ((), example) if named else (example, None)
    imported, module = upstream_cases.lowered(model, args, kwargs, **options)
    parses_in_mlir(module.text, upstream_only=True)
    oracle = imported.quantized.module
    with torch.no_grad():
        wanted = upstream_cases.leaves(oracle(**inputs) if isinstance(inputs, dict) else oracle(*inputs))
    given = inputs.values() if isinstance(inputs, dict) else inputs
    got = mlir_jit(module.text, module.arguments(*(x.numpy() for x in given)), level=level)
    assert len(got) == module.outputs == len(wanted)
    for ours, theirs in zip(got, wanted, strict=True):
        assert ours.shape == theirs.shape
        assert np.linalg.norm(ours - theirs) <= 2e-5 * np.linalg.norm(theirs)


@pytest.mark.parametrize("name", NAMES)
def test_text_models(name: str) -> None:
    number = NAMES.index(name)
    case = zoo.ZOO[name]() if name in zoo.ZOO else zoo.TEXT[name].case(masked=number % 2 == 1)
    quant, level = FORMATS[number % len(FORMATS)], 2 if name == "minilm" else 0
    agree(case.model, case.example, case.inputs, quant=quant, dynamic_shapes=case.dynamic_shapes, level=level)


@pytest.mark.parametrize("name", vision.MODELS)
def test_models_with_convolutions(name: str) -> None:
    """Packed convolutions are linears of windows; grouped ones stay convolutions in float."""
    case = vision.MODELS[name]()
    quant, level = FORMATS[list(vision.MODELS).index(name)], 2 if name == "unet" else 0
    agree(case.model, case.example, case.inputs, quant=quant, dynamic_shapes=case.dynamic_shapes, level=level)


@pytest.mark.parametrize("quant", [None, "nf4", "mxfp8"])
def test_recurrent_layers(quant: str | None) -> None:
    b, t = ("b", 1, 9), ("t", 1, 50)
    sizes = {"x": {0: b, 1: t}, "h": {1: b}, "c": {1: b}}
    model = recurrent.Layers(recurrent.WIDTH).eval()
    example = recurrent.arguments(recurrent.WIDTH, 3, 7)
    inputs = recurrent.arguments(recurrent.WIDTH, 2, 9)
    agree(model, example, inputs, quant=quant, dynamic_shapes=sizes)


def test_states_are_arguments_and_results() -> None:
    """Three calls, each with the states that the one before gave."""
    model = states.States().eval()
    imported, module = upstream_cases.lowered(model, (torch.randn(3, 4),), dynamic_shapes={"x": {0: ("n", 1, 6)}})
    assert set(module.updates) == set(module.states) == set(imported.states)
    held: dict[str, np.ndarray[Any, Any]] = {}
    for rows in (3, 1, 6):
        x = torch.randn(rows, 4)
        got = mlir_jit(module.text, module.arguments(x.numpy(), states=held), level=0)
        held = dict(zip(module.updates, got[module.outputs :], strict=True))
        for ours, theirs in zip(got, upstream_cases.leaves(model(x)), strict=False):
            np.testing.assert_array_equal(ours, theirs)


def test_tokens_one_by_one_over_a_static_cache() -> None:
    from transformers.integrations.executorch import TorchExportableModuleWithStaticCache

    step = TorchExportableModuleWithStaticCache(static_cache.llama(), batch_size=1, max_cache_len=static_cache.LENGTH)
    size = ("s", 1, 24)
    example = {"input_ids": torch.ones(1, 7, dtype=torch.int64), "cache_position": torch.arange(7)}
    dims = {"input_ids": {1: size}, "cache_position": {0: size}}
    _, module = upstream_cases.lowered(step, (), example, dynamic_shapes=dims, quant="int4")
    tokens = torch.randint(0, 97, (1, 9))

    def run(first: int, last: int, held: dict[str, Any]) -> tuple[np.ndarray[Any, Any], dict[str, Any]]:
        inputs = (tokens[:, first:last].numpy(), torch.arange(first, last).numpy())
        got = mlir_jit(module.text, module.arguments(*inputs, states=held), level=0)
        return got[0], dict(zip(module.updates, got[module.outputs :], strict=True))

    whole, _ = run(0, 9, {})
    prompt, held = run(0, 7, {})
    np.testing.assert_allclose(prompt[:, -1], whole[:, 6], atol=1e-4)
    for place in (7, 8):
        logits, held = run(place, place + 1, held)
        np.testing.assert_allclose(logits[:, -1], whole[:, place], atol=1e-4)


class Results(torch.nn.Module):
    """The layers of the zoo's MLP; every result that becomes a row of int8 is one of the model."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        joined = self.joined(x)
        gated = self.gated(joined)
        return joined, gated, self.model.last(gated)

    def joined(self, x: torch.Tensor) -> torch.Tensor:
        parts = [act(layer(x)) for layer, act in zip(self.model.layers, self.model.activations, strict=True)]
        return torch.stack(parts, dim=0).sum(0)

    def gated(self, joined: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.glu(self.model.gate(joined), dim=-1)


class Apart(Results):
    """The same results, each from rows that are given: the codes are those of these rows."""

    def forward(self, x: torch.Tensor, joined: torch.Tensor, gated: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        return self.joined(x), self.gated(joined), self.model.last(gated)


ROUNDINGS = 8 * np.sqrt(64 + 27 + 16) * 2.0**-24
"""Relative, in the norm: sums of 64 products and of 27 parts, and some 16 roundings of an activation, are independent
and add as their squares do; sums of 64 products of any sign are sqrt(64) = 8 times smaller than their terms together.
Another code changes a row by 1/127 of its largest number, which is at least 1/8 of the row's norm: 1e-3 of one row of
61, 1e-4 of all, which is 25 times as much."""


def codes(rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return int8_rows.codes_of(int8_rows.quantise(rows, "token", 0.0, None), rows.shape[1])


def test_int8_activations() -> None:
    """Rows of int8 are made and multiplied: from the same rows, and so with the same codes, to the same numbers.

    In a whole model a code on the border of two may round the other way.  Rows in which none does are equal, too.
    """
    case, config = zoo.ZOO["mlp"](), qc.QuantConfig("int8", activations="int8", promise_bits=None)
    x, sizes = case.inputs["x"], case.dynamic_shapes["x"]
    imported, module = upstream_cases.lowered(Results(case.model), (x,), quant=config, dynamic_shapes={"x": sizes})
    parses_in_mlir(module.text, upstream_only=True)
    got = mlir_jit(module.text, module.arguments(x.numpy()), level=0)
    given = (x, *(torch.from_numpy(rows) for rows in got[:2]))
    with torch.no_grad():
        whole = upstream_cases.leaves(imported.quantized.module(x))
        apart = import_torch(Apart(case.model), given, quant=config).quantized.module
        wanted = upstream_cases.leaves(apart(*given))
    for ours, theirs in zip(got, wanted, strict=True):
        assert np.linalg.norm(ours - theirs) <= ROUNDINGS * np.linalg.norm(theirs)
    same = np.ones(len(x), bool)
    for ours, theirs in zip(got[:2], whole[:2], strict=True):
        same &= (codes(ours) == codes(theirs)).all(1)
    assert same.any()
    assert np.linalg.norm((got[2] - whole[2])[same]) <= ROUNDINGS * np.linalg.norm(whole[2][same])
