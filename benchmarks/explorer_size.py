"""The size of the explorer's page of a large program, and how long a browser takes to open it and to change pages.

    python benchmarks/explorer_size.py [--layers 32] [--quant nf4] [--json FILE]

Compiles a model of the shape of Llama 8B without weights, writes the page, and opens it in headless Chromium (node and
npm bring playwright-core).  Exits with 1 if the page has more than 10 MB, or if its first text is there after more than
3 s.  Times are wall time on this machine: `open` is from the start of the navigation to the first row of text,
`Graph` and the others from the key to the second frame after it, and `frame` is the longest of 60 frames while the
text of the largest stage scrolls.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import explorer_browser
from scale import compile_llama

MOST_BYTES, MOST_SECONDS = 10_000_000, 3.0


def measure(layers: int, quant: str | None, folder: Path) -> dict[str, Any]:
    """The figures of one program; files are written to `folder`."""
    program = compile_llama(layers, quant, None)
    page = folder / f"llama-{layers}.html"
    program.explore(page)
    seen: dict[str, Any] = explorer_browser.run(explorer_browser.prepared(folder), "explorer_open.mjs", page)
    texts = sum(len(program.ir(stage)) for stage in program.stages)
    return {"layers": layers, "stages": len(program.stages), "text_bytes": texts, "bytes": page.stat().st_size, **seen}


def table(found: dict[str, Any]) -> str:
    pages = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in found["pages"].items())
    return (
        f"{found['layers']} layers: {found['text_bytes'] / 1e6:.1f} MB of text in {found['stages']} stages, "
        f"a page of {found['bytes'] / 1e6:.2f} MB\n"
        f"open {found['open']:.2f} s; {pages}; search {found['search']:.2f} s; frame {1e3 * found['frame']:.0f} ms"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--quant", default="nf4")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if missing := explorer_browser.missing_tools():
        raise SystemExit(f"opening pages needs {', '.join(missing)}")
    with tempfile.TemporaryDirectory() as folder:
        found = measure(options.layers, options.quant, Path(folder))
    print(table(found))
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1))
    return int(found["bytes"] > MOST_BYTES or found["open"] > MOST_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
