"""A language model whose calls upstream MLIR runs: its conversations and draws are those of `CausalLM`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

import qcompiler as qc
from qcompiler.inspect.upstream import UpstreamModule
from qcompiler.ir.mlir_oracle import Jitted
from qcompiler.lm.conversation import DRAWN, MARKS


class UpstreamSession:
    """What `LoadedProgram.session` gives, for texts of `CausalLM.to_mlir`: one for a token, one for the rest."""

    def __init__(self, modules: dict[str, tuple[UpstreamModule, Jitted]]) -> None:
        self.modules = modules
        self.held = dict(modules["prefill"][0].states)
        self.calls: list[str] = []

    def __call__(self, **given: Any) -> tuple[Any, Any]:
        entry = "decode" if given["ids"].shape == (1, 1) and "decode" in self.modules else "prefill"
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


def run_upstream(lm: qc.CausalLM, *, level: int = 0) -> qc.CausalLM:
    """The same language model, run by upstream MLIR from the texts of its entry points."""
    modules = {}
    for entry in ("prefill", "decode"):
        module = lm.to_mlir("linalg", entry=entry, weights="arguments")
        modules[entry] = module, Jitted(module.text, level=level)
    run: Any = SimpleNamespace(device="cpu", session=lambda: UpstreamSession(modules))
    return qc.CausalLM(run, lm.record)
