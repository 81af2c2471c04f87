"""`compile_causal_lm("folder")`: shards, quantised layers of other systems, and how much memory that takes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import numpy as np
import pytest
import torch
from by_path import environment, load

import qcompiler as qc

folders = load("tests/files/test_checkpoint_folder.py")
checked = load("tests/lm/test_gguf_models.py")
build = load("tests/files/writing.py").build

KINDS = ("gptq v1", "gptq v2", "awq", "pack-quantized", "int-quantized", "float-quantized", "nvfp4", "fp8")
QUICK = {"awq"}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in QUICK else pytest.mark.slow) for kind in KINDS]
)
def test_a_quantised_folder_generates_what_its_codes_mean(kind: str, tmp_path: Path) -> None:
    text, write, method = folders.CASES[kind]
    model = folders.saved(tmp_path / "m", folders.encoded(text, {}, write), method)
    check(tmp_path / "m", model)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_a_folder_of_bitsandbytes(kind: str, tmp_path: Path) -> None:
    def quantize(layer: str, values: np.ndarray) -> tuple[dict[str, Any], np.ndarray]:
        codes, state = bnb.functional.quantize_4bit(
            torch.from_numpy(values), blocksize=64, compress_statistics=True, quant_type=kind
        )
        arrays = {f"weight.{name}": tensor for name, tensor in state.as_dict(packed=True).items()}
        return {"weight": codes, **arrays}, bnb.functional.dequantize_4bit(codes, state).numpy()

    model = folders.saved(tmp_path / "m", quantize, {"quant_method": "bitsandbytes", "load_in_4bit": True})
    check(tmp_path / "m", model)


@pytest.mark.slow
def test_a_gptq_folder_with_sorted_columns(tmp_path: Path) -> None:
    """Act-order: the input of each linear is sorted before it."""
    generator = np.random.default_rng(5)
    fmt = qc.formats.get("int4", group=64, symmetric=False)

    def quantize(layer: str, values: np.ndarray) -> tuple[dict[str, Any], np.ndarray]:
        order = np.argsort(np.argsort(generator.permutation(values.shape[1])) // 64, kind="stable")
        packed = fmt.encode(values[:, order])
        meant = np.empty_like(values)
        meant[:, order] = fmt.decode(packed)
        return folders.gptq.write(packed, version=2, permutation=order), meant

    method = {**folders.GPTQ, "desc_act": True, "sym": False, "checkpoint_format": "gptq_v2"}
    check(tmp_path / "m", folders.saved(tmp_path / "m", quantize, method))


def check(folder: Path, model: Any) -> None:
    lm = qc.compile_causal_lm(folder, max_seq_len=40, chunk=5)
    checked.check(lm, model, checked.PROMPT, 8)
    assert lm.program is not None
    kept = [row for row in lm.program.ledger if row.reason.startswith("as stored")]
    assert len(kept) == 7, "every linear of the layer has the folder's codes"


# --- memory ----------------------------------------------------------------------------------------------------------

LARGE: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 6, "head_dim": 128}


EXPERTS: dict[str, Any] = {"moe_intermediate_size": 512, "num_experts": 8, "num_experts_per_tok": 2}
"""A matrix for each expert in the folder; the largest parameter of the model, a layer's first ones, has 17 MB."""


def _saved(folder: Path, kind: str, dtype: torch.dtype, shard: str, sizes: dict[str, Any]) -> None:
    build(kind, **sizes).to(dtype).save_pretrained(folder, max_shard_size=shard)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "more"), [("Llama", {}), ("Qwen3Moe", EXPERTS)])
def test_a_folder_is_quantised_shard_by_shard(kind: str, more: dict[str, Any], tmp_path: Path) -> None:
    """304 MB in fp32, 152 MB in eight shards, 43 MB as an artifact. Floats, or two artifacts, break the bound.

    Measured: 41 MB, the artifact and nothing of the shards.
    """
    _saved(tmp_path / "small" / "m", kind, torch.bfloat16, "20MB", {"num_hidden_layers": 1, **more})
    _saved(tmp_path / "large" / "m", kind, torch.bfloat16, "20MB", LARGE | more)
    script = Path(__file__).with_name("measure_folder.py")
    done = subprocess.run(
        [sys.executable, "-P", str(script), str(tmp_path / "small" / "m"), str(tmp_path / "large" / "m"), "q4_0"],
        capture_output=True, text=True, check=False, timeout=1200, env=environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert facts["shards"] >= 5, facts
    bound = facts["shard"] + facts["artifact"]
    assert bound < facts["float"] / 4 and bound < 2 * facts["artifact"], facts
    assert facts["growth"] <= bound, facts
