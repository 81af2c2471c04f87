"""How far the outputs of a quantised graph are from those of the float graph.

    kl       KL(float || quantised) of the logits, in nats, the mean over all rows
    error    |quantised - float|^2 / |float|^2 over all inputs, the mean over the outputs

Logits are the first output whose last dimension is the vocabulary: the model's `config.vocab_size`, or without one the
rows of the largest table of an embedding.  The float outputs are kept, in unnamed files from `IN_MEMORY` bytes on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind

from qcompiler.errors import CalibrationError, RecipeError
from qcompiler.frontends.quantise.graph_weights import GraphWeight
from qcompiler.frontends.weights.weight_files import Unnamed

Float64 = npt.NDArray[np.float64]
Measure = Literal["kl", "error"]

IN_MEMORY = 256 << 20
"""Bytes of float outputs that stay in memory."""
ELEMENTS = 1 << 20
"""Logits that are widened to float64 at a time."""


@dataclass(frozen=True)
class Distance:
    """Sums for each input (rows) and output (columns), and what they are divided by."""

    sums: Float64
    parts: Float64

    @property
    def mean(self) -> float:
        return float(np.mean(self.sums.sum(0) / self.parts.sum(0)))

    @property
    def error(self) -> float:
        """One standard error of the mean over inputs; NaN for a single one."""
        found: Float64 = np.mean(self.sums / self.parts, axis=1)
        return float(found.std(ddof=1) / math.sqrt(len(found))) if len(found) > 1 else math.nan


class Judge:
    """Compares outputs with the float graph's. `nodes` are the outputs that are compared."""

    def __init__(self, program: ExportedProgram, measure: str, vocabulary: int | None, argument: str = "data") -> None:
        """`argument` is what errors call the inputs."""
        self.argument = argument
        outputs = _outputs(program)
        logits = [node for node in outputs if node.meta["val"].ndim > 1 and node.meta["val"].shape[-1] == vocabulary]
        if measure not in ("auto", "kl", "error"):
            raise RecipeError(f"measure={measure!r}: choose 'kl', 'error', or 'auto'")
        if not outputs:
            raise RecipeError("the model returns no tensor of floats, so that nothing can be compared")
        self.measure: Measure = "kl" if measure == "kl" or (measure == "auto" and logits) else "error"
        self.nodes: list[fx.Node] = (logits or outputs)[:1] if self.measure == "kl" else outputs
        self.why = f"'{self.nodes[0].name}', whose last dimension is {self.nodes[0].meta['val'].shape[-1]}"
        if self.measure == "error":
            self.why = f"{len(outputs)} outputs, none of which has logits" if measure == "auto" else "all outputs"
        self.reference: list[list[torch.Tensor]] = []
        self._files, self._held = Unnamed(), 0

    @property
    def rows(self) -> int:
        """Rows of logits, or of outputs, that are compared."""
        return sum(each[0].numel() // max(each[0].shape[-1], 1) for each in self.reference)

    def keep(self, outputs: Sequence[torch.Tensor], number: int) -> None:
        """Takes the float outputs of the next input. CalibrationError for values that are not finite."""
        for node, each in zip(self.nodes, outputs, strict=True):
            if not torch.isfinite(each).all() and not (self.measure == "kl" and _only_excluded(each)):
                raise CalibrationError(
                    f"{self.argument}[{number}]: the float model's output '{node.name}' holds NaN or infinity; leave "
                    "that input out, or repair the model"
                )
        self.reference.append([self._stored(each) for each in outputs])

    def check(self) -> None:
        """CalibrationError if the float outputs are all zero, or if there are none."""
        if not self.rows:
            raise CalibrationError(f"`{self.argument}` gives no rows of outputs to compare; give more or longer inputs")
        for place, node in enumerate(self.nodes if self.measure == "error" else ()):
            if not any(bool(each[place].any()) for each in self.reference):
                raise CalibrationError(
                    f"the float model's output '{node.name}' is zero for all data: there is nothing to compare with"
                )

    def distance(self, number: int, outputs: Sequence[torch.Tensor]) -> tuple[list[float], list[float]]:
        """Of the outputs for one input: the sums, and what they are divided by."""
        pairs = zip(self.reference[number], outputs, strict=True)
        found = [(_divergence if self.measure == "kl" else _squares)(base, own) for base, own in pairs]
        return [each[0] for each in found], [each[1] for each in found]

    def loss(self, number: int, outputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """The mean distance of the outputs for one input, in fp32, with gradients."""
        pairs = zip(self.reference[number], outputs, strict=True)
        measure = _mean_divergence if self.measure == "kl" else _share
        return torch.stack([measure(base, own.cpu().float()) for base, own in pairs]).mean()

    def _stored(self, values: torch.Tensor) -> torch.Tensor:
        plain = values.detach().to("cpu", torch.float32).contiguous()
        self._held += plain.nbytes
        if self._held <= IN_MEMORY:
            return plain.clone()
        room = torch.from_numpy(self._files.room(plain.nbytes)).view(torch.float32).reshape(plain.shape)
        return room.copy_(plain)


def vocabulary_of(config: Any, weights: Sequence[GraphWeight]) -> int | None:
    """The number of tokens: the model's `config.vocab_size`, or the rows of its largest table of an embedding."""
    text = getattr(config, "get_text_config", lambda: config)()
    known = getattr(text, "vocab_size", None)
    tables = [int(weight.tensor.shape[0]) for weight in weights if "embedding" in weight.kinds]
    return known if isinstance(known, int) else max(tables, default=None)


def distance(each: Sequence[tuple[list[float], list[float]]]) -> Distance:
    """The distances of all inputs together."""
    return Distance(np.array([sums for sums, _ in each]), np.array([parts for _, parts in each]))


def _divergence(base: torch.Tensor, own: torch.Tensor) -> tuple[float, float]:
    """The sum of KL over rows of logits, and the number of rows."""
    wide = base.shape[-1]
    total, rows = 0.0, max(ELEMENTS // wide, 1)
    for left, right in zip(base.reshape(-1, wide).split(rows), own.reshape(-1, wide).split(rows), strict=True):  # type: ignore[no-untyped-call]
        p, q = (each.cpu().double().log_softmax(-1) for each in (left, right))
        terms = torch.where(torch.isneginf(p), 0.0, p.exp() * (p - q))
        total += float(terms.sum(-1).clamp(min=0).sum())
    return total, float(base.numel() // wide)


def _squares(base: torch.Tensor, own: torch.Tensor) -> tuple[float, float]:
    difference = own.detach().cpu().float() - base
    return float(difference.double().square().sum()), float(base.double().square().sum())


def _mean_divergence(base: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    p, q = base.log_softmax(-1), own.log_softmax(-1)
    return torch.where(torch.isneginf(p), 0.0, p.exp() * (p - q)).sum(-1).mean()


def _share(base: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    return (own - base).square().mean() / base.square().mean().clamp_min(torch.finfo(torch.float32).tiny)


def _only_excluded(logits: torch.Tensor) -> bool:
    """Whether what is not finite is -inf: what the model excludes."""
    return bool((torch.isfinite(logits) | torch.isneginf(logits)).all())


def _outputs(program: ExportedProgram) -> list[fx.Node]:
    """The results of the model that are tensors of floats."""
    returned: Any = program.graph.output_node().args[0]
    specs = program.graph_signature.output_specs
    found = [node for node, spec in zip(returned, specs, strict=True) if spec.kind == OutputKind.USER_OUTPUT]
    tensors = [node for node in found if isinstance(node, fx.Node) and isinstance(node.meta.get("val"), torch.Tensor)]
    return [node for node in dict.fromkeys(tensors) if node.meta["val"].dtype.is_floating_point]


__all__ = ["Distance", "Judge", "Measure", "distance", "vocabulary_of"]
