"""Convolutions of ResNet-18 beside torch's, per shape, in one interleaved run.

    .venv/bin/python benchmarks/conv_cpu.py [--rounds 15] [--threads 2] [--batch 1] [--last] [--json out.json]

Each shape is a program of its own (one convolution with a relu at 224 x 224's sizes), called from Python like a user's
program; torch runs the same two operators. On both sides images are stored channels first, as in torch: our time
includes the copy to channels-last, which a whole model makes once. With `--last`, images and results are stored
channels last on both sides, as between the convolutions of a model, and our results go to memory that is there.

Every round times each program once for each shape, in a varying order, so that a slow moment of the machine affects all
of them; the table gives medians. With one thread, time is the processor's time of this process, to which other
processes add little.

W8A8 and W4A8 are int8 and int4 weights with int8 activations: an image in fp32 is quantised, and the result is fp32.
"W8 bf16" are int8 weights with bf16 arithmetic: an image in fp32 is rounded, and the result is fp32.
torch's peers are its convolution in bf16 and, by oneDNN, that of quantised tensors: "int8 conv" from codes to codes by
scales that are known, "int8 whole" with the quantisation of the image and the decoding of the result.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn

import qcompiler as qc

# (channels in, out, kernel, stride, image): each convolution of ResNet-18 at 224 x 224 once
SHAPES = (
    (3, 64, 7, 2, 224), (64, 64, 3, 1, 56), (64, 128, 3, 2, 56), (64, 128, 1, 2, 56), (128, 128, 3, 1, 28),
    (128, 256, 3, 2, 28), (256, 256, 3, 1, 14), (256, 512, 3, 2, 14), (512, 512, 3, 1, 7),
)  # fmt: skip
RECIPES = {
    "f32": None,
    "int8": qc.QuantConfig("int8", promise_bits=None),
    "nf4": qc.QuantConfig("nf4", promise_bits=None),
    "W8 bf16": qc.QuantConfig("int8", compute="bf16", promise_bits=None),
    "W8A8": qc.QuantConfig("int8", activations="int8", promise_bits=None),
    "W4A8": qc.QuantConfig("int4", activations="int8", promise_bits=None),
}
BATCH_SECONDS = 2e-3
"""Calls shorter than this are timed in batches of about this length."""


@dataclass(frozen=True)
class Row:
    """One shape: median seconds per call by engine, and GFLOP of one call."""

    shape: tuple[int, int, int, int, int]
    gflop: float
    seconds: dict[str, float]


class Layer(nn.Module):
    def __init__(self, shape: tuple[int, int, int, int, int], *, last: bool) -> None:
        super().__init__()
        inside, out, kernel, stride, _ = shape
        self.conv = nn.Conv2d(inside, out, kernel, stride, kernel // 2)
        self.last = last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.last:
            return torch.relu(self.conv(x.permute(0, 3, 1, 2))).permute(0, 2, 3, 1)
        return torch.relu(self.conv(x))


def engines_of(
    shape: tuple[int, int, int, int, int], batch: int, *, last: bool, names: Sequence[str]
) -> dict[str, Callable[[], object]]:
    torch.manual_seed(0)
    model, x = Layer(shape, last=last).eval(), torch.randn(batch, shape[0], shape[4], shape[4])
    x = x.permute(0, 2, 3, 1).contiguous() if last else x
    narrow, half = Layer(shape, last=last).to(torch.bfloat16).eval(), x.to(torch.bfloat16)
    engines = {"torch": without_gradients(model, x), "bf16": without_gradients(narrow, half)}
    engines |= quantised(model.conv, x.permute(0, 3, 1, 2) if last else x)
    for name in names:
        program = qc.qcompile(model, (x,), quant=RECIPES[name])
        with torch.no_grad():
            wanted = program.oracle(x)
        out = program(x)
        assert (out - wanted).norm() <= (5e-3 if "bf16" in name else 1e-5) * wanted.norm(), (shape, name)
        kept = out if last else None
        engines[name] = lambda program=program, kept=kept: program(x, out=kept)
    return engines


def without_gradients(model: nn.Module, x: torch.Tensor) -> Callable[[], object]:
    def run() -> object:
        with torch.no_grad():
            return model(x)

    return run


def quantised(conv: nn.Conv2d, x: torch.Tensor) -> dict[str, Callable[[], object]]:
    """torch's convolution of quantised tensors with a relu, by oneDNN: codes to codes, and fp32 to fp32."""
    if "onednn" not in torch.backends.quantized.supported_engines:
        print(
            "conv_cpu: torch is built without oneDNN's quantised convolutions: 'int8 conv' is missing", file=sys.stderr
        )
        return {}
    torch.backends.quantized.engine = "onednn"
    weight, scale, zero = conv.weight.detach(), float(x.abs().max()) / 127, 128
    scales = weight.abs().amax((1, 2, 3)) / 127
    codes = torch.quantize_per_channel(weight, scales, torch.zeros(len(scales), dtype=torch.long), 0, torch.qint8)
    packed = torch.ops.quantized.conv2d_prepack(
        codes, conv.bias.detach(), conv.stride, conv.padding, conv.dilation, conv.groups
    )
    of_result = float(conv(x).detach().abs().max()) / 255
    image = torch.quantize_per_tensor(x, scale, zero, torch.quint8)

    def whole() -> object:
        made = torch.quantize_per_tensor(x, scale, zero, torch.quint8)
        return torch.ops.quantized.conv2d_relu(made, packed, of_result, 0).dequantize()

    return {"int8 conv": lambda: torch.ops.quantized.conv2d_relu(image, packed, of_result, 0), "int8 whole": whole}


def measure(engines: dict[str, Callable[[], object]], rounds: int, threads: int) -> dict[str, float]:
    """Median seconds per call by engine."""
    calls, clock = {}, time.process_time if threads == 1 else time.perf_counter
    for name, run in engines.items():
        start = time.perf_counter()
        run()
        calls[name] = max(1, int(BATCH_SECONDS / max(time.perf_counter() - start, 1e-7)))
    times: dict[str, list[float]] = {name: [] for name in engines}
    names = list(engines)
    for turn in range(rounds):
        first = turn % len(names)
        for name in (*names[first:], *names[:first]):
            time.sleep(0.003)  # the other engine's threads stop spinning
            start = clock()
            for _ in range(calls[name]):
                engines[name]()
            times[name].append((clock() - start) / calls[name])
    return {name: statistics.median(found) for name, found in times.items()}


def table(rows: list[Row]) -> str:
    names = list(rows[0].seconds)
    lines = [f"{'in  out  k  s  image':24s}" + "".join(f"{name:>12s}" for name in names) + "   time by torch's fp32"]
    for row in rows:
        cells = "".join(f"{row.gflop / row.seconds[name]:7.0f} GF/s" for name in names)
        text = "{:4d} {:4d} {:2d} {:2d} {:5d}".format(*row.shape)
        shares = ", ".join(f"{name} {row.seconds[name] / row.seconds['torch']:.2f}" for name in names[1:])
        lines.append(f"{text:24s}{cells}   {shares}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--last", action="store_true", help="images and results are stored channels last")
    parser.add_argument("--recipes", nargs="*", choices=list(RECIPES), default=list(RECIPES))
    parser.add_argument("--shapes", type=int, nargs="*", help="numbers of the shapes to run; default: all")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    os.environ["QC_NUM_THREADS"] = str(options.threads)
    rows: list[Row] = []
    for shape in [SHAPES[i] for i in options.shapes] if options.shapes else SHAPES:
        inside, out, kernel, stride, image = shape
        size = (image + 2 * (kernel // 2) - kernel) // stride + 1
        flop = 2e-9 * options.batch * size * size * out * inside * kernel * kernel
        engines = engines_of(shape, options.batch, last=options.last, names=options.recipes)
        rows.append(Row(shape, flop, measure(engines, options.rounds, options.threads)))
        print(f"conv_cpu: {shape} done", file=sys.stderr)
    print(table(rows))
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
