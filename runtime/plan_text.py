"""Every string of a plan, checked before any of it is printed into source that will be compiled.

A plan from a file is untrusted: a kernel's name or a dimension becomes part of emitted C++ text, so each string must
have the form that its place requires.  Text in comments must not be able to end them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import msgspec

from qcompiler.errors import CorruptFileError, DimError
from qcompiler.plan.dims import parse
from qcompiler.plan.kernel import KernelSpec, Operand
from qcompiler.plan.plan import Plan, Symbol

MAX_TEXT = 4096
DEEPEST = 100
"""Maximum levels of a plan: records, lists and objects inside each other. Real plans, including conditions of torch,
are below 60."""
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,255}\Z")
_OP = re.compile(r"[a-z]+(\.[a-z0-9_]+)?\Z")
_NUMBER = re.compile(r"(-?\d{1,40}|-?inf|nan|true|false)\Z")


def _is_identifier(text: str) -> bool:
    return _IDENTIFIER.match(text) is not None


def _is_dim(text: str) -> bool:
    try:
        return str(parse(text)) == text
    except DimError:
        return False


def _is_number(text: str) -> bool:
    if _NUMBER.match(text):
        return True
    try:
        return float.fromhex(text).hex() == text
    except (ValueError, OverflowError):
        return False


def _is_op(text: str) -> bool:
    return _OP.match(text) is not None


def _is_plain(text: str) -> bool:
    return len(text) <= MAX_TEXT and text.isprintable() and "\\" not in text and "*/" not in text


Check = tuple[Callable[[str], bool], str]
_IDENTIFIER_CHECK: Check = (_is_identifier, "an identifier")
_DIM_CHECK: Check = (_is_dim, "a dimension in canonical form")
_PLAIN_CHECK: Check = (_is_plain, "plain text")

_BY_FIELD: dict[str, Check] = {
    **dict.fromkeys(("symbols", "result", "args", "yields"), _IDENTIFIER_CHECK),
    **dict.fromkeys(
        ("shape", "strides", "offset", "on", "m", "n", "k", "batch", "q_len", "kv_len", "rows", "cols", "count",
         "outer", "length", "inner", "extents", "coefficients", "sizes"), _DIM_CHECK,
    ),
    **dict.fromkeys(("value", "init"), (_is_number, "a number")),
    **dict.fromkeys(("op", "predicate"), (_is_op, "an operation's name")),
}  # fmt: skip
_NAMED_BY_IDENTIFIER = (KernelSpec, Operand, Symbol)


def check_plan_text(plan: Plan) -> None:
    """CorruptFileError names the first string that does not have the form its place requires."""
    for where, field, owner, text in _strings(plan, "plan", "", None):
        if field == "name" and isinstance(owner, _NAMED_BY_IDENTIFIER):
            check, what = _IDENTIFIER_CHECK
        elif where.endswith(".body.inputs") or where.endswith(".epilogue.inputs"):
            check, what = _IDENTIFIER_CHECK  # names, and dtypes (which are identifiers too)
        else:
            check, what = _BY_FIELD.get(field, _PLAIN_CHECK)
        if not check(text):
            raise CorruptFileError(f"{where} is not {what}: {text[:100]!r}")


def _strings(
    value: object, where: str, field: str, owner: object, depth: int = 0
) -> Iterator[tuple[str, str, object, str]]:
    if depth > DEEPEST:
        raise CorruptFileError(f"the plan is nested more than {DEEPEST} deep at {where[:100]}")
    if isinstance(value, str):
        yield where, field, owner, value
    elif isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            yield from _strings(getattr(value, name), f"{where}.{name}", name, value, depth + 1)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _strings(item, where, field, owner, depth + 1)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield f"{where} key", "", owner, key
            yield from _strings(item, f"{where}.{key}", "", owner, depth + 1)
