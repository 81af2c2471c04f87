"""Measurements of the machine: bandwidth of copies, and the time between empty kernels.

copy      1 GiB from device memory to device memory; bytes read plus bytes written over the time. Not in a graph, where
          a copy engine carries copies out: on an H200 it reaches two thirds of the memory's rate
launch    a kernel of one thread: launched eagerly one after another, and in a graph as a chain
"""

from __future__ import annotations

import time
from typing import Any

from gpubench.document import Probe
from gpubench.rig import Rig
from qcompiler.plan.kernel import KernelSpec, Operand
from qcompiler.plan.kinds.norm import NormKernel

COPY_BYTES = {"full": 1 << 30, "small": 1 << 16}
CHAIN = {"full": (100, 1000), "small": (4,)}
"""Nodes of the graphs: the slope between two lengths is the time of a node without the start of the graph."""

EAGER = {"full": 2000, "small": 4}


def tiny_spec() -> KernelSpec:
    """The smallest launch: a norm of one row of 32 values, one block."""
    x = Operand(name="x", dtype="f32", access="r", shape=(1, 32), strides=(32, 1))
    y = Operand(name="y", dtype="f32", access="w", shape=(1, 32), strides=(32, 1))
    body = NormKernel(kind="rms", rows=1, cols=32, eps=1e-5, has_weight=False, has_bias=False)
    return KernelSpec(name="tiny", symbols=(), operands=(x, y), body=body)


def copy(rig: Rig, moment: str, scale: str, rounds: int) -> Probe:
    """Two copies in the stream."""
    nbytes = COPY_BYTES[scale]
    source, target = rig.allocate(nbytes), rig.allocate(nbytes)
    if not rig.timed:
        rig.poison(source)  # the simulated GPU reports copies of uninitialised memory

    def twice() -> None:
        for _ in "ab":
            rig.backend.copy(rig.stream, target.address, source.address, nbytes)

    twice()
    rig.synchronize()
    taken = rig.time(twice, rounds)
    values: dict[str, Any] = {"nbytes": 2 * nbytes}
    if taken is not None:
        values["terabytes_per_second"] = [2 * 2 * nbytes / each / 1e12 for each in taken]
    return Probe("copy", moment, values)


def launch(rig: Rig, moment: str, scale: str, rounds: int) -> Probe:
    """Microseconds: of a node in a chain (`node_us`), of an eager launch on the host and on the device."""
    kernel = rig.kernel(tiny_spec())
    x, y = rig.upload_floats(32), rig.allocate(128)

    def once() -> None:
        rig.launch(kernel, (x.address, y.address), ())

    once()
    rig.synchronize()
    values: dict[str, Any] = {}
    for nodes in CHAIN[scale]:
        graph = rig.capture(lambda nodes=nodes: [once() for _ in range(nodes)])  # type: ignore[misc]
        rig.replay(graph)
        taken = rig.time(lambda graph=graph: graph.launch(rig.stream), rounds)  # type: ignore[misc]
        if taken is not None:
            values[f"graph_of_{nodes}_us"] = [1e6 * each for each in taken]
    short, long = CHAIN[scale][0], CHAIN[scale][-1]
    if f"graph_of_{long}_us" in values and long > short:
        middle = [sorted(values[f"graph_of_{each}_us"])[rounds // 2] for each in (short, long)]
        values["node_us"] = (middle[1] - middle[0]) / (long - short)
    count = EAGER[scale]
    began = time.perf_counter()
    taken = rig.time(lambda: [once() for _ in range(count)], 1)
    rig.synchronize()
    if taken is not None:
        values["eager_host_us"] = 1e6 * (time.perf_counter() - began) / count
        values["eager_device_us"] = 1e6 * taken[0] / count
    return Probe("launch", moment, values)
