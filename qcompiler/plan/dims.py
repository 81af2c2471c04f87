"""Symbolic integer expressions over named dimensions.

A dimension is an `int` or the canonical text of an expression over symbols, such as ``"b*s"`` or ``"(s + 1) // 2"``.
Two expressions that are equal as polynomials have the same text, so comparing texts compares meanings, except inside
``//``, ``%``, ``max`` and ``min``.

    >>> str(parse("s*b + 0 + b*s"))
    '2*b*s'
    >>> parse("4*b*s").divide_exact(parse("b"))
    Expr('4*s')

Nothing here needs torch or sympy: the runtime evaluates these on machines that have neither.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from qcompiler.errors import DimError
from qcompiler.plan.dims_text import Builder, read

Dim = int | str
"""What plans and types store: an integer, or the canonical text of an `Expr`."""

Range = tuple[int, int]
"""Inclusive bounds of a symbol."""

_SYMBOL = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
CallKind = Literal["//", "%", "max", "min"]
_MAX_CORNER_SYMBOLS = 6  # 64 corners

MAX_TERMS = 128
"""The most terms of a polynomial. A short text can expand to very many terms; sizes of real models have under ten."""

MAX_DEGREE = 16
"""The most factors of a term. No tensor has as many dimensions."""


@dataclass(frozen=True, order=True)
class CallAtom:
    """An atom that is not a plain symbol: `lhs // rhs`, `lhs % rhs`, `max(lhs, rhs)` or `min(lhs, rhs)`."""

    kind: CallKind
    lhs: str
    rhs: str

    def __str__(self) -> str:
        if self.kind in ("max", "min"):
            return f"{self.kind}({self.lhs}, {self.rhs})"
        return f"({_wrap(self.lhs)} {self.kind} {_wrap(self.rhs)})"


_Atom = str | CallAtom
_Monomial = tuple[_Atom, ...]  # sorted by text, repeated for powers


def _wrap(text: str) -> str:
    return text if _SYMBOL.match(text) or text.isdigit() else f"({text})"


class Expr:
    """An immutable polynomial with integer coefficients; arithmetic returns new expressions.

    Most expressions are intermediate results of a proof and are never compared or printed. So the text and the order of
    the terms are computed on first use.
    """

    __slots__ = ("_ordered", "_terms", "_text")

    def __init__(self, terms: Mapping[_Monomial, int]) -> None:
        self._terms = {m: c for m, c in terms.items() if c != 0}
        self._ordered = len(self._terms) <= 1
        self._text: str | None = None

    # --- construction ---

    @staticmethod
    def constant(value: int) -> Expr:
        return Expr({(): value})

    @staticmethod
    def symbol(name: str) -> Expr:
        if not _SYMBOL.match(name):
            raise DimError(f"{name!r} is not a symbol name (letters, digits and '_')")
        return Expr({(name,): 1})

    # --- what it is ---

    @property
    def is_static(self) -> bool:
        return all(m == () for m in self._terms)

    @property
    def value(self) -> int:
        """The integer, for a static expression; DimError otherwise."""
        if not self.is_static:
            raise DimError(f"the dimension '{self}' is not static")
        return self._terms.get((), 0)

    def symbols(self) -> frozenset[str]:
        found: set[str] = set()
        for monomial in self._terms:
            for atom in monomial:
                if isinstance(atom, str):
                    found.add(atom)
                else:
                    found |= parse(atom.lhs).symbols() | parse(atom.rhs).symbols()
        return frozenset(found)

    @property
    def terms(self) -> Mapping[_Monomial, int]:
        """The coefficient of each product of atoms, in the order of the text."""
        if not self._ordered:
            self._terms = dict(sorted(self._terms.items(), key=lambda term: _order(term[0])))
            self._ordered = True
        return self._terms

    def to_dim(self) -> Dim:
        return self.value if self.is_static else str(self)

    # --- arithmetic ---

    def __add__(self, other: Expr | int) -> Expr:
        terms = dict(self._terms)
        for monomial, coefficient in _expr(other)._terms.items():
            terms[monomial] = terms.get(monomial, 0) + coefficient
        if len(terms) > MAX_TERMS:
            raise DimError(f"a dimension has more than {MAX_TERMS} terms: {str(self)[:80]} …")
        return Expr(terms)

    __radd__ = __add__

    def __neg__(self) -> Expr:
        return Expr({m: -c for m, c in self._terms.items()})

    def __sub__(self, other: Expr | int) -> Expr:
        return self + (-_expr(other))

    def __rsub__(self, other: Expr | int) -> Expr:
        return _expr(other) - self

    def __mul__(self, other: Expr | int) -> Expr:
        terms: dict[_Monomial, int] = {}
        for m1, c1 in self._terms.items():
            for m2, c2 in _expr(other)._terms.items():
                monomial = tuple(sorted(m1 + m2, key=str)) if m1 and m2 else m1 + m2
                if len(monomial) > MAX_DEGREE:
                    raise DimError(f"a dimension has a term of more than {MAX_DEGREE} factors: {str(self)[:80]} …")
                terms[monomial] = terms.get(monomial, 0) + c1 * c2
            if len(terms) > MAX_TERMS:
                raise DimError(f"a dimension has more than {MAX_TERMS} terms: {str(self)[:80]} …")
        return Expr(terms)

    __rmul__ = __mul__

    def divide_exact(self, divisor: Expr | int) -> Expr:
        """`self / divisor` if that is a polynomial; else DimError. The divisor must be a single term."""
        quotient = self._try_divide(_expr(divisor))
        if quotient is None:
            raise DimError(f"'{self}' cannot be divided by '{divisor}' without a remainder")
        return quotient

    def _try_divide(self, divisor: Expr) -> Expr | None:
        if self == divisor and self._terms:
            return Expr.constant(1)
        if len(divisor._terms) != 1:
            return None
        ((by, by_coefficient),) = divisor._terms.items()
        terms: dict[_Monomial, int] = {}
        for monomial, coefficient in self._terms.items():
            rest = list(monomial)
            for atom in by:
                if atom not in rest:
                    return None
                rest.remove(atom)
            if coefficient % by_coefficient:
                return None
            terms[tuple(rest)] = coefficient // by_coefficient
        return Expr(terms)

    def __floordiv__(self, other: Expr | int) -> Expr:
        divisor = _expr(other)
        if divisor.is_static and divisor.value == 0:
            raise DimError(f"'{self}' is divided by zero")
        if self.is_static and divisor.is_static:
            return Expr.constant(self.value // divisor.value)
        exact = self._try_divide(divisor)
        return exact if exact is not None else _call("//", self, divisor)

    def __mod__(self, other: Expr | int) -> Expr:
        divisor = _expr(other)
        if divisor.is_static and divisor.value == 0:
            raise DimError(f"'{self}' is divided by zero")
        if self.is_static and divisor.is_static:
            return Expr.constant(self.value % divisor.value)
        return Expr.constant(0) if self._try_divide(divisor) is not None else _call("%", self, divisor)

    def maximum(self, other: Expr | int) -> Expr:
        return self._extreme("max", _expr(other))

    def minimum(self, other: Expr | int) -> Expr:
        return self._extreme("min", _expr(other))

    def _extreme(self, kind: Literal["max", "min"], other: Expr) -> Expr:
        if self == other:
            return self
        difference = self - other
        if difference.is_static:
            return self if (difference.value > 0) == (kind == "max") else other
        first, second = sorted((self, other), key=str)
        return _call(kind, first, second)

    # --- evaluation ---

    def evaluate(self, symbols: Mapping[str, int]) -> int:
        """The value for one binding of symbols; DimError names a symbol that is missing."""
        total = 0
        for monomial, coefficient in self._terms.items():
            product = coefficient
            for atom in monomial:
                product *= _evaluate_atom(atom, symbols)
            total += product
        return total

    def substitute(self, symbols: Mapping[str, Expr | int]) -> Expr:
        """Replaces symbols by expressions; symbols not named stay."""
        total: dict[_Monomial, int] = {}
        for monomial, coefficient in self._terms.items():
            product = Expr.constant(coefficient)
            for atom in monomial:
                if isinstance(atom, str):
                    product = product * _expr(symbols.get(atom, Expr.symbol(atom)))
                else:
                    lhs, rhs = parse(atom.lhs).substitute(symbols), parse(atom.rhs).substitute(symbols)
                    product = product * _apply(atom.kind, lhs, rhs)
            for each, times in product._terms.items():
                total[each] = total.get(each, 0) + times
            if len(total) > MAX_TERMS:
                raise DimError(f"a dimension has more than {MAX_TERMS} terms: {str(self)[:80]} …")
        return Expr(total)

    def bounds(self, ranges: Mapping[str, Range]) -> Range:
        """Inclusive interval bounds, given the range of each symbol (interval arithmetic: sound, not always tight)."""
        low = high = 0
        for monomial, coefficient in self._terms.items():
            a = b = coefficient
            for atom in monomial:
                lo, hi = atom_bounds(atom, ranges)
                corners = (a * lo, a * hi, b * lo, b * hi)
                a, b = min(corners), max(corners)
            low, high = low + a, high + b
        return low, high

    def tight_bounds(self, ranges: Mapping[str, Range]) -> Range:
        """Sound bounds, at least as narrow as `bounds`. They are exact if the expression is multilinear in its symbols.

        A multilinear function over a box has its extremes at corners. Other expressions are rewritten relative to the
        lower and the upper end of every range (``s = low + t``), which removes most of the loss of interval arithmetic.
        """
        low, high = self.bounds(ranges)
        names = sorted(self.symbols())
        if len(names) <= _MAX_CORNER_SYMBOLS and self._is_multilinear():
            corners = [
                self.evaluate(dict(zip(names, point, strict=True)))
                for point in itertools.product(*(ranges[name] for name in names))
            ]
            return min(corners), max(corners)
        from_zero = {name: (0, ranges[name][1] - ranges[name][0]) for name in names}
        for shift in (
            {name: Expr.symbol(name) + ranges[name][0] for name in names},
            {name: ranges[name][1] - Expr.symbol(name) for name in names},
        ):
            try:
                a, b = self.substitute(shift).bounds(from_zero)
            except DimError:  # this spelling cannot prove a divisor positive; `bounds` above could
                continue
            low, high = max(low, a), min(high, b)
        return low, high

    def _is_multilinear(self) -> bool:
        return all(
            len(set(monomial)) == len(monomial) and all(isinstance(atom, str) for atom in monomial)
            for monomial in self._terms
        )

    # --- text ---

    def to_c(self) -> str:
        """C++ text. Each symbol must be an int64_t of its name in scope. The text calls qc_max, qc_min, qc_floordiv and
        qc_mod of kernels/cpu/task.h, because C's `/` and `%` round towards zero."""

        def atom_text(atom: _Atom) -> str:
            if isinstance(atom, str):
                return atom
            lhs, rhs = parse(atom.lhs).to_c(), parse(atom.rhs).to_c()
            if atom.kind in ("max", "min"):
                return f"qc_{atom.kind}({lhs}, {rhs})"
            return f"{'qc_floordiv' if atom.kind == '//' else 'qc_mod'}({lhs}, {rhs})"

        return self._render(atom_text)

    def _render(self, atom_text: object = str) -> str:
        assert callable(atom_text)
        parts: list[str] = []
        for monomial, coefficient in self.terms.items():
            factors = [atom_text(atom) for atom in monomial]
            if abs(coefficient) != 1 or not factors:
                factors.insert(0, str(abs(coefficient)))
            sign = "-" if coefficient < 0 else "+"
            parts += [sign, "*".join(factors)] if parts else [("-" if coefficient < 0 else "") + "*".join(factors)]
        return " ".join(parts) or "0"

    def __str__(self) -> str:
        if self._text is None:
            self._text = self._render()
        return self._text

    def __repr__(self) -> str:
        return f"Expr({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        if isinstance(other, int):
            return self.is_static and self.value == other
        return isinstance(other, Expr) and self._terms == other._terms

    def __hash__(self) -> int:
        return hash(str(self))


def _order(monomial: _Monomial) -> tuple[int, list[str]]:
    """Higher degrees first, then by name: `b*s + 2*s + 1`."""
    return -len(monomial), [str(atom) for atom in monomial]


def _expr(value: Expr | int) -> Expr:
    return value if isinstance(value, Expr) else Expr.constant(value)


def _call(kind: CallKind, lhs: Expr, rhs: Expr) -> Expr:
    return Expr({(CallAtom(kind, str(lhs), str(rhs)),): 1})


def _apply(kind: CallKind, lhs: Expr, rhs: Expr) -> Expr:
    match kind:
        case "//":
            return lhs // rhs
        case "%":
            return lhs % rhs
        case "max":
            return lhs.maximum(rhs)
        case "min":
            return lhs.minimum(rhs)


def _evaluate_atom(atom: _Atom, symbols: Mapping[str, int]) -> int:
    if isinstance(atom, str):
        if atom not in symbols:
            raise DimError(f"the dimension '{atom}' has no value here (known: {', '.join(sorted(symbols)) or 'none'})")
        return symbols[atom]
    lhs, rhs = parse(atom.lhs).evaluate(symbols), parse(atom.rhs).evaluate(symbols)
    if atom.kind in ("//", "%") and rhs == 0:
        raise DimError(f"division by zero in '{atom}'")
    match atom.kind:
        case "//":
            return lhs // rhs
        case "%":
            return lhs % rhs
        case "max":
            return max(lhs, rhs)
        case "min":
            return min(lhs, rhs)


def atom_bounds(atom: _Atom, ranges: Mapping[str, Range]) -> Range:
    if isinstance(atom, str):
        if atom not in ranges:
            raise DimError(f"the dimension '{atom}' has no range (known: {', '.join(sorted(ranges)) or 'none'})")
        return ranges[atom]
    (a, b), (c, d) = parse(atom.lhs).bounds(ranges), parse(atom.rhs).bounds(ranges)
    match atom.kind:
        case "max":
            return max(a, c), max(b, d)
        case "min":
            return min(a, c), min(b, d)
        case "%" | "//" if c <= 0:
            raise DimError(f"the divisor of '{atom}' may be zero or negative")
        case "%":
            return (a, b) if a >= 0 and b < c else (0, d - 1)
        case "//":
            corners = (a // c, a // d, b // c, b // d)
            return min(corners), max(corners)


_MAX_SPLITS = 6
"""The depth of `never_negative`'s recursion: each level replaces one quotient, `min` or `max`."""


def never_negative(expr: Expr, ranges: Mapping[str, Range], splits: int = _MAX_SPLITS) -> bool:
    """Whether `expr` >= 0 is proven for all values of its symbols. False may also mean that no proof was found.

    Beyond `tight_bounds` it uses two facts. ``a // c`` is ``(a - r) / c`` for some r from 0 to c - 1, so it examines c
    times the expression. ``min(a, b)`` is a or b, and no more than either (``max``: no less).
    """
    if (expr.value if expr.is_static else expr.tight_bounds(ranges)[0]) >= 0:
        return True
    atoms = dict.fromkeys(atom for monomial in expr.terms for atom in monomial if isinstance(atom, CallAtom))
    for atom in atoms if splits else ():
        if any(monomial.count(atom) > 1 for monomial in expr._terms):
            continue
        lhs, rhs = parse(atom.lhs), parse(atom.rhs)
        if atom.kind == "//" and rhs.is_static and rhs.value > 0:
            name = next(f"_r{i}" for i in itertools.count() if f"_r{i}" not in ranges)
            known = {**ranges, name: (0, rhs.value - 1)}
            return never_negative(_replaced(expr, atom, lhs - Expr.symbol(name), rhs.value), known, splits - 1)
        if atom.kind in ("min", "max"):
            ways = (never_negative(_replaced(expr, atom, each, 1), ranges, splits - 1) for each in (lhs, rhs))
            return any(ways) if _at_least(expr, atom, ranges) else all(ways)
    return False


def _replaced(expr: Expr, atom: CallAtom, by: Expr, times: int) -> Expr:
    """`times * expr`, with `times * atom` replaced by `by`. No term has the atom twice."""
    total = Expr({})
    for monomial, coefficient in expr._terms.items():
        rest = list(monomial)
        if atom in rest:
            rest.remove(atom)
            total = total + Expr({tuple(rest): coefficient}) * by
        else:
            total = total + Expr({monomial: coefficient * times})
    return total


def _at_least(expr: Expr, atom: CallAtom, ranges: Mapping[str, Range]) -> bool:
    """Whether replacing the atom by either of its sides can only make the expression smaller. Then a proof for one side
    is enough."""
    for monomial, coefficient in expr._terms.items():
        if atom in monomial:
            rest = list(monomial)
            rest.remove(atom)
            low, high = Expr({tuple(rest): coefficient}).bounds(ranges)
            if (high > 0) if atom.kind == "min" else (low < 0):
                return False
    return True


def dim(value: Dim | Expr) -> Expr:
    """A dimension in any form, as an `Expr`."""
    if isinstance(value, Expr):
        return value
    return Expr.constant(value) if isinstance(value, int) else parse(value)


@functools.lru_cache(maxsize=16384)
def parse(text: str) -> Expr:
    """Parses ``+ - * // % max(,) min(,)`` over integers and symbols (dims_text.py). DimError on anything else."""
    return read(text, _BUILDER)


_BUILDER: Builder[Expr] = Builder(
    Expr.constant,
    Expr.symbol,
    {
        "+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b, "//": lambda a, b: a // b,
        "%": lambda a, b: a % b, "max": lambda a, b: a.maximum(b), "min": lambda a, b: a.minimum(b),
    },
)  # fmt: skip


def product(dims: object) -> Expr:
    """The product of an iterable of dimensions (1 for none)."""
    total = Expr.constant(1)
    for each in dims:  # type: ignore[attr-defined]
        total = total * dim(each)
    return total


def contiguous_strides(shape: tuple[Dim, ...]) -> tuple[Dim, ...]:
    """Row-major strides, in elements."""
    strides: list[Dim] = []
    step = Expr.constant(1)
    for extent in reversed(shape):
        strides.append(step.to_dim())
        step = step * dim(extent)
    return tuple(reversed(strides))
