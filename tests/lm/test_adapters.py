"""PEFT's adapters through `compile_causal_lm`: merged before the weights are quantised, and kept beside them."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
from by_path import ROOT, load
from oracle_logits import oracle_logits

import qcompiler as qc
from qcompiler.cli import main
from qcompiler.errors import AdapterError

folders = load("tests/files/test_checkpoint_folder.py")
PROMPT = [5, 17, 80, 3, 3, 61, 44]
TARGETS = ["q_proj", "v_proj", "down_proj"]


def build(**options: Any) -> Any:
    return load("tests/models/zoo.py").DECODERS["llama"].build(**options)


def gpt2() -> Any:
    """Its linears are Conv1D, whose weights are (in, out)."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "n_positions": 32, "n_embd": 64, "n_layer": 2, "n_head": 2}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=1, eos_token_id=2)).eval()


def adapter_of(model: Any, folder: Path, targets: list[str] | str = TARGETS, **options: Any) -> Any:
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
    assert close(read(lm), oracle_logits(lm, PROMPT))
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


# --- configurations of peft, beside its own merge ---------------------------------------------------------------------

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "rank and alpha patterns": ("llama", {
        "rank_pattern": {r"layers\.0\..*q_proj": 2, "v_proj": 8}, "alpha_pattern": {"1.mlp.down_proj": 3}}),
    "rslora with patterns": ("llama", {"use_rslora": True, "rank_pattern": {"v_proj": 2}}),
    "one layer": ("llama", {"layers_to_transform": [1]}),
    "a regular expression": ("llama", {"targets": r".*layers\.1\..*(k_proj|up_proj)"}),
    "all linears": ("llama", {"targets": "all-linear"}),
    "gpt2": ("gpt2", {"targets": ["c_attn", "attn.c_proj", "mlp.c_proj"], "fan_in_fan_out": True}),
    "gpt2 without fan_in_fan_out": ("gpt2", {"targets": ["attn.c_proj"], "fan_in_fan_out": True}),
    "gpt2 dora": ("gpt2", {"targets": ["c_attn", "attn.c_proj"], "fan_in_fan_out": True, "use_dora": True}),
    "linears with fan_in_fan_out": ("llama", {"targets": ["q_proj", "down_proj"], "fan_in_fan_out": True}),
}  # fmt: skip
QUICK = {"rank and alpha patterns", "gpt2 without fan_in_fan_out"}


@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in VARIANTS])
def test_variants_are_merged_as_peft_merges_them(name: str, tmp_path: Path) -> None:
    kind, options = VARIANTS[name]
    model = gpt2() if kind == "gpt2" else build()
    before = logits(model, PROMPT)
    theirs = logits(adapter_of(model, tmp_path, **options), PROMPT)
    assert not close(before, theirs, 0.02), "the adapter has an effect"
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    if name == "gpt2 without fan_in_fan_out":  # peft warns and transposes nevertheless; a square weight hides it
        assert model.transformer.h[0].attn.c_proj.weight.shape[0] == model.transformer.h[0].attn.c_proj.weight.shape[1]
        config["fan_in_fan_out"] = False
    if name == "linears with fan_in_fan_out":
        config["fan_in_fan_out"] = True
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    again = peft.PeftModel.from_pretrained(copy.deepcopy(model), tmp_path).merge_and_unload().eval()
    assert close(logits(again, PROMPT), theirs), "peft reads the folder so, too"
    lm = qc.compile_causal_lm(model, max_seq_len=24, chunk=8, adapter=tmp_path)
    assert close(read(lm), theirs)


@pytest.mark.parametrize(("options", "message"), [
    ({"modules_to_save": ["lm_head"]}, "modules_to_save=.*whole modules are replaced.*Merge it in floating point by"),
    ({"bias": "all"}, "bias='all': it replaces biases"),
    ({"bias": "lora_only"}, "bias='lora_only': it replaces biases"),
    ({"init_lora_weights": "pissa"}, "changed the base weights it was trained with: convert it"),
    ({"targets": ["q_proj"], "trainable_token_indices": [3, 4]}, "single rows of an embedding are replaced"),
])  # fmt: skip
def test_variants_that_a_merge_of_weights_cannot_express_are_refused(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    adapter_of(build(num_hidden_layers=1), tmp_path, **options)
    with pytest.raises(AdapterError, match=message):
        qc.compile_causal_lm(build(num_hidden_layers=1), max_seq_len=24, adapter=tmp_path)


def test_an_adapter_of_another_architecture_is_refused(tmp_path: Path) -> None:
    adapter_of(gpt2(), tmp_path, targets=["c_attn"], fan_in_fan_out=True)
    with pytest.raises(AdapterError, match=r"does not fit LlamaForCausalLM: 'transformer\.h\.0\.attn\.c_attn' is no"):
        qc.compile_causal_lm(build(), max_seq_len=24, adapter=tmp_path)


# --- on the command line ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bytes_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in fp32 whose tokens are bytes, its adapter, and a text."""
    path = tmp_path_factory.mktemp("commands")
    model = build(vocab_size=256, num_hidden_layers=1, eos_token_id=None)
    model.save_pretrained(path / "base")
    shutil.copy(ROOT / "examples/models/tiny_llama/tokenizer.json", path / "base")
    adapter_of(model, path / "adapter").save_pretrained(path / "merged")
    (path / "text.txt").write_text("def mean(values):\n    return sum(values)\n")
    return path


@pytest.fixture(scope="module")
def merged(bytes_folder: Path) -> Path:
    """The program of both."""
    path = bytes_folder / "merged.qca"
    qc.compile_causal_lm(bytes_folder / "merged", None, max_seq_len=48, chunk=48).save(path)
    return path


def score(folder: Path, capsys: pytest.CaptureFixture[str], *options: str) -> Any:
    """What `qc eval` says of the base beside peft's merged model."""
    command = ["eval", str(folder / "base"), str(folder / "text.txt"), "--json", "--max-seq-len", "48"]
    assert main([*command, "--reference", str(folder / "merged.qca"), *options]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("option", ["--adapter", "--adapter-beside"])
@pytest.mark.usefixtures("merged")
def test_commands_take_an_adapter(option: str, bytes_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = score(bytes_folder, capsys, option, str(bytes_folder / "adapter"))
    assert found["kl_mean"] < 1e-6 and found["top1_agreement"] == 1.0, "it is peft's merged model"


@pytest.mark.usefixtures("merged")
def test_the_base_is_not_the_adapted_model(bytes_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert score(bytes_folder, capsys)["kl_mean"] > 1e-3


def test_commands_say_which_adapters_they_cannot_take(
    bytes_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.qca").write_bytes(b"")
    adapter = ["--adapter", str(bytes_folder / "adapter")]
    assert main(["generate", str(tmp_path / "model.qca"), "--prompt", "a", *adapter]) == 1
    assert "is compiled already: name the folder" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["chat", str(bytes_folder / "base"), *adapter, "--adapter-beside", "x"])
    assert "not allowed with argument" in capsys.readouterr().err
