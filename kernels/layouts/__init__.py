"""Layouts: named, versioned bijections between a weight's canonical bytes and the bytes that kernels read.

    layout = layouts.get("cpu_p16_v1")
    packed = layout.pack(fmt, dtype, rows, cols, canonical)      # uint8 -> uint8
    layout.unpack(fmt, dtype, rows, cols, packed)                # the canonical bytes again

`fmt` is a `Format`, or None for plain values of `dtype` ("f32", "bf16", …), whose canonical form is row-major. A layout
adds zero padding and nothing else. kernels/cpu/layout_pack.h implements those of the
CPU in C++.
"""

from __future__ import annotations

from qcompiler.errors import LayoutError
from qcompiler.kernels.layouts.base import CANONICAL, Layout
from qcompiler.kernels.layouts.cpu import CpuP16V1, CpuP16V2
from qcompiler.kernels.layouts.cuda import CudaT16V1
from qcompiler.kernels.layouts.pairs import CpuP16PairsV1, CpuP16PairsV2, CudaT16PairsV1
from qcompiler.kernels.layouts.panels import PanelLayout

LAYOUTS: dict[str, Layout] = {
    layout.name: layout
    for layout in (
        CANONICAL,
        CpuP16V1(),
        CpuP16V2(),
        CudaT16V1(),
        CpuP16PairsV1(),
        CpuP16PairsV2(),
        CudaT16PairsV1(),
    )
}


def in_panels(name: str) -> PanelLayout:
    """The layout of that name, which is one in panels."""
    found = get(name)
    assert isinstance(found, PanelLayout), name
    return found


def names() -> tuple[str, ...]:
    """The names of all layouts."""
    return tuple(LAYOUTS)


def get(name: str) -> Layout:
    """The layout of that name. LayoutError lists the available ones."""
    if name not in LAYOUTS:
        raise LayoutError(f"no layout is called {name!r}; there are: {', '.join(LAYOUTS)}")
    return LAYOUTS[name]
