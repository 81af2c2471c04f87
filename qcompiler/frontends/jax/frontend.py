"""From a jittable function to the IR in three readable stages: export, insert-qdq, import."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from qcompiler.config import QuantConfig
from qcompiler.frontends.jax.export import export_function
from qcompiler.frontends.jax.importer import JaxImport, import_graph
from qcompiler.frontends.jax.quantise import quantise
from qcompiler.frontends.jax.table import COMPOSITES
from qcompiler.frontends.weights.weight_files import WeightFiles
from qcompiler.runtime.progress import stage


def import_jax(
    function: Any,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    quant: QuantConfig | str | None = None,
    dynamic_shapes: Mapping[str, Any] | None = None,
    valued: bool = True,
    files: WeightFiles | None = None,
    donated: int | Sequence[int] | None = None,
) -> JaxImport:
    """Runs the three stages; `result.texts` holds the dumps "00-export" and "01-insert-qdq".

    See `export_function`, `quantise` and `import_graph` for errors.
    """
    stage("export")
    began = time.perf_counter()
    exported = export_function(function, args, kwargs, dynamic_shapes, COMPOSITES, donated)
    text, export_ended = exported.graph.text(), time.perf_counter()
    stage("insert-qdq")
    quantized = quantise(exported, quant, valued=valued, files=files)
    qdq_text, qdq_ended = quantized.text(), time.perf_counter()
    stage("import")
    result = import_graph(quantized)
    result.texts = {"00-export": text, "01-insert-qdq": qdq_text}
    result.seconds = {
        "export": export_ended - began,
        "insert-qdq": qdq_ended - export_ended,
        "import": time.perf_counter() - qdq_ended,
    }
    return result
