"""Folders of transformers with quantised layers: the program holds the stored codes, and computes what they mean."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import numpy as np
import pytest
import torch
from by_path import load
from safetensors.torch import save_file
from torch import nn

import qcompiler as qc
from qcompiler import formats
from qcompiler.config import resolve_format
from qcompiler.errors import FormatError, WeightsError
from qcompiler.formats.foreign import awq, compressed_tensors, gptq
from qcompiler.formats.foreign.floats import write_fp8
from qcompiler.frontends.torch.frontend import import_torch

build = load("tests/files/writing.py").build
DIMS = {"input_ids": {0: ("b", 1, 4), 1: ("s", 1, 32)}}
Arrays = dict[str, Any]


def saved(folder: Path, quantize: Callable[[str, np.ndarray], tuple[Arrays, np.ndarray]], method: Any) -> nn.Module:
    """Writes a small Llama whose layers' linears are what `quantize` gives (arrays, values); the model with those."""
    model = build("Llama", num_hidden_layers=1)
    state: dict[str, torch.Tensor] = dict(model.state_dict())
    with torch.no_grad():
        for name, linear in model.named_modules():
            if not isinstance(linear, nn.Linear) or name == "lm_head":
                continue
            arrays, meant = quantize(name, state.pop(f"{name}.weight").numpy())
            linear.weight.copy_(torch.from_numpy(meant))
            state |= {f"{name}.{suffix}": as_torch(array) for suffix, array in arrays.items()}
    names = sorted(state)
    folder.mkdir(exist_ok=True)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}  # the arrays of a layer in two files
    for file, some in halves.items():
        save_file({name: state[name].contiguous() for name in some}, folder / file)
    places = {name: file for file, some in halves.items() for name in some}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    described = json.loads(model.config.to_json_string(use_diff=False))
    described |= {"architectures": ["LlamaForCausalLM"], "quantization_config": method}
    (folder / "config.json").write_text(json.dumps(described))
    return model


def as_torch(array: Any) -> torch.Tensor:
    if isinstance(array, torch.Tensor):
        return array
    if array.dtype.name.startswith("float8"):
        return torch.from_numpy(array.view(np.uint8)).view(getattr(torch, array.dtype.name))
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(np.ascontiguousarray(array))


def oracle(checkpoint: qc.Checkpoint, ids: torch.Tensor) -> Any:
    """The stored tensors, and the logits of the rewritten program in eager torch."""
    imported = import_torch(checkpoint.module, (), {"input_ids": ids}, dynamic_shapes=DIMS, weights=checkpoint.weights)
    with torch.no_grad():
        return imported, imported.quantized.module(input_ids=ids).logits


def check_equal(found: torch.Tensor, model: nn.Module, ids: torch.Tensor) -> None:
    with torch.no_grad():
        expected = model(input_ids=ids).logits
    assert expected.std() > 0.5, "logits that all are alike would show nothing"
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


# --- what is written by our writers ----------------------------------------------------------------------------------


def encoded(text: str, stored: dict[str, Any], write: Callable[[Any], Arrays]) -> Any:
    """A `quantize` by one of our formats; `stored` gets the packed tensors by layer."""
    fmt = resolve_format(text)

    def quantize(layer: str, values: np.ndarray) -> tuple[Arrays, np.ndarray]:
        packed = stored[f"{layer}.weight"] = fmt.encode(values)
        return write(packed), fmt.decode(packed)

    return quantize


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False}
_INT4 = "int4:group=64,symmetric=False"
CT = {"quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed"}


def _ct(kind: str, **weights: Any) -> dict[str, Any]:
    return {**CT, "format": kind, "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}


CASES: dict[str, tuple[str, Callable[[Any], Arrays], dict[str, Any]]] = {
    "gptq v1": ("int4:group=64", gptq.write, {**GPTQ, "sym": True}),
    "gptq v2": (_INT4, lambda p: gptq.write(p, version=2), {**GPTQ, "sym": False, "checkpoint_format": "gptq_v2"}),
    "gptq 3 bits": ("int3:group=64", gptq.write, {**GPTQ, "bits": 3}),
    "awq": (_INT4, awq.write, {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True,
                               "version": "gemm"}),
    "pack-quantized": (
        "int4:group=32", lambda p: compressed_tensors.write(p, kind="pack-quantized"),
        _ct("pack-quantized", num_bits=4, type="int", strategy="group", group_size=32, symmetric=True)),
    "int-quantized": (
        "int8", lambda p: compressed_tensors.write(p, kind="int-quantized"),
        _ct("int-quantized", num_bits=8, type="int", strategy="channel", symmetric=True)),
    "float-quantized": (
        "fp8_e4m3:per=row", lambda p: compressed_tensors.write(p, kind="float-quantized"),
        _ct("float-quantized", num_bits=8, type="float", strategy="channel", symmetric=True)),
    "nvfp4": (
        "nvfp4:divisor=True", lambda p: compressed_tensors.write(p, kind="nvfp4-pack-quantized"),
        _ct("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16, symmetric=True)),
    "fp8": ("fp8_e4m3:per=block", lambda p: dict(zip(("weight", "weight_scale_inv"), write_fp8(p), strict=True)),
            {"quant_method": "fp8", "weight_block_size": [128, 128]}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_stored_codes_are_kept_and_mean_what_they_mean(case: str, tmp_path: Path, ids: torch.Tensor) -> None:
    text, write, method = CASES[case]
    stored: dict[str, Any] = {}
    model = saved(tmp_path / "m", encoded(text, stored, write), method)
    imported, logits = oracle(qc.from_checkpoint(tmp_path / "m"), ids)
    check_equal(logits, model, ids)
    assert len(stored) == 7
    for name, packed in stored.items():
        found = imported.weights[name]
        assert (found.format.name, found.data.tobytes()) == (packed.format.name, packed.to_bytes()), name
    reasons = {row.parameters[0]: row.reason for row in imported.quantized.ledger}
    assert all(reasons[name] == "as stored" for name in stored)
    assert reasons["lm_head.weight"] == "recipe 'float' keeps linear weights"


def test_columns_that_a_file_sorted_take_their_input_in_that_order(tmp_path: Path, ids: torch.Tensor) -> None:
    """Act-order: each linear of the program has an index_select before it, compiled and in the eager oracle."""
    generator = np.random.default_rng(5)
    fmt = formats.get("int4", group=64, symmetric=False)

    def quantize(layer: str, values: np.ndarray) -> tuple[Arrays, np.ndarray]:
        order = np.argsort(np.argsort(generator.permutation(values.shape[1])) // 64, kind="stable")
        packed = fmt.encode(values[:, order])
        meant = np.empty_like(values)
        meant[:, order] = fmt.decode(packed)
        return gptq.write(packed, version=2, permutation=order), meant

    method = {**GPTQ, "desc_act": True, "sym": False, "checkpoint_format": "gptq_v2"}
    model = saved(tmp_path / "m", quantize, method)
    checkpoint = qc.from_checkpoint(tmp_path / "m")
    found = {item.name: item.view() for item in checkpoint.weights.tensors.values()}
    for name, parameter in model.named_parameters():
        assert torch.equal(found[name], parameter.detach()), name
    program = qc.qcompile(checkpoint, (), {"input_ids": ids}, dynamic_shapes=DIMS)
    check_equal(program(input_ids=ids[:1, :5]).logits, model, ids[:1, :5])
    _, logits = oracle(checkpoint, ids)
    check_equal(logits, model, ids)
    moved = {each.parameter: each.by for each in program.plan.moved or ()}  # no adapter is for columns in that order
    assert moved["model.layers.0.mlp.down_proj.weight"] == ("column-order",)
    assert all(by == ("column-order",) and path.endswith("proj.weight") for path, by in moved.items())


# --- bitsandbytes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "nested"), [("nf4", False), ("nf4", True), ("fp4", True)])
def test_four_bits_by_bitsandbytes_itself(kind: str, nested: bool, tmp_path: Path, ids: torch.Tensor) -> None:
    def quantize(layer: str, values: np.ndarray) -> tuple[Arrays, np.ndarray]:
        codes, state = bnb.functional.quantize_4bit(
            torch.from_numpy(values), blocksize=64, compress_statistics=nested, quant_type=kind
        )
        arrays = {f"weight.{name}": tensor for name, tensor in state.as_dict(packed=True).items()}
        return {"weight": codes, **arrays}, bnb.functional.dequantize_4bit(codes, state).numpy()

    model = saved(tmp_path / "m", quantize, {"quant_method": "bitsandbytes", "load_in_4bit": True})
    imported, logits = oracle(qc.from_checkpoint(tmp_path / "m"), ids)
    check_equal(logits, model, ids)
    rows = {row.parameters[0]: row.format for row in imported.quantized.ledger}
    assert rows["model.layers.0.mlp.down_proj.weight"].startswith(f"{kind}:block=64")
    assert ("double_quant=True" in rows["model.layers.0.mlp.down_proj.weight"]) == nested


def test_eight_bits_by_bitsandbytes_itself(tmp_path: Path, ids: torch.Tensor) -> None:
    def quantize(layer: str, values: np.ndarray) -> tuple[Arrays, np.ndarray]:
        codes, absmax, _ = bnb.functional.int8_vectorwise_quant(torch.from_numpy(values).half())
        arrays = {"weight": codes, "SCB": absmax, "weight_format": torch.zeros((), dtype=torch.uint8)}
        return arrays, bnb.functional.int8_vectorwise_dequant(codes, absmax).numpy()

    model = saved(tmp_path / "m", quantize, {"quant_method": "bitsandbytes", "load_in_8bit": True})
    _, logits = oracle(qc.from_checkpoint(tmp_path / "m"), ids)
    check_equal(logits, model, ids)


# --- what is refused -------------------------------------------------------------------------------------------------


def test_settings_that_are_not_read_are_named(tmp_path: Path) -> None:
    saved(tmp_path, encoded("int4:group=64", {}, gptq.write), {**GPTQ, "sym": True})
    config = json.loads((tmp_path / "config.json").read_text())
    for method, message in (
        ({"quant_method": "eetq"}, r"quantised by 'eetq'; there are: bitsandbytes, gptq, awq, compressed-tensors, fp8"),
        ({**GPTQ, "bits": "four"}, r"bits is 'four', no integer"),
        ({**GPTQ, "checkpoint_format": "marlin"}, r"checkpoint_format is 'marlin'; there are gptq and gptq_v2"),
        ({**GPTQ, "dynamic": {"-:lm_head": {}}}, r"dynamic is .* which is not read"),
        (
            {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemv"},
            r"version is 'gemv', which is not read",
        ),
        ({**CT}, r"there are no config_groups"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": method}))
        with pytest.raises(WeightsError, match=message):
            qc.from_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text(
        json.dumps({**config, "quantization_config": {**GPTQ, "sym": False, "bits": 2}})
    )
    with pytest.raises(FormatError, match=r"model.layers.0.*scales"):
        qc.from_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["NoSuchModel"]}))
    with pytest.raises(WeightsError, match=r"names the architecture 'NoSuchModel'"):
        qc.from_checkpoint(tmp_path)
    with pytest.raises(WeightsError, match=r"cannot read .*config.json"):
        qc.from_checkpoint(tmp_path / "nothing")


def test_fp8_without_a_scale_is_refused_everywhere(tmp_path: Path) -> None:
    """Codes that are taken for values would be a model of noise."""
    saved(tmp_path, encoded("int4:group=64", {}, gptq.write), {**GPTQ, "sym": True})
    save_file({"w": torch.ones(4, 4).to(torch.float8_e4m3fn)}, tmp_path / "a.safetensors")
    (tmp_path / "model.safetensors.index.json").unlink()
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"'w' is torch.float8_e4m3fn without a scale"):
        qc.from_checkpoint(tmp_path)
    with pytest.raises(WeightsError, match=r"'w' .* has the dtype F8_E4M3.*qc.from_checkpoint"):
        qc.Shards(tmp_path)
