"""What kernels of each kind take: the one declaration that the verifier, the executors and all emitters go by.

    contract_of(spec)        roles of the operands, extents, limits of counts: what the text of emitters presumes
    check_spec(spec)         the spec's operands are those roles (names, ranks, types, strides): needs no sizes
    check_sizes(spec, …)     extents, strides and offsets are proven for all values of the symbols; what is written is
                             written in full, and each element once

A kernel writes every element of the operands that its contract calls "w", and reads and writes no other element than
those of its operands' views.  An emitter may rely on all that a contract says, and on nothing else: a template that
needs more says so here, for every target.  `loop` has its own module, loop_contract.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import singledispatch

from qcompiler import formats
from qcompiler.errors import DimError, FormatError, PlanError
from qcompiler.formats import int8_rows
from qcompiler.plan.dims import Dim, Expr, dim, never_negative, product
from qcompiler.plan.geometry import is_packed
from qcompiler.plan.kernel import (
    ITEMSIZE,
    Access,
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
    NormKernel,
    Operand,
    OrderKernel,
    QuantizeRowsKernel,
    RecurrentKernel,
    ScanKernel,
    ScatterKernel,
    SoftmaxKernel,
    Window,
)
from qcompiler.plan.scalar_types import check_program
from qcompiler.plan.sizes import MOST_WORK, Ranges, check_extent, check_view_sizes, magnitude

FLOATS = ("f32", "bf16", "f16")
INDICES = ("i64", "i32")
ANY = tuple(ITEMSIZE)

COUNTED_IN_32_BITS = 2**31 - 1
ROW_ALIGNMENT = 16
"""Bytes: of rows of int8, whose codes, scale and sums are read as vectors and words."""


@dataclass(frozen=True)
class Role:
    """One operand.

    `unit`: the elements of its last dim lie side by side.  `align`: its first element, and every row of its last dim,
    begin at multiples of so many bytes of the buffer.  `packed`: it may have a format or a layout.  `like` names a role
    whose type it shares.  What is written ("w", "rw") never overlaps itself.
    """

    name: str
    shape: tuple[Dim, ...]
    access: Access = "r"
    dtypes: tuple[str, ...] = FLOATS
    unit: bool = False
    align: int = 1
    packed: bool = False
    like: str | None = None


@dataclass(frozen=True)
class Contract:
    """What a kernel takes.

    `extents` are at least 0; `positive` at least 1; of each pair in `at_most` the first is no larger than the second.
    `work` are the extents whose product, or a part of it, the kernel's text may form.
    """

    roles: tuple[Role, ...]
    work: tuple[Dim, ...]
    extents: tuple[Dim, ...] = ()
    positive: tuple[Dim, ...] = ()
    at_most: tuple[tuple[Dim, Dim], ...] = ()


@singledispatch
def _contract(body: KernelBody, operands: int) -> Contract:
    raise PlanError(f"kernels of the kind {type(body).__name__} have no contract (qcompiler/plan/contracts.py)")


def declared_kinds() -> frozenset[type]:
    """The kinds of kernel that have a contract here; LoopKernel's is loop_contract.py."""
    return frozenset(_contract.registry) - {object}


# --- products --------------------------------------------------------------------------------------------------------


@_contract.register
def _(body: LinearKernel, operands: int) -> Contract:
    extras = operands - 3 - body.has_bias
    wanted = 0 if body.epilogue is None else len(body.epilogue.inputs) - 1
    if extras != wanted:
        raise PlanError(
            f"a linear kernel has {operands} operands, which do not fit its bias and epilogue: it takes {wanted} extra "
            f"inputs, {extras} are given"
        )
    if body.codes and body.window is not None:
        raise PlanError("a linear kernel reads windows and rows of int8, which exclude each other")
    x = Role("x", (body.m, body.k), unit=True)
    if body.window is not None:
        x = Role("x", _image(body, body.window), unit=True)
    if body.codes:
        x = Role("x", (body.m, int8_rows.row_bytes(body.k)), dtypes=("i8",), unit=True, align=ROW_ALIGNMENT)
    return Contract(
        (
            x,
            Role("w", (body.n, body.k), packed=True),
            *([Role("bias", (body.n,), unit=True)] if body.has_bias else []),
            *(Role(f"extra{i}", (body.m, body.n), dtypes=ANY) for i in range(extras)),
            Role("out", (body.m, body.n), "w", unit=True),
        ),
        work=(body.m, body.n, body.k),
        positive=(body.n, *((body.k,) if body.codes or body.window is not None else ())),
        extents=(body.m, body.k, *((*body.window.image, *body.window.size) if body.window is not None else ())),
    )


def _image(body: LinearKernel, window: Window) -> tuple[Dim, ...]:
    """The image whose windows are the rows; kernels test every tap against its height and width."""
    batch, _, _, channels = window.image
    numbers = (*window.kernel, *window.strides, *window.dilation, channels)
    if min(numbers) < 1:
        raise PlanError(f"a linear kernel reads windows {window.kernel} of {channels} channels; all must be positive")
    if max(*numbers, *window.padding) > COUNTED_IN_32_BITS or min(window.padding) < 0:
        raise PlanError(
            f"a linear kernel reads windows with padding {window.padding} and numbers {numbers}; none may be negative "
            f"or above {COUNTED_IN_32_BITS}"
        )
    taps = math.prod(window.kernel) * channels
    if not same_dims((body.m, body.k), (product([batch, *window.size]).to_dim(), taps)):
        raise PlanError(
            f"a linear kernel runs over {[body.m, body.k]}, its windows are {[batch, *window.size]} rows of {taps}"
        )
    return window.image


@_contract.register
def _(body: QuantizeRowsKernel, operands: int) -> Contract:
    if not math.isfinite(body.value) or body.value < 0:
        raise PlanError(f"a quantize_rows kernel has {body.cols} columns and the value {body.value}")
    columns = [Role("columns", (body.cols,), dtypes=("i1",), unit=True)] if body.kind == "outliers" else []
    row = (body.rows, int8_rows.row_bytes(body.cols))
    return Contract(
        (
            Role("x", (body.rows, body.cols), unit=True),
            *columns,
            Role("out", row, "w", dtypes=("i8",), unit=True, align=ROW_ALIGNMENT),
        ),
        work=(body.rows, body.cols),
        extents=(body.rows,),
        positive=(body.cols,),
    )


@_contract.register
def _(body: GroupedLinearKernel, operands: int) -> Contract:
    if min(body.repeat, body.experts, body.n, body.k) < 1:
        raise PlanError(
            f"a grouped linear has {body.experts} experts of {body.n}x{body.k} and {body.repeat} pairs per row; all "
            "must be positive"
        )
    pairs = (dim(body.rows) * body.repeat).to_dim()
    return Contract(
        (
            Role("x", (body.rows, body.k), unit=True),
            Role("w", (body.experts * body.n, body.k), packed=True),
            Role("index", (pairs,), dtypes=INDICES),
            Role("out", (pairs, body.n), "w", unit=True),
        ),
        work=(pairs, body.n, body.k),
        extents=(body.rows, pairs),
        positive=(body.repeat, body.experts, body.n, body.k),
        at_most=((pairs, COUNTED_IN_32_BITS),),
    )


@_contract.register
def _(body: RecurrentKernel, operands: int) -> Contract:
    lstm = body.kind == "lstm"
    if min(body.hidden, body.width) < 1 or (not body.projects and body.width != body.hidden):
        raise PlanError(
            f"a recurrent kernel has {body.hidden} hidden units and states of {body.width}; both must be positive, and "
            "equal without a projection"
        )
    if body.projects and not lstm:
        raise PlanError(f"a recurrent kernel of the kind '{body.kind}' has a projection, which only an LSTM has")
    steps, batch, rows, cells = body.steps, body.batch, body.gates * body.hidden, (body.batch, body.hidden)
    inputs = [
        Role("x", (steps, batch, rows), unit=True),
        Role("w", (rows, body.width), packed=True),
        *([Role("projection", (body.width, body.hidden), packed=True)] if body.projects else []),
        *([Role("bias", (rows,), unit=True)] if body.has_bias else []),
        Role("start", (batch, body.width), unit=True, like="out"),
        *([Role("cell_start", cells, unit=True, like="cell")] if lstm else []),
    ]
    outputs = [
        Role("out", (steps, batch, body.width), "w", unit=True),
        *([Role("cell", cells, "w", unit=True)] if lstm else []),
        *([Role("room", cells, "w", dtypes=("f32",), unit=True)] if body.projects else []),
    ]
    most = (batch, COUNTED_IN_32_BITS)
    return Contract(
        (*inputs, *outputs),
        work=(steps, batch, rows, body.width + body.hidden * body.projects),
        extents=(steps, batch),
        positive=(body.hidden, body.width),
        at_most=(most, (rows, COUNTED_IN_32_BITS), (body.width, COUNTED_IN_32_BITS)),
    )


@_contract.register
def _(body: BatchMatmulKernel, operands: int) -> Contract:
    b, m, n, k = body.batch, body.m, body.n, body.k
    return Contract(
        (Role("a", (*b, m, k)), Role("b", (*b, k, n)), Role("out", (*b, m, n), "w")),
        work=(*b, m, n, k),
        extents=(*b, m, n, k),
    )


@_contract.register
def _(body: AttentionKernel, operands: int) -> Contract:
    if min(body.kv_heads, body.heads) < 1 or body.heads % body.kv_heads:
        raise PlanError(f"an attention kernel has {body.heads} heads over {body.kv_heads} heads of keys and values")
    if body.window is not None and not 1 <= body.window <= COUNTED_IN_32_BITS:
        raise PlanError(f"an attention kernel has a window of {body.window} keys; it must be from 1 to 2**31 - 1")
    if body.softcap is not None and not 0 < body.softcap < math.inf:
        raise PlanError(f"an attention kernel has softcap {body.softcap}; it must be positive and finite")
    if body.last and body.causal:
        raise PlanError("an attention kernel is causal and has an operand `last`, which exclude each other")
    b, h, kv = body.batch, body.heads, body.kv_heads
    masks: list[Role] = []
    if body.mask != "none":
        kinds = ("i1",) if body.mask == "bool" else FLOATS
        masks.append(Role("mask", (b, h, body.q_len, body.kv_len), dtypes=kinds))
    if body.last:
        masks.append(Role("last", (b, body.q_len), dtypes=INDICES))
    return Contract(
        (
            Role("q", (b, h, body.q_len, body.head_dim), unit=True),
            Role("k", (b, kv, body.kv_len, body.head_dim), unit=True),
            Role("v", (b, kv, body.kv_len, body.value_dim), unit=True),
            *masks,
            Role("out", (b, h, body.q_len, body.value_dim), "w", unit=True),
        ),
        work=(b, h, body.q_len, body.head_dim + body.value_dim),  # keys are a loop in a task: no product has both
        extents=(b, body.q_len, body.kv_len),
        positive=(body.head_dim, body.value_dim),
        at_most=((body.head_dim, COUNTED_IN_32_BITS), (body.value_dim, COUNTED_IN_32_BITS)),
    )


# --- rows ------------------------------------------------------------------------------------------------------------


@_contract.register
def _(body: NormKernel, operands: int) -> Contract:
    shape = (body.rows, body.cols)
    names = [name for name, there in (("weight", body.has_weight), ("bias", body.has_bias)) if there]
    return Contract(
        (Role("x", shape), *(Role(name, (body.cols,), unit=True) for name in names), Role("out", shape, "w")),
        work=shape,
        extents=(body.rows,),
        positive=(body.cols,),
    )


@_contract.register
def _(body: SoftmaxKernel, operands: int) -> Contract:
    shape = (body.rows, body.cols)
    return Contract((Role("x", shape), Role("out", shape, "w")), work=shape, extents=shape)


# --- places ----------------------------------------------------------------------------------------------------------


@_contract.register
def _(body: EmbeddingKernel, operands: int) -> Contract:
    return Contract(
        (
            Role("ids", (body.count,), dtypes=INDICES),
            Role("table", (body.rows, body.cols), packed=True),
            Role("out", (body.count, body.cols), "w", unit=True),
        ),
        work=(body.count, body.cols),
        extents=(body.count,),
        positive=(body.rows, body.cols),
    )


@_contract.register
def _(body: GatherKernel, operands: int) -> Contract:
    full = (body.outer, body.count, body.inner)
    index: tuple[Dim, ...] = (body.count,) if body.mode == "take" else full
    return Contract(
        (
            Role("x", (body.outer, body.length, body.inner), dtypes=ANY),
            Role("index", index, dtypes=INDICES),
            Role("out", full, "w", dtypes=ANY, like="x"),
        ),
        work=full,
        extents=(*full, body.length),
    )


@_contract.register
def _(body: IndexUpdateKernel, operands: int) -> Contract:
    full = (body.outer, body.count, body.inner)
    return Contract(
        (
            Role("x", (body.outer, body.length, body.inner), "rw", dtypes=ANY),
            Role("index", (body.count,), dtypes=INDICES),
            Role("src", full, dtypes=ANY, like="x"),
        ),
        work=full,
        extents=(*full, body.length),
    )


@_contract.register
def _(body: ScanKernel, operands: int) -> Contract:
    full = (body.outer, body.length, body.inner)
    kinds = ("f64", *FLOATS) if body.fold == "logaddexp" else ANY
    return Contract((Role("x", full, dtypes=ANY), Role("out", full, "w", dtypes=kinds)), work=full, extents=full)


@_contract.register
def _(body: ScatterKernel, operands: int) -> Contract:
    picked = (body.outer, body.count, body.inner)
    return Contract(
        (
            Role("index", picked, dtypes=INDICES),
            Role("src", picked, dtypes=ANY, like="out"),
            Role("out", (body.outer, body.length, body.inner), "rw", dtypes=ANY),
        ),
        work=picked,
        extents=(*picked, body.length),
    )


@_contract.register
def _(body: OrderKernel, operands: int) -> Contract:
    picked = (body.outer, body.count, body.inner)
    return Contract(
        (
            Role("x", (body.outer, body.length, body.inner), dtypes=ANY),
            Role("values", picked, "w", dtypes=ANY, like="x"),
            Role("indices", picked, "w", dtypes=("i64",)),
        ),
        work=(body.outer, body.length, body.inner),
        extents=(body.outer, body.length, body.inner),
        positive=() if same_dims((body.count,), (body.length,)) else (body.count,),
        at_most=((body.count, body.length),),
    )


@_contract.register
def _(body: ArgmaxKernel, operands: int) -> Contract:
    full = (body.outer, body.length, body.inner)
    return Contract(
        (Role("x", full, dtypes=ANY), Role("out", (body.outer, body.inner), "w", dtypes=INDICES)),
        work=full,
        extents=full,
        positive=(body.length,),
    )


# --- a spec against its contract -------------------------------------------------------------------------------------


def same_dims(a: Sequence[Dim], b: Sequence[Dim]) -> bool:
    """Equal as expressions."""
    return len(a) == len(b) and all(x == y or dim(x) == dim(y) for x, y in zip(a, b, strict=True))


def contract_of(spec: KernelSpec) -> Contract:
    """The contract of a kernel that is no loop. PlanError for a body that no kernel has."""
    return _contract(spec.body, len(spec.operands))


def check_spec(spec: KernelSpec) -> Contract:
    """PlanError unless the spec's operands are what its contract says, whatever the sizes are."""
    where = f"kernel '{spec.name}' ({spec.template})"
    try:
        contract = contract_of(spec)
    except PlanError as error:
        raise PlanError(f"{where}: {error}") from error
    if len(contract.roles) != len(spec.operands):
        names = ", ".join(role.name for role in contract.roles)
        raise PlanError(f"{where} has {len(spec.operands)} operands, not {len(contract.roles)} ({names})")
    dtypes = {role.name: operand.dtype for role, operand in zip(contract.roles, spec.operands, strict=True)}
    for role, operand in zip(contract.roles, spec.operands, strict=True):
        _check_operand(where, role, operand)
        if role.like is not None and operand.dtype != dtypes[role.like]:
            raise PlanError(
                f"{where}: '{operand.name}' ({role.name}) is {operand.dtype}, and '{role.like}' {dtypes[role.like]}; "
                "they must be one type"
            )
    body = spec.body
    if isinstance(body, LinearKernel) and body.epilogue is not None:
        _check_epilogue(where, spec, body)
    return contract


def _check_operand(where: str, role: Role, operand: Operand) -> None:
    named = f"'{operand.name}'" + (f" ({role.name})" if role.name != operand.name else "")
    if not same_dims(operand.shape, role.shape):
        raise PlanError(
            f"{where} runs over {list(role.shape)} of its operand {named}, which has the shape {list(operand.shape)}"
        )
    if operand.access != role.access:
        raise PlanError(f"{where} declares {named} as '{operand.access}', it is '{role.access}'")
    if operand.dtype not in role.dtypes:
        raise PlanError(f"{where}: operand {named} is {operand.dtype}, not one of {', '.join(role.dtypes)}")
    if is_packed(operand):
        _check_packed(where, named, role, operand)
        return
    if len(operand.strides) != len(operand.shape):
        raise PlanError(f"{where}: operand {named} has rank {len(operand.shape)} but {len(operand.strides)} strides")
    if role.unit and operand.strides[-1] != 1 and operand.shape[-1] != 1:
        raise PlanError(
            f"{where}: operand {named} needs unit stride in its last dim, it has the stride {operand.strides[-1]}"
        )
    if role.align > 1:
        steps = [s for extent, s in zip(operand.shape[:-1], operand.strides[:-1], strict=True) if extent != 1]
        _check_rows(where, named, role, operand, steps)


def _check_rows(where: str, named: str, role: Role, operand: Operand, steps: Sequence[Dim]) -> None:
    """Every row begins where the contract says."""
    size = ITEMSIZE[operand.dtype]
    for step in steps:
        if any(coefficient * size % role.align for coefficient in dim(step).terms.values()):
            raise PlanError(
                f"{where}: rows of {named} begin at multiples of {step} elements; they must begin at multiples of "
                f"{role.align} bytes"
            )


def _check_packed(where: str, named: str, role: Role, operand: Operand) -> None:
    if not role.packed:
        what = operand.format.name if operand.format is not None else f"in layout '{operand.layout}'"
        raise PlanError(f"{where}: operand {named} is packed {what}; it must be plain")
    if operand.strides or not all(isinstance(extent, int) and extent >= 0 for extent in operand.shape):
        raise PlanError(f"{where}: the packed operand {named} must have a fixed shape and no strides")
    if operand.format is not None:
        try:
            formats.get(operand.format.name, **operand.format.params)
        except FormatError as error:
            raise PlanError(f"{where}: operand {named}: {error}") from error


def _check_epilogue(where: str, spec: KernelSpec, body: LinearKernel) -> None:
    """The first input is the fp32 sum, the others the extra operands; it gives one float."""
    program = body.epilogue
    assert program is not None
    extras = spec.operands[3 if body.has_bias else 2 : -1]
    wanted = ("f32", *(operand.dtype for operand in extras))
    given = tuple(dtype for _, dtype in program.inputs)
    if given != wanted or len(program.yields) != 1:
        raise PlanError(f"{where}: its epilogue takes {given} and gives {len(program.yields)} values, not {wanted}, 1")
    try:
        types = check_program(program, 0)
    except PlanError as error:
        raise PlanError(f"{where}: {error}") from error
    if types[program.yields[0]] not in FLOATS:
        raise PlanError(f"{where}: its epilogue gives {types[program.yields[0]]}, not one of {', '.join(FLOATS)}")


# --- sizes -----------------------------------------------------------------------------------------------------------


def check_sizes(spec: KernelSpec, ranges: Ranges) -> None:
    """PlanError unless the contract's limits hold, and what is written is written once, for all values of symbols."""
    where = f"kernel '{spec.name}' ({spec.template})"
    contract = check_spec(spec)
    try:
        for extent in contract.extents:
            check_extent(extent, ranges)
        for extent in contract.positive:
            check_extent(extent, ranges, least=1)
        for small, large in contract.at_most:
            magnitude(small, ranges), magnitude(large, ranges)
            if not never_negative(dim(large) - dim(small), ranges):
                raise PlanError(f"{where}: the count '{small}' may be above {large}")
        check_work(contract.work, ranges)
        for operand in spec.operands:
            check_operand_sizes(operand, ranges)
            if operand.access != "r" and not injective(operand.shape, operand.strides, ranges):
                raise PlanError(
                    f"{where} writes '{operand.name}', whose elements may overlap each other: shape "
                    f"{list(operand.shape)}, strides {list(operand.strides)}"
                )
    except DimError as error:
        raise PlanError(f"{where}: {error}") from error


def check_work(extents: Sequence[Dim], ranges: Ranges, each: int = 1) -> None:
    """DimError unless the product of the extents, `each` times, is at most `MOST_WORK`."""
    total = each
    for extent in extents:
        total *= magnitude(extent, ranges)
    if total > MOST_WORK:
        raise DimError(
            f"one launch goes over more than {MOST_WORK} (2**54) elements: {list(extents)}; give the dimensions "
            "smaller maxima, or split the operation in the model"
        )


def check_operand_sizes(operand: Operand, ranges: Ranges) -> None:
    """DimError unless shapes, strides and every offset that they give, in bytes, are proven to fit."""
    for extent in operand.shape:
        check_extent(extent, ranges)
    if is_packed(operand):
        check_view_sizes(operand.dtype, (product(operand.shape).to_dim(),), (1,), 0, ranges)
    else:
        check_view_sizes(operand.dtype, operand.shape, operand.strides, 0, ranges)


def injective(shape: Sequence[Dim], strides: Sequence[Dim], ranges: Ranges) -> bool:
    """Whether different indices are proven to be different elements: each stride goes past all smaller ones together.

    Where an extent is 0 there is no element, so symbols that are factors of an extent count as at least 1.
    """
    if 0 in shape:
        return True
    known = dict(ranges)
    axes: list[tuple[Expr, Expr]] = []
    for extent, stride in zip(map(dim, shape), map(dim, strides), strict=True):
        if extent == 1:
            continue
        axes.append((extent, stride))
        if len(extent.terms) == 1:
            for atom in next(iter(extent.terms)):
                if isinstance(atom, str):
                    known[atom] = (max(known[atom][0], 1), max(known[atom][1], 1))
    steps = []
    for extent, stride in axes:
        if never_negative(stride - 1, known):
            steps.append((extent, stride))
        elif never_negative(-stride - 1, known):
            steps.append((extent, -stride))
        else:
            return False
    most = {name: high for name, (_, high) in known.items()}
    span = Expr.constant(0)
    for extent, stride in sorted(steps, key=lambda axis: axis[1].evaluate(most)):
        if not never_negative(stride - span - 1, known):
            return False
        span = span + (extent - 1) * stride
    return True


def check_alignment(spec: KernelSpec, number: int, offset: Dim) -> None:
    """PlanError unless an operand that begins at element `offset` of its buffer begins where kernels read it."""
    role, operand = contract_of(spec).roles[number], spec.operands[number]
    _check_rows(f"kernel '{spec.name}' ({spec.template})", f"'{operand.name}'", role, operand, (offset,))
