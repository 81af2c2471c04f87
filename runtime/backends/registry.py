"""Device names: their meaning, whether the device exists, and its backend.

"cpu"    the processor          "cuda:0"  an NVIDIA GPU          "sim:0"  a simulated one
"""

from __future__ import annotations

import os

from qcompiler.errors import DeviceUnavailableError
from qcompiler.kernels.cuda.signature import ARCHS, arch_number
from qcompiler.runtime.backends.base import Backend, Kind

SIM_ARCH = "sm_80"
"""The architecture of the simulated GPU unless `QC_SIM_ARCH` names another: asynchronous copies and both mma types."""

_KINDS: dict[str, Kind] = {"cpu": "cpu", "cuda": "cuda", "sim": "sim"}


def parse(device: str) -> tuple[Kind, int]:
    """("cuda", 1) for "cuda:1". DeviceUnavailableError for an invalid name."""
    word, _, index = device.partition(":")
    kind = _KINDS.get(word)
    if kind is None or not (index.isdecimal() or device == word):
        raise DeviceUnavailableError(f"there is no device {device!r}; there are cpu, cuda:N and sim:N")
    return kind, int(index or 0)


def is_available(device: str) -> bool:
    """Whether programs can run on the device now."""
    kind, index = parse(device)
    if kind == "cpu":
        return index == 0
    if kind == "sim":
        from qcompiler.runtime.backends.sim import DEVICES

        return index < DEVICES
    from qcompiler.runtime.backends.cuda import device_count

    return index < device_count()


def require(device: str) -> None:
    """DeviceUnavailableError unless programs can run on the device now."""
    if is_available(device):
        return
    way_out = {"cpu": "there is one cpu", "cuda": 'device="sim:0" is the simulated GPU', "sim": "the last one is sim:7"}
    kind, _ = parse(device)
    raise DeviceUnavailableError(f"the device {device} is not available on this machine; {way_out[kind]}")


def architecture(device: str) -> str:
    """The architecture that programs for a GPU are compiled for. DeviceUnavailableError for an absent GPU."""
    kind, index = parse(device)
    if kind == "sim":
        arch = os.environ.get("QC_SIM_ARCH", SIM_ARCH)
        if arch not in ARCHS:
            raise DeviceUnavailableError(f"QC_SIM_ARCH={arch!r} is none of {', '.join(ARCHS)}")
        return arch
    from qcompiler.runtime.backends.cuda import device_arch, device_count

    if index >= device_count():
        raise DeviceUnavailableError(
            f"there is no {device} on this machine ({device_count()} GPUs); name an architecture to compile for "
            '(targets=["sm_90a"]), or use device="sim:0", the simulated GPU'
        )
    return device_arch(index)


def runs(device: str) -> tuple[str, ...]:
    """The builds that a device runs, plainest first.

    A cubin runs on its own architecture and on later ones of the same major version; a cubin for "sm_90a" on that one
    only.  The simulated GPU runs only its own builds.
    """
    kind, _ = parse(device)
    if kind == "cpu":
        from qcompiler.runtime.isa import runnable_isas

        return runnable_isas()
    if kind == "sim":
        return ()
    own = architecture(device)
    number = arch_number(own)
    return tuple(
        arch
        for arch in ARCHS
        if arch == own
        or (arch[-1].isdigit() and arch_number(arch) // 10 == number // 10 and arch_number(arch) <= number)
    )


def backend(device: str, isa: str) -> Backend:
    """The backend of a device for kernels of `isa`."""
    kind, index = parse(device)
    if kind == "cpu":
        from qcompiler.runtime.backends.cpu import CpuBackend

        return CpuBackend(isa)
    if kind == "sim":
        from qcompiler.runtime.backends.sim import SimBackend

        return SimBackend(index, isa)
    from qcompiler.runtime.backends.cuda import CudaBackend

    return CudaBackend(index, isa)
