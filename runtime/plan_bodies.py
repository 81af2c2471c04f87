"""Whether each kernel touches only what its operands cover.

`verify_plan` proves that every view lies in its buffer; kernels, however, run over the sizes in their *body*.  Here
those sizes are compared with the operands' shapes, loop accesses are bounded, and packed weights must have the bytes of
their layout.  So a plan from a stranger cannot make a kernel read or write anywhere else.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import singledispatch

from qcompiler import formats
from qcompiler.errors import DimError, FormatError, PlanError
from qcompiler.formats import int8_rows
from qcompiler.kernels import layouts
from qcompiler.plan.dims import Dim, Expr, Range, dim, product
from qcompiler.plan.kernel import (
    Access,
    AffineAccess,
    ArgmaxKernel,
    AttentionKernel,
    BatchMatmulKernel,
    EmbeddingKernel,
    GatherKernel,
    GroupedLinearKernel,
    IndexUpdateKernel,
    KernelBody,
    KernelSpec,
    LinearKernel,
    LoopKernel,
    NormKernel,
    Operand,
    OrderKernel,
    QuantizeRowsKernel,
    ScanKernel,
    ScatterKernel,
    SoftmaxKernel,
    Window,
)
from qcompiler.plan.plan import EntryPoint, Launch, Plan, Select, WeightEntry

Role = tuple[tuple[Dim, ...], Access]
"""What an operand must be: its shape, and whether it is read or written."""


def check_bodies(plan: Plan) -> None:
    """PlanError names the kernel or the weight that reaches beyond its bytes."""
    for spec in plan.kernels:
        if not isinstance(spec.body, LoopKernel):
            _check_roles(spec)
    specs = {spec.name: spec for spec in plan.kernels if isinstance(spec.body, LoopKernel)}
    entries = (*plan.entries, *((plan.init,) if plan.init is not None else ()))
    for entry in entries:
        ranges = {symbol.name: (symbol.min, symbol.max) for symbol in entry.symbols}
        for name in sorted(_launched(entry) & set(specs)):
            try:
                _check_loop(specs[name], ranges)
            except DimError as error:
                raise PlanError(f"kernel '{name}' in entry point '{entry.name}': {error}") from error
    for weight in plan.weights:
        check_weight(weight)


def _launched(entry: EntryPoint) -> set[str]:
    names: set[str] = set()
    for step in entry.steps:
        if isinstance(step, Launch):
            names.add(step.kernel)
        elif isinstance(step, Select):
            names |= {case.kernel for case in step.cases}
    return names


# --- templates -------------------------------------------------------------------------------------------------------


def _check_roles(spec: KernelSpec) -> None:
    roles = _roles(spec.body, len(spec.operands))
    if len(roles) != len(spec.operands):
        raise PlanError(f"kernel '{spec.name}' ({spec.template}) has {len(spec.operands)} operands, not {len(roles)}")
    for operand, (shape, access) in zip(spec.operands, roles, strict=True):
        if not _same(operand.shape, shape):
            raise PlanError(
                f"kernel '{spec.name}' ({spec.template}) runs over {list(shape)} of its operand '{operand.name}', "
                f"which has the shape {list(operand.shape)}"
            )
        if operand.access != access:
            raise PlanError(
                f"kernel '{spec.name}' ({spec.template}) declares '{operand.name}' as '{operand.access}', "
                f"it is '{access}'"
            )
        if operand.strides and len(operand.shape) == 1 and not _unit(operand):
            _require_index_operand(spec, operand)


def _unit(operand: Operand) -> bool:
    return operand.strides[0] == 1 or operand.shape[0] == 1


def _require_index_operand(spec: KernelSpec, operand: Operand) -> None:
    """Indices may have any stride; vectors of values (a bias, a norm's weight) lie element beside element."""
    if operand.name not in ("ids", "index"):
        raise PlanError(f"kernel '{spec.name}': the vector '{operand.name}' has the stride {operand.strides[0]}, not 1")


def _same(shape: Sequence[Dim], other: Sequence[Dim]) -> bool:
    return len(shape) == len(other) and all(a == b or dim(a) == dim(b) for a, b in zip(shape, other, strict=True))


@singledispatch
def _roles(body: KernelBody, operands: int) -> list[Role]:
    raise PlanError(f"the template {type(body).__name__} is unknown to the runtime")


@_roles.register
def _(body: LinearKernel, operands: int) -> list[Role]:
    extras = operands - 3 - body.has_bias
    if extras < 0 or (body.epilogue is None and extras):
        raise PlanError(f"a linear kernel has {operands} operands, which do not fit its bias and epilogue")
    if body.epilogue is not None and len(body.epilogue.inputs) != extras + 1:
        raise PlanError(
            f"a linear kernel's epilogue takes {len(body.epilogue.inputs)} inputs, it is given {extras + 1}"
        )
    bias: list[Role] = [((body.n,), "r")] if body.has_bias else []
    rows: Role = ((body.m, body.n), "r")
    x: Role = ((body.m, body.k) if body.window is None else _image(body, body.window), "r")
    if body.codes:
        if body.window is not None:
            raise PlanError("a linear kernel reads windows and rows of int8, which exclude each other")
        x = ((body.m, int8_rows.row_bytes(body.k)), "r")
    return [x, ((body.n, body.k), "r"), *bias, *[rows] * extras, ((body.m, body.n), "w")]


def _image(body: LinearKernel, window: Window) -> tuple[Dim, ...]:
    """The image whose windows are the rows; kernels test every tap against its height and width."""
    batch, _, _, channels = window.image
    if min(*window.kernel, *window.strides, *window.dilation, channels) < 1:
        raise PlanError(f"a linear kernel reads windows {window.kernel} of {channels} channels; all must be positive")
    if not _same((body.m, body.k), (product([batch, *window.size]).to_dim(), math.prod(window.kernel) * channels)):
        raise PlanError(
            f"a linear kernel runs over {[body.m, body.k]}, its windows are {[batch, *window.size]} rows of "
            f"{math.prod(window.kernel) * channels}"
        )
    return window.image


@_roles.register
def _(body: QuantizeRowsKernel, operands: int) -> list[Role]:
    if body.cols < 1 or not math.isfinite(body.value) or body.value < 0:
        raise PlanError(f"a quantize_rows kernel has {body.cols} columns and the value {body.value}")
    columns: list[Role] = [((body.cols,), "r")] if body.kind == "outliers" else []
    return [((body.rows, body.cols), "r"), *columns, ((body.rows, int8_rows.row_bytes(body.cols)), "w")]


@_roles.register
def _(body: GroupedLinearKernel, operands: int) -> list[Role]:
    if min(body.repeat, body.experts, body.n, body.k) < 1:
        raise PlanError(
            f"a grouped linear has {body.experts} experts of {body.n}x{body.k} and {body.repeat} pairs per row; all "
            "must be positive"
        )
    pairs = (dim(body.rows) * body.repeat).to_dim()
    return [
        ((body.rows, body.k), "r"),
        ((body.experts * body.n, body.k), "r"),
        ((pairs,), "r"),
        ((pairs, body.n), "w"),
    ]


@_roles.register
def _(body: BatchMatmulKernel, operands: int) -> list[Role]:
    b, m, n, k = body.batch, body.m, body.n, body.k
    return [((*b, m, k), "r"), ((*b, k, n), "r"), ((*b, m, n), "w")]


@_roles.register
def _(body: AttentionKernel, operands: int) -> list[Role]:
    if body.kv_heads < 1 or body.heads % body.kv_heads:
        raise PlanError(f"an attention kernel has {body.heads} heads over {body.kv_heads} heads of keys and values")
    if body.window is not None and not 1 <= body.window < 1 << 31:
        raise PlanError(f"an attention kernel has a window of {body.window} keys; it must be from 1 to 2**31 - 1")
    if body.softcap is not None and not 0 < body.softcap < math.inf:
        raise PlanError(f"an attention kernel has softcap {body.softcap}; it must be positive and finite")
    if body.last and body.causal:
        raise PlanError("an attention kernel is causal and has an operand `last`, which exclude each other")
    b, h, kv = body.batch, body.heads, body.kv_heads
    mask: list[Role] = [((b, h, body.q_len, body.kv_len), "r")] if body.mask != "none" else []
    if body.last:
        mask.append(((b, body.q_len), "r"))
    return [
        ((b, h, body.q_len, body.head_dim), "r"),
        ((b, kv, body.kv_len, body.head_dim), "r"),
        ((b, kv, body.kv_len, body.value_dim), "r"),
        *mask,
        ((b, h, body.q_len, body.value_dim), "w"),
    ]


@_roles.register
def _(body: NormKernel, operands: int) -> list[Role]:
    vectors: list[Role] = [((body.cols,), "r")] * (body.has_weight + body.has_bias)
    return [((body.rows, body.cols), "r"), *vectors, ((body.rows, body.cols), "w")]


@_roles.register
def _(body: SoftmaxKernel, operands: int) -> list[Role]:
    return [((body.rows, body.cols), "r"), ((body.rows, body.cols), "w")]


@_roles.register
def _(body: EmbeddingKernel, operands: int) -> list[Role]:
    return [((body.count,), "r"), ((body.rows, body.cols), "r"), ((body.count, body.cols), "w")]


@_roles.register
def _(body: GatherKernel, operands: int) -> list[Role]:
    full = (body.outer, body.count, body.inner)
    index: tuple[Dim, ...] = (body.count,) if body.mode == "take" else full
    return [((body.outer, body.length, body.inner), "r"), (index, "r"), (full, "w")]


@_roles.register
def _(body: IndexUpdateKernel, operands: int) -> list[Role]:
    return [
        ((body.outer, body.length, body.inner), "rw"),
        ((body.count,), "r"),
        ((body.outer, body.count, body.inner), "r"),
    ]


@_roles.register
def _(body: ScanKernel, operands: int) -> list[Role]:
    full = (body.outer, body.length, body.inner)
    return [(full, "r"), (full, "w")]


@_roles.register
def _(body: ScatterKernel, operands: int) -> list[Role]:
    picked = (body.outer, body.count, body.inner)
    return [(picked, "r"), (picked, "r"), ((body.outer, body.length, body.inner), "rw")]


@_roles.register
def _(body: OrderKernel, operands: int) -> list[Role]:
    picked = (body.outer, body.count, body.inner)
    return [((body.outer, body.length, body.inner), "r"), (picked, "w"), (picked, "w")]


@_roles.register
def _(body: ArgmaxKernel, operands: int) -> list[Role]:
    return [((body.outer, body.length, body.inner), "r"), ((body.outer, body.inner), "w")]


# --- loops -----------------------------------------------------------------------------------------------------------


def _check_loop(spec: KernelSpec, ranges: Mapping[str, Range]) -> None:
    body = spec.body
    assert isinstance(body, LoopKernel)
    if len(body.accesses) != len(spec.operands) or len(body.iterators) != len(body.extents):
        raise PlanError(
            f"loop kernel '{spec.name}' has {len(body.accesses)} accesses for {len(spec.operands)} operands"
        )
    outputs = len(body.body.yields)
    for number, (operand, access) in enumerate(zip(spec.operands, body.accesses, strict=True)):
        is_output = number >= len(spec.operands) - outputs
        if is_output != (operand.access != "r"):
            raise PlanError(f"loop kernel '{spec.name}' declares operand '{operand.name}' as '{operand.access}'")
        if len(access.coefficients) != len(body.extents):
            raise PlanError(f"loop kernel '{spec.name}': '{operand.name}' is accessed by another number of loops")
        low, high = _reach(access, body.extents, ranges)
        first, last = _reach(AffineAccess(offset=0, coefficients=operand.strides), operand.shape, ranges)
        if (low - first).tight_bounds(ranges)[0] < 0 or (last - high).tight_bounds(ranges)[0] < 0:
            raise PlanError(
                f"loop kernel '{spec.name}' accesses elements {low} to {high} of its operand '{operand.name}', which "
                f"covers {first} to {last}"
            )


def _reach(access: AffineAccess, extents: Sequence[Dim], ranges: Mapping[str, Range]) -> tuple[Expr, Expr]:
    """The lowest and the highest element offset. DimError where a coefficient has no definite sign."""
    low = high = dim(access.offset)
    for coefficient, extent in zip(access.coefficients, extents, strict=True):
        step = dim(coefficient)
        smallest, largest = step.tight_bounds(ranges)
        if smallest >= 0:
            high = high + step * (dim(extent) - 1)
        elif largest <= 0:
            low = low + step * (dim(extent) - 1)
        else:
            raise DimError(f"the step '{step}' may be positive or negative ({smallest} to {largest})")
    return low, high


# --- weights ---------------------------------------------------------------------------------------------------------


def check_weight(weight: WeightEntry) -> None:
    """PlanError unless a weight has exactly the bytes that its format and layout need."""
    if weight.format is None and weight.layout == "canonical":
        return  # verify_plan knows the size of plain values
    if len(weight.shape) != 2 or min(weight.shape) < 1:
        raise PlanError(f"the packed weight '{weight.name}' has the shape {list(weight.shape)}, not (rows, cols)")
    try:
        fmt = None if weight.format is None else formats.get(weight.format.name, **weight.format.params)
        nbytes = layouts.get(weight.layout).nbytes(fmt, weight.dtype, *weight.shape)
    except FormatError as error:
        raise PlanError(f"the weight '{weight.name}' of {math.prod(weight.shape)} values: {error}") from error
    if nbytes != weight.nbytes:
        raise PlanError(
            f"the weight '{weight.name}' has {weight.nbytes} bytes, its layout {weight.layout!r} needs {nbytes}"
        )
