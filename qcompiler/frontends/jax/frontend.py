"""From a jittable function to the IR in three readable stages: export, insert-qdq, import."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from qcompiler.config import QuantConfig
from qcompiler.frontends.jax.export import export_function
from qcompiler.frontends.jax.float_run import Calibration
from qcompiler.frontends.jax.importer import JaxImport, import_in_stages
from qcompiler.frontends.jax.table import COMPOSITES
from qcompiler.frontends.weights.weight_files import WeightFiles


def import_jax(
    function: Any,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    quant: QuantConfig | str | None = None,
    dynamic_shapes: Mapping[str, Any] | None = None,
    valued: bool = True,
    files: WeightFiles | None = None,
    donated: int | Sequence[int] | None = None,
    calibration: Calibration | None = None,
) -> JaxImport:
    """Runs the three stages; `result.texts` holds the dumps "00-export" and "01-insert-qdq".

    See `export_function`, `quantise` and `import_graph` for errors.
    """
    return import_in_stages(
        lambda: export_function(function, args, kwargs, dynamic_shapes, COMPOSITES, donated),
        quant,
        valued=valued,
        files=files,
        calibration=calibration,
    )
