"""Runs the rewrites that a recipe asks for, and checks each one by running the float graph before and after.

    rotate-hidden     before formats are chosen: it unties weights and makes biases
    rotate-online     transforms in front of the second linears of MLPs
    equalise          scales by ranges of weights, without data
    smooth-scales     scales by ranges of activations and weights
    awq-scales        scales by the error of outputs in the formats that were chosen; a working folder keeps them

A rewrite that moves outputs by more than roundings can is taken back, and the report and stderr say so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from qcompiler.calibrate.chosen_codes import NO_INPUTS
from qcompiler.config import QuantConfig
from qcompiler.errors import CalibrationError, RecipeError
from qcompiler.frontends.quantise.calibrate import Calibration
from qcompiler.frontends.quantise.graph_tensors import GraphTensors
from qcompiler.frontends.quantise.graph_weights import GraphWeight, is_quantised_linear, why_nearest
from qcompiler.frontends.quantise.rewrites import online
from qcompiler.frontends.quantise.rewrites.channel_statistics import measure
from qcompiler.frontends.quantise.rewrites.float_function import FloatFunction, example_inputs
from qcompiler.frontends.quantise.rewrites.moved_weights import MovedWeights
from qcompiler.frontends.quantise.rewrites.online import ONLINE
from qcompiler.frontends.quantise.rewrites.residual import find_streams
from qcompiler.frontends.quantise.rewrites.rotate import ROTATE, rotate
from qcompiler.frontends.quantise.rewrites.scale_groups import Found, Group, find_groups
from qcompiler.frontends.quantise.rewrites.scales import awq, equalise, smooth
from qcompiler.frontends.quantise.rewrites.scales_journal import ScalesJournal
from qcompiler.runtime.progress import Counted, note

EQUALISE: Final = "equalise"
SMOOTH: Final = "smooth-scales"
AWQ: Final = "awq-scales"


def wants_rewrites(recipe: QuantConfig) -> bool:
    """Whether a recipe changes values of parameters."""
    moves = recipe.smooth is not None or recipe.algorithm == "awq" or recipe.equalise or recipe.rotate
    return moves or recipe.rotate_online or recipe.correct_bias


class FloatRewrites:
    """The rewrites of one graph. It puts a `MovedWeights` in front of the tensors' source."""

    def __init__(self, tensors: GraphTensors, recipe: QuantConfig, calibration: Calibration | None) -> None:
        self.tensors, self.recipe, self.calibration = tensors, recipe, calibration
        self.source = MovedWeights(tensors.source)
        tensors.source = self.source
        self.decisions: list[tuple[str, str, str]] = []
        self.function: FloatFunction | None = None
        needs = [f"smooth={recipe.smooth:g}"] if recipe.smooth is not None else []
        needs += ["algorithm='awq'"] * (recipe.algorithm == "awq")
        if needs and calibration is None:
            raise RecipeError(f"{needs[0]} needs calibration data: qcompile(…, calibrate=[inputs])")

    def rotate(self, weights: list[GraphWeight]) -> list[GraphWeight]:
        """Rotates each residual stream; the graph's weights as they are then.

        RecipeError if no stream is found, with what stopped the search.
        """
        if not self.recipe.rotate:
            return weights
        streams, reasons = find_streams(self.tensors, weights)
        if not streams:
            raise RecipeError(
                "rotate=True: no residual stream was found. "
                + ("; ".join(f"{where}: {why}" for where, why in list(reasons.items())[:3]) or "The model has no norms")
            )
        self.decisions += [(ROTATE, where, f"not rotated: {why}") for where, why in reasons.items()]

        def rewrite() -> list[GraphWeight]:
            for number, stream in enumerate(streams):
                said = rotate(self.tensors, self.source, stream, number)
                kept = ", keeps the mean of a row" if stream.keeps_ones else ""
                text = f"a stream of {stream.width} numbers, {len(stream.norms)} norms, "
                text += f"{len(stream.writers)} writers, {len(stream.readers)} readers{kept}"
                self.decisions += [(ROTATE, "", each) for each in (text, *said)]
            regrouped = self.tensors.grouped()
            self.tensors.find_codes(regrouped)
            return regrouped

        return self._checked(ROTATE, weights, rewrite) if self.source.valued else rewrite()

    def rotate_online(self, weights: Sequence[GraphWeight]) -> None:
        """Puts transforms in front of the second linears of MLPs; formats have been chosen.

        RecipeError if there is no such linear, with the reasons.
        """
        if not self.recipe.rotate_online:
            return
        places, reasons = online.find_places(weights)
        self.decisions += [(ONLINE, path, f"no transform: {why}") for path, why in reasons.items()]
        if not places:
            said = "; ".join(f"'{path}': {why}" for path, why in list(reasons.items())[:3])
            raise RecipeError(
                "rotate_online=True: no quantised linear reads what operators that are not linear make of other "
                f"linears' outputs{': ' + said if said else ''}; leave it out"
            )
        function = self._function(weights) if self.source.valued else None
        before = dict(self.source.changes)
        made = online.transform(self.tensors, self.source, places)
        share, why = function.difference(weights) if function is not None else (0.0, "")
        if why:
            online.undo(self.tensors.graph, made)
            self.source.changes = before
            self.decisions.append((ONLINE, "", f"taken back: {why}"))
            note(f"{ONLINE} is taken back: {why}")
            return
        self.decisions += [(ONLINE, place.weight.targets[0], online.told(place)) for place in places]
        if function is not None:
            self._say_kept(ONLINE, share)

    def move_scales(self, weights: list[GraphWeight]) -> None:
        """Equalises, smooths, and searches for AWQ's scales, as the recipe says; formats have been chosen.

        RecipeError if no scale can move, with the reasons; CalibrationError for inputs that are not finite.
        """
        recipe = self.recipe
        if recipe.smooth is None and recipe.algorithm != "awq" and not recipe.equalise:
            return
        if not self.source.valued:
            self.decisions.append((SMOOTH, "", "no scales are chosen: the weights have no values"))
            return
        found = find_groups(self.tensors, weights)
        served = [group for group in found.groups if any(each.weight.format is not None for each in group.readers)]
        self._say_where_not(found, weights)
        if not served and not self._only_clips(weights):
            reasons = "; ".join(f"'{path}': {why}" for path, why in list(found.reasons.items())[:3])
            raise RecipeError(f"no scale can move in this model: {reasons or 'it has no quantised linears'}")
        if recipe.equalise:
            self._checked(EQUALISE, weights, lambda: self._equalise(served))
        if recipe.smooth is None and recipe.algorithm != "awq":
            return
        assert self.calibration is not None
        inputs = self.calibration.held()
        if not inputs:
            raise CalibrationError(NO_INPUTS)
        if recipe.smooth is not None:
            self._checked(SMOOTH, weights, lambda: self._smooth(served, weights, inputs))
        if recipe.algorithm == "awq" and served:
            self._checked(AWQ, weights, lambda: self._search(served, weights, inputs))

    def _only_clips(self, weights: Sequence[GraphWeight]) -> bool:
        """Whether the recipe asks for AWQ alone, and there are weights whose scales it clips."""
        recipe = self.recipe
        alone = recipe.algorithm == "awq" and recipe.smooth is None and not recipe.equalise
        return alone and any(weight.format is not None and not why_nearest(weight, "awq") for weight in weights)

    def _equalise(self, groups: Sequence[Group]) -> None:
        for group in groups:
            scales = equalise(group, self.tensors.value)
            group.move(self.source, scales, EQUALISE)
            self._say(EQUALISE, group, scales, "ranges of rows and columns made equal")

    def _smooth(self, groups: Sequence[Group], weights: Sequence[GraphWeight], inputs: Sequence[Any]) -> None:
        assert self.recipe.smooth is not None
        statistics = measure(self.tensors, weights, groups, inputs, keep=False)
        for group in groups:
            scales = smooth(group, self.tensors.value, statistics, self.recipe.smooth)
            group.move(self.source, scales, SMOOTH)
            self._say(SMOOTH, group, scales, f"max|x|^{self.recipe.smooth:g} / max|w|^{1 - self.recipe.smooth:g}")

    def _search(self, groups: Sequence[Group], weights: Sequence[GraphWeight], inputs: Sequence[Any]) -> None:
        assert self.calibration is not None
        int8_rows = self.recipe.inputs is not None and self.recipe.inputs.kind == "token"
        journal = None
        if self.calibration.folder is not None:
            journal = ScalesJournal.of(
                self.calibration.folder, self.tensors, weights, groups, inputs, int8_rows=int8_rows
            )
        known = {} if journal is None else journal.read_all(groups)
        left = [group for number, group in enumerate(groups) if number not in known]
        statistics = measure(self.tensors, weights, left, inputs, keep=True) if left else {}
        with Counted("searching scales (awq)", len(groups), "groups") as progress:
            for number, group in enumerate(groups):
                chosen = known.get(number)
                if chosen is None:
                    chosen = awq(group, self.tensors.value, statistics, int8_rows=int8_rows)
                    if journal is not None and chosen is not None:
                        journal.write(number, chosen)
                progress.step(1)
                if chosen is None:
                    self.decisions.append((AWQ, group.path, "no scales: none of its readers is a quantised linear"))
                    continue
                group.move(self.source, chosen.scales, AWQ)
                text = (
                    f"{chosen.text}: squared error of the outputs {100 * chosen.nearest_error:.2g} % -> "
                    f"{100 * chosen.error:.2g} %"
                )
                self._say(AWQ, group, chosen.scales, text)

    # --- the check ---

    def _checked(
        self, stage: str, weights: list[GraphWeight], rewrite: Callable[[], list[GraphWeight] | None]
    ) -> list[GraphWeight]:
        """Runs the graph before and after a rewrite, and takes the rewrite back if the function changed.

        `rewrite` returns the graph's weights if it made others; so does this.
        """
        function = self._function(weights)
        before, said = dict(self.source.changes), len(self.decisions)
        weights = rewrite() or weights
        if self.source.changes == before:
            return weights
        share, why = function.difference(weights)
        if why:
            self.source.changes = before
            self.decisions[said:] = [(stage, "", f"taken back: {why}")]
            note(f"{stage} is taken back: {why}")
        else:
            self._say_kept(stage, share)
        return weights

    def _function(self, weights: Sequence[GraphWeight]) -> FloatFunction:
        if self.function is None:
            inputs = example_inputs(self.tensors) if self.calibration is None else self.calibration.held()
            if not inputs:
                raise CalibrationError(
                    "a rewrite is checked by running the float graph, and there are no inputs with values: give "
                    "qcompile(…, calibrate=[inputs])"
                )
            self.function = FloatFunction(self.tensors, weights, inputs)
            if not self.function.outputs:
                raise RecipeError(
                    "a rewrite is checked by the floating-point results of the model, and it has none; leave rotate, "
                    "rotate_online, smooth, equalise and algorithm='awq' out"
                )
        return self.function

    # --- the report ---

    def _say_kept(self, stage: str, share: float) -> None:
        text = f"the float graph computes the same: outputs moved by {share:.2g} of what roundings may do"
        self.decisions.append((stage, "", text))

    def _say(self, stage: str, group: Group, scales: torch.Tensor, text: str) -> None:
        moved = scales[group.free]
        held = "" if bool(group.free.all()) else f", {int(group.free.sum())} of {group.channels} channels"
        readers = ", ".join(each.weight.targets[0].rpartition(".")[0] for each in group.readers)
        between = f"scales {float(moved.min()):.3g} to {float(moved.max()):.3g}{held}"
        self.decisions.append((stage, group.path, f"{between}, to the columns of {readers}; {text}"))

    def _say_where_not(self, found: Found, weights: Sequence[GraphWeight]) -> None:
        quantised = {weight.targets[0] for weight in weights if is_quantised_linear(weight)}
        stage = AWQ if self.recipe.algorithm == "awq" else SMOOTH if self.recipe.smooth is not None else EQUALISE
        for path, why in found.reasons.items():
            if path in quantised:
                self.decisions.append((stage, path, f"no scales: {why}"))


__all__ = ["AWQ", "EQUALISE", "ONLINE", "ROTATE", "SMOOTH", "FloatRewrites", "wants_rewrites"]
