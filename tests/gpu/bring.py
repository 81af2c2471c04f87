"""`make gpu-wheels`: fills a folder with what `make gpu-check` needs on a bare machine without network.

    python3 tests/gpu/bring.py FOLDER [--python 3.12 …] [--arch sm_90a] [--only wheels|cubins] [--jobs N]

1. wheels: what an image with Python, NumPy and torch 2.11+cu130 lacks, resolved by pip with the versions of
   constraints.txt, for the image's Python on Linux x86-64 (glibc 2.34 or older). NVRTC is not among them: torch's own
   (nvidia-cuda-nvrtc 13.0) is found by cuda.bindings. bitsandbytes, a peer of the benchmark, is cut to the one library
   of its CUDA version.
2. cubins.zip, references.zip: every kernel of the check and of the benchmarks compiled for the architecture, as this
   machine's cache keeps them, and what the simulated GPU computes with the matrix' kernels. NVRTC needs no GPU.

Prints each file and the total, and says if that is more than `LIMIT`. Needs the development environment.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from by_path import ROOT, load

assembly = load("tests/gpu/assembly.py")

LIMIT = 64 << 20
"""Bytes that a machine that is rented by the minute may take with a command."""

NEEDED = (
    "cuda-core", "cuda-bindings", "pytest", "hypothesis", "xdsl", "rich", "msgspec", "ml_dtypes", "safetensors",
)  # fmt: skip
"""What the package and its tests import, and an image of torch lacks or may lack; pip adds what these need."""

THERE = ("numpy", "torch", "triton", "setuptools")
"""Never brought: the image's own."""

CUT = "bitsandbytes"
CUDA = "130"
"""The CUDA version of torch 2.11+cu130, as bitsandbytes names its libraries."""

PLATFORMS = (*(f"manylinux_2_{n}_x86_64" for n in range(34, 4, -1)), "manylinux2014_x86_64", "manylinux1_x86_64")


# --- wheels ----------------------------------------------------------------------------------------------------------


def pip(*arguments: str) -> str:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr.strip()[-3000:]}")
    return done.stdout


def target(python: str) -> list[str]:
    """pip's options that name the other machine."""
    platforms = [option for each in PLATFORMS for option in ("--platform", each)]
    return ["--only-binary=:all:", "--python-version", python, "--implementation", "cp", *platforms]


def resolved(python: str) -> list[str]:
    """`name==version` of everything that is brought, dependencies included."""
    with tempfile.TemporaryDirectory() as nowhere:
        report = Path(nowhere) / "report.json"
        constraints = ["-c", str(ROOT / "constraints.txt")]
        pip("install", "--quiet", "--dry-run", "--ignore-installed", "--target", nowhere, "--report", str(report),
            *target(python), *constraints, *NEEDED)  # fmt: skip
        data = json.loads(report.read_text())
    found = [(str(each["metadata"]["name"]), str(each["metadata"]["version"])) for each in data["install"]]
    return sorted(f"{name}=={version}" for name, version in found if name.lower() not in THERE)


def pinned(package: str) -> str:
    """`name==version` of constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return next(line for line in lines if line.startswith(f"{package}=="))


def fetch_wheels(folder: Path, pythons: Sequence[str]) -> None:
    for old in folder.glob("*.whl"):
        old.unlink()
    for python in pythons:
        names = resolved(python)
        pip("download", "--quiet", "--no-deps", "--dest", str(folder), *target(python), *names)
    with tempfile.TemporaryDirectory() as place:
        pip("download", "--quiet", "--no-deps", "--dest", place, *target(pythons[0]), pinned(CUT))
        (whole,) = Path(place).glob("*.whl")
        cut_wheel(whole, folder / whole.name, CUDA)


def cut_wheel(whole: Path, into: Path, cuda: str) -> None:
    """A wheel of bitsandbytes with one of its libraries, and a RECORD that says so."""
    keep = f"libbitsandbytes_cuda{cuda}.so"
    rows, record = [], ""
    with zipfile.ZipFile(whole) as source, zipfile.ZipFile(into, "w", zipfile.ZIP_DEFLATED) as result:
        names = source.namelist()
        if not any(name.endswith(f"/{keep}") for name in names):
            libraries = sorted(Path(name).name for name in names if name.endswith(".so"))
            raise SystemExit(f"{whole.name} has no {keep}; it has {', '.join(libraries)}")
        for name in names:
            if name.endswith("/RECORD"):
                record = name
            elif not name.endswith(".so") or name.endswith(f"/{keep}"):
                data = source.read(name)
                digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
                rows.append(f"{name},sha256={digest},{len(data)}")
                result.writestr(name, data)
        result.writestr(record, "\n".join([*rows, f"{record},,", ""]))


# --- cubins ----------------------------------------------------------------------------------------------------------


def compile_cubins(folder: Path, arch: str, jobs: int) -> None:
    """cubins.zip and references.zip of the whole check, by processes with a cache of their own."""
    cache = ROOT / "build" / "gpu-bring"
    for stale in ("cuda", "plans"):
        shutil.rmtree(cache / stale, ignore_errors=True)
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    env = {**os.environ, "QC_CACHE_DIR": str(cache), "PYTHONSAFEPATH": "1"}
    pieces = [cache / f"references-{number}.zip" for number in range(jobs)]
    worker = [sys.executable, str(ROOT / "tests/gpu/matrix_worker.py"), "--compile", arch]
    commands = [
        [*worker, "--share", str(number), str(jobs), "--references", str(piece)] for number, piece in enumerate(pieces)
    ]
    with ThreadPoolExecutor(jobs) as pool:
        for output in pool.map(lambda command: must(command, env), commands):
            print(output.strip(), flush=True)
    for program in ("gpu_first.py", "gpu_profile.py"):
        path = ROOT / "benchmarks" / program
        print(must([sys.executable, "-P", str(path), "--compile", arch], env).strip()[-500:], flush=True)
    with zipfile.ZipFile(folder / assembly.REFERENCES, "w", zipfile.ZIP_STORED) as merged:
        for piece in pieces:
            with zipfile.ZipFile(piece) as archive:
                for name in archive.namelist():
                    merged.writestr(name, archive.read(name), zipfile.ZIP_DEFLATED)
    pack(cache, folder / assembly.CUBINS, assembly.compiler(env))


def must(command: Sequence[str], env: dict[str, str]) -> str:
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return done.stdout


def pack(cache: Path, into: Path, maker: str) -> None:
    """What the runtime reads of a cache: cubins, their records, and which plan has which. Sources stay here."""
    with zipfile.ZipFile(into, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        archive.writestr(assembly.MANIFEST, json.dumps({"maker": maker}))
        for pattern in ("plans/*.json", "cuda/*.cubin", "cuda/*.json"):
            for file in sorted(cache.glob(pattern)):
                archive.write(file, file.relative_to(cache))


def report_sizes(folder: Path) -> None:
    files = sorted(each for each in folder.iterdir() if each.suffix in (".whl", ".zip"))
    for file in files:
        print(f"{file.stat().st_size / 2**20:8.2f} MiB  {file.name}")
    total = sum(file.stat().st_size for file in files)
    print(f"{total / 2**20:8.2f} MiB  in all", end="")
    print(f": more than {LIMIT >> 20} MiB, which some machines do not take" if total > LIMIT else "")


def main() -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", nargs="+", default=["3.12"], help="the image's version, or several")
    parser.add_argument("--arch", default="sm_90a", help="the GPU's architecture")
    parser.add_argument("--only", choices=("wheels", "cubins"))
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    chosen = parser.parse_args()
    chosen.folder.mkdir(parents=True, exist_ok=True)
    if chosen.only != "cubins":
        fetch_wheels(chosen.folder, chosen.python)
    if chosen.only != "wheels":
        compile_cubins(chosen.folder, chosen.arch, chosen.jobs)
    report_sizes(chosen.folder)


if __name__ == "__main__":
    main()
