"""Time and memory to compile a model of the shape of Llama 8B, at 8, 16 and 32 layers, on weights without values.

    python benchmarks/scale.py [--layers 8 16 32] [--target x86-64-v4 | sm_90a] [--quant nf4 | float] [--rounds 3]
                               [--json FILE]

Each compile is a process of its own.  The table has the median wall seconds of every stage over the rounds, then the
total, the peak of resident memory, operations, launches and kernels.  The last column compares the largest model with a
straight line through the two smallest: 1.0 is linear growth.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

MAX_BATCH, MAX_LENGTH = 8, 8192
GROWTH_FLOOR = 0.05
"""CPU seconds below which the growth of a stage is not meaningful."""


def llama(layers: int, **sizes: int) -> Any:
    """A module (input_ids, position_ids) -> logits in bf16, whose parameters have no values. Sizes: LlamaConfig's."""
    import torch
    import transformers

    import qcompiler as qc

    shape = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    shape |= {"vocab_size": 128256, **sizes}
    config = transformers.LlamaConfig(
        num_hidden_layers=layers,
        max_position_embeddings=MAX_LENGTH,
        use_cache=False,
        tie_word_embeddings=False,
        **shape,
    )

    class Logits(torch.nn.Module):
        def __init__(self, model: torch.nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.model(input_ids=input_ids, position_ids=position_ids, use_cache=False).logits
            return logits

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with qc.empty_weights():
            return Logits(transformers.LlamaForCausalLM(config)).eval()
    finally:
        torch.set_default_dtype(before)


def compile_llama(layers: int, quant: str | None, target: str | None, **sizes: int) -> Any:
    """The program of `llama(layers)`, with dynamic batch and length and without weights."""
    import torch

    import qcompiler as qc

    example = (torch.zeros(2, 7, dtype=torch.long), torch.arange(7).expand(2, 7))
    dims = {0: ("b", 1, MAX_BATCH), 1: ("s", 1, MAX_LENGTH)}
    return qc.qcompile(
        llama(layers, **sizes),
        example,
        quant=quant,
        dynamic_shapes={"input_ids": dims, "position_ids": dict(dims)},
        weights="none",
        device="cuda:0" if target is not None and target.startswith("sm_") else None,
        targets=[target] if target is not None else None,
    )


def counts(program: Any) -> dict[str, int]:
    """Operations of the IR after some stages, launches and kernels."""
    report = program.report().as_dict()
    ops = {
        stage: sum(" = " in line for line in program.ir(stage).splitlines()) for stage in ("import", "select-kernels")
    }
    return {
        "imported_ops": ops["import"],
        "lowered_ops": ops["select-kernels"],
        "launches": sum(entry.get("launch", 0) for entry in report["entries"].values()),
        "kernels": report["kernels"],
    }


def peak_bytes() -> int:
    """Peak resident memory of this process. (`ru_maxrss` begins with that of the process that started this one.)"""
    status = Path("/proc/self/status")
    if status.exists():
        (line,) = (line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(layers: int, quant: str | None, target: str | None) -> dict[str, Any]:
    """One compile in this process: CPU seconds in all and wall seconds by stage, peak memory, counts."""
    import torch
    import transformers  # noqa: F401  (imports are no part of compiling)

    torch.set_num_threads(1)
    compile_llama(1, quant, target, hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2)
    cpu, wall = time.process_time(), time.perf_counter()
    program = compile_llama(layers, quant, target)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    return {
        "cpu_s": cpu,
        "wall_s": wall,
        "stages": {**program.seconds, "verifying, texts": wall - sum(program.seconds.values())},
        "peak_bytes": peak_bytes(),
        **counts(program),
    }


def in_a_process(layers: int, quant: str, target: str | None) -> dict[str, Any]:
    command = [
        sys.executable,
        __file__,
        "--one",
        str(layers),
        "--quant",
        quant,
        *(["--target", target] if target else []),
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def merged(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of times, the largest peak; counts agree in all rounds."""
    first = rounds[0]
    stages = {name: median(each["stages"][name] for each in rounds) for name in first["stages"]}
    times = {key: median(each[key] for each in rounds) for key in ("cpu_s", "wall_s")}
    return {**first, **times, "stages": stages, "peak_bytes": max(each["peak_bytes"] for each in rounds)}


def growth(values: dict[int, float]) -> float | None:
    """Growth of the largest relative to a straight line through the two smallest: 1.0 is linear."""
    layers = sorted(values)
    if len(layers) < 3 or values[layers[-1]] < GROWTH_FLOOR:
        return None
    a, b, last = layers[0], layers[1], layers[-1]
    slope = (values[b] - values[a]) / (b - a)
    return values[last] / (values[a] + slope * (last - a)) if slope > 0 else None


def table(found: dict[int, dict[str, Any]]) -> str:
    layers = sorted(found)
    lines = ["stage                   " + "".join(f"{n:>5} layers" for n in layers) + "   to linear"]

    def row(name: str, values: dict[int, float], form: str = ".2f") -> None:
        ratio = growth(values)
        cells = "".join(f"{values[n]:>12{form}}" for n in layers)
        lines.append(f"{name:<24}{cells[1:]}" + (f"{ratio:>12.2f}" if ratio is not None else ""))

    for stage in found[layers[0]]["stages"]:
        row(stage, {n: found[n]["stages"][stage] for n in layers}, ".3f")
    row("all, wall s", {n: found[n]["wall_s"] for n in layers})
    row("all, CPU s", {n: found[n]["cpu_s"] for n in layers})
    row("peak memory, GB", {n: found[n]["peak_bytes"] / 1e9 for n in layers})
    for name in ("imported_ops", "lowered_ops", "launches", "kernels"):
        row(name.replace("_", " "), {n: found[n][name] for n in layers}, "d")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", nargs="+", type=int, default=[8, 16, 32])
    parser.add_argument("--target", help="an instruction set or a GPU architecture; default: this machine's")
    parser.add_argument("--quant", default="nf4", help='a format, or "float"')
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        print(json.dumps(measure(options.one, None if options.quant == "float" else options.quant, options.target)))
        return
    found = {}
    for layers in options.layers:
        found[layers] = merged([in_a_process(layers, options.quant, options.target) for _ in range(options.rounds)])
    print(
        f"Llama 8B's shape, {options.quant}, {options.target or 'this machine'}: medians of {options.rounds} rounds\n"
    )
    print(table(found))
    if options.json is not None:
        machine = {"machine": platform.processor() or platform.machine(), "target": options.target}
        results = [{"layers": layers, **each} for layers, each in found.items()]
        options.json.write_text(json.dumps({**machine, "quant": options.quant, "results": results}, indent=1))


if __name__ == "__main__":
    main()
