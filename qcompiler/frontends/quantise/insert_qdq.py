"""Stage `insert-qdq`: encodes each weight once; the fx graph decodes it by `torch.ops.qc.dequantize`.

    before   linear = aten.linear(x, p_q_weight, p_q_bias)                          p_q_weight: f32[384, 384]
    after    dequantize = qc.dequantize(p_q_weight, "nf4:block=64", [384, 384], f32)  p_q_weight: u8[82944]
             linear = aten.linear(x, dequantize, p_q_bias)

A matrix whose only use is `x @ W` (GPT-2's Conv1D: addmm with W as (in, out)) is stored transposed, and its uses become
`aten.linear`, quantised or not, so later stages need one pattern only.  The weight of a convolution is stored as the
matrix that its product reads (conv_weights.py), including batch norms behind it (fold_batch_norm.py).  The fused
weights of experts, (E, N, K), are stored as one matrix (E * N, K) (expert_weights.py).  Tied weights (one storage) are
encoded once.  Codes from a source are stored as they are (stored_codes.py).  Rewrites that keep the float function run
first, where the recipe asks for them (rewrites/).

The rewritten ExportedProgram runs in eager torch and is the accuracy oracle for everything that follows.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature, InputKind, InputSpec, OutputSpec, TensorArgument

from qcompiler.calibrate import hqq
from qcompiler.config import BY_DATA, QuantConfig, format_text, parse_format, resolve_format
from qcompiler.errors import RecipeError, WeightsError
from qcompiler.formats import PackedTensor
from qcompiler.frontends.quantise.activations import quantise_inputs, rounded_inputs
from qcompiler.frontends.quantise.arithmetic import TYPES, choose_arithmetic, product_weight
from qcompiler.frontends.quantise.calibrate import Calibration
from qcompiler.frontends.quantise.choose_formats import FormatChooser, Kind
from qcompiler.frontends.quantise.conv_weights import restore
from qcompiler.frontends.quantise.correct_biases import BiasCorrection
from qcompiler.frontends.quantise.graph_run import Watched
from qcompiler.frontends.quantise.graph_tensors import GraphTensors
from qcompiler.frontends.quantise.graph_weights import (
    FLOATS,
    GraphWeight,
    described,
    is_quantised_linear,
    naming_errors,
    takes_importance,
    why_encoders_scales,
    why_kept,
    why_nearest,
)
from qcompiler.frontends.quantise.lost_weights import WARN_FROM, describe, lost_share
from qcompiler.frontends.quantise.observers import InputStatistics
from qcompiler.frontends.quantise.rewrites.rewrites import FloatRewrites, wants_rewrites
from qcompiler.frontends.quantise.solve_codes import Matrix, Solver
from qcompiler.frontends.quantise.stored_codes import AS_STORED, add_permutation, check_use, say_unused
from qcompiler.frontends.quantise.tune_weights import tune
from qcompiler.frontends.torch.aten import recurrent
from qcompiler.frontends.torch.capture import eager_graph, expert_weights
from qcompiler.frontends.torch.capture.export import Exported
from qcompiler.frontends.torch.capture.one_at_a_time import TRACING
from qcompiler.frontends.torch.common.origins import readable
from qcompiler.frontends.torch.common.values import row_major, to_numpy
from qcompiler.frontends.torch.qc_ops import torch_ops
from qcompiler.frontends.weights.weight_files import ByNeed, InMemory, Unnamed, WeightFiles
from qcompiler.frontends.weights.weight_source import ModuleWeights, WeightSource
from qcompiler.frontends.weights.weight_uses import as_linear, reads, replace_by_linear, storage_key
from qcompiler.ledger import STATE, Ledger, LedgerRow
from qcompiler.plan.kernel import FormatRef
from qcompiler.plan.plan import Rewrite
from qcompiler.plan.weights import NO_VALUES, Bytes, NoBytes, StoredTensor, WeightStore
from qcompiler.runtime.encoder import encode
from qcompiler.runtime.progress import Progress, note
from qcompiler.units import counted

aten = torch.ops.aten
PACKED = "_packed"
"""The name of a packed weight's buffer is its parameter's name with this suffix."""

_NO_IMPORTANCE = (
    "only linears in formats that search for their scales take an importance of columns, such as q4_K and q4_0 (but "
    "not q8_0, nf4 and int4), and only activations='int8:static' takes ranges; smooth=, "
    "tune_scales=, algorithm='gptq' and algorithm='awq' take inputs. Leave `calibrate` out, or choose one"
)


@dataclass
class Quantized:
    """The rewritten program, its packed weights (keyed by their first parameter path), and the ledger.

    `valued` is False for a program whose weights have sizes, but no values.  `files` holds the packed bytes, and will
    hold those of the program's image.
    """

    exported: Exported
    weights: WeightStore
    ledger: Ledger
    valued: bool = True
    files: WeightFiles = field(default_factory=InMemory)
    decisions: tuple[tuple[str, str, str], ...] = ()
    """(stage, a weight's path, what): whose inputs were measured or are quantised."""

    @property
    def module(self) -> Callable[..., Any]:
        """The program as a function of the model's own arguments, in eager torch: the accuracy oracle.

        WeightsError without values.
        """
        if not self.valued:
            raise WeightsError(NO_VALUES)
        return eager_graph.runnable(self.exported.program)

    def text(self) -> str:
        """The contents of the dump `01-insert-qdq.txt`."""
        return readable(self.exported.program.graph_module) + f"\n{self.ledger.table()}\n"


def insert_qdq(
    exported: Exported,
    quant: QuantConfig | str | None = None,
    source: WeightSource | None = None,
    files: WeightFiles | None = None,
    calibration: Calibration | None = None,
) -> Quantized:
    """Rewrites `exported` in place by the recipe, with values from `source` (default: its own).

    Packed weights go to `files`; by default to memory if they are small, else to unnamed files.  One tensor is
    processed at a time.  With `calibration` the graph first runs over its inputs, and the statistics of its linears'
    inputs weight the errors of their weights, in formats that take an importance.

    Errors: RecipeError for a rule that matches nothing and for a calibration that serves nothing, FormatShapeError and
    FormatValueError naming the parameter, WeightsError where the source lacks values, PromiseError if the recipe's
    promise is missed, WorkdirError.
    """
    source = source if source is not None else ModuleWeights()
    files = files if files is not None else _default_files(exported, source)
    try:
        with TRACING:
            return _Rewriter(exported, QuantConfig.of(quant), source, files, calibration).run()
    finally:
        files.abandon()


def _default_files(exported: Exported, source: WeightSource) -> WeightFiles:
    if source.streams:
        return Unnamed()
    tensors = [t for t in exported.program.state_dict.values() if isinstance(t, torch.Tensor)]
    return ByNeed(max((t.numel() * t.element_size() for t in tensors), default=0)) if source.valued else InMemory()


class _Rewriter(GraphTensors):
    def __init__(
        self,
        exported: Exported,
        recipe: QuantConfig,
        source: WeightSource,
        files: WeightFiles,
        calibration: Calibration | None = None,
    ) -> None:
        super().__init__(exported, source, files.room)
        self.recipe, self.files, self.calibration = recipe, files, calibration
        self.weights = WeightStore()
        self.rows: list[LedgerRow] = []
        self.activations = recipe.inputs
        self.inputs: dict[str, InputStatistics] = {}
        self.solved: dict[str, PackedTensor] = {}
        self.nearest: dict[str, PackedTensor] = {}
        self.final: dict[str, PackedTensor] = {}
        self.biases: BiasCorrection | None = None
        self.decoded: dict[fx.Node, str] = {}
        self.decisions: list[tuple[str, str, str]] = []
        self.lost: dict[str, str] = {}
        self.progress = Progress("packing weights", 0)
        self.rewrites = FloatRewrites(self, recipe, calibration) if wants_rewrites(recipe) else None

    def run(self) -> Quantized:
        weights = [weight for weight in self.grouped() if not self._drop(weight)]
        self.find_codes(weights)
        if self.rewrites is not None:
            weights = [weight for weight in self.rewrites.rotate(weights) if not self._drop(weight)]
        eligible = [t for w in weights if w.kinds for t in w.targets]
        self.recipe.check_rules(eligible, _modules(self.graph, [t for w in weights for t in w.targets]))
        eligible_weights = [weight for weight in weights if weight.kinds]
        chooser = FormatChooser(self.recipe, self.exported.config, [described(w) for w in eligible_weights])
        for weight in weights:
            self._decide(weight, chooser)
        weights += self._give_biases(weights, chooser)
        chosen = all(weight.codes is None for weight in weights)  # a promise covers only the recipe's choices
        self.decisions += chooser.decisions
        promise = chooser.promise(self.rows) if chosen else None
        ledger = Ledger(tuple(self.rows), self.recipe.preset, promise, len(chooser.later))
        ledger.check_promise()  # before encoding, which may take long
        say_unused(self.recipe, self.rows)
        if self.rewrites is not None:
            self.rewrites.rotate_online(weights)
            self.rewrites.move_scales(weights)
            self.decisions += self.rewrites.decisions
        self._calibrate(weights)
        if self.recipe.algorithm == "hqq":
            self._choose_scales(weights)
        self._tune_scales(weights)
        self._correct_biases(weights)
        stored = [weight for weight in weights if self._is_stored(weight)]
        kept = sum(weight.nbytes for weight in weights if not self._is_stored(weight))
        self.files.begin([weight.entry() for weight in stored], kept)
        done = 0
        with Progress("packing weights", sum(w.tensor.numel() * w.tensor.element_size() for w in stored)) as progress:
            self.progress = progress  # long encodings report their progress to it
            for weight in weights:
                self._rewrite(weight)
                done += weight.tensor.numel() * weight.tensor.element_size() if self._is_stored(weight) else 0
                progress.reach(done)
        self.files.finish()
        self._quantise_activations()
        self._choose_arithmetic()
        self.graph.lint()
        self.program.graph_module.recompile()
        exported = replace(self.exported, program=self._program())
        self.weights.moved = self._moved(weights)
        ledger = ledger.remarked(self.lost).remarked(
            {path: f"moved by {', '.join(by)}" for path, by in self.weights.moved.items()}
        )
        return Quantized(exported, self.weights, ledger, self.source.valued, self.files, tuple(self.decisions))

    # --- calibration ---

    def _calibrate(self, weights: Sequence[GraphWeight]) -> None:
        """Measures the inputs of linears whose formats take an importance, and of all linears for static scales."""
        static = self.activations is not None and self.activations.kind == "tensor"
        if self.calibration is None:
            needs = [f"activations={self.recipe.activations!r}"] * static
            needs += [f"algorithm={self.recipe.algorithm!r}"] * (self.recipe.algorithm in BY_DATA)
            needs += ["correct_bias=True"] * self.recipe.correct_bias + ["tune_scales=True"] * self.recipe.tune_scales
            if needs:
                raise RecipeError(f"{needs[0]} needs calibration data: qcompile(…, calibrate=[inputs])")
            return
        if self.recipe.algorithm in (*BY_DATA, "awq"):
            self._solve(weights)
        chosen = [
            w
            for w in weights
            if (takes_importance(w) and w.targets[0] not in self.solved) or (static and is_quantised_linear(w))
        ]
        if not chosen and (self.solved or self.rewrites is not None or self.recipe.tune_scales):
            return
        if not chosen or not self.source.valued:
            raise RecipeError(
                "`calibrate` was given, and nothing here uses it: "
                + ("the weights have no values" if chosen else _NO_IMPORTANCE)
            )
        watched = [Watched(weight.targets[0], weight.shape[1], reads(weight.nodes)) for weight in chosen]
        values = {node.name: functools.partial(self.value, weight) for weight in weights for node in weight.nodes}
        found = self.calibration.measure(
            self.program, watched, values, lambda: self.identities(weights), magnitudes=static
        )
        for weight in chosen:
            self.inputs[weight.targets[0]] = found[weight.targets[0]]
            kinds = ["importance of columns"] * takes_importance(weight) + ["range"] * static
            rows = found[weight.targets[0]].rows
            self.decisions.append(("calibrate", weight.targets[0], f"{' and '.join(kinds)}, of {counted(rows, 'row')}"))

    def _choose_scales(self, weights: Sequence[GraphWeight]) -> None:
        """Reports whose scales are chosen while they are encoded, and why others are not."""
        whys = {weight.targets[0]: why_encoders_scales(weight) for weight in weights if weight.format is not None}
        if all(whys.values()):
            listed = "; ".join(dict.fromkeys(whys.values())) or "no weight is quantised"
            raise RecipeError(f"algorithm='hqq' serves nothing here: {listed}")
        said = "scales by hqq, without data"
        self.decisions += [
            ("codes", path, f"scales of the encoder: {why}" if why else said) for path, why in whys.items()
        ]

    def _solve(self, weights: Sequence[GraphWeight]) -> None:
        """Chooses the codes of linears by the inputs of `calibrate`."""
        assert self.calibration is not None
        linears = [weight for weight in weights if weight.format is not None and "linear" in weight.kinds]
        whys = {
            weight.targets[0]: why_nearest(weight, self.recipe.algorithm)
            for weight in weights
            if weight.format is not None
        }
        chosen = [self._matrix(weight) for weight in linears if not whys[weight.targets[0]]]
        rounded = rounded_inputs(weights) if self.recipe.rounded_inputs else None
        solver = Solver(chosen, self.calibration.folder, self.recipe.algorithm, rounded)
        if self.recipe.algorithm == "awq" and not (solver.matrices and self.source.valued):
            return  # its scales of channels may serve; their search has said what it found
        if not solver.matrices or not self.source.valued:
            why = "the weights have no values" if solver.matrices else "no linear has codes that it could choose"
            raise RecipeError(f"algorithm={self.recipe.algorithm!r} serves nothing here: {why}")

        def value(weight: GraphWeight) -> torch.Tensor:
            packed = solver.packed.get(weight.targets[0])
            if packed is None:
                return self._nearest(weight) if whys.get(weight.targets[0]) else self.value(weight)
            return _model_values(weight, packed)

        values, floats = (
            {node.name: functools.partial(each, weight) for weight in weights for node in weight.nodes}
            for each in (value, self.value)
        )
        nearest = sorted((path, str(weight.format)) for weight in weights if whys.get(path := weight.targets[0]))
        identity = lambda: [*self.identities(weights), nearest]  # noqa: E731
        solver.run(self.program, self.calibration.held(), values, floats, identity)
        self.solved = solver.packed
        for weight in linears:
            path = weight.targets[0]
            self.decisions.append(("codes", path, solver.found.get(path, f"nearest codes: {whys[path]}")))

    def _give_biases(self, weights: Sequence[GraphWeight], chooser: FormatChooser) -> list[GraphWeight]:
        """The biases that linears get for `correct_bias`, with their rows of the ledger."""
        if not self.recipe.correct_bias:
            return []
        assert self.rewrites is not None
        self.biases = BiasCorrection(self, self.rewrites.source)
        made = self.biases.give(weights)
        for weight in made:
            self._decide(weight, chooser)
        return made

    def _correct_biases(self, weights: Sequence[GraphWeight]) -> None:
        """Corrects biases for the final codes, which are kept in memory until they are stored."""
        if self.biases is None:
            return

        def decoded(weight: GraphWeight) -> torch.Tensor:
            if weight.format is None or weight.codes is not None:
                return self.value(weight)
            packed = self.final[weight.targets[0]] = self._packed(weight, _stored_matrix(weight, self.value(weight)))
            return _model_values(weight, packed)

        assert self.calibration is not None
        self.biases.correct(weights, self.calibration.held(), decoded)
        self.decisions += self.biases.decisions

    def _tune_scales(self, weights: Sequence[GraphWeight]) -> None:
        """Tunes scales for the final codes, which are kept in memory until they are stored."""
        if not self.recipe.tune_scales:
            return
        assert self.calibration is not None

        made: dict[str, PackedTensor] = {}

        def codes(weight: GraphWeight) -> PackedTensor:
            packed = made[weight.targets[0]] = self._packed(weight, _stored_matrix(weight, self.value(weight)))
            return packed

        found, decisions = tune(self, weights, self.calibration.held(), self.calibration.folder, codes)
        self.solved |= found
        self.final |= {path: packed for path, packed in made.items() if path not in found}
        self.decisions += decisions

    def _nearest(self, weight: GraphWeight) -> torch.Tensor:
        """A weight that keeps its nearest codes, decoded, in the model's order. It is encoded once."""
        path, values = weight.targets[0], self.value(weight)
        if weight.codes is not None:
            return values  # what its codes mean
        if path not in self.nearest:
            with naming_errors(weight):
                self.nearest[path] = encode(resolve_format(weight.format or ""), _stored_matrix(weight, values))
        return _model_values(weight, self.nearest[path])

    def _matrix(self, weight: GraphWeight) -> Matrix:
        def values() -> npt.NDArray[np.float32]:
            found = weight.arranged(self.source.read(weight.targets, weight.tensor))
            return to_numpy(row_major(found)).astype(np.float32, copy=False)

        rows, cols = weight.shape
        assert weight.format is not None
        watched = Watched(weight.targets[0], cols, reads(weight.nodes), tuple(weight.nodes))
        arranged = lambda matrix: weight.restored(matrix.to(weight.tensor.dtype))  # noqa: E731
        return Matrix(watched, resolve_format(weight.format), rows, values, arranged)

    def _quantise_activations(self) -> None:
        if self.activations is None:
            return
        clips = {
            path: each.magnitudes.clip(self.recipe.observer)
            for path, each in self.inputs.items()
            if each.magnitudes is not None
        }
        done = quantise_inputs(self.graph, self.activations, clips, lambda node: self.decoded.get(node, node.name))
        if not done:
            raise RecipeError(
                f"the recipe quantises inputs of linears and convolutions ({self.activations.text}), and none of them "
                "has a quantised weight: choose a format for linears, or leave out `activations` and compute='int8'"
            )
        self.decisions += [("activations", path, what) for path, what in done]
        for node, path in self.decoded.items():
            if any(recurrent.is_weight_of(user, node) for user in node.users):
                self.decisions.append(("activations", path, "not quantised: it is multiplied with a state"))

    def _choose_arithmetic(self) -> None:
        if self.recipe.compute not in TYPES:
            return
        if not any(product_weight(node) is not None for node in self.graph.nodes):
            raise RecipeError(
                f"compute={self.recipe.compute!r}, and no linear, convolution or expert has a quantised "
                "weight: choose a format for linears, or leave `compute` out"
            )
        done = choose_arithmetic(self.graph, self.recipe.compute, lambda node: self.decoded.get(node, node.name))
        self.decisions += [("compute", path, what) for path, what in done]

    # --- decisions and rewriting ---

    def _drop(self, weight: GraphWeight) -> bool:
        """Removes a tensor that the graph does not read."""
        if weight.users:
            return False
        for node, spec in zip(weight.nodes, weight.specs, strict=True):
            if any(spec.target == t for t in self.program.graph_signature.buffers_to_mutate.values()):
                break
            self.graph.erase_node(node)
            self.specs.remove(spec)
            self.state.pop(str(spec.target), None)
            self.constants.pop(str(spec.target), None)
        into = self.folded.get(weight.targets[0])
        why = "not used by the graph" if into is None else f"folded into {into}"
        self._row(weight, why, 0, counts=False)
        return True

    def _decide(self, weight: GraphWeight, chooser: FormatChooser) -> None:
        """Decides the format, by the recipe, and writes the ledger's row."""
        states = self.program.graph_signature.buffers_to_mutate.values()
        why = STATE if weight.targets[0] in states else why_kept(weight)
        if weight.codes is not None:
            check_use(weight.codes, weight.targets, weight.shape, weight.kinds, weight.arrangement, self.recipe)
            weight.format, why = (
                format_text(FormatRef(weight.codes.format.name, dict(weight.codes.format.params))),
                AS_STORED,
            )
        elif weight.kinds:
            weight.format, why = chooser.choose(described(weight))
        counts = weight.is_parameter and weight.tensor.ndim >= 2
        with naming_errors(weight):
            self._row(weight, why, weight.nbytes, counts=counts)

    def _row(self, weight: GraphWeight, why: str, after: int, *, counts: bool) -> None:
        tensor = weight.tensor
        dtype, before = str(tensor.dtype).removeprefix("torch."), tensor.numel() * tensor.element_size()
        stored = format_text(parse_format(weight.format)) if weight.format is not None else ""
        shape = tuple(tensor.shape)
        self.rows.append(LedgerRow(tuple(weight.targets), shape, dtype, stored, why, before, after, counts))

    def _is_stored(self, weight: GraphWeight) -> bool:
        """Whether bytes are written: for encoded or rearranged tensors and those from files. Others stay in place."""
        if not self.source.valued or not weight.is_parameter or (weight.codes is not None and weight.codes.mapped):
            return False
        return weight.format is not None or bool(weight.arrangement) or self.source.streams

    def _rewrite(self, weight: GraphWeight) -> None:
        """Makes the graph read the stored tensor, and puts it into the program's state."""
        if weight.transposed:
            self._transpose(weight)
        if weight.conv is not None:
            restore(self.graph, weight.conv, weight.nodes, weight.targets[0].rpartition(".")[0])
        if weight.experts is not None:
            expert_weights.group(self.graph, weight.experts, weight.nodes)
        if weight.format is not None:
            self._quantize(weight)
        elif weight.is_parameter:
            self._keep(weight)
        self.final.pop(weight.targets[0], None)
        self.source.release(weight.targets)

    def _transpose(self, weight: GraphWeight) -> None:
        """(in, out) to (out, in), and `x @ W (+ b)` to `linear(x, W, b)`."""
        for node in weight.nodes:
            node.meta["val"] = node.meta["val"].t().contiguous()
            for user in list(node.users):
                replace_by_linear(self.graph, user, *as_linear(user, node))

    def _keep(self, weight: GraphWeight) -> None:
        """Keeps a parameter without quantising it."""
        if self._is_stored(weight):
            tensor = torch.from_numpy(self._stored(weight, self._copy)).view(weight.tensor.dtype).reshape(weight.shape)
        elif self.source.valued:
            tensor = self.source.read(weight.targets, weight.tensor)  # refuses a tensor without values
            if tuple(tensor.shape) == weight.shape and not self._rewritten(weight):
                return
            tensor = tensor.reshape(weight.shape)  # a view: the stacked matrices of experts
        else:
            with weight.nodes[0].meta["val"].fake_mode:
                tensor = torch.empty(weight.shape, dtype=weight.tensor.dtype)
        for target in weight.targets:
            self.state[target] = torch.nn.Parameter(tensor, requires_grad=False)

    def _moved(self, weights: Sequence[GraphWeight]) -> dict[str, tuple[Rewrite, ...]]:
        """What moved each parameter whose stored values are not the model's (plan/moved.py)."""
        found: dict[str, tuple[Rewrite, ...]] = {}
        for weight in weights:
            by: list[Rewrite] = ["fold-batch-norm"] if self.refolded.intersection(weight.targets) else []
            if weight.codes is not None and weight.codes.permutation is not None:
                by.append("column-order")
            if self.rewrites is not None:
                by += self.rewrites.source.moved_by(weight.targets)
            if by:
                found |= dict.fromkeys(weight.targets, tuple(by))
        return found

    def _rewritten(self, weight: GraphWeight) -> bool:
        return self.rewrites is not None and self.rewrites.source.changed(weight.targets)

    def _stored(self, weight: GraphWeight, fill: Callable[[GraphWeight, Bytes], None]) -> Bytes:
        return self.files.store(
            weight.entry(),
            lambda: self._identity(weight),
            lambda out: fill(weight, out),
        )

    def _identity(self, weight: GraphWeight) -> dict[str, Any]:
        """Identifies the values, and the importance that they are encoded with."""
        values = self.source.identity(weight.targets, weight.tensor)
        if self.recipe.algorithm == "hqq" and not why_encoders_scales(weight):
            values = {**values, "scales": f"hqq {hqq.SETTINGS}"}
        if weight.targets[0] in self.solved:
            codes = self.solved[weight.targets[0]].data
            return {**values, "codes": hashlib.sha256(codes.data).hexdigest()}
        importance = self._importance(weight)
        if importance is None:
            return values
        return {**values, "importance": hashlib.sha256(importance.tobytes()).hexdigest()}

    def _importance(self, weight: GraphWeight) -> npt.NDArray[np.float32] | None:
        found = self.inputs.get(weight.targets[0])
        return found.importance if found is not None and takes_importance(weight) else None

    def _copy(self, weight: GraphWeight, out: Bytes) -> None:
        values = weight.arranged(self.source.read(weight.targets, weight.tensor))
        torch.from_numpy(out).view(values.dtype).reshape(values.shape).copy_(values)

    def _encode(self, weight: GraphWeight, out: Bytes) -> None:
        assert weight.format is not None
        if weight.codes is not None:
            out[...] = weight.codes.read().data
            return
        matrix = _stored_matrix(weight, self.source.read(weight.targets, weight.tensor))
        with naming_errors(weight):
            packed = self._packed(weight, matrix, out)
            if packed.data is not out:
                out[...] = packed.data
            self._measure_loss(weight, lost_share(packed.format, matrix, packed))

    def _packed(self, weight: GraphWeight, matrix: npt.NDArray[Any], out: Bytes | None = None) -> PackedTensor:
        """The codes of a weight, however they are chosen, for its stored matrix; in `out` if they are encoded here."""
        path, importance = weight.targets[0], self._importance(weight)
        made = self.final.get(path, self.solved.get(path))
        if made is None and importance is None:
            made = self.nearest.get(path)
        if made is not None:
            return made
        assert weight.format is not None

        def step(elements: int) -> None:
            if out is not None:  # while weights are packed
                self.progress.step(elements * weight.tensor.element_size())  # the values may be wider

        with naming_errors(weight):
            packed = encode(resolve_format(weight.format), matrix, out=out, importance=importance, step=step)
            hqq_scales = self.recipe.algorithm == "hqq" and not why_encoders_scales(weight)
            return hqq.solve(matrix, packed) if hqq_scales else packed

    def _measure_loss(self, weight: GraphWeight, share: float) -> None:
        """Reports weights that became zero with their scale, in the ledger; many of them on stderr, too."""
        if not share:
            return
        key = weight.targets[0]
        self.lost[key] = describe(share)
        if share >= WARN_FROM:
            note(
                f"parameter '{key}': {describe(share)}. Choose a format with fp32 scales for it, or keep it: "
                f"rules={{{key.rpartition('.')[0]!r}: None}}"
            )

    def _quantize(self, weight: GraphWeight) -> None:
        """Encodes, swaps the placeholder's tensor for the packed bytes, and inserts one dequantize behind it."""
        assert weight.format is not None
        ref, key = parse_format(weight.format), weight.targets[0]
        rows, cols = weight.shape
        packed: Bytes | NoBytes
        if weight.codes is not None and weight.codes.mapped:
            packed = weight.codes.read().data
        else:
            packed = self._stored(weight, self._encode) if self.source.valued else NoBytes(weight.nbytes)
        if weight.codes is not None and weight.codes.permutation is not None:
            add_permutation(self.graph, self.specs, self.state, weight.nodes, key, weight.codes.permutation)
        dtype = FLOATS[weight.tensor.dtype]
        self.weights.add(StoredTensor(key, dtype, (rows, cols), packed, ref, "canonical", tuple(weight.targets)))
        first, value = weight.nodes[0], weight.nodes[0].meta["val"]
        last = next(n for n in reversed(self.graph.nodes) if n.op == "placeholder")
        with self.graph.inserting_after(last):
            node = self.graph.call_function(
                torch.ops.qc.dequantize.default, (first, format_text(ref), [rows, cols], weight.tensor.dtype)
            )
        node.meta["val"] = value
        node.meta["nn_module_stack"] = {"": (key.rpartition(".")[0], "")}
        self.decoded[node] = key
        for other in weight.nodes:
            other.replace_all_uses_with(node, delete_user_cb=lambda user: user is not node)
        with value.fake_mode:
            first.meta["val"] = torch.empty(packed.nbytes, dtype=torch.uint8)
        self._repoint(weight, first.meta["val"] if isinstance(packed, NoBytes) else torch.from_numpy(packed))

    def _repoint(self, weight: GraphWeight, packed: torch.Tensor) -> None:
        target = weight.targets[0] + PACKED
        for position, (node, spec) in enumerate(zip(weight.nodes, weight.specs, strict=True)):
            self.state.pop(str(spec.target), None)
            self.constants.pop(str(spec.target), None)
            index = self.specs.index(spec)
            if position == 0:
                self.specs[index] = InputSpec(InputKind.BUFFER, spec.arg, target, persistent=True)
                self.state[target] = packed
            else:
                self.graph.erase_node(node)
                del self.specs[index]

    def _program(self) -> ExportedProgram:
        old = self.program
        signature = ExportGraphSignature(self.specs, self._output_specs())
        return ExportedProgram(
            root=old.graph_module,
            graph=self.graph,
            graph_signature=signature,
            state_dict=self.state,
            range_constraints=old.range_constraints,
            module_call_graph=old.module_call_graph,
            example_inputs=old.example_inputs,
            constants=self.constants,
            verifiers=[old.verifier],
        )

    def _output_specs(self) -> list[OutputSpec]:
        """The old specs under the present names: a result may have been a product that became a linear."""
        specs = self.program.graph_signature.output_specs
        returned = self.graph.output_node().args[0]
        assert isinstance(returned, tuple | list)
        return [
            OutputSpec(spec.kind, TensorArgument(node.name), spec.target)
            if isinstance(node, fx.Node) and isinstance(spec.arg, TensorArgument)
            else spec
            for spec, node in zip(specs, returned, strict=True)
        ]


def _stored_matrix(weight: GraphWeight, values: torch.Tensor) -> npt.NDArray[Any]:
    """The matrix (rows, K) that is encoded, of the model's values."""
    return to_numpy(row_major(weight.arranged(values)).reshape(weight.shape))


def _model_values(weight: GraphWeight, packed: PackedTensor) -> torch.Tensor:
    """What codes mean, in the model's order and type."""
    return weight.restored(torch.from_numpy(packed.format.decode(packed)).to(weight.tensor.dtype))


def _modules(graph: fx.Graph, targets: Iterable[str]) -> list[str]:
    """Every module path that holds a tensor, and its parents."""
    found: dict[str, None] = {}
    for target in targets:
        parts = target.split(".")[:-1]
        for end in range(1, len(parts) + 1):
            found[".".join(parts[:end])] = None
    return list(found)


__all__ = ["Kind", "Quantized", "insert_qdq", "storage_key", "torch_ops"]
