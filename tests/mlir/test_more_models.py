"""The third oracle for models that other folders build for one purpose: blocks, caches, states, experts, convolutions.

Tolerances: fp32 as in test_models.py. A model of 16 bits is rounded once for each op here, and where eager torch rounds
there: a few units of its last place.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import rewritten_models
import torch
import upstream_cases
from by_path import load

import qcompiler as qc
from qcompiler.frontends.torch.common.values import to_numpy
from qcompiler.ir.mlir_oracle import Jitted, parses_in_mlir

conv, experts, plain = (load(f"tests/frontends/test_{name}.py") for name in ("conv", "experts", "models"))
blocks, gpu_blocks = load("tests/models/blocks.py"), load("tests/models/test_gpu_blocks.py")
convolutions, windows, causal = (load(f"tests/models/test_{n}.py") for n in ("convolutions", "windows", "causal"))
devices, diffusion = load("tests/models/test_device_maps.py"), load("tests/models/test_diffusion.py")
state, attributes = load("tests/models/test_state.py"), load("tests/models/test_attributes.py")
caches, int8_cache = load("tests/models/test_static_cache.py"), load("tests/models/test_int8_cache.py")
recurrent, negative = load("tests/models/test_recurrent.py"), load("tests/models/test_negative_positions.py")
random_models = load("tests/models/random_models.py")

Call = Sequence[torch.Tensor]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2.5e-2, torch.float16: 4e-3}


def agree(
    model: torch.nn.Module, calls: Sequence[Call], *, example: Call | None = None, tolerance: float = 2e-5,
    **options: Any,
) -> None:  # fmt: skip
    """Calls in a row, each with the states of the one before; eager torch runs a copy of the model."""
    reference = copy.deepcopy(model)
    imported, module = upstream_cases.lowered(model, example if example is not None else calls[0], **options)
    if options.get("quant") is not None:
        reference = imported.quantized.module
    parses_in_mlir(module.text, upstream_only=True)
    run, held = Jitted(module.text, level=0), dict(module.states)
    for call in calls:
        with torch.no_grad():
            wanted = upstream_cases.leaves(copy.deepcopy(reference(*call)))
        got = run(*module.arguments(*(to_numpy(x) for x in call), states=held))
        held.update(zip(module.updates, got[module.outputs :], strict=True))
        assert module.outputs == len(wanted)
        for number, (ours, theirs) in enumerate(zip(got, wanted, strict=False)):
            assert ours.shape == theirs.shape and ours.dtype == theirs.dtype, number
            wide = theirs.astype(np.float64)
            assert np.linalg.norm(ours.astype(np.float64) - wide) <= tolerance * np.linalg.norm(wide), number


def recipe(quant: str | None) -> Any:
    return None if quant is None else qc.QuantConfig(quant, promise_bits=None)


@pytest.mark.parametrize(("kind", "quant", "dtype"), gpu_blocks.CASES, ids=gpu_blocks.NAMES)
def test_blocks(kind: str, quant: str | None, dtype: torch.dtype) -> None:
    sizes = {"hidden": 64, "inner": 96} if quant == "int4" else {"hidden": 48, "inner": 104}
    model = blocks.scaled(getattr(blocks, kind)(**({} if kind.endswith("Block") else sizes))).to(dtype)
    calls = [gpu_blocks.inputs(model, b, s, dtype, b) for b, s in ((2, 7), (1, 1), (3, 21))]
    shapes = tuple(gpu_blocks.DIMS for _ in calls[0])
    agree(model, calls, quant=quant, dynamic_shapes=shapes, tolerance=TOLERANCE[dtype])


@pytest.mark.parametrize("seed", range(12))
def test_random_models(seed: int) -> None:
    """Every format and type in turn."""
    case = random_models.random_case(seed)
    calls = [case.inputs(b, s, n) for n, (b, s) in enumerate(case.sizes([(2, 7), (1, 1), (3, 5)]))]
    agree(case.model, calls, quant=case.quant, dynamic_shapes=case.dynamic_shapes, tolerance=TOLERANCE[case.dtype])


@pytest.mark.parametrize("quant", [None, "int8"])
def test_convolutions(quant: str | None) -> None:
    dims = {"x": {0: ("b", 1, 4), 2: ("h", 16, 48), 3: ("w", 16, 48)}}
    calls = [(convolutions.images(*size),) for size in ((2, 32, 40), (1, 17, 16))]
    agree(convolutions.Blocks().eval(), calls, quant=recipe(quant), dynamic_shapes=dims)


@pytest.mark.parametrize("kind", ["image", "line"])
def test_forms_of_convolutions(kind: str) -> None:
    table, size = (conv.IMAGE, (13, 11)) if kind == "image" else (conv.LINE, (17,))
    example = (torch.randn(2, 6, *(n + 4 for n in size)),)
    calls = [(torch.randn(3, 6, *size),)]
    agree(conv.Table(table).eval(), calls, example=example, dynamic_shapes={"x": conv.DYNAMIC[kind]})


@pytest.mark.parametrize("form", ["windows", "joined"])
def test_attention_of_windows(form: str) -> None:
    torch.manual_seed(0)
    model, calls = getattr(windows, form.capitalize())().eval(), [windows.inputs(form, n) for n in (2, 1, 3)]
    dims = {name: {0: ("b", 1, 8)} for name in ("x", "mask")[: len(calls[0])]}
    agree(model, calls, dynamic_shapes=dims)


def test_a_llama_written_by_hand() -> None:
    torch.manual_seed(0)
    dims = {"ids": {0: ("b", 1, 4), 1: ("s", 1, 41)}}
    calls = [(torch.randint(0, 97, size),) for size in ((3, 7), (1, 1), (2, 13))]
    agree(causal.Llama().eval(), calls, quant="nf4", dynamic_shapes=dims)


@pytest.mark.parametrize(("form", "tied"), [("written", True), ("aten", False), ("offset", False), ("layer", True)])
def test_decoders_of_the_rewrites(form: str, tied: bool) -> None:
    """Each form of norm that rewrites of the float graph look for."""
    calls = [(ids,) for ids in (rewritten_models.ids(1)[0], torch.tensor([[7]]))]
    model = rewritten_models.Decoder(form, tied=tied, bias=form == "layer")
    agree(model, calls, example=rewritten_models.EXAMPLE, quant=recipe("nf4"), dynamic_shapes=rewritten_models.SHAPES)


@pytest.mark.parametrize("guided", [False, True])
def test_diffusion(guided: bool) -> None:
    """Guidance enters by sin(1000 g f), where a bit of f is 1e-4 of the result (tests/models/test_diffusion.py)."""
    case, _ = diffusion.compiled(guided)
    given = diffusion.inputs(1, 6, 3, 0.3 if guided else None)
    model = Ordered(case.model, list(case.example))
    agree(model, [tuple(given.values())], tolerance=4e-4 if guided else 2e-5)


class Ordered(torch.nn.Module):
    """A model called by position."""

    def __init__(self, model: torch.nn.Module, names: list[str]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *values: torch.Tensor) -> Any:
        return self.model(**dict(zip(self.names, values, strict=True)))


def test_a_tower_with_a_tied_weight() -> None:
    torch.manual_seed(0)
    agree(devices.Tower().eval(), [(devices.IDS,), (devices.IDS[:, :7].flip(0),)], quant="nf4")


# --- states ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", state.CASES)
def test_buffers_that_are_written(name: str) -> None:
    agree(state.One(name).eval(), [(x,) for x in state.rows(4)])


@pytest.mark.parametrize("name", attributes.KEPT)
def test_attributes_that_are_assigned(name: str) -> None:
    attributes.OfTheClass.total = torch.zeros(4)
    calls = [(x,) for x in torch.randn(4, 4, generator=torch.Generator().manual_seed(3))]
    agree(attributes.KEPT[name]().eval(), calls, tolerance=1e-4)


def test_caches_as_registered_buffers() -> None:
    torch.manual_seed(0)
    calls = [(torch.randn(2, n, 32), torch.arange(at, at + n)) for at, n in ((0, 7), (7, 1), (8, 4))]
    size = ("s", 1, 9)
    example = (torch.randn(2, 5, 32), torch.arange(5))
    agree(caches.Attends().eval(), calls, example=example, dynamic_shapes={"x": {1: size}, "at": {0: size}})


def test_a_cache_object() -> None:
    calls = [(caches.prompt(7),), (caches.prompt(1),), (caches.prompt(2),)]
    agree(caches.OwnCache(caches.llama()), calls, dynamic_shapes={"input_ids": {1: ("s", 1, 24)}})


def test_the_llama_of_the_int8_caches() -> None:
    """Without a cache; test_models.py has a static one."""
    calls = [tuple(int8_cache.call(start, count).values()) for start, count in ((0, 5), (5, 1), (6, 3))]
    size = ("s", 1, 24)
    dims = {"input_ids": {1: size}, "cache_position": {0: size}}
    agree(int8_cache.step("none"), calls, quant="q4_K", dynamic_shapes=dims)


def test_a_recurrent_state_in_an_attribute() -> None:
    chunks = torch.randn(4, 1, 6, recurrent.WIDTH)
    calls = [(chunk[:, : 6 - number],) for number, chunk in enumerate(chunks)]
    agree(recurrent.Streaming().eval(), calls, dynamic_shapes={"x": {1: ("t", 1, 20)}})


def test_rows_of_a_cache_and_of_an_argument() -> None:
    agree(negative.Cache(), [(negative.X, negative.positions(0, 1)), (negative.X * 3, negative.positions(6, 2))])
    agree(negative.Put(), [(torch.zeros(5), negative.positions(-1, 2), torch.tensor([1.0, 2.0]))])


# --- experts ---------------------------------------------------------------------------------------------------------

FORMS = ("Batched", "BatchedTransposed", "Gathered", "Dense", "DenseTransposed", "Both")


@pytest.mark.parametrize("quant", [None, "int8"])
@pytest.mark.parametrize("form", FORMS)
def test_forms_of_experts(form: str, quant: str | None) -> None:
    calls = [experts.inputs(rows) for rows in (5, 1, 16)]
    agree(getattr(experts, form)().eval(), calls, quant=recipe(quant), dynamic_shapes=experts.ROWS)


def test_an_mlp_with_every_activation() -> None:
    agree(plain._Mlp().eval(), [(torch.randn(n, 16),) for n in (5, 1, 11)], dynamic_shapes=({0: ("b", 1, 16)},))
