"""Where the divergence of int8 inputs comes from: the repository's language model in W8A8, one kind of input at a time.

    python benchmarks/int8_inputs.py                       prints the tables
    python benchmarks/int8_inputs.py --write               and writes them into docs/quantisation.md
    python benchmarks/int8_inputs.py --journal found.jsonl    measures what that file does not have, and appends to it

Weights are int8.  The first table rounds the inputs of one kind of linear and leaves the others in floating point.
The second rounds all inputs, by the rule of the recipe (a scale for each token) and by rules that no kernel has: they
say what such a kernel could be worth.  The third leaves some inputs in floating point, and says how many of the
products of linears remain products of int8.  The fourth has int8 inputs with weights of fewer bits.  KL in bits from
the fp32 model, in eager torch, on windows that are chosen as in rewrites.py; the error of a ratio is its standard error
over windows, by the jackknife.
"""

from __future__ import annotations

import argparse
import copy
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import fx

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "examples")]

import tiny_llama  # noqa: E402
from chosen_codes import divergences, ratio  # noqa: E402
from rewrites import PAGE, REWRITES, TOGETHER, WHICH, Journal, LanguageModel, oracle, show  # noqa: E402

SITES = {
    "q, k, v": ("q_proj", "k_proj", "v_proj"), "o": ("o_proj",), "gate, up": ("gate_proj", "up_proj"),
    "down": ("down_proj",), "head": ("lm_head", "embed_tokens"),
}  # fmt: skip
"""Which linears read an input, by what the names of their weights contain."""
ALL = tuple(SITES)
CHOICES = {"none": (), **{site: (site,) for site in SITES}, "all but down": tuple(s for s in ALL if s != "down")}
BY_SITE = ("none", "rotate_online")
"""The rewrites that have a column in the table of sites."""
ROUNDED = ("none", "rotate_online")
"""Those in the table of rules."""

BOTH = TOGETHER[0]
"""The rewrites of the tables with two models: they mend outliers and the input of the second linear of an MLP."""
FLOATS: dict[str, tuple[str, ...]] = {
    "none": (), "head": ("head",), "down": ("down",), "q, k, v": ("q, k, v",), "gate, up": ("gate, up",),
    "q, k, v; gate, up": ("q, k, v", "gate, up"), "all but down": tuple(s for s in ALL if s != "down"), "all": ALL,
}  # fmt: skip
"""Which inputs the third table leaves in floating point."""
WEIGHTS = ("int8", "q6_K", "q5_K", "int4:group=128")
"""The weights of the fourth."""

TABLES = ("int8 inputs by site", "int8 inputs by rule", "int8 inputs in part", "int8 inputs by weights")

Rule = Callable[[torch.Tensor], torch.Tensor]


def in_groups(columns: int) -> Rule:
    """A scale for each run of so many columns of a token."""

    def rounded(x: torch.Tensor) -> torch.Tensor:
        return _symmetric(x.unflatten(-1, (-1, columns))).flatten(-2)

    return rounded


def with_zero_point(x: torch.Tensor) -> torch.Tensor:
    """256 codes between the smallest and the largest value of a token, one of them 0."""
    low, high = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True).clamp(min=0)
    step = ((high - low) / 255).clamp(min=1e-30)
    zero = (-low / step).round()
    return ((x / step).round() + zero).clamp(0, 255).sub(zero) * step


def clipped(x: torch.Tensor) -> torch.Tensor:
    """For each token the scale of least squared error, of 11 from half of the largest magnitude's upwards."""
    best = _symmetric(x)
    least = (best - x).square().sum(-1, keepdim=True)
    for share in torch.linspace(0.5, 0.95, 10).tolist():
        tried = _symmetric(x, share)
        error = (tried - x).square().sum(-1, keepdim=True)
        best, least = torch.where(error < least, tried, best), torch.minimum(error, least)
    return best


def _symmetric(x: torch.Tensor, share: float = 1.0) -> torch.Tensor:
    scale = (x.abs().amax(-1, keepdim=True) * (share / 127)).clamp(min=1e-30)
    return (x / scale).round().clamp(-127, 127) * scale


def in_pairs(x: torch.Tensor) -> torch.Tensor:
    """Two codes for each value: the second rounds what the first leaves, with a scale of its own for each token."""
    first = _symmetric(x)
    return first + _symmetric(x - first)


RULES: dict[str, Rule | None] = {
    "a scale for each token (the program's)": None, "clipped by squared error": clipped,
    "with zero points": with_zero_point, "a scale for 128 columns": in_groups(128), "a scale for 32": in_groups(32),
}  # fmt: skip


def rounding_at(module: fx.GraphModule, sites: tuple[str, ...], rule: Rule | None) -> fx.GraphModule:
    """`module` with inputs rounded at `sites` only, by `rule` or as the program rounds them."""
    names = [name for site in sites for name in SITES[site]]
    known = [name for each in SITES.values() for name in each]
    met = False
    for node in list(module.graph.nodes):
        rows = _made_by(node.args[0]) if node.target is torch.ops.aten.linear.default else None
        if rows is None or rows.target is not torch.ops.qc.dequantize_rows.default:
            continue
        met = True
        weight = str(_made_by(node.args[1]).args[0].target)
        if not any(name in weight for name in known):
            raise ValueError(f"{weight}: no site has this weight; add it to SITES")
        x = _made_by(rows.args[0]).args[0]
        if not any(name in weight for name in names):
            node.update_arg(0, x)
        elif rule is not None:
            with module.graph.inserting_before(node):
                node.update_arg(0, module.graph.call_function(rule, (x,)))
    if not met:
        raise ValueError("the graph rounds no input of a linear")
    module.graph.eliminate_dead_code()
    module.recompile()
    return module


def _made_by(node: fx.Node) -> fx.Node:
    """The operator behind a node that only fixes a layout."""
    return _made_by(node.args[0]) if node.target == "contiguous" else node


class Inputs:
    """What is measured, of the model and of nothing else: `journal` has it by name."""

    def __init__(self, journal: Journal, inputs: int, windows: int) -> None:
        self.journal, self.settings = journal, f"{inputs} {windows}"
        self.model = LanguageModel(journal, inputs, windows)

    def measured(self, rewrite: str, sites: tuple[str, ...], rule: str) -> tuple[float, float] | None:
        """KL and its standard error over windows. Those of no input and of the program are rewrites.py's, too."""
        if not sites or (sites == ALL and RULES[rule] is None):
            return self.model.measured("W8A8" if sites else "int8", rewrite, "own")

        def make() -> tuple[float, float]:
            found = self._divergences(self._quantised(rewrite, "int8", "own"), sites, RULES[rule])
            return float(found.mean()), float(found.std(ddof=1)) / len(found) ** 0.5

        name = f"int8 inputs | {rewrite} | {'; '.join(sites)} | {rule} | {self.settings}"
        found = self.journal.get(name, make)
        return None if found is None else tuple(found)

    def each_window(
        self, rewrite: str, linear: str, which: str, sites: tuple[str, ...], rule: Rule | None = None
    ) -> np.ndarray | None:
        """KL of each window of the model or its twin, with weights of a format, and inputs in int8 at `sites`."""

        def make() -> list[float]:
            found: list[float] = self._divergences(self._quantised(rewrite, linear, which), sites, rule).tolist()
            return found

        how = f" | {rule.__name__}" if rule else ""
        name = f"each window | {rewrite} | {linear} | {which} | {'; '.join(sites)}{how} | {self.settings}"
        found = self.journal.get(name, make)
        return None if found is None else np.array(found)

    def in_bf16(self, which: str) -> np.ndarray | None:
        """KL of each window with int8 weights and both factors rounded to bf16."""

        def make() -> list[float]:
            exported, inputs, windows, reference = self.model.setting
            storage = {"linear": "int8", "compute": "bf16"}
            found: list[float] = divergences(
                oracle(exported[which], storage, REWRITES[BOTH], inputs), windows, reference
            ).tolist()
            return found

        found = self.journal.get(f"each window | {BOTH} | int8 | {which} | bf16 | {self.settings}", make)
        return None if found is None else np.array(found)

    def _divergences(self, quantised: fx.GraphModule, sites: tuple[str, ...], rule: Rule | None) -> np.ndarray:
        _, _, windows, reference = self.model.setting
        return divergences(rounding_at(copy.deepcopy(quantised), sites, rule), windows, reference)

    @functools.cache  # noqa: B019  (an object lives as long as the process)
    def _quantised(self, rewrite: str, linear: str, which: str) -> fx.GraphModule:
        exported, inputs, *_ = self.model.setting
        storage = {"linear": linear, "activations": "int8"}
        made: fx.GraphModule = oracle(exported[which], storage, REWRITES[rewrite], inputs)
        return made

    def by_site(self) -> list[list[str]]:
        """A row for each kind of input."""
        rule = next(iter(RULES))
        return [[name, *self._cells(sites, rule, BY_SITE)] for name, sites in {**CHOICES, "all": ALL}.items()]

    def by_rule(self) -> list[list[str]]:
        """A row for each rule, with all inputs rounded."""
        return [[rule, *self._cells(ALL, rule, ROUNDED)] for rule in RULES]

    def _cells(self, sites: tuple[str, ...], rule: str, rewrites: tuple[str, ...]) -> list[str]:
        """KL, and its ratio to that of int8 weights alone, for each rewrite."""
        cells = []
        for rewrite in rewrites:
            found, base = self.measured(rewrite, sites, rule), self.measured(rewrite, (), next(iter(RULES)))
            if found is None or base is None:
                cells += ["not measured", ""]
            else:
                cells += [f"{found[0]:.2e} ± {found[1]:.0e}", f"{found[0] / base[0]:.2f}"]
        return cells

    def mixed(self) -> list[list[str]]:
        """A row for each choice of inputs that stay in floating point, for the model and for its twin."""
        made: dict[tuple[str, str], Callable[[str], np.ndarray | None]] = {}
        work = products()
        for name, floats in FLOATS.items():
            sites = tuple(site for site in ALL if site not in floats)
            share = sum(work[site] for site in sites) / sum(work.values())
            made[name, f"{100 * share:.0f} %"] = functools.partial(self._part, sites)
        made["none, two codes for each", "200 %"] = functools.partial(self._part, ALL, rule=in_pairs)
        made["all, rounded to bf16", "0 %"] = self.in_bf16
        rows = []
        for title, measure in made.items():
            rows.append(list(title))
            for which in WHICH:
                rows[-1] += _beside(measure(which), self._part((), which))
        return rows

    def _part(self, sites: tuple[str, ...], which: str, rule: Rule | None = None) -> np.ndarray | None:
        return self.each_window(BOTH, "int8", which, sites, rule)

    def by_weights(self) -> list[list[str]]:
        """A row for each format of weights: inputs in floating point, and in int8."""
        rows = []
        for linear in WEIGHTS:
            floats, found = (self.each_window("rotate_online", linear, "own", sites) for sites in ((), ALL))
            rows.append([linear, _beside(floats, None)[0], *_beside(found, floats)])
        return rows


def products() -> dict[str, int]:
    """The multiplications of each kind of linear for a token."""
    model: Any = tiny_llama.load_model()
    count = dict.fromkeys(SITES, 0)
    for name, each in model.named_modules():
        if isinstance(each, torch.nn.Linear):
            site = next(site for site, parts in SITES.items() if any(part in name for part in parts))
            count[site] += each.weight.numel()
    return count


def _beside(found: np.ndarray | None, base: np.ndarray | None) -> list[str]:
    """KL with its standard error over windows, and its ratio to `base` with the error of that."""
    if found is None:
        return ["not measured", ""]
    cell = f"{found.mean():.2e} ± {found.std(ddof=1) / len(found) ** 0.5:.0e}"
    if base is None:
        return [cell, ""]
    share, error = ratio(found, base)
    return [cell, f"{share:.2f} ± {error:.2f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=16, help="windows for calibration")
    parser.add_argument("--windows", type=int, default=8, help="windows that are judged")
    parser.add_argument("--journal", type=Path, help="a file of what has been measured")
    parser.add_argument("--only", action="append", choices=TABLES, help="one of the tables; may be repeated")
    parser.add_argument("--known", action="store_true", help="measure nothing: the rows of the journal alone")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(HERE.parent)}")
    options = parser.parse_args()
    made = Inputs(Journal.of(options.journal, measures=not options.known), options.inputs, options.windows)
    both = [title for which in ("", ", twin") for title in (f"KL{which}", f"of weights only{which}")]
    tables = {
        "int8 inputs by site": (_titles("inputs in int8", BY_SITE), made.by_site),
        "int8 inputs by rule": (_titles("scales of all inputs", ROUNDED), made.by_rule),
        "int8 inputs in part": (["inputs in floating point", "products of int8", *both], made.mixed),
        "int8 inputs by weights": (
            ["linears", "KL, inputs in floating point", "KL, inputs in int8", "ratio"],
            made.by_weights,
        ),
    }
    for mark in options.only or TABLES:
        columns, rows = tables[mark]
        show(mark, columns, rows(), write=options.write)


def _titles(first: str, rewrites: tuple[str, ...]) -> list[str]:
    return [first, *(text for each in rewrites for text in (f"KL, {each}", "of weights only"))]


if __name__ == "__main__":
    main()
