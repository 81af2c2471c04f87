"""Trees of arguments and results: round trips, refusals by name, and classes that must not be built."""

from __future__ import annotations

import collections
import dataclasses
import subprocess
import sys
from typing import Any

import pytest

from qcompiler.errors import ArgumentStructureError, CorruptFileError
from qcompiler.runtime import tree

LEAVES = [{"kind": "leaf", "index": i} for i in range(4)]


def inputs(args: list[Any], **kwargs: Any) -> dict[str, Any]:
    return {
        "args": {"kind": "tuple", "items": args},
        "kwargs": {"kind": "dict", "keys": list(kwargs), "items": list(kwargs.values())},
    }


NESTED = inputs(
    [
        LEAVES[1],
        {"kind": "list", "items": [LEAVES[0], {"kind": "none"}]},
        {"kind": "constant", "value": True},
    ],
    mask=LEAVES[2],
    past={"kind": "dict", "keys": ["k"], "items": [LEAVES[3]]},
    return_dict={"kind": "constant", "value": True},
)


def test_nested_arguments_come_in_the_plans_order() -> None:
    flat = tree.input_flattener(NESTED)
    assert flat(("b", ["a", None], True), {"past": {"k": "d"}, "mask": "c"}) == ["a", "b", "c", "d"]


def test_arguments_of_is_the_inverse_of_flatten() -> None:
    args, kwargs = tree.arguments_of(NESTED, ["a", "b", "c", "d"])
    assert tree.input_flattener(NESTED)(args, kwargs) == ["a", "b", "c", "d"]


def test_every_tensor_of_the_results_has_a_name_of_its_own() -> None:
    leaf = [{"kind": "leaf", "index": number} for number in range(4)]
    pair = {"kind": "tuple", "items": leaf[:2]}
    assert tree.result_names(leaf[0]) == [("result", 0)]
    assert tree.result_names(pair) == [("result.0", 0), ("result.1", 1)]
    named = {"kind": "dict", "keys": ["a", "a.0", "same"], "items": [pair, leaf[2], leaf[2]]}
    assert tree.result_names(named) == [("a.0", 0), ("a.1", 1), ("a.0_", 2), ("same", 2)]
    nested = {
        "kind": "dict",
        "keys": ["x", "y"],
        "items": [named, {"kind": "dict", "keys": ["same"], "items": leaf[3:]}],
    }
    assert [name for name, _ in tree.result_names(nested)] == ["x.a.0", "x.a.1", "x.a.0_", "x.same", "y.same"]
    assert tree.result_names({"kind": "list", "items": [{"kind": "none"}, leaf[1]]}) == [("result.1", 1)]


def test_trailing_arguments_without_tensors_may_be_left_out() -> None:
    assert tree.input_flattener(NESTED)(("b", ["a", None]), {"past": {"k": "d"}, "mask": "c"}) == ["a", "b", "c", "d"]


@pytest.mark.parametrize(
    ("args", "kwargs", "text"),
    [
        (("b",), {}, "takes 3 positional arguments, the call has 1"),
        (("b", ["a", None]), {"mask": "c"}, "argument 'past' is missing"),
        (("b", ["a", None]), {"mask": "c", "past": {}}, "'past' must have the keys 'k'"),
        (("b", ["a", None]), {"mask": "c", "past": {"k": 1}, "x": 1}, "unexpected keyword arguments: 'x'"),
        (("b", ["a", 3]), {"mask": "c", "past": {"k": 1}}, r"'args\[1\]\[1\]' was None .* is 3 now"),
        (("b", ["a"]), {"mask": "c", "past": {"k": 1}}, r"'args\[1\]' must have 2 items, not 1"),
        (("b", "ab"), {"mask": "c", "past": {"k": 1}}, r"'args\[1\]' must be a list of 2 items"),
        (("b", ["a", None], 1), {"mask": "c", "past": {"k": 1}}, r"'args\[2\]' was True .* is 1 now"),
        (("b", ["a", None]), {"mask": "c", "past": {"k": 1}, "return_dict": False}, "'return_dict' was True"),
    ],
)
def test_wrong_structure_names_the_place(args: Any, kwargs: Any, text: str) -> None:
    with pytest.raises(ArgumentStructureError, match=text):
        tree.input_flattener(NESTED)(args, kwargs)


@pytest.mark.parametrize(
    "node",
    [
        None,
        {"kind": "pickle"},
        {"kind": "leaf", "index": True},
        {"kind": "leaf", "index": 0, "more": 1},
        {"kind": "dict", "keys": ["a"], "items": []},
        {"kind": "dict", "keys": ["a", "a"], "items": [LEAVES[0], LEAVES[0]]},
        {"kind": "constant", "value": [1]},
        {"kind": "leaf", "index": 1},
        {"kind": "tuple", "items": []},
    ],
)
def test_malformed_result_trees_are_refused(node: Any) -> None:
    with pytest.raises(CorruptFileError):
        tree.check_signature(inputs([]), node, 0, 1)


def test_endless_nesting_is_refused() -> None:
    node: Any = LEAVES[0]
    for _ in range(200):
        node = {"kind": "list", "items": [node]}
    with pytest.raises(CorruptFileError, match="nested deeper"):
        tree.check_signature(inputs([]), node, 0, 1)


# --- classes ---------------------------------------------------------------------------------------------------------

Point = collections.namedtuple("Point", ["x", "y"])


@dataclasses.dataclass
class Output(dict):  # type: ignore[type-arg]
    first: Any = None
    second: Any = None


class Evil(dict):  # type: ignore[type-arg]
    def __init__(self, **kwargs: Any) -> None:
        raise AssertionError("a class that is no dataclass was built")


def named(kind: str, cls: str, *keys: str) -> dict[str, Any]:
    return {"kind": kind, "class": cls, "keys": list(keys), "items": LEAVES[: len(keys)]}


@pytest.fixture(autouse=True)
def this_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "results", sys.modules[__name__])


def test_loaded_classes_are_rebuilt() -> None:
    assert tree.unflattener(named("namedtuple", "results:Point", "x", "y"))([1, 2]) == Point(1, 2)
    output = tree.unflattener(named("modeloutput", "results:Output", "first"))([1])
    assert type(output) is Output
    assert output.first == 1


@pytest.mark.parametrize(
    ("kind", "cls", "plain"),
    [
        ("modeloutput", "results:Evil", {"a": 1}),  # no dataclass
        ("modeloutput", "results:Output", {"a": 1}),  # no such field
        ("modeloutput", "os:system", {"a": 1}),
        ("modeloutput", "antigravity:X", {"a": 1}),  # not loaded, not on the list
        ("namedtuple", "results:Point", (1,)),  # other fields
        ("namedtuple", "results:missing.x", (1,)),
    ],
)
def test_other_classes_become_plain_structures(kind: str, cls: str, plain: Any) -> None:
    assert tree.unflattener(named(kind, cls, "a"))([1]) == plain
    assert "antigravity" not in sys.modules


def test_model_outputs_of_transformers_are_rebuilt_beside_torch() -> None:
    import torch
    import transformers  # noqa: F401  (its classes are looked up by name)

    node = named("modeloutput", "transformers.modeling_outputs:BaseModelOutput", "last_hidden_state")
    value = torch.zeros(2)
    assert tree.unflattener(node)([value]).last_hidden_state is value


def test_without_torch_nothing_is_imported_for_a_result() -> None:
    code = (
        "import sys; from qcompiler.runtime import tree\n"
        "node = {'kind': 'modeloutput', 'class': 'transformers.modeling_outputs:BaseModelOutput',"
        " 'keys': ['x'], 'items': [{'kind': 'leaf', 'index': 0}]}\n"
        "assert tree.unflattener(node)([1]) == {'x': 1}\n"
        "assert 'transformers' not in sys.modules and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True)
