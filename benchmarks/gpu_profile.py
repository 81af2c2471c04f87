"""Ten kernels and a decode step, one at a time in a process of its own: for ncu and compute-sanitizer.

    python benchmarks/gpu_profile.py --list
    ncu --set full --clock-control none -k regex:qk_ python benchmarks/gpu_profile.py --kernel nf4_m1
    compute-sanitizer --tool racecheck python benchmarks/gpu_profile.py --kernel nf4_m64 --small
    python benchmarks/gpu_profile.py --kernel nf4_m1 --device sim:0     # the same launches, small, accesses checked
    python benchmarks/gpu_profile.py --compile sm_90a                   # cubins to bring along; needs no GPU

`--small` takes small sizes on a GPU: the sanitizer slows kernels down by ten to a hundred times.
Exit: 0 without a GPU as well, with a message.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import gpu_first
from gpubench import profiled


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the kernels' names and exit")
    parser.add_argument("--kernel", choices=list(profiled.KERNELS), metavar="NAME")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--launches", type=int, default=3)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--compile", metavar="ARCH", help="compile the kernels for an architecture and exit")
    chosen = parser.parse_args(given)
    if chosen.list:
        print("\n".join(profiled.KERNELS))
        return 0
    if chosen.compile:
        from gpubench import compiled

        return compiled.all_of(chosen.compile, list(profiled.KERNELS.values()), os.cpu_count() or 1)
    if chosen.kernel is None:
        parser.error("--kernel NAME, --list or --compile ARCH")
    if (reason := gpu_first.no_device(chosen.device)) is not None:
        print(f"no GPU: {reason}; nothing was launched")
        return 0
    small = chosen.small or not chosen.device.startswith("cuda")
    print("\n".join(profiled.run(chosen.kernel, chosen.device, chosen.launches, "small" if small else "full")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
