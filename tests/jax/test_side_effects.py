"""Functions that replace arrays in their arguments: JAX loses the change, and a program would, too."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from qcompiler.errors import ExportError
from qcompiler.frontends.jax.frontend import import_jax

P = {"w": jnp.ones((4, 4))}
X = np.ones((3, 4), np.float32)


def scales_in_place(p: Any, batch: Any) -> Any:
    batch["x"] = batch["x"] / 255
    return batch["x"] @ p["w"]


def returns_the_cache(p: Any, batch: Any) -> Any:
    batch["x"] = batch["x"].at[0].set(0)
    return batch["x"] @ p["w"], batch


def test_a_dict_that_is_changed_in_place_is_noted_unless_it_is_returned(check: Any) -> None:
    lost = check(scales_in_place, P, {"x": X})
    (what, why) = lost.notes[0]
    assert "replaces 'batch.x'" in what and "test_side_effects.py:" in what and "return the new value" in why
    assert not check(returns_the_cache, P, {"x": X}).notes


def test_what_replaces_an_array_may_be_anything() -> None:
    """The note has no line where no operation made the value, or where a second trace goes another way."""
    traces: list[str] = []

    def puts(value: Any) -> Any:
        def function(p: Any, batch: Any) -> Any:
            result = batch["x"] @ p["w"]
            batch["x"] = value
            return result

        return function

    def once(p: Any, batch: Any) -> Any:
        if not traces:
            batch["x"] = batch["x"] / 255
        traces.append("")
        return batch["x"] @ p["w"]

    def fails_later(p: Any, batch: Any) -> Any:
        batch["x"] = batch["x"] / 255
        traces.append("")
        assert len(traces) == 1
        return batch["x"] @ p["w"]

    def has_other_keys(p: Any, batch: Any) -> Any:
        batch[0] = batch["x"]
        return batch[0] @ p["w"]

    for function in (puts("read"), puts(0.0), puts(object()), once, fails_later):
        traces.clear()
        assert [what for what, _ in import_jax(function, (P, {"x": X})).notes] == [
            "the function replaces 'batch.x' in its argument"
        ]
    assert not import_jax(has_other_keys, (P, {"x": X})).notes


def _modules() -> Any:
    nnx = pytest.importorskip("flax.nnx", reason="a dependency of the tests alone")

    class Counts(nnx.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            self.dense, self.count = nnx.Linear(4, 4, rngs=nnx.Rngs(0)), nnx.Variable(jnp.zeros(()))

        def __call__(self, x: Any) -> Any:
            self.count[...] += 1
            return self.dense(x) + self.count[...]

    class Layers(nnx.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            rngs = nnx.Rngs(0)
            self.dense, self.norm = nnx.Linear(4, 4, rngs=rngs), nnx.BatchNorm(4, rngs=rngs)
            self.drop = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.drop(self.norm(self.dense(x)))

    return nnx, Counts(), Layers()


@pytest.mark.slow
def test_a_variable_that_counts_calls_is_refused_with_the_line() -> None:
    _, counts, layers = _modules()
    with pytest.raises(ExportError, match=r"assigns 'count'.*test_side_effects\.py:\d+: self\.count\[\.\.\.\] \+= 1"):
        import_jax(counts, (X,))
    with pytest.raises(ExportError, match=r"assigns 'drop\.rngs\.count'.*model\.eval\(\)"):
        import_jax(layers, (X,))


@pytest.mark.slow
def test_modules_in_their_inference_mode_change_nothing() -> None:
    nnx, _, layers = _modules()
    layers.eval()
    assert not import_jax(layers, (X,)).notes
    graph, state = nnx.split(layers)
    assert not import_jax(lambda s, x: nnx.merge(graph, s)(x), (state, X)).notes


@pytest.mark.slow
def test_a_variable_that_no_result_reads_is_noted() -> None:
    """The mean of the batch is used, and the running one is lost; a layer of LSTM draws a key that it does not use."""
    nnx, _, _ = _modules()
    result = import_jax(nnx.BatchNorm(4, rngs=nnx.Rngs(0)), (X,))
    assert any("replaces 'mean'" in what for what, _ in result.notes)
    layer = nnx.RNN(nnx.LSTMCell(4, 8, rngs=nnx.Rngs(0)))
    assert all("count" in what for what, _ in import_jax(layer, (X[None],)).notes)
