"""Names of arguments and weights: from attributes and locations of the text, else by number.

    %arg0: tensor<8x16xf32> {qc.name = "up.weight"}        up.weight
    %arg0: tensor<8x16xf32> loc("params['up']['w']")       params.up.w, as JAX writes pytree paths
    dense_resource<torch_tensor_16_8_torch.float32>        torch_tensor_16_8

A name of a text may end up in a ledger, in a file and in messages; it never reaches C++. Only letters, digits,
underscores, dots and hyphens are kept.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_KEPT = re.compile(r"[^\w.\-]+", re.ASCII)
_NAMED = re.compile(r'loc\("((?:[^"\\]|\\.)*)"(?:\(.*)?\)\Z', re.DOTALL)
MAX_LENGTH = 200
ATTRIBUTES = ("qc.name", "jax.arg_name", "ml_program.identifier", "tf_saved_model.index_path", "name")
"""Attributes of an argument that may hold its name, in order."""


def clean(name: str) -> str:
    """A dotted path: `params['up'][0].w` is `params.up.0.w`. Empty if nothing is left, or too much."""
    text = re.sub(r"""\[(?:'([^']*)'|"([^"]*)"|(\d+))\]""", lambda m: "." + (m[1] or m[2] or m[3] or ""), name)
    parts = (_KEPT.sub("_", part) for part in text.split("."))
    made = ".".join(part for part in parts if part.strip("_-"))
    return made if len(made) <= MAX_LENGTH else ""


def of_location(location: str) -> str:
    """The name that a location carries; empty for a file's line."""
    found = _NAMED.match(location)
    if found is None or re.match(r'loc\("[^"]*":\d', location):
        return ""
    return clean(found[1].replace("\\22", '"').replace('\\"', '"'))


def of_resource(name: str) -> str:
    """torch-mlir's names of resources end in the dtype; a dot would read as a module."""
    short = re.sub(r"_torch\.(float|bfloat|int|bool)\w*?(_\d+)?$", lambda m: m[2] or "", name)
    return clean(short.replace(".", "_")) or "resource"


def distinct(names: Iterable[str]) -> list[str]:
    """Empty names become `argN`, and equal ones get a number."""
    taken: set[str] = set()
    found: list[str] = []
    for number, name in enumerate(names):
        base = name or f"arg{number}"
        found.append(unique(base, taken))
        taken.add(found[-1])
    return found


def unique(name: str, taken: Iterable[str]) -> str:
    """`name`, or `name_2`, … ."""
    held, made, number = set(taken), name, 1
    while made in held:
        number += 1
        made = f"{name}_{number}"
    return made


_LINE = re.compile(r'"([^"]*)":(\d+)')


def line_of(location: str, file: str) -> str:
    """`layer.py:12` or `model.mlir:12`: the innermost place that a location names. The parser calls the text "-"."""
    found = _LINE.search(location)
    if found is None:
        return of_location(location)
    return f"{file if found[1] == '-' else found[1].rpartition('/')[2]}:{found[2]}"
