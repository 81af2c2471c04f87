"""The meaning of every `qc` op: computed in f32 (f64 if an operand is f64), rounded once to the result's type."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from xdsl.ir import SSAValue

from qcompiler import formats
from qcompiler.errors import InterpreterError
from qcompiler.formats import cache_rows, int8_rows, integer_product
from qcompiler.ir import qc, row_statistics
from qcompiler.ir.interpreter_base import RULES, Array, Frame, accumulator, round_to, rule, where
from qcompiler.ir.interpreter_linalg import evaluate_body
from qcompiler.ir.qc_conv import numbers
from qcompiler.ir.qc_index import RouteOp, SampleOp, TopPOp
from qcompiler.ir.types import QTensorType, tensor_dtype
from qcompiler.plan.kinds.hadamard import scale_of
from qcompiler.plan.kinds.recurrent import GATES
from qcompiler.plan.kinds.top_p import SHARE_OF_ALL, WEIGHT_BITS
from qcompiler.plan.sample_rule import sample
from qcompiler.plan.torch_regions import TensorMemory, runner
from qcompiler.plan.weights import NUMPY_DTYPES

# --- values ----------------------------------------------------------------------------------------------------------


@rule(qc.ConstOp)
def _const(op: qc.ConstOp, _operands: Sequence[Array], frame: Frame) -> list[Array]:
    if op.key in frame.constants:
        return [frame.constants[op.key]]
    stored = frame.weights[op.key]
    if isinstance(op.result.type, QTensorType):
        layout = op.result.type.layout.layout_name.data
        if stored.format != op.result.type.format.ref or stored.layout != layout:
            found = f"{stored.format} in layout '{stored.layout}'"
            raise InterpreterError(
                f"{where(op)}: constant '{op.key}' is stored as {found}, the IR says {op.result.type}"
            )
        return [stored.data]
    if stored.format is None and stored.layout != "canonical":
        canonical = frame.canonical(None, stored.layout, stored.dtype, stored.shape, stored.data)
        return [round_to(canonical.view(NUMPY_DTYPES[stored.dtype]).reshape(stored.shape), stored.dtype)]
    return [round_to(stored.array(), stored.dtype)]


@rule(qc.DimOp)
def _dim(op: qc.DimOp, _operands: Sequence[Array], frame: Frame) -> list[Array]:
    text = op.expr.data
    return [np.asarray(frame.size(int(text) if text.isdigit() else text), np.int64)]


def _states(op: qc.StateOp | qc.StateUpdateOp, frame: Frame) -> Any:
    if frame.states is None or op.key not in frame.states:
        raise InterpreterError(f"{where(op)}: the state '{op.key}' has no value; pass it in `states`")
    return frame.states


@rule(qc.StateOp)
def _state(op: qc.StateOp, _operands: Sequence[Array], frame: Frame) -> list[Array]:
    return [_states(op, frame)[op.key]]


@rule(qc.StateUpdateOp)
def _state_update(op: qc.StateUpdateOp, operands: Sequence[Array], frame: Frame) -> list[Array]:
    _states(op, frame)
    if op.key in frame.updates:
        raise InterpreterError(f"{where(op)}: the state '{op.key}' is updated twice")
    frame.updates[op.key] = np.array(operands[0])
    return []


@rule(qc.CopyOp)
def _copy(_op: qc.CopyOp, operands: Sequence[Array], _frame: Frame) -> list[Array]:
    return [operands[0]]


# --- quantised values ------------------------------------------------------------------------------------------------


@rule(qc.QuantizeOp)
def _quantize(op: qc.QuantizeOp, operands: Sequence[Array], _frame: Frame) -> list[Array]:
    reference, layout = op.result.type.format.ref, op.result.type.layout.layout_name.data
    if layout != "canonical":
        raise InterpreterError(f"{where(op)}: quantize makes canonical bytes, not layout '{layout}'")
    fmt = formats.get(reference.name, **reference.params)
    return [np.asarray(fmt.encode(operands[0].astype(np.float32)).data)]


def plain(value: Array, type_: Any, frame: Frame) -> Array:
    """A weight's values: decoded to f32 if it is quantised, else unchanged."""
    return frame.decode(type_, value) if isinstance(type_, QTensorType) else value


@rule(qc.DequantizeOp)
def _dequantize(op: qc.DequantizeOp, operands: Sequence[Array], frame: Frame) -> list[Array]:
    return [round_to(plain(operands[0], op.input.type, frame), tensor_dtype(op.result.type))]


@rule(qc.QuantizeRowsOp)
def _quantize_rows(op: qc.QuantizeRowsOp, operands: Sequence[Array], _frame: Frame) -> list[Array]:
    columns = operands[1] if op.columns is not None else None
    largest = operands[-1] if op.largest is not None else None
    kind: int8_rows.Kind = op.kind.data  # type: ignore[assignment]
    return [int8_rows.quantise(operands[0], kind, op.value.value.data, columns, largest)]


@rule(qc.DequantizeRowsOp)
def _dequantize_rows(op: qc.DequantizeRowsOp, operands: Sequence[Array], frame: Frame) -> list[Array]:
    values = int8_rows.dequantise(operands[0], frame.shape(op.result.type)[-1])
    return [round_to(values, tensor_dtype(op.result.type))]


@rule(qc.HadamardOp)
def _hadamard(op: qc.HadamardOp, operands: Sequence[Array], _frame: Frame) -> list[Array]:
    block = op.block.value.data
    x = operands[0].astype(np.float32)
    width = 1
    while width < block:
        pairs = x.reshape(-1, 2, width)
        low, high = pairs[:, 0], pairs[:, 1]
        x = np.stack([low + high, low - high], 1)
        width *= 2
    scaled = x.reshape(operands[0].shape) * np.float32(scale_of(block))
    return [round_to(scaled, tensor_dtype(op.result.type))]


@rule(qc.QuantizeCacheOp)
def _quantize_cache(op: qc.QuantizeCacheOp, operands: Sequence[Array], _frame: Frame) -> list[Array]:
    return [cache_rows.quantise(operands[0], cache_rows.kind_of(op.kind.data))]


@rule(qc.DequantizeCacheOp)
def _dequantize_cache(op: qc.DequantizeCacheOp, operands: Sequence[Array], frame: Frame) -> list[Array]:
    values = cache_rows.dequantise(operands[0], frame.shape(op.result.type)[-1], cache_rows.kind_of(op.kind.data))
    return [round_to(values, tensor_dtype(op.result.type))]


# --- matmuls ---------------------------------------------------------------------------------------------------------


@rule(qc.LinearOp)
def _linear(op: qc.LinearOp, operands: Sequence[Array], frame: Frame) -> list[Array]:
    x, kept = _prologue(op, operands, frame) if op.prologue.blocks else (operands[0], [])
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    if op.multiplies_codes:
        assert isinstance(op.w.type, QTensorType)
        packed = frame.packed(op.w.type, operands[1])
        acc = np.dtype(np.float32)
        codes, scales = int8_rows.codes_of(rows, packed.cols), int8_rows.scales_of(rows, packed.cols)
        out = integer_product.multiply(codes, scales, packed).reshape(*x.shape[:-1], packed.rows)
    else:
        w = plain(operands[1], op.w.type, frame)
        acc = accumulator(x, w)
        rows = round_to(rows, tensor_dtype(op.w.type))
        out = (rows.astype(acc, copy=False) @ w.astype(acc, copy=False).T).reshape(*x.shape[:-1], w.shape[0])
    rest = list(operands[2 : len(operands) - len(op.affine)])
    if op.bias is not None:
        out = out + rest.pop(0).astype(acc, copy=False)
    if not op.epilogue.blocks:
        value = round_to(out, tensor_dtype(op.result.type))
    else:
        sums = np.split(out.astype(np.float32, copy=False), op.sums, axis=-1)
        value = np.broadcast_to(evaluate_body(op.epilogue.block, [*sums, *rest])[0], sums[0].shape)
    statistics = [] if op.statistics is None else [row_statistics.parts_of(value, op.statistics.data)]
    return [value, *kept, *statistics]


def _prologue(op: qc.LinearOp, operands: Sequence[Array], frame: Frame) -> tuple[Array, list[Array]]:
    """The rows that a linear multiplies, and those that it keeps. Each op of its prologue has its own rule."""
    given = [operands[0], *operands[len(operands) - len(op.affine) :]]
    known: dict[SSAValue, Array] = dict(zip(op.prologue.block.args, given, strict=True))
    for each in op.prologue.block.ops:
        if isinstance(each, qc.YieldOp):
            break
        known[each.results[0]] = RULES[type(each)](each, [known[value] for value in each.operands], frame)[0]
    rows, *kept = (known[value] for value in op.prologue.block.last_op.operands)  # type: ignore[union-attr]
    return rows, kept


@rule(qc.GroupedLinearOp)
def _grouped_linear(op: qc.GroupedLinearOp, operands: Sequence[Array], frame: Frame) -> list[Array]:
    index, experts = operands[2], op.experts.value.data
    outside = [int(i) for i in index if not 0 <= i < experts]
    if outside:
        raise InterpreterError(f"{where(op)}: there is no expert {outside[0]}; there are {experts}")
    sums = (_integer_sums_of_experts if op.multiplies_codes else _sums_of_experts)(op, operands, frame)
    if not op.epilogue.blocks:
        return [round_to(sums, tensor_dtype(op.result.type))]
    return [_experts_epilogue(op, sums.astype(np.float32, copy=False), operands[3:])]


def _sums_of_experts(op: qc.GroupedLinearOp, operands: Sequence[Array], frame: Frame) -> Array:
    """Products (pairs, N) of rows with the decoded weights of the experts that some pair chose."""
    index, repeat, w = operands[2], op.repeat.value.data, plain(operands[1], op.w.type, frame)
    x, acc = round_to(operands[0], tensor_dtype(op.w.type)), accumulator(operands[0], w)
    weights = w.astype(acc, copy=False).reshape(op.experts.value.data, -1, x.shape[1])
    out = np.zeros((len(index), weights.shape[1]), acc)
    for expert in sorted({int(i) for i in index}):
        pairs = np.flatnonzero(index == expert)
        out[pairs] = x[pairs // repeat].astype(acc, copy=False) @ weights[expert].T
    return out


def _integer_sums_of_experts(op: qc.GroupedLinearOp, operands: Sequence[Array], frame: Frame) -> Array:
    """Products (pairs, N) of int8 rows with the experts that some pair chose, one expert after the other."""
    x, weight, index = operands[:3]
    assert isinstance(op.w.type, QTensorType)
    packed, repeat = frame.packed(op.w.type, weight), op.repeat.value.data
    codes, scales = int8_rows.codes_of(x, packed.cols), int8_rows.scales_of(x, packed.cols)
    width = packed.rows // op.experts.value.data
    out = np.zeros((len(index), width), np.float32)
    for expert in sorted({int(i) for i in index}):
        pairs = np.flatnonzero(index == expert)
        rows = pairs // repeat
        of_expert = (expert * width, (expert + 1) * width)
        out[pairs] = integer_product.multiply(codes[rows], scales[rows], packed, of_expert)
    return out


def _experts_epilogue(op: qc.GroupedLinearOp, sums: Array, rest: Sequence[Array]) -> Array:
    """What the regions of a grouped linear make of the fp32 sums of its pairs."""
    if op.count is None:
        halves = np.split(sums, 2, axis=1)
        return np.broadcast_to(evaluate_body(op.epilogue.block, halves)[0], halves[0].shape)
    weights, by_row = rest[0], sums.reshape(-1, op.count, sums.shape[1])
    total = np.zeros((len(by_row), sums.shape[1]), np.float32)
    for place in range(op.count):
        total = evaluate_body(op.mix.block, [by_row[:, place], weights[:, place, None], total])[0]
    return np.broadcast_to(evaluate_body(op.epilogue.block, [total, *rest[1:]])[0], total.shape)


@rule(qc.RecurrentOp)
def _recurrent(op: qc.RecurrentOp, operands: Sequence[Array], frame: Frame) -> list[Array]:
    named = {"x": operands[0], "w": plain(operands[1], op.w.type, frame), "start": operands[2]}
    present = [name for name in ("projection", "bias", "cell_start") if getattr(op, name) is not None]
    named.update(zip(present, operands[3:], strict=True))
    if op.projection is not None:
        named["projection"] = plain(named["projection"], op.projection.type, frame)
    acc, kind = accumulator(named["x"], named["w"]), op.kind.data
    x, w = named["x"].astype(acc), named["w"].astype(acc)
    bias = named["bias"].astype(acc) if "bias" in named else acc.type(0)
    types = {name: tensor_dtype(value.type) for name, value in zip(op.result_names, op.results, strict=True)}
    last = {"out": named["start"]}
    if "cell_start" in named:
        last["cell"] = named["cell_start"]
    if "projection" in named:
        last["room"] = np.zeros((x.shape[1], op.hidden), np.float32)
    states = np.empty((*x.shape[:2], w.shape[1]), last["out"].dtype)
    for t in reversed(range(len(x))) if op.reverse is not None else range(len(x)):
        before = last["out"].astype(acc)
        share = np.split(before @ w.T + bias, GATES[kind], axis=1)
        gates = np.split(x[t], GATES[kind], axis=1)
        if kind == "lstm":
            i, f, u, o = (g + s for g, s in zip(gates, share, strict=True))
            cell = _logistic(f) * last["cell"].astype(acc) + _logistic(i) * np.tanh(u)
            last["cell"] = round_to(cell, types["cell"])
            new = _logistic(o) * np.tanh(last["cell"].astype(acc))
        elif kind == "gru":
            r, z = (_logistic(g + s) for g, s in zip(gates[:2], share[:2], strict=True))
            n = np.tanh(gates[2] + r * share[2])
            new = n + z * (before - n)
        else:
            new = np.tanh(gates[0] + share[0]) if kind == "tanh" else np.maximum(gates[0] + share[0], 0)
        if "projection" in named:
            last["room"] = round_to(new, "f32")
            new = new @ named["projection"].astype(acc).T
        last["out"] = states[t] = round_to(new, types["out"])
    return [states, *(last[name] for name in op.result_names[1:])]


def _logistic(x: Array) -> Array:
    """1 / (1 + exp(-x)), computed without overflow."""
    small: Array = np.exp(-np.abs(x))
    share: Array = np.where(x >= 0, 1, small) / (1 + small)
    return share


@rule(qc.BatchMatmulOp)
def _batch_matmul(op: qc.BatchMatmulOp, operands: Sequence[Array], _frame: Frame) -> list[Array]:
    a, b = operands
    acc = accumulator(a, b)
    return [round_to(np.matmul(a.astype(acc, copy=False), b.astype(acc, copy=False)), tensor_dtype(op.result.type))]


@rule(qc.Conv2dOp)
def _conv2d(op: qc.Conv2dOp, operands: Sequence[Array], frame: Frame) -> list[Array]:
    w = plain(operands[1], op.w.type, frame)
    x, acc = round_to(operands[0], tensor_dtype(op.w.type)), accumulator(operands[0], w)
    (sh, sw), (dh, dw) = (tuple(int(v) for v in p.get_values()) for p in (op.strides, op.dilation))
    top, left, bottom, right = (int(v) for v in op.padding.get_values())
    groups, (out_channels, depth, kh, kw) = op.groups.value.data, w.shape
    padded = np.pad(x.astype(acc, copy=False), ((0, 0), (0, 0), (top, bottom), (left, right)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (dh * (kh - 1) + 1, dw * (kw - 1) + 1), axis=(2, 3))
    windows = windows[:, :, ::sh, ::sw, ::dh, ::dw]  # (B, C, H', W', kh, kw)
    batch, _, height, width = windows.shape[:4]
    patches = windows.reshape(batch, groups, depth, height, width, kh, kw).transpose(1, 0, 3, 4, 2, 5, 6)
    patches = patches.reshape(groups, batch * height * width, depth * kh * kw)
    kernels = w.astype(acc, copy=False).reshape(groups, out_channels // groups, depth * kh * kw)
    out = np.matmul(patches, kernels.transpose(0, 2, 1)).reshape(groups, batch, height, width, out_channels // groups)
    out = out.transpose(1, 0, 4, 2, 3).reshape(batch, out_channels, height, width)
    if op.bias is not None:
        out = out + operands[2].astype(acc, copy=False)[:, None, None]
    return [round_to(out, tensor_dtype(op.result.type))]


@rule(qc.WindowsOp)
def _windows(op: qc.WindowsOp, operands: Sequence[Array], _frame: Frame) -> list[Array]:
    (sh, sw), (dh, dw), (kh, kw) = (numbers(p) for p in (op.strides, op.dilation, op.kernel))
    top, left, bottom, right = numbers(op.padding)
    if op.channels is not None:
        made = int8_rows.windows(
            operands[0], op.depth, kernel=(kh, kw), strides=(sh, sw), padding=(top, left, bottom, right),
            dilation=(dh, dw),
        )  # fmt: skip
        return [made]
    padded = np.pad(operands[0], ((0, 0), (top, bottom), (left, right), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (dh * (kh - 1) + 1, dw * (kw - 1) + 1), axis=(1, 2))
    windows = windows[:, ::sh, ::sw, :, ::dh, ::dw].transpose(0, 1, 2, 4, 5, 3)  # (B, H', W', kh, kw, C)
    return [windows.reshape(*windows.shape[:3], -1)]


# --- norms -----------------------------------------------------------------------------------------------------------


@rule(qc.LayerNormOp)
def _layer_norm(op: qc.LayerNormOp, operands: Sequence[Array], _frame: Frame) -> list[Array]:
    acc = accumulator(operands[0])
    x, *affine = (value.astype(acc, copy=False) for value in operands)
    if op.statistics is not None:
        mean, variance = row_statistics.mean_and_square(operands[-1], "layer", x.shape[-1])
        centred = x - mean
    else:
        centred = x - x.mean(axis=-1, keepdims=True, dtype=acc)
        variance = np.square(centred).mean(axis=-1, keepdims=True, dtype=acc)
    out = centred / np.sqrt(variance + acc.type(op.eps.value.data))
    if op.weight is not None:
        out = out * affine.pop(0)
    if op.bias is not None:
        out = out + affine.pop(0)
    return [_normed(out, op, operands)]


def _normed(out: Array, op: qc.LayerNormOp | qc.RmsNormOp, operands: Sequence[Array]) -> Array:
    """The result of a norm, rounded, and of its addition to a residual, rounded again."""
    dtype = tensor_dtype(op.result.type)
    out = round_to(out, dtype)
    if op.residual is None:
        return out
    acc = accumulator(operands[0])
    return round_to(operands[-1].astype(acc, copy=False) + out.astype(acc, copy=False), dtype)


@rule(qc.RmsNormOp)
def _rms_norm(op: qc.RmsNormOp, operands: Sequence[Array], _frame: Frame) -> list[Array]:
    acc = accumulator(operands[0])
    x, *affine = (value.astype(acc, copy=False) for value in operands)
    if op.statistics is not None:
        _, mean = row_statistics.mean_and_square(operands[-1], "rms", x.shape[-1])
    else:
        mean = np.square(x).mean(axis=-1, keepdims=True, dtype=acc)
    out = x / np.sqrt(mean + acc.type(op.eps.value.data))
    if op.weight is not None:
        out = out * affine.pop(0)
    return [_normed(out, op, operands)]


@rule(qc.SoftmaxOp)
def _softmax(op: qc.SoftmaxOp, operands: Sequence[Array], _frame: Frame) -> list[Array]:
    return [round_to(_shares(operands[0], op.axis.value.data), tensor_dtype(op.result.type))]


def _shares(operand: Array, axis: int) -> Array:
    """Softmax, not rounded."""
    acc = accumulator(operand)
    x = operand.astype(acc, copy=False)
    powers = np.exp(x - x.max(axis=axis, keepdims=True, initial=-np.inf))
    return np.asarray(powers / powers.sum(axis=axis, keepdims=True, dtype=acc))


# --- positions -------------------------------------------------------------------------------------------------------


@rule(qc.RopeOp)
def _rope(op: qc.RopeOp, operands: Sequence[Array], _frame: Frame) -> list[Array]:
    acc = accumulator(*operands)
    x, cos, sin = (value.astype(acc, copy=False) for value in operands)
    if op.interleaved is not None:
        rotated = np.stack([-x[..., 1::2], x[..., 0::2]], axis=-1).reshape(x.shape)
    else:
        half = x.shape[-1] // 2
        rotated = np.concatenate([-x[..., half:], x[..., :half]], axis=-1)
    return [round_to(x * cos + rotated * sin, tensor_dtype(op.result.type))]


def _checked(op: Any, index: Array, length: int, *, from_end: bool) -> Array:
    """Indices as numbers in [0, length). Negative ones count from the end if `from_end` is set."""
    positive = np.where(index < 0, index + length, index) if from_end else index
    bad = (positive < 0) | (positive >= length)
    if bad.any():
        raise InterpreterError(f"{where(op)}: index {int(index[bad][0])} is out of range for {length} entries")
    return positive.astype(np.int64)


@rule(qc.EmbeddingOp)
def _embedding(op: qc.EmbeddingOp, operands: Sequence[Array], frame: Frame) -> list[Array]:
    table = plain(operands[1], op.table.type, frame)
    ids = _checked(op, operands[0], table.shape[0], from_end=False)
    return [round_to(table[ids], tensor_dtype(op.result.type))]


@rule(qc.GatherOp)
def _gather(op: qc.GatherOp, operands: Sequence[Array], _frame: Frame) -> list[Array]:
    axis = op.axis.value.data
    index = _checked(op, operands[1], operands[0].shape[axis], from_end=True)
    if op.mode.data == "take":
        return [np.take(operands[0], index, axis=axis)]
    x = operands[0][tuple(slice(None) if i == axis else slice(0, n) for i, n in enumerate(index.shape))]
    return [np.take_along_axis(x, index, axis=axis)]


_FOLDS: dict[str, np.ufunc] = {
    "add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum, "logaddexp": np.logaddexp,
}  # fmt: skip


@rule(qc.ScatterOp)
def _scatter(op: qc.ScatterOp, operands: Sequence[Array], _frame: Frame) -> list[Array]:
    """One step for each entry along the axis: equal indices apply in order, and each step rounds."""
    x, raw, src = operands
    axis, dtype = op.axis.value.data, tensor_dtype(op.result.type)
    index = _checked(op, raw, x.shape[axis], from_end=True)
    values = src[tuple(slice(0, n) for n in index.shape)]
    out = np.array(x)
    for i in range(index.shape[axis]):
        step = tuple(slice(i, i + 1) if n == axis else slice(None) for n in range(index.ndim))
        at: list[Array] = list(np.indices(index[step].shape, sparse=True))
        at[axis] = index[step]
        if op.reduce.data == "none":
            out[tuple(at)] = values[step]
        else:
            acc = np.dtype(np.bool_) if dtype == "i1" else accumulator(x) if x.dtype.kind not in "iu" else x.dtype
            before, after = (v.astype(acc, copy=False) for v in (out[tuple(at)], values[step]))
            with np.errstate(over="ignore"):
                out[tuple(at)] = round_to(_FOLDS[op.reduce.data](before, after), dtype)
    return [out]


@rule(qc.IndexUpdateOp)
def _index_update(op: qc.IndexUpdateOp, operands: Sequence[Array], _frame: Frame) -> list[Array]:
    out, axis = np.array(operands[0]), op.axis.value.data
    index = _checked(op, operands[1], out.shape[axis], from_end=False)
    out[(slice(None),) * axis + (index,)] = operands[2]
    return [out]


# --- scans and orders ------------------------------------------------------------------------------------------------


@rule(qc.CumsumOp)
def _cumsum(op: qc.CumsumOp, operands: Sequence[Array], _frame: Frame) -> list[Array]:
    dtype = tensor_dtype(op.result.type)
    result = round_to(np.empty(0), dtype).dtype
    acc = result if result.kind in "iu" else accumulator(operands[0])
    values = operands[0].astype(acc, copy=False)
    with np.errstate(over="ignore", invalid="ignore"):
        return [round_to(_FOLDS[op.fold].accumulate(values, axis=op.axis.value.data, dtype=acc), dtype)]


def _order(x: Array, axis: int, *, descending: bool) -> Array:
    """Stable order; NaN counts as the largest value."""
    keys = x.astype(np.float32) if x.dtype.kind == "V" or x.dtype == np.float16 else x
    if not descending:
        return np.argsort(keys, axis=axis, kind="stable")
    mirrored = np.argsort(np.flip(keys, axis), axis=axis, kind="stable")
    return np.flip(x.shape[axis] - 1 - mirrored, axis)


@rule(qc.SortOp)
def _sort(op: qc.SortOp, operands: Sequence[Array], _frame: Frame) -> list[Array]:
    axis = op.axis.value.data
    order = _order(operands[0], axis, descending=bool(op.descending.value.data))
    return [np.take_along_axis(operands[0], order, axis), order.astype(np.int64)]


@rule(qc.TopkOp)
def _topk(op: qc.TopkOp, operands: Sequence[Array], _frame: Frame) -> list[Array]:
    return list(_largest(operands[0], op.k.value.data, op.axis.value.data))


def _largest(x: Array, k: int, axis: int) -> tuple[Array, Array]:
    """The `k` largest entries along an axis, and their places."""
    order = np.take(_order(x, axis, descending=True), range(k), axis=axis)
    return np.take_along_axis(x, order, axis), order.astype(np.int64)


@rule(RouteOp)
def _route(op: RouteOp, operands: Sequence[Array], _frame: Frame) -> list[Array]:
    scores = operands[0].astype(accumulator(operands[0]), copy=False)
    of_all = op.kind_of_scores == "all"
    weights, indices = _largest(_shares(scores, -1) if of_all else scores, op.k.value.data, -1)
    if not of_all:
        weights = _shares(weights, -1)
    if op.normalise is not None:
        with np.errstate(invalid="ignore"):
            weights = weights / np.add.accumulate(weights, axis=-1)[..., -1:]
    return [round_to(weights, tensor_dtype(op.weights.type)), indices]


@rule(qc.ArgmaxOp)
def _argmax(op: qc.ArgmaxOp, operands: Sequence[Array], _frame: Frame) -> list[Array]:
    x = operands[0]
    keys = x.astype(np.float32) if x.dtype.kind == "V" else x
    return [np.argmax(keys, axis=op.axis.value.data).astype(np.int64)]


@rule(TopPOp)
def _top_p(op: TopPOp, operands: Sequence[Array], _frame: Frame) -> list[Array]:
    """By sorting, and with integers of any size."""
    x, top, draw = (operand.astype(np.float32) for operand in operands)
    weights = np.where(x > 0, np.minimum(x, 1), 0) * np.float32(2**WEIGHT_BITS)
    shares = [
        (np.fmin(np.fmax(each, 0), 1) * np.float32(SHARE_OF_ALL)).astype(np.int64).reshape(-1) for each in (top, draw)
    ]
    found = np.zeros(shares[0].size, dtype=np.int64)
    for row, values in enumerate(weights.astype(np.int64).reshape(-1, x.shape[-1])):
        falling = np.sort(values)[::-1]
        sums = np.cumsum(falling)
        if sums[-1] == 0:
            continue
        wanted = max(int(sums[-1]) * int(shares[0][row]) // SHARE_OF_ALL, 1)
        kept = np.cumsum(np.where(values >= falling[np.argmax(sums >= wanted)], values, 0))
        beyond = int(kept[-1]) * min(int(shares[1][row]), SHARE_OF_ALL - 1) // SHARE_OF_ALL
        found[row] = np.argmax(kept > beyond)
    return [found.reshape(x.shape[:-1])]


@rule(SampleOp)
def _sample(_op: SampleOp, operands: Sequence[Array], _frame: Frame) -> list[Array]:
    x, how, tallies, bias = operands
    return [sample(x, how, tallies, bias)]


# --- what is left to torch -------------------------------------------------------------------------------------------


@rule(qc.TorchCallOp)
def _torch_call(op: qc.TorchCallOp, operands: Sequence[Array], frame: Frame) -> list[Array]:
    """Calls torch: the one op whose meaning is not defined here. MissingDependencyError without torch."""
    sizes = [frame.size(size) for size in op.size_dims]
    kinds = [tensor_dtype(value.type) for value in (*op.inputs, *op.outputs)]
    stored = [NUMPY_DTYPES[kind] for kind in kinds]
    inputs = [np.ascontiguousarray(x, kind).reshape(x.shape) for x, kind in zip(operands, stored, strict=False)]
    results = [
        np.empty(frame.shape(value.type), kind) for value, kind in zip(op.outputs, stored[len(inputs) :], strict=True)
    ]
    places = [
        TensorMemory(address=x.__array_interface__["data"][0], dtype=kind, shape=x.shape, written=number >= len(inputs))
        for number, (x, kind) in enumerate(zip((*inputs, *results), kinds, strict=True))
    ]
    runner().prepare(op.record).on_host(sizes, places[: len(inputs)], places[len(inputs) :])
    return [round_to(x, kind) for x, kind in zip(results, kinds[len(inputs) :], strict=True)]
