"""Mutants of a plan as JSON: every number, size, name and word of it changed, every list shortened, doubled, reordered;
and edits that keep parts in agreement, so that they pass by checks that compare them.

What is not mutated: the order of steps and the streams (tests/verifier/planmutants does that), and the weights' bytes.
A mutant's class is the place that was edited: ``kernels.body.extents``, ``views.offset``, ``arenas.nbytes``, ….
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from qcompiler.errors import PlanError
from qcompiler.plan.plan import Plan, from_json, to_json

Path = tuple[Any, ...]
_LEFT_OUT = frozenset({"serves", "parameters", "sha256", "version", "torch_dtype", "stream", "streams", "devices"})


@dataclass(frozen=True)
class Mutant:
    """`plan` is None where the edit is no plan any more: a number in the place of a word."""

    kind: str
    site: str
    plan: Plan | None

    def __str__(self) -> str:
        return f"{self.kind} at {self.site}"


def mutants_of(plan: Plan) -> Iterator[Mutant]:
    """All of them, in a fixed order. An edit that changes nothing is left out."""
    tree = json.loads(to_json(plan))
    seen = {json.dumps(tree, sort_keys=True)}
    for kind, site, other in _edits(tree):
        text = json.dumps(other, sort_keys=True)
        if text in seen:
            continue
        seen.add(text)
        try:
            made = from_json(text)
        except PlanError:
            made = None
        yield Mutant(kind, site, made)


def _edits(tree: Any) -> Iterator[tuple[str, str, Any]]:
    for path, value in _walk(tree):
        if isinstance(value, list):
            yield from _list_edits(tree, path, value)
        elif not isinstance(value, dict):
            for other in _other_values(tree, path, value):
                yield _class(path), f"{_text(path)}: {value!r} to {str(other)[:60]!r}", _with(tree, path, other)
    yield from _agreeing(tree)


def _walk(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every value of the tree with its path, outer ones first."""
    yield path, value
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        if key not in _LEFT_OUT:
            yield from _walk(item, (*path, key))


def _with(tree: Any, path: Path, value: Any) -> Any:
    """The tree with another value at a path."""
    made = copy.deepcopy(tree)
    at = made
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return made


def _at(tree: Any, path: Path) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def _text(path: Path) -> str:
    return ".".join(map(str, path))


def _class(path: Path) -> str:
    """Where the edit is, in words: views for operands of steps, wherever these stand."""
    words = [str(key) for key in path if not isinstance(key, int)]
    if "steps" in words:
        rest = words[words.index("steps") + 1 :]
        views = {"operands", "source", "target"} & set(rest)
        where = "init.views" if words[0] == "init" else "views"
        return (
            ".".join([where, *rest[1:2]])
            if views
            else ".".join(["init.steps" if words[0] == "init" else "steps", *rest[:2]])
        )
    if words[0] == "kernels" and len(words) > 2 and words[1] == "operands":
        return ".".join(["kernels.operands", words[2]])
    return ".".join(words[:3])


# --- single values ---------------------------------------------------------------------------------------------------

_DTYPES = ("f32", "bf16", "f64", "i64", "i32", "i8", "ui8", "i1")
_WORDS: dict[str, tuple[str, ...]] = {
    "dtype": _DTYPES,
    "access": ("r", "w", "rw"),
    "iterators": ("parallel", "reduction"),
    "m_class": ("1", "2-8", "large"),
    "mask": ("none", "bool", "float"),
    "fold": ("none", "add", "mul", "max", "min", "logaddexp"),
    "mode": ("take", "along"),
    "kind": ("constants", "init", "activations", "state", "input", "output", "layer", "rms", "token", "outliers",
             "tensor"),
    "layout": (
        "canonical", "cpu_p16_v1", "cpu_p16_v2", "cuda_t16_v1", "cpu_p16_pairs_v1", "cpu_p16_pairs_v2",
        "cuda_t16_pairs_v1", "other",
    ),
    "op": ("arith.addf", "arith.addi", "arith.divsi", "math.exp", "arith.select", "linalg.index", "arith.extf",
           "arith.bitcast", "arith.constant", "arith.sitofp"),
    "predicate": ("slt", "ult", "oeq", "always"),
    "value": ("0", "-1", "true", "0x1.0p+0", "inf", "nan", "99999999999999999999", "1; int x"),
    "init": ("0x0.0p+0", "-inf", "1", "true", "x"),
}  # fmt: skip


def _other_values(tree: Any, path: Path, value: Any) -> Iterator[Any]:
    """What else might stand there: of the same type mostly, since other types are refused when the plan is read."""
    field = next((key for key in reversed(path) if not isinstance(key, int)), "")
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (
            value + 1,
            value - 1,
            2 * value,
            value // 2,
            0,
            -value,
            value + 16,
            1 << 31,
            1 << 40,
            1 << 62,
            1 << 64,
        )
        if field not in ("min", "max", "nbytes", "axis"):
            symbols = sorted({s["name"] for entry in tree["entries"] for s in entry["symbols"]})
            yield from symbols
            yield from (f"{s} + {value}" for s in symbols[:1])
            yield from _hostile(symbols, value)
    elif isinstance(value, float):
        yield from (0.0, -value, value * 1e30)
    elif value is None:
        yield from (0, 1, 5, "main", "canonical")
    elif isinstance(value, str):
        yield from _other_words(tree, path, field, value)


def _hostile(symbols: list[str], value: int) -> Iterator[str]:
    """Sizes that exact integers and 64 bits see differently, or that divide by what may be 0."""
    for s in symbols[:1]:
        yield f"max({-(2**64)}*{s} + {value + 1000000}, {value})"
        yield f"{value + 2**63}*{s} - {2**63}*{s}"
        yield f"({s} // ({s} - 1))"
        yield f"min({s}, {value})"
        yield f"max({s}, {value})"


def _other_words(tree: Any, path: Path, field: str, value: str) -> Iterator[Any]:
    words = _WORDS.get(field, ())
    yield from (word for word in words if word != value)
    if words:
        return
    if _is_size(path, field):
        yield from (f"{value} + 1", f"{value} - 1", f"2*{value}", 0, 1, 4, 64, f"-{value}", f"{value}*{value}")
        symbols = sorted(set(re.findall(r"[A-Za-z_]\w*", value)) - {"max", "min"})
        yield from _hostile(symbols, 4)
        yield from (f"({value}) // 2", f"({value}) % 3")
    for name in sorted(_names(tree, path, field)):
        if name != value:
            yield name
    yield from ("", "nobody", f"{value}_row")


def _is_size(path: Path, field: str) -> bool:
    return field in (
        "shape", "strides", "offset", "extents", "coefficients", "m", "n", "k", "rows", "cols", "count", "outer",
        "length", "inner", "batch", "q_len", "kv_len", "image", "size", "on",
    )  # fmt: skip


def _names(tree: Any, path: Path, field: str) -> set[str]:
    """Other names of the same kind."""
    kinds: dict[str, Callable[[], Iterator[str]]] = {
        "buffer": lambda: (each["name"] for each in tree["buffers"]),
        "arena": lambda: (each["name"] for each in tree["arenas"]),
        "kernel": lambda: (each["name"] for each in tree["kernels"]),
        "entry": lambda: (each["name"] for each in (*tree["entries"], *([tree["init"]] if tree.get("init") else []))),
        "weight": lambda: (each["name"] for each in tree["weights"]),
        "symbols": lambda: (s["name"] for entry in tree["entries"] for s in entry["symbols"]),
        "name": lambda: (each["name"] for each in _at(tree, path[:-2]) if isinstance(each, dict) and "name" in each),
        "args": lambda: (each["result"] for each in _at(tree, path[:-3]) if isinstance(each, dict)),
        "yields": lambda: (each["result"] for each in _at(tree, path[:-2])["ops"]),
    }
    try:
        return set(kinds[field]()) if field in kinds else set()
    except (KeyError, TypeError, IndexError):
        return set()


# --- lists -----------------------------------------------------------------------------------------------------------


def _list_edits(tree: Any, path: Path, value: list[Any]) -> Iterator[tuple[str, str, Any]]:
    """An item less, an item twice, neighbours exchanged."""
    if not path or (path[-1] == "steps" and path[0] == "entries"):
        return
    kind = _class((*path, 0)) + "[]"
    for i in range(len(value)):
        yield kind, f"{_text(path)}: without {i}", _with(tree, path, value[:i] + value[i + 1 :])
        yield kind, f"{_text(path)}: {i} twice", _with(tree, path, value[: i + 1] + value[i:])
        if i + 1 < len(value):
            swapped = [*value[:i], value[i + 1], value[i], *value[i + 2 :]]
            yield kind, f"{_text(path)}: {i} and {i + 1} exchanged", _with(tree, path, swapped)


# --- edits in agreement ----------------------------------------------------------------------------------------------


def _agreeing(tree: Any) -> Iterator[tuple[str, str, Any]]:
    yield from _operands_and_views(tree)
    yield from _sizes_everywhere(tree)
    yield from _weights_everywhere(tree)
    yield from _room_for_everything(tree)
    yield from _init_elsewhere(tree)


def _views_of(tree: Any, kernel: str, place: int) -> Iterator[Any]:
    """The views (as they stand in the tree) that are passed to a kernel for one operand."""
    for entry in (*tree["entries"], *([tree["init"]] if tree.get("init") else [])):
        for step in entry["steps"]:
            launched = {step.get("kernel"), *(case["kernel"] for case in step.get("cases", ()))}
            if kernel in launched:
                yield step["operands"][place]


def _operands_and_views(tree: Any) -> Iterator[tuple[str, str, Any]]:
    """A stride, an extent or a type in the spec and in every view of it; for a loop, in the access, too."""
    for k, spec in enumerate(tree["kernels"]):
        for place, operand in enumerate(spec["operands"]):
            for field in ("strides", "shape"):
                for axis, old in enumerate(operand.get(field, ())):
                    for new in (0, 1, 2, 3, -1, 17, 1 << 33, 1 << 61):
                        yield _agreed(tree, (k, place, field, axis), old, new)
            for dtype in _DTYPES:
                yield _agreed(tree, (k, place, "dtype", None), operand["dtype"], dtype)


def _agreed(tree: Any, where: tuple[int, int, str, int | None], old: Any, new: Any) -> tuple[str, str, Any]:
    k, place, field, axis = where
    made = copy.deepcopy(tree)
    spec = made["kernels"][k]
    for each in (spec["operands"][place], *_views_of(made, spec["name"], place)):
        if axis is None:
            each[field] = new
        else:
            each[field][axis] = new
    body = spec["body"]
    if field == "dtype" and body["type"] == "loop":
        body["body"]["inputs"][place][1] = new
    if field == "strides" and body["type"] == "loop":
        coefficients = body["accesses"][place]["coefficients"]
        for i, step in enumerate(coefficients):
            if step == old:
                coefficients[i] = new
    return f"agreeing {field}", f"kernel {k}, operand {place}, {field} {axis}: {old!r} to {new!r}", made


def _sizes_everywhere(tree: Any) -> Iterator[tuple[str, str, Any]]:
    """A number of a body, wherever it stands in the kernel and its views; and in signatures and memory as well."""
    numbers = {
        value for path, value in _walk(tree["kernels"]) if isinstance(value, int) and not isinstance(value, bool)
    }
    symbols = sorted({s["name"] for entry in tree["entries"] for s in entry["symbols"]})
    for old in sorted(numbers - {0, 1}):
        for new in (old + 1, old - 1, 2 * old, 0, -old, *symbols[:1], *_hostile(symbols, old)):
            for scope in (("kernels",), ("kernels", "entries"), ("kernels", "entries", "init")):
                made = copy.deepcopy(tree)
                for name in scope:
                    if made.get(name) is not None:
                        made[name] = _replaced(made[name], old, new)
                yield f"agreeing size in {len(scope)}", f"{old} to {str(new)[:40]} in {', '.join(scope)}", made


def _weights_everywhere(tree: Any) -> Iterator[tuple[str, str, Any]]:
    """A matrix has other rows and columns wherever they stand, with as many bytes as before, or those that a product
    of 64 bits gives where it wraps: none."""
    for number, weight in enumerate(tree.get("weights", ())):
        if len(weight["shape"]) != 2:
            continue
        rows, cols = weight["shape"]
        large = ((1 << 50, 1 << 20), (1 << 48, 1 << 24), (1 << 40, 1 << 40))
        for more, wide in (*large, (2 * rows, cols), (rows, 2 * cols), (16 * rows, cols // 2), (rows // 2, cols)):
            for nbytes in (weight["nbytes"], 0, 2 * weight["nbytes"]):
                made = copy.deepcopy(tree)
                for name in ("kernels", "entries", "init"):
                    if made.get(name) is not None:
                        made[name] = _replaced(_replaced(made[name], rows, more), cols, wide)
                made["weights"][number] |= {"shape": [more, wide], "nbytes": nbytes}
                for each in (*made["arenas"], *made["buffers"]):
                    if each.get("kind") in ("input", "output", "activations") or each.get("arena") in _callers(tree):
                        each["nbytes"] = 1 << 40
                yield "agreeing weight", f"weight {number}: {rows}x{cols} to {more}x{wide}, {nbytes} bytes", made


def _callers(tree: Any) -> set[str]:
    return {each["name"] for each in tree["arenas"] if each["kind"] in ("input", "output", "activations")}


def _replaced(value: Any, old: int, new: Any) -> Any:
    if isinstance(value, dict):
        return {key: each if key in ("min", "max") else _replaced(each, old, new) for key, each in value.items()}
    if isinstance(value, list):
        return [_replaced(each, old, new) for each in value]
    return new if value == old and isinstance(value, int) and not isinstance(value, bool) else value


def _room_for_everything(tree: Any) -> Iterator[tuple[str, str, Any]]:
    """Memory is large, arguments are not: what then holds a view back is the caller's array alone."""
    large = copy.deepcopy(tree)
    for each in (*large["arenas"], *large["buffers"]):
        each["nbytes"] = 1 << 20
    for path, value in _walk(tree):
        words = [key for key in path if not isinstance(key, int)]
        if "steps" in words and words[-1] in ("offset", "shape", "strides") and isinstance(value, int):
            for new in (value + 1, value + 64, 1000):
                yield "large memory", f"{_text(path)}: {value} to {new}", _with(large, path, new)
        if words[-2:] == ["inputs", "shape"] or words[-2:] == ["outputs", "shape"]:
            for new in (1, 2, "b", "b - 1", 4096) if not isinstance(value, list) else ():
                yield "large memory", f"{_text(path)}: {value!r} to {new!r}", _with(large, path, new)


def _init_elsewhere(tree: Any) -> Iterator[tuple[str, str, Any]]:
    """A kernel of the program is launched by init, on the memory that it has in its entry."""
    for entry in tree["entries"]:
        for number, step in enumerate(entry["steps"]):
            if "stream" not in step:
                continue
            made = copy.deepcopy(tree)
            init = made.get("init") or {"name": "init", "symbols": [], "inputs": [], "outputs": [], "steps": []}
            init["steps"] = [*init["steps"], step]
            made["init"] = init
            yield "init.steps", f"step {number} of {entry['name']} at init", made
            within = copy.deepcopy(made)
            within["init"]["symbols"] = entry["symbols"]
            within["init"]["inputs"] = entry["inputs"]
            yield "init.steps", f"step {number} of {entry['name']} at init, with its arguments", within
