"""The cell `layer`: a decode step of a Llama layer as a compiled program, captured, and where its time goes.

The time of a single launch comes from leaving it out: the step's launches run in the plan's order, on one stream, as
one graph, with and without launch i.  So a launch is timed in its place, with the caches as its neighbours leave them,
and with its part of the gaps between kernels.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from gpubench import layer
from gpubench.cells import Scale
from gpubench.document import Row
from gpubench.rig import Rig
from qcompiler.kernels.cost import bytes_moved

TOLERANCE = 2e-2
"""Relative L2 error against the eager model over the same quantised weights, both in bf16; they round at other points.
"""

EAGER_CALLS = {"full": 50, "small": 1}
GRAPH_LAUNCHES = 5


def compiled(device: str, scale: Scale, targets: list[str] | None = None) -> tuple[Any, Any]:
    """(the program, its arguments)."""
    import qcompiler as qc

    model, args = layer.step(layer.FULL if scale == "full" else layer.SMALL)
    more = {"targets": targets} if targets else {}
    return qc.qcompile(model, args, quant="nf4", device=device, **more), args


def measure(rig: Rig, scale: Scale, row: Row, rounds: int) -> None:
    """Fills the row: per step captured, on one stream, eagerly; each launch's share."""
    shape = layer.FULL if scale == "full" else layer.SMALL
    began = time.monotonic()
    program, args = compiled(rig.device, scale)
    row.extra |= {"compile_s": round(time.monotonic() - began, 2), "layers": shape.layers, "keys": shape.filled}
    with torch.no_grad():
        wanted = program.oracle(*args).double()
    session = program.session()
    eager = session(*args).clone()
    graph = session.capture(*args)
    replayed = graph.replay(*args)
    row.tolerance, row.path = TOLERANCE, "compiled program, nf4"
    for mode, result in (("eager", eager), ("replay", replayed)):
        row.errors[mode] = float((result.double() - wanted).norm() / wanted.norm())
    wrong = [f"{mode}: error {error:.2e}" for mode, error in row.errors.items() if not error or not error <= TOLERANCE]
    if not torch.equal(eager, replayed):
        wrong.append("a replay gave other bits than an eager call")
    row.nodes = graph.nodes
    row.status, row.reason = ("wrong", "; ".join(wrong)) if wrong else ("ok", "")
    if wrong:
        return
    launches = steps_of(session, args)
    row.nbytes = sum(each["nbytes"] for each in launches)
    row.extra["launches"] = len(launches)
    _times(rig, row, session, graph, args, launches, rounds, EAGER_CALLS[scale])


def steps_of(session: Any, args: Any) -> list[dict[str, Any]]:
    """The launches of a call in the plan's order, with the addresses of the last capture."""
    _, arguments = session.read(session.program.flatten_inputs(args, {}), None)
    binding = session.bind(tuple(argument.shape for argument in arguments))
    executor, frame = session.executors[binding.entry], session.frames[binding.entry]
    found = []
    for step in executor.prepare(binding).steps:
        if not hasattr(step, "kernel"):
            continue  # records and waits, which one stream does not need
        addresses = list(step.operands)
        for place, address in step.moving:
            addresses[place] = address.at(frame.arenas)
        spec = step.kernel.spec
        found.append(
            {
                "kernel": step.kernel, "addresses": addresses, "symbols": step.symbols, "name": spec.name,
                "template": spec.template, "nbytes": bytes_moved(spec.operands, spec.body, binding.symbols),
            }
        )  # fmt: skip
    return found


def _times(
    rig: Rig, row: Row, session: Any, graph: Any, args: Any, launches: list[dict[str, Any]], rounds: int, eager: int
) -> None:
    own = graph._graph  # the graph alone: a replay also copies arguments and results

    def replays(which: Any) -> list[float] | None:
        rig.time(lambda: which.launch(rig.stream), 2)
        taken = rig.time(lambda: [which.launch(rig.stream) for _ in range(GRAPH_LAUNCHES)], rounds)
        return None if taken is None else [1e6 * each / GRAPH_LAUNCHES for each in taken]

    row.samples, row.calls = replays(own) or [], GRAPH_LAUNCHES

    def serial(without: int | None) -> Any:
        chosen = [each for i, each in enumerate(launches) if i != without]
        return rig.capture(lambda: [rig.launch(e["kernel"], e["addresses"], e["symbols"]) for e in chosen])

    whole = serial(None)
    rig.replay(whole)
    everything = replays(whole)
    steps = [{"number": i, "kernel": e["name"], "template": e["template"], "nbytes": e["nbytes"]}
             for i, e in enumerate(launches)]  # fmt: skip
    if everything is not None:
        row.extra["serial_us"] = everything
        for i, step in enumerate(steps):
            rest = serial(i)
            taken = replays(rest)
            rest.close()
            assert taken is not None
            step["us"] = round(_middle(everything) - _middle(taken), 3)
        began = time.perf_counter()
        arguments = [session.program.array(each) for each in args]
        for _ in range(eager):
            session(*arguments)
        rig.backend.synchronize()
        row.extra["eager_us"] = 1e6 * (time.perf_counter() - began) / eager
    row.extra["steps"] = steps
    whole.close()


def _middle(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]
