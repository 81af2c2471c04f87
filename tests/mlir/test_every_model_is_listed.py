"""Each model of the suite runs through upstream MLIR, or stands here with the reason why not.

Models are found in the text of tests: classes of modules, and configurations of transformers. One that is new fails
here until a test of this folder runs it (`RUN`) or a reason is written down.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from by_path import ROOT

FOLDERS = ("models", "lm", "jax", "frontends", "support", "files")
SETTINGS = {"QuantConfig", "LoraConfig", "GenerationConfig", "TorchAoConfig"}
"""Configurations of something else than a model."""

RUN = {
    "models/zoo.py": "test_models.py",
    "models/blocks.py": "test_more_models.py",
    "models/random_models.py": "test_more_models.py",
    "models/test_attributes.py": "test_more_models.py",
    "models/test_causal.py": "test_more_models.py",
    "models/test_convolutions.py": "test_more_models.py",
    "models/test_device_maps.py": "test_more_models.py",
    "models/test_int8_cache.py": "test_more_models.py",
    "models/test_negative_positions.py": "test_more_models.py",
    "models/test_recurrent.py": "test_models.py",
    "models/test_state.py": "test_more_models.py",
    "models/test_states.py": "test_models.py",
    "models/test_static_cache.py": "test_models.py",
    "models/test_vision.py": "test_models.py",
    "models/test_windows.py": "test_more_models.py",
    "frontends/test_conv.py": "test_more_models.py",
    "frontends/test_experts.py": "test_more_models.py",
    "frontends/test_models.py": "test_more_models.py",
    "jax/test_libraries.py": "test_jax_models.py",
    "support/jax_models.py": "test_jax_models.py",
    "support/rewritten_models.py": "test_more_models.py",
}
"""The file of this folder that loads a file's models and runs them; `NOT_RUN` has exceptions."""

SINGLE = "modules around single operators or ways of writing: test_oracle.py runs the ops that they become"
REFUSED = "it is refused, or compiled for what its import says alone"
SAME = "a model of the same kind runs: only sizes differ"
NOT_RUN = {
    "frontends/operator_cases.py": SINGLE,
    "frontends/opinfo.py": SINGLE,
    "frontends/test_local_writes.py": "models/test_state.py has the same writes with values",
    "frontends/test_complex.py": SINGLE,
    "frontends/test_conv.py::Function": SINGLE,
    "frontends/test_conv.py::Small": "models/test_convolutions.py has its layers",
    "frontends/test_conv.py::Shared": "folding of norms: the frontend's, in front of the text",
    "frontends/test_eager_graph.py": SINGLE,
    "frontends/test_edges_of_operators.py": SINGLE,
    "frontends/test_experts.py::Sorted": "bf16 alone, by torch's grouped product: lm/test_moe.py has its ops",
    "frontends/test_experts.py::Ends": "it shows that ends of experts may be any numbers, which a text takes as given",
    "frontends/test_experts.py::Held": REFUSED,
    "frontends/test_export.py": REFUSED,
    "frontends/test_import_ops.py": SINGLE,
    "frontends/test_insert_qdq.py": "which weights are packed; their decoding is test_oracle.py's",
    "frontends/test_ledger.py": "which weights are packed; models/test_device_maps.py has a tied weight that runs",
    "frontends/test_lost_weights.py": REFUSED,
    "frontends/test_operators.py": SINGLE,
    "frontends/test_pooling_sizes.py": SINGLE,
    "frontends/test_recurrent.py": "models/test_recurrent.py has every kind of layer in one model",
    "frontends/test_torch_ops.py": "qc.quantize has no lowering (docs/mlir.md)",
    "files/test_folder_to_gguf.py": SAME,
    "files/test_program_export.py": SAME,
    "files/test_program_to_gguf.py": "models/test_convolutions.py has the layers of ConvNext",
    "files/test_torchao_folder.py": "settings of torchao, and no model",
    "jax/test_callable.py": SINGLE,
    "jax/test_side_effects.py": REFUSED,
    "lm/test_adapters.py": SAME,
    "lm/test_own_attention.py": "decoders of the ops that test_language_models.py runs; some are refused",
    "lm/test_multimodal.py": "their text parts are decoders of the kinds that test_language_models.py runs",
    "lm/test_pooled.py": "its steps choose, gather and write rows by ops of lm/test_moe.py and models/test_state.py",
    "lm/test_states.py": REFUSED,
    "models/test_trellis_layers.py": "the trellis is a format; experts and recurrent layers of others run",
    "lm/test_rings.py": "the zoo's Gemma 3 keeps a ring and runs; gpt-oss runs from a file and as in lm/test_moe.py",
    "models/test_attributes.py::Batch": REFUSED,
    "models/test_attributes.py::History": REFUSED,
    "models/test_attributes.py::Sequence": "its states depend on a size that is given; the others have the same ones",
    "models/test_attributes.py::SilentlyElsewhere": REFUSED,
    "models/test_diffusion.py": "Sinusoids is part of a reference in float64; test_more_models.py runs Flux",
    "models/test_files.py": SAME,
    "models/test_given_positions.py": REFUSED,
    "models/test_models.py": SINGLE,
    "models/test_recurrent.py::Halved": "a parametrisation of a weight, which the import computes",
    "models/test_recurrent.py::Model": SAME,
    "models/test_state.py::Unregistered": "which tensors are one state; the others have the same writes",
    "models/test_state.py::Counts": REFUSED,
    "models/test_state.py::Overlaps": REFUSED,
    "models/test_state.py::WritesItsArgument": REFUSED,
    "models/test_state.py::WritesItsParameter": REFUSED,
    "models/test_static_cache.py::MistralConfig": REFUSED,
    "support/launches.py": SAME,
    "support/mlir_models.py": SAME,
    "support/state_models.py": "test_lowering.py runs qc.linear_attention, the one op that the zoo's models lack",
    "support/turned_linear.py": SINGLE,
}

TABLES = {
    "models/zoo.py::ZOO": "test_models.py",
    "models/zoo.py::DECODERS": "test_language_models.py",
    "models/test_vision.py::MODELS": "test_models.py",
    "models/test_state.py::CASES": "test_more_models.py",
    "models/test_attributes.py::KEPT": "test_more_models.py",
    "jax/test_models.py::CASES": "test_jax_models.py",
    "jax/test_libraries.py::CASES": "test_jax_models.py",
    "lm/test_moe.py::MODELS": "test_language_models.py",
    "frontends/test_conv.py::IMAGE": "test_more_models.py",
}
"""Tables whose every row a test is parametrised by, or runs at once: a new row runs by itself."""


def modules(tree: ast.Module) -> Iterator[str]:
    """Names of the classes of modules and of the configurations in a file."""
    known = {"Module"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base).split(".")[-1] in known for base in node.bases):
            known.add(node.name)
            yield node.name
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func).split(".")[-1]
            if name.endswith("Config") and name not in SETTINGS:
                yield name


def found() -> dict[str, set[str]]:
    """Models by file."""
    files = (path for folder in FOLDERS for path in sorted((ROOT / "tests" / folder).glob("*.py")))
    listed = {str(path.relative_to(ROOT / "tests")): set(modules(ast.parse(path.read_text()))) for path in files}
    return {path: names for path, names in listed.items() if names}


def test_each_model_runs_or_has_a_reason() -> None:
    missing = [
        f"{path}::{name}"
        for path, names in found().items()
        for name in sorted(names)
        if path not in RUN and path not in NOT_RUN and f"{path}::{name}" not in NOT_RUN
    ]
    assert not missing, "run them in tests/mlir, or write the reason into NOT_RUN"


def test_no_reason_is_left_of_a_model_that_is_gone() -> None:
    listed = found()
    for entry in NOT_RUN:
        path, _, name = entry.partition("::")
        assert name in listed[path] if name else path in listed, entry


@pytest.mark.parametrize(("path", "by"), [*RUN.items(), *TABLES.items()])
def test_what_is_listed_as_run_is_named_there(path: str, by: str) -> None:
    """The file that runs a file's models loads it, and asks for its table."""
    file, _, table = path.partition("::")
    text = (Path(__file__).parent / by).read_text()
    stem = Path(file).stem
    assert stem in text or stem.removeprefix("test_") in text, f"{by} does not load {file}"
    if table:
        assert f".{table}" in text or "architectures.names()" in text, f"{by} does not take {table}"
