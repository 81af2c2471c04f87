"""Recipes as files: what is written is read back, and an error names the key and its line."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import qcompiler as qc
from qcompiler.config import recipe_of
from qcompiler.errors import QCompilerError, RecipeError, UnknownFormatError
from qcompiler.recipe_files import recipe_text

RECIPES = [
    qc.QuantConfig("float"),
    qc.QuantConfig("nf4", promise_bits=None),
    qc.QuantConfig("int4", activations="int8", algorithm="gptq", rounded_inputs=True, rotate_online=True),
    qc.QuantConfig("nf4", algorithm="round", tune_scales=True),
    qc.QuantConfig("q4_K_M", separate=("*.q_proj", "norm")),
    qc.QuantConfig(
        "float", linear="q4_K, else q5_0", embedding=None, activations="int8:static", observer="percentile:99.9",
        algorithm="gptq", compute="exact", smooth=0.5, rotate=True, equalise=True, correct_bias=True,
        rules=[("a.*", "int4:group=64", "say \"why\"\n\u2028\x7f"), ("b", None)],
    ),
]  # fmt: skip


def written(folder: Path, text: str) -> str:
    path = folder / "recipe.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.preset)
def test_a_recipe_is_read_back_as_it_was(recipe: qc.QuantConfig, tmp_path: Path) -> None:
    assert qc.QuantConfig.of(written(tmp_path, recipe_text(recipe, ["made\nby hand"]))) == recipe


@settings(max_examples=10, deadline=None)
@given(st.text(), st.text())
def test_any_pattern_and_reason_can_be_written(
    tmp_path_factory: pytest.TempPathFactory, pattern: str, reason: str
) -> None:
    recipe = qc.QuantConfig("float", rules=[(pattern, "nf4", reason)])
    folder = tmp_path_factory.getbasetemp()
    assert qc.QuantConfig.of(written(folder, recipe_text(recipe))) == recipe


def test_a_command_line_adds_its_arithmetic_to_the_recipe_of_a_file(tmp_path: Path) -> None:
    found = recipe_of(written(tmp_path, 'preset = "float"\nlinear = "q4_K"\n'), "bf16")
    assert found == qc.QuantConfig("float", linear="q4_K", compute="bf16")


RULE = '[[rules]]\npattern = "a"\nformat = "nf4"\n'


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ('linear = "nf4"\n', RecipeError, "has no preset"),
        ('preset = "nf4"\nrotate = 1\n', RecipeError, "line 2: rotate is 1: write rotate = true or false"),
        ('preset = "nf4"\nsmooth = "a"\n', RecipeError, "line 2: smooth is 'a': write an exponent"),
        ('preset = "nf4"\nsmooth = 2\n', RecipeError, "line 2: smooth: smooth=2: write an exponent"),
        ('preset = "nf4"\nliner = "nf4"\n', RecipeError, "line 2: liner is no key of a recipe"),
        ('preset = "nf4"\n\nlinear = 4\n', RecipeError, 'line 3: linear is 4: write a text, such as linear = "q4_K"'),
        ('preset = "nf4"\nlinear = "nf5"\n', UnknownFormatError, "line 2: linear: no storage format.*nf5"),
        ('# a comment\npreset = "nf5"\n', UnknownFormatError, "line 2: preset: no recipe"),
        ('preset = "nf4"\npromise_bits = true\n', RecipeError, "line 2: promise_bits is True"),
        ('preset = "nf4"\nseparate = "x"\n', RecipeError, "line 2: separate is 'x': write a list"),
        ('preset = "nf4"\nobserver = "best"\n', RecipeError, "line 2: observer: observer='best'"),
        (f'preset = "nf4"\n{RULE}{RULE}wheel = "x"\n', RecipeError, "rule 2, line 8: wheel is no key of a rule"),
        (f'preset = "nf4"\n{RULE}{RULE.replace("nf4", "nf5")}', UnknownFormatError, "rule 2, line 7: format: no st"),
        (f'preset = "nf4"\n{RULE}reason = 1\n', RecipeError, "rule 1, line 5: reason is 1"),
        ('preset = "nf4"\n[[rules]]\npattern = "a"\n', RecipeError, "rule 1, line 2: rules has no format"),
        ('preset = "nf4"\nrules = 3\n', RecipeError, "line 2: rules are tables"),
        ('preset = "nf4"\nrules = [{pattern = "a", format = "nf5"}]\n', UnknownFormatError, "rule 1, line 1: format"),
        ('preset = "nf4\n', RecipeError, r"no TOML: .*line 1"),
    ],
)  # fmt: skip
def test_an_error_names_the_key_and_its_line(
    text: str, kind: type[QCompilerError], message: str, tmp_path: Path
) -> None:
    with pytest.raises(kind, match=message) as caught:
        qc.QuantConfig.of(written(tmp_path, text))
    assert "recipe.toml" in str(caught.value)


def test_a_file_that_cannot_be_read_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"cannot read the recipe .*none\.toml"):
        qc.QuantConfig.of(str(tmp_path / "none.toml"))
    (tmp_path / "bytes.toml").write_bytes(b'preset = "\xff"')
    with pytest.raises(RecipeError, match=r"cannot read the recipe .*bytes\.toml"):
        qc.QuantConfig.of(str(tmp_path / "bytes.toml"))


@pytest.mark.parametrize(
    "text",
    ["promise_bits = nan", "promise_bits = -1", "linear = 0x" + "f" * 6000, "linear = " + "9" * 5000,
     'linear = "int4:group=' + "9" * 5000 + '"'],
    ids=["nan", "negative", "hex", "digits", "group"],
)  # fmt: skip
def test_numbers_that_mean_nothing_are_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "r.toml"
    path.write_text(f'preset = "float"\n{text}\n')
    with pytest.raises(QCompilerError):
        qc.QuantConfig.of(str(path))


def test_thousands_of_rules_are_read_and_a_mark_in_front_of_the_text(tmp_path: Path) -> None:
    """Lines are looked up where there is an error only: this took minutes."""
    path = tmp_path / "r.toml"
    rules = "".join(f'[[rules]]\npattern = "m.{i}"\nformat = "int8"\n' for i in range(5000))
    path.write_text("\ufeff" + 'preset = "float"\n' + rules, encoding="utf-8")
    assert len(qc.QuantConfig.of(str(path)).all_rules) == 5000


def test_paths_that_cannot_be_are_named() -> None:
    with pytest.raises(QCompilerError, match="cannot read"):
        qc.QuantConfig.of("a\0b.toml")
