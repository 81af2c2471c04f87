"""`make fuzz`: damaged and hostile files, target by target, until the time is over. See docs/testing.md.

python tests/fuzz/files.py --seconds 300                     all targets in turn
python tests/fuzz/files.py --target gguf --first 100000      other inputs
python tests/fuzz/files.py --replay build/fuzz/x.json        one input, and what it does
python tests/fuzz/files.py --target gguf --show 1234         the edits of a numbered input
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--target", action="append", default=[])
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--most", type=int, default=None, help="inputs of each target")
    parser.add_argument("--replay", type=Path)
    parser.add_argument("--show", type=int)
    parser.add_argument("--out", type=Path, default=Path("build/fuzz"))
    options = parser.parse_args()
    os.environ["QC_CACHE_DIR"] = tempfile.mkdtemp(prefix="qc-fuzz-cache-")

    from filefuzz import campaign, server, targets

    if options.show is not None:
        print(json.dumps(campaign.Case.drawn(options.target[0], options.show).json(), indent=1))
        return 0
    targets.prepare()
    if options.replay is not None:
        case = campaign.read(options.replay)
        (outcome,) = server.run(case.target, [case.files()])
        print(f"{outcome.kind} {outcome.where}: {outcome.seconds:.1f} s, {outcome.nbytes / 2**20:.0f} MiB")
        print(outcome.detail or "\n".join(outcome.messages))
        return int(outcome.found)
    counts = campaign.campaign(options.target or list(targets.TARGETS), options.seconds, options.first, options.most)
    print(campaign.table(counts))
    found = False
    for target, each in counts.items():
        for number, outcome in each.first.values():
            found = True
            case = campaign.smaller(campaign.Case.drawn(target, number), outcome.where, outcome.kind)
            path = campaign.keep(case, outcome, options.out)
            print(f"python tests/fuzz/files.py --replay {path}")
    return int(found)


if __name__ == "__main__":
    sys.exit(main())
