"""The site: every page of docs/ and an API reference from the docstrings. `make site` builds it without warnings.

The sources are the pages as they lie in the repository, so that one link works on the site and in a source browser.
Docstrings here are plain text with Markdown's backticks; `_as_rst` turns them into what Sphinx reads.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import qcompiler

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "qcompiler"
version = release = qcompiler.__version__
root_doc = "docs/site/index"
include_patterns = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/**.md", "examples/models/**.md"]
extensions = ["myst_parser", "sphinx.ext.autodoc"]
html_theme = "furo"
html_title = "qcompiler"
html_copy_source = False

myst_heading_anchors = 4
suppress_warnings = [
    "myst.xref_missing",  # a link to a folder or a file that is no page; tests/packaging/test_docs.py checks links
    "misc.highlighting_failure",  # dumps in ```mlir blocks, for which Pygments has no lexer
]
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "show-inheritance": True}
toc_object_entries = False


def _literal(text: str) -> str:
    """`name` in single backticks, as Markdown has it, with the two that RST wants; an asterisk is an asterisk."""
    parts = re.split(r"(:py:\w+:`[^`]+`|``[^`]+``|`[^`]+`)", text)  # autodoc itself writes roles
    done = []
    for part, after in zip(parts, [*parts[1:], ""], strict=True):
        if part.startswith("`"):
            plural = "\\ " if after[:1].isalnum() else ""  # `Dim`s: RST wants a separator behind a literal
            done.append(f"``{part.strip('`')}``{plural}")
        elif part.startswith(":py:"):
            done.append(part)
        else:
            done.append(re.sub(r"([*|_\\])(?!\w)|(?<!\w)([*|_\\])", r"\\\g<0>", part))
    return "".join(done)


def _as_rst(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Indented lines are kept as they are written, in a literal block; all others are paragraphs."""
    out: list[str] = []
    for indented, group in itertools.groupby(_marked(lines), key=lambda pair: pair[0]):
        text = "\n".join(line for _, line in group)
        if indented:
            out += ["", "::", "", *text.split("\n"), ""]
        else:
            out += re.sub(r"^([-=+])(?=\s|$)", r"\\\1", _literal(text), flags=re.MULTILINE).split("\n")
    lines[:] = out


def _marked(lines: Sequence[str]) -> Iterator[tuple[bool, str]]:
    """Each line, and whether it belongs to an indented block: an empty line is part of the block that it follows."""
    inside = False
    for line in lines:
        inside = line.startswith("  ") or (inside and not line.strip())
        yield inside, line


def setup(app: Sphinx) -> None:
    app.connect("autodoc-process-docstring", _as_rst)
