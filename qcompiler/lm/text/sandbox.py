"""jinja2's immutable sandbox with a budget: see template.py. Imports jinja2."""

from __future__ import annotations

import datetime
import html
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import BuiltinMethodType
from typing import Any, NoReturn

import jinja2
from jinja2 import ext, filters, nodes
from jinja2.runtime import LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from qcompiler.lm.text.budget import BUDGET, MAX_TEXT, LimitError, text_size
from qcompiler.lm.text.budget import nodes as count_values

_METHODS: dict[type, frozenset[str]] = {
    str: frozenset((
        "startswith", "endswith", "strip", "lstrip", "rstrip", "split", "rsplit", "splitlines", "replace", "upper",
        "lower", "title", "capitalize", "join", "find", "rfind", "count", "index", "removeprefix", "removesuffix",
        "isdigit", "isalpha", "isalnum", "isspace", "isupper", "islower", "partition", "rpartition", "casefold",
    )),
    dict: frozenset(("get", "items", "keys", "values")),
    list: frozenset(("index", "count")),
    tuple: frozenset(("index", "count")),
}  # fmt: skip
_FILTERS = frozenset((
    "abs", "attr", "capitalize", "count", "d", "default", "dictsort", "first", "float", "int", "items", "last",
    "length", "list", "lower", "map", "max", "min", "reject", "rejectattr", "reverse", "round", "select", "selectattr",
    "sort", "title", "trim", "unique", "upper",
))  # fmt: skip
"""Filters of jinja2 whose result is not longer than what they are given."""
_COSTLY = frozenset(("sort", "dictsort", "unique", "min", "max"))


# --- values ----------------------------------------------------------------------------------------------------------


def _shown(value: Any) -> str:
    """The text of a value. LimitError before it grows too large."""
    if isinstance(value, str):
        return value
    if not (value is None or isinstance(value, int | float | list | tuple | Mapping | Undefined)):
        raise LimitError(f"it prints a {type(value).__name__}, which is no text, number, list or dict")
    return _printed(value, str)


def _printed(value: Any, printer: Callable[[Any], str]) -> str:
    """The text that `printer` makes of a value, which is at most twelve times too long before it is refused."""
    budget = BUDGET.get()
    budget.make(text_size(value) // 12)
    made = printer(value)
    budget.make(len(made))
    return made


def _joined(pieces: Iterable[Any], between: str = "") -> str:
    texts = [_shown(piece) for piece in pieces]
    budget = BUDGET.get()
    budget.step(1 + len(texts) // 64)
    budget.make(sum(map(len, texts)) + len(between) * max(len(texts) - 1, 0))
    return between.join(texts)


def _made(value: Any) -> Any:
    BUDGET.get().make(8 * count_values(value))
    return value


def _counted(values: Any) -> Any:
    """The values of a loop. A generator is counted as it goes; what has a length keeps it for `loop.length`."""
    return _Counted(values) if isinstance(values, list | tuple | dict | str | range) else _each(values)


class _Counted:
    """An iterable with a length that counts its steps."""

    def __init__(self, values: Any) -> None:
        self._values = values

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[Any]:
        return _each(self._values)


def _each(values: Iterable[Any]) -> Iterator[Any]:
    step = BUDGET.get().step
    for value in values:
        step()
        yield value


def _sliced(value: Any, start: Any, stop: Any, step: Any) -> Any:
    BUDGET.get().make(len(value) if hasattr(value, "__len__") else 0)
    return value[slice(start, stop, step)]


def _replaced(text: str, old: str, new: str, count: Any = -1) -> str:
    count = -1 if count is None else count
    found = text.count(old) if isinstance(count, int) and count < 0 else min(text.count(old), count)
    BUDGET.get().make(len(text) + found * len(new))
    return text.replace(old, new, count)


_SPEC = re.compile(r"%(?:%|(?:\([^()]*\))?[-+ #0]{0,3}\d{0,3}(?:\.\d{1,3})?[diouxXeEfFgGsrc])")


def _formatted(text: str, values: Any) -> str:
    """`text % values`, with widths of at most three digits."""
    if "%" in _SPEC.sub("", text):
        raise LimitError("it formats with a width above 999, or in a way that is not read")
    given = values if isinstance(values, tuple) else (values,)
    size = max([text_size(value) for value in given], default=0)
    BUDGET.get().make(len(text) + text.count("%") * (1000 + size))
    return str(text % values)


# --- operators and calls ---------------------------------------------------------------------------------------------


def _operate(operator: str, left: Any, right: Any) -> Any:
    budget = BUDGET.get()
    match operator:
        case "*" if isinstance(left, str | list | tuple) or isinstance(right, str | list | tuple):
            many, times = (left, right) if isinstance(right, int) else (right, left)
            if isinstance(times, int) and hasattr(many, "__len__"):
                each = 1 if isinstance(many, str) else 8 * count_values(many)
                budget.make(max(len(many), 1) * each * max(times, 0))
            return left * right
        case "*" if isinstance(left, int) and isinstance(right, int):
            if left.bit_length() + right.bit_length() > 256:
                raise LimitError("it makes a number of more than 256 bits")
            return left * right
        case "**":
            if isinstance(left, int) and isinstance(right, int) and left.bit_length() * abs(right) > 256:
                raise LimitError("it makes a number of more than 256 bits")
            return left**right
        case "%" if isinstance(left, str):
            return _formatted(left, right)
        case "%":
            return left % right
        case "+" if isinstance(left, str) and isinstance(right, str):
            budget.make(len(left) + len(right))
            return left + right
        case _:
            return _made(left + right)


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(("*", "**", "%", "+"))
    concat = staticmethod(_joined)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        return _operate(operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # jinja2's names
        budget = BUDGET.get()
        budget.step()
        if isinstance(__obj, BuiltinMethodType):
            names = {name: value for name, value in kwargs.items() if name not in ("_loop_vars", "_block_vars")}
            return __self._call_method(__obj, *args, **names)
        of_loop = isinstance(getattr(__obj, "__self__", None), LoopContext)  # loop.cycle, loop.changed
        if of_loop or isinstance(__obj, Macro | Undefined) or __obj in __self.globals.values():
            return super().call(__context, __obj, *args, **kwargs)
        raise LimitError(f"it calls a {type(__obj).__name__}, which is no macro, method or function of a template")

    def wrap_str_format(self, value: Any) -> None:
        """No wrapper: `str.format` is refused as a method, since it pads to any width."""

    def _call_method(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        owner, name = method.__self__, method.__name__
        if name not in _METHODS.get(type(owner), frozenset()):
            raise LimitError(f"it calls {type(owner).__name__}.{name}, which templates may not use here")
        if name == "replace":
            return _replaced(owner, *args, **kwargs)
        if name == "join":
            (pieces,) = args
            return _joined(pieces, owner)
        BUDGET.get().make(2 * len(owner) if isinstance(owner, str) else 8 * len(owner))
        return method(*args, **kwargs)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = _Rewriter().visit(super()._parse(source, name, filename))
        tree.set_environment(self)
        return tree  # type: ignore[no-any-return]


class _Rewriter(NodeTransformer):
    """Puts filters in the place of what a sandbox cannot intercept. Their names are none that a template can write."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        if node.recursive:
            raise jinja2.TemplateSyntaxError("recursive loops are not read", node.lineno)
        self.generic_visit(node)
        node.iter = _filter(node.iter, "#counted")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filter(nodes.List(node.nodes, lineno=node.lineno), "#joined")

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        ends = (node.arg.start, node.arg.stop, node.arg.step)
        none = nodes.Const(None, lineno=node.lineno)
        return _filter(node.node, "#sliced", [none if end is None else end for end in ends])

    def visit_List(self, node: nodes.Expr) -> nodes.Node:
        self.generic_visit(node)
        return _filter(node, "#made")

    visit_Dict = visit_List

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _filter(node, "#made") if node.ctx == "load" else node


def _filter(node: Any, name: str, args: list[nodes.Expr] | None = None) -> nodes.Filter:
    return nodes.Filter(node, name, args or [], [], None, None, lineno=node.lineno)


class _Generation(ext.Extension):
    """`{% generation %}` marks an assistant's tokens for training; here it is what stands in it."""

    tags = {"generation"}  # noqa: RUF012  # jinja2's type

    def parse(self, parser: Any) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)  # type: ignore[no-any-return]


# --- what templates call ---------------------------------------------------------------------------------------------


class _Namespace(Namespace):
    """jinja2's namespace without names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # a template may pass a variable named `self`
        self, *given = args
        Namespace.__init__(self)
        for name, value in dict(*given, **kwargs).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise LimitError(f"it sets the name {name!r} of a namespace, which begins with an underscore")
        super().__setitem__(name, value)


def _refuse(message: Any) -> NoReturn:
    raise jinja2.TemplateError(_shown(message))


def _now(form: str) -> str:
    if len(form) > 100 or re.search(r"%[^a-zA-Z%]*\d", form):
        raise LimitError("it formats a time with more than 100 characters, or with a width")
    return datetime.datetime.now().strftime(form)


def _dict(*args: Any, **kwargs: Any) -> Any:
    return _made(dict(*args, **kwargs))


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """JSON as it is, without HTML's escapes."""
    if isinstance(value, Undefined):
        raise jinja2.UndefinedError("a variable that tojson is given is undefined")
    step = indent if isinstance(indent, int) else len(indent or "")
    if step > 16 or sum(map(len, separators or ())) > 16:
        raise LimitError("it indents JSON by more than 16 characters")
    options: dict[str, Any] = {"ensure_ascii": ensure_ascii, "indent": indent, "sort_keys": sort_keys}
    options["separators"] = separators and tuple(separators)
    return _printed(value, lambda given: json.dumps(given, **options))


def _indent(text: str, width: Any = 4, first: bool = False, blank: bool = False) -> str:
    size = width if isinstance(width, int) else len(width)
    if size > 64:
        raise LimitError("it indents by more than 64 characters")
    BUDGET.get().make(len(text) + size * (1 + text.count("\n")))
    return filters.do_indent(text, width, first, blank)


def _escape(value: Any) -> str:
    """HTML's escapes, as a text: jinja2's own type for such texts has methods that grow without a limit."""
    text = _shown(value)
    BUDGET.get().make(6 * len(text) if len(text) < MAX_TEXT // 6 else MAX_TEXT + 1)
    return html.escape(text)


@jinja2.pass_eval_context
def _join(_: Any, values: Iterable[Any], d: Any = "", attribute: Any = None) -> str:
    if attribute is not None:
        raise LimitError("it joins by an attribute; use map(attribute=…) | join")
    return _joined(values, _shown(d))


def _charged(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter of jinja2 that is counted by the size of what it is given."""
    places = {"context": 1, "eval_context": 1, "environment": 1}
    passes = getattr(function, "jinja_pass_arg", None)
    place = 0 if passes is None else places[passes.name]

    def charged(*args: Any, **kwargs: Any) -> Any:
        value = args[place] if len(args) > place else None
        size = len(value) if isinstance(value, str | list | tuple | Mapping) else 1
        if name in _COSTLY and not isinstance(value, str):
            size = 20 * text_size(value) if isinstance(value, list | tuple | Mapping) else size
        budget = BUDGET.get()
        budget.step()
        budget.make(size if isinstance(value, str) else 8 * size)
        return function(*args, **kwargs)

    if passes is not None:
        charged.jinja_pass_arg = passes  # type: ignore[attr-defined]
    return charged


def make_environment() -> Any:
    """The environment: the syntax of transformers' (trimmed blocks, break and continue, generation), the names too."""
    made = _Environment(
        trim_blocks=True, lstrip_blocks=True, optimized=False, finalize=_shown, cache_size=0,
        extensions=[_Generation, ext.loopcontrols],
    )  # fmt: skip
    kept = {name: _charged(name, function) for name, function in made.filters.items() if name in _FILTERS}
    made.filters = kept | {
        "tojson": _tojson, "indent": _indent, "join": _join, "replace": _replaced, "string": _shown,
        "safe": _shown, "e": _escape, "escape": _escape,
        "format": lambda text, *values: _formatted(text, values),
        "#counted": _counted, "#joined": _joined, "#sliced": _sliced, "#made": _made,
    }  # fmt: skip
    made.globals = {
        "range": made.globals["range"], "dict": _dict, "namespace": _Namespace, "raise_exception": _refuse,
        "strftime_now": _now,
    }  # fmt: skip
    return made


__all__ = ["make_environment"]
