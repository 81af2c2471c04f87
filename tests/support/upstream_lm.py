"""Language models whose calls upstream MLIR runs: from the texts of `CausalLM.to_mlir`, and without a host compiler."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from upstream_cases import of_stage

import qcompiler as qc
from qcompiler.frontends.torch.frontend import import_torch
from qcompiler.inspect.upstream import UpstreamModule
from qcompiler.ir.mlir_oracle import Jitted
from qcompiler.lm import compile as compiling
from qcompiler.lm.conversation import DRAWN, MARKS
from qcompiler.lm.step import prepared
from qcompiler.plan.kinds.sample import ROW, SHARE_BITS, TOP_P, WORDS

# --- a compiled model -------------------------------------------------------------------------------------------------


class UpstreamSession:
    """What `LoadedProgram.session` gives, with a text of `CausalLM.to_mlir` for each entry point."""

    def __init__(self, modules: dict[str, tuple[UpstreamModule, Jitted]]) -> None:
        self.modules = modules
        self.held = dict(modules["prefill"][0].states)
        self.calls: list[str] = []

    def __call__(self, **given: Any) -> tuple[Any, Any]:
        b, s = given["ids"].shape
        entry = "prefill" if s > 1 else "decode" if b == 1 else "decode_batch"
        self.calls.append(entry)
        module, run = self.modules[entry]
        results = run(*module.arguments(*(given[name] for name in module.inputs), states=self.held))
        self.held = dict(zip(module.updates, results[module.outputs :], strict=True))
        logits, tokens = results[: module.outputs]
        return logits, tokens

    def set_states(self, states: dict[str, Any]) -> None:
        for name in (MARKS, DRAWN):
            if name in states:
                key = name.removeprefix("state.")
                old = self.held[key]
                self.held[key] = np.asarray(states[name]).view(old.dtype).reshape(old.shape)


def run_upstream(lm: qc.CausalLM) -> tuple[qc.CausalLM, list[UpstreamSession]]:
    """The same language model run by upstream MLIR, with a list of the sessions that it makes."""
    modules = {}
    for entry in ("prefill", "decode", *(["decode_batch"] if lm.max_batch > 1 else [])):
        module = lm.to_mlir("linalg", entry=entry, weights="arguments")
        modules[entry] = module, Jitted(module.text, level=0)
    made: list[UpstreamSession] = []

    def session() -> UpstreamSession:
        made.append(UpstreamSession(modules))
        return made[-1]

    run: Any = SimpleNamespace(device="cpu", session=session)
    return qc.CausalLM(run, lm.record), made


# --- a model without kernels -----------------------------------------------------------------------------------------


def lowered_decoder(model: Any, quant: Any = None, *, length: int = 40, chunk: int = 5, cache: Any = None) -> Any:
    """The text of a decoder's calls for one sequence, without a host compiler. `model` is as for compile_causal_lm."""
    module, weights = compiling.model_and_weights(model)
    with prepared(module, 1, length, cache, length, chunk) as step:
        options = {} if weights is None else {"weights": weights}
        imported = import_torch(
            step, (), compiling.example_inputs(1, length, chunk), dynamic_shapes=compiling.ranges_of(1, chunk),
            quant=quant, **options,
        )  # fmt: skip
        return of_stage(imported, "arguments")


def read(module: UpstreamModule, tokens: Sequence[int], chunk: int) -> np.ndarray[Any, Any]:
    """The logits (tokens, vocabulary) of a text that is read in pieces. Each call draws the most likely next token."""
    run, held, rows = Jitted(module.text, level=0), dict(module.states), []
    for begin in range(0, len(tokens), chunk):
        ids = np.array([tokens[begin : begin + chunk]])
        places = begin + np.arange(ids.shape[1])
        how = np.zeros((1, WORDS), np.int64)
        how[0, ROW], how[0, TOP_P] = ids.shape[1] - 1, 1 << SHARE_BITS
        given = {"ids": ids, "positions": places[None], "rows": places[None], "wanted": np.arange(ids.shape[1])}
        given["how"] = how
        logits, drawn, *new = run(*module.arguments(*(given[name] for name in module.inputs), states=held))
        held = dict(zip(module.updates, new, strict=True))
        assert drawn.tolist() == [logits[-1].argmax()] and held["drawn"].tolist() == drawn.tolist()
        rows.append(logits)
    return np.concatenate(rows)


def logits_of(model: Any, tokens: Sequence[int]) -> np.ndarray[Any, Any]:
    """transformers' logits of a text."""
    with torch.no_grad():
        found: np.ndarray[Any, Any] = model(torch.tensor([list(tokens)]), use_cache=False).logits[0].numpy()
    return found
