"""Threads that compile at once. torch.export keeps its state for the whole process, so that its errors were those of
another thread's model; a model that two threads compile would change while it is traced."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from by_path import load

import qcompiler as qc
from qcompiler.errors import ExportError
from qcompiler.frontends.quantise.insert_qdq import insert_qdq
from qcompiler.frontends.torch.capture.export import export_model
from qcompiler.frontends.torch.importer import import_program
from qcompiler.lm.step import prepared

IDS = list(range(3, 20))
SHAPES = {"input_ids": {1: torch.export.Dim("s", min=2, max=64)}}


def at_once(calls: list[Callable[[], Any]]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [each.result() for each in [pool.submit(call) for call in calls]]


def logits(model: Any, **options: Any) -> Any:
    lm = qc.compile_causal_lm(model, max_seq_len=32, chunk=8, device="cpu", **options)
    return lm.conversation().read(IDS, logits="all")[0]


def wanted(model: Any) -> Any:
    with torch.no_grad():
        return model(torch.tensor([IDS]), use_cache=False).logits[0].numpy()


def test_modules_compile_in_several_threads() -> None:
    torch.manual_seed(0)
    models = [torch.nn.Sequential(torch.nn.Linear(8, n), torch.nn.GELU(), torch.nn.Linear(n, 4)) for n in (3, 5, 7, 16)]
    x = torch.randn(5, 8)

    def call(model: Any) -> Any:
        return qc.qcompile(model, (x,), dynamic_shapes=({0: ("n", 1, 64)},)).run(x)

    found = at_once([lambda model=model: call(model.eval()) for model in models])
    for model, out in zip(models, found, strict=True):
        np.testing.assert_allclose(np.asarray(out), model(x).detach().numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_language_models_compile_in_several_threads() -> None:
    zoo = load("tests/models/zoo.py").DECODERS
    models = [zoo[name].build() for name in ("llama", "llama", "falcon", "mixtral")]
    for parameter in models[1].parameters():
        parameter.data.mul_(1.5)
    for model, out in zip(models, at_once([lambda model=model: logits(model) for model in models]), strict=True):
        assert np.linalg.norm(out - wanted(model)) <= 1e-5 * np.linalg.norm(out)


def test_a_module_that_holds_a_model_waits_for_its_compilation() -> None:
    """The model's attention is replaced meanwhile, and another thread would trace that."""
    model = load("tests/models/zoo.py").DECODERS["llama"].build()
    before = wanted(model)

    class Holder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, ids: Any) -> Any:
            return self.inner(ids, use_cache=False).logits

    ids = torch.tensor([IDS])
    out, held = at_once([lambda: logits(model), lambda: qc.qcompile(Holder().eval(), (ids,)).run(ids)])
    for found in (out, np.asarray(held)[0]):
        assert np.linalg.norm(found - before) <= 1e-5 * np.linalg.norm(before)


def test_a_call_of_a_model_that_another_thread_compiles_says_so() -> None:
    model = load("tests/models/zoo.py").DECODERS["llama"].build()
    with prepared(model, 1, 32, None, 32, 8), pytest.raises(ExportError, match="while another thread compiles it"):
        model(torch.tensor([IDS]), use_cache=False)
    assert wanted(model).any()


def test_two_threads_compile_one_model() -> None:
    model = load("tests/models/zoo.py").DECODERS["llama"].build()
    before, attention = wanted(model), model.config._attn_implementation
    for out in at_once([lambda batch=batch: logits(model, max_batch=batch) for batch in (1, 2)]):
        assert np.linalg.norm(out - before) <= 1e-5 * np.linalg.norm(before)
    assert model.config._attn_implementation == attention
    np.testing.assert_array_equal(wanted(model), before)


class Sleeping(torch.nn.Module):
    """Tells that it is traced, which then takes a while."""

    def __init__(self) -> None:
        super().__init__()
        self.traced, self.until = threading.Event(), threading.Event()

    def forward(self, x: Any) -> Any:
        self.traced.set()
        self.until.wait(2)
        return x * x.shape[0]


def test_a_graph_is_not_rewritten_or_imported_while_another_thread_traces() -> None:
    """Sizes of one thread's graph became nodes of what the other one traced: torch keeps that state for all threads."""
    build, ids = load("tests/models/zoo.py").DECODERS["mixtral"].build, torch.tensor([IDS])
    exported = export_model(build(), (ids,), {"use_cache": False}, SHAPES)
    rewritten: list[Any] = []
    for follows in (lambda: rewritten.append(insert_qdq(exported, "int8")), lambda: import_program(rewritten[0])):
        model = Sleeping()
        with ThreadPoolExecutor(1) as pool:
            sizes = ({0: torch.export.Dim("n", min=2, max=64)},)
            traced = pool.submit(export_model, model, (torch.ones(3, 4),), None, sizes)
            assert model.traced.wait(60)
            follows()
            assert traced.done(), "it waited for the other thread"
            traced.result()
