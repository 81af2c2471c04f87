"""Checks a spec against the contract of its kind. The verifier, the executors and all emitters rely on contracts.

    contract_of(spec)        the roles of the operands, the extents, the limits of counts
    check_spec(spec)         the operands fit their roles (number, rank, type, strides); this needs no sizes
    check_sizes(spec, …)     extents, strides and offsets are proven for all values of the symbols, and no element is
                             written twice

A kernel writes every element of its "w" operands. It touches no element outside its operands' views. An emitter may
rely on everything in the contract and on nothing else. A template that needs more adds it to the kind's declaration
(plan/kinds), for every target. `loop` and `parts` have modules of their own, loop_contract.py and parts_contract.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from qcompiler import formats
from qcompiler.errors import DimError, FormatError, PlanError
from qcompiler.plan.dims import Dim, Expr, dim, never_negative, product
from qcompiler.plan.kernel import ITEMSIZE, KernelSpec, Operand
from qcompiler.plan.kernel_body import Contract, Role, RoleKernel, same_dims
from qcompiler.plan.sizes import MOST_WORK, Ranges, check_extent, check_view_sizes, magnitude
from qcompiler.plan.view_regions import is_packed


def role_body(spec: KernelSpec) -> RoleKernel:
    """The body of a spec whose operands have roles: of any kind but `loop`."""
    assert isinstance(spec.body, RoleKernel)
    return spec.body


def contract_of(spec: KernelSpec) -> Contract:
    """What a kernel requires of its operands. PlanError for a record that describes no kernel."""
    return role_body(spec).contract(len(spec.operands))


def check_spec(spec: KernelSpec) -> Contract:
    """PlanError unless the spec's operands are what its contract says, whatever the sizes are."""
    body, where = role_body(spec), f"kernel '{spec.name}' ({spec.template})"
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
    try:
        body.check_operands(spec.operands)
    except PlanError as error:
        raise PlanError(f"{where}: {error}") from error
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
    """PlanError unless every row begins at a multiple of the role's alignment."""
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


# --- sizes -----------------------------------------------------------------------------------------------------------


def check_sizes(spec: KernelSpec, ranges: Ranges) -> None:
    """PlanError unless, for all values of the symbols, the contract's limits hold and no element is written twice."""
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
    """DimError unless `each` times the product of the extents is at most `MOST_WORK`."""
    total = each
    for extent in extents:
        total *= magnitude(extent, ranges)
    if total > MOST_WORK:
        raise DimError(
            f"one launch goes over more than {MOST_WORK} (2**54) elements: {list(extents)}; give the dimensions "
            "smaller maxima, or split the operation in the model"
        )


def check_operand_sizes(operand: Operand, ranges: Ranges) -> None:
    """DimError unless the extents and every byte offset of the operand are proven to fit the limits of
    plan/sizes.py."""
    for extent in operand.shape:
        check_extent(extent, ranges)
    if is_packed(operand):
        check_view_sizes(operand.dtype, (product(operand.shape).to_dim(),), (1,), 0, ranges)
    else:
        check_view_sizes(operand.dtype, operand.shape, operand.strides, 0, ranges)


def injective(shape: Sequence[Dim], strides: Sequence[Dim], ranges: Ranges) -> bool:
    """Whether different indices are proven to address different elements.

    The proof: each stride is larger than the span of all axes with smaller strides. A tensor with an extent of 0 has no
    element, so a symbol that is a factor of an extent is taken as at least 1.
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
    """PlanError unless element `offset` of a buffer is aligned as the role of operand `number` requires."""
    role, operand = contract_of(spec).roles[number], spec.operands[number]
    _check_rows(f"kernel '{spec.name}' ({spec.template})", f"'{operand.name}'", role, operand, (offset,))
