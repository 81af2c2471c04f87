"""Experts in MXFP4, as gpt-oss stores them.

    model.layers.3.mlp.experts.gate_up_proj_blocks   uint8 (E, N, K / 32, 16)     two elements per byte, even one low
    model.layers.3.mlp.experts.gate_up_proj_scales   uint8 (E, N, K / 32)         exponents of the blocks, less 127

The model's parameter `gate_up_proj` is (E, K, N).  The codes are the matrix (E * N, K) of format mxfp4, whose blocks
run along K, which is how a program stores such a parameter: they are kept byte for byte.  Source: transformers'
integrations/mxfp4.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from qcompiler.errors import WeightsError
from qcompiler.formats import PackedTensor
from qcompiler.formats.foreign import floats
from qcompiler.formats.foreign.arrays import Arrays
from qcompiler.formats.mx import MXFP4
from qcompiler.frontends.checkpoints.checkpoint import CodesInFile
from qcompiler.frontends.weights.safetensors_files import FileTensor
from qcompiler.frontends.weights.weight_source import EXPERTS_TRANSPOSED, InFile, StoredCodes

BLOCKS, SCALES = "_blocks", "_scales"
BLOCK = 32
"""Elements that share an exponent."""


def experts(tensors: Mapping[str, FileTensor]) -> tuple[dict[str, InFile], set[str]]:
    """The experts' parameters, and the names of the tensors they consist of. WeightsError names what does not fit."""
    found: dict[str, InFile] = {}
    taken: set[str] = set()
    for name, blocks in tensors.items():
        if not name.endswith(BLOCKS):
            continue
        parameter = name.removesuffix(BLOCKS)
        scales = tensors.get(parameter + SCALES)
        if scales is None:
            raise WeightsError(f"'{name}' has no '{parameter}{SCALES}' beside it, which its values need")
        found[parameter] = _parameter(parameter, blocks, scales)
        taken |= {name, scales.name}
    return found, taken


def _parameter(name: str, blocks: FileTensor, scales: FileTensor) -> CodesInFile:
    shape, are_bytes = blocks.shape, blocks.dtype == scales.dtype == torch.uint8
    if len(shape) != 4 or shape[3] != BLOCK // 2 or scales.shape != shape[:3] or not are_bytes or 0 in shape:
        raise WeightsError(
            f"'{blocks.name}' is {blocks.dtype} of shape {list(shape)} and '{scales.name}' {scales.dtype} of shape "
            f"{list(scales.shape)}; experts in mxfp4 are bytes of shapes [experts, rows, blocks, {BLOCK // 2}] and "
            "[experts, rows, blocks]"
        )
    count, rows, cols = shape[0], shape[1], shape[2] * BLOCK

    def read() -> PackedTensor:
        matrix = blocks.array().reshape(count * rows, -1)
        exponents = scales.array().reshape(count * rows, -1)
        return floats.read_mx(Arrays({"blocks": matrix, "scales": exponents}, name, "mxfp4"), "blocks", "scales")

    def identity() -> dict[str, Any]:
        return {"arrays": [blocks.identity(), scales.identity()]}

    def release() -> None:
        blocks.release()
        scales.release()

    files = " and ".join(sorted({str(tensor.file.path) for tensor in (blocks, scales)}))
    where = f"{files} ({blocks.name}, {scales.name})"
    codes = StoredCodes(where, MXFP4(), count * rows, cols, read, arrangement=EXPERTS_TRANSPOSED)
    return CodesInFile(name, (count, cols, rows), codes, identity, release)


__all__ = ["experts"]
