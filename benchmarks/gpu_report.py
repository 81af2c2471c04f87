"""The measurements of a visit to a GPU as tables: predictions compared, misses first, then every figure.

    python benchmarks/gpu_report.py build/gpu-check.json                     # prints it
    python benchmarks/gpu_report.py gpu-check.json --write docs/performance.md --keep
    python benchmarks/gpu_report.py bench.json                               # a file of gpu_first.py works as well

`--write` puts the tables between the markers `<!-- gpu figures -->` and `<!-- end of gpu figures -->` of a page.
`--keep` copies the file to benchmarks/results/<gpu>-<date>-<commit>.json, which the tables then name. Predictions come
from benchmarks/predictions/h200.json, through the cells of the run; claims are read from that file. A run on a GPU
other than the one predicted has neither.

Files of another schema are refused. An interrupted or partly failed run is reported as far as it came.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import gpu_schema
from gpubench import document, pages
from page_marks import between

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
PREDICTIONS = HERE / "predictions" / "h200.json"
BEGIN, END = "<!-- gpu figures -->", "<!-- end of gpu figures -->"


class UnreadableError(Exception):
    """A file that this script cannot report on; the text says why, and what to do."""


def read(path: Path) -> tuple[document.Document, dict[str, Any]]:
    """(the benchmark's document, the rest of a gpu-check.json as JSON). UnreadableError with the reason."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UnreadableError(f"{path} cannot be read: {error}") from error
    except ValueError as error:
        raise UnreadableError(
            f"{path} is no JSON ({error}): copy it again, a killed run leaves a whole file"
        ) from error
    try:
        if isinstance(data, dict) and "bench_schema" in data:
            return document.made(data, str(path)), {}
        gpu_schema.read(path)  # refuses another schema, and what is no report
        bench = data.pop("bench", None)
        if not bench:
            reason = data.get("reason") or "the part that measures did not run, or left nothing"
            return document.Document(kind=data.get("kind", "none"), device=data.get("device", ""), reason=reason), data
        return document.made(bench, f"{path}: bench"), data
    except ValueError as error:
        raise UnreadableError(str(error)) from error


def kept_name(found: document.Document, check: dict[str, Any]) -> str:
    """h200-2026-11-22-57f722d.json."""
    environment = check.get("environment") or {}
    gpu = str(found.environment.get("gpu") or environment.get("name") or found.kind)
    word = re.sub(r"[^a-z0-9]+", "-", gpu.lower().replace("nvidia", "").strip()).strip("-") or "gpu"
    commit = (found.commit or str(environment.get("commit") or "")).rstrip("+") or "unknown"
    return f"{word}-{found.began[:10] or 'undated'}-{commit}.json"


def written(page: str, text: str, where: str) -> str:
    """`page` with `text` between the markers. UnreadableError unless both markers are there, once, in order."""
    try:
        return between(page, BEGIN, END, text, where)
    except ValueError as error:
        raise UnreadableError(str(error)) from error


def report_of(path: Path, source: str = "") -> pages.Report:
    """The report of a file, with the frozen claims."""
    found, check = read(path)
    claims = json.loads(PREDICTIONS.read_text(encoding="utf-8"))["claims"] if found.predictions else ()
    return pages.Report(found, claims, found.predictions, source, check)


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="gpu-check.json, or what `gpu_first.py --json` wrote")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put the tables between the markers of a page")
    parser.add_argument("--keep", action="store_true", help="copy the file to benchmarks/results")
    parser.add_argument("--results", type=Path, default=HERE / "results", help=argparse.SUPPRESS)
    chosen = parser.parse_args(given)
    try:
        found, check = read(chosen.file)
        source = ""
        if chosen.keep:
            target = chosen.results / kept_name(found, check)
            shutil.copyfile(chosen.file, target)
            source = str(target.relative_to(ROOT)) if target.is_relative_to(ROOT) else str(target)
            print(f"kept as {source}", file=sys.stderr)
        text = pages.text(report_of(chosen.file, source))
        if chosen.write:
            if not found.timed or found.kind != "gpu":
                raise UnreadableError(
                    f"{chosen.file} was not measured on a GPU ({found.kind}); {chosen.write} stays as it is"
                )
            page = chosen.write.read_text(encoding="utf-8")
            chosen.write.write_text(written(page, text, str(chosen.write)), encoding="utf-8")
    except UnreadableError as error:
        print(error, file=sys.stderr)
        return 1
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
