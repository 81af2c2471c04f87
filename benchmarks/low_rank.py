"""What a low-rank path beside quantised weights could take back (LQER, SVDQuant), before anybody builds it.

    python benchmarks/low_rank.py                prints the table of docs/quantisation.md
    python benchmarks/low_rank.py --write        and writes it there

    y = x W'^T + (x A^T) B^T,   B A = the matrix of rank r that is nearest to W - W' for the inputs of the linear

The nearest one in the norm of the outputs, |(W - W' - B A) X|: the singular value decomposition of (W - W') L, where
L L^T = X X^T.  For each linear of the repository's language model: the squared error of its outputs that is left, as a
share of the error without the path; the table has the mean over linears.  A and B are exact here; in int8 they take
r (N + K) 8 / (N K) bits per weight.  Beside it: the share that the same bits would leave in wider codes, where each bit
quarters the error.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "examples")]

import tiny_llama  # noqa: E402
from chosen_codes import calibration  # noqa: E402
from page_marks import between  # noqa: E402

from qcompiler.calibrate import gptq  # noqa: E402
from qcompiler.config import resolve_format  # noqa: E402
from qcompiler.runtime.encoder import encode  # noqa: E402

PAGE = HERE.parent / "docs" / "quantisation.md"
BEGIN, END = "<!-- low rank -->", "<!-- end of low rank -->"
RANKS = (4, 8, 16, 32)
FORMATS = ("int4:group=128", "int3:group=128", "int2:group=128")
INPUTS = 16
COLUMNS = ("linears", "codes", *(f"rank {rank}" for rank in RANKS))

Matrix = npt.NDArray[np.float64]


def moments(model: nn.Module, inputs: list[torch.Tensor]) -> dict[str, Matrix]:
    """X^T X of the inputs of each linear, by its path."""
    found: dict[str, Any] = {}

    def see(path: str, given: tuple[torch.Tensor, ...]) -> None:
        x = given[0].reshape(-1, given[0].shape[-1]).double()
        found[path] = found.get(path, 0) + x.T @ x

    hooks = [
        module.register_forward_pre_hook(lambda _, given, path=path: see(path, given))
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) and "lm_head" not in path
    ]
    with torch.no_grad():
        for each in inputs:
            model(each)
    for hook in hooks:
        hook.remove()
    return {path: each.numpy() for path, each in found.items()}


def shares_left(error: Matrix, sums: Matrix) -> list[float]:
    """The share of |error X|^2 that is left for each of `RANKS`: the other singular values' squares."""
    damped = sums + 1e-9 * float(np.trace(sums)) / len(sums) * np.eye(len(sums))
    squares = np.linalg.svd(error @ np.linalg.cholesky(damped), compute_uv=False) ** 2
    return [float(squares[rank:].sum() / squares.sum()) for rank in RANKS]


def rows() -> list[list[str]]:
    model = tiny_llama.load_model()
    sums = moments(model, calibration(INPUTS))
    weights = {path: model.get_submodule(path).weight.detach().float().numpy() for path in sums}
    found = []
    for text in FORMATS:
        fmt, left = resolve_format(text), {"nearest": [], "gptq": []}
        for path, values in weights.items():
            nearest = encode(fmt, values)
            for name, packed in (("nearest", nearest), ("gptq", gptq.solve(values, nearest, sums[path]).packed)):
                left[name].append(shares_left((values - fmt.decode(packed)).astype(np.float64), sums[path]))
        for name, shares in left.items():
            found.append([text, name, *(f"{100 * share:.0f} %" for share in np.mean(shares, 0))])
            print(*found[-1], sep="  ", file=sys.stderr, flush=True)
    added = np.mean([[8 * rank * (1 / v.shape[0] + 1 / v.shape[1]) for rank in RANKS] for v in weights.values()], 0)
    found.append(["bits per weight of A and B", "", *(f"{bits:.2f}" for bits in added)])
    found.append(["left by codes with as many bits more", "", *(f"{100 * 4.0**-bits:.0f} %" for bits in added)])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(HERE.parent)}")
    options = parser.parse_args()
    lines = [f"| {' | '.join(COLUMNS)} |", "|---|---|" + "---:|" * len(RANKS)]
    lines += [f"| {' | '.join(each)} |" for each in rows()]
    print("\n".join(lines))
    if options.write:
        PAGE.write_text(between(PAGE.read_text(), BEGIN, END, "\n".join(lines), str(PAGE)))


if __name__ == "__main__":
    main()
