"""Modules carry the definitions that their kernels use: nothing that is used is missing, and what is not is gone."""

from __future__ import annotations

import re

import pytest
from by_path import ROOT

from qcompiler.kernels.cuda import emit
from qcompiler.kernels.used_definitions import CppHeader, used

HEADER = """// What everything may use.

#define LANES 32
#define TWICE(x) \\
    ((x) + (x))

// --- a section ---

typedef unsigned int word;
enum { SMALL = 1, LARGE = SMALL + LANES };
enum kinds {
    COUNTS,  // commas, in comments { too
    OTHERS,
};
constexpr int TABLE[2] = {1, 2};

struct alignas(2) half { unsigned short bits; };
template <class T> struct is_half { static constexpr bool value = false; };
template <> struct is_half<half> { static constexpr bool value = true; };

#ifndef HOST
// One per target.
inline int where() { return 1; }
#elif defined(LANES)
inline int where() { return 2; }
#else
inline int where() { return 3; }
#endif

// Of a pair.
template <int N, class T = int>
inline T sum(
    T a, T b) {
#if LANES == 32
    if (a < 0) { return TWICE(b); }
#endif
    return a + b;
}
inline float sum(float a) { return a; }
inline int unused() { return sum(1, 2) + TABLE[0]; }
"""


def test_overloads_and_specialisations_stay_together() -> None:
    [text] = used([CppHeader.parse(HEADER)], "is_half<float>::value")
    assert "is_half<half>" in text
    assert "struct alignas(2) half" in text, "what a piece uses comes along"
    assert "sum" not in text


def test_a_macro_in_a_body_brings_its_definition() -> None:
    [text] = used([CppHeader.parse(HEADER)], "int x = sum(1, 2);")
    assert "#define TWICE(x) \\\n    ((x) + (x))" in text
    assert "#define LANES 32" in text, "a directive in a body asks for it"
    assert "// Of a pair.\ntemplate <int N, class T = int>" in text
    assert text.count("sum(") == 2
    assert "unused" not in text and "where" not in text and "TABLE" not in text


def test_every_branch_of_a_conditional_is_kept_with_its_directives() -> None:
    [text] = used([CppHeader.parse(HEADER)], "where()")
    kept = [line for line in text.splitlines() if line and not line.startswith("//")]
    assert kept == [
        "#define LANES 32", "#ifndef HOST", "inline int where() { return 1; }", "#elif defined(LANES)",
        "inline int where() { return 2; }", "#else", "inline int where() { return 3; }", "#endif",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["COUNTS", "OTHERS", "SMALL", "LARGE", "TABLE", "word", "half", "kinds"])
def test_enumerators_tables_and_types_are_found(name: str) -> None:
    [text] = used([CppHeader.parse(HEADER)], f"use({name})")
    assert name in text


def test_names_in_comments_and_strings_bring_nothing() -> None:
    assert used([CppHeader.parse(HEADER)], '// sum\n/* where */ const char* text = "TABLE";') == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("#if ONE\nint a;\n", "#endif"), ("struct open {\n", "does not end"), ("#error no\n", "no directive"),
        ("static_assert(true);\n;\n", "defines nothing"),
    ],
)  # fmt: skip
def test_a_header_that_cannot_be_cut_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CppHeader.parse(text)


def test_every_cuda_header_is_listed_and_can_be_cut() -> None:
    from importlib import resources

    files = {each.name for each in resources.files("qcompiler.kernels.cuda").iterdir() if each.name.endswith(".cuh")}
    assert files == set(emit.HEADERS)
    names = [
        name for header in emit.HEADERS for piece in CppHeader.parse(emit.header(header)).pieces for name in piece.names
    ]
    assert {"qc_mma_16816", "QC_SHARED", "qm_product", "QC_COUNTS", "QM_CHUNK", "qc_is_float"} <= set(names)


TYPE = re.compile(r"^(?:template <.*> )?(?:struct|enum|union) (?:alignas\(\d+\) )?(\w+)\b(?! \w+ ?[=(\[])", re.M)
FUNCTION = re.compile(r"^(?:template <.*> )?(?:QC_INLINE|QC_DEVICE|static|inline) [^(\n=]*?\b(\w+)\(", re.M)


@pytest.mark.parametrize("pattern", ["cpu/*.h", "cuda/*.cuh"])
def test_no_name_is_a_type_in_one_header_and_a_function_in_another(pattern: str) -> None:
    """Pieces of one name are taken together, so both would be in every module that uses either."""
    text = "\n".join(path.read_text() for path in sorted((ROOT / "kernels").glob(pattern)))
    types, functions = set(TYPE.findall(text)), set(FUNCTION.findall(text))
    assert len(types) > 10 and len(functions) > 100
    assert not types & functions
