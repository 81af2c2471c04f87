"""`compile_causal_lm("model.gguf")` with exact products: logits and greedy tokens are transformers' on the weights that
the file means."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from by_path import ROOT, load
from gguf import GGMLQuantizationType as Type

import qcompiler as qc
from qcompiler.cli import main
from qcompiler.errors import WeightsError
from qcompiler.frontends.checkpoints.gguf_architectures import ARCHITECTURES, NOT_READ
from qcompiler.frontends.checkpoints.gguf_files import GgufFile, NewTensor

written = load("tests/files/writing.py")
recorded = load("tests/files/recorded.py")
MODELS = recorded.cases.CASES

PROMPT = [5, 17, 80, 3, 3, 61, 44, 9, 12, 70, 33]  # longer than the windows of the models that have one
READ_BY_TRANSFORMERS = (
    "stablelm",
    "nemotron",
    "qwen2moe",
    "starcoder2",
    "qwen3moe",
    "gemma2",
    "gemma3",
    "phi3",
    "gpt2",
    "falcon",
)

EXACT = qc.QuantConfig("float", compute="exact")
"""What is compared with transformers in fp32 (bf16 is a file's default: test_sources.py)."""

PLAIN = {
    "ffn_gate_inp", "ffn_gate_inp_shexp", "position_embd", "attn_k_b", "altup_correct_coef", "altup_predict_coef",
    "conv", "ssm_conv1d", "ssm_conv1d_q", "ssm_conv1d_k", "ssm_conv1d_v", "ssm_norm", "ple_conv1d", "hc_attn_fn",
    "hc_ffn_fn", "output_hc_fn", "attn_compressor_ape", "indexer_compressor_ape",
}  # fmt: skip
"""Tensors that llama.cpp keeps in plain numbers, or that have too few columns for a block."""


def type_of(name: str) -> Type:
    """Formats of several block sizes in each file, and plain values where llama.cpp keeps them."""
    part = name.split(".")[-2]
    if part in PLAIN or not name.endswith(".weight"):
        return Type.F32
    kinds = {"attn_output": Type.Q5_0, "ffn_down": Type.Q4_K, "ffn_down_exps": Type.Q6_K, "attn_v": Type.Q4_0,
             "ssm_out": Type.Q5_1}  # fmt: skip
    return kinds.get(part, Type.Q8_0)


def types_of(name: str) -> Any:
    """The types of a model's tensors, by their names."""
    of_experts = {"gpt-oss": Type.MXFP4, "gpt-oss in plain numbers": Type.F32}.get(name)
    if name in ("mamba", "jamba"):  # of a rank below a block
        return lambda part: Type.F32 if ".ssm_dt." in part else type_of(part)
    return lambda part: of_experts if of_experts is not None and "exps.weight" in part else type_of(part)


def file_of(name: str, path: Path) -> Any:
    return recorded.write(path, name, types_of(name))


def check(lm: qc.CausalLM, model: Any, prompt: Sequence[int], tokens: int) -> None:
    """Logits of a prompt that is read in pieces, and tokens after it."""
    with torch.no_grad():
        theirs = model(torch.tensor([prompt]), use_cache=False).logits[0].numpy()
    ours = lm.conversation().read(list(prompt), logits="all")[0]
    assert theirs.std() > 0.5, "logits that all are alike would show nothing"
    assert np.linalg.norm(ours - theirs) <= 1e-5 * np.linalg.norm(theirs)
    model.config.use_cache = True
    expected = model.generate(
        torch.tensor([prompt]), max_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert lm.generate(prompt, max_new_tokens=tokens, eos_token_id=-1) == expected[0].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_file_of_each_architecture_generates_what_its_codes_mean(name: str, tmp_path: Path) -> None:
    made = file_of(name, tmp_path / "model.gguf")
    prompt, length = (13 * PROMPT, 160) if name.startswith("deepseek4") else (PROMPT, 40)  # its blocks have 128 tokens
    lm = qc.compile_causal_lm(made.path, EXACT, max_seq_len=length, chunk=5 if length == 40 else 30)
    check(lm, made.model, prompt, 12)
    assert lm.program is not None
    stored = {row.parameters[0] for row in lm.program.ledger if row.reason.startswith("as stored")}
    type_ = types_of(name)
    coded = {name for name, parts in made.names.items() if all(type_(part) != Type.F32 for part in parts)}
    matrices = {n for n, p in made.model.named_parameters() if p.ndim > 1 and not n.endswith("dt_proj.weight")}
    assert stored == coded & matrices, "the program holds the file's codes of every matrix"


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) for name in READ_BY_TRANSFORMERS])
def test_transformers_reads_the_same_weights_from_the_file(name: str, tmp_path: Path) -> None:
    """An independent reading of the names, and of what the converter changes in tensors.

    transformers takes a gate of one row as a vector, as converters wrote it until 2025, and not as a matrix.
    """
    made = file_of(name, tmp_path / "written.gguf")
    made.path = again(tmp_path / "model.gguf", made.path, as_vectors="ffn_gate_inp_shexp.weight")
    class_ = type(made.model)
    theirs = class_.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32, config=made.model.config)
    ours = qc.from_gguf(made.path).weights.tensors
    for parameter, values in theirs.named_parameters():
        found = ours[parameter].view().float()
        is_turned = name == "gpt2" and parameter.split(".")[-2] in ("c_attn", "c_proj", "c_fc") and found.ndim == 2
        torch.testing.assert_close(found.T if is_turned else found, values.detach(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["qwen35", *(pytest.param(name, marks=pytest.mark.slow) for name in (
    "qwen3next", "kimi-linear", "mamba", "mamba2", "jamba", "granitehybrid of Bamba", "nemotron_h"))])  # fmt: skip
def test_numbers_that_the_converter_changed_are_the_models_again(name: str, tmp_path: Path) -> None:
    """Logarithms of decays, norms with a 1, heads in another order, filters in three tensors, dims of size 1."""
    made = file_of(name, tmp_path / "model.gguf")
    found = qc.from_gguf(made.path).weights.tensors
    for parameter, values in recorded.cases.tensors_of(made.model).items():
        torch.testing.assert_close(found[parameter].view().float(), values, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_inputs_of_a_delta_net_in_two_types_are_decoded(tmp_path: Path) -> None:
    """Mixtures of llama.cpp have `attn_qkv` in more bits than `attn_gate`, and no matrix has rows of two formats."""
    made = recorded.write(
        tmp_path / "model.gguf", "qwen3next", lambda part: Type.Q4_K if "attn_gate" in part else type_of(part)
    )
    name = "model.layers.0.linear_attn.in_proj_qkvz.weight"
    found = qc.from_gguf(made.path).weights.tensors[name]
    assert found.codes is None
    torch.testing.assert_close(found.view(), made.model.get_parameter(name).detach(), rtol=0, atol=1e-6)


@pytest.mark.slow
def test_a_decay_above_zero_has_no_logarithm(tmp_path: Path) -> None:
    source = GgufFile(file_of("mamba2", tmp_path / "w.gguf").path)
    tensors = {name: NewTensor(t.shape, t.type, t.bytes) for name, t in source.tensors.items()}
    tensors["blk.1.ssm_a"] = NewTensor.of("blk.1.ssm_a", np.full((8, 1), 0.5, np.float32))
    qc.write_gguf(tmp_path / "bad.gguf", tensors, dict(source.metadata))
    with pytest.raises(WeightsError, match=r"'blk\.1\.ssm_a' in .* holds a number above 0, which is no decay"):
        qc.compile_causal_lm(tmp_path / "bad.gguf", max_seq_len=16)


SHARED = json.loads((ROOT / "tests" / "files" / "shared_architectures.json").read_text())


@pytest.mark.parametrize("architecture", SHARED)
def test_an_architecture_that_the_converter_and_transformers_share_is_read_or_has_a_reason(architecture: str) -> None:
    """The list is the converter's and transformers' own (record_gguf.py --shared)."""
    assert (architecture in ARCHITECTURES) != (architecture in NOT_READ)
    written_by = {entry["keys"]["general.architecture"][-1] for entry in recorded.record().values()}
    assert (architecture in ARCHITECTURES) == (architecture in written_by), "what is read has a case"


@pytest.mark.slow
@pytest.mark.parametrize("length", [40, 160])
def test_longrope_of_a_file_on_both_sides_of_the_trained_length(length: int, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    long, short = (random.uniform(1, high, 16).astype(np.float32) for high in (8, 2))
    scaling = {"rope_type": "longrope", "rope_theta": 10000.0, "long_factor": long.tolist(),
               "short_factor": short.tolist(), "original_max_position_embeddings": 64}  # fmt: skip
    model = written.build("Phi3", rope_parameters=scaling, original_max_position_embeddings=64)
    made = written.write(
        tmp_path / "model.gguf", model, "phi3", type_of, add_rope_scaling_orig_ctx_len=64,
        tensors={"rope_factors_long.weight": long, "rope_factors_short.weight": short},
    )  # fmt: skip
    lm = qc.compile_causal_lm(made.path, EXACT, max_seq_len=length, chunk=16)
    prompt = random.integers(3, 90, 30 if length == 40 else 100).tolist()
    check(lm, made.model, prompt, 4)


# --- models in several files ------------------------------------------------------------------------------------------


def parts(folder: Path) -> list[Path]:
    """A small model in parts of nine tensors, as gguf-py writes them."""
    recorded.write(folder / "m.gguf", "llama", type_of, parts_of=9)
    return sorted(folder.glob("m-*.gguf"))


def test_a_model_in_parts_is_that_in_one_file(tmp_path: Path) -> None:
    files, whole = parts(tmp_path), file_of("llama", tmp_path / "whole.gguf")
    assert [file.name for file in files] == [f"m-{i:05}-of-{len(files):05}.gguf" for i in range(1, len(files) + 1)]
    assert len(files) > 2
    found, wanted = (qc.from_gguf(path) for path in (files[0], whole.path))
    assert found.config.to_dict() == wanted.config.to_dict()
    assert found.formats() == wanted.formats()
    for name, tensor in wanted.weights.tensors.items():
        assert torch.equal(found.weights.tensors[name].view(), tensor.view()), name


def test_parts_that_are_missing_or_another_models_are_named(tmp_path: Path) -> None:
    files = parts(tmp_path)
    with pytest.raises(WeightsError, match=rf"is part 2 of {len(files)} of a model; give the first one"):
        qc.from_gguf(files[1])
    kept = files[1].read_bytes()
    shutil.copy(files[2], files[1])
    with pytest.raises(WeightsError, match=rf"00002-of-\d+.gguf is not part 2 of {len(files)}, as its name says"):
        qc.from_gguf(files[0])
    files[1].unlink()
    with pytest.raises(WeightsError, match=r"cannot read the GGUF file .*00002-of-\d+\.gguf.*No such file"):
        qc.from_gguf(files[0])
    files[1].write_bytes(kept)
    files[0].rename(tmp_path / "renamed.gguf")
    with pytest.raises(WeightsError, match=r"is part 1 of \d+ of a model; .* called …-00001-of-"):
        qc.from_gguf(tmp_path / "renamed.gguf")
    (tmp_path / "renamed.gguf").rename(files[0])
    first = GgufFile(files[0])
    tensors = {name: NewTensor(t.shape, t.type, t.bytes) for name, t in first.tensors.items()}
    second = GgufFile(files[1])
    name = next(iter(second.tensors))
    again_ = {
        **tensors,
        name: NewTensor(second.tensors[name].shape, second.tensors[name].type, second.tensors[name].bytes),
    }
    other = tmp_path / "other" / files[0].name
    other.parent.mkdir()
    for file in files[1:]:
        shutil.copy(file, other.parent)
    qc.write_gguf(other, again_, dict(first.metadata))
    with pytest.raises(WeightsError, match=rf"holds '{name}', which a part before it holds"):
        qc.from_gguf(other)
    for keys, message in (
        ({"split.tensors.count": 99}, r"hold \d+ tensors, and it says 99"),
        ({"split.count": -1}, "'split.count' is -1, no number of parts"),
        ({"split.count": 1 << 30}, "'split.count' is 1073741824, no number of parts"),
        ({"split.no": "two"}, "'split.no' is 'two', no number of parts"),
    ):
        other.unlink()
        qc.write_gguf(other, tensors, {**dict(first.metadata), **keys})
        with pytest.raises(WeightsError, match=message):
            qc.from_gguf(other)


# --- models whose tokens are bytes: a small one, and in the full run the repository's own -----------------------------

OWN = ROOT / "examples" / "models" / "tiny_llama"
TEMPLATE = "{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}"


@pytest.fixture(scope="module", params=["small", pytest.param("trained", marks=pytest.mark.slow)])
def own_model(request: pytest.FixtureRequest) -> Any:
    if request.param == "trained":
        return transformers.LlamaForCausalLM.from_pretrained(OWN, dtype=torch.float32, local_files_only=True).eval()
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0)
    return load("tests/models/zoo.py").DECODERS["llama"].build(vocab_size=256, tie_word_embeddings=True, **ids)


@pytest.fixture(scope="module")
def own_file(own_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model as `qc convert` writes it, with a tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("own") / "model"
    if own_model.name_or_path == str(OWN):
        shutil.copytree(OWN, folder)
    else:
        own_model.save_pretrained(folder)
        shutil.copy(OWN / "tokenizer.json", folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    path = folder.parent / "model.gguf"
    assert main(["convert", str(folder), str(path), "--quant", "q8_0"]) == 0
    return path


@pytest.fixture(scope="module")
def own(own_file: Path) -> qc.CausalLM:
    return qc.compile_causal_lm(own_file, EXACT, max_seq_len=128, chunk=16)


def own_dequantised(own_model: Any, path: Path) -> Any:
    model = transformers.LlamaForCausalLM(own_model.config).eval()
    values = {name: tensor.view().float() for name, tensor in qc.from_gguf(path).weights.tensors.items()}
    missing, unexpected = model.load_state_dict(values, strict=False)
    assert missing == ["lm_head.weight"] and not unexpected  # tied
    return model


def test_a_model_goes_through_convert_and_generates_the_same_text(
    own: qc.CausalLM, own_model: Any, own_file: Path, request: pytest.FixtureRequest
) -> None:
    prompt = "import os\n\n\ndef read_lines(path):\n"
    check(own, own_dequantised(own_model, own_file), list(prompt.encode()), 48)
    assert own.text is not None and own.text.encode(prompt) == list(prompt.encode())
    if "trained" in request.node.name:
        ids = own_model.generate(
            torch.tensor([list(prompt.encode())]), max_new_tokens=24, do_sample=False, pad_token_id=0
        )[0].tolist()  # fmt: skip
        text = bytes(ids[len(prompt) :]).decode()
        assert own.complete(prompt, max_new_tokens=24) == text, "q8_0 changes no token here"


def test_a_table_of_single_bytes_has_the_key_of_merges_that_llama_cpp_asks_for(own_file: Path) -> None:
    keys = GgufFile(own_file).metadata
    assert keys["tokenizer.ggml.model"] == "gpt2" and keys["tokenizer.ggml.merges"] == []


def test_the_chat_template_and_the_tokenizer_come_from_the_file(own: qc.CausalLM) -> None:
    messages = [{"role": "user", "content": "é"}]
    text = "# user: é\n"
    assert own.require_text().encode_chat(messages) == list(text.encode())
    assert own.chat(messages, max_new_tokens=8) == own.complete(text, max_new_tokens=8)


@pytest.mark.slow
def test_the_commands_take_the_file(own: qc.CausalLM, own_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--max-seq-len", "128", "--json", "--compute", "exact"]
    assert main(["generate", str(own_file), "--prompt", "def f(", "--tokens", "8", *options]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["text"] == "def f(" + own.complete("def f(", max_new_tokens=8)


# --- files that cannot be used ---------------------------------------------------------------------------------------


def again(path: Path, source: Path, without: str = "", as_vectors: str = "none", **keys: Any) -> Path:
    """A copy of a file with other keys, and without those that begin with `without`; tensors whose names end in
    `as_vectors` lose their first dimension."""
    file = GgufFile(source)
    kept = {name: file.metadata[name] for name in file.metadata if not (without and name.startswith(without))}
    tensors = {
        name: NewTensor(t.shape[1:] if name.endswith(as_vectors) else t.shape, t.type, t.bytes)
        for name, t in file.tensors.items()
    }
    qc.write_gguf(path, tensors, {**kept, **keys})
    return path


def test_a_file_without_a_tokenizer_takes_ids_and_says_so_to_the_commands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = written.build("Llama", num_hidden_layers=1)
    source = written.write(tmp_path / "whole.gguf", model, "llama", type_of).path
    path = again(tmp_path / "ids.gguf", source, without="tokenizer.")
    assert main(["generate", str(path), "--prompt", "a", "--max-seq-len", "16"]) == 1
    shown = capsys.readouterr().err
    assert "ids only" in shown and "has no tokenizer that is read (docs/tokenizers.md)" in shown


@pytest.mark.parametrize("kind", ["architecture", "cut", "experts"])
def test_files_that_cannot_be_compiled_say_why(kind: str, tmp_path: Path) -> None:
    source = written.write(tmp_path / "w.gguf", written.build("Llama", num_hidden_layers=1), "llama", type_of).path
    path = tmp_path / "bad.gguf"
    if kind == "architecture":
        again(path, source, **{"general.architecture": "gemma4-assistant"})
        message = "architecture 'gemma4-assistant'; it drafts tokens .* there are: deepseek4.*weights as safetensors"
    elif kind == "cut":
        path.write_bytes(source.read_bytes()[: source.stat().st_size // 2])
        message = "was cut off.*copy or download the file again"
    else:
        again(path, source, **{"llama.expert_count": 4, "llama.expert_used_count": 2})
        message = "lacks 'blk.0.ffn_gate_inp.weight'"
    with pytest.raises(WeightsError, match=message):
        qc.compile_causal_lm(path)


@pytest.mark.parametrize(("name", "keys", "message"), [
    ("glm4moe", {"glm4moe.expert_gating_func": 1}, "is 1 .softmax.; this architecture is read with sigmoid only"),
    ("glm4moe", {"glm4moe.block_count": 2**31}, r"block_count' is 2147483648, and the file has \d+ tensors"),
    ("glm4moe", {"glm4moe.nextn_predict_layers": 3}, "leaves none of 3 blocks to the model"),
    ("cohere2moe", {"cohere2moe.expert_gating_func": 3}, "is 3 .not known.; this architecture is read with sigmoid"),
    ("afmoe", {"afmoe.expert_weights_norm": False}, "expert_weights_norm' is False, which transformers' model cannot"),
    ("exaone4", {"exaone4.rope.freq_base_swa": 5.0}, "freq_base_swa' is 5.0, which transformers' model cannot express"),
    ("glm4", {"glm4.rope.dimension_sections": [8, 8, 0, 0]}, "positions of images"),
    ("deepseek2", {"deepseek2.rope.dimension_count": 15}, "rope.dimension_count is 15, and heads have 48"),
    ("llama4", {"llama4.attention.sliding_window": 4}, "sliding_window' is 4, which transformers' model cannot"),
    ("apertus", {"xielu.beta": [0.5]}, "the key 'xielu.beta' is .*, and not 2 values of the type float"),
    ("exaone4", {"exaone4.attention.sliding_window_pattern": [True]}, "not 2 values of the type bool"),
    ("deepseek2", {"deepseek2.attention.key_length_mla": 16}, "leaves nothing beside 16 rotated numbers"),
    ("minicpm3", {"minicpm3.rope.dimension_count": 48}, "queries of 48 are too short for 48 rotated numbers"),
    ("gpt-oss", {"gpt-oss.expert_feed_forward_length": 256},
     r"has the shape \[4, 512, 256\] and .* not \[4, 256, 256\], as 'model\.layers\.0\.mlp\.experts\.gate_up_proj'"),
    ("falcon in groups", {"falcon.attention.head_count_kv": 3}, "8 heads do not share 3 key/value heads evenly"),
    ("qwen2moe", {"qwen2moe.expert_shared_feed_forward_length": 256}, "'blk.0.ffn_gate_shexp.weight' in"),
    ("deepseek4", {"deepseek4.attention.compress_ratios": [0, 64, 4, 4]}, "compress_ratios' has 64; blocks of 4 and"),
    ("qwen4exp", {"qwen4exp.ple.head_vocab_sizes": [101, 103, 107, 1 << 60]}, "are no parts of a table of 424 rows"),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("deepseek4", {"deepseek4.swiglu_clamp_shexp": [1.5, 1.5, 2.0, 1.5]}, r"are .*1\.5.*2\.0.*; transformers'"),
        ("deepseek4", {"deepseek4.expert_gating_func": 2}, "is 2 .sigmoid.; this architecture is read with sqrt"),
        ("qwen4exp", {"qwen4exp.attention.compress_ratios": [0, 0, 0]}, "attention have blocks of one size"),
        ("qwen4exp", {"qwen4exp.ple.layers": [0, 2]}, "ple.layers' is .*, and not the number of one layer"),
        ("qwen4exp", {"qwen4exp.ple.head_offsets": [0, 101, 204, -1]}, "are no parts of a table of 424 rows"),
        ("qwen4exp", {"qwen4exp.ple.layer_multipliers": [1, 2]}, "layer_multipliers' is .* has 3 whole numbers"),
        ("qwen4exp", {"qwen4exp.rope.dimension_sections": [4, 2]}, "and not the sizes of three parts"),
        ("mamba2", {"mamba2.ssm.inner_size": 500}, "ssm.inner_size' is 500, which 256 does not divide"),
        ("jamba", {"jamba.attention.head_count_kv": [4, 4, 0, 4]}, r"layers with attention, .* of 4, have no period"),
        ("jamba", {"jamba.attention.head_count_kv": [0, 4, 0, 2]}, "not one number for some layers and 0 for the"),
        ("granitehybrid", {"granitehybrid.attention.head_count_kv": 4}, "not 3 values of the type int"),
        ("qwen35", {"qwen35.ssm.group_count": 3}, "8 value heads do not share 3 key heads evenly"),
        ("qwen3next", {"qwen3next.ssm.state_size": 16}, "'blk.0.ssm_conv1d.weight' in"),
        ("kimi-linear", {"kimi-linear.kda.head_dim": 512}, "kda.head_dim' is 512, and 'blk.0.attn_q.weight' has 256 "),
        ("kimi-linear", {"kimi-linear.expert_gating_func": 1}, "this architecture is read with sigmoid only"),
        ("hy_v4", {"hy_v4.swiglu_clamp_exp": [1.5, 1.5, 2.0]}, "has one limit for the experts of all"),
        ("dots3note", {"dots3note.attention.head_count": [8, 4, 8, 8]}, "one number for the layers with a window and"),
        ("dots3note", {"dots3note.attention.indexer.types": [True, True, True, False]}, "have an index where"),
        ("dots3note", {"dots3note.attention.key_length_mla_swa": 16}, "key_length_mla_swa' is 16, no number of things"),
        ("dbrx", {"dbrx.feed_forward_length": 256}, r"has the shape \[4, 512, 256\], and not \[4, 256, 256\]"),
    )),
])  # fmt: skip
def test_keys_that_do_not_fit_the_tensors_are_named(
    name: str, keys: dict[str, Any], message: str, tmp_path: Path
) -> None:
    source = file_of(name, tmp_path / "w.gguf").path
    with pytest.raises(WeightsError, match=message):
        qc.from_gguf(again(tmp_path / "bad.gguf", source, **keys))


def test_experts_that_the_model_does_not_have_are_no_choice_of_a_token(tmp_path: Path) -> None:
    source = GgufFile(file_of("deepseek4", tmp_path / "w.gguf").path)
    name = "blk.0.ffn_gate_tid2eid.weight"
    tensors = {each: NewTensor(t.shape, t.type, t.bytes) for each, t in source.tensors.items()}
    for number, message in ((4, r"holds 0 … 4, and the model counts from 0 to 3"), (-1, r"holds -1 … 3")):
        table = np.array(source.tensors[name].array())
        table[7, 1] = number
        bad = tmp_path / f"{number}.gguf"
        qc.write_gguf(bad, {**tensors, name: NewTensor.of(name, table)}, dict(source.metadata))
        found = qc.from_gguf(bad).weights.tensors["model.layers.0.mlp.gate.tid2eid"]
        with pytest.raises(WeightsError, match=f"'{name}' in .* {message}"):
            found.view()
    plain = NewTensor.of(name, np.ones((96, 2), np.float32))
    qc.write_gguf(tmp_path / "bad.gguf", {**tensors, name: plain}, dict(source.metadata))
    with pytest.raises(WeightsError, match=r"is float32 of the shape \[96, 2\], and .* has whole numbers of the shape"):
        qc.from_gguf(tmp_path / "bad.gguf")


def test_a_file_without_a_limit_of_experts_has_none(tmp_path: Path) -> None:
    source = file_of("hy_v4", tmp_path / "w.gguf").path
    assert qc.from_gguf(source).config.swiglu_limit == 1.5
    assert qc.from_gguf(again(tmp_path / "plain.gguf", source, without="hy_v4.swiglu")).config.swiglu_limit == np.inf


def test_blocks_that_predict_further_tokens_are_left_alone_and_other_tensors_are_not(tmp_path: Path) -> None:
    source = GgufFile(file_of("glm4moe", tmp_path / "w.gguf").path)
    tensors = {name: NewTensor(t.shape, t.type, t.bytes) for name, t in source.tensors.items()}
    more = ("blk.2.nextn.eh_proj.weight", "blk.2.attn_k.weight", "blk.2.attn_norm.weight")  # the third block of two
    tensors |= {name: NewTensor.of(name, np.ones((4, 4), np.float32)) for name in more}
    qc.write_gguf(tmp_path / "more.gguf", tensors, dict(source.metadata))
    assert not set(more) & set(qc.from_gguf(tmp_path / "more.gguf").weights.tensors)
    for name in ("foo", "blk.x.attn_k.weight", "blk.9.attn_k.weight"):
        other = {**tensors, name: NewTensor.of(name, np.ones(4, np.float32))}
        qc.write_gguf(tmp_path / "other.gguf", other, dict(source.metadata))
        with pytest.raises(WeightsError, match=f"holds 1 tensor that .* does not have: '{name}'"):
            qc.from_gguf(tmp_path / "other.gguf")
