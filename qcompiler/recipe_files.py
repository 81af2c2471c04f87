"""Recipes as files: a table of TOML that `quant="recipe.toml"` takes.

    # made by qc.search for 4.25 bits: …
    preset = "float"
    linear = "q4_K"                        # "float" keeps a kind of weight
    embedding = "int8"
    promise_bits = 4.3

    [[rules]]
    pattern = "model.layers.0.mlp.down_proj"
    format = "q6_K"
    reason = "alone kl 1.2e-04"

Keys are the fields of `QuantConfig`; those that are left out have their defaults.  Every error names the key and its
line.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from qcompiler.errors import RecipeError

SUFFIX = ".toml"
TEXTS = ("preset", "linear", "embedding", "activations", "compute", "observer", "algorithm")
SWITCHES = ("rotate", "rotate_online", "equalise", "correct_bias", "rounded_inputs", "tune_scales")
KEYS = (*TEXTS, *SWITCHES, "smooth", "promise_bits", "separate", "rules")
RULE_KEYS = ("pattern", "format", "reason")
FLOAT = "float"
NO_PROMISE = "none"
LARGEST = 1 << 20
"""Bytes of a file that is read: a rule takes about 100."""

MOST_BITS = 64
"""The most bits per weight that a recipe promises."""


class RuleLike(Protocol):
    """The fields of a rule."""

    @property
    def pattern(self) -> str: ...
    @property
    def format(self) -> str | None: ...
    @property
    def reason(self) -> str: ...


class RecipeLike(Protocol):
    """The fields of a recipe that a file holds. They are not written if they have their defaults."""

    @property
    def preset(self) -> str: ...
    @property
    def linear(self) -> Any: ...
    @property
    def embedding(self) -> Any: ...
    @property
    def promise_bits(self) -> Any: ...
    @property
    def activations(self) -> str | None: ...
    @property
    def compute(self) -> str | None: ...
    @property
    def observer(self) -> str: ...
    @property
    def separate(self) -> tuple[str, ...]: ...
    @property
    def algorithm(self) -> str: ...
    @property
    def smooth(self) -> float | None: ...
    @property
    def rotate(self) -> bool: ...
    @property
    def equalise(self) -> bool: ...
    @property
    def correct_bias(self) -> bool: ...
    @property
    def rounded_inputs(self) -> bool: ...
    @property
    def rotate_online(self) -> bool: ...
    @property
    def tune_scales(self) -> bool: ...
    @property
    def all_rules(self) -> Sequence[RuleLike]: ...


def recipe_text(recipe: RecipeLike, heading: Sequence[str] = ()) -> str:
    """The file's text; `heading` are lines of a comment."""
    lines = [f"# {_one_line(each)}" for each in heading]
    lines.append(f"preset = {_quoted(recipe.preset)}")
    lines += [f"{key} = {_quoted(FLOAT if value is None else value)}" for key, value in
              (("linear", recipe.linear), ("embedding", recipe.embedding))]  # fmt: skip
    promise = recipe.promise_bits
    lines.append(f"promise_bits = {_quoted(NO_PROMISE) if promise is None else repr(float(promise))}")
    optional = (("activations", recipe.activations, None), ("compute", recipe.compute, None),
                ("observer", recipe.observer, "minmax"), ("algorithm", recipe.algorithm, "nearest"))  # fmt: skip
    lines += [f"{key} = {_quoted(value)}" for key, value, default in optional if value not in (default, None)]
    lines += [f"{key} = true" for key in SWITCHES if getattr(recipe, key)]
    lines += [f"smooth = {float(recipe.smooth)!r}"] if recipe.smooth is not None else []
    if recipe.separate:
        lines.append(f"separate = [{', '.join(map(_quoted, recipe.separate))}]")
    for rule in recipe.all_rules:
        lines += ["", "[[rules]]", f"pattern = {_quoted(rule.pattern)}"]
        lines.append(f"format = {_quoted(FLOAT if rule.format is None else rule.format)}")
        lines += [f"reason = {_quoted(rule.reason)}"] * bool(rule.reason)
    return "\n".join([*lines, ""])


@dataclass(frozen=True)
class RecipeFile:
    """What a file says. `fields` are keywords of `QuantConfig`; rules are (pattern, format, reason)."""

    path: Path
    lines: tuple[str, ...]
    fields: Mapping[str, Any]

    def where(self, key: str, rule: int | None = None) -> str:
        """The place of a key, for errors; of that rule if one is given."""
        which = "" if rule is None else f", rule {rule + 1}"
        return f"{self.path}{which}, line {_line(self.lines, key, rule)}: {key}"


def read_recipe(path: Path) -> RecipeFile:
    """Reads a file. RecipeError if it cannot be read or is no TOML, for an unknown key and for a wrong type."""
    try:
        if not path.is_file():
            raise RecipeError(f"cannot read the recipe {path}: there is no such file")
        with path.open("rb") as file_:
            held = file_.read(LARGEST + 1)
        if len(held) > LARGEST:
            raise RecipeError(f"{path} has more than {LARGEST >> 20} MiB: it is no recipe")
        text = held.decode("utf-8-sig").replace("\r\n", "\n")
    except (OSError, ValueError) as error:
        raise RecipeError(f"cannot read the recipe {path}: {error}") from error
    try:
        found = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError: a number of thousands of digits, too
        raise RecipeError(f"{path} is no TOML: {error}") from error
    file = RecipeFile(path, tuple(text.split("\n")), found)
    return replace(file, fields=_Reader(file).fields())


@dataclass(frozen=True)
class _Reader:
    file: RecipeFile

    def fields(self) -> dict[str, Any]:
        found = self.file.fields
        for key, value in found.items():
            self._check(key, value)
        if "preset" not in found:
            raise RecipeError(f'{self.file.path} has no preset; write preset = "float" for a recipe of rules')
        fields = dict(found)
        for key in ("linear", "embedding"):
            if fields.get(key) == FLOAT:
                fields[key] = None
        if fields.get("promise_bits") == NO_PROMISE:
            fields["promise_bits"] = None
        fields["separate"] = tuple(fields.get("separate", ()))
        fields["rules"] = tuple(self._rules(found.get("rules", [])))
        return fields

    def _check(self, key: str, value: Any) -> None:
        wrong = ""
        if key not in KEYS:
            wrong = f" is no key of a recipe; there are: {', '.join(KEYS)}"
        elif key in TEXTS and not isinstance(value, str):
            wrong = f" is {_shown(value)}: write a text, such as {key} = {_EXAMPLES[key]}"
        number = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= MOST_BITS
        if key == "promise_bits" and not number and value != NO_PROMISE:
            wrong = f' is {_shown(value)}: write bits per weight, such as promise_bits = 6.5, or "none"'
        if key in SWITCHES and not isinstance(value, bool):
            wrong = f" is {_shown(value)}: write {key} = true or false"
        if key == "smooth" and (isinstance(value, bool) or not isinstance(value, int | float)):
            wrong = f" is {_shown(value)}: write an exponent from 0 to 1, such as smooth = 0.5"
        if key == "separate" and not (isinstance(value, list) and all(isinstance(each, str) for each in value)):
            wrong = f' is {_shown(value)}: write a list of texts, such as separate = ["*.q_proj"]'
        if wrong:
            raise RecipeError(self.file.where(key) + wrong)

    def _rules(self, given: Any) -> list[tuple[str, str | None, str]]:
        if not isinstance(given, list) or not all(isinstance(each, dict) for each in given):
            raise RecipeError(f"{self.file.where('rules')} are tables, each under [[rules]]")
        return [self._rule(number, each) for number, each in enumerate(given)]

    def _rule(self, number: int, given: Mapping[str, Any]) -> tuple[str, str | None, str]:
        for key, value in given.items():
            if key not in RULE_KEYS:
                where = self.file.where(key, number)
                raise RecipeError(f"{where} is no key of a rule; there are: {', '.join(RULE_KEYS)}")
            if not isinstance(value, str):
                raise RecipeError(f"{self.file.where(key, number)} is {_shown(value)}: write a text")
        for key in ("pattern", "format"):
            if key not in given:
                raise RecipeError(f"{self.file.where('rules', number)} has no {key}; a rule has a pattern and a format")
        text = given["format"]
        return given["pattern"], None if text == FLOAT else text, given.get("reason", "")


def _shown(value: Any) -> str:
    """A value in a message: its beginning."""
    try:
        text = repr(value)
    except ValueError:
        return "a number of thousands of digits"
    return text if len(text) <= 80 else f"{text[:80]}…"


def _line(lines: Sequence[str], key: str, rule: int | None) -> int:
    """The line that begins with a key, behind the heading of that rule; the heading, or 1, for a table in one line."""
    heads = [at for at, line in enumerate(lines) if re.match(r"\s*\[\[\s*rules\s*\]\]", line)]
    first = heads[rule] if rule is not None and rule < len(heads) else 0
    if key == "rules" and heads:
        return (first if rule is not None else heads[0]) + 1
    name = rf'\s*(?:\[+\s*)?["\']?{re.escape(key)}["\']?\s*(?:=|\.|\])'
    return next((at + 1 for at in range(first, len(lines)) if re.match(name, lines[at])), first + 1)


_EXAMPLES = {
    "preset": '"nf4"', "linear": '"q4_K"', "embedding": '"int8"', "activations": '"int8"', "compute": '"bf16"',
    "observer": '"minmax"', "algorithm": '"nearest"',
}  # fmt: skip


def _quoted(text: str) -> str:
    """A basic string of TOML: JSON's escapes are a part of its own. DEL, which JSON leaves, is escaped, too."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _one_line(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text)


__all__ = ["SUFFIX", "read_recipe", "recipe_text"]
