"""bitsandbytes: Linear4bit with nf4 on the CPU, which repacks a weight for AVX512-BF16 in its first call."""

from __future__ import annotations

import bitsandbytes
import torch
from shared import Case, Engine, Made, UnableError
from with_torch import read, use_threads

VERSION = bitsandbytes.__version__
__all__ = ["ENGINES", "VERSION", "use_threads"]


def nf4(case: Case) -> Made:
    x = torch.from_numpy(case.x).to(torch.bfloat16)
    layers = []
    for w in case.weights():
        layer = bitsandbytes.nn.Linear4bit(
            case.k, case.n, bias=False, compute_dtype=torch.bfloat16, compress_statistics=False, quant_type="nf4"
        )
        layer.weight = bitsandbytes.nn.Params4bit(
            torch.from_numpy(w), requires_grad=False, compress_statistics=False, quant_type="nf4"
        )
        layers.append(layer.to("cpu").eval())
    for layer in layers:
        layer(x)
        if not getattr(layer.weight.quant_state, "packing_format_for_cpu", False):
            raise UnableError("it does not repack the weight here: its kernel needs AVX512-BF16")
    return lambda: [layer(x) for layer in layers], read


ENGINES = {"bitsandbytes nf4": Engine("bf16", 4.25, nf4)}  # absmax in bf16 for each 64 weights
