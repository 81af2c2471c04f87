"""One HTML file from a model: the bundle of `web/`, its styles, and the data, compressed.

Names in the data come from models and files. So the data is never markup: it is compressed and written in base64, of
which no character means anything to HTML, and the page's code puts it on the screen as text nodes only.  A content
security policy allows the bundle and the styles, by their digests, and nothing else: no other script, no request.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import re
import zlib
from importlib import resources
from pathlib import Path

import msgspec

from qcompiler.errors import ArgumentError
from qcompiler.inspect.error_report import ErrorReport
from qcompiler.inspect.explore.collect import Contents, collect, contents_of_file
from qcompiler.inspect.explore.model import Collected
from qcompiler.runtime.files import replacing

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>{styles}</style>
</head>
<body>
<div id="app"><noscript>This page needs JavaScript; it makes no request and reads no other file.</noscript></div>
{data}
<script>{script}</script>
</body>
</html>
"""


@functools.cache
def bundled(name: str) -> str:
    """A file of the bundle: "explorer.js" or "explorer.css"."""
    return resources.files("qcompiler.inspect.explore").joinpath(name).read_text(encoding="utf-8")


def render(found: Collected) -> str:
    """The page."""
    script, styles = bundled("explorer.js"), bundled("explorer.css")
    blobs = {"model": msgspec.json.encode(found.model)}
    blobs |= {f"text-{number}": text.encode() for number, text in enumerate(found.texts)}
    data = "\n".join(f'<script type="text/plain" id="{name}">{_packed(blob)}</script>' for name, blob in blobs.items())
    return _PAGE.format(
        policy=_policy(script, styles), title=html.escape(f"{found.model.facts.title} - qcompiler"), styles=styles,
        data=data, script=script,
    )  # fmt: skip


def _packed(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data, 9)).decode()


def _policy(script: str, styles: str) -> str:
    """No source but these two texts. `data:` is the empty icon, without which browsers ask a server for one."""
    return (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(styles)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


class Explorer:
    """The explorer of a program: `save` writes it, and a notebook shows it."""

    def __init__(self, contents: Contents) -> None:
        self._contents = contents

    @functools.cached_property
    def html(self) -> str:
        """The page as text."""
        return render(collect(self._contents))

    def save(self, path: str | Path) -> Path:
        """Writes the page. ArgumentError if the folder does not exist."""
        path = Path(path)
        if not path.parent.is_dir():
            raise ArgumentError(f"there is no folder '{path.parent}' to write {path.name} to: make it first")
        with replacing(path) as file:
            file.write(self.html.encode())
        return path

    def _repr_html_(self) -> str:
        """The page in a frame of its own, so that neither its styles nor its code meet the notebook's."""
        return (
            f'<iframe sandbox="allow-scripts" srcdoc="{html.escape(self.html)}" title="qcompiler explorer" '
            'style="width: 100%; height: 720px; border: 1px solid #8888"></iframe>'
        )


def write_page(program: Path, target: Path, *, errors: ErrorReport | None = None, sass: bool = False) -> Path:
    """`qc inspect program.qca --html out.html`; `errors` are measured ratios, `sass` asks for machine code.

    Raises the errors of `contents_of_file` and of `collect`, and OSError.
    """
    found = contents_of_file(program, errors=errors.errors if errors is not None else None, sass=sass)
    return Explorer(found).save(target)


def sources_digest(folder: Path) -> str:
    """The digest of the sources of the bundle in `folder` (web/), which the bundle's first line records."""
    names = ["build.mjs", "package.json", "package-lock.json", "tsconfig.json"]
    files = [*(folder / name for name in names), *sorted((folder / "src").iterdir())]
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.relative_to(folder).as_posix()}\n".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()


def recorded_digest() -> str:
    """The digest in the first line of the bundle; "" if there is none."""
    found = re.match(r"/\* sources ([0-9a-f]{64}) \*/", bundled("explorer.js"))
    return found[1] if found is not None else ""
