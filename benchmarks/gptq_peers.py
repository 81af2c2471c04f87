"""GPTQ here and in llm-compressor: the repository's language model, with equal weights, data and formats.

    python benchmarks/gptq_peers.py --peer VENV/bin/python [--formats 4 3]

`--peer` is a Python in which llm-compressor is installed; it quantises in a process of its own, on the CPU.  Both take
the linears of the tiny Llama in fp32 to int4 or int3 in groups of 128, symmetric, from the same windows of the last
half of the held-out text, and are judged on its first quarter: the linears' values go into the fp32 model, which runs
in eager torch.  The KL divergence from the fp32 model is in bits; ± is one standard error over windows.  llm-compressor
runs in the order of columns (actorder none), as GPTQ here does, and with its default order.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "examples")]

GROUP = 128


# --- the peer's process ----------------------------------------------------------------------------------------------


def quantise_there(bits: int, order: str, data: Path, target: Path) -> None:
    """The linears' values after llm-compressor's GPTQ, to an .npz file. Imports nothing of qcompiler."""
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from transformers import LlamaForCausalLM

    rows = np.load(data)["rows"]
    folder = HERE.parent / "examples" / "models" / "tiny_llama"
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    weights = QuantizationArgs(num_bits=bits, type="int", symmetric=True, strategy="group", group_size=GROUP)
    how = {} if order == "default" else {"actorder": None}
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    recipe = GPTQModifier(config_groups={"linears": scheme}, ignore=["lm_head"], **how)
    given = Dataset.from_dict({"input_ids": rows.tolist(), "attention_mask": np.ones_like(rows).tolist()})
    oneshot(model=model, dataset=given, recipe=recipe, num_calibration_samples=len(rows), max_seq_length=rows.shape[1],
            shuffle_calibration_samples=False)  # fmt: skip
    found = {name: each.weight.detach().float().numpy() for name, each in model.named_modules()
             if isinstance(each, torch.nn.Linear) and name != "lm_head"}  # fmt: skip
    for name, values in found.items():
        most = max(len(np.unique(group)) for group in values[:8].reshape(-1, GROUP))
        if most > 1 << bits:
            raise SystemExit(f"{name}: a group has {most} values, which are not {bits} bits")
    np.savez(target, **found)


def there(python: str, bits: int, order: str, rows: np.ndarray) -> dict[str, np.ndarray]:
    with tempfile.TemporaryDirectory() as folder:
        data, target = Path(folder, "rows.npz"), Path(folder, "weights.npz")
        np.savez(data, rows=rows)
        command = [python, __file__, "--as-peer", str(bits), order, str(data), str(target)]
        subprocess.run(command, check=True, stdout=sys.stderr)
        return dict(np.load(target))


# --- here ------------------------------------------------------------------------------------------------------------


def here(bits: int, algorithm: str, inputs: list[torch.Tensor]) -> dict[str, np.ndarray]:
    """The linears' values in a program."""
    import tiny_llama

    import qcompiler as qc
    from qcompiler.frontends.quantise.stored_places import places_of

    quant = qc.QuantConfig("float", linear=f"int{bits}:group={GROUP}", algorithm=algorithm, separate=("*",))
    shapes = {"tokens": {0: ("batch", 1, tiny_llama.BATCH), 1: ("length", 1, tiny_llama.LENGTH)}}
    program = qc.qcompile(
        tiny_llama.load_model(), (torch.zeros(3, 37, dtype=torch.int64),), quant=quant, dynamic_shapes=shapes,
        calibrate=inputs if algorithm == "gptq" else None, device="cpu",
    )  # fmt: skip
    found = {}
    for name, place in places_of(program.plan).items():
        if place.format is not None:
            packed = place.read(program.image.weights)
            found[name.removeprefix("llama.").removesuffix(".weight")] = packed.format.decode(packed)
    return found


def divergence(weights: Mapping[str, np.ndarray], judged: tuple) -> tuple[float, float]:
    """The mean KL in bits of the fp32 model with these linears, and its standard error over windows."""
    import chosen_codes
    import tiny_llama

    _, windows, reference = judged
    model = tiny_llama.load_model()
    linears = {name for name, each in model.llama.named_modules() if isinstance(each, torch.nn.Linear)} - {"lm_head"}
    if linears != set(weights):
        raise SystemExit(f"these linears differ: {sorted(linears ^ set(weights))}")
    for name, values in weights.items():
        model.llama.get_submodule(name).weight.data = torch.from_numpy(values.copy())
    each = chosen_codes.divergences(model, windows, reference)
    return float(each.mean()), float(each.std(ddof=1) / np.sqrt(len(each)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", help="a Python with llm-compressor")
    parser.add_argument("--formats", nargs="*", type=int, default=[4, 3], help="bits")
    parser.add_argument("--inputs", type=int, default=64, help="windows for calibration")
    parser.add_argument("--as-peer", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_peer:
        bits, order, data, target = options.as_peer
        quantise_there(int(bits), order, Path(data), Path(target))
        return
    if options.peer is None:
        parser.error("--peer is missing")
    import chosen_codes

    inputs, judged = chosen_codes.calibration(options.inputs), chosen_codes.judge()
    rows = torch.cat(inputs).numpy()
    print("| format | nearest codes | gptq here | llm-compressor, columns in order | llm-compressor, default order |")
    print("|---|---:|---:|---:|---:|")
    for bits in options.formats:
        found = [here(bits, "nearest", inputs), here(bits, "gptq", inputs)]
        found += [there(options.peer, bits, order, rows) for order in ("none", "default")]
        cells = ("{:.2e} ± {:.0e}".format(*divergence(each, judged)) for each in found)
        print(f"| int{bits}:group={GROUP} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
