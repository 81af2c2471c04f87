"""What `make gpu-check` installs on a bare machine: wheels and cubins that were brought along, and the package itself.

Everything goes into build/: no index, no network, nothing outside the folder. tests/gpu/bring.py fills the folder.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

CUBINS = "cubins.zip"
REFERENCES = "references.zip"
MANIFEST = "manifest.json"
"""In cubins.zip: what made them."""

MODULES = (
    "numpy", "torch", "pytest", "cuda.core", "cuda.bindings.driver", "ml_dtypes", "msgspec", "safetensors", "xdsl",
    "rich", "hypothesis",
)  # fmt: skip
"""What the check imports; torch is used by suites and peers alone."""

MISSING = """
import importlib.util, sys
for name in sys.argv[1:]:
    try:
        found = importlib.util.find_spec(name)
    except ImportError:
        found = None
    if found is None:
        print(name)
"""

NVRTC = """
from qcompiler.runtime import nvrtc
from qcompiler.runtime.emitter import emitter_version
version = nvrtc.compiler_version("sm_90a")
library = next((line.split()[-1] for line in open("/proc/self/maps") if "libnvrtc.so" in line), "?")
emitter = emitter_version("cuda")
print(f"{version}, emitter {emitter}, {library}")
"""


def assemble(site: Path) -> None:
    """The package as a wheel would unpack it: folders of the source tree under the names they are imported by."""
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    target = site / "qcompiler"
    shutil.rmtree(target, ignore_errors=True)
    mapped: dict[str, str] = setuptools["package-dir"]
    for package in setuptools["packages"]:
        root = max((each for each in mapped if f"{package}.".startswith(f"{each}.")), key=len)
        source = ROOT / mapped[root] / package[len(root) + 1 :].replace(".", "/")
        patterns = ["*.py", *setuptools["package-data"].get(package, [])]
        for file in sorted({file for pattern in patterns for file in source.glob(pattern)}):
            path = site / package.replace(".", "/") / file.name
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, path)


def install_wheels(folder: Path, site: Path) -> None:
    """Every wheel of a folder that is for this Python, without an index."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    wheels = [wheel for wheel in sorted(folder.glob("*.whl")) if fits(wheel.name, sys.version_info[:2])]
    if not wheels:
        raise SystemExit(
            f"there are no wheels for Python {python} in {folder}; `make gpu-wheels WHEELS={folder} FOR={python}`, on "
            "a machine with a network, puts them there"
        )
    stamp, wanted = site / ".wheels", "\n".join(f"{wheel.name} {wheel.stat().st_size}" for wheel in wheels)
    if stamp.exists() and stamp.read_text() == wanted:
        return
    shutil.rmtree(site, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
    command += ["--disable-pip-version-check", "--target", str(site), *map(str, wheels)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(
            f"the wheels in {folder} do not install into Python {python}:\n{done.stderr.strip()}\n"
            f"`make gpu-wheels WHEELS={folder} FOR={python}`, on a machine with a network, fetches others"
        )
    stamp.write_text(wanted)


def fits(wheel: str, python: tuple[int, ...]) -> bool:
    """Whether a wheel is for this Python, by its name's last three parts (PEP 427): a folder may hold several's."""
    tags, abi, _ = wheel.removesuffix(".whl").split("-")[-3:]
    for tag in tags.split("."):
        found = re.fullmatch(r"(cp|py)(\d)(\d*)", tag)
        if found is None or int(found[2]) != python[0]:
            continue
        if not found[3] or int(found[3]) == python[1] or (abi == "abi3" and int(found[3]) <= python[1]):
            return True
    return False


@dataclass
class Brought:
    """The cubins of a folder, unpacked into the cache. `maker` is NVRTC's version and the emitter's (see `NVRTC`)."""

    cubins: int = 0
    maker: str = ""
    references: Path | None = None
    files: list[str] = field(default_factory=list)


def install_cubins(folder: Path | None, cache: Path) -> Brought:
    """Unpacks what bring.py packed. Files that the cache holds already are left alone."""
    if folder is None:
        return Brought()
    references = folder / REFERENCES
    brought = Brought(references=references.resolve() if references.exists() else None)
    if not (folder / CUBINS).exists():
        return brought
    with zipfile.ZipFile(folder / CUBINS) as archive:
        brought.maker = str(json.loads(archive.read(MANIFEST))["maker"])
        for name in archive.namelist():
            if name == MANIFEST:
                continue
            target = cache / name
            brought.cubins += name.endswith(".cubin")
            if target.parent.parent != cache or target.exists():
                continue
            for made in (cache, target.parent):
                made.mkdir(mode=0o700, parents=True, exist_ok=True)
            target.write_bytes(archive.read(name))
            target.chmod(0o600)
    return brought


def environment(site: Path) -> dict[str, str]:
    """Where the tests find the package, and a cache of their own."""
    before = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(site), *([before] if before else [])]),
        "PYTHONSAFEPATH": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # the image's; hypothesis' is half of pytest's start
        "QC_CACHE_DIR": os.environ.get("QC_CACHE_DIR") or str(ROOT / "build" / "gpu-cache"),
    }


def missing_modules(env: dict[str, str]) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", MISSING, *MODULES], env=env, capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def check_packages(env: dict[str, str]) -> dict[str, str]:
    """SystemExit that names what cannot be imported. torch may be absent: what then does not run, and why."""
    missing = missing_modules(env)
    absent = (
        {"torch": "torch is not installed: neither its peers nor the suites that need it"} if "torch" in missing else {}
    )
    if missing := [each for each in missing if each != "torch"]:
        raise SystemExit(
            f"{sys.executable} lacks {', '.join(missing)}; `make gpu-wheels`, on a machine with a network, puts their "
            "wheels into a folder: pass WHEELS=folder"
        )
    return absent


def compiler(env: dict[str, str]) -> str:
    """NVRTC's version, the emitter's, and the library's file; what is wrong, where it cannot be used."""
    done = subprocess.run([sys.executable, "-c", NVRTC], env=env, capture_output=True, text=True, check=False)
    return done.stdout.strip() or f"unusable: {(done.stderr.strip().splitlines() or ['?'])[-1]}"
