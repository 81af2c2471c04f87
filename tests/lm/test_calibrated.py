"""compile_causal_lm(calibrate=…): recipes that need data get the hidden states of texts that the step reads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from by_path import ROOT
from transformers import LlamaForCausalLM

import qcompiler as qc
from qcompiler.errors import ArgumentError, RecipeError

OWN = ROOT / "examples" / "models" / "tiny_llama"
SIZES: dict[str, Any] = {"max_seq_len": 256, "chunk": 128}


def texts(first: int, count: int) -> list[list[int]]:
    """Pieces of the held-out text as bytes, which are the model's tokens."""
    data = (OWN / "held_out.txt").read_bytes()[first:]
    return [list(data[number * 256 : (number + 1) * 256]) for number in range(count)]


def log_probabilities(logits: np.ndarray) -> np.ndarray:
    values = torch.from_numpy(np.array(logits)).double().log_softmax(-1)
    return values.numpy()


@pytest.mark.slow
@pytest.mark.parametrize("max_batch", [1, 3])
def test_gptq_through_the_cache_closes_half_of_the_gap(max_batch: int) -> None:
    model = LlamaForCausalLM.from_pretrained(OWN, dtype=torch.float32, local_files_only=True).eval()
    recipe: dict[str, Any] = {"linear": "int3:group=128", "embedding": "int8"}
    judged = texts(0, 4)
    with torch.no_grad():
        wanted = [log_probabilities(model(torch.tensor([ids]), use_cache=False).logits[0].numpy()) for ids in judged]
    found = []
    for algorithm, data in (("nearest", None), ("gptq", texts(131072, 16))):
        quant = qc.QuantConfig("float", algorithm=algorithm, **recipe)
        lm = qc.compile_causal_lm(OWN, quant, calibrate=data, max_batch=max_batch, **SIZES)
        each = [log_probabilities(lm.conversation().read(ids, logits="all")[0]) for ids in judged]
        found.append(np.mean([(np.exp(w) * (w - e)).sum(-1).mean() for w, e in zip(wanted, each, strict=True)]))
        assert lm.program is not None
    codes = [choice for choice in lm.program.report().choices if choice.stage == "codes"]
    assert len(codes) == 6 * 7 + 1, "seven linears of six layers, and the tied head with its reason"
    assert found[1] < 0.5 * found[0]


@pytest.mark.slow
def test_rewrites_keep_the_function_through_the_cache() -> None:
    """The folder is in bf16 and read tensor by tensor; the cache holds the scaled values."""
    quant = qc.QuantConfig("float", linear="int8", embedding="int8", rotate=True, smooth=0.5)
    lm = qc.compile_causal_lm(OWN, quant, calibrate=texts(131072, 4), **SIZES)
    assert lm.program is not None
    choices = lm.program.report().choices
    for stage in ("rotate-hidden", "smooth-scales"):
        assert [each.what for each in choices if each.stage == stage and "computes the same" in each.what]
    assert [each for each in choices if each.stage == "smooth-scales" and "self_attn.v_proj" in each.path]
    plain = qc.compile_causal_lm(OWN, qc.QuantConfig("float", linear="int8", embedding="int8"), **SIZES)
    ids = texts(0, 1)[0]
    ours, theirs = (log_probabilities(each.conversation().read(ids, logits="all")[0]) for each in (lm, plain))
    assert (np.exp(theirs) * (theirs - ours)).sum(-1).mean() < 5e-3  # int8 and bf16's roundings; a wrong scale: > 0.1


def test_bad_inputs_name_the_entry() -> None:
    gptq = qc.QuantConfig("int3:group=128", algorithm="gptq")
    bad: list[tuple[Any, str]] = [
        ([[1, 2], ["a", "b"]], r"calibrate\[1\] is \['a', 'b'\]"), ([7], r"calibrate\[0\] is 7"),
        ("one text", "calibrate is one text"), ([np.array([1, 256])], r"holds 1 … 256; tokens are 0 … 255"),
    ]  # fmt: skip
    for given, message in bad:
        with pytest.raises(ArgumentError, match=message):
            qc.compile_causal_lm(OWN, gptq, calibrate=given, **SIZES)
    model = LlamaForCausalLM.from_pretrained(OWN, dtype=torch.float32, local_files_only=True).eval()
    with pytest.raises(ArgumentError, match=r"calibrate\[0\] is a text, and the model has no tokenizer"):
        qc.compile_causal_lm(model, gptq, calibrate=["a text"], **SIZES)


@pytest.mark.slow
def test_a_recipe_that_needs_data_says_so() -> None:
    with pytest.raises(RecipeError, match="needs calibration data"):
        qc.compile_causal_lm(OWN, qc.QuantConfig("int3:group=128", algorithm="gptq"), **SIZES)
