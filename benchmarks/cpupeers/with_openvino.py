"""OpenVINO's CPU plugin: weights that are decompressed in the graph, with and without dynamic quantisation of the rows,
and plain ones in fp32 and bf16. One graph has a product for each copy of the weight."""

from __future__ import annotations

from typing import Any

import numpy as np
import openvino
from openvino import opset13 as ops
from shared import Case, Engine, Made, groups_of_4_bits, rows_of_8_bits

VERSION = openvino.__version__.partition("-")[0]
CORE = openvino.Core()


def use_threads(threads: int) -> None:
    """Compiled models take their number from the case."""


def compiled(case: Case, weights: list[Any], precision: str, quantised: int) -> Made:
    """`quantised` is the number of columns that share a scale of x in int8; 0 keeps x as it is."""
    x = ops.parameter([case.m, case.k], np.float32, name="x")
    products = [ops.matmul(x, w, False, True) for w in weights]
    model = openvino.Model([ops.result(each) for each in products], [x], "copies")
    options = {
        "INFERENCE_NUM_THREADS": case.threads, "NUM_STREAMS": 1, "ENABLE_CPU_PINNING": False,
        "INFERENCE_PRECISION_HINT": precision, "DYNAMIC_QUANTIZATION_GROUP_SIZE": quantised,
    }  # fmt: skip
    request = CORE.compile_model(model, "CPU", options).create_infer_request()
    request.set_input_tensor(openvino.Tensor(case.x))

    def run() -> list[Any]:
        request.infer()
        return [request.get_output_tensor(copy) for copy in range(case.copies)]

    return run, lambda tensor: np.array(tensor.data)


def of_4_bits(case: Case, group: int, quantised: int) -> Made:
    codes, scales = groups_of_4_bits(case.first, group)
    shape = [case.n, case.k // group, group]
    pairs = codes[:, 0::2] | codes[:, 1::2] << 4
    weights = []
    for packed, s in zip(case.turned(pairs), case.turned(scales), strict=True):
        stored = openvino.Tensor(openvino.Type.u4, openvino.Shape(shape))
        stored.data[:] = packed.reshape(stored.data.shape)
        zero = ops.convert(ops.constant(np.array(8, np.uint8)), np.float16)
        shifted = ops.subtract(ops.convert(ops.constant(stored), np.float16), zero)
        scaled = ops.multiply(shifted, ops.constant(s.astype(np.float16)[..., None]))
        whole = ops.reshape(scaled, ops.constant(np.array([case.n, case.k])), False)
        weights.append(ops.convert(whole, np.float32))
    return compiled(case, weights, "f32", quantised)


def of_8_bits(case: Case, quantised: int) -> Made:
    codes, scales = rows_of_8_bits(case.first)
    weights = []
    for w, s in zip(case.turned(codes), case.turned(scales), strict=True):
        scaled = ops.multiply(ops.convert(ops.constant(w), np.float16), ops.constant(s.astype(np.float16)[:, None]))
        weights.append(ops.convert(scaled, np.float32))
    return compiled(case, weights, "f32", quantised)


def plain(case: Case, precision: str) -> Made:
    return compiled(case, [ops.constant(w) for w in case.weights()], precision, 0)


def bits_of(group: int) -> float:
    return 4 + 16 / group


ENGINES = {
    "openvino fp32": Engine("fp32", 32, lambda case: plain(case, "f32")),
    "openvino bf16": Engine("bf16", 16, lambda case: plain(case, "bf16")),
    "openvino int4": Engine("fp32", bits_of(32), lambda case: of_4_bits(case, 32, 0)),
    "openvino int4 a8": Engine("int8", bits_of(32), lambda case: of_4_bits(case, 32, 32)),
    "openvino int4g128 a8": Engine("int8", bits_of(128), lambda case: of_4_bits(case, 128, 128)),
    "openvino int8": Engine("fp32", 8, lambda case: of_8_bits(case, 0)),
    "openvino int8 a8": Engine("int8", 8, lambda case: of_8_bits(case, 128)),
}
