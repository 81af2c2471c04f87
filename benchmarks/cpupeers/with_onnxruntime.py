"""onnxruntime: MatMulNBits (4 bits, blocks of 32) with fp32 and with int8 rows, and DynamicQuantizeMatMul, in one graph
with a product for each copy of the weight."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime
from onnx import TensorProto, helper, numpy_helper
from shared import Array, Case, Engine, Made, groups_of_4_bits, rows_of_8_bits

VERSION = onnxruntime.__version__
BLOCK = 32
FP32, INT8 = 1, 4
"""Values of MatMulNBits' accuracy_level: the arithmetic that it may use."""


def use_threads(threads: int) -> None:
    """Sessions take their number from the case."""


def session(case: Case, op: str, tensors: list[dict[str, Array]], **attributes: Any) -> Made:
    """A graph whose nodes read x and the tensors of one copy each; results are bound to memory of their own."""
    nodes, constants, outputs = [], [], []
    for copy, each in enumerate(tensors):
        names = [f"{name}_{copy}" for name in each]
        constants += [numpy_helper.from_array(array, f"{name}_{copy}") for name, array in each.items()]
        nodes.append(helper.make_node(op, ["x", *names], [f"y_{copy}"], domain="com.microsoft", **attributes))
        outputs.append(helper.make_tensor_value_info(f"y_{copy}", TensorProto.FLOAT, [case.m, case.n]))
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [case.m, case.k])
    graph = helper.make_graph(nodes, "copies", [x], outputs, constants)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = case.threads, 1
    made = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    binding = made.io_binding()
    binding.bind_cpu_input("x", case.x)
    room = [onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros((case.m, case.n), np.float32)) for _ in tensors]
    for copy, value in enumerate(room):
        binding.bind_ortvalue_output(f"y_{copy}", value)

    def run() -> list[Any]:
        made.run_with_iobinding(binding)
        return room

    return run, lambda value: value.numpy()


def of_4_bits(case: Case, level: int) -> Made:
    codes, scales = groups_of_4_bits(case.first, BLOCK)
    pairs = (codes[:, 0::2] | codes[:, 1::2] << 4).reshape(case.n, case.k // BLOCK, BLOCK // 2)
    tensors = [{"w": w, "scales": s.reshape(-1)} for w, s in zip(case.turned(pairs), case.turned(scales), strict=True)]
    sizes = {"K": case.k, "N": case.n, "bits": 4, "block_size": BLOCK}
    return session(case, "MatMulNBits", tensors, accuracy_level=level, **sizes)


def of_8_bits(case: Case) -> Made:
    codes, scales = rows_of_8_bits(case.first)
    tensors = [
        {"w": np.ascontiguousarray(w.T), "scales": s}
        for w, s in zip(case.turned(codes), case.turned(scales), strict=True)
    ]
    return session(case, "DynamicQuantizeMatMul", tensors)


ENGINES = {
    "onnxruntime int4": Engine("fp32", 5, lambda case: of_4_bits(case, FP32)),
    "onnxruntime int4 a8": Engine("int8", 5, lambda case: of_4_bits(case, INT8)),
    "onnxruntime int8 a8": Engine("int8", 8, of_8_bits),
}
