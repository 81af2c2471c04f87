"""Imports inside of functions: of heavy or optional packages only, and where a start has to be light.

An import inside of a function hides what a module depends on, and often a cycle.  It is right in two places: for a
package that not every installation has, or that takes long to load; and in the few files through which a light start
leads to heavy parts.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARTS = ("qcompiler", "passes", "kernels", "runtime")

PACKAGES = {"torch", "transformers", "huggingface_hub", "sympy", "cuda", "rich", "tokenizers", "jinja2", "shtab",
            "PIL"}  # fmt: skip
"""Optional, or slow to load: what runs programs needs none of them."""

DOORS = {
    "qcompiler/api.py",  # torch and xdsl load with the first compilation
    "qcompiler/cli.py",  # `qc --help` and `qc run` start without them
    "qcompiler/compile_command.py",  # `qc --help` knows its options without torch
    "qcompiler/frontends/mlir/frontend.py",  # JAX's parser is optional: linalg is read without it
    "qcompiler/ir/universe.py",  # xdsl-opt asks for dialects and passes by name
    "qcompiler/lm/arguments.py",  # `qc --help` knows the commands of language models without the runtime
    "qcompiler/lm/commands.py",  # only models that are no .qca file need torch
    "qcompiler/lm/compile.py",  # transformers loads with the first compilation
    "qcompiler/lm/search.py",  # transformers loads with the first search for a language model
    "qcompiler/lm/text/template.py",  # jinja2 is optional, and all of the sandbox builds on it
    "qcompiler/inspect/doctor.py",  # looks at what is installed
    "runtime/__init__.py",  # the simulated GPU, for who asks for it
    "runtime/jax_callable.py",  # JAX is optional
    "runtime/on_request.py",  # timelines and profiles need the cost model, which loads the emitters of all targets
    "runtime/backends/registry.py",  # a backend loads when a device of its kind is named
}

KNOWN = {
    ("kernels/cost.py", "qcompiler.kernels.cuda.emit"),
    ("kernels/cuda/emit.py", "msgspec"),
    ("kernels/cuda/grouped_linear.py", "qcompiler.kernels.cuda"),
    ("kernels/cuda/grouped_linear.py", "qcompiler.kernels.cuda.linear_mma"),
    ("kernels/cuda/linear.py", "qcompiler.kernels.cuda.emit"),
    ("kernels/cuda/linear.py", "qcompiler.kernels.cuda.linear_mma"),
    ("kernels/cuda/linear_int8.py", "qcompiler.kernels.cuda.emit"),
    ("kernels/cuda/linear_mma.py", "qcompiler.kernels.cuda.emit"),
    ("kernels/cuda/loop_form.py", "qcompiler.kernels.cuda.emit"),
    ("kernels/select.py", "qcompiler.kernels.cpu"),
    ("kernels/select.py", "qcompiler.kernels.cuda"),
    ("runtime/executor.py", "qcompiler.kernels.cuda.emit"),
    ("runtime/executor.py", "qcompiler.runtime.sim.queue"),
    ("runtime/isa.py", "qcompiler.runtime.support"),
    ("runtime/loaded.py", "qcompiler.runtime.device_session"),
    ("runtime/loaded.py", "qcompiler.runtime.program_file"),
    ("runtime/native.py", "qcompiler.kernels.cpu"),
    ("runtime/nvrtc.py", "qcompiler.kernels.cuda"),
    ("runtime/program_file.py", "qcompiler.runtime"),
    ("runtime/timeline.py", "qcompiler.runtime.timeline_text"),
}
"""Cycles, and what a program loads when it is asked for. This list may only become shorter."""


def inner_imports(text: str) -> Iterator[str]:
    """The modules that are imported inside of functions."""
    for function in ast.walk(ast.parse(text)):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for node in ast.walk(function):
                if isinstance(node, ast.Import):
                    yield from (alias.name for alias in node.names)
                elif isinstance(node, ast.ImportFrom):
                    yield node.module or ""


def sources() -> Iterator[tuple[str, str]]:
    for part in PARTS:
        for path in sorted((ROOT / part).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), path.read_text()


def test_functions_import_only_what_is_heavy_or_optional() -> None:
    found = {(file, module) for file, text in sources() for module in inner_imports(text) if file not in DOORS}
    unexpected = {(file, module) for file, module in found if module.partition(".")[0] not in PACKAGES} - KNOWN
    assert not unexpected, f"move these imports to the top of their files: {sorted(unexpected)}"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import os\nfrom a import b\n", []),
        ("def f():\n    import torch.nn, os\n", ["torch.nn", "os"]),
        ("class A:\n    async def f(self):\n        if self:\n            from x.y import z\n", ["x.y"]),
    ],
)
def test_imports_inside_of_functions_are_found(text: str, found: list[str]) -> None:
    assert list(inner_imports(text)) == found


def test_the_files_named_here_exist() -> None:
    assert {file for file in DOORS if not (ROOT / file).exists()} == set()
