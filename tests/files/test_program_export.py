"""Codes that `algorithm="gptq"` chose go from a program to folders that other packages load, bit for bit."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import qcompiler as qc
from qcompiler.errors import ArgumentError, WeightsError
from qcompiler.frontends.quantise.stored_places import places_of

pytestmark = pytest.mark.slow
IDS = torch.arange(256).reshape(2, 128) * 7 % 96


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_attention_heads=4,
                         num_key_value_heads=4, vocab_size=96, tie_word_embeddings=False)  # fmt: skip
    path = tmp_path_factory.mktemp("model") / "llama"
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def program(folder: Path) -> qc.Program:
    """int4 in groups of 128, symmetric, with scales in fp16; q, k and v are one tensor of the program."""
    quant = qc.QuantConfig("float", linear="int4:group=128,scale=fp16", rules={"lm_head": None}, algorithm="gptq")
    checkpoint = qc.from_checkpoint(folder)
    data = [{"input_ids": row[None]} for row in IDS]
    return qc.qcompile(checkpoint, (), data[0], quant=quant, calibrate=data, device="cpu")


def meant(program: qc.Program) -> dict[str, npt.NDArray[np.float32]]:
    """The values of the program's quantised linears."""
    places = {name: each for name, each in places_of(program.plan).items() if each.format is not None}
    found = {name: each.read(program.image.weights) for name, each in places.items()}
    return {name: each.format.decode(each) for name, each in found.items() if "proj" in name}


def test_transformers_loads_compressed_tensors_with_the_programs_values(
    folder: Path, program: qc.Program, tmp_path: Path
) -> None:
    done = qc.convert(folder, tmp_path / "ct", layout="compressed-tensors", program=program)
    assert sum(each.after == "int4" for each in done.tensors) == 7 and not done.lossy
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "ct", dtype=torch.float32)
    own = meant(program)
    assert len(own) == 7
    with torch.no_grad():
        model(IDS)  # compressed weights become plain ones at the first call
    for name, values in own.items():
        theirs = model.get_parameter(name).detach().float().numpy()
        np.testing.assert_array_equal(theirs.view(np.uint32), values.view(np.uint32), err_msg=name)
    plain = LlamaForCausalLM.from_pretrained(folder)
    assert not np.array_equal(own["model.layers.0.mlp.up_proj.weight"],
                              plain.get_parameter("model.layers.0.mlp.up_proj.weight").detach().numpy())  # fmt: skip


def test_a_gptq_folder_means_the_same_by_the_rule_of_its_kernels(
    folder: Path, program: qc.Program, tmp_path: Path
) -> None:
    """w[k, n] = scale (code - (stored zero + 1)), codes in 32-bit words along K, as AutoGPTQ's kernels read them."""
    qc.convert(folder, tmp_path / "gptq", layout="gptq", program=program)
    config = json.loads((tmp_path / "gptq" / "config.json").read_text())["quantization_config"]
    assert (config["quant_method"], config["bits"], config["group_size"], config["sym"]) == ("gptq", 4, 128, True)
    arrays = load_file(tmp_path / "gptq" / "model.safetensors")
    shifts = np.arange(0, 32, 4)
    for name, values in meant(program).items():
        layer = name.removesuffix(".weight")
        words, zeros = (arrays[f"{layer}.{part}"].view(np.uint32) for part in ("qweight", "qzeros"))
        codes = (words[:, None, :] >> shifts[None, :, None] & 15).reshape(-1, words.shape[1])
        zero = (zeros[:, :, None] >> shifts & 15).reshape(len(zeros), -1) + 1
        group = arrays[f"{layer}.g_idx"]
        scales = arrays[f"{layer}.scales"].astype(np.float32)
        made = (codes.astype(np.int64) - zero[group]).astype(np.float32) * scales[group]
        np.testing.assert_array_equal(made.T, values, err_msg=name)


def test_a_gptq_folder_is_read_back_with_the_same_values(folder: Path, program: qc.Program, tmp_path: Path) -> None:
    qc.convert(folder, tmp_path / "gptq", layout="gptq", program=program)
    again = qc.from_checkpoint(tmp_path / "gptq").weights.tensors
    for name, values in meant(program).items():
        np.testing.assert_array_equal(again[name].view().float().numpy(), values, err_msg=name)


def test_a_program_of_another_folder_is_refused_and_nothing_is_written(
    folder: Path, program: qc.Program, tmp_path: Path
) -> None:
    torch.manual_seed(1)
    LlamaForCausalLM(LlamaConfig.from_pretrained(folder)).save_pretrained(tmp_path / "other")
    with pytest.raises(WeightsError, match="it is no program of this folder"):
        qc.convert(tmp_path / "other", tmp_path / "out", layout="gptq", program=program)
    with pytest.raises(ArgumentError, match="is no program"):
        qc.convert(folder, tmp_path / "out", layout="gptq", program="model.qca")
    moved = qc.QuantConfig("float", linear="int4:group=128,scale=fp16", equalise=True)
    equalised = qc.qcompile(qc.from_checkpoint(folder), (), {"input_ids": IDS[:1]}, quant=moved, device="cpu")
    with pytest.raises(WeightsError, match=r"other values than in the model \(equalise\); compile the folder without"):
        qc.convert(folder, tmp_path / "out", layout="gptq", program=equalised)
    turned = qc.QuantConfig("float", linear="int4:group=128,scale=fp16", rotate_online=True)
    transformed = qc.qcompile(qc.from_checkpoint(folder), (), {"input_ids": IDS[:1]}, quant=turned, device="cpu")
    with pytest.raises(WeightsError, match=r"down_proj.weight' has other values than in the model \(rotate-online\)"):
        qc.convert(folder, tmp_path / "out", layout="gptq", program=transformed)
    biased = qc.QuantConfig("float", linear="int4:group=128,scale=fp16", correct_bias=True)
    data = {"input_ids": IDS[:1]}
    corrected = qc.qcompile(qc.from_checkpoint(folder), (), data, quant=biased, calibrate=[data], device="cpu")
    with pytest.raises(WeightsError, match=r"proj.bias' has other values than in the model \(correct-bias\)"):
        qc.convert(folder, tmp_path / "out", layout="gptq", program=corrected)
    image = dataclasses.replace(program.image, plan=msgspec.structs.replace(program.plan, moved=None))
    with pytest.raises(WeightsError, match=r"does not record which .* are the model's own.*compile it again"):
        qc.convert(folder, tmp_path / "out", layout="gptq", program=SimpleNamespace(image=image))
    assert [each.name for each in tmp_path.iterdir()] == ["other"]


def test_a_tied_head_is_no_parameter_that_the_folder_lacks(tmp_path: Path) -> None:
    config = LlamaConfig(hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_attention_heads=4,
                         num_key_value_heads=4, vocab_size=96, tie_word_embeddings=True)  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "tied")
    quant = qc.QuantConfig("float", linear="int4:group=128,scale=fp16")
    data = {"input_ids": IDS[:1]}
    program = qc.qcompile(qc.from_checkpoint(tmp_path / "tied"), (), data, quant=quant, device="cpu")
    assert "lm_head.weight" in places_of(program.plan)
    done = qc.convert(tmp_path / "tied", tmp_path / "out", layout="gptq", program=program)
    assert "7 in another format" in str(done)
