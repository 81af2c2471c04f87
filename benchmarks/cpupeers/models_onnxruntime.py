"""onnxruntime with whole models: in fp32, and with weights and rows of 8 bits by its dynamic quantisation."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import onnxruntime
import torch
from onnxruntime.quantization import QuantType, quantize_dynamic
from shared import Array, ModelEngine

VERSION = onnxruntime.__version__


def use_threads(threads: int) -> None:
    """Sessions take their number from `session`."""


def session(program: Path, arrays: list[Array], threads: int, quantised: bool) -> Callable[[], Array]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.onnx")
        torch.onnx.export(torch.export.load(program), (), path, dynamo=True, external_data=True, verbose=False)
        if quantised:
            smaller = path.with_name("quantised.onnx")
            quantize_dynamic(
                path, smaller, per_channel=True, weight_type=QuantType.QInt8, use_external_data_format=True
            )
            path = smaller
        made = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    given = {place.name: array for place, array in zip(made.get_inputs(), arrays, strict=True)}

    def run() -> Array:
        result: Array = made.run(None, given)[0]
        return result

    return run


ENGINES = {
    "onnxruntime fp32": ModelEngine("fp32", lambda *given: session(*given, quantised=False)),
    "onnxruntime int8 a8": ModelEngine("int8", lambda *given: session(*given, quantised=True)),
}
