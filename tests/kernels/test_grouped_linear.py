"""Products with chosen experts against float64: formats, experts that begin inside panels, routings of every kind."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from grouped_cases import PANELS, Case, make_case
from kernel_cases import Array

from qcompiler.config import resolve_format
from qcompiler.errors import KernelSelectionError
from qcompiler.kernels import layouts
from qcompiler.kernels.cpu.emit import emit_kernel as emit
from qcompiler.plan.kernel import DType, KernelSpec, Operand
from qcompiler.plan.weights import NUMPY_DTYPES

BOUNDS = {"f32": 1e-6, "bf16": 3e-3, "f16": 4e-4}


def routings(case: Case) -> dict[str, list[int]]:
    """Experts by pair; the number of pairs is a multiple of `repeat`."""
    body = case.body
    rng, last = np.random.default_rng(5), body.experts - 1
    found = {
        "one row": [int(e) for e in rng.integers(0, body.experts, body.repeat)],
        "fewer pairs than experts, one twice": [last, 0, last][: body.repeat],
        "some experts without rows": [int(e) for e in rng.choice([1, last], 12 * body.repeat)],
        "any": [int(e) for e in rng.integers(0, body.experts, 60 * body.repeat)],
        "all on the last, more than fit at a time": [last] * (260 * body.repeat),
    }
    if body.repeat == 1:
        found["fewer pairs than experts, one twice"] = [last, 0, last]
    return found


def check(kernels: Any, case: Case, chosen: Sequence[int]) -> None:
    body, (x_operand, _, index_operand, _) = case.body, case.spec.operands
    dtype = NUMPY_DTYPES[x_operand.dtype]
    rng = np.random.default_rng(len(chosen))
    x = rng.standard_normal((len(chosen) // body.repeat, body.k + 5)).astype(dtype)
    step = int(index_operand.strides[0])
    index = np.full(len(chosen) * step, -(2**30), np.int64 if index_operand.dtype == "i64" else np.int32)
    index[::step] = chosen
    rows = x[:, : body.k].astype(np.float64)
    expected = np.stack([case.values[e] @ rows[p // body.repeat] for p, e in enumerate(chosen)])

    def operands() -> list[Array]:
        return [x, case.weight, index, np.full((len(chosen), body.n + 1), 7, dtype)]

    out = kernels.run_both(case.spec.name, operands, symbols=(len(x),))[-1].astype(np.float64)
    assert (out[:, body.n] == 7).all(), "wrote beside its columns"
    error = np.linalg.norm(out[:, : body.n] - expected, axis=1) / np.linalg.norm(expected, axis=1)
    assert error.max() <= 3 * BOUNDS[x_operand.dtype], f"{case.spec.operands[1].format}: {error.max():.2e} in a row"


def all_cases() -> list[Case]:
    """Experts of 19 or 35 rows begin inside of panels; K = 97 puts them inside of a stream's blocks, too. The 15 panels
    of an expert of 240 rows are seven and eight of two groups."""
    return [
        make_case("nf4", 5, 19, 97, repeat=2), make_case("nf4:block=64", 3, 16, 128, index="i32"),
        make_case("int8", 5, 35, 101, repeat=3), make_case("q4_0", 4, 19, 96, repeat=2),
        make_case("q4_K", 3, 35, 512), make_case("q8_0", 4, 16, 64, repeat=2, index="i32"),
        make_case("panels", 5, 19, 77), make_case("rows", 3, 35, 61, repeat=2), make_case("columns", 4, 5, 33),
        make_case("panels", 2, 35, 1219), make_case("q4_0", 3, 240, 1024),
    ]  # fmt: skip


def test_chosen_experts_equal_float64_for_every_format_and_routing(build: Callable[..., Any], isa: str) -> None:
    cases = all_cases()
    kernels = build([case.spec for case in cases], isa)
    for case in cases:
        for chosen in routings(case).values():
            check(kernels, case, chosen)


def test_narrow_types_round_once(build: Callable[..., Any], isa: str) -> None:
    cases = [make_case("int4", 3, 19, 96, dtype="bf16", repeat=2), make_case("panels", 4, 19, 70, dtype="f16")]
    kernels = build([case.spec for case in cases], isa)
    for case in cases:
        for chosen in routings(case).values():
            check(kernels, case, chosen)


@pytest.mark.parametrize("wrong", [-1, 4, 2**40])
def test_an_expert_that_does_not_exist_is_reported(build: Callable[..., Any], isa: str, wrong: int) -> None:
    case = all_cases()[8]
    kernels = build([each.spec for each in all_cases()], isa)
    x, out = np.ones((7, 38), np.float32), np.full((7, 6), 7, np.float32)
    index = np.array([0, 3, wrong, 1, wrong, 0, 2], np.int64)
    context = kernels.run(case.spec.name, [x, case.weight, index, out], (7,), threads=2)
    assert (context.error_code, context.error_value, context.error_limit) == (1, wrong, 4)
    assert (out[[2, 4], :5] == 0).all() and (out[[0, 1, 3, 5, 6], :5] != 0).all() and (out[:, 5] == 7).all()


def test_no_rows_write_nothing(build: Callable[..., Any], isa: str) -> None:
    kernels = build([each.spec for each in all_cases()], isa)
    case, out = all_cases()[0], np.full((1, 20), 7, np.float32)
    kernels.run(case.spec.name, [out, case.weight, np.zeros(1, np.int64), out], (0,))
    assert (out == 7).all()


@pytest.mark.parametrize("factors", [None, "bf16"])
def test_experts_that_nobody_chose_are_not_read(build: Callable[..., Any], isa: str, factors: DType | None) -> None:
    """Their codes lie in pages that must not be touched: one token reads two of sixteen experts."""
    if not hasattr(os, "fork"):
        pytest.skip("needs processes that can be forked")
    experts, n, k = 16, 64, 2 * mmap.PAGESIZE // 32
    case = make_case("nf4", experts, n, k, repeat=2, factors=factors)
    kernels = build([case.spec], isa)
    page = mmap.PAGESIZE
    memory = mmap.mmap(-1, -(-case.weight.size // page) * page)
    weight = np.frombuffer(memory, np.uint8)
    weight[: case.weight.size] = case.weight
    fmt = resolve_format("nf4")
    codes = layouts.get(PANELS).sections(fmt, "f32", experts * n, k)[0]
    per_expert = codes.nbytes // experts
    assert per_expert % page == 0 and codes.offset == 0
    x, index, out = np.ones((1, k + 5), np.float32), np.array([11, 3], np.int64), np.zeros((2, n + 1), np.float32)
    child = os.fork()
    if child == 0:
        libc = ctypes.CDLL(None, use_errno=True)
        for expert in range(experts):
            if expert not in index:
                address = ctypes.c_void_p(weight.ctypes.data + expert * per_expert)
                if libc.mprotect(address, ctypes.c_size_t(per_expert), 0) != 0:
                    os._exit(3)
        kernels.run(case.spec.name, [x, weight, index, out], (1,))
        expected = np.stack([case.values[e].sum(axis=1) for e in index])
        near = 1e-4 if factors is None else 1e-2
        os._exit(0 if np.allclose(out[:, :n], expected, rtol=near, atol=near) else 2)
    _, status = os.waitpid(child, 0)
    assert status == 0, f"a process that may not read other experts ended with {os.waitstatus_to_exitcode(status)}"


def test_wrong_operands_are_named() -> None:
    spec = make_case("rows", 2, 3, 4).spec
    for place, change, message in (
        (2, {"dtype": "f32"}, "'index' is f32"), (0, {"dtype": "i32"}, "'x' is i32"),
        (3, {"strides": (1, 6)}, "'out' needs unit stride"),
    ):  # fmt: skip
        operands = list(spec.operands)
        fields = {f: getattr(operands[place], f) for f in operands[place].__struct_fields__}
        operands[place] = Operand(**{**fields, **change})
        broken = KernelSpec(name=spec.name, symbols=spec.symbols, operands=tuple(operands), body=spec.body)
        with pytest.raises(KernelSelectionError, match=message):
            emit(broken, "x86-64-v3")
