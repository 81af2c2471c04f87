"""The pictures of docs/tutorial.md: the explorer's page of the tutorial's own model, in headless Chromium.

    python benchmarks/explorer_pictures.py           # takes them anew; keeps them without Chromium or node
    python benchmarks/explorer_pictures.py --check   # exits with 1 if they show something else than they would now

`make docs` runs it.  Pictures differ from machine to machine by their fonts, so they are not compared.
docs/pictures/explorer.json has the digest of what they show: the page's code, the script that takes them, and the
stages, kernels and steps of the program, without the seconds of the stages.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import explorer_browser

import qcompiler as qc
from qcompiler.inspect.explore.collect import Contents, collect
from qcompiler.inspect.explore.model import Collected
from qcompiler.inspect.explore.page import bundled
from qcompiler.inspect.explore.stages import StageText

ROOT = Path(__file__).resolve().parents[1]
PICTURES = ROOT / "docs" / "pictures"
RECORD = PICTURES / "explorer.json"
SCRIPT = "explorer_pictures.mjs"
SHOWN = ("pull-slices", "fuse-epilogues")
"""The stages whose texts are in a picture."""


def tutorial_program(folder: Path) -> Any:
    """The tutorial's model, compiled for AVX2 on every machine, since pictures show kernels and estimates."""
    found = re.search(r"^```python\n(# net\.py\n.*?)^```", (ROOT / "docs" / "tutorial.md").read_text(), re.S | re.M)
    assert found is not None, "the tutorial has no net.py"
    (folder / "net.py").write_text(found[1])
    spec = importlib.util.spec_from_file_location("net", folder / "net.py")
    assert spec is not None and spec.loader is not None
    net = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(net)
    model, args, kwargs, dims = net.model()
    return qc.qcompile(model, args, kwargs, quant="int8", dynamic_shapes=dims, targets=["x86-64-v3"])


def digest_of(program: Any) -> str:
    """The digest of everything that a picture shows of a program, but seconds."""
    stages = [StageText(n, name, _suffix(n, program), program.ir(name)) for n, name in enumerate(program.stages)]
    contents = Contents(
        program.plan, "cpu", program.image.target.isa, "compile", "net", stages, [],
        json.loads(program.ledger.to_json()),
    )  # fmt: skip
    facts = [
        *(bundled(name) for name in ("explorer.js", "explorer.css")),
        *((Path(__file__).parent / name).read_text() for name in (SCRIPT, "explorer_page.mjs")),
        *_facts(collect(contents)),
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def recorded() -> str:
    """The digest of what the committed pictures show; "" without any."""
    return str(json.loads(RECORD.read_text())["digest"]) if RECORD.exists() else ""


def _suffix(number: int, program: Any) -> str:
    """That of the dump's file: torch graphs, then IR, then C++."""
    return "txt" if number < 2 else "cpp" if number == len(program.stages) - 1 else "mlir"


def _facts(found: Collected) -> list[Any]:
    model = found.model
    (main,) = (entry for entry in model.entries if entry.name == "main")
    return [
        [(stage.name, stage.changed, stage.delta) for stage in model.stages if stage.kind == "mlir"],
        [found.texts[stage.text] for stage in model.stages if stage.name in SHOWN],
        [(kernel.name, kernel.launch, kernel.operands, found.texts[kernel.source]) for kernel in model.kernels],
        [(step.place, step.kernel, step.nbytes, step.alone) for step in main.steps],
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        program = tutorial_program(folder)
        digest = digest_of(program)
        current = recorded() == digest
        if options.check:
            print(
                "the pictures are current" if current else "the pictures are out of date: `make docs` takes them anew"
            )
            return int(not current)
        if current:
            print("the pictures are current")
            return 0
        if missing := explorer_browser.missing_tools():
            print(f"the pictures are out of date and are kept: new ones need {', '.join(missing)}", file=sys.stderr)
            return 0
        program.explore(folder / "net.html")
        PICTURES.mkdir(exist_ok=True)
        web = explorer_browser.prepared(folder)
        taken = explorer_browser.run(web, SCRIPT, folder / "net.html", PICTURES)
        RECORD.write_text(json.dumps({"digest": digest}, indent=1) + "\n")
    print(", ".join(f"{name} {nbytes / 1000:.0f} kB" for name, nbytes in taken.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
