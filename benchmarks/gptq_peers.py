"""Chosen codes here and in other projects: the repository's language model, with equal weights, data and formats.

    python benchmarks/gptq_peers.py --peer llm-compressor=VENV/bin/python --peer hqq=VENV/bin/python
    python benchmarks/gptq_peers.py --peer … --write          and writes the table into docs/quantisation.md
    python benchmarks/gptq_peers.py --peer … --bits 3         formats of 3 bits only; other rows stay as they are

`--peer` names a project and a Python in which it is installed; it quantises in a process of its own, on the CPU, and
imports nothing of qcompiler.  All take the linears of the tiny Llama in fp32 to integers in groups of 128 and leave the
embedding in fp32.  GPTQ of llm-compressor and of qcompiler gets the same windows of the last half of the held-out text;
formats are symmetric.  The peer runs in the order of columns, as GPTQ here does, and with its default order.  HQQ takes
no data; formats have zero points, which the package keeps in fp16 and qcompiler in 8 bits.  All are judged on 32
windows of the first quarter of the text: the linears' values in the fp32 model, in eager torch.  The KL divergence from
the fp32 model is in bits; ± is one standard error over windows, of the share of nearest codes' KL by the jackknife.
"""

from __future__ import annotations

import argparse
import copy
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs" / "quantisation.md"
BEGIN, END = "<!-- chosen codes beside peers -->", "<!-- end of chosen codes beside peers -->"
COLUMNS = ("linears", "codes", "of", "KL", "share of nearest codes'")
GROUP = 128
SYMMETRIC, ZEROS = f"group={GROUP}", f"group={GROUP},symmetric=False"


# --- the peers' processes --------------------------------------------------------------------------------------------


def tiny_llama_there() -> Any:
    from transformers import LlamaForCausalLM

    folder = HERE.parent / "examples" / "models" / "tiny_llama"
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()


def linears_of(model: torch.nn.Module) -> dict[str, torch.nn.Linear]:
    """All linears but the head, which is tied to the embedding."""
    found = {name: each for name, each in model.named_modules() if isinstance(each, torch.nn.Linear)}
    return {name: each for name, each in found.items() if name != "lm_head"}


def llm_compressor(bits: int, order: str, rows: np.ndarray) -> dict[str, np.ndarray]:
    """The linears' values after its GPTQ."""
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier

    model = tiny_llama_there()
    weights = QuantizationArgs(num_bits=bits, type="int", symmetric=True, strategy="group", group_size=GROUP)
    how = {} if order == "default order" else {"actorder": None}
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    recipe = GPTQModifier(config_groups={"linears": scheme}, ignore=["lm_head"], **how)
    given = Dataset.from_dict({"input_ids": rows.tolist(), "attention_mask": np.ones_like(rows).tolist()})
    oneshot(model=model, dataset=given, recipe=recipe, num_calibration_samples=len(rows), max_seq_length=rows.shape[1],
            shuffle_calibration_samples=False)  # fmt: skip
    return {name: each.weight.detach().float().numpy() for name, each in linears_of(model).items()}


def hqq(bits: int, order: str, rows: np.ndarray) -> dict[str, np.ndarray]:
    """The linears' values with the scales and zero points of the package's defaults, rounded to fp16."""
    from hqq.core.quantize import BaseQuantizeConfig, Quantizer

    how = BaseQuantizeConfig(nbits=bits, group_size=GROUP, axis=1)["weight_quant_params"]
    found = {}
    for name, each in linears_of(tiny_llama_there()).items():
        codes, meta = Quantizer.quantize(each.weight.data, **how, device="cpu", compute_dtype=torch.float32)
        meta["scale"], meta["zero"] = meta["scale"].half().float(), meta["zero"].half().float()
        found[name] = Quantizer.dequantize(codes, meta).reshape(each.weight.shape).float().numpy()
    return found


PEERS = {"llm-compressor": ("llmcompressor", llm_compressor), "hqq": ("hqq", hqq)}
"""The package of each peer, and what quantises with it."""


def quantise_there(peer: str, bits: int, order: str, data: Path, target: Path) -> None:
    """Writes the linears' values and the package's version to an .npz file."""
    from importlib.metadata import version

    package, quantise = PEERS[peer]
    found = quantise(bits, order, np.load(data)["rows"])
    for name, values in found.items():
        most = max(len(np.unique(group)) for group in values[:8].reshape(-1, GROUP))
        if most > 1 << bits:
            raise SystemExit(f"{name}: a group has {most} values, which are not {bits} bits")
    np.savez(target, **found, _version=np.array(version(package)))


def there(peer: str, python: str, bits: int, order: str, rows: np.ndarray) -> tuple[dict[str, np.ndarray], str]:
    """The linears' values, and the package's version."""
    with tempfile.TemporaryDirectory() as folder:
        data, target = Path(folder, "rows.npz"), Path(folder, "weights.npz")
        np.savez(data, rows=rows)
        command = [python, __file__, "--as-peer", peer, str(bits), order, str(data), str(target)]
        subprocess.run(command, check=True, stdout=sys.stderr)
        found = dict(np.load(target))
        return found, str(found.pop("_version"))


# --- here ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A row: an algorithm of qcompiler, or a peer's with an order of columns."""

    bits: int
    form: str
    algorithm: str
    peer: str = ""
    order: str = ""

    @property
    def linears(self) -> str:
        return f"int{self.bits}:{self.form}"


def cases(bits: int, peers: Mapping[str, str]) -> list[Case]:
    """Nearest codes of a form come first."""
    orders = ("columns in order", "default order")
    found = [Case(bits, SYMMETRIC, "nearest"), Case(bits, SYMMETRIC, "gptq")]
    found += [Case(bits, SYMMETRIC, "gptq", "llm-compressor", order) for order in orders]
    found += [Case(bits, ZEROS, "nearest"), Case(bits, ZEROS, "hqq"), Case(bits, ZEROS, "hqq", "hqq")]
    wanted = {each.form for each in found if each.peer in peers}
    return [each for each in found if each.form in wanted and (not each.peer or each.peer in peers)]


class Judge:
    """The model, the windows to calibrate with, and those that are judged."""

    def __init__(self, inputs: int, judged: int) -> None:
        import chosen_codes
        import tiny_llama

        import qcompiler.frontends.torch.capture.export as capture

        self.model, windows = tiny_llama.load_model(), tiny_llama.held_out(tiny_llama.MEASURED_BYTES)
        self.windows = windows[torch.linspace(0, len(windows) - 1, judged).round().long()]
        self.reference = [base.float() for base, _ in tiny_llama.log_probabilities(self.model, self.windows)]
        self.inputs = chosen_codes.calibration(inputs)
        shapes = {"tokens": {0: ("batch", 1, tiny_llama.BATCH), 1: ("length", 1, tiny_llama.LENGTH)}}
        self.exported = capture.export_model(self.model, (torch.zeros(3, 37, dtype=torch.int64),), {}, shapes)

    def here(self, case: Case) -> np.ndarray:
        """The KL of each window with codes of qcompiler: the quantised graph in eager torch."""
        import qcompiler as qc
        from qcompiler.frontends.quantise.calibrate import Calibration
        from qcompiler.frontends.quantise.insert_qdq import insert_qdq

        quant = qc.QuantConfig("float", linear=case.linears, algorithm=case.algorithm)
        data = Calibration(self.inputs) if case.algorithm == "gptq" else None
        return self.divergences(insert_qdq(copy.deepcopy(self.exported), quant, calibration=data).module)

    def there(self, case: Case, python: str) -> tuple[np.ndarray, str]:
        """The KL of each window with the linears' values of a peer, and the peer's version."""
        rows = torch.cat(self.inputs).numpy()
        weights, version = there(case.peer, python, case.bits, case.order, rows)
        model = copy.deepcopy(self.model)
        linears = linears_of(model.llama)
        if set(linears) != set(weights):
            raise SystemExit(f"these linears differ: {sorted(set(linears) ^ set(weights))}")
        for name, values in weights.items():
            linears[name].weight.data = torch.from_numpy(values.copy())
        return self.divergences(model), version

    def divergences(self, module: Any) -> np.ndarray:
        import chosen_codes

        found: np.ndarray = chosen_codes.divergences(module, self.windows, self.reference)
        return found


def cells(case: Case, version: str, each: np.ndarray, nearest: np.ndarray) -> list[str]:
    import chosen_codes

    share, error = chosen_codes.ratio(each, nearest)
    of = ", ".join(text for text in (f"{case.peer} {version}", case.order) if text) if case.peer else "qcompiler"
    compared = "1" if each is nearest else f"{share:.2f} ± {error:.2f}"
    kl = f"{each.mean():.2e} ± {each.std(ddof=1) / np.sqrt(len(each)):.0e}"
    return [case.linears, case.algorithm, of, kl, compared]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON", help=f"of {', '.join(PEERS)}")
    parser.add_argument("--bits", nargs="*", type=int, default=[4, 3, 2])
    parser.add_argument("--inputs", type=int, default=64, help="windows for calibration")
    parser.add_argument("--judged", type=int, default=32, help="windows that are judged")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(HERE.parent)}")
    parser.add_argument("--as-peer", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_peer:
        peer, bits, order, data, target = options.as_peer
        quantise_there(peer, int(bits), order, Path(data), Path(target))
        return
    peers = dict(each.partition("=")[::2] for each in options.peer)
    if not peers or set(peers) - set(PEERS) or not all(peers.values()):
        parser.error(f"--peer takes NAME=PYTHON, of {', '.join(PEERS)}; got {options.peer or 'none'}")
    sys.path[:0] = [str(HERE), str(HERE.parent / "examples")]
    from page_marks import rows_between

    judge, nearest = Judge(options.inputs, options.judged), np.zeros(0)
    for case in [each for bits in options.bits for each in cases(bits, peers)]:
        each, version = judge.there(case, peers[case.peer]) if case.peer else (judge.here(case), "")
        nearest = each if case.algorithm == "nearest" else nearest
        row = cells(case, version, each, nearest)
        print(*row, sep="  ", flush=True)
        if options.write:  # after each row: a run that is stopped keeps what it has measured
            PAGE.write_text(rows_between(PAGE.read_text(), BEGIN, END, COLUMNS, [row], str(PAGE), keys=3))


if __name__ == "__main__":
    main()
