"""Graphs that failed once, each shrunk to what showed it (tests/fuzz/kept/), stay right."""

from __future__ import annotations

from graphfuzz import batch, generate, plan
from graphfuzz.keep import kept_files, read, text_of_graph


def test_graphs_that_failed_once_are_right_now() -> None:
    files = kept_files()
    assert files
    graphs = [read(path) for path in files]
    checks = batch.Checks(schedule=True, stepwise=True)
    plan.hold(graphs, generate.sizes_of(1), checks, f"the kept graphs ({', '.join(path.stem for path in files)})")


def test_a_kept_graph_reads_back_as_it_was_written(tmp_path: object) -> None:
    from pathlib import Path

    assert isinstance(tmp_path, Path)
    for number, graph in enumerate(plan.drawn(4, generate.sizes_of(4), 12)):
        path = tmp_path / f"graph_{number}.py"
        path.write_text(text_of_graph(graph, "a story"))
        assert read(path).source() == graph.source()
        assert [s.types for s in read(path).statements] == [s.types for s in graph.statements]
