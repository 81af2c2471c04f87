"""What the compiler emits for a fixed set of programs: recorded before a refactoring, compared after each step of it.

    python tests/support/emitted.py record build/emitted             # about ten minutes
    python tests/support/emitted.py compare build/emitted            # prints what differs, and exits with 1 then
    python tests/support/emitted.py compare build/emitted mixtral    # only programs whose name holds this

A program is a model, a recipe and a target.  Recorded are the kernels' text, the plan, and on the CPU the results for
fixed inputs, bit for bit.  A difference is a bug, or is named in the message of the commit with its reason.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from by_path import load

import qcompiler as qc

TARGETS: dict[str, dict[str, Any]] = {
    "cpu": {},
    "sm_75": {"device": "cuda:0", "targets": ["sm_75"]},
    "sm_90a": {"device": "cuda:0", "targets": ["sm_90a"]},
}
RECIPES: dict[str, Any] = {
    "nf4": "nf4",
    "int8": "int8",
    "q4_K": "q4_K, else q4_0, else int8",  # most rows of these small models are shorter than a superblock
    "w8a8": qc.QuantConfig("int8", activations="int8"),
}


Made = tuple[Any, dict[str, Any], Any, Any]
"""A model, arguments to compile and to call with, dynamic sizes, and buckets."""


def _case(case: Any) -> Made:
    names = list(case.dynamic_shapes) if isinstance(case.dynamic_shapes, dict) else []
    given = case.inputs if isinstance(case.inputs, dict) else dict(zip(names, case.inputs, strict=True))
    return case.model, given, case.dynamic_shapes, None


def _llama_with_cache() -> Made:
    from transformers.integrations.executorch import TorchExportableModuleWithStaticCache

    static = load("tests/models/test_static_cache.py")
    step = TorchExportableModuleWithStaticCache(static.llama(), batch_size=1, max_cache_len=static.LENGTH)
    size = ("s", 1, 24)
    given = {"input_ids": static.prompt(7), "cache_position": torch.arange(7)}
    buckets = [("decode", {"s": (1, 1)}), ("prefill", {"s": (1, 24)})]
    return step, given, {"input_ids": {1: size}, "cache_position": {0: size}}, buckets


MODELS: dict[str, Callable[[], Made]] = {
    "minilm": lambda: _case(load("tests/models/zoo.py").minilm()),
    "llama-cache": _llama_with_cache,
    "mixtral": lambda: _case(load("tests/models/zoo.py").TEXT["mixtral"].case(masked=True)),
    "flux": lambda: _case(load("tests/models/test_diffusion.py").compiled(True)[0]),
    "unet": lambda: _case(load("tests/models/test_vision.py").unet()),
}


def parts(made: Made, quant: Any, target: str) -> dict[str, bytes]:
    """The files of one program: its kernels, its plan, and what it answers where it can run."""
    model, given, sizes, buckets = made
    program = qc.qcompile(model, kwargs=given, dynamic_shapes=sizes, buckets=buckets, quant=quant, **TARGETS[target])
    found = {"kernels.txt": program.ir("emit-kernels").encode(), "plan.mlir": program.ir("verify-schedule").encode()}
    if target == "cpu":
        leaves = torch.utils._pytree.tree_leaves(program(**given))
        arrays = [np.asarray(leaf.float() if leaf.dtype == torch.bfloat16 else leaf) for leaf in leaves]
        found["results.sha256"] = "\n".join(hashlib.sha256(each.tobytes()).hexdigest() for each in arrays).encode()
    return found


def programs(wanted: str) -> Iterator[tuple[str, dict[str, bytes]]]:
    """The files of each program whose name holds `wanted`, by that name."""
    for model, make in MODELS.items():
        for recipe, quant in RECIPES.items():
            for target in TARGETS:
                name = f"{model}.{recipe}.{target}"
                if wanted in name:
                    torch.manual_seed(0)
                    yield name, parts(make(), quant, target)


def record(folder: Path, wanted: str) -> None:
    for name, files in programs(wanted):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for file, content in files.items():
            (folder / name / file).write_bytes(content)
        print(name, flush=True)


def compare(folder: Path, wanted: str) -> int:
    """How many files differ from those in the folder; the first lines of each difference are printed."""
    different = 0
    for name, files in programs(wanted):
        for file, content in files.items():
            before = (folder / name / file).read_bytes()
            if before != content:
                different += 1
                old, new = before.decode().splitlines(), content.decode().splitlines()
                print(
                    f"{name}/{file}", *list(difflib.unified_diff(old, new, "before", "now", "", "", 1))[:24], sep="\n"
                )
    return different


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("action", choices=["record", "compare"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("wanted", nargs="?", default="", help="only programs whose name holds this")
    given = parser.parse_args()
    if given.action == "record":
        record(given.folder, given.wanted)
    else:
        different = compare(given.folder, given.wanted)
        sys.exit(f"{different} files differ" if different else 0)


if __name__ == "__main__":
    main()
