"""`qc.search` for any model that `qcompile` takes: sensitivities, the front, and the recipe for a budget.

search(model, data, "4.25 bits")
  export               one graph
  merged_groups        what the passes store as one tensor is stored alike
  Study.effects        the distance of the outputs for each weight in each candidate
  times_of             with speed=: what each weight takes in each candidate, measured on this machine
  knapsack.solve       the best sum of distances for every size; within the time, LimitedFront
  Study.whole          the true distance of the chosen recipe
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from qcompiler.api import qcompile, weight_source
from qcompiler.calibrate import knapsack
from qcompiler.calibrate.knapsack import Front
from qcompiler.calibrate.two_budgets import LimitedFront, TwoBudgets
from qcompiler.config import QuantConfig
from qcompiler.errors import ArgumentError, BudgetError, ExportError, RecipeError, WeightsError
from qcompiler.frontends.quantise.graph_tensors import GraphTensors
from qcompiler.frontends.quantise.judge import Judge, vocabulary_of
from qcompiler.frontends.quantise.sensitivity import FLOAT, Effect, Study
from qcompiler.frontends.torch.capture.export import Exported, export_model
from qcompiler.frontends.weights.weight_files import Unnamed
from qcompiler.recipes.budgets import Budget
from qcompiler.recipes.layers import LAST_RESORT, Item, Kept, Layer, checked_candidates, items_of, layers_of
from qcompiler.recipes.linear_times import measured
from qcompiler.recipes.result import SearchResult
from qcompiler.recipes.speed import Speed, Times, times_of
from qcompiler.runtime.progress import note
from qcompiler.runtime.threads import resolve_num_threads
from qcompiler.units import human_nanoseconds

SENSITIVITIES = ("kl", "output")
FEW_ROWS = 1024
"""Rows of logits below which a note says that the data is little: a mean over few rows depends on which they are."""


@dataclass(frozen=True)
class Options:
    """What a search is asked for, apart from the model and its data."""

    budget: Budget
    candidates: tuple[str, ...]
    rules: Any = ()
    merged: bool = True
    sensitivity: str = "kl"
    measure: str = "auto"
    workdir: Path | None = None
    speed: Speed | None = None
    num_threads: int = 1

    @staticmethod
    def of(
        budget: str,
        candidates: Iterable[str] | None,
        rules: Any,
        merged: bool,
        sensitivity: str,
        measure: str,
        workdir: str | Path | None,
        speed: str | None = None,
        num_threads: int | None = None,
    ) -> Options:
        """Checks everything that needs no model. BudgetError, RecipeError, UnknownFormatError."""
        if sensitivity not in SENSITIVITIES:
            raise RecipeError(f"sensitivity={sensitivity!r}: choose {' or '.join(map(repr, SENSITIVITIES))}")
        if measure not in ("auto", "kl", "error"):
            raise RecipeError(f"measure={measure!r}: choose 'kl', 'error', or 'auto'")
        folder = Path(workdir) if workdir is not None else None
        found = checked_candidates(candidates)
        fast = None if speed is None else Speed.of(speed)
        threads = resolve_num_threads(num_threads)
        return Options(Budget.of(budget), found, rules, merged, sensitivity, measure, folder, fast, threads)


@dataclass(frozen=True)
class Asked:
    """A model as `qcompile` takes it, with everything that its plan depends on."""

    model: Any
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    dynamic_shapes: Any = None
    weights: Any = None
    from_data: bool = False
    """Whether the example is the first of the data."""
    notes: tuple[str, ...] = ()
    """What a reader of the result must know of the model."""

    def exported(self) -> Exported:
        """ArgumentError for a model in training mode, whose dropout would be measured as an error."""
        if getattr(self.model, "training", False):
            raise ArgumentError("the model is in training mode: call model.eval() first")
        return export_model(self.model, tuple(self.args), dict(self.kwargs), self.dynamic_shapes)

    def merged_groups(self) -> list[tuple[str, ...]]:
        """The paths of weights that become one stored tensor when their formats are equal: the passes decide.

        They are taken from the plan of the model in one format, compiled without values.
        """
        plan = qcompile(
            self.model, self.args, self.kwargs, quant=QuantConfig(FLOAT, linear=LAST_RESORT),
            dynamic_shapes=self.dynamic_shapes, weights="none", device="cpu",
        ).plan  # fmt: skip
        parts = ([each for part in entry.parts for each in part.parameters[:1]] for entry in plan.weights)
        return [tuple(paths) for paths in parts if len(paths) > 1]


def search_model(asked: Asked, inputs: Sequence[Any], options: Options) -> SearchResult:
    """Searches a recipe for a model of torch; see `qc.search`."""
    source = weight_source(asked.weights)
    if not source.valued:
        raise WeightsError("a search runs the model, and weights='none' leaves it without values")
    try:
        groups = asked.merged_groups() if options.merged else []
        exported = asked.exported()
    except ExportError as error:
        if not asked.from_data:
            raise
        raise type(error)(
            f"{error}\nThe model is exported with data[0]; args= or kwargs= give another example"
        ) from error
    tensors = GraphTensors(exported, source, Unnamed().room)
    weights = [weight for weight in tensors.grouped() if weight.users]
    tensors.find_codes(weights)
    states = set(tensors.program.graph_signature.buffers_to_mutate.values())
    layers, kept = layers_of(weights, exported.config, options.candidates, options.rules, states)
    items = items_of(layers, groups)
    judge = Judge(tensors.program, options.measure, vocabulary_of(exported.config, weights))
    if not options.budget.is_size and options.budget.kind != judge.measure:
        raise BudgetError(
            f"{options.budget.text}: this search measures {judge.measure} ({judge.why}); bound that, or choose by "
            f"measure={options.budget.kind!r}"
        )
    study = Study(tensors, weights, judge, inputs, options.workdir)
    if judge.rows < FEW_ROWS:
        note(f"the data gives {judge.rows} rows of outputs; {FEW_ROWS} or more make a search worth its time")
    return _solved(study, layers, items, kept, options, asked.notes)


def _solved(
    study: Study, layers: Sequence[Layer], items: Sequence[Item], kept: Kept, options: Options, notes: tuple[str, ...]
) -> SearchResult:
    if options.budget.is_size:  # before sensitivities are measured, which takes long
        kept.room(options.budget, sum(min(map(item.nbytes, item.texts)) for item in items))
    times = _times(items, kept, options)
    texts = {layer.path: item.texts for item in items for layer in item.layers}
    wanted = [(layer.weight, texts[layer.path]) for layer in layers]
    effects = study.effects(wanted, by_output=options.sensitivity == "output")
    front = knapsack.solve(_knapsack_items(items, effects))
    solved = front if times is None else LimitedFront(front, _nanoseconds(items, times), times.limit)
    result = SearchResult(
        items, effects, kept, solved, study.judge.measure, study.judge.why, study.whole,
        (*_notes(items, solved, times), *notes), times,
    )  # fmt: skip
    if options.budget.is_size:
        result.choose(options.budget)
    else:
        result.choose_measured(options.budget)
    return result


def _times(items: Sequence[Item], kept: Kept, options: Options) -> Times | None:
    """What the items take by measurement. BudgetError if no recipe is as fast, or none that is is as small."""
    if options.speed is None:
        return None
    times = times_of(items, options.speed, partial(measured, threads=options.num_threads))
    fastest = sum(min(ns[text] for text in item.texts) for item, ns in zip(items, times.ns, strict=True))
    if fastest > times.limit:
        raise BudgetError(
            f"speed={options.speed.text!r} is {human_nanoseconds(times.limit)}: the linears of the fastest recipe of "
            f"these candidates take {human_nanoseconds(fastest)}. Add candidates that are faster, or give more time"
        )
    if options.budget.is_size:
        plain = [[knapsack.Option(item.nbytes(text), 0.0) for text in item.texts] for item in items]
        smallest = TwoBudgets(plain, _nanoseconds(items, times)).smallest(times.limit)
        assert smallest is not None
        nbytes = sum(item[place].nbytes for item, place in zip(plain, smallest, strict=True))
        kept.room(options.budget, nbytes, f" that keep {options.speed.text!r}")
    return times


def _nanoseconds(items: Sequence[Item], times: Times) -> list[list[int]]:
    return [[ns[text] for text in item.texts] for item, ns in zip(items, times.ns, strict=True)]


def _knapsack_items(items: Sequence[Item], effects: Mapping[tuple[str, str], Effect]) -> list[list[knapsack.Option]]:
    """The options of each item: a group costs the sum of its weights."""
    return [
        [
            knapsack.Option(item.nbytes(text), sum(effects[layer.path, text].cost or 0.0 for layer in item.layers))
            for text in item.texts
        ]
        for item in items
    ]


def _notes(items: Sequence[Item], solved: Front | LimitedFront, times: Times | None) -> tuple[str, ...]:
    notes = [f"{layer.path}: {layer.fixed}" for item in items for layer in item.layers if layer.fixed]
    if solved.slack:
        notes.append(f"sizes are rounded: a recipe is at least the best of a budget smaller by {solved.slack:,} bytes")
    return (*notes, *(times.notes if times is not None else ()))


__all__ = ["Asked", "Options", "search_model"]
