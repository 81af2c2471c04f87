"""PEFT's adapters through `compile_causal_lm`: merged before the weights are quantised, and kept beside them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from by_path import load

import qcompiler as qc
from qcompiler.errors import AdapterError

folders = load("tests/files/test_checkpoint_folder.py")
PROMPT = [5, 17, 80, 3, 3, 61, 44]
TARGETS = ["q_proj", "v_proj", "down_proj"]


def build(**options: Any) -> Any:
    return load("tests/models/zoo.py").DECODERS["llama"].build(**options)


def adapter_of(model: Any, folder: Path, targets: list[str] = TARGETS, **options: Any) -> Any:
    """A folder with a random adapter; the model with it, merged by peft."""
    torch.manual_seed(3)
    made = peft.get_peft_model(
        copy.deepcopy(model), peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, **options)
    )
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.3) if parameter.ndim > 1 else parameter.mul_(1.3)
    made.save_pretrained(folder, save_embedding_layers=False)
    return made.merge_and_unload().eval()


def logits(model: Any, prompt: list[int]) -> Any:
    with torch.no_grad():
        return model(torch.tensor([prompt]), use_cache=False).logits[0].numpy()


def read(lm: qc.CausalLM) -> Any:
    return lm.conversation().read(PROMPT, logits="all")[0]


def close(ours: Any, theirs: Any, limit: float = 1e-5) -> bool:
    return bool(np.linalg.norm(ours - theirs) <= limit * np.linalg.norm(theirs))


CASES = [
    pytest.param(True, {}, id="merged"),
    pytest.param(False, {}, id="beside"),
    pytest.param(True, {"use_dora": True}, id="dora merged", marks=pytest.mark.slow),
    pytest.param(False, {"use_rslora": True, "rank_pattern": {"v_proj": 2}}, id="rslora", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("merge", "options"), CASES)
def test_an_adapter_is_what_peft_makes_of_it_and_leaves_the_model_alone(
    merge: bool, options: dict[str, Any], tmp_path: Path
) -> None:
    model = build()
    before = logits(model, PROMPT)
    names = [name for name, _ in model.named_buffers()]
    theirs = logits(adapter_of(model, tmp_path, **options), PROMPT)
    assert not close(before, theirs, 0.05), "the adapter has an effect"
    lm = qc.compile_causal_lm(model, max_seq_len=24, chunk=8, adapter=tmp_path, merge=merge)
    assert close(read(lm), theirs)
    assert np.array_equal(logits(model, PROMPT), before)
    assert [name for name, _ in model.named_buffers()] == names


@pytest.mark.slow
@pytest.mark.parametrize("merge", [True, False])
def test_what_is_quantised_is_the_sum_or_the_base(merge: bool, tmp_path: Path) -> None:
    """Merged: the sum in 4 bits. Beside: the base in 4 bits, and factors in floats."""
    model = build()
    theirs = adapter_of(model, tmp_path)
    lm = qc.compile_causal_lm(model, "int4", max_seq_len=24, chunk=8, adapter=tmp_path, merge=merge)
    program = lm.program
    assert program is not None
    rows = {row.parameters[0]: row for row in program.ledger}
    assert rows["model.layers.0.self_attn.q_proj.weight"].format.startswith("int4")
    factors = {name: row.format for name, row in rows.items() if "lora_" in name}
    assert factors == ({} if merge else dict.fromkeys(factors, "")) and len(factors) == (0 if merge else 12)
    positions = torch.arange(7)[None]
    with torch.no_grad():
        oracle = program.oracle(
            ids=torch.tensor([PROMPT]), positions=positions, rows=positions, wanted=torch.arange(7)
        ).numpy()
    assert close(read(lm), oracle)
    reference = load("tests/models/oracles.py").float64_model(theirs if merge else model, program).float()
    if not merge:  # the base's decoded weights, with the adapter beside them
        reference = peft.PeftModel.from_pretrained(reference, tmp_path).eval()
    assert close(read(lm), logits(reference, PROMPT))


@pytest.mark.slow
@pytest.mark.parametrize("quant", [None, "q8_0"])
def test_a_folder_is_merged_tensor_by_tensor(quant: str | None, tmp_path: Path) -> None:
    model = build()
    model.save_pretrained(tmp_path / "base")
    theirs = adapter_of(model, tmp_path / "adapter")
    lm = qc.compile_causal_lm(tmp_path / "base", quant, max_seq_len=24, chunk=8, adapter=tmp_path / "adapter")
    direct = qc.compile_causal_lm(theirs, quant, max_seq_len=24, chunk=8)
    assert close(read(lm), read(direct))


def quantised_folder(folder: Path) -> Any:
    text, write, method = folders.CASES["gptq v1"]
    return folders.saved(folder, folders.encoded(text, {}, write), method)


def test_an_adapter_beside_the_codes_of_a_folder(tmp_path: Path) -> None:
    """As QLoRA's adapters are meant: the base keeps its codes."""
    model = quantised_folder(tmp_path / "base")
    theirs = adapter_of(model, tmp_path / "adapter")
    lm = qc.compile_causal_lm(tmp_path / "base", max_seq_len=24, chunk=8, adapter=tmp_path / "adapter", merge=False)
    assert lm.program is not None
    assert len([row for row in lm.program.ledger if row.reason == "as stored"]) == 7
    assert close(read(lm), logits(theirs, PROMPT))
    with pytest.raises(AdapterError, match=r"q_proj' is stored as codes \(int4.*merge=False keeps the adapter apart"):
        qc.compile_causal_lm(tmp_path / "base", max_seq_len=24, adapter=tmp_path / "adapter")


@pytest.mark.parametrize(("merge", "change", "message"), [
    (False, {"use_dora": True}, "is a DoRA, which scales the rows of the sum: merge=True"),
    (False, {"targets": ["embed_tokens"]}, "is Embedding, and only linears.*merge=True"),
    (True, {"targets": ["lm_head"], "tied": True}, r"'lm_head' shares its weight with 'model\.embed_tokens"),
    (True, {"hidden_size": 32}, r"q_proj' is \[64, 32\], and the adapter's is \[64, 64\]"),
    (True, {"num_hidden_layers": 1}, r"layers\.1\..* is no linear or embedding of the model"),
])  # fmt: skip
def test_adapters_that_do_not_fit_are_refused_with_a_way_out(
    merge: bool, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    change = dict(change)
    tied = {"tie_word_embeddings": change.pop("tied", False)}
    sizes = {key: change.pop(key) for key in ("hidden_size", "num_hidden_layers") if key in change}
    adapter_of(build(**tied), tmp_path, **change)
    with pytest.raises(AdapterError, match=message):
        qc.compile_causal_lm(build(**tied, **sizes), max_seq_len=24, adapter=tmp_path, merge=merge)


def test_a_folder_that_is_no_adapter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=r"adapter_config\.json"):
        qc.compile_causal_lm(build(), max_seq_len=24, adapter=tmp_path)
