"""From a torch model to the IR in three readable stages: export, insert-qdq, import."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.export import ExportedProgram

from qcompiler.config import QuantConfig
from qcompiler.errors import PromiseError, QCompilerError, UnsupportedOperatorError
from qcompiler.frontends.common.imported import FRONTEND_STAGES, Stages
from qcompiler.frontends.quantise.calibrate import Calibration
from qcompiler.frontends.quantise.insert_qdq import insert_qdq
from qcompiler.frontends.torch.capture.export import Exported, export_model
from qcompiler.frontends.torch.capture.fallback import KEPT_WHOLE
from qcompiler.frontends.torch.importer import BUILDERS, FallbackChoice, ImportResult, import_program
from qcompiler.frontends.weights.weight_files import WeightFiles
from qcompiler.frontends.weights.weight_source import NoValues, WeightSource

__all__ = ["FRONTEND_STAGES", "import_torch"]


def import_torch(
    model: nn.Module | ExportedProgram,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    quant: QuantConfig | str | None = None,
    dynamic_shapes: Any = None,
    fallback: FallbackChoice = None,
    weights: WeightSource | None = None,
    files: WeightFiles | None = None,
    calibration: Calibration | None = None,
) -> ImportResult:
    """Runs the three stages; `result.texts` holds the dumps "00-export" and "01-insert-qdq".

    `quant=None` keeps floats; `weights` is the source of values (default: the model's own tensors), `files` the storage
    of packed weights, `calibration` the inputs that the graph runs over before weights are encoded.
    See `export_model` for dynamic_shapes, `insert_qdq` and `import_program` for errors.
    """
    stages = Stages()
    with stages("export"):
        keep = KEPT_WHOLE.union(BUILDERS) if fallback is not None else None
        exported = export_model(model, args, kwargs, dynamic_shapes, keep=keep)
        stages.texts["00-export"] = exported.text()
    with stages("insert-qdq"):
        try:
            quantized = insert_qdq(exported, quant, weights, files, calibration)
        except PromiseError as error:
            _raise_cause(exported, error, fallback)
            raise
        stages.texts["01-insert-qdq"] = quantized.text()
    with stages("import"):
        result = import_program(quantized, fallback=fallback)
    result.texts, result.seconds = stages.texts, stages.seconds
    return result


def _raise_cause(exported: Exported, error: PromiseError, fallback: FallbackChoice) -> None:
    """Raises the error of an operator without a lowering, if the model has one: it explains why weights were kept.

    With only the promise's error, a user would look for another format and then meet that other error.
    """
    try:
        import_program(insert_qdq(exported, None, NoValues()), fallback=fallback)
    except UnsupportedOperatorError as cause:
        raise cause from error
    except (QCompilerError, KeyError):  # KeyError: a placeholder that the first attempt removed from the graph
        return  # errors of a half-rewritten graph mean nothing
