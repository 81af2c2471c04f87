"""OpenVINO's CPU plugin with whole models: in fp32 and bf16, with weights of 8 and 4 bits by NNCF, and with int8 rows.

"a8" finds the scales of rows as it runs (dynamic quantisation in groups of 128 columns).  "static a8" has scales from
a calibration, which here sees the very inputs that are measured: the best that such scales can be.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import nncf
import numpy as np
import openvino
import torch
from shared import Array, ModelEngine

VERSION = f"{openvino.__version__.partition('-')[0]}, NNCF {nncf.__version__}"
CORE = openvino.Core()


def use_threads(threads: int) -> None:
    """Compiled models take their number from `compiled`."""


@lru_cache(maxsize=1)
def exported(program: Path) -> torch.export.ExportedProgram:
    return torch.export.load(program)


def converted(program: Path) -> openvino.Model:
    """A graph of its own, which NNCF may change."""
    return openvino.convert_model(exported(program))


def compiled(
    model: openvino.Model, arrays: list[Array], threads: int, precision: str, quantised: int
) -> Callable[[], Array]:
    """`quantised` is the number of columns that share a scale of a row in int8; 0 keeps rows as they are."""
    model.reshape({place: list(array.shape) for place, array in zip(model.inputs, arrays, strict=True)})
    options = {
        "INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1, "ENABLE_CPU_PINNING": False,
        "INFERENCE_PRECISION_HINT": precision, "DYNAMIC_QUANTIZATION_GROUP_SIZE": quantised,
    }  # fmt: skip
    request = CORE.compile_model(model, "CPU", options).create_infer_request()
    for place, array in enumerate(arrays):
        request.set_input_tensor(place, openvino.Tensor(array))

    def run() -> Array:
        request.infer()
        return np.asarray(request.get_output_tensor(0).data)

    return run


def plain(program: Path, arrays: list[Array], threads: int, precision: str) -> Callable[[], Array]:
    return compiled(converted(program), arrays, threads, precision, 0)


def compressed(program: Path, arrays: list[Array], threads: int, **how: Any) -> Callable[[], Array]:
    """`how` is what nncf.compress_weights takes."""
    return compiled(nncf.compress_weights(converted(program), **how), arrays, threads, "bf16", 128)


def calibrated(program: Path, arrays: list[Array], threads: int) -> Callable[[], Array]:
    quantised = nncf.quantize(
        converted(program), nncf.Dataset([arrays]), model_type=nncf.ModelType.TRANSFORMER, subset_size=1
    )
    return compiled(quantised, arrays, threads, "bf16", 0)


OF_8_BITS = {"mode": nncf.CompressWeightsMode.INT8_SYM}
OF_4_BITS = {"mode": nncf.CompressWeightsMode.INT4_SYM, "group_size": 128, "all_layers": True}

ENGINES = {
    "openvino fp32": ModelEngine("fp32", lambda *given: plain(*given, "f32")),
    "openvino bf16": ModelEngine("bf16", lambda *given: plain(*given, "bf16")),
    "openvino int8 a8": ModelEngine("int8", lambda *given: compressed(*given, **OF_8_BITS)),
    "openvino int4g128 a8": ModelEngine("int8", lambda *given: compressed(*given, **OF_4_BITS)),
    "openvino int8 static a8": ModelEngine("int8", calibrated),
}
