"""`qc.search` for language models of transformers: texts and token ids, and recipes that compile_causal_lm takes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import qcompiler as qc
from qcompiler.errors import ArgumentError

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[2] / "examples" / "models" / "tiny_llama"


@pytest.fixture(scope="module")
def result() -> qc.SearchResult:
    """Of the model in fp32: the checkpoint is in bf16, whose roundings are a part of what a search of it measures."""
    model = transformers.LlamaForCausalLM.from_pretrained(FOLDER, dtype=torch.float32, local_files_only=True)
    ids, formats = list((FOLDER / "held_out.txt").read_bytes()[:256]), ("int3", "int4", "q4_K", "int8")
    return qc.search(model, [ids], "4.5 bits", formats, sensitivity="output", max_seq_len=64)


def test_logits_of_all_tokens_are_compared(result: qc.SearchResult) -> None:
    """The divergence of the whole recipe is that of the eager model with decoded weights, over pieces of 64 tokens."""
    from qcompiler.config import resolve_format

    assert result.measure == "kl"
    plain, own = (
        transformers.LlamaForCausalLM.from_pretrained(FOLDER, dtype=torch.float32, local_files_only=True).eval()
        for _ in range(2)
    )
    for path, text in result.chosen.formats.items():
        weight, fmt = own.get_parameter(path), resolve_format(text)
        weight.data = torch.from_numpy(fmt.decode(fmt.encode(weight.detach().numpy())))
    ids = torch.tensor(list((FOLDER / "held_out.txt").read_bytes()[:256])).reshape(-1, 64)
    with torch.no_grad():
        p, q = (model(ids).logits.double().log_softmax(-1) for model in (plain, own))
    assert result.chosen.measured == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-3)


def test_gates_and_q_k_v_get_one_format_and_the_recipe_compiles(result: qc.SearchResult, tmp_path: Path) -> None:
    groups = [tuple(layer.path.rsplit(".", 2)[1] for layer in item.layers) for item in result.items]
    assert groups.count(("q_proj", "k_proj", "v_proj")) == groups.count(("gate_proj", "up_proj")) == 6
    assert result.chosen.nbytes < 4.6 / 8 * 4.8e6, "the cache is not counted"
    result.save(tmp_path / "recipe.toml")
    lm = qc.compile_causal_lm(FOLDER, str(tmp_path / "recipe.toml"), max_seq_len=64)
    assert lm.program is not None
    assert lm.program.ledger.without_padding().bits_per_weight() == pytest.approx(result.chosen.bits)


def test_texts_need_a_tokenizer_and_ids_the_vocabulary() -> None:
    model = transformers.LlamaForCausalLM.from_pretrained(FOLDER, dtype=torch.float32, local_files_only=True)
    with pytest.raises(ArgumentError, match=r"data\[0\] is a text, and the model has no tokenizer"):
        qc.search(model, ["a text"], "4.5 bits")
    with pytest.raises(ArgumentError, match=r"data\[1\] holds 0 … 300"):
        qc.search(model, [[1, 2, 3], [0, 300]], "4.5 bits")
    with pytest.raises(ArgumentError, match="data is one text"):
        qc.search(model, "a text", "4.5 bits")
