"""Prints what became of mutants of kernels, views, sizes, memory, init, states and entries, as docs/schedule.md has it.

python tests/verifier/tally_specs.py --known found.jsonl                  # all mutants of all seeds, run on the CPU
python tests/verifier/tally_specs.py --known found.jsonl --kind cuda      # on the simulated GPU
python tests/verifier/tally_specs.py --per-class 2 --refused 100          # a sample; and refused ones that are run, too

With --known a run that was interrupted goes on where it was.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from specmutants import tally


def main() -> int:
    """0 if no accepted mutant is reported by a judge and none escapes the checks with another error than ours."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--per-class", type=int, help="at most so many of each class, for each seed")
    parser.add_argument("--run", type=int, help="run at most so many accepted ones of each class, for each seed")
    parser.add_argument(
        "--refused", type=int, default=0, help="run so many refused ones: which were refused needlessly?"
    )
    parser.add_argument("--known", type=Path, help="a file of judgements, made or continued")
    parser.add_argument("--seeds", nargs="+", default=list(tally.SEEDS))
    options = parser.parse_args()
    known = tally.Known(options.known)
    run = tally.run_on_cpu if options.kind == "cpu" else tally.run_on_sim
    everything, refused = [], []
    for name in options.seeds:
        own = list(tally.checked(name, options.kind, options.per_class))
        accepted = [each for each in own if each[0].refused is None]
        if options.run is not None:
            accepted = random.Random(name).sample(accepted, min(len(accepted), options.run))
        run(accepted, known)
        everything += [verdict for verdict, _ in own]
        refused += [each for each in own if each[0].refused is not None and each[0].mutant.plan is not None]
        harm = sum(verdict.harm for verdict, _ in accepted)
        print(f"{name}: {len(own)} mutants, {len(accepted)} accepted, {harm} reported", file=sys.stderr, flush=True)
    print(tally.table(everything))
    escaped = [verdict for verdict in everything if (verdict.refused or "").startswith("ESCAPED")]
    harmful = [verdict for verdict in everything if verdict.refused is None and verdict.harm]
    print(f"\naccepted, and a judge reports it ({len(harmful)}):", *harmful, sep="\n  ")
    print(f"\nother errors than ours ({len(escaped)}):", *escaped, sep="\n  ")
    if options.refused:
        chosen = random.Random(0).sample(refused, min(len(refused), options.refused))
        run(chosen, known)
        needless = [verdict for verdict, _ in chosen if verdict.found == "clean"]
        print(f"\nrefused, run and clean: {len(needless)} of {len(chosen)}", *needless, sep="\n  ")
    return 1 if harmful or escaped else 0


if __name__ == "__main__":
    sys.exit(main())
