"""Makes random graphs until it is told to stop, and keeps what fails, shrunk, as files of tests/fuzz/kept/.

    python tests/fuzz/explore.py --graphs 2000 --seed 7                     # all kinds
    python tests/fuzz/explore.py --graphs 200 --profile special --checks schedule,stepwise,file
    python tests/fuzz/explore.py --only 7003 --seed 7                       # one graph again, with its text

Graph i of seed s has the number 1000 * s + i; the same number is the same graph. Exit status 1 if anything failed.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from graphfuzz import batch, generate
from graphfuzz.keep import KEPT, text_of_graph
from graphfuzz.shrink import shrink

FLAGS = ("schedule", "stepwise", "file", "mlir", "sim", "verify_each")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1, help="of the first batch")
    parser.add_argument("--size", type=int, default=20, help="graphs in a batch")
    parser.add_argument("--profile", choices=sorted(generate.PROFILES))
    parser.add_argument("--checks", default="schedule,stepwise", help=f"comma-separated: {', '.join(FLAGS)}")
    parser.add_argument("--optimise", default="-O1")
    parser.add_argument("--isa")
    parser.add_argument("--static", action="store_true", help="fixed sizes")
    parser.add_argument("--only", type=int, help="the number of one graph")
    parser.add_argument("--keep", type=Path, default=KEPT)
    parser.add_argument("--no-shrink", action="store_true")
    given = parser.parse_args()
    checks = batch.Checks(optimise=given.optimise, isa=given.isa, static=given.static)
    checks = replace(checks, **{flag: True for flag in given.checks.split(",") if flag})
    failed, done, seed = 0, 0, given.seed
    while done < given.graphs:
        sizes = generate.sizes_of(seed)
        numbers = [1000 * seed + i for i in range(given.size)] if given.only is None else [given.only]
        graphs = [generate.graph_of(number, sizes, given.profile) for number in numbers]
        if given.only is not None:
            print(graphs[0].source())
        began = time.process_time()
        report = batch.check(graphs, sizes, checks)
        found = batch.isolate(graphs, sizes, checks, report)
        seconds = time.process_time() - began
        print(
            f"seed {seed}: {len(graphs)} graphs, {len(found)} fail ({seconds:.0f} s of CPU)",
            file=sys.stderr,
            flush=True,
        )
        for place, failure in found:
            failed += 1
            graph = graphs[place]
            if not given.no_shrink:
                graph, failure, _ = shrink(graph, failure, sizes, checks)  # noqa: PLW2901
            story = (
                f"{failure.component}: {failure.detail.splitlines()[0][:400]}\n\nGraph {numbers[place]} of seed {seed}."
            )
            path = given.keep / f"{failure.component}_{numbers[place]}.py"
            given.keep.mkdir(exist_ok=True)
            path.write_text(text_of_graph(graph, story))
            print(f"{path}\n{failure.component}: {failure.detail[:1000]}\n{graph.source()}", flush=True)
        done += len(graphs)
        seed += 1
        if given.only is not None:
            break
    print(f"{done} graphs, {failed} fail", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
