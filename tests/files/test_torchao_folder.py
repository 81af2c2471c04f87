"""Folders that torchao quantised: made by torchao itself, read without it, compared with what it decodes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from by_path import load
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
from torchao.quantization import (
    Float8WeightOnlyConfig,
    Int4Tensor,
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    PerAxis,
    PerGroup,
    PerRow,
    PerTensor,
    quantize_,
)
from torchao.quantization.quant_primitives import MappingType

import qcompiler as qc
from qcompiler.errors import FormatError, WeightsError
from qcompiler.formats.foreign import torchao

build = load("tests/files/writing.py").build
METHOD = {"quant_method": "torchao", "quant_type": {"default": {"_type": "AnyConfig", "_data": {}, "_version": 2}}}

CONFIGS: dict[str, tuple[Any, str]] = {
    "int8 rows": (lambda: Int8WeightOnlyConfig(version=2), "int8"),
    "int8 groups": (lambda: Int8WeightOnlyConfig(version=2, granularity=PerGroup(32)), "int8"),
    "int8 tensor": (lambda: Int8WeightOnlyConfig(version=2, granularity=PerTensor()), "int8"),
    "int8 with activations": (lambda: Int8DynamicActivationInt8WeightConfig(version=2), "int8"),
    "int4 groups": (lambda: IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)), "int4"),
    "int4 asymmetric": (
        lambda: IntxWeightOnlyConfig(
            weight_dtype=torch.int4, granularity=PerGroup(64), mapping_type=MappingType.ASYMMETRIC
        ),
        "int4",
    ),
    "int3 rows": (lambda: IntxWeightOnlyConfig(weight_dtype=torch.int3, granularity=PerAxis(0)), "int3"),
    "int2 groups": (lambda: IntxWeightOnlyConfig(weight_dtype=torch.int2, granularity=PerGroup(32)), "int2"),
    "int6 in int8": (lambda: IntxWeightOnlyConfig(weight_dtype=torch.int6, granularity=PerGroup(32)), "int8"),
    "fp8 rows": (lambda: Float8WeightOnlyConfig(version=2), "fp8_e4m3"),
}


def saved(folder: Path, quantize: Callable[[nn.Module], None]) -> nn.Module:
    """A small Llama whose linears torchao quantised, saved as transformers does; the model itself is what is meant."""
    model: nn.Module = build("Llama", num_hidden_layers=1)
    quantize(model)
    state = model.state_dict()
    tensors, notes = flatten_tensor_state_dict(state)
    folder.mkdir(exist_ok=True)
    save_file({name: each.contiguous() for name, each in tensors.items()}, folder / "model.safetensors", notes)
    described = json.loads(model.config.to_json_string(use_diff=False))
    described |= {"architectures": ["LlamaForCausalLM"], "quantization_config": METHOD}
    (folder / "config.json").write_text(json.dumps(described))
    return model


def is_layer(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.Linear) and "lm_head" not in name


def by_torchao(config: Any) -> Callable[[nn.Module], None]:
    return lambda model: quantize_(model, config, filter_fn=is_layer)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_codes_decode_to_what_torchao_decodes(name: str, tmp_path: Path) -> None:
    config, family = CONFIGS[name]
    model = saved(tmp_path, by_torchao(config()))
    checkpoint = qc.from_checkpoint(tmp_path)
    read = 0
    for path, linear in model.named_modules():
        if isinstance(linear, nn.Linear) and "lm_head" not in path:
            item = checkpoint.weights.tensors[f"{path}.weight"]
            assert item.codes is not None and item.codes.format.name == family
            np.testing.assert_array_equal(item.view().numpy(), linear.weight.dequantize().detach().numpy())
            read += 1
    assert read == 7


@pytest.mark.parametrize("name", ["int8 rows", "int4 asymmetric"])
def test_the_program_computes_what_the_model_does(name: str, tmp_path: Path, ids: torch.Tensor) -> None:
    config, _ = CONFIGS[name]
    model = saved(tmp_path, by_torchao(config()))
    for linear in model.modules():
        if isinstance(linear, nn.Linear) and hasattr(linear.weight, "qdata"):
            linear.weight = nn.Parameter(linear.weight.dequantize(), requires_grad=False)
    program = qc.qcompile(qc.from_checkpoint(tmp_path), (), {"input_ids": ids})
    with torch.no_grad():
        expected = model(input_ids=ids).logits
    found = program(input_ids=ids).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    assert {row.format.split(":")[0] for row in program.ledger if row.format} == {name.partition(" ")[0]}


def int4_tensor(weight: torch.Tensor, group: int, symmetric: bool) -> tuple[Int4Tensor, torch.Tensor]:
    """An Int4Tensor as FBGEMM's functions make it, and its values by the definition."""
    rows, cols = weight.shape
    parts = weight.float().reshape(rows, cols // group, group)
    if symmetric:
        scale, zero = parts.abs().amax(-1) / 8, torch.zeros(rows, cols // group)
    else:
        low, high = parts.amin(-1), parts.amax(-1)
        scale = (high - low).clamp(min=1e-6) / 15
        zero = low + 8 * scale
    scale, zero = scale.bfloat16(), zero.bfloat16()
    codes = ((parts - zero.float()[..., None]) / scale.float()[..., None]).round().clamp(-8, 7)
    meant = (codes * scale.float()[..., None] + zero.float()[..., None]).reshape(rows, cols)
    flat = codes.reshape(rows, cols).to(torch.int8)
    packed = (flat[:, 1::2] << 4) | (flat[:, ::2] & 0xF)
    made = Int4Tensor(
        qdata=packed, scale=scale.t().contiguous(), zero_point=zero.t().contiguous(), block_size=[1, group],
        shape=weight.shape,
    )  # fmt: skip
    return made, meant


@pytest.mark.parametrize("symmetric", [True, False])
def test_int4_tensors_are_codes_where_their_zeros_are_none_and_values_else(
    symmetric: bool, tmp_path: Path, ids: torch.Tensor
) -> None:
    meant: dict[str, torch.Tensor] = {}

    def quantize(model: nn.Module) -> None:
        for path, linear in model.named_modules():
            if isinstance(linear, nn.Linear) and "lm_head" not in path:
                made, meant[path] = int4_tensor(linear.weight.detach(), 32, symmetric)
                linear.weight = nn.Parameter(made, requires_grad=False)

    saved(tmp_path, quantize)
    checkpoint = qc.from_checkpoint(tmp_path)
    assert len(meant) == 7
    for path, values in meant.items():
        item = checkpoint.weights.tensors[f"{path}.weight"]
        assert (item.codes is not None) is symmetric
        np.testing.assert_array_equal(item.view().numpy(), values.numpy())
    if not symmetric:  # plain values, which a recipe may quantise
        program = qc.qcompile(checkpoint, (), {"input_ids": ids}, quant="int8")
        assert {row.format.split(":")[0] for row in program.ledger if row.format} == {"int8"}
        assert np.isfinite(program(input_ids=ids).logits.numpy()).all()


@pytest.mark.slow
def test_a_folder_that_transformers_saved(tmp_path: Path, ids: torch.Tensor) -> None:
    import transformers

    model = build("Llama", num_hidden_layers=1)
    model.save_pretrained(tmp_path / "float")
    config = transformers.TorchAoConfig(Int8WeightOnlyConfig(version=2, granularity=PerRow()))
    quantised = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "float", dtype=torch.float32, quantization_config=config
    )
    quantised.save_pretrained(tmp_path / "int8")
    checkpoint = qc.from_checkpoint(tmp_path / "int8")
    assert checkpoint.formats()["int8"] == 7
    weight = quantised.get_submodule("model.layers.0.mlp.up_proj").weight.dequantize()
    item = checkpoint.weights.tensors["model.layers.0.mlp.up_proj.weight"]
    np.testing.assert_array_equal(item.view().numpy(), weight.detach().numpy())


LAYER = "model.layers.0.mlp.up_proj"


def edited(folder: Path, change: Callable[[dict[str, torch.Tensor], dict[str, Any]], Any]) -> None:
    """The folder's file with other tensors or metadata; the layer's own is given decoded."""
    path = folder / "model.safetensors"
    with safe_open(path, "pt") as file:
        tensors, notes = {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata())  # noqa: SIM118
    about = json.loads(notes[f"{LAYER}.weight"])
    change(tensors, about)
    notes[f"{LAYER}.weight"] = json.dumps(about)
    save_file(tensors, path, notes)


DAMAGED: dict[str, tuple[str, Callable[[dict[str, torch.Tensor], dict[str, Any]], Any]]] = {
    "a kind for GPUs": (
        "Int4TilePackedTo4dTensor.*IntxWeightOnlyConfig",
        lambda t, n: n.update(_type="Int4TilePackedTo4dTensor"),
    ),
    "a class of anybody's": ("'os.system'.*not read", lambda t, n: n.update(_type="os.system")),
    "no data": ("not read", lambda t, n: n.pop("_data")),
    "squares": ("blocks of 16 x 32", lambda t, n: n["_data"].update(block_size=[16, 32])),
    "three dimensions": ("block_size is", lambda t, n: n["_data"].update(block_size=[1, 1, 32])),
    "other groups": ("scale has the shape", lambda t, n: n["_data"].update(block_size=[1, 64])),
    "an odd group": ("groups of 48", lambda t, n: n["_data"].update(block_size=[1, 48])),
    "another width": ("qdata holds codes", lambda t, n: n["_data"].update(target_dtype={"_data": "int2"})),
    "no width": ("target_dtype is", lambda t, n: n["_data"].update(target_dtype={"_data": "uint9"})),
    "no scale": ("needs scale", lambda t, n: t.pop(f"{LAYER}._weight_scale")),
    "an infinite scale": ("not finite|is inf", lambda t, n: t[f"{LAYER}._weight_scale"].fill_(float("inf"))),
    "wide codes": (
        "qdata is int16",
        lambda t, n: t.update({f"{LAYER}._weight_qdata": t[f"{LAYER}._weight_qdata"].short()}),
    ),
    "far zeros": ("zero_point is not within", lambda t, n: t[f"{LAYER}._weight_zero_point"].fill_(100)),
    "scaled input": (
        "input is scaled",
        lambda t, n: t.update({f"{LAYER}._weight_act_pre_scale": torch.ones(1)}),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_what_does_not_fit_is_refused_by_the_layers_name(name: str, tmp_path: Path) -> None:
    saved(tmp_path, by_torchao(CONFIGS["int4 groups"][0]()))
    match, change = DAMAGED[name]
    edited(tmp_path, change)
    with pytest.raises((FormatError, WeightsError), match=match) as caught:
        qc.from_checkpoint(tmp_path)
    assert LAYER in str(caught.value)


def test_metadata_that_is_missing_or_no_json_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, by_torchao(CONFIGS["int8 rows"][0]()))
    path = tmp_path / "model.safetensors"
    with safe_open(path, "pt") as file:
        tensors, notes = {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata())  # noqa: SIM118
    save_file(tensors, path, notes | {f"{LAYER}.weight": "{"})
    with pytest.raises(WeightsError, match=f"metadata of {LAYER}.weight"):
        qc.from_checkpoint(tmp_path)
    save_file(tensors, path)
    with pytest.raises(WeightsError, match="metadata says nothing of"):
        qc.from_checkpoint(tmp_path)


def test_pickles_are_not_read_and_the_way_out_is_named(tmp_path: Path) -> None:
    model = saved(tmp_path, by_torchao(CONFIGS["int8 rows"][0]()))
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(WeightsError, match=r"holds pickles \(pytorch_model\.bin\).*save_pretrained.*torchao 0\.15"):
        qc.from_checkpoint(tmp_path)


def test_the_reader_takes_arrays_alone() -> None:
    """Without files: what else reads torchao's arrays has the same checks."""
    codes = np.arange(-32, 32, dtype=np.int8).reshape(2, 32)
    about = {"_type": "Int8Tensor", "_data": {"block_size": [1, 32]}}
    packed = torchao.read({"qdata": codes, "scale": np.full((2, 1), 0.5, np.float32)}, about, "layer")
    np.testing.assert_array_equal(packed.format.decode(packed), codes * np.float32(0.5))
