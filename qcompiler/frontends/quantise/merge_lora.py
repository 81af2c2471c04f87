"""`qc.merge_lora`: an adapter's low-rank update added to quantised weights, which stay quantised.

    rows    W = decode(codes)          M = W + scaling * B @ A          codes' = encode(M)

Rows are decoded, updated (in fp64, rounded once) and encoded a few at a time (formats/made.py), so no matrix is ever
complete in floating point.  Formats with statistics of the whole tensor read their rows twice.  All code is NumPy: no
GPU and no special instruction is needed.

Encoding again rounds again, and the report gives the error.  An update that is small beside the format's step is lost;
such an adapter should be kept apart, or merged before the weights are quantised.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from qcompiler.errors import AdapterError, ArgumentError, FormatShapeError, FormatValueError, MergeError
from qcompiler.formats import PackedTensor
from qcompiler.formats.made import MadeMatrix
from qcompiler.frontends.quantise.lora_adapter import LoraLayer, listed, read_adapter
from qcompiler.frontends.quantise.stored_places import Matrix, StoredPlace, places_of
from qcompiler.plan.moved import UNKNOWN, moved_of, why_moved
from qcompiler.plan.weights import NUMPY_DTYPES
from qcompiler.runtime.encoder import encode_made
from qcompiler.runtime.image import ProgramImage
from qcompiler.runtime.loaded import LoadedProgram
from qcompiler.runtime.memory import Block, file_bytes
from qcompiler.runtime.progress import Progress
from qcompiler.runtime.repack import IN_MEMORY

if TYPE_CHECKING:
    from qcompiler.program import Program

Values = npt.NDArray[np.float32]


@dataclass(frozen=True)
class LayerMerge:
    """The result of merging one weight.

    `error` is ||Q - M|| / ||M||, with Q the stored result and M the exact sum.  `kept` is ||Q - W|| / ||D|| and
    `cosine`
    the cosine of the angle between Q - W and D, with W the old weight and D = M - W.  Both are 1 if the update is fully
    kept; a cosine near 0 means that the change is rounding and not the update.  If D is zero, `kept` is 1.
    """

    path: str
    format: str
    shape: tuple[int, int]
    rank: int
    error: float
    kept: float
    cosine: float


@dataclass(frozen=True)
class MergeReport:
    """A row for each merged weight; `str` is the table."""

    layers: tuple[LayerMerge, ...]

    def __str__(self) -> str:
        width = max([len("weight"), *(len(row.path) for row in self.layers)])
        lines = [f"{'weight':<{width}}  {'format':<24} {'rank':>4} {'error':>9} {'kept':>6} {'cosine':>6}"]
        for row in self.layers:
            lines.append(
                f"{row.path:<{width}}  {row.format:<24} {row.rank:>4} {row.error:>9.2e} {row.kept:>6.3f} "
                f"{row.cosine:>6.3f}"
            )
        return "\n".join(lines)


class Merged(NamedTuple):
    """The new weights, in the container of the input, and the report of the merge."""

    weights: Any
    report: MergeReport


def merge_lora(
    weights: Mapping[str, Matrix] | Program | LoadedProgram,
    adapter: str | Path | Mapping[str, Any],
    *,
    config: Mapping[str, Any] | None = None,
    threshold: float | None = None,
) -> Merged:
    """Merges a LoRA or DoRA adapter of PEFT into weights: ``weights, report = qc.merge_lora(weights, "adapter/")``.

    `weights` is a mapping of module paths (or paths of their weights) to `PackedTensor`s, or to arrays of floats in the
    model's shape: (out, in), or (in, out) for an embedding and where the adapter's config says `fan_in_fan_out`.  Their
    columns are in the model's order; those of a GPTQ file with act-order are not.  The result is a dictionary with all
    of them; those that the adapter does not name are unchanged.  Or `weights` is a program, compiled or loaded; then
    the result is a `LoadedProgram` on its devices with weights of its own, which can be run and saved.  The inputs are
    not changed.

    `adapter` is a folder with adapter_config.json and adapter_model.safetensors, or the tensors (of NumPy or torch)
    with the config as `config`.  `threshold` is the largest relative error ||Q - M|| / ||M|| that a layer may have.

    Errors: AdapterError for an adapter of another kind; one AdapterError lists all targets that do not exist, have
    other shapes, or have other values in the program than in the model (a rewrite moved them); MergeError, with the
    report as `report`, lists the layers beyond the threshold.
    """
    if threshold is not None and not threshold > 0:
        raise ArgumentError(f"threshold={threshold!r}: the largest relative error of a layer is a number above 0")
    layers = read_adapter(adapter, config)
    image = getattr(weights, "image", None)
    if isinstance(image, ProgramImage):
        return _merge_program(weights, image, layers, threshold)
    if not isinstance(weights, Mapping):
        raise ArgumentError(
            f"merge_lora takes a mapping of module paths to PackedTensors, or a program; not {type(weights).__name__}"
        )
    problems: list[str] = []
    found: list[tuple[LoraLayer, Matrix]] = []
    names: dict[str, str] = {}
    for layer in layers:
        name = next((n for n in (layer.path, f"{layer.path}.weight") if n in weights), None)
        if name is None:
            problems.append(f"'{layer.path}' is not among the weights")
        elif (wrong := _unfit(weights[name])) is not None:
            problems.append(f"'{layer.path}' {wrong}")
        else:
            found.append((layer, weights[name]))
            names[layer.path] = name
    _check_shapes(found, problems, outputs_first=False)
    merged, report = _merge_all(found, threshold, outputs_first=False)
    return Merged({**weights, **{names[path]: matrix for path, matrix in merged.items()}}, report)


def _unfit(matrix: Any) -> str | None:
    if isinstance(matrix, PackedTensor):
        return None
    if isinstance(matrix, np.ndarray) and matrix.ndim == 2 and matrix.dtype in _FLOATS:
        return None
    return f"is {type(matrix).__name__}, and not a PackedTensor or a matrix of floats"


_FLOATS = tuple(NUMPY_DTYPES[name] for name in ("f32", "bf16", "f16", "f64"))


def _check_shapes(found: list[tuple[LoraLayer, Matrix]], problems: list[str], *, outputs_first: bool) -> None:
    """AdapterError listing every mismatch."""
    for layer, matrix in found:
        shape, mine = layer.shape(outputs_first=outputs_first), _shape(matrix)
        if shape != mine:
            problems.append(f"'{layer.path}' is {mine[0]} x {mine[1]}, and the adapter's is {shape[0]} x {shape[1]}")
    if problems:
        raise AdapterError(f"the adapter does not fit the weights: {listed(problems)}")


def _shape(matrix: Matrix) -> tuple[int, int]:
    return (matrix.rows, matrix.cols) if isinstance(matrix, PackedTensor) else (matrix.shape[0], matrix.shape[1])


# --- one weight ------------------------------------------------------------------------------------------------------


def _merge_all(
    found: list[tuple[LoraLayer, Matrix]], threshold: float | None, *, outputs_first: bool
) -> tuple[dict[str, Matrix], MergeReport]:
    merged: dict[str, Matrix] = {}
    rows = []
    with Progress("merging", sum(4 * _shape(matrix)[0] * _shape(matrix)[1] for _, matrix in found)) as progress:
        for layer, matrix in found:
            merged[layer.path], row = _merge(layer, matrix, outputs_first=outputs_first)
            rows.append(row)
            progress.step(4 * row.shape[0] * row.shape[1])
    report = MergeReport(tuple(rows))
    beyond = [row for row in rows if threshold is not None and not row.error <= threshold]
    if beyond:
        raise MergeError(
            f"{len(beyond)} of {len(rows)} layers would be off by more than {threshold:g} of their norm: "
            + listed(f"'{row.path}' ({row.format}) by {row.error:.3g}" for row in beyond)
            + ". Choose a format of more bits for them, keep the adapter apart, or raise the threshold",
            report=report,
        )
    return merged, report


def _merge(layer: LoraLayer, matrix: Matrix, *, outputs_first: bool) -> tuple[Matrix, LayerMerge]:
    rows, cols = _shape(matrix)
    before = _reader(matrix)
    made = MadeMatrix(rows, cols, merged_rows(layer, before, rows, cols, outputs_first=outputs_first))
    after: Matrix
    if isinstance(matrix, PackedTensor):
        try:
            after = encode_made(matrix.format, made)
        except (FormatValueError, FormatShapeError) as refused:
            raise type(refused)(f"'{layer.path}', merged: {refused}") from refused
    else:
        after = np.empty_like(matrix, order="C")
        for first in range(0, rows, made.piece // cols):
            stop = min(first + made.piece // cols, rows)
            after[first:stop] = made.rows(first, stop)
    text = str(matrix.format) if isinstance(matrix, PackedTensor) else str(matrix.dtype)
    error, kept, cosine = _figures(before, made, _reader(after))
    return after, LayerMerge(layer.path, text, (rows, cols), layer.a.shape[0], error, kept, cosine)


def _reader(matrix: Matrix) -> Callable[[int, int], Values]:
    """Reads rows [first, stop) in fp32."""
    if isinstance(matrix, PackedTensor):
        packed = matrix
        return lambda first, stop: packed.format.decode_rows(packed, first, stop)
    array = matrix
    return lambda first, stop: array[first:stop].astype(np.float32)


def merged_rows(
    layer: LoraLayer, before: Callable[[int, int], Values], rows: int, cols: int, *, outputs_first: bool
) -> Callable[[int, int], Values]:
    """Rows [first, stop) of the exact sum, computed in fp64 and rounded to fp32 once."""
    delta = layer.delta(outputs_first=outputs_first)

    def plain(first: int, stop: int) -> npt.NDArray[np.float64]:
        total = delta(first, stop)
        total += before(first, stop)
        return total

    if layer.magnitude is None:
        return lambda first, stop: _float32(plain(first, stop))
    magnitude = layer.magnitude.astype(np.float64)
    by_column = layer.is_transposed(outputs_first=outputs_first)
    if by_column:  # an output is a column: its norm takes a pass over all rows
        magnitude = magnitude / _column_norms(plain, rows, cols)

    def scaled(first: int, stop: int) -> Values:
        total = plain(first, stop)
        if by_column:
            total *= magnitude
        else:
            total *= (magnitude[first:stop] / _norms(np.square(total).sum(1)))[:, None]
        return _float32(total)

    return scaled


def _float32(total: npt.NDArray[np.float64]) -> Values:
    """Rounded once; values beyond fp32's range become infinite, which encoders refuse with the element's position."""
    with np.errstate(over="ignore"):
        return total.astype(np.float32)


def _column_norms(
    plain: Callable[[int, int], npt.NDArray[np.float64]], rows: int, cols: int
) -> npt.NDArray[np.float64]:
    squares, step = np.zeros(cols), max(1, (1 << 20) // cols)
    for first in range(0, rows, step):
        squares += np.square(plain(first, min(first + step, rows))).sum(0)
    return _norms(squares)


def _norms(squares: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Square roots; infinite for an output without weights, which has no direction, so that it stays 0."""
    return np.where(squares > 0, np.sqrt(squares), np.inf)


def _figures(
    before: Callable[[int, int], Values], made: MadeMatrix, after: Callable[[int, int], Values]
) -> tuple[float, float, float]:
    """(error, kept, cosine), see `LayerMerge`."""
    missed = norm = delta = change = both = 0.0
    rows, step = made.shape[0], made.piece // made.shape[1]
    for first in range(0, rows, step):
        stop = min(first + step, rows)
        exact, old, new = (part(first, stop).astype(np.float64) for part in (made.rows, before, after))
        missed += float(np.square(new - exact).sum())
        norm += float(np.square(exact).sum())
        exact -= old
        new -= old
        delta, change = delta + float(np.square(exact).sum()), change + float(np.square(new).sum())
        both += float((exact * new).sum())
    error = (missed / norm) ** 0.5 if norm else 0.0 if missed == 0 else float("inf")
    if delta == 0:
        return error, 1.0, 1.0
    return error, (change / delta) ** 0.5, both / (delta * change) ** 0.5 if change else 0.0


# --- programs --------------------------------------------------------------------------------------------------------


def _merge_program(program: Any, image: ProgramImage, layers: list[LoraLayer], threshold: float | None) -> Merged:
    """Merges into a program. Its linears are stored (out, in), whatever the model has.

    W + B A is another sum where the program's matrix is W S or W R: a moved weight is refused, and so is one whose bias
    was corrected for the codes that the merge replaces.
    """
    image.require_values()
    if moved_of(image.plan) is None:
        raise AdapterError(f"an adapter is merged into the weights that it was trained for, and {UNKNOWN}")
    by_parameter = places_of(image.plan)
    stored = Counter(parameter for entry in image.plan.weights for parameter in entry.paths)
    problems: list[str] = []
    places: list[tuple[LoraLayer, StoredPlace]] = []
    for layer in layers:
        path = _path_in(layer.path, by_parameter)
        place = by_parameter.get(f"{path}.weight")
        if place is None:
            problems.append(f"'{layer.path}' is not among the program's weights")
            continue
        entry, tied = place.entry, place.entry.named[place.number].parameters
        if len(tied) > 1:
            problems.append(f"'{layer.path}' is stored once for {' and '.join(tied)} (tied weights)")
        elif moved := why_moved(image.plan, (f"{path}.weight", f"{path}.bias")):
            problems.append(f"'{layer.path}' is not what the adapter was trained for: {moved}; {_INTO_THE_MODEL}")
        elif stored[f"{path}.weight"] > 1:
            times = stored[f"{path}.weight"]
            problems.append(f"'{layer.path}' is stored {times} times, in the order of each reader; {_INTO_THE_MODEL}")
        elif len(entry.shape) != 2 or entry.dtype not in ("f32", "bf16", "f16"):
            problems.append(f"'{layer.path}' is stored as {list(entry.shape)} of {entry.dtype}, no matrix of floats")
        else:
            places.append((layer, place))
    found = [(layer, place.read(image.weights)) for layer, place in places]
    _check_shapes(found, problems, outputs_first=True)
    merged, report = _merge_all(found, threshold, outputs_first=True)
    arena = file_bytes(image.weights.nbytes) if image.weights.nbytes > IN_MEMORY else Block(image.weights.nbytes).bytes
    arena[...] = image.weights
    for layer, place in places:
        place.write(merged[layer.path], arena)
    names = {place.entry.name for _, place in places}
    directory = tuple(msgspec.structs.replace(e, sha256=()) if e.name in names else e for e in image.plan.weights)
    plan = msgspec.structs.replace(image.plan, weights=directory)
    made = replace(image, plan=plan, weights=arena, native=())
    return Merged(LoadedProgram.from_image(made, devices=program.devices), report)


_INTO_THE_MODEL = "merge into the model and compile that"


def _path_in(path: str, by_parameter: Mapping[str, Any]) -> str:
    """The parameter of a path. A program may wrap the adapter's base model or be a part of it: one prefix may
    differ."""
    if f"{path}.weight" in by_parameter:
        return path
    ends = [p for p in by_parameter if p.endswith(f".{path}.weight")]
    if len(ends) == 1:
        return ends[0].removesuffix(".weight")
    inner = path.partition(".")[2]
    return inner if inner and f"{inner}.weight" in by_parameter else path


__all__ = ["LayerMerge", "MergeReport", "Merged", "merge_lora"]
