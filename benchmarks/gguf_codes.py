"""What calibrated codes are worth in llama.cpp: GGUF files of the repository's language model, of one format and size.

    python benchmarks/gguf_codes.py                   prints a table
    python benchmarks/gguf_codes.py --write           and puts its rows into docs/files.md
    python benchmarks/gguf_codes.py q4_K q3_K         of these formats only

The codes are those of llama.cpp's quantiser, without and with an importance matrix, and those of programs, which
`convert(program=)` puts into a file: nearest ones, nearest ones with the importance of the same calibration, and those
of each algorithm.  The embedding, which is the head as well, stays bf16 in all files, so they differ in the codes of
linears only.  llama.cpp reads each file, and so does `from_gguf`, whose model is compiled.  Calibration, the text, and
the mean KL from the fp32 model are those of chosen_codes.py.

It needs llama-cpp-python (pip install llama-cpp-python), whose library has the quantiser.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
import torch
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "examples")]

import chosen_codes  # noqa: E402
import tiny_llama  # noqa: E402
from page_marks import rows_between  # noqa: E402

import qcompiler as qc  # noqa: E402
from qcompiler.frontends.checkpoints.folder_to_gguf import FILE_TYPES  # noqa: E402
from qcompiler.lm.llama_cpp_reader import LlamaCpp  # noqa: E402

PAGE = HERE.parent / "docs" / "files.md"
BEGIN, END = "<!-- codes in llama.cpp -->", "<!-- end of codes in llama.cpp -->"
TITLES = ("format", "codes of linears", "KL, llama.cpp", "KL, qcompiler", "of nearest codes'")
FORMATS = ("q4_K", "q2_K")
PROGRAMS = ("nearest", "importance", "gptq")
"""Codes of a program: nearest ones, nearest ones with the columns' importance, and those of an algorithm."""
BF16 = 30
"""ggml's number of the type bf16."""
THREADS = 2
WINDOWS = 32


@dataclass
class Bench:
    """What all files share: the folder of files, the calibration, and the fp32 model's answers."""

    work: Path
    inputs: list[torch.Tensor]
    judged: chosen_codes.Judged

    def plain(self) -> Path:
        """The model's own values, which llama.cpp's quantiser reads."""
        path = self.work / "plain.gguf"
        if not path.exists():
            qc.convert(tiny_llama.FOLDER, path)
        return path

    def of_program(self, text: str, codes: str) -> Path:
        """A file with the codes of a program whose linears have the format `text`."""
        algorithm = codes if codes not in ("nearest", "importance") else "nearest"
        quant = qc.QuantConfig("float", linear=text, algorithm=algorithm)
        data = None if codes == "nearest" else [{"input_ids": rows} for rows in self.inputs]
        checkpoint = qc.from_checkpoint(tiny_llama.FOLDER, dtype=torch.float32)
        ids = torch.zeros(1, tiny_llama.LENGTH, dtype=torch.int64)
        program = qc.qcompile(
            checkpoint, (), {"input_ids": ids}, quant=quant, calibrate=data, device="cpu",
            dynamic_shapes={"input_ids": {0: ("b", 1, chosen_codes.BATCH), 1: None}},
        )  # fmt: skip
        path = self.work / f"{text}-{codes}.gguf"
        qc.convert(tiny_llama.FOLDER, path, program=program)
        return path

    def of_llama_cpp(self, text: str, importance: Mapping[str, np.ndarray] | None) -> Path:
        """A file by llama.cpp's quantiser: the format for all linears, bf16 for the embedding."""
        options = llama_cpp.llama_model_quantize_default_params()
        options.nthread, options.ftype, options.pure = THREADS, FILE_TYPES[text], True
        options.allow_requantize, options.token_embedding_type = True, BF16
        kept = []
        if importance is not None:
            kept = [(name.encode(), np.ascontiguousarray(row, np.float32)) for name, row in importance.items()]
            table = (llama_cpp.llama_model_imatrix_data * (len(kept) + 1))()  # a last one without a name ends it
            for place, (name, row) in zip(table, kept, strict=False):
                place.name, place.size = name, row.size
                place.data = row.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
            options.imatrix = table
        path = self.work / f"{text}-llama.cpp{'-importance' if kept else ''}.gguf"
        failed = llama_cpp.llama_model_quantize(str(self.plain()).encode(), str(path).encode(), ctypes.byref(options))
        if failed:
            raise SystemExit(f"llama.cpp's quantiser refuses {text}")
        return path

    def by_llama_cpp(self, path: Path) -> np.ndarray:
        """The KL of each window in bits, as llama.cpp computes: its cache in fp16, its inputs of products in int8."""
        reader = LlamaCpp(path, tiny_llama.LENGTH, tiny_llama.LENGTH, 256)

        def logits(windows: torch.Tensor) -> torch.Tensor:
            found = []
            for row in windows.tolist():
                reader.reset()
                found.append(reader.read(row, logits="all")[0])
            return torch.from_numpy(np.stack(found))

        return self._divergences(logits)

    def by_qcompiler(self, path: Path) -> np.ndarray:
        """The same by a compiled program: products of fp32."""
        ids = torch.zeros(2, tiny_llama.LENGTH, dtype=torch.int64)
        program = qc.qcompile(
            qc.from_gguf(path, dtype=torch.float32), (), {"input_ids": ids}, device="cpu",
            dynamic_shapes={"input_ids": {0: ("b", 1, tiny_llama.BATCH), 1: None}},
        )  # fmt: skip
        return self._divergences(lambda windows: program(input_ids=windows).logits)

    def _divergences(self, logits: Callable[[torch.Tensor], torch.Tensor]) -> np.ndarray:
        _, windows, reference = self.judged
        return chosen_codes.divergences(logits, windows, reference)


def importance_of(model: Any, inputs: Sequence[torch.Tensor]) -> dict[str, np.ndarray]:
    """The mean square of each column's inputs, by GGUF's name of the linear, as llama.cpp's imatrix tool sums it."""
    sums: dict[str, torch.Tensor] = {}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, model.llama.config.num_hidden_layers)

    def watch(name: str) -> Callable[..., None]:
        def seen(module: Any, given: tuple[torch.Tensor, ...]) -> None:
            x = given[0].reshape(-1, given[0].shape[-1]).double()
            sums[name] = sums.get(name, 0) + (x * x).sum(0)

        return seen

    hooks = []
    for name, module in model.llama.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            there = names.get_name(f"{name}.weight", try_suffixes=(".weight",))
            hooks.append(module.register_forward_pre_hook(watch(there)))
    with torch.no_grad():
        for rows in inputs:
            model(rows)
    for hook in hooks:
        hook.remove()
    count = sum(rows.numel() for rows in inputs)
    return {name: (each / count).float().numpy() for name, each in sums.items()}


def codes_of(path: Path) -> dict[str, bytes]:
    """The quantised tensors of a file."""
    plain = (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.BF16)
    return {each.name: each.data.tobytes() for each in gguf.GGUFReader(path).tensors if each.tensor_type not in plain}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=chosen_codes.INPUTS, help="windows for calibration")
    parser.add_argument("--windows", type=int, default=WINDOWS, help="windows of 512 bytes that are compared")
    parser.add_argument("--programs", default=",".join(PROGRAMS), help="codes of programs, separated by commas")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(HERE.parent)}")
    parser.add_argument("formats", nargs="*")
    chosen = parser.parse_args()
    inputs, judged = chosen_codes.calibration(chosen.inputs), chosen_codes.judge(chosen.windows)
    importance = importance_of(judged[0], inputs)
    table = Table(*TITLES)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), inputs, judged)
        rows: list[list[str]] = []
        nearest: dict[str, np.ndarray] = {}

        def add(text: str, codes: str, path: Path) -> None:
            theirs, ours = bench.by_llama_cpp(path), bench.by_qcompiler(path)
            nearest.setdefault(text, theirs)
            share, error = chosen_codes.ratio(theirs, nearest[text])
            figures = [f"{float(theirs.mean()):.2e}", f"{float(ours.mean()):.2e}", f"{share:.2f} ± {error:.2f}"]
            rows.append([text, codes, *figures])
            table.add_row(*rows[-1])
            print(*rows[-1], sep="  ", file=sys.stderr, flush=True)
            if chosen.write:
                PAGE.write_text(rows_between(PAGE.read_text(), BEGIN, END, TITLES, rows[-1:], str(PAGE), keys=2))

        add("bf16", "none", bench.plain())
        for text in chosen.formats or FORMATS:
            theirs = {name: bench.of_llama_cpp(text, given) for name, given in
                      (("nearest", None), ("importance", importance))}  # fmt: skip
            for name, path in theirs.items():
                add(text, f"llama.cpp, {name}", path)
            for codes in chosen.programs.split(","):
                path = bench.of_program(text, codes)
                if codes in theirs:
                    ours, others = codes_of(path), codes_of(theirs[codes])
                    same = sum(ours[name] == others[name] for name in others)
                    print(f"{text}, {codes}: {same} of {len(others)} matrices have llama.cpp's codes", file=sys.stderr)
                add(text, codes, path)
    Console().print(table)


if __name__ == "__main__":
    main()
