"""Calls that Python would answer with an error of its own: each is refused with what to write instead."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import qcompiler as qc
from qcompiler.errors import QCompilerError

X = torch.ones(2, 4)


def script() -> Any:
    return torch.jit.trace(nn.Linear(4, 4), X)


CALLS: dict[str, tuple[Any, str]] = {
    "a tensor for args": (lambda: qc.qcompile(nn.Linear(4, 4), X), r"\(x,\): a tuple"),
    "a number for args": (lambda: qc.qcompile(nn.Linear(4, 4), 3), r"\(x,\): a tuple"),
    "None for args": (lambda: qc.qcompile(nn.Linear(4, 4), None), r"\(x,\): a tuple"),
    "a dict for args": (lambda: qc.qcompile(nn.Linear(4, 4), {"input": X}), r"kwargs=\{"),
    "a tensor for kwargs": (lambda: qc.qcompile(nn.Linear(4, 4), (), X), "a dict by name"),
    "no arguments": (lambda: qc.qcompile(nn.Linear(4, 4)), "forward"),
    "an argument too many": (lambda: qc.qcompile(nn.Linear(4, 4), (X, X)), "forward"),
    "an unknown keyword": (lambda: qc.qcompile(nn.Linear(4, 4), (), {"y": X}), "forward"),
    "TorchScript": (lambda: qc.qcompile(script(), (X,)), "TorchScript.*nn.Module"),
    "a class": (lambda: qc.qcompile(nn.Linear, (X,)), r"Linear is a class.*Linear\(…\)"),
    "a path": (lambda: qc.qcompile("model.gguf", (X,)), "qc.from_gguf"),
    "a function": (lambda: qc.qcompile(torch.relu, (X,)), "nn.Module"),
    "no preset": (lambda: qc.QuantConfig(None, activations="int8"), r'QuantConfig\("float", …\)'),
    "a list of presets": (lambda: qc.QuantConfig(["nf4"]), "a name such as"),
    "a number for linear": (lambda: qc.QuantConfig("nf4", linear=4), 'linear="nf4"'),
    "True for activations": (lambda: qc.QuantConfig("nf4", activations=True), 'activations="int8"'),
    "None for the observer": (lambda: qc.QuantConfig("nf4", observer=None), "minmax"),
    "a text for the promise": (lambda: qc.QuantConfig("nf4", promise_bits="6"), "promise_bits=6.5"),
    "a rule that is no pair": (lambda: qc.QuantConfig("nf4", rules=["lm_head"]), "a rule is"),
    "a rule of a number": (lambda: qc.QuantConfig("nf4", rules={"*": 4}), "a rule is"),
    "a number for quant": (lambda: qc.qcompile(nn.Linear(4, 4), (X,), quant=4), "quant= takes None, a name"),
    "a format for quant": (lambda: qc.qcompile(nn.Linear(4, 4), (X,), quant="nf5"), "did you mean 'nf4'"),
    "a number for dynamic_shapes": (lambda: qc.qcompile(nn.Linear(4, 4), (X,), dynamic_shapes=4), "dynamic_shapes"),
    "a text for buckets": (lambda: qc.qcompile(nn.Linear(4, 4), (X,), buckets="decode"), r"buckets=\[\("),
    "a dict for buckets": (lambda: qc.qcompile(nn.Linear(4, 4), (X,), buckets={"s": (1, 1)}), r"buckets=\[\("),
    "a number for calibrate": (lambda: qc.qcompile(nn.Linear(4, 4), (X,), quant="nf4", calibrate=4), "calibrate"),
    "a text for targets": (lambda: qc.qcompile(nn.Linear(4, 4), (X,), targets="x86-64-v3"), "give a list"),
    "a number for device": (lambda: qc.qcompile(nn.Linear(4, 4), (X,), device=0), "device"),
    "a number for weights": (lambda: qc.qcompile(nn.Linear(4, 4), (X,), weights=4), "weights=4"),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_of_another_kind_says_what_to_write(name: str) -> None:
    call, text = CALLS[name]
    with pytest.raises(QCompilerError, match=text):
        call()
