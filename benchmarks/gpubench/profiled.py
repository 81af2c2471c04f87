"""Kernels for ncu and compute-sanitizer, each alone in a process: some cells, and one program."""

from __future__ import annotations

from gpubench import ours
from gpubench.cells import KEYS, SHAPES, Cell, Scale, sizes
from gpubench.rig import rig_of
from gpubench.weights import Store

SQUARE = SHAPES[0]
LAYER = "decode_layer"
KERNELS: dict[str, Cell] = {
    "nf4_m1": Cell("linear", "nf4", *SQUARE, m=1),
    "int4_m1": Cell("linear", "int4", *SQUARE, m=1),
    "q4_K_m1": Cell("linear", "q4_K", *SQUARE, m=1),
    "nf4_m16": Cell("linear", "nf4", *SQUARE, m=16),
    "nf4_m64": Cell("linear", "nf4", *SQUARE, m=64),
    "nf4_m4096": Cell("linear", "nf4", *SQUARE, m=4096),
    "w8a8_m64": Cell("linear", "w8a8", *SQUARE, m=64),
    "attention_decode_8k": Cell("attention_decode", "ours", n=KEYS[0], m=1),
    "rmsnorm": Cell("norm", "ours", k=4096, m=4096),
    "grouped_linear": Cell("grouped", "nf4", n=4096, k=4096, m=64),
    LAYER: Cell("layer", "nf4", m=1),
}
"""By name; the last launches the kernels of a decoder layer, so one profile shows where a step's time goes."""


def run(name: str, device: str, launches: int, scale: Scale) -> list[str]:
    """Launches a kernel `launches` times, rotating through copies; returns lines that describe it. Compares nothing."""
    cell, rig = KERNELS[name], rig_of(device)
    if cell.kind == "layer":
        from gpubench import program

        compiled, arguments = program.compiled(device, scale)
        for _ in range(launches):
            compiled(*arguments)
        steps = compiled.plan.entries[0].steps
        names = [step.kernel for step in steps if hasattr(step, "kernel")]
        return [f"{name}: {launches} steps of {len(names)} launches", *(f"  qk_{each}" for each in names)]
    store = Store(rig)
    try:
        work = ours.work_of(rig, store, cell, sizes(cell, scale))
        for i in range(launches):
            work.call(i)
        rig.synchronize()
    finally:
        store.close()
    facts = work.facts
    return [
        f"{name}: {launches} launches of qk_{facts['name']} ({facts['engine']}) on {facts['grid']} blocks of "
        f"{facts['block']} threads, {facts['shared']} bytes of shared memory",
        f"  {cell.id}; {facts['note']}",
    ]
