"""Prints what became of mutants and neutral edits of real schedules, as the tables of docs/schedule.md.

python tests/verifier/tally.py                    # every site: half an hour
python tests/verifier/tally.py --per-class 8     # as the tests: some minutes
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from planmutants import tally


def main() -> int:
    """0 if nothing was accepted that the simulator reports, and no neutral edit refused."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--per-class", type=int, help="at most so many of each class, for each program and variant")
    parser.add_argument("--programs", nargs="+", default=tally.PROGRAMS, help=f"of {', '.join(tally.PROGRAMS)}, block")
    options = parser.parse_args()
    mutants, neutral = [], []
    for program in options.programs:
        mutants += tally.judged(program, options.per_class)
        neutral += tally.judged(program, options.per_class, neutral=True)
        print(f"{program} done: {len(mutants)} mutants, {len(neutral)} neutral edits", file=sys.stderr, flush=True)
    print(tally.table(mutants), tally.neutral_table(neutral), sep="\n\n")
    wrong = [v for v in mutants if v.rule is None and v.harm] + [v for v in neutral if v.rule or v.harm]
    needless = [v for v in mutants if v.rule and not v.harm]
    print(f"\nrefused although harmless ({len(needless)}):", *needless, sep="\n  ")
    print(f"\nwrong ({len(wrong)}):", *wrong, sep="\n  ")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
