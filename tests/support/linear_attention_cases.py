"""Specs, operands and float64 answers of `linear_attention`, for the tests of both targets."""

from __future__ import annotations

from typing import Any

import numpy as np

from qcompiler.plan.dims import Dim
from qcompiler.plan.kernel import Access, DType, KernelSpec, Operand
from qcompiler.plan.kinds.linear_attention import LinearAttentionKernel

SLOTS, HEADS, GROUPS = 4, 6, 3

FORMS: dict[str, dict[str, Any]] = {
    "mamba": {"width": 1, "depth": 16, "has_rate": True},
    "mamba 2": {"width": 5, "depth": 19},
    "delta rule": {"width": 7, "depth": 48, "has_beta": True},
    "delta rule, columns": {"width": 3, "depth": 130, "has_beta": True, "decays_columns": True},
    "one column": {"width": 2, "depth": 1, "has_beta": True, "has_rate": True},
}
"""Widths and depths that end inside of vectors and of groups of lanes, and the options of each architecture."""

LARGE: dict[str, dict[str, Any]] = {
    "heads in parts": {"width": 40, "depth": 128, "has_beta": True},
    "rows in memory": {"width": 5, "depth": 400, "has_beta": True, "decays_columns": True},
    "one row, columns": {"width": 1, "depth": 20, "decays_columns": True},
}
"""Forms that the templates of the CPU take apart in other ways."""


def spec(name: str, form: str, *, batch: Dim = "b", steps: Dim = "t", apart: int = 1) -> KernelSpec:
    """`apart`: the step between the elements of values."""
    body = LinearAttentionKernel(
        slots=SLOTS, batch=batch, steps=steps, heads=HEADS, groups=GROUPS, **(FORMS | LARGE)[form]
    )
    last = body.depth if body.decays_columns else 1
    values = (batch, steps, HEADS, body.width)
    operands = [
        _operand("state", (SLOTS, HEADS, body.width, body.depth), "rw"),
        _operand("query", (batch, steps, GROUPS, body.depth)), _operand("key", (batch, steps, GROUPS, body.depth)),
        _operand("value", values, apart=apart), _operand("decay", (batch, steps, HEADS, last)),
        _operand("first", (batch,), dtype="i64"), _operand("counts", (batch,), dtype="i64"),
        *([_operand("rate", (HEADS, body.depth))] if body.has_rate else []),
        *([_operand("beta", (batch, steps, HEADS))] if body.has_beta else []),
        _operand("out", values, "w"),
    ]  # fmt: skip
    symbols = tuple(sorted({size for size in (batch, steps) if isinstance(size, str)}))
    return KernelSpec(name=name, symbols=symbols, operands=tuple(operands), body=body)


def _operand(
    name: str, shape: tuple[Dim, ...], access: Access = "r", *, dtype: DType = "f32", apart: int = 1
) -> Operand:
    strides: list[Dim] = [apart]
    for size in reversed(shape[1:]):
        strides.insert(0, _times(strides[0], size))
    return Operand(name=name, dtype=dtype, access=access, shape=shape, strides=tuple(strides))


def _times(a: Dim, b: Dim) -> Dim:
    return a * b if isinstance(a, int) and isinstance(b, int) else f"{a}*{b}"


def given(made: KernelSpec, batch: int, steps: int, seed: int = 0) -> list[np.ndarray]:
    """Operands. Sequence 0 goes on, 1 begins, 2 reads nothing, 3 reads a part, as far as there are as many."""
    rng = np.random.default_rng(seed)
    sizes = {"b": batch, "t": steps}
    arrays = []
    for operand in made.operands:
        shape = [size if isinstance(size, int) else sizes[str(size)] for size in operand.shape]
        if operand.name == "value":
            shape[-1] *= 1 if operand.strides[-1] == 1 else int(operand.strides[-1])
        numbers = rng.standard_normal(shape).astype(np.float32)
        if operand.name == "decay":
            numbers = (np.abs(numbers) if made.body.has_rate else -np.abs(numbers)).astype(np.float32)  # type: ignore[union-attr]
        if operand.name == "rate":
            numbers = -np.abs(numbers)
        if operand.name == "key":
            numbers /= np.sqrt(np.float32(shape[-1]))  # a step of the delta rule then adds less than it finds
        if operand.name == "beta":
            numbers = (1 / (1 + np.exp(-numbers))).astype(np.float32)
        if operand.name == "first":
            numbers = np.array([9, 0, 0, 5][:batch], np.int64)
        if operand.name == "counts":
            numbers = np.array([steps, steps, 0, steps // 2][:batch], np.int64)
        arrays.append(np.full(shape, 7, np.float32) if operand.name == "out" else numbers)
    return arrays


def answer(made: KernelSpec, arrays: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The states and outputs in float64, by the equations."""
    named = {o.name: a.astype(np.float64) for o, a in zip(made.operands, arrays, strict=True)}
    apart = next(int(o.strides[-1]) for o in made.operands if o.name == "value")
    state, value = named["state"].copy(), named["value"][..., ::apart]
    out = np.zeros(value.shape)
    for b, count in enumerate(named["counts"].astype(int)):
        if count and named["first"][b] == 0:
            state[b] = 0
        for t in range(count):
            for h in range(HEADS):
                k, q = (named[each][b, t, h // (HEADS // GROUPS)] for each in ("key", "query"))
                d = named["decay"][b, t, h] * (named["rate"][h] if "rate" in named else 1)
                s = state[b, h] * np.exp(d)
                u = value[b, t, h]
                if "beta" in named:
                    u = named["beta"][b, t, h] * (u - s @ k)
                state[b, h] = s + np.outer(u, k)
                out[b, t, h] = state[b, h] @ q
    return state, out


def assert_close(found: np.ndarray, wanted: np.ndarray) -> None:
    """A state decays, so that roundings of 2^-24 do not add up over tokens; sums have up to 130 terms."""
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-5 * float(np.abs(wanted).max(initial=1.0)))
