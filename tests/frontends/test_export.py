"""Dynamic dimensions, ranges, and every refusal of the export stage with its own message."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

from qcompiler.errors import (
    ArgumentError,
    ArgumentShapeError,
    ArgumentStructureError,
    DataDependentShapeError,
    ExportError,
    NarrowedDimError,
    UnboundedDimError,
    UnsupportedOperatorError,
)
from qcompiler.frontends.torch.capture.export import export_model
from qcompiler.frontends.torch.frontend import import_torch
from qcompiler.runtime import progress

B, S = ("b", 1, 64), ("s", 1, 64)


class _Branch(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] > 1:  # torch takes this for true without a guard
            return x * 2
        return x


class _Special(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[1] == 7 else x


class _Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(16, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table[: x.shape[1]]


class _Squeeze(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum(-1).squeeze()


class _Harmless(nn.Module):
    """Branches on the size 1, but means the same on both sides."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.flip(1).flip(1) if x.shape[1] > 1 else x


def _x(*shape: int) -> torch.Tensor:
    return torch.randn(shape or (2, 8, 8))


def test_an_example_of_size_1_or_of_a_weights_size_does_not_specialise() -> None:
    for shape in ((1, 1, 8), (8, 8, 8), (2, 4, 8)):
        exported = export_model(nn.Linear(8, 8).eval(), (_x(*shape),), {}, ({0: B, 1: S},))
        assert exported.ranges == {"b": (1, 64), "s": (1, 64)}


@pytest.mark.parametrize(("model", "name", "line"), [
    (_Branch(), "s", "if x.shape[1] > 1"), (_Special(), "s", "if x.shape[1] == 7"), (_Table(), "s", "self.table["),
    (_Squeeze(), "b", "x.sum(-1).squeeze()"),
])  # fmt: skip
def test_a_narrowed_dimension_names_the_dimension_and_the_line(model: nn.Module, name: str, line: str) -> None:
    with pytest.raises(NarrowedDimError) as caught:
        export_model(model, (_x(),), {}, {"x": {0: B, 1: S}})
    assert name in str(caught.value) and line in str(caught.value) and "test_export.py" in str(caught.value)


_CONVOLUTIONS = pytest.mark.parametrize(("conv", "smallest"), [
    ({"kernel_size": 3}, 3),
    pytest.param({"kernel_size": 4, "stride": 4}, 4, marks=pytest.mark.slow),
])  # fmt: skip


@_CONVOLUTIONS
def test_a_convolution_with_too_small_an_image_names_its_module_and_a_range_that_compiles(
    conv: dict[str, Any], smallest: int
) -> None:
    model, image = nn.Sequential(nn.Sequential(nn.Conv2d(3, 4, **conv))).eval(), _x(1, 3, 12, 13)
    with pytest.raises(NarrowedDimError) as caught:
        export_model(model, (image,), {}, ({2: ("h", 1, 64)},))
    said = str(caught.value)
    assert said == (
        "the model narrows h. Narrowed by module '0.0', a Conv2d. Give a range of sizes that take one path, such as "
        f'("h", {smallest}, 64), or change that line'
    )
    assert export_model(model, (image,), {}, ({2: ("h", smallest, 64)},)).ranges == {"h": (smallest, 64)}


def test_a_convolution_may_give_one_row_or_many() -> None:
    """torch notes how a result lies in memory, which differs for one row; that narrows nothing."""
    model, image = nn.Conv2d(3, 4, 3, stride=2, padding=1).eval(), _x(1, 3, 12, 13)
    assert export_model(model, (image,), {}, ({2: ("h", 1, 64)},)).ranges == {"h": (1, 64)}


@pytest.mark.slow
def test_a_size_at_which_the_model_does_not_run_is_named() -> None:
    """The user's example has 12 rows; the model is traced at another size of the range."""
    with pytest.raises(ExportError, match=r"Kernel size can't be greater.*\. It was traced at h = 3: dynamic_"):
        export_model(nn.Sequential(nn.Conv2d(1, 1, 4)), (_x(1, 1, 12, 13),), {}, ({2: ("h", 3, 5)},))


def test_a_branch_that_means_the_same_on_both_sides_is_accepted() -> None:
    assert export_model(_Harmless(), (_x(),), {}, {"x": {0: B, 1: S}}).ranges["s"] == (1, 64)


class _Frequencies(nn.Module):
    """Registers its buffer anew in each call, as rotary embeddings do whose frequencies depend on the length."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.ones(8), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.register_buffer("frequencies", torch.arange(8.0) / 8, persistent=False)
        return x * self.frequencies


def test_a_buffer_registered_anew_in_forward_is_no_traced_tensor_afterwards() -> None:
    model = _Frequencies()
    export_model(model, (torch.zeros(3, 8),))
    assert type(model.frequencies) is torch.Tensor and model.frequencies.data_ptr()


def test_buffers_are_as_before_after_the_probe() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count.add_(1)
            return x + self.count

    model = Counter()
    export_model(model, (_x(),), {}, {"x": {0: B}})
    assert model.count.eq(0).all()


@pytest.mark.parametrize("entry", ["b", ("b", 1, None), Dim("b"), Dim("b", min=2), Dim.DYNAMIC, Dim.AUTO], ids=str)
def test_a_dimension_without_a_maximum_is_refused_by_name(entry: Any) -> None:
    with pytest.raises(UnboundedDimError, match=r"dimension 0 of 'input'.*no maximum"):
        export_model(nn.Linear(8, 8), (_x(),), {}, {"input": {0: entry}})


@pytest.mark.parametrize(("entry", "ranges"), [
    (Dim("n", min=1, max=9), {"n": (1, 9)}), (Dim("n", max=9), {"n": (1, 9)}), (2 * Dim("n", max=9), {"n": (1, 9)}),
    (Dim.DYNAMIC(max=20), {"input_0": (1, 20)}), (None, {}), (2, {}), (Dim.STATIC, {}), (("n", 2, 2), {}),
    (("n", 1, 2), {"n": (1, 2)}), (("n", 5, 9), {"n": (5, 9)}),
], ids=str)  # fmt: skip
def test_every_spelling_of_a_dimension(entry: Any, ranges: dict[str, Any]) -> None:
    assert export_model(nn.Linear(8, 8), (_x(),), {}, ({0: entry},)).ranges == ranges


@pytest.mark.parametrize(("shapes", "error", "text"), [
    ({"y": {0: B}}, ArgumentStructureError, "no argument of the call"),
    ({"input": {5: B}}, ArgumentStructureError, "names dimension 5"),
    ({"input": [B]}, ArgumentStructureError, "one entry for each of its 3"),
    (({0: B}, {0: B}), ArgumentStructureError, "2 entries for 1"),
    ({"input": {0: 3}}, ArgumentShapeError, "declared 3, but the example has 2"),
    ({"input": {0: ("b", 9, 3)}}, ArgumentError, "above the maximum"),
    ({"input": {0: ("b", 1, 4), 1: ("b", 1, 5)}}, ArgumentError, "has the range"),
    ({"input": {0: B, 1: B}}, ArgumentShapeError, "'b' has 2 elsewhere"),
    ({"input": {0: ("2b", 1, 4)}}, ArgumentError, "is not a name"),
    ({"input": {0: 1.5}}, ArgumentError, "is no dimension"),
    ("input", ArgumentStructureError, "dict by argument name"),
])  # fmt: skip
def test_malformed_dynamic_shapes_are_refused(shapes: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        export_model(nn.Linear(8, 8), (_x(2, 8, 8),), {}, shapes)


def test_arguments_that_do_not_fit_forward_are_refused() -> None:
    with pytest.raises(ArgumentStructureError, match=r"do not fit Linear\.forward"):
        export_model(nn.Linear(8, 8), (_x(), _x()), {}, ({0: B},))


class _Nested(nn.Module):
    def forward(self, pair: Any, *rest: torch.Tensor, **named: Any) -> Any:
        return {"sum": pair[0] + pair[1]["a"] + rest[0], "first": [named["z"], None], "tuple": (rest[0], rest[0])}


def test_nested_arguments_and_results_keep_their_structure() -> None:
    x = _x(3, 8)
    shapes = {"pair": ({0: B}, {"a": {0: B}}), "rest": ({0: B},), "z": {1: S}}
    result = import_torch(_Nested(), ((x, {"a": x}), x), {"z": _x(3, 5), "mode": "fast", "flag": None}, None, shapes)
    inputs, outputs = result.signature.inputs, result.signature.outputs
    assert inputs["args"]["items"][0]["items"][1] == {
        "kind": "dict",
        "keys": ["a"],
        "items": [{"kind": "leaf", "index": 1}],
    }
    assert inputs["kwargs"]["keys"] == ["z", "mode", "flag"]
    assert inputs["kwargs"]["items"][1:] == [{"kind": "constant", "value": "fast"}, {"kind": "none"}]
    assert outputs["keys"] == ["sum", "first", "tuple"]
    assert outputs["items"][1]["items"][1] == {"kind": "none"}
    assert [spec.shape for spec in result.inputs] == [("b", 8), ("b", 8), ("b", 8), (3, "s")]
    assert len(result.outputs) == 4


class _Data(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: torch.Tensor) -> Any:
        match self.kind:
            case "mask":
                return x[x > 0]
            case "nonzero":
                return x.nonzero()
            case "item":
                return x[: int(x.sum().item())]
            case _:
                return x if x.sum() > 0 else x + 1


@pytest.mark.parametrize("kind", ["mask", "nonzero", "item", "branch"])
def test_shapes_and_branches_on_data_are_refused_with_the_line(kind: str) -> None:
    with pytest.raises(DataDependentShapeError, match=r"test_export\.py:\d+ in forward"):
        export_model(_Data(kind), (_x(),), {}, {"x": {0: B}})


def test_an_unsupported_operator_names_itself_its_module_and_the_line() -> None:
    class Inner(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.lgamma(x)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.solver = Inner()

        def forward(self, x: torch.Tensor) -> Any:
            return self.solver(x) + 1

    with pytest.raises(
        UnsupportedOperatorError, match=r"aten\.lgamma\.default.*'solver'.*test_export\.py:\d+.*lgamma\(x\)"
    ):
        import_torch(Outer(), (_x(),))
    result = import_torch(Outer(), (_x(),), fallback="torch")
    assert result.torch_calls == ("aten.lgamma.default",)
    assert "qc.torch_call" in str(result.module)


def test_an_operator_with_side_effects_names_itself() -> None:
    class Checked(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.linalg.inv(x)

    for shapes in (None, {"x": {0: ("n", 1, 8), 1: ("n", 1, 8)}}):
        with pytest.raises(UnsupportedOperatorError, match=r"operator torch\.linalg\.inv has side effects.*inv\(x\)"):
            import_torch(Checked(), (torch.eye(4),), dynamic_shapes=shapes)
        assert import_torch(Checked(), (torch.eye(4),), dynamic_shapes=shapes, fallback="torch").torch_calls == (
            "aten.linalg_inv.default",
        )


def test_a_branch_on_values_names_the_operator_and_the_way_out() -> None:
    class Branch(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y - 1, (x,))

    with pytest.raises(UnsupportedOperatorError, match=r"operator cond .*test_export\.py:\d+.*torch\.where"):
        import_torch(Branch(), (_x(),))


class _Conditional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda y: self.inner(y) * 2, torch.sin, (x,))


def test_a_branch_of_cond_may_call_a_module() -> None:
    """torch.cond traces its branches with Dynamo, where the hook that counts modules may count nothing."""
    exported = export_model(_Conditional().eval(), (torch.randn(3, 8),), {}, None)
    assert "cond" in str(exported.program.graph)


def test_a_returned_buffer_is_compared_before_it_is_put_back() -> None:
    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(8))

        def forward(self, x: torch.Tensor) -> Any:
            self.mean.add_(x.mean(0))
            return self.mean

    result = import_torch(Mean(), (torch.randn(3, 8),), dynamic_shapes={"x": {0: ("n", 1, 8)}})
    assert result.symbols == {"n": (1, 8)}


def test_training_mode_is_refused_only_where_it_matters() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).train()
    with pytest.raises(UnsupportedOperatorError, match=r"call model\.eval\(\)"):
        import_torch(model, (_x(),))
    import_torch(nn.Sequential(nn.Linear(8, 8), nn.ReLU()).train(), (_x(),))


def test_writing_into_an_argument_is_refused() -> None:
    class Writer(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.add_(1)

    with pytest.raises(ExportError, match="writes into its argument 'x'"):
        export_model(Writer(), (_x(),))


def test_an_exception_in_the_model_keeps_its_text_and_line() -> None:
    class Broken(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ torch.ones(3, 3)

    with pytest.raises(ExportError, match=r"test_export\.py:\d+ in forward: return x @ torch\.ones"):
        export_model(Broken(), (_x(),))


def test_things_that_are_no_model_are_refused() -> None:
    with pytest.raises(ExportError, match="cannot compile a function"):
        export_model(lambda x: x, (_x(),))  # type: ignore[arg-type]


def test_exported_programs_and_graph_modules_are_accepted(check: Any) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU()).eval()
    program = torch.export.export(model, (_x(3, 8),), dynamic_shapes=({0: Dim("b", min=1, max=9)},))
    result = import_torch(program)
    assert list(result.symbols.values()) == [(1, 9)]
    check(torch.fx.symbolic_trace(model), _x(3, 8), dynamic=({0: B},))
    decomposed = import_torch(program.run_decompositions(), (), {}, "nf4")
    assert "qc.linear" in str(decomposed.module)
    assert decomposed.quantized.ledger.rows[0].format == "nf4:block=64"


def test_an_exported_program_without_a_maximum_is_refused() -> None:
    program = torch.export.export(nn.Linear(8, 8), (_x(3, 8),), dynamic_shapes=({0: Dim("b")},))
    with pytest.raises(UnboundedDimError, match="dimension 0 of 'input'"):
        import_torch(program)
    with pytest.raises(ArgumentError, match="brings its own dynamic shapes"):
        import_torch(program, (), {}, None, ({0: B},))


def test_mutated_buffers_become_state() -> None:
    class Cache(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("cache", torch.zeros(16, 4))

        def forward(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
            self.cache.index_copy_(0, position, x)
            return self.cache.sum(0)

    result = import_torch(Cache(), (_x(3, 4), torch.arange(3)), {}, None, ({0: ("s", 1, 16)}, {0: ("s", 1, 16)}))
    text = str(result.module)
    assert list(result.states) == ["cache"]
    assert "qc.state @cache" in text and "qc.state_update @cache" in text and "qc.index_update" in text


def test_symbols_keep_the_users_names_in_types() -> None:
    result = import_torch(nn.Flatten(0, 1), (_x(2, 4, 8),), {}, None, ({0: ("batch", 1, 4), 1: ("seq", 1, 8)},))
    assert result.outputs[0].shape == ("batch*seq", 8)
    assert result.symbols == {"batch": (1, 4), "seq": (1, 8)}


class Repeated(nn.Module):
    """Holds a list of modules, and calls one of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.layers
        return first(second(first(x)))


def test_an_export_tells_how_far_it_is_and_leaves_no_hook(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("QC_QUIET", raising=False)
    monkeypatch.setattr(progress, "EVERY", 0.0)
    export_model(Repeated(), (torch.randn(3, 8),), {}, ({0: ("b", 1, 16)},))
    said = capsys.readouterr().err
    assert "qcompiler: tracing the model: 1 of 3 modules, " in said
    assert re.search(r"tracing the model: 2 of 3 modules, [\d.e+]+/s, \d+ s left\n", said)
    assert re.search(r"tracing the model: 3 of 3 modules, [\d.e+]+/s\n", said)
    assert "tracing the model: 4 of" not in said
    assert "qcompiler: comparing the graph with the model: 2 of 2 runs, " in said
    with pytest.raises(ExportError):
        export_model(nn.Sequential(nn.Linear(8, 8), nn.Linear(9, 9)), (torch.randn(3, 8),))
    assert not nn.modules.module._global_forward_hooks
