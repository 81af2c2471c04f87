"""Folders as they are published: transformers stacks experts, joins filters and renames parameters while it loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from by_path import load

import qcompiler as qc
from qcompiler import formats
from qcompiler.config import resolve_format
from qcompiler.errors import WeightsError
from qcompiler.formats.foreign import gptq
from qcompiler.formats.foreign.floats import write_fp8
from qcompiler.frontends.checkpoints.published_names import by_rows, stacked, unit_of, with_scales_of_rows
from qcompiler.frontends.torch.frontend import import_torch

cases = load("tests/files/gguf_cases.py")
QUICK = ("llama", "mixtral", "mamba2", "kimi-linear", "qwen4exp", "deepseek4", "gptneox")
"""No conversion, stacked experts under other names, numbers that JSON has not, joined filters, joined rows, all of
these, and a tied head under another name."""


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in QUICK else pytest.mark.slow) for case in cases.CASES]
)
def test_a_folder_that_transformers_saves_has_every_number_of_the_model(case: str, tmp_path: Path) -> None:
    model = cases.build(case)
    model.save_pretrained(tmp_path)
    checkpoint = qc.from_checkpoint(tmp_path)
    tensors = checkpoint.weights.tensors
    wanted = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("lm_head")}
    assert not [name for name in tensors if name not in model.state_dict()]
    for name, tensor in wanted.items():
        assert tensors[name].shape == tuple(tensor.shape), name
        assert torch.equal(tensors[name].view().to(tensor.dtype), tensor), name
    assert type(checkpoint.module) is type(model)
    assert checkpoint.config.to_dict() == type(model.config).from_pretrained(tmp_path).to_dict()


def of_experts(folder: Path, quantize: Any, method: dict[str, Any], **sizes: Any) -> Any:
    """Writes a small Qwen 3 MoE in which each matrix of each expert is what `quantize` gives (arrays, values); the
    model with those values, and how many there are."""
    model = cases.build("qwen3moe", **sizes)
    model.save_pretrained(folder)
    path = folder / "model.safetensors"
    state = safetensors.torch.load_file(path)
    names = [name for name in state if ".experts." in name]
    for number, name in enumerate(names):
        arrays, meant = quantize(number, state.pop(name).numpy())
        layer = name.removesuffix(".weight")
        state |= {f"{layer}.{part}": value for part, value in arrays.items()}
        _, _, index, _, _, expert, part = layer.split(".")[-7:]
        inside = model.model.layers[int(index)].mlp.experts
        with torch.no_grad():
            if part == "down_proj":
                inside.down_proj[int(expert)] = torch.from_numpy(meant)
            else:
                rows = meant.shape[0]
                start = rows * (part == "up_proj")
                inside.gate_up_proj[int(expert), start : start + rows] = torch.from_numpy(meant)
    safetensors.torch.save_file({name: value.contiguous() for name, value in state.items()}, path)
    described = json.loads((folder / "config.json").read_text()) | {"quantization_config": method}
    (folder / "config.json").write_text(json.dumps(described))
    return model, len(names)


def test_a_folder_of_experts_computes_what_transformers_does(tmp_path: Path) -> None:
    model = cases.build("mixtral")
    model.save_pretrained(tmp_path)
    checkpoint = qc.from_checkpoint(tmp_path)
    ids = torch.tensor([[5, 17, 80, 3, 61]])
    imported = import_torch(checkpoint.module, (), {"input_ids": ids}, weights=checkpoint.weights, quant="int8")
    stacks = [row.parameters[0] for row in imported.quantized.ledger if ".experts." in row.parameters[0]]
    assert len(stacks) == 4, "two matrices of two layers"
    with torch.no_grad():
        ours, theirs = imported.quantized.module(input_ids=ids).logits, model(ids, use_cache=False).logits
    assert theirs.std() > 0.5
    assert 1e-5 < float((ours - theirs).norm() / theirs.norm()) < 0.05, "int8 is near"


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False, "sym": True}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@pytest.mark.parametrize("kind", ["fp8", pytest.param("gptq", marks=pytest.mark.slow)])
def test_codes_of_experts_are_stacked_and_mean_what_they_mean(kind: str, tmp_path: Path) -> None:
    fmt = resolve_format("int4:group=64" if kind == "gptq" else "fp8_e4m3:per=block")

    def quantize(_: int, values: np.ndarray) -> Any:
        packed = fmt.encode(values)
        if kind == "gptq":
            arrays = gptq.write(packed)
        else:
            arrays = dict(zip(("weight", "weight_scale_inv"), write_fp8(packed), strict=True))
        found = load("tests/files/test_checkpoint_folder.py").as_torch
        return {name: found(array) for name, array in arrays.items()}, fmt.decode(packed)

    model, count = of_experts(tmp_path, quantize, GPTQ if kind == "gptq" else FP8)
    assert count == 2 * 4 * 3
    checkpoint = qc.from_checkpoint(tmp_path)
    ids = torch.tensor([[5, 17, 80, 3, 61]])
    imported = import_torch(checkpoint.module, (), {"input_ids": ids}, weights=checkpoint.weights)
    with torch.no_grad():
        ours, theirs = imported.quantized.module(input_ids=ids).logits, model(ids, use_cache=False).logits
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5 * float(theirs.abs().max()))
    reasons = {row.parameters[0]: row.reason for row in imported.quantized.ledger if ".experts." in row.parameters[0]}
    assert len(reasons) == 4 and set(reasons.values()) == {"as stored"}


EVERY = (
    "int2:group=32", "int3:group=64", "int4:group=64", "int4:group=64,symmetric=False", "int8", "nf4", "fp4",
    "nf4:double_quant=True", "llm_int8", "fp8_e4m3:per=row", "fp8_e4m3:per=tensor", "fp8_e4m3:per=block",
    "nvfp4:divisor=True", "mxfp4", "q4_0", "q4_K",
)  # fmt: skip


@pytest.mark.parametrize("text", EVERY)
def test_rows_of_a_format_are_stacked_in_any_order_or_refused(text: str) -> None:
    fmt, random = resolve_format(text), np.random.default_rng(0)
    rows, cols = 256, 256
    parts = [fmt.encode(random.normal(scale=i + 1, size=(rows, cols)).astype(np.float32)) for i in range(3)]
    unit = unit_of(by_rows(fmt), cols)
    shares = text in ("nf4:double_quant=True", "nvfp4:divisor=True")
    assert unit == (None if shares else 128 if text == "fp8_e4m3:per=block" else 1)
    if unit is None:
        return
    order = (random.permutation(3 * rows // unit)[:, None] * unit + np.arange(unit)).reshape(-1)
    made = stacked([with_scales_of_rows(part) for part in parts], order)
    wanted = np.concatenate([fmt.decode(part) for part in parts])[order]
    assert np.array_equal(made.format.decode(made), wanted)


def test_scales_of_blocks_that_would_lie_in_two_experts_are_refused(tmp_path: Path) -> None:
    """A block of 128 x 128 of fp8 has one scale: matrices of 192 rows cannot lie one behind the other."""
    fmt, as_torch = resolve_format("fp8_e4m3:per=block"), load("tests/files/test_checkpoint_folder.py").as_torch

    def quantize(_: int, values: np.ndarray) -> Any:
        arrays = dict(zip(("weight", "weight_scale_inv"), write_fp8(fmt.encode(values)), strict=True))
        return {name: as_torch(array) for name, array in arrays.items()}, values

    of_experts(tmp_path, quantize, FP8, moe_intermediate_size=192)
    with pytest.raises(WeightsError, match=r"gate_up_proj' .* stack of 8 matrices in fp8_e4m3.* would share scales"):
        qc.from_checkpoint(tmp_path)


def test_experts_that_do_not_fit_one_another_are_named(tmp_path: Path) -> None:
    cases.build("mixtral").save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    state = safetensors.torch.load_file(path)
    name = "model.layers.1.block_sparse_moe.experts.3.w1.weight"
    for change, message in (
        (None, r"consists of 7 tensors .*'model\.layers\.1\.block_sparse_moe\.experts\.0\.w1\.weight' … .* do not fit"),
        (torch.zeros(4, 4), r"consists of 8 tensors of the folder .* which do not fit one another"),
    ):
        changed = {each: value for each, value in state.items() if each != name or change is not None}
        safetensors.torch.save_file(changed | ({} if change is None else {name: change}), path)
        with pytest.raises(
            WeightsError, match=rf"'model\.layers\.1\.mlp\.experts\.gate_up_proj' of the model {message}"
        ):
            qc.from_checkpoint(tmp_path)
    half = {each: value for each, value in state.items() if "experts.3" not in each}
    safetensors.torch.save_file(half, path)
    checkpoint = qc.from_checkpoint(tmp_path)
    with pytest.raises(
        WeightsError, match=r"'model\.layers\.0\.mlp\.experts\.gate_up_proj' is 3x1024x256, the model has 4x"
    ):
        import_torch(
            checkpoint.module, (), {"input_ids": torch.ones(1, 3, dtype=torch.int64)}, weights=checkpoint.weights
        )


def test_codes_in_different_orders_of_columns_are_refused(tmp_path: Path) -> None:
    fmt = formats.get("int4", group=64, symmetric=False)
    as_torch = load("tests/files/test_checkpoint_folder.py").as_torch

    def quantize(number: int, values: np.ndarray) -> Any:
        order = np.argsort(np.argsort(np.random.default_rng(number).permutation(values.shape[1])) // 64, kind="stable")
        arrays = gptq.write(fmt.encode(values[:, order]), version=2, permutation=order)
        return {name: as_torch(array) for name, array in arrays.items()}, values

    method = {**GPTQ, "desc_act": True, "sym": False, "checkpoint_format": "gptq_v2"}
    of_experts(tmp_path, quantize, method)
    with pytest.raises(
        WeightsError, match=r"\.experts\..* of the model consists of \d tensors .* different orders of col"
    ):
        qc.from_checkpoint(tmp_path)


def test_tensors_that_the_model_ignores_are_left_out_and_others_are_named(tmp_path: Path) -> None:
    model = cases.build("deepseek4")
    assert any("mtp" in pattern for pattern in model._keys_to_ignore_on_load_unexpected)
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    state = safetensors.torch.load_file(path)
    safetensors.torch.save_file(state | {"mtp.0.e_proj.weight": torch.ones(4, 4)}, path)
    assert set(qc.from_checkpoint(tmp_path).weights.tensors) == set(model.state_dict())
    safetensors.torch.save_file(state | {"other.weight": torch.ones(4, 4)}, path)
    assert set(qc.from_checkpoint(tmp_path).weights.tensors) == {*model.state_dict(), "other.weight"}


def test_numbers_that_json_has_not_are_read_as_transformers_writes_them(tmp_path: Path) -> None:
    cases.build("mamba2").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    described = json.loads(path.read_text())
    assert described["time_step_limit"] == [0.0, {"__float__": "Infinity"}]
    assert qc.from_checkpoint(tmp_path).config.time_step_limit[1] == float("inf")
    for value, message in (("NaN", "it must be a finite number"), ("many", "refuses the configuration")):
        path.write_text(json.dumps(described | {"time_step_limit": [0.0, {"__float__": value}]}))
        with pytest.raises(WeightsError, match=message):
            qc.from_checkpoint(tmp_path)
