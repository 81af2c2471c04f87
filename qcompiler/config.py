"""Recipes: which storage format each weight of a model gets.

    QuantConfig("nf4")                                     linears nf4 (block 64), embeddings int8 per row
    QuantConfig("int4:group=64", rules={"*.query": "int8", "lm_head": None})
    QuantConfig("nf4", embedding="nf4", promise_bits=4.6)
    QuantConfig("q4_K, else q5_0, else int8")              alternatives where blocks of 256 do not divide K
    QuantConfig("q4_K_M")                                  llama.cpp's mixture: a format per tensor (format_mixtures.py)
    QuantConfig.of("recipe.toml")                          the recipe of a file (recipe_files.py)

A text may name several formats with `else` between them; the first that can store a matrix is taken.  A recipe of one
format has a built-in chain of alternatives, which ends in int8 per row and is visible in `linear`; rules have none.

Exceptions are made by explicit rules only: a rule is a glob over module paths, the first match wins, and a rule that
matches nothing is an error.  The ledger prints every rule that applied.
"""

from __future__ import annotations

import difflib
import fnmatch
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, Literal

from qcompiler import formats
from qcompiler.errors import QCompilerError, RecipeError, UnknownFormatError
from qcompiler.format_mixtures import ALTERNATIVE_FORMAT, MIXTURES
from qcompiler.formats import Format
from qcompiler.plan.kernel import FormatRef
from qcompiler.recipe_files import SUFFIX, RecipeFile, read_recipe


class _Unset(Enum):
    PRESET = "as the preset says"


PRESET: Literal[_Unset.PRESET] = _Unset.PRESET
"""The default of a field whose value comes from the preset."""


@dataclass(frozen=True)
class Rule:
    """Modules whose path matches `pattern` (a glob) are stored in `format`, or kept as they are if it is None."""

    pattern: str
    format: str | None
    reason: str = ""

    def matches(self, parameter: str) -> bool:
        """Whether the rule applies to `parameter`, a full path; the pattern may name its module or the parameter."""
        module = parameter.rpartition(".")[0]
        return fnmatch.fnmatchcase(module, self.pattern) or fnmatch.fnmatchcase(parameter, self.pattern)

    @property
    def text(self) -> str:
        return f"rule '{self.pattern}'" + (f": {self.reason}" if self.reason else "")


RuleLike = Rule | tuple[str, str | None] | tuple[str, str | None, str]


def choices(text: str) -> tuple[str, ...]:
    """The formats in a text, in order: ("q4_K", "q5_0") for "q4_K, else q5_0". "float" keeps a weight."""
    return tuple(part.strip() for part in re.split(r",\s*else\s", text))


def with_next(text: str) -> str:
    """A format and its alternatives where its blocks do not divide K, down to int8 per row, which takes any K.

    The alternatives are llama.cpp's for GGUF's formats, and smaller groups for integers.
    """
    fmt = resolve_format(text)
    if fmt.declaration.tail == "short":
        return text
    chain = [text]
    if fmt.name in ALTERNATIVE_FORMAT:
        chain.append(ALTERNATIVE_FORMAT[fmt.name])
    group = fmt.params.get("group")
    while isinstance(group, int) and group > 32:
        group //= 2
        chain.append(format_text(FormatRef(fmt.name, {**fmt.params, "group": group})))
    return ", else ".join([*chain, *(["int8"] if fmt.name != "int8" else ["int8:group=row"])])


def _check_choices(text: str) -> None:
    """UnknownFormatError for a text that names anything but formats; RecipeError for a mixture in a chain."""
    named = choices(text)
    for each in named:
        if each in MIXTURES and len(named) > 1:
            raise RecipeError(f"{text!r}: the mixture {each!r} has alternatives of its own; write it alone")
        if each != "float" and each not in MIXTURES:
            parse_format(each)


def _preset(text: str) -> tuple[str | None, str | None, float | None]:
    """(linears, embeddings, promised bits per weight) of a preset: "float", a mixture, or storage formats for linears.

    "q2_K" is llama.cpp's mixture of that name, as "q2_K_M" is; the plain format is QuantConfig("float", linear="q2_K").

    The promise holds for matrices with K >= 64 if at most half of the weights are embeddings (int8 per row, 8.5 bits).
    It is 6.5 for formats of 4.5 bits such as nf4 and int4.  Where all weights are int8 it is 9.0, half a bit more than
    they take.
    """
    if text == "float":
        return None, None, None
    if text == "q2_K" or text in MIXTURES:
        name = "q2_K_M" if text == "q2_K" else text
        bits = resolve_format(MIXTURES[name]).bits_per_weight(4096, 4096)
        return name, name, (bits + 8.5) / 2
    named = choices(text)
    fmt = resolve_format(named[0])
    cols = math.lcm(64, fmt.declaration.block_size(64))
    bits = fmt.bits_per_weight(4096, cols)
    return (
        text if len(named) > 1 else with_next(text),
        "int8",
        max(_PROMISED.get(fmt.name, 0.0), (bits + 8.5) / 2, bits + 0.5),
    )


_PROMISED = {"nf4": 6.5, "int8": 9.0, "int4": 6.5}
"""The smallest promise of a preset, whatever the block size."""


LLM_INT8_THRESHOLD = 6.0

ALGORITHMS = ("nearest", "hqq", "gptq", "round", "awq")
"""How `QuantConfig.algorithm` chooses the codes of a matrix."""
BY_DATA = ("gptq", "round")
"""Those that solve for codes by the data of `qcompile(calibrate=…)`."""
ROUNDED = ("gptq", "awq")
"""Those that `QuantConfig.rounded_inputs` is for."""

COMPUTES = ("exact", "bf16", "int8")
"""The kinds of arithmetic that `QuantConfig.compute` takes."""


@dataclass(frozen=True)
class Activations:
    """The parsed `QuantConfig.activations`: "token" or "tensor" scales, or "outliers" with their `threshold`."""

    kind: str
    threshold: float = LLM_INT8_THRESHOLD

    @staticmethod
    def of(text: str) -> Activations:
        """RecipeError for any other text."""
        name, _, value = text.partition(":")
        if text == "int8":
            return Activations("token")
        if text == "int8:static":
            return Activations("tensor")
        if name == "llm_int8":
            try:
                threshold = float(value) if value else LLM_INT8_THRESHOLD
            except ValueError:
                threshold = 0.0
            if 0 < threshold < float("inf"):
                return Activations("outliers", threshold)
        raise RecipeError(
            f"activations={text!r}: choose 'int8' (a scale per token), 'int8:static' (one per tensor, from "
            "calibration), 'llm_int8' or 'llm_int8:<threshold>'"
        )

    @property
    def text(self) -> str:
        """For reports."""
        return {
            "token": "int8, a scale per token",
            "tensor": "int8, a static scale",
            "outliers": f"int8, a scale per token; columns with |x| >= {self.threshold:g} stay",
        }[self.kind]


def check_observer(text: str) -> None:
    """RecipeError unless `text` names an observer (frontends/quantise/observers.py)."""
    name, colon, value = text.partition(":")
    try:
        fits = (name == "percentile" and 0 < float(value) <= 100) if colon else name in ("minmax", "percentile", "mse")
    except ValueError:
        fits = False
    if not fits:
        raise RecipeError(f"observer={text!r}: choose 'minmax', 'percentile' (or 'percentile:99.9'), or 'mse'")


@dataclass(frozen=True)
class QuantConfig:
    """A recipe. `preset` is "float", a mixture ("q4_K_M"), or a storage format, optionally with parameters
    ("nf4:block=128", "int3:group=64") and with alternatives for matrices that do not fit ("q4_K, else q5_0").

    `linear` (also used for convolutions) and `embedding` are format texts, or None to keep that kind of weight as it
    is.  `rules` may be given as a mapping pattern -> format.  `promise_bits` is the maximum of bits per weight that
    the compiled model may take (see `Ledger.bits_per_weight`); None makes no promise.

    `activations` is the type of the input of linears with quantised weights: None (floats), "int8" (a scale per
    token, and for convolutions per image), "int8:static" (one per tensor, from `qcompile(calibrate=…)`), or "llm_int8",
    optionally with its threshold ("llm_int8:6.0"). Convolutions take "int8" alone.
    `compute` is the arithmetic of linears, convolutions and experts with quantised weights, and of attention: "exact"
    (products and sums in fp32), "bf16" (factors are rounded to bf16, sums in fp32), "int8" (the same as
    activations="int8"; attention in bf16), or None: bf16 for models in bf16, as in torch, fp16 for those in fp16, and
    exact for all others.
    `algorithm` chooses the codes of linears: "nearest" (each weight its nearest code), "hqq" (also the scales, by the
    error of the weights), "gptq" (codes whose errors cancel in the outputs, for the inputs of `qcompile(calibrate=…)`,
    and scales that fit them), "round" (codes and scales that are learned from GPTQ's on for the outputs of a whole
    block, or GPTQ's codes where these are better), or "awq" (nearest codes, after scales of channels have moved into
    the weights so that the outputs' error falls).
    `rotate`, `rotate_online`, `equalise` and `smooth` change the float graph before, and keep what it computes
    (docs/quantisation.md): `rotate` turns the residual stream by a random Hadamard matrix, `rotate_online` transforms
    the input of an MLP's second linear by one while the program runs, `equalise` makes the ranges of consecutive
    linears equal, and `smooth` (an exponent between 0 and 1) moves the ranges of activations into weights, by
    calibration.
    `correct_bias` moves the mean of each linear's outputs back to the float model's, by calibration.
    `tune_scales` learns the scales of all quantised weights for the outputs of the whole model, by calibration; codes
    stay.
    `rounded_inputs` has "gptq" and "awq" choose codes for inputs that are rounded to int8 as the program rounds them,
    with a scale per token; without it they are chosen for inputs in floating point.
    `observer` finds the static scales: "minmax", "percentile" (of 99.99, or "percentile:99.9") or "mse".

    `separate` are globs over module paths, as in `rules`: linears that are not merged with those that read the same
    rows, and norms that keep a kernel of their own.  `("*",)` merges none.
    """

    preset: str = "nf4"
    linear: str | _Unset | None = PRESET
    embedding: str | _Unset | None = PRESET
    rules: tuple[Rule, ...] | Mapping[str, str | None] | Sequence[RuleLike] = ()
    promise_bits: float | _Unset | None = PRESET
    activations: str | None = None
    compute: str | None = None
    observer: str = "minmax"
    separate: tuple[str, ...] = ()
    algorithm: str = "nearest"
    smooth: float | None = None
    rotate: bool = False
    equalise: bool = False
    correct_bias: bool = False
    rounded_inputs: bool = False
    rotate_online: bool = False
    tune_scales: bool = False

    def __post_init__(self) -> None:
        _refuse_kinds(self)
        _check_rewrites(self)
        object.__setattr__(self, "separate", tuple(self.separate))
        check_observer(self.observer)
        if self.algorithm not in ALGORITHMS:
            raise RecipeError(f"algorithm={self.algorithm!r}: choose {', '.join(map(repr, ALGORITHMS))}")
        if self.compute not in (None, *COMPUTES):
            raise RecipeError(f"compute={self.compute!r}: choose {', '.join(map(repr, COMPUTES))}, or leave it out")
        if self.activations is not None:
            Activations.of(self.activations)
        _check_rounded(self)
        known = ("float", *MIXTURES, *formats.names())
        if choices(self.preset)[0].partition(":")[0].strip() not in known:
            raise UnknownFormatError(_unknown(self.preset, known, "recipe"))
        _check_choices(self.preset)
        linear, embedding, promise = _preset(self.preset)
        fields: dict[str, object] = {
            "linear": linear if self.linear is PRESET else self.linear,
            "embedding": embedding if self.embedding is PRESET else self.embedding,
            "promise_bits": promise if self.promise_bits is PRESET else self.promise_bits,
            "rules": tuple(_rules(self.rules)),
        }
        for field, value in fields.items():
            object.__setattr__(self, field, value)
        for text in (fields["linear"], fields["embedding"], *(rule.format for rule in fields["rules"])):  # type: ignore[attr-defined]
            if text is not None:
                _check_choices(text)

    @property
    def mixtures(self) -> tuple[str, ...]:
        """The mixtures that the recipe names."""
        texts = (self.linear, self.embedding, *(rule.format for rule in self.all_rules))
        return tuple(dict.fromkeys(text for text in texts if isinstance(text, str) and text in MIXTURES))

    @property
    def inputs(self) -> Activations | None:
        """How the inputs of linears with quantised weights are quantised: as `activations` says, or in int8 with a
        scale per token where only `compute="int8"` does; None for floats."""
        text = "int8" if self.activations is None and self.compute == "int8" else self.activations
        return None if text is None else Activations.of(text)

    @property
    def attention(self) -> str | None:
        """The arithmetic of attention, as the pass `round-attention` takes it: `compute`; int8 where only activations
        are named; None where the model's type decides."""
        return "int8" if self.compute is None and self.activations is not None else self.compute

    @property
    def promises_by_preset(self) -> bool:
        """Whether the promise is the preset's: it assumes the first choices, and grows by the bits of alternatives."""
        return self.promise_bits == _preset(self.preset)[2]

    @staticmethod
    def of(quant: QuantConfig | str | None) -> QuantConfig:
        """A recipe from what `quant=` accepts: None (keep floats), a preset's text, the name of a file of a recipe
        ("recipe.toml"), or a QuantConfig."""
        if quant is None:
            return QuantConfig("float")
        if isinstance(quant, str) and quant.endswith(SUFFIX):
            return _from_file(read_recipe(Path(quant)))
        if isinstance(quant, str):
            return QuantConfig(quant)
        if isinstance(quant, QuantConfig):
            return quant
        raise RecipeError(f"quant= takes None, a name such as 'nf4', or a QuantConfig; not {type(quant).__name__}")

    @property
    def all_rules(self) -> tuple[Rule, ...]:
        assert isinstance(self.rules, tuple)
        return tuple(rule for rule in self.rules if isinstance(rule, Rule))

    def choose(self, parameters: Sequence[str], kind: Literal["linear", "embedding", "conv"]) -> tuple[str | None, str]:
        """The format text (None: keep) for a weight with these paths, and the rule's text ("" for the default)."""
        for rule in self.all_rules:
            if any(rule.matches(p) for p in parameters):
                return rule.format, rule.text
        default = self.embedding if kind == "embedding" else self.linear
        assert not isinstance(default, _Unset)
        return default, "" if default else f"recipe '{self.preset}' keeps {kind} weights"

    def check_rules(self, weights: Sequence[str], modules: Sequence[str]) -> None:
        """RecipeError, with similar names, for a rule that matches none of `weights`, the paths of weights that can
        be quantised. A pattern of `separate` may match a norm instead: a module without modules in it."""
        leaves = [m for m in modules if m and not any(other.startswith(f"{m}.") for other in modules)]
        norms = {p for p in self.separate if any(fnmatch.fnmatchcase(leaf, p) for leaf in leaves)}
        rules = [*self.all_rules, *(Rule(pattern, None) for pattern in self.separate if pattern not in norms)]
        for rule in rules:
            if any(rule.matches(p) for p in weights):
                continue
            if any(fnmatch.fnmatchcase(m, rule.pattern) for m in modules):
                raise RecipeError(
                    f"rule '{rule.pattern}' matches modules that hold no weight of a linear, a convolution or an "
                    f"embedding; weights are: {_few(weights)}"
                )
            known = sorted({p.rpartition(".")[0] for p in weights} | set(modules))
            near = difflib.get_close_matches(rule.pattern.strip("*."), [k for k in known if k], n=3, cutoff=0.4)
            tails = [k for k in known if k.rpartition(".")[2].startswith(rule.pattern.strip("*.")[:3])]
            hint = ", ".join(dict.fromkeys([*near, *tails[:3]])) or _few(known)
            raise RecipeError(f"rule '{rule.pattern}' matches no module of the model; near: {hint}")


def recipe_of(quant: str | None, compute: str | None) -> QuantConfig | None:
    """What a command line says by `--quant` and `--compute`, as `quant=` takes it. RecipeError as for `QuantConfig`."""
    if compute is None:
        return None if quant is None else QuantConfig.of(quant)
    return replace(QuantConfig.of(quant or "float"), compute=compute)


_ROUNDED = "rounded_inputs"
"""The field that is checked with others: alone it would always be refused."""


def _from_file(file: RecipeFile) -> QuantConfig:
    """The recipe of a file. An error in a value names the key and its line."""
    preset = file.fields["preset"]
    checks: list[tuple[tuple[str, int | None], dict[str, Any]]] = [
        ((key, None), {key: value}) for key, value in file.fields.items() if key not in ("rules", "preset", _ROUNDED)
    ]
    if _ROUNDED in file.fields:
        needed = (_ROUNDED, "algorithm", "activations", "compute")
        checks.append(((_ROUNDED, None), {key: file.fields[key] for key in needed if key in file.fields}))
    for number, rule in enumerate(file.fields["rules"]):
        checks.append((("format", number), {"rules": (rule,)}))
    for place, fields in ((("preset", None), {}), *checks):
        try:
            QuantConfig(preset if not fields else "float", **fields)
        except QCompilerError as error:
            raise type(error)(f"{file.where(*place)}: {error}") from None
    return QuantConfig(**file.fields)


def _refuse_kinds(config: QuantConfig) -> None:
    """RecipeError for a field of the wrong type; the message says what to write."""
    if not isinstance(config.preset, str):
        raise RecipeError(
            f'QuantConfig({config.preset!r}): the preset is a name such as "nf4", or "float" to keep weights as '
            'they are: QuantConfig("float", …)'
        )
    examples = {"linear": '"nf4"', "embedding": '"int8"', "activations": '"int8"', "compute": '"bf16"'}
    for field, example in examples.items():
        value = getattr(config, field)
        if not (value is None or isinstance(value, str | _Unset)):
            raise RecipeError(f"{field}={value!r}: write a name, such as {field}={example}, or None")
    if not isinstance(config.observer, str):
        raise RecipeError(f"observer={config.observer!r}: choose 'minmax', 'percentile' or 'mse'")
    separate = config.separate
    if isinstance(separate, str) or not all(isinstance(pattern, str) for pattern in separate):
        raise RecipeError(f'separate={separate!r}: write a tuple of globs over module paths, such as ("*.q_proj",)')
    bits = config.promise_bits
    if isinstance(bits, bool) or not (bits is None or isinstance(bits, int | float | _Unset)):
        raise RecipeError(f"promise_bits={bits!r}: write bits per weight, such as promise_bits=6.5, or None")


def _check_rewrites(config: QuantConfig) -> None:
    """RecipeError for values of the rewrites' fields that cannot be used."""
    smooth = config.smooth
    number = isinstance(smooth, int | float) and not isinstance(smooth, bool)
    if smooth is not None and not (number and 0 <= smooth <= 1):
        raise RecipeError(f"smooth={smooth!r}: write an exponent from 0 to 1, such as smooth=0.5, or None")
    for field in ("rotate", "rotate_online", "equalise", "correct_bias", "rounded_inputs", "tune_scales"):
        if not isinstance(getattr(config, field), bool):
            raise RecipeError(f"{field}={getattr(config, field)!r}: write True or False")


def _check_rounded(config: QuantConfig) -> None:
    """RecipeError where no inputs are rounded while codes are chosen."""
    if not config.rounded_inputs:
        return
    if config.algorithm not in ROUNDED:
        raise RecipeError(
            f"rounded_inputs=True is for {' and '.join(f'algorithm={each!r}' for each in ROUNDED)}, not "
            f"{config.algorithm!r}; leave it out"
        )
    if config.inputs is None or config.inputs.kind != "token":
        raise RecipeError(
            "rounded_inputs=True needs activations='int8', whose scales depend on nothing but the rows themselves; "
            "leave it out, or choose that"
        )


def _rules(rules: object) -> Iterable[Rule]:
    if isinstance(rules, Mapping):
        rules = list(rules.items())
    if not isinstance(rules, Sequence) or isinstance(rules, str):
        raise RecipeError("rules must be a mapping {pattern: format} or a sequence of Rule")
    for rule in rules:
        if not isinstance(rule, Rule) and not (isinstance(rule, tuple | list) and 2 <= len(rule) <= 3):
            raise RecipeError(f"a rule is (pattern, format or None, reason); got {rule!r}")
        made = rule if isinstance(rule, Rule) else Rule(*rule)
        if not isinstance(made.pattern, str) or not (made.format is None or isinstance(made.format, str)):
            raise RecipeError(f"a rule is (pattern, format or None, reason); got {rule!r}")
        yield made


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" … ({len(names)} in all)" if len(names) > 5 else "") if names else "none"


def _unknown(name: str, known: Iterable[str], what: str) -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    hint = f" (did you mean '{near[0]}'?)" if near else ""
    return f"no {what} is called {name!r}{hint}; there are: {', '.join(known)}"


# --- formats as text -------------------------------------------------------------------------------------------------


def parse_format(text: str) -> FormatRef:
    """`"nf4:block=128"` or `"int4:group=64,symmetric=False"` with its parameters filled in. UnknownFormatError.

    A parameter without a value is True: `"nf4:double_quant"`.  Parameters that are newer than the file format are left
    out at their defaults.
    """
    fmt = resolve_format(text)
    return FormatRef(name=fmt.name, params=dict(fmt.params))


def resolve_format(text: str) -> Format:
    """The `Format` that a text names."""
    name, _, rest = text.partition(":")
    params: dict[str, int | bool | str] = {}
    for item in rest.split(",") if rest else ():
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals and not key.isidentifier():
            raise UnknownFormatError(f"format {text!r}: write parameters as key=value, not {item!r}")
        params[key] = _value(value) if equals else True
    return formats.get(name.strip(), **params)


def format_text(ref: FormatRef) -> str:
    """The text of a format, its parameters written out: `"nf4:block=64"`."""
    params = ",".join(f"{key}={value}" for key, value in sorted(ref.params.items()))
    return f"{ref.name}:{params}" if params else ref.name


DIGITS = 19
"""More digits than a parameter of a format has."""


def _value(text: str) -> int | bool | str:
    if text in ("True", "true"):
        return True
    if text in ("False", "false"):
        return False
    return int(text) if text.lstrip("-").isdecimal() and len(text) < DIGITS else text
